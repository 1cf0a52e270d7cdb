"""One optimiser step of another library's trainer, read in the trainer's own forward and backward passes.

    reader.open(part)       before the trainer's forward of a micro-batch
    reader.close()          after its backward
    reader.stepping()       before the optimiser step
    reader.stepped()        after it: the same calls of the policy once more, without gradients

The policy is a module whose first output is log π of the chosen tokens, (B, T). A hook on that tensor receives the
gradient of the loss that the trainer differentiates, whatever that loss is:

    w_it = −∂loss/∂log π(y_it)        ∇_θ J = Σ_it w_it ∇_θ log π(y_it)

Every pass has a microscope of its own. A prompt group whose rows all lie in one pass has an exact Gram; one that was
cut over micro-batches or ranks is read from the sketches (`sketch/…`). Before the step the rows are proven against the
gradient that the engine reduced, and the factor s of that reduction is read from the engine; w of the step is s times
the gradient above.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from creditscope.batch import metrics
from creditscope.batch.answers import text_hashes
from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.microscope import distributed as ranks
from creditscope.microscope.distributed import RanksReading
from creditscope.microscope.shards import many_ranks
from creditscope.objective.kept import kept_arrays
from creditscope.optimizer.geometry import SampledUpdate
from creditscope.optimizer.overshoot import Overshoot
from creditscope.plugins.common import gather_ranks as together
from creditscope.plugins.common.gather_ranks import Rows
from creditscope.plugins.common.observer import RankObserver
from creditscope.plugins.common.untouched import untouched
from creditscope.plugins.common.update import after_step, before_step, moved_by
from creditscope.runs import schema

OVERSHOOT = (schema.OPTIMIZER_OVERSHOOT, schema.OVERSHOOT_PAST, schema.OVERSHOOT_DISTANCE, schema.OVERSHOOT_MAX,
             schema.OVERSHOOT_KL)
"""Metrics of `Overshoot` that count no updates: the batch may have been used before the step that was read."""


@dataclass(frozen=True)
class Part:
    """The rows of one micro-batch, each from its first chosen token on; `place` (B, T) is their column in the pass."""

    rollouts: Rollouts
    credit: Tensor  # (B, T) A
    place: Tensor

    @classmethod
    def of(cls, tokens: Tensor, mask: Tensor, old: Tensor, credit: Tensor, reward: Tensor, group: Tensor,
           texts: dict[str, Any] | None = None) -> Part:
        """From tensors (B, A) of a pass, in which rows may begin with columns of the prompt."""
        place = first_chosen(mask)
        inside = mask.gather(1, place)
        inside &= torch.arange(mask.shape[1], device=mask.device) < (mask.shape[1] - place[:, :1])
        # A trainer's own tensors are 0, or anything, where no token was chosen.
        ids, logp, given = (x.gather(1, place).masked_fill(~inside, 0) for x in (tokens, old.detach(), credit))
        return cls(Rollouts(tokens=ids, mask=inside, logp=logp.clamp(max=0.0), reward=reward.to(logp), group=group,
                            **(texts or {})), given, place)

    def placed(self, values: Tensor) -> Tensor:
        """(B, T) values of the pass at these rows' tokens, 0 elsewhere."""
        return values.gather(1, self.place).masked_fill(~self.rollouts.mask, 0.0)


def first_chosen(mask: Tensor) -> Tensor:
    """(B, A) the column that each token comes from when every row is moved to begin at its first chosen token.

    >>> first_chosen(torch.tensor([[False, True, True], [True, False, True]])).tolist()
    [[1, 2, 2], [0, 1, 2]]
    """
    start = mask.long().argmax(dim=1, keepdim=True)
    width = mask.shape[1]
    return (start + torch.arange(width, device=mask.device)).clamp(max=width - 1)


@dataclass(frozen=True)
class StepReading:
    """Metrics of a step by their keys in `runs.schema`, and arrays for groups/*.npz and scope/*.npz of a record."""

    metrics: dict[str, Any]
    groups: dict[str, Any]
    scope: dict[str, Any] | None = None


class _Call:
    """The trainer's call of the policy: its arguments, log π, and the gradient that reached log π."""

    def __init__(self, policy: nn.Module) -> None:
        self.live: Tensor | None = None
        self.slope: Tensor | None = None
        self._handle = policy.register_forward_hook(self._seen, with_kwargs=True)

    def _seen(self, policy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        logp = out[0] if isinstance(out, tuple) else out
        if self.live is None and isinstance(logp, Tensor) and logp.requires_grad:
            self._args, self._kwargs, self.live = args, kwargs, logp.detach()
            logp.register_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, grad: Tensor) -> None:
        self.slope = grad.detach() if self.slope is None else self.slope + grad.detach()

    @property
    def logp(self) -> Tensor:
        assert self.live is not None
        return self.live

    @property
    def gradient(self) -> Tensor:
        assert self.slope is not None
        return self.slope

    def remove(self) -> None:
        self._handle.remove()

    def again(self, policy: nn.Module) -> Tensor:
        out = policy(*self._args, **self._kwargs)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found


