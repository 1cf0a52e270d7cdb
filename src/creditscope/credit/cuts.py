"""Where an answer is cut for Monte Carlo values, and how values at cuts become credit for tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.advantages import BASELINES
from creditscope.credit.tools import Tools
from creditscope.credit.units import wide
from creditscope.errors import CreditscopeError
from creditscope.groups import Groups
from creditscope.rollouts import Rollouts


def between(rollouts: Rollouts, cut: Tensor, tools: Tools, samples: int, who: str) -> Tensor:
    """(B, T) V(next cut) − V(cut before t) in reward units, from `cut` (B, T): True where an answer is cut before t.

    V at a cut is the mean reward of `samples` continuations. The start's is the mean reward of the siblings, who are
    continuations of the prompt already; the end's is the reward itself. So Σ over segments = r_i − V(start).
    """
    if samples < 1:
        raise CreditscopeError(f"samples of credit {who!r} must be at least 1, got {samples}")
    reward, width = wide(rollouts.reward), rollouts.tokens.shape[1]
    column = torch.arange(width, device=cut.device)
    cut = cut & (column > 0) & (column < rollouts.extents[:, None])  # at the start and at the end values are known
    most = int(cut.sum(dim=1).max())
    segment = cut.cumsum(dim=1)  # the segment of each token: 0 before the first cut
    known = torch.zeros(len(rollouts), most + 2, dtype=reward.dtype, device=reward.device)
    if most:
        place = torch.where(cut, column, width).sort(dim=1).values[:, :most]  # each row's cuts, then width
        asked = place.where(place < width, -1)
        known[:, 1:-1] = tools.values(asked, samples).to(known).masked_fill(asked < 0, 0.0)
    known[:, 0] = BASELINES["leave_one_out"](reward, Groups(rollouts.group), reward)
    last = cut.sum(dim=1, keepdim=True) + 1
    known.scatter_(1, last, reward[:, None])
    gain = known[:, 1:] - known[:, :-1]
    return gain.gather(1, segment)


def step_ends(rollouts: Rollouts) -> Tensor:
    """(B, T) True before the first token of every step but the first; without steps, after every line break."""
    if rollouts.step is not None and bool((rollouts.step >= 0).any()):
        step = rollouts.step
        seen = step.cummax(dim=1).values
        return torch.nn.functional.pad((seen[:, 1:] > seen[:, :-1]) & (seen[:, :-1] >= 0), (1, 0))
    if not rollouts.pieces:
        raise CreditscopeError("credit 'monte_carlo' cuts at the ends of steps, but the rollouts have neither steps "
                               "nor pieces; give one of them, or use spo_chain, which cuts at uncertain tokens")
    out = torch.zeros_like(rollouts.mask)
    for i, row in enumerate(rollouts.pieces):
        for t, piece in enumerate(row[: out.shape[1] - 1]):
            out[i, t + 1] = "\n" in piece
    return out


def uncertain(rollouts: Rollouts, probability: float) -> Tensor:
    """(B, T) True for chosen tokens with π < ρ."""
    return (wide(rollouts.logp).exp() < probability) & rollouts.mask
