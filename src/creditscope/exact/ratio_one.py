"""J at ratio 1, before the first update of a batch, in closed form (arXiv:2601.05002, Prop. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.methods.bounds import BOUNDS, by_sign
from creditscope.objective.advantages import log_drift, token_advantage
from creditscope.objective.penalties import kl_estimate
from creditscope.objective.surrogate import check_credit
from creditscope.objective.weights import aggregate, alpha, kept


def value_at_ratio_one(method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> Tensor:
    """J(π_old) = Σ_it α_it·h_it·A_it − β·R(π_old). At ratio 1 a trust region drops no token."""
    old = rollouts.logp.to(torch.promote_types(rollouts.logp.dtype, torch.float32)).masked_fill(~rollouts.mask, 0.0)
    own = token_advantage(method, rollouts) if credit is None else check_credit(credit, rollouts)
    own = own.detach().to(old.dtype)
    keep = kept(method, rollouts, own)
    value = (alpha(method, rollouts, keep, old.dtype) * height(method, old, own) * own).sum()
    if method.has_loss_kl and method.kl_to == "ref":  # the distance to the sampler is 0
        shares = aggregate(method, rollouts, keep, old.dtype)
        apart = log_drift(method, rollouts).to(old.dtype)
        value = value - method.beta * (shares * kl_estimate(method, apart, rollouts)).sum()
    return value


def height(method: Method, old: Tensor, credit: Tensor) -> Tensor:
    """h, the factor of A_it at ratio 1: φ(1), times log π where that carries the gradient; broadcastable to (B, T)."""
    h = by_sign(credit > 0, *BOUNDS[method.bound].height(method), credit)
    return h * old if method.carrier == "log_prob" else h
