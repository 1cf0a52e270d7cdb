"""Is there a reward, and does it depend on the answer? For each rule a log that turns it on and one that does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.finding import EDGE, FEW, THIRDS
from creditscope.diagnosis.thresholds import (
    APART_BROKEN,
    APART_PAIRS,
    APART_WATCH,
    FAILED_BROKEN,
    FORM,
    FORM_BROKEN,
    GOLD_BROKEN,
    GOLD_WATCH,
    LENGTH_BROKEN,
    LENGTH_STEPS,
    LENGTH_WATCH,
    MISSING,
    MISSING_BROKEN,
    SILENT,
)
from creditscope.diagnosis.trainers import OURS, VERL
from diagnosis.makers_doctor import FALLS, FLAT, RISES, Case, N, above, below, findings, halves, log_of, states, steady

RESULTS = Path(__file__).resolve().parents[2] / "results"
PAIRS = "reward/equal_texts"
APART = "reward/equal_texts_apart"
LOST = "reward/lost_to_form"
GOLD = "reward/gold_mean"
CORRELATION = "length/reward_correlation"


def gold(lost: float, noise: float = 0.01) -> dict[str, list[float]]:
    """A learned reward that rises, beside a verifier's that loses a share after half of the run, each for 18 readings;
    every other reading is off by ± noise."""
    values = [0.4] * 18 + [0.4 * (1 - lost)] * 18
    return {**{name: list(column)[:36] for name, column in RISES.items()},
            GOLD: [value + noise * (-1) ** k for k, value in enumerate(values)]}


def silent(count: float, before: float = 0.5, value: float = 0.0) -> dict[str, list[float]]:
    """The last `count` readings have one reward and no spread."""
    quiet = int(count)
    live = N - quiet
    return {"reward/mean": [before] * live + [value] * quiet, "reward/std": [0.5] * live + [0.0] * quiet}


def pairs(share: float, count: float = 40) -> dict[str, list[float]]:
    """`count` pairs of equal answers per step, of which a share has different rewards."""
    return {**FLAT, PAIRS: steady(count), APART: steady(share * count)}


def lost(share: float, paid: float) -> dict[str, list[float]]:
    """A share of the answers with the right number and no reward, beside a reward that hardly changes."""
    return {"reward/mean": [paid - 0.01, paid + 0.01] * (N // 2), "reward/std": steady(0.5), LOST: steady(share)}


def parts(lost: float) -> dict[str, list[float]]:
    """TRL's mean of one reward function over the answers that have a reward, and the mean over all answers."""
    return {"rewards/mine/mean": steady(0.5), "reward/mean": steady(0.5 * (1 - lost)), "reward/std": steady(0.5)}


