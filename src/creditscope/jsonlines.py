"""Lines of a JSON-lines file, one at a time and never longer than allowed: a file is not to be trusted with memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from creditscope.errors import CreditscopeError

MAX_LINE = 64 * 2**20
"""Longest line accepted, in bytes. A completion of a million tokens fits; a file without newlines does not."""


def numbered_lines(path: str | Path, max_line: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    """(number, text) of each line that is not blank. Faults are errors that name the line."""
    for number, _, text in placed_lines(path, max_line):
        yield number, text


def placed_lines(path: str | Path, max_line: int = MAX_LINE, before: int = 0,
                 start: int = 0) -> Iterator[tuple[int, int, str]]:
    """(number, the byte after it, text) of each line that is not blank, from byte `start` on, `before` lines down."""
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
                                           f"write one object a line, ended by a newline")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise CreditscopeError(f"{path}, line {number}: not UTF-8 text: byte {line[error.start]:#04x} at "
                                           f"position {error.start}") from None
                if text.strip():
                    yield number, end, text
    except FileNotFoundError:
        raise CreditscopeError(f"no such file: {path}") from None
    except OSError as error:
        raise CreditscopeError(f"cannot read {path}: {error.strerror}") from None
    if number == 0:
        raise CreditscopeError(f"{path} is empty; expected one JSON object a line")
