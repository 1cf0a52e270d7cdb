"""Records of format 1 are read under the names of today: `record_0.1` is a run that creditscope 0.1.0 wrote."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cli import run, run_json
from creditscope import Record
from creditscope.claims.evidence import from_json, read_evidence, to_json
from creditscope.runs import schema
from creditscope.runs.arrays import ARRAYS
from creditscope.runs.formats import upgraded

OLD = Path(__file__).parent / "record_0.1"
RESULTS = Path(__file__).parents[2] / "results"
RENAMED = {"credit/zero": "w/zero", "credit/top10_mass": "w/top10_mass", "credit/positive_mass": "w/positive_mass",
           "gram/credit_null": "gram/w_null", "gram/group/credit_null": "gram/group/w_null"}


def written() -> list[dict[str, object]]:
    """The lines as they stand in the file."""
    return [json.loads(line) for line in (OLD / "steps.jsonl").read_text().splitlines()]


def test_the_record_is_of_format_1_and_has_every_name_that_changed() -> None:
    assert json.loads((OLD / "run.json").read_text())["format"] == 1
    assert set(RENAMED) <= set(written()[0])
    assert "credit.npy" in zipfile.ZipFile(OLD / "scope" / "000000.npz").namelist()


def test_every_number_of_an_old_step_is_read_under_its_new_name() -> None:
    found = Record.open(OLD).steps()
    for old, new in zip(written(), found, strict=True):
        assert new == {RENAMED.get(name, name): value for name, value in old.items() if name != "crc32"}
    assert not set(RENAMED) & {name for line in found for name in line}
    assert Record.open(OLD).columns() == found


def test_every_name_of_an_old_record_is_in_the_schema() -> None:
    record = Record.open(OLD)
    names = {name for line in record.steps() for name in line} - {"step", "kept", "absent"}
    assert [name for name in sorted(names) if schema.metric(name) is None] == []
    for file, arrays in (("groups", record.group(0)), ("scope", record.reading(0)),
                         ("optimizer", record.optimizer_reading(0))):
        assert set(arrays) <= set(ARRAYS[file])


def test_credit_in_groups_stays_A_and_credit_in_scope_becomes_the_rows_w() -> None:
    record = Record.open(OLD)
    kept, read = record.group(0), record.reading(0)
    assert "credit" not in read
    assert {"credit", "w"} <= set(kept)
    # One answer's tokens have one w: the row's, which scope keeps.
    for i, mask in enumerate(kept["mask"]):
        assert kept["w"][i][mask] == pytest.approx(read["row_w"][i], rel=1e-5)


def test_a_metric_that_was_not_finite_is_absent_under_its_new_name() -> None:
    line = {"step": 3, "absent": {"credit/zero": "nan", "reward/std": "nan"}}
    assert upgraded(line, "steps", 1) == {"step": 3, "absent": {"w/zero": "nan", "reward/std": "nan"}}
    assert upgraded(line, "steps", 2) == line


def test_a_run_of_format_1_goes_on_with_the_new_names(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    config = Record.open(OLD).config
    count = len(Record.open(OLD).steps())
    with Record.resume(tmp_path / "run", config) as record:
        record.save_reading(7, {"row_w": np.array([0.5])})
        record.append(7, {schema.W_ZERO: 0.25, "credit/within": 0.0})
    found = Record.open(tmp_path / "run")
    assert found.run["format"] == 1
    assert [line["w/zero"] for line in found.steps() if "w/zero" in line][-1] == 0.25
    assert len(found.steps()) == count + 1
    assert found.reading(7)["row_w"].tolist() == [0.5]
    assert "row_w" in found.reading(0)


def test_a_new_run_is_of_format_2(tmp_path: Path) -> None:
    with Record.create(tmp_path / "run", {}, {}) as record:
        record.append(0, {schema.W_ZERO: 0.25})
    assert json.loads((tmp_path / "run" / "run.json").read_text())["format"] == 2
    assert Record.open(tmp_path / "run").steps() == [{"step": 0, "w/zero": 0.25}]


def test_old_evidence_files_have_the_new_columns() -> None:
    found = [from_json(path) for path in sorted((RESULTS / "p1-tiny").rglob("*.evidence.json"))]
    assert len(found) > 10
    assert all("credit_null" not in run.groups for run in found)
    assert all("w_null" in run.groups for run in found if run.groups)


def test_evidence_of_an_old_record_is_written_in_the_new_format(tmp_path: Path) -> None:
    run = read_evidence(Record.open(OLD))
    path = tmp_path / "old.evidence.json"
    path.write_text(to_json(run))
    assert json.loads(path.read_text())["format"] == "creditscope evidence 2"
    assert from_json(path).groups["w_null"] == [pytest.approx(value, rel=1e-4) for value in run.groups["w_null"]]


@pytest.mark.parametrize("words", ["papers check", "doctor", "inspect", "inspect --prefix"])
def test_every_reader_takes_an_old_record(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, *words.split(), OLD)


def test_the_page_of_an_old_record_shows_w(tmp_path: Path) -> None:
    assert run("report", shutil.copytree(OLD, tmp_path / "run"), "--out", tmp_path / "page.html") == 0
    assert "glossary-w_zero" in (tmp_path / "page.html").read_text()
