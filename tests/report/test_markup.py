"""Text to html: what is escaped, what is named, and what cannot be said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.files.markup import Html, join, shown, tag
from creditscope.report.markup import table
from each import each
from report.records import HOSTILE
from shown_text import Reader


@each("text", HOSTILE)
def test_a_hostile_text_is_one_element_s_text_and_one_attribute_s_value(text: str) -> None:
    found = Reader(tag("p", text, title=text))
    assert found.elements == ["p"]
    assert list(found.attributes) == ["title"]
    assert found.text == found.attributes["title"] == shown(text)


@pytest.mark.slow
@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_at_all_is_read_back_as_it_is_shown_and_has_bytes(text: str) -> None:
    markup = tag("b", text)
    found = Reader(markup.encode().decode())
    assert found.elements == ["b"]
    # A parser takes a line feed after a carriage return with it; none is left, for both are named or kept alone.
    assert found.text == shown(text)


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_that_is_shown_is_invisible(text: str) -> None:
    assert all(c.isprintable() or c in "\n\t" or c.isspace() for c in shown(text))


def test_markup_stays_markup_and_text_that_looks_like_it_does_not() -> None:
    assert join(Html("<i>"), "<i>") == "<i>&lt;i&gt;"
    assert tag("p", tag("b", "<"), None, False, 0) == "<p><b>&lt;</b>0</p>"


def test_a_string_made_from_markup_is_text_again() -> None:
    assert tag("p", tag("b", "x") + "!") == "<p>&lt;b&gt;x&lt;/b&gt;!</p>"


def test_a_table_has_a_cell_for_each_value_and_can_be_scrolled_by_keyboard() -> None:
    found = Reader(table(["a", "b"], [[1, None], ["<", Html("<i>x</i>")]], aria_label="numbers"))
    assert found.elements == ["div", "table", "thead", "tr", "th", "th", "tbody", *["tr", "td", "td"] * 2, "i"]
    assert found.text == "ab1<x"
    assert (found.attributes["tabindex"], found.attributes["aria-label"]) == ("0", "numbers")


def test_a_long_text_is_cut_and_counted() -> None:
    assert shown("é" * 10**6, longest=2) == "éé… (1,000,000 characters)"
    assert shown("abc", longest=3) == "abc"
