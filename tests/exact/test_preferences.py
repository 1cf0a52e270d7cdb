"""C.4: what DPO shares with GRPO and what it does not, each with a case that holds and one that refutes it."""

from __future__ import annotations

import pytest

from creditscope.exact.preferences import contrast, readings
from creditscope.methods.table import DPO, DR_GRPO, GRPO, METHODS, RLOO


def test_the_verdicts_on_the_table() -> None:
    outcomes = [verdict.outcome for verdict in contrast()]
    assert outcomes == ["holds", "holds", "holds", "refuted", "holds", "refuted", "holds", "holds", "refuted"]


@pytest.mark.parametrize(("field", "wrong"), [
    ("prefix", {"score": "log_ratio_mean"}),  # 1/L_i
    ("scale", {"scale": "none"}), ("baseline", {"scale": "none"}),  # the reward itself in the place of its order
    ("tie", {"scale": "label", "baseline": "none", "keep": "all", "keep_threshold": None}),
    ("beta_start", {"score": "log_prob"}),  # without a reference pairs do not start at one margin
])
def test_another_row_refutes_what_holds_for_dpo(field: str, wrong: dict[str, object]) -> None:
    assert getattr(readings(DPO), field) == 0
    assert getattr(readings(DPO.replace(**wrong)), field) > 1e-3


def test_beside_group_methods() -> None:
    grpo, dr, rloo = readings(GRPO), readings(DR_GRPO), readings(RLOO)
    assert grpo.within == dr.within == rloo.within == 0
    assert min(row.baseline for row in (grpo, dr, rloo)) > 0.1  # they need theirs
    assert grpo.prefix > 0.05
    assert max(dr.prefix, rloo.prefix) < 1e-12
    assert grpo.scale < 1e-12 < dr.scale


def test_two_answers_of_a_group_bound_the_rank() -> None:
    # Three groups with a pair, four answers each: DPO moves 2·3 of them, GRPO all twelve.
    assert readings(DPO, size=4).rank == 6
    assert readings(GRPO, size=4).rank == 12
    assert {readings(METHODS[name]).rank for name in ("dpo", "ipo", "simpo", "grpo")} == {6}
