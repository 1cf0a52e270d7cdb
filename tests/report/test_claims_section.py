"""Claims as cards, and the table of methods: what stands there is what check and the rows say. No torch is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope.claims.evidence import read_evidence
from creditscope.claims.page import observed
from creditscope.claims.table import CLAIMS, check
from creditscope.methods.table import METHODS
from creditscope.report import claims, methods
from creditscope.report.run import read_run
from creditscope.runs.record import Record
from report import records

TESTED = [claim.id for claim in CLAIMS.values() if claim.runs is not None]


def write(path: Path, value: float = 0.0, change: float = 0.01, **settings: Any) -> Path:
    """A run of GRPO whose loss is `value` at every step, where P2.5 says 0, and whose update changes by `change` at a
    tenth of the credit, where P2.3 says less than 0.05 with an interval over runs.
    """
    config = {"model": "tiny", "task": "arithmetic", "method": "grpo", "credit": None, "group": 4, "prompts": 4,
              "steps": 4, "seed": 0, "lr": 1e-4, "inner_steps": 1, "beta1": 0.9} | settings
    with Record.create(path, config, {}) as record:
        for step in range(4):
            record.append(step, {"rollouts/spent": 16, "reward/mean": 0.5, "signal/dead_groups": 0.25,
                                 "credit/within": 0.0, "objective/value": value, "optimizer/scale_change": change})
    return path


def card(html: str, claim: str) -> str:
    return unescape(html.split(f'id="claim-{claim}"')[1].split("</article>")[0])


def test_a_card_has_the_verdict_the_number_the_rule_and_the_command(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    html = claims.section(read_run(path)).html()
    (verdict,) = check([read_evidence(Record.open(path))], ["P2.5"])
    text = re.sub("<[^>]+>", "", card(html, "P2.5"))
    assert verdict.outcome == "holds"
    for words in ("✓ holds", observed(verdict), verdict.definition, verdict.threshold, verdict.reason,
                  f"creditscope papers check {path} --claim P2.5 --all"):
        assert words in text


def test_a_loss_that_is_not_zero_refutes_on_the_card(tmp_path: Path) -> None:
    html = claims.section(read_run(write(tmp_path / "run", value=0.5))).html()
    assert 'data-verdict="refuted"' in card(html, "P2.5")
    assert "✗ refuted" in card(html, "P2.5")
    assert "0.5" in card(html, "P2.5")


def test_every_claim_on_runs_stands_on_the_page_once(tmp_path: Path) -> None:
    html = claims.section(read_run(write(tmp_path / "run"))).html()
    cards = re.findall(r'data-claim="([^"]+)"', html)
    untested = html.split('id="claims-untested"')[1].split("</details>")[0]
    listed = re.findall(r"<tr><td>([PC][0-9.]+)</td>", untested)
    assert sorted(cards + listed) == sorted(TESTED)


def test_what_was_not_tested_says_what_it_needs(tmp_path: Path) -> None:
    html = unescape(claims.section(read_run(write(tmp_path / "run"))).html())
    assert CLAIMS["P1.5"].ask in html.split('id="claims-untested"')[1].split("</details>")[0]


def test_undecided_claims_of_one_run_are_folded_up_and_of_three_are_open(tmp_path: Path) -> None:
    # 0.01, 0.05, 0.09: the interval lies on both sides of 0.05, so three runs do not decide P2.3 either
    paths = [write(tmp_path / f"{seed}", seed=seed, change=0.01 + 0.04 * seed) for seed in range(3)]
    one = claims.section(read_run(paths[0])).html()
    three = claims.of([read_evidence(Record.open(path)) for path in paths], [str(tmp_path)]).html()
    assert '<details id="claims-undecided">' in one
    assert '<details id="claims-undecided" open>' in three
    assert "--seed 1" in one
    assert "--seed 1" not in three
    assert "? undecided" in card(three, "P2.3")


def test_a_claim_that_one_run_leaves_open_is_decided_by_three(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{seed}", seed=seed) for seed in range(3)]
    three = claims.of([read_evidence(Record.open(path)) for path in paths], [str(tmp_path)]).html()
    assert "✓ holds" in card(three, "P2.3")
    assert "? undecided" in card(claims.section(read_run(paths[0])).html(), "P2.3")


@pytest.mark.slow
def test_claims_that_need_no_run_are_named_with_their_command_and_not_run(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    html = claims.section(read_run(path)).html()
    exact = html.split('id="claims-exact"')[1]
    assert "creditscope papers check --exact" in exact
    assert all(f"<td>{claim.id}</td>" in exact for claim in CLAIMS.values() if claim.exact is not None)
    code = ("import sys; from pathlib import Path; from creditscope.report import claims, methods, glossary;"
            f"from creditscope.report.run import read_run; run = read_run(Path({str(path)!r}));"
            "claims.section(run), methods.section(run), glossary.section(run); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_filter_counts_the_claims_that_have_a_verdict_of_each_kind(tmp_path: Path) -> None:
    section = claims.section(read_run(write(tmp_path / "run", value=0.5)))
    assert section.data is not None
    found = check([read_evidence(Record.open(tmp_path / "run"))])
    assert section.data["counts"] == {word: len({verdict.claim for verdict in found if verdict.outcome == word})
                                      for word in ("holds", "refuted", "undecided")}
    assert section.data["counts"]["refuted"] == 1


def test_a_damaged_reading_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    (path / "scope").mkdir()
    (path / "scope" / "000001.npz").write_bytes(b"no zip")
    html = claims.section(read_run(path)).html()
    assert "The claims could not be tested: cannot read the readings of step 1" in html


@pytest.mark.parametrize("settings", [
    {"group": "eight", "seed": [0], "method": 7}, {"inner_steps": "many", "lr": None, "beta1": "0.9"},
    {"credit": 3, "adapt": {"x": 1}, "also": 4, "brake": 0.5}], ids=["kinds", "numbers", "names"])
def test_settings_of_the_wrong_kind_break_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = read_run(write(tmp_path / "run", **settings))
    claims.section(run).html()
    methods.section(run).html()


@pytest.mark.slow
def test_claims_on_hostile_bare_and_empty_records_are_text(tmp_path: Path) -> None:
    Record.create(tmp_path / "empty", {}, {}).close()
    for path in (records.hostile(tmp_path / "hostile"), records.bare(tmp_path / "bare"), tmp_path / "empty"):
        html = claims.section(read_run(path)).html() + methods.section(read_run(path)).html()
        assert "<img" not in html
        html.encode()


def test_a_reading_that_is_not_a_gram_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    with Record.resume(path, Record.open(path).config) as record:
        record.save_reading(0, {"gram": np.ones(3)})
    assert "damaged" in claims.section(read_run(path)).html()


# -- methods ---------------------------------------------------------------------------------------------------------


def test_a_row_in_full_has_its_equation_its_differences_and_the_law_of_its_loss(tmp_path: Path) -> None:
    html = unescape(methods.section(read_run(write(tmp_path / "run", method="dr_grpo"))).html())
    own = re.sub("<[^>]+>", "", html.split('data-method="dr_grpo"')[1].split("</div>")[0])
    assert "J = Σ_it 1/(B·L_max) · [min(ρ_it·A_i, clip(ρ_it, 0.8, 1.2)·A_i)] − β·K3" in own
    assert "scale: group_std → none (not scaled)" in own
    assert "J = Σ_i A_i·L_i/(B·L_max)" in own


def test_the_equation_has_the_runs_own_weight_of_the_penalty(tmp_path: Path) -> None:
    html = methods.section(read_run(write(tmp_path / "run", beta=0.07))).html()
    assert "0.07·K3" in html
    assert "grpo, β = 0.07" in html


def test_grpo_differs_from_grpo_in_nothing_and_an_unknown_method_says_so(tmp_path: Path) -> None:
    assert methods.changes(METHODS["grpo"]) == []
    assert "GRPO&#x27;s own row" in methods.section(read_run(write(tmp_path / "a"))).html()
    strange = methods.section(read_run(write(tmp_path / "b", method="mine"))).html()
    assert "No row of the table is called mine" in strange
