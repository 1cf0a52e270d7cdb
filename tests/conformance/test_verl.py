"""Our `verl_*` rows give every token the credit that verl 0.9.1's own code gives it.

Some numbers of verl's code no axis of ours carries; `test_verls_safety_clamps_are_idle_on_these_batches` says which.
"""

from __future__ import annotations

import importlib.util
from itertools import product

import numpy as np
import pytest
import torch
import verl_peer
from batches import batches
from ours import as_rollouts
from torch import Tensor
from verl_peer import CASES
from verl_table import differences, goldens, verls

from creditscope import METHODS
from creditscope.credit.optimal_token import optimal_token
from creditscope.credit.tools import Tools
from creditscope.methods.dialects import DIALECTS
from each import each

pytestmark = pytest.mark.conformance
BATCHES = tuple(batches())
BY_NAME = {case.name: case for case in CASES}


@each("name, batch", product(BY_NAME, BATCHES))
def test_our_row_gives_each_token_the_credit_that_verl_gives(name: str, batch: str) -> None:
    case = BY_NAME[name]
    advantages, w = differences(case, batch)
    assert advantages <= case.tolerance, f"advantages differ by {advantages:.2e} of the largest"
    assert w <= case.tolerance, f"w differs by {w:.2e} of the largest"


def test_every_verl_row_has_a_case() -> None:
    assert {case.row for case in CASES} == {name for name in DIALECTS if name.startswith("verl_")}


def test_goldens_hold_the_cases_in_order_and_no_pickled_object() -> None:
    assert goldens()["cases"].tolist() == [case.name for case in CASES]
    assert str(goldens()["verl"]) == "0.9.1"
    assert len(BY_NAME) == len(CASES)


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl lives in its own environment")
def test_goldens_are_current() -> None:
    for name, fresh in verl_peer.goldens().items():
        if fresh.dtype.kind == "f":
            np.testing.assert_allclose(goldens()[name], fresh, rtol=1e-12, atol=1e-15, err_msg=name)


# -- the optimal token baseline ---------------------------------------------------------------------------------------

VERLS_EPSILON = 1e-8  # added to Σ_j W_jt


def _optimal_token(batch: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ours with verl's ε put in, verl's, tokens that both know, tokens of rows without strangers' text)."""
    here = batches()[batch]
    mask, group = here["mask"], here["group"]
    ours = optimal_token(METHODS["p1_grpo"], as_rollouts(here), Tools())
    norm = (1 - 2 * here["old"].exp() + here["collision"]) * mask
    weight = torch.stack([(norm.cumsum(1) * mask)[group == g].sum(0) for g in group])
    baseline = here["reward"][:, None] - ours
    with_epsilon = (here["reward"][:, None] - baseline * weight / (weight + VERLS_EPSILON)) * mask
    last = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1)
    holed = torch.stack([(last != mask.sum(1))[group == g].any() for g in group])
    return with_epsilon, torch.from_numpy(goldens()[f"optimal_token/{batch}"]), mask, mask & ~holed[:, None]


@pytest.mark.parametrize("batch", BATCHES)
def test_our_optimal_token_gives_each_token_the_credit_that_verl_gives(batch: str) -> None:
    ours, verl, mask, plain = _optimal_token(batch)
    torch.testing.assert_close(ours[plain], verl[plain], rtol=0, atol=1e-12)
    assert torch.equal(plain, mask) == (batch != "ragged")


def test_in_these_batches_siblings_end_one_by_one_and_the_last_one_stands_alone() -> None:
    for name in BATCHES:
        here, verl = batches()[name], torch.from_numpy(goldens()[f"optimal_token/{name}"])
        alive = torch.stack([here["mask"][here["group"] == g].sum(0) for g in here["group"]])
        alone = here["mask"] & (alive == 1) & (torch.arange(here["mask"].shape[1]) > 0)
        assert alone.any()
        assert len({int(n) for n in alive[here["mask"]]}) >= 4
        if name != "ragged":
            assert torch.equal(verl[alone], here["reward"][:, None].expand_as(verl)[alone]), "its baseline is 0"


def test_verl_finds_the_last_survivor_by_counting_tokens_so_strangers_text_misleads_it() -> None:
    # In group 4 of `ragged` row 0 chose 7 tokens of its 9 columns and row 4 has 8: verl takes row 4 for the longest.
    _, verl, _, _ = _optimal_token("ragged")
    ours = optimal_token(METHODS["p1_grpo"], as_rollouts(batches()["ragged"]), Tools())
    assert verl[0, 8] == pytest.approx(0, abs=1e-7), "row 0, alone at its last token, is its own baseline"
    assert ours[0, 8] == 1.0
    assert batches()["ragged"]["mask"][[0, 4], 7].all(), "two are left, and verl gives row 4 no baseline"
    assert verl[4, 7] == 0.0
    assert ours[4, 7] < 0


# -- the branches act: without these, equal arrays could mean that nothing happened ---------------------------------


