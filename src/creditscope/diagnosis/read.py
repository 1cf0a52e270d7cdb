"""Files of a trainer -> a Log; SHAPES lists them. They are untrusted: lines and rows are bounded, no pickle is read."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.trainers import KNOWN, OURS, SIGNS, TRAINERS, who_wrote
from creditscope.errors import CreditscopeError, command_line
from creditscope.files.jsonlines import Repeated, parse_json, read_whole
from creditscope.runs.record import Record

MAX_LINE = 2**20
"""Longest line that is read, in bytes. A row of 1000 metrics has 40,000."""
MAX_ROWS = 100_000
"""Rows that are kept, half from the start and half from the end: about 20 numbers each, a few hundred MB."""
MAX_DOCUMENT = 64 * 2**20
"""Longest JSON document (trainer_state.json), in bytes: 20,000 logged steps."""
MAX_SETTINGS = 2**18
"""Longest file of settings, in bytes; verl's whole configuration has 30,000."""
MAX_FOLDERS = 1000
"""Folders that are searched for runs: a sweep has hundreds, a home directory any number."""
LARGEST = 1e60
"""A larger number counts as infinite; the square of this one is still finite."""
NAMED = 8
"""Runs or logs named in the error that asks for one of them."""

STEPS = ("step", "_step", "global_step", "Step", "training/global_step")
SHAPES = """expected one of
  a folder   with run.json (creditscope) or trainer_state.json (TRL, also inside checkpoint-N)
  a log      lines such as {'loss': '0', 'reward': '0.5', 'frac_reward_zero_std': '0.25'} (TRL),
             step:12 - actor/pg_loss:0.01 - critic/score/mean:0.5 (verl), or JSON objects with those names
  a table    .csv with a column for each of those names, as wandb and others export it"""
_VERL_STEP = re.compile(r"(?:^|[\s\x1b\])m])step:(\d{1,15}) - ")


def read(path: str | Path, config: Path | None = None, sets: Sequence[str] = ()) -> Log:
    """A run's log with its settings: from files beside it or `config`, changed by `sets` ("name=value")."""
    path = Path(path)
    notes: list[str] = []
    file = _file_of(path)
    settings = _given(path, file, config, sets, notes)
    if file.name == "run.json":
        steps = Record.open(file.parent).steps() if (file.parent / "steps.jsonl").exists() else []
        if not steps:
            raise CreditscopeError(f"{path} has no step yet; wait for the run's first step, or look why it stopped")
        # A record keeps NaN apart, under `absent`.
        whole = (absent | step if isinstance(absent := step.get("absent"), dict) else step for step in steps)
        rows, source = _rows(enumerate(whole, start=1), notes), "steps.jsonl, line"
    elif file.suffix == ".json":
        state = _json(_small(file, MAX_DOCUMENT), file)
        history = state.get("log_history") if isinstance(state, dict) else None
        if not isinstance(history, list):
            raise CreditscopeError(f"{file} has no log_history, which TRL's trainer_state.json has; {SHAPES}")
        entries = [entry for entry in history if isinstance(entry, dict)]
        rows, source = _rows(enumerate(entries, start=1), notes), f"{file.name}, log_history entry"
    else:
        rows = _rows(_table(file, notes) if file.suffix == ".csv" else _lines(file, notes), notes)
        source = f"{file.name}, line"
    names = frozenset(name for row in rows for name in row.values)
    found = [trainer for trainer in TRAINERS if trainer.marks & names]
    if not found:
        seen = f"it has {', '.join(sorted(names))}, which other programs write too" if names else "no such line"
        raise CreditscopeError(f"{path} holds no log of TRL's GRPOTrainer, verl or creditscope: {seen}; {SHAPES}")
    trainer = max(found, key=lambda trainer: len(names & set(trainer.metrics.values())))
    trainer = who_wrote(settings) if trainer is OURS else trainer
    signs = dict(setting for name, setting in trainer.proofs.items() if name in names)
    given, proved = settings.get("loss_type"), signs.get("loss_type")
    if given and proved and given != proved:
        notes.append(f"the settings say loss_type={given}, but the log is of loss_type={proved}: are they of the same "
                     f"run?")
    named = "the settings" if config is None else config.name
    return Log(source, trainer, rows, LogSettings(settings, signs, trainer.defaults, named), notes)


