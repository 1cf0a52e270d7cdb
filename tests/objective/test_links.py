"""Preference rows: w by hand, links and scores against autograd, pairs of larger groups, and bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Method, Rollouts, advantage, effective_credit, surrogate
from creditscope.credit.units import in_units
from creditscope.methods.links import LINKS, SCORES
from creditscope.methods.table import DPO, GRPO, PREFERENCES, SIMPO
from creditscope.methods.words import axis_meaning
from creditscope.objective.advantages import token_advantage
from creditscope.objective.links import link_pull, pair_changes, pair_metrics
from creditscope.objective.weights import alpha, kept
from each import each
from makers import make, random_batches

D = torch.float64
SIGMA = 1 / (1 + math.e)  # σ(−1)


def pair(margin: float = 0.0, lengths: tuple[int, int] = (2, 4)) -> tuple[Rollouts, Tensor]:
    """A chosen and a rejected answer with log(π/π_ref) of `margin` and 0; π_old plays no part."""
    batch = make([1, 0], [0, 0], list(lengths))
    ref = torch.full_like(batch.logp, -2.0) * batch.mask
    logp = ref.clone()
    logp[0, 0] += margin
    return replace(batch, ref_logp=ref), logp


def w_of(method: Method, batch: Rollouts, logp: Tensor) -> Tensor:
    return effective_credit(lambda live: surrogate(method, live, batch), logp)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_dpo_by_hand_at_the_reference_and_after_it() -> None:
    # u = 0: w = ±β·σ(0) = ±0.1/2 on every token. u = β·10 = 1: w = ±0.1·σ(−1).
    batch, logp = pair()
    assert w_of(DPO, batch, logp)[0, :2].tolist() == pytest.approx([0.05, 0.05], abs=1e-15)
    assert w_of(DPO, batch, logp)[1, :4].tolist() == pytest.approx([-0.05] * 4, abs=1e-15)
    assert float(surrogate(DPO, logp, batch)) == pytest.approx(-math.log(2), abs=1e-15)
    batch, logp = pair(margin=10.0)
    assert w_of(DPO, batch, logp)[:, 0].tolist() == pytest.approx([0.1 * SIGMA, -0.1 * SIGMA], abs=1e-15)


@pytest.mark.parametrize(("name", "chosen", "rejected"), [
    # Two and four tokens. u = 0.1·10 = 1 with sums; γ of SimPO is 1, its scores are means of log π.
    ("ipo", 0.1 * (1 - 2) / 0.01, -0.1 * (1 - 2) / 0.01),          # φ' = (1 − 2u)/β² < 0: beyond ½ the sign turns
    ("slic", 0.0, 0.0),                                            # u = 1: the hinge rests
    ("rdpo", 0.1 * (0.9 * SIGMA + 0.1 * (1 - SIGMA)) / 0.8, -0.1 * (0.9 * SIGMA + 0.1 * (1 - SIGMA)) / 0.8),
])
def test_other_links_by_hand(name: str, chosen: float, rejected: float) -> None:
    batch, logp = pair(margin=10.0)
    assert w_of(METHODS[name], batch, logp)[:, 0].tolist() == pytest.approx([chosen, rejected], abs=1e-13)


def test_simpo_divides_by_the_length_and_has_no_reference() -> None:
    # All log π = −2: u = 2·(−2 + 2) − 1 = −1, so w = ±2·σ(1)/L.
    batch, logp = pair()
    batch = replace(batch, ref_logp=None)
    assert w_of(SIMPO, batch, logp)[:, 0].tolist() == pytest.approx([(1 - SIGMA), -(1 - SIGMA) / 2], abs=1e-14)


def test_orpo_by_hand() -> None:
    # p = e⁻² for both: the odds are equal, u = 0. w = 0.1·½·(±1)/(L·(1 − e⁻²)), and 1/L more on the chosen answer.
    batch, logp = pair()
    odds = 0.05 / (1 - math.exp(-2))
    assert w_of(METHODS["orpo"], batch, logp)[:, 0].tolist() == pytest.approx([odds / 2 + 0.5, -odds / 4], abs=1e-14)


def test_kto_by_hand() -> None:
    # h = (10, 0), z = 5, u = 0.1·(±1)(h − z) = ½ for both; w = ±0.1·σ'(½)/2.
    batch, logp = pair(margin=10.0)
    slope = math.exp(-0.5) / (1 + math.exp(-0.5)) ** 2
    assert w_of(METHODS["kto"], batch, logp)[:, 0].tolist() == pytest.approx([0.05 * slope, -0.05 * slope], abs=1e-14)


def test_of_a_larger_group_the_first_best_and_the_first_worst_are_the_pair() -> None:
    reward, group = torch.tensor([0.5, 1, 1, 0, 0, 2, 2], dtype=D), torch.tensor([0, 0, 0, 0, 0, 1, 1])
    assert advantage(DPO, reward, group).tolist() == [0, 1, 0, -1, 0, 0, 0]  # the second group is a tie


# -- identities -------------------------------------------------------------------------------------------------------


def test_dpo_at_the_reference_is_grpos_credit_at_two_rollouts() -> None:
    # (r − mean)/std with 1/R is ±1 in a group of two: w_DPO = β/2 · A, the same for all tokens.
    row = GRPO.but(name="g", std="population")
    batch = make([3, 1, 0, 2], [0, 0, 1, 1], [2, 3, 1, 4])
    batch = replace(batch, ref_logp=batch.logp)
    expected = 0.05 * advantage(row, batch.reward, batch.group)[:, None] * batch.mask / 2
    assert torch.allclose(w_of(DPO, batch, batch.logp), expected, atol=1e-15, rtol=0)


@each("name", PREFERENCES)
def test_the_other_answers_of_a_group_have_no_w(name: str) -> None:
    row = METHODS[name]
    if row.link_over == "answer":
        return
    batch = make([1, 0, 0.5, 0.25], [0] * 4, [2, 3, 4, 2])
    w = w_of(row, batch, batch.logp)
    assert bool((w[:2] != 0).any())
    assert not bool(w[2:].any())
    two = batch.rows(torch.tensor([0, 1]))
    assert torch.allclose(w[:2], w_of(row, two, two.logp), atol=1e-15, rtol=0)


@pytest.mark.slow
@given(batch=random_batches())
def test_the_closed_form_of_w_is_autograds(batch: Rollouts) -> None:
    for name in PREFERENCES:
        row = METHODS[name].bare
        own = token_advantage(row, batch) if not row.centred or len(batch.group.unique()) < len(batch) else None
        if own is None:
            continue
        found = link_pull(row, batch.logp, batch, own, alpha(row, batch, kept(row, batch, own), D), own)
        assert torch.allclose(found, w_of(row, batch, batch.logp), atol=1e-12, rtol=1e-9), name


@each("name", [name for name in LINKS if name != "none"])
def test_a_links_slope_is_that_of_its_value(name: str) -> None:
    row = next(m for m in METHODS.values() if m.link == name)
    u = torch.linspace(-4, 4, 33, dtype=D, requires_grad=True)  # 0, ½ and 1 are among them
    (slope,) = torch.autograd.grad(LINKS[name].value(row, u).sum(), u)
    assert torch.allclose(slope, LINKS[name].slope(row, u.detach()), atol=1e-12, rtol=1e-9)


def test_far_margins_are_finite_in_float32() -> None:
    u = torch.tensor([-1e4, 1e4])
    for name in PREFERENCES:
        row = METHODS[name]
        assert bool(torch.isfinite(LINKS[row.link].value(row, u)).all()), name


def test_every_link_and_score_has_a_row() -> None:
    from creditscope.methods.dialects import DIALECTS

    rows = [*METHODS.values(), *DIALECTS.values()]
    assert {row.link for row in rows} == set(LINKS)
    assert {row.score for row in rows} == set(SCORES)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_of_pairs_by_hand() -> None:
    batch, logp = pair(margin=-10.0)
    credit = token_advantage(DPO, batch)
    found = pair_metrics(DPO, logp, batch, credit)
    assert found["pairs/count"] == 1
    assert found["pairs/margin"] == found["pairs/chosen_reward"] == pytest.approx(-1.0)
    assert found["pairs/rejected_reward"] == found["pairs/accuracy"] == 0
    assert found["pairs/chosen_logp"] == pytest.approx(-14.0)  # −2 twice, and −10
    assert pair_metrics(GRPO, logp, batch, credit) == {}
    moved = logp.clone()
    moved[0, 1] -= 3.0  # the chosen answer falls by 3 nats, the rejected stays
    assert pair_changes(DPO, logp, moved, batch, credit) == pytest.approx(
        {"pairs/chosen_change": -3.0, "pairs/rejected_change": 0.0, "pairs/chosen_fell": 1.0})


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_reference_that_is_not_there_is_named() -> None:
    batch, logp = pair()
    with pytest.raises(CreditscopeError, match="method 'dpo', which compares with a reference policy, needs ref_logp"):
        surrogate(DPO, logp, replace(batch, ref_logp=None))


def test_a_group_of_one_has_no_pair() -> None:
    with pytest.raises(CreditscopeError, match="method 'dpo' compares a rollout with its group, but group 7 has one"):
        advantage(DPO, torch.tensor([1.0]), torch.tensor([7]))


def test_credit_in_rewards_has_no_place_in_a_label() -> None:
    batch, _ = pair()
    with pytest.raises(CreditscopeError, match="labels its answers"):
        in_units(DPO, torch.ones(2, 1), batch)


@each("change, said", [
    ({"beta": 0.0}, "give β > 0"), ({"score": "none"}, "do not go together"), ({"ratio": "token"}, "a link takes"),
    ({"flip": 0.1}, "'robust' needs flip"), ({"anchor": "batch_mean"}, "cancels between the two answers"),
    ({"sft": -1.0}, "less likely"), ({"link": "logit"}, "link of method 'dpo'")])
def test_impossible_rows_are_refused_in_a_sentence(change: dict[str, object], said: str) -> None:
    with pytest.raises(CreditscopeError, match=said):
        DPO.replace(**change)
    with pytest.raises(CreditscopeError, match="do nothing with link='none'"):
        GRPO.replace(margin=1.0)


def test_the_mean_of_a_row_with_a_link_is_over_its_terms() -> None:
    # Not 1/B Σ_i 1/L_i Σ_t: a score has its own sum over tokens.
    assert axis_meaning(METHODS["kto"], "aggregate", "sequence_mean") == "1/B Σ_i"
    assert axis_meaning(METHODS["dpo"], "aggregate", "group_token_mean") == "1/P Σ_g"
    assert axis_meaning(METHODS["grpo"], "aggregate", "sequence_mean") == "1/B Σ_i 1/L_i Σ_t"
