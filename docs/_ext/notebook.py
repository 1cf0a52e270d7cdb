"""docs/*.ipynb as pages: text, code, and the outputs that are stored in the file. Nothing is executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

FENCE = "`" * 8
"""Longer than any fence inside a cell."""


class NotebookParser(MystParser):
    """A notebook, read as the Markdown page that `as_markdown` makes of it."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(as_markdown(inputstring), document)


def as_markdown(notebook: str) -> str:
    """Cells in order, each followed by its stored outputs."""
    return "\n\n".join(block for cell in json.loads(notebook)["cells"] for block in _blocks(cell))


def _blocks(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else _fenced("python", source)
    for output in cell.get("outputs", ()):
        yield _shown(output)


def _shown(output: dict[str, Any]) -> str:
    """The richest form of an output: html or a drawing as it is, else text."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return _fenced("{raw} html", f'<div class="notebook-output">\n{data[kind]}\n</div>')
    return _fenced("text", data.get("text/plain") or "".join(output.get("text", ())))


def _fenced(language: str, text: str) -> str:
    return f"{FENCE}{language}\n{text.rstrip()}\n{FENCE}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
