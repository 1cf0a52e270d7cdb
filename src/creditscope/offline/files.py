"""A file of objects (JSON lines or parquet), or a folder with one per step, as a stream that can be resumed."""

from __future__ import annotations

import hashlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from creditscope.batch.jsonl import Row, read_object
from creditscope.errors import CreditscopeError, require_module
from creditscope.files.jsonlines import MAX_LINE, placed_lines

SUFFIXES = (".jsonl", ".parquet")
NESTED = ("step_*/train/all/traces.jsonl", "rollouts/step_*/train/all/traces.jsonl", "[0-9]*/*.jsonl",
          "rollout/[0-9]*/*.jsonl")
"""Where prime-rl and AReaL keep files of one step in a folder of their own."""
ROWS = 256
"""Rows of a parquet file that are held at once."""
CHUNK = 2**20
LARGEST = 2**30
"""Bytes that one batch may take, or one row group of a parquet file."""
AT_ONCE = 1000
"""Parquet files per process: the length of a command line is limited."""
SURVEY = """
import sys
import pyarrow.parquet
for number, file in enumerate(sys.argv[1:]):
    print(number, flush=True)
    about = pyarrow.parquet.read_metadata(file)
    for at in range(about.num_row_groups):
        group = about.row_group(at)
        values = sum(group.column(i).num_values for i in range(group.num_columns))
        print(number, at, max(group.total_byte_size, 8 * values), flush=True)
"""
"""Prints the number of each file, and of each of its row groups with its unpacked bytes, at least 8 per value."""


@dataclass(frozen=True)
class Place:
    """A position in a source."""

    file: int = 0
    row: int = 0
    """Lines, or rows of parquet, that were read of that file."""
    end: int = 0
    """Bytes of that file that were read; for parquet, which is not read in order, all."""


START = Place()


@dataclass(frozen=True)
class Object:
    """One object, and the place after it."""

    row: Row
    where: str
    place: Place
    size: int
    """Bytes; for parquet approximately."""


class Source:
    """The files behind a path, in the order of the numbers in their names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _files(self.path)
        self._surveyed = False
        try:
            self.sizes = [file.stat().st_size for file in self.files]
        except OSError as error:
            raise CreditscopeError(f"cannot read {error.filename}: {error.strerror}") from None

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def again(self) -> bool:
        """Whether it can be read twice; a pipe cannot."""
        return all(file.is_file() for file in self.files)

    def done(self, place: Place) -> int:
        return sum(self.sizes[:place.file]) + place.end

    def objects(self, start: Place = START) -> Iterator[Object]:
        """Every object after a place."""
        if not self._surveyed and (tables := [file for file in self.files if file.suffix == ".parquet"]):
            for at in range(0, len(tables), AT_ONCE):
                _survey(tables[at:at + AT_ONCE])
            self._surveyed = True
        for number in range(start.file, len(self.files)):
            file, first = self.files[number], start if number == start.file else Place(number)
            if file.suffix == ".parquet":
                yield from self._parquet(file, first)
            else:
                yield from _lines(file, first)

    def _parquet(self, file: Path, first: Place) -> Iterator[Object]:
        for number, row in itertools.islice(enumerate(_parquet_rows(file), start=1), first.row, None):
            where = f"{file}, row {number}"
            size = _extent(row)
            if size > MAX_LINE:
                raise CreditscopeError(f"{where}: the row is longer than {MAX_LINE:,} characters")
            yield Object(row, where, Place(first.file, number, self.sizes[first.file]), size)


class Trail:
    """A hash of exactly the bytes that were read."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, Place()
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def advance(self, place: Place) -> None:
        """Hash the bytes between the last place and this one."""
        for number in range(self._at.file, place.file + 1):
            file, start = self._source.files[number], self._at.end if number == self._at.file else 0
            end = place.end if number == place.file else self._source.sizes[number]
            if start >= end:  # a pipe must not be opened
                continue
            try:
                with file.open("rb") as data:
                    data.seek(start)
                    while start < end and (part := data.read(min(CHUNK, end - start))):
                        self._hash.update(part)
                        start += len(part)
            except OSError as error:
                raise CreditscopeError(f"cannot read {file}: {error.strerror}") from None
        self._at = place


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / "run.json").exists():
        raise CreditscopeError(f"{path} is a run of creditscope, not a file of rollouts; see: creditscope report")
    inside = [file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith(".")]
    inside = inside or next((files for pattern in NESTED if (files := [*path.glob(pattern)])), [])
    found = sorted(inside, key=lambda file: [(int(part), "") if part.isdecimal() else (0, part)
                                             for part in re.split(r"(\d+)", f"{file.relative_to(path)}")])
    if not found:
        trl = path / "completions"  # TRL's folder in its output_dir
        raise CreditscopeError(f"{path} holds no rollouts: no file in it ends in {' or '.join(SUFFIXES)}"
                               + (f"; try {trl}" if trl.is_dir() else ""))
    return found


def _lines(file: Path, first: Place) -> Iterator[Object]:
    before = first.end
    for number, end, text in placed_lines(file, before=first.row, start=first.end):
        where = f"{file}, line {number}"
        yield Object(read_object(text, partial(complain, where)), where, Place(first.file, number, end), end - before)
        before = end


def complain(where: str, what: str) -> CreditscopeError:
    return CreditscopeError(f"{where}: {what}")


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        about = pyarrow.parquet.read_metadata(file)
        columns = [about.schema.column(i) for i in range(about.num_columns)]
        # A small file can repeat a long text: dictionaries hold it once, and rows are made one at a time.
        texts = [column.path for column in columns
                 if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"]
        with pyarrow.parquet.ParquetFile(file, read_dictionary=texts) as table:
            for batch in table.iter_batches(batch_size=ROWS):
                named = [*zip(batch.schema.names, batch.columns, strict=True)]
                for number in range(len(batch)):
                    yield {name: column[number].as_py() for name, column in named}
    except (OSError, ValueError, OverflowError, NotImplementedError, pyarrow.ArrowException) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CreditscopeError(f"{file}: not a parquet file that can be read: {first}") from None


def _survey(files: Sequence[Path]) -> None:
    """Refuse damaged files and row groups over LARGEST bytes. In a subprocess: damaged metadata can crash pyarrow."""
    require_module(f"reading {files[0].name}", "pyarrow")
    for file in files:
        if not file.exists():
            raise CreditscopeError(f"no such file: {file}")
    found = subprocess.run([sys.executable, "-P", "-c", SURVEY, *map(str, files)], capture_output=True, text=True,
                           errors="replace", check=False)
    lines = [[int(word) for word in line.split()] for line in found.stdout.splitlines()]
    for line in lines:
        if len(line) == 3 and line[2] > LARGEST:
            raise CreditscopeError(f"{files[line[0]]}: row group {line[1]} takes {line[2]:,} bytes, over {LARGEST:,}; "
                                   f"write the file with a smaller row_group_size")
    if found.returncode:
        said = (found.stderr.strip().splitlines() or [f"exit status {found.returncode}"])[-1]
        raise CreditscopeError(f"{files[lines[-1][0]] if lines else files[0]}: not a parquet file that can be read: "
                               f"{said.strip()[:200]}")


def _extent(value: Any) -> int:
    """Size of a value: its characters, and 8 per number."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + _extent(inner) for name, inner in value.items())
    if isinstance(value, list):
        return sum(_extent(inner) for inner in value)
    return 8
