"""Does the policy move too far? For each rule a log that turns it on and one that does not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from creditscope.diagnosis.finding import TREND
from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.thresholds import (
    CLIP_MUCH,
    CLIP_SOME,
    COLLAPSED,
    DECAY,
    ENTROPY_GONE,
    ENTROPY_LEFT,
    ENTROPY_LOW,
    ENTROPY_NATS,
    ENTROPY_RISE,
    GAP,
    GROWN,
    KL_FIRST,
    KL_WATCH,
    PAST_BROKEN,
    PAST_WATCH,
    RATIO_BROKEN,
    RATIO_WATCH,
    RIGHT,
    SHRUNK_BROKEN,
    SHRUNK_WATCH,
    SPIKE,
    STEP_BROKEN,
    STEP_WATCH,
    UPDATES_MANY,
    ZERO_MANY,
)
from creditscope.diagnosis.trainers import OURS, TRL, VERL
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

KL, PAST = "overshoot/kl", "overshoot/past"


def once(value: float, others: float, at: int = 0) -> list[float]:
    """One reading apart from the others."""
    return [value if k == at else others for k in range(N)]


def fall(by: float) -> dict[str, list[float]]:
    """Rewards that fall by so many stds of the answers."""
    return {"reward/mean": halves(0.8, 0.8 - 0.4 * by), "reward/std": steady(0.4)}


def zeros(count: float) -> list[float]:
    """Gradient norms of which `count` are exactly 0."""
    return [0.0] * int(count) + [0.1] * (N - int(count))


CASES = [
    Case(rule="weight decay", on={**FLAT, "lr": steady(0.1)}, given={"weight_decay": above(DECAY) / (0.1 * N)},
         unless={"weight_decay": below(DECAY) / (0.1 * N)}),
    Case(rule="weight decay", what="that learns", on={**FLAT, "lr": steady(0.1)}, off=RISES, otherwise="watch",
         given={"weight_decay": above(DECAY) / (0.1 * N)}),
    Case(rule="updates", what="past the bound", trainer=OURS, on={**FLAT, PAST: steady(above(PAST_BROKEN))},
         given={"inner_steps": 4}, off={PAST: steady(below(PAST_WATCH))}),
    Case(rule="updates", what="some past the bound", trainer=OURS, on={**FLAT, PAST: steady(above(PAST_WATCH))},
         given={"inner_steps": 4}, off={PAST: steady(below(PAST_WATCH))}, state="watch"),
    Case(rule="updates", what="past the bound at the first step", trainer=OURS,
         on={**FLAT, PAST: once(above(PAST_BROKEN), 0)}, given={"inner_steps": 4}, off=RISES),
    Case(rule="updates", what="one", trainer=OURS, on={**FLAT, PAST: steady(above(PAST_BROKEN))},
         given={"inner_steps": 4}, unless={"inner_steps": 1}),
    Case(rule="updates", what="clipped", state="watch", on={**FLAT, "clip": steady(above(CLIP_MUCH))},
         given={"num_iterations": 4}, off={"clip": steady(below(CLIP_MUCH))}),
    Case(rule="updates", what="many and clipped", on={**FLAT, "clip": steady(above(CLIP_SOME))},
         given={"num_iterations": int(UPDATES_MANY)}, off={"clip": steady(below(CLIP_SOME))}),
    Case(rule="updates", what="so many", on={**FLAT, "clip": steady(above(CLIP_SOME))},
         given={"num_iterations": int(UPDATES_MANY)}, unless={"num_iterations": int(UPDATES_MANY) - 1}),
    Case(rule="updates", what="clipped and learns", state="watch", on={**FLAT, "clip": steady(above(CLIP_MUCH))},
         given={"num_iterations": 4}, off=RISES),
    Case(rule="step size", what="once", on={**FLAT, KL: once(above(STEP_BROKEN), 1e-5)}, otherwise="watch",
         off={KL: once(below(STEP_BROKEN), 1e-5)}),
    Case(rule="step size", what="though it learns", on={**FLAT, KL: once(above(STEP_BROKEN), 1e-5)}, otherwise="watch",
         off=RISES),
    Case(rule="step size", what="though solved", on={"reward/mean": steady(below(RIGHT)),
                                                     KL: once(above(STEP_BROKEN), 1e-5)}, otherwise="watch",
         off={"reward/mean": steady(above(RIGHT))}),
    Case(rule="step size", what="to watch", state="watch", on={**FLAT, KL: once(above(STEP_WATCH), 1e-5)},
         off={KL: once(below(STEP_WATCH), 1e-5)}),
    Case(rule="step size", what="from a fall", on=fall(above(COLLAPSED)), off=fall(below(COLLAPSED))),
    Case(rule="entropy", what="collapsed", on={**FLAT, "entropy": halves(0.5, below(ENTROPY_LOW))}, otherwise="watch",
         off={"entropy": halves(0.5, above(ENTROPY_LOW))}),
    Case(rule="entropy", what="fell", state="watch", on={**FLAT, "entropy": halves(0.5, 0.5 * below(ENTROPY_LEFT))},
         off={"entropy": halves(0.5, 0.5 * above(ENTROPY_LEFT))}),
    Case(rule="entropy", what="gone while it learns", state="watch",
         on={**RISES, "entropy": halves(0.5, 0.5 * below(ENTROPY_GONE))},
         off={"entropy": halves(0.5, 0.5 * above(ENTROPY_GONE))}),
    Case(rule="entropy", what="rises", state="watch", on={**FLAT, "entropy": halves(5, 5 * above(ENTROPY_RISE))},
         off={"entropy": halves(5, 5 * below(ENTROPY_RISE))}),
    Case(rule="entropy", what="rises by nats", state="watch",
         on={**FLAT, "entropy": halves(0.1, 0.1 + above(ENTROPY_NATS))},
         off={"entropy": halves(0.1, 0.1 + below(ENTROPY_NATS))}),
    Case(rule="length drift", what="gone", on={**FLAT, "length/mean": halves(1000, 1000 * below(SHRUNK_BROKEN))},
         off={"length/mean": halves(1000, 1000 * above(SHRUNK_BROKEN))}, otherwise="watch"),
    Case(rule="length drift", what="shrinks", state="watch",
         on={**FLAT, "length/mean": halves(1000, 1000 * below(SHRUNK_WATCH))},
         off={"length/mean": halves(1000, 1000 * above(SHRUNK_WATCH))}),
    Case(rule="length drift", what="grows", state="watch", on={**FLAT, "length/mean": halves(100, 100 * above(GROWN))},
         off={"length/mean": halves(100, 100 * below(GROWN))}),
    Case(rule="length drift", what="grows and learns", state="watch", off=RISES,
         on={**FLAT, "length/mean": halves(100, 100 * above(GROWN))}),
    Case(rule="KL level", what="high", state="watch", given={"beta": 0.04}, off={"kl": halves(0, below(KL_WATCH))},
         on={**FLAT, "kl": halves(0, above(KL_WATCH))}),
    Case(rule="KL level", what="not in the loss", state="watch", given={"beta": 0.04}, unless={"beta": 0.0},
         on={**FLAT, "kl": halves(0, above(KL_WATCH))}),
    Case(rule="KL level", what="at first", state="watch", given={"beta": 0.04},
         on={**FLAT, "kl": steady(above(KL_FIRST))}, off={"kl": steady(below(KL_FIRST))}),
    Case(rule="gradient", what="not a number", on={**FLAT, "grad/norm": once(math.nan, 0.1, 7)},
         off={"grad/norm": steady(0.1)}),
    Case(rule="gradient", what="infinite loss", on={**FLAT, "grad/norm": steady(0.1), "loss": once(math.inf, 0.1)},
         off={"loss": steady(0.1)}),
    Case(rule="gradient", what="is 0", on={**FLAT, "grad/norm": zeros(ZERO_MANY * N + 1)},
         off={"grad/norm": zeros(ZERO_MANY * N)}),
    Case(rule="gradient", what="spikes", state="watch", on={**FALLS, "grad/norm": once(above(SPIKE) * 0.1, 0.1)},
         off={"grad/norm": once(below(SPIKE) * 0.1, 0.1)}),
    Case(rule="gradient", what="spikes without a fall", state="watch", off=FLAT,
         on={**FALLS, "grad/norm": once(above(SPIKE) * 0.1, 0.1)}),
    Case(rule="sampler", what="far", on={**FLAT, "sampler/ratio": steady(1 - above(RATIO_BROKEN))}, otherwise="watch",
         off={"sampler/ratio": steady(1 - below(RATIO_BROKEN))}),
    Case(rule="sampler", what="low", state="watch", on={**FLAT, "sampler/ratio": steady(1 - above(RATIO_WATCH))},
         off={"sampler/ratio": steady(1 - below(RATIO_WATCH))}),
    Case(rule="sampler", what="high", state="watch", on={**FLAT, "sampler/ratio": steady(1 + above(RATIO_WATCH))},
         off={"sampler/ratio": steady(1 + below(RATIO_WATCH))}),
    Case(rule="sampler", what="gap", state="watch", on={**FLAT, "sampler/gap": steady(above(GAP))},
         off={"sampler/gap": steady(below(GAP))}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_finds_its_fault_and_nothing_just_short_of_it(case: Case) -> None:
    case.check()


# -- steps ------------------------------------------------------------------------------------------------------------


def test_what_happened_at_the_first_step_does_not_expire() -> None:
    found = findings(log_of({**FLAT, KL: once(1.0, 1e-6)}, learning_rate=2e-3))["step size"]
    assert (found.state, found.onset) == ("broken", 1)
    assert "1 nats per token at step 1 (learning rate 0.002)" in found.sentence


def test_a_large_step_of_a_run_that_learns_is_fine_and_of_one_that_collapsed_is_broken() -> None:
    worst = {KL: once(above(STEP_WATCH), 1e-6)}
    assert states(log_of({**RISES, **worst}))["step size"] == "fine"
    assert states(log_of({**FALLS, **worst}))["step size"] == "broken"


def test_a_fall_follows_from_decay_and_from_updates_where_these_were_found() -> None:
    decays = findings(log_of({**FALLS, "lr": steady(0.1)}, weight_decay=above(DECAY) / (0.1 * N)))
    assert decays["step size"].follows == ("weight decay",)
    several = {"num_iterations": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
               "generation_batch_size": None}
    clipped = findings(log_of({**FALLS, "clip": steady(above(CLIP_MUCH))}, **several))
    assert (clipped["updates"].state, clipped["step size"].follows) == ("broken", ("updates",))


def test_without_readings_several_updates_are_unknown() -> None:
    found = findings(log_of(FLAT, OURS, inner_steps=4))["updates"]
    assert (found.state, "--probe light" in found.settles) == ("unknown", True)


# -- entropy, length --------------------------------------------------------------------------------------------------


def test_an_entropy_that_was_low_from_the_start_or_falls_in_a_solved_task_is_no_collapse() -> None:
    assert states(log_of({**FLAT, "entropy": steady(below(ENTROPY_LOW))}))["entropy"] == "fine"
    solved = {"reward/mean": steady(0.95), "reward/std": steady(0.2), "entropy": halves(0.5, 0.5 * above(ENTROPY_GONE))}
    assert states(log_of(solved))["entropy"] == "fine"


def test_a_rise_of_entropy_that_is_small_in_nats_is_no_finding() -> None:
    assert states(log_of({**FLAT, "entropy": halves(0.1, 0.1 * above(ENTROPY_RISE))}))["entropy"] == "fine"


def test_entropy_that_verl_sums_over_answers_is_unknown() -> None:
    columns = {**FLAT, "entropy": halves(0.5, 0.001)}
    summed = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum"}
    assert states(log_of(columns, VERL, **summed))["entropy"] == "unknown"
    assert states(log_of(columns, VERL))["entropy"] == "broken"


def test_entropy_of_masked_answers_is_no_collapse() -> None:
    columns = {**FLAT, "entropy": halves(0.5, 0), "truncated": steady(1)}
    masked = findings(log_of(columns, mask_truncated_completions=True))["entropy"]
    assert (masked.state, masked.follows) == ("unknown", ("truncation",))
    assert states(log_of(columns))["entropy"] == "broken"


def test_a_drift_needs_two_ends() -> None:
    values = halves(1000, 10)
    assert states(log_of({"length/mean": values[:5] + values[-5:]}))["length drift"] == "broken"
    assert states(log_of({"length/mean": values[:5] + values[-4:]}))["length drift"] == "unknown"
    assert TREND == 10


def test_only_a_mean_over_each_answer_is_told_to_change_the_loss_where_answers_grow() -> None:
    columns = {**FLAT, "length/mean": halves(100, 100 * above(GROWN))}
    own = findings(log_of(columns, loss_type="grpo"))["length drift"]
    assert ("punished less" in own.sentence, "loss_type='dapo'" in own.change) == (True, True)
    other = findings(log_of(columns, loss_type="dapo"))["length drift"]
    assert ("punished less" in other.sentence, "loss_type" in other.change) == (False, False)


# -- gradients --------------------------------------------------------------------------------------------------------


def test_one_zero_among_200_gradients_is_no_finding_and_is_told() -> None:
    found = findings(log_of({"grad/norm": [0.0] + [0.1] * 199}))["gradient"]
    assert (found.state, "1 of 200 readings are 0" in found.sentence) == ("fine", True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_one_gradient_norm_that_is_no_number_is_broken_and_shown(bad: float) -> None:
    found = findings(log_of({"grad/norm": once(bad, 0.1, 7)}))["gradient"]
    assert (found.state, found.onset) == ("broken", 8)
    assert "line 8 (step 8 of the log)" in found.evidence[0]


def test_gradients_that_were_printed_as_0_are_not_0() -> None:
    rows = [LogRow(k + 1, k + 1, {"grad_norm": 0.0}, {"grad_norm": 3}) for k in range(N)]
    log = Log("made.log, line", TRL, rows, LogSettings({}, {}, TRL.defaults))
    assert states(log)["gradient"] == "fine"
    exact = Log("made.log, line", TRL, [LogRow(r.place, r.step, r.values) for r in rows], log.settings)
    assert states(exact)["gradient"] == "broken"
    assert states(log_of({"grad/norm": steady(1e-9)}))["gradient"] == "fine"


# -- the sampler ------------------------------------------------------------------------------------------------------


def test_without_readings_the_sampler_is_unknown_only_where_there_is_a_second_engine() -> None:
    assert states(log_of({"loss": [0.0]}))["sampler"] == "fine"
    assert states(log_of({"loss": [0.0]}, use_vllm=True))["sampler"] == "unknown"
    assert states(log_of({"loss": [0.0]}, VERL))["sampler"] == "unknown"


def test_a_negative_entropy_loss_is_no_collapsed_entropy() -> None:
    found = findings(log_of({**FLAT, "entropy": steady(-1.0)}))["entropy"]
    assert (found.state, "negative" in found.sentence) == ("unknown", True)
    assert states(log_of({**FLAT, "entropy": steady(0)}))["entropy"] == "fine"


def test_a_first_reading_that_is_late_says_nothing_of_the_reference() -> None:
    log = log_of({**FLAT, "kl": steady(above(KL_FIRST))}, beta=0.1)
    assert states(log)["KL level"] == "watch"
    later = [LogRow(row.place, (row.step or 0) + 500, row.values) for row in log.rows]
    assert states(replace(log, rows=later))["KL level"] == "fine"


def test_a_step_without_a_number_is_not_named() -> None:
    log = log_of({**FLAT, "overshoot/kl": [1.0, 0.0]})
    rows = [LogRow(row.place, None, row.values) for row in log.rows]
    found = findings(replace(log, rows=rows))["step size"]
    assert (found.state, "None" in found.sentence) == ("broken", False)


def test_a_reward_that_fell_while_nothing_was_clipped_is_not_blamed_on_updates() -> None:
    given = {"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
             "generation_batch_size": None}
    assert states(log_of({**FALLS, "clip": steady(above(CLIP_SOME))}, **given))["updates"] == "broken"
    assert states(log_of({**FALLS, "clip": steady(0.001)}, **given))["updates"] == "fine"


def test_the_onset_of_a_sampler_gap_is_the_step_at_which_it_began() -> None:
    found = findings(log_of({**FLAT, "sampler/gap": steady(above(GAP))}))["sampler"]
    assert (found.state, found.onset) == ("watch", 1)
