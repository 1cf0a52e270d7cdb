"""The run directory: plain files that survive a kill at any moment and can be read while they are written.

    run.json          what was run: format, config, versions, seed
    steps.jsonl       one object per step, appended and synced; a torn last line is not a step. Files of a step are
                      written before its line, which names them under `kept`
    groups/*.npz      selected rollouts of a step
    scope/*.npz       what the microscope read at a step
    optimizer/*.npz   what the full probe read of the optimiser at a step
    checkpoints/*     folders that appear whole or not at all
    run.lock          held by the one process that writes

Damage is detected: run.json and each line of steps.jsonl end with a CRC-32 of themselves, zip files contain one, and a
folder has SHA256SUMS, as sha256sum -c reads it. What has no checksum is accepted: it was edited, or is older.

`runs.schema` has every metric and `runs.arrays` every array. Names of an older format are read as those of today.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError, require_module
from creditscope.files.guards import inside, masked, members
from creditscope.files.jsonlines import Repeated, parse_json, read_whole, whole_lines
from creditscope.files.sums import seal
from creditscope.files.versions import software
from creditscope.files.writing import flush_to_disk, lock_folder, new_file, new_folder, remove_folder
from creditscope.runs.columns import Steps
from creditscope.runs.formats import FORMAT, READ, upgraded
from creditscope.runs.place import SHELVES, disk_of, refuse_links, require_place

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from creditscope.batch.rollouts import Rollouts

WRITERS = "creditscope lab train, or in TRL by ScopeCallback (from creditscope.plugins.trl import ScopeCallback)"
"""Completes "a folder written by"."""
KEEP = 2
"""Checkpoints that stay: the newest, and the one before in case the newest is damaged."""
MAX_STEP = 4 * 2**20
"""Longest line of steps.jsonl, in bytes. A step has a few thousand."""
_NAME = re.compile(r"\d{6}|[1-9]\d{6,11}")
_CRC = b', "crc32": "'
_SUM = re.compile(rb': "[0-9a-f]{8}"}$')


class Record:
    """A run on disk. `create` and `resume` give a writer, `open` a reader, which changes nothing."""

    def __init__(self, path: Path, run: dict[str, Any], lock: BaseFileLock | None) -> None:
        self.path = path
        self.run = run
        self._lock = lock

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r})"

    # -- opening -----------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], versions: Mapping[str, Any] | None = None) -> Record:
        """A new run in an empty or absent folder. `versions`: by default those of creditscope, Python and torch."""
        path = Path(path)
        require_place(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CreditscopeError(f"cannot make the run folder {path}: {error.strerror}; choose another --out"
                                   ) from None
        lock = lock_folder(path)
        try:
            cls._require_no_steps(path)  # under the lock: another process may have run here meanwhile
            refuse_links(path)
            run = {"format": FORMAT, "config": masked(dict(config)),
                   "versions": software(("torch", "transformers")) if versions is None else dict(versions)}
            record = cls(path, run, lock)
            with disk_of(path):
                (path / "groups").mkdir(exist_ok=True)
                (path / "checkpoints").mkdir(exist_ok=True)
                (path / "steps.jsonl").touch()
                _write(path / "run.json", _run_json(record.run))  # last: it makes the folder a run
                flush_to_disk(path.parent)
        except BaseException:
            lock.release()
            raise
        return record

    @classmethod
    def require_free(cls, path: str | Path) -> None:
        """Refuse, before anything is made, all but a new place and a run without steps."""
        path = Path(path)
        require_place(path)
        if (path / "run.json").exists():
            lock = lock_folder(path)
            try:
                cls._require_no_steps(path)
            finally:
                lock.release()

    @classmethod
    def _require_no_steps(cls, path: Path) -> None:
        if (path / "run.json").exists() and cls.open(path).steps():
            raise CreditscopeError(f"{path} already holds a run; continue it with --resume or choose another --out "
                                   f"(in Python: Record.resume, or free_path of files.writing)")

    @classmethod
    def resume(cls, path: str | Path, config: Mapping[str, Any], free: frozenset[str] = frozenset()) -> Record:
        """A writer on an old run whose config is the same, except for the keys in `free`."""
        path = Path(path)
        config = masked(dict(config))
        cls.open(path)  # refuse what is no run before anything is written
        lock = lock_folder(path)
        try:
            record = cls.open(path)
            old = record.config
            # A setting that is newer than the run had its default; `as_recorded` sets it.
            for key in sorted(set(old) - free):
                if old.get(key) != config.get(key):
                    was, now = ("left out" if value is None else repr(value)
                                for value in (old.get(key), config.get(key)))
                    raise CreditscopeError(f"cannot resume {path}: its {key} is {was}, not {now}; give the same "
                                           f"settings, or start a new run with another --out")
            whole = b"".join(line for line, _ in record._lines())  # without a torn last line
            record.run["config"] = dict(config)
            with disk_of(path):
                # Only these folders: another one may be a link out of the run.
                places = [path, path / "checkpoints", *(path / shelf for shelf in SHELVES)]
                for place in filter(Path.is_dir, places):  # before any step is removed
                    if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                for scrap in (scrap for place in places for scrap in place.glob(".*.part")):
                    shutil.rmtree(scrap) if scrap.is_dir() and not scrap.is_symlink() else scrap.unlink()
                _write(path / "run.json", _run_json(record.run))
                _write(path / "steps.jsonl", whole)
        except BaseException:
            lock.release()
            raise
        record._lock = lock
        return record

    @classmethod
    def open(cls, path: str | Path) -> Record:
        """A reader, also of a run that is being written."""
        if not isinstance(path, str | Path):
            raise CreditscopeError(f"Record.open needs the path of a run's folder, got {type(path).__name__}")
        path = Path(path)
        refuse_links(path)
        try:
            run = parse_json(read_whole(path / "run.json").decode("utf-8"))
        except FileNotFoundError:
            raise CreditscopeError(f"{path} holds no run (no run.json); give a folder written by {WRITERS}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CreditscopeError(f"cannot read {path / 'run.json'}: {error}; {_LOST}") from None
        if not isinstance(run, dict) or run.get("format") not in READ or not isinstance(run.get("config"), dict):
            raise CreditscopeError(f"{path / 'run.json'} is not a run of format {' or '.join(map(str, READ))}; another "
                                   f"version wrote it")
        told = run.pop("crc32", None)
        if told is not None and told != _crc(json.dumps(run).encode()):
            raise CreditscopeError(f"{path / 'run.json'} is not what was written: it does not match its crc32. "
                                   f"{_EDITED}; otherwise {_LOST}")
        return cls(path, run, None)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing -----------------------------------------------------------------------------------------------

    def append(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Add one step. Values that are not finite are listed under `absent`, files of the step under `kept`."""
        self._must_write()
        absent = {k: str(v) for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)}
        line: dict[str, Any] = {"step": step} | {k: v for k, v in metrics.items() if k not in absent}
        kept = [shelf for shelf in SHELVES if self._file(shelf, step).exists()]
        line |= {name: found for name, found in {"absent": absent, "kept": kept}.items() if found}
        body = json.dumps(line, allow_nan=False)[:-1].encode()
        data = body + _CRC + f'{_crc(body)}"}}\n'.encode()
        path = self.path / "steps.jsonl"
        with disk_of(self.path), path.open("r+b") as out:
            whole = out.seek(0, os.SEEK_END)
            try:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            except OSError:
                # Half a line on a full disk would be joined to the next one.
                with contextlib.suppress(OSError):
                    os.ftruncate(out.fileno(), whole)
                raise

    def rewind(self, steps: int) -> None:
        """Keep the first `steps` steps and remove later ones, with their files."""
        self._must_write()
        kept = [line for line, found in self._lines() if found["step"] < steps]
        with disk_of(self.path):
            _write(self.path / "steps.jsonl", b"".join(kept))
            for shelf in SHELVES:
                for step in self._kept(shelf):
                    if step >= steps:
                        self._file(shelf, step).unlink()
            for step in self.checkpoints():
                if step > steps:
                    remove_folder(self.checkpoint_path(step))
            for old in self.checkpoints()[:-KEEP]:  # left by a kill
                remove_folder(self.checkpoint_path(old))

    def save_group(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._save("groups", step, arrays)

    def save_reading(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._save("scope", step, arrays)

    def save_optimizer(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._save("optimizer", step, arrays)

    def thin(self, step: int, most: int, every: Mapping[str, int]) -> None:
        """After a step: keep at most `most` files of each shelf, evenly spread; 0 keeps all. `every`: its schedule.

        run.json states the spacing before files are removed, so that they do not count as missing.
        """
        self._must_write()
        for shelf, often in every.items():
            if not most or not often or step % often:
                continue
            apart = spacing(step, often, most)
            with disk_of(self.path):
                known = self._apart()
                if (wider := math.lcm(apart, known.get(shelf, 1))) != known.get(shelf):
                    self.run["apart"] = known | {shelf: wider}
                    _write(self.path / "run.json", _run_json(self.run))
                for kept in self._kept(shelf):
                    if kept % apart:
                        self._file(shelf, kept).unlink()

    def _save(self, shelf: str, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Numbers and text only: nothing that would need pickle."""
        self._must_write()
        for name, value in arrays.items():
            if value.dtype.hasobject:
                raise CreditscopeError(f"array {name!r} for {shelf} has dtype {value.dtype}; store numbers or text")
        packed = io.BytesIO()
        np.savez_compressed(packed, **dict(arrays))  # type: ignore[arg-type]
        with disk_of(self.path):
            if not (self.path / shelf).exists():
                (self.path / shelf).mkdir()
                flush_to_disk(self.path)
            _write(self._file(shelf, step), packed.getvalue())

    @contextlib.contextmanager
    def checkpoint(self, step: int, keep: int = KEEP) -> Iterator[Path]:
        """A folder to fill; renamed to checkpoints/<step> at the end of the block, and only the newest `keep` stay."""
        with self.folder(f"checkpoints/{step:06d}") as part:
            yield part
        with disk_of(self.path):
            for old in self.checkpoints()[:-keep]:
                remove_folder(self.checkpoint_path(old))

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """A folder to fill; renamed to its name at the end of the block, in place of an older one."""
        self._must_write()
        with disk_of(self.path), new_folder(self.path / name, sync=True) as part:
            yield part
            seal(part)

    def _must_write(self) -> None:
        if self._lock is None:
            raise CreditscopeError(f"the record {self.path} was opened for reading")

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.run["config"]
        return found

    def steps(self) -> list[dict[str, Any]]:
        return [found for _, found in self._lines()]

    def columns(self) -> Steps:
        """The same by column, in about a tenth of the memory: for long runs."""
        return Steps.of(found for _, found in self._lines())

    def frame(self, library: str | None = None) -> Any:
        """The steps as a dataframe of "polars" or "pandas"; by default polars, where it is installed."""
        from creditscope.runs.frame import frame

        return frame(self.columns(), library)

    def chart(self, *metrics: str) -> Any:
        """An Altair chart with one panel per metric, such as "reward/mean". Needs the extra `plot`."""
        from creditscope.runs.figures import steps_chart

        return steps_chart(self.columns(), metrics)

    def _repr_html_(self) -> str:
        from creditscope.runs.overview import overview

        return overview(self)

    def groups(self) -> list[int]:
        """The steps whose rollouts were kept."""
        return self._kept("groups")

    def group(self, step: int) -> dict[str, NDArray[Any]]:
        """The arrays that were kept of a step's rollouts, with credit and w."""
        return self._load("groups", step, "rollouts")

    def rollouts(self, step: int) -> Rollouts:
        """The same rollouts as a batch in float64, for `surrogate`, `advantage` and `prefix_bias`. Needs torch."""
        require_module("Record.rollouts", "torch")
        from creditscope.batch.kept import rollouts_of

        arrays = self.group(step)
        try:
            return rollouts_of(arrays)
        except CreditscopeError as error:
            raise CreditscopeError(f"the rollouts of step {step} in {self.path} are damaged: {error}; choose "
                                   f"another step of those kept: {self.groups()}") from None

    def readings(self) -> list[int]:
        """The steps that the microscope read."""
        return self._kept("scope")

    def reading(self, step: int) -> dict[str, NDArray[Any]]:
        return self._load("scope", step, "readings")

    def reading_version(self, step: int) -> tuple[Any, ...]:
        """Changes when the file of the reading does."""
        file = self._file("scope", step).absolute()
        with contextlib.suppress(OSError):  # the reader will report it
            found = file.stat()
            return file, found.st_ino, found.st_size, found.st_mtime_ns
        return (file,)

    def optimizer_readings(self) -> list[int]:
        return self._kept("optimizer")

    def optimizer_reading(self, step: int) -> dict[str, NDArray[Any]]:
        return self._load("optimizer", step, "optimiser readings")

    def missing(self, steps: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
        """Files that the steps name under `kept` and that do not exist."""
        lines, apart = Steps.of(self.columns() if steps is None else steps).together("step", "kept"), self._apart()
        told = {shelf: {step for step, kept in lines if isinstance(kept, list) and shelf in kept
                        and step % apart.get(shelf, 1) == 0} for shelf in SHELVES}
        gone = [f"{shelf}/{step:06d}.npz" for shelf in SHELVES for step in sorted(told[shelf] - set(self._kept(shelf)))]
        now = Record.open(self.path) if gone else self  # a writer may have thinned since run.json was read
        return gone if now.run == self.run else now.missing()

    def told_missing(self, steps: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
        """The same as one sentence, or none."""
        gone = self.missing(steps)
        more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
        return [f"{self.path} lacks files that it had kept: {', '.join(gone[:3])}{more}; they are left out here"] \
            if gone else []

    def _apart(self) -> dict[str, int]:
        """Shelf -> how many steps apart its files are, where it was thinned."""
        found = self.run.get("apart")
        return {shelf: apart for shelf, apart in (found if isinstance(found, dict) else {}).items()
                if shelf in SHELVES and type(apart) is int and apart > 0}

    def _file(self, shelf: str, step: int) -> Path:
        return self.path / shelf / f"{step:06d}.npz"

    def _kept(self, shelf: str) -> list[int]:
        return sorted(int(p.stem) for p in (self.path / shelf).glob("*.npz") if _NAME.fullmatch(p.stem))

    def _load(self, shelf: str, step: int, what: str) -> dict[str, NDArray[Any]]:
        path = self._file(shelf, step)
        try:
            # Each member is read to its end, which checks its CRC; `np.load` stops before it.
            found = {name.removesuffix(".npy"): _array(data) for name, data in members(inside(self.path, path))}
            return upgraded(found, shelf, self.run["format"])
        except FileNotFoundError:
            raise CreditscopeError(f"no {what} were kept of step {step}; kept: {self._kept(shelf)}") from None
        except Exception as error:  # zip and npy readers raise many types
            raise CreditscopeError(f"cannot read the {what} of step {step} in {self.path}: {error}; the file was "
                                   f"damaged. Delete {path} to go on without it") from None

    def checkpoints(self) -> list[int]:
        return sorted(int(p.name) for p in (self.path / "checkpoints").glob("*") if _NAME.fullmatch(p.name))

    def checkpoint_path(self, step: int) -> Path:
        return inside(self.path, self.path / "checkpoints" / f"{step:06d}")

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """The complete lines of steps.jsonl and their values, one in memory at a time."""
        path = self.path / "steps.jsonl"
        taken, last = max(self.checkpoints(), default=0), None  # before the lines, which may grow meanwhile
        for number, line in enumerate(_whole_lines(path), start=1):
            body, sealed, tail = line.rpartition(_CRC)
            cut = f"Cut it after line {number - 1} to keep what is whole"
            try:
                found = parse_json(line)
                assert type(found["step"]) is int
                assert not [value for value in found.values() if type(value) is int and abs(value) >= 2**63]
            except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
                why = f" ({error})" if isinstance(error, Repeated) else ""
                raise CreditscopeError(f"{path}, line {number}: not a step{why}; the file was damaged. {cut}") from None
            if tail != f'{_crc(body)}"}}'.encode() if sealed else _SUM.search(line):  # a damaged key
                raise CreditscopeError(f"{path}, line {number} is not what was written: it does not match its crc32. "
                                       f"{_EDITED}; otherwise the file was damaged. {cut}")
            found.pop("crc32", None)
            last = found["step"]
            yield line + b"\n", upgraded(found, "steps", self.run["format"])
        # A line is on disk before the checkpoint of its step.
        if taken and (last is None or last < taken - 1):
            held = "holds no step" if last is None else f"ends with step {last}"
            raise CreditscopeError(f"{path} {held}, but there is a checkpoint after {taken} steps: the file was cut. "
                                   f"Bring the whole file back; or delete the checkpoints that are newer than it in "
                                   f"{self.path / 'checkpoints'}, and train the lost steps again with --resume")


def _whole_lines(path: Path) -> Iterator[bytes]:
    try:
        yield from whole_lines(path, MAX_STEP)
    except OSError as error:
        raise CreditscopeError(f"cannot read {path}: {error.strerror}; {_LOST}") from None


_LOST = "bring the file back from a copy, or train again with another --out"
_EDITED = "If you edited it, delete the crc32 there"


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _array(data: bytes) -> NDArray[Any]:
    """An array from its bytes. Empty texts need no bytes, so their number is checked."""
    found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    if found.size > len(data):
        raise ValueError(f"{found.size:,} entries in {len(data):,} bytes")
    return found


def spacing(step: int, every: int, most: int) -> int:
    """every · 2^k with the least k that leaves at most `most` multiples in 0, …, step.

    >>> [spacing(step, 10, 3) for step in (0, 20, 30, 50, 60)]
    [10, 10, 20, 20, 40]
    """
    while step // every >= most:
        every *= 2
    return every


def _write(path: Path, data: bytes) -> None:
    with new_file(path, sync=True) as out:
        out.write(data)


def _run_json(run: dict[str, Any]) -> bytes:
    return json.dumps(run | {"crc32": _crc(json.dumps(run).encode())}, indent=2, allow_nan=False).encode() + b"\n"
