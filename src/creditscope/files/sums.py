"""SHA256SUMS of a folder, as sha256sum -c reads it: written when the folder is whole, compared when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import read_whole
from creditscope.files.writing import flush_to_disk

SUMS = "SHA256SUMS"


def verify(folder: Path, whole: bool = True) -> None:
    """Compare the files of a folder with its SHA256SUMS; without one there is nothing to compare.

    `whole`: all that it names is there, and nothing else. Otherwise what it names and is there is as it was: a folder
    that may come from anybody can have files of its own.
    """
    if not (folder / SUMS).is_file():
        return
    lines = read_whole(folder / SUMS).decode("utf-8", errors="replace").splitlines()
    told = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = set(_files(folder))
    for name in sorted(told.keys() | found if whole else told.keys() & found):
        if name not in found:
            raise CreditscopeError(f"{name} is missing, which {SUMS} names")
        if told.get(name) != _sum(folder / name):
            raise CreditscopeError(f"{name} is not what was written: it does not match {SUMS}")


def seal(folder: Path) -> None:
    """Write SHA256SUMS, and see that all of the folder is on the disk."""
    lines = [f"{_sum(folder / name)}  {name}\n" for name in _files(folder)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    for entry in [*folder.rglob("*"), folder]:
        flush_to_disk(entry)


def digests(path: Path, patterns: Sequence[str] = ("*",)) -> dict[str, str]:
    """Name -> SHA-256 of a file, or of the files of a folder that match a pattern; empty where neither is there."""
    try:
        files = [path] if path.is_file() else [file for pattern in patterns for file in path.glob(pattern)]
        return {file.name: _sum(file) for file in sorted(files)}
    except OSError as error:
        raise CreditscopeError(f"cannot read {error.filename}: {error.strerror}") from None


def _files(folder: Path) -> list[str]:
    """The names of the files in a folder, but for that of their sums."""
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*")
                  if file.is_file() and file.name != SUMS)


def _sum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
