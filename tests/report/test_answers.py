"""The four topics: numbers in sentences, and states that are the diagnosis' own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope.diagnosis.engine import SIGNS, Diagnosis
from creditscope.diagnosis.finding import Finding, State
from creditscope.diagnosis.rules import RULES
from creditscope.methods.find import row_of
from creditscope.methods.table import METHODS
from creditscope.methods.words import LAWS, law
from creditscope.report.answers import (
    LOSS,
    TOPICS,
    answers,
    credit,
    directions,
    loss_sentence,
    of_topic,
    optimiser,
    past_steps,
    signal,
    state_of,
)
from creditscope.report.run import Run, read_run
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

    def made(lines: Sequence[Line], probe: dict[str, Any] | None = None, probing: str = "off", **config: Any) -> Run:
        kept = {} if probe is None else {0: {name: np.array(value) for name, value in probe.items()}}
        return read_run(write_record(tmp_path / f"run-{next(numbers)}", lines,
                                     {"method": "grpo", "group": 8, "probe": probing} | config, probes=kept))

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


def test_the_topics_stand_in_order_with_the_sections_that_show_them(make: Make) -> None:
    found = answers(make(but()))
    assert [answer.topic for answer in found] == list(TOPICS) == ["Signal", "Credit", "Directions", "Optimiser"]
    assert [answer.evidence for answer in found] == ["steps", "tokens", "directions", "optimizer"]


def test_a_run_without_a_step_is_unknown_four_times(make: Make) -> None:
    assert [answer.state for answer in answers(make([]))] == ["unknown"] * 4


@each("name", PLAIN)
def test_no_number_is_needed_to_give_four_answers(make: Make, name: str) -> None:
    found = answers(make([{key: value for key, value in line.items() if key != name} for line in but()]))
    assert len(found) == 4
    assert all(answer.state in SIGNS for answer in found)


def test_a_number_that_is_a_text_is_no_number(make: Make) -> None:
    odd = {name: "many" for name in PLAIN if name != "rollouts/spent"}
    run = make([odd | {"rollouts/spent": 64}] * 10)
    assert {answer.state for answer in answers(run)} <= {"unknown", "fine"}
    assert not any(word in answer.sentence for answer in answers(run) for word in ("many", "nan"))


# -- states -----------------------------------------------------------------------------------------------------------


def test_every_finding_is_of_one_topic(make: Make) -> None:
    found = make(but()).diagnosis
    told = [finding.rule for topic in TOPICS for finding in of_topic(found, topic)]
    assert sorted(told) == sorted(RULES)


@pytest.mark.parametrize(("states", "state"), [
    (["fine", "unknown"], "fine"), (["unknown"], "unknown"), ([], "unknown"), (["fine", "watch", "unknown"], "watch"),
    (["watch", "broken"], "broken")])
def test_a_topic_is_as_bad_as_its_worst_finding_and_unknown_where_nothing_is_known(
        states: list[State], state: State) -> None:
    assert state_of([Finding(rule="x", state=one, sentence="x") for one in states]) == state


def test_a_topic_has_the_state_of_the_diagnosis_and_names_its_findings(make: Make) -> None:
    run = make(but(reward__mean=0.0, reward__std=0.0, credit__dead_groups=1.0, signal__live_groups=0, grad__norm=0.0))
    found = {answer.topic: answer for answer in answers(run)}
    assert run.diagnosis.state == "broken"
    assert (found["Signal"].state, found["Optimiser"].state) == ("broken", "broken")
    assert found["Signal"].rule.startswith("Findings: ✗ ")
    assert found["Signal"].rule.endswith("Mean over the last 10 steps, 0 to 9.")
    assert not [each for each in run.diagnosis.findings if each.state == "broken"
                and each.rule not in found["Signal"].rule + found["Optimiser"].rule]


def test_what_happened_early_is_told_with_its_step(make: Make) -> None:
    later = but(overshoot__past=None, overshoot__1__past=None)
    run = make([*but(overshoot__past=0.116)[:1], *but(overshoot__past=0.01)[:2], *later, *later])
    assert "4.5 % of bounded tokens end outside the clip range, at most 12 % (step 0)" in optimiser(run)[0]


def test_a_state_is_never_made_by_a_sentence() -> None:
    found = Diagnosis([Finding(rule="gradient", state="broken", sentence="x")])
    assert [state_of(of_topic(found, topic)) for topic in TOPICS] == ["unknown", "unknown", "unknown", "broken"]


# -- signal -----------------------------------------------------------------------------------------------------------


def test_five_of_eight_groups_carry_signal(make: Make) -> None:
    said, over = signal(make(live(5)))
    assert said == ("mean reward 0.5 → 0.5 (thirds); 5 of 8 groups carry signal. The loss is 0 at ratio 1 by "
                    "construction, no measure of progress.")
    assert over == "Mean over the last 10 steps, 0 to 9."


def test_groups_that_get_credit_without_a_difference_in_reward_carry_signal(make: Make) -> None:
    # one rollout a group has no difference of rewards, and a critic's or a plain reward's credit all the same
    run = make(but(signal__live_groups=0, credit__dead_groups=0.25), method="reinforce", group=1)
    assert "6 of 8 groups carry signal" in signal(run)[0]


def test_the_numbers_of_signal_are_told_without_a_judgement(make: Make) -> None:
    first, *rest = but(length__truncated=0.2, reward__errors=3, entropy__mean=0.2)
    run = make([first | evaluated(0.466), *rest, *but(length__truncated=0.6, entropy__mean=0.02), evaluated(0.26)])
    said = signal(run)[0]
    for part in ("accuracy on unseen problems 46.6 → 26.0 % [23.0, 29.0];", "60 % of the answers are cut off",
                 "the reward function failed on 30 answers", "entropy 0.2 → 0.02 nats per token"):
        assert part in said


def test_accuracy_without_an_interval_has_none(make: Make) -> None:
    first, *rest = but()
    said = signal(make([first | {"eval/accuracy": 0.9}, *rest, {"eval/accuracy": 0.1}]))[0]
    assert said.startswith("accuracy on unseen problems 90.0 → 10.0 %;")


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
    assert answers(make(but(), **({"method": None} | config)))[0].state in SIGNS


# -- credit -----------------------------------------------------------------------------------------------------------


def test_credit_says_what_an_even_spread_would_give(make: Make) -> None:
    # half of the tokens have credit: a tenth of all tokens is a fifth of those
    assert credit(make(but(w__top10_mass=0.71, w__zero=0.5, credit__within=0.4, w__positive_mass=0.9)))[0] == (
        "the top tenth of tokens carries 71 % of the effective credit (even: 20 %); 50 % of tokens have none; 40 % "
        "varies inside answers; 90 % pushes up.")


def test_credit_that_a_tenth_of_the_tokens_holds_alone_is_even_there(make: Make) -> None:
    assert "(even: 100 %)" in credit(make(but(w__zero=0.95)))[0]


def test_an_even_spread_is_computed_step_by_step(make: Make) -> None:
    # 0.1 where every token has credit and 1 where one in ten has: 0.55; a mean of 45 % without would be 0.18
    half = [*but(w__zero=0.0)[:5], *but(w__zero=0.9)[:5]]
    assert "(even: 55 %)" in credit(make(half))[0]


def test_credit_of_whole_answers_is_said_to_vary_between_them_only(make: Make) -> None:
    assert "; it varies only between answers;" in credit(make(but()))[0]


def test_steps_without_any_credit_are_counted(make: Make) -> None:
    without = but(w__top10_mass=None, w__zero=None, credit__within=None, w__positive_mass=None)
    assert credit(make([*without[:6], *but()[6:]]))[0].endswith("; in 6 of the last 10 steps no token had any.")
    assert "no token had any" not in credit(make(but(w__top10_mass=float("nan"))))[0]


def test_a_record_that_says_nothing_of_credit_says_so(make: Make) -> None:
    assert credit(make([{"rollouts/spent": 64, "reward/mean": 0.5}] * 10))[0] == "no effective credit is recorded."


# -- directions -------------------------------------------------------------------------------------------------------


def test_directions_are_told_beside_their_nulls(make: Make) -> None:
    assert directions(make(but(gram__group__effective_rank=2.4, gram__group__w_null=5.1,
                               gram__group__norm_null=3.2)))[0] == (
        "8 rollouts push in 2.4 directions; null 5.1 (orthogonal, equal norms), 3.2 with their own norms.")


def test_one_rollout_per_group_has_one_direction(make: Make) -> None:
    assert directions(make(but(), group=1))[0] == "one rollout per group has one direction."


def test_token_credit_is_compared_with_the_null_of_two_rewards(make: Make) -> None:
    said = directions(make(but(gram__group__w_null=None, gram__group__orthogonal_null=7.0)))[0]
    assert "null 7 (orthogonal, equal norms, two rewards)" in said


@pytest.mark.parametrize(("scope", "changes", "said"), [
    ("off", {"gram__group__effective_rank": None}, "not read: train with --scope light."),
    ("light", {"gram__group__effective_rank": None}, "not read: no group was live when the microscope looked."),
    ("light", {"gram__group__w_null": None, "gram__group__orthogonal_null": None},
     "8 rollouts push in 3 directions; no null to compare with was read.")])
def test_directions_that_were_not_read_say_why(make: Make, scope: str, changes: dict[str, None], said: str) -> None:
    assert directions(make(but(**changes), scope=scope))[0] == said


def test_a_script_of_ones_own_is_told_what_the_callback_does_not_read(make: Make) -> None:
    run = make(but(optimizer__scale_change=None, gram__group__effective_rank=None), engine="trl", trainer="GRPOTrainer")
    assert optimiser(run)[0].endswith("reward scale was not read: ScopeCallback does not read it.")
    assert directions(run)[0] == "not read: give ScopeCallback gram=True."


# -- optimiser --------------------------------------------------------------------------------------------------------


def test_tokens_past_their_bound_and_the_reward_s_scale_are_told(make: Make) -> None:
    assert optimiser(make(but(overshoot__past=0.05, optimizer__scale_change=0.04)))[0] == (
        "5 % of bounded tokens end outside the clip range, at most 5 % (step 0); a tenth of the credit changes the "
        "update by 4 %.")


def test_a_scale_from_a_step_on_is_told_where_there_is_no_other(make: Make) -> None:
    run = make(but(optimizer__scale_change=None, optimizer__scale_change_now=0.02))
    assert "a tenth of the credit changes the update by 2 % from that step on" in optimiser(run)[0]


def test_both_windows_are_named_where_they_differ(make: Make) -> None:
    over = optimiser(make([*but(overshoot__past=None, overshoot__1__past=None)[:5], *but()[:5]]))[1]
    assert over == "Mean over the last 5 readings, 5 to 9. Scale: mean over the last 10 readings, 0 to 9."


@pytest.mark.parametrize(("cosine", "said"), [
    ([0.9, 1.0, 0.9998], "cosine 0.9998 at ×10"), ([0.9, 1.0, float("nan")], "cosine 0.9000 at ×0.1"),
    ([0.9, 1.0, 0.999996], "cosine 0.999996 at ×10"), ([float("nan")] * 3, "")])
def test_the_cosine_is_that_at_ten_times_the_reward_or_else_at_a_tenth(
        make: Make, cosine: list[float], said: str) -> None:
    found = optimiser(make(but(), probe={"phi": [0.1, 1.0, 10.0], "cosine": cosine}))[0]
    assert said in found
    assert ("cosine" in found) == bool(said)


@pytest.mark.parametrize("probe", [
    {"phi": ["many"], "cosine": [1.0]}, {"phi": [10.0, 1.0], "cosine": [1.0]}, {"phi": [10.0]}, {"other": [1.0]}])
def test_an_odd_sweep_has_no_cosine(make: Make, probe: dict[str, Any]) -> None:
    assert "cosine" not in optimiser(make(but(), probe=probe))[0]


def test_a_damaged_sweep_has_no_cosine_and_is_named(make: Make) -> None:
    run = make(but(), probe={"phi": [10.0], "cosine": [0.9]})
    (run.record.path / "optimizer" / "000000.npz").write_bytes(b"no archive")
    assert "cosine" not in optimiser(run)[0]
    assert len(run.faults) == 1


def test_where_the_end_of_the_batch_was_not_read_an_earlier_update_is_told(make: Make) -> None:
    lines = but(overshoot__past=None, overshoot__1__past=0.02, overshoot__3__past=0.06)
    steps, where = past_steps(lines)
    assert (len(steps), where) == (10, "overshoot/3/past")
    said = optimiser(make(lines))[0]
    assert "6 % of bounded tokens are outside the clip range after 3 of the batch's updates" in said
    assert past_steps([*but(overshoot__past=None)[:9], *but()[:1]])[1] == "overshoot/past"


def test_a_method_without_a_bound_cannot_overshoot(make: Make) -> None:
    lines = but(overshoot__past=None, overshoot__1__past=None)
    assert optimiser(make(lines, method="p1_grpo"))[0].startswith("this method has no clip range; ")


def test_an_optimiser_that_was_not_probed_names_the_flag(make: Make) -> None:
    run = make(but(overshoot__past=None, overshoot__1__past=None, optimizer__scale_change=None))
    assert optimiser(run)[0] == "not read: train with --probe light."


@pytest.mark.parametrize(("level", "said"), [("off", "train with --probe light"), ("light", "clipped to its norm")])
def test_a_scale_that_was_not_read_says_why(make: Make, level: str, said: str) -> None:
    assert said in optimiser(make(but(optimizer__scale_change=None), probing=level))[0]


def test_a_probe_that_saw_no_bound_says_so(make: Make) -> None:
    run = make(but(overshoot__past=None, overshoot__1__past=None), probing="light")
    assert optimiser(run)[0].startswith("overshoot was not read: no token had a bound when the probe looked; ")


def test_gradients_that_are_not_finite_are_counted_from_the_first(make: Make) -> None:
    wild = {**PLAIN, "grad/norm": float("nan")}
    run = make([*but()[:9], wild, *but()])
    assert optimiser(run)[0].startswith("the gradient was not finite in 1 of 20 steps, first at 9; ")
