"""A credit estimator of one's own: no baseline at all, the control of docs/results.md.

    cd examples && creditscope compare credit no_baseline:no_baseline --scope off --out ../runs/no_baseline
"""

from creditscope.batch.groups import Groups
from creditscope.credit.units import in_units, wide


def no_baseline(method, rollouts, tools):
    """A_it = r_i where rewards differ in the group; unanimous groups stay silent, as under a centred method."""
    reward = wide(rollouts.reward)
    live = reward.masked_fill(Groups(rollouts.group).unanimous(reward), 0.0)
    return in_units(method, live[:, None], rollouts)
