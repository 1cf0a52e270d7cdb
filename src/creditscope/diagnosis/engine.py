"""All rules on one log: the findings, most severe first, each with its first cause. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from creditscope.diagnosis.finding import STATES, Finding, judge
from creditscope.diagnosis.log import Log
from creditscope.diagnosis.rules import RULES


def diagnose(log: Log) -> list[Finding]:
    """Every rule's finding, most severe first; among equals those without a cause come first."""
    found: dict[str, Finding] = {}
    for name, rule in RULES.items():
        log.settings.assumed.clear()
        told = judge(rule, log)
        assumes = dict(log.settings.assumed) if told.state != "unknown" else {}
        found[name] = replace(told, rule=name, assumes=assumes or None)
    rooted = [replace(each, follows=_root(each, found)) for each in found.values()]
    return sorted(rooted, key=lambda finding: (STATES.index(finding.state), bool(finding.follows)))


def root(findings: Sequence[Finding]) -> Finding | None:
    """The first cause of the most severe finding; None where none is broken or watch."""
    worst = findings[0]
    return {each.rule: each for each in findings}[worst.follows or worst.rule] if worst.bad else None


def _root(effect: Finding, found: Mapping[str, Finding]) -> str:
    """The last rule on the chain of `follows` whose finding is broken or watch; "" for a finding that is fine."""
    cause = ""
    for _ in found:  # no chain is longer; rules that name each other in a circle end here too
        if effect.state == "fine" or not effect.follows or not found[effect.follows].bad:
            break
        cause, effect = effect.follows, found[effect.follows]
    return cause
