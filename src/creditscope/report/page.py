"""Sections to one file. Nothing is fetched, and a content policy lets no script run but those that were put in here.

The data of all sections travel as one gzipped JSON object in a script of type application/json, which no browser
executes; base64 has no character that could end it. Scripts are named to the policy by their hash, so that markup
which slipped through would still not run. Vega is told to interpret its expressions, as it must where eval is barred.
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
from creditscope.files.writing import new_file
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
    """The content policy: these scripts, no others; inline style; nothing else."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    asks = "self" if live else "none"
    return (f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
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
    place = cache() / f"vega-{vl_convert.__version__}.js"
    bundle = kept(place)
    if not bundle:
        bundle = str(vl_convert.javascript_bundle())
        keep(place, bundle)
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


# -- bundling takes seconds: it is done once ---------------------------------------------------------------------------


def cache() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "creditscope"


def kept(place: Path) -> str:
    """A text that `keep` left, if it is whole and nobody else could have written it; or nothing."""
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
    """A text and its hash, each whole or not at all. A folder that cannot be written to costs time, nothing else."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.parent.chmod(0o700)  # what is kept there becomes a script of the page
        for file, data in ((place, text.encode()), (beside(place), hashlib.sha256(text.encode()).hexdigest().encode())):
            with new_file(file, mode=0o600) as out:
                out.write(data)


def beside(place: Path) -> Path:
    """Where the hash of a file is kept."""
    return place.with_name(f"{place.name}.sha256")
