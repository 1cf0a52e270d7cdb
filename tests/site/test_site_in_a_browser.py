"""The built site in a real browser, from disk and from a server below a path of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from browser.opened import READY, Opened, opened

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

LUMINANCE = """(() => {
  const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number);
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
})()"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """No line per request."""


@pytest.fixture(scope="module")
def served(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site below /deep/path/ of a server on this machine."""
    top = tmp_path_factory.mktemp("served")
    (top / "deep").mkdir()
    (top / "deep" / "path").symlink_to(site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(top)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/deep/path/"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["from disk", "from a server"])
def base(request: pytest.FixtureRequest, site: Path) -> str:
    """The address of the site's folder."""
    return f"{site.as_uri()}/" if request.param == "from disk" else request.getfixturevalue("served")


def stays_inside(tab: Opened, base: str) -> None:
    """Nothing was asked for outside of the site, and nothing went wrong."""
    assert [asked for asked in tab.requests if not asked.startswith((base, "data:", "blob:"))] == []
    assert tab.console == []
    assert tab.errors == []


def entries(site: Path) -> list[str]:
    return sorted(path.parent.name for path in site.glob("docs/gallery/*/report.html"))


def test_the_top_address_opens_the_home_page(base: str, browser: Any) -> None:
    with opened(browser, f"{base}index.html", wait=False) as tab:
        tab.until("location.pathname.endsWith('docs/index.html') && document.querySelector('h1') !== null")
        assert tab.page.locator("h1").first.inner_text().strip() == "creditscope"
        stays_inside(tab, base)


def test_a_search_in_the_side_bar_finds_a_page_that_opens(base: str, browser: Any) -> None:
    with opened(browser, f"{base}docs/index.html", wait=False) as tab:
        box = tab.page.locator("input.sidebar-search")
        box.fill("overshoot")
        box.press("Enter")
        tab.until("document.querySelector('#search-results li a[href^=\"docs/optimizer.html\"]') !== null")
        tab.page.locator("#search-results li a").first.click()
        tab.until("!location.pathname.endsWith('search.html') && document.querySelector('h1') !== null")
        assert "overshoot" in tab.page.locator("article").inner_text().lower()
        stays_inside(tab, base)


def test_a_name_of_the_api_is_found_by_search(base: str, browser: Any) -> None:
    with opened(browser, f"{base}search.html?q=effective_credit", wait=False) as tab:
        name = "docs/api/creditscope.html#creditscope.effective_credit"
        tab.until(f"document.querySelector('#search-results li a[href=\"{name}\"]') !== null")


def test_the_gallery_opens_reports_whose_first_line_is_the_diagnosis(base: str, site: Path, browser: Any) -> None:
    assert len(entries(site)) >= 4
    for name in entries(site):
        with opened(browser, f"{base}docs/gallery/index.html", wait=False) as tab:
            shown = tab.page.locator(".gallery-entry", has=tab.page.locator(f"a[href='{name}/report.html']"))
            said = shown.locator(".diagnosis").inner_text()
            shown.locator("a.open-report").click()
            tab.page.wait_for_selector(READY, timeout=60_000)
            first = " ".join(tab.page.locator("body").inner_text().split())[:200]
            assert said[0] in "✗!?✓"
            assert " ".join(said.split()).lstrip("✗!?✓ ")[:60] in first, name
            assert tab.page.locator("#claims").count() == 0, "a report of the gallery has none of the papers' lines"
            stays_inside(tab, base)


@pytest.mark.parametrize("path", ["docs/index.html", "docs/gallery/index.html", "docs/doctor.html"])
def test_a_page_fits_a_phone_and_follows_the_scheme_of_the_system(path: str, site: Path, browser: Any) -> None:
    for scheme, (low, high) in {"light": (0.9, 1.0), "dark": (0.0, 0.2)}.items():
        with opened(browser, (site / path).as_uri(), wait=False, width=390, color_scheme=scheme) as tab:
            assert low <= tab.page.evaluate(LUMINANCE) <= high
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_button_changes_light_to_dark_and_the_choice_stays_on_the_next_page(served: str, browser: Any) -> None:
    with opened(browser, f"{served}docs/index.html", wait=False, color_scheme="light") as tab:
        for _ in range(3):  # auto, then the two schemes in turn
            tab.page.locator("button.theme-toggle:visible").first.click()
            if tab.page.evaluate("document.body.dataset.theme") == "dark":
                break
        tab.until(f"{LUMINANCE} < 0.2")
        tab.page.goto(f"{served}docs/which.html")
        tab.until(f"{LUMINANCE} < 0.2")


def test_a_formula_is_drawn_without_a_script(site: Path, browser: Any) -> None:
    pages = [path for path in site.rglob("*.html") if "<math" in path.read_text()]
    for path in pages:
        with opened(browser, path.as_uri(), wait=False, java_script_enabled=False) as tab:
            box = tab.page.locator("math").first.bounding_box()
            assert box["width"] > 5
            assert box["height"] > 5
