"""verl's FSDP2 engine under the microscope, under any loss: `VERL_ENGINE_VENDOR=creditscope`.

verl cuts a mini-batch into ranks and micro-batches. Each micro-batch's own forward and backward runs inside a
`Microscope`, and w is the gradient of the loss at the log-probs. A prompt group whose rows all lie in one micro-batch
has an exact Gram; a group that was cut is read from the ranks' sketches.

The scale of the reduced gradient is read from FSDP and proven at every reading (`microscope.distributed`): a wrong
scale, a missed layer or a row counted twice is an error. The first reading, every 25th and the first after the model
has changed also prove that each row is attributed to the right rollout, by passes without the microscope in which
rollouts are weighted at random.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from creditscope.batch import metrics
from creditscope.errors import CreditscopeError, installed
from creditscope.microscope import distributed as ranks
from creditscope.microscope import geometry
from creditscope.microscope.observer import row_w
from creditscope.microscope.proof import Proofs
from creditscope.microscope.scope import Microscope
from creditscope.microscope.sketch import Sketcher
from creditscope.plugins.verl.names import assert_registered, load, require_engine
from creditscope.runs import schema

# The readings below are also used without verl.
Engine: Any = load("verl.workers.engine.fsdp.transformer_impl").FSDPEngineWithLMHead if installed("verl") else object
if installed("verl"):
    require_engine(Engine)

EVERY = "CREDITSCOPE_EVERY"
"""Environment variable: updates between two readings, by default 10. The first update is read."""
SKETCHED = ("effective_rank", "top1", "conflict")
"""Readings of a group that are also taken from its sketch: verl's trainer always spreads groups over the ranks."""


@dataclass
class EngineReading:
    """One mini-batch on one rank; the lists have one item per micro-batch, `w` and `masks` (B, T)."""

    number: dict[str, int]  # prompt id → group number, the same on every rank
    sketcher: Sketcher = field(default_factory=Sketcher)
    scopes: list[Microscope] = field(default_factory=list)
    groups: list[Tensor] = field(default_factory=list)
    w: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)


class ScopedEngine(Engine):  # type: ignore[misc]
    """verl's FSDP2 engine; every few updates it adds `w/batch_…`, `gram/…` and `sketch/…` to verl's metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert_registered()
        self.every = _whole_number(os.environ.get(EVERY, "10"))
        self.blocks: dict[str, NDArray[np.float64]] = {}
        """Prompt id → exact Gram, in the units of the update: the whole groups of this rank at the last reading."""
        self._updates = 0
        self._reading: EngineReading | None = None
        self._stack = ExitStack()
        self._slope: Tensor | None = None
        self._proofs = Proofs()
        self._weights: list[Tensor] | None = None  # during a proof: the weights of each coming micro-batch's rollouts

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        if forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only=True)
        due = self._updates % self.every == 0
        self._updates += 1
        if not due:
            return super().forward_backward_batch(data, loss_function)
        self._refuse(data)
        reading = self._reading = EngineReading(self._numbered(_uids(data)))
        try:
            out = super().forward_backward_batch(data, loss_function)
        finally:
            self._reading = None
        if self._proofs.due(self.module) is not None:
            self._prove(reading, data, loss_function)
        out["metrics"] |= {name: [value] for name, value in self._readings(reading).items()}
        return out

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        with super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch), ExitStack() as self._stack:
            yield

    def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any], forward_only: bool) -> Any:
        if self._reading is not None:
            self._stack.enter_context(self._watched(self._reading, micro_batch))
        return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prepare_model_outputs(*args, **kwargs)
        if self._reading is None and self._weights is None:
            return found
        nested = found["log_probs"]
        flat = nested.values()
        if self._reading is not None:
            flat.register_hook(self._see)
        elif self._weights is not None:
            given = self._weights.pop(0).to(flat).repeat_interleave(nested.offsets().diff())
            flat.register_hook(lambda slope: slope * given)
        found["log_probs"] = torch.nested.nested_tensor_from_jagged(flat, nested.offsets())
        return found

    def _prove(self, reading: EngineReading, data: Any, loss_function: Callable[..., Any]) -> None:
        """The same micro-batches without the microscope, rollout i's slopes times h_i; gradients are restored."""
        held = {p: p.grad for p in self.module.parameters()}
        rank = dist.get_rank(self.get_data_parallel_group())
        weights = [ranks.draw_weights(len(ids), 1000 * self._updates + i, rank) for i, ids in enumerate(reading.groups)]
        try:
            for p in held:
                p.grad = None
            self._weights = list(weights)
            super().forward_backward_batch(data, loss_function)
            ranks.prove_rows(reading.scopes, weights, ranks=self.get_data_parallel_group())
        finally:
            self._weights = None
            for p, grad in held.items():
                p.grad = grad

    @contextmanager
    def _watched(self, reading: EngineReading, micro_batch: Any) -> Iterator[None]:
        self._slope = None
        with Microscope(self.module, segments=self._owners(micro_batch), sketch=reading.sketcher) as scope:
            yield
        w, mask = self._w(micro_batch), micro_batch["response_mask"]
        mask = mask.to_padded_tensor(0) if mask.is_nested else mask
        reading.scopes.append(scope)
        reading.groups.append(torch.tensor([reading.number[uid] for uid in _uids(micro_batch)]))
        reading.w.append(w)
        reading.masks.append(mask.bool().to(w.device))

    def _see(self, grad: Tensor) -> None:
        self._slope = grad.detach()

    def _w(self, micro_batch: Any) -> Tensor:
        """(B, T) w_it = −∂loss/∂log π(y_it), from the slope at all positions."""
        if self._slope is None:
            raise CreditscopeError("the loss has no gradient at the log-probs, so there is no w to read: it is "
                                   "not a policy loss. Unset VERL_ENGINE_VENDOR for this worker")
        w: Tensor = -load("verl.workers.utils.padding").no_padding_2_padding(self._slope, micro_batch)
        return w

    def _owners(self, micro_batch: Any) -> Tensor | None:
        """(1, tokens) the row of each position of a packed micro-batch, −1 at its end; None where rows are padded."""
        if not load("verl.utils.tensordict_utils").get(micro_batch, "use_remove_padding", True):
            return None
        lengths = micro_batch["input_ids"].offsets().diff().cpu()
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return torch.nn.functional.pad(owners, (0, self._get_packed_pad_size(len(owners))), value=-1)[None]

    def _numbered(self, uids: Sequence[str]) -> dict[str, int]:
        everyones = dict.fromkeys(uid for part in self._gathered(list(uids)) for uid in part)
        return {uid: number for number, uid in enumerate(everyones)}

    def _gathered(self, mine: Any) -> list[Any]:
        """The values of all data-parallel ranks, on each of them."""
        group = self.get_data_parallel_group()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        return found

    def _readings(self, reading: EngineReading) -> dict[str, float]:
        """The metrics of the whole mini-batch, equal on every rank: verl takes a mean over ranks."""
        found = ranks.across(reading.scopes, reading.groups, ranks=self.get_data_parallel_group())
        w_i, eps = _row_w(reading), max(scope.eps for scope in reading.scopes)
        whole = {number: gram.numpy() for number, gram in found.blocks.items() if number in w_i}
        self.blocks = {uid: whole[number] for uid, number in reading.number.items() if number in whole}
        mine = [(gram, w_i[number], eps) for number, gram in whole.items()]
        tokens = torch.cat([w[mask] for w, mask in zip(reading.w, reading.masks, strict=True)]).float().cpu().numpy()
        parts = self._gathered((mine, tokens, sorted(w_i)))
        w = torch.from_numpy(np.concatenate([part[1] for part in parts]))
        real = {number for part in parts for number in part[2]}
        groups = [group for part in parts for group in part[0]]
        out: dict[str, float] = {name.replace("w/", "w/batch_", 1): value
                                 for name, value in metrics.spread(w, torch.ones_like(w, dtype=torch.bool)).items()}
        out |= {schema.SIGNAL_GROUPS: float(len(real)), schema.GRAM_WHOLE_GROUPS: float(len(groups)),
                schema.GRAM_CUT_GROUPS: float(len(real) - len(groups)), schema.GRAM_CHECK: found.check.error}
        return out | group_means(groups) | sketched_means(found, real, eps)

    def _refuse(self, data: Any) -> None:
        for broken, name, repair in (
                (self.ulysses_sequence_parallel_size > 1, "ulysses_sequence_parallel_size", "set it to 1"),
                (self.model_config.use_fused_kernels, "use_fused_kernels", "set it to False"),
                (self.scaler is not None, "mixed_precision.param_dtype=fp16", "set it to bf16 or fp32"),
                (not _uids(data), "a batch without uid", "put the prompt's id into it, as verl's trainers do")):
            if broken:
                raise CreditscopeError(f"{name}: the microscope cannot read gradients under it; {repair}, or unset "
                                       f"VERL_ENGINE_VENDOR")


