"""Outcome credit on the tokens with the highest entropy, none elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.methods.axes import Method
from creditscope.objective.advantages import token_advantage


def entropy_mask(method: Method, rollouts: Rollouts, tools: Tools, *, share: float = 0.2) -> Tensor:
    """A_it = A_i · 1{H_it ≥ the (1 − share) quantile of H over the batch's tokens}."""
    entropy = wide(rollouts.require("entropy", "credit 'entropy_mask'"))
    high = entropy >= threshold(entropy[rollouts.mask], share)
    return (token_advantage(method, rollouts) * high).masked_fill(~rollouts.mask, 0.0)


def threshold(values: Tensor, share: float) -> Tensor:
    """The (1 − share) quantile, interpolated; torch.quantile refuses more than 2²⁴ values.

    >>> threshold(torch.tensor([0., 1., 2., 3., 4.]), 0.5).item()
    2.0
    """
    place = (1 - share) * (len(values) - 1)
    low = int(place)
    ordered = values.sort().values
    above = ordered[min(low + 1, len(values) - 1)]
    return torch.lerp(ordered[low], above, torch.as_tensor(place - low, dtype=values.dtype, device=values.device))
