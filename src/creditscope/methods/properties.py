"""Properties of a row at ratio 1, of its policy term alone (no KL, no supervised term), by its axes. No torch.

`tests/objective/test_properties.py` measures each of them for every row on a probe batch: two mixed groups, unequal
lengths, a prefix that a whole group shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from creditscope.methods.axes import Method
from creditscope.methods.links import SCORES


@dataclass(frozen=True)
class Properties:
    """Each field is a statement about the row; None where the row takes its credit from outside."""

    zero_sum: bool | None
    """Σ_i A_i = 0 over the rollouts of a group that count."""
    uniform_credit: bool | None
    """At ratio 1 all tokens of a rollout have the same w."""
    prefix_cancels: bool | None
    """At ratio 1, Σ_i w_it = 0 on a prefix that the whole group shares."""
    scale_invariant: bool | None
    """w(φ·r) = w(r) for φ > 0."""
    shift_invariant: bool | None
    """w(r + c_group) = w(r) for one constant per group."""


def properties(m: Method) -> Properties:
    """The properties of a row.

    >>> from creditscope.methods.table import METHODS
    >>> properties(METHODS["dr_grpo"]).prefix_cancels, properties(METHODS["grpo"]).prefix_cancels
    (True, False)
    """
    if m.external:
        return Properties(None, None, None, None, None)
    # Σ A = 0 needs a baseline that is the group's own mean, up to a factor the group shares, and every rollout kept.
    own_mean = m.baseline in ("group_mean", "leave_one_out") and not m.entropy_cost
    every = m.keep in ("all", "live_groups") or m.keep_threshold == 0.0  # |A| > 0 drops no advantage
    sums_to_zero = own_mean and m.whiten == "none" and every
    # A shared prefix cancels when, besides, all rollouts of the group weigh the same: no 1/L_i, no λ. With the product
    # ratio the 1/L_i of a sequence mean cancels against the L_i tokens that carry the same s_i. Under a link the two
    # answers of a pair share φ'(u), so that their scores decide; answers with a link each share nothing.
    even = m.token_weight == "none" and (m.aggregate != "sequence_mean" or m.ratio == "sequence_product")
    if m.linked:
        even = m.link_over == "pair" and SCORES[m.score].even == m.score
    # Dividing by the std removes the reward's unit; an ε in it, or the Beta density, does not. A label has no unit.
    unitless = m.labels or (m.scale in ("group_std", "batch_std", "group_mean") and not m.std_eps) or (
        m.whiten != "none" and not m.whiten_eps)
    # The shift differs between groups, so a std over the batch depends on it.
    blind_to_shift = m.centred and m.scale not in ("group_mean", "beta_density", "nonzero_rewards", "batch_std")
    return Properties(zero_sum=sums_to_zero, uniform_credit=m.token_weight == "none",
                      prefix_cancels=sums_to_zero and even, scale_invariant=unitless and not m.entropy_cost,
                      shift_invariant=blind_to_shift)


def properties_of(m: Method) -> str:
    """The part of J that the properties are of. They say nothing of the terms that stand beside it.

    >>> from creditscope.methods.table import METHODS
    >>> properties_of(METHODS["grpo"]), properties_of(METHODS["dpo"])
    ('of the policy term alone, without KL, at ratio 1', 'of the preference term')
    >>> properties_of(METHODS["cpo"])
    'of the preference term alone, without the supervised term'
    """
    term = "the preference term" if m.linked else "the policy term"
    # A KL in the reward is part of A, and goes with β as well.
    beside = [*(["KL"] if m.kl != "none" else []), *(["the supervised term"] if m.sft else [])]
    alone = f" alone, without {' and '.join(beside)}" if beside else ""
    return f"of {term}{alone}" + ("" if m.linked else ", at ratio 1")
