"""JSON documents -> rows: TRL's trainer_state.json, arrays of rows, columns, and Jupyter notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HOLDERS = ("log_history", "history", "steps", "logs", "metrics", "rows", "data", "training_history", "log")
"""Names under which people keep an array of rows, in the order of search; then any other name."""
MAX_CELLS = 10_000


def array_of(document: Any, depth: int = 2) -> tuple[str, list[Any]]:
    """(name, rows) of the first array of objects, searched `depth` levels down; an empty list where there is none.

    >>> array_of({"total": 2, "steps": [{"reward": 0.5}]})
    ('steps', [{'reward': 0.5}])
    >>> array_of({"step": [1, 2], "reward": [0.5, 0.25]})
    ('columns', [{'step': 1, 'reward': 0.5}, {'step': 2, 'reward': 0.25}])
    """
    if isinstance(document, list):
        return "array", document if any(isinstance(row, dict) for row in document) else []
    if not isinstance(document, dict):
        return "", []
    named = [*(name for name in HOLDERS if name in document), *(name for name in document if name not in HOLDERS)][:200]
    for name in named:
        held = document[name]
        if isinstance(held, list) and any(isinstance(row, dict) for row in held):
            return name, held
    if rows := _columns(document):
        return "columns", rows
    for name in named if depth > 1 else ():
        inner, found = array_of(document[name], depth - 1)
        if found:
            return f"{name}.{inner}"[:80], found
    return "", []


def _columns(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a dict of lists of numbers; shorter lists end earlier."""
    lists = {name: held for name, held in document.items()
             if isinstance(held, list) and held and all(isinstance(value, int | float | None) for value in held)}
    if len(lists) < 2:
        return []
    longest = max(map(len, lists.values()))
    full = {name: held for name, held in lists.items() if len(held) == longest}
    if len(full) < 2:
        return []
    return [dict(zip(full, values, strict=True)) for values in zip(*full.values(), strict=True)]


def is_notebook(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("cells"), list) and "nbformat" in document


def notebook_texts(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, text) in the order of the notebook: source of code, printed text, html of an output."""
    for cell in document["cells"][:MAX_CELLS]:
        if not isinstance(cell, dict) or cell.get("cell_type") == "markdown":
            continue
        yield "source", _joined(cell.get("source"))
        outputs = cell.get("outputs")
        for output in outputs if isinstance(outputs, list) else ():
            if not isinstance(output, dict):
                continue
            data = output.get("data")
            data = data if isinstance(data, dict) else {}
            html = _joined(data.get("text/html"))
            yield "text", _joined(output.get("text")) or ("" if html else _joined(data.get("text/plain")))
            yield "html", html


def _joined(held: Any) -> str:
    """nbformat keeps a text whole or as a list of its lines."""
    return held if isinstance(held, str) else "".join(map(str, held)) if isinstance(held, list) else ""
