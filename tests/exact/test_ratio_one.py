"""J at ratio 1: closed form against the surrogate, laws from the axes against laws from numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Method, Rollouts, surrogate
from creditscope.exact.ratio_one import value_at_ratio_one
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.table import CISPO, DAPO, DPPO, DPPO_KL, DR_GRPO, GRPO, GRPO_V32, SAPO
from creditscope.methods.words import LAWS, law
from creditscope.objective.advantages import token_advantage
from creditscope.objective.ratios import trusted
from creditscope.objective.weights import alpha, kept
from makers import make, random_batches
from probes import probe

# Rows of one's own, for laws that no paper's row has.
OWN = [
    GRPO.but(name="no_baseline", baseline="none", scale="none"),
    GRPO.but(name="no_baseline_sum", baseline="none", scale="none", aggregate="token_sum"),
    GRPO.but(name="whitened", baseline="none", scale="none", whiten="rollouts"),
    GRPO.but(name="whitened_sum", whiten="rollouts", aggregate="sequence_sum"),
    GRPO.but(name="whitened_tokens_mean", whiten="tokens"),
    GRPO.but(name="whitened_by_group", whiten="tokens", aggregate="group_token_mean"),
    GRPO.but(name="whitened_live", whiten="rollouts", keep="live_groups"),
    GRPO.but(name="whitened_tokens_live", whiten="tokens", keep="live_groups", aggregate="token_mean"),
    GRPO.but(name="bare_by_group", baseline="none", scale="none", whiten="tokens", aggregate="group_token_mean"),
    GRPO.but(name="bare_live", baseline="none", scale="none", whiten="rollouts", keep="live_groups"),
    GRPO.but(name="length_weighted", baseline="length_weighted_mean"),
    GRPO.but(name="length_weighted_by_group", baseline="length_weighted_mean", aggregate="group_token_mean"),
    GRPO.but(name="sum_of_tokens", aggregate="token_sum"),
    SAPO.but(name="even_gate", gate_neg=1.0),
    GRPO.but(name="sequence_kl", kl="k2", kl_level="sequence"),
    DR_GRPO.but(name="dr_grpo_sequence_kl", kl="k2", kl_level="sequence"),
]
ROWS = [*METHODS.values(), *DIALECTS.values(), *OWN]
BATCH = make([1, 0, 0.25, 1, 0.5, 0, 1, 0.75, 0.5, 0.5], [2, 2, 2, 2, 5, 5, 5, 5, 9, 9], [3, 5, 1, 7, 2, 6, 4, 1, 2, 5])
LEVEL = make([1, 0, 0.25, 0.5, 0.5, 0, 1], [0, 0, 0, 0, 1, 1, 1], [4] * 7, seed=3)


def weighted(row: Method) -> list[Method]:
    """The row without KL, with the paper's weight, and with one that no rounding hides."""
    if row.linked:
        return [row]
    betas = {0.0, row.beta, row.paper_beta or 0.0} | ({0.7} if row.kl != "none" else set())
    return [row.replace(beta=beta) for beta in sorted(betas)]


def given_credit(row: Method, rollouts: Rollouts) -> Tensor | None:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(rollouts.mask.shape, generator=draw, dtype=torch.float64) if row.external else None


# -- the closed form ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("row", [w for row in ROWS for w in weighted(row)], ids=lambda row: f"{row.name}-{row.beta}")
def test_the_closed_form_is_the_surrogate_at_ratio_1(row: Method) -> None:
    for rollouts in (BATCH, LEVEL):
        credit = given_credit(row, rollouts)
        twin = surrogate(row, rollouts.logp, rollouts, credit)
        assert abs(value_at_ratio_one(row, rollouts, credit) - twin) <= 1e-12


@pytest.mark.slow
@given(rollouts=random_batches())
def test_the_closed_form_is_the_surrogate_on_any_batch(rollouts: Rollouts) -> None:
    for row in [weighed for name in METHODS for weighed in weighted(METHODS[name])]:
        credit = given_credit(row, rollouts)
        twin = surrogate(row, rollouts.logp, rollouts, credit)
        assert abs(value_at_ratio_one(row, rollouts, credit) - twin) <= 1e-12, row.name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_credit_from_outside_is_used_as_the_surrogate_uses_it(row: Method) -> None:
    draw = torch.Generator().manual_seed(1)
    for shape in ((len(BATCH),), (len(BATCH), 1), BATCH.mask.shape):
        credit = torch.randn(shape, generator=draw, dtype=torch.float64)
        if credit.dim() == 2:
            credit[0, -1] = torch.nan if credit.shape[1] > 1 else 1.0  # on padding: it must reach no sum
        twin = surrogate(row, BATCH.logp, BATCH, credit)
        assert torch.isfinite(twin)
        assert abs(value_at_ratio_one(row, BATCH, credit) - twin) <= 1e-12


