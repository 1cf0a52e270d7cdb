"""R: the KL terms that live in the loss. KL in the reward is part of the advantage (`advantages.py`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.objective.ratios import exp_bounded, ratio


def penalty(method: Method, logp: Tensor, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """(B, T) the KL estimate of each token, before aggregation and β."""
    apart = _apart(method, logp, log_ratio, rollouts)
    if method.kl_level == "sequence":
        # The sequence's value is spread evenly over its tokens, so that their sum is the value.
        length = rollouts.lengths[:, None].clamp(min=1)
        estimate = ESTIMATORS[method.kl](apart.sum(dim=1, keepdim=True)) / length
    else:
        estimate = ESTIMATORS[method.kl](apart)
    return estimate * ratio(method, log_ratio, rollouts.mask) if method.kl_weight == "ratio" else estimate


def _apart(method: Method, logp: Tensor, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """log(π/π_ref), or log(π/π_old) for a method that stays near its sampler; 0 where the mask is False."""
    if method.kl_to == "old":
        return log_ratio
    reference = rollouts.require("ref_logp", f"method {method.name!r} with β = {method.beta}")
    return (logp - reference.to(logp.dtype)).masked_fill(~rollouts.mask, 0.0)


def k1(apart: Tensor) -> Tensor:
    """log(π/π_ref)."""
    return apart


def k2(apart: Tensor) -> Tensor:
    """½ log²(π/π_ref)."""
    return 0.5 * apart * apart


def k3(apart: Tensor) -> Tensor:
    """π_ref/π − log(π_ref/π) − 1."""
    return exp_bounded(-apart) + apart - 1


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
