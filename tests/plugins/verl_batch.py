"""One mini-batch as verl deals it out: two ranks, two micro-batches each, a prompt that was cut, a dead one, padding.

Read by the processes that run verl's engine and by the tests that check it; needs neither verl nor creditscope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# rank -> micro-batch -> prompt ids. `b` lies on both ranks; `d` is unanimous; `pad…` is what verl appends.
DEALT = ((("a", "a", "a", "a"), ("b", "d", "d", "b")), (("c", "c", "c", "c"), ("b", "pad0", "b", "pad0")))
REWARDS = {"a": (1.0, 0.0, 0.0, 1.0), "b": (0.0, 0.0, 1.0, 0.0), "c": (1.0, 0.0, 0.0, 0.0), "d": (1.0, 1.0),
           "pad0": (0.0, 0.0)}
METHODS = ("dapo", "gspo", "grpo_even", "cppo", "kimi")
LIMIT = 8
LR = 0.5
VOCAB = 99


@dataclass(frozen=True)
class Row:
    """One rollout of the batch."""

    uid: str
    prompt: Tensor
    response: Tensor
    mask: Tensor
    """False on padding, and on a word that a tool wrote."""
    reward: float
    drift: Tensor
    """(T,) log π_old − log π at the start: up to ±0.4, so that clips bind from the first update on."""


def rows(rank: int) -> list[Row]:
    """The rows of a rank, micro-batch after micro-batch, the same in every process."""
    return [row for row, (owner, _) in zip(_all(), _places(), strict=True) if owner == rank]


def everyone() -> list[Row]:
    """The rows of all ranks, rank after rank."""
    return _all()


def _places() -> list[tuple[int, str]]:
    return [(rank, uid) for rank, parts in enumerate(DEALT) for part in parts for uid in part]


def _all() -> list[Row]:
    draw = torch.Generator().manual_seed(7)
    used: dict[str, int] = {}
    out = []
    for _, uid in _places():
        nth = used[uid] = used.get(uid, -1) + 1
        length = int(torch.randint(3, LIMIT + 1, (), generator=draw))
        response = torch.randint(3, VOCAB, (length,), generator=draw)
        prompt = torch.arange(5, 9) + "abcdp".index(uid[0])
        mask = torch.ones(length, dtype=torch.bool)
        if uid.startswith("pad"):
            mask[:] = False
        elif nth == 1:
            mask[1] = False
        drift = 0.4 * (2 * torch.rand(length, generator=draw, dtype=torch.float64) - 1)
        out.append(Row(uid, prompt, response, mask, REWARDS[uid][nth], drift))
    return out


def logp(model: Any, row: Row) -> Tensor:
    """(T,) log π of the response, alone in its batch."""
    ids = torch.cat([row.prompt, row.response])
    z: Tensor = model(input_ids=ids[None]).logits[0, len(row.prompt) - 1:-1].log_softmax(-1)
    return z.gather(1, row.response[:, None]).squeeze(1)


def padded(values: list[Tensor]) -> Tensor:
    """(B, LIMIT), zeros behind."""
    out = values[0].new_zeros(len(values), LIMIT)
    for i, value in enumerate(values):
        out[i, : len(value)] = value
    return out
