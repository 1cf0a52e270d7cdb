"""Links, anchors and loaded files of html pages, read by the standard library's parser."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("audio", "src"),
         ("embed", "src"), ("object", "data"), ("use", "href"), ("image", "href")}
"""Attributes whose target a browser loads by itself."""
RELATIONS = {"stylesheet", "icon", "shortcut", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch",
             "manifest"}
"""<link rel=...> that a browser loads or connects to."""
IN_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


@dataclass
class Page(HTMLParser):
    """One html file."""

    path: Path
    links: list[str] = field(default_factory=list)
    """Targets of <a href>."""
    loads: list[str] = field(default_factory=list)
    """What a browser loads with the page."""
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._style = False
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._style = tag == "style"
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and RELATIONS & set(given.get("rel", "").lower().split()):
            self.loads.append(given.get("href", ""))
        self.loads += [value for name, value in given.items() if (tag, name) in LOADS]
        self.loads += in_style(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += in_style(data)


def in_style(text: str) -> list[str]:
    """Targets of url() and @import."""
    return [a or b for a, b in IN_STYLE.findall(text)]


@cache
def page(path: Path) -> Page:
    return Page(path)


def is_remote(target: str) -> bool:
    return bool(urlsplit(target).netloc) or urlsplit(target).scheme in ("http", "https", "ftp", "ws", "wss")


def broken(path: Path, target: str) -> str | None:
    """Why a link from a page leads nowhere; None where it is good, or leads out of the site."""
    if is_remote(target) or urlsplit(target).scheme in ("mailto", "data", "javascript"):
        return None
    parts = urlsplit(target)
    to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not to.is_file():
        return f"no file {target}"
    if parts.fragment and to.suffix == ".html" and unquote(parts.fragment) not in page(to).anchors:
        return f"no anchor {target}"
    return None
