"""Exact claims about the optimiser: as stated, by hand, and refuted by something wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from creditscope.exact import p2_optimizer
from creditscope.exact.p2_optimizer import CONDITIONS, PRINTED, SIZES, Condition
from creditscope.exact.p2_prefix import TabularPolicy, tabular_policy
from creditscope.optimizer.carry import carry, carry_limit
from creditscope.optimizer.scale import PHIS, sweep
from each import each
from exact.makers_exact import said


@pytest.fixture(scope="module")
def world() -> TabularPolicy:
    return tabular_policy()


# -- P2.3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_condition_is_as_it_is_said_to_be() -> None:
    found = p2_optimizer.blind_to_scale()
    assert [v.subject for v in found] == [*(c.name for c in CONDITIONS), "tabular policy"]
    assert [v.outcome for v in found] == ["holds"] * len(found)


@pytest.mark.slow
@each("condition", CONDITIONS)
def test_the_opposite_of_every_condition_is_refuted(condition: Condition, world: TabularPolicy) -> None:
    opposite = replace(condition, says="broken" if condition.says == "blind" else "blind")
    assert p2_optimizer._judged(world, opposite).outcome == "refuted"


def test_sgd_follows_the_scale_and_adamw_does_not_by_hand(world: TabularPolicy) -> None:
    # One step: SGD moves by φ·lr·g; AdamW by lr·g/(|g| + ε/φ), which is ±lr.
    sgd, adamw = CONDITIONS[-2], CONDITIONS[0]
    reward, rest = p2_optimizer._parts(world, world.logits, 1.0, 0.0, 0)
    seen = [(world.logits, reward, rest)]
    assert torch.allclose(p2_optimizer._fed(sgd, seen, 10.0), -10 * 1e-5 * reward, rtol=1e-9, atol=1e-15)
    assert torch.allclose(p2_optimizer._fed(adamw, seen, 10.0), -1e-2 * reward.sign(), rtol=1e-5)


def test_the_rewards_part_of_the_gradient_is_linear_and_the_rest_does_not_see_it(world: TabularPolicy) -> None:
    (one, rest), (ten, same) = (p2_optimizer._parts(world, world.logits, phi, 10.0, 1) for phi in (1.0, 10.0))
    assert torch.allclose(ten, 10 * one, rtol=1e-12)
    assert torch.equal(rest, same)
    assert float(rest.norm()) > 0.01


def test_the_norms_of_the_five_steps_lie_on_both_sides_of_the_clip(world: TabularPolicy) -> None:
    (condition,) = [c for c in CONDITIONS if c.clip < math.inf]
    norms = [float(p2_optimizer._parts(world, world.logits, 1.0, 0.0, step)[0].norm()) for step in range(len(SIZES))]
    assert min(norms) < condition.clip < max(norms)


def test_the_limit_is_reached_for_several_phi_and_not_for_all() -> None:
    blind = said(p2_optimizer.blind_to_scale(conditions=CONDITIONS[:1]), CONDITIONS[0].name)
    assert blind.n is not None
    assert 3 <= blind.n < len(PHIS) - 1


def test_a_prediction_that_is_off_by_a_millionth_refutes_the_replay() -> None:
    def off(*given: Any) -> Any:
        found = sweep(*given)
        return replace(found, change=found.change + 1e-6)

    assert p2_optimizer.blind_to_scale(conditions=CONDITIONS[:1], predict=off)[-1].outcome == "refuted"


def test_a_replay_that_forgets_the_rest_is_refuted() -> None:
    def forgetful(optimizer: Any, named: Any, phis: Any, since: str, parts: Any) -> Any:
        return sweep(optimizer, named, phis, since)

    kl, plain = CONDITIONS[3], CONDITIONS[0]
    assert p2_optimizer.blind_to_scale(conditions=[plain], predict=forgetful)[-1].outcome == "holds"
    assert p2_optimizer.blind_to_scale(conditions=[kl], predict=forgetful)[-1].outcome == "refuted"


@pytest.mark.parametrize("number", [0, 1, 3, 4, 6])
def test_the_replay_agrees_condition_by_condition(number: int, world: TabularPolicy) -> None:
    found = p2_optimizer._replayed(world, [CONDITIONS[number]], sweep)
    assert (found.outcome, found.n) == ("holds", len(PHIS))


# -- P2.4 -------------------------------------------------------------------------------------------------------------


def test_adamw_has_the_printed_carry() -> None:
    found = p2_optimizer.overshoot()
    assert [v.outcome for v in found] == ["holds"] * 5
    assert [v.expected for v in found[:4]] == ["0.6786", "0.9047", "0.6763", "0.923"]
    assert found[3].observed == pytest.approx(carry_limit(0, (0.9, 0.95)), abs=1e-9)


def test_the_carry_of_a_real_adamw_after_one_gradient_by_hand() -> None:
    # β = (½, ¾): m̂₂ = ¼/¾ = 1/3, v̂₂ = (3/16)/(7/16) = 3/7, so Δ = (1/3)/√(3/7).
    assert p2_optimizer.carried(2, (0.5, 0.75), 0) == pytest.approx([1 / 3 / math.sqrt(3 / 7)], abs=1e-12)


@pytest.mark.parametrize("case", PRINTED)
def test_a_printed_value_that_is_off_in_its_last_digit_is_refuted(case: tuple[int, int]) -> None:
    value, digits = PRINTED[case]
    found = p2_optimizer.overshoot(printed={case: (value + 10.0**-digits, digits)})
    assert [v.outcome for v in found] == ["refuted", "holds"]


@pytest.mark.parametrize("wrong", [
    lambda step, lag, betas: carry(step, lag + 1, betas),
    lambda step, lag, betas: carry(step + 1, lag, betas),
    lambda step, lag, betas: carry_limit(lag, betas),
], ids=["a step late", "a step early", "the limit"])
def test_another_closed_form_is_refuted(wrong: Any) -> None:
    assert p2_optimizer.overshoot(closed_form=wrong)[-1].outcome == "refuted"


@pytest.mark.slow
def test_every_verdict_says_its_number_in_one_sentence() -> None:
    for verdict in p2_optimizer.overshoot():
        assert any(c.isdigit() for c in verdict.reason)
        assert not verdict.reason.endswith(".")
        assert verdict.threshold
        assert verdict.n
