"""SALT: advantages split along the eigenvectors of a Gram."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.credit import find_estimator
from creditscope.credit.salt import salt, split
from creditscope.credit.tools import Tools
from creditscope.objective.advantages import token_advantage
from makers import make, random_batches

D = torch.float64
PLAIN = METHODS["p1_grpo"]


class Scores(Tools):
    """Scores that are known: the rows of a matrix."""

    def __init__(self, scores: Tensor, factor: float = 1.0) -> None:
        self._gram = factor * scores @ scores.T

    def gram(self) -> Tensor:
        return self._gram


def random_scores(batch: Rollouts, seed: int = 0) -> Tensor:
    return torch.randn(len(batch), 4, generator=torch.Generator().manual_seed(seed), dtype=D)


def test_two_correlated_scores_by_hand() -> None:
    # K = [[1, ½], [½, 1]], A = (1, 0): top eigenvector (1, 1)/√2, P A = (½, ½), the rest (½, −½).
    # ‖Σ A ψ‖ = 1 = Σ |A|‖ψ‖: nothing cancels, c = 0, A' = A.
    gram = torch.tensor([[1., .5], [.5, 1.]], dtype=D)
    torch.testing.assert_close(split(torch.tensor([1., 0.], dtype=D), gram, 1), torch.tensor([1., 0.], dtype=D),
                               rtol=0, atol=1e-15)
    # A = (1, −½): P A = (¼, ¼), the rest (¾, −¾). ‖Σ A ψ‖² = 1 − ½ + ¼ = ¾, Σ |A|‖ψ‖ = 3/2: c = 1 − (√3/2)/1.5.
    c = 1 - 1 / math.sqrt(3)
    expected = torch.tensor([.25 + (1 + c) * .75, .25 - (1 + c) * .75], dtype=D)
    torch.testing.assert_close(split(torch.tensor([1., -.5], dtype=D), gram, 1), expected, rtol=0, atol=1e-15)


def test_the_estimator_by_hand() -> None:
    # A = ½, −½ and the same K: P A = 0, c = 1 − √(¼ − ¼ + ¼)/1 = ½, so A' = 1.5 A on every token.
    batch = make([1, 0], [4, 4], [2, 1])
    scores = torch.tensor([[1., 0.], [.5, math.sqrt(.75)]], dtype=D)
    found = salt(PLAIN, batch, Scores(scores))
    torch.testing.assert_close(found, torch.tensor([[.75, .75], [-.75, -.75]], dtype=D), rtol=0, atol=1e-15)


def test_opposite_scores_with_opposite_advantages_push_the_same_way_and_nothing_is_added() -> None:
    # ψ_2 = −ψ_1: Σ A ψ = ψ_1, c = 0.
    batch = make([1, 0], [0, 0], [1, 1])
    found = salt(PLAIN, batch, Scores(torch.tensor([[1.], [-1.]], dtype=D)))
    torch.testing.assert_close(found, torch.tensor([[.5], [-.5]], dtype=D), rtol=0, atol=1e-15)


def test_equal_scores_with_opposite_advantages_cancel_and_the_residual_doubles() -> None:
    # K = 1 everywhere: A is orthogonal to its eigenvector (1, 1), and Σ A ψ = 0: c = 1.
    batch = make([1, 0], [0, 0], [1, 1])
    found = salt(PLAIN, batch, Scores(torch.ones(2, 1, dtype=D)))
    torch.testing.assert_close(found, torch.tensor([[1.], [-1.]], dtype=D), rtol=0, atol=1e-14)


@given(random_batches(), st.integers(6, 9))
def test_with_every_eigenvector_kept_the_advantage_comes_back(batch: Rollouts, rank: int) -> None:
    own = token_advantage(PLAIN, batch).expand_as(batch.mask)
    torch.testing.assert_close(salt(PLAIN, batch, Scores(random_scores(batch)), rank=rank), own, rtol=0, atol=1e-13)


@given(random_batches(), st.integers(-12, 12))
def test_the_scale_of_the_gram_does_not_matter(batch: Rollouts, power: int) -> None:
    scores = random_scores(batch)
    found = salt(PLAIN, batch, Scores(scores, 10.0**power))
    torch.testing.assert_close(found, salt(PLAIN, batch, Scores(scores)), rtol=0, atol=1e-9)


@given(random_batches())
def test_the_part_along_the_shared_direction_is_kept_and_the_rest_grows(batch: Rollouts) -> None:
    scores = random_scores(batch)
    own, found = token_advantage(PLAIN, batch)[:, 0], salt(PLAIN, batch, Scores(scores))[:, 0]
    for group in batch.group.unique():
        rows = batch.group == group
        top = torch.linalg.svd(scores[rows]).U[:, 0]  # another route to the eigenvector
        torch.testing.assert_close(top @ found[rows], top @ own[rows], rtol=0, atol=1e-12)
        rest, was = (a[rows] - top * (top @ a[rows]) for a in (found, own))
        pushed = (own[rows, None] * scores[rows]).sum(dim=0).norm()
        alone = (own[rows].abs() * scores[rows].norm(dim=1)).sum()
        c = 1 - pushed / alone if alone > 0 else torch.zeros(())
        torch.testing.assert_close(rest, (1 + c) * was, rtol=0, atol=1e-12)


def test_a_gram_of_zeros_gives_the_advantage_back() -> None:
    batch = make([1, 0, 0], [0, 0, 0], [2, 1, 1])
    own = token_advantage(PLAIN, batch).expand_as(batch.mask)
    assert torch.equal(salt(PLAIN, batch, Scores(torch.zeros(3, 2, dtype=D))), own)


def test_what_never_met_may_be_unknown_between_groups_and_not_inside_one() -> None:
    batch = make([1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1])
    tools = Scores(random_scores(batch))
    full = salt(PLAIN, batch, tools)
    apart = batch.group[:, None] != batch.group[None]
    tools._gram = tools._gram.masked_fill(apart, torch.nan)
    assert torch.equal(salt(PLAIN, batch, tools), full)
    tools._gram[0, 2] = tools._gram[2, 0] = torch.nan
    with pytest.raises(CreditscopeError, match="needs the Gram of a whole group"):
        salt(PLAIN, batch, tools)


def test_a_rank_below_one_and_a_method_with_credit_by_token_are_refused() -> None:
    batch = make([1, 0], [0, 0], [2, 2])
    tools = Scores(random_scores(batch))
    with pytest.raises(CreditscopeError, match="rank of credit 'salt' must be a whole number of at least 1, got 0"):
        find_estimator("salt,rank=0")
    with pytest.raises(CreditscopeError, match="splits one advantage per rollout, but method 'x' has one per token"):
        salt(METHODS["reinforce_pp"].but(name="x", beta=0.1), batch, tools)


def test_float32_advantages_are_split_in_float64_and_come_back_in_float32() -> None:
    batch = make([1, 0], [0, 0], [1, 1])
    scores = random_scores(batch)
    narrow = salt(PLAIN, replace(batch, reward=batch.reward.float()), Scores(scores))
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), salt(PLAIN, batch, Scores(scores)), rtol=1e-7, atol=0)
