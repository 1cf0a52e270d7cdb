"""Which file of a folder is the run's log, and which runs are below a folder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from creditscope.diagnosis.readers.events import PREFIX
from creditscope.errors import CreditscopeError, command_line
from creditscope.runs.record import Record

MAX_FOLDERS = 1000
"""Folders that are searched for runs: a sweep has hundreds, a home directory any number."""
NAMED = 8
"""Runs or logs named in the error that asks for one of them."""
LOGS = (".jsonl", ".log", ".out", ".csv", ".tsv", ".ipynb")
"""Suffixes of logs. Files that end in .txt or .md are mostly something else: they count where they are alone."""
SHAPES = "\n".join((
    "expected one of",
    "  a folder   with run.json (creditscope), trainer_state.json (TRL, also inside checkpoint-N) or wandb's "
    "output.log",
    "  a log      lines such as {'loss': '0', 'reward': '0.5', 'frac_reward_zero_std': '0.25'} (TRL), "
    "step:12 - actor/pg_loss:0.01 - critic/score/mean:0.5 (verl), or JSON objects with those names, also in a notebook "
    "(.ipynb) or in one JSON array",
    "  a console  what OpenRLHF, SkyRL, AReaL, prime-rl, NeMo-RL or EasyR1 print, or their TensorBoard events",
    "  a table    .csv or .tsv with a column for each of those names, as wandb and others export it"))
"""What can be read, one line each: the command line wraps them to the terminal."""


def log_file(path: Path) -> Path:
    """The log at a path: the file itself, or the one that a folder holds."""
    if not path.exists():
        raise CreditscopeError(f"no such file or folder: {path}")
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".safetensors"):
        raise CreditscopeError(f"{path} is not a log, and pickles are never loaded; {SHAPES}")
    if path.is_file():
        return path
    if not path.is_dir():
        raise CreditscopeError(f"{path} is neither a file nor a folder; {SHAPES}")
    wandb = (path / inner / "output.log" for inner in ("files", ".", "latest-run/files", "wandb/latest-run/files"))
    for file in (path / "run.json", state_in(path)):
        if file is not None and file.exists():
            return file
    runs = runs_below(path, logs=False)
    logs = logs_in(path)
    for file in wandb:
        if file.exists() and not [log for log in logs if log.name != "output.log"]:
            return file
    if len(logs) == 1 and not runs:
        return logs[0]
    if found := runs or logs:
        names = ", ".join(f"{each.relative_to(path)}" for each in found[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        what = ("run" if runs else "log") + ("s" if len(found) > 1 else "")
        raise CreditscopeError(f"{path} holds {len(found)} {what}: {names}{more}; name one, as in "
                               f"{command_line('doctor', found[0])}")
    raise CreditscopeError(f"{path} holds neither a run nor a log; {SHAPES}")


def state_in(path: Path) -> Path | None:
    """TRL's trainer_state.json in a folder, or in its latest checkpoint."""
    checkpoints = sorted(path.glob("checkpoint-*/trainer_state.json"), key=_number)
    return next((file for file in (path / "trainer_state.json", *checkpoints[-1:]) if file.exists()), None)


def runs_below(path: Path, logs: bool = True) -> list[Path]:
    """The runs below a folder: folders of creditscope, TRL and wandb; a checkpoint counts as its run, and so does the
    record that ScopeCallback wrote into the folder of TRL's log.

    With `logs` also the files that end as logs do, in folders that hold no such run.
    """
    found: set[Path] = set()
    files_found: set[Path] = set()
    for name, inner, files in itertools.islice(os.walk(path), MAX_FOLDERS):
        inner.sort()
        folder = Path(name)
        if "run.json" in files or "trainer_state.json" in files:
            found.add(folder.parent if folder.name.startswith("checkpoint-") else folder)
            inner.clear()
        elif folder.name == "files" and "output.log" in files:
            found.add(folder.parent)
            inner.clear()
        elif logs:
            files_found.update(folder / file for file in files if file.endswith(LOGS))
    homes = {file.parent for file in files_found} | found
    for home in sorted(homes, key=lambda folder: -len(folder.parts)):  # the nearest has its record
        if (record := callback_record(home)) in found and record is not None:
            found = (found - {record}) | {home}
    inside = [file for file in files_found if file.parent not in found and not found.intersection(file.parents)]
    return sorted([*found, *inside])


def callback_record(home: Path) -> Path | None:
    """The record that ScopeCallback wrote below the folder of TRL's log, where there is just one; None otherwise."""
    found = [place.parent for place in itertools.islice(_records(home), 2)]
    if len(found) != 1 or found[0] == home:
        return None
    try:
        return found[0] if isinstance(Record.open(found[0]).config.get("trl"), Mapping) else None
    except CreditscopeError:
        return None


def record_in(path: Path) -> Path | None:
    """The folder of a record of creditscope in a folder, at most two levels down."""
    return next((file.parent for file in itertools.islice(_records(path), 1)), None)


def _records(path: Path) -> Iterator[Path]:
    return itertools.chain.from_iterable(path.glob(pattern) for pattern in ("run.json", "*/run.json", "*/*/run.json"))


def logs_in(path: Path) -> list[Path]:
    """The logs of a folder; where there is none, its texts, then the JSON files named after metrics or a log."""
    files = sorted(file for file in itertools.islice(path.iterdir(), 10 * MAX_FOLDERS) if file.is_file())
    for suffixes in ((*LOGS, ".txt"), (".md",)):
        if found := [file for file in files if file.suffix in suffixes]:
            return found
        if found := [file for file in files if file.name.startswith(PREFIX)]:
            return found
    return [file for file in files if file.suffix == ".json"
            and any(word in file.stem for word in ("metrics", "history", "log"))]


def _number(file: Path) -> int:
    """N of checkpoint-N."""
    digits = file.parent.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() and len(digits) < 16 else -1
