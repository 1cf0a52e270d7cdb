"""P2's exact claims: what they say, the same by hand, and that each is refuted by something wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from creditscope import METHODS, Method, surrogate
from creditscope.claims.verdict import Verdict
from creditscope.exact import p2 as p2_exact
from creditscope.exact.p2 import (
    BY_LENGTH,
    CANCELS,
    CONDITIONS,
    PRINTED,
    SAME,
    SIZES,
    STAYS,
    STEPS,
    Condition,
    World,
    make_world,
)
from creditscope.exact.prefix_bias import PrefixBias, nodes
from creditscope.exact.prefix_bias import prefix_bias as predict
from creditscope.exact.ratio_one import value_at_ratio_one
from creditscope.methods.table import P2_TABLE_1, even
from creditscope.optimizer.replay import carry, carry_limit
from creditscope.optimizer.scale import PHIS, sweep
from each import each


def said(verdicts: list[Verdict], subject: str, definition: str = "") -> Verdict:
    """The one verdict on a subject whose definition holds these words."""
    (found,) = [v for v in verdicts if v.subject == subject and definition in v.definition]
    return found


def swapped(**rows: Method) -> dict[str, Method]:
    """Our table with some rows exchanged."""
    return {**METHODS, **{name: row.replace(name=name) for name, row in rows.items()}}


def without(*names: str) -> dict[str, Method]:
    return {name: row for name, row in METHODS.items() if name not in names}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world()


# -- P2.1 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ten() -> list[Verdict]:
    return p2_exact.ten_methods()


@pytest.mark.slow
def test_five_printed_rows_are_their_methods_four_depart_and_one_cannot_be_told(ten: list[Verdict]) -> None:
    printed = {v.subject: v.outcome for v in ten if "as printed" in v.definition}
    assert tuple(printed) == P2_TABLE_1
    departs = {"gspo", "cppo", "dr_grpo", "cispo"}
    assert printed == {name: "refuted" if name in departs else "undecided" if name == "gcpo" else "holds"
                       for name in P2_TABLE_1}


def test_with_the_repair_the_four_rows_hold(ten: list[Verdict]) -> None:
    repaired = {v.subject: v.outcome for v in ten if "repaired" in v.definition}
    assert repaired == dict.fromkeys(["gspo", "cppo", "dr_grpo", "cispo"], "holds")


def test_dr_grpo_as_printed_is_off_by_the_constant_of_its_authors(ten: list[Verdict]) -> None:
    # 1/R against 1/(R·L_max) with L_max = 30: (30 − 1)·w.
    assert said(ten, "dr_grpo", "as printed").observed == pytest.approx(29, abs=1e-12)


def test_a_row_written_from_the_table_is_not_confirmed_by_it(ten: list[Verdict]) -> None:
    found = said(ten, "gcpo")
    assert found.observed is not None
    assert found.observed < 1e-12
    assert found.reason.startswith("needs gcpo's own loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in P2_TABLE_1 if name != "gcpo"])
def test_another_loss_under_the_methods_name_refutes_its_row(name: str) -> None:
    other = METHODS[name].replace(aggregate="sequence_sum")
    last = [v for v in p2_exact.ten_methods(methods=swapped(**{name: other})) if v.subject == name][-1]
    assert last.outcome == "refuted"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"clip_high": 0.25}, {"clip_low": 0.25}, {"std": "population"}, {"kl": "k2"}])
def test_a_small_change_of_grpo_refutes_its_row(changes: dict[str, Any]) -> None:
    found = said(p2_exact.ten_methods(methods=swapped(grpo=METHODS["grpo"].but(name="grpo", **changes))), "grpo")
    assert found.outcome == "refuted"


@pytest.mark.slow
def test_a_row_that_is_not_there_is_asked_for() -> None:
    found = said(p2_exact.ten_methods(methods=without("dapo")), "dapo")
    assert (found.outcome, found.reason) == ("undecided", "needs a row 'dapo' in the table of methods")


# -- the world --------------------------------------------------------------------------------------------------------


def test_the_worlds_log_probs_are_those_of_its_table(world: World) -> None:
    probabilities = world.logits.softmax(dim=1)
    rollouts = world.rollouts
    for i, t in rollouts.mask.nonzero().tolist():
        p = probabilities[world.context[i, t], rollouts.tokens[i, t]]
        assert float(rollouts.logp[i, t]) == pytest.approx(math.log(p), abs=1e-14)
    # Two tokens have one context exactly where all before them is the same, of the same prompt.
    seen: dict[tuple[int, ...], int] = {}
    for i, t in rollouts.mask.nonzero().tolist():
        key = (int(rollouts.group[i]), *rollouts.tokens[i, :t].tolist())
        assert seen.setdefault(key, int(world.context[i, t])) == int(world.context[i, t])
    assert len(set(seen.values())) == len(seen) == len(world.logits)


def test_no_answer_of_the_world_goes_without_credit_and_every_group_shares_a_prefix(world: World) -> None:
    for g in (0, 1):
        reward = world.rollouts.reward[world.rollouts.group == g]
        assert float((reward - reward.mean()).abs().min()) > 0.01
    assert {int(g) for g in world.tree.group[world.tree.whole]} == {0, 1}


def test_an_inner_step_climbs(world: World) -> None:
    row = METHODS["dr_grpo"]
    before, after = (surrogate(row, logp, world.rollouts) for logp in (world.rollouts.logp, world.step(row, 0.1)))
    assert after > before
    assert torch.allclose(world.step(row, 0.0), world.rollouts.logp, atol=1e-15)


def test_the_small_step_stops_nobody_and_the_large_one_many(world: World) -> None:
    moves = [(world.step(METHODS["grpo"], size) - world.rollouts.logp).exp() - 1 for size in STEPS[1:]]
    assert 0 < float(moves[0].abs().max()) < 0.2
    assert int((moves[1].abs() > 0.2).sum()) > 5


# -- P2.2 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefix() -> list[Verdict]:
    return p2_exact.prefix_bias()


@pytest.mark.slow
def test_prefix_bias_is_predicted_and_falls_on_whom_p2_says(prefix: list[Verdict]) -> None:
    for words in ("predicted and by autograd", "who cancels", "after one inner step"):
        assert said(prefix, "tabular policy", words).outcome == "holds", words
    assert said(prefix, "tabular policy", "predicted").n == 3 * len(METHODS)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo"])
def test_short_good_answers_are_favoured(name: str, prefix: list[Verdict]) -> None:
    assert said(prefix, name, "favours short").outcome == "holds"


def test_p2s_claim_says_nothing_of_our_even_weights(prefix: list[Verdict]) -> None:
    assert {v.claim for v in prefix} == {"P2.2"}
    assert [v.subject for v in prefix] == ["tabular policy"] * 3 + list(BY_LENGTH)


def test_the_pair_of_answers_has_the_W_of_a_hand(prefix: list[Verdict]) -> None:
    # A = ±½/σ = ±1/√2; ω = 1/(2·2) for the good answer of 2 tokens, 1/(2·5) for the bad one of 5: W = (1/4 − 1/10)/√2.
    rollouts, tree = p2_exact._pair(2, 5)
    assert tree.rows.tolist() == [2, 1, 1, 1, 1, 1]
    total = predict(METHODS["grpo"], rollouts).total[0]
    assert float(total) == pytest.approx(0.15 / math.sqrt(2), abs=1e-15)


@pytest.mark.slow
def test_a_prediction_of_the_wrong_sign_refutes_it() -> None:
    def flipped(*given: Any) -> PrefixBias:
        found = predict(*given)
        return replace(found, w=-found.w)

    assert said(p2_exact.prefix_bias(predict=flipped), "tabular policy", "predicted").outcome == "refuted"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "aggregate"), [("dr_grpo", "sequence_mean"), ("grpo", "constant")])
def test_a_row_with_the_other_weights_refutes_the_list(name: str, aggregate: str) -> None:
    rows = swapped(**{name: METHODS[name].replace(aggregate=aggregate)})
    found = said(p2_exact.prefix_bias(methods=rows), "tabular policy", "who cancels")
    assert (found.outcome, found.observed) == ("refuted", 1.0)
    assert found.reason == f"1 of 11 rows are not as listed: {name}"


@pytest.mark.slow
def test_even_weights_refute_that_short_answers_are_favoured() -> None:
    rows = swapped(grpo=METHODS["grpo_even"])
    assert said(p2_exact.prefix_bias(methods=rows), "grpo", "favours short").outcome == "refuted"


@pytest.mark.slow
def test_a_weight_that_favours_long_answers_refutes_it_too() -> None:
    # OPO's baseline Σ L r / Σ L of two answers: A = L_bad/ΣL and −L_good/ΣL, so W has the sign of L_bad − L_good as
    # well; REINFORCE with r alone has W > 0 whoever is longer.
    rows = swapped(grpo=METHODS["reinforce"])
    found = said(p2_exact.prefix_bias(methods=rows), "grpo", "favours short")
    assert (found.outcome, found.observed) == ("refuted", 21.0)  # 15 pairs with a longer good answer, 6 equally long


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ratio"), [("gcpo", "token"), ("dr_grpo", "sequence_product")])
def test_the_other_ratio_refutes_what_a_step_does(name: str, ratio: str) -> None:
    rows = swapped(**{name: METHODS[name].replace(ratio=ratio, aggregate="token_mean")})
    assert said(p2_exact.prefix_bias(methods=rows), "tabular policy", "after one inner").outcome == "refuted"


def test_rows_that_are_not_there_are_asked_for() -> None:
    (found,) = p2_exact.prefix_bias(methods=without("rloo", "sapo"))
    assert (found.outcome, found.reason) == ("undecided", "needs the rows rloo, sapo in the table of methods")


def test_whoever_is_listed_has_credit_on_the_shared_prefix(world: World) -> None:
    roots = [p2_exact._root(world, METHODS[name]) for name in (*CANCELS, *STAYS)]
    assert all(0 <= root <= 1 for root in roots)


# -- C.3 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evened() -> list[Verdict]:
    return p2_exact.even_weights()


def test_even_weights_are_judged_on_every_row_that_leaves_something(evened: list[Verdict]) -> None:
    assert {v.claim for v in evened} == {"C.3"}
    assert [v.subject for v in evened] == [f"{name}_even" for name in STAYS]


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo"])
def test_even_weights_end_what_a_weight_by_length_leaves(name: str, evened: list[Verdict]) -> None:
    assert said(evened, f"{name}_even").outcome == "holds"


@pytest.mark.parametrize("name", ["opo", "reinforce_pp", "cppo", "gtpo"])
def test_even_weights_are_not_enough_where_credit_does_not_sum_to_zero(name: str, evened: list[Verdict]) -> None:
    assert said(evened, f"{name}_even").outcome == "refuted"


def test_what_even_weights_leave_of_two_answers_by_hand(world: World) -> None:
    # A good answer of 2 tokens and a bad one of 5. GRPO: A = ±a, ω = 1/4 and 1/10, so |W|/Σ|w| = 0.15/0.35, and with
    # one weight for both nothing. OPO's baseline is Σ L r/ΣL = 2/7: A = 5/7 and −2/7, with one weight (5 − 2)/(5 + 2).
    rollouts, tree = p2_exact._pair(2, 5)
    pair = replace(world, rollouts=rollouts, tree=tree)
    assert p2_exact._root(pair, METHODS["grpo"]) == pytest.approx(3 / 7, abs=1e-15)
    assert p2_exact._root(pair, even(METHODS["grpo"])) == pytest.approx(0, abs=1e-15)
    assert p2_exact._root(pair, even(METHODS["opo"])) == pytest.approx(3 / 7, abs=1e-15)


def test_weights_that_stay_as_they_are_remove_nothing() -> None:
    found = p2_exact.even_weights(flatten=lambda row: row)
    assert [(v.subject, v.outcome) for v in found] == [(name, "refuted") for name in STAYS]


def test_with_the_groups_mean_for_its_baseline_even_weights_end_what_opo_leaves() -> None:
    rows = swapped(opo=METHODS["opo"].but(name="opo", baseline="group_mean"))
    assert said(p2_exact.even_weights(methods=rows), "opo_even").outcome == "holds"


def test_even_weights_ask_for_the_rows_they_need_and_for_no_others() -> None:
    (found,) = p2_exact.even_weights(methods=without("gspo", "gtpo", "rloo"))
    assert (found.claim, found.outcome) == ("C.3", "undecided")
    assert found.reason == "needs the rows gspo, gtpo in the table of methods"
    assert len(p2_exact.even_weights(methods=without("rloo"))) == len(STAYS)


# -- P2.3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_condition_is_as_it_is_said_to_be() -> None:
    found = p2_exact.blind_to_scale()
    assert [v.subject for v in found] == [*(c.name for c in CONDITIONS), "tabular policy"]
    assert [v.outcome for v in found] == ["holds"] * len(found)


@pytest.mark.slow
@each("condition", CONDITIONS)
def test_the_opposite_of_every_condition_is_refuted(condition: Condition, world: World) -> None:
    opposite = replace(condition, says="broken" if condition.says == "blind" else "blind")
    assert p2_exact._judged(world, opposite).outcome == "refuted"


def test_sgd_follows_the_scale_and_adamw_does_not_by_hand(world: World) -> None:
    # One step: SGD moves by φ·lr·g; AdamW by lr·g/(|g| + ε/φ), which is ±lr.
    sgd, adamw = CONDITIONS[-2], CONDITIONS[0]
    reward, rest = p2_exact._parts(world, world.logits, 1.0, 0.0, 0)
    seen = [(world.logits, reward, rest)]
    assert torch.allclose(p2_exact._fed(sgd, seen, 10.0), -10 * 1e-5 * reward, rtol=1e-9, atol=1e-15)
    assert torch.allclose(p2_exact._fed(adamw, seen, 10.0), -1e-2 * reward.sign(), rtol=1e-5)


def test_the_rewards_part_of_the_gradient_is_linear_and_the_rest_does_not_see_it(world: World) -> None:
    (one, rest), (ten, same) = (p2_exact._parts(world, world.logits, phi, 10.0, 1) for phi in (1.0, 10.0))
    assert torch.allclose(ten, 10 * one, rtol=1e-12)
    assert torch.equal(rest, same)
    assert float(rest.norm()) > 0.01


def test_the_norms_of_the_five_steps_lie_on_both_sides_of_the_clip(world: World) -> None:
    (condition,) = [c for c in CONDITIONS if c.clip < math.inf]
    norms = [float(p2_exact._parts(world, world.logits, 1.0, 0.0, step)[0].norm()) for step in range(len(SIZES))]
    assert min(norms) < condition.clip < max(norms)


def test_the_limit_is_reached_for_several_phi_and_not_for_all() -> None:
    blind = said(p2_exact.blind_to_scale(conditions=CONDITIONS[:1]), CONDITIONS[0].name)
    assert blind.n is not None
    assert 3 <= blind.n < len(PHIS) - 1


def test_an_eps_that_drowns_everything_leaves_no_phi_to_ask() -> None:
    huge = replace(CONDITIONS[0], settings={"lr": 1e-2, "eps": 1e9})
    found = said(p2_exact.blind_to_scale(conditions=[huge]), huge.name)
    assert (found.outcome, found.reason) == ("undecided", f"needs a φ with ε/(φ√v̂) ≤ {SAME:g} at every coordinate")


def test_a_prediction_that_is_off_by_a_millionth_refutes_the_replay() -> None:
    def off(*given: Any) -> Any:
        found = sweep(*given)
        return replace(found, change=found.change + 1e-6)

    assert p2_exact.blind_to_scale(conditions=CONDITIONS[:1], predict=off)[-1].outcome == "refuted"


def test_a_replay_that_forgets_the_rest_is_refuted() -> None:
    def forgetful(optimizer: Any, named: Any, phis: Any, since: str, parts: Any) -> Any:
        return sweep(optimizer, named, phis, since)

    kl, plain = CONDITIONS[3], CONDITIONS[0]
    assert p2_exact.blind_to_scale(conditions=[plain], predict=forgetful)[-1].outcome == "holds"
    assert p2_exact.blind_to_scale(conditions=[kl], predict=forgetful)[-1].outcome == "refuted"


@pytest.mark.parametrize("number", [0, 1, 3, 4, 6])
def test_the_replay_agrees_condition_by_condition(number: int, world: World) -> None:
    found = p2_exact._replayed(world, [CONDITIONS[number]], sweep)
    assert (found.outcome, found.n) == ("holds", len(PHIS))


def test_without_adam_there_is_nothing_to_replay() -> None:
    found = p2_exact.blind_to_scale(conditions=CONDITIONS[-2:])[-1]
    assert (found.outcome, found.reason) == ("undecided", "needs a condition with Adam and without norm clipping")


# -- P2.4 -------------------------------------------------------------------------------------------------------------


def test_adamw_has_the_printed_carry() -> None:
    found = p2_exact.overshoot()
    assert [v.outcome for v in found] == ["holds"] * 5
    assert [v.expected for v in found[:4]] == ["0.6786", "0.9047", "0.6763", "0.923"]
    assert found[3].observed == pytest.approx(carry_limit(0, (0.9, 0.95)), abs=1e-9)


def test_the_carry_of_a_real_adamw_after_one_gradient_by_hand() -> None:
    # β = (½, ¾): m̂₂ = ¼/¾ = 1/3, v̂₂ = (3/16)/(7/16) = 3/7, so Δ = (1/3)/√(3/7).
    assert p2_exact._carried(2, (0.5, 0.75), 0) == pytest.approx([1 / 3 / math.sqrt(3 / 7)], abs=1e-12)


@pytest.mark.parametrize("case", PRINTED)
def test_a_printed_value_that_is_off_in_its_last_digit_is_refuted(case: tuple[int, int]) -> None:
    value, digits = PRINTED[case]
    found = p2_exact.overshoot(printed={case: (value + 10.0**-digits, digits)})
    assert [v.outcome for v in found] == ["refuted", "holds"]


@pytest.mark.parametrize("wrong", [
    lambda step, lag, betas: carry(step, lag + 1, betas),
    lambda step, lag, betas: carry(step + 1, lag, betas),
    lambda step, lag, betas: carry_limit(lag, betas),
], ids=["a step late", "a step early", "the limit"])
def test_another_closed_form_is_refuted(wrong: Any) -> None:
    assert p2_exact.overshoot(closed_form=wrong)[-1].outcome == "refuted"


# -- P2.5 -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_is_what_proposition_4_leaves_of_it() -> None:
    found = p2_exact.loss_value()
    assert [v.outcome for v in found] == ["holds"] * 5
    assert [v.subject.split(", ")[1] for v in found] == [f"{n} methods" for n in (30, 4, 2, 4, 10)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes", "law"), [
    ("grpo", {"aggregate": "token_mean"}, "even over answers"),
    ("gspo", {"baseline": "none", "scale": "none"}, "even over answers"),
    ("dapo", {"aggregate": "sequence_mean"}, "even over tokens"),
    ("dr_grpo", {"max_tokens": 7}, "even over tokens"),
    ("cppo", {"keep": "all", "keep_threshold": None}, "others"),
    ("gpg", {"aggregate": "sequence_sum"}, "others"),
])
def test_a_row_with_other_weights_refutes_its_law(name: str, changes: dict[str, Any], law: str) -> None:
    rows = swapped(**{name: METHODS[name].replace(**changes)})
    (found,) = [v for v in p2_exact.loss_value(methods=rows) if v.definition.startswith(law)]
    assert found.outcome == "refuted"


def test_a_loss_without_a_baseline_is_a_progress_signal() -> None:
    (found,) = [v for v in p2_exact.loss_value(methods=swapped(gpg=METHODS["reinforce"]))
                if v.definition.startswith("no progress")]
    assert found.outcome == "refuted"


@pytest.mark.slow
def test_a_closed_form_with_another_weight_of_kl_is_refuted() -> None:
    found = p2_exact.loss_value(closed_form=lambda row, batch: value_at_ratio_one(
        row.replace(beta=row.beta * 1.001), batch))
    assert [v.outcome for v in found] == ["refuted", *["holds"] * 4]


def test_without_the_tables_rows_the_loss_is_not_judged() -> None:
    (found,) = p2_exact.loss_value(methods=without("grpo"))
    assert (found.outcome, found.reason) == ("undecided", "needs the rows grpo in the table of methods")


def test_the_length_statistic_of_two_answers_by_hand() -> None:
    # r = (1, 0), L = (2, 5): A = ±½, σ = 1/√2. DAPO: Σ A L/(σ ΣL) = −1.5·√2/7.
    rollouts, _ = p2_exact._pair(2, 5)
    rollouts = replace(rollouts, ref_logp=rollouts.logp, entropy=rollouts.logp * 0)
    assert p2_exact._length_statistic("dapo", rollouts) == pytest.approx(-1.5 * math.sqrt(2) / 7, abs=1e-15)
    # Dr.GRPO: Σ A L/(R·L_max) = −1.5/10, and no KL at the reference.
    assert p2_exact._length_statistic("dr_grpo", rollouts) == pytest.approx(-0.15, abs=1e-15)
    assert len(nodes(rollouts)) == 6


@pytest.mark.slow
def test_every_verdict_says_its_number_in_one_sentence(ten: list[Verdict], prefix: list[Verdict]) -> None:
    for verdict in (*ten, *prefix, *p2_exact.overshoot(), *p2_exact.loss_value()):
        assert any(c.isdigit() for c in verdict.reason)
        assert not verdict.reason.endswith(".")
        assert verdict.threshold
        assert verdict.n
