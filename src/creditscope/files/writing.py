"""Atomic writes: files and folders are filled under another name, then renamed. No torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from creditscope.errors import CreditscopeError

if TYPE_CHECKING:
    from filelock import BaseFileLock


@contextlib.contextmanager
def new_file(path: Path, sync: bool = False, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to fill; renamed to `path` if the block does not raise, else deleted; `sync`: fsync. Raises OSError."""
    part = part_of(path)
    try:
        part.unlink(missing_ok=True)  # a symlink there would be written through
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
            yield out
            if sync:
                out.flush()
                os.fsync(out.fileno())
        part.replace(path)
        if sync:
            flush_to_disk(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_file(path: Path, data: str | bytes, repair: str = "make room there, or choose another place") -> None:
    """Write a file and make its folder; an OSError becomes an error that ends with `repair`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as out:
            out.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise CreditscopeError(f"cannot write {path}: {error.strerror}; {repair}") from None


@contextlib.contextmanager
def new_folder(path: Path, sync: bool = False) -> Iterator[Path]:
    """A folder to fill; it replaces `path` if the block does not raise. Raises OSError."""
    part = part_of(path)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for file in filter(_plain, part.rglob("*")):
            file.chmod(part.stat().st_mode & 0o666)  # safetensors writes 0600 for any umask
        if path.exists():
            remove_folder(path)
        part.replace(path)
        if sync:
            flush_to_disk(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_new_folder(out: Path) -> None:
    """Find out before the work, not after it, whether the folder of --out can be written."""
    _check_place(out)
    if out.is_file():
        raise CreditscopeError(f"--out {out} is a file; choose another --out")
    if out.is_dir() and any(out.iterdir()):
        raise CreditscopeError(f"--out {out} is there already and not empty; choose another --out")


def check_new_file(out: Path) -> None:
    """The same of a file: it must not be there."""
    _check_place(out)
    if out.is_dir():
        raise CreditscopeError(f"--out {out} is a folder; give the name of a file, such as {out / 'pairs.jsonl'}")
    if os.path.lexists(out):
        raise CreditscopeError(f"--out {out} is there already; choose another --out, or remove it")


def _check_place(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            out.lstat()  # a name may be too long
        with tempfile.TemporaryFile(dir=out.parent):  # of /proc, access() tells root that it may write there
            pass
    except OSError as error:
        raise CreditscopeError(f"cannot make --out {out}: {error.strerror}; choose another --out") from None


def _plain(entry: Path) -> bool:
    return entry.is_file() and not entry.is_symlink()


def free_path(path: str | Path) -> Path:
    """The first of path, path-2, path-3, ... that does not exist: a script that is run twice writes two runs."""
    path = Path(path)
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    return next(one for one in names if not one.exists())


def remove_folder(path: Path) -> None:
    """Delete by rename, then rmtree: a partly deleted folder never has its name."""
    part = path.with_name(f".{path.name}.old.part")
    shutil.rmtree(part, ignore_errors=True)
    path.replace(part)
    shutil.rmtree(part)


def part_of(path: Path) -> Path:
    """The temporary name of a file or folder, with the process id: two processes may write the same one."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a folder's names; Windows cannot open a folder for that."""
    if os.name == "nt" and path.is_dir():
        return
    found = os.open(path, os.O_RDONLY)
    try:
        os.fsync(found)
    finally:
        os.close(found)


def lock_folder(path: Path, name: str = "run.lock") -> BaseFileLock:
    """The lock of a folder's writer, held until `release` or the end of the process; an error if another holds it."""
    from filelock import FileLock, Timeout  # late: readers need none

    # filelock opens the file with O_NOFOLLOW: a symlink there is refused.
    lock = FileLock(path / name, timeout=0, mode=0o644, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise CreditscopeError(f"another process is writing into {path}; wait, or write into another folder") from None
    except OSError as error:
        raise CreditscopeError(f"cannot write into {path}: {error.strerror}") from None
    return lock
