"""The constant baseline of least variance, from the norms of the rollouts' scores."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.groups import Groups, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def optimal_scalar(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = r_i − b*,  b* = Σ_j r_j ‖ψ_j‖² / Σ_j ‖ψ_j‖² over the group.

    b* minimises E‖(r − b) ψ‖². It is the group's mean when norms and rewards do not vary together.
    """
    return in_units(method, around(rollouts, tools.gram().diagonal().clamp(min=0.0))[:, None], rollouts)


def around(rollouts: Rollouts, square: Tensor) -> Tensor:
    """(B,) r_i − Σ_j r_j s_j / Σ_j s_j over the group, s_j ≥ 0 the squared norm of rollout j's score.

    Where all scores of a group are 0 there is no gradient, and the group's mean is taken.
    """
    reward, groups = wide(rollouts.reward), Groups(rollouts.group)
    square = square.to(reward)
    total = groups.sum(square)
    best = groups.sum(reward * square) / total.masked_fill(total <= 0, 1.0)
    centred = reward - best.where(total > 0, groups.mean(reward))
    return centred.masked_fill(groups.unanimous(reward), 0.0)
