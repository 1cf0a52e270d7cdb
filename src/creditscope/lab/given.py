"""A batch of given preference pairs in the place of sampled answers: each pair is a group of two, rewards 1 and 0."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from creditscope.batch.pairs import Pair
from creditscope.batch.rollouts import Rollouts
from creditscope.files.memory import enough_memory
from creditscope.lab.reward import encode_pairs
from creditscope.lab.rollout import Drawn
from creditscope.policy.loading import Policy
from creditscope.policy.logp import padded
from creditscope.policy.scoring import score_tokens
from creditscope.tasks import Problem


def pair_stream(pairs: Sequence[Pair], seed: int) -> Iterator[Pair]:
    """The pairs without end; every pass shuffles all of them by the seed."""
    shuffled = random.Random(f"pairs/{seed}")
    while True:
        yield from shuffled.sample(list(pairs), len(pairs))


@enough_memory("scoring the pairs", "lower --prompts")
def given(policy: Policy, pairs: Sequence[Pair], temperature: float) -> Drawn:
    """The pairs as rollouts, chosen before rejected; log π_old is that of the policy now. Nothing is sampled."""
    sides = [side for pair in encode_pairs(policy, pairs) for side in (pair.chosen, pair.rejected)]
    tokens, mask = padded([side.answer for side in sides], policy.device)
    prompts = [side.prompt for side in sides]
    scores = score_tokens(policy, prompts, tokens, mask, temperature)
    rows = [Problem(id=f"pair {i // 2}", prompt=pairs[i // 2].prompt, answer="") for i in range(len(sides))]
    rollouts = Rollouts(
        tokens=tokens, mask=mask, logp=scores.logp, entropy=scores.entropy, collision=scores.collision,
        reward=torch.tensor([1.0, 0.0], device=policy.device).repeat(len(pairs)),
        group=torch.arange(len(pairs), device=policy.device).repeat_interleave(2),
        prompt=[row.prompt for row in rows], prompt_ids=prompts,
        text=[text for pair in pairs for text in (pair.chosen, pair.rejected)],
        pieces=[policy.pieces(side.answer) for side in sides])
    return Drawn(rollouts, rows, torch.ones(len(rows), dtype=torch.bool, device=policy.device), [], 0)
