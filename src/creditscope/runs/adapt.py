"""When a run changes R, or its credit: rules that are pure functions of the lines of its record so far.

arXiv:2606.29238, Sec. 8, proposes to raise R, or to take denser rewards, when the effective rank falls. A resumed run
decides as an uninterrupted one. Prompts per step stay: a raised R makes a step more expensive, and the budget of
rollouts ends the run earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from creditscope.credit.table import ESTIMATORS
from creditscope.errors import CreditscopeError
from creditscope.files.specs import Option, read_spec
from creditscope.runs import schema

RANK = schema.GRAM_GROUP_EFFECTIVE_RANK
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Setting:
    """R and credit of a step; credit as --credit spells it."""

    group: int
    credit: str


@dataclass(frozen=True, kw_only=True)
class AdaptRow:
    """One row of the table."""

    name: str
    rule: str
    decide: Callable[..., Setting]
    """(start, lines, budget, **options) -> the coming step's setting."""
    reads: bool = False
    """True where it reads the rank, so that there must be readings of it."""
    spends: bool = False
    """True where it depends on the share of the budget that was spent."""
    options: Mapping[str, Option] = field(default_factory=dict)


def falls(ranks: Sequence[float], window: int, fall: float) -> bool:
    """mean of the last `window` < fall · mean of the first `window`; not known, so False, of fewer than `window`.

    >>> falls([2.0, 2.0, 1.0, 1.0], window=2, fall=0.8), falls([2.0, 2.0, 1.0], window=2, fall=0.8)  # ½ and ¾ of 2
    (True, True)
    >>> falls([2.0, 2.0, 1.5, 1.75], window=2, fall=0.8), falls([2.0], window=2, fall=0.8)  # 1.625 of 2
    (False, False)
    """
    if len(ranks) < window:
        return False
    return math.fsum(ranks[-window:]) < fall * math.fsum(ranks[:window])


def raised(group: int, most: int) -> int:
    """min(2R, most); R itself where it is larger.

    >>> raised(8, 32), raised(24, 32), raised(64, 32)
    (16, 32, 64)
    """
    return max(group, min(2 * group, most))


def _stay(start: Setting, lines: Lines, budget: int) -> Setting:
    return start


def _raise_group(start: Setting, lines: Lines, budget: int, *, window: int, fall: float, most: int) -> Setting:
    if not lines:
        return start
    group = int(lines[-1][schema.ADAPT_GROUP])
    # Rank depends on R, so the reference is new.
    here = _ranks(line for line in lines if line[schema.ADAPT_GROUP] == group)
    return replace(start, group=raised(group, most) if falls(here, window, fall) else group)


def _denser_credit(start: Setting, lines: Lines, budget: int, *, window: int, fall: float, to: str) -> Setting:
    switched = bool(lines) and lines[-1][schema.ADAPT_SWITCHED] == 1
    return replace(start, credit=to) if switched or falls(_ranks(lines), window, fall) else start


def _late_group(start: Setting, lines: Lines, budget: int, *, at: float, most: int) -> Setting:
    spent = sum(line[schema.ROLLOUTS_SPENT] for line in lines)
    return replace(start, group=raised(start.group, most)) if spent >= at * budget else start


def _ranks(lines: Any) -> list[float]:
    """The finite readings of the rank."""
    return [line[RANK] for line in lines if RANK in line and math.isfinite(line[RANK])]


WINDOW = Option(5, "readings in a mean", low=1)
FALL = Option(0.8, "share of the first mean under which the rank has fallen", low=0.0, high=1.0)
MOST = Option(32, "R is raised no further", low=2)
DENSER = tuple(name for name, row in ESTIMATORS.items() if "critic" not in row.needs)
"""Credits to switch to; a critic would be untrained at the switch."""

ADAPTS: Mapping[str, AdaptRow] = MappingProxyType({row.name: row for row in (
    AdaptRow(name="none", rule="R and credit stay", decide=_stay),
    AdaptRow(
        name="raise_group", rule="R ← min(2R, most) when the rank has fallen", decide=_raise_group, reads=True,
        options={"window": WINDOW, "fall": FALL, "most": MOST}),
    AdaptRow(
        name="denser_credit", rule="credit ← to, once, when the rank has fallen", decide=_denser_credit, reads=True,
        options={"window": WINDOW, "fall": FALL,
                 "to": Option("step_reward", "the credit to switch to", choices=DENSER)}),
    AdaptRow(
        name="late_group", decide=_late_group, spends=True,
        rule="the control: R ← min(2R, most), once, when `at` of --rollouts was spent, whatever the rank",
        options={"at": Option(0.5, "share of --rollouts", low=0.01, high=0.99), "most": MOST}),
)})


def parse_adapt(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name,key=value`, checked; those that are not given have their defaults.

    >>> parse_adapt("raise_group,most=16")
    ('raise_group', {'window': 5, 'fall': 0.8, 'most': 16})
    """
    name, options = read_spec("adapt", spec, ADAPTS)
    return name, {key: option.default for key, option in ADAPTS[name].options.items()} | options


def decide(spec: str, start: Setting, lines: Lines, budget: int) -> Setting:
    """The setting of the step after these lines, in a run that began with `start` and may spend `budget` rollouts."""
    name, options = parse_adapt(spec)
    return ADAPTS[name].decide(start, lines, budget, **options)


def check_adapt(spec: str, start: Setting, budget: int, scope: str, readings: int) -> None:
    """Refuse settings under which the rule could do nothing; `readings` is the most that the run has."""
    name, options = parse_adapt(spec)
    row = ADAPTS[name]
    if row.reads and scope == "off":
        raise CreditscopeError(f"--adapt {name} reads the effective rank, and --scope is off; give --scope light")
    if row.reads and readings <= options["window"]:
        raise CreditscopeError(f"--adapt {name} compares the last {options['window']} readings of the rank with the "
                               f"first {options['window']}, and the run has {readings}; give more --steps, a smaller "
                               f"--every, or {name},window=1")
    if row.spends and not budget:
        raise CreditscopeError(f"--adapt {name} goes by the share of the budget that was spent; give --rollouts")
    if "most" in options and start.group >= options["most"]:
        raise CreditscopeError(f"--adapt {name} raises R to at most {options['most']}, and --group is {start.group} "
                               f"already; give {name},most={4 * start.group}, or a smaller --group")
    if options.get("to") == start.credit:
        raise CreditscopeError(f"--adapt {name} would switch to {start.credit}, which is the run's credit already; "
                               f"give {name},to=NAME with another of: creditscope list credits")
