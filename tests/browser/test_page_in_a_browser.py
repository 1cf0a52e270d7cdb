"""The report in a real browser: it answers, follows clicks and keys, keeps its state in the address, and is for all."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from browser.opened import READY, opened
from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.read import read
from creditscope.report.build import build
from depth import FULL
from makers import edit_config
from report import records

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def write(path: Path, runs: list[Path]) -> str:
    path.write_text(build(runs, papers=True), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="session")
def full(rich_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the real run."""
    return write(tmp_path_factory.mktemp("pages") / "full.html", [rich_run])


@pytest.fixture(scope="session")
def compared(rich_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real run beside three others that differ in the seed."""
    base = tmp_path_factory.mktemp("compared")
    for seed in range(3):
        path = records.bare(base / f"seed-{seed}")
        edit_config(path, seed=seed)
    return write(base / "compared.html", [rich_run, base])


# -- it is there ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["full", "compared"])
def test_a_page_says_nothing_to_the_console_and_loads_nothing_but_itself(
        which: str, browser: Any, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(which)
    with opened(browser, url) as tab:
        for heading in tab.page.locator("main h2").all():
            heading.scroll_into_view_if_needed()
        assert tab.page.locator(".chart svg").count() >= 4
        tab.quiet(url)


def test_a_record_with_next_to_nothing_is_a_quiet_page_too(browser: Any, tmp_path: Path) -> None:
    url = write(tmp_path / "bare.html", [records.bare(tmp_path / "run")])
    with opened(browser, url) as tab:
        tab.quiet(url)
        assert tab.page.locator(".missing:visible").count() >= 3


@pytest.mark.deep
def test_five_hundred_steps_are_a_quiet_page(browser: Any, long_run: Path, tmp_path: Path) -> None:
    url = write(tmp_path / "long.html", [long_run])
    with opened(browser, url) as tab:
        tab.quiet(url)
        tab.page.locator("#step").press("Home")
        assert tab.state()["step"] == "0"


# -- the four answers -------------------------------------------------------------------------------------------------


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The trained steps, read without the report's code."""
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollouts/spent" in line]


def mean(lines: list[dict[str, Any]], name: str) -> float:
    """Over the last ten that have it."""
    values = [line[name] for line in lines if name in line][-10:]
    return sum(values) / len(values)


def says(text: str, pattern: str, true: float, unit: float = 1.0) -> bool:
    """Whether the number printed there is this one, to half of the last digit that is printed; at least two are."""
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in {text!r}"
    whole, _, rest = found[1].partition(".")
    assert len((whole + rest).lstrip("0")) >= 2 or float(found[1]) == int(float(found[1])), found[1]
    return abs(float(found[1]) * unit - true) <= 0.5 * 10.0 ** -len(rest) * unit * (1 + 1e-9)


def test_the_four_sentences_are_what_the_record_s_numbers_say(browser: Any, full: str, rich_run: Path) -> None:
    lines = lines_of(rich_run)
    with opened(browser, full) as tab:
        said = {topic: tab.page.locator(f"[data-topic={topic}] .sentence").inner_text()
                for topic in ("signal", "credit", "directions", "optimiser")}
        states = {topic: tab.page.locator(f"[data-topic={topic}]").get_attribute("data-state") for topic in said}
        words = {topic: tab.page.locator(f"[data-topic={topic}] .state").inner_text() for topic in said}
    assert says(said["signal"], r"([\d.]+) of [\d.]+ groups", mean(lines, "signal/live_groups"))
    assert says(said["signal"], r"of ([\d.]+) groups", mean(lines, "signal/groups"))
    assert says(said["credit"], r"top tenth of tokens carries ([\d.]+) %", mean(lines, "w/top10_mass"), 0.01)
    assert says(said["directions"], r"push in ([\d.]+) directions", mean(lines, "gram/group/effective_rank"))
    assert says(said["directions"], r"null ([\d.]+)", mean(lines, "gram/group/w_null"))
    assert says(said["optimiser"], r"by ([\d.]+) %", mean(lines, "optimizer/scale_change"), 0.01)
    assert says(said["optimiser"], r"([\d.]+) % of bounded tokens", mean(lines, "overshoot/past"), 0.01)
    assert all(states[topic] in words[topic] for topic in said)


def test_the_page_leads_with_the_diagnosis_of_the_doctor(browser: Any, full: str, rich_run: Path) -> None:
    found = diagnose(read(rich_run))
    with opened(browser, full) as tab:
        block = tab.page.locator("#diagnosis")
        assert block.get_attribute("data-state") == found.state
        said = f"{found.first.rule}: {found.first.sentence}." if found.first else found.headline[2:]
        assert block.locator(".headline").inner_text() == said
        top = block.bounding_box()
        assert top is not None
        assert top["y"] < tab.page.locator(".answers").bounding_box()["y"]


def test_each_answer_leads_to_its_evidence(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        links = tab.page.locator(".answer a")
        assert links.count() == 4
        for link in links.all():
            target = link.get_attribute("href")
            link.click()
            assert tab.page.locator(f"section{target}").count() == 1
            assert tab.page.locator(f"section{target}").evaluate("e => e.getBoundingClientRect().top") < 900


def test_a_link_to_a_section_leaves_what_was_chosen_in_the_address(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        tab.page.locator("#step").press("Home")
        for link in (".answer a >> nth=0", "nav a[href='#layers']"):
            tab.page.locator(link).click()
            tab.until("location.hash === '#step=0'")
        assert tab.page.evaluate("scrollY") > 0
        tab.page.reload()
        tab.page.wait_for_selector(READY)
        assert shown_step(tab) == "0"


def test_without_scripts_the_four_sentences_can_be_read(browser: Any, full: str) -> None:
    with opened(browser, full, wait=False, java_script_enabled=False) as tab:
        assert tab.page.locator(".answer .sentence:visible").count() == 4
        assert tab.page.locator("dl.facts:visible").count() == 1


def test_on_paper_the_answers_stand_and_the_buttons_do_not(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        tab.page.emulate_media(media="print")
        assert tab.page.locator(".answer .sentence:visible").count() == 4
        assert tab.page.locator(".tools:visible").count() == 0
        assert len(tab.page.pdf()) > 20_000


def test_on_paper_a_dark_page_is_black_on_white_and_nothing_is_cut(browser: Any, full: str) -> None:
    with opened(browser, full, width=760, color_scheme="dark") as tab:
        tab.page.emulate_media(media="print", color_scheme="dark")
        style = "getComputedStyle(document.body)"
        assert tab.page.evaluate(f"[{style}.color, {style}.backgroundColor]") == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
        cut = tab.page.evaluate("""[...document.querySelectorAll("main table")].filter(
            (e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 120))""")
        assert cut == []


# -- one state for all ------------------------------------------------------------------------------------------------


def shown_step(tab: Any) -> str:
    """The step that the token view shows."""
    text: str = tab.page.locator("#token-step").evaluate("box => box.selectedOptions[0].textContent")
    return text


def test_a_click_on_a_chart_s_step_changes_the_token_view(browser: Any, full: str, rich_run: Path) -> None:
    kept = sorted(int(file.stem) for file in (rich_run / "groups").glob("*.npz"))
    with opened(browser, full) as tab:
        assert shown_step(tab) == str(kept[-1])
        before = tab.page.locator(".answers-grid").inner_text()
        plot = tab.page.locator("#steps .chart svg").first
        plot.scroll_into_view_if_needed()
        box = plot.locator("path.background").first.bounding_box()  # from the first step to the last
        assert box
        tab.page.mouse.click(box["x"] + 1, box["y"] + box["height"] / 2)
        assert tab.state()["step"] == "0"
        assert shown_step(tab) == "0"
        assert tab.page.locator(".answers-grid").inner_text() != before
        assert tab.page.locator("#step-told").inner_text().startswith("step 0 ")
        tab.page.mouse.click(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
        assert tab.state()["step"] == str(kept[-1])
        assert tab.page.locator(".answers-grid").inner_text() == before


def test_the_slider_and_its_buttons_move_the_step_by_keyboard(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        slider = tab.page.locator("#step")
        slider.focus()
        slider.press("Home")
        assert tab.state()["step"] == "0"
        slider.press("ArrowRight")
        assert tab.state()["step"] == "1"
        assert slider.get_attribute("aria-valuetext") == "step 1"
        tab.page.locator("#step-on").focus()
        tab.page.keyboard.press("Enter")
        assert tab.state()["step"] == "2"
        assert shown_step(tab) == "2"


def focused(tab: Any) -> tuple[int, int]:
    """(rollout, token) that has the focus."""
    row, token = tab.page.evaluate("() => [document.activeElement.dataset.row, document.activeElement.dataset.token]")
    return int(row), int(token)


def test_arrow_keys_move_through_the_tokens_and_the_address_follows(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        first = tab.page.locator(".answers-grid .token[tabindex='0']")
        assert first.count() == 1  # one token is in the tab order
        first.focus()
        row, token = focused(tab)
        for key, to in (("ArrowRight", (row, token + 1)), ("ArrowRight", (row, token + 2)),
                        ("ArrowLeft", (row, token + 1)), ("Home", (row, 0))):
            tab.page.keyboard.press(key)
            assert focused(tab) == to
            assert (tab.state()["row"], tab.state()["token"]) == (str(to[0]), str(to[1]))
        tab.page.keyboard.press("ArrowDown")
        assert focused(tab)[0] != row
        tab.page.keyboard.press("ArrowUp")
        assert focused(tab)[0] == row
        values = tab.page.locator(".token-panel").inner_text()
        assert "log π" in values or "logp" in values or "entropy" in values.lower()
        group = tab.page.locator("#token-group").input_value()
        tab.page.keyboard.press("]")
        assert tab.page.locator("#token-group").input_value() != group


def test_the_address_carries_what_was_chosen_over_a_load_and_into_another_window(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        tab.page.locator("#step").press("Home")
        tab.page.locator(".answers-grid .token").nth(3).click()
        colours = tab.page.locator("#token-colour option")
        tab.page.locator("#token-colour").select_option(colours.nth(1).get_attribute("value"))
        chosen, url = tab.state(), tab.page.url
        assert set(chosen) >= {"step", "row", "token", "colour"}

        def standing(page: Any) -> list[str]:
            return [page.locator("#token-step").input_value(), page.locator("#token-group").input_value(),
                    page.locator("#token-colour").input_value(), page.locator(".token-panel").inner_text()]

        before = standing(tab.page)
        tab.page.reload()
        tab.page.wait_for_selector(READY)
        assert (tab.state(), standing(tab.page)) == (chosen, before)
    with opened(browser, url) as other:
        assert standing(other.page) == before


def test_an_address_that_names_a_token_opens_there_and_says_what_is_not_in_the_file(browser: Any, full: str) -> None:
    with opened(browser, f"{full}#step=0&row=1&token=2") as tab:
        box = tab.page.locator(".answers-grid .token[aria-selected=true]").bounding_box()
        assert box
        assert 0 < box["y"] < 900
        assert tab.page.locator(".told").inner_text() == ""
    with opened(browser, f"{full}#step=77777&row=1&token=9999&colour=gold") as tab:
        told = tab.page.locator(".told").inner_text()
    for said in ("Step 77777 is not in this file", "Rollout 1 has no token 9999", "No gold was recorded"):
        assert said in told
    with opened(browser, f"{full}#row=8888") as tab:
        assert "Rollout 8888 is not in this group." in tab.page.locator(".told").inner_text()


def test_a_line_of_the_prefix_tree_stays_in_the_panel_until_the_mouse_moves(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        panel, line = tab.page.locator(".token-panel"), tab.page.locator("button.node").nth(1)
        line.click()
        row, token = tab.state()["row"], int(tab.state()["token"])
        named = f"token {token + 1} of"
        # The page moves on below a mouse at rest, so that some token comes to lie under it.
        box = tab.page.locator(".answers-grid .token").last.bounding_box()
        assert box
        tab.page.mouse.move(box["x"] + 2, box["y"] + 4 + 30)
        line.dispatch_event("click")
        tab.page.mouse.wheel(0, 30)
        tab.page.wait_for_timeout(300)
        assert named in panel.inner_text()
        assert f"rollout {row}" in panel.inner_text()
        other = tab.page.locator(".answers-grid .one").last.locator(".token").first
        other.hover()
        assert "token 1 of" in panel.inner_text()
        assert f"rollout {other.get_attribute('data-row')}" in panel.inner_text()


def test_a_token_that_ends_a_line_is_one_box(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        boxes = tab.page.evaluate("""[...document.querySelectorAll(".answers-grid .token")]
            .filter((e) => e.textContent.endsWith("⏎")).map((e) => e.getClientRects().length)""")
        assert boxes
        assert set(boxes) == {1}


def test_an_address_that_makes_no_sense_is_a_page_all_the_same(browser: Any, full: str) -> None:
    for words in ("step=abc&group=-7&row=1e99&token=NaN&colour=%3Cimg%3E", "step=999999&row=999", "nowhere",
                  "step=0&step=2", "__proto__=1&constructor=2&step=1"):
        with opened(browser, f"{full}#{words}") as tab:
            assert tab.errors == []
            assert tab.console == []
            assert tab.page.locator(".answers-grid .token").count() > 0


def test_a_cell_of_the_gram_matrix_shows_its_two_answers(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        cell = tab.page.locator("#directions table.gram td[data-i='0'][data-j='1']").first
        cell.scroll_into_view_if_needed()
        cell.click()
        assert {"row", "other"} <= set(tab.state())
        assert tab.state()["row"] != tab.state()["other"]
        shown = {card.get_attribute("data-row") for card in tab.page.locator("#directions .card[data-row]").all()}
        assert shown == {tab.state()["row"], tab.state()["other"]}
        cell.focus()
        tab.page.keyboard.press("ArrowRight")
        assert tab.page.evaluate("document.activeElement.dataset.j") == "2"


def test_the_name_of_a_row_chooses_its_group(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        name = tab.page.locator("#directions-between th[data-of='3']")
        name.click()
        assert tab.state()["group"] == name.inner_text()
        assert tab.page.locator("#directions-group").input_value() == name.inner_text()
        assert "No group is chosen" not in tab.page.locator("#directions-rollouts").inner_text()
        tab.page.locator("#directions-group").select_option("mean")
        assert "No group is chosen" in tab.page.locator("#directions-rollouts").inner_text()


def test_a_filter_without_a_hit_and_a_verdict_without_a_claim_say_so(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        assert tab.page.locator("#layers-some").inner_text().startswith("These are 20 of ")
        tab.page.locator("#layers-filter").fill("no such layer")
        assert tab.page.locator("#layers-list").inner_text() == "No parameter matches the filter."
        empty = tab.page.locator("#claims-filter button", has_text="(0)").first
        empty.click()
        assert empty.get_attribute("data-verdict") in tab.page.locator("#claims-none").inner_text()
        assert not tab.page.locator("#claims-exact").is_visible()
        tab.page.locator("#claims-filter button").first.click()
        assert tab.page.locator("#claims-exact").is_visible()
        assert tab.page.locator("#claims-none").inner_text() == ""


def test_a_verdict_that_every_object_has_a_property_of_shows_all_claims(browser: Any, full: str) -> None:
    with opened(browser, f"{full}#verdict=constructor") as tab:
        assert tab.page.locator("#claims-filter [aria-pressed=true]").get_attribute("data-verdict") == "all"
        assert tab.page.locator("#claims .claim:visible").count() > 0


def test_a_cell_that_a_spreadsheet_would_take_for_a_formula_is_quoted(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        text = tab.page.evaluate("""creditscope.csv([{ a: "=1", b: " \\t@x", c: "-2", d: -2, e: "a,\\"b\\"" }])""")
        assert text == "a,b,c,d,e\r\n'=1,' \t@x,'-2,-2,\"a,\"\"b\"\"\"\r\n"


def test_numbers_and_pictures_can_be_saved(browser: Any, full: str, rich_run: Path) -> None:
    with opened(browser, full) as tab:
        figure = tab.page.locator("#steps figure").first
        with tab.page.expect_download() as saved:
            figure.get_by_role("button", name="CSV").click()
        text = Path(saved.value.path()).read_text()
        assert saved.value.suggested_filename.startswith(f"{rich_run.name}-")  # every run has a chart of this name
        assert text.startswith("step,")
        assert len(text.strip().splitlines()) - 1 >= len(lines_of(rich_run))
        with tab.page.expect_download() as saved:
            figure.get_by_role("button", name="SVG").click()
        assert Path(saved.value.path()).read_text().startswith("<svg")


# -- for all ----------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize(("which", "ground"), [("full", "dark"), ("compared", "light"), *(
    [("full", "light"), ("compared", "dark")] if FULL else [])])
def test_axe_finds_nothing_serious(which: str, ground: str, browser: Any, request: pytest.FixtureRequest) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, request.getfixturevalue(which), color_scheme=ground) as tab:
        # The policy of the page lets no script in from outside, axe neither: it enters through the browser.
        found = Axe().run(tab.page).response["violations"]
    grave = [(v["id"], [(node["target"], node.get("failureSummary", "")) for node in v["nodes"][:3]]) for v in found
             if v["impact"] in ("serious", "critical")]
    assert grave == []


@pytest.mark.parametrize("width", [360, 800])
@pytest.mark.parametrize("which", ["full", "compared"])
def test_a_narrow_window_never_scrolls_sideways(
        which: str, width: int, browser: Any, request: pytest.FixtureRequest) -> None:
    with opened(browser, request.getfixturevalue(which), width=width) as tab:
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        wide = tab.page.evaluate("""() => [...document.querySelectorAll("body *")].filter((e) => {
            const box = e.getBoundingClientRect();
            const inside = e.closest(".wide, pre, nav, .skip, svg, .spoken, [hidden]");
            return box.width && box.right > innerWidth + 1 && !inside;
        }).map((e) => e.outerHTML.slice(0, 120))""")
        assert wide == []


def test_headings_go_down_one_at_a_time_and_every_section_has_a_name(browser: Any, full: str) -> None:
    with opened(browser, full) as tab:
        levels = tab.page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((h) => Number(h.tagName[1]))")
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b <= a + 1 for a, b in pairwise(levels))
        assert tab.page.evaluate("[...document.querySelectorAll('section')].every((s) => s.getAttribute('aria-label'))")


# -- a hostile record -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of a hostile record: alone, and beside another."""
    base = tmp_path_factory.mktemp("hostile")
    one, two = records.hostile(base / records.HOSTILE[2].replace("/", "_")), records.bare(base / "bare")
    return {"alone": write(base / "one.html", [one]), "beside": write(base / "two.html", [one, two])}


def everything(tab: Any) -> None:
    """Touch what can be touched: every control, token, cell and box of the page."""
    page = tab.page
    for details in page.locator("details").all():
        details.evaluate("e => { e.open = true; }")
    for box in page.locator("select").all():
        for i in range(min(6, box.locator("option").count())):
            box.select_option(index=i)
    for name in (".token", "td[data-i]", "button.node", "th button", ".sort"):
        for place in page.locator(name).all()[:12]:
            if place.is_visible():
                place.hover(timeout=2000, force=True)
                place.dispatch_event("click")
    page.locator("#step").press("Home") if page.locator("#step").count() else None
    page.wait_for_timeout(200)


@pytest.mark.parametrize("which", ["alone", "beside"])
def test_a_hostile_record_shows_as_text_and_runs_nothing(which: str, browser: Any, attacked: dict[str, str]) -> None:
    url = attacked[which]
    with opened(browser, url) as tab:
        everything(tab)
        assert tab.page.evaluate("window.hacked") is None
        assert tab.page.url.partition("#")[0] == url
        tab.quiet(url)
        assert tab.page.locator("img").count() == 0
        assert tab.page.evaluate("document.scripts.length") == 3  # data, Vega, ours
        handlers = tab.page.evaluate("""[...document.querySelectorAll("*")].flatMap((e) => [...e.attributes].filter(
            (a) => a.name.startsWith("on") || (a.name === "href" && !a.value.startsWith("#")))).map((a) => a.name)""")
        assert handlers == []
        text = tab.page.evaluate("document.body.innerText")
        assert "<script>" in text  # it is there, as text


def test_a_token_of_a_megabyte_and_what_cannot_be_seen_are_named(browser: Any, attacked: dict[str, str]) -> None:
    with opened(browser, f"{attacked['alone']}#step=0&group=0") as tab:
        tokens = tab.page.locator(".answers-grid .token").all_inner_texts()
        assert any("1,000,003 characters" in token for token in tokens)
        assert max(map(len, tokens)) < 1000
        tab.page.locator("#token-group").select_option(index=1)
        hidden = "".join(tab.page.locator(".answers-grid .token").all_inner_texts())
        assert all(name in hidden for name in ("⟨202E⟩", "⟨0⟩", "⟨1B⟩", "⟨D800⟩"))
        whole = tab.page.evaluate("document.documentElement.outerHTML")
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00\x1b]", whole)


def test_markup_that_got_into_the_page_all_the_same_would_not_run(browser: Any, full: str) -> None:
    """The second lock: with the first one open, the policy still holds."""
    with opened(browser, full) as tab:
        tab.page.evaluate("""document.querySelector("main").insertAdjacentHTML("beforeend",
            '<img src=x onerror="window.hacked=1"><a id=evil href="javascript:window.hacked=1">x</a>')""")
        tab.page.evaluate("""() => { const s = document.createElement("script"); s.textContent = "window.hacked=1";
            document.body.append(s); }""")
        tab.page.locator("#evil").dispatch_event("click")
        tab.page.wait_for_timeout(300)
        assert tab.page.evaluate("window.hacked") is None
        assert any("Content Security Policy" in line for line in tab.console)


