"""Edges: each by hand, and in agreement with the credit that every row of the table really gives."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from creditscope import METHODS, Method, Rollouts, effective_credit, surrogate
from creditscope.methods.bounds import BOUNDS, TRUSTS
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.table import GRPO
from creditscope.objective.advantages import token_advantage
from creditscope.objective.bounds import beyond, bounded_tokens, edges_of, overhang
from creditscope.objective.weights import alpha, kept
from each import each
from makers import make

D = torch.float64
INF = math.inf
# Rows of the table have equal sides more often than not; these do not.
LOPSIDED = (
    METHODS["gmpo"].but(name="lopsided_inside", clip_low=0.2, clip_high=0.5),
    METHODS["dppo"].but(name="lopsided_tv", trust_low=0.05, trust_high=0.25),
    METHODS["dppo_kl"].but(name="lopsided_kl", trust_low=0.01, trust_high=0.1),
    METHODS["grpo_v32"].but(name="lopsided_dual", clip_low=0.1, clip_high=0.3, dual_clip=1.5))
ROWS: Mapping[str, Method] = {name: row.bare for name, row in
                              {**METHODS, **DIALECTS, **{row.name: row for row in LOPSIDED}}.items()}
HARD = sorted(name for name, row in ROWS.items() if row.stops == "zero")
SOFT = sorted(name for name, row in ROWS.items() if BOUNDS[row.bound].stops == "half")
CAPPED = sorted(name for name, row in ROWS.items() if BOUNDS[row.bound].stops == "cap")
FREE = sorted(name for name, row in ROWS.items() if row.stops is None)


def one(row: Method, log_ratio: float, credit: float, old: float = -2.0) -> float:
    """The distance of a lone token."""
    logp = torch.tensor([[old]], dtype=D)
    mask = torch.ones(1, 1, dtype=torch.bool)
    return beyond(row, logp + log_ratio, logp, mask, torch.tensor([[credit]], dtype=D)).item()


def spans(row: Method, credit: Tensor, old: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(low, high) of the one edge of tokens with this credit."""
    (edge,) = edges_of(row, torch.zeros_like(credit) if old is None else old, torch.ones_like(credit).bool(), credit)
    return edge.low, edge.high


def walk(row: Method, seed: int, size: float = 0.5) -> tuple[Rollouts, Tensor, Tensor]:
    """(rollouts, log π, credit): a policy that has moved at random, its log-probs below 0 and its sampler's likely."""
    draw = torch.Generator().manual_seed(seed)
    batch = make([1, 0, 0, 1, 1, 0, .5, .25], group=[0] * 4 + [1] * 4, lengths=[2, 5, 3, 4, 6, 1, 7, 2], seed=seed)
    noise = torch.randn(batch.logp.shape, generator=draw, dtype=D)
    logp = (batch.logp + size * noise).clamp(max=-1e-3) * batch.mask
    if row.baseline == "external":
        return batch, logp, torch.randn(batch.logp.shape, generator=draw, dtype=D)
    return batch, logp, token_advantage(row, batch)


def w_of(row: Method, logp: Tensor, batch: Rollouts, credit: Tensor) -> Tensor:
    return effective_credit(lambda lp: surrogate(row, lp, batch, credit), logp)


def learning(row: Method, batch: Rollouts, credit: Tensor) -> Tensor:
    """(B, T) tokens with A ≠ 0 and α ≠ 0: those whose w can only be 0 because a bound made it so."""
    return (alpha(row, batch, kept(row, batch, credit), D) != 0) & (credit.expand_as(batch.mask) != 0)


# -- by hand --------------------------------------------------------------------------------------------------------


def test_the_clip_has_one_edge_for_each_sign_and_a_second_one_under_dual_clip() -> None:
    row = GRPO.but(name="x", clip_low=0.2, clip_high=0.28)
    credit = torch.tensor([[2.0, -1.0, 0.0]], dtype=D)
    low, high = spans(row, credit)
    assert low.tolist() == [[-INF, math.log1p(-0.2), -INF]]
    assert high.tolist() == [[math.log1p(0.28), INF, INF]]
    low, high = spans(row.replace(dual_clip=3.0), credit)
    assert low.tolist() == [[-INF, math.log1p(-0.2), -INF]]
    assert high.tolist() == [[math.log1p(0.28), math.log(3), INF]]


