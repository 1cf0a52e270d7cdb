"""Credit by entropy: a mask, and a shape that conserves the sum; TRL's own mask is in tests/conformance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.credit import find_estimator
from creditscope.credit.entropy_mask import entropy_mask, threshold
from creditscope.credit.entropy_shaping import LEAST, entropy_shaping
from creditscope.credit.tools import Tools
from creditscope.objective.advantages import token_advantage
from makers import make, random_batches

D = torch.float64
PLAIN = METHODS["p1_grpo"]


def test_the_mask_by_hand() -> None:
    # Entropies 0.1 … 0.5 on five tokens, 9 on padding. share 0.25: the 0.75 quantile is 0.4, place 3 of 0 … 4.
    batch = replace(make([1, 0], [0, 0], [3, 2]), entropy=torch.tensor([[.1, .5, .3], [.4, .2, 9.]], dtype=D))
    assert entropy_mask(PLAIN, batch, Tools(), share=0.25).tolist() == [[0, .5, 0], [-.5, 0, 0]]
    # share 0.4: place 0.6·4 = 2.4, so 0.3 + 0.4·0.1 = 0.34. Nothing changes.
    assert entropy_mask(PLAIN, batch, Tools(), share=0.4).tolist() == [[0, .5, 0], [-.5, 0, 0]]
    assert entropy_mask(PLAIN, batch, Tools(), share=0.5).tolist() == [[0, .5, .5], [-.5, 0, 0]]


@given(random_batches())
def test_a_share_of_one_is_the_outcome(batch: Rollouts) -> None:
    own = token_advantage(PLAIN, batch).expand_as(batch.mask).masked_fill(~batch.mask, 0.0)
    assert torch.equal(entropy_mask(PLAIN, batch, Tools(), share=1.0), own)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0.01, 1))
def test_the_threshold_is_torchs_quantile(values: list[float], share: float) -> None:
    given_values = torch.tensor(values, dtype=D)
    torch.testing.assert_close(threshold(given_values, share), given_values.quantile(1 - share), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_threshold_takes_more_values_than_torchs_quantile() -> None:
    many = torch.arange(2**24 + 5, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="too large"):
        many.quantile(0.5)
    assert float(threshold(many, 0.5)) == 2**23 + 2


def test_the_quantile_is_that_of_the_whole_batch() -> None:
    # The second group is the unsure one: all its tokens, and none of the first.
    batch = replace(make([1, 0, 1, 0], [0, 0, 1, 1], [2, 2, 2, 2]),
                    entropy=torch.tensor([[.1, .2], [.3, .4], [1., 2.], [3., 4.]], dtype=D))
    assert entropy_mask(PLAIN, batch, Tools(), share=0.5).tolist() == [[0, 0], [0, 0], [.5, .5], [-.5, -.5]]


@given(random_batches())
def test_padding_changes_neither_the_mask_nor_the_shape(batch: Rollouts) -> None:
    wider = {name: torch.nn.functional.pad(getattr(batch, name), (0, 3))
             for name in ("tokens", "mask", "logp", "ref_logp", "entropy")}
    for estimate in (entropy_mask, entropy_shaping):
        found = estimate(PLAIN, replace(batch, **wider), Tools())
        torch.testing.assert_close(found[:, :-3], estimate(PLAIN, batch, Tools()), rtol=0, atol=1e-14)
        assert not bool(found[:, -3:].any())


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(CreditscopeError, match=f"share of credit 'entropy_mask' must be .* in 0.001 .. 1, got {share}"):
        find_estimator(f"entropy_mask,share={share}")


# -- shaping -----------------------------------------------------------------------------------------------------------


def test_shaping_by_hand() -> None:
    # A = ½, ½, −½, −½. Position 0, positive: H = 1, 3, mean 2: factors ½ + ½·½ = ¾ and ½ + ½·3/2 = 5/4.
    #   Negative: 1/H = 2, 1, mean 3/2: factors ½ + ½·4/3 = 7/6 and ½ + ½·⅔ = 5/6.
    # Position 1: row 1 has ended, so row 0 is alone with its sign: factor 1. Negative: 1/H = 4, 4: 1 and 1.
    batch = replace(make([1, 1, 0, 0], [0] * 4, [2, 1, 2, 2]),
                    entropy=torch.tensor([[1., 5.], [3., 0.], [.5, .25], [1., .25]], dtype=D))
    expected = torch.tensor([[3 / 8, .5], [5 / 8, 0], [-7 / 12, -.5], [-5 / 12, -.5]], dtype=D)
    torch.testing.assert_close(entropy_shaping(PLAIN, batch, Tools()), expected, rtol=0, atol=1e-15)


def test_base_and_bonus_weigh_the_two_parts() -> None:
    # Position 0 of the example above with α₁ = 1, α₂ = 2: factors 1 + 2·½ = 2 and 1 + 2·3/2 = 4, times ½.
    batch = replace(make([1, 1, 0, 0], [0] * 4, [1, 1, 1, 1]), entropy=torch.tensor([[1.], [3.], [1.], [1.]], dtype=D))
    assert entropy_shaping(PLAIN, batch, Tools(), base=1.0, bonus=2.0).tolist() == [[1.], [2.], [-1.5], [-1.5]]


@given(random_batches(graded=False), st.floats(0, 1))
def test_with_weights_that_sum_to_one_each_sign_keeps_its_sum_at_every_position(batch: Rollouts, base: float) -> None:
    own = token_advantage(PLAIN, batch).expand_as(batch.mask).masked_fill(~batch.mask, 0.0)
    found = entropy_shaping(PLAIN, batch, Tools(), base=base, bonus=1 - base)
    for group in batch.group.unique():
        for sign in (own > 0, own < 0):
            here = sign & (batch.group == group)[:, None]
            torch.testing.assert_close((found * here).sum(dim=0), (own * here).sum(dim=0), rtol=0, atol=1e-12)


def test_a_sibling_without_advantage_is_of_neither_sign() -> None:
    # Rewards 1, ½, 0: the one in the middle has A = 0, so the last is alone with its sign, and its factor is 1.
    batch = replace(make([1, .5, 0], [0, 0, 0], [1, 1, 1]), entropy=torch.tensor([[1.], [.1], [2.]], dtype=D))
    assert entropy_shaping(PLAIN, batch, Tools()).tolist() == [[.5], [0.], [-.5]]


def test_a_token_that_the_policy_was_sure_of_has_a_bounded_weight() -> None:
    # 1/H = 1000 beside 1: mean 500.5, factors ½ + ½·1000/500.5 and ½ + ½/500.5.
    batch = replace(make([0, 0, 1], [0, 0, 0], [1, 1, 1]), entropy=torch.tensor([[0.], [1.], [1.]], dtype=D))
    assert LEAST == 1e-3
    found = entropy_shaping(PLAIN, batch, Tools())[:, 0].tolist()
    assert found == pytest.approx([-(.5 + 500 / 500.5) / 3, -(.5 + .5 / 500.5) / 3, 2 / 3], abs=1e-15)


def test_without_a_bonus_and_with_a_base_of_one_it_is_the_outcome() -> None:
    batch = make([1, 0, .5, 0], [0, 0, 1, 1], [3, 2, 1, 4])
    own = token_advantage(PLAIN, batch).expand_as(batch.mask).masked_fill(~batch.mask, 0.0)
    assert torch.equal(entropy_shaping(PLAIN, batch, Tools(), base=1.0, bonus=0.0), own)


@pytest.mark.parametrize(("base", "bonus"), [(-0.1, 0.5), (0.5, -0.1), (float("nan"), 0.5), (0.5, float("inf"))])
def test_weights_that_cannot_work_are_refused(base: float, bonus: float) -> None:
    with pytest.raises(CreditscopeError, match=r"(base|bonus) of credit 'entropy_shaping' must be a finite number"):
        find_estimator(f"entropy_shaping,base={base},bonus={bonus}")


@pytest.mark.parametrize("estimate", [entropy_mask, entropy_shaping])
def test_without_entropies_the_error_names_the_credit(estimate: object) -> None:
    batch = replace(make([1, 0], [0, 0], [1, 1]), entropy=None)
    with pytest.raises(CreditscopeError, match=f"credit '{estimate.__name__}' needs entropy"):  # type: ignore[attr-defined]
        estimate(PLAIN, batch, Tools())  # type: ignore[operator]
