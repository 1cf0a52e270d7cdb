"""The tabular policy on which P2's claims are tested."""

from __future__ import annotations

import math

import pytest
import torch

from creditscope import METHODS, surrogate
from creditscope.exact.p2_prefix import STEPS
from creditscope.exact.tabular import TabularPolicy, tabular_policy


@pytest.fixture(scope="module")
def world() -> TabularPolicy:
    return tabular_policy()


def test_the_worlds_log_probs_are_those_of_its_table(world: TabularPolicy) -> None:
    probabilities = world.logits.softmax(dim=1)
    rollouts = world.rollouts
    for i, t in rollouts.mask.nonzero().tolist():
        p = probabilities[world.context[i, t], rollouts.tokens[i, t]]
        assert float(rollouts.logp[i, t]) == pytest.approx(math.log(p), abs=1e-14)
    # Two tokens have one context exactly where all before them is the same, of the same prompt.
    seen: dict[tuple[int, ...], int] = {}
    for i, t in rollouts.mask.nonzero().tolist():
        key = (int(rollouts.group[i]), *rollouts.tokens[i, :t].tolist())
        assert seen.setdefault(key, int(world.context[i, t])) == int(world.context[i, t])
    assert len(set(seen.values())) == len(seen) == len(world.logits)


def test_no_answer_of_the_world_goes_without_credit_and_every_group_shares_a_prefix(world: TabularPolicy) -> None:
    for g in (0, 1):
        reward = world.rollouts.reward[world.rollouts.group == g]
        assert float((reward - reward.mean()).abs().min()) > 0.01
    assert {int(g) for g in world.tree.group[world.tree.whole]} == {0, 1}


def test_an_inner_step_climbs(world: TabularPolicy) -> None:
    row = METHODS["dr_grpo"]
    before, after = (surrogate(row, logp, world.rollouts) for logp in (world.rollouts.logp, world.step(row, 0.1)))
    assert after > before
    assert torch.allclose(world.step(row, 0.0), world.rollouts.logp, atol=1e-15)


def test_the_small_step_stops_nobody_and_the_large_one_many(world: TabularPolicy) -> None:
    moves = [(world.step(METHODS["grpo"], size) - world.rollouts.logp).exp() - 1 for size in STEPS[1:]]
    assert 0 < float(moves[0].abs().max()) < 0.2
    assert int((moves[1].abs() > 0.2).sum()) > 5
