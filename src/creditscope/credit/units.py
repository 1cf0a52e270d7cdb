"""From reward units to the method's: a row's scale, whitening and costs on credit that differs by token.

Outcome credit stays the same: for r_i − b_i the result is the method's own A_i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, binary_unit, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.advantages import SCALES, log_drift, mean_entropy, standardised


def in_units(method: Method, credit: Tensor, rollouts: Rollouts) -> Tensor:
    """(B, T) credit in reward units → KL to go subtracted → scaled → whitened → entropy cost subtracted.

    With KL in the reward credit_it loses β Σ_{t' ≥ t} log(π_old/π_ref)_it'. An empty answer has no token, but its
    reward is part of the group's std: it counts with its column 0.
    """
    counted = rollouts.mask.clone()
    counted[:, 0] |= rollouts.lengths == 0
    credit = wide(credit).expand_as(rollouts.mask).masked_fill(~counted, 0.0)
    if method.has_reward_kl:
        credit = credit - method.beta * log_drift(method, rollouts).flip(1).cumsum(1).flip(1)
        credit = credit.masked_fill(~counted, 0.0)  # the sum to go is not 0 where the mask is False
    credit = _scaled(method, credit, rollouts)
    if method.whiten != "none":
        weight = rollouts.mask.to(credit.dtype)
        if method.whiten == "rollouts":
            weight = counted.to(credit.dtype) / rollouts.lengths.clamp(min=1)[:, None]
        credit = standardised(credit, weight, method.whiten_eps, method.std)
    if method.entropy_cost:
        credit = credit - method.entropy_cost * mean_entropy(method, rollouts)[:, None]
    return credit.masked_fill(~rollouts.mask, 0.0)


def _scaled(method: Method, credit: Tensor, rollouts: Rollouts) -> Tensor:
    """credit · factor_i. A group's std is that of the credit; every other factor is made of the rewards alone."""
    groups, reward = Groups(rollouts.group), wide(rollouts.reward).to(credit.dtype)
    if method.labels:
        raise CreditscopeError(f"method {method.name!r} labels its answers +1 and −1, and credit in rewards has no "
                               f"place in a label; take the method's own advantage, or give credit to surrogate(...)")
    if method.scale == "group_std":
        return _by_group_rms(method, credit, rollouts, groups)
    factor = SCALES[method.scale](torch.ones_like(reward), reward, groups, method)
    return credit * factor.masked_fill(~torch.isfinite(factor), 0.0)[:, None]


def _by_group_rms(method: Method, credit: Tensor, rollouts: Rollouts, groups: Groups) -> Tensor:
    """credit / (σ + ε),  σ² = 1/(R − ddof) Σ_i 1/L_i Σ_t credit²_it: for r_i − mean this is the std of the rewards.

    The std of the rewards themselves would be 0 in a unanimous group, where steps and prefixes still tell tokens apart.
    """
    lengths = rollouts.lengths.clamp(min=1).to(credit.dtype)
    unit = binary_unit(groups.largest(credit.abs().amax(dim=1)))
    square = ((credit / unit[:, None]) ** 2).sum(dim=1) / lengths
    ddof = 1 if method.std == "sample" else 0
    sigma = (groups.sum(square) / (groups.size - ddof).clamp(min=1)).sqrt() * unit
    # A credit of 0 up to rounding must not be scaled up to 1.
    live = sigma > 16 * torch.finfo(credit.dtype).eps * _largest(rollouts, groups).to(credit.dtype)
    return torch.where(live[:, None], credit / (sigma + method.std_eps).masked_fill(~live, 1.0)[:, None],
                       torch.zeros_like(credit))


def _largest(rollouts: Rollouts, groups: Groups) -> Tensor:
    """(B,) the largest |reward|, of answers or steps, in the row's group: what credit is rounded relative to."""
    size = wide(rollouts.reward).abs()
    if rollouts.step_reward is not None and rollouts.step_reward.shape[1]:
        size = torch.maximum(size, wide(rollouts.step_reward).abs().amax(dim=1).to(size.dtype))
    return groups.largest(size)
