"""The verb: what it prints, its exit codes, and that it needs no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from creditscope.cli.doctor import Doctor
from creditscope.cli.output import Output
from creditscope.diagnosis.finding import STATES
from creditscope.diagnosis.rules import RULES
from diagnosis.makers_doctor import LOGS, findings

NEXT = "Next: "


def said(capsys: pytest.CaptureFixture[str], name: str, **options: object) -> tuple[int, str]:
    code = Doctor(LOGS / name, **options).run()  # type: ignore[arg-type]
    return code, capsys.readouterr().out


def test_the_table_lists_every_finding_most_severe_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(capsys, "verl-collapse")
    assert code == 0
    order = [line.split()[1] for line in out.splitlines() if line.strip().startswith(("✗ b", "! w", "? u", "✓ f"))]
    assert len(order) == len(RULES)
    assert order == sorted(order, key=STATES.index)
    assert out.splitlines()[-1].startswith(NEXT)


def test_what_is_broken_is_shown_with_evidence_reason_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = said(capsys, "trl-cispo")
    flat = " ".join(out.split())
    found = findings("trl-cispo")["cispo cap"]
    for text in (found.evidence, found.why, found.change):
        assert text
        assert " ".join(text.split()) in flat
    assert "assumes epsilon_high=None, epsilon=0.2 (defaults of TRL)" in flat


def test_the_first_line_is_the_first_cause_with_the_setting_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = said(capsys, "trl-short")
    line = " ".join(out.partition("TRL (read as")[0].split())
    assert line == ("✗ truncation: 100% of the answers are cut at the limit over steps 8–12 and left out of the loss. "
                    "From it follow: reward, dead groups, gradient. Change: max_completion_length (raise it).")
    assert "nothing is learnt there (follows from truncation)" in " ".join(out.split())
    assert said(capsys, "trl-dapo")[1].startswith("✓ Nothing is broken or to watch.\n")
    # verl counts no dead groups, on which three rules rest, and this log has no sampler's numbers.
    assert said(capsys, "verl-steady")[1].startswith("✓ Nothing is broken or to watch; 4 findings are unknown.\n")


def test_what_follows_from_another_is_laid_out_only_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    evidence = findings("trl-short")["gradient"].evidence
    assert evidence not in " ".join(said(capsys, "trl-short")[1].split())
    assert evidence in " ".join(said(capsys, "trl-short", why=True)[1].split())


def test_why_shows_the_evidence_of_what_is_fine_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings("trl-dapo")["dead groups"]
    assert found.evidence not in " ".join(said(capsys, "trl-dapo")[1].split())
    assert found.evidence in " ".join(said(capsys, "trl-dapo", why=True)[1].split())


def test_strict_fails_on_broken_and_on_nothing_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "trl-never", strict=True)[0] == 1
    assert said(capsys, "trl-never")[0] == 0
    assert said(capsys, "trl-twice", strict=True)[0] == 0  # to watch, not broken
    assert said(capsys, "trl-dapo", strict=True)[0] == 0


def test_json_is_one_object_with_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = said(capsys, "trl-short", output=Output(json=True))
    told = json.loads(out)
    assert (told["trainer"], told["rows"], told["first"]) == ("TRL", 12, "truncation")
    assert [finding["follows"] for finding in told["findings"]][:4] == ["", *["truncation"] * 3]
    assert {finding["rule"]: finding["state"] for finding in told["findings"]} == {
        rule: finding.state for rule, finding in findings("trl-short").items()}


def test_without_settings_the_next_line_asks_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config FILE or --set NAME=VALUE" in said(capsys, "trl-dapo/train.log")[1].splitlines()[-1]
    assert "--why" in said(capsys, "trl-dapo")[1].splitlines()[-1]


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(LOGS / "trl-dapo", tmp_path / "run")
    (folder / "training_args.json").write_text(json.dumps({"loss_type": "\x1b[2Jmine"}))
    Doctor(folder).run()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2Jmine" in out


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
