"""A page made of a hostile record: text stays text, links stay inside, and only our scripts are named to the policy."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from creditscope.report import page
from creditscope.report.build import build
from creditscope.report.header import _is_ours
from report import records


class Reader(HTMLParser):
    """Every element of a page with its attributes, as a browser would read them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a hostile record in a folder with a hostile name, beside a second one, without charts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("creditscope.report.page.vega", lambda: "")
        base = tmp_path_factory.mktemp("pages")
        one = records.hostile(base / "<img src=x onerror=alert(1)>" / "javascript:alert(1)")
        other = records.hostile(base / "\" autofocus onfocus=\"alert(1)")
        return build([one], papers=True) + build([one, other], papers=True)


@pytest.mark.slow
def test_no_element_of_a_hostile_page_is_the_record_s(text: str) -> None:
    found = Reader(text).found
    assert not {name for name, _ in found} & {"img", "iframe", "object", "embed", "base", "form", "link", "svg"}
    assert not [key for _, attributes in found for key in attributes if key.startswith("on") or key == "srcdoc"]
    assert {attributes.get("type") for name, attributes in found if name == "script"} == {None, "application/json"}
    assert sum(name == "script" for name, _ in found) == 4  # of two pages: the data, and our own


def test_every_link_of_a_hostile_page_stays_on_it_or_leads_to_a_paper(text: str) -> None:
    links = {attributes["href"] or "" for _, attributes in Reader(text).found if "href" in attributes}
    assert links
    assert all(re.fullmatch(r"#[\w/.%-]*|https://arxiv\.org/abs/[\d.]+", link) for link in links), links
    assert not [value for _, attributes in Reader(text).found for key, value in attributes.items()
                if key in ("src", "action", "formaction", "poster", "data") and value]


@pytest.mark.parametrize("told", ["rm -rf ~", "creditscope report x; rm -rf ~", "creditscope report `id`",
                                  "creditscope report $(id)", "creditscope report x\nrm y", "creditscope report x > y",
                                  "creditscope 'report", "", "CREDITSCOPE=1 sh"])
def test_a_command_to_paste_runs_creditscope_and_nothing_else(told: str) -> None:
    assert not _is_ours(told)


def test_a_kept_script_that_others_could_have_written_is_made_anew(tmp_path: Path) -> None:
    place = tmp_path / "shared" / "vega.js"
    place.parent.mkdir(mode=0o777)
    page.keep(place, "ours")
    assert page.kept(place) == "ours"
    assert {path.stat().st_mode & 0o077 for path in (place.parent, place, page.beside(place))} == {0}
    for spoilt in (place.parent, place, page.beside(place)):
        before = spoilt.stat().st_mode
        os.chmod(spoilt, 0o777)
        assert page.kept(place) == ""
        os.chmod(spoilt, before)
    assert page.kept(place) == "ours"
