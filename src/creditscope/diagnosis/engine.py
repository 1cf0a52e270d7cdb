"""Every rule over one log: the findings, most severe first, and which of them is the cause of which. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from creditscope.diagnosis.finding import STATES, Finding
from creditscope.diagnosis.log import Log
from creditscope.diagnosis.rules import RULES


def diagnose(log: Log) -> list[Finding]:
    """Every rule's finding, most severe first; of equals, what follows from no other comes first."""
    found: dict[str, Finding] = {}
    for name, rule in RULES.items():
        log.settings.assumed.clear()
        says = rule(log)
        assumes = dict(log.settings.assumed) if says.state != "unknown" else {}
        found[name] = replace(says, rule=name, assumes=assumes or None)
    rooted = [replace(each, follows=_root(each, found)) for each in found.values()]
    return sorted(rooted, key=lambda finding: (STATES.index(finding.state), bool(finding.follows)))


def root(findings: Sequence[Finding]) -> Finding | None:
    """What to mend first: the cause behind the most severe finding; None where nothing is broken or to watch."""
    worst = findings[0]
    return {each.rule: each for each in findings}[worst.follows or worst.rule] if worst.bad else None


def _root(effect: Finding, found: Mapping[str, Finding]) -> str:
    """The first cause: the chain of `follows`, as far as what it names is broken or to watch. What is fine has none."""
    cause = ""
    for _ in found:  # no chain is longer: were rules to name each other in a circle, this would end all the same
        if effect.state == "fine" or not effect.follows or not found[effect.follows].bad:
            break
        cause, effect = effect.follows, found[effect.follows]
    return cause
