"""R: the KL terms that live in the loss. KL in the reward is part of the advantage (`advantages.py`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.methods.bounds import exp_bounded
from creditscope.objective.ratios import ratio


def penalty(method: Method, logp: Tensor, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """(B, T) the KL estimate of each token, before aggregation and β."""
    estimate = kl_estimate(method, _apart(method, logp, log_ratio, rollouts), rollouts)
    return estimate * ratio(method, log_ratio, rollouts.mask) if method.kl_weight == "ratio" else estimate


def kl_estimate(method: Method, apart: Tensor, rollouts: Rollouts) -> Tensor:
    """k(log-ratio) of each token; of a sequence, k(Σ_t log-ratio) spread evenly, so that its tokens sum to it."""
    estimate = KL_ESTIMATORS[method.kl]
    if method.kl_level == "token":
        return estimate(apart)
    return estimate(apart.sum(dim=1, keepdim=True)) / rollouts.lengths[:, None].clamp(min=1)


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


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
