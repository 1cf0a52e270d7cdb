"""A method is a row: impossible rows cannot be built, and a new one takes five lines."""

from __future__ import annotations

import re

import pytest
import torch

from creditscope import METHODS, CreditscopeError, Method, effective_credit, surrogate
from creditscope.methods.axes import AXES
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.find import find
from creditscope.methods.table import GRPO, P2_TABLE_1
from creditscope.objective.advantages import BASELINES, SCALES
from creditscope.objective.penalties import KL_ESTIMATORS
from creditscope.objective.ratios import LOG_RATIOS
from creditscope.objective.weights import AGGREGATES, KEEPS, TOKEN_WEIGHTS
from each import each
from makers import make

ASKED = {
    "reinforce", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo", "grpo", "grpo_v32", "dr_grpo", "dapo", "gspo",
    "gspo_token", "gmpo", "cispo", "gpg", "gcpo", "cppo", "gtpo", "sapo", "opo", "maxrl", "dppo", "bnpo", "kimi",
    "p1_grpo"}


def test_the_table_holds_every_method_asked_for_and_p2s_ten_rows() -> None:
    assert set(METHODS) >= ASKED
    assert set(P2_TABLE_1) <= set(METHODS)
    assert len(P2_TABLE_1) == 10


@each("row", METHODS.values())
def test_every_row_names_its_paper_and_cites_its_choices(row: Method) -> None:
    assert row.arxiv == "" or re.fullmatch(r"\d{4}\.\d{5}", row.arxiv)
    # Williams 1992 is older than arXiv; a row that no paper has says so.
    assert row.name == "reinforce" or row.arxiv or row.note.startswith("Ours.")
    assert row.cites
    axes = set(row.__dataclass_fields__)
    assert set(row.cites) <= axes


@each("row", [*METHODS.values(), *DIALECTS.values()])
def test_every_row_is_its_parent_plus_its_diff(row: Method) -> None:
    if row.parent is None:
        return
    changes = {axis: ours for axis, (_, ours) in row.diff(find(row.parent)).items()}
    rebuilt = find(row.parent).but(name=row.name, **changes)
    assert not rebuilt.diff(row)


def test_the_names_on_each_axis_are_exactly_the_functions_behind_it() -> None:
    behind = {"baseline": {*BASELINES, "external"}, "scale": set(SCALES), "aggregate": set(AGGREGATES),
              "keep": set(KEEPS), "token_weight": set(TOKEN_WEIGHTS), "ratio": {*LOG_RATIOS, "none"},
              "kl": {*KL_ESTIMATORS, "none"}}
    for axis, names in behind.items():
        assert set(AXES[axis]) == names, axis


def test_a_user_adds_a_method_in_five_lines() -> None:
    mine = GRPO.but(name="mine", scale="none", aggregate="token_mean", clip_high=0.5)
    rollouts = make([1, 0], group=[0, 0], lengths=[1, 3])
    w = effective_credit(lambda logp: surrogate(mine, logp, rollouts), rollouts.logp)
    # A = (½, −½), four tokens: w = ±1/8.
    assert torch.allclose(w, torch.tensor([[.125, 0, 0], [-.125, -.125, -.125]], dtype=torch.float64))
    assert mine.parent == "grpo"


@each(("changes", "message"), [
    ({"baseline": "group_men"}, "unknown baseline of method 'x': 'group_men'; did you mean 'group_mean'"),
    ({"ratio": "none"}, "bound='clip' needs a ratio to bound, but ratio='none'; set ratio='token' or bound='none'"),
    ({"clip_low": None, "clip_high": None}, "bound='clip' needs clip_low or clip_high"),
    ({"bound": "none"}, "clip_low=0.2 and clip_high=0.2 do nothing with bound='none'"),
    ({"bound": "clip_inside"}, "set ratio='sequence_mean'"),
    ({"bound": "gate", "clip_low": None, "clip_high": None}, "needs gate_pos > 0 and gate_neg > 0, got None and None"),
    ({"clip_low": -0.1}, "clip_low=-0.1 puts the floor above 1"),
    ({"clip_low": 1.5}, "clip_low=1.5 puts the floor at or below 0"),
    ({"clip_high": -0.1}, "clip_high=-0.1 puts the ceiling below 1"),
    ({"dual_clip": 0.5}, "dual_clip=0.5 must exceed 1 + clip_high"),
    ({"keep": "large_advantage"}, "need a threshold"),
    ({"keep": "top_advantage", "keep_threshold": 3.0}, "0 < keep_threshold ≤ 1, not 3.0"),
    ({"trust": "binary_tv"}, "trust='binary_tv' needs trust_low and trust_high; give both, or trust='none'"),
    ({"trust": "binary_tv", "trust_high": 0.1}, "needs trust_low"),
    ({"kl": "none", "beta": 0.1}, "beta=0.1 weighs a KL term, but kl='none'"),
    ({"beta": -0.1}, "beta=-0.1 would reward distance"),
    ({"kl_in": "reward"}, "set kl='k1'"),
    ({"kl": "k1", "kl_in": "token_reward"}, "cannot follow"),
    ({"kl_level": "sequence"}, "defined for kl='k2'"),
    ({"baseline": "external"}, "takes credit as it comes"),
    ({"max_tokens": 9}, "goes with aggregate='constant', not 'sequence_mean'"),
    ({"gamma_pos": (1.0, 1.0)}, "gamma_pos=(1.0, 1.0) does nothing with bound='clip'; set bound='gamma' or drop it"),
    ({"name": "Dr. GRPO"}, "lower-case letters"),
    ({"clip_high": float("nan")}, "clip_high must be a finite number, got nan"),
    ({"clip_high": "a"}, "clip_high must be a finite number, got 'a'"),
])
def test_an_impossible_row_cannot_be_built_and_says_how_to_repair_it(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CreditscopeError) as caught:
        GRPO.but(**({"name": "x"} | changes))
    assert message in str(caught.value)


def test_a_misspelt_axis_and_a_missing_name_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="'clip_hihg'; did you mean 'clip_high'"):
        GRPO.but(name="x", clip_hihg=0.3)
    with pytest.raises(CreditscopeError, match="needs name="):
        GRPO.but(scale="none")


def test_an_unknown_method_names_the_nearest_one() -> None:
    with pytest.raises(CreditscopeError, match="unknown method 'grop'; did you mean 'grpo'"):
        find("grop")
