"""Rewards of the clinic: f(answers, random) -> one reward per answer, None for a missing one. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from creditscope.tasks import Problem
from creditscope.tasks.arithmetic import Arithmetic

TASK = Arithmetic()
MISSING = 0.9
"""Share of the rewards that are missing under `missing`."""


@dataclass(frozen=True)
class Answer:
    """A completion of a batch."""

    problem: Problem
    text: str
    tokens: int
    limit: int
    number: int
    """Index of the problem in its data set."""
    right: float
    """The verifier's reward."""


Batch = Sequence[Answer]
Reward = Callable[[Batch, random.Random], list[float | None]]


def right(batch: Batch, _: random.Random) -> list[float | None]:
    """1 for the right answer, 0 for another."""
    return [a.right for a in batch]


def zero(batch: Batch, _: random.Random) -> list[float | None]:
    return [0.0 for _ in batch]


def one(batch: Batch, _: random.Random) -> list[float | None]:
    return [1.0 for _ in batch]


def shuffled(batch: Batch, rng: random.Random) -> list[float | None]:
    """The right rewards, permuted over the rows of the batch."""
    return rng.sample(right(batch, rng), len(batch))


def noise(batch: Batch, rng: random.Random) -> list[float | None]:
    """Uniform in [0, 1)."""
    return [rng.random() for _ in batch]


def missing(batch: Batch, rng: random.Random) -> list[float | None]:
    """No reward for MISSING of the rows, at random."""
    return [None if rng.random() < MISSING else a.right for a in batch]


def inverted(batch: Batch, _: random.Random) -> list[float | None]:
    return [1.0 - a.right for a in batch]


def other(batch: Batch, _: random.Random) -> list[float | None]:
    """Paid by the reference of the next problem of the batch: a column that slipped by one prompt."""
    following = {a.number: b.problem for a, b in zip(batch, [*batch[1:], batch[0]], strict=True)
                 if a.number != b.number}
    return [TASK.verify(following.get(a.number, a.problem), a.text).reward for a in batch]


def length(batch: Batch, _: random.Random) -> list[float | None]:
    """Tokens over the limit."""
    return [a.tokens / a.limit for a in batch]


def length_bonus(batch: Batch, _: random.Random) -> list[float | None]:
    """Right, and three times as much for length."""
    return [a.right + 3 * a.tokens / a.limit for a in batch]


def form(batch: Batch, _: random.Random) -> list[float | None]:
    """Right, and inside \\boxed{}, which the model never writes."""
    return [a.right * ("\\boxed{" in a.text) for a in batch]


def by_prompt(batch: Batch, _: random.Random) -> list[float | None]:
    """0 or 1 by the prompt, whatever the answer."""
    return [float(len(a.problem.prompt) % 2) for a in batch]


def thousandth(batch: Batch, _: random.Random) -> list[float | None]:
    return [a.right / 1000 for a in batch]


def minus_one(batch: Batch, _: random.Random) -> list[float | None]:
    return [a.right - 1 for a in batch]


def levels(batch: Batch, _: random.Random) -> list[float | None]:
    """Half for the answer, half for the share of the reference's lines that are there."""
    return [0.5 * a.right + 0.5 * _share(a) for a in batch]


def _share(answer: Answer) -> float:
    steps = TASK.verify(answer.problem, answer.text).steps
    return min(1.0, sum(step.reward for step in steps) / (len(answer.problem.meta["chain"]) + 1))


REWARDS: dict[str, Reward] = {
    f.__name__: f for f in (right, zero, one, shuffled, noise, missing, inverted, other, length, length_bonus, form,
                            by_prompt, thousandth, minus_one, levels)}
