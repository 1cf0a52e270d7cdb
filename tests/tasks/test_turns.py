"""turns: values by recursion equal values by enumeration, and the multi-turn bias is what P1 says."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from creditscope.errors import CreditscopeError
from creditscope.tasks import Problem, find_task
from creditscope.tasks.turns import Ladder
from makers import walk_probability


def random_policy(game: Ladder, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(game.turns, game.top + 1, 2, generator=generator, dtype=torch.float64).softmax(dim=-1)


games = st.builds(Ladder, top=st.integers(1, 4), turns=st.integers(1, 4))


@settings(deadline=None, max_examples=30)
@given(game=games, seed=st.integers(0, 999))
def test_the_value_is_the_sum_over_all_walks(game: Ladder, seed: int) -> None:
    policy = random_policy(game, seed)
    for start in range(game.top + 1):
        chance = torch.stack([walk_probability(game, policy, start, m) for m in game.walks()])
        total = torch.tensor([sum(game.walk(start, m)[1]) for m in game.walks()], dtype=torch.float64)
        torch.testing.assert_close(chance.sum(), torch.ones((), dtype=torch.float64))
        torch.testing.assert_close((chance * total).sum(), game.values(policy)[0, start])


def test_values_by_hand() -> None:
    # top 1, two turns, always fair: a turn reaches rung 1 or 0 with 1/2 each, so it is worth 1/2 from anywhere.
    value = Ladder(top=1, turns=2).values(torch.full((2, 2, 2), 0.5))
    assert value.tolist() == [[1.0, 1.0], [0.5, 0.5], [0.0, 0.0]]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(game=games, seed=st.integers(0, 999))
def test_the_bias_is_the_gap_of_the_two_advantages_and_stays_in_its_bound(game: Ladder, seed: int) -> None:
    policy = random_policy(game, seed)
    value = game.values(policy)
    for start, moves in itertools.product(range(game.top + 1), game.walks()):
        states, rewards = game.walk(start, moves)
        bias = game.bias(policy, start, moves)
        for h in range(game.turns):
            group = sum(rewards) - value[0, start]
            true = sum(rewards[h:]) - value[h, states[h]]
            torch.testing.assert_close(bias[h], group - true)
            assert abs(float(bias[h])) <= game.bound()[h]
        assert bias[0] == 0


def test_one_turn_has_no_bias() -> None:
    game = Ladder(turns=1)
    assert game.bias(random_policy(game, 0), 2, (1,)).tolist() == [0.0]


def test_the_text_of_a_walk_earns_its_rewards_turn_by_turn() -> None:
    task = Ladder(top=4, turns=3)
    for problem in task.problems("test"):
        for moves in task.walks():
            text = "\n".join(("down", "up")[a] for a in moves)
            rewards = task.walk(problem.meta["start"], moves)[1]
            verdict = task.verify(problem, text)
            assert [s.reward for s in verdict.steps] == rewards
            assert verdict.reward == sum(rewards)


def test_a_line_that_is_no_move_earns_nothing_and_turns_past_the_last_do_not_count() -> None:
    problem = Problem("p", "", "", {"start": 2})
    verdict = Ladder(top=4, turns=3).verify(problem, "up\njump\n\nup\nup\n")
    assert [s.reward for s in verdict.steps] == [0.75, 0.0, 1.0]
    assert [(s.start, s.end) for s in verdict.steps] == [(0, 3), (3, 8), (9, 12)]


def test_train_is_reproducible_and_bad_sizes_are_refused() -> None:
    first, again = (list(itertools.islice(find_task("turns").problems("train", 5), 20)) for _ in range(2))
    assert first == again
    for options in ({"turns": 0}, {"top": 0}, {"turns": 17}):
        with pytest.raises(CreditscopeError):
            find_task("turns", **options)
    with pytest.raises(CreditscopeError, match=r"shape \(turns, rungs, moves\) = \(3, 5, 2\)"):
        Ladder().values(torch.ones(2, 2))