@each(("log_ratio", "credit", "nats"), [
    (math.log(1.5), 1.0, math.log(1.5 / 1.2)),   # a good token past the ceiling
    (math.log(0.5), 1.0, 0.0),                   # a good token below the floor is free
    (math.log(0.5), -1.0, math.log(0.8 / 0.5)),  # a bad token past the floor
    (math.log(1.5), -1.0, 0.0),                  # a bad token above the ceiling is free
    (math.log(6.0), -1.0, math.log(6 / 3)),      # but not above the dual clip
    (math.log(1.1), 1.0, 0.0), (math.log(0.9), -1.0, 0.0), (5.0, 0.0, 0.0)])
def test_the_distance_past_a_clip_by_hand(log_ratio: float, credit: float, nats: float) -> None:
    assert one(GRPO.but(name="x", dual_clip=3.0), log_ratio, credit) == pytest.approx(nats, abs=1e-14)


def test_clipping_inside_has_its_edges_on_each_token_and_in_logs() -> None:
    row = METHODS["gmpo"].but(name="x", clip_low=0.3, clip_high=0.4)
    batch = make([1, 0], group=[0, 0], lengths=[3, 3])
    move = torch.tensor([[.6, .1, -.9], [-.6, .1, .9]], dtype=D)
    past = beyond(row, batch.logp + move, batch.logp, batch.mask, torch.tensor([[1.], [-1.]], dtype=D))
    # 0.6 − 0.4 above for A > 0, 0.6 − 0.3 below for A < 0; the other tokens are free, whatever the mean.
    assert torch.allclose(past, torch.tensor([[.2, 0, 0], [.3, 0, 0]], dtype=D), atol=1e-14)


def test_the_capped_weight_has_both_edges_for_both_signs() -> None:
    row = METHODS["cispo"].but(name="x", clip_low=0.5, clip_high=0.28)
    for credit in (1.0, -1.0):
        assert one(row, math.log(2.56), credit) == pytest.approx(math.log(2), abs=1e-14)
        assert one(row, math.log(0.25), credit) == pytest.approx(math.log(2), abs=1e-14)
        assert one(METHODS["cispo"], math.log(0.01), credit) == 0  # no ε_low, no floor
        # A floor at or below 0 is none; a ceiling below 1 is passed at ratio 1 already: log(1/0.2).
        assert one(row.but(name="y", clip_low=1.0), -30.0, credit) == 0
        assert one(row.but(name="z", clip_high=-0.8), 0.0, credit) == pytest.approx(math.log(5), abs=1e-14)


def test_the_gates_edges_by_hand() -> None:
    # s·4σ'(τ(s−1)) = s/cosh²(τ(s−1)/2) = ½.
    for tau, credit in ((1.0, 1.0), (1.05, -1.0)):
        low, high = (edge.item() for edge in spans(METHODS["sapo"], torch.tensor([[credit]], dtype=D)))
        assert low < 0 < high
        for edge in (low, high):
            s = math.exp(edge)
            assert s / math.cosh(tau * (s - 1) / 2) ** 2 == pytest.approx(0.5, abs=1e-12)
    # τ = 1: 0.52 → 0.4912 and 0.53 → 0.5018; 4.5 → 0.5122 and 4.6 → 0.4764. Lines between meet ½ at 0.5283 and 4.534.
    low, high = (edge.item() for edge in spans(METHODS["sapo"], torch.ones(1, 1, dtype=D)))
    assert math.exp(low) == pytest.approx(0.5283, abs=1e-4)
    assert math.exp(high) == pytest.approx(4.534, abs=1e-3)


def test_the_gamma_weights_edges_by_hand() -> None:
    # s^k·e^{λ(1−s)} = ½ with (2, 3) for A > 0 and (3, 2) for A < 0.
    for (k, lam), credit in (((2, 3), 1.0), ((3, 2), -1.0)):
        low, high = (edge.item() for edge in spans(METHODS["vespo"], torch.tensor([[credit]], dtype=D)))
        assert low < 0 < high
        for edge in (low, high):
            assert math.exp(edge) ** k * math.exp(lam * (1 - math.exp(edge))) == pytest.approx(0.5, abs=1e-12)
    # s²e^{3(1−s)}: 1.50 → 0.5020 and 1.51 → 0.4937. s³e^{2(1−s)}: 2.98 → 0.5045 and 3.00 → 0.4945, 0.60 → 0.4807 and
    # 0.62 → 0.5096. Lines between meet ½ at 1.5024, 2.989 and 0.6133.
    low, high = (edge[0] for edge in spans(METHODS["vespo"], torch.tensor([[1.0, -1.0]], dtype=D)))
    assert high.exp().tolist() == pytest.approx([1.5024, 2.989], abs=1e-3)
    assert low[1].exp().item() == pytest.approx(0.6133, abs=1e-3)


