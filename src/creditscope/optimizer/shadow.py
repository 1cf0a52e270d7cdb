"""A shadow of a live optimiser over a sample of its coordinates: the same rule, the same state, a few tensors.

Reading every parameter takes dozens of small operations each, which on a GPU can outlast a small step. Adam and SGD
treat each coordinate alone, so a sample of coordinates with their moments is an optimiser of its own, and whatever
reads an optimiser can read the shadow.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.optimizer.state import CLOSED, bare


class Shadow:
    """About `coordinates` of the coordinates that have a gradient, from at most `tensors` parameters.

    Parameters are drawn by size, evenly along the model: each draw stands for as many coordinates as any other, so a
    mean over the sample estimates the mean over the model. `take` copies parameters, gradients and state, before the
    step; `follow` copies the parameters once more, after it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, coordinates: int, tensors: int = 32) -> None:
        self._real = bare(optimizer)
        if type(self._real) not in CLOSED:
            raise CreditscopeError(f"a sample of the coordinates is an optimiser of its own for Adam, AdamW and SGD, "
                                   f"not for {type(self._real).__name__}")
        self._coordinates, self._tensors = coordinates, tensors
        self._members: list[list[tuple[Tensor, int]]] = []
        self.optimizer: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def take(self) -> torch.optim.Optimizer:
        """The shadow of the optimiser as it stands now."""
        strides = self._strides([p for group in self._real.param_groups for p in group["params"] if p.grad is not None])
        if not strides:
            raise CreditscopeError("no parameter has a gradient; take a shadow between backward() and step()")
        self._members, groups, states = [], [], []
        for real in self._real.param_groups:
            members = [(p, strides[p]) for p in real["params"] if p in strides]
            if not members:
                continue
            flat = nn.Parameter(_flat(members))
            flat.grad = _flat([(p.grad, n) for p, n in members])
            groups.append({k: v for k, v in real.items() if k != "params"} | {"params": [flat]})
            states.append(self._state(members))
            self._members.append(members)
        self.optimizer = type(self._real)(groups, lr=groups[0]["lr"])  # type: ignore[call-arg]
        for group, state in zip(self.optimizer.param_groups, states, strict=True):
            if state:
                self.optimizer.state[group["params"][0]] = state
        return self.optimizer

    @torch.no_grad()
    def follow(self) -> None:
        """Move the shadow's parameters to where the real ones stand now."""
        assert self.optimizer is not None
        for group, members in zip(self.optimizer.param_groups, self._members, strict=True):
            group["params"][0].copy_(_flat(members))

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The shadow's parameters, by the number of their group."""
        assert self.optimizer is not None
        return [(f"group {k}", group["params"][0]) for k, group in enumerate(self.optimizer.param_groups)]

    def _strides(self, live: Sequence[Tensor]) -> dict[Tensor, int]:
        """Parameter -> every how many-th of its coordinates is read; those that were not drawn are absent."""
        ends = list(accumulate(p.numel() for p in live))
        if not ends or ends[-1] <= self._coordinates:
            return dict.fromkeys(live, 1)
        draws = Counter(bisect_right(ends, (2 * k + 1) * ends[-1] // (2 * self._tensors)) for k in range(self._tensors))
        each = self._coordinates / self._tensors
        return {live[at]: max(1, int(live[at].numel() / (count * each))) for at, count in draws.items()}

    def _state(self, members: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
        """What the optimiser keeps for them: tensors of their shape as a sample, counters as they are."""
        first = self._real.state.get(members[0][0], {})
        sampled = {key for key, value in first.items() if isinstance(value, Tensor) and value.dim()}
        return {key: _flat([(self._real.state[p][key], n) for p, n in members]) if key in sampled
                else copy.deepcopy(value) for key, value in first.items()}


def _flat(tensors: Sequence[tuple[Tensor | None, int]]) -> Tensor:
    """Every n-th coordinate of each, end to end."""
    return torch.cat([x.reshape(-1)[::n] for x, n in tensors if x is not None])
