"""What a reader sees: html as a browser reads it, and whether two texts say the same."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Reader(HTMLParser):
    """What a browser would make of markup: its elements, its attributes, and its text."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def differs(found: str, told: str) -> str:
    """Where two texts differ first: in words, or in a number by more than a thousandth and a millionth, below which
    sums are rounding; empty where they agree."""
    words, others = NUMBER.sub("#", found), NUMBER.sub("#", told)
    if words != others:
        at = next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)
        return " is not ".join(repr(text[max(0, at - 30):at + 60]) for text in (words, others))
    pairs = zip(NUMBER.findall(found), NUMBER.findall(told), strict=True)
    return ", ".join(f"{a} is not {b}" for a, b in pairs if float(a) != pytest.approx(float(b), rel=1e-3, abs=1e-6))
