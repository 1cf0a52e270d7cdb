"""Credit estimators in the trainer: real runs, a few steps each."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mini
from creditscope.cli.train import Train
from creditscope.credit import ESTIMATORS
from creditscope.errors import CreditscopeError
from creditscope.lab.train import train
from creditscope.policy.loading import load_policy
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from each import each

pytestmark = pytest.mark.usefixtures("mini_task")

SMALL = Config(model=mini.model(), task=mini.TASK, group=4, prompts=2, steps=2, lr=1e-2, eval_problems=0, keep_every=1,
               checkpoint_every=1)


def run(config: Config, out: Path, resume: bool = False, steps: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run; `steps` stops it after so many."""
    asked = iter(range(10**6))
    return list(train(config, out, {}, resume, stop=lambda: steps is not None and next(asked) + 1 >= steps))


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Record.open(out).checkpoint_path(step) / "policy.safetensors")


def learnt(found: dict[str, torch.Tensor]) -> bool:
    """Whether any weight has left its start."""
    start = load_policy(SMALL.model, device="cpu").trainable()
    return not all(torch.equal(value, start[name]) for name, value in found.items())


@pytest.mark.slow
@each("name", [name for name in ESTIMATORS if not {"states", "scores"} & set(ESTIMATORS[name].needs)])
def test_every_estimator_trains(name: str, tmp_path: Path) -> None:
    # At this temperature answers of a group share their first tokens.
    lines = run(replace(SMALL, credit=name, group=8, temperature=0.5), tmp_path / "run")
    assert len(lines) == 2
    kept = Record.open(tmp_path / "run").group(0)
    credit, mask = kept["credit"], kept["mask"]
    assert credit.shape == mask.shape
    assert credit.any()
    assert not credit[~mask].any()
    spread = max(line.get("credit/within", 0.0) for line in lines)
    assert (spread < 1e-9) == ESTIMATORS[name].per_answer


def test_outcome_credit_is_the_default_and_changes_no_weight(tmp_path: Path) -> None:
    run(SMALL, tmp_path / "default")
    run(replace(SMALL, credit="outcome"), tmp_path / "named")
    named = weights(tmp_path / "named", 2)
    assert learnt(named)
    assert all(torch.equal(value, named[name]) for name, value in weights(tmp_path / "default", 2).items())


def test_states_of_turns_reach_the_estimator(tmp_path: Path) -> None:
    """The model knows no ladder, so it earns nothing; the states must be there all the same."""
    lines = run(replace(SMALL, task="turns", credit="state_return", max_tokens=12), tmp_path / "run")
    assert len(lines) == 2


@pytest.mark.slow
@each("kind", ["head", "model"])
def test_ppo_learns_its_critic_and_resumes_bit_by_bit(kind: str, tmp_path: Path) -> None:
    config = replace(SMALL, method="ppo", critic=kind, steps=4, critic_warmup=1, inner_steps=2, minibatches=2)
    whole = run(config, tmp_path / "whole")
    assert run(config, tmp_path / "parts", steps=2)
    run(config, tmp_path / "parts", resume=True)
    first, second = weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert learnt(first)
    losses = [line["critic/loss"] for line in Record.open(tmp_path / "parts").steps() if "critic/loss" in line]
    assert losses == [line["critic/loss"] for line in whole if "critic/loss" in line]
    assert len(losses) == 4


def test_value_pre_training_leaves_the_policy_alone(tmp_path: Path) -> None:
    lines = run(replace(SMALL, method="ppo", critic_warmup=1), tmp_path / "run")
    assert "grad/norm" not in lines[0]
    assert "grad/norm" in lines[1]
    assert not learnt(weights(tmp_path / "run", 1))
    assert learnt(weights(tmp_path / "run", 2))


def test_continuations_count_as_rollouts_and_a_budget_ends_the_run(tmp_path: Path) -> None:
    config = replace(SMALL, credit="monte_carlo,samples=2", steps=50, rollouts=60)
    lines = run(config, tmp_path / "run")
    spent = [line["rollouts/spent"] for line in lines]
    assert all(line["rollouts/sampled"] == 8 < line["rollouts/spent"] for line in lines)
    assert sum(spent[:-1]) < 60 <= sum(spent)
    assert (tmp_path / "run" / "model").is_dir()
    assert run(config, tmp_path / "run", resume=True) == []


@pytest.mark.slow
def test_monte_carlo_resumes_bit_by_bit(tmp_path: Path) -> None:
    config = replace(SMALL, credit="monte_carlo,samples=2", steps=3)
    run(config, tmp_path / "whole")
    run(config, tmp_path / "parts", steps=1)
    run(config, tmp_path / "parts", resume=True)
    first, second = weights(tmp_path / "whole", 3), weights(tmp_path / "parts", 3)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert learnt(first)


