"""The properties of every row, measured on a probe batch: in float64 at ratio 1, without KL, to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope import METHODS, Method, Rollouts, effective_credit, surrogate
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.properties import Properties, properties
from creditscope.objective.advantages import token_advantage
from creditscope.objective.weights import kept
from each import each
from probes import PREFIX, probe


def measured(method: Method) -> Properties:
    if method.baseline == "external":
        return properties(method)
    bare = method.bare
    rollouts = probe()
    w = _credit(bare, rollouts)
    credit = token_advantage(bare, rollouts)
    counted = credit.squeeze(1) * kept(bare, rollouts, credit)
    shift = torch.where(rollouts.group == 0, 0.05, 0.125).to(rollouts.reward.dtype)
    shifted, scaled = probe(rollouts.reward + shift), probe(rollouts.reward * 0.5)
    return Properties(
        zero_sum=_zero(_group_sums(counted, rollouts), counted),
        uniform_credit=all(_zero(row[m] - row[m].mean(), w) for row, m in zip(w, rollouts.mask, strict=True)),
        prefix_cancels=_zero(_group_sums(w[:, :PREFIX], rollouts), w),
        scale_invariant=_zero(_credit(bare, scaled) - w, w),
        shift_invariant=_zero(_credit(bare, shifted) - w, w),
    )


def _credit(method: Method, rollouts: Rollouts) -> Tensor:
    return effective_credit(lambda logp: surrogate(method, logp, rollouts), rollouts.logp)


def _group_sums(value: Tensor, rollouts: Rollouts) -> Tensor:
    return torch.stack([value[rollouts.group == g].sum(dim=0) for g in (0, 1)])


def _zero(value: Tensor, scale: Tensor) -> bool:
    """Zero up to rounding, beside quantities of the size of `scale`."""
    return bool(value.abs().max() <= 1e-9 * scale.abs().max())


@each("row", [*METHODS.values(), *DIALECTS.values()])
def test_the_measured_properties_are_those_that_follow_from_the_axes(row: Method) -> None:
    assert measured(row) == properties(row)


def test_the_prefix_bias_falls_where_p2_says() -> None:
    # Proposition 1 with the rows of shared notation: uniform weights cancel, 1/L_i and foreign baselines do not.
    cancel = {name for name, row in METHODS.items() if properties(row).prefix_cancels}
    assert {"dr_grpo", "dapo", "rloo"} <= cancel
    assert not {"grpo", "gspo", "gmpo", "sapo", "opo", "reinforce_pp", "cppo", "gtpo"} & cancel
