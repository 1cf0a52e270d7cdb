"""Our preference rows against TRL's own trainers, live: the same w, to the last digits of float64."""

from __future__ import annotations

import pytest

from each import each

pytest.importorskip("trl", reason="TRL's own code is the other side of the comparison")

from trl_preferences import CASES, PreferenceCase, our_w, pair_batches, trl_w

from creditscope.methods.dialects import DIALECTS

pytestmark = [pytest.mark.conformance, pytest.mark.slow]
BATCHES = pair_batches()


def apart(case: PreferenceCase, row: PreferenceCase | None = None) -> float:
    """max|Δw| / max|w| over the batches."""
    found = []
    for rollouts, logp in BATCHES.values():
        theirs = trl_w(case, rollouts, logp)
        found.append(float((our_w(row or case, rollouts, logp) - theirs).abs().max() / theirs.abs().max()))
    return max(found)


@each("case", CASES)
def test_the_rows_w_is_that_of_trls_own_loss(case: PreferenceCase) -> None:
    assert apart(case) <= case.tolerance


def test_every_preference_row_of_trl_is_compared() -> None:
    assert {case.dialect for case in CASES} == {name for name, row in DIALECTS.items()
                                                if row.linked and name.startswith("trl_")}


def test_the_papers_ipo_is_not_trls() -> None:
    # TRL's log-ratios are means over the tokens, the paper's are sums.
    ipo = next(case for case in CASES if case.dialect == "trl_ipo")
    paper = PreferenceCase(ipo.dialect, ipo.config, ipo.settings, {"score": "log_ratio"})
    assert apart(ipo, paper) > 0.1


@each("case", [case for case in CASES if case.settings.get("beta", 1.0) != 1.0])
def test_another_beta_is_seen(case: PreferenceCase) -> None:
    number = "link_weight" if "link_weight" in case.changes else "beta"
    other = PreferenceCase(case.dialect, case.config, case.settings, {**case.changes, number: 1.03})
    assert apart(case, other) > 1e-4

