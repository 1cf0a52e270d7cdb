"""A copy of a live optimiser over a sample of its coordinates: the same rule, the same state, few tensors.

Reading every parameter takes dozens of small operations each, which on a GPU can take longer than a small step. Adam
and SGD treat each coordinate alone, so a sample of coordinates with their moments is an optimiser too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.optimizer.families import bare, family_of


class SampledOptimizer:
    """Every stride-th coordinate of each parameter that has a gradient, flat, one parameter per group and age.

    Every parameter is sampled: most of the effect of the reward's scale may be in one, as in an embedding with rarely
    used rows. `take` copies parameters, gradients and state before the step, `follow` the parameters after it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stride: int) -> None:
        self._real = bare(optimizer)
        if family_of(self._real) is None:
            raise CreditscopeError(f"a sample of the coordinates is an optimiser of its own for Adam, AdamW and SGD, "
                                   f"not for {type(self._real).__name__}")
        self._stride = stride
        self._members: list[list[Tensor]] = []
        self.optimizer: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def take(self) -> torch.optim.Optimizer:
        self._members, groups, states = [], [], []
        for real in self._real.param_groups:
            ages: dict[tuple[bool, float], list[Tensor]] = {}
            for p in real["params"]:
                if p.grad is not None:
                    state = self._real.state.get(p, {})
                    ages.setdefault((bool(state), float(state.get("step", 0))), []).append(p)
            for members in ages.values():
                flat = nn.Parameter(self._flat(members))
                flat.grad = self._flat([p.grad for p in members if p.grad is not None])
                groups.append({k: v for k, v in real.items() if k != "params"} | {"params": [flat]})
                states.append(self._state(members))
                self._members.append(members)
        if not groups:
            raise CreditscopeError("no parameter has a gradient; take a sample between backward() and step()")
        self.optimizer = type(self._real)(groups, lr=groups[0]["lr"])  # type: ignore[call-arg]
        for group, state in zip(self.optimizer.param_groups, states, strict=True):
            if state:
                self.optimizer.state[group["params"][0]] = state
        return self.optimizer

    @torch.no_grad()
    def follow(self) -> None:
        assert self.optimizer is not None
        for group, members in zip(self.optimizer.param_groups, self._members, strict=True):
            group["params"][0].copy_(self._flat(members))

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        assert self.optimizer is not None
        return [(f"sample {k}", group["params"][0]) for k, group in enumerate(self.optimizer.param_groups)]

    def _state(self, members: Sequence[Tensor]) -> dict[str, Any]:
        """The optimiser's state: tensors of the parameters' shapes sampled, counters copied."""
        first = self._real.state.get(members[0], {})
        sampled = {key for key, value in first.items() if isinstance(value, Tensor) and value.dim()}
        return {key: self._flat([self._real.state[p][key] for p in members]) if key in sampled
                else copy.deepcopy(value) for key, value in first.items()}

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([x.reshape(-1)[::self._stride] for x in tensors])
