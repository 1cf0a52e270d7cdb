"""Rollouts refuse what cannot be right, and name the row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from creditscope import CreditscopeError, Rollouts
from each import each
from makers import make


def test_groups_of_unequal_size_of_one_and_empty_completions_are_allowed() -> None:
    batch = make([1, 0, 1, 0], group=[3, 3, 3, 8], lengths=[2, 0, 1, 3])
    assert batch.lengths.tolist() == [2, 0, 1, 3]
    assert len(batch) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_row(value: float) -> None:
    with pytest.raises(CreditscopeError, match=r"Rollouts\.reward must be finite: row 1 is"):
        make([1, value, 0], group=[0, 0, 0], lengths=[1, 1, 1])


@pytest.mark.parametrize("name", ["logp", "ref_logp", "entropy"])
def test_a_log_prob_that_is_not_finite_is_refused_with_its_row_and_column(name: str) -> None:
    batch = make([1, 0], group=[0, 0], lengths=[2, 3])
    spoilt = getattr(batch, name).clone()
    spoilt[1, 2] = float("nan")
    with pytest.raises(CreditscopeError, match=rf"Rollouts\.{name} must be finite: row 1, column 2 is nan"):
        replace(batch, **{name: spoilt})


@pytest.mark.parametrize(("name", "value", "message"), [
    ("logp", 0.5, r"row 1, column 2 is 0\.5"), ("ref_logp", 0.5, "a log-probability is at most 0"),
    ("entropy", -0.5, "an entropy is at least 0"), ("collision", 1.5, "Σ π² lies between 0 and 1"),
    ("tokens", -1, "ids, counted from 0"),
])
def test_a_number_that_no_policy_has_is_refused_with_its_row_and_column(name: str, value: float, message: str) -> None:
    batch = make([1, 0], group=[0, 0], lengths=[2, 3])
    given = batch.entropy if name == "collision" else getattr(batch, name)
    spoilt = given.clone().clamp(max=1.0) if name == "collision" else given.clone()
    spoilt[1, 2] = value
    with pytest.raises(CreditscopeError, match=rf"Rollouts\.{name} must be .*{message}"):
        replace(batch, **{name: spoilt})
    spoilt[1, 2] = 0
    assert replace(batch, **{name: spoilt})


def test_a_log_prob_above_0_by_rounding_is_kept() -> None:
    batch = make([1, 0], group=[0, 0], lengths=[2, 3])
    assert replace(batch, logp=torch.full_like(batch.logp, 1e-5)).logp[0, 0] == pytest.approx(1e-5)


def test_what_stands_on_padding_is_blanked_not_refused() -> None:
    batch = make([1, 0], group=[0, 0], lengths=[1, 3])
    logp = batch.logp.clone()
    logp[0, 2] = float("-inf")  # engines write −inf there
    assert replace(batch, logp=logp).logp[0, 2] == 0


@each(("field", "value", "message"), [
    ("tokens", torch.zeros(2, 3), r"tokens must be int64, got torch\.float32; convert it with tokens\.long\(\)"),
    ("mask", torch.ones(2, 3, dtype=torch.int64), r"mask must be bool.*mask\.bool\(\)"),
    ("mask", torch.ones(2, 2, dtype=torch.bool), r"mask must have shape \(2, 3\).*got \(2, 2\)"),
    ("reward", torch.zeros(2, 1), r"reward must have shape \(2,\)"),
    ("reward", torch.zeros(2, dtype=torch.int64), r"reward must be float"),
    ("group", torch.zeros(3, dtype=torch.int64), r"group must have shape \(2,\)"),
    ("logp", [[0.0]], r"logp must be a float tensor, got list"),
    ("prompt", ["only one"], r"prompt must have one entry per row \(2\)"),
    ("step_reward", torch.zeros(2, 1), r"step_reward was given without Rollouts\.step"),
])
def test_wrong_shapes_and_kinds_name_the_field_and_the_repair(field: str, value: object, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        replace(make([1, 0], group=[0, 0], lengths=[2, 3]), **{field: value})


def test_a_batch_in_which_nothing_was_chosen_is_refused() -> None:
    with pytest.raises(CreditscopeError, match="mask is False everywhere: in none of the 2 rows"):
        make([1, 0], group=[0, 0], lengths=[0, 0], width=3)


def test_no_rows_at_all_is_refused() -> None:
    empty = torch.zeros(0, 3)
    with pytest.raises(CreditscopeError, match="at least one row"):
        Rollouts(tokens=empty.long(), mask=empty.bool(), logp=empty, reward=torch.zeros(0), group=torch.zeros(0).long())


def test_a_step_beyond_the_step_rewards_is_refused() -> None:
    step = torch.tensor([[0, 1, -1], [0, 0, 2]])
    with pytest.raises(CreditscopeError, match=r"row 1, column 2 is 2"):
        replace(make([1, 0], group=[0, 0], lengths=[2, 3]), step=step, step_reward=torch.zeros(2, 2))


def test_cat_pads_to_the_widest_part_and_rows_takes_it_apart_again() -> None:
    left, right = make([1, 0], group=[0, 0], lengths=[2, 1]), make([0.5], group=[1], lengths=[4])
    both = Rollouts.cat([left, right])
    assert both.tokens.shape == (3, 4)
    assert torch.equal(both.rows(both.group == 0).trim().logp, left.logp)
    assert torch.equal(both.rows(torch.tensor([2])).logp, right.logp)


def test_cat_refuses_parts_with_different_fields() -> None:
    part = make([1.0], group=[0], lengths=[2])
    with pytest.raises(CreditscopeError, match="some parts have 'ref_logp'"):
        Rollouts.cat([part, replace(part, ref_logp=None)])
