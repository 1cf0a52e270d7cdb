"""Our advantages and losses as verl calls them, without verl: against verl's own numbers, and against `surrogate`."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import batches
from torch import Tensor
from verl_peer import CASES
from verl_table import method_of, verls

from creditscope import METHODS, Rollouts, effective_credit, surrogate
from creditscope.credit import ESTIMATORS, find_estimator
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.methods.table import PREFERENCES
from creditscope.plugins.verl.advantage import estimator_of, group_share, numbered, turns
from creditscope.plugins.verl.loss import DECIDED, MODES, policy_loss, refuse_settings, share
from creditscope.plugins.verl.table import BY_TOKENS, countable, refuse_credit, refuse_method
from each import each
from makers import make, moved

REFUSED = {"gtpo": "the tokens", **dict.fromkeys(PREFERENCES, "one term per pair")}
FED = [name for name, method in METHODS.items() if name not in REFUSED and method.baseline != "external"]
BY_NAME = {case.name: case for case in CASES}


# -- conformance: verl's own estimators and losses ---------------------------------------------------------------------


@pytest.mark.conformance
@each("name, batch", product([c.name for c in CASES if not (c.kl_loss or c.kl_reward)], batches()))
def test_our_loss_in_verls_place_gives_each_token_the_credit_that_verls_loss_gives(name: str, batch: str) -> None:
    case, here = BY_NAME[name], batches()[batch]
    advantages, w = verls(case, batch)
    rows = len(here["mask"]) if case.global_rows else int(here["mask"].any(dim=1).sum())
    # Where verl divides by its batch's rows, geo_mean counts the empty ones too.
    told = {"global_batch_size": len(here["mask"]) if case.loss == "geo_mean" else rows,
            "loss_scale_factor": case.actor.get("loss_scale_factor", here["mask"].shape[1])}
    leaf = here["logp"].clone().requires_grad_()
    loss, _ = policy_loss(method_of(case), here["old"], leaf, advantages, here["mask"], told)
    (slope,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(-slope, w, rtol=0, atol=case.tolerance * float(w.abs().max() or 1))


@pytest.mark.conformance
@each("name, batch", product(["verl_grpo", "verl_dr_grpo", "verl_rloo", "verl_opo", "verl_gpg"], batches()))
def test_our_advantages_in_verls_place_are_verls(name: str, batch: str) -> None:
    case, here = next(c for c in CASES if c.row == name and not c.label), batches()[batch]
    mine, returns = estimator_of("outcome", countable(method_of(case)))(
        token_level_rewards=at_the_end(here["reward"], here["mask"]), response_mask=here["mask"].long(),
        index=here["group"].numpy(), config=None)
    theirs, _ = verls(case, batch)
    torch.testing.assert_close(mine, theirs * here["mask"], rtol=0, atol=1e-12)
    assert torch.equal(mine, returns)


def at_the_end(reward: Tensor, mask: Tensor) -> Tensor:
    """verl's reward managers put a reward on the last token; of an empty answer, in the last column."""
    out = torch.zeros(mask.shape, dtype=reward.dtype)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1) - 1
    out[torch.arange(len(mask)), last] = reward
    return out


# -- identity: estimator and loss together are the row, however verl deals the rows out --------------------------------

GROUP = [0, 1, 0, 2, 1, 0, 2, 1, 0, 3, 3, 1]
REWARD = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.25, 1.0]  # group 2 is unanimous
LENGTHS = [5, 2, 7, 3, 1, 6, 4, 7, 2, 3, 5, 6]
PADDING = 4


def dealt(rollouts: Rollouts, logp: Tensor) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """(old, live, mask, uid) with verl's padding between the rows: it has an id of its own and no chosen token."""
    order = torch.tensor([0, 1, 12, 2, 3, 4, 13, 14, 5, 6, 7, 8, 9, 15, 10, 11])
    def wide(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(PADDING, x.shape[1])])[order]
    uid = [f"prompt-{g}" for g in GROUP] + ["pad77"] * PADDING
    return wide(rollouts.logp), wide(logp), wide(rollouts.mask), [uid[i] for i in order]


