"""The optimal token baseline: one per position, weighted by the squared scores of each rollout up to there."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def optimal_token(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = r_i − B_t,  B_t = Σ_j r_j W_jt / Σ_j W_jt,  W_jt = Σ_{u ≤ t} (1 − 2π_ju + Σ_v π_ju(v)²).

    Only siblings with a token at t count, and one that is alone there has no baseline.
    """
    reward, groups = wide(rollouts.reward), Groups(rollouts.group)
    gathered = logit_norms(rollouts, "optimal_token").cumsum(dim=1).masked_fill(~rollouts.mask, 0.0)
    alive = groups.totals(rollouts.mask.to(reward.dtype))
    weight, worth = groups.totals(gathered), groups.totals(gathered * reward[:, None])
    # Where all scores are still 0 the ratio is 0/0: equal weights.
    plain = groups.totals(reward[:, None] * rollouts.mask) / alive.clamp(min=1)
    baseline = torch.where(weight > 0, worth / weight.masked_fill(weight <= 0, 1.0), plain)[groups.index]
    baseline = baseline.masked_fill(alive[groups.index] <= 1, 0.0)
    # In a unanimous group with siblings left r − B is rounding.
    agreed = groups.unanimous(reward)[:, None] & (alive[groups.index] > 1)
    return in_units(method, (reward[:, None] - baseline).masked_fill(agreed, 0.0), rollouts)


def logit_norms(rollouts: Rollouts, who: str) -> Tensor:
    """(B, T) 1 − 2π + Σπ² = ‖onehot − π‖² = ‖∂log π(y_t)/∂z_t‖²."""
    collision = wide(rollouts.require("collision", f"credit {who!r}"))
    return (1 - 2 * wide(rollouts.logp).exp() + collision).clamp(min=0.0).masked_fill(~rollouts.mask, 0.0)
