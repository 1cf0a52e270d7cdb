"""`creditscope report` as a user meets it: the file, what is printed, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import webbrowser
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cli
from creditscope.cli.main import main
from creditscope.diagnosis.engine import SIGNS
from creditscope.files.markup import escape
from creditscope.report import answers as rules
from creditscope.report import page
from creditscope.report.answers import answers
from creditscope.report.run import read_run
from creditscope.runs.record import Record
from makers import edit_config
from report import records

run = partial(cli.run, "report")


def told(capsys: pytest.CaptureFixture[str], *args: str | Path) -> dict[str, Any]:
    assert run(*args, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return records.bare(tmp_path / "run")


def test_one_run_s_page_lies_in_its_folder_and_is_told_with_its_size(
        bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bare) == 0
    out = capsys.readouterr().out
    size = (bare / "report.html").stat().st_size
    assert f"wrote {bare / 'report.html'}: {size / 1e6:.1f} MB in " in out
    assert f"Next: the same with --open, or creditscope papers check {bare}\n" in out
    assert (bare / "report.html").read_text().startswith("<!doctype html>")


def test_an_error_that_ended_the_run_is_printed_below_the_headline(
        bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Record.resume(bare, Record.open(bare).config) as record:
        record.append(record.steps()[-1]["step"] + 1, {"run/stopped": "the gradient's norm is nan"})
    assert run(bare) == 0
    out = " ".join(capsys.readouterr().out.split())
    headline = read_run(bare).diagnosis.headline
    assert out.startswith(f"{headline} the run ended early with an error: the gradient's norm is nan")


def test_the_four_answers_are_printed_as_they_stand_on_the_page(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bare) == 0
    out = capsys.readouterr().out
    headline = read_run(bare).diagnosis.headline
    assert " ".join(out.split()).startswith(headline)
    found = answers(read_run(bare))
    lines = [line for line in out.splitlines() if line.split()[2:3] and line.split()[2] in rules.TOPICS]
    for line, answer in zip(lines, found, strict=True):
        assert line.split(maxsplit=3)[1:] == [answer.state, answer.topic, answer.sentence]
    # 3 of 4 groups are live in each of the six steps of the record; the rewards rise by 0.05 per step.
    sign = f"{SIGNS[found[0].state]} {found[0].state:<8}"
    assert lines[0].startswith(f"{sign}Signal     Mean reward 0.275 → 0.475 (thirds); 3 of 4 groups carry signal;")


def test_json_is_the_same_as_data(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, bare)
    assert found["file"] == str(bare / "report.html")
    assert found["bytes"] == (bare / "report.html").stat().st_size
    assert found["charts"] is True
    (one,) = found["runs"]
    assert [(a["topic"], a["state"]) for a in one["answers"]] == [
        (answer.topic, answer.state) for answer in answers(read_run(bare))]


def test_a_report_is_written_over_an_older_one_and_the_run_does_not_mind_it(
        bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Record.open(bare).config
    first = told(capsys, bare)
    with Record.resume(bare, config) as record:
        record.append(6, {"reward/mean": 0.9, "rollouts/spent": 16, "signal/groups": 4, "signal/live_groups": 4})
    assert (bare / "report.html").exists()
    assert told(capsys, bare)["runs"] != first["runs"]
    assert not list(bare.glob(".*"))


def test_a_run_that_never_took_a_step_can_be_started_anew_beside_a_report(tmp_path: Path) -> None:
    Record.create(tmp_path / "run", {}, {}).close()
    (tmp_path / "run" / "report.html").write_text("x")
    Record.create(tmp_path / "run", {}, {}).close()


def test_several_runs_are_one_page_in_the_present_folder(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        path = records.bare(tmp_path / "all" / f"seed-{seed}")
        edit_config(path, seed=seed)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run(tmp_path / "all") == 0
    out = capsys.readouterr().out
    state = read_run(path).diagnosis.state
    assert out.startswith(f"{SIGNS[state]} {state:<8}tiny · arithmetic · grpo 75 % live groups\n")
    assert "wrote report.html: " in out
    assert [file.name for file in (tmp_path / "here").iterdir()] == ["report.html"]
    assert not (tmp_path / "all" / "report.html").exists()


def test_a_folder_with_one_run_inside_gives_that_run_s_page(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, bare.parent)["file"] == str(bare / "report.html")


def test_a_file_of_evidence_is_a_page_too(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["papers", "check", str(bare), "--save", str(tmp_path / "kept")])
    capsys.readouterr()
    (file,) = (tmp_path / "kept").iterdir()
    found = told(capsys, file, "-o", tmp_path / "page.html")
    assert found["runs"] == []
    assert [setting["state"] for setting in found["settings"]] == [read_run(bare).diagnosis.state]
    assert (tmp_path / "page.html").stat().st_size == found["bytes"]


@pytest.mark.parametrize(("make", "message"), [
    (lambda path: path, "run does not exist; give a folder written by creditscope lab train"),
    (lambda path: path.write_text("notes") and path, r"run is no run's folder, nor a \*.evidence.json file"),
    (lambda path: path.mkdir() or ((path / "trainer_state.json").write_text("{}") and path),
     "holds a log of TRL's, no record; read the log with creditscope doctor "),
    (lambda path: path.parent / ("x" * 300), "cannot look into .*: File name too long"),
    (lambda path: Record.create(path, {}, {}).close() or (path / "steps.jsonl").unlink() or path,
     "run has no step yet; wait for the first, or follow it with --watch"),
    (lambda path: path.mkdir() or path, r"run holds no run \(no run.json\); give a folder written by"),
    (lambda path: Record.create(path, {}, {}).close() or path,
     "run has no step yet; wait for the first, or follow it with --watch"),
])
def test_what_is_no_run_or_has_no_step_is_refused_with_the_repair(
        make: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make(tmp_path / "run")) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert not list(tmp_path.rglob("*.html"))


def test_a_damaged_step_is_named_by_its_line(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (bare / "steps.jsonl").read_text().splitlines(keepends=True)
    (bare / "steps.jsonl").write_text(text[0] + "{}\n")
    assert run(bare) == 2
    assert "steps.jsonl, line 2: not a step" in capsys.readouterr().err


def test_a_file_that_is_no_report_is_not_written_over(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = bare.parent / "thesis.html"
    for text in ("my thesis", "", "x" * 5000 + '<meta name="generator" content="creditscope 1">'):
        mine.write_text(text)
        assert run(bare, "-o", mine) == 2
        assert "is no report of creditscope's; choose another file with -o" in capsys.readouterr().err
        assert mine.read_text() == text


@pytest.mark.parametrize(("out", "said"), [
    ("", "a report is an html file"), ("notes.md", "a report is an html file; name it "),
    ("run/steps.jsonl/x.html", "does not exist; make it first"), ("no/such/x.html", "does not exist; make it first")])
def test_a_place_that_cannot_be_written_is_refused(
        out: str, said: str, bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(bare.parent.rglob("*"))
    assert run(bare, "-o", bare.parent / out) == 2
    err = capsys.readouterr().err
    assert "cannot write" in err
    assert said in err
    assert sorted(bare.parent.rglob("*")) == before


def test_one_of_several_that_does_not_exist_is_refused(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bare, bare.parent / "nosuch") == 2
    assert "nosuch does not exist" in capsys.readouterr().err


def test_the_next_command_can_be_pasted_whatever_the_names_are(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = records.bare(tmp_path / "my run")
    assert run(path) == 0
    assert f"creditscope papers check '{path}'\n" in capsys.readouterr().out


def test_flags_that_do_not_fit_are_refused(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bare, "--watch", "-o", "x.html") == 2
    assert "--watch serves the page and writes no file: leave out --out x.html" in capsys.readouterr().err
    assert run(bare, "--port", "80") == 2
    assert "--port 80 is where --watch serves: give --watch too" in capsys.readouterr().err
    assert run(bare, "--watch", "--port", "70000") == 2
    assert "cannot serve on 127.0.0.1:70000" in capsys.readouterr().err
    assert run() == 2
    assert "nothing to report: name a run's folder" in capsys.readouterr().err


def test_a_write_that_is_interrupted_leaves_the_old_report_and_no_part(
        bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(bare) == 0
    before = (bare / "report.html").read_bytes()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    assert run(bare) == 130
    assert (bare / "report.html").read_bytes() == before
    assert not list(bare.glob("*.part"))
    assert "interrupted" in capsys.readouterr().err


def test_open_gives_the_file_to_the_browser_and_says_when_there_is_none(
        bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(asked.append(url)))
    monkeypatch.chdir(bare.parent)
    assert run("run", "--open") == 0
    assert asked == [(bare / "report.html").resolve().as_uri()]
    assert f"no browser was found here; open {asked[0]}" in capsys.readouterr().err.replace("\n", "")


def test_without_vega_the_page_is_made_and_both_say_so(
        bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page.vega.cache_clear()
    try:
        assert run(bare) == 0
    finally:
        page.vega.cache_clear()
    assert "no charts: a chart needs vl-convert: pip install 'creditscope[plot]'" in capsys.readouterr().out
    text = (bare / "report.html").read_text()
    assert len(text) < 300_000
    assert "No charts in this file: pip install 'creditscope[plot]' and make it again." in text


@pytest.mark.slow
def test_a_hostile_record_reaches_the_terminal_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(records.hostile(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    out.encode()


@pytest.mark.slow
def test_the_verb_loads_no_torch_and_works_as_a_program(bare: Path) -> None:
    code = ("import sys; from creditscope.cli.main import main\ntry: main(['report', sys.argv[1]])\n"
            "except SystemExit as stop: assert stop.code == 0, stop.code\nsys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, bare], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0, done.stderr
    assert "carry signal" in done.stdout


def test_the_page_and_the_doctor_have_the_same_findings_of_a_record(
        bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Record.resume(bare, Record.open(bare).config) as record:
        for step in range(6, 30):  # rewards fall to 0 and stay there
            record.append(step, {"reward/mean": 0.0, "reward/std": 0.0, "signal/groups": 4, "signal/live_groups": 0,
                                 "signal/dead_groups": 1.0, "credit/dead_groups": 1.0, "grad/norm": 0.0,
                                 "rollouts/spent": 16})
    report = told(capsys, bare)["runs"][0]["diagnosis"]
    assert cli.run("doctor", bare, "--json") == 0
    doctor = json.loads(capsys.readouterr().out)
    assert report == {name: doctor[name] for name in report}
    html = (bare / "report.html").read_text()
    assert f'id="diagnosis" data-state="{doctor["state"]}" data-first="{doctor["first"]}"' in html
    shown = dict(re.findall(r'data-rule="([^"]+)" data-state="([^"]+)"', html))
    assert shown == {each["rule"]: each["state"] for each in doctor["findings"] if each["rule"] != doctor["first"]}
    first = next(each for each in doctor["findings"] if each["rule"] == doctor["first"])
    assert escape(f"{first['rule']}: {first['sentence']}.") in html
    assert escape(first["change"]) in html


def test_the_docs_name_the_topics_and_the_window_of_the_means() -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row in rules.TOPICS] == list(rules.TOPICS)
    assert f"means over the last {rules.LAST} steps" in " ".join(text.split())


def test_the_record_inside_a_folder_of_trl_is_reported(bare: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    outputs = tmp_path / "outputs"
    (outputs / "checkpoint-10").mkdir(parents=True)
    (outputs / "checkpoint-10" / "trainer_state.json").write_text("{}")
    bare.rename(outputs / "scope")
    found = told(capsys, outputs)
    assert found["file"] == str(outputs / "scope" / "report.html")
    assert [run["path"] for run in found["runs"]] == [str(outputs / "scope")]
