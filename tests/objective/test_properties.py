"""The measured properties of every row, reached a second time from the axes alone."""

from __future__ import annotations

from creditscope import METHODS, Method
from creditscope.methods.dialects import DIALECTS
from creditscope.objective.properties import Properties, properties
from each import each


def from_the_axes(m: Method) -> Properties:
    """What theory says of a row with β = 0 at ratio 1, for mixed groups of unequal answers."""
    if m.baseline == "external":
        return Properties(None, None, None, None, None)
    # Σ A = 0 needs a baseline that is the group's own mean, up to a factor the group shares, and every rollout kept.
    own_mean = m.baseline in ("group_mean", "leave_one_out") and not m.entropy_cost
    sums_to_zero = own_mean and m.whiten == "none" and m.keep in ("all", "live_groups")
    # A shared prefix cancels when, besides, all rollouts of the group weigh the same: no 1/L_i, no λ. With the product
    # ratio the 1/L_i of a sequence mean cancels against the L_i tokens that carry the same s_i.
    even = m.token_weight == "none" and (m.aggregate != "sequence_mean" or m.ratio == "sequence_product")
    # The std takes the reward's unit away, an ε in it gives it back; the Beta density has no unit to take.
    unitless = (m.scale in ("group_std", "batch_std", "group_mean") and not m.std_eps) or \
        (m.whiten != "none" and not m.whiten_eps)
    # The shift is another one in each group, so a std over the batch sees it.
    blind_to_shift = m.centred and m.scale not in ("group_mean", "beta_density", "nonzero_rewards", "batch_std")
    return Properties(
        zero_sum=sums_to_zero,
        uniform_credit=m.token_weight == "none",
        prefix_cancels=sums_to_zero and even,
        scale_invariant=unitless and not m.entropy_cost,
        shift_invariant=blind_to_shift,
    )


@each("row", [*METHODS.values(), *DIALECTS.values()])
def test_the_measured_properties_are_those_that_follow_from_the_axes(row: Method) -> None:
    assert properties(row) == from_the_axes(row)


def test_the_prefix_bias_falls_where_p2_says() -> None:
    # Proposition 1 with the rows of shared notation: uniform weights cancel, 1/L_i and foreign baselines do not.
    cancel = {name for name, row in METHODS.items() if properties(row).prefix_cancels}
    assert {"dr_grpo", "dapo", "rloo"} <= cancel
    assert not {"grpo", "gspo", "gmpo", "sapo", "opo", "reinforce_pp", "cppo", "gtpo"} & cancel
