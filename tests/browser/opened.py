"""A page as a browser has it: what it said, what it asked for, and what went wrong in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

READY = "html[data-ready=yes]"


@dataclass
class Opened:
    """A tab, and everything in it that is no silence."""

    page: Any
    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def state(self) -> dict[str, str]:
        """What the address carries."""
        return dict(part.split("=", 1) for part in self.page.url.partition("#")[2].split("&") if "=" in part)

    def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true, over loads. Playwright's own wait needs eval, which the page forbids."""
        from playwright.sync_api import Error

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.page.evaluate(expression):
                    return
            except Error:  # the page is being loaded
                pass
            self.page.wait_for_timeout(100)
        raise AssertionError(f"not true after {seconds} s: {expression}")

    def quiet(self, url: str) -> None:
        """Nothing was logged, nothing failed, nothing asked, and nothing but the page itself was loaded."""
        assert self.console == []
        assert self.errors == []
        assert self.dialogs == []
        # What the page draws into itself (a picture as data) leaves no machine.
        assert [asked for asked in self.requests if not asked.startswith(("data:", "blob:"))] == [url]


@contextmanager
def opened(browser: Any, url: str, wait: bool = True, width: int = 1200, **context: Any) -> Iterator[Opened]:
    """The page of `url` in a tab of its own, when its scripts are done."""
    tab = browser.new_context(viewport={"width": width, "height": 900}, **context)
    page = tab.new_page()
    found = Opened(page)
    page.on("console", lambda message: found.console.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))

    def dismiss(dialog: Any) -> None:
        found.dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    try:
        page.goto(url)
        if wait:
            page.wait_for_selector(READY, timeout=60_000)
        yield found
    finally:
        tab.close()
