"""Values at cuts: where an answer is cut, what is asked for, and how values become credit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.batch.groups import Groups
from creditscope.credit import find_estimator
from creditscope.credit.cuts import between, step_ends
from creditscope.credit.monte_carlo import monte_carlo
from creditscope.credit.spo_chain import spo_chain
from creditscope.credit.tools import Tools
from creditscope.objective.advantages import BASELINES
from makers import make, random_batches

D = torch.float64
PLAIN = METHODS["reinforce"]  # no scale, no baseline of its own


class Values(Tools):
    """V after n tokens of row i is `table[i][n]`; keeps what it was asked."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.asked: list[list[int]] = []
        self.samples = 0

    def values(self, cuts: Tensor, samples: int) -> Tensor:
        self.asked, self.samples = cuts.tolist(), samples
        return self.table.gather(1, cuts.clamp(min=0)).masked_fill(cuts < 0, torch.nan)


def where(*rows: str) -> Tensor:
    """`.|..`: True at the bars."""
    return torch.tensor([[c == "|" for c in row] for row in rows])


def check(found: Tensor, *rows: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(rows, dtype=D), rtol=0, atol=1e-15)


def test_two_rows_with_two_and_one_cuts_by_hand() -> None:
    # V(start) of a rollout is its sibling's reward: 0 for row 0, 1 for row 1.
    # Row 0: V = 0 → 0.3 before token 1 → 0.8 before token 3 → 1. Gains 0.3, 0.5, 0.2.
    # Row 1: V = 1 → 0.6 before token 2 → 0. Gains −0.4, −0.6. Its last column is padding.
    tools = Values(torch.tensor([[9., .3, 9., .8], [9., 9., .6, 9.]], dtype=D))
    batch = make([1, 0], [5, 5], [4, 3])
    found = between(batch, where(".|.|", "..|."), tools, 3).masked_fill(~batch.mask, 0.0)
    check(found, [.3, .5, .5, .2], [-.4, -.4, -.6, 0])
    assert tools.asked == [[1, 3], [2, -1]]
    assert tools.samples == 3


def test_without_a_cut_nothing_is_asked_and_credit_is_that_of_leave_one_out() -> None:
    batch = make([1, 0, .5], [0, 0, 0], [2, 2, 2])
    # Others of 1: ¼, of 0: ¾, of ½: ½.
    check(between(batch, where("..", "..", ".."), Tools(), 4), [.75, .75], [-.75, -.75], [0, 0])


def test_cuts_at_the_start_and_past_the_end_are_known_and_not_asked_for() -> None:
    # Only the cut before row 1's last token is left: V = 1 → 0.25 → 0.
    tools = Values(torch.tensor([[9., 9., 9.], [9., 9., .25]], dtype=D))
    batch = make([1, 0], [0, 0], [2, 3])
    found = between(batch, where("|.|", "|.|"), tools, 1).masked_fill(~batch.mask, 0.0)
    check(found, [1, 1, 0], [-.75, -.75, -.25])
    assert tools.asked == [[-1], [2]]


def test_a_cut_before_every_token_asks_for_one_value_less_than_there_are_tokens() -> None:
    tools = Values(torch.tensor([[9., .5, .25], [9., .5, .75]], dtype=D))
    check(between(make([0, 1], [0, 0], [3, 3]), where("|||", "|||"), tools, 1), [-.5, -.25, -.25], [.5, .25, .25])
    assert tools.asked == [[1, 2], [1, 2]]


def test_a_rollout_alone_in_its_group_asks_for_the_start_s_value_too() -> None:
    # Row 2 has no sibling: V(start) = 0.5 is asked for, the first segment lost 0.25 and the second won 0.75. The two
    # siblings take each other's reward: 0.25 − 0 and 1 − 0.25; 0.75 − 1 and 0 − 0.75.
    tools = Values(torch.tensor([[9., .25], [9., .75], [.5, .25]], dtype=D))
    found = between(make([1, 0, 1], [0, 0, 1], [2, 2, 2]), where(".|", ".|", ".|"), tools, 1)
    check(found, [.25, .75], [-.25, -.75], [-.25, .75])
    assert tools.asked == [[-1, 1], [-1, 1], [0, 1]]


def test_a_lone_rollout_without_a_cut_is_compared_with_the_start_alone() -> None:
    tools = Values(torch.tensor([[.25, 9.]], dtype=D))
    check(between(make([1], [0], [2]), where(".."), tools, 1), [.75, .75])


