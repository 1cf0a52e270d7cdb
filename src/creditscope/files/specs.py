"""Options after a name, `name,key=value,…`: parsed and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from creditscope.errors import CreditscopeError, unknown

WRITTEN = re.compile(r"([a-z_]+)=([-+.\w]+)")
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Option:
    """One setting: its default, meaning and range."""

    default: int | float | bool | str
    meaning: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, owner: str, name: str, value: object) -> None:
        """Refuse a value of another type or out of range. `owner` names the row, as in "credit 'gae'"."""
        if self.choices:
            if value not in self.choices:
                raise unknown(f"{name} of {owner}:", str(value), self.choices)
            return
        kind = float if isinstance(self.default, float) else type(self.default)
        fits = isinstance(value, int | float if kind is float else kind)
        fits = fits and isinstance(value, bool) == (kind is bool)  # bool is an int in Python
        number = value if isinstance(value, int | float) else 0.0
        inside = (self.low is None or number >= self.low) and (self.high is None or number <= self.high)
        huge = isinstance(number, int) and abs(number) > LARGEST  # beyond int64
        if not fits or not inside or huge or not math.isfinite(number):
            raise CreditscopeError(f"option {name} of {owner} must be {self.range(kind)}, got {value!r:.60}")

    def range(self, kind: type) -> str:
        if kind is bool:
            return "true or false"
        what = "a whole number" if kind is int else "a finite number"
        if self.low is not None and self.high is not None:
            return f"{what} in {self.low:g} .. {self.high:g}"
        return what if self.low is None else f"{what} of at least {self.low:g}"


def check_option(owner: str, options: Mapping[str, Option], name: str, value: object) -> None:
    """Refuse an unknown option or a wrong value."""
    if not options:
        raise CreditscopeError(f"{owner} has no options, got {name!r:.80}")
    if name not in options:
        raise unknown(f"option of {owner}:", name, options)
    options[name].check(owner, name, value)


class HasOptions(Protocol):
    @property
    def options(self) -> Mapping[str, Option]: ...


def read_spec(kind: str, spec: str, table: Mapping[str, HasOptions], see: str = "",
              own: re.Pattern[str] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and options of `--kind name,key=value,…`, checked against the table; a name that fits `own` is the user's.

    >>> class Row:
    ...     options = {"samples": Option(4, "rollouts", low=1)}
    >>> read_spec("credit", "monte_carlo,samples=8", {"monte_carlo": Row()})
    ('monte_carlo', {'samples': 8})
    >>> read_spec("credit", "monte_carlo,samples=0", {"monte_carlo": Row()})
    Traceback (most recent call last):
    creditscope.errors.CreditscopeError: option samples of credit 'monte_carlo' must be a whole number of at least 1, \
got 0
    """
    name, options = read_options(f"--{kind}", spec)
    if name in table:
        for key, value in options.items():
            check_option(f"{kind} {name!r}", table[name].options, key, value)
    elif own is None or not own.fullmatch(name):
        raise unknown(kind, name, table, see=see)
    return name, options


def read_options(flag: str, spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options as they were written, not yet checked.

    >>> read_options("--credit", "monte_carlo,samples=8")
    ('monte_carlo', {'samples': 8})
    """
    name, *rest = spec.split(",")
    options: dict[str, Any] = {}
    for part in rest:
        found = WRITTEN.fullmatch(part.strip())
        if not found:
            raise CreditscopeError(f"{flag} {spec:.80}: {part!r:.80} is no option; write {name:.80},key=value")
        if found[1] in options:
            raise CreditscopeError(f"{flag} {spec:.80}: option {found[1]!r:.80} is given twice")
        options[found[1]] = _value(found[2])
    return name, options


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)
