"""--watch in a real browser, beside a real training: the page follows the run and keeps what the reader chose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from browser.opened import opened
from creditscope.runs.record import Record
from report import records

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@contextmanager
def watching(run: Path) -> Iterator[str]:
    """The address under which `creditscope report RUN --watch` serves."""
    command = [sys.executable, "-m", "creditscope", "report", run, "--watch", "--json"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as verb:
        assert verb.stdout is not None
        try:
            yield json.loads("".join(verb.stdout.readline() for _ in range(3)))["url"]
        finally:
            verb.send_signal(signal.SIGINT)
        assert verb.wait(timeout=30) == 0


def version(tab: Any) -> str:
    found: str = tab.page.evaluate("document.documentElement.dataset.version")
    return found


def until_new(tab: Any, old: str) -> None:
    """Wait until the page is another one than `old`, and its scripts are done."""
    tab.until(f"(({{ ready, version }}) => ready === 'yes' && version !== '{old}')(document.documentElement.dataset)")


def add_step(run: Path, step: int) -> None:
    with Record.resume(run, Record.open(run).config) as record:
        record.append(step, {"reward/mean": 0.5, "signal/groups": 4, "signal/live_groups": 2, "rollouts/spent": 16})


def test_a_new_step_shows_by_itself_and_the_reader_stays_where_he_was(browser: Any, tmp_path: Path) -> None:
    run = records.bare(tmp_path / "run")
    with watching(run) as url, opened(browser, url) as tab:
        assert tab.page.locator("#step").get_attribute("max") == "5"
        tab.page.locator("#step").press("Home")
        tab.page.locator("#step").focus()
        tab.page.evaluate("window.scrollTo(0, 700)")
        old = version(tab)
        add_step(run, 6)
        until_new(tab, old)
        assert tab.page.locator("#step").get_attribute("max") == "6"
        assert tab.state()["step"] == "0"
        tab.until("Math.abs(window.scrollY - 700) < 5")
        assert tab.page.evaluate("document.activeElement.id") == "step"
        assert tab.errors == []
        assert tab.console == []
        assert {asked.removeprefix(url) for asked in tab.requests} == {"", "version"}


def test_a_paused_page_stands_still_and_goes_on_when_it_is_asked_to(browser: Any, tmp_path: Path) -> None:
    run = records.bare(tmp_path / "run")
    with watching(run) as url, opened(browser, url) as tab:
        pause = tab.page.locator("#live-pause")
        pause.click()
        assert pause.inner_text() == "Resume"
        assert tab.page.locator("#live-status").inner_text().startswith("Live: paused; ")
        old = version(tab)
        add_step(run, 6)
        tab.page.wait_for_timeout(4000)
        assert version(tab) == old
        pause.click()
        until_new(tab, old)
        assert pause.inner_text() == "Pause"
        assert tab.page.locator("#live-status").inner_text() == "Live: finished, 7 of 6 steps."
        tab.until("/^updated \\d+ s ago$/.test(document.querySelector('#live-age').textContent)")


def test_a_record_that_is_damaged_on_the_way_leaves_the_page_with_a_notice(browser: Any, tmp_path: Path) -> None:
    run = records.bare(tmp_path / "run")
    with watching(run) as url, opened(browser, url) as tab:
        whole = (run / "steps.jsonl").read_text()
        (run / "steps.jsonl").write_text(whole + "{}\n")
        tab.until("document.querySelector('#live-status').textContent.includes('not a step')")
        assert tab.page.locator(".answer").count() == 4
        (run / "steps.jsonl").write_text(whole)
        tab.until("document.querySelector('#live-status').textContent === 'Live: finished, 6 of 6 steps.'")


@pytest.mark.nightly
def test_the_page_follows_a_real_training(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "creditscope", "lab", "train", "--group", "4", "--prompts", "4", "--steps", "400",
               "--eval-problems", "0", "--keep-every", "1", "--out", run, "--json"]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not ((run / "steps.jsonl").exists() and (run / "steps.jsonl").read_text()):
            assert training.poll() is None
            time.sleep(0.1)
        with watching(run) as url, opened(browser, url) as tab:
            seen = [int(tab.page.locator("#step").get_attribute("max"))]
            for _ in range(2):
                until_new(tab, version(tab))
                seen.append(int(tab.page.locator("#step").get_attribute("max")))
            assert training.poll() is None  # it was going on all the while
            assert seen[0] <= seen[1] <= seen[2]
            assert seen[2] > seen[0]
            assert tab.errors == []
            assert tab.page.locator(".answer .sentence").count() == 4
    finally:
        training.kill()
        training.wait()
