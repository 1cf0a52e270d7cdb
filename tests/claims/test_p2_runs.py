"""P2's claims about training, on runs made by hand: each holds on one set, is refuted by another, and asks for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from creditscope import CreditscopeError
from creditscope.claims.evidence import Evidence
from creditscope.claims.p2_runs import blind_to_scale, loss_value, momentum_aware, overshoot
from creditscope.claims.verdict import ClaimVerdict
from each import each

CONFIG = {"model": "tiny", "task": "arithmetic", "method": "grpo", "group": 8, "inner_steps": 1, "lr": 1e-4,
          "optimizer": "adamw", "beta1": 0.9, "eps": 1e-8, "brake": "none"}
DAPO = {"method": "dapo"}
CLAIMS: list[Callable[[Sequence[Evidence]], list[ClaimVerdict]]] = [
    blind_to_scale, overshoot, loss_value, momentum_aware]


def run(seed: int, columns: dict[str, Sequence[float]], accuracy: float = 0.5, finished: bool = True,
        **settings: Any) -> Evidence:
    """A run whose metrics are given by column; a setting that is None is one that the run does not know."""
    length = max(len(values) for values in columns.values()) if columns else 1
    steps: list[dict[str, Any]] = [
        {"step": t, "rollouts/spent": 64, **{name: values[t] for name, values in columns.items() if t < len(values)}}
        for t in range(length)]
    steps.append({"step": length, "eval/accuracy": accuracy})
    config = {key: value for key, value in (CONFIG | {"seed": seed} | settings).items() if value is not None}
    return Evidence(name=f"seed-{seed}", config=config, finished=finished, steps=tuple(steps))


def several(metric: str, means: Sequence[float], **settings: Any) -> list[Evidence]:
    """One run a value; its two steps lie on both sides of it."""
    return [run(seed, {metric: [mean - 0.001, mean + 0.001]}, **settings) for seed, mean in enumerate(means)]


def only(verdicts: list[ClaimVerdict], words: str = "") -> ClaimVerdict:
    (found,) = [v for v in verdicts if words in v.definition]
    return found


# -- every claim ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", CLAIMS)
def test_without_runs_every_claim_asks_for_them(claim: Callable[[Sequence[Evidence]], list[ClaimVerdict]]) -> None:
    for runs in ([], [Evidence(name="offline", config={"model": "tiny"}, finished=True)]):
        (found,) = claim(runs)
        assert found.outcome == "undecided"
        assert found.reason.startswith("needs ")
        assert found.subject == "no run"


@pytest.mark.parametrize("claim", CLAIMS[:3])
def test_a_run_without_the_metric_is_undecided_and_says_what_it_needs(
        claim: Callable[[Sequence[Evidence]], list[ClaimVerdict]]) -> None:
    for found in claim([run(0, {"time/step": [1.0]}, inner_steps=4)]):
        assert found.outcome == "undecided"
        assert found.reason.startswith("needs ")
        assert found.subject == "tiny · arithmetic · grpo, R = 8, μ = 4, lr = 0.0001, β₁ = 0.9"


@pytest.mark.parametrize("claim", CLAIMS)
def test_runs_with_a_method_that_is_not_in_the_table_are_left_out(
        claim: Callable[[Sequence[Evidence]], list[ClaimVerdict]]) -> None:
    metrics: dict[str, Sequence[float]] = {
        "optimizer/scale_change": [0.01], "overshoot/after": [0.7], "overshoot/distance": [0.4],
        "objective/value": [0.0], "reward/mean": [0.5]}
    ours, strange = ([run(seed, metrics, inner_steps=4, method=method, brake=brake)
                      for brake in ("none", "recall") for seed in range(3)] for method in ("grpo", "mine"))
    assert [v.subject for v in claim(strange)] == ["no run"]
    assert claim([*ours, *strange]) == claim(ours)
    assert "no run" not in {v.subject for v in claim(ours)}


@pytest.mark.parametrize("setting", ["beta", "inner_steps", "lr"])
def test_a_setting_that_is_no_number_is_refused_by_name(setting: str) -> None:
    damaged = Evidence(name="seed-0", config={**CONFIG, setting: "much"})
    with pytest.raises(CreditscopeError, match=rf"run seed-0: {setting} is 'much', not a number"):
        blind_to_scale([damaged])


def test_two_records_of_one_seed_count_once() -> None:
    runs = several("optimizer/scale_change", (0.01, 0.02, 0.03))
    assert blind_to_scale([*runs, *runs]) == blind_to_scale(runs)


# -- P2.3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "outcome"), [
    ((0.01, 0.012, 0.008), "holds"),
    ((0.5, 0.52, 0.48), "refuted"),
    ((0.01, 0.05, 0.09), "undecided"),
    ((0.01,), "undecided"),
    ((0.01, 0.01), "undecided"),  # agreement of two may be luck
])
def test_adam_is_blind_where_a_tenth_of_the_credit_changes_little(changes: tuple[float, ...], outcome: str) -> None:
    found = only(blind_to_scale(several("optimizer/scale_change", changes)))
    assert (found.outcome, found.n) == (outcome, len(changes))
    assert found.observed == pytest.approx(sum(changes) / len(changes), abs=1e-12)


def test_the_interval_of_the_change_by_hand() -> None:
    found = only(blind_to_scale(several("optimizer/scale_change", (0.01, 0.02, 0.03))))
    # s = 0.01, t = 4.3027: 0.02 ± 4.3027·0.01/√3.
    assert found.interval == pytest.approx((0.02 - 0.0248417, 0.02 + 0.0248417), abs=1e-7)
    assert found.reason == "a tenth of the credit changes the update by 2 %"


@pytest.mark.parametrize(("settings", "by"), [
    ({"optimizer": "sgd"}, "SGD"), ({"beta": 0.04}, "β = 0.04"), ({"eps": 1e-5}, "ε = 1e-05"),
    ({"optimizer": "adam", "weight_decay": 0.1}, "coupled weight decay"),
])
def test_what_breaks_blindness_must_be_seen_to_break_it(settings: dict[str, Any], by: str) -> None:
    for changes, outcome in (((0.9, 0.89, 0.9), "holds"), ((0.01, 0.011, 0.012), "refuted")):
        found = only(blind_to_scale(several("optimizer/scale_change", changes, **settings)))
        assert (found.outcome, found.expected) == (outcome, f"broken by {by}")


def test_decoupled_weight_decay_and_beta_0_leave_it_blind() -> None:
    runs = several("optimizer/scale_change", (0.01, 0.011, 0.012), weight_decay=0.1, beta=0.0)
    assert only(blind_to_scale(runs)).expected == "blind"


def test_of_an_eps_between_the_two_nothing_is_said() -> None:
    assert blind_to_scale(several("optimizer/scale_change", (0.2, 0.2, 0.2), eps=1e-6))[0].subject == "no run"


def test_a_run_older_than_a_setting_had_its_default() -> None:
    found = only(blind_to_scale(several("optimizer/scale_change", (0.01, 0.01, 0.011), eps=None, beta1=None,
                                        brake=None, inner_steps=None)))
    assert found.outcome == "holds"
    assert found.subject == "tiny · arithmetic · grpo, R = 8, μ = 1, lr = 0.0001, β₁ = 0.9"


def test_families_are_judged_apart() -> None:
    runs = several("optimizer/scale_change", (0.01, 0.011, 0.012)) + several("optimizer/scale_change", (0.9, 0.91, 0.9),
                                                                             lr=1e-3)
    assert [v.outcome for v in blind_to_scale(runs)] == ["holds", "refuted"]


def test_group_sizes_are_judged_apart_and_the_subject_tells_which() -> None:
    runs = [each for group, change in ((4, 0.01), (16, 0.9))
            for each in several("optimizer/scale_change", (change, change, change), group=group)]
    assert [(v.subject.split(", ")[1], v.outcome) for v in blind_to_scale(runs)] == [
        ("R = 4", "holds"), ("R = 16", "refuted")]


# -- P2.4 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shares", "outcome"), [
    ((0.7, 0.72, 0.74), "holds"), ((-0.2, -0.1, -0.15), "refuted"), ((-0.2, 0.1, 0.3), "undecided"),
])
def test_tokens_overshoot_where_they_move_on_after_their_gradient_stopped(shares: tuple[float, ...],
                                                                        outcome: str) -> None:
    assert only(overshoot(several("overshoot/after", shares, inner_steps=4)), "overshoot/after").outcome == outcome


@pytest.mark.parametrize(("shares", "outcome"), [((-0.1, -0.12, -0.11), "holds"), ((0.7, 0.72, 0.74), "refuted")])
def test_without_momentum_they_must_not(shares: tuple[float, ...], outcome: str) -> None:
    found = only(overshoot(several("overshoot/after", shares, inner_steps=4, beta1=0.0)), "overshoot/after")
    assert (found.outcome, found.expected) == (outcome, "none of it")


@pytest.mark.parametrize(("carries", "outcome"), [
    ((0.85, 0.87, 0.89), "holds"), ((0.81, 0.815, 0.82), "holds"), ((0.98, 0.985, 0.99), "holds"),
    ((0.5, 0.52, 0.54), "refuted"), ((1.2, 1.25, 1.3), "refuted"),
    ((0.7, 0.9, 1.1), "undecided"),
])
def test_the_carry_is_judged_against_C(carries: tuple[float, ...], outcome: str) -> None:
    runs = [run(seed, {"overshoot/carry": [carry], "overshoot/carry_predicted": [0.9]}, inner_steps=2)
            for seed, carry in enumerate(carries)]
    found = only(overshoot(runs), "minus C")
    assert found.outcome == outcome
    assert found.observed == pytest.approx(sum(carries) / 3 - 0.9, abs=1e-12)


def test_only_steps_with_both_carries_count() -> None:
    runs = [run(seed, {"overshoot/carry": [0.9, 5.0], "overshoot/carry_predicted": [0.9]}, minibatches=2)
            for seed in range(2)]
    assert only(overshoot(runs), "minus C").observed == 0


@pytest.mark.parametrize("settings", [{"inner_steps": 1}, {"optimizer": "sgd"}, {"brake": "recall"}])
def test_one_update_sgd_and_brakes_are_no_test_of_overshoot(settings: dict[str, Any]) -> None:
    runs = several("overshoot/after", (0.7, 0.7, 0.7), **({"inner_steps": 4} | settings))
    assert only(overshoot(runs)).subject == "no run"


# -- P2.5 -------------------------------------------------------------------------------------------------------------

REWARD = [0.1, 0.2, 0.3, 0.4]
FLAT = [1.0, -1.0, -1.0, 1.0]  # Σ (r − 0.25)·x = −0.15 + 0.05 − 0.05 + 0.15 = 0


def losses(values: Sequence[Sequence[float]], **settings: Any) -> list[Evidence]:
    return [run(seed, {"objective/value": each, "reward/mean": REWARD}, **settings) for seed, each in enumerate(values)]


@pytest.mark.parametrize(("largest", "outcome"), [
    (3e-8, "holds"), (-5e-7, "holds"), (2e-6, "refuted"), (1e-3, "refuted"), (-1e-3, "refuted")])
def test_a_loss_of_rounding_holds_and_a_larger_one_is_refuted_where_nothing_should_be_left(largest: float,
                                                                                           outcome: str) -> None:
    found = only(loss_value(losses([[1e-8, -2e-8, largest, 1e-8], [0.0] * 4])))
    assert (found.outcome, found.observed) == (outcome, abs(largest))
    assert found.reason == f"|J| is at most {abs(largest):.2g} at every step"


def test_a_loss_that_does_not_follow_the_reward_is_no_signal() -> None:
    found = only(loss_value(losses([FLAT, FLAT, FLAT], **DAPO)))
    assert found.outcome == "holds"
    assert found.observed == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_follows_the_reward_either_way_is_one(sign: int) -> None:
    found = only(loss_value(losses([[sign * r for r in REWARD]] * 3, **DAPO)))
    assert found.outcome == "refuted"
    assert found.observed == pytest.approx(sign, abs=1e-12)


def test_runs_that_disagree_and_a_single_run_do_not_decide() -> None:
    assert only(loss_value(losses([FLAT, REWARD, FLAT], **DAPO))).outcome == "undecided"
    assert only(loss_value(losses([FLAT], **DAPO))).reason.endswith("1 run cannot tell, needs about 3")


def test_r_of_a_run_by_hand() -> None:
    # x = (0, 0, 0, 2) less its mean: (−½, −½, −½, 3/2); r − mean ∝ (−3, −1, 1, 3): Σ = 6, norms √3 and √20.
    found = only(loss_value(losses([[0.0, 0.0, 0.0, 2.0]], **DAPO)))
    assert found.observed == pytest.approx(6 / (3 * 20) ** 0.5, abs=1e-12)
    assert found.reason == "the correlation of J with the reward is +0.77: 1 run cannot tell, needs about 3"


def test_of_other_credit_than_the_outcome_p2_says_nothing() -> None:
    assert only(loss_value(losses([FLAT] * 3, credit="step_reward"))).reason.startswith("needs a run")
    assert only(loss_value(losses([FLAT] * 3, adapt="denser_credit"))).reason.startswith("needs a run")
    assert "largest" in only(loss_value(losses([[0.0] * 4] * 3, credit="outcome"))).definition


def test_a_loss_that_never_moves_has_no_correlation_to_judge() -> None:
    found = only(loss_value(losses([[0.3] * 4] * 3, **DAPO)))
    assert found.outcome == "undecided"
    assert found.reason == "needs steps over which objective/value and reward/mean both change"


# -- P2.6 -------------------------------------------------------------------------------------------------------------


def braked(change: Sequence[float], gain: Sequence[float], brake: str = "recall", **settings: Any) -> list[Evidence]:
    """Runs without a brake at distance 0.4 and accuracy 0.5, and runs with one that changes both, paired by seed."""
    settings = {"inner_steps": 4} | settings
    plain = [run(seed, {"overshoot/distance": [0.4]}, **settings) for seed in range(len(change))]
    return plain + [run(seed, {"overshoot/distance": [0.4 * (1 + c)]}, 0.5 + g, brake=brake, **settings)
                    for seed, (c, g) in enumerate(zip(change, gain, strict=True))]


# Three values d apart have s = d, and an interval of mean ± 4.3027·d/√3 = mean ± 2.484·d.
@each(("change", "gain", "outcome"), [
    ((-0.7, -0.72, -0.74), (0.01, 0.0, -0.01), "holds"),  # accuracy in ±2.5 points
    ((-0.7, -0.72, -0.74), (0.1, 0.11, 0.12), "holds"),
    ((-0.7, -0.72, -0.74), (-0.01, -0.011, -0.012), "holds"),  # [−1.3, −0.9] points: lost, but less than 3
    ((-0.7, -0.72, -0.74), (-0.1, -0.11, -0.12), "refuted"),  # [−13.5, −8.5] points: lost
    ((-0.7, -0.72, -0.74), (0.02, 0.0, -0.02), "undecided"),  # ±5.0 points: 3 may be lost, or not
    ((-0.7, -0.72, -0.74), (-0.02, -0.03, -0.04), "undecided"),
    ((-0.3, -0.32, -0.34), (0.1, 0.11, 0.12), "refuted"),  # not halved
    ((-0.3, -0.32, -0.34), (0.02, 0.0, -0.02), "refuted"),  # whatever became of accuracy
    ((0.3, 0.32, 0.34), (0.1, 0.11, 0.12), "refuted"),
    ((-0.3, -0.5, -0.7), (0.1, 0.11, 0.12), "undecided"),  # −50 ± 50 %
    ((-0.3, -0.5, -0.7), (-0.1, -0.11, -0.12), "refuted"),  # halved or not, accuracy is lost
])
def test_a_brake_must_halve_the_distance_and_lose_nothing(change: tuple[float, ...], gain: tuple[float, ...],
                                                          outcome: str) -> None:
    found = only(momentum_aware(braked(change, gain)))
    assert found.outcome == outcome
    assert found.observed == pytest.approx(sum(change) / 3, abs=1e-12)
    assert found.subject == "tiny · arithmetic · grpo, R = 8, μ = 4, lr = 0.0001, β₁ = 0.9, brake recall"


def test_the_verdict_on_a_brake_by_hand() -> None:
    # Distance: −0.72 ± 2.4842·0.02; accuracy: 0 ± 2.4842·0.01.
    found = only(momentum_aware(braked((-0.7, -0.72, -0.74), (0.01, 0.0, -0.01))))
    assert found.interval == pytest.approx((-0.72 - 0.0496833, -0.72 + 0.0496833), abs=1e-7)
    assert (found.n, found.of) == (3, "seeds")
    assert found.threshold == "change < -50 %, accuracy above −3 points"
    assert found.reason.startswith("distance -72 % [-77, -67], accuracy ")
    assert found.reason.endswith("0.0 [-2.5, +2.5] points")


def test_the_interval_is_of_pairs() -> None:
    # Both worlds differ from seed to seed by a factor, and their ratio does not: the interval has no width.
    runs = [run(seed, {"overshoot/distance": [0.1 * size * factor]}, inner_steps=4, brake=brake)
            for brake, factor in (("none", 1.0), ("recall", 0.25)) for seed, size in enumerate((1, 2, 5))]
    assert only(momentum_aware(runs)).interval == pytest.approx((-0.75, -0.75), abs=1e-12)


def test_every_brake_and_every_number_of_updates_has_its_verdict() -> None:
    runs = braked((-0.7,) * 3, (0.0,) * 3) + [r for r in braked((-0.1,) * 3, (0.0,) * 3, "restart")
                                              if r["brake"] == "restart"]
    assert [(v.subject.split("brake ")[1], v.outcome) for v in momentum_aware(runs)] == [
        ("recall", "holds"), ("restart", "refuted")]
    two = runs + braked((-0.9,) * 3, (0.0,) * 3, inner_steps=2)
    assert [v.outcome for v in momentum_aware(two)] == ["holds", "refuted", "holds"]


def test_what_cannot_be_paired_is_asked_for() -> None:
    runs = braked((-0.7, -0.7, -0.7), (0.0, 0.0, 0.0))
    lacking: list[list[Evidence]] = [
        runs[:5], runs[3:], runs[:2] + runs[3:],
        [*runs[:3], *(run(seed, {"overshoot/past": [0.1]}, inner_steps=4, brake="recall") for seed in range(3))]]
    for some in lacking:
        found = only(momentum_aware(some))
        assert found.outcome == "undecided"
        assert found.reason.startswith("needs finished runs that differ in --brake alone")


def test_a_run_that_did_not_finish_is_left_out() -> None:
    runs = braked((-0.7, -0.7, -0.7), (0.0, 0.0, 0.0))
    unfinished = run(3, {"overshoot/distance": [9.0]}, inner_steps=4, brake="recall", finished=False)
    assert only(momentum_aware([*runs, unfinished])).n == 3
