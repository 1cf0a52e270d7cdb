"""P2's exact claims about the objective: as stated, by hand, and refuted by something wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from creditscope import METHODS
from creditscope.claims.verdict import ClaimVerdict
from creditscope.exact import p2 as p2_exact
from creditscope.exact.p2_prefix import _pair as pair
from creditscope.exact.p2_table import TABLE
from creditscope.exact.ratio_one import value_at_ratio_one
from creditscope.exact.shared_prefix import nodes
from creditscope.methods.table import P2_TABLE_1
from exact.makers_exact import said, swapped

# -- P2.1 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ten() -> list[ClaimVerdict]:
    return p2_exact.ten_methods()


@pytest.mark.slow
def test_five_printed_rows_are_their_methods_four_depart_and_one_cannot_be_told(ten: list[ClaimVerdict]) -> None:
    printed = {v.subject: v.outcome for v in ten if "as printed" in v.definition}
    assert tuple(printed) == P2_TABLE_1
    departs = {"gspo", "cppo", "dr_grpo", "cispo"}
    assert printed == {name: "refuted" if name in departs else "undecided" if name == "gcpo" else "holds"
                       for name in P2_TABLE_1}


def test_with_the_repair_the_four_rows_hold(ten: list[ClaimVerdict]) -> None:
    repaired = {v.subject: v.outcome for v in ten if "repaired" in v.definition}
    assert repaired == dict.fromkeys(["gspo", "cppo", "dr_grpo", "cispo"], "holds")


def test_dr_grpo_as_printed_is_off_by_the_constant_of_its_authors(ten: list[ClaimVerdict]) -> None:
    # 1/R against 1/(R·L_max) with L_max = 30: (30 − 1)·w.
    assert said(ten, "dr_grpo", "as printed").observed == pytest.approx(29, abs=1e-12)


def test_a_row_written_from_the_table_is_not_confirmed_by_it(ten: list[ClaimVerdict]) -> None:
    found = said(ten, "gcpo")
    assert found.observed is not None
    assert found.observed < 1e-12
    assert found.reason.startswith("needs gcpo's own loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in P2_TABLE_1 if name != "gcpo"])
def test_another_loss_under_the_methods_name_refutes_its_row(name: str) -> None:
    other = METHODS[name].replace(aggregate="sequence_sum")
    last = [v for v in p2_exact.ten_methods(methods=swapped(**{name: other})) if v.subject == name][-1]
    assert last.outcome == "refuted"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"clip_high": 0.25}, {"clip_low": 0.25}, {"std": "population"}, {"kl": "k2"}])
def test_a_small_change_of_grpo_refutes_its_row(changes: dict[str, Any]) -> None:
    found = said(p2_exact.ten_methods(methods=swapped(grpo=METHODS["grpo"].but(name="grpo", **changes))), "grpo")
    assert found.outcome == "refuted"


# -- P2.5 -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_is_what_proposition_4_leaves_of_it() -> None:
    found = p2_exact.loss_value()
    assert [v.outcome for v in found] == ["holds"] * 5
    assert [v.subject.split(", ")[1] for v in found] == [f"{n} methods" for n in (len(METHODS) - 1, 4, 2, 4, 10)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes", "law"), [
    ("grpo", {"aggregate": "token_mean"}, "even over answers"),
    ("gspo", {"baseline": "none", "scale": "none"}, "even over answers"),
    ("dapo", {"aggregate": "sequence_mean"}, "even over tokens"),
    ("dr_grpo", {"max_tokens": 7}, "even over tokens"),
    ("cppo", {"keep": "all", "keep_threshold": None}, "others"),
    ("gpg", {"aggregate": "sequence_sum"}, "others"),
])
def test_a_row_with_other_weights_refutes_its_law(name: str, changes: dict[str, Any], law: str) -> None:
    rows = swapped(**{name: METHODS[name].replace(**changes)})
    (found,) = [v for v in p2_exact.loss_value(methods=rows) if v.definition.startswith(law)]
    assert found.outcome == "refuted"


def test_a_loss_without_a_baseline_is_a_progress_signal() -> None:
    (found,) = [v for v in p2_exact.loss_value(methods=swapped(gpg=METHODS["reinforce"]))
                if v.definition.startswith("no progress")]
    assert found.outcome == "refuted"


@pytest.mark.slow
def test_a_closed_form_with_another_weight_of_kl_is_refuted() -> None:
    found = p2_exact.loss_value(closed_form=lambda row, batch: value_at_ratio_one(
        row.replace(beta=row.beta * 1.001), batch))
    assert [v.outcome for v in found] == ["refuted", *["holds"] * 4]


def test_the_length_statistic_of_two_answers_by_hand() -> None:
    # r = (1, 0), L = (2, 5): A = ±½, σ = 1/√2. DAPO: Σ A L/(σ ΣL) = −1.5·√2/7.
    rollouts, _ = pair(2, 5)
    rollouts = replace(rollouts, ref_logp=rollouts.logp, entropy=rollouts.logp * 0)
    assert TABLE["dapo"].value(rollouts) == pytest.approx(-1.5 * math.sqrt(2) / 7, abs=1e-15)
    # Dr.GRPO: Σ A L/(R·L_max) = −1.5/10, and no KL at the reference.
    assert TABLE["dr_grpo"].value(rollouts) == pytest.approx(-0.15, abs=1e-15)
    assert len(nodes(rollouts)) == 6


@pytest.mark.slow
def test_every_verdict_says_its_number_in_one_sentence(ten: list[ClaimVerdict]) -> None:
    for verdict in (*ten, *p2_exact.loss_value()):
        assert any(c.isdigit() for c in verdict.reason)
        assert not verdict.reason.endswith(".")
        assert verdict.threshold
        assert verdict.n