def test_credit_of_a_wrong_shape_is_refused_in_words() -> None:
    with pytest.raises(CreditscopeError, match=r"credit must be \(B,\) = \(10,\)"):
        value_at_ratio_one(GRPO, BATCH, torch.ones(3))


def test_half_precision_is_computed_in_float32() -> None:
    half = make([1.0, 0.0], [0, 0], [1, 3], dtype=torch.bfloat16)
    assert value_at_ratio_one(DAPO, half).dtype == torch.float32


# Two answers of 1 and 3 tokens, rewards 1 and 0: r − mean = ±½, the sample std is √½, so (r − mean)/std = ±1/√2.
PAIR = make([1, 0], [0, 0], [1, 3])
ROOT = 1 / math.sqrt(2)


@pytest.mark.parametrize(("name", "value"), [
    ("grpo", 0.0),                          # ½·(A₁ + A₂)
    ("gspo", 0.0),
    ("dr_grpo", (0.5 - 1.5) / 6),           # (½·1 − ½·3)/(2·3)
    ("dapo", ROOT * (1 - 3) / 4),           # (A·1 − A·3)/4
    ("bnpo", (0.5 - 1.5) / 2),              # (½·1 − ½·3)/2: one group, nothing to fit
    ("maxrl", (1 - 3) / 4),                 # (r − ½)/½ = ±1
    ("luspo", ROOT * (1 - 3) / 2),
    ("sapo", ROOT * (1 - 1 / 1.05)),        # ½·(2/1·A₁ − 2/1.05·A₁)
    ("reinforce_pp", 0.0),                  # whitened over the four tokens
    ("verl_opo", 0.0),                      # Σ L r/Σ L = ¼: A = ¾ on one token, −¼ on three
    ("verl_rloo", (1 - 3) / 4),             # r minus the other's: ±1
])
def test_without_log_probs_j_at_ratio_1_is_this_number(name: str, value: float) -> None:
    row = {**METHODS, **DIALECTS}[name]
    assert float(value_at_ratio_one(row, PAIR)) == pytest.approx(value, abs=1e-14)


@pytest.mark.parametrize(("name", "factor"), [
    ("p1_grpo", 0.5 / 2), ("kimi", 0.5 / 2), ("cispo", ROOT / 4), ("gpg", 0.5 / 4), ("vespo", ROOT / 4),
    ("dppo", 0.5 / 2),
    ("trl_cispo", 0.2 * 0.5 / (ROOT + 1e-4) / 4), ("verl_cispo", 0.5 / (ROOT + 1e-6) / 4),  # their ε in the std
])
def test_with_log_probs_j_at_ratio_1_is_their_difference(name: str, factor: float) -> None:
    # A·(log π of the good answer − log π of the bad one), times α; kimi's distance is to the sampler, so it is 0.
    row = {**METHODS, **DIALECTS}[name]
    good, bad = (float(PAIR.logp[i].sum()) for i in (0, 1))
    assert float(value_at_ratio_one(row, PAIR)) == pytest.approx(factor * (good - bad), abs=1e-14)


@pytest.mark.parametrize(("changes", "value"), [
    ({"kl": "k1"}, math.log(2)),
    ({"kl": "k2"}, math.log(2) ** 2 / 2),
    ({"kl": "k3"}, 0.5 + math.log(2) - 1),
    ({"kl": "k3", "kl_weight": "ratio"}, 0.5 + math.log(2) - 1),
    ({"kl": "k3", "kl_to": "old"}, 0.0),
    # ½(log 2)² of 1 token and ½(3·log 2)² of 3, each spread over its tokens: ½·(½·1 + ½·9/3)·log² 2.
    ({"kl": "k2", "kl_level": "sequence"}, math.log(2) ** 2),
])
def test_the_penalty_at_ratio_1_is_the_distance_of_the_sampler_from_the_reference(changes: dict[str, str],
                                                                                 value: float) -> None:
    # π_old = 2·π_ref on every token.
    near = replace(PAIR, ref_logp=PAIR.logp - math.log(2))
    row = GRPO.but(name="grpo_kl", beta=0.25, **changes)
    assert float(value_at_ratio_one(row, near)) == pytest.approx(-0.25 * value, abs=1e-14)


