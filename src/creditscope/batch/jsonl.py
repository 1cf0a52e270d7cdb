"""Rollouts from JSON lines: one rollout per line, every fault named by its line.

    {"prompt": "...", "text": "...", "group": 3, "reward": 1.0, "tokens": [5, 9], "logp": [-0.1, -0.7]}

Required: tokens, logp, reward, group. Optional: prompt, text, pieces, ref_logp, entropy, collision, step, step_reward,
step_state, and mask (absent: the policy chose every token). Unknown fields are an error, so that no misspelt name is
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.rollouts import COLUMNS, Range, Rollouts
from creditscope.errors import CreditscopeError, unknown
from creditscope.files.jsonlines import fault, numbered_lines, parse_json

_INT64 = range(-(2**63), 2**63)
_TYPES = {"int64": int, "float": float, "bool": bool}
_REQUIRED = ("tokens", "logp", "reward", "group")
_FIELDS = (*COLUMNS, "prompt", "text", "pieces")

CELLS = 2**27
"""Rows × columns that a batch may have once every answer is padded to the longest."""

Row = dict[str, Any]
Bad = Callable[[str], CreditscopeError]
"""A fault -> an error with the file and the line."""


def read_rows(path: str | Path) -> Iterator[Row]:
    """Checked rows of a file, one at a time; memory is bounded by the longest line allowed."""
    for number, line in numbered_lines(path):
        def bad(what: str, place: str = f"{path}, line {number}") -> CreditscopeError:
            return CreditscopeError(f"{place}: {what}")

        row = read_object(line, bad)
        for name in row:
            if name not in _FIELDS:
                raise bad(str(unknown("field", name, _FIELDS)))
        for name in _REQUIRED:
            if name not in row:
                raise bad(f"field {name!r} is missing; a rollout needs {', '.join(_REQUIRED)}")
        yield check_fields(row, bad)


def read_jsonl(path: str | Path, dtype: torch.dtype = torch.float32) -> Rollouts:
    """A whole file as one batch."""
    return collate(read_rows(path), dtype)


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

    def tensor(name: str) -> Tensor:
        kind, axis, _, pad, _ = COLUMNS[name]
        precision = dtype if kind == "float" else getattr(torch, kind)
        if axis == "row":
            return torch.tensor([row[name] for row in rows], dtype=precision)
        values = [row[name] if name in row else [True] * len(row["tokens"]) for row in rows]  # the mask may be absent
        out = torch.full((len(rows), max(map(len, values))), pad, dtype=precision)
        for i, found in enumerate(values):
            out[i, : len(found)] = torch.tensor(found, dtype=precision)
        return out

    found: dict[str, Any] = {name: tensor(name) for name in COLUMNS if present[name] or name == "mask"}
    found |= {name: [row[name] for row in rows] for name in ("prompt", "text", "pieces") if present[name]}
    return Rollouts(**found)


# -- one line ---------------------------------------------------------------------------------------------------


def read_object(line: str, bad: Bad) -> Row:
    """The JSON object of a line, whatever its fields are."""
    try:
        row = parse_json(line, parse_constant=_no_constant)
    except ValueError as error:
        raise bad(f"not valid JSON: {fault(error)}") from None
    if not isinstance(row, dict):
        raise bad(f"expected a JSON object, got {type(row).__name__}")
    return row


def check_fields(row: Row, bad: Bad) -> Row:
    """The row with each of our fields that it has checked for kind, size and length."""
    for name in ("prompt", "text"):
        if name in row and not isinstance(row[name], str):
            raise bad(f"{name!r} must be text, got {show(row[name])}")
    columns = {name: (_TYPES[column.kind], column.axis) for name, column in COLUMNS.items()}
    for name, (kind, axis) in (columns | {"pieces": (str, "token")}).items():
        if name not in row:
            continue
        check = check_scalar if axis == "row" else check_list
        row[name] = check(name, row[name], kind, bad)
        if axis == "token" and "tokens" not in row:
            raise bad(f"{name!r} has one entry per token, but there are no 'tokens'")
        if axis == "token" and len(row[name]) != len(row["tokens"]):
            raise bad(f"{name!r} has {len(row[name])} entries for {len(row['tokens'])} tokens")
    for name, column in COLUMNS.items():
        if name in row and column.range is not None:
            _check_range(name, row[name], column.range, row.get("mask"), bad)
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
    """True where no entry needs a check of its own: the fast path for most lists."""
    if set(map(type, value)) != {kind}:
        return False
    if kind is int:
        return min(value) in _INT64 and max(value) in _INT64
    return kind is not float or all(map(math.isfinite, value))


def _check_range(name: str, values: list[float], bounds: Range, mask: list[bool] | None, bad: Bad) -> None:
    """Refuse a number outside the range on a token that the policy chose."""
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
    """A short text for a value of any size."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed; every number must be finite")
