"""Run docs/notebook.ipynb in a fresh kernel and write its outputs into it.

    python docs/execute.py            part of make docs; needs nbclient and ipykernel (extra test)

Nothing that differs from run to run is kept: no times, no ids of messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent / "notebook.ipynb"
SECONDS = 300


def executed(path: Path = NOTEBOOK) -> Any:
    """The notebook with the outputs of a fresh kernel, which starts in its folder. Raises what a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    # A busy kernel sends what one cell prints in several messages: they are joined.
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False,
                            coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.clear()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                         "language_info": {"name": "python"}}
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
    print(f"wrote docs/{NOTEBOOK.name}")
