"""TensorBoard's event files -> rows: records of length, checksum, message, checksum; of a message the step and its
scalars.

    Event    2: step (varint)   5: summary        Summary   1: value, repeated
    Value    1: tag             2: simple_value (float)      8: tensor      Tensor   5: float_val   4: content
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from creditscope.errors import CreditscopeError

MAX_RECORD = 2**22
"""Longest record that is read, in bytes; longer ones hold pictures or texts."""
MAX_EVENTS = 2_000_000
PREFIX = "events.out.tfevents."


def event_rows(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """(number of the last record, {"step": …, tag: value, …}) of each step, in the order of the file."""
    held: dict[str, float] = {}
    number = 0
    for number, message in enumerate(_records(file, notes), start=1):
        step, scalars = _event(message)
        if not scalars:
            continue
        if held and (step != held["step"] or not held.keys().isdisjoint(scalars)):
            yield number - 1, held
            held = {}
        held.update({"step": step, **scalars})
    if held:
        yield number, held


def _records(file: Path, notes: list[str]) -> Iterator[bytes]:
    try:
        with file.open("rb") as data:
            for _ in range(MAX_EVENTS):
                head = data.read(12)
                if len(head) < 12:
                    return
                size = int.from_bytes(head[:8], "little")
                if size > MAX_RECORD:
                    if size > 2**40:
                        raise CreditscopeError(f"{file} is not a file of TensorBoard's events; give the run's console "
                                               f"output, or an export of its scalars as csv")
                    data.seek(size + 4, 1)
                    continue
                message = data.read(size + 4)
                if len(message) < size + 4:
                    notes.append("the last record has no end and was left out")
                    return
                yield message[:size]
    except OSError as error:
        raise CreditscopeError(f"cannot read {file}: {error.strerror}") from None


def _event(message: bytes) -> tuple[int, dict[str, float]]:
    step, scalars = 0, {}
    for field, value in _fields(message):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            scalars = dict(pair for inner, text in _fields(value) if inner == 1 and isinstance(text, bytes)
                           if (pair := _scalar(text)) is not None)
    return step, scalars


def _scalar(message: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, value in _fields(message):
        if field == 1 and isinstance(value, bytes):
            tag = value[:200].decode("utf-8", errors="replace")
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif field == 8 and isinstance(value, bytes):  # a tensor with one float
            floats = [inner for at, inner in _fields(value) if at in (4, 5) and isinstance(inner, bytes)]
            number = struct.unpack("<f", floats[0])[0] if floats and len(floats[0]) == 4 else None
    return None if not tag or number is None else (tag, float(number))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field, value) of a protobuf message: an int for varints, bytes for all else; it ends at the first fault."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind, -1)
        if kind == 2:
            size, at = _varint(message, at)
        if size < 0 or at + size > len(message):
            return
        yield key >> 3, message[at:at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
    return value, len(message)
