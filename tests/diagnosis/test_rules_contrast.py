"""Is there contrast inside the groups? For each rule a log that turns it on and one that does not."""

from __future__ import annotations

import pytest

from creditscope.diagnosis.finding import FEW, THIRDS
from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.thresholds import (
    COLD,
    CUT_BROKEN,
    CUT_GROWN,
    CUT_WATCH,
    DEAD_BOUND,
    DEAD_BROKEN,
    DEAD_GROWTH,
    DEAD_WATCH,
    DILUTION,
    DISTINCT,
    ENTROPY_LOW,
    HOT,
    HOT_ENTROPY,
    NEAR_LIMIT,
    RIGHT,
    STEP_BROKEN,
    WRONG,
)
from creditscope.diagnosis.trainers import ANOTHER, OURS, TRL, VERL
from diagnosis.makers_doctor import (
    FALLS,
    FLAT,
    RISES,
    Case,
    N,
    above,
    below,
    findings,
    halves,
    log_of,
    states,
    steady,
)

DISTINCT_TEXTS = "signal/distinct_texts"
ROLLOUTS = "actor_rollout_ref.rollout.n"
LIMIT = "data.max_response_length"


def rewards(mean: float) -> dict[str, list[float]]:
    """A mean reward that does not change, with a spread that is not 0."""
    return {"reward/mean": steady(mean), "reward/std": steady(0.3)}