def test_a_soft_bound_that_never_falls_to_half_is_open() -> None:
    # k = 0: φ = e^{λ(1−s)} has no half below 1 and one at s = 1 + log 2 / λ. λ = 0: s^k has one at 2^{−1/k} only.
    row = METHODS["vespo"].but(name="x", gamma_pos=(0.0, 3.0), gamma_neg=(2.0, 0.0))
    low, high = (edge[0] for edge in spans(row, torch.tensor([[1.0, -1.0]], dtype=D)))
    assert low.tolist() == pytest.approx([-INF, -math.log(2) / 2], abs=1e-14)
    assert high.tolist() == pytest.approx([math.log(1 + math.log(2) / 3), INF], abs=1e-14)


def test_the_total_variation_edges_by_hand() -> None:
    row = METHODS["dppo"].but(name="x", bound="none", clip_high=None, trust_low=0.1, trust_high=0.3)
    old = math.log(0.4)
    assert one(row, math.log(0.8 / 0.4), 1.0, old) == pytest.approx(math.log(0.8 / 0.7), abs=1e-14)  # 0.4 + 0.3
    assert one(row, math.log(0.1 / 0.4), -1.0, old) == pytest.approx(math.log(0.3 / 0.1), abs=1e-14)  # 0.4 − 0.1
    assert one(row, math.log(0.1 / 0.4), 1.0, old) == one(row, math.log(0.8 / 0.4), -1.0, old) == 0
    assert one(row, -50.0, -1.0, math.log(0.05)) == 0  # a probability of 0.05 cannot fall by 0.1


def test_the_binary_kl_edges_are_where_the_kl_is_delta() -> None:
    row = METHODS["dppo_kl"].but(name="x", bound="none", clip_high=None, trust_low=0.02, trust_high=0.07)
    p = torch.tensor([[1e-6, 1e-3, 0.1, 0.5, 0.9, 0.99]], dtype=D)
    for sign, delta in ((1.0, 0.07), (-1.0, 0.02)):
        low, high = spans(row, torch.full_like(p, sign), p.log())
        edge, other = (high, low) if sign > 0 else (low, high)
        assert bool((edge * sign > 0).all())
        assert bool((other == -sign * INF).all())
        q = p * edge.exp()
        kl = -p * edge + (1 - p) * torch.log((1 - p + 1e-8) / (1 - q + 1e-8))  # the row's own 1e-8
        assert torch.allclose(kl, torch.full_like(p, delta), atol=1e-11)


def test_a_token_that_is_certain_has_no_upper_kl_edge() -> None:
    row = METHODS["dppo_kl"].but(name="x", bound="none", clip_high=None)
    low, high = spans(row, torch.ones(1, 1, dtype=D), torch.zeros(1, 1, dtype=D))
    assert (low.item(), high.item()) == (-INF, INF)


def test_the_off_policy_edge_is_on_the_mean_of_a_bad_answer() -> None:
    row = METHODS["grpo_v32"].but(name="x", bound="none", clip_low=None, clip_high=None)
    batch = make([1, 0], group=[0, 0], lengths=[2, 2], width=3)
    move = torch.tensor([[-2.0, -1.0, 0], [-2.0, 0.4, 0]], dtype=D)
    past = beyond(row, batch.logp + move, batch.logp, batch.mask, torch.tensor([[1.], [-1.]], dtype=D))
    # δ = 0.5. The bad answer's mean is −0.8: 0.3 past, for its two tokens and not for padding.
    assert torch.allclose(past, torch.tensor([[0, 0, 0], [.3, .3, 0]], dtype=D), atol=1e-14)


