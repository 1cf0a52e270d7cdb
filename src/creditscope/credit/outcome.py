"""Outcome credit: what the method does by itself."""

from __future__ import annotations

from torch import Tensor

from creditscope.advantages import token_advantage
from creditscope.credit.tools import Tools
from creditscope.method import Method
from creditscope.rollouts import Rollouts


def outcome(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = A_i, every token of an answer alike: the method's own advantage, to the bit."""
    return token_advantage(method, rollouts).expand_as(rollouts.mask)