def zeros(share: float) -> dict[str, list[float]]:
    """Rewards whose std is exactly 0 in a share of the readings, never at the end of the log."""
    quiet = round(share * N)
    return {"reward/mean": [0.4, 0.5] * (N // 2), "reward/std": [0.0] * quiet + [0.5] * (N - quiet)}


def zeros_at(*places: int) -> list[float]:
    """The rewards' std, exactly 0 at these readings."""
    return [0.0 if k in places else 0.5 for k in range(N)]


def diluted(factor: float) -> dict[str, list[float]]:
    """1/(1 − dead) = factor in every batch."""
    return {**FLAT, "dead": steady(1 - 1 / factor)}


CASES = [
    Case(rule="one rollout", on=FLAT, given={"num_generations": 1}, unless={"num_generations": 2}),
    Case(rule="one rollout", what="in verl", on=FLAT, trainer=VERL, unless={ROLLOUTS: 2},
         given={ROLLOUTS: 1, "algorithm.adv_estimator": "grpo"}),
    Case(rule="one rollout", what="with a critic", on=FLAT, trainer=VERL, unless={"algorithm.adv_estimator": "gae"},
         given={ROLLOUTS: 1, "algorithm.adv_estimator": "grpo"}),
    Case(rule="cold sampler", what="one text", state="watch", on={**FLAT, DISTINCT_TEXTS: steady(below(DISTINCT))},
         off={DISTINCT_TEXTS: steady(above(DISTINCT))}),
    Case(rule="cold sampler", what="by temperature", state="watch", on=FLAT, given={"temperature": below(COLD)},
         unless={"temperature": above(COLD)}),
    Case(rule="cold sampler", what="by top-p", state="watch", on=FLAT, given={"top_p": below(COLD)},
         unless={"top_p": above(COLD)}),
    Case(rule="cold sampler", what="by top-k", state="watch", on=FLAT, given={"top_k": 1}, unless={"top_k": 2}),
    Case(rule="cold sampler", what="and dead groups", on={**FLAT, "dead": steady(above(DEAD_WATCH))},
         given={"temperature": below(COLD)}, unless={"temperature": above(COLD)}),
    Case(rule="cold sampler", what="by entropy", state="watch", on={**FLAT, "entropy": steady(below(ENTROPY_LOW))},
         off={"entropy": steady(above(ENTROPY_LOW))}),
    Case(rule="hot sampler", what="by temperature", state="watch", on=FLAT, given={"temperature": above(HOT)},
         unless={"temperature": below(HOT)}),
    Case(rule="hot sampler", what="by entropy", state="watch", on={**FLAT, "entropy": steady(above(HOT_ENTROPY))},
         off={"entropy": steady(below(HOT_ENTROPY))}),
    Case(rule="hot sampler", what="by both", on={**FLAT, "entropy": steady(above(HOT_ENTROPY))},
         given={"temperature": above(HOT)}, off={"entropy": steady(below(HOT_ENTROPY))}),
    Case(rule="hot sampler", what="that learns", state="watch", on={**FLAT, "entropy": steady(above(HOT_ENTROPY))},
         off=RISES),
    Case(rule="truncation", what="some", state="watch", on={**FLAT, "truncated": steady(above(CUT_WATCH))},
         off={"truncated": steady(below(CUT_WATCH))}),
    Case(rule="truncation", what="most", on={**FLAT, "truncated": steady(above(CUT_BROKEN))}, otherwise="watch",
         off={"truncated": steady(below(CUT_BROKEN))}),
    Case(rule="truncation", what="though it learns", on={**FLAT, "truncated": steady(above(CUT_BROKEN))},
         off=RISES, otherwise="watch"),
    Case(rule="truncation", what="by length", state="watch", on={**FLAT, "length/mean": steady(100)},
         given={"max_completion_length": 100 / above(NEAR_LIMIT)},
         unless={"max_completion_length": 100 / below(NEAR_LIMIT)}),
    Case(rule="truncation", what="in verl", state="watch", trainer=VERL, unless={LIMIT: 101}, given={LIMIT: 100},
         on={**FLAT, "truncated": steady(above(CUT_WATCH)), "length/max": steady(100)}),
    Case(rule="too hard", what="most", on={**rewards(below(WRONG)), "dead": steady(above(DEAD_BROKEN))},
         off=rewards(above(WRONG))),
    Case(rule="too hard", what="many", state="watch", on={**rewards(below(WRONG)), "dead": steady(above(DEAD_BOUND))},
         off={"dead": steady(below(DEAD_BOUND))}),
    Case(rule="too hard", what="that learns", state="watch", off={"reward/mean": [0.002 * k for k in range(N)]},
         on={**rewards(below(WRONG)), "reward/std": steady(0.05), "dead": steady(above(DEAD_WATCH))}),
    Case(rule="too easy", what="right", state="watch", on={**rewards(above(RIGHT)), "dead": steady(above(DEAD_BOUND))},
         off=rewards(below(RIGHT))),
    Case(rule="too easy", what="dead", state="watch", on={**rewards(above(RIGHT)), "dead": steady(above(DEAD_BOUND))},
         off={"dead": steady(below(DEAD_BOUND))}),
    Case(rule="dead groups", what="most", on={**FLAT, "dead": steady(above(DEAD_BROKEN))}, otherwise="watch",
         off={"dead": steady(below(DEAD_BROKEN))}),
    Case(rule="dead groups", what="half", state="watch", on={**FLAT, "dead": steady(above(DEAD_WATCH))},
         off={"dead": steady(below(DEAD_WATCH))}),
    Case(rule="dead groups", what="by their std", state="watch", given={"scale_rewards": "batch"},
         on=zeros(DEAD_BOUND + 1 / N), off=zeros(DEAD_BOUND - 1 / N), otherwise="unknown"),
    # 6 of 40 are few; 6 of the last 13 are 46 % ± 31 %, and the first 13 have none.
    Case(rule="dead groups", what="by their std at the end", state="watch", given={"scale_rewards": "batch"},
         on={**FLAT, "reward/std": zeros_at(*range(28, N, 2))}, otherwise="unknown",
         off={"reward/std": zeros_at(0, 6, 12, 28, 34, 38)}),
    Case(rule="dead groups", what="by a bound", state="watch", trainer=VERL, given={ROLLOUTS: 4}, otherwise="unknown",
         on={"reward/mean": steady(0.1)}, off={"reward/mean": steady(0.5)}),  # 0.1⁴ + 0.9⁴ = 0.66, 2·0.5⁴ = 0.125
    Case(rule="saturation", state="watch", on={**FLAT, "dead": halves(0.1, 0.1 + above(DEAD_GROWTH))},
         off={"dead": halves(0.1, 0.1 + below(DEAD_GROWTH))}),
    Case(rule="dilution", state="watch", on=diluted(above(DILUTION)), off=diluted(below(DILUTION))),
    Case(rule="dilution", what="that learns", state="watch", on=diluted(above(DILUTION)), off=RISES),
    Case(rule="KL only", what="share", state="watch", on={**FLAT, "dead": steady(above(DEAD_WATCH))},
         given={"beta": 0.04}, off={"dead": steady(below(DEAD_WATCH))}),
    Case(rule="KL only", what="no term", state="watch", on={**FLAT, "dead": steady(above(DEAD_WATCH))},
         given={"beta": 0.04}, unless={"beta": 0.0}),
]


def test_a_reward_at_its_largest_value_is_solved_whatever_that_value_is() -> None:
    top = {"reward/mean": [1.0 + 0.05 * k for k in range(20)] + [2.0] * 20, "reward/std": [0.4] * 20 + [0.0] * 20}
    found = findings(log_of(top))
    assert (found["too easy"].state, found["dead groups"].follows) == ("watch", ("too easy",))
    below_it = {**top, "reward/mean": [*top["reward/mean"][:20], *[1.9, 1.8] * 10]}
    assert states(log_of(below_it))["too easy"] == "fine"


def test_a_reward_of_the_prompt_alone_is_a_fault_of_the_reward() -> None:
    found = findings(log_of({**FLAT, "dead": steady(1)}))["dead groups"]
    assert (found.state, found.remedy) == ("broken", "reward")
    assert "do not depend on the answer" in found.sentence
    assert findings(log_of({**FLAT, "dead": steady(0.99)}))["dead groups"].remedy == "dead groups"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_finds_its_fault_and_nothing_just_short_of_it(case: Case) -> None:
    case.check()


# -- one rollout ------------------------------------------------------------------------------------------------------


def test_a_group_of_one_that_was_only_assumed_is_unknown() -> None:
    # verl's default is n = 1; a log without settings does not say so.
    found = findings(log_of(FLAT, VERL, **{"algorithm.adv_estimator": "grpo"}))["one rollout"]
    assert (found.state, "default is 1" in found.sentence) == ("unknown", True)


def test_a_group_of_one_that_was_given_counts_whatever_else_was_assumed() -> None:
    assert states(log_of(FLAT, num_generations=1))["one rollout"] == "broken"
    assert states(log_of(FLAT, num_generations=1, loss_type="grpo"))["one rollout"] == "broken"


# -- dead groups ------------------------------------------------------------------------------------------------------


def test_dead_groups_of_our_records_are_graded_alike() -> None:
    for share, state in ((above(DEAD_BROKEN), "broken"), (above(DEAD_WATCH), "watch"), (below(DEAD_WATCH), "fine")):
        assert states(log_of({**FLAT, "dead": steady(share)}, OURS))["dead groups"] == state


def test_what_is_0_is_said_in_words_and_what_is_small_is_not_said_to_be_0() -> None:
    none = findings(log_of({"dead": steady(0), "truncated": steady(0)}))
    assert none["dead groups"].sentence.startswith("No group is dead")
    assert none["truncation"].sentence == "No answer is cut at the limit"
    assert none["dilution"].sentence == "No batch that trains has a dead group in its denominator"
    few = findings(log_of({"dead": steady(0.004), "truncated": steady(0.004)}))
    assert few["dead groups"].sentence.startswith("0.40% of the groups are dead")
    assert few["truncation"].sentence == "0.40% of the answers are cut at the limit over steps 36–40"


def test_under_batch_scaling_the_logged_share_is_not_believed() -> None:
    columns = {**FLAT, "dead": steady(0), "grad/norm": steady(0.3)}
    assert states(log_of(columns))["dead groups"] == "fine"
    for setting in ({"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}):
        found = findings(log_of({**columns, "reward/mean": steady(0.5)}, num_generations=4, **setting))["dead groups"]
        assert found.state == "unknown"
        # p = 1/2, R = 4: 2·(1/2)^4 = 12.5 %
        assert "cannot be trusted" in found.sentence
        assert "at least 12% of the groups" in found.sentence


def test_a_gradient_of_0_shows_that_every_group_is_dead_whatever_is_counted() -> None:
    columns = {**FLAT, "dead": steady(0), "grad/norm": steady(0)}
    for setting in ({}, {"scale_rewards": "batch"}):
        found = findings(log_of(columns, **setting))["dead groups"]
        assert (found.state, "No group trains anything" in found.sentence) == ("broken", True)
    masked = log_of({**columns, "truncated": steady(1)}, mask_truncated_completions=True)
    assert states(masked)["dead groups"] == "fine"  # there the masks explain it


@pytest.mark.parametrize("norms", [[0.3, 0.0, 0.2, 0.3], [0.0, 0.0, 0.0, 0.1], [0.2, 0.2, 0.2, 0.0]])
def test_a_gradient_that_is_0_at_some_steps_does_not_say_that_every_group_is_dead(norms: list[float]) -> None:
    still, moving = (findings(log_of({"grad/norm": values, "dead": [0.1] * 4})) for values in ([0.0] * 4, norms))
    assert "No group trains anything" in still["dead groups"].sentence
    assert "No group trains anything" not in moving["dead groups"].sentence


def printed(columns: dict[str, list[float]], digits: int | None, **given: object) -> Log:
    """A log of TRL whose numbers were printed with so many digits; None: in full."""
    made = log_of(columns, **given)
    rows = [LogRow(row.place, row.step, row.values, dict.fromkeys(row.values, digits) if digits else {})
            for row in made.rows]
    return Log(made.source, TRL, rows, made.settings)


@pytest.mark.parametrize(("rule", "columns", "otherwise"), [
    ("dead groups", zeros(0.5), "unknown"),
    ("dead groups", {**FLAT, "grad/norm": steady(0), "dead": steady(0)}, "unknown"),
    ("reward constant", {"reward/mean": steady(0), "reward/std": steady(0)}, "unknown"),
    ("gradient", {**FLAT, "grad/norm": steady(0)}, "fine")])
def test_a_number_that_was_printed_as_0_is_not_0(rule: str, columns: dict[str, list[float]], otherwise: str) -> None:
    assert states(printed(columns, None, scale_rewards="batch"))[rule] in ("broken", "watch")
    assert states(printed(columns, 3, scale_rewards="batch"))[rule] == otherwise


def test_verl_counts_no_groups_so_equal_extremes_must_do() -> None:
    flat = {"reward/mean": steady(1), "reward/max": steady(1), "reward/min": steady(1)}
    assert states(log_of(flat, VERL, **{ROLLOUTS: 4}))["dead groups"] == "broken"
    wide = {"reward/mean": steady(-3), "reward/max": steady(1), "reward/min": steady(-5)}
    assert "at least" not in findings(log_of(wide, VERL, **{ROLLOUTS: 4}))["dead groups"].sentence


def test_groups_that_verl_filters_out_neither_die_nor_dilute_nor_pull() -> None:
    columns = {"reward/mean": steady(0.1), "reward/max": steady(1), "reward/min": steady(0)}
    given = {ROLLOUTS: 4, "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": True}
    rules = ("dead groups", "dilution", "KL only")
    before, after = (states(log_of(columns, VERL, **given, **{"algorithm.filter_groups.enable": on}))
                     for on in (False, True))
    assert [before[rule] for rule in rules] == ["watch", "unknown", "unknown"]
    assert [after[rule] for rule in rules] == ["fine"] * 3


def test_dead_groups_of_right_answers_are_solved_and_those_of_wrong_ones_are_too_hard() -> None:
    dead = {"dead": steady(above(DEAD_BROKEN))}
    right, wrong = (states(log_of({**rewards(mean), **dead})) for mean in (above(RIGHT), below(WRONG)))
    assert (right["too easy"], right["too hard"]) == ("watch", "fine")
    assert (wrong["too easy"], wrong["too hard"]) == ("fine", "broken")


# -- dilution, saturation ---------------------------------------------------------------------------------------------


def test_dilution_is_one_over_the_live_share_of_batches_that_are_not_all_dead() -> None:
    # Shares 0.5, 0.75, 0.75, 0.75, 1: of the four that train, mean 0.6875, so × 3.2; over the run × 2 to × 4.
    found = findings(log_of({"dead": [0.5, 0.75, 0.75, 0.75, 1.0]}))["dilution"]
    assert (found.state, "× 3.20 now, by × 2.00 to × 4.00" in found.sentence) == ("watch", True)


def test_a_method_that_drops_dead_groups_is_not_diluted() -> None:
    columns = {**FLAT, "dead": steady(0.8)}
    found = findings(log_of(columns, OURS, method="dapo"))["dilution"]
    assert (found.state, "no dead groups in its denominator" in found.sentence) == ("fine", True)
    assert states(log_of(columns, OURS, method="grpo"))["dilution"] == "watch"
    assert states(log_of({"dead": steady(1)}))["dilution"] == "fine"


def test_dead_groups_that_jump_about_do_not_make_a_trend() -> None:
    # Thirds of 4: means 0.25 and 0.5, s = 0.5 and 0.577, so 0.25 ± 1.2.
    values = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert len(values) == THIRDS
    assert states(log_of({"dead": values}))["saturation"] == "fine"


def test_there_is_no_signal_to_run_out_where_every_group_is_dead() -> None:
    found = findings(log_of({"dead": steady(1)}))["saturation"]
    assert (found.state, found.sentence.startswith("Not in play")) == ("fine", True)


# -- cut answers ------------------------------------------------------------------------------------------------------


def test_masked_answers_are_said_to_be_left_out_and_a_rising_reward_does_not_excuse_them() -> None:
    columns = {**RISES, "truncated": steady(above(CUT_BROKEN))}
    found = findings(log_of(columns, mask_truncated_completions=True))["truncation"]
    assert (found.state, "left out of the loss" in found.sentence, "w = 0" in found.why) == ("broken", True, True)
    assert findings(log_of(columns))["truncation"].sentence.endswith("though the reward rose")


def test_a_limit_that_was_wide_enough_at_first_is_not_the_first_cause() -> None:
    columns = {**FALLS, "truncated": halves(below(CUT_WATCH), above(CUT_BROKEN))}
    found = findings(log_of(columns))["truncation"]
    assert found.follows != ()
    assert "at first" in found.sentence
    early = findings(log_of({**columns, "truncated": steady(above(CUT_BROKEN))}))["truncation"]
    assert early.follows == ()


def test_cuts_that_grew_by_much_follow_from_a_step_that_moved_the_policy() -> None:
    """Also where many answers were cut at first; one that grew by less is the limit's own."""
    def cause(grown: float) -> tuple[str, ...]:
        return findings(log_of({**FALLS, "overshoot/kl": steady(2 * STEP_BROKEN),
                                "truncated": halves(0.6, 0.6 + grown)}))["truncation"].follows

    assert cause(above(CUT_GROWN)) == ("step size",)
    assert cause(below(CUT_GROWN)) == ()


def test_verls_clip_ratio_is_no_truncation_without_the_limit() -> None:
    columns = {"truncated": steady(0.25), "length/max": steady(100)}
    found = findings(log_of(columns, VERL))["truncation"]  # a limit that is assumed proves nothing
    assert (found.state, "the limit" in found.settles) == ("unknown", True)


def test_trls_share_of_cut_answers_is_believed_whatever_limit_is_assumed() -> None:
    assert states(log_of({"truncated": steady(1), "length/max": steady(64)}))["truncation"] == "broken"


def test_a_window_without_numbered_steps_is_told_by_its_readings() -> None:
    rows = [LogRow(k, None, {"completions/clipped_ratio": above(CUT_WATCH)}) for k in range(N)]
    log = Log("made.log, line", TRL, rows, LogSettings({}, {}, TRL.defaults))
    assert findings(log)["truncation"].sentence.endswith("of the answers are cut at the limit over the last 5 readings")


def test_fewer_than_few_readings_decide_nothing() -> None:
    assert states(log_of({"truncated": [1.0] * FEW}))["truncation"] == "broken"
    assert states(log_of({"truncated": [1.0] * (FEW - 1)}))["truncation"] == "unknown"


def test_without_a_known_group_size_distinct_answers_are_no_cold_sampler() -> None:
    assert states(log_of({**FLAT, "signal/distinct_texts": steady(0.7)}, ANOTHER))["cold sampler"] == "fine"


def test_a_program_without_a_known_kl_term_is_not_said_to_pull_dead_groups() -> None:
    columns = {**FLAT, "dead": steady(0.7)}
    assert states(log_of(columns, ANOTHER))["KL only"] == "unknown"
    assert states(log_of({**columns, "kl": steady(0.1)}, ANOTHER))["KL only"] == "watch"


def test_a_gradient_of_0_is_told_as_such_where_no_share_of_dead_groups_is_logged() -> None:
    columns = {"reward/mean": [0.4, 0.5] * 3, "reward/std": [0.5] * 6, "grad/norm": [0.0] * 6}
    found = findings(log_of(columns, VERL))["dead groups"]
    assert (found.state, "the gradient is 0" in found.sentence) == ("broken", True)


def test_many_prompts_are_not_most_prompts() -> None:
    columns = {"reward/mean": steady(0.05), "reward/std": steady(0.2)}
    assert "Many prompts" in findings(log_of({**columns, "dead": steady(0.4)}))["too hard"].sentence
    assert "Most prompts" in findings(log_of({**columns, "dead": steady(0.6)}))["too hard"].sentence


def test_a_limit_that_was_given_is_named_with_its_value_and_an_assumed_one_is_not() -> None:
    columns = {**FLAT, "truncated": steady(1.0)}
    given, assumed = (findings(log_of(columns, **settings))["truncation"].sentence
                      for settings in ({"max_completion_length": 12}, {}))
    assert "cut at the limit of 12 tokens over" in given
    assert "cut at the limit over" in assumed
