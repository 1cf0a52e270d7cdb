"""J at ratio 1, before the first update of a batch, in closed form (arXiv:2601.05002, Prop. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.methods.bounds import BOUNDS, by_sign
from creditscope.methods.links import LINKS
from creditscope.objective.advantages import log_drift, token_advantage
from creditscope.objective.links import margins
from creditscope.objective.penalties import kl_estimate
from creditscope.objective.surrogate import check_credit
from creditscope.objective.weights import aggregate, alpha, kept


def value_at_ratio_one(method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> Tensor:
    """J(π_old) = Σ_it α_it·h_it·A_it − β·R(π_old). At ratio 1 a trust region drops no token."""
    old = rollouts.logp.to(torch.promote_types(rollouts.logp.dtype, torch.float32)).masked_fill(~rollouts.mask, 0.0)
    own = token_advantage(method, rollouts) if credit is None else check_credit(credit, rollouts)
    own = own.detach().to(old.dtype)
    keep = kept(method, rollouts, own)
    if method.linked:
        return _preferred(method, old, rollouts, own, keep)
    value = (alpha(method, rollouts, keep, old.dtype) * height(method, old, own) * own).sum()
    if method.has_loss_kl and method.kl_to == "ref":  # the distance to the sampler is 0
        shares = aggregate(method, rollouts, keep, old.dtype)
        apart = log_drift(method, rollouts).to(old.dtype)
        value = value - method.beta * (shares * kl_estimate(method, apart, rollouts)).sum()
    return value


def _preferred(method: Method, old: Tensor, rollouts: Rollouts, credit: Tensor, keep: Tensor) -> Tensor:
    """J of a preference method, pair by pair or answer by answer: λ/P Σ_g φ(u_g) + sft · mean log π(chosen)."""
    u = margins(method, old, rollouts, credit).squeeze(1)
    rows = [i for i in range(len(rollouts)) if keep[i] and rollouts.lengths[i] > 0]
    if method.link_over == "pair":
        rows = list({int(rollouts.group[i]): i for i in rows}.values())  # one row of each pair
    count = len(rows) if method.link_over == "pair" else len(rollouts)
    value = method.link_weight * LINKS[method.link].value(method, u[rows]).sum() / max(1, count)
    good = [old[i][m & (a > 0)] for i, (m, a) in enumerate(zip(rollouts.mask, credit, strict=True))]
    means = [x.mean() for x in good if len(x)] if method.sft_mean == "answers" else list(torch.cat(good))
    return value + method.sft * torch.stack(means).mean() if method.sft and means else value


def height(method: Method, old: Tensor, credit: Tensor) -> Tensor:
    """h, the factor of A_it at ratio 1: φ(1), times log π where that carries the gradient; broadcastable to (B, T)."""
    h = by_sign(credit > 0, *BOUNDS[method.bound].height(method), credit)
    return h * old if method.carrier == "log_prob" else h
