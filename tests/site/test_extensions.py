"""What turns docstrings, formulas and the gallery's folders into pages."""

from __future__ import annotations

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


def test_a_notebook_becomes_text_code_and_the_outputs_that_are_in_it() -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    outputs = [{"text": ["1\n"]}, {"data": {"text/plain": "R", "text/html": ["<b>", "x</b>"]}},
               {"data": {"text/plain": "2"}}]
    cells = [{"cell_type": "markdown", "source": ["# T\n", "t"]},
             {"cell_type": "code", "source": "print(1)", "outputs": outputs}]
    assert load_script(EXT / "notebook.py").as_markdown({"cells": cells}).split("\n\n") == [
        "# T\nt", "```python\nprint(1)\n```", "````text\n1\n````",
        '````{raw} html\n<div class="output"><b>x</b></div>\n````', "````text\n2\n````\n"]
