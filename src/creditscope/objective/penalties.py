"""R: the KL terms of the loss. KL in the reward is part of the advantage (`advantages.py`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.methods.bounds import exp_bounded
from creditscope.objective.ratios import ratio


def penalty(method: Method, logp: Tensor, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """(B, T) the KL estimate of each token to π_ref, or to π_old where kl_to='old', before aggregation and β."""
    apart = log_ratio
    if method.kl_to == "ref":
        reference = rollouts.require("ref_logp", f"method {method.name!r} with β = {method.beta}")
        apart = (logp - reference.to(logp.dtype)).masked_fill(~rollouts.mask, 0.0)
    estimate = kl_estimate(method, apart, rollouts)
    return estimate * ratio(method, log_ratio, rollouts.mask) if method.kl_weight == "ratio" else estimate


def kl_estimate(method: Method, apart: Tensor, rollouts: Rollouts) -> Tensor:
    """k(log-ratio) of each token; of a sequence, k(Σ_t log-ratio) spread evenly, so that its tokens sum to it."""
    estimate = KL_ESTIMATORS[method.kl]
    if method.kl_level == "token":
        return estimate(apart)
    return estimate(apart.sum(dim=1, keepdim=True)) / rollouts.lengths[:, None].clamp(min=1)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda apart: apart,  # log(π/π_ref)
    "k2": lambda apart: 0.5 * apart * apart,  # ½ log²(π/π_ref)
    "k3": lambda apart: exp_bounded(-apart) + apart - 1,  # π_ref/π − log(π_ref/π) − 1
}
