"""Docstrings are plain text: this writes them as reStructuredText for autodoc.

Paragraphs are separated by empty lines. An indented paragraph is shown as it stands (equations, tables), one that
begins with >>> is code, and `x` in a sentence is code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)


def as_rst(lines: list[str]) -> list[str]:
    """The docstring's lines as lines of reStructuredText."""
    return [line for paragraph in paragraphs(lines) for line in (*_shown(paragraph), "")]


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines that are not empty; a run of indented ones keeps the empty lines inside it."""
    runs = [list(run) for full, run in groupby(lines, key=lambda line: bool(line.strip())) if full]
    joined: list[list[str]] = []
    for run in runs:
        if joined and _indented(run) and _indented(joined[-1]):
            joined[-1] += ["", *run]
        else:
            joined.append(run)
    yield from joined


def _shown(paragraph: list[str]) -> list[str]:
    if paragraph[0].startswith(">>>"):
        return [".. code-block:: pycon", "", *(f"   {line}" for line in paragraph)]
    if _indented(paragraph):
        return [".. code-block:: text", "", *(f"   {line}".rstrip() for line in paragraph)]
    return sentence("\n".join(paragraph)).splitlines()


def _indented(paragraph: list[str]) -> bool:
    return all(line.startswith("  ") or not line for line in paragraph)


def sentence(text: str) -> str:
    """Text without markup, except for code between backticks."""
    out, end = [], 0
    for found in CODE.finditer(text):
        out += [_escaped(text[end:found.start()]), f"``{' '.join(found[2].split())}``"]
        after = text[found.end():found.end() + 1]
        out += ["\\ "] if re.match(r"\w", after) else []
        end = found.end()
    return "".join([*out, _escaped(text[end:])])


def _escaped(text: str) -> str:
    return re.sub(r"([\\*|_`])", r"\\\1", text)


def rewrite(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True}
