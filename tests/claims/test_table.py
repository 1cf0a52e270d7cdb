"""The table of claims is whole, and every row leads to its tests."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from creditscope.claims import ours, p1_credit, p1_learning, p1_rank, p2_runs
from creditscope.claims.table import CLAIMS, check, find_claims, run_exact
from creditscope.errors import CreditscopeError
from each import each

IDS = [*(f"P1.{i}" for i in range(1, 15)), *(f"P2.{i}" for i in range(1, 7)), "C.1", "C.2", "C.3", "C.4"]


def test_every_statement_of_the_papers_is_a_claim_and_four_are_ours() -> None:
    assert list(CLAIMS) == IDS
    assert [name for name, claim in CLAIMS.items() if claim.where == "ours"] == ["C.1", "C.2", "C.3", "C.4"]


@each("name", IDS)
def test_a_claim_says_what_it_states_where_it_stands_what_decides_and_what_it_needs(name: str) -> None:
    claim = CLAIMS[name]
    assert min(map(len, (claim.statement, claim.where, claim.rule))) > 3
    assert len(claim.title.split()) <= 12
    assert claim.exact is not None or claim.runs is not None
    assert bool(claim.ask) == (claim.runs is not None)


@each("name", [name for name, claim in CLAIMS.items() if claim.exact is not None])
def test_an_exact_test_exists_under_its_name(name: str) -> None:
    module, _, function = (CLAIMS[name].exact or "").partition(":")
    assert callable(getattr(importlib.import_module(f"creditscope.{module}"), function))


@each("name", [name for name, claim in CLAIMS.items() if claim.runs is not None])
def test_without_evidence_a_claim_is_undecided_and_says_what_it_needs(name: str) -> None:
    verdicts = check([], [name])
    assert verdicts
    for verdict in verdicts:
        assert (verdict.claim, verdict.outcome) == (name, "undecided")
        assert verdict.reason.startswith("needs ")


def test_a_rule_that_names_a_threshold_names_the_one_of_the_code() -> None:
    assert "inside [1.5, 2.5]" in CLAIMS["P1.5"].rule
    assert f"than {p1_rank.RAISED} and" in CLAIMS["P1.12"].rule
    assert f"{p2_runs.UNSEEN:.0%}" in CLAIMS["P2.3"].rule
    assert f"above −{100 * p2_runs.LITTLE:g} points" in CLAIMS["P2.6"].rule
    assert f"more than {ours.HALF:g}, at each R" in CLAIMS["C.1"].rule
    assert f"{ours.SHARE:.0%}" in CLAIMS["C.2"].rule


@each(("module", "names"), [
    (p1_credit, ("ROUNDING", "SUM_ROUNDING", "LAW_BAND", "THIRDS", "LOST", "APART")),
    (p1_rank, ("ABOUT_TWO", "SIZES", "FLAT", "DIGIT", "RAISED", "PAIRED_GROUPS")), (p1_learning, ("NEAR",))])
def test_every_threshold_is_explained(module: ModuleType, names: tuple[str, ...]) -> None:
    source = Path(module.__file__ or "").read_text().splitlines()
    for name in names:
        line = next(i for i, text in enumerate(source) if text.startswith(f"{name} = "))
        assert source[line + 1].startswith('"""'), name


def test_an_id_that_does_not_exist_is_refused_with_the_choices() -> None:
    with pytest.raises(CreditscopeError, match=r"unknown claim 'p1\.5'") as error:
        find_claims(["p1.5"])
    assert "P1.14" in str(error.value)
    with pytest.raises(CreditscopeError, match=r"unknown claim 'P3\.1'"):
        list(run_exact(["P3.1"]))
    with pytest.raises(CreditscopeError, match=r"unknown claim 'P3\.1'"):
        check([], ["P3.1"])


def test_claims_come_in_the_order_of_the_table_whatever_the_order_of_the_asking() -> None:
    assert [claim.id for claim in find_claims(["C.1", "P1.2"])] == ["P1.2", "C.1"]
    assert len(find_claims()) == len(IDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["P2.2", "C.2", "C.3"])  # P2.2 and C.3 lie in one module
def test_an_exact_claim_alone_gives_its_own_verdicts_alone(name: str) -> None:
    verdicts = list(run_exact([name, "P1.5"]))  # P1.5 has no exact test
    assert {verdict.claim for verdict in verdicts} == {name}


@pytest.mark.slow
def test_every_exact_test_gives_verdicts_of_its_own_claim_in_one_sentence_each() -> None:
    found = list(run_exact())
    assert {verdict.claim for verdict in found} == {name for name, claim in CLAIMS.items() if claim.exact is not None}
    for verdict in found:
        assert verdict.reason
        assert "\n" not in verdict.reason
        assert verdict.outcome in ("holds", "refuted", "undecided")
    # An instrument that only ever confirms is worthless.
    assert {"holds", "refuted"} <= {verdict.outcome for verdict in found}


def test_an_exact_claim_without_torch_loads_none() -> None:
    code = ("import sys; from creditscope.claims.table import run_exact; found = list(run_exact(['C.2']));"
            "sys.exit('torch' in sys.modules or not found)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
