"""Outcome credit: the method's own advantage on every token."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.methods.axes import Method
from creditscope.objective.advantages import token_advantage


def outcome(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = A_i, bit for bit."""
    return token_advantage(method, rollouts).expand_as(rollouts.mask)
