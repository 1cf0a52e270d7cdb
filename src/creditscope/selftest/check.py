"""A check of the self-test and its verdict: pass, fail, or not run and what it needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from creditscope.errors import CreditscopeError, installed, printable
from creditscope.files.memory import is_short, sentence


class WorstError(NamedTuple):
    """The largest error of a check, in the unit of its tolerance, and the case that had it."""

    worst: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class SelftestCheck:
    """Two computations of the same numbers, and how far apart they may be."""

    name: str
    what: str
    """One sentence: the two sides, and the unit of the error."""
    run: Callable[[torch.device], WorstError]
    tolerance: float
    why: str
    """The reason for the tolerance."""
    needs: str = ""
    """A package, or `cuda`: without it the check is not run."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    name: str
    what: str
    verdict: Literal["pass", "fail", "not run"]
    worst: float | None
    """None where the check did not run, raised an error, or measured no number."""
    tolerance: float
    why: str
    detail: str
    seconds: float


def run_checks(checks: Iterable[SelftestCheck], device: torch.device) -> Iterator[CheckResult]:
    """The results, one by one. A check that fails, or raises, does not stop the others."""
    for check in checks:
        start = time.perf_counter()
        worst, verdict, detail = _judge(check, device)
        yield CheckResult(name=check.name, what=check.what, verdict=verdict, worst=worst, tolerance=check.tolerance,
                          why=check.why, detail=printable(detail), seconds=time.perf_counter() - start)


def _judge(check: SelftestCheck, device: torch.device
           ) -> tuple[float | None, Literal["pass", "fail", "not run"], str]:
    if lacking(check.needs, device):
        return None, "not run", f"needs {check.needs}"
    try:
        worst, detail = check.run(device)
    except Exception as error:  # any error but a lack of memory is a fault of the installation
        if is_short(error):
            raise CreditscopeError(sentence(error, check.name, "free some of it, or give --device cpu")) from None
        return None, "fail", f"{type(error).__name__}: {error}"
    if not math.isfinite(worst):
        return None, "fail", f"the error is {worst}; {detail}"
    return worst, "pass" if worst <= check.tolerance else "fail", detail


def lacking(needs: str, device: torch.device) -> bool:
    return device.type != "cuda" if needs == "cuda" else bool(needs) and not installed(needs)


def worst_of(errors: dict[str, float], cases: str) -> WorstError:
    """The largest of several named errors; NaN is the largest.

    >>> worst_of({"a": 1e-16, "b": 2e-16}, "layers")
    WorstError(worst=2e-16, detail='b is the worst of 2 layers')
    """
    where = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return WorstError(errors[where], f"{where} is the worst of {len(errors)} {cases}")
