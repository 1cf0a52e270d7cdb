"""`turns`: a multi-turn task with a reward per turn, small enough that every value v(s_h) is exact.

A ladder of rungs 0..top. In each of H turns the policy writes `up` or `down`, one word per line; a turn earns rung/top
for the rung it reaches. Turn h (from 0) starts in state s_h. A group baseline estimates v(s_0) only, so at turn h it is
biased by

    Bias_h = (G − v(s_0)) − (G_h − v(s_h)) = Σ_{h'<h} r_h' + v(s_h) − v(s_0)        G_h = Σ_{h'≥h} r_h', G = G_0
    |Bias_h| ≤ h·r_max + 2·V_max,  Bias_0 = 0

(arXiv:2606.29238, Eq. 22–27, counts turns from 1: its h − 1 is this h.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from creditscope.errors import CreditscopeError
from creditscope.tasks import Problem, Step, Verdict, check_split, spans

if TYPE_CHECKING:
    from torch import Tensor

MOVES = ("down", "up")


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The game, as a task and as an exact Markov decision process.

    >>> game = Ladder(top=2, turns=2)
    >>> game.walk(start=1, moves=(1, 0))
    ([1, 2, 1], [1.0, 0.5])
    """

    top: int = 4
    turns: int = 3
    name: str = "turns"
    max_tokens: int = 32
    files: ClassVar[tuple[Path, ...]] = ()

    def __post_init__(self) -> None:
        if self.top < 1 or self.turns < 1:
            raise CreditscopeError(f"turns needs top >= 1 and turns >= 1, got {self.top} and {self.turns}")
        if len(MOVES) ** self.turns > 1 << 16:
            raise CreditscopeError(f"turns is meant to be enumerated: at most 16 turns, got {self.turns}")

    # -- the task ----------------------------------------------------------------------------------------

    def problems(self, split: str, seed: int = 0) -> Iterator[Problem]:
        """`test`: every rung once. `train`: endless random rungs, each with a random walk as its solution, so that
        warm-up teaches the form of an answer and no preference."""
        if check_split(split) == "test":
            return (self._problem(f"test-{rung}", rung) for rung in range(self.top + 1))
        rng = random.Random(f"turns/{seed}")
        return (self._problem(f"train-{seed}-{i}", rng.randint(0, self.top), walk=True) for i in itertools.count())

    def verify(self, problem: Problem, text: str) -> Verdict:
        """The sum of the turns' rewards; one step per turn. A line that is no move earns 0 and moves nowhere."""
        rung, steps = int(problem.meta["start"]), list[Step]()
        for start, end, line in spans(text):
            word = line.strip()
            if word and len(steps) < self.turns:
                reward, state = 0.0, f"turn {len(steps)}, rung {rung}"
                if word in MOVES:
                    rung = self.move(rung, MOVES.index(word))
                    reward = rung / self.top
                steps.append(Step(start, end, reward, state))
        return Verdict(sum((step.reward for step in steps), 0.0), tuple(steps))

    def _problem(self, name: str, rung: int, walk: bool = False) -> Problem:
        prompt = (f"You stand on rung {rung} of a ladder with rungs 0 to {self.top}. Say up or down, one word a line, "
                  f"{self.turns} times. Each turn earns the rung you reach.\n")
        solution = "\n".join(random.Random(f"walk/{name}").choices(MOVES, k=self.turns))
        meta = {"start": rung} | ({"solution": solution} if walk else {})
        return Problem(name, prompt, "\n".join(["up"] * self.turns), meta)

    # -- the exact values --------------------------------------------------------------------------------

    def move(self, rung: int, action: int) -> int:
        """The rung reached; the ladder ends at 0 and top."""
        return min(self.top, rung + 1) if action else max(0, rung - 1)

    def walk(self, start: int, moves: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """States s_0..s_H and rewards r_0..r_{H−1} of a sequence of moves."""
        states = [start]
        for action in moves:
            states.append(self.move(states[-1], action))
        return states, [rung / self.top for rung in states[1:]]

    def walks(self) -> list[tuple[int, ...]]:
        """Every sequence of moves."""
        return list(itertools.product(range(len(MOVES)), repeat=self.turns))

    def values(self, policy: Tensor) -> Tensor:
        """(H+1, S) from a policy (H, S, 2) of probabilities: v_h(s) = Σ_a π_h(a|s) (r(s,a) + v_{h+1}(s')), v_H = 0."""
        import torch

        self._check(policy)
        after = torch.tensor([[self.move(s, a) for a in range(len(MOVES))] for s in range(self.top + 1)])
        rows = [policy.new_zeros(self.top + 1)]
        for h in reversed(range(self.turns)):
            rows.append((policy[h] * (after.to(policy) / self.top + rows[-1][after])).sum(dim=1))
        return torch.stack(rows[::-1])

    def bias(self, policy: Tensor, start: int, moves: tuple[int, ...]) -> Tensor:
        """(H,) Bias_h = Σ_{h'<h} r_h' + v(s_h) − v(s_0) along one walk."""
        import torch

        states, rewards = self.walk(start, moves)
        value = self.values(policy)
        at = torch.stack([value[h, states[h]] for h in range(self.turns)])
        return at.new_tensor([0.0, *itertools.accumulate(rewards[:-1])]) + at - at[0]

    def bound(self) -> list[float]:
        """h·r_max + 2·V_max for each turn, with r_max = 1 and V_max = H."""
        return [h + 2.0 * self.turns for h in range(self.turns)]

    def _check(self, policy: Tensor) -> None:
        shape = (self.turns, self.top + 1, len(MOVES))
        if tuple(policy.shape) != shape:
            raise CreditscopeError(f"the policy must have shape (turns, rungs, moves) = {shape}, "
                                   f"got {tuple(policy.shape)}")
