"""Tables of the page. Text to html is `files.markup`, which notebooks use too."""

from __future__ import annotations

from creditscope.files.markup import LONGEST as LONGEST
from creditscope.files.markup import Html as Html
from creditscope.files.markup import escape as escape
from creditscope.files.markup import join as join
from creditscope.files.markup import shown as shown
from creditscope.files.markup import tag as tag


def table(headers: list[object], rows: list[list[object]], **attributes: object) -> Html:
    head = tag("tr", *(tag("th", header, scope="col") for header in headers))
    body = [tag("tr", *(tag("td", "" if cell is None else cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), **attributes), class_="wide", tabindex="0",
               role="region", aria_label=attributes.get("aria_label") or "table")
