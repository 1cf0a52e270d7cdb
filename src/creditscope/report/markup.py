"""Tables of the page. Text to html is `files.markup`, which notebooks use too."""

from __future__ import annotations

from creditscope.files.markup import Html, tag


def table(headers: list[object], rows: list[list[object]], **attributes: object) -> Html:
    head = tag("tr", *(tag("th", header, scope="col") for header in headers))
    body = [tag("tr", *(tag("td", "" if cell is None else cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), **attributes), class_="wide", tabindex="0",
               role="region", aria_label=attributes.get("aria_label") or "table")