def _file_of(path: Path) -> Path:
    if not path.exists():
        raise CreditscopeError(f"no such file or folder: {path}")
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".safetensors"):
        raise CreditscopeError(f"{path} is not a log, and pickles are never loaded; {SHAPES}")
    if path.is_file():
        return path
    if not path.is_dir():
        raise CreditscopeError(f"{path} is neither a file nor a folder; {SHAPES}")
    checkpoints = sorted(path.glob("checkpoint-*/trainer_state.json"), key=_number)
    for file in (path / "run.json", path / "trainer_state.json", *checkpoints[-1:]):
        if file.exists():
            return file
    runs = _runs_below(path)
    logs = sorted(file for suffix in ("jsonl", "log", "txt", "csv", "out") for file in path.glob(f"*.{suffix}"))
    if len(logs) == 1 and not runs:
        return logs[0]
    if found := runs or logs:
        names = ", ".join(f"{each.relative_to(path)}" for each in found[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        what = ("run" if runs else "log") + ("s" if len(found) > 1 else "")
        raise CreditscopeError(f"{path} holds {len(found)} {what}: {names}{more}; name one, as in "
                               f"{command_line('doctor', found[0])}")
    raise CreditscopeError(f"{path} holds neither a run nor a log; {SHAPES}")


def _runs_below(path: Path) -> list[Path]:
    """The runs of creditscope and TRL in the folders below; a checkpoint counts as its run."""
    found = set()
    for name, inner, files in itertools.islice(os.walk(path), MAX_FOLDERS):
        inner.sort()
        if "run.json" in files or "trainer_state.json" in files:
            folder = Path(name)
            found.add(folder.parent if folder.name.startswith("checkpoint-") else folder)
            inner.clear()
    return sorted(found)


def _number(file: Path) -> int:
    """N of checkpoint-N."""
    digits = file.parent.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() and len(digits) < 16 else -1


def _rows(entries: Iterable[tuple[int, Mapping[str, Any]]], notes: list[str]) -> list[LogRow]:
    """The known metrics of the entries that have one; of more than MAX_ROWS the first and the last half."""
    first: list[LogRow] = []
    last: deque[LogRow] = deque(maxlen=MAX_ROWS // 2)
    left_out = 0
    for place, entry in entries:
        values = {name: number for key, value in entry.items()
                  if (name := _name(key)) in KNOWN and (number := _float(value)) is not None}
        if values.keys() - SIGNS:
            step = next((_float(entry[key]) for key in STEPS if key in entry), None)
            left_out += len(last) == last.maxlen
            (first if len(first) < MAX_ROWS - MAX_ROWS // 2 else last).append(
                LogRow(place, int(step) if step is not None and abs(step) < 1e15 else None, values))
    if left_out:
        notes.append(f"{left_out:,} rows in the middle were left out: the first and the last {MAX_ROWS // 2:,} were "
                     f"read")
    return [*first, *last]


def _name(key: object) -> str:
    """A metric's own name: trackers put the run's name and `train/` before it.

    >>> _name("my run - train/reward_std"), _name("actor/pg_loss")
    ('reward_std', 'actor/pg_loss')
    """
    return str(key)[-200:].rpartition(" - ")[2].removeprefix("train/")


def _float(value: object) -> float | None:
    """A number, also where it was printed as text, NaN and infinity included; None for everything else."""
    if isinstance(value, str) and len(value) <= 40:
        value = value.strip().removesuffix(")").rpartition("(")[2]  # np.float64(0.5)
    elif not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST or math.isnan(number) else math.copysign(math.inf, number)


def _table(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of a csv file."""
    reader = csv.reader(line.replace("\0", "") for _, line in _bounded(file, notes))
    try:
        # Known columns alone, so that a header of any length does not slow down each row.
        at = {name: place for place, column in enumerate(next(reader, []))
              if (name := column if column in STEPS else _name(column)) in KNOWN or name in STEPS}
        for row in reader:
            yield reader.line_num, {name: row[place] for name, place in at.items() if place < len(row)}
    except csv.Error as error:
        raise CreditscopeError(f"{file}, line {reader.line_num}: not a table: {error}; save it as plain csv") from None


def _lines(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of each line in the shape of a trainer's row; other lines are skipped."""
    for number, line in _bounded(file, notes):
        for shape in (_json_line, _verl_line, _trl_line):
            try:
                entry = shape(line)
            except Repeated as error:
                raise CreditscopeError(f"{file}, line {number}: {error}") from None
            if entry:
                yield number, entry
                break


def _json_line(line: str) -> dict[str, Any]:
    """A JSON object; verl's file logger puts the metrics one level down, under `data`."""
    if not line.lstrip().startswith('{"'):
        return {}
    try:
        entry = parse_json(line)
    except Repeated:
        raise
    except ValueError:
        return {}
    inner = entry.get("data")
    return {**inner, "step": entry.get("step")} if isinstance(inner, dict) else entry


def _verl_line(line: str) -> dict[str, Any]:
    """step:12 - actor/pg_loss:0.01 - critic/score/mean:np.float64(0.5), with any prefix of Ray's."""
    start = _VERL_STEP.search(line)
    if start is None:
        return {}
    pairs = (part.rpartition(":") for part in line[start.end():].split(" - "))
    return {"step": start[1]} | {key: value for key, colon, value in pairs if colon}


def _trl_line(line: str) -> dict[str, Any]:
    """{'loss': '0.01', 'reward': 0.5}, also after a progress bar. Split, not evaluated."""
    start, end = line.find("{'"), line.rfind("}")
    if start < 0 or end < start:
        return {}
    pairs = (part.partition("': ") for part in line[start + 1:end].split(", "))
    return {key.strip("'"): value.strip("'") for key, colon, value in pairs if colon}


def _bounded(file: Path, notes: list[str]) -> Iterator[tuple[int, str]]:
    """(number, text) of each line. Too long ones are skipped, and a last one without newline or closing brace: half a
    number is a wrong number."""
    number = passed = 0
    try:
        with file.open("rb") as lines:
            while line := lines.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE and not line.endswith(b"\n"):
                    passed += 1
                    while (line := lines.readline(MAX_LINE)) and not line.endswith(b"\n"):
                        pass
                    continue
                if not line.endswith((b"\n", b"}")):
                    notes.append(f"line {number}, the last, has no end and was left out")
                    continue
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace")
    except OSError as error:
        raise CreditscopeError(f"cannot read {file}: {error.strerror}") from None
    if passed:
        notes.append(f"{passed} lines longer than {MAX_LINE:,} bytes were passed over")


def _given(path: Path, file: Path, config: Path | None, sets: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Settings from the record, from `config`, or from a file in the run's folder; then --set."""
    given: dict[str, Any] = {}
    if config is not None:
        given = dict(_settings_file(config))
    elif file.name == "run.json":
        given = dict(Record.open(file.parent).config)
    elif path.is_dir():
        names = ("training_args.json", ".hydra/config.yaml", "config.yaml")
        beside = [at / name for at in (file.parent, path) for name in names if (at / name).exists()]
        if beside:
            given = dict(_settings_file(beside[0]))
            notes.append(f"settings from {beside[0].name}")
        elif any((at / "training_args.bin").exists() for at in (file.parent, path)):
            notes.append("training_args.bin is a pickle, which can run code, so it is not opened; give --config FILE "
                         "or --set NAME=VALUE")
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CreditscopeError(f"--set {text!r} is not NAME=VALUE; for example --set loss_type=grpo")
        used = sorted({name for trainer in TRAINERS for name in (*trainer.defaults, *trainer.paths.values())})
        if name not in used:
            raise CreditscopeError(f"--set {name}: no rule reads this setting. Those that are read: {', '.join(used)}")
        given[name] = _value(value)
    return given


def _settings_file(file: Path) -> Mapping[str, Any]:
    """A mapping from JSON or YAML; wandb's config.yaml wraps each entry as {value: …}."""
    text = _small(file, MAX_SETTINGS)
    found = _json(text, file) if file.suffix == ".json" else _yaml(text, file)
    if not isinstance(found, dict):
        raise CreditscopeError(f"{file} holds no settings; expected NAME: VALUE, as JSON or YAML")
    return {key: value["value"] if isinstance(value, dict) and "value" in value else value
            for key, value in found.items()}


def _yaml(text: str, file: Path) -> Any:
    """YAML without tags (they call code), aliases (they grow exponentially) or deep nesting (it takes too long)."""
    import yaml  # type: ignore[import-untyped]

    opens = (yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken, yaml.BlockSequenceStartToken,
             yaml.BlockMappingStartToken)
    closes = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
    depth, fault = 0, ""
    try:
        for token in yaml.scan(text):
            depth += isinstance(token, opens) - isinstance(token, closes)
            if isinstance(token, yaml.AliasToken | yaml.TagToken) or depth > 50:
                fault = "uses aliases (*name) or tags (!name), or is nested too deep"
                break
            if getattr(token, "plain", False) and token.value.count(":") > 20:  # to YAML 1.1 a number in base 60
                fault = "holds a value of many parts between colons, without quotes"
                break
        found = None if fault else yaml.safe_load(text)
        json.dumps(found, default=str)  # a hexadecimal number may be longer than Python will write out
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        fault = f"is not YAML: {' '.join(str(error).split())[:200]}"
    if fault:
        raise CreditscopeError(f"{file} {fault}; write plain names and values")
    return found


def _json(text: str, file: Path) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise CreditscopeError(f"{file} is not JSON: {str(error)[:200]}; if the run was killed while writing it, take "
                               f"an older checkpoint") from None


def _small(file: Path, most: int) -> str:
    try:
        return read_whole(file, most, "give a log with one row per line").decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise CreditscopeError(f"cannot read {file}: {error.strerror}") from None


def _value(text: str) -> Any:
    """A truth value, null or number; anything else is a word.

    >>> _value("null"), _value("True"), _value("1e-6"), _value("dapo")
    (None, True, 1e-06, 'dapo')
    """
    words: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words and text != "none":
        return words[text.lower()]
    number = _float(text)
    return text if number is None or "(" in text else number
