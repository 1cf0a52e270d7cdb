"""Each rule has a log in which it fires and one in which it does not; numbers are derived by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.diagnosis.engine import diagnose, root
from creditscope.diagnosis.finding import EDGE, FEW, THIRDS, TREND, ends, last, trend
from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.rules import (
    CLIP_MUCH,
    COLLAPSED,
    DEAD_BROKEN,
    DEAD_WATCH,
    DRIFT,
    ENTROPY_LEFT,
    ENTROPY_LOW,
    GAP,
    HORIZON,
    KL_ONLY,
    PAST,
    RATIO_BROKEN,
    RATIO_WATCH,
    RULES,
    SILENT,
)
from creditscope.diagnosis.signs import CUT_BROKEN, CUT_WATCH, DEAD_GROWTH, FELL, RIGHT
from creditscope.diagnosis.trainers import OURS, SCRIPT, TRAINERS, TRL, VERL, Trainer
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.table import METHODS
from creditscope.methods.words import law
from diagnosis.makers_doctor import findings, log_of, states

N = 20


# -- windows -----------------------------------------------------------------------------------------------------------


def test_a_level_is_read_over_the_last_tenth_and_a_trend_between_both_tenths() -> None:
    series = log_of({"loss": range(100)}).series("loss")
    assert series is not None
    assert last(series).values == list(range(90, 100))
    assert [part.values for part in ends(series)] == [list(range(10)), list(range(90, 100))]


def test_the_two_ends_of_the_shortest_trend_share_no_row() -> None:
    series = log_of({"loss": range(TREND)}).series("loss")
    assert series is not None
    assert [len(part) for part in ends(series)] == [EDGE, EDGE]
    assert ends(series)[0].values[-1] < ends(series)[1].values[0]


def test_a_trend_is_the_difference_of_two_thirds_with_its_interval() -> None:
    series = log_of({"loss": [0, 0, 1, 1, 9, 9, 9, 9, 9, 2, 2, 3, 3]}).series("loss")
    assert series is not None
    found = trend(series)
    assert (found.first.values, found.last.values) == ([0, 0, 1, 1], [2, 2, 3, 3])
    # Each third of 4: s² = 1/3, h = 3.1824·√(1/3)/2 = 0.91868. Change 2 ± √2·0.91868 = 2 ± 1.29921.
    assert (found.change.mean, found.change.low) == (2, pytest.approx(0.70079, abs=1e-5))
    assert found.change.high == pytest.approx(3.29921, abs=1e-5)


def test_evidence_names_file_lines_steps_and_values() -> None:
    found = findings(log_of({"dead": [0.0] * 95 + [1.0] * 5}))["dead groups"]
    # The last tenth are rows 91 to 100: five of 0, five of 1.
    assert found.evidence == ("made.log, line 91–100 (step 91–100): frac_reward_zero_std 0, 0 … 1, 1 (n 10, mean 0.5, "
                              "from 0 to 1)")
    assert found.sentence.startswith("50% of the groups are dead")


def test_findings_come_most_severe_first_and_each_rule_speaks_once() -> None:
    found = diagnose(log_of({"lr": [0.0] * N, "dead": [0.6] * N}))
    order = [finding.state for finding in found]
    assert order == sorted(order, key=("broken", "watch", "unknown", "fine").index)
    assert sorted(finding.rule for finding in found) == sorted(RULES)


def test_of_equals_the_cause_comes_first_and_what_follows_says_from_what() -> None:
    columns = {"truncated": [1.0] * N, "reward/mean": [0.0] * N, "reward/std": [0.0] * N, "dead": [1.0] * N,
               "grad/norm": [0.0] * N, "lr": [0.0] * N}
    found = diagnose(log_of(columns))
    assert [finding.rule for finding in found if finding.bad] == ["truncation", "learning rate", "reward",
                                                                  "dead groups", "gradient"]
    assert [finding.follows for finding in found if finding.bad] == ["", "", *["truncation"] * 3]
    whole = findings(log_of(columns | {"truncated": [0.0] * N}))
    assert [whole[rule].follows for rule in ("reward", "dead groups", "gradient")] == ["", "reward", "reward"]
    alone = findings(log_of(columns | {"truncated": [0.0] * N, "reward/mean": [0.2, 0.3] * 10,
                                       "reward/std": [0.4] * N}))
    assert [alone[rule].follows for rule in ("dead groups", "gradient")] == ["", "dead groups"]


def test_a_gradient_that_is_no_number_follows_from_nothing() -> None:
    columns = {"truncated": [1.0] * N, "dead": [1.0] * N, "grad/norm": [math.nan] * N}
    assert findings(log_of(columns))["gradient"].follows == ""


def test_dead_groups_follow_from_an_entropy_that_leaves_one_answer() -> None:
    columns = {"entropy": [0.5] * 10 + [0.001] * 10, "dead": [0.0] * 10 + [0.6] * 10}
    assert findings(log_of(columns))["dead groups"].follows == "entropy"
    assert findings(log_of(columns | {"entropy": [0.5] * N}))["dead groups"].follows == ""


def test_the_cause_of_the_worst_finding_is_mended_first_though_it_is_less_severe() -> None:
    # 11 of 20 gradients are 0 (broken) because 60 % of the groups are dead (watch).
    found = diagnose(log_of({"dead": [0.6] * N, "grad/norm": [0.0] * 11 + [0.1] * 9}))
    assert (found[0].rule, found[0].follows) == ("gradient", "dead groups")
    first = root(found)
    assert first is not None
    assert first.rule == "dead groups"
    assert root(diagnose(log_of({"dead": [0.1] * N}))) is None


SHARES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, math.nan]), min_size=1, max_size=N)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
@given(data=st.data(), masked=st.booleans(), scale=st.sampled_from(["group", "batch"]))
def test_whatever_the_log_a_cause_is_itself_bad_and_follows_from_nothing(
        trainer: Trainer, data: st.DataObject, masked: bool, scale: str) -> None:
    columns = data.draw(st.dictionaries(st.sampled_from(sorted(trainer.metrics)), SHARES, min_size=1))
    found = findings(log_of(columns, trainer, mask_truncated_completions=masked, scale_rewards=scale, beta=0.1))
    for finding in found.values():
        if finding.follows:
            assert found[finding.follows].bad
            assert found[finding.follows].follows == ""


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_an_empty_log_makes_every_rule_unknown_or_not_in_play_and_names_what_it_needs(trainer: object) -> None:
    for finding in diagnose(log_of({"reward/mean": [0.5]}, trainer)):  # type: ignore[arg-type]
        assert finding.state in ("unknown", "fine"), finding
        if finding.state == "unknown":
            assert "need" in finding.sentence or "not" in finding.sentence


# -- the loss and the clip ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "kind"), [("grpo", "zero"), ("dapo", "length"), ("dr_grpo", "length"),
                                            ("bnpo", "length"), ("cispo", "log_prob"), ("sapo", "weights"),
                                            ("vespo", "log_prob")])
def test_what_the_loss_is_worth_follows_from_the_row_of_the_loss_type(loss: str, kind: str) -> None:
    log = log_of({"loss": [0.0] * N}, loss_type=loss)
    row = TRL.facts["method"](log.settings)
    assert law(row).kind == kind
    found = findings(log)["loss"]
    assert found.state == "fine"
    assert law(row).formula.removeprefix("J = ") in found.sentence
    assert found.sentence.startswith("The loss is 0, and no measure of progress")
    assert found.sentence.endswith(("watch reward.", "Watch reward."))


def test_a_kl_term_of_unknown_weight_is_named_in_the_loss() -> None:
    log = log_of({"loss": [0.1] * N, "kl": [0.1] * N}, loss_type="grpo", beta=None)
    assert "the KL term, whose weight the log does not say" in findings(log)["loss"].sentence
    known = log_of({"loss": [0.1] * N}, loss_type="grpo", beta=0.04)
    assert "0.04·K3" in findings(known)["loss"].sentence


def test_no_row_of_the_table_has_a_loss_that_measures_progress() -> None:
    # The finding says so of every loss; a row whose loss followed the reward would make it wrong.
    assert "reward" not in {law(row).kind for row in (*METHODS.values(), *DIALECTS.values())}


def test_credit_from_elsewhere_changes_what_the_loss_is() -> None:
    sentence = findings(log_of({"loss": [0.5] * N}, OURS, method="grpo", credit="salt"))["loss"].sentence
    assert "how the credit that was given is centred" in sentence


def test_a_loss_without_a_row_is_unknown() -> None:
    assert states(log_of({"loss": [0.0] * N}, loss_type="mine"))["loss"] == "unknown"


@pytest.mark.parametrize(("given", "state"), [
    ({}, "fine"),  # one iteration, one step per generation
    ({"num_iterations": 2}, "watch"),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 4}, "fine"),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 8}, "watch"),
    ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, "watch"),  # a batch straddles two steps
    ({"generation_batch_size": 64}, "watch"),
])
def test_a_clip_ratio_of_0_is_by_construction_only_with_one_update_a_batch(given: dict[str, int], state: str) -> None:
    found = findings(log_of({"clip": [0.0] * N, "reward/std": [0.5] * N}, **given))["clip"]
    assert found.state == state
    assert ("Nothing can be clipped" in found.sentence) == (state == "fine")
    assert ("ε has no effect: with" in found.sentence) == (state == "watch")


@pytest.mark.parametrize(("mini", "epochs", "bypass", "updates"), [
    (16, 1, False, 1), (8, 1, False, 2), (16, 3, False, 3), (12, 1, False, 2), (16, 1, True, None)])
def test_verls_updates_are_epochs_times_mini_batches(mini: int, epochs: int, bypass: bool, updates: int | None) -> None:
    log = log_of({"clip": [0.0] * N}, VERL, **{
        "data.train_batch_size": 16, "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.actor.ppo_epochs": epochs, "algorithm.rollout_correction.bypass_mode": bypass})
    assert log.fact("updates") == updates


def test_clipping_with_one_update_a_batch_is_a_contradiction() -> None:
    assert states(log_of({"clip": [0.1] * N}))["clip"] == "watch"


@pytest.mark.parametrize(("share", "state"), [(CLIP_MUCH + 0.01, "watch"), (CLIP_MUCH - 0.01, "fine")])
def test_much_clipping_is_to_watch(share: float, state: str) -> None:
    assert states(log_of({"clip": [share] * N}, num_iterations=4))["clip"] == state


@pytest.mark.parametrize(("share", "state"), [(PAST, "watch"), (PAST - 0.001, "fine")])
def test_creditscope_reads_the_tokens_past_their_bound_instead_of_a_clip_ratio(share: float, state: str) -> None:
    found = findings(log_of({"past": [share] * N}, OURS, inner_steps=4))["clip"]
    assert (found.state, f"{share:.1%} of the tokens that have a bound" in found.sentence) == (state, True)
    once = findings(log_of({"past": [share] * N}, OURS, inner_steps=1))["clip"]
    assert once.state == "fine"
    assert once.sentence.endswith(f". After it {share:.1%} of the bounded tokens stand past their bound over steps "
                                  f"16–20")
    unread = findings(log_of({"dead": [0.1] * N}, OURS, inner_steps=4))["clip"]
    assert (unread.state, "--probe light" in unread.sentence) == ("unknown", True)


def test_no_clip_ratio_can_be_read_where_every_advantage_is_0() -> None:
    log = log_of({"clip": [0.0] * N, "reward/std": [0.0] * N}, num_iterations=2)
    assert states(log)["clip"] == "unknown"


@pytest.mark.parametrize(("given", "state"), [
    ({"loss_type": "cispo"}, "broken"), ({"loss_type": "cispo", "epsilon": 0.3}, "broken"),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "fine"), ({"loss_type": "dapo"}, "fine")])
def test_the_default_cap_of_cispo_is_broken(given: dict[str, object], state: str) -> None:
    found = findings(log_of({"cispo": [0.4] * N}, **given))["cispo cap"]
    assert found.state == state
    if state == "broken":
        assert f"scaled by {given.get('epsilon', 0.2)}" in found.sentence
        assert "epsilon_high=5.0" in found.change


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "state"), [(DEAD_BROKEN, "broken"), (DEAD_WATCH, "watch"),
                                              (DEAD_WATCH - 0.01, "fine")])
def test_dead_groups_are_graded_by_their_share(share: float, state: str) -> None:
    assert states(log_of({"dead": [share] * N}))["dead groups"] == state
    assert states(log_of({"dead": [share] * N}, OURS))["dead groups"] == state


def test_what_is_0_is_said_in_words_and_what_is_small_is_not_said_to_be_0() -> None:
    none = findings(log_of({"dead": [0.0] * N, "truncated": [0.0] * N}, beta=0.1))
    assert none["dead groups"].sentence.startswith("No group is dead")
    assert none["KL only"].sentence.startswith("No group is dead")
    assert none["truncation"].sentence == "No answer is cut at the limit"
    assert none["dilution"].sentence == "No batch that trains has a dead group in its denominator"
    few = findings(log_of({"dead": [0.004] * N, "truncated": [0.004] * N}))
    assert few["dead groups"].sentence.startswith("0.40% of the groups are dead")
    assert few["truncation"].sentence == "0.40% of the answers are cut at the limit over steps 16–20"


@pytest.mark.parametrize(("reward", "cause"), [(RIGHT, ""), (1.01, "truncation"), (RIGHT - 0.01, "truncation")])
def test_groups_that_are_dead_because_every_answer_is_right_are_no_fault_of_the_limit(reward: float,
                                                                                      cause: str) -> None:
    columns = {"reward/mean": [reward] * N, "reward/std": [0.2] * N, "truncated": [0.95] * N, "dead": [0.6] * N}
    found = findings(log_of(columns))
    assert found["dead groups"].follows == cause
    assert ("all right" in found["dead groups"].sentence) == (cause == "")
    assert found["truncation"].state == ("broken" if cause else "watch")
    if not cause:
        assert found["dead groups"].change == TRL.changes["saturation"]
        assert found["truncation"].sentence.endswith("over steps 16–20, though the mean reward is 0.9")


def test_a_limit_under_which_the_reward_rose_is_to_watch_and_kills_no_group() -> None:
    columns = {"reward/mean": [0.1] * 10 + [0.4] * 10, "reward/std": [0.4] * N, "truncated": [0.95] * N,
               "dead": [0.6] * N}
    found = findings(log_of(columns))
    assert (found["truncation"].state, found["dead groups"].follows) == ("watch", "")
    assert found["truncation"].sentence.endswith(", though the reward rose")
    masked = findings(log_of(columns, mask_truncated_completions=True))["truncation"]
    assert masked.state == "broken"
    fell = findings(log_of(columns | {"reward/mean": [0.4] * 10 + [0.1] * 10}))
    assert (fell["truncation"].state, fell["dead groups"].follows) == ("broken", "truncation")


def test_a_window_without_numbered_steps_is_told_by_its_readings() -> None:
    rows = [LogRow(k, None, {"completions/clipped_ratio": 0.3}) for k in range(N)]
    log = Log("made.log, line", TRL, rows, LogSettings({}, {}, TRL.defaults))
    assert findings(log)["truncation"].sentence == "30% of the answers are cut at the limit over the last 5 readings"


def test_under_batch_scaling_the_logged_share_is_not_believed() -> None:
    columns = {"dead": [0.0] * N, "reward/mean": [0.5] * N, "reward/std": [0.5] * N, "grad/norm": [0.3] * N}
    assert states(log_of(columns))["dead groups"] == "fine"
    for setting in ({"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}):
        found = findings(log_of(columns, num_generations=4, **setting))["dead groups"]
        assert found.state == "watch"
        # p = 1/2, R = 4: 2·(1/2)^4 = 12.5 %
        assert "cannot be trusted" in found.sentence
        assert "at least 12% of the groups" in found.sentence


def test_a_gradient_of_0_under_batch_scaling_shows_that_every_group_is_dead() -> None:
    columns = {"dead": [0.0] * N, "reward/mean": [0.5] * N, "reward/std": [0.5] * N, "grad/norm": [0.0] * N}
    found = findings(log_of(columns, scale_rewards="batch"))["dead groups"]
    assert found.state == "broken"
    assert "scale_rewards='group'" in found.change


def test_a_gradient_of_0_beside_live_groups_is_not_believed_whatever_scaling_is_assumed() -> None:
    columns = {"dead": [0.0] * N, "grad/norm": [0.0] * N}
    found = findings(log_of(columns))["dead groups"]
    assert found.state == "broken"
    assert "cannot be trusted" in found.sentence
    masked = log_of(columns | {"truncated": [1.0] * N}, mask_truncated_completions=True)
    assert states(masked)["dead groups"] == "fine"  # there the masks explain it


def test_verl_counts_no_groups_so_equal_extremes_or_a_bound_must_do() -> None:
    flat = {"reward/mean": [1.0] * N, "reward/max": [1.0] * N, "reward/min": [1.0] * N}
    mixed = {"reward/mean": [0.5] * N, "reward/max": [1.0] * N, "reward/min": [0.0] * N}
    rare = mixed | {"reward/mean": [0.1] * N}
    wide = mixed | {"reward/mean": [-3.0] * N}
    size = {"actor_rollout_ref.rollout.n": 4}
    assert states(log_of(flat, VERL, **size))["dead groups"] == "broken"
    assert states(log_of(mixed, VERL, **size))["dead groups"] == "unknown"
    # p = 0.1, R = 4: 0.1^4 + 0.9^4 = 0.6562
    assert "at least 66%" in findings(log_of(rare, VERL, **size))["dead groups"].sentence
    assert states(log_of(rare, VERL, **size))["dead groups"] == "watch"
    assert "at least" not in findings(log_of(wide, VERL, **size))["dead groups"].sentence


def test_groups_that_verl_filters_out_neither_die_nor_dilute_nor_pull() -> None:
    columns = {"reward/mean": [0.1] * N, "reward/max": [1.0] * N, "reward/min": [0.0] * N}
    given = {"actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": "grpo",
             "actor_rollout_ref.actor.use_kl_loss": True}
    rules = ("dead groups", "dilution", "KL only")
    before, after = (states(log_of(columns, VERL, **given, **{"algorithm.filter_groups.enable": on}))
                     for on in (False, True))
    assert [before[rule] for rule in rules] == ["watch", "unknown", "unknown"]
    assert [after[rule] for rule in rules] == ["fine"] * 3


def test_dilution_is_one_over_the_live_share_of_batches_that_are_not_all_dead() -> None:
    # Shares 0.5, 0.75, 0.75, 0.75, 1: of the four that train, mean 0.6875, so × 3.2; over the run × 2 to × 4.
    found = findings(log_of({"dead": [0.5, 0.75, 0.75, 0.75, 1.0]}))["dilution"]
    assert found.state == "watch"
    assert "× 3.20 now, by × 2.00 to × 4.00" in found.sentence


def test_one_batch_that_is_far_off_does_not_make_dilution() -> None:
    # Of 20 batches 2 at each end are left out: the 18th of the sorted factors is the largest that counts.
    assert states(log_of({"dead": [0.75] * 2 + [0.0] * 18}))["dilution"] == "fine"
    assert states(log_of({"dead": [0.75] * 3 + [0.0] * 17}))["dilution"] == "watch"


def test_a_steady_small_share_of_dead_groups_dilutes_little() -> None:
    assert states(log_of({"dead": [0.2] * N}))["dilution"] == "fine"
    assert states(log_of({"dead": [1.0] * N}))["dilution"] == "fine"
    assert states(log_of({"dead": [0.0, 0.6] * 10}))["dilution"] == "watch"


def test_a_method_that_drops_dead_groups_is_not_diluted() -> None:
    found = findings(log_of({"dead": [0.8] * N}, OURS, method="dapo"))["dilution"]
    assert found.state == "fine"
    assert "no dead groups in its denominator" in found.sentence
    assert states(log_of({"dead": [0.8] * N}, OURS, method="grpo"))["dilution"] == "watch"


@pytest.mark.parametrize(("beta", "share", "state"), [(0.04, KL_ONLY, "watch"), (0.04, KL_ONLY - 0.01, "fine"),
                                                      (0.0, 0.9, "fine"), (None, KL_ONLY, "watch")])
def test_dead_groups_under_a_kl_term_are_to_watch(beta: float | None, share: float, state: str) -> None:
    assert states(log_of({"dead": [share] * N}, beta=beta))["KL only"] == state


@pytest.mark.parametrize(("growth", "state"), [(DEAD_GROWTH + 0.001, "watch"), (DEAD_GROWTH - 0.001, "fine")])
def test_the_signal_runs_out_when_dead_groups_grow_whatever_the_spread_does(growth: float, state: str) -> None:
    rising = [0.1] * 10 + [0.1 + growth] * 10
    for spread in ([0.5] * N, [0.5] * 10 + [0.3] * 10):
        found = findings(log_of({"reward/std": spread, "dead": rising}))["saturation"]
        assert found.state == state
        assert f"the rewards' std from 0.5 to {spread[-1]:g}" in found.sentence
    assert states(log_of({"dead": rising}))["saturation"] == state


def test_dead_groups_that_jump_about_do_not_make_a_trend() -> None:
    # Thirds of 4: means 0.25 and 0.5, s = 0.5 and 0.577, so 0.25 ± 1.2.
    assert states(log_of({"dead": [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]}))["saturation"] == "fine"


def test_there_is_no_signal_to_run_out_where_every_group_is_dead() -> None:
    found = findings(log_of({"dead": [1.0] * N}))["saturation"]
    assert (found.state, found.sentence.startswith("Not in play")) == ("fine", True)


def test_where_every_reward_is_the_same_no_rule_says_that_dead_groups_are_not_known() -> None:
    flat = {"reward/mean": [0.0] * N, "reward/std": [0.0] * N}
    found = findings(log_of(flat, scale_rewards="batch", beta=0.1))
    assert {rule: found[rule].state for rule in ("dead groups", "saturation", "dilution", "KL only")} == {
        "dead groups": "broken", "saturation": "fine", "dilution": "fine", "KL only": "watch"}
    assert found["KL only"].follows == "reward"


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "state"), [(CUT_BROKEN, "broken"), (CUT_WATCH, "watch"), (CUT_WATCH - 0.01, "fine")])
def test_truncation_is_graded_by_its_share(share: float, state: str) -> None:
    assert states(log_of({"truncated": [share] * N}))["truncation"] == state


def test_masked_answers_are_said_to_be_left_out() -> None:
    found = findings(log_of({"truncated": [0.5] * N}, mask_truncated_completions=True))["truncation"]
    assert "left out of the loss" in found.sentence
    assert "w = 0" in found.why


def test_verls_clip_ratio_is_no_truncation_while_the_longest_answer_is_below_the_limit() -> None:
    columns = {"truncated": [0.25] * N, "length/max": [100.0] * N}
    assert states(log_of(columns, VERL, **{"data.max_response_length": 512}))["truncation"] == "fine"
    assert states(log_of(columns, VERL, **{"data.max_response_length": 100}))["truncation"] == "watch"
    assert states(log_of(columns, VERL))["truncation"] == "unknown"  # a limit that is assumed proves nothing


def test_trls_share_of_cut_answers_is_believed_whatever_limit_is_assumed() -> None:
    assert states(log_of({"truncated": [1.0] * N, "length/max": [64.0] * N}))["truncation"] == "broken"


def test_a_constant_length_far_above_the_answers_scales_the_gradient_down() -> None:
    # 20 tokens, divided by 512: × 0.039 of a token mean.
    found = findings(log_of({"length/mean": [20.0] * N}, loss_type="dr_grpo"))["length constant"]
    assert found.state == "watch"
    assert "× 0.039" in found.sentence
    near = log_of({"length/mean": [512 * HORIZON + 1] * N}, loss_type="dr_grpo")
    assert states(near)["length constant"] == "fine"
    assert states(log_of({"length/mean": [20.0] * N}, loss_type="dapo"))["length constant"] == "fine"


def test_verls_constant_is_its_loss_scale_factor() -> None:
    actor = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 4096}
    short = {"length/mean": [50.0] * N}
    assert states(log_of(short, VERL, **actor))["length constant"] == "watch"
    scaled = actor | {"actor_rollout_ref.actor.loss_scale_factor": 100}
    assert states(log_of(short, VERL, **scaled))["length constant"] == "fine"


@pytest.mark.parametrize(("factor", "state"), [(DRIFT, "watch"), (1 / DRIFT, "watch"), (1.2, "fine")])
def test_length_drift_is_told_in_both_directions(factor: float, state: str) -> None:
    log = log_of({"length/mean": [100.0] * 10 + [100.0 * factor] * 10}, loss_type="grpo")
    assert states(log)["length drift"] == state
    assert ("punished less" in findings(log)["length drift"].sentence) == (factor == DRIFT)


def test_a_flat_reward_is_broken_and_a_moving_one_is_not() -> None:
    assert states(log_of({"reward/mean": [1.0] * N, "reward/std": [0.0] * N}))["reward"] == "broken"
    assert states(log_of({"reward/mean": [1.0] * N, "reward/std": [0.1] * N}))["reward"] == "fine"
    # Batches of one prompt each: no spread within a batch, but the mean moves.
    assert states(log_of({"reward/mean": [0.0, 1.0] * 10, "reward/std": [0.0] * N}))["reward"] == "fine"
    assert states(log_of({"reward/mean": [1.0] * N}))["reward"] == "unknown"


@pytest.mark.parametrize(("before", "after", "state"), [
    (0.5, ENTROPY_LOW / 2, "broken"), (0.5, 0.5 * ENTROPY_LEFT, "watch"), (ENTROPY_LOW / 2, ENTROPY_LOW / 2, "watch"),
    (0.5, 0.4, "fine"), (0.5, 2.0, "fine")])
def test_entropy_collapses_when_it_is_low_and_has_fallen(before: float, after: float, state: str) -> None:
    assert states(log_of({"entropy": [before] * 10 + [after] * 10}))["entropy"] == state


# -- the reward --------------------------------------------------------------------------------------------------------


def fall(by: float, spread: float = 0.5) -> dict[str, list[float]]:
    """Rewards of 0.8, then of 0.8 − by, with this std."""
    return {"reward/mean": [0.8] * 10 + [0.8 - by] * 10, "reward/std": [spread] * N}


@pytest.mark.parametrize(("by", "state"), [
    (0.5 * FELL - 0.001, "fine"), (0.5 * FELL + 0.001, "watch"), (0.5 * COLLAPSED - 0.001, "watch"),
    (0.5 * COLLAPSED + 0.001, "broken"), (-0.3, "fine")])
def test_a_fall_of_the_reward_is_graded_by_the_std_of_the_answers(by: float, state: str) -> None:
    assert states(log_of(fall(by)))["reward trend"] == state
    # verl logs no std, and half the range is no less than it: 0 to 1 makes 0.5 too.
    ranged = {"reward/mean": fall(by)["reward/mean"], "reward/max": [1.0] * N, "reward/min": [0.0] * N}
    assert states(log_of(ranged, VERL))["reward trend"] == state


def test_a_fall_without_any_spread_beside_it_is_to_watch_and_never_broken() -> None:
    assert states(log_of({"reward/mean": fall(0.7)["reward/mean"]}))["reward trend"] == "watch"


def test_a_rise_is_said_and_so_is_that_noise_hides_a_change() -> None:
    assert findings(log_of(fall(-0.3)))["reward trend"].sentence == (
        "The reward rose from 0.8 in the first third to 1.1 in the last")
    # Thirds of 4, means 0.5 and 0.25, s = 0.577 and 0.5: −0.25 ± 1.2.
    noisy = log_of({"reward/mean": [0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0], "reward/std": [0.5] * 12})
    found = findings(noisy)["reward trend"]
    assert (found.state, "did not clearly change" in found.sentence) == ("fine", True)


def test_thirds_need_readings() -> None:
    values = [0.8] * 6 + [0.1] * 6
    assert states(log_of({"reward/mean": values}))["reward trend"] == "watch"
    found = findings(log_of({"reward/mean": values[:THIRDS - 1]}))["reward trend"]
    assert found.sentence == f"needs at least {THIRDS} readings of reward; the log has {THIRDS - 1}"


def test_what_to_change_after_a_fall_depends_on_the_updates_a_batch() -> None:
    assert "num_iterations" not in findings(log_of(fall(0.3)))["reward trend"].change
    assert "num_iterations" in findings(log_of(fall(0.3), num_iterations=4))["reward trend"].change


@pytest.mark.parametrize(("high", "state"), [(0.399, "broken"), (0.4, "fine")])
def test_held_out_accuracy_below_its_first_interval_is_broken(high: float, state: str) -> None:
    columns = {"eval": [0.5, 0.35], "eval/low": [0.4, 0.3], "eval/high": [0.6, high], "reward/mean": [0.5] * N}
    assert states(log_of(columns, OURS))["reward trend"] == state
    assert states(log_of(columns | {"eval/low": [math.nan, 0.3]}, OURS))["reward trend"] == "fine"


@pytest.mark.parametrize(("silent", "state"), [(SILENT - 1, "fine"), (SILENT, "watch"), (EDGE - 1, "watch"),
                                               (EDGE, "broken")])
def test_batches_in_a_row_with_one_reward_are_counted(silent: int, state: str) -> None:
    live = N - silent
    columns = {"reward/mean": [0.5] * live + [0.0] * silent, "reward/std": [0.5] * live + [0.0] * silent}
    assert states(log_of(columns))["reward"] == state
    ranged = {"reward/mean": columns["reward/mean"], "reward/max": [1.0] * live + [0.0] * silent,
              "reward/min": [0.0] * N}
    assert states(log_of(ranged, VERL))["reward"] == state


@pytest.mark.parametrize(("before", "value", "state", "words"), [
    (0.5, 0.0, "broken", "down from 0.5 before"), (0.5, 1.0, "watch", "nothing is left to learn"),
    (0.0, 0.0, "broken", "fault of the reward function")])
def test_one_reward_is_told_by_how_it_came(before: float, value: float, state: str, words: str) -> None:
    columns = {"reward/mean": [before] * 10 + [value] * 10, "reward/std": [0.5] * 10 + [0.0] * 10}
    found = findings(log_of(columns))["reward"]
    assert (found.state, words in found.sentence) == (state, True)


def test_a_task_that_was_solved_is_no_fault_of_the_limit() -> None:
    columns = {"reward/mean": [0.5] * 10 + [1.0] * 10, "reward/std": [0.5] * 10 + [0.0] * 10, "truncated": [0.95] * N}
    assert findings(log_of(columns))["reward"].follows == ""


def test_dead_groups_that_did_not_grow_do_not_follow_from_a_fall() -> None:
    assert findings(log_of(fall(0.3) | {"dead": [0.6] * N}))["dead groups"].follows == ""
    assert findings(log_of(fall(0.3) | {"dead": [0.1] * 10 + [0.6] * 10}))["dead groups"].follows == "reward trend"


@pytest.mark.parametrize(("first", "follows"), [(CUT_WATCH - 0.01, "reward trend"), (CUT_WATCH, "")])
def test_truncation_that_came_with_a_fall_follows_from_it(first: float, follows: str) -> None:
    columns = fall(0.3) | {"truncated": [first] * 10 + [0.95] * 10}
    found = findings(log_of(columns))["truncation"]
    assert (found.state, found.follows) == ("broken", follows)


def test_entropy_that_verl_sums_over_answers_is_unknown() -> None:
    summed = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum"}
    falling = {"entropy": [0.5] * 10 + [0.001] * 10}
    assert states(log_of(falling, VERL, **summed))["entropy"] == "unknown"
    assert states(log_of(falling, VERL))["entropy"] == "broken"


def test_entropy_of_masked_answers_is_no_collapse() -> None:
    columns = {"entropy": [0.0] * N, "truncated": [1.0] * N}
    assert states(log_of(columns, mask_truncated_completions=True))["entropy"] == "unknown"
    assert states(log_of(columns))["entropy"] == "broken"


# -- the step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "state"), [
    ([0.0] * 6, "broken"), ([0.0, 1e-6, 1e-6, 1e-6], "fine"), ([1e-6, 2e-6, 3e-6, 4e-6], "watch"),
    ([4e-6, 3e-6, 2e-6, 0.0], "fine"), ([1e-6] * 6, "fine")])
def test_a_learning_rate_of_0_is_broken_and_endless_warm_up_is_to_watch(values: list[float], state: str) -> None:
    assert states(log_of({"lr": values}))["learning rate"] == state


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_gradient_norm_that_is_no_number_is_broken_and_shown(bad: float) -> None:
    values = [0.1] * 7 + [bad] + [0.1] * 5
    found = findings(log_of({"grad/norm": values}))["gradient"]
    assert found.state == "broken"
    assert "line 8 (step 8)" in found.evidence
    assert findings(log_of({"loss": values, "grad/norm": [0.1] * 13}))["gradient"].state == "broken"


def test_gradients_of_exactly_0_are_counted() -> None:
    assert states(log_of({"grad/norm": [0.0] * 11 + [0.1] * 9}))["gradient"] == "broken"
    found = findings(log_of({"grad/norm": [0.0] * 2 + [0.1] * 18}))["gradient"]
    assert (found.state, "2 of 20" in found.sentence) == ("watch", True)
    assert states(log_of({"grad/norm": [1e-9] * N}))["gradient"] == "fine"


def test_a_gradient_of_0_from_masked_answers_points_to_the_limit() -> None:
    columns = {"grad/norm": [0.0] * N, "truncated": [1.0] * N}
    assert "max_completion_length" in findings(log_of(columns, mask_truncated_completions=True))["gradient"].change
    assert "max_completion_length" not in findings(log_of(columns))["gradient"].change


@pytest.mark.parametrize(("ratio", "gap", "state"), [
    (1.0, 0.01, "fine"), (1 - RATIO_WATCH - 0.01, 0.01, "watch"), (1 + RATIO_WATCH + 0.01, 0.01, "watch"),
    (1 - RATIO_BROKEN - 0.01, 0.01, "broken"), (1.0, GAP + 0.01, "watch")])
def test_a_sampler_apart_from_the_trainer_is_told(ratio: float, gap: float, state: str) -> None:
    assert states(log_of({"sampler/ratio": [ratio] * N, "sampler/gap": [gap] * N}))["sampler"] == state


def test_without_readings_the_sampler_is_unknown_only_where_there_is_a_second_engine() -> None:
    assert states(log_of({"loss": [0.0]}))["sampler"] == "fine"
    assert states(log_of({"loss": [0.0]}, use_vllm=True))["sampler"] == "unknown"
    assert states(log_of({"loss": [0.0]}, VERL))["sampler"] == "unknown"


def test_fewer_than_few_readings_decide_nothing_and_the_metric_is_named() -> None:
    found = findings(log_of({"truncated": [1.0] * (FEW - 1)}))["truncation"]
    assert found.state == "unknown"
    assert found.sentence == f"needs at least {FEW} readings of completions/clipped_ratio; the log has {FEW - 1}"


def test_findings_say_which_settings_were_assumed() -> None:
    assert findings(log_of({"dead": [0.1] * N}))["dead groups"].assumes == {
        "scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
    given = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
    assert findings(log_of({"dead": [0.1] * N}, **given))["dead groups"].assumes is None


@pytest.mark.parametrize("trainer", [*TRAINERS, SCRIPT], ids=lambda trainer: trainer.name)
def test_every_change_that_a_rule_asks_for_is_written_for_every_trainer(trainer: Trainer) -> None:
    # Only TRL has a ceiling on CISPO's ratio, and only our records say where tokens end.
    own = {"cispo cap"} if trainer is TRL else {"past"} if trainer is OURS else set()
    own = {"cispo cap", "past"} if trainer is SCRIPT else own
    assert set(trainer.changes) == set(TRL.changes) - {"cispo cap"} | own
    assert set(TRL.facts) == set(trainer.facts)


@pytest.mark.parametrize("norms", [[0.3, 0.0, 0.2, 0.3], [0.0, 0.0, 0.0, 0.1], [0.2, 0.2, 0.2, 0.0]])
def test_a_gradient_that_is_0_at_some_steps_is_not_one_that_is_0(norms: list[float]) -> None:
    """Only a gradient that never moves says that no group is live, whatever was counted."""
    still, moving = (findings(log_of({"grad/norm": values, "dead": [0.1] * 4}))
                     for values in ([0.0] * 4, norms))
    assert "No group trains anything" in still["dead groups"].sentence
    assert "No group trains anything" not in moving["dead groups"].sentence
