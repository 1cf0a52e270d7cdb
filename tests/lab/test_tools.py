"""What the trainer gives to estimators, against the slow way: one prefix, one backward at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from creditscope.lab.rollout import Drawn, roll_out
from creditscope.lab.tools import LabTools
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import rollout_logp
from creditscope.policy.sampling import sample
from creditscope.runs.config import Config
from creditscope.tasks import find_task

TASK = find_task("arithmetic")
SURE = Config(group=3, prompts=2, temperature=1e-3, device="cpu")  # continuations are the likeliest ones


@pytest.fixture(scope="module")
def made() -> tuple[Policy, Drawn]:
    policy = load_policy("tiny", device="cpu")
    batch = roll_out(policy, TASK, list(islice(TASK.problems("train", 3), 2)), 3, max_tokens=TASK.max_tokens,
                     temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(1))
    return policy, batch


def tools(policy: Policy, batch: Drawn, config: Config = SURE, parts: int = 1) -> LabTools:
    return LabTools(policy, TASK, replace(config, accumulate=parts), batch, TASK.max_tokens, 0, 0.0, None)


@pytest.mark.slow
def test_the_value_of_a_prefix_is_the_reward_of_its_likeliest_end(made: tuple[Policy, Drawn]) -> None:
    policy, batch = made
    cuts = torch.tensor([[0, 5], [9, -1], [14, 20], [0, 7], [12, 18], [-1, -1]])
    cuts = torch.cat([cuts, batch.rollouts.lengths[:, None] - 2], dim=1)  # late cuts follow what the answer had wrong
    found = tools(policy, batch).values(cuts, 2)
    assert torch.isnan(found).tolist() == (cuts < 0).tolist()
    values = []
    for i, c in (cuts >= 0).nonzero().tolist():
        prefix = batch.rollouts.tokens[i, : int(cuts[i, c])].tolist()
        end = sample(policy.model, [[*batch.rollouts.prompt_ids[i], *prefix]], 1,
                     max_tokens=TASK.max_tokens - len(prefix), end=policy.end, temperature=0.0)
        text = policy.decode([*prefix, *end.tokens[0][end.mask[0]].tolist()])
        values.append(TASK.verify(batch.problems[i], text).reward)
        assert found[i, c].item() == values[-1]
    assert 0 < sum(values) < len(values), "both kinds of answers are needed to tell rows apart"


@pytest.mark.slow
def test_equal_prefixes_are_continued_once_and_only_within_their_group(made: tuple[Policy, Drawn]) -> None:
    policy, batch = made
    giver = tools(policy, batch)
    first = giver.values(torch.zeros(6, 1, dtype=torch.int64), 4)
    assert giver.continuations == 2 * 4, "six rows, two prompts"
    assert first[:3].unique().numel() == first[3:].unique().numel() == 1
    # Two groups that write the same tokens have different problems, and so other values.
    same = replace(batch, rollouts=replace(batch.rollouts, tokens=batch.rollouts.tokens[[0, 0, 0, 0, 0, 0]],
                                           mask=batch.rollouts.mask[[0, 0, 0, 0, 0, 0]]))
    giver = tools(policy, same)
    giver.values(torch.full((6, 1), 5), 3)
    assert giver.continuations == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_the_gram_is_that_of_scores_taken_one_by_one_and_the_gradient_stays(made: tuple[Policy, Drawn],
                                                                            parts: int) -> None:
    policy, batch = made
    rollouts, parameters = batch.rollouts, list(policy.trainable().values())
    scores = []
    for i in range(len(rollouts)):
        live = rollout_logp(policy, rollouts.rows(torch.tensor([i])), 1.0)
        scores.append(torch.cat([g.flatten() for g in torch.autograd.grad(live.sum(), parameters)]).double())
    psi = torch.stack(scores)
    marks = [torch.ones_like(p) for p in parameters]
    for p, mark in zip(parameters, marks, strict=True):
        p.grad = mark
    found = tools(policy, batch, replace(SURE, temperature=1.0), parts).gram()
    assert all(p.grad is mark for p, mark in zip(parameters, marks, strict=True))
    for p in parameters:
        p.grad = None
    same = rollouts.group[:, None] == rollouts.group
    expected = psi @ psi.T
    torch.testing.assert_close(found[same], expected[same], rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert bool(torch.isnan(found[~same]).all()) == (parts == 2)
