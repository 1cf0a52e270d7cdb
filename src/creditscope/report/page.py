"""Sections to one file. Nothing is fetched, and a content policy lets no script run but those that were put in here.

The data of all sections travel as one gzipped JSON object in a script of type application/json, which no browser
executes; base64 has no character that could end it. Scripts are named to the policy by their hash, so that markup
which slipped through would still not run. Vega is told to interpret its expressions, as it must where eval is barred.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from creditscope import __version__
from creditscope.report.markup import Html, join, tag
from creditscope.report.section import Section

STYLES = ("page.css", "tokens.css", "compare.css")
SCRIPTS = ("core.js", "chart.js")
"""What every page has; a section that has data adds `<id>.js`."""


def page(title: str, first: Html, sections: Sequence[Section], live: bool = False) -> str:
    """The whole file. `live` lets the page ask its own server, and nobody else, whether there is something new."""
    data = {section.id: section.data for section in sections if section.data is not None}
    own = "".join(asset(name) for name in [*SCRIPTS, *(f"{name}.js" for name in data)] + (["live.js"] if live else []))
    scripts = [source for source in (vega(), own + "\ncreditscope.start();\n") if source]
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(scripts, live)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"creditscope {__version__}"),
        tag("title", title),
        tag("style", Html("".join(asset(name) for name in STYLES))))
    links = [tag("a", section.title, href=f"#{section.id}") for section in sections]
    body = join(
        tag("a", "Skip to the evidence", href=f"#{sections[0].id}" if sections else "#", class_="skip"),
        tag("header", first), tag("nav", *links, aria_label="Sections") if links else None,
        tag("main", *(section.html() for section in sections)),
        tag("footer", tag("p", f"creditscope {__version__}. This file holds everything; it asks no network.")),
        tag("script", Html(packed(data)), type="application/json", id="data"),
        *(tag("script", Html(source)) for source in scripts))
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def policy(scripts: Sequence[str], live: bool) -> str:
    """The content policy: these scripts, no others; inline style; pictures that are in the file."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    asks = "self" if live else "none"
    return (f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src '{asks}'; base-uri 'none'; form-action 'none'")


def packed(data: Mapping[str, Any]) -> str:
    """JSON, gzipped, in base64. The same data give the same bytes: no time is written into it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@functools.cache
def asset(name: str) -> str:
    """A file of `assets/`. None of ours may hold what would end the element that it stands in."""
    text = resources.files("creditscope.report").joinpath("assets", name).read_text(encoding="utf-8")
    assert "</script" not in text.lower()
    assert "</style" not in text.lower()
    return text


@functools.cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, or nothing where the extra `plot` is not installed."""
    try:
        import vl_convert
    except ImportError:
        return ""
    bundle: str = vl_convert.javascript_bundle()
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")
