"""tree: closed forms equal autograd and enumeration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from creditscope.errors import CreditscopeError
from makers_tree import Tree

trees = st.one_of(st.builds(Tree, tokens=st.integers(2, 3), depth=st.integers(1, 3)),
                  st.builds(Tree, tokens=st.integers(2, 3), depth=st.integers(1, 4), stop=st.integers(0, 1)))


def draw(tree: Tree, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tree.states), tree.tokens, generator=g, dtype=torch.float64)
    return logits, torch.randn(len(tree.leaves), generator=g, dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(tree=trees, seed=st.integers(0, 999))
def test_probabilities_sum_to_one_and_the_root_is_worth_the_expected_reward(tree: Tree, seed: int) -> None:
    logits, reward = draw(tree, seed)
    chance = tree.probability(logits)
    torch.testing.assert_close(chance.sum(), torch.ones_like(chance[0]))
    torch.testing.assert_close(tree.value(logits, reward)[0], (chance * reward).sum())


@settings(deadline=None, max_examples=40)
@given(tree=trees, seed=st.integers(0, 999))
def test_the_gradient_is_autograd_s_and_the_score_function_s(tree: Tree, seed: int) -> None:
    logits, reward = draw(tree, seed)
    logits.requires_grad_()
    (auto,) = torch.autograd.grad((tree.probability(logits) * reward).sum(), logits)
    with torch.no_grad():
        torch.testing.assert_close(tree.gradient(logits, reward), auto)
        weight = tree.probability(logits) * reward
        torch.testing.assert_close(torch.einsum("n,nsa->sa", weight, tree.scores(logits)), auto)


@settings(deadline=None, max_examples=40)
@given(tree=trees, seed=st.integers(0, 999))
def test_v_is_the_mean_of_q_and_the_score_has_mean_zero(tree: Tree, seed: int) -> None:
    logits, reward = draw(tree, seed)
    q, v = tree.q(logits, reward), tree.value(logits, reward)
    torch.testing.assert_close((logits.softmax(1) * q).sum(1), v)
    mean = torch.einsum("n,nsa->sa", tree.probability(logits), tree.scores(logits))
    torch.testing.assert_close(mean, torch.zeros_like(mean))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 999), size=st.integers(2, 4))
def test_the_group_mean_baseline_shrinks_the_expected_gradient_by_R_minus_1_over_R(seed: int, size: int) -> None:
    tree = Tree(tokens=2, depth=2)
    logits, reward = draw(tree, seed)
    groups = tree.groups(size)
    r = reward[groups]
    credit = (r - r.mean(1, keepdim=True)) / size
    estimate = torch.einsum("gi,gisa->gsa", credit, tree.scores(logits)[groups])
    expected = torch.einsum("g,gsa->sa", tree.chance(logits, groups), estimate)
    torch.testing.assert_close(expected, (size - 1) / size * tree.gradient(logits, reward))


def test_a_small_tree_by_hand() -> None:
    # Two tokens, depth 2, token 0 stops: the sequences are 0, 10, 11. Fair coins: 1/2, 1/4, 1/4.
    tree = Tree(tokens=2, depth=2, stop=0)
    assert list(tree.states) == [(), (1,)]
    assert tree.leaves == [(0,), (1, 0), (1, 1)]
    logits, reward = torch.zeros(2, 2), torch.tensor([1.0, 0.0, 4.0])
    assert tree.probability(logits).tolist() == [0.5, 0.25, 0.25]
    assert tree.q(logits, reward).tolist() == [[1.0, 2.0], [0.0, 4.0]]
    assert tree.value(logits, reward).tolist() == [1.5, 2.0]
    assert tree.reach(logits).tolist() == [1.0, 0.5]
    # d π (q − v): 1 · ½ · (∓½), ½ · ½ · (∓2).
    assert tree.gradient(logits, reward).tolist() == [[-0.25, 0.25], [-0.5, 0.5]]


def test_groups_become_a_batch_of_rollouts() -> None:
    tree = Tree(tokens=2, depth=2, stop=0)
    logits, reward = draw(tree, 0)
    groups = tree.groups(2)
    batch = tree.rollouts(logits, groups, reward)
    assert len(batch) == 18
    assert batch.group.tolist() == [i // 2 for i in range(18)]
    torch.testing.assert_close(batch.logp.sum(1).exp(), tree.probability(logits)[groups.reshape(-1)])
    torch.testing.assert_close(tree.chance(logits, groups).sum(), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("options", [{"tokens": 1}, {"depth": 0}, {"tokens": 10, "depth": 9}, {"stop": 2}])
def test_bad_trees_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(CreditscopeError):
        Tree(**options)


def test_bad_shapes_are_refused() -> None:
    tree = Tree()
    with pytest.raises(CreditscopeError, match=r"\(7, 2\), got \(2, 2\)"):
        tree.value(torch.zeros(2, 2), torch.zeros(8))
    with pytest.raises(CreditscopeError, match="one entry per sequence"):
        tree.value(torch.zeros(7, 2), torch.zeros(3))
    with pytest.raises(CreditscopeError, match="cannot be enumerated"):
        tree.groups(20)
