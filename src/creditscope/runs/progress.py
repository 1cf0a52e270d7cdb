"""The loss is no progress signal: J at ratio 1 in closed form, and its correlation with the reward over a run.

    J(π_old) = Σ_it α_it · h_it · A_it − β · R(π_old)        h: the bound at s = 1   (arXiv:2601.05002, Prop. 4)

What is read from a record needs no torch. `describe.law` says in words what is left of J.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.runs.intervals import Z975
from creditscope.runs.record import Record

if TYPE_CHECKING:
    from torch import Tensor

    from creditscope.batch.rollouts import Rollouts

ROUNDING = 1e-6
"""A |J| below this at every step is 0 up to the rounding of a float32 sum."""
LARGEST = 1e100
"""No metric is larger; the square of one that is might not be a number."""


def value_at_ratio_one(method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> Tensor:
    """J of a batch at log π = log π_old: Σ_it α_it·h_it·A_it − β·R. A trust region drops nothing there."""
    import torch

    from creditscope.objective.advantages import token_advantage
    from creditscope.objective.surrogate import check_credit
    from creditscope.objective.weights import aggregate, alpha, kept

    old = rollouts.logp.to(torch.promote_types(rollouts.logp.dtype, torch.float32)).masked_fill(~rollouts.mask, 0.0)
    own = token_advantage(method, rollouts) if credit is None else check_credit(credit, rollouts)
    own = own.detach().to(old.dtype)
    keep = kept(method, rollouts, own)
    value = (alpha(method, rollouts, keep, old.dtype) * height(method, old, own) * own).sum()
    if method.has_loss_kl and method.kl_to == "ref":  # the distance to the sampler is 0
        shares = aggregate(method, rollouts, keep, old.dtype)
        value = value - method.beta * (shares * distance(method, old, rollouts)).sum()
    return value


def height(method: Method, old: Tensor, credit: Tensor) -> Tensor | float:
    """h: what multiplies A_it at s = 1, broadcastable to (B, T); log π where it stands in the ratio's place."""
    return old if method.ratio == "none" else HEIGHTS[method.bound](method, old, credit)


def distance(method: Method, old: Tensor, rollouts: Rollouts) -> Tensor:
    """(B, T) R of each token at ratio 1: k(log π_old/π_ref), or an equal share of the sequence's."""
    from creditscope.objective.penalties import ESTIMATORS

    reference = rollouts.require("ref_logp", f"method {method.name!r} with β = {method.beta}")
    apart = (old - reference.to(old.dtype)).masked_fill(~rollouts.mask, 0.0)
    if method.kl_level == "token":
        return ESTIMATORS[method.kl](apart)
    return ESTIMATORS[method.kl](apart.sum(dim=1, keepdim=True)) / rollouts.lengths[:, None].clamp(min=1)


# -- heights: (method, log π_old, credit) -> h --------------------------------------------------------------------


def _one(method: Method, old: Tensor, credit: Tensor) -> float:
    """h = 1: the clip does not bind at s = 1."""
    return 1.0


def _half_gate(method: Method, old: Tensor, credit: Tensor) -> Tensor:
    """h = 4/τ·sigmoid(0) = 2/τ, τ = τ₊ for A > 0 and τ₋ else."""
    assert method.gate_pos is not None
    assert method.gate_neg is not None
    good = (credit > 0).to(credit.dtype)
    return 2 / method.gate_pos * good + 2 / method.gate_neg * (1 - good)


def _capped_log_prob(method: Method, old: Tensor, credit: Tensor) -> Tensor:
    """h = min(1, 1 + ε_high)·log π: a ceiling may stand below 1."""
    return old * min(1.0, 1 + (method.clip_high or 0.0))


def _log_prob(method: Method, old: Tensor, credit: Tensor) -> Tensor:
    """h = φ(1)·log π = log π."""
    return old


HEIGHTS: dict[str, Callable[[Method, Tensor, Tensor], Tensor | float]] = {
    "none": _one,
    "clip": _one,
    "clip_inside": _one,
    "gate": _half_gate,
    "stop_gradient": _capped_log_prob,
    "gamma": _log_prob,
}


# -- over a run -----------------------------------------------------------------------------------------------------


class Correlation(NamedTuple):
    """Pearson's r with its 95 % interval; below four pairs there is none."""

    r: float
    low: float | None
    high: float | None


def correlation(values: Sequence[float], rewards: Sequence[float]) -> Correlation | None:
    """r = cos(x − x̄, y − ȳ) and Fisher's interval tanh(atanh r ± 1.96/√(n − 3)); None where a side is constant.

    The interval takes the pairs as independent. Steps of one run follow one another, so there it is too narrow.

    >>> round(correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]).r, 12)  # Σ(x − 2)(y − 2) = 1, both norms √2
    0.5
    """
    if len(values) != len(rewards):
        raise CreditscopeError(f"correlation needs pairs, got {len(values)} values and {len(rewards)} rewards")
    x, y = _unit(values), _unit(rewards)
    if x is None or y is None:
        return None
    r = max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(x, y, strict=True))))
    if len(x) < 4:
        return Correlation(r, None, None)
    if abs(r) == 1.0:
        return Correlation(r, r, r)
    half = Z975 / math.sqrt(len(x) - 3)
    return Correlation(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))


def _unit(values: Sequence[float]) -> list[float] | None:
    """(x − x̄)/‖x − x̄‖, or None where x varies by rounding alone."""
    largest = max((abs(x) for x in values), default=0.0)
    if not values or max(values) - min(values) <= 1e-15 * largest:
        return None
    mean = math.fsum(x / largest for x in values) / len(values)
    centred = [x / largest - mean for x in values]
    norm = math.hypot(*centred)
    return [x / norm for x in centred]


def over_training(record: Record) -> dict[str, Any]:
    """How J went with the reward over a run: steps, the largest |J|, and r with its interval, None where undefined.

    Empty where no step has both. A J that is 0 up to rounding has no r: noise correlates with anything.
    """
    pairs = series(record.path, record.steps(), "objective/value", "reward/mean")
    if not pairs:
        return {}
    values, rewards = zip(*pairs, strict=True)
    largest = max(abs(value) for value in values)
    found = correlation(values, rewards) if largest > ROUNDING else None
    r, low, high = found or (None, None, None)
    return {"steps": len(pairs), "largest": largest, "r": r, "low": low, "high": high}


def series(run: Path, steps: Sequence[Mapping[str, Any]], *names: str) -> list[tuple[float, ...]]:
    """The metrics `names` of every step that has them all. A folder may come from anybody: only numbers pass."""
    found = [line for line in steps if all(name in line for name in names)]
    for line in found:
        for name in names:
            value = line[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
                raise CreditscopeError(f"{run}/steps.jsonl, step {line['step']}: {name} is {value!r:.60}, not a "
                                       f"number; is this a run of creditscope train?")
    return [tuple(float(line[name]) for name in names) for line in found]
