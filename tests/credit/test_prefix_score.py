"""Credit from the differences of a learned reward: numbers by hand, the telescoping sum, and exact expectations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from creditscope import METHODS, CreditscopeError
from creditscope.credit import find_estimator
from creditscope.credit.prefix_score import summed
from creditscope.credit.tools import Tools
from creditscope.exact.enumeration import measure, tree_world
from creditscope.tasks.tree import Tree
from each import each
from makers import make

PLAIN = METHODS["p1_grpo"]  # A in units of the reward, baseline the group's mean


class Scored(Tools):
    def __init__(self, scores: Tensor) -> None:
        self._scores = scores

    def scores(self) -> Tensor:
        return self._scores


SCORES = torch.tensor([[1.0, 3.0, 2.0], [1.0, 1.0, 1.0]])
"""Two answers to one prompt of score 1: two tokens, and one; past its end the score is that of the answer."""


def test_a_token_has_its_difference_less_the_mean_of_the_groups_tokens() -> None:
    batch = make([0, 0], [0, 0], [2, 1])
    # d = (2, −1) and (0): their mean over three tokens is 1/3.
    credit = find_estimator("prefix_score")(PLAIN, batch, Scored(SCORES))
    assert torch.allclose(credit, torch.tensor([[5 / 3, -4 / 3], [-1 / 3, 0.0]], dtype=credit.dtype))


def test_at_lambda_1_a_token_has_the_answers_score_less_that_of_the_prefix_before_it() -> None:
    batch = make([0, 0], [0, 0], [2, 1])
    # s(y) − s(y_<t) = (2 − 1, 2 − 3) and (1 − 1): their mean is 0.
    credit = find_estimator("prefix_score,lam=1")(PLAIN, batch, Scored(SCORES))
    assert torch.allclose(credit, torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=credit.dtype))


@each("seed", range(5))
def test_the_differences_of_an_answer_add_up_to_its_score_less_that_of_the_prompt(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 9, generator=draw) < 0.7  # text of others between chosen tokens
    mask[:, 0] = True
    scores = torch.randn(6, 10, generator=draw, dtype=torch.float64)
    assert torch.allclose(summed(scores, mask, 0.0).sum(dim=1), scores[:, -1] - scores[:, 0])
    first = summed(scores, mask, 1.0)[:, 0]
    assert torch.allclose(first, scores[:, -1] - scores[:, 0])


def test_scores_of_another_shape_are_refused_in_one_sentence() -> None:
    with pytest.raises(CreditscopeError, match=r"must score the prompt and every token, \(2, 3\), got \(2, 2\)"):
        find_estimator("prefix_score")(PLAIN, make([0, 0], [0, 0], [2, 2]), Scored(SCORES[:, 1:]))


def test_without_a_learned_reward_there_is_no_such_credit() -> None:
    with pytest.raises(CreditscopeError, match="needs a learned reward that scores every prefix"):
        find_estimator("prefix_score")(PLAIN, make([0, 0], [0, 0], [2, 1]), Tools())


def test_a_score_that_is_the_value_gives_the_gradient_and_a_wrong_one_does_so_at_lambda_1_alone() -> None:
    """By enumeration: with s = v and no baseline credit is q − v; an error of s(y_<t) that depends on the state alone
    drops out of the gradient where every later difference is counted."""
    tree = Tree(tokens=2, depth=2)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(len(tree.states), 2, generator=draw, dtype=torch.float64)
    world = tree_world(tree, logits, torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    error = torch.randn(len(tree.states), generator=draw, dtype=torch.float64)
    none = replace(PLAIN, name="none", baseline="none")
    exact = measure("prefix_score", none, world, 2)
    assert exact.bias < 1e-12
    late, early = (measure(f"prefix_score,lam={lam}", none, world, 2, error).gradient_error for lam in (1, 0))
    assert late < 1e-12
    assert early > 0.1
