"""Kill real training runs at random moments, look at what is left, resume them, and compare with an undisturbed run.

    python tests/faults/kills.py --kills 100 --workers 2 --seed 0

A run is a process that does what `creditscope lab train` does with the packaged model. It is killed by SIGKILL: by the
clock, when a line or an unfinished file becomes visible, at some size of an unfinished checkpoint, or just before its
n-th operation on the file system. In some trials the power fails too: what was not synced is gone. Then:

    complete      a step is complete once its line is visible in steps.jsonl. After a power cut, once `append` returned
    lost          complete steps that are not on disk, or whose kept files are not, or whose numbers are others
    identical     after --resume: every line but its times, every array, the weights, the optimiser and the model

Beside each run a `creditscope report --watch` goes on from before its first kill to its end, and is asked for its page
after each.

Afterwards each fault of `--controls` is planted (controls.py), and runs are killed until something is lost: a harness
that loses nothing then could not have noticed. Exit code 1 if anything was lost, or nothing where it had to be.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where this file is run alone

from rich.console import Console
from rich.progress import Progress

import mini
from creditscope.errors import CreditscopeError
from creditscope.files.sums import verify
from creditscope.runs.place import SHELVES
from creditscope.runs.record import Record
from faults.controls import CONTROLS

STEPS = 5
BASE = ["--steps", str(STEPS), "--group", "4", "--prompts", "2", "--max-tokens", "40", "--eval-problems", "0",
        "--checkpoint-every", "2", "--keep-every", "1", "--lr", "1e-4", "--seed", "1", "--device", "cpu"]
SETTINGS = {"plain": BASE,
            "full": [*BASE, "--eval-problems", "2", "--scope", "full", "--every", "2", "--probe", "full",
                     "--probe-every", "3"],
            "critic": [*BASE, "--credit", "gae", "--inner-steps", "2", "--keep-most", "2"],
            "mini": [*BASE, "--max-tokens", "12", "--scope", "full", "--every", "2", "--lr", "1e-2", "--seed", "4"]}
"""`mini` is no part of `make faults`: its model and task are known to forks alone, so it has no moment `start`."""
MOMENTS = ("start", "clock", "line", "part", "bytes", "operation")
TIMED = ("time/", "scope/ratio", "scope/share")
"""Metrics that no seed can fix."""
LONGEST = 300.0
"""Seconds after which a run counts as hung."""


@dataclass
class Kill:
    """One kill: when, what was on disk, what was lost."""

    setting: str
    moment: str
    resumed: bool
    power: bool = False
    killed: bool = True
    """False where the run had ended before its moment came."""
    seconds: float = 0.0
    complete: int = 0
    """Steps that were complete when the process died."""
    on_disk: int = 0
    checkpoints: list[int] = field(default_factory=list)
    scraps: list[str] = field(default_factory=list)
    """Unfinished files that were left."""
    lost: list[str] = field(default_factory=list)
    """What was lost, one sentence each."""
    identical: bool | None = None
    """Of the last kill of a trial: whether the resumed run is the undisturbed one."""
    page: int = 0
    """What the page that follows the run answered after the kill: 200, or 503 where there is no step yet."""


# -- the run -----------------------------------------------------------------------------------------------------------


def started(args: list[str], log: Path, before: Callable[[], None] = lambda: None) -> int:
    """Process id of a fork that does what `creditscope ARGS` does, after `before`. Forked, to spare the imports."""
    pid = os.fork()
    if pid:
        return pid
    try:
        told = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(told, 1)
        os.dup2(told, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        from creditscope.cli.main import main

        before()
        with mini.known():
            main(args)
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def executed(args: list[str], log: Path) -> int:
    """The same as a process of its own, from the interpreter on."""
    with log.open("wb") as told:
        return subprocess.Popen([sys.executable, "-m", "creditscope", *args], stdout=told, stderr=told,
                                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}).pid


def ended(pid: int) -> int | None:
    """The exit code of a child, or None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def finished(args: list[str], log: Path, before: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """(exit code, everything said) of a fork that is left alone."""
    pid, start = started(args, log, before), time.monotonic()
    while (code := ended(pid)) is None:
        if time.monotonic() - start > LONGEST:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124, "hung"
        time.sleep(0.005)
    return code, log.read_text(errors="replace")


class Follower:
    """A `creditscope report --watch` of a run."""

    def __init__(self, out: Path, log: Path) -> None:
        self.out, start = out, time.monotonic()
        self.pid = started(["report", str(out), "--watch", "--json"], log)
        while not log.exists() or not (told := log.read_text()).endswith("}\n"):
            assert ended(self.pid) is None, log.read_text()
            assert time.monotonic() - start < LONGEST, "the page is not served"
            time.sleep(0.01)
        self.url = json.loads(told)["url"]

    def answer(self) -> int:
        """The status of an answer, 0 where there was none, or not a whole page of what is on disk."""
        try:
            with urllib.request.urlopen(self.url, timeout=LONGEST) as answer:
                whole = answer.read().endswith(b"</html>\n")
            with urllib.request.urlopen(f"{self.url}version", timeout=LONGEST) as answer:
                newest = json.loads(answer.read())["notice"] == ""
            return int(answer.status) if whole and newest else 0
        except urllib.error.HTTPError as error:
            return error.code
        except (OSError, http.client.HTTPException):
            return 0

    def see(self, kill: Kill) -> None:
        """Ask after a kill, or after the end."""
        kill.page = self.answer()
        if kill.page not in ((200,) if kill.on_disk else (200, 503)):
            kill.lost.append(f"the page that follows the run answered {kill.page} where {kill.on_disk} steps are there")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Tap:
    """What a run tells about itself from inside: each step that `append` has returned from, each operation on the file
    system under `out`, each sync. It kills the run before operation number `fatal` of those whose path has `focus`."""

    def __init__(self, out: Path, folder: Path, fatal: int = 0, focus: str = "") -> None:
        self.out, self.fatal, self.focus, self.count = str(out), fatal, focus, 0
        self.acks, self.syncs, self.total = folder / "acks", folder / "syncs", folder / "operations"

    def __call__(self) -> None:
        acks, syncs, total = (os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                              for path in (self.acks, self.syncs, self.total))
        append, fsync = Record.append, os.fsync

        def telling(record: Record, step: int, *rest: Any) -> None:
            append(record, step, *rest)
            os.write(acks, f"{os.getpid()} {step}\n".encode())

        def syncing(descriptor: int) -> None:
            self.operation(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)
            found = os.stat(descriptor)
            names = sorted(os.listdir(descriptor)) if os.path.isdir(f"/proc/self/fd/{descriptor}") else []
            os.write(syncs, (json.dumps([found.st_ino, found.st_size, names]) + "\n").encode())

        Record.append = telling  # type: ignore[method-assign]
        os.fsync = syncing  # type: ignore[assignment]
        self._told = total
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self.operation(args[0])
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            self.operation(os.path.join(f"/proc/self/fd/{args[-1]}" if args[-1] != -1 else "", os.fspath(args[0])))
        elif event in ("os.rename", "os.truncate", "faults.write"):
            self.operation(os.fspath(args[0]))

    def operation(self, path: str) -> None:
        if not path.startswith((self.out, "/proc/self/fd/")) or self.focus not in path:
            return
        self.count += 1
        os.write(self._told, b".")
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def said(self, pid: int) -> set[int]:
        """Steps that a process was told are written."""
        if not self.acks.exists():
            return set()
        pairs = [line.split() for line in self.acks.read_text().splitlines()]
        return {int(step) for who, step in pairs if int(who) == pid}


def cut_power(out: Path, syncs: Path, rng: random.Random) -> None:
    """Leave what a disk holds when the power fails: of each file the bytes that were synced, of each folder the names
    that were, and of the names that were not any."""
    files: dict[int, int] = {}
    folders: dict[int, set[str]] = {}
    for line in syncs.read_text().splitlines() if syncs.exists() else ():
        inode, size, names = json.loads(line)
        files[inode] = size
        folders[inode] = set(names)
    for entry in [out, *out.rglob("*")]:
        if not entry.exists():
            continue
        inode = entry.stat().st_ino
        known = entry.name in folders.get(entry.parent.stat().st_ino, set())
        if not known and rng.random() < 0.5:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        elif entry.is_file() and entry.name != "run.lock" and files.get(inode, 0) < entry.stat().st_size:
            os.truncate(entry, files.get(inode, 0))


# -- the observer ------------------------------------------------------------------------------------------------------


@dataclass
class Observer:
    """Looks at a run's folder from outside, as often as it can."""

    out: Path
    seen: bytes = b""
    """The whole lines of steps.jsonl at the last look."""
    grew: bool = False
    """Whether this process has added a line."""
    parts: set[tuple[str, int]] = field(default_factory=set)
    bytes: int = 0
    """Size of an unfinished folder, where there is one."""

    def look(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            path = self.out / "steps.jsonl"
            if path.stat().st_size != len(self.seen):
                now = path.read_bytes()
                now = now[:now.rfind(b"\n") + 1]
                self.grew |= len(now) > len(self.seen)
                self.seen = now
        self.bytes = 0
        for folder in (self.out, self.out / "checkpoints", *(self.out / shelf for shelf in SHELVES)):
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(".part"):
                        self.parts.add((entry.name, entry.inode()))
                        if entry.is_dir():
                            self.bytes += sum(file.stat().st_size for file in Path(entry.path).iterdir())

    @property
    def lines(self) -> int:
        return self.seen.count(b"\n")


def due(moment: str, rng: random.Random, times: dict[str, float], observer: Observer) -> Callable[[float], bool]:
    """Whether a moment has come, asked again and again with the seconds since the start."""
    if moment in ("start", "clock"):
        when = rng.uniform(0, times[moment])
        return lambda now: now >= when
    if moment == "line":
        wanted = max(observer.lines, rng.randint(1, STEPS))
        return lambda _: observer.grew and observer.lines >= wanted
    if moment == "part":
        wanted = rng.randint(1, 4 * STEPS)
        return lambda _: len(observer.parts) >= wanted
    if moment == "bytes":
        size = rng.uniform(0, times["bytes"])
        after = rng.randint(0, STEPS)
        return lambda _: observer.bytes > size and observer.lines >= after
    return lambda _: False  # the run kills itself before an operation


# -- the comparison ----------------------------------------------------------------------------------------------------


def facts(line: dict[str, Any]) -> dict[str, Any]:
    """A step without the times, and without the names of its files: these are looked for themselves."""
    return {name: value for name, value in line.items() if not name.startswith(TIMED) and name != "kept"}


def shelves(record: Record) -> dict[str, tuple[list[int], Callable[[int], dict[str, Any]]]]:
    return {"groups": (record.groups(), record.group), "scope": (record.readings(), record.reading),
            "optimizer": (record.optimizer_readings(), record.optimizer_reading)}


def alike(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Equal bit by bit: NaN is NaN, and -0 is not 0."""
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and one[name].shape == two[name].shape
        and one[name].tobytes() == two[name].tobytes() for name in one)


def differences(out: Path, whole: Path) -> list[str]:
    """What is on disk and is not as in the undisturbed run; what is not there is no difference."""
    said: list[str] = []
    record, other = Record.open(out), Record.open(whole)
    truth = {line["step"]: facts(line) for line in other.steps()}
    steps = record.steps()
    if [line["step"] for line in steps] != list(range(len(steps))):
        said.append(f"steps.jsonl has the steps {[line['step'] for line in steps]}")
    said += [f"step {line['step']} has other numbers" for line in steps if facts(line) != truth.get(line["step"])]
    said += [f"{name} is named and not there" for name in record.missing(steps)]
    theirs = shelves(other)
    for shelf, (kept, load) in shelves(record).items():
        should = [step for step in theirs[shelf][0] if step < len(steps)]
        said += [f"step {step} is complete, but {shelf}/{step:06d}.npz is not there" for step in should
                 if step not in kept]
        said += [f"{shelf}/{step:06d}.npz has other numbers" for step in kept  # others are thinned at the end
                 if step in theirs[shelf][0] and not alike(load(step), theirs[shelf][1](step))]
    for step in record.checkpoints():
        try:
            verify(record.checkpoint_path(step))
            state = json.loads((record.checkpoint_path(step) / "state.json").read_text())
            assert state["step"] == step
        except (CreditscopeError, OSError, ValueError, KeyError, AssertionError) as error:
            said.append(f"checkpoints/{step:06d} is not whole: {error!r}")
    return said


def unlike(out: Path, whole: Path) -> list[str]:
    """What is not as in the undisturbed run, in a run that came to its end."""
    said = differences(out, whole)
    names = [{file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()}
             - {"report.html"} for root in (out, whole)]
    said += [f"{name} is in one of the two alone" for name in sorted(names[0] ^ names[1])]
    plain = [name for name in names[0] & names[1] if name.startswith(("checkpoints/", "model/"))]
    return said + [f"{name} has other bytes" for name in sorted(plain)
                   if (out / name).read_bytes() != (whole / name).read_bytes()]


def looked_at(out: Path, folder: Path, steps: int) -> list[str]:
    """What `creditscope papers check` and `creditscope report` say of what was left, where that is not well."""
    said = []
    for verb in (["papers", "check", str(out), "--json"], ["report", str(out), "--json"]):
        code, told = finished(verb, folder / "verb.log")
        early = not steps and code == 2 and ("no step yet" in told or "no completed step" in told)
        if "Traceback" in told or (code and not early):
            said.append(f"creditscope {verb[0]} ends with {code}: {told[-300:]}")
    (out / "report.html").unlink(missing_ok=True)
    return said


# -- a trial -----------------------------------------------------------------------------------------------------------


def warm() -> None:
    """Import what a run needs, once for all forks, and start no thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import creditscope.lab.train
    import creditscope.report.build  # noqa: F401

    torch.set_num_threads(1)


def startup(place: Path) -> float:
    """Seconds from the interpreter to run.json."""
    out, start = place / "startup" / "run", time.monotonic()
    out.parent.mkdir()
    pid = executed(command(out, "plain"), place / "startup" / "log")
    while not (out / "run.json").exists():
        assert ended(pid) is None, (place / "startup" / "log").read_text()
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return time.monotonic() - start


def reference(setting: str, place: Path) -> dict[str, float]:
    """The undisturbed run; how long it takes, its operations on the file system, the size of a checkpoint."""
    folder = place / setting
    folder.mkdir()
    out, start = folder / "whole", time.monotonic()
    tap = Tap(out, folder)
    code, told = finished(command(out, setting), folder / "log", tap)
    assert code == 0, told
    learnt = [line for line in Record.open(out).steps() if line.get("grad/norm", 0.0) > 0]
    assert len(learnt) >= STEPS // 2, "the undisturbed run learns nothing: to be like it would prove nothing"
    size = sum(file.stat().st_size for file in (out / "checkpoints" / f"{STEPS:06d}").iterdir())
    return {"clock": time.monotonic() - start, "bytes": float(size), "operation": float(tap.total.stat().st_size)}


def trial(number: int, seed: int, setting: str, place: Path, times: dict[str, float], control: str | None,
          moments: tuple[str, ...], power: float, focus: str = "") -> list[Kill]:
    """A run that is killed once or more, and then resumed to its end."""
    rng = random.Random(seed * 1_000_003 + number)
    folder = place / f"trial-{number:04d}"
    folder.mkdir()
    out, whole, kills = folder / "run", place.parent / setting / "whole", []
    cuts = rng.random() < power
    page = None if control else Follower(out, folder / "page.log")
    try:
        for _ in range(rng.choice((1, 2, 3, 3))):
            moment = rng.choice([name for name in moments if not (cuts and name == "start")])
            kills.append(one_kill(out, whole, folder, setting, moment, rng, times, control, cuts, focus))
            if page is not None:
                page.see(kills[-1])
            if kills[-1].lost or not kills[-1].killed:
                break
        said = []
        if any(kill.lost for kill in kills):
            return kills
        if kills[-1].killed:
            code, told = finished(command(out, setting), folder / "log", planted(control))
            said += [f"--resume ends with {code}: {told[-600:]}"] if code else []
        try:
            said += unlike(out, whole)
        except CreditscopeError as error:
            said.append(str(error))
        if page is not None and (last := page.answer()) != 200:
            said.append(f"the page that follows the run answered {last} at its end")
    finally:
        if page is not None:
            page.close()
    kills[-1].identical = not said
    kills[-1].lost += said
    if not any(kill.lost for kill in kills):
        shutil.rmtree(folder)
    return kills


def one_kill(out: Path, whole: Path, folder: Path, setting: str, moment: str, rng: random.Random,
             times: dict[str, float], control: str | None, cuts: bool, focus: str) -> Kill:
    """Start or resume the run, kill it, and see what was left."""
    resumed = (out / "run.json").exists()
    base = max(Record.open(out).checkpoints(), default=0) if resumed else 0
    kill = Kill(setting, moment, resumed, power=cuts)
    most = 12 if focus else int(times["operation"])
    tap = Tap(out, folder, rng.randint(1, most) if moment == "operation" else 0, focus)
    observer = Observer(out)
    observer.look()
    observer.grew = False
    begin = planted(control, tap)
    come = due(moment, rng, times, observer)
    late = rng.choice((0.0, rng.uniform(0, 0.004)))
    args, log = command(out, setting), folder / "log"
    pid, start = executed(args, log) if moment == "start" else started(args, log, begin), time.monotonic()
    while (code := ended(pid)) is None:
        kill.seconds = time.monotonic() - start
        observer.look()
        if come(kill.seconds) or kill.seconds > LONGEST or (moment != "operation" and observer.lines > STEPS):
            time.sleep(late)
            os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            break
        time.sleep(0.001 if moment in ("part", "bytes") else 0.005)
    kill.killed = code == -signal.SIGKILL
    if kill.seconds > LONGEST or code not in (0, -signal.SIGKILL):
        told = log.read_text(errors="replace")[-600:]
        kill.lost.append(f"the run ends with {code} after {kill.seconds:.0f} s: {told}")
    # A resumed run forgets what came after its checkpoint, and repeats it.
    visible = [json.loads(line)["step"] for line in observer.seen.splitlines()]
    complete = {step for step in visible if observer.grew or not resumed or step < base} | tap.said(pid)
    if cuts and kill.killed:
        complete = tap.said(pid) | set(range(base))
        cut_power(out, tap.syncs, rng)
    kill.complete = len(complete)
    try:
        kill.lost += left(out, whole, folder, complete, kill)
    except CreditscopeError as error:
        kill.lost.append(f"the record does not open: {error}")
    return kill


def left(out: Path, whole: Path, folder: Path, complete: set[int], kill: Kill) -> list[str]:
    """What was lost. Fills in what is on disk."""
    kill.scraps = sorted(scrap.name for scrap in out.rglob(".*.part"))
    if not (out / "run.json").exists():
        return [f"there is no run.json, and {len(complete)} steps were complete"] if complete else []
    record = Record.open(out)
    steps = {line["step"] for line in record.steps()}
    kill.on_disk, kill.checkpoints = len(steps), record.checkpoints()
    said = [f"step {step} was complete and is not on disk" for step in sorted(complete - steps)]
    return said + differences(out, whole) or looked_at(out, folder, len(steps))


def command(out: Path, setting: str) -> list[str]:
    """How to start the run, or how to go on."""
    if (out / "run.json").exists():
        return ["lab", "train", "--out", str(out), "--resume", "--json"]
    model = [mini.model(), "--task", mini.TASK] if setting == "mini" else []
    return ["lab", "train", *model, *SETTINGS[setting], "--out", str(out), "--json"]


def planted(control: str | None, tap: Tap | None = None) -> Callable[[], None]:
    """What a run does before it is itself: tell, and be faulty where that is wanted."""

    def begin() -> None:
        if tap is not None:
            tap()
        if control is not None:
            CONTROLS[control]()

    return begin


def attack(pool: ProcessPoolExecutor, place: Path, times: dict[str, dict[str, float]], kills: int, workers: int,
           seed: int, told: Callable[[int], None], power: float, control: str | None = None,
           moments: tuple[str, ...] = MOMENTS, focus: str = "") -> list[Kill]:
    """Trials until there were so many kills; under a control, until the first loss."""
    found: list[Kill] = []
    running: set[Future[list[Kill]]] = set()
    numbers = itertools.count()
    while True:
        hit = sum(kill.killed or bool(kill.lost) for kill in found)
        over = control is not None and any(kill.lost for kill in found)
        while not over and len(running) < min(workers, kills - hit):
            number = next(numbers)
            setting = list(times)[number % len(times)]
            running.add(pool.submit(trial, number, seed, setting, place / (control or "kills"), times[setting], control,
                                    moments, power, focus))
        if not running:
            return found
        done = next(as_completed(running))
        running.remove(done)
        found += done.result()
        told(sum(kill.killed for kill in found))


REVEALED: dict[str, dict[str, Any]] = {
    "no_rename": {"moments": ("operation",), "power": 0.0, "focus": "/groups/"},
    "no_whole_folders": {"moments": ("operation",), "power": 0.0, "focus": "/checkpoints/"},
    "no_sync": {"moments": ("line", "part"), "power": 1.0},
    "late_lines": {"moments": ("line",), "power": 0.0},
    "line_first": {"moments": ("operation",), "power": 0.0, "focus": "/groups/"}}
"""Where a planted fault shows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=["plain", "full", "critic"])
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--power", type=float, default=0.25, help="share of the trials in which the power fails too")
    parser.add_argument("--controls", nargs="*", choices=sorted(REVEALED), default=[])
    parser.add_argument("--json", type=Path, help="write every kill to this file")
    args = parser.parse_args()
    start, place, console = time.monotonic(), Path(tempfile.mkdtemp(prefix="creditscope-kills-")), Console(stderr=True)
    context = multiprocessing.get_context("spawn")
    with Progress(console=console) as progress, \
            ProcessPoolExecutor(args.workers, context, initializer=warm) as pool:
        bar = progress.add_task("undisturbed runs", total=len(args.settings))
        begins = pool.submit(startup, place)
        whole = {setting: pool.submit(reference, setting, place) for setting in args.settings}
        times = {setting: future.result() | {"start": begins.result() + 1.0} for setting, future in whole.items()}
        progress.remove_task(bar)

        def attacked(name: str, kills: int, **how: Any) -> list[Kill]:
            bar = progress.add_task(name, total=kills)
            (place / (how.get("control") or "kills")).mkdir()
            return attack(pool, place, times, kills, args.workers, args.seed,
                          lambda done: progress.update(bar, completed=done), **how)

        found = attacked("kills", args.kills, moments=tuple(args.moments), power=args.power)
        controls = {name: attacked(name, 20, control=name, **REVEALED[name]) for name in args.controls}
    kills, lost = [kill for kill in found if kill.killed], [kill for kill in found if kill.lost]
    trials = [kill.identical for kill in found if kill.identical is not None]
    blind = [name for name, some in controls.items() if not any(kill.lost for kill in some)]
    summary = {"kills": len(kills), "by_moment": {name: sum(kill.moment == name for kill in kills) for name in MOMENTS},
               "with_power_cut": sum(kill.power for kill in kills), "trials": len(trials), "identical": sum(trials),
               "pages": {str(code): sum(kill.page == code for kill in kills) for code in (200, 503)},
               "with_loss": len(lost), "seed": args.seed, "seconds": round(time.monotonic() - start),
               "controls": {name: next((kill.lost[0] for kill in some if kill.lost), "") for name, some in
                            controls.items()}}
    if args.json:
        args.json.write_text(json.dumps({"summary": summary, "kills": [asdict(kill) for kill in found]}, indent=1))
    print(json.dumps(summary, indent=1))
    for kill in lost:
        print(f"LOST ({kill.setting}, {kill.moment}, power {kill.power}): {'; '.join(kill.lost)[:1000]}")
    for name in blind:
        print(f"BLIND: nothing was lost with {name}")
    if lost:
        print(f"kept for a look: {place}")
    else:
        shutil.rmtree(place)
    return 1 if lost or blind else 0


if __name__ == "__main__":
    sys.exit(main())
