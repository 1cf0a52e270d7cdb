"""docs/theory.md: its names exist, its numbers are those of the claims, its formulas convert, its examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from creditscope import METHODS
from creditscope.claims.table import CLAIMS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "theory.md").read_text()
CLAIMS_PAGE = (ROOT / "docs" / "claims.md").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


# -- what the page names ----------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """Heading -> text, of the numbered sections and of the table."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def cells() -> list[list[str]]:
    """The rows of the last table."""
    lines = [line for line in sections()["All statements"].splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def resolve(dotted: str) -> Any:
    """The object behind creditscope.package.module.name or .Class.name."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


@cache
def functions_in(path: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_function_on_the_page_exists() -> None:
    assert f"has all {len(METHODS)} rows" in " ".join(PAGE.split())
    named = set(re.findall(r"`(creditscope\.[\w.]+)`", PAGE)) | {f"creditscope.{row[3].strip('`')}" for row in cells()}
    assert len(named) > 35
    for name in named:
        found = resolve(name)
        assert found is METHODS or callable(found) or hasattr(found, "__get__") or hasattr(found, "func"), name


def test_a_name_that_does_not_exist_is_seen() -> None:
    for wrong in ("creditscope.exact.p1.dead_laws", "creditscope.exact.p3.dead_law", "creditscope.Microscope.grams"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(wrong)


def test_every_test_on_the_page_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 30
    assert [f"{path}::{name}" for path, name in named if name not in functions_in(path)] == []
    assert PAGE.count("::") == len(named)


def test_every_claim_on_the_page_is_one_of_the_table_and_those_about_theory_are_all_here() -> None:
    named = set(re.findall(r"\b(?:P[12]|C)\.\d+\b", PAGE))
    assert named <= CLAIMS.keys()
    assert CLAIMS.keys() - named == {"P1.7", "P1.14"}  # how fast runs learn
    assert {row[4] for row in cells() if row[4] != f"test of section {row[0]}"} == named


def test_every_section_names_its_functions_and_what_holds_them() -> None:
    found = sections()
    numbered = [name for name in found if name[0].isdigit()]
    assert [int(name.partition(".")[0]) for name in numbered] == list(range(1, 16))
    for name in numbered:
        assert "$$" in found[name], name
        line = r"^Computed by `creditscope\..*?;\s+held\s+by\s.*?\.$"
        lines = re.findall(line, found[name], re.DOTALL | re.MULTILINE)
        assert lines, f"section {name} has no line 'Computed by `creditscope...`; held by ...'"
        assert all("::" in line or "claim" in line for line in lines)
    assert {int(row[0]) for row in cells()} == set(range(1, 16))


def test_the_last_table_counts_the_verdicts_as_the_page_of_claims_does() -> None:
    for row in cells():
        assert row[5] == (counted(row[4]) if row[4] in CLAIMS else "–"), row[4]


def counted(claim: str) -> str:
    """`exact ✓ 3 ✗ 1; runs ? 2` from the cell `✗ 1 refuted, ✓ 3 holds: exact<br>? undecided (2 of 2): subject`."""
    found = re.search(rf"^\| {re.escape(claim)} \| .* \| (.*) \|$", CLAIMS_PAGE, re.MULTILINE)
    assert found is not None
    total = {"exact": Counter[str](), "runs": Counter[str]()}
    for part in found[1].split("<br>"):
        said, _, subject = part.partition(": ")
        counts = total["exact" if subject == "exact" else "runs"]
        if one := re.fullmatch(r"([✓✗?]) \w+(?: \((\d+) of \d+\))?", said):
            counts[one[1]] += int(one[2] or 1)
        for sign, number in re.findall(r"([✓✗?]) (\d+) \w+", said):
            counts[sign] += int(number)
    return "; ".join(f"{where} " + " ".join(f"{sign} {counts[sign]}" for sign in "✓✗?" if counts[sign])
                     for where, counts in total.items() if counts)


@pytest.mark.parametrize(("claim", "told", "measured"), [
    ("P1.4", "by 0.09 at $R=4$", "0.0929 [0.0679, 0.118]"), ("P1.4", "by 0.28 at $R=32$", "0.275 [0.13, 0.42]"),
    ("P1.4", "five of the 38 rows", "5 of 38 rows"), ("P1.1", "8 of the 13 estimators", "8 of 13 estimators"),
    ("P1.5", "12.4 where the null is 12.5", "12.45 at R = 2, 4, 8, 16, 32, where orthogonal scores of equal norm have "
                                            "(Σσ)²/Σσ² = 2.00, 3.27, 4.83, 7.73, 12.46"),
    ("P1.5", "8.4 where it is 27.7", "8.40 at R = 2, 4, 8, 16, 32, where orthogonal scores of equal norm have "
                                      "(Σσ)²/Σσ² = 2.00, 3.33, 6.61, 13.32, 27.72"),
    ("P1.6", "measured are 2, 4 and 8", "the largest rank is 2, 4, 8 at R = 2, 4, 8"),
    ("P1.12", "1.11 [1.04, 1.18]", "1.11 [1.04, 1.18]"),
    ("P1.8", "1.9 times", "1.89 times the gradient noise"),
    ("P1.11", "0.42 [0.32, 0.52] below", "-0.42 [-0.523, -0.318]"),
    ("P2.4", "44, 72 and 81 %", "81 % of the distance"), ("C.2", "70 % do", "0.70 \\[0.60, 0.80\\] of the groups"),
    ("C.1", "85 % of the gap", "explain 0.85 \\["), ("C.1", "48 % at $R=32$", "explain 0.48 \\["),
    ("C.1", "80 % and 1 %", "explain 0.80 \\["), ("C.1", "80 % and 1 %", "explain 0.01 \\["),
], ids=str)
def test_a_number_of_a_run_on_the_page_is_in_the_section_of_its_claim(claim: str, told: str, measured: str) -> None:
    assert told in " ".join(PAGE.split())
    section = re.search(rf"^## {re.escape(claim)} .*?(?=^## |\Z)", CLAIMS_PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert measured in section[0]


# -- formulas and examples ---------------------------------------------------------------------------------------------


def formulas(text: str) -> list[str]:
    """What stands between $ or $$, outside code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    shown = re.findall(r"\$\$(.+?)\$\$", prose, re.DOTALL)
    rest = re.sub(r"\$\$.+?\$\$", "", prose, flags=re.DOTALL)
    inline = re.findall(r"\$([^$]+)\$", rest)
    assert rest.count("$") == 2 * len(inline)
    return shown + inline


def test_every_formula_becomes_mathml() -> None:
    convert = pytest.importorskip("latex2mathml.converter").convert
    found = formulas(PAGE)
    assert len(found) > 150
    wrong = {}
    for formula in found:
        written = convert(formula)
        ElementTree.fromstring(written)
        if "\\" in written or formula.count("{") != formula.count("}"):
            wrong[formula] = written
    assert not wrong, wrong


def test_a_formula_with_an_unknown_command_is_seen() -> None:
    convert = pytest.importorskip("latex2mathml.converter").convert
    assert "\\" in convert(r"\nosuchcommand{x}")
    assert formulas("`$no$` and $a_i$ and\n$$b\n$$\n```\n$c$\n```\n") == ["b\n", "a_i"]


def test_every_formula_stands_on_one_line_or_between_double_dollars() -> None:
    """A pipe inside $...$ would end a cell of a table, and a line break would end the formula on some pages."""
    assert [f for f in formulas(PAGE) if "\n" in f or "|" in f] == []


def test_the_examples_print_what_the_page_shows() -> None:
    blocks = [block for language, block in FENCED.findall(PAGE) if language == "pycon"]
    assert len(blocks) == 3
    assert len(FENCED.findall(PAGE)) == 3
    runner = doctest.DocTestRunner(verbose=False)
    for number, block in enumerate(blocks):
        example = doctest.DocTestParser().get_doctest(block, {}, f"docs/theory.md, example {number}", None, 0)
        assert len(example.examples) > 4
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
