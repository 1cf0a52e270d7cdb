"""LaTeX between dollar signs becomes MathML when the site is built, so that formulas need neither script nor font."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

SPACE = '<mspace width="0.167em"/>'


class UnknownFormula(SphinxError):
    """A formula with a command that the converter does not know."""

    category = "formula"


def mathml(latex: str, display: str) -> str:
    """The formula as a <math> element."""
    try:
        found = convert(latex, display=display)
    except Exception as error:
        raise UnknownFormula(f"{type(error).__name__} in the formula {latex!r}") from error
    left = re.search(r"\\[A-Za-z]+", re.sub(r"<[^>]*>", "", found))
    if left:
        raise UnknownFormula(f"the converter does not know {left[0]} in the formula {latex!r}")
    return spaced(found)


def spaced(found: str) -> str:
    """A thin space between a function's name and a letter, which the converter leaves out."""
    before = r"(?:(?<=</m[in]>)|(?<=&#x02207;</mo>)|(?<=</msub>)|(?<=</msup>))"
    found = re.sub(rf"{before}(?=<mi>[a-z]{{2,}}</mi>)", SPACE, found)
    return re.sub(r"(<mi>[a-z]{2,}</mi>)(?=<m(?!o|space))", rf"\1{SPACE}", found)


def visit_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_math_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True}
