"""benchmarks/real_model.py: the order of its runs, and what it packs of finished and unfinished ones; and what
benchmarks/real_step.py measures again."""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from creditscope.claims.evidence import from_json
from creditscope.runs.config import Config
from makers import load_script
from records import write_record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "real_model.py")


def planned(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Config]:
    monkeypatch.setattr("sys.argv", ["real_model.py", "some/model", "gsm8k:data", "--out", "out", *words])
    found: dict[str, Config] = script.planned(script.parsed(), "some/model")
    return found


def test_learning_comes_first_then_p1_seed_by_seed_then_p2(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = list(planned(script, monkeypatch))
    kinds = list(dict.fromkeys(name.rpartition("/seed-")[0].split("/")[0] for name in plan))
    assert kinds == ["learn", "p1", "p2", "float32"]
    assert plan[:4] == ["learn/outcome/seed-0", "learn/outcome/seed-1", "learn/outcome/seed-2", "p1/sampled/seed-0"]
    sizes = [name.removeprefix("p1/").replace("/seed-", " ") for name in plan if name.startswith("p1/r")]
    assert sizes == [f"r{group} {seed}" for groups in ((2, 4, 8), (16, 32)) for seed in range(3) for group in groups]
    assert plan[-4:] == ["learn/step_reward/seed-2", "float32/seed-0", "float32/seed-1", "float32/seed-2"]
    few = planned(script, monkeypatch, "--only", "p2", "--brakes", "none", "recall")
    assert {name.split("/")[2] for name in few} == {"none", "recall"}
    assert all(name.startswith("learn/") for name in planned(script, monkeypatch, "--only", "credit", "learn"))


def test_the_compared_credits_are_the_first_steps_of_the_learning_runs_which_are_evaluated_there(
        script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(script, monkeypatch)
    base = plan["learn/outcome/seed-1"]
    for credit in script.WINNERS:
        other = plan[f"learn/{credit}/seed-1"]
        changed = {name for name, value in asdict(base).items() if value != asdict(other)[name]}
        assert changed == {"credit", "steps", "rollouts", "checkpoint_every"}
        assert other.rollouts == other.steps * other.prompts * other.group < base.rollouts
        assert other.rollouts % base.eval_rollouts == 0


def test_further_settings_reach_every_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(script, monkeypatch, "--set", "beta2=0.95", 'chat="off"')
    assert {(config.beta2, config.chat) for config in plan.values()} == {(0.95, "off")}


def test_finished_runs_become_results_and_others_are_kept_apart(script: ModuleType, tmp_path: Path) -> None:
    out, to = tmp_path / "mine", tmp_path / "packed" / "mine.tar.xz"
    lines: list[dict[str, Any]] = [{"eval/accuracy": 0.5, "rollouts/spent": 8, "reward/mean": 0.5}]
    write_record(out / "p1" / "r8" / "seed-0", [*lines, {"eval/accuracy": 0.6}], asdict(Config(method="p1_grpo")))
    write_record(out / "p2" / "mu4" / "none" / "seed-1", lines, asdict(Config()))
    (out / "p1" / "r8" / "seed-0.log").write_text("a line\n")
    (out / "p1" / "r8" / "seed-0" / "model").mkdir()
    (out / "p1" / "r8" / "seed-0" / "model" / "weights").write_text("large")
    script.pack(out, to)
    with tarfile.open(to) as archive:
        archive.extractall(tmp_path / "here", filter="data")
    found = {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").glob("**/*") if path.is_file()}
    assert found == {
        "results/p1-mine/r8-seed-0.evidence.json", "partial/p2-mine/mu4-none-seed-1.evidence.json", "verdicts.json",
        "runs/p1/r8/seed-0/run.json", "runs/p1/r8/seed-0/steps.jsonl", "runs/p1/r8/seed-0.log",
        "runs/p2/mu4/none/seed-1/run.json", "runs/p2/mu4/none/seed-1/steps.jsonl"}
    assert from_json(tmp_path / "here" / "results" / "p1-mine" / "r8-seed-0.evidence.json").finished
    assert json.loads((tmp_path / "here" / "verdicts.json").read_text())


def test_a_finished_run_loses_its_weights_and_keeps_its_record(script: ModuleType, tmp_path: Path) -> None:
    write_record(tmp_path / "run", [{"reward/mean": 0.5}], {})
    (tmp_path / "run" / "checkpoints" / "000001").mkdir(parents=True)
    script.lighten(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert (tmp_path / "run" / "steps.jsonl").exists()


def test_a_step_is_measured_again_where_it_failed_or_had_another_length() -> None:
    real_step = load_script(ROOT / "benchmarks" / "real_step.py")
    cells = [{"part": "step", "group": 8, "head": kind} for kind in ("whole", "blocks", "recompute")]
    there = [cells[0] | {"tokens": 8 * 512}, cells[1] | {"failed": "out of memory"}]
    assert real_step.left(cells, there, 512) == cells[1:]
    assert real_step.left(cells, there, 1024) == cells
