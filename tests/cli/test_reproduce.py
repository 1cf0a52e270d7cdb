"""`creditscope papers reproduce`: which runs it asks for, and what it makes of runs that are there."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from rich.console import Console

import cli
import mini
from creditscope.claims.evidence import APART
from creditscope.claims.p1_learning import PAIRS
from creditscope.claims.page import FIGURES
from creditscope.claims.table import CLAIMS
from creditscope.cli.reproduce import CLAIMS_OF, Choices, Reproduce, placed
from creditscope.cli.sweep import Fleet, arguments, is_done
from creditscope.cli.train import Train
from creditscope.credit.table import ESTIMATORS, parse
from creditscope.errors import CreditscopeError
from creditscope.runs.config import Config
from creditscope.runs.figures import curves_svg
from creditscope.runs.intervals import Interval
from creditscope.runs.kinds import KINDS
from creditscope.runs.record import Record
from creditscope.studies.plans import (
    CLOSE,
    GROUPS,
    LABEL_STEPS,
    LABELLED,
    ROLLOUTS,
    SAMPLED,
    SHARED,
    UNLABELLED,
    WARM,
    Size,
    p1,
    p2,
)
from jobs import run_here
from records import write_record

SMALL, FULL = Size(), Size(budget="full")


run = partial(cli.run, "papers", "reproduce")


# -- the plans -------------------------------------------------------------------------------------------------------


def test_p1_is_every_r_with_three_seeds_under_p1_s_own_grpo() -> None:
    sweep = {name: config for name, config in p1(SMALL) if name.startswith("r")}
    assert set(sweep) == {f"r{group}/seed-{seed}" for group in (2, 4, 8, 16, 32) for seed in range(3)}
    for name, config in sweep.items():
        assert name == f"r{config.group}/seed-{config.seed}"
        assert (config.method, config.estimator, config.prompts, config.steps, config.lr) == (
            "p1_grpo", "outcome", 8, 30, 1e-4)
        assert config.scope != "off"
        assert (config.every, config.eval_every) == (5, 10)
    assert {config.steps for name, config in p1(FULL) if name.startswith("r")} == {60}


def test_other_credits_and_the_optimal_baseline_are_read_at_r_8_alone() -> None:
    for size in (SMALL, FULL):
        for name, config in p1(size):
            close = name.startswith(f"r{CLOSE}/")
            assert config.also == ((*UNLABELLED, *LABELLED, *SAMPLED[size.budget]) if close else ())
            assert (config.scope == "full") == close
    # A continuation from each token, which is a label a token, takes the full budget.
    assert SAMPLED == {"small": ("monte_carlo,samples=4",), "full": (
        "monte_carlo,samples=4", "spo_chain,samples=4,every=1,probability=1.0")}


@pytest.mark.parametrize("plan", [p1(SMALL), p1(FULL), p2(SMALL), p2(FULL)])
def test_no_plan_has_one_experiment_twice(plan: Any) -> None:
    assert len({name for name, _ in plan}) == len(plan)
    told = [{k: v for k, v in asdict(config).items() if k == "seed" or k not in APART} for _, config in plan]
    assert all(told.count(settings) == 1 for settings in told)


@pytest.mark.parametrize(("choice", "labels"), [({"model": "some/model"}, LABELLED), ({"task": "gsm8k:here"}, LABELLED),
                                                ({"model": "some/model", "task": "gsm8k"}, LABELLED),
                                                ({"task": "stories"}, ()), ({"task": "jsonl:gsm8k"}, ())])
def test_another_model_or_task_gets_the_sweep_with_credits_that_need_no_continuations(
        choice: dict[str, str], labels: tuple[str, ...]) -> None:
    size = Size(**choice, budget="full")  # type: ignore[arg-type]
    plan = p1(size)
    assert {name.split("/")[0] for name, _ in plan} == {f"r{group}" for group in GROUPS}
    assert {config.also for _, config in plan} == {(), (*UNLABELLED, *labels)}
    assert all((config.model, config.task) == (size.model, size.task) for _, config in plan)


def test_credits_are_sorted_by_what_they_need() -> None:
    def needs(spec: str) -> set[str]:
        return {"steps", "states", "continuations", "critic"} & set(ESTIMATORS[parse(spec)[0]].needs)

    assert [needs(spec) for spec in UNLABELLED] == [set()] * len(UNLABELLED)
    assert [needs(spec) for spec in LABELLED] == [{"steps"}] * 3
    assert [needs(spec) for spec in SAMPLED["full"]] == [{"continuations"}] * 2


def test_turns_are_run_from_the_warmed_model_and_every_rollout_is_kept() -> None:
    turns = {name: config for name, config in placed(p1(SMALL), Path("out")).items() if config.task == "turns"}
    assert list(turns) == [f"turns/seed-{seed}" for seed in range(3)]
    assert {(config.model, config.keep_every) for config in turns.values()} == {(str(Path("out") / WARM), 1)}


def test_the_schedules_are_compared_at_equal_rollouts_with_five_seeds_and_a_control() -> None:
    plan = {name: config for name, config in p1(FULL) if name.startswith("schedules/")}
    assert len(plan) == 5 * 7
    assert {config.rollouts for config in plan.values()} == {ROLLOUTS}
    assert {name.split("/")[1]: (config.adapt, config.credit, config.group) for name, config in plan.items()} == {
        "fixed-4": ("none", None, 4), "fixed-8": ("none", None, 8), "fixed-16": ("none", None, 16),
        "step_reward": ("none", "step_reward", 8),  # what denser_credit turns to, from the start
        "raise_group": ("raise_group", None, 8), "denser_credit": ("denser_credit,to=step_reward", None, 8),
        "late_group": ("late_group", None, 8)}
    assert all({config.seed for name, config in plan.items() if name.startswith(f"schedules/{setting}/")} == {
        0, 1, 2, 3, 4} for setting in {name.split("/")[1] for name in plan})
    # The budget ends every run: steps are no difference between settings, and enough for the smallest R.
    assert {config.steps for config in plan.values()} == {120}
    assert not any(name.startswith("schedules/") for name, _ in p1(SMALL))


def test_p2_is_brakes_over_several_updates_probed_as_compare_does() -> None:
    small = dict(p2(SMALL))
    assert set(small) == {f"mu4/{brake}/seed-{seed}" for brake in ("none", "recall", "shorten") for seed in range(3)}
    full = dict(p2(FULL))
    assert len(full) == 5 * (1 + 3 * 4)
    for name, config in full.items():
        assert name == f"mu{config.inner_steps}/{config.brake}/seed-{config.seed}"
        assert {key: getattr(config, key) for key in KINDS["brake"].probe} == KINDS["brake"].probe
        assert (config.rollouts, config.group, config.method) == (3840, 8, "grpo")


def test_what_a_user_chooses_reaches_every_run() -> None:
    chosen = {"prompts": 3, "lr": 2e-5, "max_tokens": 99, "accumulate": 2, "dtype": "float64", "answer": "flexible",
              "clip_norm": None, "temperature": 0.7, "eval_problems": 50}
    assert set(SHARED) - set(chosen) == {"model", "task"}
    size = Size(steps=7, seeds=2, groups=(4, 8), **chosen)
    plan = p1(size)
    assert {name.split("/")[0] for name, _ in plan} == {"r4", "r8", "turns"}
    assert {name.split("/")[1] for name, _ in plan} == {"seed-0", "seed-1"}
    for _, config in plan:
        assert config.steps == 7
        assert {name: getattr(config, name) for name in chosen} == chosen
    for _, config in p2(replace(size, groups=GROUPS)):
        assert {name: getattr(config, name) for name in chosen} == chosen


def test_readings_and_evaluations_are_spread_over_the_steps() -> None:
    plan = dict(p1(Size(model="some/model", steps=16, readings=8, evaluations=4)))
    assert {(config.every, config.eval_every) for config in plan.values()} == {(2, 4)}


def test_four_evaluations_meet_at_equal_rollouts_for_every_pair_that_is_compared() -> None:
    size = Size(model="some/model", steps=16, evaluations=4)
    by_size = {config.group: config for _, config in p1(size)}
    evaluated = {group: {step * config.prompts * group for step in range(0, config.steps + 1, config.eval_every)}
                 for group, config in by_size.items()}
    for small, large in PAIRS:
        assert max(evaluated[small]) in evaluated[large]


def test_credits_from_continuations_are_read_in_short_runs_that_differ_in_steps_alone() -> None:
    plan = dict(p1(Size(model="some/model", steps=16, sampled=("monte_carlo,samples=2",))))
    for seed in range(3):
        short, long = plan[f"sampled/seed-{seed}"], plan[f"r{CLOSE}/seed-{seed}"]
        assert (short.steps, short.every, short.also) == (LABEL_STEPS, 1, ("monte_carlo,samples=2",))
        apart = {name for name, value in asdict(short).items() if value != getattr(long, name)}
        assert apart <= APART | {"steps"}  # so the claims read both as one experiment, each credit where it was read
        assert short.eval_problems  # by its last evaluation a run is known to be finished


@pytest.mark.parametrize(("plan", "size", "words"), [
    (p1, {"seeds": 0}, "--seeds must be at least 1"), (p1, {"evaluations": 0}, "--evaluations must be at least 1"),
    (p1, {"eval_problems": 0}, "--eval-problems must be at least 1"), (p2, {"steps": -1}, "--steps must be at least 1"),
    (p1, {"groups": (2, 2)}, "each R once"), (p1, {"groups": ()}, "each R once"),
    (p2, {"groups": (4,)}, "p2 has R = 8 alone"), (p1, {"groups": (1,)}, "a group of one")])
def test_sizes_that_cannot_be_are_refused(plan: Any, size: dict[str, Any], words: str) -> None:
    with pytest.raises(CreditscopeError, match=words):
        plan(Size(**size))


@pytest.mark.parametrize("config", [config for _, config in (*p1(FULL), *p2(SMALL))][::7])
def test_the_command_of_a_run_makes_the_settings_of_the_plan(config: Config, tmp_path: Path) -> None:
    words = arguments(config, tmp_path / "run")
    assert words[:2] == ("lab", "train")
    verb = tyro.cli(Train, args=list(words[2:]))
    assert {name: getattr(verb.config, name) for name in asdict(config)} == asdict(config)
    assert verb.out == tmp_path / "run"


# -- runs that are there ---------------------------------------------------------------------------------------------


def settled(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return found


def write_run(path: Path, config: Config, finished: bool = True) -> None:
    """A run as the trainer would leave it: each group's rows are orthogonal, so the rank at half right is R."""
    reward = (np.arange(config.group) < config.group // 2).astype(np.float64)
    credit = reward - reward.mean()
    reading = {"group": np.zeros(config.group, dtype=np.int64), "reward": reward, "gram": np.diag(credit**2),
               "row_w": credit, "eps": np.array(2e-16)}
    lines: list[dict[str, Any]] = [
        {"eval/accuracy": 0.5 + step / 10, "rollouts/spent": config.group, "rollouts/sampled": config.group,
         "reward/mean": 0.5, "credit/within": 0.0} for step in range(2)]
    write_record(path, [*lines, {"eval/accuracy": 0.7}] if finished else lines, settled(config),
                 readings={0: reading, 1: reading})


FLAGS = ("--groups", "4", "8", "--steps", "2", "--prompts", "2")
SIZE = Size(groups=(4, 8), steps=2, prompts=2)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """All runs of a small sweep, finished."""
    out = tmp_path / "p1"
    for name, config in placed(p1(SIZE), out).items():
        write_run(out / name, config)
    return out


@pytest.mark.slow
def test_finished_runs_are_used_as_they_are_and_reported(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("p1", *FLAGS, "--out", there) == 0
    out = capsys.readouterr().out
    assert "runs of" not in out  # nothing was trained
    assert "P1.5" in out
    assert "P2." not in out
    assert f"Next: creditscope papers check {there} --all" in out
    kept = sorted(path.name for path in (there / "evidence").iterdir())
    assert kept == sorted(f"{name}-seed-{seed}.evidence.json" for name in ("r4", "r8", "turns") for seed in range(3))
    assert "| 4 | ≈ 2 | 4.00 [4.00, 4.00] |" in (there / "table1.md").read_text()
    assert "Made by `creditscope papers reproduce p1 --steps 2 --prompts 2 --groups 4 8`, 9 runs." in (
        there / "claims.md").read_text()


@pytest.mark.slow
def test_the_figures_of_a_sweep_are_p1_s_three(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    assert run("p1", *FLAGS, "--out", there, "--json") == 0
    files = json.loads(capsys.readouterr().out)["files"]
    for name in FIGURES:
        assert f"{name}.svg" in files
        text = (there / f"{name}.svg").read_text()
        assert text.startswith("<svg")
        assert "R = 4" in text
        assert "R = 8" in text


@pytest.mark.slow
def test_the_report_is_one_object_for_programs(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("p1", *FLAGS, "--out", there, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["finished"], found["runs"], found["failed"]) == (True, 9, {})
    assert {verdict["claim"] for verdict in found["verdicts"]} <= set(CLAIMS_OF["p1"])
    rank = [v["outcome"] for v in found["verdicts"] if v["claim"] == "P1.5" and v["subject"].startswith("tiny ")
            and v["definition"].startswith("(Σσ)²/Σσ² of the rollout matrix")]
    assert rank == ["refuted"]


def test_a_folder_with_other_settings_is_refused_with_a_sentence(there: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert run("p1", *FLAGS, "--lr", "0.5", "--out", there) == 2
    err = capsys.readouterr().err
    assert "holds a run with other settings: its lr is 0.0001, not 0.5" in err
    assert "choose another --out" in err


def test_a_stopped_run_is_not_done_and_a_finished_one_is(tmp_path: Path) -> None:
    config = dict(p1(SIZE))["r8/seed-0"]
    assert not is_done(tmp_path / "none", config)
    write_run(tmp_path / "half", config, finished=False)
    assert not is_done(tmp_path / "half", config)
    write_run(tmp_path / "whole", config)
    assert is_done(tmp_path / "whole", config)
    assert is_done(tmp_path / "whole", replace(config, checkpoint_every=99))  # changes no result
    with pytest.raises(CreditscopeError, match="its also is"):
        is_done(tmp_path / "whole", replace(config, also=("salt",)))


def test_turns_that_were_moved_with_their_warmed_model_are_still_done(tmp_path: Path) -> None:
    old, new = (placed(p1(SIZE), tmp_path / name)["turns/seed-0"] for name in ("old", "new"))
    assert old.model != new.model
    write_run(tmp_path / "new" / "turns", old)
    assert is_done(tmp_path / "new" / "turns", new, beside=WARM)
    with pytest.raises(CreditscopeError, match="its model is"):
        is_done(tmp_path / "new" / "turns", replace(new, model="tiny"), beside=WARM)
    with pytest.raises(CreditscopeError, match="its lr is"):
        is_done(tmp_path / "new" / "turns", replace(new, lr=0.5), beside=WARM)


def test_both_papers_have_every_claim_that_a_run_can_test_and_none_twice() -> None:
    both = [*CLAIMS_OF["p1"], *CLAIMS_OF["p2"]]
    assert len(both) == len(set(both))
    assert set(CLAIMS) - set(both) == {"C.3", "C.4"}  # ours, and about no run
    assert {CLAIMS[name].runs for name in ("C.3", "C.4")} == {None}
    assert len(CLAIMS_OF["p2"]) == 6


@pytest.mark.parametrize(("args", "words"), [(("p1", "--jobs", "0"), "--jobs must be at least 1"),
                                             (("p2", "--groups", "4"), "p2 has R = 8 alone")])
def test_flags_that_cannot_be_are_refused_before_anything_runs(args: tuple[str, ...], words: str, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args, "--out", tmp_path / "out") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run("p1", "--out", tmp_path / "file") == 2
    assert "is a file; choose a folder" in capsys.readouterr().err


def test_the_default_folder_names_paper_model_and_budget() -> None:
    assert Reproduce("p1").place == Path("runs/p1-tiny-small")
    assert Reproduce("p2", Choices(model="a/b-c.gguf", budget="full")).place == Path("runs/p2-b_c.gguf-full")


# -- many runs of different length -----------------------------------------------------------------------------------


def test_the_time_left_counts_each_run_by_its_own_budget(tmp_path: Path) -> None:
    # Of 100 + 300 rollouts nothing was done when the clock began; one run has ended with 100: a quarter of the whole.
    said = StringIO()
    with Fleet(Console(file=said, width=200), tmp_path, {"short": 100, "long": 300}, 0) as fleet:
        with Record.create(tmp_path / "short", {}, {}) as record:
            record.append(0, {"rollouts/spent": 100})
        fleet._start -= 10  # ten seconds ago
        fleet.watch(["long"], {"short": None})
    assert "short    1 steps  100 rollouts  (1 of 2, left 30 s)" in said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("percent", [False, True])
def test_a_curve_without_an_interval_is_drawn_without_a_band(percent: bool) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    one = {"R = 2": [(0, Interval(0.5, None, None, 1)), (5, Interval(0.5, None, None, 1))]}
    assert "one run each, no interval" in curves_svg(one, "rank", percent)
    three = {"R = 2": [(0, Interval(0.5, 0.4, 0.6, 3))]}
    assert "mean of up to 3 runs, 95 % t-interval" in curves_svg(three, "rank", percent)


# -- for real --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("mini_task")
def test_a_sweep_of_a_model_of_one_s_own_is_run_reported_and_then_reused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.cli.sweep.run_jobs", run_here)
    mine = shutil.copytree(mini.model(), tmp_path / "mine")
    args = ("p1", mine, "--task", mini.TASK, "--groups", "2", "--seeds", "1", "--steps", "1", "--prompts", "4", "--out",
            tmp_path / "out")
    assert run(*args) == 0
    out = capsys.readouterr().out
    assert "1 runs of 8 rollouts together, 1 at a time" in out
    assert "mine · coins · p1_grpo" in out
    before = (tmp_path / "out" / "r2" / "seed-0" / "steps.jsonl").read_bytes()
    assert run(*args) == 0
    assert "runs of" not in capsys.readouterr().out
    assert (tmp_path / "out" / "r2" / "seed-0" / "steps.jsonl").read_bytes() == before
