"""The correlation of J with the reward over a run, and its interval. The loss is no progress signal: `words.law`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError
from creditscope.runs import schema
from creditscope.runs.intervals import Z975
from creditscope.runs.record import Record

ROUNDING = 1e-6
"""|J| below this at every step is 0 up to the rounding of a float32 sum."""
LARGEST = 1e100
"""Largest |metric| whose square is a float."""


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
    r = float(np.clip(x @ y, -1, 1))
    if len(x) < 4 or abs(r) == 1.0:
        return Correlation(r, *((None, None) if len(x) < 4 else (r, r)))
    half = Z975 / math.sqrt(len(x) - 3)
    return Correlation(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))


def _unit(values: Sequence[float]) -> NDArray[np.float64] | None:
    """(x − x̄)/‖x − x̄‖, or None where x varies by rounding alone."""
    x = np.array(values, dtype=np.float64)
    largest = np.abs(x).max(initial=0.0)
    if not len(x) or np.ptp(x) <= 1e-15 * largest:
        return None
    centred = x / largest - (x / largest).mean()
    return np.asarray(centred / np.linalg.norm(centred))


def over_training(record: Record) -> dict[str, Any]:
    """`of_pairs` of a run; a J or a reward that is no number is an error."""
    return of_pairs(series(record.path, record.steps(), schema.OBJECTIVE_VALUE, schema.REWARD_MEAN))


def of_pairs(pairs: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """How J went with the reward, from (J, mean reward) of each step: the number of steps, the largest |J|, and r with
    its interval, None where undefined.

    Empty where no step has both. A J that is 0 up to rounding has no r: noise correlates with anything.
    """
    if not pairs:
        return {}
    values, rewards = zip(*pairs, strict=True)
    largest = max(abs(value) for value in values)
    found = correlation(values, rewards) if largest > ROUNDING else None
    r, low, high = found or (None, None, None)
    return {"steps": len(pairs), "largest": largest, "r": r, "low": low, "high": high}


def series(run: Path, steps: Sequence[Mapping[str, Any]], *names: str) -> list[tuple[float, ...]]:
    """The metrics `names` of every step that has them all; steps.jsonl is untrusted, so types are checked."""
    found = [line for line in steps if all(name in line for name in names)]
    for line in found:
        for name in names:
            value = line[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
                raise CreditscopeError(f"{run}/steps.jsonl, step {line['step']}: {name} is {value!r:.60}, not a "
                                       f"number; is this a run of creditscope lab train?")
    return [tuple(float(line[name]) for name in names) for line in found]
