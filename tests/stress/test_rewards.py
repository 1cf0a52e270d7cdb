"""Rewards and ratios at the ends of what floats can hold: credit stays right, or is refused in words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Method, Rollouts, advantage, effective_credit, surrogate
from creditscope.batch.groups import Groups, binary_unit, std
from creditscope.batch.metrics import assigned, signal, spread
from creditscope.credit.units import in_units
from creditscope.objective.advantages import standardised
from makers import make, moved

REWARD = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25], dtype=torch.float64)
GROUP, LENGTH = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([3, 4, 5, 2, 3, 1])
OWN = {name: method for name, method in METHODS.items() if method.baseline != "external"}
# Where the group's std, the batch's or whitening divides, and where a label stands, rewards have no unit left.
UNITLESS = {name: m for name, m in OWN.items() if m.scale in ("group_std", "batch_std", "group_mean")
            or m.whiten != "none" or m.labels}


def in_unit(method: Method, unit: float) -> Method:
    """The method with its ε in units of the reward: (c·r − c·b)/(c·σ + ε) = (r − b)/(σ + ε/c)."""
    return method.but(name=f"{method.name}_in_unit", std_eps=method.std_eps / unit,
                      whiten_eps=method.whiten_eps / unit**2)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [2.0**100, 2.0**60, 2.0**-60, 2.0**-100], ids=["1e30", "1e18", "1e-18", "1e-30"])
@pytest.mark.parametrize("name", sorted(name for name in OWN if OWN[name].scale != "beta_density"))
def test_rewards_of_any_size_have_the_advantages_of_ordinary_ones(name: str, unit: float) -> None:
    """Identity: A(c·r; ε) = A(r; ε/c), or c·A(r) where nothing divides. In float32 (1e30)² is ∞ and (1e-30)² is 0."""
    method = OWN[name]
    expected = advantage(in_unit(method, unit), REWARD, GROUP, LENGTH) * (1.0 if name in UNITLESS else unit)
    found = advantage(method, (REWARD * unit).float(), GROUP, LENGTH)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert bool(found.any())


def test_groups_of_very_different_size_do_not_silence_each_other() -> None:
    """By hand: rewards (c, 0) have std c/√2, so A = ±√½ for every c > 0."""
    reward = torch.tensor([1e30, 0, 1e-30, 0, 1, 0], dtype=torch.float32)
    found = advantage(METHODS["grpo"].but(name="g", std_eps=0.0), reward, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert found.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)] * 3, rel=1e-6)


def test_rewards_that_cannot_be_added_up_are_refused_with_their_size() -> None:
    """3e38 + 3e38 is ∞ in float32; the same rewards in float64 are no trouble."""
    reward, group = torch.tensor([3e38, 3e38, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(CreditscopeError, match=r"up to 3e\+38 are too large to be added up in torch.float32; divide"):
        advantage(METHODS["dr_grpo"], reward, group)
    assert advantage(METHODS["dr_grpo"], reward.double(), group).tolist() == pytest.approx([1.5e38] * 2 + [-1.5e38] * 2)


@pytest.mark.parametrize("ulps", [1, 4])
@pytest.mark.parametrize("size", [1e-30, 0.1, 1e30])
@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo", "reinforce_pp_baseline"])
def test_rewards_equal_up_to_rounding_are_no_signal_at_any_size(name: str, size: float, ulps: int) -> None:
    reward = torch.tensor([size] * 4)
    for _ in range(ulps):
        reward[1] = torch.nextafter(reward[1], torch.tensor(torch.inf))
    assert not bool(advantage(METHODS[name], reward, torch.zeros(4, dtype=torch.int64), torch.ones(4)).any())


@pytest.mark.parametrize("unit", [1e30, 1e-30])
def test_credit_by_token_is_scaled_as_the_outcomes_is_whatever_the_rewards_size(unit: float) -> None:
    """Identity: (r − mean)·1 through `in_units` is the method's own advantage, as for ordinary rewards."""
    rollouts = make([unit, 0.0, unit, 0.0], [0, 0, 1, 1], [3, 2, 4, 1], dtype=torch.float32)
    method = METHODS["grpo"].but(name="g", std_eps=0.0)
    centred = rollouts.reward - Groups(rollouts.group).mean(rollouts.reward)
    found = in_units(method, centred[:, None], rollouts)[:, 0]
    assert torch.allclose(found, advantage(method, rollouts.reward, rollouts.group), rtol=1e-6)
    assert found[0].item() == pytest.approx(math.sqrt(0.5), rel=1e-6)


def test_whitening_large_and_small_values_by_hand() -> None:
    """(c, −c) with sample variance 2c²: ±√½ without ε; beside ε = 1e-8 a value of 1e-30 stands at 1e-30/1e-4."""
    weight = torch.ones(2)
    for c in (1e30, 1e-30, 3e38):
        assert standardised(torch.tensor([c, -c]), weight, 0.0)[0].item() == pytest.approx(math.sqrt(0.5))
    assert standardised(torch.tensor([1e30, -1e30]), weight, 1e-8)[0].item() == pytest.approx(math.sqrt(0.5))
    assert standardised(torch.tensor([1e-30, -1e-30]), weight, 1e-8)[0].item() == pytest.approx(1e-26, rel=1e-6)


