"""A batch of given preference pairs in the place of sampled answers: each pair is a group of two, rewards 1 and 0."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from creditscope.batch.pairs import Pair, read_pairs
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.files.memory import enough_memory
from creditscope.lab.reward import encode_pairs
from creditscope.lab.rollout import Drawn
from creditscope.policy.loading import Policy
from creditscope.policy.logp import padded
from creditscope.policy.scoring import score_tokens
from creditscope.tasks import Problem


def pairs_of(file: str, step: int) -> list[Pair]:
    """The pairs of a file. A step that takes more than there are would learn from each of them several times."""
    pairs = read_pairs(file, "--pairs")
    if step > len(pairs):
        raise CreditscopeError(f"--prompts {step}: a step takes so many pairs, and {file} has {len(pairs)}; give "
                               f"--prompts {len(pairs)} or fewer, or more pairs")
    return pairs


def pair_stream(pairs: Sequence[Pair], seed: int) -> Iterator[Pair]:
    """The pairs without end; every pass shuffles all of them by the seed."""
    shuffled = random.Random(f"pairs/{seed}")
    while True:
        yield from shuffled.sample(list(pairs), len(pairs))


def check_pairs(policy: Policy, pairs: Sequence[Pair], file: str) -> None:
    """Refuse a pair that the policy cannot learn from before the first step: one pair would end the run that draws it.
    The tokens are not kept, since a file may have more of them than memory holds."""
    for pair in pairs:
        encode_pairs(policy, [pair], file)


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
