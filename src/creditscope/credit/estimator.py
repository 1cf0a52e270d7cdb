"""What is known about an estimator before it runs: its equation, its price, what it must be given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from creditscope.errors import CreditscopeError, unknown
from creditscope.files.specs import Option

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


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One row of the list. Its function has the same name and stands in the file of that name."""

    name: str
    title: str
    equation: str
    needs: tuple[str, ...] = ()
    siblings: bool = False
    """True where a rollout alone in its group would get nothing."""
    per_answer: bool = False
    """True where it gives a rollout one number; every other one gives tokens or steps their own."""
    across_groups: bool = False
    """True where a rollout's credit depends on other groups of the batch."""
    one_prompt: bool = False
    """True where it compares the beginnings of answers to one prompt."""
    variants: tuple[str, ...] = ()
    """Specs that a study of all estimators runs besides the plain one."""
    scheduled: Mapping[str, object] = field(default_factory=dict)
    """Option values under which credit depends on how far the run is."""
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

    def require(self, given: frozenset[str], where: str) -> None:
        """Refuse, before anything is spent, a place that cannot give what the estimator needs."""
        for need in self.needs:
            if need not in given:
                raise CreditscopeError(f"credit {self.name!r} needs {NEEDS[need]}, which {where} does not give; choose "
                                       f"another of: creditscope credit")