Group = tuple[NDArray[np.float64], NDArray[np.float64] | None, float]
"""(Gram, w of each rollout where it is one number, relative precision)."""


def group_means(groups: Sequence[Group]) -> dict[str, float]:
    """`gram/group/…`: means over the live groups, those whose gradient is not 0; absent where there is none."""
    live = [geometry.summary(gram, w_i, np.zeros(len(gram), dtype=np.int64), eps=eps)
            for gram, w_i, eps in groups if np.diag(gram).any()]
    out: dict[str, float] = {schema.GRAM_LIVE_GROUPS: float(len(live))} if groups else {}
    for name in dict.fromkeys(name for found in live for name in found if name.startswith("gram/group/")):
        out[name] = float(np.mean([found[name] for found in live if name in found]))
    return out


def sketched_means(found: ranks.RanksReading, numbers: Iterable[int], eps: float) -> dict[str, float]:
    """`sketch/group/…`: the same for all groups, cut ones too, from sketched Grams, and the sketch's error."""
    gram, owner = found.sketch.gram.numpy(), found.group.numpy()
    blocks = [(gram[np.ix_(owner == number, owner == number)], None, eps) for number in sorted(numbers)]
    means = group_means(blocks)
    out = {f"sketch/group/{name}": means[f"gram/group/{name}"] for name in SKETCHED if f"gram/group/{name}" in means}
    return out | ({schema.SKETCH_RELATIVE_ERROR: found.sketch.relative_error} if out else {})


def _row_w(reading: EngineReading) -> dict[int, NDArray[np.float64] | None]:
    """Group number → w of its rows in a micro-batch; verl's padding is left out."""
    out: dict[int, NDArray[np.float64] | None] = {}
    for w, mask, numbers in zip(reading.w, reading.masks, reading.groups, strict=True):
        given = row_w(w, mask)
        for number in sorted(set(numbers.tolist())):
            rows = numbers == number
            if bool(mask[rows.to(mask.device)].any()):
                out[number] = None if given is None else given[rows.numpy()]
    return out


def _uids(data: Any) -> list[str]:
    return [str(uid) for uid in load("verl.utils.tensordict_utils").get(data, "uid", [])]


def _whole_number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise CreditscopeError(f"{EVERY}={text!r} must be a whole number from 1: updates between two readings")
    return int(text)