@pytest.mark.slow
def test_evaluations_come_when_rollouts_have_been_spent(tmp_path: Path) -> None:
    config = replace(SMALL, steps=5, eval_rollouts=16, eval_problems=4)
    lines = run(config, tmp_path / "run")
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 4, 5]  # 8 rollouts a step


@each("changes, message", [
    ({"credit": "state_return"}, "needs a task that names the state in which each turn begins, which task"),
    ({"credit": "entropy_mask,shre=0.5"}, "unknown option of credit 'entropy_mask': 'shre'"),
    ({"credit": "nowhere_at_all:mine"}, "no module 'nowhere_at_all'"),
])
def test_credit_that_cannot_be_given_is_refused_before_anything_is_written(
        changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=message):
        run(replace(SMALL, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_users_own_estimator_trains_and_a_wrong_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_credit.py").write_text(
        "import torch\n"
        "def first_token(method, rollouts, tools, *, size=1.0):\n"
        "    out = torch.zeros(rollouts.mask.shape)\n"
        "    out[:, 0] = size * (rollouts.reward - rollouts.reward.mean() + 0.1)\n"
        "    return out\n"
        "def wrong(method, rollouts, tools):\n"
        "    return rollouts.reward[:3]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "own_credit", __import__("own_credit"))
    lines = run(replace(SMALL, credit="own_credit:first_token,size=2"), tmp_path / "run")
    assert lines[-1]["credit/within"] > 0.5
    with pytest.raises(CreditscopeError, match=r"credit 'own_credit:wrong' must be \(B,\)"):
        run(replace(SMALL, credit="own_credit:wrong"), tmp_path / "other")


def test_the_gram_of_scores_leaves_no_gradient_behind(tmp_path: Path) -> None:
    """A second pass for the Gram must not add to the step's own gradient: salt with R eigenvectors is outcome."""
    run(replace(SMALL, credit="salt,rank=4"), tmp_path / "salt")
    run(replace(SMALL, credit="outcome"), tmp_path / "outcome")
    first, second = weights(tmp_path / "salt", 2), weights(tmp_path / "outcome", 2)
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    assert learnt(first)


def test_a_record_s_word_is_not_enough_to_run_a_users_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder may come from anybody: the name of a function to import must come from the command line."""
    (tmp_path / "evil_credit.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    with Record.create(Path("run"), asdict(SMALL) | {"log": [], "credit": "evil_credit:mine"}, {}):
        pass
    with pytest.raises(CreditscopeError, match=r"run\.json is untrusted: give --credit again"):
        Train(out=Path("run"), resume=True).as_recorded(["--task", "evil_credit:mine"])
    given = Train(out=Path("run"), resume=True).as_recorded(["--credit", "evil_credit:mine"])
    assert given.config.credit == "evil_credit:mine"


def test_more_steps_are_not_free_where_an_estimator_may_know_how_many_there_are() -> None:
    assert "steps" in SMALL.free
    for credit in ("my_module:mine", "gae,schedule=linear,lam=0.9"):
        assert "steps" not in replace(SMALL, credit=credit).free


def test_value_pre_training_without_a_critic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_critic.py").write_text("def mine(method, rollouts, tools):\n    return rollouts.reward\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CreditscopeError, match="--critic-warmup 1: --credit no_critic:mine has no critic"):
        run(replace(SMALL, credit="no_critic:mine", critic_warmup=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_at_its_first_batch_leaves_no_folder(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    row = '{"prompt": "Question: Mia has 12 apples.\\nAnswer:\\n", "answer": "12"}\n'
    (tmp_path / "labels.jsonl").write_text(row * 4)
    (tmp_path / "number_judge.py").write_text("def score(text, row):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    config = replace(SMALL, task="jsonl:labels.jsonl", reward="number_judge:score", credit="step_reward", max_tokens=8)
    with pytest.raises(CreditscopeError, match=r"none of the first 8 answers has one; --reward number_judge:score must "
                                               r"return \(reward, \[\[start, end, reward\], ...\]\)"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_name_is_no_estimator() -> None:
    with pytest.raises(CreditscopeError, match="unknown credit ''"):
        replace(SMALL, credit="")


@pytest.mark.slow
def test_evaluations_draw_the_same_numbers_for_every_seed_and_others_for_another_eval_seed(tmp_path: Path) -> None:
    def first(**changes: int) -> float:
        out = tmp_path / "-".join(map(str, changes.values()))
        return float(run(replace(SMALL, steps=1, eval_problems=40, **changes), out)[0]["eval/accuracy"])

    assert first(seed=0, eval_seed=0) == first(seed=7, eval_seed=0)
    assert len({first(seed=0, eval_seed=n) for n in (1, 2, 3)}) > 1
