"""Runs side by side, each a process with one thread; where one fails the others go on.

`Executor` is the contract of everything that runs jobs: `run_jobs` here, `on_ray.RayExecutor` on a cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from creditscope.errors import CreditscopeError

POLL = 0.2  # seconds
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Small models gain nothing from a second thread, and runs side by side compete for the cores."""


@dataclass(frozen=True)
class Job:
    """Arguments of `creditscope` to run, and the file beside the run's folder for its error stream."""

    name: str
    args: tuple[str, ...]
    log: Path
    out: Path | None = None
    """The run's folder, where the arguments have `--out`: another machine's copy of it is brought here."""
    inputs: tuple[str, ...] = ()
    """Files and folders below the working directory that the run reads."""

    def elsewhere(self) -> list[str]:
        """The arguments without --out and --resume, which depend on the machine.

        >>> Job("a", ("lab", "train", "--out", "runs/a", "--resume"), Path("a.log"), Path("runs/a")).elsewhere()
        ['lab', 'train']
        """
        words = list(self.args)
        if self.out is not None:
            at = words.index("--out")
            words = [word for word in words[:at] + words[at + 2:] if word != "--resume"]
        return words


class Executor(Protocol):
    """Runs the jobs, `at_once` at a time: ended job -> why it failed (None: it did not).

    `watch(running, ended)` is called a few times per second. Once `stop()` is true no job is started, and the running
    ones end after their step with everything kept. An exception ends them at once.
    """

    def __call__(self, jobs: Sequence[Job], at_once: int, stop: Callable[[], bool],
                 watch: Callable[[Sequence[str], Mapping[str, str | None]], None]) -> dict[str, str | None]: ...


def run_jobs(jobs: Sequence[Job], at_once: int, stop: Callable[[], bool],
             watch: Callable[[Sequence[str], Mapping[str, str | None]], None]) -> dict[str, str | None]:
    """The `Executor` of this machine. A stop is SIGTERM, and an exception kills the processes."""
    waiting = list(jobs)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    ended: dict[str, str | None] = {}
    asked = False
    try:
        while waiting or running:
            if stop() and not asked:
                asked = True
                waiting.clear()
                for process in running.values():
                    process.terminate()
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job] = start(job)
            time.sleep(POLL)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                code = running.pop(job).returncode
                if not asked or code == 0:
                    ended[job.name] = None if code == 0 else last_line(job, code)
                if asked or not job.log.stat().st_size:
                    job.log.unlink()
            watch([job.name for job in running], ended)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return ended


def start(job: Job) -> subprocess.Popen[bytes]:
    """Outside the terminal's process group: Ctrl-C reaches the parent alone, which signals each child once."""
    try:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            return subprocess.Popen([sys.executable, "-P", "-m", "creditscope", *job.args], stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, stderr=log, process_group=0,
                                    env=os.environ | ONE_THREAD)
    except OSError as error:
        raise CreditscopeError(f"cannot start {job.name}: {error.strerror or error}") from None


def last_line(job: Job, code: int) -> str:
    """The last line that a failed run wrote, or the signal that ended it."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
        return f"killed by {name}" + ("; was there enough memory?" if -code == signal.SIGKILL else "")
    with contextlib.suppress(OSError):
        said = [line for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        if said:
            return said[-1].strip().removeprefix("creditscope: ")
    return f"exit code {code}"


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
