"""Does the policy move in the right direction? For each rule a log that turns it on and one that does not."""

from __future__ import annotations

import math

import pytest

from creditscope.diagnosis.finding import THIRDS
from creditscope.diagnosis.thresholds import (
    APART,
    COLLAPSED,
    DISPLACED,
    DISPLACED_ALL,
    FELL,
    NO_GAIN,
    NO_GAIN_FEWEST,
    PASSES,
    PASSES_MANY,
    RIGHT,
)
from creditscope.diagnosis.trainers import OURS, VERL
from diagnosis.makers_doctor import FALLS, FLAT, RISES, Case, N, above, below, findings, halves, log_of, states, steady

PASS, HELD, BETWEEN = "prompts/passes", "eval/reward", "gram/between"


def fall(by: float, spread: float = 0.5) -> dict[str, list[float]]:
    """Rewards of 0.8, then less by so many stds of the answers."""
    return {"reward/mean": halves(0.8, 0.8 - by * spread), "reward/std": steady(spread)}


def accuracy(first: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, list[float]]:
    """Two evaluations: value, and the ends of its interval."""
    return {name: list(both) for name, *both in zip(("eval", "eval/low", "eval/high"), first, after, strict=True)}


def pairs(fall: float, gain: float) -> dict[str, list[float]]:
    """Rewards of the chosen answers from 0 to −fall, margins from 0 to `gain`."""
    return {**RISES, "pairs/chosen_reward": halves(0.0, -fall), "pairs/margin": halves(0.0, gain)}


def short(columns: dict[str, list[float]], rows: float) -> dict[str, list[float]]:
    return {name: values[:int(rows)] for name, values in columns.items()}


