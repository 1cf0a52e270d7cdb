"""A run's folder, copied in pieces while it is written. At any moment the copy is a record that can be resumed.

`Outbox` stands beside the run, `Inbox` beside the copy. A record on one disk survives a kill because each part is
written before whatever names it: run.json, files of a step, its line, its checkpoint. `Outbox` reads in the opposite
order and sends in this one, so a copy that is cut off after any piece is what a kill could have left:

    read   checkpoints, steps.jsonl, files of steps and model, run.json
    send   run.json, files of steps and model, steps.jsonl, checkpoints; then the names of what was removed

A checkpoint that is sent is thus never ahead of its lines, and a line never ahead of its files. Where files were
thinned out between two reads, the run.json that is read later says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Self

from creditscope.errors import CreditscopeError
from creditscope.files.guards import inside
from creditscope.files.sums import SUMS, verify
from creditscope.files.writing import flush_to_disk, lock_folder, remove_folder
from creditscope.runs.place import SHELVES

if TYPE_CHECKING:
    from filelock import BaseFileLock

CHUNK = 8 * 2**20
"""Bytes of a piece at most: a checkpoint of gigabytes never is in memory as a whole."""
LINES = "steps.jsonl"
UNIT = re.compile(rf"run\.json|{re.escape(LINES)}|(?:{'|'.join(SHELVES)})/\d{{6,12}}\.npz", re.ASCII)
"""Files that appear whole."""
FOLDER = re.compile(r"(checkpoints/\d{6,12}|model)(?:/(\w[\w.-]*(?:/\w[\w.-]*)?))?", re.ASCII)
"""Folders that appear whole, with SHA256SUMS, and a file in one."""
ACTS = ("fill", "done", "grow", "gone")


class Piece(NamedTuple):
    """fill: bytes of a file that is not whole yet; done: a file or folder is whole; grow: lines to append; gone."""

    act: str
    path: str
    data: bytes = b""


def pack(pieces: Iterable[Piece], **said: Any) -> bytes:
    """Pieces and a few words as plain bytes: one line of JSON, then the data.

    >>> unpack(pack([Piece("fill", "run.json", b"{}")], code=0))
    ([Piece(act='fill', path='run.json', data=b'{}')], {'code': 0})
    """
    listed = list(pieces)
    head = {"pieces": [[piece.act, piece.path, len(piece.data)] for piece in listed], "said": said}
    return b"".join([json.dumps(head).encode(), b"\n", *(piece.data for piece in listed)])


def unpack(data: bytes) -> tuple[list[Piece], dict[str, Any]]:
    """The inverse of `pack`; the bytes come from another machine."""
    line, _, rest = data.partition(b"\n")
    pieces: list[Piece] = []
    at = 0
    try:
        head = json.loads(line)
        for act, path, size in head["pieces"]:
            if act not in ACTS or not isinstance(path, str) or not 0 <= size <= len(rest) - at:
                raise ValueError(f"{act!r} of {size!r} bytes")
            pieces.append(Piece(act, path, rest[at:at + size]))
            at += size
        said: dict[str, Any] = dict(head["said"])
    except (ValueError, TypeError, KeyError) as error:
        raise CreditscopeError(f"what another machine sent is no list of pieces: {error}") from None
    return pieces, said


def read_chunks(file: IO[bytes], path: str) -> Iterator[Piece]:
    """A file as pieces; at least one, so that an empty file is sent too."""
    yield Piece("fill", path, file.read(CHUNK))
    while data := file.read(CHUNK):
        yield Piece("fill", path, data)


class Outbox:
    """What is new in a folder. `sent`: whether what is there now is at the other end already."""

    def __init__(self, folder: Path, sent: bool = False) -> None:
        self._folder = folder
        self._sent: dict[str, tuple[int, int, int]] = {}
        self._bytes = 0
        self._newest: bytes | None = None
        """Of steps.jsonl: how much of it was sent, and the last line of that; None before anything was sent."""
        if sent:
            for _ in self.pieces():
                pass

    def pieces(self) -> Iterator[Piece]:
        """Everything that changed since the last time, in an order that may be cut off anywhere.

        Files are open from the first piece on: what the run removes meanwhile is still sent.
        """
        with contextlib.ExitStack() as files:
            late = self._new(files, "checkpoints/*")
            lines, whole, reach = self._new_lines()
            early = self._new(files, *(f"{shelf}/*.npz" for shelf in SHELVES), "model")
            first = self._new(files, "run.json")
            if not (self._folder / "run.json").exists():  # not yet a run, or its folder was removed
                return
            for unit, opened in first + early:
                yield from self._send(unit, opened)
            if lines or whole:
                for at in range(0, max(1, len(lines)), CHUNK):
                    yield Piece("fill" if whole else "grow", LINES, lines[at:at + CHUNK])
                if whole:
                    yield Piece("done", LINES)
            self._bytes, self._newest = reach
            for unit, opened in late:
                yield from self._send(unit, opened)
            for unit in [unit for unit in self._sent if not (self._folder / unit).exists()]:
                del self._sent[unit]
                yield Piece("gone", unit)

    def _new(self, files: contextlib.ExitStack, *patterns: str) -> list[tuple[str, dict[str, IO[bytes]]]]:
        """Units that were not sent as they are now, with their open files."""
        found: list[tuple[str, dict[str, IO[bytes]]]] = []
        for path in sorted(path for pattern in patterns for path in self._folder.glob(pattern)):
            unit = path.relative_to(self._folder).as_posix()
            if not (UNIT.fullmatch(unit) or FOLDER.fullmatch(unit)):
                continue  # part of what is being written
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                state = path.stat()
                stamp = (state.st_ino, state.st_size, state.st_mtime_ns)
                if self._sent.get(unit) != stamp:
                    names = sorted(path.rglob("*")) if path.is_dir() else [path]
                    found.append((unit, {name.relative_to(self._folder).as_posix(): files.enter_context(name.open("rb"))
                                         for name in names if name.is_file()}))
                    self._sent[unit] = stamp
        return found

    def _new_lines(self) -> tuple[bytes, bool, tuple[int, bytes | None]]:
        """Whole lines of steps.jsonl that were not sent; whether they are all of it; what is sent then.

        A file that was rewound no longer has the newest line at its place: a line has its times and its sum. Its
        inode does not tell: one that was freed is given to the next file, and `resume` writes the file twice.
        """
        try:
            with (self._folder / LINES).open("rb") as file:
                newest = self._newest or b""
                file.seek(self._bytes - len(newest))
                whole = self._newest is None or file.read(len(newest)) != newest
                file.seek(0 if whole else self._bytes)
                data = file.read()
        except FileNotFoundError:
            return b"", False, (self._bytes, self._newest)
        data = data[:data.rfind(b"\n") + 1]
        sent, before = (0, b"") if whole else (self._bytes, newest)
        return data, whole, (sent + len(data), data[data.rfind(b"\n", 0, -1) + 1:] or before)

    @staticmethod
    def _send(unit: str, opened: dict[str, IO[bytes]]) -> Iterator[Piece]:
        for path, file in opened.items():
            yield from read_chunks(file, path)
            file.close()
        yield Piece("done", unit)


class Inbox:
    """The copy's side. It holds the folder's lock, and what is not whole lies beside the folder, not in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._part = folder.with_name(f".{folder.name}.home.part")
        self._lock: BaseFileLock | None = None

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self._folder)
            for name in ("groups", "checkpoints"):
                inside(self._folder, self._folder / name).mkdir(exist_ok=True)
            inside(self._folder, self._folder / LINES).touch()  # run.json comes before the first line
            shutil.rmtree(self._part, ignore_errors=True)
        except OSError as error:
            raise CreditscopeError(f"cannot write into {self._folder}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._part, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def put(self, pieces: Iterable[Piece]) -> None:
        """Write them, in their order."""
        for piece in pieces:
            try:
                self._put(piece)
            except OSError as error:
                raise CreditscopeError(f"cannot write {self._folder / piece.path}: {error.strerror}; make room there, "
                                       f"then give the same command again") from None

    def _put(self, piece: Piece) -> None:
        folder = FOLDER.fullmatch(piece.path)
        if not (folder or UNIT.fullmatch(piece.path)):
            raise CreditscopeError(f"{piece.path!r:.80} is no file of a run; it was not written")
        target = self._folder / (folder[1] if folder else piece.path)
        inside(self._folder, target.parent)
        if piece.act == "fill":
            part = self._part / ((folder[2] or "") if folder else "file")
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as out:
                out.write(piece.data)
                out.flush()
                os.fsync(out.fileno())
        elif piece.act == "grow":
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with os.fdopen(os.open(target, flags, 0o666), "ab") as out:
                out.write(piece.data)
                out.flush()
                os.fsync(out.fileno())
        elif piece.act == "done":
            self._place(target, bool(folder))
        elif folder and target.exists():
            remove_folder(target)
        else:
            target.unlink(missing_ok=True)

    def _place(self, target: Path, folder: bool) -> None:
        """Rename what is whole to its name; a folder's files match their SHA256SUMS."""
        target.parent.mkdir(exist_ok=True)
        if folder:
            if not (self._part / SUMS).is_file():
                raise CreditscopeError(f"{target} came without {SUMS}; it was not written")
            verify(self._part)
            if target.exists():
                remove_folder(target)
            self._part.replace(target)
        else:
            (self._part / "file").replace(target)
        flush_to_disk(target.parent)