def in_pieces(method: Method, advantages: Tensor, old: Tensor, live: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, slope) as two ranks with uneven micro-batches make them: ranks average, micro-batches add up."""
    told = {"dp_size": 2, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask), "loss_scale_factor": 9}
    leaf = live.clone().requires_grad_()
    parts = [policy_loss(method, old[part], leaf[part], advantages[part], mask[part], told)[0]
             for part in (slice(0, 2), slice(2, 3), slice(3, 8), slice(8, 13), slice(13, 16))]
    total = sum(parts, torch.zeros((), dtype=torch.float64)) / 2
    return total.detach(), torch.autograd.grad(total, leaf)[0]


@pytest.mark.slow
@each("name, size", product(FED, (0.0, 0.4)))
def test_estimator_and_loss_of_a_row_are_its_surrogate_however_verl_deals_the_rows_out(name: str, size: float) -> None:
    method, rollouts = METHODS[name], make(REWARD, GROUP, LENGTHS)
    logp = moved(rollouts, size)
    row = method.replace(max_tokens=9) if method.aggregate == "constant" else method
    if method.has_loss_kl and method.aggregate != "token_mean":  # verl counts its padding where A cannot reach
        row = row.replace(beta=row.beta * len(rollouts) / (len(rollouts) + PADDING))
    old, live, mask, uid = dealt(rollouts, logp)
    reward = dict(zip(_real(uid), REWARD, strict=True))
    rewards = at_the_end(torch.tensor([reward.get(i, 0.0) for i in range(len(uid))], dtype=torch.float64), mask)
    estimate = estimator_of("outcome", method)
    advantages, _ = estimate(token_level_rewards=rewards, response_mask=mask, index=np.array(uid))
    loss, slope = in_pieces(method, advantages, old, live, mask)
    w = effective_credit(lambda x: surrogate(row, x, rollouts), logp)
    assert float(loss) == pytest.approx(-float(surrogate(row, logp, rollouts)), abs=1e-12)
    torch.testing.assert_close(-slope[_real(uid)], w, rtol=0, atol=1e-12)
    assert not slope[[i for i, name in enumerate(uid) if name.startswith("pad")]].any()
    assert w.any()


def _real(uid: list[str]) -> list[int]:
    return [i for i, name in enumerate(uid) if not name.startswith("pad")]


def test_advantages_carry_no_factor_where_the_loss_can_count_everything() -> None:
    rollouts = make(REWARD, GROUP, LENGTHS)
    credit = find_estimator("outcome")(METHODS["gspo"], rollouts, Tools())
    assert torch.equal(group_share(METHODS["gspo"], rollouts, credit, len(rollouts))[rollouts.mask],
                       torch.ones(sum(LENGTHS), dtype=torch.float64))


def test_dapos_advantages_carry_the_tokens_of_the_dead_groups() -> None:
    rollouts = make(REWARD, GROUP, LENGTHS)
    credit = find_estimator("outcome")(METHODS["dapo"], rollouts, Tools())
    factor = group_share(METHODS["dapo"], rollouts, credit, len(rollouts))
    # 51 tokens, of which the unanimous group 2 has 3 + 4: a mean over 44 is 51/44 times one over 51.
    assert factor[0, 0] == pytest.approx(51 / 44, rel=1e-15)
    assert not factor[3].any(), "and the dead group none"


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_micro_batch_counts_as_its_part_of_the_mini_batch_times_the_ranks() -> None:
    here = make([1.0, 0.0], [0, 0], [3, 5])
    # 8 of 40 tokens on one of 4 ranks: 4·8/40; 2 of 16 rows: 4·2/16; a plain sum: 4.
    told = {"dp_size": 4, "batch_num_tokens": 40, "global_batch_size": 16}
    assert share(countable(METHODS["dapo"]), here, told) == pytest.approx(0.8)
    assert share(countable(METHODS["gspo"]), here, told) == pytest.approx(0.5)
    assert share(METHODS["grpo"].but(name="sum", aggregate="token_sum"), here, told) == 4.0
    assert share(countable(METHODS["dapo"]), here, {}) == 1.0


def test_turns_are_runs_of_chosen_tokens_and_a_tools_answer_belongs_to_the_turn_before() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0]]).bool()
    rewards = torch.tensor([[0.0, 1, 2, 0, 0, 4], [8.0, 0, 0, 1, 0, 2], [0.0, 0, 3, 0, 0, 0]])
    step, paid = turns(rewards, mask)
    assert step.tolist() == [[0, 0, -1, -1, 1, 1], [-1, 0, -1, 1, -1, 2], [0, 0, 0, -1, -1, -1]]
    assert paid.tolist() == [[3, 4, 0], [8, 1, 2], [3, 0, 0]]


def test_turn_credit_leaves_out_what_earlier_turns_earned() -> None:
    # Two answers of two turns, rewards (1, 0) and (0, 1): to go (1, 0) and (1, 1), means (1, ½).
    mask = torch.tensor([[1, 0, 1], [1, 0, 1]])
    rewards = torch.tensor([[1.0, 0, 0], [0.0, 0, 1]], dtype=torch.float64)
    advantages, _ = estimator_of("turn_return")(token_level_rewards=rewards, response_mask=mask, index=["x", "x"],
                                             config={"creditscope_method": "p1_grpo"})
    assert advantages.tolist() == [[0, 0, -0.5], [0, 0, 0.5]]


def test_a_correction_of_the_sampler_multiplies_the_policy_term() -> None:
    rollouts = make([1.0, 0.0], [0, 0], [3, 4])
    logp, credit = moved(rollouts, 0.5), torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 4)
    weights = torch.tensor([[0.5], [2.0]], dtype=torch.float64).expand(2, 4)
    both, _ = policy_loss(METHODS["dapo"], rollouts.logp, logp, credit * weights, rollouts.mask, {})
    rows = [policy_loss(METHODS["dapo"], rollouts.logp[i:i + 1], logp[i:i + 1], credit[i:i + 1], rollouts.mask[i:i + 1],
                        {"batch_num_tokens": 7})[0] for i in (0, 1)]
    assert float(both) == pytest.approx(0.5 * float(rows[0]) + 2.0 * float(rows[1]), rel=1e-14)


def test_readings_are_shares_of_tokens_and_rows() -> None:
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [False] * 4])
    old = torch.zeros(3, 4, dtype=torch.float64)
    # Ratios: row 0 past the upper clip on its first token; row 1 has no credit.
    logp = torch.log(torch.tensor([[1.5, 1.0, 1.0, 1.0], [1.0] * 4, [1.0] * 4], dtype=torch.float64))
    credit = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64).expand(3, 4)
    _, said = policy_loss(METHODS["dapo"], old, logp, credit, mask, {})
    assert said == pytest.approx({"w/zero": 3 / 5, "w/stopped": 1 / 5, "w/positive": 2 / 5,
                                  "signal/silent_rows": 1 / 2})


def test_a_micro_batch_of_padding_has_loss_0_a_gradient_of_0_and_no_readings() -> None:
    leaf = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss, said = policy_loss(METHODS["gspo"], torch.zeros(2, 3), leaf, torch.zeros(2, 3), mask, {})
    loss.backward()
    assert loss.item() == 0
    assert leaf.grad is not None
    assert not leaf.grad.any()
    assert all(np.isnan(value) for value in said.values())
    assert set(said) == {"w/zero", "w/stopped", "w/positive", "signal/silent_rows"}


def test_uids_of_any_kind_become_numbers() -> None:
    assert numbered(np.array(["x", "y", "x"], dtype=object)).tolist() == [0, 1, 0]
    assert numbered(torch.tensor([7, 3, 7])).tolist() == [0, 1, 0]


def test_a_rollout_that_lost_its_siblings_gets_0() -> None:
    mask = torch.ones(3, 2)
    rewards = torch.tensor([[0.0, 1], [0.0, 0], [0.0, 1]], dtype=torch.float64)
    estimate = estimator_of("outcome", METHODS["grpo"])
    advantages, _ = estimate(token_level_rewards=rewards, response_mask=mask, index=list("aab"))
    assert not advantages[2].any()
    assert advantages[0, 0] > 0


# -- refusals ----------------------------------------------------------------------------------------------------------


def _ask(compute: Any, **changes: Any) -> Any:
    two = torch.tensor([[1.0], [0.0]])
    return compute(**({"token_level_rewards": two, "response_mask": torch.ones(2, 1), "index": ["a", "a"]} | changes))


@each("compute, changes, word", [
    (estimator_of("outcome", METHODS["ppo"]), {}, "algorithm.adv_estimator=gae"),
    (estimator_of("outcome", METHODS["gtpo"]), {}, "needs the tokens"),
    (estimator_of("outcome", METHODS["grpo"]), {"index": None}, "no uid"),
    (estimator_of("outcome", METHODS["grpo"]), {"index": ["a", "b"]}, "rollout.n to 2 or more"),
    (estimator_of("prefix_tree"), {}, "needs the tokens"),
    (estimator_of("monte_carlo"), {}, "a policy to sample from"),
    (estimator_of("outcome"), {"config": {"creditscope_method": "grop"}}, "did you mean 'grpo'"),
])
def test_what_verl_cannot_feed_is_refused_by_name(compute: Any, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CreditscopeError, match=word):
        _ask(compute, **changes)


def test_every_estimator_is_fed_or_refused() -> None:
    fed = {"outcome", "leave_one_out", "step_reward", "step_return", "turn_return"}
    for name in ESTIMATORS:
        if name in fed:
            assert _ask(estimator_of(name))[0].shape == (2, 1)
        else:
            with pytest.raises(CreditscopeError, match=f"credit '{name}' needs"):
                refuse_credit(name)
    assert set(BY_TOKENS) < set(ESTIMATORS)


def test_every_method_is_fed_or_refused() -> None:
    for name, method in METHODS.items():
        if name in REFUSED:
            with pytest.raises(CreditscopeError, match=REFUSED[name]):
                refuse_method(method)
        else:
            refuse_method(method)
        assert countable(method).aggregate in MODES


@each("name", sorted(DECIDED))
def test_a_setting_that_the_row_decides_is_refused(name: str) -> None:
    with pytest.raises(CreditscopeError, match=f"actor.{name}=0.123: the row of method 'dapo' decides"):
        refuse_settings(METHODS["dapo"], "token-mean", SimpleNamespace(**{name: 0.123}))


def test_loss_agg_mode_may_be_left_out_or_fit_the_row() -> None:
    refuse_settings(METHODS["gspo"], "token-mean", None)
    refuse_settings(METHODS["gspo"], "seq-mean-token-mean", None)
    with pytest.raises(CreditscopeError, match=r"loss_agg_mode='token-sum'.*seq-mean-token-mean"):
        refuse_settings(METHODS["gspo"], "token-sum", None)


def test_a_row_that_divides_by_l_max_wants_it_told() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(CreditscopeError, match="loss_scale_factor"):
        policy_loss(METHODS["dr_grpo"], ones, ones, ones, ones.bool(), {})


def test_ranks_without_a_global_count_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="batch_num_tokens"):
        share(countable(METHODS["dapo"]), make([1.0, 0.0], [0, 0], [1, 1]), {"dp_size": 2})
