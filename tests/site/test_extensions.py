"""What turns docstrings, formulas and the gallery's folders into pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from makers import load_script

EXT = Path(__file__).resolve().parent.parent.parent / "docs" / "_ext"


def test_a_docstring_without_markup_is_shown_as_it_is_read() -> None:
    docstrings = load_script(EXT / "docstrings.py")
    given = ["w_it = ∂J/∂log π of `logp` (B, T), |w| and a*b.", "", "    K = Σ g", "", "        more", "",
             ">>> 1 + 1", "2"]
    assert docstrings.as_rst(given) == [
        r"w\_it = ∂J/∂log π of ``logp`` (B, T), \|w\| and a\*b.", "",
        ".. code-block:: text", "", "       K = Σ g", "", "           more", "",
        ".. code-block:: pycon", "", "   >>> 1 + 1", "   2", ""]


def test_code_that_runs_over_two_lines_of_a_docstring_stays_code() -> None:
    docstrings = load_script(EXT / "docstrings.py")
    assert docstrings.sentence("of `a\nb`s") == "of ``a b``\\ s"


def test_a_formula_becomes_mathml_and_an_unknown_command_ends_the_build() -> None:
    pytest.importorskip("latex2mathml")
    pytest.importorskip("sphinx")
    mathml = load_script(EXT / "mathml.py")
    found = mathml.mathml(r"\nabla_\theta J = \sum_i w_i", "inline")
    assert found.startswith("<math ")
    assert "∇" in found or "&#x02207;" in found
    with pytest.raises(mathml.UnknownFormula, match="nosuchcommand"):
        mathml.mathml(r"\nosuchcommand{x}", "block")


def test_a_function_s_name_stands_apart_from_the_letters_beside_it() -> None:
    pytest.importorskip("latex2mathml")
    pytest.importorskip("sphinx")
    mathml = load_script(EXT / "mathml.py")
    nabla, log, pi = "<mo>&#x02207;</mo>", "<mi>log</mi>", "<mi>&#x003C0;</mi>"
    assert f"{nabla}{mathml.SPACE}{log}{mathml.SPACE}{pi}" in mathml.mathml(r"\nabla\log\pi", "inline")
    assert f'{log}<mo stretchy="false">' in mathml.mathml(r"\log(x)", "inline")


def test_a_notebook_is_its_text_its_code_and_its_stored_outputs() -> None:
    pytest.importorskip("myst_parser")
    notebook = load_script(EXT / "notebook.py")
    cells = [{"cell_type": "markdown", "source": ["# T\n", "x"]},
             {"cell_type": "code", "source": ["1 + 1"], "outputs": [
                 {"output_type": "stream", "text": ["said\n"]},
                 {"output_type": "execute_result", "data": {"text/html": ["<b>2</b>"], "text/plain": ["2"]}}]}]
    fence = notebook.FENCE
    assert notebook.as_markdown(json.dumps({"cells": cells})) == "\n\n".join([
        "# T\nx", f"{fence}python\n1 + 1\n{fence}", f"{fence}text\nsaid\n{fence}",
        f'{fence}{{raw}} html\n<div class="notebook-output">\n<b>2</b>\n</div>\n{fence}'])
