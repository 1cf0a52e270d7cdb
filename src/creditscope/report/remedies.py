"""How to record what a record lacks: flags of `creditscope lab train`, or arguments of TRL's ScopeCallback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from creditscope.diagnosis.trainers import is_script


class Recording(NamedTuple):
    train: str
    script: str = ""
    """Empty where `ScopeCallback` cannot read it."""


COMMANDS = {
    "rollouts": Recording("creditscope lab train --keep-every 10", "ScopeCallback(trainer, every=10)"),
    "geometry": Recording("creditscope lab train --scope full --every 5", "ScopeCallback(trainer, every=5, gram=True)"),
    "rank": Recording("creditscope lab train --scope light", "ScopeCallback(trainer, gram=True)"),
    "overshoot": Recording("creditscope lab train --probe light --inner-steps 4", "ScopeCallback(trainer, every=5)"),
    "after": Recording("creditscope lab train --probe light --probe-every 10 --keep-every 10",
                    "ScopeCallback(trainer, every=10)"),
    "also": Recording("creditscope lab train --scope light --every 10 --keep-every 10 --also step_reward"),
    "scale": Recording("creditscope lab train --probe light --inner-steps 4"),
    "sweep": Recording("creditscope lab train --probe full"),
    "accuracy": Recording("creditscope lab train --eval-problems 400"),
}
"""Part of a record -> the command that records it."""
CANNOT = "ScopeCallback does not read it"
WORDS = {
    "rank": Recording("train with --scope light", "give ScopeCallback gram=True"),
    "overshoot": Recording("train with --probe light", "no token had a bound when ScopeCallback looked"),
    "scale": Recording("train with --probe light", CANNOT),
    "matrices": Recording("train with --scope full", CANNOT),
    "readings": Recording("a smaller --every reads more often", "a smaller every= of ScopeCallback reads more often"),
    "probes": Recording("a smaller --probe-every reads more often",
                        "a smaller every= of ScopeCallback reads more often"),
}


def command(config: Mapping[str, Any], part: str) -> str:
    return COMMANDS[part].script if is_script(config) else COMMANDS[part].train


def words(config: Mapping[str, Any], part: str) -> str:
    return WORDS[part].script if is_script(config) else WORDS[part].train
