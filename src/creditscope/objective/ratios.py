"""s: how far the policy has moved since it sampled, how that enters the objective, and what stops it.

Everything works on `log_ratio` = log π − log π_old, (B, T), 0 where the mask is False.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from creditscope.methods.axes import Method


def ratio(method: Method, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The method's s, (B, T) or (B, 1). Methods without a ratio have none to ask for."""
    return exp_bounded(LOG_RATIOS[method.ratio](log_ratio, mask))


def exp_bounded(x: Tensor) -> Tensor:
    """exp(x), held at e^80 in float32 and e^638 in float64, with slope 0 beyond.

    Past that exp overflows, and a token that the clip has stopped would get 0 · ∞ = NaN instead of 0.
    """
    return x.clamp(max=0.9 * math.log(torch.finfo(x.dtype).max)).exp()


def bounded(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """The objective of each token before weighting: A·log π, s·A, or s·A under the method's bound."""
    if method.ratio == "none":
        return credit * logp
    return BOUNDS[method.bound](method, logp, log_ratio, mask, credit)


def trusted(method: Method, logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor | None:
    """Bool, broadcastable to (B, T): False where the trust region drops the policy term. None if nothing can drop."""
    if method.trust == "none":
        return None
    return TRUSTS[method.trust](method, logp.detach(), old, mask, credit)


# -- log s: (log_ratio, mask) -> (B, T) or (B, 1) -----------------------------------------------------------------


def _token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log ρ_it."""
    return log_ratio


def _sequence_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log s_i = 1/L_i Σ_t log ρ_it."""
    return log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _sequence_product(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log s_i = Σ_t log ρ_it."""
    return log_ratio.sum(dim=1, keepdim=True)


def _sequence_token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log s_it = sg[log s_i] + log π_it − sg[log π_it]: the sequence's value, the token's gradient."""
    return _sequence_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _token,
    "sequence_mean": _sequence_mean,
    "sequence_product": _sequence_product,
    "sequence_token": _sequence_token,
}


# -- bounds: (method, logp, log_ratio, mask, credit) -> objective of each token --------------------------------------


def _free(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """s·A."""
    return ratio(method, log_ratio, mask) * credit


def _clip(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """min(s·A, clip(s, 1−ε_low, 1+ε_high)·A), and at least c·A for A < 0 under dual clip."""
    s = ratio(method, log_ratio, mask)
    objective = torch.minimum(s * credit, _clamped(method, s) * credit)
    if method.dual_clip is None:
        return objective
    return torch.where(credit < 0, torch.maximum(objective, method.dual_clip * credit), objective)


def _clip_inside(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """exp(mean_t d_it)·A, d = min(log ρ, clip(log ρ, −ε_low, ε_high)) for A ≥ 0 and max(...) for A < 0."""
    assert method.clip_low is not None
    assert method.clip_high is not None
    clipped = log_ratio.clamp(-method.clip_low, method.clip_high)
    pessimistic = torch.where(credit >= 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    return exp_bounded(_sequence_mean(pessimistic, mask)) * credit


def _stop_gradient(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """sg[clip(s, 1−ε_low, 1+ε_high)]·A·log π."""
    return _clamped(method, ratio(method, log_ratio, mask)).detach() * credit * logp


def _gate(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """A·4/τ·sigmoid(τ(s − 1)), τ = τ₊ for A > 0 and τ₋ else; its slope at s = 1 is A."""
    assert method.gate_pos is not None
    assert method.gate_neg is not None
    tau = _either(credit > 0, method.gate_pos, method.gate_neg, credit)
    return credit * torch.sigmoid(tau * (ratio(method, log_ratio, mask) - 1)) * 4 / tau


def _gamma(method: Method, logp: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """sg[φ]·A·log π, log φ = λ + k·log s − λ·s with s the sequence's product ratio; φ(1) = 1."""
    assert method.gamma_pos is not None
    assert method.gamma_neg is not None
    (k_pos, lam_pos), (k_neg, lam_neg) = method.gamma_pos, method.gamma_neg
    log_s = _sequence_product(log_ratio, mask).detach()
    k = _either(credit >= 0, k_pos, k_neg, credit)
    lam = _either(credit >= 0, lam_pos, lam_neg, credit)
    return torch.exp(lam + k * log_s - lam * torch.exp(log_s)) * credit * logp


def _clamped(method: Method, s: Tensor) -> Tensor:
    """clip(s, 1−ε_low, 1+ε_high), a side without ε being open."""
    low = None if method.clip_low is None else 1 - method.clip_low
    high = None if method.clip_high is None else 1 + method.clip_high
    return s if low is None and high is None else s.clamp(low, high)


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers, in the precision of `like`: torch.where on bare floats would round them to float32."""
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


BOUNDS: dict[str, Callable[[Method, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "none": _free,
    "clip": _clip,
    "clip_inside": _clip_inside,
    "stop_gradient": _stop_gradient,
    "gate": _gate,
    "gamma": _gamma,
}


# -- trust regions: (method, logp, old, mask, credit) -> bool, broadcastable to (B, T) -------------------------------


def _off_policy_sequence(method: Method, logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """Keep where A ≥ 0 or 1/L_i Σ_t log(π_old/π)_it ≤ δ."""
    assert method.trust_high is not None
    drift = (old - logp).masked_fill(~mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (credit >= 0) | (drift <= method.trust_high)


def _binary_tv(method: Method, logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """Keep where π − π_old ≤ δ_high for A > 0, and π − π_old ≥ −δ_low else."""
    assert method.trust_low is not None
    assert method.trust_high is not None
    moved = logp.exp() - old.exp()
    return torch.where(credit > 0, moved <= method.trust_high, moved >= -method.trust_low)


def _binary_kl(method: Method, logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """Keep where KL(Bernoulli(π_old) ‖ Bernoulli(π)) ≤ δ, or the token moved against the sign of A."""
    assert method.trust_low is not None
    assert method.trust_high is not None
    p, q = old.exp(), logp.exp()
    tiny = 1e-8  # both probabilities may round to 1
    kl = p * (old - logp) + (1 - p) * torch.log((1 - p + tiny) / (1 - q + tiny))
    return torch.where(credit > 0, (kl <= method.trust_high) | (q <= p), (kl <= method.trust_low) | (q >= p))


TRUSTS: dict[str, Callable[[Method, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "off_policy_sequence": _off_policy_sequence,
    "binary_tv": _binary_tv,
    "binary_kl": _binary_kl,
}
