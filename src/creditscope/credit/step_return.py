"""Return to go of step rewards, each minus the baseline of the group's steps."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.steps import centred, labels, spread, to_go
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def step_return(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = Σ_{s ≥ s(t)} (r_is − b), b the method's baseline over all step rewards of the group."""
    step, reward, exists = labels(rollouts, "step_return")
    key = rollouts.group[:, None].expand_as(reward)
    return in_units(method, spread(to_go(centred(method, reward, key, exists, rollouts.lengths)), step), rollouts)
