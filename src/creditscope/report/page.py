"""Sections to one file that fetches nothing and runs no script but its own.

The data of all sections are one gzipped JSON object, base64 in a script of type application/json, which browsers do not
execute. The content policy names our scripts by hash, so that injected markup would not run. Vega interprets its
expressions, as `eval` is forbidden.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from creditscope import __version__
from creditscope.errors import installed
from creditscope.files.markup import Html, join, tag
from creditscope.files.writing import new_file
from creditscope.report.section import Section

STYLES = ("page.css", "tokens.css", "compare.css")
SCRIPTS = ("core.js", "chart.js")
"""On every page; a section that has data adds `<id>.js`."""


def page(title: str, first: Html, sections: Sequence[Section], live: bool = False) -> str:
    """The whole file. `live` lets the page ask its own server whether there is a newer one."""
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
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    asks = "self" if live else "none"
    return (f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
            f"connect-src '{asks}'; base-uri 'none'; form-action 'none'")


def packed(data: Mapping[str, Any]) -> str:
    """JSON, gzipped without a time stamp, in base64."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@functools.cache
def asset(name: str) -> str:
    """A file of `assets/`, which must not end the element that contains it."""
    text = resources.files("creditscope.report").joinpath("assets", name).read_text(encoding="utf-8")
    assert "</script" not in text.lower()
    assert "</style" not in text.lower()
    return text


@functools.cache
def vega() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, or nothing where vl-convert is not installed."""
    if not installed("vl_convert"):
        return ""
    import vl_convert

    place = cache() / f"vega-{vl_convert.__version__}.js"
    bundle = kept(place)
    if not bundle:
        bundle = str(vl_convert.javascript_bundle())
        keep(place, bundle)
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "creditscope"


def kept(place: Path) -> str:
    """A text that `keep` wrote, if its hash matches and only this user can write it; else empty."""
    try:
        if any(found.stat().st_uid != os.getuid() or found.stat().st_mode & 0o022
               for found in (place, beside(place), place.parent)):
            return ""
        found = place.read_bytes()
        whole = beside(place).read_text(encoding="ascii") == hashlib.sha256(found).hexdigest()
        return found.decode() if whole else ""
    except (OSError, ValueError):
        return ""


def keep(place: Path, text: str) -> None:
    """Write a text and its hash atomically; a folder that cannot be written to is ignored."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.parent.chmod(0o700)  # what is kept there becomes a script of the page
        for file, data in ((place, text.encode()), (beside(place), hashlib.sha256(text.encode()).hexdigest().encode())):
            with new_file(file, mode=0o600) as out:
                out.write(data)


def beside(place: Path) -> Path:
    return place.with_name(f"{place.name}.sha256")
