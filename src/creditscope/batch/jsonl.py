"""Rollouts as JSON lines: one rollout a line, streamed, exact both ways, with every fault named by its line.

    {"prompt": "...", "text": "...", "group": 3, "reward": 1.0, "tokens": [5, 9], "logp": [-0.1, -0.7]}

Required: tokens, logp, reward, group. Optional: prompt, text, pieces, ref_logp, entropy, collision, step, step_reward,
step_state, and mask (absent means that the policy chose every token). Unknown fields are an error: a misspelt name must
not be dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from creditscope.batch.rollouts import RANGES, Range, Rollouts
from creditscope.errors import CreditscopeError, unknown
from creditscope.files.jsonlines import MAX_LINE, numbered_lines, parse_json
from creditscope.files.writing import new_file

_INT64 = range(-(2**63), 2**63)
_PER_TOKEN = {"logp": float, "mask": bool, "ref_logp": float, "entropy": float, "collision": float, "step": int,
              "pieces": str}
_REQUIRED = ("tokens", "logp", "reward", "group")
_PER_ROW = {"reward": float, "group": int}
_PER_STEP = {"step_reward": float, "step_state": int}
_FIELDS = ("prompt", "text", "group", "reward", "tokens", "mask", "logp", "ref_logp", "entropy", "collision", "step",
           "step_reward", "step_state", "pieces")

CELLS = 2**27
"""Rows × columns that a batch may have once every answer is padded to the longest."""

Row = dict[str, Any]
Bad = Callable[[str], CreditscopeError]
"""Makes an error of a fault: it knows the file and the line."""


def read_rows(path: str | Path, max_line: int = MAX_LINE) -> Iterator[Row]:
    """Checked rows of a file, one at a time; memory is bounded by the longest line allowed."""
    for number, line in numbered_lines(path, max_line):
        yield _parse(line, partial(_bad, path, number))


def read_jsonl(path: str | Path, max_line: int = MAX_LINE, dtype: torch.dtype = torch.float32) -> Rollouts:
    """A whole file as one batch."""
    return collate(read_rows(path, max_line), dtype)


def collate(rows: Iterable[Row], dtype: torch.dtype = torch.float32, where: Sequence[str] = ()) -> Rollouts:
    """One right-padded batch from checked rows. A field is kept when all rows have it; some but not all is an error.

    `where` names each row in messages.
    """
    rows = list(rows)
    if not rows:
        raise CreditscopeError("no rollouts to collate; the input had only blank lines")
    present = {name: sum(name in row for row in rows) for name in _FIELDS}
    for name, count in present.items():
        if count not in (0, len(rows)) and name != "mask":
            first = next(i for i, row in enumerate(rows) if name not in row)
            raise CreditscopeError(f"field {name!r} is in {count} of {len(rows)} rollouts (missing first in rollout "
                                   f"{first}); give it in all or in none")
    for name in ("tokens", "step_reward"):
        at = max(range(len(rows)), key=lambda i: len(rows[i].get(name, ())))
        if (cells := len(rows) * (width := len(rows[at].get(name, ())))) > CELLS:
            raise CreditscopeError(f"{where[at] if where else f'rollout {at}'}: an answer of {width:,} {name} in a "
                                   f"batch of {len(rows):,} rows: padded to it they take {cells:,} cells, over "
                                   f"{CELLS:,}; drop that row, or give a smaller --rows")
    width = max(len(row["tokens"]) for row in rows)

    def matrix(name: str, kind: torch.dtype, pad: float, fallback: Callable[[Row], list[Any]] | None = None) -> Any:
        if not present[name] and fallback is None:
            return None
        out = torch.full((len(rows), width), pad, dtype=kind)
        for i, row in enumerate(rows):
            values = row[name] if name in row else fallback(row) if fallback else []
            out[i, : len(values)] = torch.tensor(values, dtype=kind)
        return out

    def steps(name: str, kind: torch.dtype, pad: float) -> Any:
        if not present[name]:
            return None
        out = torch.full((len(rows), max(len(row[name]) for row in rows)), pad, dtype=kind)
        for i, row in enumerate(rows):
            out[i, : len(row[name])] = torch.tensor(row[name], dtype=kind)
        return out

    return Rollouts(
        tokens=matrix("tokens", torch.int64, 0),
        mask=matrix("mask", torch.bool, False, lambda row: [True] * len(row["tokens"])),
        logp=matrix("logp", dtype, 0.0),
        reward=torch.tensor([row["reward"] for row in rows], dtype=dtype),
        group=torch.tensor([row["group"] for row in rows], dtype=torch.int64),
        ref_logp=matrix("ref_logp", dtype, 0.0),
        entropy=matrix("entropy", dtype, 0.0),
        collision=matrix("collision", dtype, 0.0),
        step=matrix("step", torch.int64, -1),
        step_reward=steps("step_reward", dtype, 0.0),
        step_state=steps("step_state", torch.int64, -1),
        **{name: [row[name] for row in rows] for name in ("prompt", "text", "pieces") if present[name]},
    )


def write_jsonl(path: str | Path, batches: Iterable[Rollouts] | Rollouts) -> int:
    """Write batches to a file, streaming, and return the number of rollouts. The file appears whole or not at all."""
    path = Path(path)
    count = 0
    try:
        with new_file(path) as out:
            for batch in [batches] if isinstance(batches, Rollouts) else batches:
                for row in to_rows(batch):
                    out.write(json.dumps(row, allow_nan=False).encode() + b"\n")
                    count += 1
    except OSError as error:
        raise CreditscopeError(f"cannot write {path}: {error.strerror}") from None
    return count


def to_rows(rollouts: Rollouts) -> Iterator[Row]:
    """One plain dictionary a rollout, without padding. float32 values survive the trip through JSON exactly."""
    for i, extent in enumerate(rollouts.extents.tolist()):
        row: Row = {name: getattr(rollouts, name)[i] for name in ("prompt", "text") if getattr(rollouts, name)}
        row |= {"group": int(rollouts.group[i]), "reward": float(rollouts.reward[i])}
        row["tokens"] = rollouts.tokens[i, :extent].tolist()
        if not bool(rollouts.mask[i, :extent].all()):
            row["mask"] = rollouts.mask[i, :extent].tolist()
        for name in ("logp", "ref_logp", "entropy", "collision", "step"):
            value = getattr(rollouts, name)
            if value is not None:
                row[name] = value[i, :extent].tolist()
        if rollouts.step_reward is not None:
            # Columns past a row's last step are padding unless something stands in them.
            values = rollouts.step_reward[i].tolist()
            states = values if rollouts.step_state is None else rollouts.step_state[i].add(1).tolist()
            used = max([max(row.get("step", []), default=-1) + 1,
                        *(s + 1 for s, found in enumerate(zip(values, states, strict=True)) if any(found))])
            row["step_reward"] = values[:used]
            if rollouts.step_state is not None:
                row["step_state"] = rollouts.step_state[i, :used].tolist()
        if rollouts.pieces:
            row["pieces"] = [*rollouts.pieces[i], *[""] * extent][:extent]
        yield row


# -- one line ---------------------------------------------------------------------------------------------------


def _parse(line: str, bad: Bad) -> Row:
    row = read_object(line, bad)
    for name in row:
        if name not in _FIELDS:
            raise bad(str(unknown("field", name, _FIELDS)))
    for name in _REQUIRED:
        if name not in row:
            raise bad(f"field {name!r} is missing; a rollout needs {', '.join(_REQUIRED)}")
    return check_fields(row, bad)


def read_object(line: str, bad: Bad) -> Row:
    """The JSON object of a line, whatever its fields are."""
    try:
        row = parse_json(line, parse_constant=_no_constant)
    except ValueError as error:
        raise bad(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise bad(f"expected a JSON object, got {type(row).__name__}")
    return row


def check_fields(row: Row, bad: Bad) -> Row:
    """The row with each of our fields that it has checked for kind, size and length."""
    for name in ("prompt", "text"):
        if name in row and not isinstance(row[name], str):
            raise bad(f"{name!r} must be text, got {show(row[name])}")
    for name, kind in _PER_ROW.items():
        if name in row:
            row[name] = check_scalar(name, row[name], kind, bad)
    if "tokens" in row:
        row["tokens"] = check_list("tokens", row["tokens"], int, bad)
    for name, kind in _PER_TOKEN.items():
        if name in row:
            row[name] = check_list(name, row[name], kind, bad)
            if "tokens" not in row:
                raise bad(f"{name!r} has one entry a token, but there are no 'tokens'")
            if len(row[name]) != len(row["tokens"]):
                raise bad(f"{name!r} has {len(row[name])} entries for {len(row['tokens'])} tokens")
    for name, bounds in RANGES.items():
        if name in row:
            _check_range(name, row[name], bounds, row.get("mask"), bad)
    for name, kind in _PER_STEP.items():
        if name in row:
            row[name] = check_list(name, row[name], kind, bad)
    if "step_reward" in row and max(row.get("step", []), default=-1) >= len(row["step_reward"]):
        raise bad(f"'step' names step {max(row['step'])}, but 'step_reward' has {len(row['step_reward'])} entries; "
                  f"steps are counted from 0")
    if "step_state" in row and len(row["step_state"]) != len(row.get("step_reward", [])):
        raise bad(f"'step_state' has {len(row['step_state'])} entries for {len(row.get('step_reward', []))} steps")
    return row


def check_list(name: str, value: Any, kind: type, bad: Bad) -> list[Any]:
    """A list whose entries are all of one kind."""
    if not isinstance(value, list):
        raise bad(f"{name!r} must be a list of {kind.__name__}, got {show(value)}")
    if _all_plain(value, kind):
        return value
    return [check_scalar(f"{name}[{i}]", entry, kind, bad) for i, entry in enumerate(value)]


def _all_plain(value: list[Any], kind: type) -> bool:
    """True where nothing needs to be looked at one by one. Most lists are like that, and most of the time goes here."""
    if set(map(type, value)) != {kind}:
        return False
    if kind is int:
        return min(value) in _INT64 and max(value) in _INT64
    return kind is not float or all(map(math.isfinite, value))


def _check_range(name: str, values: list[float], bounds: Range, mask: list[bool] | None, bad: Bad) -> None:
    """Refuse what cannot be, on a token that the policy chose; what others wrote may have any number."""
    if not values or (min(values) > bounds.low and max(values) < bounds.high):
        return
    for i, value in enumerate(values):
        if not bounds.low < value < bounds.high and (mask is None or mask[i]):
            raise bad(f"{name}[{i}] is {value}, and {bounds.says}")


def check_scalar(name: str, value: Any, kind: type, bad: Bad) -> Any:
    """A finite number, an integer of 64 bits, a truth value or a text; an integer may stand for a float."""
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise bad(f"{name!r} does not fit a float: an integer of {len(str(value)):,} digits") from None
        if math.isfinite(value):
            return value
        raise bad(f"{name!r} must be finite, got {value}")
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if value in _INT64:
            return value
        raise bad(f"{name!r} must fit 64 bits, got {show(value)}")
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise bad(f"{name!r} must be {kind.__name__}, got {show(value)}")


def show(value: Any) -> str:
    """A short picture of a value of any size, for a message."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed; every number must be finite")


def _bad(path: str | Path, number: int, what: str) -> CreditscopeError:
    return CreditscopeError(f"{path}, line {number}: {what}")
