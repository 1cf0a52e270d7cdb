"""One line of a log -> its row, as the trainers write them; HTML tables of a notebook."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

from creditscope.files.jsonlines import Repeated, parse_json

MAX_TAGS = 2**22
"""Tags and texts of an HTML output that are read."""
_VERL_STEP = re.compile(r"(?:^|[\s\x1b\])m])step:(\d{1,15}) - ")
_BAR_STEP = re.compile(r"\b(?:iteration|step)\s{0,20}:?\s{0,20}(\d{1,15})\b", re.IGNORECASE)
_TRL_ROW = re.compile(r"\{'[^{}]*\}")
_GLOBAL_STEP = re.compile(r"\bglobal[ _]step (\d{1,15})\b", re.IGNORECASE)
_PLAIN = re.compile(r"([A-Z][A-Za-z. ]{0,40}) (-?[\d.]+(?:e[+-]?\d+)?%?)(?: .*)?")
MAX_DEPTH, MAX_FLAT = 5, 5000
"""Levels, and names, of a nested row that are read."""
_TAG = re.compile(r"<(/?)(tr|th|td)\b[^<>]*>|<[^<>]*>?|([^<]+)", re.IGNORECASE)
_TITLES = {"Training Loss": "loss", "Validation Loss": "eval_loss", "Step": "step", "Epoch": "epoch"}
"""Columns of the table that transformers shows in a notebook -> their names in its log."""


def rows_of(line: str) -> Iterator[dict[str, Any]]:
    """The rows of a line: JSON, verl's or TRL's. Raises Repeated where a JSON row has a name twice."""
    if "{" not in line and "step:" not in line and " | " not in line:
        return
    for shape in (json_row, verl_row, bar_row):
        if entry := shape(line):
            yield entry
            return
    yield from trl_rows(line)


def json_row(line: str) -> dict[str, Any]:
    """A JSON object, also after a prefix; verl's file logger puts the metrics one level down, under `data`."""
    start = line.find('{"')
    if start < 0 or not line.rstrip().endswith("}"):
        return {}
    try:
        entry = parse_json(line[start:])
    except Repeated:
        if line[:start].strip():  # not a file of rows: one that prints JSON
            return {}
        raise
    except ValueError:
        return {}
    inner = entry.get("data")
    return {**inner, "step": entry.get("step")} if isinstance(inner, dict) else flat(entry)


def flat(entry: dict[str, Any]) -> dict[str, Any]:
    """A nested row with one name per number, as EasyR1's file logger nests what was logged.

    >>> flat({"step": 1, "critic": {"score": {"mean": 0.5}}})
    {'step': 1, 'critic/score/mean': 0.5}
    """
    for _ in range(MAX_DEPTH):
        if len(entry) > MAX_FLAT or not any(isinstance(value, dict) for value in entry.values()):
            break
        entry = {name: inner for key, value in entry.items()
                 for name, inner in ([(f"{key}/{below}", held) for below, held in value.items()]
                                     if isinstance(value, dict) else [(key, value)])}
    return entry


def verl_row(line: str) -> dict[str, Any]:
    """step:12 - actor/pg_loss:0.01 - critic/score/mean:np.float64(0.5), with any prefix of Ray's."""
    start = _VERL_STEP.search(line)
    if start is None:
        return {}
    pairs = (part.rpartition(":") for part in line[start.end():].split(" - "))
    return {"step": start[1]} | {key: value for key, colon, value in pairs if colon}


def bar_row(line: str) -> dict[str, Any]:
    """iteration 7/ 2174 | learning rate: 5E-05 | reward: 7.6E-01 | grad norm: 0.016 (Megatron, as ms-swift has it), or
    SUCCESS Step 28 | 73.77s | Reward 0.3887 | Truncation 3.1% (prime-rl)."""
    prime = "SUCCESS" in line and "Step " in line
    if line.count(" | ") < 2 or not (prime or "reward" in line.lower()):
        return {}
    parts = [part.strip(" |\r\n") for part in line.split(" | ")]
    entry = {key.strip().replace(" ", "_"): value.strip() for key, colon, value in map(_colon, parts) if colon}
    if prime:
        plain = [found for part in parts if (found := _PLAIN.fullmatch(part))]
        entry |= {found[1]: found[2] for found in plain if not found[2].endswith("%")}
    step = _BAR_STEP.search(line)
    return entry | ({"step": step[1]} if step else {})


def _colon(part: str) -> tuple[str, str, str]:
    return part.partition(":")


def trl_rows(line: str) -> Iterator[dict[str, Any]]:
    """{'loss': '0.01', 'reward': 0.5}, also after a progress bar, or after "Global step 12: " (OpenRLHF). Split, not
    evaluated."""
    step = _GLOBAL_STEP.search(line[:2000])
    for found in _TRL_ROW.finditer(line):
        pairs = (part.partition("': ") for part in found[0][1:-1].split(", "))
        if entry := {key.strip("'"): value.strip("'") for key, colon, value in pairs if colon}:
            yield {"step": step[1], **entry} if step else entry


def table_rows(html: str) -> Iterator[dict[str, Any]]:
    """Rows of the HTML tables of a notebook whose first row has the columns' names. Tags are split by one pattern,
    in time proportional to the text."""
    header: list[str] = []
    for cells, titles in _cells(html):
        if titles:
            header = [_TITLES.get(cell, cell) for cell in cells]
        elif header and len(cells) == len(header):
            yield dict(zip(header, cells, strict=True))


def _cells(html: str) -> Iterator[tuple[list[str], bool]]:
    """(texts, whether they are titles) of each row."""
    row: list[str] = []
    titles, cell = False, False
    for found in itertools.islice(_TAG.finditer(html), MAX_TAGS):
        close, tag, text = found[1], (found[2] or "").lower(), found[3]
        if tag == "tr":
            if row:
                yield row, titles
            row, titles, cell = [], False, False
        elif tag and not close:
            row.append("")
            titles, cell = tag == "th", True
        elif tag:
            cell = False
        elif text and cell:
            row[-1] = (row[-1] + unescape(text.strip()[:200]))[:200]
    if row:
        yield row, titles
