"""Our `skyrl_*` rows give every token the credit that SkyRL 0.3.0's own code gives it."""

from __future__ import annotations

import importlib.util
from itertools import product

import numpy as np
import pytest
import skyrl_peer
import torch
from batches import batches
from skyrl_peer import BATCHES, CASES, STORED
from stored_peer import goldens

from creditscope.methods.dialects import DIALECTS
from each import each

pytestmark = pytest.mark.conformance
BY_NAME = {case.name: case for case in CASES}


@each("name, batch", [(name, batch) for name, batch in product(BY_NAME, BATCHES) if batch not in BY_NAME[name].apart])
def test_our_row_gives_each_token_the_credit_that_skyrl_gives(name: str, batch: str) -> None:
    case = BY_NAME[name]
    advantages, w = STORED.differences(case, batch)
    assert advantages <= case.advantages, f"advantages differ by {advantages:.2e} of the largest"
    assert w <= case.tolerance, f"w differs by {w:.2e} of the largest"


def test_every_skyrl_row_has_a_case_and_the_goldens_hold_them_in_order() -> None:
    assert {case.row for case in CASES} == {name for name in DIALECTS if name.startswith("skyrl_")}
    assert STORED.arrays["cases"].tolist() == [case.name for case in CASES]
    assert str(STORED.arrays["skyrl"]) == "0.3.0"
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize(("name", "changes"), [
    ("skyrl_grpo", {"std_eps": 1e-4}), ("skyrl_grpo", {"dual_clip": 3.0}), ("skyrl_grpo+prompt_mean", {}),
    ("skyrl_dapo", {"dual_clip": None}), ("skyrl_gspo", {"ratio": "token"}), ("skyrl_rloo", {"lone": "keep"}),
    ("skyrl_cispo", {"clip_low": None}), ("skyrl_sapo", {"gate_neg": 1.0}),
])
def test_a_row_that_differs_in_one_choice_does_not_equal_skyrl(name: str, changes: dict[str, object]) -> None:
    from dataclasses import replace

    other = replace(BY_NAME[name], changes=changes)
    far = max(max(STORED.differences(other, batch)) for batch in BATCHES)
    assert far > 10 * max(other.tolerance, other.advantages)


def test_skyrls_reinforce_pp_gives_tokens_before_a_tools_output_no_reward() -> None:
    """In row 0 of `ragged` a tool wrote columns 2 and 3, and the reward 1 came after: SkyRL gives the first two tokens
    the whitened 0, as it gives the tokens of an answer without reward, and the later ones the whitened 1."""
    here = batches()["ragged"]
    a, _ = STORED.theirs(BY_NAME["skyrl_reinforce_pp"], "ragged")
    assert here["reward"][0] == 1
    assert not here["mask"][0, 2:4].any()
    assert here["reward"][1] == 0
    torch.testing.assert_close(a[0, :2], a[1, :1].expand(2), rtol=1e-12, atol=0)
    assert (a[0, 4:][here["mask"][0, 4:]] > 0).all()


def test_skyrl_caps_cispos_ratio_between_1_and_6() -> None:
    here = batches()["off_policy"]
    a, w = STORED.theirs(BY_NAME["skyrl_cispo"], "off_policy")
    live = here["mask"] & (a != 0)
    ratio = (here["logp"] - here["old"]).exp()[live]
    assert (ratio < 1).any()
    found = w[live] * here["mask"].sum() / a[live]
    torch.testing.assert_close(found, ratio.clamp(1.0, 6.0), rtol=1e-6, atol=0)


def test_skyrls_clamps_are_idle_on_these_batches() -> None:
    """No axis carries them: |log ratio| ≤ 20, GSPO's ≤ 10, k3's value within ±10."""
    for name, here in batches().items():
        assert (here["logp"] - here["old"]).abs().max() < 10, name
        to_ref = here["ref"] - here["logp"]
        assert (to_ref.exp() - to_ref - 1).max() < 10, name


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="SkyRL lives in its own environment")
def test_goldens_are_current() -> None:
    for name, fresh in goldens("skyrl", "", CASES, skyrl_peer.credit, BATCHES).items():
        if fresh.dtype.kind == "f":
            np.testing.assert_allclose(STORED.arrays[name], fresh, rtol=1e-6, atol=1e-9, err_msg=name)
