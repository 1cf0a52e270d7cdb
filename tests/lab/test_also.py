"""Other credits under the microscope: what is read is right, and the run does not notice."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mini
from creditscope import CreditscopeError, Record, spectrum
from creditscope.claims.evidence import read_evidence
from creditscope.cli.train import Train
from creditscope.credit import find_estimator
from creditscope.credit.tools import Tools
from creditscope.lab.rollout import Drawn, roll_out, state_number
from creditscope.lab.setup import make_optimizer
from creditscope.lab.step import Minibatch, take_step
from creditscope.lab.train import train
from creditscope.microscope.observer import Observer
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.optimizer.brakes import Brake
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import token_logp
from creditscope.runs.config import Config
from creditscope.tasks import find_task

pytestmark = pytest.mark.usefixtures("mini_task")
LOOK = Config(model=mini.model(), task=mini.TASK, prompts=3, group=4, steps=1, max_tokens=12, eval_problems=0,
              checkpoint_every=1, keep_every=0, lr=1e-4, scope="light", dtype="float64", probe="off", method="p1_grpo")
SMALL = Config(model=mini.model(), task=mini.TASK, prompts=2, group=4, steps=2, max_tokens=12, eval_problems=0,
               checkpoint_every=1, keep_every=1, lr=1e-4, scope="light", inner_steps=2, minibatches=2)


def looked(config: Config, rewards: tuple[float, ...] = (0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1), rows: Any = None,
           silent: slice = slice(0)) -> tuple[Policy, Observer, Drawn, torch.Tensor, dict[str, torch.Tensor]]:
    """One step under the microscope with rewards of our own, one dead group among them; also the weights as they were.
    The steps of `silent` rollouts earn nothing."""
    policy, task = load_policy(config.model, dtype=config.dtype), find_task(config.task)
    problems = [problem for problem, _ in zip(task.problems("train", 0), range(config.prompts), strict=False)]
    batch = roll_out(policy, task, problems, config.group, max_tokens=12, temperature=1.0, top_p=1.0,
                     generator=torch.Generator().manual_seed(1))
    r = replace(batch.rollouts, reward=torch.tensor(rewards, dtype=batch.rollouts.reward.dtype))
    r.step_reward[silent] = 0
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    observer = Observer(policy.model, config.scope == "full")
    observer.assign(lambda: {spec: find_estimator(spec)(config.row, r, Tools()) for spec in config.also})
    rows = torch.arange(len(r)) if rows is None else rows
    credit = find_estimator(config.estimator)(config.row, r, Tools())
    update = take_step(Minibatch(policy, config.row, r, credit, rows=rows, accumulate=config.accumulate),
                       Brake(make_optimizer(policy, config)), [observer], config.clip_norm)
    assert update is not None
    w = torch.zeros(r.mask.shape, dtype=update.w.dtype)
    w[rows] = update.w
    return policy, observer, replace(batch, rollouts=r), w, before


def slow_gram(policy: Policy, batch: Drawn, w: torch.Tensor) -> np.ndarray[Any, Any]:
    """(N, N) from rows taken one by one, by plain autograd."""
    rows = []
    for i in range(len(batch.rollouts)):
        policy.model.zero_grad()
        r = batch.rollouts.rows(torch.tensor([i]))
        logp = token_logp(policy, [batch.rollouts.prompt_ids[i]], r.tokens, r.mask, 1.0)
        torch.autograd.backward(logp, w[i:i + 1, : logp.shape[1]].to(logp.dtype))
        rows.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                               for p in policy.trainable().values()]))
    stacked = torch.stack(rows)
    return (stacked @ stacked.T).numpy()


def facts(out: Path) -> list[dict[str, Any]]:
    """The recorded steps without times, and without what other credits read."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "also/", "scope/"))}
            for line in Record.open(out).steps()]


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"method": "gspo"}, {"method": "dapo", "accumulate": 2}])
def test_the_run_s_own_credit_read_as_another_gives_its_own_gram(changes: dict[str, Any]) -> None:
    _, observer, batch, w, _ = looked(replace(LOOK, also=("outcome",), **changes))
    found, line = observer.arrays(batch.rollouts, w), observer.metrics(batch.rollouts, w, observer.seconds + 1.0)
    own, (other,) = found["gram"], found["other_grams"]
    assert np.nanmax(own) > 0
    assert (np.isnan(own) == np.isnan(other)).all()
    assert np.nanmax(np.abs(own - other)) < 1e-12 * np.nanmax(np.abs(own))
    assert line["also/outcome/effective_rank"] == pytest.approx(line["gram/group/effective_rank"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["step_return", "optimal_token", "entropy_mask,share=0.05"])
def test_the_gram_of_another_credit_is_that_of_its_own_rows_taken_one_by_one(spec: str) -> None:
    config = replace(LOOK, method="grpo", also=("step_reward", spec))
    policy, observer, batch, w, before = looked(config)
    found = observer.arrays(batch.rollouts, w)
    assert found["other_names"].tolist() == ["step_reward", spec]
    assert found["other_grams"].shape == (2, 12, 12)
    assert found["other_grams"].dtype == np.float64
    policy.model.load_state_dict(before, strict=False)
    r = batch.rollouts
    live = token_logp(policy, batch.rollouts.prompt_ids, r.tokens, r.mask, 1.0, grad=False)
    credit = find_estimator(spec)(config.row, r, Tools())
    slow = slow_gram(policy, batch, effective_credit(lambda lp: surrogate(config.row, lp, r, credit), live))
    assert slow.any()
    assert np.abs(found["other_grams"][1] - slow).max() < 1e-10 * np.abs(slow).max()
    assert np.abs(found["gram"] - slow).max() > 1e-3 * np.abs(slow).max(), "another credit, else nothing is tested"


def test_leave_one_out_scales_the_rows_and_cannot_change_a_rank() -> None:
    # A = r_i − mean_{j≠i} r_j = R/(R−1) · (r_i − mean r), so at R = 4 the Gram grows by (4/3)² = 16/9.
    _, observer, batch, w, _ = looked(replace(LOOK, also=("leave_one_out",), accumulate=3))
    found, line = observer.arrays(batch.rollouts, w), observer.metrics(batch.rollouts, w, observer.seconds + 1.0)
    assert np.nanmax(np.abs(found["other_grams"][0] - 16 / 9 * found["gram"])) < 1e-6 * np.nanmax(found["gram"])
    assert line["also/leave_one_out/effective_rank"] == pytest.approx(line["gram/group/effective_rank"], rel=1e-6)


def test_the_metric_is_the_mean_over_groups_in_which_that_credit_is_not_0() -> None:
    """Unanimous rewards leave no outcome credit; steps may still differ."""
    config = replace(LOOK, also=("step_reward", "outcome"))
    _, observer, batch, w, _ = looked(config, rewards=(1,) * 12, silent=slice(4, 8))
    found, line = observer.arrays(batch.rollouts, w), observer.metrics(batch.rollouts, w, observer.seconds + 1.0)
    assert "also/outcome/effective_rank" not in line
    assert "gram/group/effective_rank" not in line
    blocks = [found["other_grams"][0][np.ix_(rows, rows)] for rows in (found["group"] == g for g in range(3))]
    ranks = [spectrum(block, float(found["eps"])).effective_rank for block in blocks if block.any()]
    assert len(ranks) == 2, "group 1 has no credit"
    assert line["also/step_reward/effective_rank"] == pytest.approx(np.mean(ranks), rel=1e-12)


@pytest.mark.slow
def test_micro_batches_and_minibatches_leave_each_group_s_block_as_it_is() -> None:
    also = ("step_return", "outcome")
    _, observer, batch, w, _ = looked(replace(LOOK, also=also))
    whole = observer.arrays(batch.rollouts, w)
    _, observer, _, w, _ = looked(replace(LOOK, also=also, accumulate=2))
    parted = observer.arrays(batch.rollouts, w)
    # Groups 0 and 2 share a micro-batch, group 1 is alone.
    met = np.array([[(a == 1) == (b == 1) for b in whole["group"]] for a in whole["group"]])
    for one, two in zip(whole["other_grams"], parted["other_grams"], strict=True):
        assert np.isnan(two[~met]).all()
        assert np.abs(one - two)[met].max() < 1e-10 * np.abs(one).max()
    # A minibatch of group 2 alone: its rows are the batch's last four, and w is divided by 4 rows instead of 12.
    _, observer, _, w, _ = looked(replace(LOOK, also=also), rows=torch.arange(8, 12))
    some = observer.arrays(batch.rollouts, w)
    for one, two in zip(whole["other_grams"], some["other_grams"], strict=True):
        assert np.isnan(two[:8]).all()
        assert np.abs(9 * one[8:, 8:] - two[8:, 8:]).max() < 1e-6 * np.abs(two[8:, 8:]).max()


# -- the run does not notice -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "also"), [
    ({}, ("monte_carlo,samples=2", "step_return")),
    ({"accumulate": 1, "credit": "monte_carlo,samples=2"}, ("spo_chain,samples=1", "salt")),
    ({"method": "ppo", "probe": "full"}, ("gae,lam=0.9", "monte_carlo,samples=1"))])
