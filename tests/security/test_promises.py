"""SECURITY.md: each promise names a test, and each test that is named exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import creditscope

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PROMISED = TEXT.partition("## What is promised")[2].partition("## What is not promised")[0]
PACKAGED = {"models/tiny": {".json", ".safetensors"}, "report/assets": {".js", ".css"}, "selftest": {".json", ".npz"},
            "diagnosis": {".json"}, ".": {".typed"}}
"""Folders of the package that hold more than source, and the kinds of files there."""


def names_in(file: str) -> set[str]:
    """Names of the tests in a file."""
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_promise_names_a_test() -> None:
    promises = re.split(r"\n(?=- )", PROMISED)[1:]
    assert len(promises) > 20
    assert [promise for promise in promises if "`tests/" not in promise] == []


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) == TEXT.count("`tests/")
    assert [(file, test) for file, test in named if test not in names_in(file)] == []


def test_every_pinned_version_is_exact_and_comes_from_an_index() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 50
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.!+]+", line)] == []


def test_the_package_holds_no_data_that_is_not_named_here() -> None:
    source = Path(creditscope.__file__).parent
    strangers = [path for path in source.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc") and
                 path.suffix not in PACKAGED.get(path.parent.relative_to(source).as_posix(), set())]
    assert strangers == []
