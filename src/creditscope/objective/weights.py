"""α: which rollouts count, how much a token weighs, and what the sum is divided by.

    α_it = keep_i · λ_it · mask_it · a_i        a: the aggregate's factor, for example 1/(B·L_i)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.objective.advantages import mean_entropy


def kept(method: Method, rollouts: Rollouts, credit: Tensor) -> Tensor:
    """(B,) True for the rollouts that the method learns from."""
    return KEEPS[method.keep](method, rollouts, credit)


def alpha(method: Method, rollouts: Rollouts, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) α_it of the policy term. Rollouts and tokens that do not count have exactly 0."""
    weight = aggregate(method, rollouts, keep, dtype)
    return weight * TOKEN_WEIGHTS[method.token_weight](rollouts).to(dtype)


def aggregate(method: Method, rollouts: Rollouts, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T) the aggregate's factor on each kept token: Σ_it of it times x is the aggregated x."""
    mask = rollouts.mask & keep[:, None]
    counted = (keep & (rollouts.lengths > 0)) if method.denominator == "kept" else torch.ones_like(keep)
    width = method.max_tokens or rollouts.mask.shape[1]
    factor = AGGREGATES[method.aggregate](rollouts.lengths.to(dtype), counted, rollouts.group, width)
    return mask.to(dtype) * factor[:, None]


# -- which rollouts count: (method, rollouts, credit) -> (B,) bool -----------------------------------------------


def _keep_top_advantage(method: Method, rollouts: Rollouts, credit: Tensor) -> Tensor:
    """The ⌊share·R⌋ largest max_t |A_it| of each group, at least one; the earlier row wins a tie."""
    groups = Groups(rollouts.group)
    by_strength = _strength(rollouts, credit).argsort(descending=True, stable=True)
    order = by_strength[groups.index[by_strength].argsort(stable=True)]  # group by group, strongest first
    start = groups.counts.cumsum(0) - groups.counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - start[groups.index[order]]
    return rank < (groups.size * (method.keep_threshold or 0.0)).floor().clamp(min=1)


def _strength(rollouts: Rollouts, credit: Tensor) -> Tensor:
    """(B,) max_t |A_it|."""
    return (credit.abs() if credit.shape[1] == 1 else credit.abs().masked_fill(~rollouts.mask, 0.0)).amax(dim=1)


KEEPS: dict[str, Callable[[Method, Rollouts, Tensor], Tensor]] = {
    "all": lambda method, rollouts, credit: torch.ones_like(rollouts.mask[:, 0]),
    "live_groups": lambda method, rollouts, credit: ~Groups(rollouts.group).unanimous(rollouts.reward),
    # max_t |A_it| > γ
    "large_advantage": lambda method, rollouts, credit: _strength(rollouts, credit) > (method.keep_threshold or 0.0),
    "top_advantage": _keep_top_advantage,
    # ⟨H⟩_i ≤ threshold
    "low_entropy": lambda method, rollouts, credit: mean_entropy(method, rollouts) <= (method.keep_threshold or 0.0),
}


# -- how much a token weighs: rollouts -> λ, broadcastable to (B, T) ----------------------------------------------


def conflict_weight(rollouts: Rollouts) -> Tensor:
    """λ_it = 2 (A > 0) or 0 (A < 0) on conflict tokens, 1 elsewhere (arXiv:2508.03772).

    A token is in conflict when the same id stands at the same position in a rollout with A > 0 and in one with A < 0
    of the same group, and so do all tokens before it (leading run, positions from the start) or all tokens after it
    (trailing run, positions from the end). The sign is that of the group-relative reward: an entropy cost in the
    credit does not make a good answer bad.
    """
    groups = Groups(rollouts.group)
    sign = (rollouts.reward - groups.mean(rollouts.reward)).masked_fill(groups.unanimous(rollouts.reward), 0.0).sign()
    column = torch.arange(rollouts.mask.shape[1], device=sign.device)
    mirror = (rollouts.extents[:, None] - 1 - column).clamp(min=0)  # column t of an answer read from its end
    inside = column < rollouts.extents[:, None]
    leading = _contested_run(rollouts.tokens, inside, groups, sign)
    trailing = _contested_run(rollouts.tokens.gather(1, mirror), inside, groups, sign).gather(1, mirror)
    conflict = (leading | trailing) & inside & (sign != 0)[:, None]
    return torch.where(conflict, 1 + sign[:, None], torch.ones_like(sign)[:, None])


def _contested_run(tokens: Tensor, inside: Tensor, groups: Groups, sign: Tensor) -> Tensor:
    """(B, T) True from the first column on for as long as a good and a bad answer of the group agree on the token.

    One column at a time for all rows, up to the end of the longest run.
    """
    out = torch.zeros_like(inside)
    words = int(tokens.max()) + 1
    running = sign != 0
    for t in range(tokens.shape[1]):
        running = running & inside[:, t]
        if not bool(running.any()):
            break
        _, slot = torch.unique(groups.index * words + tokens[:, t], return_inverse=True)
        sides = torch.zeros(len(slot), 2, dtype=torch.bool, device=sign.device)
        sides[slot[inside[:, t] & (sign > 0)], 0] = True
        sides[slot[inside[:, t] & (sign < 0)], 1] = True
        running = running & sides.all(dim=1)[slot]
        out[:, t] = running
    return out


TOKEN_WEIGHTS: dict[str, Callable[[Rollouts], Tensor]] = {
    "none": lambda rollouts: torch.ones(1, 1, device=rollouts.reward.device),  # λ_it = 1
    "conflict": conflict_weight,
}


# -- what the sum is divided by: (L, counted rows, group ids, width) -> a, one factor per row ----------------------


def _rows(length: Tensor, counted: Tensor) -> Tensor:
    """B, the rows that count, in the precision of `length`."""
    return counted.sum().clamp(min=1).to(length.dtype)


def _group_token_mean(length: Tensor, counted: Tensor, group: Tensor, width: int) -> Tensor:
    """a_i = 1/(P·ΣL_g), g the row's group: one factor in a group, and every prompt counts the same."""
    groups = Groups(group)
    prompts = (groups.totals(counted.to(length.dtype)) > 0).sum().clamp(min=1)
    return 1 / (prompts * groups.sum(length * counted).clamp(min=1))


AGGREGATES: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    # a_i = 1/(B·L_i)
    "sequence_mean": lambda length, counted, group, width: 1 / (_rows(length, counted) * length.clamp(min=1)),
    # a_i = 1/B
    "sequence_sum": lambda length, counted, group, width: 1 / _rows(length, counted).expand_as(length),
    # a_i = 1/ΣL
    "token_mean": lambda length, counted, group, width: 1 / (length * counted).sum().clamp(min=1).expand_as(length),
    "group_token_mean": _group_token_mean,
    # a_i = 1/(B·L_max)
    "constant": lambda length, counted, group, width: 1 / _rows(length, counted).expand_as(length) / max(width, 1),
    # a_i = 1
    "token_sum": lambda length, counted, group, width: torch.ones_like(length),
}


def with_limit(method: Method, max_tokens: int) -> Method:
    """The row with the trainer's own limit as L_max, where its aggregate divides by L_max."""
    if method.aggregate != "constant" or method.max_tokens is not None:
        return method
    return method.replace(max_tokens=max_tokens)
