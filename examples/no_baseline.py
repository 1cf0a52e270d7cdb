"""A user's own credit estimator: no baseline, the control of docs/results.md.

    cd examples && creditscope lab compare credit no_baseline:no_baseline --scope off --out ../runs/no_baseline
"""

from creditscope.batch.groups import Groups, wide
from creditscope.credit.units import in_units


def no_baseline(method, rollouts, tools):
    """A_it = r_i where rewards differ in the group; 0 in unanimous groups, as under a centred method."""
    reward = wide(rollouts.reward)
    live = reward.masked_fill(Groups(rollouts.group).unanimous(reward), 0.0)
    return in_units(method, live[:, None], rollouts)
