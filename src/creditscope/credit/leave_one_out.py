"""The leave-one-out baseline in place of the method's own."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.groups import Groups, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method
from creditscope.objective.advantages import BASELINES


def leave_one_out(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = r_i − 1/(R−1) Σ_{j≠i} r_j: the baseline is independent of rollout i, so the gradient is unbiased."""
    reward, groups = wide(rollouts.reward), Groups(rollouts.group)
    centred = reward - BASELINES["leave_one_out"](reward, groups, rollouts.lengths.to(reward.dtype))
    return in_units(method, centred.masked_fill(groups.unanimous(reward), 0.0)[:, None], rollouts)
