"""The page on a phone, 390 px wide: the first screen has the cause and the remedy, and only tables scroll sideways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from browser.opened import opened
from creditscope.report import settings, standing
from creditscope.report.build import build
from creditscope.report.run import read_run
from makers import edit_config
from records import write_record
from report import records

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WIDTH, HEIGHT = 390, 844
"""Of a common phone, in CSS pixels."""
LINE = {"reward/std": 0.0, "reward/min": 0.0, "reward/max": 0.0, "signal/groups": 4, "signal/live_groups": 0,
        "signal/dead_groups": 1.0, "credit/dead_groups": 1.0, "rollouts/spent": 16, "grad/norm": 0.0,
        "overshoot/1/past": 0.01, "overshoot/1/distance": 0.2, "overshoot/1/after": 0.5, "overshoot/1/kl": 1e-4,
        "objective/value": 0.0, "update/cosine": 0.5, "update/ratio": 1e-4}


def stalled(path: Path, **config: Any) -> Path:
    """A run whose rewards are 0 at every step: broken, with a remedy."""
    return write_record(path, [LINE | {"reward/mean": 0.0}] * 30, {
        "model": "tiny", "task": "arithmetic", "method": "grpo", "group": 4, "prompts": 4, "steps": 30, "seed": 0,
        "lr": 1e-4, "inner_steps": 2} | config)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs of each page, and its file beside them."""
    base = tmp_path_factory.mktemp("phone")
    stalled(base / "one" / "run")
    for group in (2, 4):
        for lr in (1e-4, 1e-3):
            stalled(base / "many" / f"a-rather-long-name-of-a-folder-{group}-{lr}", group=group, lr=lr)
    other = records.bare(base / "many" / "other")
    edit_config(other, task="turns")
    for name in ("one", "many"):
        (base / f"{name}.html").write_text(build([base / name]), encoding="utf-8")
    return {name: base / name for name in ("one", "many")}


def phone(browser: Any, runs: Path, ground: str) -> Any:
    return opened(browser, runs.with_suffix(".html").as_uri(), width=WIDTH, color_scheme=ground)


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_the_first_screen_of_a_run_has_its_cause_and_its_remedy(
        ground: str, browser: Any, pages: dict[str, Path]) -> None:
    first = read_run(pages["one"] / "run").diagnosis.first
    assert first is not None
    with phone(browser, pages["one"], ground) as tab:
        assert tab.page.locator(".diagnosis .headline").inner_text() == f"{first.rule}: {first.sentence}."
        change = tab.page.locator(".diagnosis > dl .change dd")
        assert change.inner_text() == first.change
        box = change.bounding_box()
        assert box["y"] + box["height"] <= HEIGHT


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_the_first_screen_of_several_runs_has_the_warning_the_worst_cause_and_its_remedy(
        ground: str, browser: Any, pages: dict[str, Path]) -> None:
    several = settings.read([pages["many"]])
    fault = standing.faults(several)[0]
    assert several.notice is not None
    with phone(browser, pages["many"], ground) as tab:
        assert several.notice.line in tab.page.locator("#notice summary").inner_text()
        change = tab.page.locator(".faulty .change").first
        assert change.inner_text() == f"Change: {fault.change}."
        box = change.bounding_box()
        assert box["y"] + box["height"] <= HEIGHT
        # one line: what it is about is folded up
        assert not tab.page.locator("#notice p").is_visible()
        tab.page.locator("#notice summary").click()
        assert tab.page.locator("#notice p").inner_text() == several.notice.details


@pytest.mark.parametrize("which", ["one", "many"])
def test_only_boxes_scroll_sideways_and_every_wide_table_is_in_one(
        which: str, browser: Any, pages: dict[str, Path]) -> None:
    with phone(browser, pages[which], "light") as tab:
        tab.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= WIDTH
        tab.page.mouse.move(WIDTH / 2, HEIGHT / 2)
        tab.page.mouse.wheel(300, 0)
        assert tab.page.evaluate("window.scrollX") == 0
        wide = tab.page.evaluate("[...document.querySelectorAll('table')].filter((one) => one.scrollWidth > innerWidth)"
                                 ".map((one) => getComputedStyle(one.parentElement).overflowX)")
        assert wide
        assert set(wide) == {"auto"}


def test_a_link_to_a_definition_opens_its_part_of_the_glossary(browser: Any, pages: dict[str, Path]) -> None:
    with phone(browser, pages["one"], "light") as tab:
        term = tab.page.locator("#glossary-update_cosine")
        assert not term.is_visible()
        tab.page.locator('#optimizer a[href="#glossary-update_cosine"]').click()
        tab.until("document.querySelector('#glossary-update_cosine').checkVisibility()")
        box = term.bounding_box()
        assert 0 <= box["y"] <= HEIGHT
        assert not tab.page.locator("#glossary-w").is_visible()  # the other parts stay folded up


def test_an_address_that_names_a_definition_opens_it(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, f"{pages['one'].with_suffix('.html').as_uri()}#glossary-w", width=WIDTH) as tab:
        assert tab.page.locator("#glossary-w").is_visible()
