"""Does the policy move? For each rule a log that turns it on and one that does not."""

from __future__ import annotations

import pytest

from creditscope.diagnosis.log import Log, LogRow, LogSettings
from creditscope.diagnosis.rules.movement import LOSS_ZERO
from creditscope.diagnosis.thresholds import (
    BETA,
    BF16_RATE,
    CLIP_ONCE,
    CLOSED,
    EPSILON_FACTOR,
    EPSILON_NORM,
    EPSILON_USUAL,
    GRAD_CLIP,
    HORIZON,
    KL_REWARD,
    KL_SIZE,
    MASK_LENGTH,
    MASK_ROWS,
    MASK_ROWS_BROKEN,
    MASK_TOKENS,
    MOVED,
    PULL_BROKEN,
    PULL_WATCH,
    RATE_SUM,
    REACHED,
    ROUNDED,
    ROUNDED_SOME,
    SGD_SUM,
    TRAINABLE,
    WARM,
)
from creditscope.diagnosis.trainers import OURS, SCRIPT, TRL, VERL
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.table import METHODS
from creditscope.methods.words import law
from diagnosis.makers_doctor import FLAT, RISES, Case, N, above, below, findings, log_of, states, steady

RATE = 1e-5
LIMIT = "data.max_response_length"
KL, ZERO, FACTOR = "overshoot/kl", "update/zero", "update/epsilon_factor"
PULL, SIZE = "grad/kl_pull", "grad/kl_size"
DEAD_ROWS, FIRST, LAST = "w/dead_rows", "w/skipped_first", "w/skipped_last"
TRAINED, REACH = "update/trainable", "update/reached"
SEVERAL = {"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
ONCE = {**SEVERAL, "num_iterations": 1, "generation_batch_size": None}


def warm(count: int) -> list[float]:
    """Learning rates of which `count` are below WARM of the largest."""
    return [RATE * below(WARM)] * count + [RATE] * (N - count)


def mixed_kl(score: float, cost: float) -> dict[str, list[float]]:
    """verl: a score, and the reward that is left after the KL penalty."""
    return {"reward/mean": steady(score), "score with kl": steady(score - cost)}


CASES = [
    Case(rule="learning rate", what="is 0", on={**FLAT, "lr": [0.0] * (N // 2 + 1) + [RATE] * (N // 2 - 1)},
         off={"lr": [0.0] * 2 + [RATE] * (N - 2)}),
    Case(rule="learning rate", what="is nearly 0", on={**FLAT, "lr": warm(N // 2 + 1)}, off={"lr": warm(N // 2)}),
    Case(rule="learning rate", what="is nearly 0 and yet it learns", on={**FLAT, "lr": warm(N // 2 + 1)}, off=RISES,
         otherwise="watch"),
    Case(rule="learning rate", what="is all warm-up", given={"learning_rate": RATE},
         on={**FLAT, "lr": [0.4 * RATE * (k + 1) / N for k in range(N)]}, unless={"learning_rate": 0.4 * RATE}),
    Case(rule="learning rate", what="is too small", on={**FLAT, "lr": steady(below(RATE_SUM) / N)},
         off={"lr": steady(above(RATE_SUM) / N)}),
    Case(rule="learning rate", what="is too small for the plan", on={**FLAT, "lr": steady(below(RATE_SUM) / N)},
         unless={"max_steps": 2 * N}),
    Case(rule="epsilon", what="by its factor", on={**FLAT, FACTOR: steady(below(EPSILON_FACTOR))},
         given={"adam_epsilon": 1.0}, off={FACTOR: steady(above(EPSILON_FACTOR))}),
    Case(rule="epsilon", what="is usual", on={**FLAT, FACTOR: steady(below(EPSILON_FACTOR))},
         given={"adam_epsilon": above(EPSILON_USUAL)}, unless={"adam_epsilon": below(EPSILON_USUAL)}),
    Case(rule="epsilon", what="by the norm", on={**FLAT, "grad/norm": steady(1)},
         given={"adam_epsilon": above(EPSILON_NORM)}, unless={"adam_epsilon": below(EPSILON_NORM)}),
    Case(rule="epsilon", what="that learns", on={**FLAT, "grad/norm": steady(1)}, off=RISES, otherwise="watch",
         given={"adam_epsilon": above(EPSILON_NORM)}),
    Case(rule="rounding", what="read", on={**FLAT, ZERO: steady(above(ROUNDED, 0.001))}, given={"dtype": "bfloat16"},
         off={ZERO: steady(below(ROUNDED, 0.001))}),
    Case(rule="rounding", what="dtype", on={**FLAT, ZERO: steady(above(ROUNDED, 0.001))}, given={"dtype": "bfloat16"},
         unless={"dtype": "float32"}),
    Case(rule="rounding", what="where the dtype is not known", off={FACTOR: steady(0.4)},
         on={**FLAT, ZERO: steady(above(ROUNDED, 0.001)), FACTOR: steady(1), "lr": steady(1e-5)}),
    Case(rule="rounding", what="from settings", on={**FLAT, "lr": steady(1e-6)}, given={"dtype": "bfloat16"},
         off=RISES),
    Case(rule="rounding", what="rate", on={**FLAT, "lr": steady(below(BF16_RATE))}, given={"dtype": "bfloat16"},
         off={"lr": steady(above(BF16_RATE))}),
    Case(rule="rounding", what="and KL of 0", on={**RISES, ZERO: steady(above(ROUNDED_SOME)), KL: steady(0)},
         given={"dtype": "bfloat16"}, off={ZERO: steady(below(ROUNDED_SOME))}),
    Case(rule="gradient clip", what="under SGD", on={**FLAT, "grad/norm": steady(1)},
         given={"max_grad_norm": below(GRAD_CLIP), "optim": "sgd"}, unless={"max_grad_norm": above(GRAD_CLIP)}),
    Case(rule="gradient clip", what="under Adam", on={**FLAT, "grad/norm": steady(1)}, state="watch",
         given={"max_grad_norm": below(GRAD_CLIP)}, off=RISES),
    Case(rule="frozen", what="by what is reached", on={**FLAT, TRAINED: steady(1e-4), REACH: steady(below(REACHED))},
         off={REACH: steady(above(REACHED))}),
    Case(rule="frozen", what="that learns", on={**FLAT, TRAINED: steady(1e-4), REACH: steady(1e-4)}, off=RISES),
    Case(rule="frozen", what="by the trained share alone", on={**FLAT, TRAINED: steady(below(TRAINABLE))},
         off={TRAINED: steady(above(TRAINABLE))}, state="watch"),
    Case(rule="frozen", what="without adapters", on={**FLAT, TRAINED: steady(below(TRAINABLE))}, trainer=OURS,
         given={"lora": 0}, unless={"lora": 1}),
    Case(rule="mask", what="rows", state="watch", on={**FLAT, DEAD_ROWS: steady(above(MASK_ROWS))}, trainer=OURS,
         off={DEAD_ROWS: steady(below(MASK_ROWS))}),
    Case(rule="mask", what="half of the rows", on={**FLAT, DEAD_ROWS: steady(above(MASK_ROWS_BROKEN))}, trainer=OURS,
         off={DEAD_ROWS: steady(below(MASK_ROWS_BROKEN))}, otherwise="watch"),
    Case(rule="mask", what="and yet it learns", on={**FLAT, DEAD_ROWS: steady(above(MASK_ROWS_BROKEN))}, trainer=OURS,
         off=RISES, otherwise="watch"),
    Case(rule="mask", what="first tokens", state="watch", trainer=OURS, off={FIRST: [MASK_TOKENS, 0.0] * (N // 2)},
         on={**FLAT, DEAD_ROWS: steady(0), FIRST: steady(MASK_TOKENS), LAST: steady(0), "length/mean": steady(100)}),
    Case(rule="mask", what="a third of the tokens", trainer=OURS, otherwise="watch",
         on={**FLAT, DEAD_ROWS: steady(0), LAST: steady(30), "length/mean": steady(below(30 / MASK_LENGTH))},
         off={"length/mean": steady(above(30 / MASK_LENGTH))}),
    Case(rule="mask", what="of a method that prunes", on={**FLAT, DEAD_ROWS: steady(above(MASK_ROWS_BROKEN))},
         trainer=OURS, given={"method": "grpo"}, unless={"method": "cppo"}),
    Case(rule="KL pull", what="all", on={**FLAT, PULL: steady(above(PULL_BROKEN))}, otherwise="watch",
         off={PULL: steady(below(PULL_BROKEN))}),
    Case(rule="KL pull", what="half", state="watch", on={**FLAT, PULL: steady(above(PULL_WATCH))},
         off={PULL: steady(below(PULL_WATCH))}),
    Case(rule="KL pull", what="by its size", on={**FLAT, PULL: steady(-2), SIZE: steady(above(KL_SIZE))},
         off={SIZE: steady(below(KL_SIZE))}),
    Case(rule="KL pull", what="by its weight", on=FLAT, given={"beta": above(BETA)}, unless={"beta": below(BETA)}),
    Case(rule="KL pull", what="in the reward", trainer=VERL, on=mixed_kl(0.5, 0.5 * above(KL_REWARD)),
         off=mixed_kl(0.5, 0.5 * below(KL_REWARD))),
    Case(rule="clip", what="is closed", on=FLAT, given={**SEVERAL, "epsilon": below(CLOSED)},
         unless={"epsilon": above(CLOSED)}),
    Case(rule="clip", what="is closed and one update", on=FLAT, given={**SEVERAL, "epsilon": below(CLOSED)},
         unless=ONCE),
    Case(rule="clip", what="with one update", state="watch", on={**FLAT, "clip": steady(above(CLIP_ONCE))}, given=ONCE,
         off={"clip": steady(below(CLIP_ONCE))}),
    Case(rule="cispo cap", state="watch", on={**FLAT, "cispo": steady(0.4)}, given={"loss_type": "cispo"},
         unless={"epsilon_high": 5.0}),
    Case(rule="cispo cap", what="that learns", state="watch", on=FLAT, given={"loss_type": "cispo"}, off=RISES),
    # n²·D with n = N: D = MOVED/N² is the limit.
    Case(rule="small steps", on={**FLAT, KL: steady(below(MOVED) / N**2)}, off={KL: steady(above(MOVED) / N**2)}),
    Case(rule="small steps", what="for the plan", on={**FLAT, KL: steady(below(MOVED) / N**2)},
         unless={"max_steps": 2 * N}),
    Case(rule="small steps", what="sum under SGD", given={"optim": "sgd"},
         on={**FLAT, "lr": steady(below(SGD_SUM) / N), "grad/norm": steady(1)}, off={"lr": steady(above(SGD_SUM) / N)}),
    Case(rule="small steps", what="under SGD", given={"optim": "sgd"}, otherwise="unknown",
         on={**FLAT, "lr": steady(1e-6), "grad/norm": steady(1)}, unless={"optim": "adamw_torch"}),
    Case(rule="length constant", state="watch", on={**FLAT, "length/mean": steady(100)},
         given={"loss_type": "dr_grpo", "optim": "sgd", "max_completion_length": 100 / below(HORIZON)},
         unless={"max_completion_length": 100 / above(HORIZON)}),
    Case(rule="length constant", what="under Adam", state="watch", on={**FLAT, "length/mean": steady(100)},
         given={"loss_type": "dr_grpo", "optim": "sgd", "max_completion_length": 100 / below(HORIZON)},
         unless={"optim": "adamw_torch"}),
]
NEVER_BAD = {"loss": "at ratio 1 the loss is fixed by the method's row: it is explained, and is no sign of a fault"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_finds_its_fault_and_nothing_just_short_of_it(case: Case) -> None:
    case.check()


# -- the learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "state"), [
    ([0.0] * 6, "broken"), ([0.0, 1e-4, 1e-4, 1e-4], "fine"), ([4e-4, 3e-4, 2e-4, 0.0], "fine"), ([1e-4] * 6, "fine")])
def test_a_learning_rate_of_0_is_broken_and_a_schedule_that_begins_or_ends_at_0_is_not(
        values: list[float], state: str) -> None:
    assert states(log_of({"lr": values}))["learning rate"] == state


def test_a_learning_rate_that_was_printed_as_0_is_unknown() -> None:
    rows = [LogRow(k + 1, k + 1, {"actor/lr": 0.0}, {"actor/lr": 3}) for k in range(N)]
    found = findings(Log("made.log, line", VERL, rows, LogSettings({}, {}, VERL.defaults)))["learning rate"]
    assert (found.state, "below 0.0005" in found.sentence) == ("unknown", True)
    assert "actor_rollout_ref.actor.optim.lr" in found.settles
    exact = [LogRow(row.place, row.step, row.values) for row in rows]
    assert states(Log("made.log, line", VERL, exact, LogSettings({}, {}, VERL.defaults)))["learning rate"] == "broken"


def test_a_small_sum_of_rates_says_nothing_under_sgd() -> None:
    columns = {**FLAT, "lr": steady(below(RATE_SUM) / N)}
    assert states(log_of(columns, optim="adamw_torch"))["learning rate"] == "broken"
    assert states(log_of(columns, optim="sgd"))["learning rate"] == "fine"


# -- rounding, small steps --------------------------------------------------------------------------------------------


def test_kl_of_exactly_0_after_most_steps_confirms_rounding() -> None:
    columns = {**RISES, ZERO: steady(above(ROUNDED_SOME)), KL: steady(0)}
    found = findings(log_of(columns, dtype="bfloat16"))["rounding"]
    assert (found.state, "KL after the step is exactly 0" in found.sentence) == ("broken", True)
    assert states(log_of({**columns, KL: steady(1e-6)}, dtype="bfloat16"))["rounding"] == "fine"


def test_an_update_of_0_at_a_learning_rate_of_0_is_no_rounding() -> None:
    columns = {**FLAT, ZERO: steady(1), "lr": steady(0)}
    assert states(log_of(columns, dtype="bfloat16"))["rounding"] == "fine"


def test_small_steps_follow_from_what_makes_them_small() -> None:
    found = findings(log_of({**FLAT, KL: steady(0), "lr": steady(0)}))["small steps"]
    assert (found.state, found.follows) == ("broken", ("learning rate",))


# -- the loss and the clip --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "kind"), [("grpo", "zero"), ("dapo", "length"), ("dr_grpo", "length"),
                                            ("bnpo", "length"), ("cispo", "log_prob"), ("sapo", "weights"),
                                            ("vespo", "log_prob")])
def test_what_the_loss_is_worth_follows_from_the_row_of_the_loss_type(loss: str, kind: str) -> None:
    log = log_of({"loss": steady(0)}, loss_type=loss)
    row = TRL.facts["method"](log.settings)
    assert law(row).kind == kind
    found = findings(log)["loss"]
    assert found.state == "fine"
    assert law(row).formula.removeprefix("J = ") in found.sentence
    assert found.sentence.startswith("The loss is 0, and no measure of progress")
    assert found.sentence.endswith(("watch reward.", "Watch reward."))


def test_a_loss_of_rounding_alone_is_said_to_be_0() -> None:
    assert findings(log_of({"loss": steady(below(LOSS_ZERO))}))["loss"].sentence.startswith("The loss is 0")
    assert not findings(log_of({"loss": steady(above(LOSS_ZERO))}))["loss"].sentence.startswith("The loss is 0,")


def test_a_kl_term_of_unknown_weight_is_named_in_the_loss() -> None:
    log = log_of({"loss": steady(0.1), "kl": steady(0.1)}, loss_type="grpo", beta=None)
    assert "the KL term, whose weight the log does not say" in findings(log)["loss"].sentence
    known = log_of({"loss": steady(0.1)}, loss_type="grpo", beta=0.04)
    assert "0.04·K3" in findings(known)["loss"].sentence


def test_no_row_of_the_table_has_a_loss_that_measures_progress() -> None:
    # The finding says so of every loss; a row whose loss followed the reward would make it wrong.
    assert "reward" not in {law(row).kind for row in (*METHODS.values(), *DIALECTS.values())}


def test_credit_from_elsewhere_changes_what_the_loss_is() -> None:
    sentence = findings(log_of({"loss": steady(0.5)}, OURS, method="grpo", credit="salt"))["loss"].sentence
    assert "how the credit that was given is centred" in sentence


def test_a_loss_without_a_row_is_unknown() -> None:
    assert states(log_of({"loss": steady(0)}, loss_type="mine"))["loss"] == "unknown"


@pytest.mark.parametrize(("given", "once"), [
    ({}, True),  # one iteration, one step per generation
    ({"num_iterations": 2}, False),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 4}, True),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 8}, False),
    ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, False),  # a batch straddles two steps
    ({"generation_batch_size": 64}, False)])
def test_a_clip_ratio_of_0_is_by_construction_only_with_one_update_per_batch(given: dict[str, int], once: bool) -> None:
    found = findings(log_of({"clip": steady(0), "reward/std": steady(0.5)}, **given))["clip"]
    assert found.state == "fine"
    assert ("Nothing can be clipped" in found.sentence) == once


@pytest.mark.parametrize(("mini", "epochs", "bypass", "updates"), [
    (16, 1, False, 1), (8, 1, False, 2), (16, 3, False, 3), (12, 1, False, 2), (16, 1, True, None)])
def test_verls_updates_are_epochs_times_mini_batches(mini: int, epochs: int, bypass: bool, updates: int | None) -> None:
    log = log_of({"clip": steady(0)}, VERL, **{
        "data.train_batch_size": 16, "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.actor.ppo_epochs": epochs, "algorithm.rollout_correction.bypass_mode": bypass})
    assert log.fact("updates") == updates


def test_clipped_tokens_contradict_one_update_per_batch_only_where_the_settings_were_given() -> None:
    assert states(log_of({"clip": steady(0.1)}, **ONCE))["clip"] == "watch"
    assert states(log_of({"clip": steady(0.1)}))["clip"] == "fine"


@pytest.mark.parametrize(("given", "capped"), [
    ({"loss_type": "cispo"}, 0.2), ({"loss_type": "cispo", "epsilon": 0.3}, 0.3),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, None), ({"loss_type": "dapo"}, None)])
def test_the_default_cap_of_cispo_scales_every_gradient(given: dict[str, object], capped: float | None) -> None:
    found = findings(log_of({**FLAT, "cispo": steady(0.4)}, **given))["cispo cap"]
    assert found.state == ("fine" if capped is None else "watch")
    if capped is not None:
        assert f"scaled by {capped}" in found.sentence
        assert "epsilon_high=5.0" in found.change


def test_verls_constant_is_its_loss_scale_factor() -> None:
    given = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm", LIMIT: 4096}
    found = findings(log_of({"length/mean": steady(50)}, VERL, **given))["length constant"]
    assert "divided by 4096" in found.sentence
    scaled = log_of({"length/mean": steady(50)}, VERL, **given, **{"actor_rollout_ref.actor.loss_scale_factor": 100})
    assert "divided by 100" in findings(scaled)["length constant"].sentence


# -- a run that has just begun, and sentences that hold in every branch -----------------------------------------------


@pytest.mark.parametrize("planned", [{"max_steps": 1000}, {"max_steps": -1}, {}])
def test_the_first_steps_of_a_warm_up_are_no_fault(planned: dict[str, int]) -> None:
    rates = [1e-6 * k / 1000 for k in range(1, 11)]
    log = log_of({"reward/mean": [0.4, 0.5] * 5, "lr": rates}, learning_rate=1e-6, **planned)
    assert states(log)["learning rate"] == "fine"


def test_three_steps_at_a_usual_rate_do_not_say_that_the_policy_cannot_move() -> None:
    found = states(log_of({"reward/mean": [0.5] * 3, "lr": [1e-6] * 3, KL: [1e-6] * 3}))
    assert (found["learning rate"], found["small steps"]) == ("fine", "fine")
    found = states(log_of({"reward/mean": [0.5] * 3, "lr": [1e-9] * 3, KL: [1e-13] * 3}))
    assert (found["learning rate"], found["small steps"]) == ("broken", "broken")


def test_without_a_reading_of_w_a_reward_that_rises_leaves_no_question_of_the_mask_open() -> None:
    assert [states(log_of(columns))["mask"] for columns in (FLAT, RISES)] == ["unknown", "fine"]


def test_a_small_adapter_is_no_fault_before_the_reward_was_read() -> None:
    columns = {"reward/mean": [0.4, 0.5] * 2, TRAINED: [below(TRAINABLE)] * 4}
    assert states(log_of(columns))["frozen"] == "fine"


def test_the_narrow_clip_range_of_a_sequences_ratio_is_not_closed() -> None:
    narrow = {**SEVERAL, "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"}
    assert states(log_of(FLAT, **narrow))["clip"] == "broken"
    assert states(log_of(FLAT, **narrow, importance_sampling_level="sequence"))["clip"] == "fine"


def test_a_large_kl_term_under_which_the_reward_rises_is_not_said_to_outweigh_it() -> None:
    found = findings(log_of(RISES, beta=above(BETA)))["KL pull"]
    assert (found.state, found.sentence) == ("fine", f"The reward rises under a KL term of weight {above(BETA):g}")


def test_the_size_of_the_kl_gradient_is_not_told_where_it_was_not_read() -> None:
    found = findings(log_of({**FLAT, PULL: steady(0.1)}, beta=0.1))["KL pull"]
    assert found.sentence.startswith("The KL term takes back 10% of what the reward gives")


def test_the_planned_steps_of_a_script_are_those_that_its_trainer_resolved() -> None:
    log = log_of({"lr": [1e-6]}, SCRIPT, steps=500, trl={"max_steps": -1})
    assert log.setting("steps") == 500
