"""A batch, `Rollouts`: B sampled completions in groups, checked where it is made and trusted afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError

ROUNDING = 1e-3
"""How far a log-prob may be above 0: a margin for rounding. float32 numbers near 100 are 8e-6 apart."""


class Range(NamedTuple):
    """low < x < high, and how to repair a number outside."""

    low: float
    high: float
    says: str


class BatchColumn(NamedTuple):
    """One tensor of a batch."""

    kind: str
    """int64, float or bool."""
    axis: str
    """row: (B,), token: (B, T), step: (B, S)."""
    required: bool = False
    pad: int = 0
    range: Range | None = None


_LOG_PROB = Range(-math.inf, ROUNDING, f"a log-probability is at most 0 (up to {ROUNDING:g} is taken for rounding); "
                                       f"give log π, with its minus sign, not π and not −log π")
_ENTROPY = Range(-ROUNDING, math.inf, "an entropy is at least 0; give −Σ π log π, in nats")
_COLLISION = Range(-ROUNDING, 1 + ROUNDING, "Σ π² lies between 0 and 1; give the sum of squared probabilities")
COLUMNS = {
    "tokens": BatchColumn("int64", "token", required=True),
    "mask": BatchColumn("bool", "token", required=True),
    "logp": BatchColumn("float", "token", required=True, range=_LOG_PROB),
    "reward": BatchColumn("float", "row", required=True),
    "group": BatchColumn("int64", "row", required=True),
    "ref_logp": BatchColumn("float", "token", range=_LOG_PROB),
    "entropy": BatchColumn("float", "token", range=_ENTROPY),
    "collision": BatchColumn("float", "token", range=_COLLISION),
    "step": BatchColumn("int64", "token", pad=-1),
    "step_reward": BatchColumn("float", "step"),
    "step_state": BatchColumn("int64", "step", pad=-1),
}
TOKEN_FIELDS = tuple(name for name, column in COLUMNS.items() if column.axis == "token")
STEP_FIELDS = tuple(name for name, column in COLUMNS.items() if column.axis == "step")
LIST_FIELDS = ("prompt", "prompt_ids", "text", "pieces")  # lists of length B, or empty when unknown


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """B completions, right-padded to T tokens; rows with the same `group` answer the same prompt.

    >>> r = Rollouts(tokens=torch.tensor([[5, 6], [7, 0]]), mask=torch.tensor([[True, True], [True, False]]),
    ...              logp=torch.tensor([[-.1, -.2], [-.3, 0.]]), reward=torch.tensor([1., 0.]),
    ...              group=torch.tensor([0, 0]))
    >>> len(r), r.lengths.tolist()
    (2, [2, 1])
    """

    tokens: Tensor
    """(B, T) int64 token ids of the completion; 0 after a row's last chosen token."""
    mask: Tensor
    """(B, T) bool: True where the policy chose the token. False on padding and on text from elsewhere."""
    logp: Tensor
    """(B, T) log π_old of the chosen tokens, as sampled."""
    reward: Tensor
    """(B,) reward of each rollout."""
    group: Tensor
    """(B,) int64 prompt id. Groups may differ in size and need not be contiguous."""
    ref_logp: Tensor | None = None
    """(B, T) log π_ref of the chosen tokens, for methods with a KL term."""
    entropy: Tensor | None = None
    """(B, T) entropy of the sampling distribution at each token, in nats."""
    collision: Tensor | None = None
    """(B, T) Σ_v π(v)² at each token, before any top-p: the chance that two draws agree."""
    step: Tensor | None = None
    """(B, T) int64 index of the reasoning step (or turn) a token belongs to, -1 for none."""
    step_reward: Tensor | None = None
    """(B, S) reward of each step; columns past a row's last step are 0."""
    step_state: Tensor | None = None
    """(B, S) int64 the state in which each step (or turn) begins, equal where states are; -1 past the last step."""
    prompt: Sequence[str] = field(default_factory=list)
    prompt_ids: Sequence[Sequence[int]] = field(default_factory=list)
    """Token ids of each row's prompt."""
    text: Sequence[str] = field(default_factory=list)
    pieces: Sequence[Sequence[str]] = field(default_factory=list)
    """The text of each token, for people to read."""

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_shapes()
        self._check_values()
        # Kept on the CPU, so that `trim` knows its width without waiting for the GPU.
        object.__setattr__(self, "_ends", self.extents.tolist())

    # -- checks ------------------------------------------------------------------------------------------

    def _check_kinds(self) -> None:
        for name, (kind, _, required, *_) in COLUMNS.items():
            value = getattr(self, name)
            if value is None and not required:
                continue
            if not isinstance(value, Tensor):
                raise CreditscopeError(f"Rollouts.{name} must be a {kind} tensor, got {type(value).__name__}; "
                                       f"use torch.as_tensor(...)")
            if not (value.is_floating_point() if kind == "float" else value.dtype == getattr(torch, kind)):
                repair = "long" if kind == "int64" else kind
                raise CreditscopeError(f"Rollouts.{name} must be {kind}, got {value.dtype}; "
                                       f"convert it with {name}.{repair}()")

    def _check_shapes(self) -> None:
        if self.tokens.dim() != 2:
            raise CreditscopeError(f"Rollouts.tokens must be (B, T), got shape {tuple(self.tokens.shape)}")
        rows, width = self.tokens.shape
        if rows == 0:
            raise CreditscopeError("Rollouts needs at least one row, got 0; skip the step when nothing was sampled")
        for name, value in self._tensors().items():
            axis, shape = COLUMNS[name].axis, tuple(value.shape)
            if axis == "step" and self.step is None:
                raise CreditscopeError(f"Rollouts.{name} was given without Rollouts.step; "
                                       f"pass the step index of every token too")
            if axis == "step" and (value.dim() != 2 or shape[0] != rows):
                raise CreditscopeError(f"Rollouts.{name} must be (B, S) with B = {rows}, got {shape}")
            expected = (rows,) if axis == "row" else (rows, width)
            if axis != "step" and shape != expected:
                raise CreditscopeError(f"Rollouts.{name} must have shape {expected} to fit tokens, got {shape}")
        if self.step_state is not None and (self.step_reward is None
                                            or self.step_state.shape != self.step_reward.shape):
            have = "none" if self.step_reward is None else str(tuple(self.step_reward.shape))
            raise CreditscopeError(f"Rollouts.step_state {tuple(self.step_state.shape)} must have the shape of "
                                   f"step_reward, which is {have}")
        for name in LIST_FIELDS:
            entries = getattr(self, name)
            if entries and len(entries) != rows:
                raise CreditscopeError(f"Rollouts.{name} must have one entry per row ({rows}) or none, "
                                       f"got {len(entries)}")

    def _check_values(self) -> None:
        if not bool(self.mask.any()):
            raise CreditscopeError(f"Rollouts.mask is False everywhere: in none of the {len(self)} rows did the policy "
                                   f"choose a token; skip the batch, or mark the chosen tokens True")
        # After the last chosen token stands padding, whatever its id.
        column = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        tail = column >= self.extents[:, None]
        if bool((self.tokens[tail] != 0).any()):
            object.__setattr__(self, "tokens", self.tokens.masked_fill(tail, 0))
        _refuse_rows("tokens", (self.tokens < 0) & self.mask, self.tokens, rule="ids, counted from 0")
        _refuse_rows("reward", ~torch.isfinite(self.reward), self.reward)
        for name, value in self._tensors().items():
            possible = COLUMNS[name].range
            if possible is None:
                continue
            right = (value > possible.low) & (value < possible.high)  # False for NaN
            if bool(right.all()):
                continue
            _refuse_rows(name, ~torch.isfinite(value) & self.mask, value)
            _refuse_rows(name, ~right & self.mask, value, rule=f"possible ({possible.says})")
            # Numbers on padding mean nothing, but 0 · NaN would still reach every sum: set them to 0.
            object.__setattr__(self, name, value.masked_fill(~self.mask, 0.0))
        if self.step is not None:
            _refuse_rows("step", self.step < -1, self.step, rule="an index, or -1 for no step")
            if self.step_reward is not None:
                _refuse_rows("step_reward", ~torch.isfinite(self.step_reward), self.step_reward)
                steps = self.step_reward.shape[1]
                _refuse_rows("step", self.step >= steps, self.step, rule=f"below step_reward's {steps} columns")

    # -- reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """(B,) L_i, the number of tokens the policy chose; 0 for an empty completion."""
        return self.mask.sum(dim=1)

    @property
    def extents(self) -> Tensor:
        """(B,) columns up to the last chosen token, text from elsewhere included; padding follows."""
        columns = torch.arange(1, self.tokens.shape[1] + 1, device=self.tokens.device)
        return (self.mask * columns).amax(dim=1)

    def require(self, name: str, who: str) -> Tensor:
        """The optional field `name`, or an error that says who needs it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise CreditscopeError(f"{who} needs {name} but the rollouts have none; pass Rollouts({name}=...), "
                                   f"or give {name!r} in each line of a file")
        return value

    # -- new batches from old ------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name in COLUMNS if (value := getattr(self, name)) is not None}

    def _made(self, changes: dict[str, Any]) -> Rollouts:
        """A batch made from this one, not checked again: a check would wait for the GPU."""
        made = copy.copy(self)
        vars(made).update(changes)
        return made

    def to(self, device: torch.device | str) -> Rollouts:
        """The same rollouts with every tensor on `device`."""
        # A copy to the CPU is read at once, so it waits; a copy to a GPU need not.
        ahead = torch.device(device).type != "cpu"
        return self._made({name: value.to(device, non_blocking=ahead) for name, value in self._tensors().items()})

    def rows(self, index: Tensor) -> Rollouts:
        """The chosen rows, by boolean mask (B,) or by integer index. An integer index on the CPU waits for no GPU."""
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        if not len(index):
            raise CreditscopeError("Rollouts.rows needs at least one row, got none")
        at = index.to(self.tokens.device, non_blocking=not index.is_cuda)
        chosen: dict[str, Any] = {name: value[at] for name, value in self._tensors().items()}
        where, ends = index.tolist(), vars(self)["_ends"]
        chosen |= {name: [value[i] for i in where] for name in LIST_FIELDS if (value := getattr(self, name))}
        return self._made(chosen | {"_ends": [ends[i] for i in where]})

    def trim(self) -> Rollouts:
        """The same rollouts without columns that are padding in every row."""
        width = max(vars(self)["_ends"])
        return self._made({n: v[:, :width] for n, v in self._tensors().items() if n in TOKEN_FIELDS})

    @staticmethod
    def cat(parts: Sequence[Rollouts]) -> Rollouts:
        """One batch from several. Group ids are kept, so number them before you join."""
        if not parts:
            raise CreditscopeError("Rollouts.cat needs at least one part, got none")
        joined: dict[str, Any] = {}
        for name in (*COLUMNS, *LIST_FIELDS):
            values = [getattr(part, name) for part in parts]
            if name == "step_state":  # where no row has a step, no state is missing
                values = [part.step.new_zeros(len(part), 0) if v is None and part.step is not None
                          and part.step_reward is not None and part.step_reward.shape[1] == 0 else v
                          for v, part in zip(values, parts, strict=True)]
                values = [None] * len(parts) if all(v is None or v.shape[1] == 0 for v in values) else values
            present = [value is not None and len(value) > 0 for value in values]  # texts are empty when unknown
            if not any(present):
                joined[name] = values[0]
            elif not all(present):
                raise CreditscopeError(f"cannot join rollouts: some parts have {name!r} and some do not")
            elif name in LIST_FIELDS:
                joined[name] = [entry for value in values for entry in value]
            elif COLUMNS[name].axis == "row":
                joined[name] = torch.cat(values)
            else:
                width, pad = max(v.shape[1] for v in values), COLUMNS[name].pad
                joined[name] = torch.cat([torch.nn.functional.pad(v, (0, width - v.shape[1]), value=pad)
                                          for v in values])
        return Rollouts(**joined)


def _refuse_rows(name: str, bad: Tensor, value: Tensor, rule: str = "finite") -> None:
    """Raise for the first offending entry of `value`, naming its row and how many more there are."""
    if not bool(bad.any()):
        return
    where = bad.nonzero()
    place = f"row {int(where[0, 0])}" + (f", column {int(where[0, 1])}" if where.shape[1] > 1 else "")
    more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
    raise CreditscopeError(f"Rollouts.{name} must be {rule}: {place} is {value[tuple(where[0])].item()}{more}; "
                           f"drop or repair that rollout before building the batch")
