"""A real browser: Chromium, driven by Playwright. Where there is none the tests are skipped, and the last lines say so.

CREDITSCOPE_CHROMIUM names the program; CREDITSCOPE_BROWSER=required makes a missing one a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from report.conftest import base, long_run, rich_run  # noqa: F401

FLAGS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def chromium() -> str | None:
    """The first of the programs that answers."""
    for name in (os.environ.get("CREDITSCOPE_CHROMIUM"), "chromium", "google-chrome"):
        found = shutil.which(name) if name else None
        if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    return None


def lacking() -> str | None:
    """What there would have to be for these tests."""
    try:
        import axe_playwright_python  # noqa: F401
        import playwright  # noqa: F401
    except ImportError:
        return "Playwright or axe is not installed: pip install 'creditscope[browser]'"
    if chromium() is None:
        return "no Chromium was found: apt-get install chromium, or set CREDITSCOPE_CHROMIUM"
    return None


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of this process."""
    reason = lacking()
    if reason and os.environ.get("CREDITSCOPE_BROWSER") == "required":
        pytest.fail(f"CREDITSCOPE_BROWSER=required, and {reason}")
    if reason:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to be root inside its sandbox
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=[*FLAGS, *root])
        yield started
        started.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A skipped browser test is easily overlooked: say it in words of its own."""
    skipped = [report for report in terminalreporter.stats.get("skipped", [])
               if "browser" in getattr(report, "keywords", ())]  # a module that skips itself has none
    if skipped:
        terminalreporter.section("BROWSER TESTS WERE SKIPPED", sep="!", red=True)
        terminalreporter.write_line(f"{len(skipped)} tests did not run: {lacking()}")