def test_a_row_without_steps_is_cut_at_its_line_breaks_whatever_the_others_have() -> None:
    batch = replace(make([1, 0], [0, 0], [3, 3]), step=torch.tensor([[0, 0, 1], [-1, -1, -1]]),
                    pieces=[["a\n", "b", "c"], ["a", "b\n", "c"]])
    assert step_ends(batch).tolist() == [[False, False, True], [False, False, True]]
    assert step_ends(batch.rows(torch.tensor([1]))).tolist() == [[False, False, True]]


@given(random_batches(), st.integers(0, 99))
def test_the_segments_sum_to_the_reward_minus_the_value_of_the_start(batch: Rollouts, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = tuple(batch.mask.shape)
    cut, table = torch.rand(shape, generator=draw) < 0.4, torch.rand(shape, generator=draw, dtype=D)
    found = between(batch, cut, Values(table), 2)
    start = BASELINES["leave_one_out"](batch.reward, Groups(batch.group), batch.reward)
    for i, length in enumerate(batch.lengths.tolist()):
        first = [0, *(t for t in range(1, length) if cut[i, t])]  # one token of each segment
        assert float(found[i, first].sum()) == pytest.approx(float(batch.reward[i] - start[i]), abs=1e-12)
        edges = [start[i], *(table[i, t] for t in first[1:]), batch.reward[i]]
        for n, (a, b) in enumerate(zip([*first], [*first[1:], length], strict=True)):
            assert found[i, a:b].tolist() == pytest.approx([float(edges[n + 1] - edges[n])] * (b - a), abs=1e-12)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_value_that_was_asked_for_and_is_not_finite_does_not_pass_for_zero(wrong: float) -> None:
    class Broken(Tools):
        def values(self, cuts: Tensor, samples: int) -> Tensor:
            return torch.full(cuts.shape, wrong, dtype=D)

    batch = replace(make([1, 0], [0, 0], [2, 2]), pieces=[["a\n", "b"], ["a\n", "b"]])
    with pytest.raises(CreditscopeError, match="credit 'monte_carlo' must be finite: row 0, column 0"):
        find_estimator("monte_carlo")(PLAIN, batch, Broken())


# -- where the steps end -------------------------------------------------------------------------------------------


def test_steps_are_cut_before_the_first_token_of_every_step_but_the_first() -> None:
    batch = replace(make([0] * 4, [0] * 4, [5, 5, 2, 3]), step=torch.tensor(
        [[0, 0, 1, -1, 2], [-1, 0, -1, 1, 1], [0, 0, -1, -1, -1], [-1, -1, -1, -1, -1]]))
    assert torch.equal(step_ends(batch), where("..|.|", "...|.", ".....", "....."))


def test_a_step_that_no_token_belongs_to_makes_no_cut_of_its_own() -> None:
    batch = replace(make([0], [0], [3]), step=torch.tensor([[0, 2, 2]]))
    assert torch.equal(step_ends(batch), where(".|."))


@pytest.mark.parametrize("step", [None, torch.full((2, 4), -1)])
def test_without_steps_lines_are_cut_after_their_break(step: Tensor | None) -> None:
    batch = replace(make([0, 0], [0, 0], [4, 3]), step=step, pieces=[["a", "\n", "b\n\n", "c"], ["x\ny", "z", "\n"]])
    assert torch.equal(step_ends(batch), where("..||", ".|.|"))  # the last is past the end, and `between` drops it


def test_neither_steps_nor_pieces_is_refused_with_the_way_out() -> None:
    with pytest.raises(CreditscopeError, match=r"'monte_carlo' cuts at the ends of steps.*or use spo_chain"):
        monte_carlo(PLAIN, make([1, 0], [0, 0], [2, 2]), Tools())


def test_monte_carlo_by_hand() -> None:
    # One line break in row 0: V = 0 → 0.75 → 1. Row 1 has none: −1 throughout.
    tools = Values(torch.tensor([[9., 9., .75], [9., 9., 9.]], dtype=D))
    batch = replace(make([1, 0], [0, 0], [3, 2]), pieces=[["a", "\n", "b"], ["a", "b"]])
    check(monte_carlo(PLAIN, batch, tools, samples=8), [.75, .75, .25], [-1, -1, 0])
    assert (tools.asked, tools.samples) == ([[2], [-1]], 8)


def test_monte_carlo_in_the_units_of_the_method() -> None:
    # The credit above: σ² = (0.75² + 0.75² + 0.25²)/3 + 1 over R − 1 = 1.
    tools = Values(torch.tensor([[9., 9., .75], [9., 9., 9.]], dtype=D))
    batch = replace(make([1, 0], [0, 0], [3, 2]), pieces=[["a", "\n", "b"], ["a", "b"]])
    s = (1.1875 / 3 + 1) ** .5
    check(monte_carlo(METHODS["grpo"], batch, tools), [.75 / s, .75 / s, .25 / s], [-1 / s, -1 / s, 0])


# -- at uncertain tokens ---------------------------------------------------------------------------------------------


def hesitating() -> Rollouts:
    """π = .5 where the policy was unsure, .95 where it was sure, row by row `u s u u s u` and `s u s`."""
    p = torch.tensor([[.5, .95, .5, .5, .95, .5], [.95, .5, .95, 1., 1., 1.]], dtype=D)
    return replace(make([1, 0], [0, 0], [6, 3]), logp=p.log())


def test_spo_chain_by_hand() -> None:
    # Row 0 hesitates at 0, 2, 3, 5; every second one is followed by a cut: after 2, and after 5, which is the end.
    # V = 0 → 0.4 before token 3 → 1. Row 1 hesitates once: no cut, −1 at that token alone.
    tools = Values(torch.tensor([[9., 9., 9., .4, 9., 9.], [9.] * 6], dtype=D))
    found = spo_chain(PLAIN, hesitating(), tools, samples=5, every=2)
    check(found, [.4, 0, .4, .6, 0, .6], [0, -1, 0, 0, 0, 0])
    assert (tools.asked, tools.samples) == ([[3], [-1]], 5)


def test_spo_chain_with_a_cut_after_each_hesitation() -> None:
    # Cuts before 1, 3, 4 in row 0 and before 2 in row 1, whose value 0.5 no hesitation follows.
    tools = Values(torch.tensor([[9., .2, 9., .4, .7, 9.], [9., 9., .5, 9., 9., 9.]], dtype=D))
    check(spo_chain(PLAIN, hesitating(), tools, every=1), [.2, 0, .2, .3, 0, .3], [0, -.5, 0, 0, 0, 0])
    assert tools.asked == [[1, 3, 4], [2, -1, -1]]


def test_the_probability_below_which_a_token_counts_is_an_option() -> None:
    # π < 0.99: every token of both rows counts, three to a segment: a cut before token 3 of row 0, none in row 1.
    tools = Values(torch.tensor([[9., 9., 9., .4, 9., 9.], [9.] * 6], dtype=D))
    check(spo_chain(PLAIN, hesitating(), tools, probability=0.99), [.4] * 3 + [.6] * 3, [-1, -1, -1, 0, 0, 0])
    # π < 0.5: none.
    assert not bool(spo_chain(PLAIN, hesitating(), Tools(), probability=0.5).any())


def test_a_hesitation_on_the_last_column_does_not_cut_the_first() -> None:
    batch = replace(make([1, 0], [0, 0], [2, 2]), logp=torch.tensor([[.95, .5], [.95, .5]], dtype=D).log())
    check(spo_chain(PLAIN, batch, Tools(), every=1), [0, 1], [0, -1])  # no cut inside: nothing is asked


def test_text_that_others_wrote_is_no_hesitation() -> None:
    batch = replace(hesitating(), mask=torch.tensor([[True, True, False, True, True, True], [True] * 3 + [False] * 3]))
    # Row 0 hesitates at 0, 3, 5: the second is followed by a cut before 4.
    tools = Values(torch.tensor([[9., 9., 9., 9., .4, 9.], [9.] * 6], dtype=D))
    check(spo_chain(PLAIN, batch, tools, every=2), [.4, 0, 0, .4, 0, .6], [0, -1, 0, 0, 0, 0])


@pytest.mark.parametrize(("spec", "says"), [
    ("monte_carlo,samples=0", "option samples of credit 'monte_carlo' must be a whole number in 1 .. 4096, got 0"),
    ("spo_chain,samples=-1", "option samples of credit 'spo_chain' must be .*, got -1"),
    ("spo_chain,every=0", "option every of credit 'spo_chain' must be a whole number of at least 1, got 0"),
    ("spo_chain,probability=0.0", "got 0.0"), ("spo_chain,probability=1.5", "in 0.001 .. 1, got 1.5"),
    ("spo_chain,probability=nan", "got nan")])
def test_options_that_cannot_work_are_refused(spec: str, says: str) -> None:
    batch = replace(hesitating(), pieces=[["\n"] * 6, ["a"] * 3])
    with pytest.raises(CreditscopeError, match=says):
        find_estimator(spec)(PLAIN, batch, Tools())


def test_without_a_sampler_it_says_what_it_needs() -> None:
    with pytest.raises(CreditscopeError, match="needs a policy to sample from and a verifier, and there is none here"):
        spo_chain(PLAIN, hesitating(), Tools())