def test_a_run_is_the_same_bit_by_bit_whatever_is_read_also(changes: dict[str, Any], also: tuple[str, ...],
                                                           tmp_path: Path) -> None:
    config = replace(SMALL, **changes)
    for name, run in (("plain", config), ("also", replace(config, also=also))):
        list(train(run, tmp_path / name, {}))
    plain, other = Record.open(tmp_path / "plain"), Record.open(tmp_path / "also")
    assert facts(tmp_path / "also") == facts(tmp_path / "plain")
    files = sorted(path.name for path in plain.checkpoint_path(2).glob("*.safetensors"))
    assert len(files) == (4 if "method" in changes else 2)
    for file in files:
        one, two = (load_file(record.checkpoint_path(2) / file) for record in (plain, other))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), file
    for step in (0, 1):
        before, after = plain.reading(step), other.reading(step)
        assert all(after[key].tobytes() == value.tobytes() for key, value in before.items()), step
        assert after.keys() - before.keys() == {"other_names", "other_grams"}
        assert after["other_names"].tolist() == list(also)
    assert any(f"also/{name}/effective_rank" in line for name in also for line in other.steps())


@pytest.mark.slow
def test_continuations_for_other_credits_are_not_spent(tmp_path: Path) -> None:
    config = replace(SMALL, steps=1, inner_steps=1, minibatches=1)
    list(train(replace(config, also=("monte_carlo,samples=2",)), tmp_path / "also", {}))
    list(train(replace(config, credit="monte_carlo,samples=2"), tmp_path / "own", {}))
    [read], [spent] = facts(tmp_path / "also"), facts(tmp_path / "own")
    assert read["rollouts/spent"] == read["rollouts/sampled"] == 8
    assert spent["rollouts/spent"] > spent["rollouts/sampled"] == 8
    # The same seeds: what is read also is what a run with that credit would have read of its first batch.
    first, second = Record.open(tmp_path / "also").reading(0), Record.open(tmp_path / "own").reading(0)
    assert second["gram"].any()
    assert np.abs(first["other_grams"][0] - second["gram"]).max() < 1e-5 * np.abs(second["gram"]).max()


