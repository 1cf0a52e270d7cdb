"""The folder of a run: what may lie there before the run begins, and what its disk refuses."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from creditscope.errors import CreditscopeError
from creditscope.files.guards import inside

SHELVES = ("groups", "scope", "optimizer")
"""Folders of arrays, a file per step."""


def require_place(path: Path) -> None:
    """Refuse a file, a place that cannot be written, and a folder that holds anything else than a run."""
    try:
        if path.is_file():
            raise CreditscopeError(f"{path} is a file, and a run is a folder; choose another --out")
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=there):  # of /proc, access() tells root that it may write there
            pass
    except OSError as error:
        raise CreditscopeError(f"cannot make the run folder {path}: {error.strerror}; choose another --out") from None
    others = sorted(entry.name for entry in path.iterdir() if not _scrap(entry)) if path.is_dir() else []
    if others and not (path / "run.json").exists():
        raise CreditscopeError(f"{path} is not empty (it holds {others[0]!r}); choose another --out")


def _scrap(entry: Path) -> bool:
    """Whether a run that was killed before it had a run.json left this."""
    if entry.name in ("groups", "checkpoints"):
        return entry.is_dir() and not any(entry.iterdir())
    if entry.name == "steps.jsonl":
        return entry.is_file() and not entry.stat().st_size
    return entry.name == "run.lock" or (entry.name.startswith(".run.json.") and entry.name.endswith(".part"))


def refuse_links(path: Path) -> None:
    for name in ("run.json", "steps.jsonl", "run.lock", "checkpoints", *SHELVES):
        inside(path, path / name)


@contextlib.contextmanager
def disk_of(path: Path) -> Iterator[None]:
    """A full or read-only disk ends the run with an error in words; what was written before stays readable."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise CreditscopeError(f"cannot write into {path}: {why}; what was recorded so far is "
                               f"whole. Make room there, or make it writable, and resume the run") from error
