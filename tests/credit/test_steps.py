"""Credit by steps: step rewards and returns to go, beside the group's steps, the same turn, the same state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.credit.state_return import state_return
from creditscope.credit.step_return import step_return
from creditscope.credit.step_reward import step_reward
from creditscope.credit.steps import labels
from creditscope.credit.tools import Tools
from creditscope.credit.turn_return import turn_return
from creditscope.methods.axes import Method
from each import each
from makers import make

D = torch.float64
MEAN, OTHERS, NONE, BY_LENGTH = (METHODS[name] for name in ("p1_grpo", "rloo", "reinforce", "opo"))
ESTIMATORS = (step_reward, step_return, turn_return, state_return)
Estimate = Callable[[Method, Rollouts, Tools], Tensor]


def three_rows() -> Rollouts:
    """Steps of 2 + 2 tokens worth 1 and 0, the last token in none; one step worth 0.2 in the middle; no step at all."""
    return replace(make([1, 0, 1], [7, 7, 7], [4, 3, 2]),
                   step=torch.tensor([[0, 0, 1, -1], [-1, 0, -1, -1], [-1, -1, -1, -1]]),
                   step_reward=torch.tensor([[1., 0.], [.2, 0.], [0., 0.]], dtype=D))


def check(found: Tensor, *rows: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(rows, dtype=D), rtol=0, atol=1e-15)


# -- by hand: the baseline is over the three steps that exist, 1, 0 and 0.2; row 2 has none --------------------------


@pytest.mark.parametrize(("method", "first", "second", "other"), [
    (MEAN, .6, -.4, -.2),  # b = 0.4
    (OTHERS, .9, -.6, -.3),  # others of 1: 0.1, of 0: 0.6, of 0.2: 0.5
    (NONE, 1., 0., .2),
    (BY_LENGTH, 1 - 4.6 / 11, -4.6 / 11, .2 - 4.6 / 11),  # answers of 4, 4 and 3 tokens: (4·1 + 4·0 + 3·0.2)/11
], ids=lambda x: getattr(x, "name", ""))
def test_step_reward_by_hand(method: Method, first: float, second: float, other: float) -> None:
    check(step_reward(method, three_rows(), Tools()), [first, first, second, second], [other, other, other, 0], [0] * 4)


@pytest.mark.parametrize(("method", "first", "second", "other"), [
    (MEAN, .2, -.4, -.2),  # 0.6 − 0.4
    (OTHERS, .3, -.6, -.3),  # 0.9 − 0.6
    (NONE, 1., 0., .2),
], ids=lambda x: getattr(x, "name", ""))
def test_step_return_by_hand(method: Method, first: float, second: float, other: float) -> None:
    check(step_return(method, three_rows(), Tools()), [first, first, second, second], [other, other, other, 0], [0] * 4)


@pytest.mark.parametrize(("method", "first", "second", "other"), [
    (MEAN, .4, 0., -.4),  # turn 0: returns 1 and 0.2, mean 0.6. Turn 1: nobody to compare with
    (OTHERS, .8, 0., -.8),
    (NONE, 1., 0., .2),
], ids=lambda x: getattr(x, "name", ""))
def test_turn_return_by_hand(method: Method, first: float, second: float, other: float) -> None:
    check(turn_return(method, three_rows(), Tools()), [first, first, second, second], [other, other, other, 0], [0] * 4)


def test_returns_to_go_leave_out_what_was_earned_before() -> None:
    # Rewards (1, 0, ½) and (0, 1, 1), a token each: returns (1.5, 0.5, 0.5) and (2, 2, 1); means 1.75, 1.25, 0.75.
    batch = replace(make([0, 0], [0, 0], [3, 3]), step=torch.tensor([[0, 1, 2]] * 2),
                    step_reward=torch.tensor([[1., 0., .5], [0., 1., 1.]], dtype=D))
    check(turn_return(MEAN, batch, Tools()), [-.25, -.75, -.25], [.25, .75, .25])
    # All six rewards: mean 7/12. Step returns are their sums to go: of the first row, 5/12, −7/12, −1/12.
    check(step_return(MEAN, batch, Tools()), [-3 / 12, -8 / 12, -1 / 12], [3 / 12, 10 / 12, 5 / 12])


def test_state_return_by_hand() -> None:
    # Rewards (1, 0) and (0, 1): returns (1, 0) and (1, 1). State 5 is seen in turn 0 and in turn 1, with 1 and 1;
    # state 9 with 0 and 1: mean ½. In the other group the states mean something else: returns 0.3 and 0, mean 0.15.
    batch = replace(make([0, 0, 0, 0], [2, 2, -1, -1], [2, 2, 1, 1]),
                    step=torch.tensor([[0, 1], [0, 1], [0, -1], [0, -1]]),
                    step_reward=torch.tensor([[1., 0.], [0., 1.], [.3, 0.], [0., 0.]], dtype=D),
                    step_state=torch.tensor([[5, 9], [9, 5], [9, -1], [9, -1]]))
    check(state_return(MEAN, batch, Tools()), [0, -.5], [.5, 0], [.15, 0], [-.15, 0])
    check(state_return(OTHERS, batch, Tools()), [0, -1], [1, 0], [.3, 0], [-.3, 0])
    check(state_return(NONE, batch, Tools()), [1, 0], [1, 1], [.3, 0], [0, 0])


def test_alone_in_its_state_a_turn_is_compared_with_the_siblings_same_turn() -> None:
    # Rewards (1, 0) and (0, 1): returns (1, 0) and (1, 1). All start in state 5; then one is in 6, one in 7: the turn's
    # mean is ½. With a third sibling in state 6, returns 0 and 0 meet there, and 7 is compared with the mean 1/3.
    batch = replace(make([0, 0], [0, 0], [2, 2]), step=torch.tensor([[0, 1]] * 2),
                    step_reward=torch.tensor([[1., 0.], [0., 1.]], dtype=D), step_state=torch.tensor([[5, 6], [5, 7]]))
    check(state_return(MEAN, batch, Tools()), [0, -.5], [0, .5])
    more = replace(make([0, 0, 0], [0, 0, 0], [2, 2, 2]), step=torch.tensor([[0, 1]] * 3),
                   step_reward=torch.tensor([[1., 0.], [0., 1.], [1., 0.]], dtype=D),
                   step_state=torch.tensor([[5, 6], [5, 7], [5, 6]]))
    check(state_return(MEAN, more, Tools()), [0, 0], [0, 2 / 3], [0, 0])


def test_a_method_with_a_critic_takes_the_mean_of_the_groups_steps() -> None:
    torch.testing.assert_close(step_reward(METHODS["ppo"], three_rows(), Tools()),
                               step_reward(MEAN, three_rows(), Tools()), rtol=0, atol=0)


def test_a_step_that_no_token_belongs_to_still_counts_where_it_earned_something() -> None:
    # The text of step 1 was cut off, its label ½ was not: rewards 1, ½ and 0, mean ½.
    batch = replace(make([0, 0], [0, 0], [1, 1]), step=torch.tensor([[0], [0]]),
                    step_reward=torch.tensor([[1., .5], [0., 0.]], dtype=D))
    assert labels(batch, "x")[2].tolist() == [[True, True], [True, False]]
    check(step_reward(MEAN, batch, Tools()), [.5], [-.5])


def test_a_last_step_that_earned_nothing_counts_by_its_tokens() -> None:
    # Rewards (1, 0) and (1): mean ⅔. Without the 0 all steps would be alike.
    batch = replace(make([0, 0], [0, 0], [2, 1]), step=torch.tensor([[0, 1], [0, -1]]),
                    step_reward=torch.tensor([[1., 0.], [1., 0.]], dtype=D))
    check(step_reward(MEAN, batch, Tools()), [1 / 3, -2 / 3], [1 / 3, 0])


# -- identities ------------------------------------------------------------------------------------------------------


@st.composite
def stepped(draw: st.DrawFn) -> Rollouts:
    """Groups with any ids, of answers of 0 to 3 steps of 1 to 2 tokens, some tokens in no step."""
    ids = draw(st.lists(st.integers(-50, 50), min_size=1, max_size=3, unique=True))
    group = draw(st.permutations([g for g in ids for _ in range(draw(st.integers(1, 4)))]))
    rows = []
    for _ in group:
        steps = [[n] * draw(st.integers(1, 2)) for n in range(draw(st.integers(0, 3)))]
        rows.append([-1] * draw(st.integers(0 if steps else 1, 1))
                    + [t for step in steps for t in [*step, *[-1] * draw(st.integers(0, 1))]])
    width, most = max(map(len, rows)), 3
    count = [max(row) + 1 for row in rows]
    worth = [[draw(st.sampled_from([0., .25, 1., -1.])) if n < c else 0. for n in range(most)] for c in count]
    state = [[draw(st.integers(0, 2)) if n < c else -1 for n in range(most)] for c in count]
    return replace(make([0.0] * len(group), group, [len(row) for row in rows], width=width),
                   step=torch.tensor([row + [-1] * (width - len(row)) for row in rows]),
                   step_reward=torch.tensor(worth, dtype=D), step_state=torch.tensor(state))


@pytest.mark.parametrize("estimate", ESTIMATORS)
@given(batch=stepped(), random=st.randoms(use_true_random=False))
def test_permuting_the_rows_permutes_the_credit(estimate: Estimate, batch: Rollouts, random: Random) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    moved = estimate(MEAN, batch.rows(torch.tensor(order)), Tools())
    torch.testing.assert_close(moved, estimate(MEAN, batch, Tools())[order], rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ESTIMATORS)
@given(batch=stepped(), shift=st.integers(1, 1000))
def test_group_ids_are_names_and_nothing_more(estimate: Estimate, batch: Rollouts, shift: int) -> None:
    renamed = replace(batch, group=shift - 3 * batch.group)  # the order of the ids is turned around too
    torch.testing.assert_close(estimate(MEAN, renamed, Tools()), estimate(MEAN, batch, Tools()), rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ESTIMATORS)
@given(batch=stepped())
def test_padding_of_tokens_and_of_steps_changes_nothing(estimate: Estimate, batch: Rollouts) -> None:
    pad = torch.nn.functional.pad
    wider = {name: pad(getattr(batch, name), (0, 2)) for name in ("tokens", "mask", "logp", "ref_logp", "entropy")}
    padded = replace(batch, **wider, step=pad(batch.step, (0, 2), value=-1), step_reward=pad(batch.step_reward, (0, 2)),
                     step_state=pad(batch.step_state, (0, 2), value=-1))
    found = estimate(MEAN, padded, Tools())
    torch.testing.assert_close(found[:, :-2], estimate(MEAN, batch, Tools()), rtol=0, atol=1e-14)
    assert not bool(found[:, -2:].any())


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("method", [MEAN, OTHERS, NONE, BY_LENGTH], ids=lambda m: m.name)
@given(batch=stepped())
def test_a_loop_over_steps_gives_the_same(estimate: Estimate, method: Method, batch: Rollouts) -> None:
    torch.testing.assert_close(estimate(method, batch, Tools()), slow(estimate, method, batch), rtol=0, atol=1e-13)


def slow(estimate: Estimate, method: Method, batch: Rollouts) -> Tensor:
    """Each token's step, found by looking back; each step's value beside a list of those it is compared with."""
    assert batch.step is not None
    assert batch.step_reward is not None
    assert batch.step_state is not None
    rows = range(len(batch))
    worth = [batch.step_reward[i, : int(batch.step[i].max()) + 1].tolist() for i in rows]
    returns = [[sum(row[n:]) for n in range(len(row))] for row in worth]
    value = worth if estimate in (step_reward, step_return) else returns

    def key(i: int, n: int, kind: Estimate = estimate) -> tuple[int, ...]:
        more = {turn_return: (n,), state_return: (int(batch.step_state[i, n]),)}.get(kind, ())
        return (int(batch.group[i]), *more)

    def centred(i: int, n: int) -> float:
        for kind in (estimate, turn_return):
            mates = [(j, m) for j in rows for m in range(len(worth[j])) if key(j, m, kind) == key(i, n, kind)]
            if len(mates) > 1 or estimate is not state_return:
                break
        if method.baseline == "none":
            return value[i][n]
        if method.baseline == "leave_one_out":
            others = [value[j][m] for j, m in mates if (j, m) != (i, n)]
            return value[i][n] - sum(others) / len(others) if others else 0.0
        weight = [float(batch.lengths[j]) if method.baseline == "length_weighted_mean" else 1.0 for j, _ in mates]
        return value[i][n] - sum(w * value[j][m] for w, (j, m) in zip(weight, mates, strict=True)) / sum(weight)

    out = torch.zeros(batch.mask.shape, dtype=D)
    for i, t in batch.mask.nonzero().tolist():
        if worth[i]:
            n = max([0, *(s for s in batch.step[i, : t + 1].tolist())])
            to_go = range(n, len(worth[i])) if estimate is step_return else [n]
            out[i, t] = sum(centred(i, m) for m in to_go)
    return out


@given(batch=stepped())
def test_where_the_state_is_the_turn_state_return_is_turn_return(batch: Rollouts) -> None:
    assert batch.step_state is not None
    turn = torch.arange(3).expand_as(batch.step_state).where(batch.step_state >= 0, -1)
    found = state_return(MEAN, replace(batch, step_state=turn), Tools())
    torch.testing.assert_close(found, turn_return(MEAN, batch, Tools()), rtol=0, atol=0)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_batch_in_which_no_answer_got_to_a_step_has_no_credit_and_no_error(estimate: Estimate) -> None:
    batch = replace(make([1, 0], [0, 0], [2, 2]), step=torch.full((2, 2), -1), step_reward=torch.zeros(2, 0, dtype=D))
    for method in (MEAN, METHODS["grpo"]):
        assert not estimate(method, batch, Tools()).any()


@each("estimate", ESTIMATORS)
@each("left", ["nothing", "steps alone"])
def test_without_labels_the_error_names_the_credit_and_the_repair(estimate: Estimate, left: str) -> None:
    batch = make([1, 0], [0, 0], [2, 2])
    if left != "nothing":
        batch = replace(batch, step=torch.full((2, 2), -1))
    with pytest.raises(CreditscopeError, match=rf"credit '{estimate.__name__}' needs step labels.*such as arithmetic, "
                                               rf"or give step and step_reward in the file"):
        estimate(MEAN, batch, Tools())


def test_without_states_state_return_says_so() -> None:
    with pytest.raises(CreditscopeError, match="credit 'state_return' needs step_state but the rollouts have none"):
        state_return(MEAN, three_rows(), Tools())


def test_steps_that_go_back_are_refused() -> None:
    batch = replace(three_rows(), step=torch.tensor([[0, 1, 0, -1], [-1, 0, -1, -1], [-1, -1, -1, -1]]))
    with pytest.raises(CreditscopeError, match="needs steps in order: row 0, column 2 goes back to step 0"):
        step_return(MEAN, batch, Tools())
