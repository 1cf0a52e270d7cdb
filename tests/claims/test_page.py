"""Verdicts and evidence as pages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from creditscope.claims.evidence import Evidence
from creditscope.claims.page import (
    COLUMNS,
    FIGURES,
    by_place,
    claims_page,
    curves,
    number,
    observed,
    plain,
    readme_table,
    sample,
    summary,
    table1,
    told,
    verdict_table,
    why_low,
)
from creditscope.claims.table import CLAIMS
from creditscope.claims.verdict import ClaimVerdict, Outcome

RUN = "tiny · arithmetic · p1_grpo"


def verdict(claim: str = "P1.5", outcome: Outcome = "holds", **changes: Any) -> ClaimVerdict:
    return ClaimVerdict(**{"claim": claim, "definition": "all", "subject": RUN, "outcome": outcome,  # type: ignore[arg-type]
                      "reason": "it is 2"} | changes)


def run(group: int, seed: int, ranks: dict[int, float], accuracy: tuple[float, ...] = (), **config: Any) -> Evidence:
    """A run read at some steps, one group a reading, and evaluated before each step and after the last."""
    steps = [{"step": i, "eval/accuracy": a, "rollouts/spent": 8 * group} for i, a in enumerate(accuracy[:-1])]
    steps += [{"step": len(steps), "eval/accuracy": a} for a in accuracy[-1:]]
    settings = {"model": "tiny", "task": "arithmetic", "method": "p1_grpo", "group": group, "seed": seed} | config
    groups = {"step": [float(step) for step in ranks], "all/effective_rank": list(ranks.values()),
              "all/top1": [1 / rank for rank in ranks.values()]} if ranks else {}
    return Evidence(name=f"r{group}-{seed}", config=settings, steps=tuple(steps), groups=groups)


# -- few words -------------------------------------------------------------------------------------------------------


def test_a_verdict_with_an_interval_shows_it_and_one_without_does_not() -> None:
    assert observed(verdict(observed=1.23456, interval=(1.1, 1.36))) == "1.23 [1.1, 1.36]"
    assert observed(verdict(observed=3840.0)) == "3,840"
    assert observed(verdict(observed=-0.302, interval=(-0.37, -0.233))) == "-0.302 [-0.37, -0.233]"
    assert (observed(verdict()), sample(verdict())) == ("", "")
    assert sample(verdict(n=1200, of="groups")) == "1,200 groups"


@pytest.mark.parametrize(("value", "text"), [(1e-16, "0"), (-2.5e-10, "0"), (2e-6, "2e-06"), (-0.30251, "-0.303"),
                                             (1e7, "1e+07"), (999.0, "999"), (1000.0, "1,000")])
def test_rounding_is_shown_as_nothing_and_small_numbers_as_they_are(value: float, text: str) -> None:
    assert number(value) == text


def test_outcomes_that_agree_are_a_word_and_others_are_counted_the_refuted_first() -> None:
    some = [verdict(outcome="holds"), verdict(outcome="undecided"), verdict(outcome="refuted"),
            verdict(outcome="refuted")]
    assert told(some) == "✗ 2 refuted, ✓ 1 holds, ? 1 undecided"
    assert told(some[:1]) == "✓ holds"
    assert told(some[2:]) == "✗ refuted (2 of 2)"


def test_the_summary_counts_claims_and_verdicts() -> None:
    some = [verdict(), verdict(outcome="refuted"), verdict("C.1", "undecided"), verdict("C.1", "undecided")]
    assert summary(some) == "2 claims, 4 verdicts: 1 hold, 1 refuted, 2 undecided"
    assert summary(some[:1]) == "1 claim, 1 verdict: 1 hold, 0 refuted, 0 undecided"
    assert summary([]) == "no verdict"


def test_lines_are_by_claim_in_the_order_of_the_table_and_exact_subjects_are_one_place() -> None:
    some = [verdict("C.2", subject="matrices"), verdict("P2.3", subject="SGD, β = 0"), verdict("P2.3", subject="AdamW"),
            verdict("P2.3", subject=f"{RUN}, μ = 4"), verdict("P1.14", subject="runs"),
            verdict("P2.6", subject="no run"), verdict("P2.5", subject="my · model · arithmetic · grpo, R = 8, μ = 4")]
    assert {key: len(found) for key, found in by_place(some).items()} == {
        ("P1.14", "no run"): 1, ("P2.3", "exact"): 2, ("P2.3", RUN): 1,
        ("P2.5", "my · model · arithmetic · grpo"): 1, ("P2.6", "no run"): 1, ("C.2", "exact"): 1}


# -- markdown --------------------------------------------------------------------------------------------------------


def rows(text: str) -> list[list[str]]:
    return [re.split(r"(?<!\\) ?\| ?", line.strip())[1:-1] for line in text.splitlines() if line.startswith("|")]


def test_text_of_strangers_makes_no_cell_no_tag_no_link_and_no_line() -> None:
    assert plain("a|b") == "a\\|b"
    assert plain("<script>") == "&lt;script&gt;"
    assert plain("[x](http://y) `z` *w* ~v~ \\") == "\\[x\\](http://y) \\`z\\` \\*w\\* \\~v\\~ \\\\"
    assert plain("a\nb\tc") == "a b c"
    assert "\x1b" not in plain("\x1b[2J")


def test_the_readme_s_table_has_a_line_a_claim_and_a_verdict_a_subject() -> None:
    text = readme_table([verdict(), verdict(outcome="refuted"), verdict("P1.2", subject="enumerated"),
                         verdict(subject="evil|<b> · arithmetic · grpo")])
    head, _, first, second = rows(text)
    assert head == ["", "claim", "verdict"]
    assert first == ["P1.2", CLAIMS["P1.2"].title, "✓ holds: exact"]
    assert second[2] == f"✗ 1 refuted, ✓ 1 holds: {RUN}<br>✓ holds: evil\\|&lt;b&gt; · arithmetic · grpo"


def test_a_claim_that_found_nothing_to_test_is_not_called_exact() -> None:
    assert rows(readme_table([verdict("P1.8", "undecided", subject="runs")]))[2][2] == "? undecided: no run"
    assert rows(readme_table([verdict("P2.4", "undecided", subject="no run")]))[2][2] == "? undecided: no run"


def test_the_page_has_every_claim_with_statement_rule_and_command() -> None:
    page = claims_page([verdict(reason="it is | 2")])
    for claim in CLAIMS.values():
        assert f"## {claim.id} {claim.title}\n" in page
        assert claim.statement in page
        assert f"--claim {claim.id}\n" in page
    assert page.count("No verdict yet.") == len(CLAIMS) - 1
    assert "it is \\| 2" in page
    found = [row for row in rows(page) if row[0] == "all"]
    assert found == [["all", RUN, "✓ holds", "", "", "", "", "it is \\| 2"]]


def test_the_page_prints_value_interval_and_sample_of_each_verdict() -> None:
    page = claims_page([verdict(observed=-1.5, interval=(-2.0, -1.25), n=3, of="runs", expected="2", threshold="0")])
    assert [row for row in rows(page) if row[0] == "all"] == [
        ["all", RUN, "✓ holds", "-1.5 [-2, -1.25]", "2", "0", "3 runs", "it is 2"]]
    assert "1 claim, 1 verdict: 1 hold, 0 refuted, 0 undecided." in page


def test_the_page_of_some_claims_has_no_others_and_an_exact_claim_no_command_for_runs() -> None:
    page = claims_page([], ["P1.3"])
    assert page.count("\n## ") == 1
    assert "creditscope papers check --exact --claim P1.3" in page
    assert "RUN..." not in page
    assert "No verdict yet." in page


# -- Table 1 and the figures -----------------------------------------------------------------------------------------


def test_table_1_has_p1_s_numbers_beside_the_mean_over_runs_with_its_interval() -> None:
    # Run means 2, 3, 4: mean 3 ± 4.3027·1/√3 = 2.4842. Accuracy 50, 50, 50 before and 60, 60, 60 after.
    runs = [run(8, seed, {0: 1.0 + seed, 5: 3.0 + seed}, (0.5, 0.6)) for seed in range(3)]
    head, _, line = rows(table1([*runs]))
    found = dict(zip(head, line, strict=True))
    assert list(found) == list(COLUMNS)
    assert found["R"] == "8"
    assert (found["P1: r_eff"], found["P1: top-1"], found["P1: max rank"]) == ("≈ 2", "0.5–0.6", "7")
    assert found["r_eff, all"] == "3.00 [0.52, 5.48]"
    assert found["r_eff, a layer"] == ""
    assert (found["before, %"], found["after, %"], found["runs"]) == ("50.0 [50.0, 50.0]", "60.0 [60.0, 60.0]", "3")


def test_the_columns_of_table_1_are_those_of_the_evidence() -> None:
    columns = {"all/effective_rank": 4.5, "all/effective_rank_truncated_2": 1.75, "layer/effective_rank": 3.5,
               "layer/effective_rank_truncated_2": 1.5, "qv/effective_rank": 3.25, "w_null": 7.0,
               "all/top1": 0.625, "layer/top1": 0.75, "all/numerical_rank": 8.0, "reward_std": 0.5}
    groups = {"step": [0.0, 5.0]} | {name: [value - 0.25, value + 0.25] for name, value in columns.items()}
    # Two readings of one run: a mean, and nothing about other runs.
    one = Evidence(name="a", config={"group": 8, "seed": 0}, groups=groups)
    head, _, line = rows(table1([one]))
    found = dict(zip(head, line, strict=True))
    assert [found[name] for name in ("r_eff, all", "all, cut to 2", "r_eff, a layer", "a layer, cut to 2",
                                     "r_eff, q and v", "null", "top-1, all", "top-1, a layer", "rank, all",
                                     "reward std")] == [
        f"{value:.2f}" for value in columns.values()]


def test_accuracy_in_table_1_is_in_percent_with_its_interval_over_runs() -> None:
    # 50, 60, 70 % after: 60 ± 4.3027·10/√3 = 24.842.
    runs = [run(2, seed, {0: 1.0}, (0.4, 0.5 + seed / 10)) for seed in range(3)]
    found = dict(zip(*[rows(table1(runs))[i] for i in (0, 2)], strict=True))
    assert (found["before, %"], found["after, %"]) == ("40.0 [40.0, 40.0]", "60.0 [35.2, 84.8]")


def test_table_1_has_a_line_an_r_in_order_and_a_table_a_family() -> None:
    runs = [run(16, 0, {0: 5.0}), run(4, 0, {0: 3.0}), run(4, 0, {0: 9.0}, model="other"), run(2, 0, {}, (0.5, 0.5),
                                                                                            task="turns")]
    page = table1(runs)
    assert [row[0] for row in rows(page)] == ["R", "---", "4", "16", "R", "---", "4"]
    assert [row[2] for row in rows(page) if row[0] in ("4", "16")] == ["3.00", "5.00", "9.00"]
    assert "turns" not in page  # nothing was read there
    assert dict(zip(*[rows(page)[i] for i in (0, 3)], strict=True))["P1: r_eff"] == ""  # P1 has no R = 16


@pytest.mark.parametrize("other", [{"credit": "step_reward"}, {"method": "ppo"}, {"adapt": "late_group"},
                                   {"inner_steps": 4}, {"minibatches": 2}, {"group": None}, {"seed": None}], ids=str)
def test_table_1_has_runs_as_p1_s_alone(other: dict[str, Any]) -> None:
    """One credit an answer (`ppo` has a critic's), one R, one update a batch."""
    settings: dict[str, Any] = {"group": 8, "seed": 0, "ranks": {0: 9.0}} | other
    stranger = run(**settings)
    page = table1([run(4, 0, {0: 3.0}), stranger])
    assert [row[0] for row in rows(page)] == ["R", "---", "4"]
    assert "9.00" not in page
    assert not rows(table1([stranger]))  # no table without a run


def test_a_run_read_twice_counts_once_in_table_1_with_more_readings() -> None:
    head, _, line = rows(table1([run(8, 0, {0: 9.0}, every=10), run(8, 0, {0: 3.0, 5: 4.0}, every=5)]))
    found = dict(zip(head, line, strict=True))
    assert (found["r_eff, all"], found["runs"]) == ("3.50", "1")


def test_curves_are_means_over_runs_at_each_step_by_r() -> None:
    found = curves([run(4, 0, {0: 1.0, 5: 2.0}), run(4, 1, {0: 3.0}), run(2, 0, {0: 1.5})], FIGURES["rank"][1])
    assert list(found) == ["R = 2", "R = 4"]
    assert [(step, p.mean, p.n) for step, p in found["R = 4"]] == [(0, 2.0, 2), (5, 2.0, 1)]


def test_the_curve_of_the_accuracy_stands_at_the_steps_taken_until_then() -> None:
    accuracy = curves([run(4, 0, {}, (0.25, 0.5, 0.75))], FIGURES["accuracy"][1])
    assert [(step, p.mean) for step, p in accuracy["R = 4"]] == [(0, 0.25), (1, 0.5), (2, 0.75)]


def test_runs_without_the_number_have_no_curve() -> None:
    assert curves([run(4, 0, {})], FIGURES["rank"][1]) == {}


def test_the_table_of_verdicts_has_a_column_a_kind_of_subject_and_leaves_out_what_was_not_measured() -> None:
    found = [verdict(outcome="refuted", observed=3.0), verdict(subject="tiny · arithmetic · grpo", observed=2.0),
             verdict(outcome="undecided", subject="Smol · gsm8k · p1_grpo"), verdict(subject="formula", observed=1.0)]
    text = verdict_table(found, {"exact": "exact", "packaged": "tiny", "other": "Smol"})
    header, _, line = text.splitlines()
    assert header == "|  | claim | exact | packaged | other |"
    assert [cell.strip() for cell in line.split("|")[3:6]] == ["✓ holds", "✗ 1 refuted, ✓ 1 holds", ""]


def test_why_the_rank_is_low_is_four_lines_by_r_and_two_runs_have_no_interval() -> None:
    def with_nulls(group: int, seed: int) -> Evidence:
        columns = {"step": [0.0], "w_null": [4.0], "all/norm_null": [3.0], "all/effective_rank": [2.0 + seed]}
        return Evidence(name="", config={"group": group, "seed": seed}, groups=columns)

    found = why_low([*(with_nulls(4, seed) for seed in range(3)), *(with_nulls(8, seed) for seed in range(2))])
    assert list(found) == ["w alone", "and the measured norms", "measured"], "nothing was cut to 2"
    (_, three), (_, two) = found["measured"]
    assert (three.mean, three.n, two.mean, two.low, two.n) == (3.0, 3, 2.5, None, 2)
    assert three.low == pytest.approx(3 - 4.3027 / 3**0.5)
