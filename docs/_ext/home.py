"""index.html at the top of the site leads to the home page, which is docs/index.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="refresh" content="0; url={home}"><link rel="icon" href="_static/icon.svg"></head>
<body><p><a href="{home}">{title}</a></p></body></html>
"""


def write_home(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        home = app.builder.get_target_uri(app.config.root_doc)
        (Path(app.outdir) / "index.html").write_text(PAGE.format(title=app.config.html_title, home=home))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write_home)
    return {"parallel_read_safe": True}
