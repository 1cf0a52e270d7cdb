"""The pull of the KL term: by hand, and against gradients of the two parts of J taken by autograd."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import mini
from creditscope import Record
from creditscope.lab.rollout import roll_out
from creditscope.lab.step import Minibatch, PolicyPasses
from creditscope.lab.train import train
from creditscope.objective.advantages import token_advantage
from creditscope.objective.surrogate import surrogate
from creditscope.optimizer.kl_pull import KLPull, kl_pull
from creditscope.policy.loading import load_policy
from creditscope.runs import schema
from creditscope.runs.config import Config
from creditscope.tasks import find_task

pytestmark = pytest.mark.usefixtures("mini_task")


def test_a_kl_term_that_takes_back_all_has_pull_1() -> None:
    g = torch.tensor([3.0, -4.0])
    assert kl_pull([(0 * g, -g)]) == {schema.GRAD_KL_PULL: 1.0, schema.GRAD_KL_SIZE: 1.0}
    # Orthogonal, and twice as long.
    assert kl_pull([(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]))]) == {
        schema.GRAD_KL_PULL: 0.0, schema.GRAD_KL_SIZE: 2.0}
    # A parameter that only one of the parts reaches: g_R = (2,), (0,); g_KL = (−1,), (5,).
    assert kl_pull([(torch.tensor([1.0]), torch.tensor([-1.0])), (torch.tensor([5.0]), torch.tensor([5.0]))]) == {
        schema.GRAD_KL_PULL: 0.5, schema.GRAD_KL_SIZE: pytest.approx(26**0.5 / 2)}


def test_without_a_gradient_of_the_reward_there_is_no_pull() -> None:
    assert kl_pull([]) == {}
    assert kl_pull([(torch.ones(2), torch.ones(2)), (None, None)]) == {}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_reading_is_that_of_the_gradients_of_both_parts_of_J(accumulate: int) -> None:
    config = Config(model=mini.model(), task=mini.TASK, method="grpo", beta=0.5, group=4, prompts=2)
    policy, task = load_policy(config.model, dtype="float64", seed=0), find_task(config.task)
    drawn = roll_out(policy, task, [p for p, _ in zip(task.problems("train", 0), range(2), strict=False)], 4,
                     max_tokens=6, temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(0))
    batch = dataclasses.replace(drawn.rollouts, reward=torch.arange(8.0) % 3, ref_logp=drawn.rollouts.logp * 0.7)
    method = config.row
    credit = token_advantage(method, batch)
    reader = KLPull(policy.trainable().values())
    reader.begin(method, batch, credit)
    reader.before(Minibatch(policy, method, batch, credit, accumulate=accumulate))
    passes = PolicyPasses(policy, batch)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(policy.trainable().values()))])

    logp = passes.forward(torch.arange(8))
    both = gradient(surrogate(method, logp, batch, credit))
    reward = gradient(surrogate(method.replace(beta=0.0), passes.forward(torch.arange(8)), batch, credit))
    kl = both - reward
    assert float(kl.norm()) > 0
    assert reader.metrics == pytest.approx({schema.GRAD_KL_PULL: -float(kl @ reward / reward.square().sum()),
                                            schema.GRAD_KL_SIZE: float(kl.norm() / reward.norm())}, rel=1e-5)


def test_a_run_with_a_kl_term_has_it_at_readings_and_one_without_never(tmp_path: Path) -> None:
    base = Config(model=mini.model(), task=mini.TASK, group=4, prompts=2, steps=3, scope="light", every=2,
                  eval_problems=0)
    list(train(base, tmp_path / "without", {}))
    list(train(dataclasses.replace(base, beta=0.1), tmp_path / "with", {}))
    assert not any(schema.GRAD_KL_PULL in line for line in Record.open(tmp_path / "without").steps())
    lines = Record.open(tmp_path / "with").steps()
    assert [schema.GRAD_KL_PULL in line for line in lines] == [schema.GRAD_NORM in line and k != 1 and
                                                               line[schema.SIGNAL_LIVE_GROUPS] > 0
                                                               for k, line in enumerate(lines)]
