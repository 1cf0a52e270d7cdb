"""What a check is, and what running it may say: pass, fail, or not run and what it needs."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from creditscope.errors import CreditscopeError, printable
from creditscope.files.memory import is_short, sentence

Verdict = Literal["pass", "fail", "not run"]


@dataclass(frozen=True)
class Measured:
    """What a check measured."""

    worst: float
    """The largest error, in the unit of the check's tolerance."""
    detail: str = ""
    """Where it was met, and over how many cases."""


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """Two routes to the same numbers: how far apart they may be, and why so far."""

    name: str
    what: str
    """One sentence: what is compared with what, and the unit of the error."""
    run: Callable[[torch.device], Measured]
    tolerance: float
    why: str
    """Why this tolerance and no other."""
    needs: str = ""
    """A package, or `cuda`: without it the check is not run."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check said."""

    name: str
    what: str
    verdict: Verdict
    worst: float | None
    """None where the check did not run, ended in an error, or found what is no number."""
    tolerance: float
    why: str
    detail: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_checks(checks: Iterable[SelfCheck], device: torch.device) -> Iterator[CheckResult]:
    """The lines, one by one. A check that fails, or breaks, does not stop the others."""
    for check in checks:
        start = time.perf_counter()
        worst, verdict, detail = _judge(check, device)
        yield CheckResult(name=check.name, what=check.what, verdict=verdict, worst=worst, tolerance=check.tolerance,
                   why=check.why, detail=printable(detail), seconds=time.perf_counter() - start)


def _judge(check: SelfCheck, device: torch.device) -> tuple[float | None, Verdict, str]:
    if lacking(check.needs, device):
        return None, "not run", f"needs {check.needs}"
    try:
        found = check.run(device)
    except Exception as error:  # whatever it is, the user's installation is not sound; but for memory
        if is_short(error):
            raise CreditscopeError(sentence(error, check.name, "free some of it, or give --device cpu")) from None
        return None, "fail", f"{type(error).__name__}: {error}"
    if not math.isfinite(found.worst):
        return None, "fail", f"the error is {found.worst}; {found.detail}"
    return found.worst, "pass" if found.worst <= check.tolerance else "fail", found.detail


def lacking(needs: str, device: torch.device) -> bool:
    """Whether what a check needs is not here."""
    return device.type != "cuda" if needs == "cuda" else bool(needs) and importlib.util.find_spec(needs) is None


def worst_of(errors: dict[str, float], cases: str) -> Measured:
    """The largest of several named errors; one that is no number is the largest.

    >>> worst_of({"a": 1e-16, "b": 2e-16}, "layers")
    Measured(worst=2e-16, detail='b is the worst of 2 layers')
    """
    where = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return Measured(errors[where], f"{where} is the worst of {len(errors)} {cases}")