def test_the_readings_of_a_batch_follow_its_unit() -> None:
    """Identity: means and stds scale with the reward, shares of credit do not move."""
    plain = make([1.0, 0.0, 0.5, 0.0], [0, 0, 1, 1], [3, 2, 4, 1], dtype=torch.float32)
    for unit in (2.0**100, 2.0**-100):
        scaled = replace(plain, reward=plain.reward * unit)
        one, other = signal(plain), signal(scaled)
        for name in one:
            factor = unit if name in ("reward/mean", "reward/std", "reward/min", "reward/max") else 1.0
            assert other[name] == one[name] * factor, name
        w = moved(plain)
        assert spread(w * 2.0**120, plain.mask) == spread(w, plain.mask)
        within = assigned(w, plain)["credit/within"]
        assert assigned(w * unit, plain)["credit/within"] == pytest.approx(within, rel=1e-12)


def test_a_unit_is_a_power_of_two_and_ordinary_numbers_come_out_bit_by_bit() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3.7
    unit = binary_unit(values.abs().amax())
    assert math.log2(float(unit)).is_integer()
    assert torch.equal(values / unit * unit, values)
    assert torch.equal(std(values, 1), values.std())
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    for end in (0.0, tiny / 4, tiny, huge, math.inf):
        assert 0 < float(binary_unit(torch.tensor(end))) < math.inf


# -- ratios, log-probs and masks ---------------------------------------------------------------------------------------


def weights_of(name: str, logp: Tensor, rollouts: Rollouts) -> Tensor:
    return effective_credit(lambda lp: surrogate(METHODS[name], lp, rollouts), logp)


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_certain_policy_has_finite_credit_equal_to_the_float64_one(name: str) -> None:
    """log π = 0 and entropy 0 exactly, for sampler and policy: every ratio is 1."""
    rollouts = make([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [3, 2, 4, 1], dtype=torch.float32)
    zero = torch.zeros_like(rollouts.logp)
    certain = replace(rollouts, logp=zero, ref_logp=zero, entropy=zero)
    found = weights_of(name, zero, certain)
    wide = replace(certain, logp=zero.double(), ref_logp=zero.double(), entropy=zero.double(),
                   reward=certain.reward.double())
    assert torch.allclose(found.double(), weights_of(name, zero.double(), wide), rtol=1e-5, atol=1e-7)
    assert bool(torch.isfinite(found).all())


@pytest.mark.slow
@pytest.mark.parametrize("gap", [90.0, 800.0, 1e30])
@pytest.mark.parametrize("name", sorted(OWN))
def test_ratios_beyond_exp_leave_no_nan_and_no_credit_on_good_tokens_past_a_clip(name: str, gap: float) -> None:
    """log ρ = ±gap: exp(90) is ∞ in float32, exp(800) in float64."""
    for dtype in (torch.float32, torch.float64):
        rollouts = make([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [3, 2, 4, 1], dtype=dtype)
        # Up in the first group and down in the second; the reference stays where the sampler was.
        way = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=dtype)[:, None]
        rollouts = replace(rollouts, ref_logp=rollouts.logp)
        w = weights_of(name, rollouts.logp + gap * way * rollouts.mask, rollouts)
        assert bool(torch.isfinite(w).all())
        if METHODS[name].bound == "clip" and METHODS[name].clip_high is not None and not METHODS[name].has_loss_kl:
            assert not bool(w[0].any()), "a good answer past its bound is not pushed further"


def test_an_empty_answer_and_an_answer_of_others_have_no_credit_and_spoil_nothing() -> None:
    """One completion empty, one of a single token, one whose every token was written by others."""
    rollouts = make([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0], [4, 0, 1, 3], dtype=torch.float64)
    mask = rollouts.mask.clone()
    mask[3] = False
    rollouts = replace(rollouts, mask=mask)
    for name in sorted(OWN):
        w = weights_of(name, rollouts.logp, rollouts)
        assert bool(torch.isfinite(w).all())
        assert not bool(w[1].any())
        assert not bool(w[3].any())
    assert signal(rollouts)["length/empty"] == 2
    with pytest.raises(CreditscopeError, match="False everywhere"):
        replace(rollouts, mask=torch.zeros_like(mask))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OWN))
def test_a_completion_of_8192_tokens_has_the_credit_of_its_float64_twin(name: str) -> None:
    rollouts = make([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [8192, 5000, 1, 8000], dtype=torch.float64)
    small = replace(rollouts, **{field: getattr(rollouts, field).float()
                                 for field in ("logp", "reward", "ref_logp", "entropy")})
    logp = moved(rollouts, 0.001)
    found, twin = weights_of(name, logp.float(), small), weights_of(name, logp, rollouts)
    # A token within rounding of its clip may fall on either side: at most a handful of 21,193.
    off = (found.double() - twin).abs() > 1e-3 * twin.abs().max()
    assert int(off.sum()) <= 4
    assert bool(torch.isfinite(found).all())
