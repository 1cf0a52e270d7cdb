"""A run that is killed, resumed and interrupted in a hurry, while a page follows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from creditscope.record import Record
from creditscope.report.build import build
from creditscope.report.watch import Watched

FLAGS = ["--prompts", "2", "--group", "4", "--max-tokens", "40", "--eval-problems", "0", "--checkpoint-every", "2",
         "--keep-every", "1", "--lr", "1e-4", "--steps", "500", "--device", "cpu"]


def training(out: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "creditscope", "train", *flags, "--out", str(out)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})


def lines(out: Path) -> bytes:
    return (out / "steps.jsonl").read_bytes() if (out / "steps.jsonl").exists() else b""


def wait_until(child: subprocess.Popen[str], out: Path, watched: Watched, before: bytes, more: int) -> None:
    """Look at the page until the run has written so many lines that were not there before."""
    start = time.monotonic()
    while len(set(lines(out).splitlines()) - set(before.splitlines())) < more:
        assert child.poll() is None, child.communicate()
        assert time.monotonic() - start < 400, "the run did not get under way"
        if Record.open(out).steps() if (out / "run.json").exists() else ():
            assert watched.page().endswith(b"</html>\n")
        time.sleep(0.2)


@pytest.mark.slow
def test_two_ctrl_c_at_once_leave_nothing_half_written_and_say_how_to_go_on_and_the_page_outlives_it_all(
        tmp_path: Path) -> None:
    out = tmp_path / "run"
    watched = Watched([out], lambda: build([out], live=True))
    child = training(out, *FLAGS)
    wait_until(child, out, watched, b"", more=3)
    child.kill()
    child.communicate()
    before = lines(out)
    steps = Record.open(out).steps()
    assert watched.page().endswith(b"</html>\n")

    child = training(out, "--resume")
    wait_until(child, out, watched, before, more=2)
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        time.sleep(0.05)
    stdout, stderr = child.communicate(timeout=200)
    assert child.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert f"creditscope train --out {out} --resume" in stdout + stderr
    assert not list(out.rglob(".*.part"))
    again = Record.open(out).steps()
    assert [{**line, **{name: 0 for name in line if name.startswith("time/")}} for line in again[:len(steps)]] == [
        {**line, **{name: 0 for name in line if name.startswith("time/")}} for line in steps]
    assert watched.page().endswith(b"</html>\n")
    assert watched.notice == ""
