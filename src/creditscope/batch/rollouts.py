"""What a batch is: `Rollouts`, B sampled completions in groups, checked where it is made and trusted afterwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError

# Fields of one shape, so that checks, indexing and concatenation are written once.
TOKEN_FIELDS = ("tokens", "mask", "logp", "ref_logp", "entropy", "collision", "step")  # (B, T)
STEP_FIELDS = ("step_reward", "step_state")  # (B, S)
LIST_FIELDS = ("prompt", "prompt_ids", "text", "pieces")  # lists of length B, or empty when unknown
ROUNDING = 1e-3
"""How far a log-prob may be above 0: a margin for rounding. float32 numbers near 100 are 8e-6 apart."""


class Range(NamedTuple):
    """low < x < high, and what to do with a number that is outside."""

    low: float
    high: float
    says: str


_LOG_PROB = Range(-math.inf, ROUNDING, f"a log-probability is at most 0 (up to {ROUNDING:g} is taken for rounding); "
                                       f"give log π, with its minus sign, not π and not −log π")
RANGES = {
    "logp": _LOG_PROB,
    "ref_logp": _LOG_PROB,
    "entropy": Range(-ROUNDING, math.inf, "an entropy is at least 0; give −Σ π log π, in nats"),
    "collision": Range(-ROUNDING, 1 + ROUNDING, "Σ π² lies between 0 and 1; give the sum of squared probabilities"),
}
_PAD = {"step": -1, "step_state": -1}  # everything else pads with 0


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
    """(B, T) bool: True where the policy chose the token. False on padding and on text that others wrote."""
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
    """Token ids of each row's prompt: what a model has to read before the completion."""
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
        kinds = {"tokens": "int64", "mask": "bool", "logp": "float", "reward": "float", "group": "int64",
                 "ref_logp": "float", "entropy": "float", "collision": "float", "step": "int64", "step_reward": "float",
                 "step_state": "int64"}
        required = ("tokens", "mask", "logp", "reward", "group")
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is None and name not in required:
                continue
            if not isinstance(value, Tensor):
                raise CreditscopeError(f"Rollouts.{name} must be a {kind} tensor, got {type(value).__name__}; "
                                       f"use torch.as_tensor(...)")
            right = value.is_floating_point() if kind == "float" else value.dtype == getattr(torch, kind)
            if not right:
                repair = {"float": ".float()", "int64": ".long()", "bool": ".bool()"}[kind]
                raise CreditscopeError(f"Rollouts.{name} must be {kind}, got {value.dtype}; "
                                       f"convert it with {name}{repair}")

    def _check_shapes(self) -> None:
        if self.tokens.dim() != 2:
            raise CreditscopeError(f"Rollouts.tokens must be (B, T), got shape {tuple(self.tokens.shape)}")
        rows, width = self.tokens.shape
        if rows == 0:
            raise CreditscopeError("Rollouts needs at least one row, got 0; skip the step when nothing was sampled")
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(TOKEN_FIELDS, (rows, width))
        expected |= {"reward": (rows,), "group": (rows,)}
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise CreditscopeError(f"Rollouts.{name} must have shape {shape} to fit tokens, "
                                       f"got {tuple(value.shape)}")
        for name in STEP_FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            if self.step is None:
                raise CreditscopeError(f"Rollouts.{name} was given without Rollouts.step; "
                                       f"pass the step index of every token too")
            if value.dim() != 2 or value.shape[0] != rows:
                raise CreditscopeError(f"Rollouts.{name} must be (B, S) with B = {rows}, got {tuple(value.shape)}")
        if self.step_state is not None and (self.step_reward is None
                                            or self.step_state.shape != self.step_reward.shape):
            have = "none" if self.step_reward is None else str(tuple(self.step_reward.shape))
            raise CreditscopeError(f"Rollouts.step_state {tuple(self.step_state.shape)} must have the shape of "
                                   f"step_reward, which is {have}")
        for name in LIST_FIELDS:
            value = getattr(self, name)
            if value and len(value) != rows:
                raise CreditscopeError(f"Rollouts.{name} must have one entry per row ({rows}) or none, "
                                       f"got {len(value)}")

    def _check_values(self) -> None:
        if not bool(self.mask.any()):
            raise CreditscopeError(f"Rollouts.mask is False everywhere: in none of the {len(self)} rows did the policy "
                                   f"choose a token; skip the batch, or mark the chosen tokens True")
        # What stands after the last chosen token is padding, whatever id it was padded with.
        column = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        tail = column >= self.extents[:, None]
        if bool((self.tokens[tail] != 0).any()):
            object.__setattr__(self, "tokens", self.tokens.masked_fill(tail, 0))
        _refuse_rows("tokens", (self.tokens < 0) & self.mask, self.tokens, rule="ids, counted from 0")
        _refuse_rows("reward", ~torch.isfinite(self.reward), self.reward)
        for name, (low, high, says) in RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            right = (value > low) & (value < high)  # False for NaN
            if bool(right.all()):
                continue
            _refuse_rows(name, ~torch.isfinite(value) & self.mask, value)
            _refuse_rows(name, ~right & self.mask, value, rule=f"possible ({says})")
            # What stands on padding means nothing, but 0 · NaN would still reach every sum: blank it.
            object.__setattr__(self, name, value.masked_fill(~self.mask, 0.0))
        if self.step_reward is not None:
            _refuse_rows("step_reward", ~torch.isfinite(self.step_reward), self.step_reward)
        if self.step is not None:
            if bool((self.step < -1).any()):
                _refuse_rows("step", self.step < -1, self.step, rule="an index, or -1 for no step")
            if self.step_reward is not None:
                past = self.step >= self.step_reward.shape[1]
                _refuse_rows("step", past, self.step, rule=f"below step_reward's {self.step_reward.shape[1]} columns")

    # -- reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Tensor:
        """(B,) L_i, the number of tokens the policy chose; 0 for an empty completion."""
        return self.mask.sum(dim=1)

    @property
    def extents(self) -> Tensor:
        """(B,) columns up to the last chosen token; what others wrote before it is inside, what follows is padding."""
        columns = torch.arange(1, self.tokens.shape[1] + 1, device=self.tokens.device)
        return (self.mask * columns).amax(dim=1)

    def require(self, name: str, who: str) -> Tensor:
        """The optional field `name`, or an error that says who needs it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise CreditscopeError(f"{who} needs {name} but the rollouts have none; pass Rollouts({name}=...)")
        return value

    # -- new batches from old ------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _made(self, changes: dict[str, Any]) -> Rollouts:
        """A batch that is made of this one. It is not checked again: that would wait for the GPU at every use."""
        made = copy.copy(self)
        vars(made).update(changes)
        return made

    def to(self, device: torch.device | str) -> Rollouts:
        """The same rollouts with every tensor on `device`."""
        return self._made({name: value.to(device) for name, value in self._tensors().items()})

    def rows(self, index: Tensor) -> Rollouts:
        """The chosen rows, by boolean mask (B,) or by integer index. An integer index on the CPU waits for no GPU."""
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        if not len(index):
            raise CreditscopeError("Rollouts.rows needs at least one row, got none")
        chosen: dict[str, Any] = {name: value[index] for name, value in self._tensors().items()}
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
        width = max(part.tokens.shape[1] for part in parts)
        joined: dict[str, Any] = {}
        for f in fields(Rollouts):
            values = [getattr(part, f.name) for part in parts]
            if f.name == "step_state":  # where no row has a step, no state is missing
                values = [part.step.new_zeros(len(part), 0) if v is None and part.step is not None
                          and part.step_reward is not None and part.step_reward.shape[1] == 0 else v
                          for v, part in zip(values, parts, strict=True)]
                values = [None] * len(parts) if all(v is None or v.shape[1] == 0 for v in values) else values
            present = [value is not None and len(value) > 0 for value in values]  # texts are empty when unknown
            if not any(present):
                joined[f.name] = values[0]
            elif not all(present):
                raise CreditscopeError(f"cannot join rollouts: some parts have {f.name!r} and some do not")
            elif f.name in TOKEN_FIELDS:
                joined[f.name] = torch.cat([_widen(v, width, _PAD.get(f.name, 0)) for v in values])
            elif f.name in STEP_FIELDS:
                steps = max(v.shape[1] for v in values)
                joined[f.name] = torch.cat([_widen(v, steps, _PAD.get(f.name, 0)) for v in values])
            elif isinstance(values[0], Tensor):
                joined[f.name] = torch.cat(values)
            else:
                joined[f.name] = [entry for value in values for entry in value]
        return Rollouts(**joined)


def _widen(value: Tensor, width: int, pad: int) -> Tensor:
    missing = width - value.shape[1]
    return torch.nn.functional.pad(value, (0, missing), value=pad) if missing else value


def _refuse_rows(name: str, bad: Tensor, value: Tensor, rule: str = "finite") -> None:
    """Raise for the first offending entry of `value`, naming its row and how many more there are."""
    if not bool(bad.any()):
        return
    where = bad.nonzero()
    place = f"row {int(where[0, 0])}" + (f", column {int(where[0, 1])}" if where.shape[1] > 1 else "")
    more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
    raise CreditscopeError(f"Rollouts.{name} must be {rule}: {place} is {value[tuple(where[0])].item()}{more}; "
                           f"drop or repair that rollout before building the batch")
