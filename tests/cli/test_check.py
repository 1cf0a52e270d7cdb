"""`creditscope papers check` on records made by hand: verdicts, exit codes, files, and what is missing or damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cli
from creditscope.claims.evidence import from_json, to_json
from creditscope.claims.table import CLAIMS
from creditscope.cli.check import names, read_runs
from creditscope.errors import CreditscopeError
from creditscope.runs.record import Record
from makers import edit_config
from records import write_record

SIZES = (4, 8)


def rows_of(reward: np.ndarray, directions: int) -> np.ndarray:
    """Scores of equal norm in so many orthogonal directions, right and wrong answers apart."""
    eye = np.eye(directions)
    half = directions // 2
    return np.array([eye[(i % half) + (0 if r else half)] for i, r in enumerate(reward)])


def write_run(path: Path, group: int, seed: int, directions: int, **config: Any) -> Path:
    """Two readings of a half-right group: its rows have `directions` equal singular values, so every rank is that."""
    settings = {"model": "tiny", "task": "arithmetic", "method": "p1_grpo", "credit": None, "group": group,
                "prompts": 1, "seed": seed, "steps": 2, "rollouts": 0, "lr": 1e-4} | config
    reward = (np.arange(group) < group // 2).astype(np.float64)
    credit = reward - reward.mean()
    rows = credit[:, None] * rows_of(reward, directions)
    gram = rows @ rows.T
    line = {"reward/mean": 0.5, "rollouts/spent": group, "credit/within": 0.0, "eval/accuracy": 0.5}
    reading = {"group": np.zeros(group, dtype=np.int64), "reward": reward, "gram": gram, "row_w": credit,
               "eps": np.array(2e-16)}
    return write_record(path, [line, line, {"eval/accuracy": 0.5}], settings, readings={0: reading, 1: reading},
                        versions={"torch": "2"})


def sweep(out: Path, directions: dict[int, int]) -> Path:
    for size, count in directions.items():
        for seed in range(3):
            write_run(out / f"r{size}" / f"seed-{seed}", size, seed, count)
    return out


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Rank 2 at R = 4 and 8."""
    return sweep(tmp_path / "two", {4: 2, 8: 2})


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Rank R at R = 4 and 8."""
    return sweep(tmp_path / "full", {4: 4, 8: 8})


run = partial(cli.run, "papers", "check")


def data(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    return cli.run_json(capsys, "papers", "check", *args)


def outcomes(found: Any, start: str = "(Σσ)²/Σσ² of the rollout matrix") -> list[str]:
    return [v["outcome"] for v in found["verdicts"] if v["definition"].startswith(start)]


# -- verdicts and exit codes -----------------------------------------------------------------------------------------


def test_rank_two_at_every_r_holds_and_rank_r_is_refuted(two: Path, full: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert outcomes(data(capsys, two, "--claim", "P1.5")) == ["holds"]
    assert outcomes(data(capsys, full, "--claim", "P1.5")) == ["refuted"]


@pytest.mark.slow
def test_strict_fails_for_a_refuted_claim_alone(two: Path, full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(full, "--claim", "P1.5") == 0
    assert run(full, "--claim", "P1.5", "--strict") == 1
    assert run(full, "--claim", "P1.5", "--strict", "--json") == 1
    assert run(two, "--claim", "P1.1", "P1.2", "--strict") == 0
    capsys.readouterr()
    assert run(two, "--claim", "P1.14", "--strict") == 0  # undecided is no failure
    assert "0 refuted, 1 undecided" in capsys.readouterr().out


def test_what_was_not_recorded_leaves_a_claim_undecided_with_what_it_needs(
        two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, two, "--claim", "P1.8", "P1.11", "P1.14")["verdicts"]
    assert {v["claim"] for v in found} == {"P1.8", "P1.11", "P1.14"}
    assert all(v["outcome"] == "undecided" and v["reason"].startswith("needs ") for v in found)
    assert run(two, "--claim", "P1.8", "P1.11") == 0
    out = capsys.readouterr().out
    assert "? not tested: P1.8, P1.11; --why says what each needs" in out
    assert run(two, "--claim", "P1.8", "--why") == 0
    assert "? P1.8 [runs]: needs kept rollouts" in capsys.readouterr().out


def test_a_run_with_nothing_but_its_settings_is_undecided_everywhere_and_no_crash(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Record.create(tmp_path / "bare", {}, {}).close()
    found = data(capsys, tmp_path / "bare")
    assert {v["claim"] for v in found["verdicts"]} == {name for name, claim in CLAIMS.items() if claim.runs}
    assert {v["outcome"] for v in found["verdicts"]} == {"undecided"}
    assert run(tmp_path / "bare", "--strict") == 0


def test_what_holds_and_what_is_undecided_together_are_no_failure(two: Path) -> None:
    assert run(two, "--claim", "P1.1", "P1.8", "--strict", "--json") == 0


@pytest.mark.slow
def test_one_folder_given_twice_has_the_sample_of_one(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(two, "--save", two / "evidence") == 0
    capsys.readouterr()
    found = [data(capsys, *paths, "--claim", "P1.2")["verdicts"][0]["n"] for paths in (
        (two,), (two, two), (two, two / "evidence"))]
    assert found == [12, 12, 12]  # two readings of six runs


def test_exact_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--exact", "--claim", "C.2")
    assert {v["outcome"] for v in found["verdicts"]} == {"holds"}
    assert found["runs"] == []
    assert run("--exact", "--claim", "P1.9", "--strict") == 1  # the printed table is wrong


def test_exact_and_runs_are_told_apart_on_the_screen(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(two, "--exact", "--claim", "C.2", "P1.5") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("C.2")]
    assert ["exact" in line for line in lines] == [True, False]


# -- the screen ------------------------------------------------------------------------------------------------------


def test_many_definitions_are_one_line_and_all_of_them_with_all(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(full, "--claim", "P1.5") == 0
    out = capsys.readouterr().out
    folded = [line for line in out.splitlines() if line.strip().startswith("P1.5")]
    assert len(folded) == 1
    assert "The effective rank is about 2 whatever R" in folded[0]
    assert "tiny · arithmetic · p1_grpo" in folded[0]
    assert " refuted, " in folded[0]
    assert ("✗ P1.5 [tiny · arithmetic · p1_grpo] (Σσ)²/Σσ² of the rollout matrix, all parameters: it is 4.00, 8.00 at "
            "R = 4, 8") in out
    assert "more: --all)" in out
    assert run(full, "--claim", "P1.5", "--all") == 0
    every = capsys.readouterr().out
    found = data(capsys, full, "--claim", "P1.5")["verdicts"]
    assert len([line for line in every.splitlines() if line.strip().startswith("P1.5")]) == len(found)
    assert "more: --all)" not in every


def test_a_reason_says_on_what_and_the_sum_says_that_a_refuted_claim_is_no_error(
        full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(full / "other" / "seed-0", 4, 0, 4, model="other")
    assert run(full, "--claim", "P1.2", "--why") == 0
    out = capsys.readouterr().out
    assert "P1.2 [tiny · arithmetic · p1_grpo]" in out
    assert "P1.2 [other · arithmetic · p1_grpo]" in out
    assert run(full, "--claim", "P1.5") == 0
    last = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1 claim, "))
    assert last.endswith(" undecided. ✗ is a statement that fails, not an error of this program.")


def test_without_anything_to_check_the_claims_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in CLAIMS)
    assert "Nothing was checked" in out
    assert "Next: creditscope papers check --exact" in out
    listed = data(capsys, "--claim", "P1.5")["claims"]
    assert [claim["id"] for claim in listed] == ["P1.5"]


def test_text_from_a_record_neither_moves_the_cursor_nor_sets_markup(tmp_path: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", 4, 0, 2, model="\x1b[2Jevil[/red]", task="[bold]x")
    assert run(path, "--why", "--all") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[/red]" in out


# -- which runs ------------------------------------------------------------------------------------------------------


def test_names_tell_runs_apart_by_the_ends_of_their_paths() -> None:
    assert names([Path("/a/r8/seed-0"), Path("/a/r16/seed-0")]) == ["r8-seed-0", "r16-seed-0"]
    assert names([Path("/a/r8/seed-0")]) == ["r8-seed-0"]
    assert names([Path("/a/x/r8/seed-0"), Path("/a/y/r8/seed-0")]) == ["x-r8-seed-0", "y-r8-seed-0"]
    assert names([Path("/a/demo"), Path("/b/one.evidence.json")]) == ["demo", "one"]
    assert names([]) == []


def test_a_run_counts_once_however_it_is_given(two: Path, tmp_path: Path) -> None:
    alone = read_runs([two])
    assert [found.name for found in alone] == [f"r{size}-seed-{seed}" for size in SIZES for seed in range(3)]
    assert len(read_runs([two, two / "r4" / "seed-0", two / "r4"])) == len(alone)
    assert run(two, "--save", two / "evidence") == 0
    assert len(read_runs([two])) == len(alone)  # summaries beside the runs
    assert len(read_runs([two, two / "evidence"])) == len(alone)


def test_an_old_summary_beside_a_run_that_went_on_is_not_another_run(two: Path) -> None:
    assert run(two, "--save", two / "evidence") == 0
    path = two / "r4" / "seed-0"
    with Record.resume(path, Record.open(path).config) as record:
        record.append(3, {"eval/accuracy": 0.75})
    assert len(read_runs([two])) == 6


def test_saved_evidence_gives_the_same_verdicts_as_the_runs(full: Path, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, full, "--save", tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(
        f"r{size}-seed-{seed}.evidence.json" for size in SIZES for seed in range(3))
    again = data(capsys, tmp_path / "kept")
    assert [(v["claim"], v["definition"], v["outcome"]) for v in again["verdicts"]] == [
        (v["claim"], v["definition"], v["outcome"]) for v in found["verdicts"]]
    kept = from_json(tmp_path / "kept" / "r8-seed-1.evidence.json")
    assert kept.name == "r8-seed-1"
    assert json.loads(to_json(kept)) == json.loads((tmp_path / "kept" / "r8-seed-1.evidence.json").read_text())


def test_the_page_of_a_check_has_the_claims_that_were_asked_for(full: Path, tmp_path: Path) -> None:
    assert run(full, "--claim", "P1.5", "--markdown", tmp_path / "sub" / "page.md") == 0
    page = (tmp_path / "sub" / "page.md").read_text()
    assert page.count("\n## ") == 1
    assert "✗ refuted" in page


# -- what is wrong ---------------------------------------------------------------------------------------------------


def one_sentence(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert run(*args) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("creditscope: ")
    assert "Traceback" not in said.err
    return said.err


def test_a_reading_that_was_cut_in_half_is_one_error(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = two / "r4" / "seed-0" / "scope" / "000001.npz"
    file.write_bytes(file.read_bytes()[:file.stat().st_size // 2])
    assert "cannot read the readings of step 1" in one_sentence(capsys, two)


def flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1:]


@pytest.mark.slow
def test_a_flipped_byte_anywhere_in_a_reading_is_an_error_or_changes_nothing(two: Path) -> None:
    folder = two / "r4" / "seed-0"
    before = to_json(read_runs([folder])[0])
    file = folder / "scope" / "000001.npz"
    whole = file.read_bytes()
    refused = 0
    for at in range(0, len(whole), 7):
        file.write_bytes(flipped(whole, at))
        try:
            found = read_runs([folder])
        except CreditscopeError:
            refused += 1
        else:
            assert to_json(found[0]) == before, f"byte {at}"
    assert refused > len(whole) // 7 // 2


def test_a_record_without_its_steps_is_one_error(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (two / "r4" / "seed-0" / "steps.jsonl").unlink()
    assert "steps.jsonl" in one_sentence(capsys, two)


@pytest.mark.parametrize("line", ['{"step": 1, "eval/accuracy": NaN}', '{"step": 1, "reward/mean": Infinity}',
                                  '{"no": 1}', "[]", "{"])
def test_a_step_that_is_none_is_one_error(line: str, two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (two / "r4" / "seed-0" / "steps.jsonl").open("a") as out:
        out.write(f"{line}\n")
    one_sentence(capsys, two)


def test_an_empty_folder_a_missing_one_and_a_file_of_something_else_are_errors(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no run" in one_sentence(capsys, tmp_path / "empty")
    assert "holds no run" in one_sentence(capsys, tmp_path / "nowhere")
    (tmp_path / "other.json").write_text("{}")
    assert "holds no evidence" in one_sentence(capsys, tmp_path / "other.json")
    (tmp_path / "torn.evidence.json").write_text('{"format": "creditscope evidence 1"')
    assert "cannot read" in one_sentence(capsys, tmp_path / "torn.evidence.json")


@pytest.mark.parametrize(("name", "value"), [("group", "eight"), ("seed", True), ("lr", "fast"), ("model", 3)])
def test_a_setting_of_another_kind_is_one_error(name: str, value: Any, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", 4, 0, 2)
    edit_config(path, **{name: value})
    assert f"{name} is {value!r}" in one_sentence(capsys, path)


def test_a_claim_that_does_not_exist_is_told_before_a_run_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    said = one_sentence(capsys, "nowhere", "--claim", "P9.9")
    assert "unknown claim 'P9.9'" in said
    assert "P1.14" in said


def test_a_place_that_cannot_be_written_is_one_error(two: Path, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in one_sentence(capsys, two, "--save", tmp_path / "file" / "sub")
    assert "cannot write" in one_sentence(capsys, two, "--markdown", tmp_path)


def load_no_torch(args: Sequence[str]) -> subprocess.CompletedProcess[str]:
    code = ("import sys; from creditscope.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
            "sys.exit('torch' in sys.modules)")
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_checking_runs_loads_no_torch(two: Path) -> None:
    done = load_no_torch(["check", str(two)])
    assert done.returncode == 0, done.stderr
    assert "P1.5" in done.stdout