class StepReader:
    """Reads the steps of a `policy` whose weights are those of `model`; `method` is the row of the trainer's loss.

    `gram=False` leaves out the geometry. `engine` is DeepSpeed's, where it reduces the gradients. It allows no backward
    but its own, so that rows are then proven against the reduced gradient alone, not by further passes.
    """

    def __init__(self, policy: nn.Module, model: nn.Module, method: Method, *, gram: bool = True, engine: Any = None,
                 autocast: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.policy, self.model, self.method = policy, model, method
        self._gram, self._engine, self._autocast = gram, engine, autocast
        self._open: tuple[Part, _Call] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget what was read."""
        self.abort()
        self._parts: list[tuple[Part, _Call]] = []
        self._moving: SampledUpdate | None = None
        self._found: RanksReading | None = None
        if self._gram:
            self.observer.reset()

    @cached_property
    def observer(self) -> RankObserver:
        return RankObserver(self.model)

    def open(self, part: Part) -> None:
        self._open = part, _Call(self.policy)
        if self._gram:
            self.observer.apart()
            self.observer.open()

    def close(self) -> None:
        """After the backward and before the optimiser step."""
        if self._open is None:
            return
        (part, call), self._open = self._open, None
        call.remove()
        first = sum(len(one.rollouts) for one, _ in self._parts)
        if self._gram:
            self.observer.close(torch.arange(first, first + len(part.rollouts)))
        if call.live is None or call.slope is None:
            raise CreditscopeError("the loss has no gradient at the log-probs that the policy returned, so there is no "
                                   "w to read: the trainer called another module, or its loss is no policy loss")
        if call.live.shape != part.place.shape:
            raise CreditscopeError(f"the policy returned log-probs of shape {tuple(call.live.shape)} for a mask of "
                                   f"shape {tuple(part.place.shape)}; packed rows are not read: switch packing off")
        self._parts.append((part, call))

    def abort(self) -> None:
        """Restore the model after an exception in a pass."""
        if self._open is not None:
            self._open[1].remove()
            self._open = None
            if self._gram:
                self.observer.abort()

    def stepping(self) -> None:
        """Before the optimiser step: the rows of all passes and ranks as one, proven, and a sample of the weights."""
        if self._gram:
            self._found = self.observer.across(torch.cat([part.rollouts.group for part, _ in self._parts]),
                                               engine=self._engine)
            if self._engine is None and self.observer.proofs.due(self.model) is not None:
                self._prove(self._found.scale)
            self.observer.require_proof()
        self._moving = before_step(self.model)

    def _prove(self, scale: float) -> None:
        """`distributed.prove_rows`: the passes once more without the microscope, rollouts weighted at random."""
        rank = dist.get_rank() if many_ranks() else 0
        weights = ranks.draw_weights(sum(len(part.rollouts) for part, _ in self._parts), len(self._parts), rank)
        each = torch.split(weights, [len(part.rollouts) for part, _ in self._parts])
        with untouched(self.model):
            for (_, call), h in zip(self._parts, each, strict=True):
                with self._autocast():
                    logp = call.again(self.policy)
                torch.autograd.backward(logp, call.gradient.to(logp) * h.to(logp)[:, None])
            if many_ranks():
                together.reduce(self.model)
            self.observer.prove_ranks(weights, scale)

    def stepped(self, optimizer: Any = None) -> StepReading | None:
        """The reading, on the first rank; None on the others."""
        seen = []
        with untouched(self.model), torch.no_grad(), self._autocast():
            seen = [part.placed(call.again(self.policy).double()) for part, call in self._parts]
        moved = together.to_first(moved_by(self._moving))
        found = together.to_first((self._rows(), together.stacked(seen).cpu()))
        if not found:
            return None
        rows, after = together.joined([one for one, _ in found]), together.stacked([x for _, x in found])
        rows = replace(rows, rollouts=replace(rows.rollouts, group=numbered(rows.rollouts.group)))
        line = metrics.assigned(rows.credit, rows.rollouts) | metrics.spread(rows.w, rows.rollouts.mask)
        scope = None
        if rows.blocks:
            observer = self.observer
            observer.blocks, observer.updates = rows.blocks, []
            line |= observer.metrics(rows.rollouts, rows.w, 1.0)
            if len(set(Groups(rows.rollouts.group).counts.tolist())) == 1:
                scope = observer.arrays(rows.rollouts, rows.w)
        if self._found is not None and self._found.split:
            line |= together.sketched(self._found, self.observer.eps)
        line |= after_step(moved, optimizer, self.model) | past_bound(self.method, rows, after)
        return StepReading(line, kept_arrays(self.method, rows.rollouts, rows.credit, rows.w, rows.live, after), scope)

    def _rows(self) -> Rows:
        """This rank's rows on the CPU, in units of the step."""
        parts = [Rows(part.rollouts, part.credit.double(), part.placed(call.logp.double()),
                      -part.placed(call.gradient.double()), 0.0, []) for part, call in self._parts]
        whole = replace(together.joined(parts), blocks=self.observer.blocks if self._gram else [])
        if self._found is not None:
            return whole.in_step(self._found.scale, self._found.split)
        return whole.in_step(1 / dist.get_world_size() if many_ranks() else 1.0, ())


def past_bound(method: Method, rows: Rows, after: Tensor) -> dict[str, float]:
    """`overshoot/…`: the tokens past the row's bound after the step."""
    track = Overshoot(method, rows.rollouts, rows.credit)
    track.see(rows.live)
    track.see(after)
    told = track.metrics()
    return {name: told[name] for name in OVERSHOOT if name in told}


def prompt_ids(tokens: Tensor, inside: Tensor) -> Tensor:
    """(B,) a group id for each row, the same on every rank: 62 bits of the hash of its prompt's tokens."""
    return (text_hashes(tokens, inside)[:, 0] & (2**62 - 1)).to(tokens.device)


def numbered(group: Tensor) -> Tensor:
    """Group ids as 0, 1, ..."""
    found: Tensor = torch.unique(group, return_inverse=True)[1]
    return found
