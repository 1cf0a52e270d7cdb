"""Cuts of an answer for Monte Carlo values, and the credit of tokens between cuts."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.objective.advantages import BASELINES


def between(rollouts: Rollouts, cut: Tensor, tools: Tools, samples: int) -> Tensor:
    """(B, T) V(next cut) − V(cut before t) in reward units, from `cut` (B, T): True where an answer is cut before t.

    V at a cut is the mean reward of `samples` continuations. V(start) is the mean reward of the siblings, which are
    continuations of the prompt (a rollout without siblings gets new ones); V(end) is the reward. So Σ over segments =
    r_i − V(start).
    """
    reward, width = wide(rollouts.reward), rollouts.tokens.shape[1]
    column = torch.arange(width, device=cut.device)
    cut = cut & (column > 0) & (column < rollouts.extents[:, None])  # at the start and at the end values are known
    most = int(cut.sum(dim=1).max())
    segment = cut.cumsum(dim=1)  # the segment of each token: 0 before the first cut
    known = torch.zeros(len(rollouts), most + 2, dtype=reward.dtype, device=reward.device)
    groups = Groups(rollouts.group)
    alone = groups.size == 1
    known[:, 0] = BASELINES["leave_one_out"](reward, groups, reward)
    if most or bool(alone.any()):
        place = torch.where(cut, column, width).sort(dim=1).values[:, :most]  # each row's cuts, then width
        asked = place.where(place < width, -1)
        if bool(alone.any()):
            asked = torch.cat([torch.where(alone, 0, -1)[:, None], asked], dim=1)
        found = tools.values(asked, samples).to(known)
        known[:, 1:-1] = found[:, asked.shape[1] - most:].masked_fill(asked[:, asked.shape[1] - most:] < 0, 0.0)
        known[:, 0] = torch.where(alone, found[:, 0], known[:, 0])
    last = cut.sum(dim=1, keepdim=True) + 1
    known.scatter_(1, last, reward[:, None])
    gain = known[:, 1:] - known[:, :-1]
    return gain.gather(1, segment)


def step_ends(rollouts: Rollouts) -> Tensor:
    """(B, T) True before the first token of every step but the first; in rows without steps, after every line break."""
    out = torch.zeros_like(rollouts.mask)
    stepped = torch.zeros_like(rollouts.mask[:, 0])
    if rollouts.step is not None:
        seen = rollouts.step.cummax(dim=1).values
        out[:, 1:] = (seen[:, 1:] > seen[:, :-1]) & (seen[:, :-1] >= 0)
        stepped = seen[:, -1] >= 0
    if not rollouts.pieces:
        if bool(stepped.any()):
            return out
        raise CreditscopeError("credit 'monte_carlo' cuts at the ends of steps, but the rollouts have neither steps "
                               "nor pieces; give one of them, or use spo_chain, which cuts at uncertain tokens")
    for i in (~stepped).nonzero()[:, 0].tolist():
        for t, piece in enumerate(rollouts.pieces[i][: out.shape[1] - 1]):
            out[i, t + 1] = "\n" in piece
    return out


def uncertain(rollouts: Rollouts, probability: float) -> Tensor:
    """(B, T) True for chosen tokens with π < ρ."""
    return (wide(rollouts.logp).exp() < probability) & rollouts.mask
