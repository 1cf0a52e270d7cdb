"""Findings of all rules: their order, the first cause, the headline, and what cannot be judged."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope.diagnosis import engine
from creditscope.diagnosis.engine import LATER, SIGNS, Diagnosis, diagnose, unread
from creditscope.diagnosis.finding import STATES, THIRDS, Finding
from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.rules import RULES
from creditscope.diagnosis.thresholds import DEAD_WATCH, NO_GAIN_FEWEST, ZERO_MANY
from creditscope.diagnosis.trainers import BY_TRL, OURS, SCRIPT, TRAINERS, TRL, VERL, Trainer
from creditscope.runs import schema
from diagnosis.makers_doctor import FALLS, FLAT, RISES, N, above, findings, log_of, steady

DEAD = {"truncated": steady(1), "reward/mean": steady(0), "reward/std": steady(0), "dead": steady(1),
        "grad/norm": steady(0)}
"""Every answer is cut, so that every reward, advantage and gradient is 0."""


def a(rule: str, *follows: str, state: Any = "broken", onset: int | None = None) -> Finding:
    return Finding(rule=rule, state=state, sentence=f"{rule} is so", onset=onset, follows=follows)


def roots(*findings: Finding) -> dict[str, tuple[str, ...]]:
    found = {each.rule: each for each in findings}
    return {name: engine._root(each, found) for name, each in found.items()}


# -- order and causes -------------------------------------------------------------------------------------------------


def test_findings_come_most_severe_first_then_causes_then_in_the_order_of_the_rules() -> None:
    found = diagnose(log_of(DEAD)).findings
    key = [(STATES.index(each.state), bool(each.follows), list(RULES).index(each.rule)) for each in found]
    assert key == sorted(key)
    assert sorted(each.rule for each in found) == sorted(RULES)


def test_the_chain_is_followed_to_its_end() -> None:
    assert roots(a("x"), a("y", "x"), a("z", "y")) == {"x": (), "y": ("x",), "z": ("x",)}


def test_a_rule_that_is_not_bad_causes_nothing_and_the_next_one_is_taken() -> None:
    assert roots(a("x", state="fine"), a("y"), a("z", "x", "y"))["z"] == ("y",)
    assert roots(a("x", state="unknown"), a("z", "x"))["z"] == ()


def test_a_finding_that_is_fine_follows_from_nothing() -> None:
    assert roots(a("x"), a("y", "x", state="fine"))["y"] == ()
    assert roots(a("x"), a("y", "x", state="unknown"))["y"] == ("x",)


def test_circles_end() -> None:
    assert roots(a("x", "y"), a("y", "x")) == {"x": ("y",), "y": ("x",)}
    assert roots(a("x", "x")) == {"x": ()}
    assert roots(a("x", "y"), a("y", "z"), a("z", "y"))["x"] == ("z",)


@pytest.mark.parametrize(("late", "cause"), [(0, ("x",)), (LATER, ("x",)), (LATER + 1, ())])
def test_what_begins_later_than_its_effect_is_not_its_cause(late: int, cause: tuple[str, ...]) -> None:
    assert roots(a("x", onset=10 + late), a("y", "x", onset=10))["y"] == cause
    assert roots(a("x"), a("y", "x", onset=10))["y"] == ("x",)  # an onset that is not known rules nothing out


def test_a_late_cause_gives_way_to_the_next_likely_one() -> None:
    assert roots(a("x", onset=50), a("z", onset=1), a("y", "x", "z", onset=10))["y"] == ("z",)


def test_cut_answers_are_the_cause_of_dead_groups_only_from_the_start() -> None:
    found = findings(log_of(DEAD))
    assert [found[rule].follows for rule in ("reward constant", "dead groups", "gradient")] == [("truncation",)] * 3
    whole = findings(log_of({**DEAD, "truncated": steady(0)}))
    assert [whole[rule].follows for rule in ("dead groups", "gradient")] == [("reward constant",)] * 2


def test_a_gradient_that_is_no_number_does_not_follow_from_dead_groups() -> None:
    assert findings(log_of({**DEAD, "grad/norm": steady(math.nan)}))["gradient"].follows == ()


def test_the_first_cause_is_repaired_first_though_it_is_less_severe() -> None:
    # Most gradients are 0 (broken) because about half of the groups are dead (watch).
    zero = int(ZERO_MANY * N) + 1
    told = diagnose(log_of({"dead": steady(above(DEAD_WATCH)), "grad/norm": [0.0] * zero + [0.1] * (N - zero)}))
    assert (told.findings[0].rule, told.findings[0].follows) == ("gradient", ("dead groups",))
    assert told.first is not None
    assert (told.first.rule, told.first.state, told.state) == ("dead groups", "watch", "broken")
    assert told.headline.startswith("✗ dead groups: ")


def test_effects_come_by_onset_and_those_without_one_last() -> None:
    told = Diagnosis([a("x"), a("late", "x", onset=9), a("never", "x"), a("early", "x", onset=2), a("other")])
    assert [each.rule for each in told.effects] == ["early", "late", "never"]


# -- the headline -----------------------------------------------------------------------------------------------------


def test_the_headline_names_the_first_cause_what_follows_and_the_change() -> None:
    told = diagnose(log_of(DEAD))
    first = told.first
    assert first is not None
    assert told.headline == (f"✗ truncation: {first.sentence}. This explains: "
                             f"{', '.join(each.rule for each in told.effects)}. Change: max_completion_length "
                             "(raise it).")


def test_the_headline_of_a_run_that_learns_says_so_and_counts_open_questions() -> None:
    told = diagnose(log_of(RISES))
    unknown = sum(each.state == "unknown" for each in told.findings)
    assert told.state == "fine"
    assert told.headline.startswith("✓ The reward rose from ")
    assert told.headline.endswith(f"; {unknown} questions are open.")


def test_one_open_question_is_not_several() -> None:
    told = Diagnosis([a("x", state="unknown"), a("y", state="fine")])
    assert told.headline == "✓ Nothing is broken or to watch; 1 question is open."


def test_signs_are_one_per_state() -> None:
    assert set(SIGNS) == set(STATES)
    assert len(set(SIGNS.values())) == len(SIGNS)


# -- what cannot be judged --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [
    {"loss": steady(0.1)},
    {"reward/mean": [0.4, 0.5] * (THIRDS // 2 - 1), "reward/std": [0.5] * (THIRDS - 2)},
    {"reward/mean": [0.4, 0.5] * (THIRDS // 2), "reward/std": [0.5] * THIRDS},
    {"reward/mean": [*RISES["reward/mean"][:THIRDS - 1]]}])
def test_the_unread_is_never_green(columns: dict[str, list[float]]) -> None:
    told = diagnose(log_of(columns))
    assert told.first is None
    assert told.headline.startswith("? cannot judge: ")
    assert told.state == "unknown"


def test_what_was_seen_is_named_where_the_reward_was_not_read() -> None:
    text = unread(log_of({"loss": steady(0.1), "kl": steady(0)}))
    assert text == f"the reward was not read, at least {THIRDS} are needed; columns seen: kl, loss"
    many = Log("made", TRL, [LogRow(1, 1, {f"c{k:02}": 0.0 for k in range(20)})], LogSettings({}, {}, TRL.defaults))
    assert unread(many).endswith("c10, c11 …")
    few = unread(log_of({"reward/mean": [0.5] * (THIRDS - 1)}))
    assert few.startswith(f"reward has {THIRDS - 1} readings, at least {THIRDS} are needed")


def test_readings_that_are_no_numbers_are_not_read() -> None:
    assert unread(log_of({"reward/mean": [math.nan] * N})).startswith("the reward was not read")


def test_a_flat_reward_of_few_steps_is_too_early_and_of_many_the_complaint() -> None:
    early = {name: values[:int(NO_GAIN_FEWEST) - 1] for name, values in FLAT.items()}
    assert diagnose(log_of(early)).headline.startswith("? cannot judge: no gain in ")
    late = diagnose(log_of(FLAT))
    assert late.headline.startswith("! no gain: No gain in 40 steps")


def test_a_fault_is_said_although_the_reward_was_not_read() -> None:
    told = diagnose(log_of({"lr": steady(0)}))
    assert told.unread
    assert told.headline.startswith("✗ learning rate: ")


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_one_reading_makes_every_rule_unknown_or_not_in_play(trainer: Trainer) -> None:
    for finding in diagnose(log_of({"reward/mean": [0.5]}, trainer)).findings:
        assert finding.state in ("unknown", "fine"), finding
        said = any(word in finding.sentence for word in ("need", "not", "no row"))
        assert finding.state == "fine" or said or finding.settles


# -- settings ---------------------------------------------------------------------------------------------------------


def test_findings_say_which_settings_were_assumed() -> None:
    found = findings(log_of({"dead": steady(0.1)}))["dead groups"].assumes
    assert found == {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
    given_all = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
    assert findings(log_of({"dead": steady(0.1)}, **given_all))["dead groups"].assumes is None


# -- whatever the log -------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.5, 1e-9, 5e-324, 1e308, -1e308, 1e149, math.nan, math.inf,
                                     -math.inf]), st.floats(0, 1), st.floats())
COLUMN = st.one_of(st.lists(NUMBERS, min_size=0, max_size=N), st.builds(lambda x, n: [x] * n, NUMBERS,
                                                                       st.integers(1, N)))
NUMERIC = st.sampled_from([0, 1, 2, 8, 0.5, 1e-9, 1e-3, 100, 1e9, 1e300, "1e-6"])
COUNT, SWITCH = st.sampled_from([0, 1, 2, 8, 0.5, 1000, 1e9]), st.booleans()


def settings_of(trainer: Trainer) -> st.SearchStrategy[dict[str, Any]]:
    """Settings that a trainer would accept: numbers for numbers, switches for switches, words as they are."""
    strategies = dict.fromkeys((path for name, path in trainer.paths.items() if name not in ("optimizer", "dtype")),
                               NUMERIC)
    for path, value in trainer.defaults.items():
        if isinstance(value, bool):
            strategies[path] = SWITCH
        elif isinstance(value, int | float):
            strategies[path] = COUNT
    strategies |= {trainer.paths[name]: st.sampled_from(words) for name, words in
                   {"optimizer": ["sgd", "adamw_torch"], "dtype": ["bfloat16", "float32"]}.items()
                   if name in trainer.paths}
    return st.fixed_dictionaries({}, optional=strategies)


@pytest.mark.parametrize("trainer", [TRL, VERL, OURS, BY_TRL, SCRIPT], ids=["trl", "verl", "ours", "by-trl", "script"])
@given(data=st.data(), numbered=st.booleans(), digits=st.sampled_from([0, 3]))
def test_whatever_the_log_each_rule_gives_one_finding_and_a_cause_is_itself_bad(
        trainer: Trainer, data: st.DataObject, numbered: bool, digits: int) -> None:
    names = sorted({*(str(name) for name in schema.METRICS), *trainer.metrics, "epoch"})
    columns = data.draw(st.dictionaries(st.sampled_from(names), COLUMN, min_size=1, max_size=10))
    given_settings = data.draw(settings_of(trainer))
    made = log_of({**columns, "reward/mean": columns.get("reward/mean", [])}, trainer, **given_settings)
    rows = [LogRow(row.place, row.step if numbered else None, row.values, dict.fromkeys(row.values, digits) if digits
                   else {}) for row in made.rows]
    told = diagnose(Log(made.source, trainer, rows, made.settings))
    found = {each.rule: each for each in told.findings}
    assert sorted(found) == sorted(RULES)
    for each in told.findings:
        assert each.sentence
        assert bool(each.change) <= each.bad
        assert all(found[name].bad for name in each.follows)
    assert told.headline[0] == SIGNS[told.state]
    assert told.headline[0] != SIGNS["fine"] or not told.unread
    assert (told.first is None) == (told.state in ("unknown", "fine"))


def test_an_empty_log_is_unread() -> None:
    for trainer in TRAINERS:
        told = diagnose(Log("made", trainer, [], LogSettings({}, {}, trainer.defaults)))
        assert told.state == "unknown"


def test_a_fall_is_told_with_its_onset() -> None:
    found = findings(log_of(FALLS))["reward trend"]
    assert found.onset == N // 2 + 1
