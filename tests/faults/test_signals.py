"""A run that is killed, resumed and interrupted in a hurry, while a page follows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from creditscope.record import Record

FLAGS = ["--prompts", "2", "--group", "4", "--max-tokens", "40", "--eval-problems", "0", "--checkpoint-every", "2",
         "--keep-every", "1", "--lr", "1e-4", "--steps", "500", "--device", "cpu"]


def training(out: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "creditscope", "train", *flags, "--out", str(out)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})


def lines(out: Path) -> bytes:
    return (out / "steps.jsonl").read_bytes() if (out / "steps.jsonl").exists() else b""


class Page:
    """A `creditscope report --watch`, as a browser meets it."""

    def __init__(self, out: Path) -> None:
        self.child = subprocess.Popen([sys.executable, "-m", "creditscope", "report", str(out), "--watch", "--json"],
                                      text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.child.stdout is not None
        told = ""
        while line := self.child.stdout.readline():
            told += line
            if line == "}\n":
                break
        self.url = json.loads(told)["url"]

    def stands(self) -> bool:
        """Whether a whole page is answered, and nothing keeps it from being the newest."""
        with urllib.request.urlopen(self.url, timeout=400) as answer, \
                urllib.request.urlopen(f"{self.url}version", timeout=400) as version:
            return answer.read().endswith(b"</html>\n") and json.loads(version.read())["notice"] == ""

    def end(self) -> tuple[int, str]:
        """(exit code, what it complained of) after Ctrl-C."""
        self.child.send_signal(signal.SIGINT)
        _, said = self.child.communicate(timeout=200)
        return self.child.returncode, said


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    found = Page(tmp_path / "run")
    yield found
    found.child.kill()
    found.child.wait()


def wait_until(child: subprocess.Popen[str], out: Path, page: Page, before: bytes, more: int) -> None:
    """Look at the page until the run has written so many lines that were not there before."""
    start = time.monotonic()
    while len(set(lines(out).splitlines()) - set(before.splitlines())) < more:
        assert child.poll() is None, child.communicate()
        assert time.monotonic() - start < 400, "the run did not get under way"
        if Record.open(out).steps() if (out / "run.json").exists() else ():
            assert page.stands()
        time.sleep(0.2)


@pytest.mark.slow
def test_two_ctrl_c_at_once_leave_nothing_half_written_and_say_how_to_go_on_and_the_page_outlives_it_all(
        tmp_path: Path, page: Page) -> None:
    out = tmp_path / "run"
    child = training(out, *FLAGS)
    wait_until(child, out, page, b"", more=3)
    child.kill()
    child.communicate()
    before = lines(out)
    steps = Record.open(out).steps()
    assert page.stands()

    child = training(out, "--resume")
    wait_until(child, out, page, before, more=2)
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
    assert page.stands()
    assert page.end() == (0, "")


def test_ctrl_c_while_the_verbs_are_loading_is_no_traceback() -> None:
    """The signal is raised where it would hit: at the import of one of them."""
    program = """
import sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "creditscope.verbs.train":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Press())
from creditscope.__main__ import main
main()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "creditscope: interrupted\n")


@pytest.mark.parametrize(("verb", "number"), [("scope", signal.SIGTERM), ("scope", signal.SIGINT),
                                              ("train", signal.SIGTERM)])
def test_the_first_signal_ends_a_verb_that_waits_for_a_pipe(verb: str, number: signal.Signals, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    args = {"scope": ["scope", str(pipe)],
            "train": ["train", "--task", f"gsm8k:{pipe}", "--out", str(tmp_path / "run")]}[verb]
    child = subprocess.Popen([sys.executable, "-m", "creditscope", *args], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
    end = connect(child, pipe)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    os.close(end)
    assert (child.returncode, said) == (130, "creditscope: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_the_first_signal_ends_a_verb_between_two_lines_of_a_pipe_with_what_it_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = subprocess.Popen([sys.executable, "-m", "creditscope", "scope", str(pipe), "--rows", "2"], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with pipe.open("w") as out:
        for reward in (1, 0) * 3:
            out.write(json.dumps({"prompt": "p", "response": "r", "reward": reward, "step": 1}) + "\n")
        out.write('{"prompt": "p", "response": "r", "reward": 1, "step": 2}\n')  # the first step is whole
        out.flush()
        time.sleep(2)
        child.send_signal(signal.SIGTERM)
        told, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (130, "")
    assert "rollouts                   6\n" in told


def connect(child: subprocess.Popen[str], pipe: Path) -> int:
    """The writing end, once the child has opened the other: it gets nothing, and waits."""
    start = time.monotonic()
    while time.monotonic() - start < 60 and child.poll() is None:
        try:
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.1)
            continue
        time.sleep(0.5)
        return end
    raise AssertionError(child.communicate())
