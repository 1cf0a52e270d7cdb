"""A question that cannot be answered: because the log lacks the metric, or because it has too few readings of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from rich.console import Console

from creditscope.cli.doctor import show
from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.finding import EDGE, FEW, MORE_STEPS, THIRDS, TREND, judge, lacking
from creditscope.diagnosis.trainers import OURS, VERL, Trainer
from creditscope.diagnosis.trainers.own import OURS_OF_PAIRS
from creditscope.runs import schema
from diagnosis.makers_doctor import FLAT, findings, log_of, steady

ABSENT = ("not in the log", "not read", "no second reward", "not counted", "nothing says", "nothing was",
          "log has none")
"""What is said of a metric that the log does not have."""


@dataclass(frozen=True, kw_only=True)
class Short:
    """A metric with one reading fewer than a rule needs, beside columns that leave the question open."""

    rule: str
    metric: str
    few: int = FEW
    absent: str
    """Part of the sentence where the log has no reading of the metric."""
    settles: str = ""
    """Part of what settles it then."""
    state: str = "unknown"
    """Then."""
    beside: Mapping[str, list[float]] | None = None
    value: float = 0.5
    trainer: Trainer = OURS

    def __str__(self) -> str:
        return f"{self.rule} {self.metric}".replace(" ", "-")


FLAT_LISTS = {name: list(values) for name, values in FLAT.items()}
BARE = {"reward/mean": FLAT_LISTS["reward/mean"]}
CASES = [
    Short(rule="reward hacked", metric="reward/gold_mean", few=THIRDS, state="fine", absent="no second reward is"),
    Short(rule="form", metric="reward/lost_to_form", absent="is not in the log", settles="the last number of some"),
    Short(rule="reward length", metric="length/reward_correlation", absent="is not in the log",
          settles="--scope light --probe light"),
    Short(rule="truncation", metric="length/truncated", absent="share of cut answers was not read",
          settles="cut at the limit"),
    Short(rule="reward constant", metric="reward/std", beside=BARE, absent="needs the spread of the rewards"),
    Short(rule="cold sampler", metric="signal/distinct_texts", state="fine", absent="nothing says"),
    Short(rule="hot sampler", metric="entropy", state="fine", absent="nothing says"),
    Short(rule="too hard", metric="reward/mean", beside={"lr": steady(1e-6)}, absent="the reward was not read"),
    Short(rule="dead groups", metric="dead", absent=""),
    Short(rule="saturation", metric="dead", few=THIRDS, absent="the log has none"),
    Short(rule="mask", metric="w/dead_rows", absent="was not read", settles="--scope light"),
    Short(rule="clip", metric="clip", state="fine", absent="clipped tokens are not counted", trainer=VERL),
    Short(rule="updates", metric="clip", absent="neither clipped tokens nor", trainer=VERL),
    Short(rule="small steps", metric="overshoot/kl", few=2, absent="was not read", settles="--scope light"),
    Short(rule="length drift", metric="length/mean", few=TREND, absent="the log has none"),
    Short(rule="held out", metric="eval/reward", absent="nothing was evaluated", settles="before and after"),
    Short(rule="signal", metric="gram/between", absent="was not read", settles="--scope light"),
    Short(rule="no gain", metric="reward/mean", few=THIRDS, beside={"lr": steady(1e-6)}, absent="needs at least 12"),
    Short(rule="displacement", metric="pairs/chosen_reward", few=TREND, state="fine", absent="has no pairs",
          trainer=OURS_OF_PAIRS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_too_few_readings_are_counted_and_an_absent_metric_is_named(case: Short) -> None:
    beside = FLAT_LISTS if case.beside is None else case.beside
    short = findings(log_of({**beside, case.metric: [case.value] * (case.few - 1)}, case.trainer))[case.rule]
    name = case.trainer.metrics.get(case.metric, case.metric)
    assert (short.state, short.sentence, short.lacks) == (
        "unknown", f"too few readings of {name}: {case.few - 1} of the {case.few} that it needs",
        (case.few - 1, case.few))
    assert short.settles.startswith("more evaluations" if case.rule == "held out" else MORE_STEPS)
    without = findings(log_of(beside, case.trainer))[case.rule]
    if case.absent:
        assert (without.state, without.lacks) == (case.state, None)
        assert case.absent in without.sentence
        assert case.settles in without.settles


@pytest.mark.parametrize("trainer", [OURS, OURS_OF_PAIRS, VERL], ids=lambda trainer: trainer.name)
def test_no_rule_says_that_a_log_of_every_metric_lacks_one(trainer: Trainer) -> None:
    told = diagnose(log_of({name: [0.25, 0.5, 0.5] for name in {*schema.METRICS, *trainer.metrics}}, trainer)).findings
    assert [each.sentence for each in told if any(words in each.sentence for words in ABSENT)] == []


def test_two_evaluations_with_intervals_are_enough_and_one_is_counted() -> None:
    one = {"eval": [0.5], "eval/low": [0.4], "eval/high": [0.6], "eval/reward": [0.5]}
    found = findings(log_of({**FLAT_LISTS, **one}, OURS))["held out"]
    assert found.sentence == "too few readings of eval/accuracy: 1 of the 2 that it needs"
    two = {name: values * 2 for name, values in one.items()}
    assert findings(log_of({**FLAT_LISTS, **two}, OURS))["held out"].state == "fine"


def test_a_metric_that_is_read_at_few_of_the_steps_may_be_read_at_more() -> None:
    def settled_by(readings: int, steps: int) -> str:
        columns = {"reward/mean": [0.5] * steps, schema.GRAM_BETWEEN: [0.1] * readings}
        return findings(log_of(columns, OURS))["signal"].settles
    assert settled_by(3, 6) == "more steps, or readings at more of them"
    assert settled_by(3, 5) == "more steps"


def test_readings_that_are_no_numbers_count_as_none() -> None:
    log = log_of({**FLAT_LISTS, schema.GRAM_BETWEEN: [float("nan")] * 3})
    found = judge(lambda log: lacking(log, "absent", {schema.GRAM_BETWEEN: FEW}, "a remedy"), log)
    assert (found.sentence, found.settles) == ("absent", "a remedy")


def test_rules_that_lack_steps_alone_stand_in_one_line_with_their_counts() -> None:
    log = log_of({**{name: values[:EDGE] for name, values in FLAT_LISTS.items()}, "reward/lost_to_form": [0.0] * 3},
                 OURS)
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, log, diagnose(log), why=False)
    text = " ".join(console.export_text().split())
    assert "form (3 of 4)" in text
    assert "reward trend (5 of 12)" in text
    assert "(k of n): k readings are logged and n are needed, which more steps or evaluations bring" in text
    assert "Settled by: more steps" not in text
