"""Untrusted JSON, by lines or as one document, with limits on length and depth."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError

MAX_LINE = 64 * 2**20
"""Longest line accepted, in bytes; a completion of a million tokens fits."""
MAX_DEPTH = 100
"""Deepest nesting. Python's recursion limit is 1000, and code that walks a value needs some of it."""


def numbered_lines(path: str | Path, max_line: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    """(number, text) of each line that is not blank. Errors name the line."""
    return ((number, text) for number, _, text in placed_lines(path, max_line))


def placed_lines(path: str | Path, max_line: int = MAX_LINE, before: int = 0,
                 start: int = 0) -> Iterator[tuple[int, int, str]]:
    """(number, end, text) of each line that is not blank, from byte `start`, which is after line `before`."""
    number, end = before, start
    try:
        with Path(path).open("rb") as lines:
            if start:
                lines.seek(start)
            while line := lines.readline(max_line + 1):
                number += 1
                end += len(line)
                if len(line) > max_line:
                    raise CreditscopeError(f"{path}, line {number}: the line is longer than {max_line:,} bytes; "
                                           f"write one object per line, ended by a newline")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise CreditscopeError(f"{path}, line {number}: not UTF-8 text: byte {line[error.start]:#04x} at "
                                           f"position {error.start}; save the file as UTF-8") from None
                if text.strip():
                    yield number, end, text
    except FileNotFoundError:
        raise CreditscopeError(f"no such file: {path}") from None
    except CreditscopeError:
        raise
    except OSError as error:
        raise CreditscopeError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have, such as one with a NUL
        raise CreditscopeError(f"cannot read {str(path)!r}: {error}") from None
    if number == 0:
        raise CreditscopeError(f"{path} is empty; expected one JSON object per line")


def whole_lines(path: Path, max_line: int = MAX_LINE) -> Iterator[bytes]:
    """The lines that end in a newline, without it; the last may be incomplete. Raises OSError."""
    with path.open("rb") as lines:
        for number in itertools.count(1):
            line = lines.readline(max_line + 1)
            if len(line) > max_line:
                raise CreditscopeError(f"{path}, line {number}: the line is longer than {max_line:,} bytes")
            if not line.endswith(b"\n"):
                return
            yield line[:-1]


def read_whole(path: Path, most: int = MAX_LINE, repair: str = "is it the one you meant?") -> bytes:
    """The bytes of a file of at most `most`. Raises OSError."""
    with path.open("rb") as data:
        held = data.read(most + 1)
    if len(held) > most:
        raise CreditscopeError(f"{path} is larger than the {most:,} bytes that are read of such a file; {repair}")
    return held


class Repeated(ValueError):
    """A name twice in one object: Python keeps the last, other readers the first."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Repeated(f"{twice[:60]!r} stands twice in one object; keep one of the two")
    return found


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """A JSON value of at most MAX_DEPTH levels. Raises ValueError.

    >>> parse_json("[1, {}]")
    [1, {}]
    >>> parse_json("[" * 101 + "]" * 101)
    Traceback (most recent call last):
    ValueError: nested too deeply: more than 100 levels
    >>> parse_json('{"reward": 0, "reward": 1}')
    Traceback (most recent call last):
    creditscope.files.jsonlines.Repeated: 'reward' stands twice in one object; keep one of the two
    """
    try:
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError(f"nested too deeply: more than {MAX_DEPTH} levels") from None
    opens = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opens)) > MAX_DEPTH:  # type: ignore[arg-type]
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [inner for holder in level if isinstance(holder, dict | list)
                     for inner in (holder.values() if isinstance(holder, dict) else holder)
                     if isinstance(inner, dict | list)]
        if level:
            raise ValueError(f"nested too deeply: more than {MAX_DEPTH} levels")
    return value


def fault(error: ValueError) -> str:
    """What `parse_json` found wrong in a line: the column alone, since json counts lines from the line's own start.

    >>> try: parse_json('{"a": }')
    ... except ValueError as error: fault(error)
    'Expecting value at column 7'
    """
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
    return str(error)


def encodable(text: str) -> bool:
    """False for a text with a lone surrogate, which is valid in JSON but not in UTF-8 or for tokenizers.

    >>> encodable("½"), encodable("\\ud800")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
