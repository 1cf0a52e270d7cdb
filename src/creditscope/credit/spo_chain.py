"""Monte Carlo values at uncertain tokens (SPO-chain): cuts at tokens with π < ρ, credit on those alone."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.cuts import between, uncertain
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def spo_chain(method: Method, rollouts: Rollouts, tools: Tools, *, samples: int = 4, every: int = 3,
              probability: float = 0.9) -> Tensor:
    """A_it = (V(next cut) − V(cut)) · 1{π_it < ρ}, a cut after every `every`-th token with π < ρ.

    A segment holds `every` uncertain tokens, whatever its length: at π = 1 the value cannot change.
    """
    unsure = uncertain(rollouts, probability)
    count = unsure.cumsum(dim=1)
    # The cut is before the token after the every-th uncertain one.
    cut = (unsure & (count % every == 0)).roll(1, dims=1)
    cut[:, 0] = False
    credit = between(rollouts, cut, tools, samples)
    return in_units(method, credit.masked_fill(~unsure, 0.0), rollouts)
