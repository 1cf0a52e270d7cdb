"""The four answers: each rule at both sides of each threshold, and what is said where there is too little."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope.methods.find import row_of
from creditscope.methods.table import METHODS
from creditscope.methods.words import LAWS, law
from creditscope.report.answers import (
    LOSS,
    SHAPES,
    answers,
    credit,
    directions,
    is_stale,
    loss_sentence,
    optimiser,
    past_steps,
    reward_trend,
    signal,
)
from creditscope.report.run import Run, read_run
from creditscope.runs.record import Record
from each import each
from records import write_record

Line = dict[str, Any]
Make = Callable[..., Run]
PLAIN: Line = {
    "rollouts/spent": 64, "reward/mean": 0.5, "signal/groups": 8, "signal/live_groups": 8, "length/truncated": 0.0,
    "credit/dead_groups": 0.0, "w/top10_mass": 0.2, "w/zero": 0.0, "credit/within": 0.0,
    "w/positive_mass": 0.5,
    "gram/group/effective_rank": 3.0, "gram/group/w_null": 6.0, "gram/group/orthogonal_null": 6.0,
    "overshoot/past": 0.01, "overshoot/1/past": 0.005, "optimizer/scale_change": 0.01, "grad/norm": 1.0}
"""A step in which nothing is wrong."""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    numbers = itertools.count()

    def made(lines: Sequence[Line], probe: dict[str, Any] | None = None, **config: Any) -> Run:
        kept = {} if probe is None else {0: {name: np.array(value) for name, value in probe.items()}}
        return read_run(write_record(tmp_path / f"run-{next(numbers)}", lines,
                                     {"method": "grpo", "group": 8} | config, probes=kept))

    return made


def but(**changes: Any) -> list[Line]:
    """Ten plain steps with some numbers changed; None takes a number out. Names are written a__b for a/b."""
    line = PLAIN | {name.replace("__", "/"): value for name, value in changes.items()}
    return [{name: value for name, value in line.items() if value is not None}] * 10


def live(groups: float, of: int = 8) -> list[Line]:
    """Ten steps in which so many groups have rewards that differ, and credit."""
    return but(signal__groups=of, signal__live_groups=groups, credit__dead_groups=1 - groups / of)


def evaluated(accuracy: float, width: float = 0.03) -> Line:
    return {"eval/accuracy": accuracy, "eval/low": accuracy - width, "eval/high": accuracy + width}


def test_a_run_in_which_nothing_is_wrong_is_good_four_times(make: Make) -> None:
    found = answers(make(but()))
    assert [answer.topic for answer in found] == ["Signal", "Credit", "Directions", "Optimiser"]
    assert [answer.state for answer in found] == ["good"] * 4
    assert [answer.evidence for answer in found] == ["steps", "tokens", "directions", "optimizer"]


def test_a_run_without_a_step_is_unknown_four_times(make: Make) -> None:
    assert [answer.state for answer in answers(make([]))] == ["unknown"] * 4


@each("name", PLAIN)
def test_no_number_is_needed_to_give_four_answers(make: Make, name: str) -> None:
    found = answers(make([{key: value for key, value in line.items() if key != name} for line in but()]))
    assert len(found) == 4
    assert all(answer.state in SHAPES for answer in found)


def test_a_number_that_is_a_text_is_no_number(make: Make) -> None:
    odd = {name: "many" for name in PLAIN if name != "rollouts/spent"}
    assert [answer.state for answer in answers(make([odd | {"rollouts/spent": 64}] * 10))] == ["unknown"] * 4


# -- signal -----------------------------------------------------------------------------------------------------------


def test_five_of_eight_groups_carry_signal(make: Make) -> None:
    # 10 steps of 8 groups, 5 live: 50 of 80, above a half
    found = signal(make(live(5)))
    assert found.state == "good"
    assert found.sentence == ("Mean reward 0.5; 5 of 8 groups carry signal. The loss is 0 at ratio 1 by construction, "
                              "no measure of progress.")
    assert "Mean over the last 10 steps, 0 to 9." in found.rule


@pytest.mark.parametrize(("groups", "of", "state"), [
    (4, 8, "good"), (3, 8, "watch"), (10, 100, "watch"), (9, 100, "broken"), (0, 8, "broken")])
def test_half_of_the_groups_is_good_and_less_than_a_tenth_is_broken(
        make: Make, groups: int, of: int, state: str) -> None:
    assert signal(make(live(groups, of))).state == state


def test_groups_that_get_credit_without_a_difference_in_reward_carry_signal(make: Make) -> None:
    # one rollout a group has no difference of rewards, and a critic's or a plain reward's credit all the same
    found = signal(make(but(signal__live_groups=0, credit__dead_groups=0.25), method="reinforce", group=1))
    assert found.state == "good"
    assert "6 of 8 groups carry signal" in found.sentence


def test_dead_groups_of_right_answers_are_to_watch_and_not_broken(make: Make) -> None:
    silent = {"w__top10_mass": None, "w__zero": None, "credit__dead_groups": 1.0, "signal__live_groups": 0}
    run = make(but(reward__mean=1.0, **silent))
    assert (signal(run).state, credit(run).state) == ("watch", "watch")
    assert "nearly every answer is right: little is left to learn here" in signal(run).sentence
    assert "nearly every answer is right" in credit(run).sentence


@pytest.mark.parametrize("reward", [0.0, 0.94, 3.0])
def test_dead_groups_of_other_answers_are_broken(make: Make, reward: float) -> None:
    assert signal(make(but(reward__mean=reward, signal__live_groups=0, credit__dead_groups=1.0))).state == "broken"


def test_answers_that_could_not_be_judged_are_to_watch(make: Make) -> None:
    found = signal(make([*but()[:8], *but(reward__errors=3)[:2]]))
    assert found.state == "watch"
    assert "the reward function failed on 6 answers" in found.sentence


@pytest.mark.parametrize(("now", "state"), [(0.021, "good"), (0.019, "watch")])
def test_entropy_that_fell_below_a_fiftieth_of_a_nat_is_to_watch(make: Make, now: float, state: str) -> None:
    found = signal(make([*but(entropy__mean=0.2), *but(entropy__mean=now)]))
    assert found.state == state
    assert ("entropy fell from 0.2 to 0.019 nats per token" in found.sentence) == (state == "watch")


def test_entropy_that_was_always_low_did_not_fall(make: Make) -> None:
    # 0.01 is half of 0.02: more than 0.3 of it is left
    assert signal(make([*but(entropy__mean=0.02), *but(entropy__mean=0.01)])).state == "good"


# -- what was learnt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "state", "said"), [
    (0.26, "broken", "Accuracy on unseen problems 46.6 → 26.0 % [23.0, 29.0]: it fell;"),
    (0.4, "broken", "Accuracy on unseen problems 46.6 → 40.0 % [37.0, 43.0]: it fell;"),
    (0.63, "good", "Accuracy on unseen problems 46.6 → 63.0 % [60.0, 66.0]: it rose;"),
    (0.44, "good", "Accuracy on unseen problems 46.6 → 44.0 % [41.0, 47.0]: no clear change;")])
def test_accuracy_that_fell_is_broken_where_the_intervals_are_apart(
        make: Make, after: float, state: str, said: str) -> None:
    first, *rest = but()
    found = signal(make([first | evaluated(0.466), *rest, evaluated(after)]))
    assert found.state == state
    assert found.sentence.startswith(said)
    assert "mean reward" not in found.sentence


def test_accuracy_without_an_interval_decides_nothing(make: Make) -> None:
    first, *rest = but()
    found = signal(make([first | {"eval/accuracy": 0.9}, *rest, {"eval/accuracy": 0.1}]))
    assert (found.state, "90.0 → 10.0 %: no clear change" in found.sentence) == ("good", True)


def test_one_evaluation_says_nothing_of_what_was_learnt(make: Make) -> None:
    first, *rest = but()
    assert signal(make([first | evaluated(0.466), *rest])).sentence.startswith("Mean reward 0.5;")


def test_a_reward_speaks_where_accuracy_does_not(make: Make) -> None:
    high, low = but(reward__mean=0.6), but(reward__mean=0.3)
    found = signal(make([high[0] | evaluated(0.5), *high[1:], *low, evaluated(0.48)]))
    assert found.state == "watch"
    assert "no clear change; mean reward fell from 0.6 to 0.3" in found.sentence


@pytest.mark.parametrize(("cut", "state"), [(0.09, "good"), (0.1, "watch"), (0.49, "watch"), (0.5, "broken")])
def test_a_tenth_of_the_answers_cut_off_is_to_watch_and_a_half_is_broken(make: Make, cut: float, state: str) -> None:
    found = signal(make(but(length__truncated=cut)))
    assert found.state == state
    assert f"{100 * cut:.2g} % of the answers are cut off" in found.sentence


def test_cut_off_answers_are_to_watch_where_the_reward_rose(make: Make) -> None:
    low, high = (but(reward__mean=reward, length__truncated=0.9) for reward in (0.3, 0.9))
    assert signal(make([*low, *high])).state == "watch"


def test_cut_off_answers_are_broken_where_the_reward_fell(make: Make) -> None:
    low, high = (but(reward__mean=reward, length__truncated=0.9) for reward in (0.3, 0.9))
    assert signal(make([*high, *low])).state == "broken"


def test_a_script_of_ones_own_is_told_the_callbacks_arguments(make: Make) -> None:
    once = [PLAIN, *({name: value for name, value in PLAIN.items() if not name.startswith(("gram/", "overshoot/",
                                                                                           "optimizer/"))},) * 5]
    run = make(once, engine="trl", trainer="GRPOTrainer", scope="light")
    oftener = "a smaller every= of ScopeCallback reads more often"
    assert directions(run).sentence == f"1 reading is too few to say, it takes 3; {oftener}."
    assert optimiser(run).sentence.startswith(f"Overshoot: 1 reading is too few to say, it takes 3; {oftener}; ")


def test_a_script_of_ones_own_is_told_what_the_callback_does_not_read(make: Make) -> None:
    run = make(but(optimizer__scale_change=None, gram__group__effective_rank=None), engine="trl", trainer="GRPOTrainer")
    assert optimiser(run).sentence.endswith("reward scale was not read: ScopeCallback does not read it.")
    assert directions(run).sentence == "Not read: give ScopeCallback gram=True."


def test_the_worse_of_two_findings_is_the_state(make: Make) -> None:
    dead = {"signal__live_groups": 0, "credit__dead_groups": 1.0}
    assert signal(make(but(length__truncated=0.2, **dead))).state == "broken"


def test_fifteen_groups_are_too_few_and_sixteen_are_not(make: Make, tmp_path: Path) -> None:
    few = signal(make([*but(signal__groups=5, signal__live_groups=5)[:3]]))  # 3 · 5 = 15
    assert few.state == "unknown"
    assert "; 15 groups are too few to say, it takes 16." in few.sentence
    with Record.create(tmp_path / "more", {"method": "grpo"}, {}) as record:
        for step in range(2):  # 2 · 8 = 16
            record.append(step, PLAIN)
    assert signal(read_run(tmp_path / "more")).state == "good"


def test_what_happened_before_the_last_ten_steps_does_not_count(make: Make) -> None:
    found = signal(make([*live(0), *but()]))
    assert found.state == "good"
    assert "Mean over the last 10 steps, 10 to 19." in found.rule


@pytest.mark.parametrize(("rewards", "state", "said"), [
    ((0.6, 0.3), "watch", "Mean reward fell from 0.6 to 0.3;"),
    ((0.3, 0.6), "good", "Mean reward rose from 0.3 to 0.6;")])
def test_a_reward_that_fell_is_to_watch_and_one_that_rose_is_said(
        make: Make, rewards: tuple[float, float], state: str, said: str) -> None:
    before, after = (but(reward__mean=reward) for reward in rewards)
    found = signal(make([*before, *after]))  # twenty steps: thirds of six
    assert found.state == state
    assert found.sentence.startswith(said)


def test_thirds_are_told_apart_by_the_interval_of_their_difference() -> None:
    # thirds of four: s² = 4·0.01/3 each, half = 3.1824·√(2·0.04/3/4) = 0.2599
    def run(last: float) -> list[Line]:
        return [{"reward/mean": x} for x in (0.4, 0.6, 0.4, 0.6, 0, 0, 0, 0, last, last + 0.2, last, last + 0.2)]

    assert reward_trend(run(0.4 - 0.26)) == pytest.approx((0.5, 0.24))
    assert reward_trend(run(0.4 - 0.259)) is None
    assert reward_trend([{"reward/mean": x} for x in (0.5,) * 3 + (0.4,) * 5]) is None  # thirds of two say nothing


@each("name", METHODS)
def test_what_the_loss_says_is_the_law_of_the_row(name: str) -> None:
    assert loss_sentence({"method": name}) == LOSS[law(METHODS[name]).kind]


def test_every_law_has_its_short_sentence_and_none_sounds_like_a_state() -> None:
    assert LOSS.keys() == LAWS.keys()
    assert not any("watch" in sentence for sentence in LOSS.values())


def test_the_loss_under_credit_from_outside_says_how_that_is_centred() -> None:
    assert loss_sentence({"method": "grpo", "credit": "step_reward"}) == LOSS["outside"]
    assert loss_sentence({"method": "grpo", "credit": "outcome"}) == LOSS["zero"]
    assert loss_sentence({"method": "p1_grpo", "credit": "step_reward"}) == LOSS["log_prob"]


def test_the_loss_under_a_weight_for_the_kl_term_is_that_term() -> None:
    assert loss_sentence({"method": "grpo", "beta": 0.04}) == LOSS["penalty"]


@pytest.mark.parametrize("config", [
    {}, {"method": None}, {"method": ["grpo"]}, {"method": "from_the_future"}, {"method": "grpo", "beta": "much"},
    {"method": "dapo", "beta": 0.1}, {"method": "grpo", "beta": 10**400}])
def test_a_row_that_is_not_known_has_no_law_and_harms_nothing(make: Make, config: dict[str, Any]) -> None:
    assert row_of(config) is None
    assert loss_sentence(config) == ""
    assert signal(make(but(), **({"method": None} | config))).state == "good"


# -- credit -----------------------------------------------------------------------------------------------------------


def test_credit_says_what_an_even_spread_would_give(make: Make) -> None:
    # half of the tokens have credit: a tenth of all tokens is a fifth of those
    found = credit(make(but(w__top10_mass=0.71, w__zero=0.5, credit__within=0.4)))
    assert found.state == "good"
    assert found.sentence == ("The top tenth of tokens carries 71 % of the effective credit (even: 20 %); 50 % of "
                              "tokens have none; 40 % varies inside answers.")


def test_credit_that_a_tenth_of_the_tokens_holds_alone_is_even_there(make: Make) -> None:
    assert "(even: 100 %)" in credit(make(but(w__zero=0.95))).sentence


def test_an_even_spread_is_reckoned_step_by_step(make: Make) -> None:
    # 0.1 where every token has credit and 1 where one in ten has: 0.55; a mean of 45 % without would be 0.18
    half = [*but(w__zero=0.0)[:5], *but(w__zero=0.9)[:5]]
    assert "(even: 55 %)" in credit(make(half)).sentence


def test_credit_of_whole_answers_is_said_to_vary_between_them_only(make: Make) -> None:
    assert credit(make(but())).sentence == ("The top tenth of tokens carries 20 % of the effective credit (even: "
                                            "10 %); it varies only between answers.")


@pytest.mark.parametrize(("top", "state"), [(0.89, "good"), (0.9, "watch")])
def test_nine_tenths_of_the_credit_on_a_tenth_of_the_tokens_is_to_watch(make: Make, top: float, state: str) -> None:
    assert credit(make(but(w__top10_mass=top))).state == state


@pytest.mark.parametrize(("positive", "state", "said"), [
    (0.89, "good", ""), (0.9, "watch", "90 % pushes up"), (0.11, "good", ""), (0.1, "watch", "90 % pushes down")])
def test_credit_of_one_sign_is_to_watch(make: Make, positive: float, state: str, said: str) -> None:
    found = credit(make(but(w__positive_mass=positive)))
    assert (found.state, "pushes" in found.sentence) == (state, bool(said))
    assert said in found.sentence


@pytest.mark.parametrize(("silent", "state"), [(5, "good"), (6, "broken")])
def test_credit_is_broken_when_more_than_half_of_the_steps_have_none(make: Make, silent: int, state: str) -> None:
    without = but(w__top10_mass=None, w__zero=None, credit__within=None, w__positive_mass=None)
    found = credit(make([*without[:silent], *but()[silent:]]))
    assert found.state == state
    assert (found.sentence == "In 6 of 10 steps no token had any effective credit.") == (state == "broken")


def test_a_record_that_says_nothing_of_credit_is_unknown_and_not_broken(make: Make) -> None:
    assert credit(make([{"rollouts/spent": 64, "reward/mean": 0.5}] * 10)).state == "unknown"


def test_credit_that_is_not_a_number_is_not_the_same_as_none(make: Make) -> None:
    assert credit(make(but(w__top10_mass=float("nan")))).state == "unknown"


def test_two_steps_of_credit_are_too_few(make: Make) -> None:
    found = credit(make(but()[:2]))
    assert (found.state, found.sentence) == ("unknown", "2 steps are too few to say, it takes 3.")


# -- directions -------------------------------------------------------------------------------------------------------


def test_directions_are_told_beside_their_nulls(make: Make) -> None:
    found = directions(make(but(gram__group__effective_rank=2.4, gram__group__w_null=5.1,
                                gram__group__norm_null=3.2)))
    assert found.state == "good"
    assert found.sentence == ("8 rollouts push in 2.4 directions; null 5.1 (orthogonal, equal norms), 3.2 with their "
                              "own norms.")


@pytest.mark.parametrize(("rank", "null", "state", "end"), [
    (1.26, 28.0, "good", "norms)."), (1.24, 28.0, "watch", "; all push along one line."),
    (1.24, 3.0, "watch", "; all push along one line."), (1.0, 2.9, "unknown", "; too few directions to judge.")])
def test_low_rank_is_no_fault_but_one_line_is_to_watch_where_there_could_be_three(
        make: Make, rank: float, null: float, state: str, end: str) -> None:
    found = directions(make(but(gram__group__effective_rank=rank, gram__group__w_null=null)))
    assert found.state == state
    assert found.sentence.endswith(end)


def test_one_rollout_per_group_has_one_direction(make: Make) -> None:
    found = directions(make(but(), group=1))
    assert (found.state, found.sentence) == ("unknown", "One rollout per group has one direction.")


def test_token_credit_is_held_against_the_null_of_two_rewards(make: Make) -> None:
    found = directions(make(but(gram__group__w_null=None, gram__group__orthogonal_null=7.0)))
    assert "null 7 (orthogonal, equal norms, two rewards)" in found.sentence


@pytest.mark.parametrize(("scope", "changes", "said"), [
    ("off", {"gram__group__effective_rank": None}, "Not read: train with --scope light."),
    ("light", {"gram__group__effective_rank": None}, "Not read: no group was live when the microscope looked."),
    ("light", {"gram__group__w_null": None, "gram__group__orthogonal_null": None},
     "The rank was read, but no null to hold it against.")])
def test_directions_that_cannot_be_judged_say_why(
        make: Make, scope: str, changes: dict[str, None], said: str) -> None:
    found = directions(make(but(**changes), scope=scope))
    assert (found.state, found.sentence) == ("unknown", said)


def test_two_readings_are_too_few_and_three_are_not(make: Make, tmp_path: Path) -> None:
    unread = but(gram__group__effective_rank=None)
    found = directions(make([*unread, *but()[:2]]))
    assert found.state == "unknown"
    assert found.sentence == "2 readings are too few to say, it takes 3; a smaller --every reads more often."
    with Record.create(tmp_path / "more", {"group": 8}, {}) as record:
        for step, line in enumerate([*unread, *but()[:3]]):
            record.append(step, line)
    assert directions(read_run(tmp_path / "more")).state == "good"


# -- optimiser --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("past", "state"), [(0.049, "good"), (0.05, "watch"), (0.199, "watch"), (0.2, "broken")])
def test_one_token_in_twenty_past_its_bound_is_to_watch_and_one_in_five_is_broken(
        make: Make, past: float, state: str) -> None:
    found = optimiser(make(but(overshoot__past=past)))
    assert found.state == state
    assert "of bounded tokens end outside the clip range; reward scale" in found.sentence


@pytest.mark.parametrize(("change", "word"), [(0.049, "hardly matters"), (0.05, "matters")])
def test_scale_hardly_matters_below_a_twentieth_and_never_changes_the_state(
        make: Make, change: float, word: str) -> None:
    found = optimiser(make(but(optimizer__scale_change=change)))
    assert f"; reward scale {word}: a tenth of the credit changes the update by " in found.sentence
    assert found.state == "good"


def test_a_scale_that_was_read_once_says_so_and_that_from_a_step_on_stands_in(make: Make, tmp_path: Path) -> None:
    lines = [*but(optimizer__scale_change=None)[:9], PLAIN]
    assert "reward scale: 1 reading is too few to say, it takes 3" in optimiser(make(lines)).sentence
    with Record.create(tmp_path / "now", {"method": "grpo"}, {}) as record:
        for step, line in enumerate(lines):
            record.append(step, line | {"optimizer/scale_change_now": 0.02})
    found = optimiser(read_run(tmp_path / "now"))
    assert "a tenth of the credit changes the update by 2 % from that step on" in found.sentence


def test_both_windows_are_named_where_they_differ(make: Make) -> None:
    found = optimiser(make([*but(overshoot__past=None, overshoot__1__past=None)[:5], *but()[:5]]))
    assert found.rule.endswith("Mean over the last 5 readings, 5 to 9. Scale: mean over the last 10 readings, 0 to 9.")


@pytest.mark.parametrize(("cosine", "said"), [
    ([0.9, 1.0, 0.9998], "cosine 0.9998 at ×10"), ([0.9, 1.0, float("nan")], "cosine 0.9000 at ×0.1"),
    ([0.9, 1.0, 0.999996], "cosine 0.999996 at ×10"), ([float("nan")] * 3, "")])
def test_the_cosine_is_that_at_ten_times_the_reward_or_else_at_a_tenth(
        make: Make, cosine: list[float], said: str) -> None:
    found = optimiser(make(but(), probe={"phi": [0.1, 1.0, 10.0], "cosine": cosine}))
    assert said in found.sentence
    assert ("cosine" in found.sentence) == bool(said)


@pytest.mark.parametrize("probe", [
    {"phi": ["many"], "cosine": [1.0]}, {"phi": [10.0, 1.0], "cosine": [1.0]}, {"phi": [10.0]}, {"other": [1.0]}])
def test_an_odd_sweep_has_no_cosine(make: Make, probe: dict[str, Any]) -> None:
    assert "cosine" not in optimiser(make(but(), probe=probe)).sentence


def test_a_damaged_sweep_has_no_cosine_and_is_named(make: Make) -> None:
    run = make(but(), probe={"phi": [10.0], "cosine": [0.9]})
    (run.record.path / "optimizer" / "000000.npz").write_bytes(b"no archive")
    assert "cosine" not in optimiser(run).sentence
    assert len(run.faults) == 1


def test_where_the_end_of_the_batch_was_hardly_read_the_steps_before_it_speak(make: Make) -> None:
    lines = but(overshoot__past=None, overshoot__1__past=0.02, overshoot__3__past=0.06)
    steps, where = past_steps(lines)
    assert (len(steps), where) == (10, "overshoot/3/past")
    found = optimiser(make(lines))
    assert found.state == "watch"
    assert "6 % of bounded tokens are outside the clip range after 3 of the batch's updates" in found.sentence


def test_the_end_of_the_batch_speaks_where_it_was_read_three_times() -> None:
    lines = [*but(overshoot__past=None)[:7], *but()[:3]]
    assert past_steps(lines)[1] == "overshoot/past"
    assert past_steps([*but(overshoot__past=None)[:8], *but()[:2]])[1] == "overshoot/1/past"


@pytest.mark.parametrize(("method", "scale", "state"), [
    ("p1_grpo", 0.01, "good"), ("p1_grpo", None, "unknown"), ("grpo", 0.01, "unknown")])
def test_a_method_without_a_bound_cannot_overshoot(
        make: Make, method: str, scale: float | None, state: str) -> None:
    lines = but(overshoot__past=None, overshoot__1__past=None, optimizer__scale_change=scale)
    found = optimiser(make(lines, method=method))
    assert found.state == state
    assert ("this method has no clip range" in found.sentence.lower()) == (method == "p1_grpo")


def test_an_optimiser_that_was_not_probed_names_the_flag(make: Make) -> None:
    found = optimiser(make(but(overshoot__past=None, overshoot__1__past=None, optimizer__scale_change=None)))
    assert found.state == "unknown"
    assert found.sentence == "Not read: train with --probe light."


@pytest.mark.parametrize(("level", "said"), [("off", "train with --probe light"), ("light", "clipped to its norm")])
def test_a_scale_that_was_not_read_says_why(tmp_path: Path, level: str, said: str) -> None:
    with Record.create(tmp_path / "run", {"method": "grpo", "probe": level}, {}) as record:
        for step, line in enumerate(but(optimizer__scale_change=None)):
            record.append(step, line)
    assert said in optimiser(read_run(tmp_path / "run")).sentence


def test_a_probe_that_saw_no_bound_says_so(make: Make) -> None:
    lines = but(overshoot__past=None, overshoot__1__past=None)
    with Record.create(make(lines).record.path.parent / "probed", {"method": "grpo", "probe": "light"}, {}) as record:
        for step, line in enumerate(lines):
            record.append(step, line)
    found = optimiser(read_run(record.path))
    assert found.state == "unknown"
    assert "Overshoot was not read: no token had a bound when the probe looked" in found.sentence


def test_two_readings_of_overshoot_are_too_few(make: Make) -> None:
    found = optimiser(make([*but(overshoot__past=None, overshoot__1__past=None)[:8],
                            *but(overshoot__1__past=None)[:2]]))
    assert found.state == "unknown"
    assert "Overshoot: 2 readings are too few to say, it takes 3; a smaller --probe-every" in found.sentence


def test_a_gradient_that_is_not_finite_is_broken_whatever_else_is_good(make: Make) -> None:
    found = optimiser(make([*but()[:9], {**PLAIN, "grad/norm": float("nan")}]))
    assert found.state == "broken"
    assert "The gradient was not finite in 1 of the last steps" in found.sentence


# -- what was read long ago -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "last", "stale"), [
    ([0, 1, 2], 11, False), ([0, 1, 2], 12, True), ([0, 10, 20], 39, False), ([0, 10, 20], 40, True), ([], 50, False)])
def test_ten_steps_and_twice_the_widest_gap_make_a_number_old(at: list[int], last: int, stale: bool) -> None:
    assert is_stale([{"step": last}], [{"step": step} for step in at]) == stale


def test_numbers_that_were_read_long_ago_are_not_called_good(make: Make) -> None:
    gone = dict.fromkeys(name.replace("/", "__") for name in PLAIN if name.startswith(
        ("credit/", "w/", "gram/", "overshoot/", "optimizer/")))
    run = make([*but(), *but(**gone)], scope="light")
    assert [answer.state for answer in answers(run)] == ["good", "unknown", "unknown", "unknown"]
    assert credit(run).sentence == "Not known since step 9."
    assert directions(run).sentence == "Not read since step 9."
    assert optimiser(run).sentence == ("Tokens outside the clip range were not counted since step 9; reward scale was "
                                       "not read since step 9.")
