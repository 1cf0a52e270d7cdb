"""What a row implies, found by evaluating it: nothing here is typed in by hand.

Each property is put to a probe batch in float64 with real-valued rewards, unequal lengths, unequal groups and a prefix
shared by every answer of a group, at ratio 1 and with no KL. A property that holds on the probe to rounding is
reported as true; `tests/objective/test_properties.py` reaches the same answers from the axes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.objective.advantages import token_advantage
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.objective.weights import kept

PREFIX = 2  # tokens that all answers of a group share


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
    """w(r + c_group) = w(r) for a constant of each group."""

    def to_dict(self) -> dict[str, bool | None]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def properties(method: Method) -> Properties:
    """The properties of a row.

    >>> from creditscope.methods.table import METHODS
    >>> properties(METHODS["dr_grpo"]).prefix_cancels, properties(METHODS["grpo"]).prefix_cancels
    (True, False)
    """
    if method.external:
        return Properties(None, None, None, None, None)
    bare = method.replace(beta=0.0)
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


def probe(reward: Tensor | None = None) -> Rollouts:
    """Two mixed groups, of 4 and 3 rollouts with 3 to 7 tokens each, that share a prefix of two tokens."""
    lengths = torch.tensor([3, 5, 4, 7, 6, 3, 5])
    mask = torch.arange(7) < lengths[:, None]
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 9, mask.shape, generator=draw)
    tokens[:, :PREFIX] = torch.tensor([1, 2])
    logp = -torch.rand(mask.shape, generator=draw, dtype=torch.float64)
    entropy = 0.5 * torch.rand(mask.shape, generator=draw, dtype=torch.float64)
    if reward is None:
        reward = torch.tensor([0.85, 0.1, 0.35, 0.0, 0.6, 0.25, 0.0], dtype=torch.float64)
    return Rollouts(tokens=tokens * mask, mask=mask, logp=logp * mask, reward=reward,
                    group=torch.tensor([0, 0, 0, 0, 1, 1, 1]), entropy=entropy * mask)


def _credit(method: Method, rollouts: Rollouts) -> Tensor:
    return effective_credit(lambda logp: surrogate(method, logp, rollouts), rollouts.logp)


def _group_sums(value: Tensor, rollouts: Rollouts) -> Tensor:
    return torch.stack([value[rollouts.group == g].sum(dim=0) for g in (0, 1)])


def _zero(value: Tensor, scale: Tensor) -> bool:
    """Zero up to rounding, beside quantities of the size of `scale`."""
    return bool(value.abs().max() <= 1e-9 * scale.abs().max())
