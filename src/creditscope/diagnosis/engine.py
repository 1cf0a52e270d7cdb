"""All rules on one log: the findings, the first cause, and one line that says both. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from creditscope.diagnosis import remedies
from creditscope.diagnosis.finding import SIGNS as SIGNS
from creditscope.diagnosis.finding import STATES, THIRDS, Finding, State, finding, judge
from creditscope.diagnosis.log import Log
from creditscope.diagnosis.rules import OF_PAIRS, RULES
from creditscope.files.cells import cell, folded
from creditscope.runs import schema

LATER = 5
"""Steps by which a cause may be seen after its effect: both are read over windows of some steps."""


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a run."""

    findings: Sequence[Finding]
    """Of every rule, most severe first; among equals first causes, then in the order of the rules."""
    unread: str = ""
    """Why the run cannot be judged; empty where it can."""

    @property
    def first(self) -> Finding | None:
        """The first cause of the most severe finding; None where none is broken or to watch."""
        worst = self.findings[0]
        if not worst.bad:
            return None
        return {each.rule: each for each in self.findings}[worst.follows[0]] if worst.follows else worst

    @property
    def state(self) -> State:
        """Of the headline: that of the most severe finding, which its cause need not be."""
        return self.findings[0].state if self.first else "unknown" if self.unread else "fine"

    @property
    def effects(self) -> Sequence[Finding]:
        """The bad findings that follow from the first cause, by onset."""
        first = self.first
        found = [each for each in self.findings if first and each.bad and first.rule in each.follows]
        return sorted(found, key=lambda each: (each.onset is None, each.onset or 0))

    @property
    def headline(self) -> str:
        """One line: the sign, the first cause and its change; what was found fine; or why nothing can be said."""
        first, count = self.first, Counter(each.state for each in self.findings)
        if first is not None:
            brings = f" This explains: {', '.join(each.rule for each in self.effects)}." if self.effects else ""
            change = f" Change: {first.change}." if first.change else ""
            return f"{SIGNS[self.state]} {first.rule}: {first.sentence}.{brings}{change}"
        if self.unread:
            return f"{SIGNS['unknown']} cannot judge: {self.unread}."
        several = "question is" if count["unknown"] == 1 else "questions are"
        unknown = f"; {count['unknown']} {several} open" if count["unknown"] else ""
        return f"{SIGNS['fine']} {self.progress}{unknown}."

    @property
    def progress(self) -> str:
        """What the reward did, for the headline of a run without a fault."""
        found = {each.rule: each for each in self.findings}.get("reward trend")
        return found.sentence if found and found.state == "fine" else "Nothing is broken or to watch"

    def __repr__(self) -> str:
        return f"Diagnosis({self.headline!r}, {len(self.findings)} findings)"

    def _repr_html_(self) -> str:
        """For a notebook: the headline, the first cause in full, and the other findings folded, one list per state."""
        first = self.first
        lists = [folded(f"{SIGNS[state]} {state}: {len(told)}", told) for state in STATES if (told := [
            f"{each.rule}: {each.sentence}." for each in self.findings if each.state == state and each is not first])]
        return cell(self.headline, first.details if first else {}, *lists, word=self.state)


def diagnose(log: Log) -> Diagnosis:
    """Every rule's finding, most severe first, each with its first cause."""
    found: dict[str, Finding] = {}
    for name, rule in RULES.items():
        log.settings.assumed.clear()
        told = judge(rule, log) if name in OF_PAIRS or not log.trainer.pairs else finding(
            "fine", "Not in play: preference pairs are given, so no answer is sampled and none has a reward")
        assumes = dict(log.settings.assumed) if told.state != "unknown" else {}
        cure = (told.remedy or name) if told.bad else ""
        found[name] = replace(told, rule=name, assumes=assumes or None, remedy=cure,
                              change=remedies.change(cure, log.trainer, log.settings) if cure else "",
                              expect=remedies.REMEDIES[cure].expect if cure else "")
    rooted = [replace(each, follows=_root(each, found)) for each in found.values()]
    ordered = sorted(rooted, key=lambda each: (STATES.index(each.state), bool(each.follows)))
    return Diagnosis(_agreed(ordered), unread(log))


def _agreed(findings: Sequence[Finding]) -> list[Finding]:
    """Of findings that ask for a larger and for a smaller learning rate the first keeps its change; others wait."""
    first = next((each for each in findings if each.remedy in remedies.RATE), None)
    if first is None:
        return list(findings)
    way = remedies.RATE[first.remedy]
    wait = f"none yet: repair {first.rule} first, then look again"
    return [replace(each, change=wait, expect="") if remedies.RATE.get(each.remedy, way) != way else each
            for each in findings]


def unread(log: Log) -> str:
    """Why the log is too little to judge a run by: no reward, or too few steps; empty where it is enough."""
    series = log.series(schema.REWARD_MEAN)
    count = len(series.finite) if series else 0
    if count >= THIRDS:
        told = judge(RULES["no gain"], log)
        return f"{told.sentence[0].lower()}{told.sentence[1:]}" if told.state == "unknown" else ""
    # Without a reward, columns that no rule knows matter too: the reward may be one of them.
    names = (not series and log.seen) or sorted({name for row in log.rows for name in row.values})
    seen = f"; columns seen: {', '.join(names[:12])}{' …' if len(names) > 12 else ''}"
    what = f"{series.name} has {count} readings" if series and count else f"the {log.trainer.gain} was not read"
    return f"{what}, at least {THIRDS} are needed{seen}"


def _root(effect: Finding, found: Mapping[str, Finding]) -> tuple[str, ...]:
    """The last rule on the chain of causes; () for a finding that is fine or has no cause."""
    cause: tuple[str, ...] = ()
    seen = {effect.rule}
    while effect.state != "fine":
        step = next((name for name in effect.follows if name not in seen and found[name].bad
                     and _not_later(found[name], effect)), None)
        if step is None:
            break
        cause, effect = (step,), found[step]
        seen.add(step)
    return cause


def _not_later(cause: Finding, effect: Finding) -> bool:
    """Whether the cause was there when the effect began, as far as is known."""
    return cause.onset is None or effect.onset is None or cause.onset <= effect.onset + LATER
