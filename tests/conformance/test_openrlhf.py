"""Our `openrlhf_*` rows give every token the credit that OpenRLHF 0.11.2's own code gives it."""

from __future__ import annotations

import importlib.util
from itertools import product

import numpy as np
import openrlhf_peer
import pytest
import torch
from batches import batches
from openrlhf_peer import BATCHES, CASES, STORED
from stored_peer import goldens

from creditscope.methods.dialects import DIALECTS
from each import each

pytestmark = pytest.mark.conformance
BY_NAME = {case.name: case for case in CASES}


@each("name, batch", product(BY_NAME, BATCHES))
def test_our_row_gives_each_token_the_credit_that_openrlhf_gives(name: str, batch: str) -> None:
    case = BY_NAME[name]
    advantages, w = STORED.differences(case, batch)
    assert advantages <= case.advantages, f"advantages differ by {advantages:.2e} of the largest"
    assert w <= case.tolerance, f"w differs by {w:.2e} of the largest"


def test_every_openrlhf_row_has_a_case_and_the_goldens_hold_them_in_order() -> None:
    assert {case.row for case in CASES} == {name for name in DIALECTS if name.startswith("openrlhf_")}
    assert STORED.arrays["cases"].tolist() == [case.name for case in CASES]
    assert str(STORED.arrays["openrlhf"]) == "0.11.2"
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize(("name", "changes"), [
    ("openrlhf_grpo", {"std_eps": 1e-4}), ("openrlhf_grpo", {"aggregate": "sequence_mean"}),
    ("openrlhf_grpo", {"clip_high": 0.28}), ("openrlhf_rloo", {"baseline": "group_mean"}),
    ("openrlhf_reinforce_pp", {"std": "sample"}), ("openrlhf_gspo", {"ratio": "token"}),
])
def test_a_row_that_differs_in_one_choice_does_not_equal_openrlhf(name: str, changes: dict[str, object]) -> None:
    from dataclasses import replace

    other = replace(BY_NAME[name], changes=changes)
    far = max(max(STORED.differences(other, batch)) for batch in ("off_policy", "graded", "near"))
    assert far > 10 * max(other.tolerance, other.advantages)


def test_openrlhf_silences_tokens_beyond_either_clip() -> None:
    here = batches()["off_policy"]
    a, w = STORED.theirs(BY_NAME["openrlhf_grpo"], "off_policy")
    ratio = (here["logp"] - here["old"]).exp()
    for clipped in (here["mask"] & (a > 0) & (ratio > 1.2), here["mask"] & (a < 0) & (ratio < 0.8)):
        assert clipped.any()
        assert not w[clipped].any()


def test_openrlhfs_clamps_are_idle_on_these_batches() -> None:
    """No axis carries them: |log ratio| ≤ 20, a KL value within ±10."""
    for name in BATCHES:
        here = batches()[name]
        assert (here["logp"] - here["old"]).abs().max() < 10, name
        to_ref = here["ref"] - here["logp"]
        assert (to_ref.exp() - to_ref - 1).max() < 10, name


@pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason="OpenRLHF lives in its own environment")
def test_goldens_are_current() -> None:
    for name, fresh in goldens("openrlhf", "", CASES, openrlhf_peer.credit, BATCHES).items():
        if fresh.dtype.kind == "f":
            np.testing.assert_allclose(STORED.arrays[name], fresh, rtol=1e-7, atol=1e-9, err_msg=name)
            assert torch.from_numpy(fresh).isfinite().all()
