"""Shared prefixes weigh 1/n: a token that n siblings share is trained n times."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.groups import wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.prefixes import node_values
from creditscope.credit.tools import Tools
from creditscope.methods.axes import Method
from creditscope.objective.advantages import token_advantage


def prefix_share(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = A_i / n_it, n_it the siblings that share y_≤t, itself among them."""
    _, count = node_values(rollouts, wide(rollouts.reward))
    return token_advantage(method, rollouts) / count[:, 1:]
