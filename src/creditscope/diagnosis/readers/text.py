"""Lines and documents of untrusted files, with limits on their size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import parse_json, read_whole

MAX_LINE = 2**20
"""Longest line that is read, in bytes. A row of 1000 metrics has 40,000."""
MAX_DOCUMENT = 64 * 2**20
"""Longest JSON document (trainer_state.json, a notebook), in bytes: 20,000 logged steps."""
LARGEST = 1e60
"""A larger number counts as infinite; the square of this one is still finite."""


def bounded_lines(file: Path, notes: list[str]) -> Iterator[tuple[int, str]]:
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


def small_text(file: Path, most: int) -> str:
    try:
        return read_whole(file, most, "give a log with one row per line").decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise CreditscopeError(f"cannot read {file}: {error.strerror}") from None


def json_of(text: str, file: Path) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise CreditscopeError(f"{file} is not JSON: {str(error)[:200]}; if the run was killed while writing it, take "
                               f"an older checkpoint") from None


def yaml_of(text: str, name: str) -> Any:
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
        raise CreditscopeError(f"{name} {fault}; write plain names and values")
    return found


def number_of(value: object) -> float | None:
    """A number, also where it was printed as text, NaN and infinity included; None for everything else.

    >>> number_of("np.float64(0.5)"), number_of("nan"), number_of("many"), number_of(True)
    (0.5, nan, None, None)
    """
    if isinstance(value, str) and len(value) <= 40:
        value = value.strip().removesuffix(")").rpartition("(")[2]  # np.float64(0.5)
    elif not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST or math.isnan(number) else math.copysign(math.inf, number)
