"""The batches on which our rows and the libraries' own code are compared. Imports torch alone: verl's environment
reads this file too.

Each batch is made to act on every branch: both clip sides, dual clip, trust masks, padding, unequal lengths, a
unanimous group, and in `ragged` unequal groups, a group of one, an empty completion and text that others wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def batches() -> dict[str, Batch]:
    """name -> tokens, mask, old, logp, ref, reward, group, entropy, value, collision; float64, B rows of T tokens.

    `even` batches have groups of 4 and can be fed to TRL; `ragged` cannot.
    """
    even = torch.arange(4).repeat_interleave(4)
    binary = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1], dtype=torch.float64)
    graded = torch.tensor([.9, .1, .4, .6, .2, .0, .3, .8, .5, .5, .5, .5, 1., .7, .2, .9], dtype=torch.float64)
    even_lengths = [9, 4, 7, 2, 9, 5, 1, 8, 6, 6, 3, 9, 2, 9, 7, 5]
    ragged = torch.tensor([4, 4, 4, 4, 4, 0, 0, 0, 9, 9, 2, 7, 7, 7])
    ragged_reward = torch.tensor([1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0], dtype=torch.float64)
    ragged_lengths = [9, 3, 6, 0, 8, 5, 9, 2, 4, 7, 6, 1, 9, 8]
    return {
        "on_policy": _batch(0, even, binary, even_lengths, move=0.0),
        "off_policy": _batch(1, even, binary, even_lengths, move=0.9),
        "graded": _batch(2, even, graded, even_lengths, move=0.5),
        "near": _batch(3, even, binary, even_lengths, move=1e-3),  # GSPO's bounds are 3e-4 and 4e-4
        "ragged": _batch(4, ragged, ragged_reward, ragged_lengths, move=0.9, holes=True),
    }


def _batch(seed: int, group: Tensor, reward: Tensor, lengths: list[int], move: float, holes: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    if holes:  # text that a tool wrote in the middle of an answer
        mask[0, 2:4] = False
        mask[12, 5] = False

    def normal() -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    old = -(normal().abs() + 0.05)
    logp = (old + move * normal()).clamp(max=-1e-3) if move else old.clone()
    if move > 0.5:
        logp[1, 0] = old[1, 0] = -2.0
        logp[1, 0] += 1.5  # ratio 4.5 with a negative advantage: beyond the dual clip
    ref = (old + 0.3 * normal()).clamp(max=-1e-3)
    tokens = torch.randint(1, 6, shape, generator=draw) * mask
    blank = {"old": old, "logp": logp, "ref": ref, "entropy": normal().abs(), "value": normal()}
    # Σπ² lies between π² and π² + (1 − π)². Drawn last, so that what was drawn before stays as it was.
    chance = old.exp()
    blank["collision"] = chance**2 + torch.rand(shape, generator=draw, dtype=torch.float64) * (1 - chance) ** 2
    return {"tokens": tokens, "mask": mask, "reward": reward, "group": group} | {
        name: value.masked_fill(~mask, 0.0) for name, value in blank.items()}
