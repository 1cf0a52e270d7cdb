"""A small batch whose numbers show what a row does: mixed groups, unequal lengths, a shared prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope import Rollouts

PREFIX = 2  # tokens that all answers of a group share


def probe(reward: Tensor | None = None) -> Rollouts:
    """Two mixed groups, of 4 and 3 rollouts with 3 to 7 tokens each, that share a prefix of two tokens."""
    lengths = torch.tensor([3, 5, 4, 7, 6, 3, 5])
    mask = torch.arange(7) < lengths[:, None]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 9, mask.shape, generator=draw)
    tokens[:, :PREFIX] = torch.tensor([1, 2])
    logp = -torch.rand(mask.shape, generator=draw, dtype=torch.float64)
    entropy = 0.5 * torch.rand(mask.shape, generator=draw, dtype=torch.float64)
    ref = -torch.rand(mask.shape, generator=draw, dtype=torch.float64)
    if reward is None:
        reward = torch.tensor([0.85, 0.1, 0.35, 0.0, 0.6, 0.25, 0.0], dtype=torch.float64)
    return Rollouts(tokens=tokens * mask, mask=mask, logp=logp * mask, reward=reward,
                    group=torch.tensor([0, 0, 0, 0, 1, 1, 1]), entropy=entropy * mask, ref_logp=ref * mask)