def test_the_larger_of_bound_and_trust_counts() -> None:
    row = METHODS["grpo_v32"]
    batch = make([0, 1], group=[0, 0], lengths=[2, 1])
    logp = batch.logp + torch.tensor([[-1.0, -0.3], [0.0, 0.0]], dtype=D)
    past = beyond(row, logp, batch.logp, batch.mask, torch.tensor([[-1.], [1.]], dtype=D))
    # Clip at log 0.8 = −0.2231: 0.7769 and 0.0769. Trust: the mean is −0.65, 0.15 past for both.
    expected = torch.tensor([[1 + math.log(0.8), 0.15], [0, 0]], dtype=D)
    assert torch.allclose(past, expected, atol=1e-14)


@pytest.mark.parametrize(("name", "move"), [("gspo", 0.3), ("gspo_token", 0.3), ("gcpo", 0.6)])
def test_a_sequence_gives_its_distance_to_every_chosen_token(name: str, move: float) -> None:
    batch = make([1, 1], group=[0, 0], lengths=[2, 3])
    logp = batch.logp + torch.tensor([[.4, .2, 0], [-.1, 0, 0]], dtype=D)
    past = beyond(METHODS[name], logp, batch.logp, batch.mask, torch.ones(2, 1, dtype=D))
    high = math.log1p(METHODS[name].clip_high or 0.0)  # log s: the mean 0.3, or the sum 0.6
    assert torch.allclose(past, torch.tensor([[move - high] * 2 + [0], [0] * 3], dtype=D), atol=1e-14)


# -- identities over the whole table ---------------------------------------------------------------------------------


def test_every_bound_and_trust_region_is_tried() -> None:
    assert {row.bound for row in ROWS.values()} == set(BOUNDS)
    assert {row.trust for row in ROWS.values()} == set(TRUSTS)
    assert set(HARD + SOFT + CAPPED + FREE) == set(ROWS)


@pytest.mark.slow
@each("seed", range(3))
@each("name", HARD)
def test_a_hard_bound_makes_the_credit_zero_exactly_beyond_its_edge(name: str, seed: int) -> None:
    row = ROWS[name]
    batch, logp, credit = walk(row, seed)
    # A capped weight beside a trust region has an edge that does not stop: it is left out here.
    bare = row.but(name="x", bound="none", clip_low=None, clip_high=None) if row.bound == "stop_gradient" else row
    past = beyond(bare, logp, batch.logp, batch.mask, credit)
    here = learning(row, batch, credit)
    assert row.stops == "zero"
    assert torch.equal((w_of(row, logp, batch, credit) == 0)[here], (past > 0)[here])
    assert 0 < int((past > 0)[here].sum()) < int(here.sum())
    assert bool((past[~batch.mask] == 0).all())


def at(row: Method, batch: Rollouts, target: Tensor) -> Tensor:
    """Log-probs at which every token's log s is `target` (B, 1)."""
    even = {"token": 1.0, "sequence_mean": 1.0, "sequence_product": batch.lengths.clamp(min=1)[:, None]}[row.ratio]
    return batch.logp + (target / even) * batch.mask


@each("name", SOFT)
@each("side", [1, -1])
def test_a_soft_bound_halves_the_credit_at_its_edge_and_takes_more_beyond(name: str, side: int) -> None:
    row = ROWS[name]
    batch, _, credit = walk(row, 0)
    (edge,) = edges_of(row, batch.logp, batch.mask, credit)
    target = (edge.high if side > 0 else edge.low)[:, :1]
    here = learning(row, batch, credit)
    start = w_of(row, batch.logp, batch, credit)[here]

    def share(shift: float) -> Tensor:
        return w_of(row, at(row, batch, target + side * shift), batch, credit)[here] / start

    def past(shift: float) -> Tensor:
        return beyond(row, at(row, batch, target + side * shift), batch.logp, batch.mask, credit)[here]

    assert row.stops == "half"
    assert torch.allclose(share(0.0), torch.full_like(start, 0.5), atol=1e-12)
    for further in (1e-3, 0.1, 1.0):
        assert bool((share(further) < 0.5).all())
        assert bool((share(-further / 10) > 0.5).all())
        assert torch.allclose(past(further), torch.full_like(start, further), atol=1e-12)
        assert bool((past(-further / 10) == 0).all())


