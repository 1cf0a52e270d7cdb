"""The verb: what it prints, its exit codes, and that it needs no torch."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from rich.cells import cell_len
from rich.console import Console

from creditscope.cli.doctor import Doctor, show, show_runs, table_of
from creditscope.cli.main import wrapped
from creditscope.cli.output import Output, Screen
from creditscope.diagnosis.engine import SIGNS, diagnose
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.read import read
from creditscope.diagnosis.readers.folders import SHAPES
from creditscope.diagnosis.rules import RULES
from creditscope.report.diagnosed import chain
from creditscope.runs.record import Record
from diagnosis.makers_doctor import LOGS, findings

NEXT = "Next: "


def said(capsys: pytest.CaptureFixture[str], name: str, **options: object) -> tuple[int, str]:
    code = Doctor(LOGS / name, **options).run()  # type: ignore[arg-type]
    return code, capsys.readouterr().out


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_first_line_is_the_headline_and_the_last_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(capsys, "verl-collapse")
    assert code == 0
    assert flat(out).startswith(flat(diagnose(read(LOGS / "verl-collapse")).headline))
    assert out.splitlines()[-1].startswith(NEXT)


def test_an_error_that_ended_the_run_is_said_below_the_headline(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Record.create(tmp_path / "run", {"method": "grpo"}, {}) as record:
        for step in range(3):
            record.append(step, {"reward/mean": 0.5, "signal/dead_groups": 0.0})
        record.append(3, {"run/stopped": "the gradient's norm is nan\x1b[2J"})
    assert Doctor(tmp_path / "run").run() == 0
    out = capsys.readouterr().out
    assert "note: the run ended early with an error: the gradient's norm is nan" in flat(out)
    assert "\x1b" not in out
    assert out.index("note: ") < out.index("unknown")


def test_every_rule_that_is_not_fine_is_named_and_the_others_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    out = flat(said(capsys, "verl-collapse")[1])
    states = {name: found.state for name, found in findings("verl-collapse").items()}
    assert not [name for name, state in states.items() if state != "fine" and name not in out]
    assert f"fine: {list(states.values()).count('fine')} questions, named by --why" in out
    assert out.count("✓") == 0
    assert not [name for name in RULES if name not in flat(said(capsys, "verl-collapse", why=True)[1])]


def test_the_first_cause_is_shown_with_evidence_reason_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    out = flat(said(capsys, "trl-cispo")[1])
    found = findings("trl-cispo")["cispo cap"]
    for text in (*found.evidence, found.why, found.change):
        assert text
        assert flat(text) in out
    assert "assumes epsilon_high=None, epsilon=0.2 (defaults of TRL)" in out


def test_effects_stand_in_the_order_of_their_onset() -> None:
    made = [Finding(rule=name, state="broken", sentence="x", onset=onset)
            for name, onset in (("length", 12), ("entropy", 20), ("reward", None))]
    assert chain(made) == "step 12 length, step 20 entropy, reward"


def test_what_follows_names_its_cause_and_what_does_not_its_change() -> None:
    cause = Finding(rule="b", state="broken", sentence="B", change="lr=1")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of([Finding(rule="a", state="watch", sentence="A", follows=("b",)), cause,
                            Finding(rule="c", state="unknown", sentence="C", settles="--probe light")]))
    out = flat(console.export_text())
    assert "A. Follows from b." in out
    assert "B. Change: lr=1." in out
    assert "C. Settled by: --probe light." in out


@pytest.mark.parametrize("why", [False, True])
@pytest.mark.parametrize("name", ["trl-short", "verl-collapse", "trl-dapo", "ours-fell"])
def test_no_line_is_longer_than_a_terminal_of_80_columns(name: str, why: bool) -> None:
    console = Screen(width=80, file=io.StringIO(), record=True, highlight=False)
    log = read(LOGS / name)
    show(console, log, diagnose(log), why)
    show_runs(console, {f"{name}/{'x' * 90}": diagnose(log)})
    lines = console.export_text().splitlines()
    assert len(lines) > 3
    assert max(map(cell_len, lines)) <= 80


@pytest.mark.parametrize("width", [48, 80])
def test_what_can_be_read_is_told_within_the_terminal_and_its_columns_stay(width: int) -> None:
    lines = wrapped(f"creditscope: x holds neither a run nor a log; {SHAPES}", width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert flat(" ".join(lines)) == flat(f"creditscope: x holds neither a run nor a log; {SHAPES}")  # nothing is lost
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("  a folder")):]
    assert {len(line) - len(line.lstrip()) for line in table} == {2, 13}  # terms, and the text beside them


def test_why_shows_the_evidence_of_what_follows_and_of_what_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    for name, rule in (("trl-short", "gradient"), ("trl-dapo", "dead groups")):
        evidence = findings(name)[rule].evidence[0]
        assert evidence not in flat(said(capsys, name)[1])
        assert evidence in flat(said(capsys, name, why=True)[1])


# -- many runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    for name in ("trl-short", "trl-dapo"):
        shutil.copytree(LOGS / name, tmp_path / "all" / name)
    (tmp_path / "all" / "bad").mkdir()
    (tmp_path / "all" / "bad" / "trainer_state.json").write_text("no json")
    return tmp_path / "all"


def test_a_folder_of_runs_gives_one_line_per_run(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Doctor(parent).run() == 0
    *lines, after = capsys.readouterr().out.splitlines()
    state = diagnose(read(LOGS / "trl-dapo")).state
    assert [line.split()[:3] for line in lines] == [
        ["bad", "?", "unknown"], ["trl-dapo", SIGNS[state], state], ["trl-short", "✗", "broken"]]
    assert "truncation" in lines[2]
    assert "is not JSON" in lines[0]
    assert after == f"Next: creditscope doctor {parent / 'trl-short'}"
    assert Doctor(parent, strict=True).run() == 1


def test_a_folder_of_runs_as_json_has_each_run_s_own(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Doctor(parent, output=Output(json=True)).run()
    told = {run.pop("run"): run for run in json.loads(capsys.readouterr().out)["runs"]}
    Doctor(parent / "trl-short", output=Output(json=True)).run()
    assert told["trl-short"] == json.loads(capsys.readouterr().out)
    assert (told["bad"]["state"], told["bad"]["rows"]) == ("unknown", 0)


def test_a_folder_with_one_run_inside_is_that_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(LOGS / "trl-short", tmp_path / "all" / "one")
    Doctor(tmp_path / "all").run()
    assert capsys.readouterr().out.startswith("✗ truncation: ")


def test_strict_fails_on_broken_and_on_nothing_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "trl-never", strict=True)[0] == 1
    assert said(capsys, "trl-never")[0] == 0
    assert said(capsys, "trl-twice", strict=True)[0] == 0  # to watch, not broken
    assert said(capsys, "trl-dapo", strict=True)[0] == 0


def test_json_is_one_object_with_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = said(capsys, "trl-short", output=Output(json=True))
    told = json.loads(out)
    assert (told["trainer"], told["rows"], told["first"]) == ("TRL", 12, "truncation")
    found = diagnose(read(LOGS / "trl-short"))
    assert (told["headline"], told["state"]) == (found.headline, found.state)
    assert told["effects"] == [each.rule for each in found.effects]
    assert [each["evidence"] for each in told["findings"]] == [list(each.evidence) for each in found.findings]
    assert {finding["rule"]: finding["state"] for finding in told["findings"]} == {
        rule: finding.state for rule, finding in findings("trl-short").items()}


def test_without_settings_the_next_line_asks_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Doctor(Path(shutil.copy(LOGS / "trl-dapo" / "train.log", tmp_path))).run()
    assert "--config FILE or --set NAME=VALUE" in capsys.readouterr().out.splitlines()[-1]
    assert "--why" in said(capsys, "trl-dapo")[1].splitlines()[-1]


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(LOGS / "trl-dapo", tmp_path / "run")
    (folder / "training_args.json").write_text(json.dumps({"loss_type": "\x1b[2Jmine"}))
    Doctor(folder).run()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    Doctor(folder, why=True).run()
    assert "\\x1b[2Jmine" in capsys.readouterr().out


def test_settings_on_the_command_line_may_be_repeated() -> None:
    asked = tyro.cli(Doctor, args=["a.log", "--set", "loss_type=grpo", "--set", "beta=0.1", "--strict"])
    assert asked == Doctor(Path("a.log"), sets=("loss_type=grpo", "beta=0.1"), strict=True)


def test_the_page_has_a_row_for_every_rule_in_their_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    rows = page.partition("## The rules")[2].partition("What follows from what")[0].splitlines()
    table = [line.split("|")[1].strip() for line in rows if line.startswith("|")]
    assert table[2:] == list(RULES)


@pytest.mark.slow
def test_the_doctor_loads_no_torch() -> None:
    code = ("import sys; from pathlib import Path; from creditscope.cli.doctor import Doctor;"
            f"Doctor(Path({str(LOGS / 'verl-steady')!r})).run(); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
