"""The surrogate: w derived by hand for every choice on every axis, and the identities between rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Method, Record, Rollouts, advantage, effective_credit, surrogate
from creditscope.methods.table import GRPO
from creditscope.objective.weights import conflict_weight
from each import each
from makers import make, moved, random_batches

D = torch.float64
ALL = sorted(set(METHODS) - {"ppo"})
CENTRED = sorted(name for name in ALL if METHODS[name].centred)


def w_of(method: Method, rollouts: Rollouts, logp: Tensor | None = None, credit: Tensor | None = None) -> Tensor:
    return effective_credit(lambda lp: surrogate(method, lp, rollouts, credit), rollouts.logp if logp is None else logp)


def one_token(reward: list[float], log_ratio: list[float]) -> tuple[Rollouts, Tensor]:
    """One group of one-token answers whose policy has moved by `log_ratio`."""
    batch = make(reward, group=[0] * len(reward), lengths=[1] * len(reward))
    return batch, batch.logp + torch.tensor(log_ratio, dtype=D)[:, None]


# -- aggregates, by hand: r = (1, 0), L = (1, 3), A = ±½, ratio 1, so w_it = α_i·A_i -------------------------------


@pytest.mark.parametrize(("aggregate", "first", "second"), [
    ("sequence_mean", 1 / 4, -1 / 12),  # 1/(2·1)·½ and 1/(2·3)·½
    ("sequence_sum", 1 / 4, -1 / 4),    # 1/2·½
    ("token_mean", 1 / 8, -1 / 8),      # 1/4·½
    ("group_token_mean", 1 / 8, -1 / 8),  # one group: the same
    ("constant", 1 / 12, -1 / 12),      # 1/(2·3)·½, the batch being 3 wide
    ("token_sum", 1 / 2, -1 / 2),
])
def test_each_aggregate_by_hand(aggregate: str, first: float, second: float) -> None:
    row = METHODS["p1_grpo"].but(name="x", aggregate=aggregate)
    w = w_of(row, make([1, 0], group=[0, 0], lengths=[1, 3]))
    assert torch.allclose(w, torch.tensor([[first, 0, 0], [second] * 3], dtype=D), atol=1e-15)


def test_the_constant_aggregate_divides_by_max_tokens_where_it_is_given() -> None:
    row = METHODS["dr_grpo"].but(name="x", max_tokens=10)
    assert w_of(row, make([1, 0], group=[0, 0], lengths=[1, 3]))[0, 0].item() == pytest.approx(.5 / 20)


# -- bounds, by hand: two one-token answers, A = (½, −½), B = 2, so w = ±¼·(slope of the bound) ---------------------


def test_the_clip_stops_a_good_token_above_and_a_bad_token_below() -> None:
    row = GRPO.but(name="x", scale="none")
    above, below = math.log(1.3), math.log(0.7)
    cases = {(above, 0.0): (0, -.25), (below, 0.0): (.25 * .7, -.25),  # good: stopped above 1.2, free below
             (0.0, above): (.25, -.25 * 1.3), (0.0, below): (.25, 0)}  # bad: free above, stopped below 0.8
    for moves, expected in cases.items():
        batch, logp = one_token([1, 0], list(moves))
        assert torch.allclose(w_of(row, batch, logp).squeeze(), torch.tensor(expected, dtype=D), atol=1e-12), moves


def test_the_two_sides_of_the_clip_are_not_interchangeable() -> None:
    row = GRPO.but(name="x", scale="none", clip_low=0.1, clip_high=0.5)
    batch, logp = one_token([1, 0], [math.log(1.4), math.log(0.8)])
    # 1.4 < 1.5 still learns, 0.8 < 0.9 is stopped.
    assert torch.allclose(w_of(row, batch, logp).squeeze(), torch.tensor([.25 * 1.4, 0], dtype=D), atol=1e-12)


def test_the_dual_clip_stops_a_bad_token_that_grew_beyond_c() -> None:
    row = GRPO.but(name="x", scale="none", dual_clip=3.0)
    batch, logp = one_token([1, 0], [0.0, math.log(4.0)])
    assert w_of(row, batch, logp)[1, 0] == 0
    assert w_of(GRPO.but(name="y", scale="none"), batch, logp)[1, 0].item() == pytest.approx(-1.0)  # −¼·4


def test_stop_gradient_weighs_by_the_clipped_ratio_and_never_stops() -> None:
    row = METHODS["cispo"].but(name="x", scale="none")
    batch, logp = one_token([1, 0], [math.log(2.0), math.log(0.5)])
    # B tokens = 2: ¼·min(2, 1.28) and −¼·0.5, no floor.
    assert torch.allclose(w_of(row, batch, logp).squeeze(), torch.tensor([.25 * 1.28, -.125], dtype=D), atol=1e-12)


def test_the_soft_gate_by_hand() -> None:
    row = METHODS["sapo"].but(name="x", scale="none")
    batch, logp = one_token([1, 0], [math.log(2.0), math.log(2.0)])

    def slope(tau: float) -> float:  # d/dlogρ of 4/τ·σ(τ(ρ−1)) = 4·σ(1−σ)·ρ
        sigma = 1 / (1 + math.exp(-tau))
        return 4 * sigma * (1 - sigma) * 2

    expected = torch.tensor([.25 * slope(1.0), -.25 * slope(1.05)], dtype=D)
    assert torch.allclose(w_of(row, batch, logp).squeeze(), expected, atol=1e-12)


def test_the_sequence_ratio_is_the_geometric_mean_and_its_clip_stops_the_whole_answer() -> None:
    row = METHODS["gspo"].but(name="x", scale="none", clip_low=0.2, clip_high=0.2)
    batch = make([1, 0], group=[0, 0], lengths=[2, 2])
    logp = batch.logp + torch.tensor([[.4, .2], [.2, .0]], dtype=D)
    # s_1 = e^0.3 > 1.2 with A > 0: stopped. s_2 = e^0.1: w = 1/B · A · s · 1/L = ½·(−½)·e^0.1·½.
    assert torch.allclose(w_of(row, batch, logp)[0], torch.zeros(2, dtype=D))
    assert torch.allclose(w_of(row, batch, logp)[1], torch.full((2,), -math.exp(.1) / 8, dtype=D), atol=1e-12)


def test_gspo_token_has_gspos_credit_while_credit_is_uniform() -> None:
    batch = make([1, 0, 0, 1], group=[0] * 4, lengths=[2, 3, 1, 4])
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    logp = moved(batch, 0.3)
    sequence = w_of(METHODS["gspo"].but(name="x", **wide), batch, logp)
    token = w_of(METHODS["gspo_token"].but(name="y", **wide), batch, logp)
    assert torch.allclose(sequence, token, atol=1e-12)


def test_the_product_ratio_weighs_every_token_by_the_whole_answer() -> None:
    row = METHODS["gcpo"].but(name="x", scale="none", clip_low=None, clip_high=9.0)
    batch = make([1, 0], group=[0, 0], lengths=[2, 1])
    logp = batch.logp + torch.tensor([[.3, .2], [.1, .0]], dtype=D)
    # w = 1/B·A·Πρ for each token: ¼·e^0.5 and −¼·e^0.1.
    expected = torch.tensor([[math.exp(.5) / 4] * 2, [-math.exp(.1) / 4, 0]], dtype=D)
    assert torch.allclose(w_of(row, batch, logp), expected, atol=1e-12)


def test_clipping_inside_the_mean_stops_single_tokens() -> None:
    row = METHODS["gmpo"].but(name="x", scale="none")
    batch = make([1, 0], group=[0, 0], lengths=[2, 2])
    logp = batch.logp + torch.tensor([[.6, .2], [-.6, -.2]], dtype=D)
    # Good answer: mean of (0.4, 0.2) = 0.3; first token stopped, second: ½·½·e^0.3·½. Bad answer: mirror image.
    expected = torch.tensor([[0, math.exp(.3) / 8], [0, -math.exp(-.3) / 8]], dtype=D)
    assert torch.allclose(w_of(row, batch, logp), expected, atol=1e-12)


def test_the_gamma_weight_by_hand() -> None:
    row = METHODS["vespo"].but(name="x", scale="none")
    batch, logp = one_token([1, 0], [math.log(1.5), math.log(1.5)])
    # φ₊ = 1.5²·e^{3(1−1.5)}, φ₋ = 1.5³·e^{2(1−1.5)}; token mean over two.
    expected = torch.tensor([.25 * 1.5**2 * math.exp(-1.5), -.25 * 1.5**3 * math.exp(-1.0)], dtype=D)
    assert torch.allclose(w_of(row, batch, logp).squeeze(), expected, atol=1e-12)


# -- trust regions -------------------------------------------------------------------------------------------------


def test_the_off_policy_mask_drops_bad_answers_that_the_policy_has_left() -> None:
    row = METHODS["grpo_v32"].but(name="x", clip_low=None, clip_high=9.0)
    batch, logp = one_token([1, 0, 0], [-.7, -.7, -.3])
    w = w_of(row, batch, logp).squeeze()
    # A = (⅔, −⅓, −⅓), threshold 0.5: the good one stays, the second is dropped, the third stays. α = ⅓.
    expected = torch.tensor([2 / 9 * math.exp(-.7), 0, -1 / 9 * math.exp(-.3)], dtype=D)
    assert torch.allclose(w, expected, atol=1e-12)


def test_the_tv_mask_drops_tokens_that_moved_too_far_the_way_their_credit_points() -> None:
    batch = replace(make([1, 0], group=[0, 0], lengths=[2, 2]), logp=torch.full((2, 2), math.log(.5), dtype=D))
    logp = torch.tensor([[.7, .6], [.3, .7]], dtype=D).log()
    w = w_of(METHODS["dppo"], batch, logp)
    # δ = 0.15: +0.2 with A > 0 drops, +0.1 stays; −0.2 with A < 0 drops, +0.2 with A < 0 stays. 1/B·½·ρ.
    expected = torch.tensor([[0, .25 * 1.2], [0, -.25 * 1.4]], dtype=D)
    assert torch.allclose(w, expected, atol=1e-12)


def test_the_kl_mask_by_hand() -> None:
    batch = replace(make([1, 0], group=[0, 0], lengths=[2, 2]), logp=torch.full((2, 2), math.log(.5), dtype=D))
    logp = torch.tensor([[.7, .6], [.3, .7]], dtype=D).log()
    # KL(½‖.7) = ½ln(.5/.7) + ½ln(.5/.3) = 0.0872 > 0.05 drops; KL(½‖.6) = 0.0204 stays.
    w = w_of(METHODS["dppo_kl"], batch, logp)
    assert (w[0, 0], w[1, 0]) == (0, 0)
    assert w[0, 1] > 0 > w[1, 1]


# -- penalties: gradients of the estimators at log(π/π_ref) = d -------------------------------------------------------


@pytest.mark.parametrize(("kl", "slope"), [
    ("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d))])
def test_the_kl_term_pulls_by_its_own_slope(kl: str, slope: object) -> None:
    batch = replace(make([1, 1], group=[0, 0], lengths=[1, 1]), logp=torch.full((2, 1), -1.0, dtype=D),
                    ref_logp=torch.tensor([[-1.3], [-.6]], dtype=D))
    w = w_of(GRPO.but(name="x", kl=kl, beta=0.1), batch)  # unanimous: only the KL acts; α = ½
    expected = torch.tensor([[-.05 * slope(.3)], [-.05 * slope(-.4)]], dtype=D)  # type: ignore[operator]
    assert torch.allclose(w, expected, atol=1e-12)


def test_kl_times_the_live_ratio_adds_the_ratios_own_gradient() -> None:
    batch = replace(make([1, 1], group=[0, 0], lengths=[1, 1]), logp=torch.full((2, 1), -1.0, dtype=D),
                    ref_logp=torch.full((2, 1), -1.3, dtype=D))
    w = w_of(GRPO.but(name="x", kl_weight="ratio", beta=0.1), batch)
    # d/dlogπ of ρ·K3 at ρ = 1: K3 + K3′ = (e^{−.3} + .3 − 1) + (1 − e^{−.3}) = 0.3. Unbiased: the true KL gradient.
    assert torch.allclose(w, torch.full((2, 1), -.05 * .3, dtype=D), atol=1e-12)


def test_kimis_penalty_pulls_the_whole_answer_back_by_its_log_ratio() -> None:
    row = METHODS["kimi"].but(name="x", beta=0.5)
    batch = make([1, 0], group=[0, 0], lengths=[2, 1])
    logp = batch.logp + torch.tensor([[.3, .1], [.0, .0]], dtype=D)
    # w = 1/B·(A − τ·Σ log ρ): ½·(½ − 0.5·0.4) and ½·(−½).
    assert torch.allclose(w_of(row, batch, logp), torch.tensor([[.15, .15], [-.25, 0]], dtype=D), atol=1e-12)


# -- filters and denominators ------------------------------------------------------------------------------------------


def test_dapo_drops_unanimous_groups_from_the_denominator_too() -> None:
    batch = make([1, 0, 1, 1], group=[0, 0, 1, 1], lengths=[1, 1, 5, 5])
    w = w_of(METHODS["dapo"].but(name="x", scale="none"), batch)
    assert w[0, 0].item() == pytest.approx(.5 / 2)  # two tokens kept
    diluted = w_of(METHODS["dapo"].but(name="y", scale="none", keep="all", denominator="all"), batch)
    assert diluted[0, 0].item() == pytest.approx(.5 / 12)  # dead groups dilute


def test_cppo_keeps_g_in_the_denominator_and_its_top_k_form_does_not() -> None:
    batch = make([1, 0, 0, 0], group=[0] * 4, lengths=[1] * 4)
    # A = (1.5, −.5, −.5, −.5); γ = 0.5 keeps the first alone.
    assert torch.allclose(w_of(METHODS["cppo"], batch).squeeze(), torch.tensor([1.5 / 4, 0, 0, 0], dtype=D))
    # Top half: the first and, of the ties, the earliest.
    topk = w_of(METHODS["cppo_topk"], batch).squeeze()
    assert torch.allclose(topk, torch.tensor([1.5 / 2, -.25, 0, 0], dtype=D))


def test_top_advantage_ranks_inside_each_group() -> None:
    batch = make([1, 0, 0, 0, .5, .4, .5, .5], group=[7] * 4 + [2] * 4, lengths=[1] * 8)
    kept = w_of(METHODS["cppo_topk"], batch).squeeze() != 0
    assert kept.tolist() == [True, True, False, False, True, True, False, False]


def test_gtpo_drops_answers_of_high_entropy_but_keeps_counting_them() -> None:
    batch = make([1, 0], group=[0, 0], lengths=[1, 1])
    batch = replace(batch, tokens=torch.tensor([[1], [2]]), entropy=torch.tensor([[.2], [.8]], dtype=D))
    w = w_of(METHODS["gtpo"], batch).squeeze()
    assert torch.allclose(w, torch.tensor([(.5 - .02) / 2, 0], dtype=D))


def test_conflict_tokens_weigh_double_in_good_answers_and_nothing_in_bad_ones() -> None:
    tokens = torch.tensor([[1, 2, 3, 9], [1, 5, 9, 0], [1, 2, 8, 7]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    batch = replace(make([1, 0, 1], group=[0, 0, 0], lengths=[4, 3, 4]), tokens=tokens, mask=mask)
    row = METHODS["gtpo"].but(name="x", entropy_cost=0.0, keep="all", keep_threshold=None, aggregate="token_sum")
    w = w_of(row, batch)
    # Leading run: token 1 is in good and bad. The 2 is shared by good answers only. Trailing: 9 ends the first (good)
    # and the second (bad). A = (⅓, −⅔, ⅓).
    expected = torch.tensor([[2, 1, 1, 2], [0, -2, 0, 0], [2, 1, 1, 1]], dtype=D) / 3
    assert torch.allclose(w, expected, atol=1e-12)


def test_an_empty_completion_counts_in_the_denominator_only_where_the_row_says_so() -> None:
    batch = make([1, 0, 0], group=[0] * 3, lengths=[1, 1, 0])
    for denominator, rows in {"all": 3, "kept": 2}.items():
        w = w_of(METHODS["p1_grpo"].but(name="x", denominator=denominator), batch)
        assert w[0, 0].item() == pytest.approx(2 / 3 / rows)
        assert w[2].abs().max() == 0


# -- identities over random batches ----------------------------------------------------------------------------------


@given(random_batches())
def test_on_policy_grpo_gspo_gmpo_and_sapo_have_the_same_credit(batch: Rollouts) -> None:
    grpo = w_of(METHODS["grpo"], batch)
    for name in ("gspo", "gspo_token", "gmpo", "sapo"):
        assert torch.allclose(w_of(METHODS[name], batch), grpo, atol=1e-12), name


@given(random_batches())
def test_a_token_ratio_without_a_bound_is_plain_policy_gradient_at_ratio_1(batch: Rollouts) -> None:
    free = METHODS["p1_grpo"].but(name="x", ratio="token")
    assert torch.allclose(w_of(free, batch), w_of(METHODS["p1_grpo"], batch), atol=1e-12)


@given(random_batches(), st.sampled_from([n for n in CENTRED if n not in ("maxrl", "bnpo")]), st.floats(0.5, 3.0))
def test_adding_a_constant_to_a_group_changes_nothing_for_centred_methods(batch: Rollouts, name: str, c: float) -> None:
    shifted = replace(batch, reward=batch.reward + c * (1 + batch.group))
    logp = moved(batch)
    assert torch.allclose(w_of(METHODS[name], shifted, logp), w_of(METHODS[name], batch, logp), atol=1e-9)


@given(random_batches(), st.sampled_from(ALL), st.integers(1, 4))
def test_padding_changes_nothing(batch: Rollouts, name: str, extra: int) -> None:
    # The constant aggregate divides by the batch's width unless told L_max: tell it.
    row = METHODS[name]
    row = row.replace(max_tokens=7) if row.aggregate == "constant" else row
    wide = Rollouts.cat([batch, make([0, 1], group=[98, 98], lengths=[0, batch.mask.shape[1] + extra])])
    wide = wide.rows(wide.group != 98)
    logp = moved(batch)
    padded = torch.nn.functional.pad(logp, (0, extra), value=float("nan"))  # padding may hold anything
    assert torch.allclose(w_of(row, wide, padded)[:, :-extra], w_of(row, batch, logp), atol=1e-12)


@given(random_batches(), st.sampled_from([n for n in ALL if n != "cppo_topk"]), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_the_names_of_groups_change_nothing(batch: Rollouts, name: str, rng: object) -> None:
    if METHODS[name].scale == "extremes":  # of equally good answers the first is in the pair: here none are equal
        batch = replace(batch, reward=batch.reward + torch.arange(len(batch), dtype=batch.reward.dtype) / 100)
    order = torch.tensor(sorted(range(len(batch)), key=lambda _: rng.random()))  # type: ignore[attr-defined]
    shuffled = replace(batch.rows(order), group=1000 - 7 * batch.group[order])
    logp = moved(batch)
    expected = w_of(METHODS[name], batch, logp)[order]
    assert torch.allclose(w_of(METHODS[name], shuffled, logp[order]), expected, atol=1e-12)


@given(random_batches(), st.sampled_from(ALL))
def test_credit_given_from_outside_as_B_and_as_B_T_is_the_same(batch: Rollouts, name: str) -> None:
    credit = batch.reward - 0.4
    wide = credit[:, None].expand_as(batch.mask)
    logp = moved(batch)
    assert torch.allclose(w_of(METHODS[name], batch, logp, credit), w_of(METHODS[name], batch, logp, wide), atol=1e-12)


@given(random_batches(), st.sampled_from(sorted(METHODS)))
def test_masked_tokens_have_no_credit(batch: Rollouts, name: str) -> None:
    mask = batch.mask.clone()
    mask[:, 1::3] = False  # holes, as where a tool wrote
    batch = replace(batch, mask=mask)
    credit = torch.ones(len(batch), dtype=D) if name == "ppo" else None
    w = w_of(METHODS[name], batch, moved(batch), credit)
    assert (w[~mask] == 0).all()
    assert torch.isfinite(w).all()


@given(random_batches(), st.sampled_from(ALL))
def test_w_is_the_derivative_of_J_by_finite_differences(batch: Rollouts, name: str) -> None:
    row, logp = METHODS[name], moved(batch, 0.05)  # inside every smooth region with probability one
    w = w_of(row, batch, logp)
    if row.bound in ("stop_gradient", "gamma") or row.ratio == "sequence_token":
        return  # sg[·] is not a function: its w is defined by autograd alone
    step = 1e-6 * torch.randn(logp.shape, generator=torch.Generator().manual_seed(0), dtype=D) * batch.mask
    rise = surrogate(row, logp + step, batch) - surrogate(row, logp - step, batch)
    assert rise.item() == pytest.approx(2 * (w * step).sum().item(), rel=1e-4, abs=1e-11)


# -- precision, devices, bad input -----------------------------------------------------------------------------------


@each("name", ALL)
def test_bfloat16_inputs_are_computed_in_float32(name: str) -> None:
    exact = make([1, 0, 0, 1], group=[0] * 4, lengths=[3, 5, 2, 4])
    logp = exact.logp.bfloat16()
    half = replace(exact, logp=logp, ref_logp=exact.ref_logp.bfloat16(), entropy=exact.entropy.bfloat16(),
                   reward=exact.reward.bfloat16())
    wide = replace(exact, logp=logp.double(), ref_logp=half.ref_logp.double(),  # type: ignore[union-attr]
                   entropy=half.entropy.double())  # type: ignore[union-attr]
    w = w_of(METHODS[name], half)
    assert w.dtype == torch.float32
    assert torch.allclose(w.double(), w_of(METHODS[name], wide), rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("name", ALL)
def test_the_gpu_agrees_with_the_cpu(name: str) -> None:
    batch = make([1, 0, 0, 1], group=[0, 0, 1, 1], lengths=[3, 5, 2, 4])
    logp = moved(batch)
    assert torch.allclose(w_of(METHODS[name], batch.to("cuda"), logp.cuda()).cpu(), w_of(METHODS[name], batch, logp))


@each("name", ALL)
def test_an_all_masked_row_has_zero_credit_and_spoils_no_other(name: str) -> None:
    w = w_of(METHODS[name], make([1, 0, 0, 1], group=[0] * 4, lengths=[2, 0, 3, 1]))
    assert (w[1] == 0).all()
    assert torch.isfinite(w).all()
    assert w.abs().sum() > 0


def test_whitening_over_one_token_is_refused() -> None:
    with pytest.raises(CreditscopeError, match=r"cannot whiten over 1 value"):
        w_of(METHODS["reinforce_pp"], make([1, 0], group=[0, 0], lengths=[1, 0], width=3))


@each(("call", "message"), [
    (lambda b: surrogate(GRPO, b.logp[:, :1], b), r"logp must have the rollouts' shape \(2, 3\), got \(2, 1\)"),
    (lambda b: surrogate(GRPO, b.tokens, b), "logp must be floating point, got torch.int64"),
    (lambda b: surrogate(GRPO, b.logp, b, torch.zeros(3)), r"credit must be \(B,\) = \(2,\) or \(B, T\)"),
    (lambda b: surrogate(GRPO, b.logp, b, torch.tensor([1.0, float("nan")])), "credit must be finite: row 1, column 0"),
    (lambda b: surrogate(METHODS["ppo"], b.logp, b), r"pass credit=\(B, T\) to surrogate"),
    (lambda b: surrogate(GRPO.but(name="x", beta=0.1), b.logp, replace(b, ref_logp=None)), "needs ref_logp"),
    (lambda b: surrogate(METHODS["gtpo"], b.logp, replace(b, entropy=None)), "'gtpo' needs entropy"),
    (lambda b: effective_credit(lambda lp: lp, b.logp), r"one number, got shape \(2, 3\)"),
    (lambda b: effective_credit(lambda lp: 3.0, b.logp), "one number, got float"),
    (lambda b: effective_credit(lambda lp: b.logp.sum(), b.logp), "does not depend on the log-probs"),
])
def test_bad_input_is_refused_in_words(call: object, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        call(make([1, 0], group=[0, 0], lengths=[2, 3]))  # type: ignore[operator]


@given(random_batches(graded=False))
def test_conflict_weights_equal_their_definition_read_token_by_token(batch: Rollouts) -> None:
    def contested(i: int, position: int, end: bool) -> bool:
        seen = set()
        for j in range(len(batch)):
            row = batch.tokens[j, : int(batch.lengths[j])].tolist()
            if batch.group[j] == batch.group[i] and position < len(row):
                mine = batch.tokens[i, : int(batch.lengths[i])].tolist()
                if (row[-1 - position] == mine[-1 - position]) if end else (row[position] == mine[position]):
                    seen.add(float(batch.reward[j]))
        return seen == {0.0, 1.0}

    weight = conflict_weight(batch).expand_as(batch.mask)
    for i in range(len(batch)):
        length = int(batch.lengths[i])
        lead = next((t for t in range(length) if not contested(i, t, end=False)), length)
        tail = next((t for t in range(length) if not contested(i, t, end=True)), length)
        for t in range(length):
            conflict = t < lead or t >= length - tail
            expected = (2.0 if batch.reward[i] > 0 else 0.0) if conflict else 1.0
            assert weight[i, t] == expected, (i, t)


@each("dtype", [torch.float32, D])
@each("name", ALL)
def test_a_ratio_that_overflows_gives_no_nan(name: str, dtype: torch.dtype) -> None:
    batch = make([1, 0, 1, 1, 0, 0], group=[0, 0, 1, 1, 2, 2], lengths=[4] * 6, dtype=dtype)
    huge = 900.0 if dtype == D else 95.0
    for sign in (1.0, -1.0):
        w = w_of(METHODS[name], batch, batch.logp + sign * huge * batch.mask)
        assert torch.isfinite(w).all()


def test_a_good_token_far_above_its_clip_has_credit_zero_and_not_nan() -> None:
    batch, logp = one_token([1, 0], [95.0, 0.0])
    batch = replace(batch, logp=batch.logp.float(), reward=batch.reward.float())
    assert w_of(GRPO, batch, logp.float())[0, 0] == 0


def test_half_precision_rewards_are_told_apart_by_the_filter_as_by_the_advantage() -> None:
    batch = make([1.0, 0.95], group=[0, 0], lengths=[1, 1])
    batch = replace(batch, reward=batch.reward.bfloat16())
    assert w_of(METHODS["dapo"], batch).abs().min() > 0


def test_the_id_of_the_padding_changes_nothing() -> None:
    plain = make([1, 0, 1], group=[0] * 3, lengths=[4, 2, 3])
    other = replace(plain, tokens=torch.where(plain.mask, plain.tokens, 2))
    for name in ALL:
        assert torch.equal(w_of(METHODS[name], other), w_of(METHODS[name], plain)), name


@each(("call", "message"), [
    (lambda b: advantage("grpo", b.reward, b.group), r"method must be Method, got str; take its row: METHODS"),
    (lambda b: advantage(GRPO, [1.0, 0.0], b.group), r"reward must be Tensor, got list; convert it with torch\."),
    (lambda b: advantage(GRPO, b.reward.to(torch.complex64), b.group), "reward must be real, got torch.complex64"),
    (lambda b: advantage(GRPO, b.reward, None), "group must be Tensor, got NoneType"),
    (lambda b: surrogate("grpo", b.logp, b), "method must be Method, got str"),
    (lambda b: surrogate(GRPO, b.logp, {}), r"rollouts must be Rollouts, got dict; build it with Rollouts\("),
    (lambda b: surrogate(GRPO, [[0.0]], b), "logp must be Tensor, got list"),
    (lambda b: surrogate(GRPO, b.logp, b, "outcome"), "credit must be Tensor, got str"),
    (lambda b: surrogate(GRPO, b.logp, b, b.logp.to(torch.complex64)), "credit must be real"),
    (lambda b: effective_credit(3, b.logp), "needs a function from log-probs to one number, got int"),
    (lambda b: effective_credit(lambda logp: logp.sum(), [0.0]), "logp must be Tensor, got list"),
    (lambda b: GRPO.but(name=3), "a name is lower-case letters"),
    (lambda b: Record.open(None), "needs the path of a run's folder, got NoneType"),
])
def test_an_argument_of_another_class_is_refused_with_the_repair(call: Callable[[Rollouts], object],
                                                                message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        call(make([1, 0], group=[0, 0], lengths=[2, 3]))
