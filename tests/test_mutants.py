"""The table of planted bugs fits the code: a bug whose text has moved is found here, not in the gate."""

from __future__ import annotations

from pathlib import Path

from mutants import ALL, ROOT

TABLE = ROOT / "docs" / "planted.md"


def test_the_text_of_each_planted_bug_stands_once_in_its_file() -> None:
    texts = {mutant.file: (ROOT / "src" / "creditscope" / mutant.file).read_text() for mutant in ALL}
    assert {mutant.name: texts[mutant.file].count(mutant.old) for mutant in ALL} == {mutant.name: 1 for mutant in ALL}


def test_the_page_has_every_planted_bug_in_the_order_of_the_table() -> None:
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [(name.removeprefix("| "), file) for name, file, _ in rows] == [(m.name, m.file) for m in ALL]


def test_tests_that_guard_a_planted_bug_exist() -> None:
    assert {file for mutant in ALL for file in mutant.files if not Path(ROOT / file).exists()} == set()
