"""Outcome credit shaped by entropy: larger where H is high and A > 0, and where H is low and A < 0."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.methods.axes import Method
from creditscope.objective.advantages import token_advantage

LEAST = 1e-3  # nats, so that 1/H is bounded


def entropy_shaping(method: Method, rollouts: Rollouts, tools: Tools, *, base: float = 0.5,
                    bonus: float = 0.5) -> Tensor:
    """A_it = A_i (α₁ + α₂ h_it / mean_j h_jt),  h = H where A_i > 0, 1/H where A_i < 0; α₁ `base`, α₂ `bonus`.

    j runs over the siblings with the same sign that have a token at t. With α₁ + α₂ = 1 the shaping moves credit
    between siblings and keeps its sum at every position where advantages of one sign are equal, as with rewards 0 / 1.
    """
    own = token_advantage(method, rollouts).expand_as(rollouts.mask)
    entropy = wide(rollouts.require("entropy", "credit 'entropy_shaping'")).to(own.dtype).clamp(min=LEAST)
    h = torch.where(own > 0, entropy, 1 / entropy)
    mean = _mean_by_sign(h, own, rollouts)
    return (own * (base + bonus * h / mean)).masked_fill(~rollouts.mask, 0.0)


def _mean_by_sign(h: Tensor, own: Tensor, rollouts: Rollouts) -> Tensor:
    """(B, T) mean of h over the siblings with A of the same sign that have a token at t; 1 where A is 0."""
    groups = Groups(rollouts.group)
    out = torch.ones_like(h)
    for sign in (own > 0, own < 0):
        here = sign & rollouts.mask
        total, count = groups.totals(h.masked_fill(~here, 0.0)), groups.totals(here.to(h.dtype))
        out = torch.where(here, (total / count.clamp(min=1))[groups.index], out)
    return out