@pytest.mark.slow
def test_a_critic_s_credit_is_read_before_the_critic_learns_from_the_batch(tmp_path: Path) -> None:
    config = replace(SMALL, method="ppo", also=("gae",), inner_steps=1)
    list(train(config, tmp_path / "run", {}))
    for step in (0, 1):
        found = Record.open(tmp_path / "run").reading(step)
        assert np.nanmax(found["gram"]) > 0
        assert np.nanmax(np.abs(found["other_grams"][0] - found["gram"])) < 1e-5 * np.nanmax(found["gram"])


@pytest.mark.slow
def test_other_credits_are_read_with_the_microscope_s_schedule_and_reach_the_evidence(tmp_path: Path) -> None:
    config = replace(SMALL, steps=3, every=2, inner_steps=1, also=("step_return", "optimal_token"))
    list(train(config, tmp_path / "run", {}))
    record = Record.open(tmp_path / "run")
    assert record.readings() == [0, 2]
    assert record.config["also"] == ["step_return", "optimal_token"]
    assert not any(name.startswith("also/") for name in record.steps()[1])
    columns = read_evidence(record).groups
    assert {"credit:step_return/effective_rank", "credit:optimal_token/effective_rank"} <= columns.keys()


@pytest.mark.slow
def test_what_is_read_also_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    list(train(replace(SMALL, steps=1, also=("step_return",)), tmp_path / "cut", {}))
    list(train(replace(SMALL, steps=2, also=("salt", "outcome")), tmp_path / "cut", {}, resume=True))
    list(train(SMALL, tmp_path / "whole", {}))
    record = Record.open(tmp_path / "cut")
    assert facts(tmp_path / "cut") == facts(tmp_path / "whole")
    assert [record.reading(step)["other_names"].tolist() for step in (0, 1)] == [["step_return"], ["salt", "outcome"]]
    assert "other_names" not in Record.open(tmp_path / "whole").reading(0)


