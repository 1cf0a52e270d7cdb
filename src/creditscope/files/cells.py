"""What a notebook shows of an object: a title, and rows of a name and a text. `_repr_html_` of our classes uses it.

No script, no style sheet, no address. Text has the notebook's own colours, light or dark; the mark on the left repeats
what the title says. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from creditscope.files.markup import Html, tag

MARKS: Mapping[str, str] = {"broken": "#d55e00", "refuted": "#d55e00", "watch": "#b8860b", "fine": "#009e73",
                            "holds": "#009e73"}
"""Word -> the colour of its mark; contrast 3 to 1 or more against white and against black. Others are grey."""
GREY = "#767676"


def cell(title: object, rows: Mapping[str, object], *after: Html, word: str = "") -> str:
    """One object. Rows that are None, empty text or an empty list are left out; a list is one line per entry.

    >>> cell("<b>", {"step": 3, "why": None})
    '<div style="border-left:4px solid #767676;padding-left:0.8em"><b>&lt;b&gt;</b><table><tr><th scope="row" \
style="text-align:left;vertical-align:top">step</th><td style="text-align:left">3</td></tr></table></div>'
    """
    body = [tag("tr", tag("th", name, scope="row", style="text-align:left;vertical-align:top"),
                tag("td", *_lines(value), style="text-align:left"))
            for name, value in rows.items() if value is not None and value != "" and value != []]
    return str(tag("div", tag("b", title), tag("table", *body) if body else None, *after,
                   style=f"border-left:4px solid {MARKS.get(word, GREY)};padding-left:0.8em"))


def folded(title: str, lines: Sequence[object]) -> Html:
    """A list that opens on a click."""
    return tag("details", tag("summary", title), tag("ul", *(tag("li", line) for line in lines)))


def _lines(value: object) -> list[object]:
    texts = value if isinstance(value, list | tuple) else [value]
    return [part for text in texts for part in (text, tag("br"))][:-1]
