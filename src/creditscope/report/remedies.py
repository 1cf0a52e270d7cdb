"""How to record what a record lacks: flags of `creditscope train`, or arguments of TRL's ScopeCallback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from creditscope.diagnosis.trainers import is_script


class Remedy(NamedTuple):
    train: str
    script: str = ""
    """Empty where `ScopeCallback` cannot read it."""


COMMANDS = {
    "rollouts": Remedy("creditscope train --keep-every 10", "ScopeCallback(trainer, every=10)"),
    "geometry": Remedy("creditscope train --scope full --every 5", "ScopeCallback(trainer, every=5, gram=True)"),
    "rank": Remedy("creditscope train --scope light", "ScopeCallback(trainer, gram=True)"),
    "overshoot": Remedy("creditscope train --probe light --inner-steps 4", "ScopeCallback(trainer, every=5)"),
    "after": Remedy("creditscope train --probe light --probe-every 10 --keep-every 10",
                    "ScopeCallback(trainer, every=10)"),
    "also": Remedy("creditscope train --scope light --every 10 --keep-every 10 --also step_reward"),
    "scale": Remedy("creditscope train --probe light --inner-steps 4"),
    "sweep": Remedy("creditscope train --probe full"),
    "accuracy": Remedy("creditscope train --eval-problems 400"),
}
"""Part of a record -> the command that records it."""
CANNOT = "ScopeCallback does not read it"
WORDS = {
    "rank": Remedy("train with --scope light", "give ScopeCallback gram=True"),
    "overshoot": Remedy("train with --probe light", "no token had a bound when ScopeCallback looked"),
    "scale": Remedy("train with --probe light", CANNOT),
    "matrices": Remedy("train with --scope full", CANNOT),
    "readings": Remedy("a smaller --every reads more often", "a smaller every= of ScopeCallback reads more often"),
    "probes": Remedy("a smaller --probe-every reads more often", "a smaller every= of ScopeCallback reads more often"),
}


def command(config: Mapping[str, Any], part: str) -> str:
    return COMMANDS[part].script if is_script(config) else COMMANDS[part].train


def words(config: Mapping[str, Any], part: str) -> str:
    return WORDS[part].script if is_script(config) else WORDS[part].train
