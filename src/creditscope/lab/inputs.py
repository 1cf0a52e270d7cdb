"""The files that a run learns from besides its settings, by SHA-256: a resumed run must go on with the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.sums import digests
from creditscope.policy.loading import TINY, Policy
from creditscope.runs.config import Config
from creditscope.tasks import Task

MODEL = ("*.safetensors", "config.json", "tokenizer.json")
"""What decides the numbers of a model's folder; notes beside it may change."""

Inputs = dict[str, dict[str, str]]
"""Setting -> file -> SHA-256."""


def read_inputs(config: Config, policy: Policy, task: Task) -> Inputs:
    """The sums of the pairs, the task's files, the reward model, and the model where a checkpoint lacks its weights: as
    a frozen reference, or under adapters. A model of the hub is known by its commit."""
    found: Inputs = {}
    if task.files:
        found["task"] = {name: digest for file in task.files for name, digest in digests(file).items()}
    if config.pairs is not None:
        found["pairs"] = digests(Path(config.pairs))
    if config.learned is not None:
        found["reward"] = digests(Path(config.learned), MODEL)
    if config.needs_reference or config.lora:
        commit = getattr(policy.model.config, "_commit_hash", None)
        found["model"] = digests(TINY if config.model == "tiny" else Path(config.model), MODEL) \
            or ({"commit": commit} if commit else {})
    return found


def require_same(told: Any, now: Inputs, out: Path) -> None:
    """Refuse to go on where a file is not as a checkpoint tells. One of an earlier version tells nothing."""
    for setting, files in now.items():
        before = told.get(setting) if isinstance(told, dict) else None
        if not isinstance(before, dict) or before == files:
            continue
        changed = next(name for name in sorted(before | files) if before.get(name) != files.get(name))
        what, repair = ("was not there when the run began", "take it away") if changed not in before else \
            ("is not as it was when the run began", "bring it back")
        raise CreditscopeError(f"cannot resume {out}: {changed} of its {setting} {what}; {repair}, or start a new run "
                               f"with another --out")
