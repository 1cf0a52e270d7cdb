"""Accuracy on the test split, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import torch

from creditscope.lab.rollout import roll_out
from creditscope.policy.decoding import cache_numbers
from creditscope.policy.loading import Policy
from creditscope.runs import schema
from creditscope.runs.config import Config
from creditscope.tasks import Problem, Task

USUAL, MOST = 128, {"cuda": 512}
"""Problems sampled at a time, and on these devices: a GPU decodes 512 rows in 1.7 times the time of 128
(benchmarks/real_step.md)."""
KEYS = 2**32
"""Numbers in the keys and values of all rows, 8 GiB in half precision, above which fewer than `MOST` are sampled."""


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share: (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    >>> low, high = wilson(5, 10)
    >>> round(low, 4), round(high, 4)
    (0.2366, 0.7634)
    """
    p, zz = successes / n, z * z / n
    half = z * math.sqrt(p * (1 - p) / n + zz / (4 * n))
    return max(0.0, (p + zz / 2 - half) / (1 + zz)), min(1.0, (p + zz / 2 + half) / (1 + zz))


def evaluate(policy: Policy, task: Task, config: Config, max_tokens: int) -> dict[str, float]:
    """One sampled answer to each of the first test problems: share with reward above ½, and its 95 % interval.

    The random numbers are the same at every evaluation, of every run, so that differences are the policies'.
    """
    problems = list(islice(task.problems("test"), config.eval_problems))
    if not problems:
        return {}
    generator = torch.Generator(policy.device).manual_seed(config.eval_seed)
    right, reward, size = 0, 0.0, at_once(policy, problems, max_tokens)
    for start in range(0, len(problems), size):
        batch = roll_out(policy, task, problems[start:start + size], 1, max_tokens=max_tokens,
                         temperature=config.temperature, top_p=config.top_p, generator=generator)
        right += int((batch.rollouts.reward > 0.5).sum())
        reward += float(batch.rollouts.reward.sum())
    low, high = wilson(right, len(problems))
    return {schema.EVAL_ACCURACY: right / len(problems), schema.EVAL_LOW: low, schema.EVAL_HIGH: high,
            schema.EVAL_REWARD: reward / len(problems), schema.EVAL_PROBLEMS: len(problems)}


def at_once(policy: Policy, problems: Sequence[Problem], max_tokens: int) -> int:
    """Problems sampled together: as many as the device takes well, fewer where the model's keys and values are large.

    It depends on model, problems and limit, not on the memory that is free: other batches have other random numbers.
    """
    most, numbers = MOST.get(policy.device.type, USUAL), cache_numbers(policy.model)
    if numbers is None or most == USUAL:
        return USUAL
    tokens = max_tokens + max(len(policy.encode(problem.prompt)) for problem in problems)
    return max(USUAL, min(most, KEYS // (numbers * tokens)))
