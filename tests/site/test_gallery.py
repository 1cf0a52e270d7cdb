"""The gallery's records are whole, small, of no particular machine, and give the page that their README promises."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from cli import run
from creditscope import Record
from creditscope.report.build import build
from each import each

ROOT = Path(__file__).resolve().parent.parent.parent
GALLERY = ROOT / "docs" / "gallery"
ENTRIES = sorted(path.parent for path in GALLERY.glob("*/run.json"))
LARGEST = 400 * 1024


def test_the_gallery_has_a_healthy_run_dead_groups_overshoot_and_a_hacked_reward() -> None:
    assert {"healthy", "dead-groups", "overshoot", "hacked-reward"} <= {entry.name for entry in ENTRIES}


@each("entry", ENTRIES)
def test_a_record_is_small_and_whole(entry: Path) -> None:
    files = [path for path in entry.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LARGEST
    record = Record.open(entry)
    steps = [line["step"] for line in record.steps()]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 20
    assert len(record.groups()) >= 1


@each("entry", ENTRIES)
def test_a_record_names_no_folder_of_the_machine_that_made_it(entry: Path) -> None:
    config = json.loads((entry / "run.json").read_text())["config"]
    assert not [value for value in config.values() if isinstance(value, str) and re.search(r"(^|:)(/|~)", value)]


@each("entry", ENTRIES)
def test_the_readme_says_what_made_the_record_and_shows_the_diagnosis(entry: Path) -> None:
    text = (entry / "README.md").read_text()
    assert text.startswith("# ")
    assert ":::{diagnosis}" in text
    assert re.search(r"^(creditscope lab train|python) ", text, re.MULTILINE)


@each("entry", ENTRIES)
def test_the_first_line_of_the_report_is_the_diagnosis_and_no_line_is_the_papers(
        entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", str(entry), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    page = build([entry])
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.partition("<body")[2])).split())
    assert not [mark for mark in ('id="claims"', "2606.29238", "2601.05002") if mark in page]
    assert found["headline"].lstrip("✗!?✓ ")[:60] in text[:400]


EXPECTED = {"healthy": ("fine", None), "dead-groups": ("broken", "cold sampler"), "overshoot": ("broken", "updates"),
            "hacked-reward": ("broken", "reward length")}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_doctor_names_the_planted_cause(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", str(GALLERY / name), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["first"]) == EXPECTED[name]