def _off_policy(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(A, ρ, w·ΣL, π − π_old) of verl's token mean on the off-policy batch, one entry for each token that counts."""
    here = batches()["off_policy"]
    advantages, w = verls(BY_NAME[name], "off_policy")
    mask = here["mask"]
    logp, old = here["logp"][mask], here["old"][mask]
    return advantages[mask], (logp - old).exp(), w[mask] * mask.sum(), logp.exp() - old.exp()


@pytest.mark.parametrize(("name", "low", "high"), [("verl_grpo", 0.2, 0.2), ("verl_dapo", 0.2, 0.28)])
def test_verl_silences_tokens_beyond_either_clip_and_the_dual_clip(name: str, low: float, high: float) -> None:
    a, ratio, w, _ = _off_policy(name)
    above, below, far = (a > 0) & (ratio > 1 + high), (a < 0) & (ratio < 1 - low), (a < 0) & (ratio > 3)
    for clipped in (above, below, far):
        assert clipped.any()
        assert not w[clipped].any()
    free = ~(above | below | far)
    torch.testing.assert_close(w[free], (a * ratio)[free], rtol=1e-12, atol=0)


def test_verl_clips_gspos_sequence_ratio_on_both_sides() -> None:
    for batch in ("off_policy", "ragged"):
        here = batches()[batch]
        a, w = verls(BY_NAME["verl_gspo"], batch)
        drift = (here["logp"] - here["old"]).sum(1) / here["mask"].sum(1).clamp(min=1)
        above, below = (a[:, 0] > 0) & (drift.exp() > 1.0004), (a[:, 0] < 0) & (drift.exp() < 0.9997)
        assert above.any()
        assert below.any()
        assert not w[above | below].any()


def test_verl_clips_single_tokens_inside_gmpos_mean() -> None:
    here = batches()["off_policy"]
    a, w = verls(BY_NAME["verl_gmpo"], "off_policy")
    moved, live = here["logp"] - here["old"], (a != 0) & here["mask"]
    for clipped in (live & (a > 0) & (moved > 0.4), live & (a < 0) & (moved < -0.4)):
        assert clipped.any()
        assert not w[clipped].any()
    assert bool(((w == 0) & live).any(1).logical_and((w != 0).any(1)).any()), "clipped and free tokens share a row"


def test_verl_caps_cispos_ratio_on_both_sides_and_drops_no_token() -> None:
    a, ratio, w, _ = _off_policy("verl_cispo")
    live = a != 0
    assert (ratio[live] > 1.2).any()
    assert (ratio[live] < 0.8).any()
    torch.testing.assert_close(w[live] / a[live], ratio[live].clamp(0.8, 1.2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["verl_dppo", "verl_dppo_kl"])
def test_verl_drops_tokens_that_left_the_trust_region_and_caps_the_ratio_at_3(name: str) -> None:
    a, ratio, w, moved = _off_policy(name)
    dropped = (a != 0) & (w == 0)
    assert (dropped & (a > 0) & (moved > 0)).any()
    assert (dropped & (a < 0) & (moved < 0)).any()
    assert not (dropped & (a * moved < 0)).any(), "a move against the sign of A is never too far"
    kept = (a != 0) & ~dropped
    assert (kept & (ratio > 3)).any()
    torch.testing.assert_close(w[kept] / a[kept], ratio[kept].clamp(max=3.0), rtol=1e-12, atol=0)


def test_verls_two_leave_one_out_estimators_differ_on_a_group_of_one_and_nowhere_else() -> None:
    here = batches()["ragged"]
    plain, vectorized = (verls(BY_NAME[name], "ragged")[0] for name in ("verl_rloo", "verl_rloo+vectorized"))
    lone = torch.tensor([int((here["group"] == g).sum()) == 1 for g in here["group"]])
    assert torch.equal(plain[lone], here["reward"][lone, None] * here["mask"][lone])
    assert not vectorized[lone].any()
    torch.testing.assert_close(plain[~lone], vectorized[~lone], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_verls_kl_loss_moves_the_credit_and_k3_plus_has_the_gradient_of_k2(kind: str) -> None:
    bare, with_kl, k2, plus = (verls(BY_NAME[f"verl_grpo{end}"], "off_policy")[1]
                               for end in ("", f"+kl_{kind}", "+kl_k2", "+kl_k3+"))
    assert not torch.allclose(bare, with_kl)
    torch.testing.assert_close(k2, plus, rtol=1e-12, atol=1e-15)


def test_verl_divides_sums_over_sequences_by_rows_that_are_not_empty_unless_told_the_batch_size() -> None:
    """`seq-mean-token-sum-norm` is 1/(rows·L_max), with rows = 13 of 14 here: it does not omit 1/B."""
    here = batches()["ragged"]
    width, rows, filled = here["mask"].shape[1], len(here["mask"]), int(here["mask"].any(1).sum())
    assert filled == rows - 1
    alone, trainer = (verls(BY_NAME[name], "ragged")[1] for name in ("verl_dr_grpo", "verl_dr_grpo+trainer"))
    torch.testing.assert_close(alone * filled * width, trainer * rows * 20, rtol=1e-12, atol=0)
    a, ratio = verls(BY_NAME["verl_dr_grpo"], "ragged")[0], (here["logp"] - here["old"]).exp()
    free = (alone != 0) & here["mask"]
    torch.testing.assert_close(alone[free] * filled * width, (a * ratio)[free], rtol=1e-12, atol=0)


def test_verls_safety_clamps_are_idle_on_these_batches() -> None:
    """No axis carries them: |log ratio| ≤ 20, GSPO's log ratio ≤ 10, k3's log ratio within ±20 and its value ≤ 10."""
    for name, here in batches().items():
        assert (here["logp"] - here["old"]).abs().max() < 10, name
        to_ref = here["ref"] - here["logp"]
        assert (to_ref.exp() - to_ref - 1).max() < 10, name
