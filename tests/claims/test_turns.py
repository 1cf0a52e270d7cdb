"""The multi-turn bias, measured on sampled walks of the ladder, against its exact value."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from creditscope.claims.turns import bias_by_turn, rms
from creditscope.tasks.turns import Ladder


def sampled(game: Ladder, policy: torch.Tensor, starts: list[int], size: int, seed: int) -> dict[str, np.ndarray]:
    """Groups of walks as a record keeps them; a state's number tells its turn and its rung."""
    rng = np.random.default_rng(seed)
    state, reward, group = [], [], []
    for number, start in enumerate(starts):
        for _ in range(size):
            rung, moves = start, []
            for h in range(game.turns):
                moves.append(int(rng.random() < float(policy[h, rung, 1])))
                rung = game.move(rung, moves[-1])
            states, rewards = game.walk(start, tuple(moves))
            state.append([h * 100 + s for h, s in enumerate(states[:-1])])
            reward.append(rewards)
            group.append(number)
    return {"step_state": np.array(state), "step_reward": np.array(reward), "group": np.array(group)}


def exact_rms(game: Ladder, policy: torch.Tensor, starts: list[int], h: int) -> float:
    """√E[E[Bias_h | s_0, s_h]²] by enumeration of walks: an independent route, through Ladder.bias."""
    total = 0.0
    for start in starts:
        mean: dict[int, float] = {}
        chance: dict[int, float] = {}
        for moves in itertools.product((0, 1), repeat=game.turns):
            states = game.walk(start, moves)[0]
            p, at = float(policy[range(game.turns), states[:-1], moves].prod()), states[h]
            mean[at] = mean.get(at, 0.0) + p * float(game.bias(policy, start, moves)[h])
            chance[at] = chance.get(at, 0.0) + p
        total += sum(chance[s] * (mean[s] / chance[s]) ** 2 for s in mean) / len(starts)
    return total ** 0.5


@pytest.fixture
def game() -> Ladder:
    return Ladder(top=3, turns=3)


@pytest.fixture
def policy(game: Ladder) -> torch.Tensor:
    up = torch.rand(game.turns, game.top + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.stack([1 - up, up], dim=2)


def test_the_measured_bias_of_outcome_credit_is_the_enumerated_one_times_R_minus_1_over_R(game, policy) -> None:
    starts, size = [0, 1, 2, 3] * 60, 8
    found = bias_by_turn(sampled(game, policy, starts, size, seed=0))
    for h in range(1, game.turns):
        # 1,920 walks; the standard error of the mean square is about 3 %, of its root about 2 %.
        exact = exact_rms(game, policy, [0, 1, 2, 3], h) * (size - 1) / size
        assert found[h]["rms_outcome"] == pytest.approx(exact, rel=0.1)
        assert exact > 0.1


def test_at_the_first_turn_there_is_no_bias_at_all(game, policy) -> None:
    first = bias_by_turn(sampled(game, policy, [1, 1, 2, 2, 2], 4, seed=1))[0]
    assert abs(first["rms_outcome"]) < 1e-7  # √ of what rounding leaves of a sum of squares
    assert first["largest"] < 1e-12


def test_the_baseline_of_the_state_removes_the_bias_and_that_of_the_turn_a_part(game, policy) -> None:
    # In groups of 64 hardly anybody is alone in a state, where the turn's baseline would stand in.
    last = bias_by_turn(sampled(game, policy, [0, 1, 2, 3] * 15, 64, seed=2))[-1]
    assert abs(last["rms_state"]) < 0.1 * last["rms_turn"] < 0.1 * last["rms_outcome"]


def test_no_bias_exceeds_the_bound_of_the_paper(game, policy) -> None:
    for row in bias_by_turn(sampled(game, policy, [0, 1, 2, 3] * 5, 8, seed=3)):
        assert row["largest"] <= row["bound"]
        # r_max is the largest reward seen, here 1: h·1 + 2·3·1.
        assert row["bound"] == row["turn"] + 6


def test_noise_alone_is_no_bias() -> None:
    """Credit that is pure noise has mean square 0 on average, and one that is a constant c has c²."""
    rng = np.random.default_rng(0)
    place, group = np.zeros(40, dtype=np.int64), np.arange(40) // 4
    squares = [float(np.sign(x) * x * x) for x in (rms(rng.normal(size=40), place, group) for _ in range(400))]
    assert abs(np.mean(squares)) < 4 * np.std(squares) / 20
    assert rms(np.full(40, -0.5), place, group) == pytest.approx(0.5)


def test_the_mean_product_of_different_groups_by_hand() -> None:
    # One place, groups with sums 4 and 5 of 2 and 1 rollouts: (9² − 4² − 5²) / (3² − 2² − 1²) = 40/4.
    assert rms(np.array([1.0, 3.0, 5.0]), np.zeros(3, dtype=np.int64), np.array([0, 0, 1])) == pytest.approx(10**0.5)
    # Credits 1 and −1 of two groups in one place: (0 − 1 − 1) / (4 − 1 − 1) = −1, and so the sign.
    assert rms(np.array([1.0, -1.0]), np.zeros(2, dtype=np.int64), np.array([0, 1])) == -1.0


def test_a_place_that_one_group_met_says_nothing() -> None:
    assert rms(np.ones(4), np.zeros(4, dtype=np.int64), np.zeros(4)) is None


def test_rollouts_without_states_have_no_rows() -> None:
    assert bias_by_turn({"reward": np.ones(2)}) == []
    assert bias_by_turn({"step_state": np.full((2, 1), -1), "step_reward": np.zeros((2, 1)),
                         "group": np.zeros(2)}) == []


def test_an_answer_that_ends_early_counts_for_the_turns_it_took() -> None:
    arrays = {"step_state": np.array([[0, 1], [0, -1], [0, 1], [0, 1]]), "group": np.array([0, 0, 1, 1]),
              "step_reward": np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]])}
    first, second = bias_by_turn(arrays)
    assert (first["n"], second["n"]) == (4, 3)
    # G = 2, 0 | 1, 1: outcome credit 1, −1 | 0, 0. At turn 1: 1 | 0, 0 in one place: (1 − 1 − 0) / (9 − 1 − 4) = 0.
    assert second["rms_outcome"] == 0.0
