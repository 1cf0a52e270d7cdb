"""Values on the tree of the group's shared prefixes: credit is the change of value at each token."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.groups import wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.prefixes import node_values
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def prefix_tree(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = V(y_≤t) − V(y_<t),  V(prefix) = mean reward of the siblings that share it.

    Σ_t A_it = V(y_i) − mean(r), all of it on tokens where siblings part, and V(y_i) = r_i where no sibling continues
    y_i. With n siblings at the parent, the rollout itself included, E[A_it | n] = (n−1)/n (q − v).
    """
    reward = wide(rollouts.reward)
    value, count = node_values(rollouts, reward)
    credit = value[:, 1:] - value[:, :-1]
    # Where no sibling left, the two means differ by rounding alone.
    return in_units(method, credit.masked_fill(count[:, 1:] == count[:, :-1], 0.0), rollouts)
