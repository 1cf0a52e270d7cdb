"""Step rewards minus the baseline of the group's steps."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.steps import centred, labels, spread
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def step_reward(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = r_i,s(t) − b, b the method's baseline over all step rewards of the group."""
    step, reward, exists = labels(rollouts, "step_reward")
    key = rollouts.group[:, None].expand_as(reward)
    return in_units(method, spread(centred(method, reward, key, exists, rollouts.lengths), step), rollouts)
