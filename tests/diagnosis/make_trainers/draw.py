"""Drawn batches, the same for every trainer: rewards that rise from 0.4 to 0.62, 40 tokens per answer, 16 groups of
four."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LOGS = Path(__file__).parents[1] / "logs"
SOURCE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
"""Where the trainer's source is."""
PROMPTS, ROLLOUTS, STEPS, LIMIT = 16, 4, 12, 64


@dataclass
class Batch:
    step: int
    reward: Tensor
    length: Tensor
    mask: Tensor
    old: Tensor
    new: Tensor
    advantage: Tensor
    """(B, T): (r − mean)/(std + 1e-6) of the group, on each token."""
    entropy: Tensor
    text: list[str]
    """Answers that were drawn for the first two groups of the first two steps."""

    @property
    def grad_norm(self) -> float:
        return float(self.advantage.abs().mean())


def batches(spread: float = 0.05, ratio_one: bool = False) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(0)
    rows = PROMPTS * ROLLOUTS
    for step in range(STEPS):
        length = (40 + 8 * torch.randn(rows, generator=draw)).round().clamp(1, LIMIT)
        mask = (torch.arange(int(length.max()))[None] < length[:, None]).float()
        reward = (torch.rand(rows, generator=draw) < 0.4 + 0.02 * step).float()
        groups = reward.view(PROMPTS, ROLLOUTS)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1) * mask
        old = -torch.rand(mask.shape, generator=draw)
        new = old + (0.0 if ratio_one else spread) * torch.randn(mask.shape, generator=draw)
        entropy = 0.5 + 0.1 * torch.rand(mask.shape, generator=draw)
        text = [f"{row % 7} + {row // 7 % 5} is {'right' if reward[row] else 'wrong'}, by step {step}"
                for row in range(2 * ROLLOUTS)] if step < 2 else []
        yield Batch(step + 1, reward, length, mask, old, new, advantage, entropy, text)


def home(name: str) -> Path:
    folder = LOGS / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
