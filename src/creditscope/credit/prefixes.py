"""The tree of a group's answers: the first tokens that siblings share."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts


def shared(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(B, R) each row's siblings, itself among them (−1 past the group's size), and (B, R) tokens it shares with each.

    Tokens are compared up to the last chosen one, whether the policy chose them or not.
    """
    groups = Groups(rollouts.group)
    size = int(groups.counts.max())
    order = groups.index.argsort(stable=True)
    first = groups.counts.cumsum(0) - groups.counts
    seat = torch.arange(size, device=order.device)
    table = order[(first[:, None] + seat).clamp(max=len(order) - 1)]  # (P, R) rows of each group
    table = table.where(seat < groups.counts[:, None], -1)
    sibling = table[groups.index]
    extent = rollouts.extents
    column = torch.arange(rollouts.tokens.shape[1], device=order.device)
    common = torch.empty_like(sibling)
    for j in range(size):  # one sibling at a time: (B, T) of memory, not (B, R, T)
        other = sibling[:, j].clamp(min=0)
        reach = torch.minimum(extent, extent[other])[:, None]
        differs = (rollouts.tokens != rollouts.tokens[other]) | (column >= reach)
        # The first difference ends the shared part; the added column of True is for rows without one.
        stop = torch.nn.functional.pad(differs, (0, 1), value=True)
        common[:, j] = stop.to(torch.uint8).argmax(dim=1)
    return sibling, common.masked_fill(sibling < 0, -1)


def node_values(rollouts: Rollouts, value: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T+1) mean `value` of, and number of, siblings that share the first t tokens, t = 0 … T.

    Past a row's own end it is alone with itself.
    """
    sibling, common = shared(rollouts)
    width = rollouts.tokens.shape[1]
    rows = torch.arange(len(rollouts), device=sibling.device)[:, None].expand_as(sibling)
    worth = value[sibling.clamp(min=0)].masked_fill(sibling < 0, 0.0)
    present = (sibling >= 0).to(value.dtype)
    # A sibling that shares c tokens counts at t = 0 … c: add it at c, then sum from the right.
    total, count = value.new_zeros(2, len(rollouts), width + 1)
    at = common.clamp(min=0)
    total.index_put_((rows, at), worth, accumulate=True)
    count.index_put_((rows, at), present, accumulate=True)
    total, count = total.flip(1).cumsum(1).flip(1), count.flip(1).cumsum(1).flip(1)
    alone = count < 1
    return torch.where(alone, value[:, None], total / count.clamp(min=1)), count.clamp(min=1)
