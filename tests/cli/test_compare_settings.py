"""`creditscope lab compare SETTING VALUE ...`: any setting that changes what is learnt, at equal rollouts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cli import run, run_json
from creditscope import CreditscopeError
from creditscope.cli.compare import Compare, folder
from creditscope.runs.compare import compare, read_folder
from creditscope.runs.config import Config
from creditscope.runs.kinds import COMPARED, KINDS, NOT_COMPARED, kind_of, read_value, verdicts
from each import each
from jobs import run_here
from records import write_record

BUDGET = 128
SMALL = ("--rollouts", str(BUDGET), "--prompts", "4", "--eval-problems", "20", "--points", "2")


def write_run(out: Path, setting: str, value: str, seed: int, accuracy: float) -> None:
    """A finished run: two steps of half the budget each, the accuracy along a straight line from 0.5."""
    config = Compare(setting, (value,), rollouts=BUDGET, prompts=4, eval_problems=20, points=2).config(value, seed)
    half = {"rollouts/sampled": BUDGET // 2, "rollouts/spent": BUDGET // 2, "time/step": 1.0}
    lines = [{"eval/accuracy": 0.5, **half}, {"eval/accuracy": (0.5 + accuracy) / 2, **half},
             {"eval/accuracy": accuracy}]
    name = kind_of(setting, (value,)).name(asdict(config))
    write_record(out / folder(name) / f"seed-{seed}", lines, asdict(config) | {"log": []})


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", lambda *_: pytest.fail("a run was started"))
    monkeypatch.setattr("creditscope.cli.compare.can_draw", lambda: False)


def test_every_setting_is_compared_or_named_as_one_that_is_not() -> None:
    assert set(Config.__dataclass_fields__) == {*COMPARED, *KINDS, *NOT_COMPARED}


@each(("setting", "word", "value"), [
    ("group", "16", 16), ("lr", "5e-5", 5e-5), ("lr", "1", 1.0), ("method", "dr_grpo", "dr_grpo"),
    ("clip_norm", "none", None), ("clip_norm", "0.5", 0.5), ("max_tokens", "None", None), ("beta", "0.04", 0.04),
])
def test_a_value_is_read_by_the_type_of_its_setting(setting: str, word: str, value: object) -> None:
    found = read_value(setting, word)
    assert (found, type(found)) == (value, type(value))


@each(("setting", "word"), [("group", "8.5"), ("group", "none"), ("lr", "fast"), ("lr", "none"), ("lora", "")])
def test_a_word_of_another_type_is_refused_with_the_flag(setting: str, word: str) -> None:
    with pytest.raises(CreditscopeError, match=f"--{setting} must be a .*number.*got {word!r}"):
        read_value(setting, word)


def test_runs_of_another_group_size_have_as_many_rollouts_and_fewer_steps() -> None:
    verb = Compare("group", ("4", "16"), seeds=2, rollouts=512, prompts=8)
    found = verb._asked()
    assert list(found) == ["group=4/seed-0", "group=16/seed-0", "group=4/seed-1", "group=16/seed-1"]
    four, sixteen = found["group=4/seed-1"], found["group=16/seed-1"]
    assert (four.group, four.steps, four.rollouts, four.seed) == (4, 16, 512, 1)  # 512 / (8·4)
    assert (sixteen.group, sixteen.steps, sixteen.rollouts, sixteen.seed) == (16, 4, 512, 1)
    alike = {name for name in asdict(four) if asdict(four)[name] == asdict(sixteen)[name]}
    assert set(asdict(four)) - alike == {"group", "steps"}
    assert verb.place == Path("runs/compare-group")


@pytest.mark.usefixtures("nothing_runs")
def test_a_table_of_finished_runs_is_made_against_the_first_value(tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    for seed, (two, four) in enumerate([(0.60, 0.70), (0.62, 0.72), (0.64, 0.74)]):
        write_run(tmp_path, "group", "2", seed, two)
        write_run(tmp_path, "group", "4", seed, four)
    words = ("lab", "compare", "group", "2", "4", "--seeds", "3", "--out", tmp_path, *SMALL)
    data = run_json(capsys, *words)
    assert [line["group"] for line in data["lines"]] == ["4", "2"]  # the best first
    # Paired by seed the difference is 0.1 three times, so that its interval has no width.
    gap = data["lines"][0]["difference"]
    assert (gap["mean"], gap["low"], gap["high"]) == pytest.approx((0.1, 0.1, 0.1))
    assert data["lines"][1]["difference"] is None
    assert data["verdict"] == ["group=4 beats group=2 at 128 rollouts: 72.0 % [67.0, 77.0] against 62.0 % [57.0, "
                               "67.0]; intervals do not overlap"]
    assert run(*words) == 0
    page = (tmp_path / "table.md").read_text()
    assert "# `group` at 128 rollouts" in page
    assert "| group | seeds | accuracy | minus group=2, paired |" in page
    assert "Model tiny, task arithmetic, method grpo, P = 4, learning rate 0.0001, 3 seeds" in page
    again = data["command"].split()
    assert again[1:6] == ["lab", "compare", "group", "2", "4"]
    assert "--group" not in again
    assert run(*again[1:], "--out", tmp_path) == 0
    assert (tmp_path / "table.md").read_text() == page


@pytest.mark.usefixtures("nothing_runs")
def test_without_values_all_runs_of_the_folder_are_compared_with_the_default_or_the_least(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (values, baseline) in enumerate(((("16", "4", "8"), "8"), (("16", "4"), "4"))):
        for value in values:
            write_run(tmp_path / str(number), "group", value, 0, 0.6)
        lines = run_json(capsys, "lab", "compare", "group", "--no-run", "--out", tmp_path / str(number))["lines"]
        assert {line["group"] for line in lines} == set(values)
        assert [line["group"] for line in lines if line["difference"] is None] == [baseline]


def test_the_best_of_the_others_is_named_where_none_is_above(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.6, 0.7, 0.8)):
        for value in ("1e-4", "5e-5"):
            write_run(tmp_path, "lr", value, seed, accuracy)
    kind = kind_of("lr", ("1e-4",))
    said = verdicts(compare(read_folder(tmp_path, kind)[0], kind))
    assert said[0].startswith("no value's interval lies above lr=0.0001's at 128 rollouts: the best of the others is "
                              "lr=5e-05, 70.0 %")


@each(("words", "message"), [
    (("grup", "8", "16"), "unknown setting 'grup'; did you mean 'group'? Choices: accumulate, adapt, "),
    (("seed", "1", "2"), "unknown setting 'seed'. Choices: "),
    (("group",), "no value of group to train with; name two or more: creditscope lab compare group VALUE VALUE"),
    (("group", "8", "eight"), "--group must be a whole number below 2^63, got 'eight'"),
    (("lr", "1e-4", "0.0001"), "lr '0.0001' is named twice; name each value once"),
    (("method", "grpo", "grop"), "unknown method 'grop'; did you mean 'grpo'?"),
    (("optimizer", "adamw", "adma"), "unknown --optimizer 'adma'; did you mean 'adam'? Choices: adam, adamw, sgd."),
    (("group", "8", "16", "--group", "4"), "--group 4: group is what is compared; name its values behind it"),
    (("group", "8", "500"), "--rollouts 3840 is less than one step spends: --prompts 8 × --group 500 = 4000"),
    (("task", "arithmetic", "gsm8k:nowhere.jsonl"), "nowhere.jsonl"),
    (("model", "tiny", "nowhere"), "no model 'nowhere'"),
])
def test_bad_input_is_one_sentence_before_any_run_starts(words: tuple[str, ...], message: str, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lab", "compare", *words, "--out", tmp_path / "new") == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("mini_task")
def test_two_learning_rates_are_trained_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    import mini

    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", run_here)
    data = run_json(capsys, "lab", "compare", "lr", "1e-3", "1e-2", "--seeds", "1", "--rollouts", "32", "--group", "4",
                    "--prompts", "4", "--points", "2", "--eval-problems", "8", "--model", mini.model(), "--task",
                    mini.TASK, "--out", tmp_path)
    assert {line["lr"]: line["spent"] for line in data["lines"]} == {"0.001": 32, "0.01": 32}
    assert data["failed"] == {}
    stored = {json.loads((tmp_path / name / "seed-0" / "run.json").read_text())["config"]["lr"]
              for name in ("lr=0.001", "lr=0.01")}
    assert stored == {0.001, 0.01}


def test_bad_input_leaves_nothing_of_a_new_path_and_what_was_there(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    for out in ("mine/a/b", "c/d"):
        assert run("lab", "compare", "method", "grpo", "dr_grpo", "--task", "gsm8k:nowhere", *SMALL, "--seeds", "1",
                   "--out", str(tmp_path / out)) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"], capsys.readouterr().err
