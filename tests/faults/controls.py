"""Planted faults: creditscope without one of the things that keep a record whole. With each the harness must go red."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from creditscope.files import sums, writing
from creditscope.runs import record
from creditscope.runs.record import Record


def no_rename() -> None:
    """Files are written in place, half after half, as a long file is."""

    def write(path: Path, data: bytes) -> None:
        with path.open("wb") as out:
            for half in (data[:len(data) // 2], data[len(data) // 2:]):
                sys.audit("faults.write", str(path))
                out.write(half)
                out.flush()
            os.fsync(out.fileno())

    record._write = write


def no_whole_folders() -> None:
    """Checkpoints are filled under their own names."""

    @contextlib.contextmanager
    def folder(self: Record, name: str) -> Iterator[Path]:
        final = self.path / name
        final.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as part:
            yield Path(part)
            sums.seal(Path(part))
            for file in Path(part).iterdir():
                sys.audit("faults.write", str(final))
                shutil.copy(file, final)
                writing.flush_to_disk(final / file.name)
        writing.flush_to_disk(final)

    Record.folder = folder  # type: ignore[method-assign]


def no_sync() -> None:
    """Nothing is forced onto the disk. A kill cannot tell; a power cut can."""
    record.os = writing.os = SimpleNamespace(**vars(os) | {"fsync": lambda _: None})  # type: ignore[attr-defined]


def late_lines() -> None:
    """A step is said to be written when the one after it is."""
    held: list[tuple[Any, ...]] = []
    append = Record.append

    def later(self: Record, *args: Any) -> None:
        for before in held:
            append(self, *before)
        held[:] = [args]

    Record.append = later  # type: ignore[method-assign]


def line_first() -> None:
    """A step's line is written before what was kept of it."""
    late: list[Callable[[], None]] = []
    save, append = Record.save_group, Record.append

    def save_later(self: Record, step: int, arrays: Mapping[str, Any]) -> None:
        late.append(lambda: save(self, step, arrays))

    def append_first(self: Record, *args: Any) -> None:
        append(self, *args)
        while late:
            late.pop()()

    Record.save_group, Record.append = save_later, append_first  # type: ignore[method-assign]


CONTROLS: dict[str, Callable[[], None]] = {
    control.__name__: control for control in (no_rename, no_whole_folders, no_sync, late_lines, line_first)}