@each("name", CAPPED)
@each("sign", [1.0, -1.0])
def test_a_cap_stops_the_credit_from_following_the_ratio_and_leaves_it(name: str, sign: float) -> None:
    row = ROWS[name].but(name="x", trust="none", trust_low=None, trust_high=None, whiten="none", scale="none")
    batch = make([1, 0], group=[0, 0], lengths=[1, 1])
    credit = torch.tensor([[sign], [0.0]], dtype=D)
    (edge,) = edges_of(row, batch.logp, batch.mask, credit)

    def w(log_s: float) -> float:
        return w_of(row, at(row, batch, torch.full((2, 1), log_s, dtype=D)), batch, credit)[0, 0].item()

    high = edge.high[0, 0].item()
    assert row.stops == "cap"
    assert w(high - 0.1) == pytest.approx(w(high) * math.exp(-0.1), rel=1e-12)
    assert w(high + 0.1) == pytest.approx(w(high), rel=1e-12)
    assert w(high) != 0


@each("name", FREE)
def test_a_method_without_bound_has_no_edge(name: str) -> None:
    batch, logp, credit = walk(ROWS[name], 0)
    assert ROWS[name].stops is None
    assert not bool(bounded_tokens(ROWS[name], batch.logp, batch.mask, credit).any())
    assert not bool(beyond(ROWS[name], logp, batch.logp, batch.mask, credit).any())


@each("name", sorted(set(ROWS) - set(FREE)))
def test_bounded_tokens_are_the_chosen_ones_with_credit(name: str) -> None:
    batch, _, credit = walk(ROWS[name], 0)
    assert torch.equal(bounded_tokens(ROWS[name], batch.logp, batch.mask, credit), batch.mask & (credit != 0))


@pytest.mark.parametrize(("p", "bounded"), [(0.01, False), (0.1, False), (0.149, False), (0.151, True)])
def test_a_bad_token_too_rare_to_fall_by_delta_has_no_edge(p: float, bounded: bool) -> None:
    row = METHODS["dppo"].but(name="x", bound="none", clip_high=None)  # δ = 0.15
    old, mask = torch.tensor([[p]], dtype=D).log(), torch.ones(1, 1, dtype=torch.bool)
    assert bounded_tokens(row, old, mask, -torch.ones(1, 1)).item() is bounded


@pytest.mark.slow
@each("name", sorted(ROWS))
def test_the_slope_of_the_distance_is_that_of_finite_differences(name: str) -> None:
    # Signs of A mixed inside an answer: there a sequence's distance and its surrogate's gradient part ways.
    row = ROWS[name]
    batch, logp, _ = walk(row, 0)
    credit = torch.randn(batch.logp.shape, generator=torch.Generator().manual_seed(5), dtype=D)

    def total(at: Tensor) -> Tensor:
        return beyond(row, at, batch.logp, batch.mask, credit).sum()

    if row.stops is None:
        assert total(logp) == 0
        return
    slope = effective_credit(total, logp)
    h = 1e-6
    for i, t in batch.mask.nonzero().tolist():
        nudge = torch.zeros_like(logp)
        nudge[i, t] = h
        assert slope[i, t].item() == pytest.approx(((total(logp + nudge) - total(logp - nudge)) / (2 * h)).item(),
                                                   abs=1e-7)


def test_forward_is_the_side_to_which_credit_pushes() -> None:
    row = METHODS["cispo"].but(name="x", clip_low=0.5, clip_high=1.0)
    batch = make([1, 0], group=[0, 0], lengths=[1, 1])
    credit = torch.tensor([[1.], [-1.]], dtype=D)
    edges = edges_of(row, batch.logp, batch.mask, credit)
    forward, backward = overhang(edges, batch.logp + 1.0, batch.logp, batch.mask, credit)
    # At log s = 1: 1 − log 2 above the ceiling, −log 2 − 1 above the floor.
    above, below = 1 - math.log(2), -math.log(2) - 1
    assert torch.allclose(forward, torch.tensor([[above], [below]], dtype=D), atol=1e-14)
    assert torch.allclose(backward, torch.tensor([[below], [above]], dtype=D), atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_and_junk_on_padding_change_nothing_but_rounding(dtype: torch.dtype) -> None:
    for name in ("grpo", "dppo_kl", "vespo", "gmpo"):
        batch, logp, credit = walk(ROWS[name], 1)
        exact = beyond(ROWS[name], logp.to(dtype).double(), batch.logp.to(dtype).double(), batch.mask, credit)
        junk = logp.to(dtype).masked_fill(~batch.mask, torch.nan)
        rough = beyond(ROWS[name], junk, batch.logp.to(dtype), batch.mask, credit.to(dtype))
        assert rough.dtype == torch.float32
        assert torch.allclose(rough.double(), exact, atol=2e-6)
