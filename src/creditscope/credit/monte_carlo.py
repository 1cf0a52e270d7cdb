"""Monte Carlo values at the ends of steps (VinePPO): credit of a step is the change of V over it."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.cuts import between, step_ends
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def monte_carlo(method: Method, rollouts: Rollouts, tools: Tools, *, samples: int = 4) -> Tensor:
    """A_it = V(end of t's step) − V(its start),  V = mean reward of `samples` fresh continuations."""
    return in_units(method, between(rollouts, step_ends(rollouts), tools, samples), rollouts)
