"""s, the ratio of the policy to the one that sampled, and the term of each token under its bound.

Everything works on `log_ratio` = log π − log π_old, (B, T), 0 where the mask is False.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from creditscope.methods.axes import Method
from creditscope.methods.bounds import BOUNDS, TRUSTS, exp_bounded


def ratio(method: Method, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The method's s, (B, T) or (B, 1). Not for ratio='none'."""
    return exp_bounded(LOG_RATIOS[method.ratio](log_ratio, mask))


def bounded(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """The objective of each token before weighting, by what carries its gradient.

        log π, no ratio   A·log π              log π   A·sg[φ(log s)]·log π
        the ratio         A·φ(log s)           tokens  A·exp(mean_t φ(log ρ_it))
    """
    if method.ratio == "none":
        return credit * logp
    bound = BOUNDS[method.bound]
    if bound.carrier == "tokens":
        return ratio(method, bound.term(method, log_ratio, credit), mask) * credit
    factor = bound.term(method, LOG_RATIOS[method.ratio](log_ratio, mask), credit)
    return factor.detach() * credit * logp if bound.carrier == "log_prob" else factor * credit


def trusted(method: Method, logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor | None:
    """Bool, broadcastable to (B, T): False where the trust region drops the policy term. None if nothing can drop."""
    keeps = TRUSTS[method.trust].keeps
    return None if keeps is None else keeps(method, logp.detach(), old, mask, credit)


# -- log s: (log_ratio, mask) -> (B, T) or (B, 1) -----------------------------------------------------------------


def _sequence_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log s_i = 1/L_i Σ_t log ρ_it."""
    return log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _sequence_token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log s_it = sg[log s_i] + log π_it − sg[log π_it]: the sequence's value, the token's gradient."""
    return _sequence_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio,  # log ρ_it
    "sequence_mean": _sequence_mean,
    "sequence_product": lambda log_ratio, mask: log_ratio.sum(dim=1, keepdim=True),  # log s_i = Σ_t log ρ_it
    "sequence_token": _sequence_token,
}
