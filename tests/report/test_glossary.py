"""The glossary cannot rot: every metric that the page names, and every one that the docs name, has an entry."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import creditscope.report
from creditscope.microscope.geometry import RANKS
from creditscope.microscope.spectrum import spectrum
from creditscope.report import glossary
from creditscope.runs import schema
from each import each

REPORT = Path(creditscope.report.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
AREAS = ("w", "reward", "signal", "length", "entropy", "objective", "grad", "policy", "credit", "critic", "gram",
         "scores", "null", "matrix", "also", "baseline", "tokens", "overshoot", "optimizer", "update", "brake", "eval",
         "rollouts", "adapt", "scope", "time")
METRIC = re.compile(rf"({'|'.join(AREAS)})/([a-z0-9_,=.]+/)*[a-z][a-z0-9_]+")


def texts(path: Path) -> set[str]:
    """The texts of a module, and the keys that it takes from the schema; a value in an f-string is a 1, as in
    overshoot/1/past."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "schema":
            found.add(str(getattr(schema, node.attr)))
    return found


def named() -> list[str]:
    """Every metric that the report's modules and scripts name; one that ends in braces names none."""
    found = {text for path in REPORT.glob("*.py") if path.name != "glossary.py" for text in texts(path)}
    found |= {text for path in (REPORT / "assets").glob("*.js") for text in re.findall(r"[\"'`]([^\"'`\n]+)[\"'`]",
                                                                                       path.read_text())}
    return sorted(text for text in found if METRIC.fullmatch(text))


@each("metric", named())
def test_every_metric_that_the_page_names_has_an_entry(metric: str) -> None:
    assert glossary.key(metric) is not None, f"{metric} is not in report/glossary.py"


@pytest.mark.slow
def test_the_search_for_metrics_finds_some() -> None:
    assert {"reward/mean", "signal/live_groups"} <= set(named())


@pytest.mark.parametrize("name", ["optimizer.md"])
def test_every_metric_of_the_docs_has_an_entry(name: str) -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", (DOCS / name).read_text(), flags=re.MULTILINE)
    metrics = [word.replace("/K/", "/1/") for cell in cells for word in re.findall(r"`([^`]+)`", cell)]
    metrics = [metric for metric in metrics if METRIC.fullmatch(metric)]
    assert len(metrics) >= 10
    assert [metric for metric in metrics if glossary.key(metric) is None] == []


@each("name", RANKS)
def test_every_rank_has_an_entry_with_an_equation(name: str) -> None:
    assert glossary.TERMS[name].equation


def test_a_name_that_is_no_metric_has_no_entry() -> None:
    assert glossary.key("gram/group/no_such_rank") is None
    assert glossary.key("reward/no_such_mean") is None


def test_the_same_reading_of_other_rows_has_one_place() -> None:
    places = {glossary.anchor(metric) for metric in (
        "gram/effective_rank", "gram/group/effective_rank", "scores/group/effective_rank", "null/group/effective_rank",
        "also/monte_carlo,samples=4/effective_rank", "all/effective_rank")}
    assert places == {"glossary-effective_rank"}


def test_every_entry_has_its_own_anchor_on_the_page_and_links_lead_there() -> None:
    html = glossary.section().html()
    ids = re.findall(r'id="(glossary-[^"]+)"', html)
    assert sorted(ids) == sorted(f"glossary-{key}" for key in glossary.TERMS)
    assert glossary.link("gram/group/top1") == '<a href="#glossary-top1">top-1 share</a>'


def test_definitions_of_rank_are_those_of_the_code() -> None:
    # σ = (2, 1): (2 + 1)²/(4 + 1) = 1.8, and the glossary prints the formula that the code documents
    assert spectrum([[4.0, 0.0], [0.0, 1.0]]).effective_rank == pytest.approx(1.8)
    assert "(Σσ)² / Σσ²" in glossary.TERMS["effective_rank"].equation
    assert glossary.TERMS["stable_rank"].equation == "Σσ² / σ₁²"


def test_no_sentence_is_long_and_no_entry_is_empty() -> None:
    for key, term in glossary.TERMS.items():
        assert term.sentence.endswith("."), key
        assert len(term.sentence) <= 240, key
