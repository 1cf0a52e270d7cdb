"""A notebook as a page: its text as Markdown, its code, and the outputs that are committed in it. Nothing is executed.

    docs/notebook.ipynb  →  docs/notebook.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


class NotebookParser(MystParser):  # type: ignore[misc]
    """Reads a notebook of format 4."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(as_markdown(json.loads(inputstring)), document)


def as_markdown(notebook: Mapping[str, Any]) -> str:
    """The cells in their order; an output as html where it has some, otherwise as text."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell)) + "\n"


def _parts(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        html = data.get("text/html") or data.get("image/svg+xml")
        text = output.get("text") or data.get("text/plain", "")
        yield (f'````{{raw}} html\n<div class="output">{"".join(html)}</div>\n````' if html
               else f"````text\n{''.join(text).rstrip()}\n````")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
