"""The run directory: plain files that survive a kill at any moment and can be read while they are written.

    run.json          what was run: config, versions, seed
    steps.jsonl       one object a step, appended and synced; a torn last line is not a step
    groups/*.npz      selected rollouts of a step: tokens, w, credit, clipped, entropy, text; where read, log π
                      afterwards and the credit by other estimators
    scope/*.npz       what the microscope read at a step: Gram matrices by group and by parameter, sketches
    optimizer/*.npz   what the optimiser did at a step: the update under other reward scales, whole and by layer
    checkpoints/*     folders that appear whole or not at all
    run.lock          held by the one process that writes

Imports no torch, so that reading a run starts at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from creditscope.errors import CreditscopeError

FORMAT = 1
SHELVES = ("groups", "scope", "optimizer")
_NAME = re.compile(r"\d{6}")


class Record:
    """A run on disk. `create` and `resume` give a writer, `open` a reader; a reader never changes a byte."""

    def __init__(self, path: Path, run: dict[str, Any], lock: IO[str] | None) -> None:
        self.path = path
        self.run = run
        self._lock = lock

    # -- opening -----------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], versions: Mapping[str, Any]) -> Record:
        """A new run in an empty or absent folder."""
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CreditscopeError(f"cannot make the run folder {path}: {error.strerror}") from None
        started = (path / "run.json").exists()
        if started and cls.open(path)._lines():  # a run that never took a step is not worth keeping
            raise CreditscopeError(f"{path} already holds a run; continue it with --resume or choose another --out")
        strangers = [entry.name for entry in path.iterdir() if entry.name != "run.lock"]
        if strangers and not started:
            raise CreditscopeError(f"{path} is not empty (it holds {strangers[0]!r}); choose another --out")
        record = cls(path, {"format": FORMAT, "config": dict(config), "versions": dict(versions)}, _locked(path))
        with _disk(path):
            (path / "groups").mkdir(exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            (path / "steps.jsonl").touch()
            _write_atomically(path / "run.json", _run_json(record.run))
        return record

    @classmethod
    def resume(cls, path: str | Path, config: Mapping[str, Any], free: frozenset[str] = frozenset()) -> Record:
        """A writer on an old run whose config is the same, except for the keys in `free`."""
        path = Path(path)
        record = cls.open(path)
        record._lock = _locked(path)
        old = record.config
        # A setting that is younger than the run had its default then; `as_recorded` gives it that.
        for key in sorted(set(old) - free):
            if old.get(key) != config.get(key):
                record.close()
                raise CreditscopeError(f"cannot resume {path}: its {key} is {old.get(key)!r}, not {config.get(key)!r}; "
                                       f"give the same settings, or start a new run with another --out")
        for scrap in [*path.glob(".*.part"), *path.glob("*/.*.part")]:
            shutil.rmtree(scrap) if scrap.is_dir() else scrap.unlink()
        record.run["config"] = dict(config)
        with _disk(path):
            _write_atomically(path / "run.json", _run_json(record.run))
            _write_atomically(path / "steps.jsonl", b"".join(record._lines()))  # without a line that a kill tore
        return record

    @classmethod
    def open(cls, path: str | Path) -> Record:
        """A reader, also of a run that is being written."""
        path = Path(path)
        try:
            run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CreditscopeError(f"{path} holds no run (no run.json); give a folder written by creditscope train") \
                from None
        except (OSError, ValueError) as error:
            raise CreditscopeError(f"cannot read {path / 'run.json'}: {error}") from None
        if not isinstance(run, dict) or run.get("format") != FORMAT or not isinstance(run.get("config"), dict):
            raise CreditscopeError(f"{path / 'run.json'} is not a run of format {FORMAT}; another version wrote it")
        return cls(path, run, None)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing -----------------------------------------------------------------------------------------------

    def append(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Add one step. A value that is not finite is left out and named under `absent`, with what it was."""
        self._must_write()
        absent = {k: str(v) for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)}
        line: dict[str, Any] = {"step": step} | {k: v for k, v in metrics.items() if k not in absent}
        if absent:
            line["absent"] = absent
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        path = self.path / "steps.jsonl"
        with _disk(self.path), path.open("r+b") as out:
            whole = out.seek(0, os.SEEK_END)
            try:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            except OSError:
                # Half a line on a full disk would be glued to the next one: cut it off again.
                with contextlib.suppress(OSError):
                    os.ftruncate(out.fileno(), whole)
                raise

    def rewind(self, steps: int) -> None:
        """Keep the first `steps` steps and forget what came after them, groups included."""
        self._must_write()
        kept = [line for line in self._lines() if json.loads(line)["step"] < steps]
        with _disk(self.path):
            _write_atomically(self.path / "steps.jsonl", b"".join(kept))
        for shelf in SHELVES:
            for step in self._kept(shelf):
                if step >= steps:
                    self._file(shelf, step).unlink()
        for step in self.checkpoints():
            if step > steps:
                shutil.rmtree(self.path / "checkpoints" / f"{step:06d}")

    def save_group(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep selected rollouts of a step."""
        self._save("groups", step, arrays)

    def save_reading(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep what the microscope read at a step."""
        self._save("scope", step, arrays)

    def save_optimizer(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep what the optimiser did at a step."""
        self._save("optimizer", step, arrays)

    def _save(self, shelf: str, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Numbers and text only: nothing that would need pickle."""
        self._must_write()
        for name, value in arrays.items():
            if value.dtype.hasobject:
                raise CreditscopeError(f"array {name!r} for {shelf} has dtype {value.dtype}; store numbers or text")
        packed = io.BytesIO()
        np.savez_compressed(packed, **dict(arrays))  # type: ignore[arg-type]
        with _disk(self.path):
            (self.path / shelf).mkdir(exist_ok=True)
            _write_atomically(self._file(shelf, step), packed.getvalue())

    @contextlib.contextmanager
    def checkpoint(self, step: int, keep: int = 2) -> Iterator[Path]:
        """A folder to fill; it becomes checkpoints/<step> when the block ends well, and older ones than `keep` go."""
        with self.folder(f"checkpoints/{step:06d}") as part:
            yield part
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(self.path / "checkpoints" / f"{old:06d}", ignore_errors=True)

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """A folder to fill; it takes its name when the block ends well, in place of an older one."""
        self._must_write()
        final = self.path / name
        part = final.with_name(f".{final.name}.part")
        with _disk(self.path):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                yield part
                for file in part.iterdir():
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
                shutil.rmtree(final, ignore_errors=True)
                part.replace(final)
            finally:
                shutil.rmtree(part, ignore_errors=True)

    def _must_write(self) -> None:
        if self._lock is None:
            raise CreditscopeError(f"the record {self.path} was opened for reading")

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.run["config"]
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Every completed step, in order."""
        return [json.loads(line) for line in self._lines()]

    def groups(self) -> list[int]:
        """The steps whose rollouts were kept."""
        return self._kept("groups")

    def group(self, step: int) -> dict[str, NDArray[Any]]:
        """The rollouts kept of a step."""
        return self._load("groups", step, "rollouts")

    def readings(self) -> list[int]:
        """The steps that were read by the microscope."""
        return self._kept("scope")

    def reading(self, step: int) -> dict[str, NDArray[Any]]:
        """What the microscope read at a step."""
        return self._load("scope", step, "readings")

    def optimizer_readings(self) -> list[int]:
        """The steps at which the optimiser was read."""
        return self._kept("optimizer")

    def optimizer_reading(self, step: int) -> dict[str, NDArray[Any]]:
        """What the optimiser did at a step."""
        return self._load("optimizer", step, "optimiser readings")

    def _file(self, shelf: str, step: int) -> Path:
        return self.path / shelf / f"{step:06d}.npz"

    def _kept(self, shelf: str) -> list[int]:
        return sorted(int(p.stem) for p in (self.path / shelf).glob("*.npz") if _NAME.fullmatch(p.stem))

    def _load(self, shelf: str, step: int, what: str) -> dict[str, NDArray[Any]]:
        try:
            with np.load(self._file(shelf, step), allow_pickle=False) as stored:
                return dict(stored)
        except FileNotFoundError:
            raise CreditscopeError(f"no {what} were kept of step {step}; kept: {self._kept(shelf)}") from None
        except (OSError, ValueError, EOFError, RuntimeError, TypeError, AttributeError, MemoryError, zipfile.BadZipFile,
                zlib.error) as error:
            raise CreditscopeError(f"cannot read the {what} of step {step} in {self.path}: {error}") from None

    def checkpoints(self) -> list[int]:
        """The steps after which a checkpoint was kept, oldest first."""
        return sorted(int(p.name) for p in (self.path / "checkpoints").glob("*") if _NAME.fullmatch(p.name))

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"{step:06d}"

    def _lines(self) -> list[bytes]:
        """The whole lines of steps.jsonl. A torn last line is not an error: the step had not ended."""
        try:
            lines = (self.path / "steps.jsonl").read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise CreditscopeError(f"cannot read {self.path / 'steps.jsonl'}: {error.strerror}") from None
        whole = [line for line in lines if line.endswith(b"\n")]
        for number, line in enumerate(whole, start=1):
            try:
                assert isinstance(json.loads(line)["step"], int)
            except (ValueError, KeyError, TypeError, AssertionError):
                raise CreditscopeError(f"{self.path / 'steps.jsonl'}, line {number}: not a step; the file was damaged. "
                                       f"Cut it after line {number - 1} to keep what is whole") from None
        return whole


def _locked(path: Path) -> IO[str]:
    """The writer's lock, or an error where another process holds it. It falls with the process, however that ends."""
    try:
        lock = (path / "run.lock").open("w")
    except OSError as error:
        raise CreditscopeError(f"cannot write into {path}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise CreditscopeError(f"another process is writing into {path}; wait, or choose another --out") from None
    return lock


def _run_json(run: dict[str, Any]) -> bytes:
    return json.dumps(run, indent=2, allow_nan=False).encode() + b"\n"


def _write_atomically(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """A disk that is full or read-only ends the run in words; what was written before stays readable."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CreditscopeError(f"cannot write into {path}: {why}; what was recorded so far is "
                               f"whole. Make room and continue with --resume") from error
