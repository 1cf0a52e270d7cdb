"""`creditscope lab train --engine trl`: one flag from the lab to TRL, on one rank or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="its loop is used")

import cli
import mini
from creditscope.claims.evidence import read_evidence
from creditscope.errors import CreditscopeError
from creditscope.plugins.trl.engine import Judge, arguments, refuse, train_by_trl
from creditscope.policy.loading import load_policy
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.tasks import find_task
from each import each
from plugins.trl_makers import settle

pytestmark = [pytest.mark.conformance, pytest.mark.usefixtures("mini_task")]

SMALL = ["--task", mini.TASK, "--prompts", "2", "--group", "4", "--steps", "3", "--device", "cpu", "--eval-problems",
         "10"]


def run(*flags: str) -> int:
    settle()
    return cli.run("lab", "train", mini.model(), "--engine", "trl", *SMALL, *flags)


def test_the_labs_command_line_trains_by_trl_and_leaves_a_whole_record(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert run("--out", str(out), "--scope", "light", "--every", "2", "--method", "dr_grpo", "--inner-steps", "2",
               "--accumulate", "2", "--plain") == 0
    record = Record.open(out)
    assert record.config["engine"] == "trl"
    assert record.config["group"] == 4
    steps = record.steps()
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 4, 5, 6]  # three batches twice, and the last evaluation
    assert [line.get("rollouts/spent") for line in steps] == [8, 0, 8, 0, 8, 0, None]
    assert "eval/accuracy" in steps[0]
    assert record.readings() == [0, 3, 4]  # the passes over a batch in turn
    evidence = read_evidence(record)
    assert evidence.finished
    assert len(evidence.points()) == 2
    assert "Next: creditscope report" in capsys.readouterr().out
    moved = load_policy(str(out / "model")).trainable()
    start = load_policy(mini.model()).trainable()
    assert any(not torch.equal(moved[name], start[name]) for name in start)


def test_check_and_report_read_what_trl_left(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    run("--out", str(out), "--scope", "light", "--json")
    assert json.loads(capsys.readouterr().out)["finished"]
    for words in ("papers check", "inspect", "inspect --prefix"):
        assert cli.run_json(capsys, *words.split(), out), words


def test_credit_by_steps_comes_from_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini.Coins, "may_tell_steps", True, raising=False)
    out = tmp_path / "run"
    assert run("--out", str(out), "--credit", "step_reward", "--steps", "1", "--json") == 0
    kept = Record.open(out).group(0)
    assert kept["step_reward"].shape[1] > 0
    inside = kept["mask"] & (kept["step"] >= 0)
    reward = np.take_along_axis(kept["step_reward"], kept["step"].clip(0), axis=1)
    mixed = 0
    for i in range(8):  # a right step is worth more than a wrong one of the same answer
        right, wrong = inside[i] & (reward[i] == 1), inside[i] & (reward[i] == 0)
        if right.any() and wrong.any():
            mixed += 1
            assert kept["credit"][i][right].min() > kept["credit"][i][wrong].max()
    assert mixed >= 2
    assert run("--out", str(tmp_path / "again"), "--credit", "step_reward", "--scope", "light", "--json") == 0


def test_rewards_are_the_tasks_own() -> None:
    task, policy = find_task("arithmetic"), load_policy("tiny")
    problems = [next(iter(task.problems("train", 0)))]
    judge = Judge(task, policy, problems)
    right = list(policy.tokenizer(str(problems[0].meta["solution"]))["input_ids"])
    assert judge.reward([right, right[:2]], [0, 0]) == [1.0, 0.0]
    assert judge.steps(policy.decode(right), {"number": 0})


@each("settings, says", [
    ({"rollouts": 100}, "--rollouts 100: --engine trl cannot do that; it ends after --steps"),
    ({"brake": "recall", "inner_steps": 2}, "--brake recall: --engine trl"),
    ({"scope": "full"}, "--scope full: --engine trl cannot do that; use --scope light"),
    ({"scope": "light", "also": ("salt",)}, "--also salt: --engine trl"),
    ({"eval_every": 5}, "--eval-every 5: --engine trl"),
    ({"device": "cuda:1"}, "--device cuda:1: --engine trl"),
    ({"method": "dapo"}, "give --resample 0"),
    ({"method": "reinforce", "group": 1}, "--group 1: --engine trl needs 2 or more"),
    ({"prompts": 3, "group": 3, "minibatches": 2}, "is 9 rows, which --minibatches 2"),
    ({"model": "a.gguf", "beta": 0.1}, "--beta 0.1: --engine trl loads its reference"),
])
def test_what_trl_cannot_do_is_refused_by_its_flag(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        refuse(Config(**settings))


@pytest.mark.parametrize(("flags", "says"), [
    (["--credit", "monte_carlo"], "a policy to sample from"),
    (["--method", "ppo"], "a learned value function"),
    (["--resume"], "--engine trl keeps no checkpoint"),
])
def test_what_the_mixin_refuses_ends_the_command_in_a_sentence(flags: list[str], says: str, tmp_path: Path,
                                                              capsys: Any) -> None:
    if flags == ["--resume"]:
        Record.create(tmp_path / "run", {}, {}).close()
    assert run("--out", str(tmp_path / "run"), *flags) == 2
    assert says in capsys.readouterr().err


def test_the_command_line_in_trls_words() -> None:
    config = Config(prompts=4, group=4, steps=5, inner_steps=3, minibatches=2, accumulate=2, lr=1e-4, warmup=2,
                    clip_norm=None, beta=0.1, seed=7, temperature=0.8)
    args = arguments(config, 40, "x")
    assert (args.per_device_train_batch_size, args.steps_per_generation, args.gradient_accumulation_steps) == (4, 4, 2)
    assert (args.max_steps, args.num_iterations, args.beta, args.max_grad_norm) == (30, 3, 0.1, 0.0)
    assert (args.lr_scheduler_type, args.warmup_steps, args.seed) == ("constant_with_warmup", 2, 7)
    assert (args.max_completion_length, args.temperature, args.learning_rate) == (40, 0.8, 1e-4)


def test_a_run_that_is_asked_to_stop_keeps_its_steps(tmp_path: Path) -> None:
    config = Config(model=mini.model(), task=mini.TASK, prompts=2, group=4, steps=5, device="cpu", eval_problems=0)
    lines: list[dict[str, Any]] = []
    assert not train_by_trl(config, tmp_path / "run", lines.append, lambda: len(lines) == 2)
    assert len(Record.open(tmp_path / "run").steps()) == 2


def test_a_launcher_that_started_more_processes_than_trl_sees_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("creditscope.plugins.trl.engine.ranks", lambda: 2)
    config = Config(prompts=2, group=4, steps=1, device="cpu", eval_problems=0)
    with pytest.raises(CreditscopeError, match="2 processes were started, but the trainer sees 1"):
        train_by_trl(config, tmp_path / "run", print)