@pytest.mark.parametrize("row", [row for row in ROWS if row.trust != "none"], ids=lambda row: row.name)
def test_a_trust_region_drops_nothing_at_ratio_1(row: Method) -> None:
    trust = trusted(row, BATCH.logp, BATCH.logp, BATCH.mask, token_advantage(row, BATCH))
    assert trust is not None
    assert bool(trust.all())


def test_the_three_trust_regions_are_all_tried() -> None:
    assert {GRPO_V32.trust, DPPO.trust, DPPO_KL.trust} == {"off_policy_sequence", "binary_tv", "binary_kl"}


# -- the law --------------------------------------------------------------------------------------------------------


def random_probes() -> list[Rollouts]:
    """Groups of unequal sizes and lengths, one of them unanimous."""
    return [make(reward, [0, 0, 0, 0, 1, 1, 1, 2, 2], lengths, seed=seed) for seed, (reward, lengths) in enumerate([
        ([0.9, 0.1, 0.4, 0.2, 0.7, 0.3, 0.0, 0.5, 0.5], [3, 5, 1, 7, 2, 6, 4, 1, 3]),
        ([0.0, 0.8, 0.6, 0.3, 0.2, 1.0, 0.1, 0.4, 0.4], [2, 1, 6, 3, 5, 4, 7, 5, 2])])]


def law_by_numbers(row: Method) -> str:
    """The law of a row with β = 0 from values of J alone."""
    def values(change: Callable[[Rollouts], Rollouts] = lambda r: r) -> Tensor:
        return torch.stack([value_at_ratio_one(row, change(r)) for r in (probe(), *random_probes())])

    level = [make(r.reward.tolist(), r.group.tolist(), [4] * len(r), seed=9) for r in random_probes()]
    plain = values()
    if float(plain.abs().max()) <= 1e-12:
        return "zero"
    if torch.allclose(values(lambda r: replace(r, logp=2 * r.logp)), 2 * plain, rtol=1e-10, atol=0):
        return "log_prob"
    if max(abs(float(value_at_ratio_one(row, r))) for r in level) <= 1e-12:
        return "length"
    if torch.allclose(values(lambda r: replace(r, reward=r.reward**3)), plain, rtol=1e-12, atol=0):
        # Nothing of the rewards counts but their order, or their signs, which a shift changes.
        lower = values(lambda r: replace(r, reward=r.reward - 0.45))
        return "margin" if torch.allclose(lower, plain, rtol=1e-12, atol=0) else "label"
    paid = values(lambda r: replace(r, reward=r.reward + 1))
    return "reward" if bool((paid > plain + 0.1).all()) else "weights"


@pytest.mark.slow
@pytest.mark.parametrize("row", [r for r in ROWS if not r.external], ids=lambda row: row.name)
def test_the_law_from_the_axes_is_the_law_from_numbers(row: Method) -> None:
    bare = row.bare
    assert law(bare).kind == law_by_numbers(bare)


def test_the_laws_fall_where_p2_says() -> None:
    # Proposition 4: length-normalised weights leave nothing, constant weights a length statistic.
    kinds = {name: law(row).kind for name, row in METHODS.items()}
    assert {name for name in kinds if kinds[name] == "zero"} >= {"grpo", "grpo_v32", "gspo", "gmpo", "gcpo"}
    assert {name for name in kinds if kinds[name] == "length"} >= {"dr_grpo", "dapo"}
    assert {name for name in kinds if kinds[name] == "weights"} == {"cppo", "cppo_topk", "gtpo", "sapo"}
    assert {name for name in kinds if kinds[name] == "log_prob"} >= {"cispo", "gpg", "p1_grpo", "vespo"}
    # And where nobody looked: whitening over tokens takes the length statistic of a token mean away.
    assert kinds["reinforce_pp"] == kinds["reinforce_pp_baseline"] == law(DIALECTS["verl_opo"]).kind == "zero"