def together(noise: float) -> dict[str, list[float]]:
    """Rewards that rise with lengths, both by the same steps; every other length is off by ± noise."""
    rise = [0.01 * k + 0.02 * (k % 3) for k in range(N)]
    return {"reward/mean": [0.1 + x for x in rise], "reward/std": steady(0.2),
            "length/mean": [100 + 100 * x + noise * (-1) ** (k // 2) for k, x in enumerate(rise)]}


CASES = [
    Case(rule="reward constant", what="down", on=silent(EDGE), off=silent(SILENT - 1)),
    Case(rule="reward constant", what="in few readings", on=silent(SILENT), off=silent(SILENT - 1),
         state="watch" if SILENT < EDGE else "broken"),
    Case(rule="reward constant", what="from the start", on={"reward/mean": steady(0), "reward/std": steady(0)},
         off={"reward/std": steady(0.1)}),
    Case(rule="reward constant", what="in verl", trainer=VERL,
         on={"reward/mean": steady(1), "reward/max": steady(1), "reward/min": steady(1)},
         off={"reward/min": steady(0)}),
    Case(rule="reward missing", what="not a number", on={"reward/mean": [*steady(0.5)[:-1], math.nan]},
         off={"reward/mean": steady(0.5)}),
    Case(rule="reward missing", what="failures", trainer=OURS, state="watch",
         on={**FLAT, "reward/errors": steady(100 * above(MISSING)), "rollouts/sampled": steady(100)},
         off={"reward/errors": steady(100 * below(MISSING))}),
    Case(rule="reward missing", what="parts", state="watch", on=parts(above(MISSING)), off=parts(below(MISSING))),
    Case(rule="reward missing", what="much of the reward", on=parts(above(MISSING_BROKEN)), otherwise="watch",
         off=parts(below(MISSING_BROKEN))),
    Case(rule="reward missing", what="many failures", trainer=OURS, otherwise="watch",
         on={**FLAT, "reward/errors": steady(100 * above(FAILED_BROKEN)), "rollouts/sampled": steady(100)},
         off={"reward/errors": steady(100 * below(FAILED_BROKEN))}),
    Case(rule="reward missing", what="weights explain it", state="watch", on=parts(above(MISSING)),
         unless={"reward_weights": [0.9]}),
    Case(rule="form", what="half of the right answers", trainer=OURS, on=lost(0.4, 0.4 * below(1 / FORM_BROKEN - 1)),
         off=lost(0.4, 0.4 * above(1 / FORM_BROKEN - 1)), otherwise="watch"),
    Case(rule="form", what="some of the right answers", trainer=OURS, state="watch", on=lost(above(FORM), 0.5),
         off=lost(below(FORM), 0.5)),
    Case(rule="form", what="all of them", trainer=OURS, on={**silent(N, 0.0), LOST: steady(above(FORM))},
         off={LOST: steady(below(FORM))}),
    Case(rule="form", what="that is being learnt", trainer=OURS, state="watch", on=lost(above(FORM), 0.5), off=RISES),
    Case(rule="reward noise", what="half", on=pairs(above(APART_BROKEN)), off={APART: steady(0)}),
    Case(rule="reward noise", what="some", state="watch", on=pairs(above(APART_WATCH)), off=pairs(below(APART_WATCH))),
    Case(rule="reward noise", what="few pairs", otherwise="unknown", on=pairs(0.5, above(APART_PAIRS) / N),
         off=pairs(0.5, below(APART_PAIRS) / N)),
    Case(rule="reward length", what="is the reward", on={**FLAT, CORRELATION: steady(above(LENGTH_BROKEN))},
         off={CORRELATION: steady(below(LENGTH_WATCH))}),
    Case(rule="reward length", what="is part of it", state="watch",
         on={**FLAT, CORRELATION: steady(above(LENGTH_WATCH))}, off={CORRELATION: steady(below(LENGTH_WATCH))}),
    Case(rule="reward length", what="shorter pays", state="watch",
         on={**FLAT, CORRELATION: steady(-above(LENGTH_WATCH))}, off={CORRELATION: steady(-below(LENGTH_WATCH))}),
    Case(rule="reward length", what="and answers grow",
         on={**FLAT, CORRELATION: steady(above(LENGTH_WATCH)), "length/mean": [100.0 + k for k in range(N)]},
         off={CORRELATION: steady(below(LENGTH_WATCH))}),
    Case(rule="reward hacked", what="a quarter is lost", trainer=OURS, on=gold(above(GOLD_BROKEN)),
         off=gold(below(GOLD_BROKEN)), otherwise="watch"),
    Case(rule="reward hacked", what="a tenth is lost", trainer=OURS, state="watch", on=gold(above(GOLD_WATCH)),
         off=gold(below(GOLD_WATCH))),
    Case(rule="reward hacked", what="and the learned reward did not fall", trainer=OURS, on=gold(0.5), off=FALLS),
    Case(rule="reward hacked", what="where it is flat", trainer=OURS, on={**gold(above(GOLD_BROKEN)), **FLAT},
         off=gold(below(GOLD_WATCH))),
    Case(rule="reward hacked", what="more than by chance", trainer=OURS, on=gold(0.5), off=gold(0.5, noise=0.7)),
    Case(rule="reward hacked", what="in enough readings", trainer=OURS, on=gold(0.5),
         off={GOLD: gold(0.5)[GOLD][:THIRDS - 1]}, otherwise="unknown"),
    Case(rule="reward length", what="from steps", state="watch", on=together(0.0), off=together(20.0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_finds_its_fault_and_nothing_just_short_of_it(case: Case) -> None:
    case.check()


# -- one reward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "value", "state", "words"), [
    (0.5, 0.0, "broken", "down from 0.5 before"), (0.5, 1.0, "watch", "nothing is left to learn"),
    (0.0, 0.0, "broken", "fault of the reward function")])
def test_one_reward_is_told_by_how_it_came(before: float, value: float, state: str, words: str) -> None:
    found = findings(log_of(silent(N // 2, before, value)))["reward constant"]
    assert (found.state, words in found.sentence) == (state, True)


def test_batches_of_one_prompt_have_no_spread_but_their_means_differ() -> None:
    log = log_of({"reward/mean": [0.0, 1.0] * (N // 2), "reward/std": steady(0)})
    assert states(log)["reward constant"] == "fine"


def test_a_reward_without_its_spread_is_unknown() -> None:
    found = findings(log_of({"reward/mean": steady(1)}))["reward constant"]
    assert (found.state, found.sentence) == ("unknown", "needs the spread of the rewards beside reward")


def test_what_to_change_depends_on_whether_there_ever_was_a_reward() -> None:
    never = findings(log_of(silent(N, 0.0)))["reward constant"]
    lost = findings(log_of(silent(N // 2)))["reward constant"]
    assert "reward function" in never.change
    assert "learning_rate" in lost.change


def test_the_onset_is_the_first_reading_without_spread() -> None:
    assert findings(log_of(silent(10)))["reward constant"].onset == N - 10 + 1


# -- missing rewards --------------------------------------------------------------------------------------------------


def test_the_first_reading_that_is_no_number_is_shown() -> None:
    values = steady(0.5)
    values[7] = math.nan
    found = findings(log_of({"reward/mean": values}))["reward missing"]
    assert (found.onset, "in 1 readings" in found.sentence) == (8, True)
    assert "line 8 (step 8 of the log)" in found.evidence[0]


def test_parts_are_compared_only_over_rows_that_have_all_of_them() -> None:
    columns = parts(0.5)
    short = {**columns, "rewards/mine/mean": columns["rewards/mine/mean"][:THIRDS - 1]}
    assert states(log_of(columns))["reward missing"] == "broken"
    assert states(log_of(short))["reward missing"] == "fine"


# -- form -------------------------------------------------------------------------------------------------------------


def test_lost_right_answers_are_the_cause_of_a_reward_of_0_and_of_dead_groups() -> None:
    columns = {**silent(N, 0.0), LOST: steady(0.4), "dead": steady(1.0)}
    found = diagnose(log_of(columns, OURS))
    assert found.first is not None
    assert (found.first.rule, found.state) == ("form", "broken")
    assert {"reward constant", "dead groups"} <= {each.rule for each in found.effects}
    assert found.first.change.startswith("--answer flexible")


def test_a_reward_that_rises_while_half_of_the_right_answers_are_lost_is_to_watch() -> None:
    assert states(log_of({**RISES, LOST: steady(0.7)}, OURS))["form"] == "watch"


def test_without_the_share_a_reward_that_rises_leaves_no_question_of_form_open() -> None:
    assert [states(log_of(columns))["form"] for columns in (FLAT, RISES)] == ["unknown", "fine"]


# -- noise ------------------------------------------------------------------------------------------------------------


def test_without_pairs_of_equal_answers_noise_is_unknown_and_the_callback_is_named() -> None:
    found = findings(log_of(FLAT))["reward noise"]
    assert (found.state, "ScopeCallback" in found.settles) == ("unknown", True)


# -- length -----------------------------------------------------------------------------------------------------------


def test_a_correlation_whose_interval_holds_small_values_is_no_finding() -> None:
    # 4 readings, mean 0.5, s = 0.577: 0.5 ± 3.1824·0.577/2 = 0.5 ± 0.92, which holds 0.
    log = log_of({**FLAT, CORRELATION: [0.0, 1.0, 0.0, 1.0]})
    assert states(log)["reward length"] == "fine"
    assert FEW == 4


def test_from_steps_alone_a_reward_that_does_not_rise_is_no_hack() -> None:
    columns = together(0.0)
    assert LENGTH_STEPS < 1
    falls = {**columns, "reward/mean": columns["reward/mean"][::-1], "length/mean": columns["length/mean"][::-1]}
    assert states(log_of(columns))["reward length"] == "watch"
    assert states(log_of(falls))["reward length"] == "fine"


def test_lengths_that_do_not_move_decide_nothing() -> None:
    assert states(log_of({**RISES, "length/mean": steady(100)}))["reward length"] == "fine"
    assert states(log_of({**FLAT, "length/mean": halves(100, 100)[:THIRDS]}))["reward length"] == "unknown"


def test_several_reward_functions_whose_sum_is_above_the_reward_are_only_to_watch() -> None:
    one = {"reward/mean": steady(0.5), "rewards/a/mean": steady(1.0)}
    assert states(log_of(one))["reward missing"] == "broken"
    two = {"reward/mean": steady(0.5), "rewards/a/mean": steady(0.5), "rewards/b/mean": steady(0.5)}
    assert states(log_of(two))["reward missing"] == "watch"  # each may be None on the other's prompts


# -- a learned reward -------------------------------------------------------------------------------------------------


def test_a_learned_reward_whose_verifier_rises_with_it_is_no_fault() -> None:
    healthy = {**RISES, GOLD: [0.4 + 0.005 * k for k in range(N)]}
    found = findings(log_of(healthy, OURS))["reward hacked"]
    assert (found.state, "did not clearly fall" in found.sentence) == ("fine", True)


def test_a_reward_that_is_hacked_names_both_rewards_their_correlation_and_when() -> None:
    found = findings(log_of({**gold(0.5), "reward/gold_correlation": steady(-0.1)}, OURS))["reward hacked"]
    # A third has 12 readings, over which ±0.01 adds up to 0; the last third begins with reading 25.
    assert "the verifier's fell by 50%, from 0.4 to 0.2; inside groups their correlation is -0.10" in found.sentence
    assert found.onset == 25
    assert found.change.startswith("a reward model that orders held-out pairs")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("file", "name"), [("all", "wide"), ("strong", "strong")])
def test_real_runs_against_a_learned_reward_are_found(file: str, name: str, seed: int) -> None:
    """The comparison of thirds was not changed after either was seen."""
    runs = json.loads((RESULTS / "learned-reward" / f"{file}.json").read_text())
    steps = runs[f"{name}-{seed}"]
    columns = {"reward/mean": "learned", GOLD: "gold"}
    found = findings(log_of({name: [step[key] for step in steps] for name, key in columns.items()}, OURS))
    assert found["reward hacked"].state == "broken"
    assert "The learned reward is hacked: it rose" in found["reward hacked"].sentence
    early = findings(log_of({name: [step[key] for step in steps[:16]] for name, key in columns.items()}, OURS))
    assert early["reward hacked"].state in ("fine", "watch")  # enough readings, and little is lost yet


def test_a_fall_within_the_first_third_is_found() -> None:
    # Thirds of 8: the first has the mean 0.206 and s = 0.20, so ± 2.36·0.20/√8 = 0.17, more than the change of 0.17 to
    # the last. The first three readings have the mean 0.45 ± 0.04.
    early = [0.44, 0.47, 0.44] + [0.06, 0.1, 0.04, 0.06, 0.04] + [0.03, 0.05] * 8
    found = findings(log_of({"reward/mean": [0.3 + 0.005 * k for k in range(24)], GOLD: early}, OURS))["reward hacked"]
    assert found.state == "broken"
    assert "the verifier's fell by 91%, from 0.45 to 0.04" in found.sentence
    calm = [0.44, 0.47, 0.44] + [0.4, 0.48] * 11  # the same start, and no fall
    assert states(log_of({"reward/mean": steady(0.3)[:25], GOLD: calm}, OURS))["reward hacked"] == "fine"


def test_real_runs_that_lose_little_are_not_called_hacked() -> None:
    runs = json.loads((RESULTS / "learned-reward" / "mild.json").read_text())
    logs = [log_of({"reward/mean": [step["learned"] for step in steps], GOLD: [step["gold"] for step in steps]}, OURS)
            for steps in runs.values()]
    assert [states(log)["reward hacked"] for log in logs] == ["fine", "fine", "watch"]


def test_where_no_verifier_is_recorded_the_rule_is_not_in_play() -> None:
    assert states(log_of(RISES, OURS))["reward hacked"] == "fine"


def test_a_learned_reward_that_stays_while_the_verifiers_falls_misleads() -> None:
    found = findings(log_of({**gold(0.5), **FLAT}, OURS))["reward hacked"]
    assert found.sentence.startswith("The learned reward misleads: it went from 0.446 to 0.454, and the verifier's ")
