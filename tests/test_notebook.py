"""docs/notebook.ipynb runs in a fresh kernel, and shows what is committed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from makers import load_script
from shown_text import Reader, differs

DOCS = Path(__file__).resolve().parent.parent / "docs"


def shown(output: Any) -> str:
    """The text of an output as a reader sees it; of a drawing its texts without their places."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", data["image/svg+xml"]))
    html = data.get("text/html")
    return Reader(html).text if html else output.get("text") or data.get("text/plain", "")


@pytest.mark.slow
def test_the_notebook_runs_in_a_fresh_kernel_and_shows_what_is_committed() -> None:
    pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    told = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
    found = load_script(DOCS / "execute.py").executed()  # raises what a cell raises
    assert [cell.source for cell in found.cells] == [cell.source for cell in told.cells]
    wrong = {}
    for cell, before in zip(found.cells, told.cells, strict=True):
        now, then = ([shown(output) for output in each.get("outputs", [])] for each in (cell, before))
        if len(now) != len(then) or any(differs(a, b) for a, b in zip(now, then, strict=True)):
            wrong[cell.source] = [differs(a, b) for a, b in zip(now, then, strict=False)]
    assert not wrong, f"run: python docs/execute.py, and look at what changed: {wrong}"


def test_a_committed_notebook_has_outputs_in_order_and_neither_errors_nor_paths() -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [cell for cell in nbformat.read(DOCS / "notebook.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"execute_result", "stream"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    text = (DOCS / "notebook.ipynb").read_text()
    assert not re.search(r"/home/|/tmp/|/root/|<script|https?://(?!www\.w3\.org/)", text)


def test_a_number_that_moved_and_a_word_that_changed_are_both_told() -> None:
    assert differs("rank 3.448", "rank 3.449") == ""
    assert differs("rank 3.448", "rank 3.46") == "3.448 is not 3.46"
    assert differs("rank 3.448", "ranks 3.448") == "'rank #' is not 'ranks #'"
    assert differs("1 2", "1")