@pytest.mark.parametrize("row", [r for r in ROWS if "A_i·L_i" in law(r).formula], ids=lambda row: row.name)
def test_the_length_statistic_is_what_its_formula_says(row: Method) -> None:
    for rollouts in random_probes():
        credit, lengths = token_advantage(row, rollouts).squeeze(1), rollouts.lengths.double()
        live = kept(row, rollouts, credit[:, None]) if row.denominator == "kept" else torch.ones_like(credit) > 0
        of_group = torch.stack([lengths[rollouts.group == g].sum() for g in rollouts.group])
        divisor = {"/ΣL": (lengths * live).sum(), "/B": 9.0, "/B_kept": 9.0, "/(B·L_max)": 9.0 * 7,
                   "/(B_kept·L_max)": 9.0 * 7, "/(P·ΣL_g)": 3 * of_group, "": 1.0}
        formula = law(row).formula.removeprefix("J = Σ_i A_i·L_i")
        expected = (credit * lengths / divisor[formula]).sum()
        assert float(value_at_ratio_one(row, rollouts)) == pytest.approx(float(expected), abs=1e-13)


@pytest.mark.parametrize("name", ["sapo", "cppo", "cppo_topk", "p1_grpo", "cispo", "gpg", "vespo", "dr_grpo", "dapo"])
def test_j_is_the_covariance_of_the_advantages_with_the_weights(name: str) -> None:
    # Σ A = 0 in each group, so Σ_i A_i ω_i = Σ_i A_i (ω_i − ω̄), ω_i = Σ_t α_it h_it.
    row = METHODS[name]
    for rollouts in random_probes():
        credit = token_advantage(row, rollouts)
        height = rollouts.logp if law(row).kind == "log_prob" else torch.ones_like(credit)
        if name == "sapo":
            height = 2 / torch.where(credit > 0, height, 1.05 * height)
        omega = (alpha(row, rollouts, kept(row, rollouts, credit), torch.float64) * height).sum(dim=1)
        covariance = (credit.squeeze(1) * (omega - omega.mean())).sum()
        assert float(value_at_ratio_one(row, rollouts)) == pytest.approx(float(covariance), abs=1e-13)


@pytest.mark.parametrize("row", [w for r in ROWS if law(r.bare).kind == "zero"
                                 for w in weighted(r) if w.has_loss_kl], ids=lambda row: f"{row.name}-{row.beta}")
def test_where_j_is_zero_a_reference_leaves_the_penalty_alone(row: Method) -> None:
    found = law(row)
    assert found.kind == "penalty"
    assert found.formula == f"J = − {row.beta:g}·{row.kl.upper()}" + " of Σ_t" * (row.kl_level == "sequence")
    # Other rewards leave it as it is, if the same groups are unanimous.
    other = replace(BATCH, reward=torch.tensor([0.5, 0.25, 0.25, 1, 0.5, 1, 1, 0.75, 0, 0], dtype=torch.float64))
    value = float(value_at_ratio_one(row, BATCH))
    assert value < -1e-4
    assert float(value_at_ratio_one(row, other)) == pytest.approx(value, abs=1e-13)


@pytest.mark.parametrize(("row", "formula"), [
    (METHODS["cispo"], "J = Σ_it 1/ΣL · A_i·log π_it"),
    (DIALECTS["trl_cispo"], "J = Σ_it 1/ΣL · A_i·0.2·log π_it"),
    (METHODS["cppo"], "J = Σ_it 1/(B·L_i) · 1{|A_i| > 0.5} · A_i"),
    (METHODS["sapo"], "J = Σ_it 1/(B·L_i) · A_i·2/τ±"),
    (METHODS["dppo"], "J = Σ_it 1/B · A_i·log π_it"),  # no trust region
    (METHODS["ppo"], "J = Σ_it 1/ΣL · A_it"),
    # Their distance is to the sampler.
    (METHODS["kimi"], "J = Σ_it 1/B · A_i·log π_it"),
    (METHODS["dro"], "J = Σ_it 1/ΣL · A_i·log π_it"),
    (GRPO.but(name="near_old", kl_to="old", beta=0.5), "J = 0"),
    (CISPO.but(name="half_cispo", clip_high=-0.5), "J = Σ_it 1/ΣL · A_i·0.5·log π_it"),
    (DPPO.but(name="low_dppo", clip_high=-0.25), "J = Σ_it 1/B · A_i·0.75·log π_it"),
    (DR_GRPO.but(name="dr_grpo_kl", beta=0.5), "J = Σ_i A_i·L_i/(B·L_max) − 0.5·K3"),
])
def test_formulas_of_laws(row: Method, formula: str) -> None:
    assert law(row).formula == formula


def test_every_law_names_what_to_watch() -> None:
    assert {law(row).kind for row in ROWS} | {"penalty"} == set(LAWS)
    assert all("reward/mean" in sentence for sentence in LAWS.values())
