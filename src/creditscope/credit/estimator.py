"""What is known about an estimator before it runs: its equation, its price, what it must be given."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from creditscope.errors import CreditscopeError, unknown

NEEDS: Mapping[str, str] = MappingProxyType({
    "steps": "a task that judges single steps, or step labels in the file",
    "states": "a task that names the state in which each turn begins",
    "entropy": "the entropy of the sampling distribution at each token",
    "collision": "Σπ² of the sampling distribution at each token",
    "continuations": "a policy to sample from and a verifier",
    "critic": "a learned value function",
    "gram": "a backward pass under the microscope",
})
"""What an estimator may ask for besides rewards and tokens, and where it comes from."""

BASES = ("reward", "advantage")


@dataclass(frozen=True)
class Option:
    """One setting of an estimator: its default, what it means, and what it may be."""

    default: int | float | bool | str
    meaning: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, who: str, name: str, value: object) -> None:
        """Refuse a value of another kind, or out of range."""
        if self.choices:
            if value not in self.choices:
                raise unknown(f"{name} of credit {who!r}:", str(value), self.choices)
            return
        kind = float if isinstance(self.default, float) else type(self.default)
        fits = isinstance(value, int | float if kind is float else kind)
        fits = fits and isinstance(value, bool) == (kind is bool)  # true is no number, though Python says so
        number = value if isinstance(value, int | float) else 0.0
        inside = (self.low is None or number >= self.low) and (self.high is None or number <= self.high)
        if not fits or not inside or not math.isfinite(number):
            raise CreditscopeError(f"option {name} of credit {who!r} must be {self.range(kind)}, got {value!r}")

    def range(self, kind: type) -> str:
        if kind is bool:
            return "true or false"
        what = "a whole number" if kind is int else "a finite number"
        if self.low is not None and self.high is not None:
            return f"{what} in {self.low:g} .. {self.high:g}"
        return what if self.low is None else f"{what} of at least {self.low:g}"


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One row of the list. Its function has the same name and stands in the file of that name."""

    name: str
    title: str
    equation: str
    needs: tuple[str, ...] = ()
    siblings: bool = False
    """True where a rollout alone in its group would get nothing."""
    builds_on: str = "reward"
    """reward: replaces r_i − b_i, the method scales it. advantage: reshapes the advantage that the method computed."""
    cost: str
    """What it takes beyond the step: rollouts, forward or backward passes."""
    cites: str
    options: Mapping[str, Option] = field(default_factory=dict)
    claim: str = ""
    """What its paper says about bias, in our words; what enumeration says stands in docs/credit.md."""
    note: str = ""
    """Where it departs from its paper."""

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in NEEDS:
                raise unknown(f"need of estimator {self.name!r}:", need, NEEDS)
        if self.builds_on not in BASES:
            raise unknown(f"builds_on of estimator {self.name!r}:", self.builds_on, BASES)

    @property
    def function(self) -> Callable[..., Any]:
        """(method, rollouts, tools, **options) -> (B, T). Torch loads here, not with the list."""
        found: Callable[..., Any] = getattr(importlib.import_module(f"creditscope.credit.{self.name}"), self.name)
        return found

    def check(self, name: str, value: object) -> None:
        """Refuse an option that the estimator does not have, or a value that it cannot take."""
        if not self.options:
            raise CreditscopeError(f"credit {self.name!r} has no options, got {name!r}")
        if name not in self.options:
            raise unknown(f"option of credit {self.name!r}:", name, self.options)
        self.options[name].check(self.name, name, value)

    def require(self, given: frozenset[str], where: str) -> None:
        """Refuse, before anything is spent, a place that cannot give what the estimator needs."""
        for need in self.needs:
            if need not in given:
                raise CreditscopeError(f"credit {self.name!r} needs {NEEDS[need]}, which {where} does not give; choose "
                                       f"another of: creditscope credit")
