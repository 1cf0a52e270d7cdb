"""A run's settings: from the files beside its log, from a file that was named, and from NAME=VALUE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from creditscope.diagnosis.readers.printed import value_of
from creditscope.diagnosis.readers.text import json_of, small_text, yaml_of
from creditscope.diagnosis.trainers import READ
from creditscope.errors import CreditscopeError

MAX_SETTINGS = 2**18
"""Longest file of settings, in bytes; verl's whole configuration has 30,000."""
BESIDE = ("training_args.json", "args.json", ".hydra/config.yaml", "experiment_config.json",
          "configs/orchestrator.json", "config.yaml")
"""Files of settings in a run's folder: written by people for TRL, by ms-swift, by hydra for verl, by EasyR1, by
prime-rl, by wandb, AReaL and NeMo-RL."""
IN_PARTS = ("orchestrator", "trainer")
"""Files of prime-rl's `configs` that hold its settings, each of a part that has its name."""
WITH_SETTINGS = ("trainer_state.json", "output.log", "logging.jsonl")
"""Logs of TRL, wandb and ms-swift: all of BESIDE in their folder is of the same run."""
ANY_LOG = BESIDE[:5]
"""Files that only a trainer's run has; a config.yaml beside another log may be of something else."""


def settings_beside(path: Path, file: Path, notes: list[str]) -> dict[str, Any]:
    """The first file of BESIDE in the log's folder, in the parent of checkpoint-N, or in the folder that was named."""
    folders = [file.parent]
    if file.parent.name.startswith("checkpoint-"):
        folders.append(file.parent.parent)
    if path.is_dir():
        folders.append(path)
    names = BESIDE if path.is_dir() or file.name in WITH_SETTINGS else ANY_LOG
    for beside in (folder / name for folder in folders for name in names):
        if beside.is_file():
            try:
                given = dict(settings_file(beside))
            except CreditscopeError as error:
                notes.append(f"settings were not read: {error}")
                continue
            notes.append(f"settings from {beside.name}")
            return given
    if names is BESIDE and any((folder / "training_args.bin").exists() for folder in folders):
        notes.append("training_args.bin is a pickle, which can run code, so it is not opened; give --config FILE "
                     "or --set NAME=VALUE")
    return {}


def settings_set(sets: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of the settings that some rule reads."""
    given = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CreditscopeError(f"--set {text!r} is not NAME=VALUE; for example --set loss_type=grpo")
        used = sorted({name for trainer in READ for name in (*trainer.defaults, *trainer.paths.values())})
        if name not in used:
            raise CreditscopeError(f"--set {name}: no rule reads this setting. Those that are read: {', '.join(used)}")
        given[name] = value if value == "none" or "(" in value else value_of(value)
    return given


def settings_file(file: Path) -> Mapping[str, Any]:
    """A mapping from JSON or YAML; wandb's config.yaml wraps each entry as {value: …}."""
    if file.parent.name == "configs" and file.stem in IN_PARTS:
        return {part: json_of(small_text(inner, MAX_SETTINGS), inner) for part in IN_PARTS
                if (inner := file.with_stem(part)).is_file()}
    text = small_text(file, MAX_SETTINGS)
    found = json_of(text, file) if file.suffix == ".json" else yaml_of(text, f"{file}")
    if not isinstance(found, dict):
        raise CreditscopeError(f"{file} holds no settings; expected NAME: VALUE, as JSON or YAML")
    return {key: value["value"] if isinstance(value, dict) and "value" in value else value
            for key, value in found.items()}
