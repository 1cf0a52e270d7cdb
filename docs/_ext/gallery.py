"""The gallery: every folder docs/gallery/NAME with a record and a README.md is an entry, with its report.

    :::{diagnosis}        in an entry's README.md: the record's headline, and the link to its report
    :::{entries}          in docs/gallery/index.md: all entries, with title, headline and links

Headlines come from `creditscope doctor`, reports from `creditscope report`, both when the site is built.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent.parent
GALLERY = ROOT / "docs" / "gallery"
REPORT = "report.html"


class BrokenEntry(SphinxError):
    """An entry of the gallery whose record cannot be read or shown."""

    category = "gallery"


def entries() -> list[Path]:
    """The folders of the gallery: runs without a fault first, then by name."""
    return sorted((path.parent for path in GALLERY.glob("*/run.json")),
                  key=lambda folder: (diagnosis(folder)["state"] != "fine", folder.name))


def creditscope(*args: str) -> str:
    """What the command prints, from the sources of this checkout."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run([sys.executable, "-m", "creditscope", *args], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    if done.returncode:
        raise BrokenEntry(f"creditscope {' '.join(args)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@cache
def diagnosis(folder: Path) -> dict[str, str]:
    """State and headline of a record."""
    found = json.loads(creditscope("doctor", "--json", str(folder)))
    return {"state": found["state"], "headline": found["headline"]}


def title(folder: Path) -> str:
    """The README's first heading."""
    readme = folder / "README.md"
    if not readme.is_file():
        raise BrokenEntry(f"{folder.relative_to(ROOT)} has a record and no README.md; write one with a heading")
    return readme.read_text().partition("# ")[2].partition("\n")[0].strip()


def headline(folder: Path) -> nodes.paragraph:
    found = diagnosis(folder)
    return nodes.paragraph("", "", nodes.Text(found["headline"]), classes=["diagnosis", f"state-{found['state']}"])


def link(text: str, uri: str, *classes: str) -> nodes.reference:
    return nodes.reference("", "", nodes.Text(text), internal=True, refuri=uri, classes=list(classes))


class Diagnosis(SphinxDirective):
    """The headline of the record beside this page, and the link to its report."""

    def run(self) -> list[nodes.Node]:
        folder = Path(self.env.doc2path(self.env.docname)).parent
        if folder not in entries():
            raise BrokenEntry(f"{folder.relative_to(ROOT)} has no run.json")
        return [headline(folder), nodes.paragraph("", "", link("Open the report", REPORT, "open-report"))]


class Entries(SphinxDirective):
    """Title, headline and links of every entry."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # a folder may be added without a change of this page
        out: list[nodes.Node] = []
        for folder in entries():
            page = self.env.app.builder.get_relative_uri(
                self.env.docname, f"docs/gallery/{folder.name}/README")
            out.append(nodes.container(
                "", nodes.paragraph("", "", link(title(folder), page), classes=["entry-title"]), headline(folder),
                nodes.paragraph("", "", link("Open the report", f"{folder.name}/{REPORT}", "open-report")),
                classes=["gallery-entry"]))
        return out


def write_reports(app: Sphinx, error: Exception | None) -> None:
    """`creditscope report` for every entry, beside its page."""
    if error is not None or app.builder.format != "html":
        return
    for folder in entries():
        out = Path(app.outdir) / "docs" / "gallery" / folder.name / REPORT
        creditscope("report", str(folder), "-o", str(out), "--plain")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("diagnosis", Diagnosis)
    app.add_directive("entries", Entries)
    app.connect("build-finished", write_reports)
    return {"parallel_read_safe": False}
