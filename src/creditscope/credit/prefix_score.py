"""Differences of a learned reward between successive tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.gae import advantages
from creditscope.credit.steps import centred
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method


def prefix_score(method: Method, rollouts: Rollouts, tools: Tools, *, lam: float = 0.0) -> Tensor:
    """A_it = Σ_l λ^l d_i,t+l − b,  d_it = s(x, y_≤t) − s(x, y_<t), b the method's baseline over the group's tokens.

    s is the learned reward of a prefix. The differences telescope, Σ_t d_it = s(x, y) − s(x), so at λ = 1 every token
    has s(x, y) − s(x, y_<t): the reward with a baseline of the state.
    """
    sums = summed(_checked(tools.scores(), rollouts), rollouts.mask, lam)
    group = rollouts.group[:, None].expand_as(rollouts.mask)
    return in_units(method, centred(method, sums, group, rollouts.mask, rollouts.lengths), rollouts)


def summed(scores: Tensor, mask: Tensor, lam: float) -> Tensor:
    """(B, T) Σ_l λ^l d_t+l from scores (B, T+1): GAE with V = s before each chosen token and s(x, y) as the reward.

    Between two chosen tokens a difference includes what the text of others between them does to the score.

    >>> summed(torch.tensor([[0.0, 2.0, 3.0]]), torch.ones(1, 2).bool(), 0.0)
    tensor([[2., 1.]])
    """
    decay = torch.full_like(scores[:, 0], lam)
    return advantages(scores[:, -1], scores[:, :-1], mask, 1.0, decay)


def _checked(scores: Tensor, rollouts: Rollouts) -> Tensor:
    rows, width = rollouts.mask.shape
    if scores.shape != (rows, width + 1):
        raise CreditscopeError(f"a learned reward must score the prompt and every token, {(rows, width + 1)}, got "
                               f"{tuple(scores.shape)}")
    return wide(scores).detach()
