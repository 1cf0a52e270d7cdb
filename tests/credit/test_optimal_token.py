"""The optimal token baseline by hand and against a loop; verl's own code is in tests/conformance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.credit.optimal_sequence import optimal_sequence
from creditscope.credit.optimal_token import optimal_token
from creditscope.credit.outcome import outcome
from creditscope.credit.tools import Tools
from makers import make, random_batches

D = torch.float64
PLAIN = METHODS["p1_grpo"]


def with_collision(batch: Rollouts, seed: int = 0) -> Rollouts:
    """Σπ² between its least and its largest value for the π of the token: π² ≤ Σπ² ≤ π² + (1 − π)²."""
    p = batch.logp.exp()
    share = torch.rand(p.shape, generator=torch.Generator().manual_seed(seed), dtype=D)
    return replace(batch, collision=p**2 + share * (1 - p) ** 2)


def test_two_rollouts_of_two_tokens_by_hand() -> None:
    # Two equal symbols: π = ½, Σπ² = ½, ‖onehot − π‖² = 1 − 1 + ½ = ½. A symbol of ¾ beside one of ¼: Σπ² = ⅝,
    # ‖·‖² = 1 − 1.5 + ⅝ = ⅛ for the likely one and 1 − ½ + ⅝ = 9/8 for the other.
    #   row 0, reward 1: ½, then ⅛   W = ½, ⅝          row 1, reward 0: 9/8, then ½   W = 9/8, 13/8
    #   B_1 = ½/(½ + 9/8) = 4/13     B_2 = ⅝/(⅝ + 13/8) = 5/18
    p = torch.tensor([[.5, .75], [.25, .5]], dtype=D)
    batch = replace(make([1, 0], [0, 0], [2, 2]), logp=p.log(),
                    collision=torch.tensor([[.5, .625], [.625, .5]], dtype=D))
    expected = torch.tensor([[9 / 13, 13 / 18], [-4 / 13, -5 / 18]], dtype=D)
    torch.testing.assert_close(optimal_token(PLAIN, batch, Tools()), expected, rtol=0, atol=1e-15)


def test_the_sequence_s_baseline_by_hand() -> None:
    # The same batch: W = ⅝ and 13/8 at the end, so b = ⅝/(⅝ + 13/8) = 5/18 for every token.
    p = torch.tensor([[.5, .75], [.25, .5]], dtype=D)
    batch = replace(make([1, 0], [0, 0], [2, 2]), logp=p.log(),
                    collision=torch.tensor([[.5, .625], [.625, .5]], dtype=D))
    expected = torch.tensor([[13 / 18, 13 / 18], [-5 / 18, -5 / 18]], dtype=D)
    torch.testing.assert_close(optimal_sequence(PLAIN, batch, Tools()), expected, rtol=0, atol=1e-15)


@given(random_batches())
def test_where_all_lengths_are_equal_the_sequence_s_baseline_is_that_of_the_last_token(batch: Rollouts) -> None:
    batch = with_collision(make(batch.reward.tolist(), batch.group.tolist(), [5] * len(batch)))
    last = optimal_token(PLAIN, batch, Tools())[:, -1:]
    torch.testing.assert_close(optimal_sequence(PLAIN, batch, Tools()), last.expand(-1, 5), rtol=0, atol=1e-12)


def test_without_collision_the_sequence_s_baseline_names_itself() -> None:
    with pytest.raises(CreditscopeError, match="credit 'optimal_sequence' needs collision"):
        optimal_sequence(PLAIN, make([1, 0], [0, 0], [1, 1]), Tools())


def slow(batch: Rollouts) -> Tensor:
    """r_i − B_t, token by token, from the siblings that have a token at t."""
    assert batch.collision is not None
    out = torch.zeros_like(batch.logp)
    for i, t in batch.mask.nonzero().tolist():
        alive = [j for j in range(len(batch)) if batch.group[j] == batch.group[i] and bool(batch.mask[j, t])]
        weight = [sum(1 - 2 * math.exp(float(batch.logp[j, u])) + float(batch.collision[j, u])
                      for u in range(t + 1) if batch.mask[j, u]) for j in alive]
        best = sum(w * float(batch.reward[j]) for w, j in zip(weight, alive, strict=True)) / sum(weight)
        out[i, t] = batch.reward[i] - (best if len(alive) > 1 else 0.0)
    return out


@given(random_batches())
def test_each_position_has_the_baseline_of_a_loop(batch: Rollouts) -> None:
    batch = with_collision(batch)
    torch.testing.assert_close(optimal_token(PLAIN, batch, Tools()), slow(batch), rtol=0, atol=1e-12)


@given(random_batches())
def test_what_others_wrote_has_no_score_and_no_credit(batch: Rollouts) -> None:
    mask = batch.mask.clone()
    mask[::2, 1::3] = False
    batch = with_collision(replace(batch, mask=mask))
    found = optimal_token(PLAIN, batch, Tools())
    torch.testing.assert_close(found, slow(batch), rtol=0, atol=1e-12)
    assert not bool(found[~mask].any())


def test_the_last_survivor_has_no_baseline() -> None:
    batch = with_collision(make([.75, 0, 1], [0, 0, 0], [4, 2, 1]))
    assert optimal_token(PLAIN, batch, Tools())[0, 2:].tolist() == [.75, .75]


def test_siblings_that_have_ended_count_no_more() -> None:
    # The long answers earn 0: past the short one's end their baseline is 0 too.
    batch = with_collision(make([1, 0, 0], [0, 0, 0], [2, 4, 4]))
    found = optimal_token(PLAIN, batch, Tools())
    assert bool((found[1:, :2] < 0).all())
    assert not bool(found[1:, 2:].any())


def test_where_nobody_was_unsure_all_weigh_the_same() -> None:
    # π = Σπ² = 1: every W is 0, and the ratio is 0/0.
    batch = replace(make([1, 0, .5], [0, 0, 0], [2, 2, 2]), logp=torch.zeros(3, 2, dtype=D),
                    collision=torch.ones(3, 2, dtype=D))
    assert optimal_token(PLAIN, batch, Tools()).tolist() == [[.5, .5], [-.5, -.5], [0, 0]]


@given(random_batches())
def test_with_equal_scores_it_is_the_group_mean_while_all_are_alive(batch: Rollouts) -> None:
    batch = replace(batch, logp=torch.full_like(batch.logp, math.log(.5)), collision=torch.full_like(batch.logp, .5))
    found, mean = optimal_token(PLAIN, batch, Tools()), outcome(PLAIN, batch, Tools())
    torch.testing.assert_close(found[:, 0], mean[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7e20])
def test_a_unanimous_group_is_zero_while_siblings_are_left(value: float) -> None:
    batch = with_collision(make([value] * 3, [0] * 3, [3, 2, 2]))
    for name in ("grpo", "p1_grpo"):
        found = optimal_token(METHODS[name], batch, Tools())
        assert found[:, :2].abs().max() == 0
        assert float(found[0, 2]) > 0, "alone, it keeps its reward"


def test_without_collisions_it_says_what_it_needs() -> None:
    with pytest.raises(CreditscopeError, match=r"'optimal_token' needs collision.*pass Rollouts\(collision=...\)"):
        optimal_token(PLAIN, make([1, 0], [0, 0], [1, 1]), Tools())