FLAT_LISTS = {name: list(values) for name, values in FLAT.items()}
SCATTERED = [-0.1, 0.1] * (N // 2)
CASES = [
    Case(rule="held out", what="accuracy", trainer=OURS, on={**FLAT, **accuracy((0.5, 0.4, 0.6), (0.3, 0.2, 0.39))},
         off=accuracy((0.5, 0.4, 0.6), (0.3, 0.2, 0.41))),
    Case(rule="held out", what="reward", on={**RISES, HELD: [0.5] * 4 + [0.3] * 4}, off={HELD: [0.5] * 8}),
    Case(rule="held out", what="reward of a run that does not learn", on={**RISES, HELD: [0.5] * 4 + [0.3] * 4},
         off=FLAT),
    # Rewards of 0 to 1, and 0.57 at the end.
    Case(rule="held out", what="far below training", on={**RISES, HELD: [0.57 - above(APART)] * 8},
         off={HELD: [0.57 - below(APART)] * 8}),
    Case(rule="memorised", what="many passes", on={**FLAT, PASS: steady(above(PASSES_MANY))},
         off={PASS: steady(below(PASSES))}),
    Case(rule="memorised", what="some passes", state="watch", on={**FLAT, PASS: steady(above(PASSES))},
         off={PASS: steady(below(PASSES))}),
    Case(rule="memorised", what="passes of both kinds", on={**FLAT, PASS: steady(above(PASSES_MANY))},
         otherwise="watch",
         off={PASS: steady(below(PASSES_MANY))}),
    Case(rule="memorised", what="and solved", off={PASS: steady(below(PASSES))},
         on={"reward/mean": steady(above(RIGHT)), "reward/std": steady(0.3), PASS: steady(above(PASSES))}),
    Case(rule="memorised", what="held out improves", on={**FLAT, PASS: steady(above(PASSES_MANY))},
         off={HELD: [0.3] * 4 + [0.5] * 4}),
    Case(rule="reward trend", what="collapsed", on=fall(above(COLLAPSED)), off=fall(below(COLLAPSED)),
         otherwise="watch"),
    Case(rule="reward trend", what="fell", state="watch", on=fall(above(FELL)), off=fall(below(FELL))),
    Case(rule="signal", what="scattered", state="watch", on={**FLAT, BETWEEN: SCATTERED},
         off={BETWEEN: [0.1, 0.12] * (N // 2)}),
    Case(rule="signal", what="learns", state="watch", on={**FLAT, BETWEEN: SCATTERED}, off=RISES),
    # The chosen answers lose as much as the margin gains: the rejected ones lose twice that.
    Case(rule="displacement", what="more than the margin", trainer=OURS, otherwise="watch",
         on=pairs(above(DISPLACED), gain=above(DISPLACED) / above(DISPLACED_ALL)),
         off=pairs(above(DISPLACED), gain=above(DISPLACED) / below(DISPLACED_ALL))),
    Case(rule="displacement", what="chosen fell", state="watch", trainer=OURS, on=pairs(above(DISPLACED), gain=5.0),
         off=pairs(below(DISPLACED), gain=5.0)),
    Case(rule="no gain", what="flat", state="watch", on=FLAT, off=RISES),
    Case(rule="no gain", what="solved", state="watch", off={"reward/mean": steady(above(RIGHT))},
         on={"reward/mean": steady(below(RIGHT)), "reward/std": steady(0.3)}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_finds_its_fault_and_nothing_just_short_of_it(case: Case) -> None:
    case.check()


# -- the reward -------------------------------------------------------------------------------------------------------


def test_a_flat_reward_is_a_finding_only_after_enough_steps() -> None:
    calm = {"reward/mean": [0.44, 0.46] * (N // 2), "reward/std": [0.5] * N}
    assert states(log_of(short(calm, NO_GAIN_FEWEST)))["no gain"] == "watch"
    assert states(log_of(short(calm, NO_GAIN_FEWEST - 1)))["no gain"] == "unknown"
    assert states(log_of(short({**calm, BETWEEN: SCATTERED}, NO_GAIN_FEWEST - 1)))["signal"] == "fine"


def test_a_flat_reward_whose_noise_would_hide_a_gain_is_a_finding_only_after_many_steps() -> None:
    # Values 0.1 and 0.8: s = 0.36 of a third of 33, h = 2.04·0.36/√33 = 0.13, √2·h = 0.18, above 0.1 · 0.5 = 0.05.
    noisy = {"reward/mean": [0.1, 0.8] * int(NO_GAIN), "reward/std": [0.5] * 2 * int(NO_GAIN)}
    assert states(log_of(short(noisy, NO_GAIN)))["no gain"] == "watch"
    assert states(log_of(short(noisy, NO_GAIN - 1)))["no gain"] == "unknown"


def test_no_gain_says_which_gain_would_have_been_invisible() -> None:
    # Thirds of 4 with values 0.4 and 0.5: s = 0.0577, h = 3.1824·0.0577/2 = 0.0919, √2·h = 0.13.
    found = findings(log_of(short(FLAT_LISTS, THIRDS)))["no gain"]
    assert found.sentence == ("No gain in 12 steps: the reward is 0.45; a gain below 0.13 would be invisible in this "
                              "noise")


def test_half_the_range_stands_for_the_std_where_none_is_logged() -> None:
    for by, state in ((above(FELL), "watch"), (below(FELL), "fine"), (above(COLLAPSED), "broken")):
        ranged = {"reward/mean": fall(by)["reward/mean"], "reward/max": steady(1), "reward/min": steady(0)}
        assert states(log_of(ranged, VERL))["reward trend"] == state


def test_a_fall_without_any_spread_beside_it_is_to_watch_and_never_broken() -> None:
    assert states(log_of({"reward/mean": fall(1.4)["reward/mean"]}))["reward trend"] == "watch"


def test_a_rise_is_said_and_so_is_that_noise_hides_a_change() -> None:
    assert findings(log_of(fall(-0.6)))["reward trend"].sentence == (
        "The reward rose from 0.8 in the first third to 1.1 in the last")
    # Thirds of 4, means 0.5 and 0.25, s = 0.577 and 0.5: −0.25 ± 1.2.
    noisy = log_of({"reward/mean": [0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0], "reward/std": [0.5] * 12})
    found = findings(noisy)["reward trend"]
    assert (found.state, "did not clearly change" in found.sentence) == ("fine", True)


def test_thirds_need_readings() -> None:
    values = [0.8] * (THIRDS // 2) + [0.1] * (THIRDS // 2)
    assert states(log_of({"reward/mean": values}))["reward trend"] == "watch"
    found = findings(log_of({"reward/mean": values[:-1]}))["reward trend"]
    assert found.sentence == f"too few readings of reward: {THIRDS - 1} of the {THIRDS} that it needs"


# -- held out ---------------------------------------------------------------------------------------------------------


def test_an_evaluation_without_an_interval_is_not_compared() -> None:
    columns = accuracy((0.5, math.nan, 0.6), (0.3, 0.2, 0.39))
    assert states(log_of({**FLAT, **columns}, OURS))["held out"] == "unknown"


def test_held_out_accuracy_that_falls_while_the_reward_rises_blames_the_reward() -> None:
    columns = accuracy((0.5, 0.4, 0.6), (0.3, 0.2, 0.39))
    hacked, broken = (findings(log_of({**rewards, **columns}, OURS))["held out"] for rewards in (RISES, FALLS))
    assert "what is paid is not what was meant" in hacked.sentence
    assert "training made the model worse" in broken.sentence
    assert (hacked.remedy, broken.remedy) == ("held out", "step size")


def test_a_run_whose_accuracy_fell_does_not_count_as_learning() -> None:
    columns = {**RISES, "lr": steady(0.0)}
    assert states(log_of(columns, OURS))["no gain"] == "fine"
    fell = {**RISES, **accuracy((0.5, 0.4, 0.6), (0.3, 0.2, 0.39)), "overshoot/past": steady(0.1)}
    assert states(log_of(fell, OURS, inner_steps=4))["updates"] == "watch"
    assert states(log_of({**fell, "eval/high": [0.6, 0.41]}, OURS, inner_steps=4))["updates"] == "fine"


def test_passes_are_read_from_the_epoch_where_prompts_are_not_counted() -> None:
    found = findings(log_of({**FLAT, "epoch": [2 * PASSES * (k + 1) / N for k in range(N)]}))["memorised"]
    assert (found.state, found.onset) == ("watch", N // 2)


def test_a_reward_that_falls_while_every_gradient_is_0_differs_by_its_prompts() -> None:
    still = {**FALLS, "grad/norm": steady(0.0)}
    found = findings(log_of(still))["reward trend"]
    assert (found.state, "every gradient is 0" in found.sentence) == ("fine", True)
    moved = findings(log_of({**still, "grad/norm": [1e-9, *steady(0.0)[1:]]}))["reward trend"]
    assert moved.bad
