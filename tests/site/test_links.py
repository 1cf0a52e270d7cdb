"""Every link of the built site leads somewhere, and no page loads anything from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from html_pages import broken, in_style, is_remote, page

pytestmark = pytest.mark.nightly


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_link_and_anchor_of_every_page_leads_somewhere(site: Path) -> None:
    found = {path.relative_to(site).as_posix(): why for path in pages(site)
             if (why := [said for target in page(path).links if (said := broken(path, target))])}
    assert len(pages(site)) > 60
    assert found == {}


def test_no_page_loads_a_file_from_elsewhere_and_every_file_it_loads_is_there(site: Path) -> None:
    for path in pages(site):
        for target in page(path).loads:
            assert not is_remote(target), f"{path.relative_to(site)} loads {target}"
            assert broken(path, target) is None, f"{path.relative_to(site)} loads {target}"


def test_no_style_sheet_loads_a_file_from_elsewhere(site: Path) -> None:
    sheets = sorted(site.rglob("*.css"))
    assert len(sheets) > 3
    found = [(sheet.name, target) for sheet in sheets for target in in_style(sheet.read_text()) if is_remote(target)]
    assert found == []


def test_the_top_of_the_site_leads_to_the_home_page(site: Path) -> None:
    assert page(site / "index.html").links == ["docs/index.html"]


def test_a_broken_link_and_a_remote_script_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="here">')
    path = tmp_path / "a.html"
    path.write_text('<a href="b.html#here"></a><a href="b.html#there"></a><a href="c.html"></a>'
                    '<script src="https://host.test/x.js"></script><style>@import "//host.test/y.css";</style>')
    assert [broken(path, target) for target in page(path).links] == [None, "no anchor b.html#there", "no file c.html"]
    assert [is_remote(target) for target in page(path).loads] == [True, True]
