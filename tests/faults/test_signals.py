"""A run that is killed, resumed and interrupted in a hurry, while a page follows it; and verbs that wait for a pipe.

Each verb is a process of its own, forked by one that has loaded what it needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from creditscope.runs.record import Record
from faults.kills import LONGEST, Follower, ended, facts, started

FLAGS = ["--prompts", "2", "--group", "4", "--max-tokens", "40", "--eval-problems", "0", "--checkpoint-every", "2",
         "--keep-every", "1", "--lr", "1e-4", "--steps", "500", "--device", "cpu"]

pytestmark = pytest.mark.slow


def wait_until(come: Callable[[], bool], pid: int, log: Path, pause: float = 0.02) -> None:
    """However slow the machine is; the process must live. A pause of 0.2 s where looking is dear."""
    start = time.monotonic()
    while not come():
        assert ended(pid) is None, log.read_text()
        assert time.monotonic() - start < LONGEST, log.read_text()
        time.sleep(pause)


def end_of(pid: int) -> int:
    """Its exit code, once it has ended."""
    start = time.monotonic()
    while (code := ended(pid)) is None:
        if time.monotonic() - start > LONGEST:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return code


# -- a run -------------------------------------------------------------------------------------------------------------


def test_two_ctrl_c_at_once_leave_nothing_half_written_and_say_how_to_go_on_and_the_page_outlives_it_all(
        tmp_path: Path, forks: ProcessPoolExecutor) -> None:
    forks.submit(hurry, tmp_path / "run", tmp_path).result()


def hurry(out: Path, place: Path) -> None:
    page = Follower(out, place / "page.log")
    try:
        pid, log = started(["lab", "train", *FLAGS, "--out", str(out)], place / "log"), place / "log"
        wait_until(lambda: written(out, b"", page) >= 3, pid, log, 0.2)
        os.kill(pid, signal.SIGKILL)
        assert end_of(pid) == -signal.SIGKILL
        before, steps = (out / "steps.jsonl").read_bytes(), Record.open(out).steps()
        assert page.answer() == 200

        pid = started(["lab", "train", "--out", str(out), "--resume"], log)
        wait_until(lambda: written(out, before, page) >= 2, pid, log, 0.2)
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: "stopping after this step" in log.read_text(), pid, log)
        os.kill(pid, signal.SIGINT)
        assert end_of(pid) == 130, log.read_text()
        said = log.read_text()
        assert "Traceback" not in said
        assert f"creditscope lab train --out {out} --resume" in said
        assert not list(out.rglob(".*.part"))
        assert [facts(line) for line in Record.open(out).steps()[:len(steps)]] == [facts(line) for line in steps]
        assert page.answer() == 200
        os.kill(page.pid, signal.SIGINT)
        assert end_of(page.pid) == 0
        assert json.loads((place / "page.log").read_text())["url"] == page.url  # and it said nothing else
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, as it should
            page.close()


def written(out: Path, before: bytes, page: Follower) -> int:
    """How many lines a run has written that were not there before; while it writes, the page stands."""
    now = (out / "steps.jsonl").read_bytes() if (out / "steps.jsonl").exists() else b""
    if (out / "run.json").exists() and Record.open(out).steps():
        assert page.answer() == 200
    return len(set(now.splitlines()) - set(before.splitlines()))


@pytest.mark.parametrize("module", ["creditscope.cli.main", "creditscope.cli.train"])
def test_ctrl_c_while_a_command_is_loading_is_no_traceback(module: str) -> None:
    """The signal is raised where it would hit: at the import of the table of commands, or of the command."""
    program = f"""
import sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Press())
sys.argv = ["creditscope", "lab", "train"]
from creditscope.__main__ import main
main()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "creditscope: interrupted\n")


# -- a pipe ------------------------------------------------------------------------------------------------------------

BEGIN = "grpo  loading the model, then one answer to each of 400 test problems\n"  # what `train` says first

@pytest.mark.parametrize(("verb", "number"), [("inspect", signal.SIGTERM), ("inspect", signal.SIGINT),
                                              ("train", signal.SIGTERM)])
def test_the_first_signal_ends_a_verb_that_waits_for_a_pipe(verb: str, number: signal.Signals, tmp_path: Path,
                                                            forks: ProcessPoolExecutor) -> None:
    pipe, place = tmp_path / "pipe", tmp_path / "place"
    args = {"inspect": ["inspect", str(pipe)],
            "train": ["lab", "train", "--task", f"gsm8k:{pipe}", "--out", str(place / "run")]}
    code, said = forks.submit(interrupted, args[verb], pipe, b"", number).result()
    assert code == 130
    assert said.removeprefix(BEGIN) == "creditscope: interrupted\n"
    assert not place.exists()


def test_the_first_signal_ends_a_verb_between_two_lines_of_a_pipe_with_what_it_read(tmp_path: Path,
                                                                                    forks: ProcessPoolExecutor) -> None:
    rows = [{"prompt": "p", "response": "r", "reward": reward, "step": 1} for reward in (1, 0) * 3]
    rows.append({"prompt": "p", "response": "r", "reward": 1, "step": 2})  # the first step is whole
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    args = ["inspect", str(tmp_path / "pipe"), "--rows", "2"]
    code, said = forks.submit(interrupted, args, tmp_path / "pipe", data, signal.SIGTERM).result()
    assert code == 130
    assert "rollouts                   6\n" in said
    assert "creditscope: " not in said
    assert "Traceback" not in said


def interrupted(args: list[str], pipe: Path, data: bytes, number: int) -> tuple[int, str]:
    """(exit code, all it said) of a verb that has read the data from a pipe and waits for more when a signal comes."""
    os.mkfifo(pipe)
    log, ends = pipe.with_name("log"), []
    pid = started(args, log)

    def connected() -> bool:
        try:
            ends.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody reads yet
            return False
        return True

    wait_until(connected, pid, log)
    os.write(ends[0], data)
    wait_until(lambda: all(sleeps(pid, ends[0]) for _ in range(10)), pid, log)
    os.kill(pid, number)
    code = end_of(pid)
    os.close(ends[0])
    return code, log.read_text()


def sleeps(pid: int, pipe: int) -> bool:
    """Whether nothing is left in the pipe and the process waits, as it does for more."""
    time.sleep(0.03)
    left = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
    return not left and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