@pytest.mark.slow
def test_a_full_probe_reads_the_same_with_and_without_the_microscope(tmp_path: Path) -> None:
    """Both take gradients of the second minibatch, whose tokens the first has moved."""
    config = replace(SMALL, method="ppo", probe="full", lr=0.01, inner_steps=1, steps=1, dtype="float64")
    for scope in ("off", "light"):
        list(train(replace(config, scope=scope), tmp_path / scope, {}))
    [plain], [seen] = facts(tmp_path / "off"), facts(tmp_path / "light")
    assert plain["overshoot/by_momentum"] != 0
    for name in [name for name in plain if name.startswith("overshoot/")]:
        assert seen[name] == pytest.approx(plain[name], rel=1e-6, abs=1e-12), name


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"scope": "off", "also": ("salt",)}, "--also salt: other credits are read under the microscope, and --scope is"),
    ({"also": ("salt", "salt")}, "--also salt is given twice"),
    ({"also": ("optimal_tokn",)}, "did you mean 'optimal_token'"),
    ({"also": ("monte_carlo,samples=0",)}, r"--also monte_carlo,samples=0: option samples .* got 0"),
    ({"also": ("optimal_token",), "top_p": 0.9}, "--also optimal_token: --top-p 0.9"),
    ({"method": "ppo", "also": ("outcome",)}, "--also outcome: --credit outcome reshapes the method's own advantage"),
    ({"method": "dpo", "also": ("step_return",)}, "--also step_return: .* leave --also out"),
    ({"method": "reinforce", "group": 1, "also": ("prefix_tree",)}, "compares a rollout with its siblings")])
def test_other_credits_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(("also", "message"), [
    ("gae", "--also gae: it needs a critic, and --credit outcome trains none"),
    ("state_return", "credit 'state_return' needs a task that names the state")])
def test_what_the_run_cannot_give_to_another_credit_is_said_before_the_first_step(also: str, message: str,
                                                                                 tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=message):
        list(train(replace(SMALL, also=(also,)), tmp_path / "run", {}))
    assert not (tmp_path / "run").exists()


def test_a_record_s_word_is_not_enough_to_read_with_a_users_function(tmp_path: Path) -> None:
    config = replace(SMALL, also=("salt", "evil_credit:mine"))
    with Record.create(tmp_path / "run", asdict(config), {}):
        pass
    with pytest.raises(CreditscopeError, match=r"run\.json is untrusted: give --also again"):
        Train(out=tmp_path / "run", resume=True).as_recorded([])
    given = Train(out=tmp_path / "run", resume=True).as_recorded(["--also", "evil_credit:mine", "--scope", "light"])
    assert given.config.also == ("salt", "evil_credit:mine")


# -- states ------------------------------------------------------------------------------------------------------------


def test_kept_rollouts_hold_the_states_of_their_turns_and_a_state_has_one_number_in_every_batch(tmp_path: Path) -> None:
    list(train(replace(SMALL, task="turns", scope="off", prompts=6), tmp_path / "run", {}))
    record = Record.open(tmp_path / "run")
    for step in (0, 1):
        kept = record.group(step)
        assert kept["step_state"].shape == kept["step_reward"].shape
        for prompt, state in zip(kept["prompt"], kept["step_state"][:, 0], strict=True):
            rung = int(str(prompt).split()[4])
            assert state in (-1, state_number(f"turn 0, rung {rung}"))
        assert (kept["step_state"] >= -1).all()
        assert (kept["step_state"][:, 0] >= 0).any()
