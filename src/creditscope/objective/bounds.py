"""Where a token's bound lies: the log-ratios between which it is free, and how far past them it stands.

A bound or a trust region leaves a token alone while low ≤ x ≤ high, with x a log-ratio: log s of the method's own
ratio, or log ρ_it, or its mean over the sequence. Past an edge the token's own term is stopped, halved or capped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from creditscope.methods.axes import STOPS, Method
from creditscope.objective.ratios import LOG_RATIOS, TRUSTS


@dataclass(frozen=True)
class Edge:
    """The free interval of every token under one bound or trust region, (B, T) each, ±∞ where open."""

    of: str
    """The log-ratio that it bounds, a name in `LOG_RATIOS`."""
    low: Tensor
    high: Tensor

    def rows(self, index: Tensor) -> Edge:
        """The same edge of some rows of the batch."""
        return Edge(self.of, self.low[index], self.high[index])


def edges_of(method: Method, old: Tensor, mask: Tensor, credit: Tensor) -> tuple[Edge, ...]:
    """The edges of a batch, in the precision of `old` (B, T): they depend on π_old and on A, not on π.

    `credit` is (B, 1) or (B, T). Tokens with A = 0, or where the mask is False, are open on both sides.
    """
    credit = credit.to(old.dtype).expand_as(mask).masked_fill(~mask, 0.0)
    found = []
    if method.bound != "none":
        found.append((method.bound, EDGES[method.bound](method, credit)))
    if method.trust != "none":
        found.append((method.trust, TRUST_EDGES[method.trust](method, old, mask, credit)))
    return tuple(Edge(_log_ratio_of(method, name), low, high) for name, (low, high) in found)


def overhang(edges: Sequence[Edge], logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> tuple[Tensor, Tensor]:
    """Nats past the edge to which A pushes the token, and past the opposite one: (B, T) each, differentiable in `logp`.

        A > 0: (x − high, low − x)          A < 0: (low − x, x − high)

    The larger of bound and trust region; negative inside, −∞ where open.
    """
    log_ratio = (logp - old).masked_fill(~mask, 0.0)
    above = below = torch.full_like(log_ratio, -torch.inf)
    for edge in edges:
        x = LOG_RATIOS[edge.of](log_ratio, mask)
        above, below = torch.maximum(above, x - edge.high), torch.maximum(below, edge.low - x)
    up = credit > 0
    return torch.where(up, above, below), torch.where(up, below, above)


def beyond(method: Method, logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """(B, T) nats by which a token stands past the edge that it has crossed; 0 inside, on padding and where A = 0.

    Where the ratio is the sequence's, so is the distance, and every token of the sequence has it.

    >>> from creditscope.methods.table import METHODS
    >>> old = torch.tensor([[-1.0, -1.0]])  # A = (1, −1), both up by 0.5: the first is past log 1.2, the second free
    >>> beyond(METHODS["grpo"], old + 0.5, old, torch.tensor([[True, True]]), torch.tensor([[1.0, -1.0]]))
    tensor([[0.3177, 0.0000]])
    """
    dtype = torch.promote_types(logp.dtype, torch.float32)
    logp, old, credit = logp.to(dtype), old.to(dtype), credit.to(dtype)
    return torch.maximum(*overhang(edges_of(method, old, mask, credit), logp, old, mask, credit)).clamp(min=0)


def bounded_tokens(method: Method, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """(B, T) True where a token has an edge at all. A method without bound and trust region has no such token."""
    out = torch.zeros_like(mask)
    for edge in edges_of(method, old, mask, credit):
        out = out | edge.low.isfinite() | edge.high.isfinite()
    return out


def stops(method: Method) -> str | None:
    """What crossing an edge does to the token's own term: "zero", "half" or "cap"; None where there is no edge.

    A trust region drops the term, so it decides where a row has both. The term is the token's own: under a sequence
    ratio its log-prob still moves the terms of tokens in the same sequence whose A has the other sign.
    """
    return STOPS[method.trust] or STOPS[method.bound]


# bound or trust region -> the log-ratio it acts on, where that is not the method's own.
_ACTS_ON = {"clip_inside": "token", "off_policy_sequence": "sequence_mean", "binary_tv": "token", "binary_kl": "token"}


def _log_ratio_of(method: Method, name: str) -> str:
    of = _ACTS_ON.get(name, method.ratio)
    # sequence_token has the value of the mean with another gradient; a distance needs its own.
    return "sequence_mean" if of == "sequence_token" else of


# -- bounds: (method, credit) -> (low, high), like credit ------------------------------------------------------------

Interval = tuple[float, float]


def _clip(method: Method, credit: Tensor) -> tuple[Tensor, Tensor]:
    """A > 0: (−∞, log(1 + ε_high)).  A < 0: (log(1 − ε_low), log c), c the dual clip."""
    low, high = _clip_range(method)
    dual = math.inf if method.dual_clip is None else math.log(method.dual_clip)
    return _by_sign(credit, (-math.inf, high), (low, dual))


def _clip_inside(method: Method, credit: Tensor) -> tuple[Tensor, Tensor]:
    """Of log ρ_it, whose clip is stated in logs.  A > 0: (−∞, ε_high).  A < 0: (−ε_low, ∞)."""
    assert method.clip_low is not None
    assert method.clip_high is not None
    return _by_sign(credit, (-math.inf, method.clip_high), (-method.clip_low, math.inf))


def _stop_gradient(method: Method, credit: Tensor) -> tuple[Tensor, Tensor]:
    """(log(1 − ε_low), log(1 + ε_high)) for either sign: where the weight stops following the ratio."""
    return _by_sign(credit, _clip_range(method), _clip_range(method))


def _gate(method: Method, credit: Tensor) -> tuple[Tensor, Tensor]:
    """Where w has fallen to half of w(1), for τ₊ and τ₋."""
    assert method.gate_pos is not None
    assert method.gate_neg is not None
    return _by_sign(credit, _half_gate(method.gate_pos), _half_gate(method.gate_neg))


def _gamma(method: Method, credit: Tensor) -> tuple[Tensor, Tensor]:
    """Where w has fallen to half of w(1), for (k₊, λ₊) and (k₋, λ₋)."""
    assert method.gamma_pos is not None
    assert method.gamma_neg is not None
    return _by_sign(credit, _half_gamma(*method.gamma_pos), _half_gamma(*method.gamma_neg))


EDGES: dict[str, Callable[[Method, Tensor], tuple[Tensor, Tensor]]] = {
    "clip": _clip,
    "clip_inside": _clip_inside,
    "stop_gradient": _stop_gradient,
    "gate": _gate,
    "gamma": _gamma,
}


def _clip_range(method: Method) -> Interval:
    """(log(1 − ε_low), log(1 + ε_high)), a side without ε being open."""
    low = -math.inf if method.clip_low is None or method.clip_low >= 1 else math.log1p(-method.clip_low)
    high = math.inf if method.clip_high is None else math.log1p(method.clip_high)
    return low, high


@functools.cache
def _half_gate(tau: float) -> Interval:
    """log s with w(s)/w(1) = s·4σ'(τ(s − 1)) = ½, below 1 and above."""

    def log_damping(log_s: Tensor) -> Tensor:
        x = tau * torch.expm1(log_s)
        return log_s + math.log(4) + F.logsigmoid(x) + F.logsigmoid(-x)

    return _half_points(log_damping)


@functools.cache
def _half_gamma(k: float, lam: float) -> Interval:
    """log s with w(s)/w(1) = φ(s) = s^k·exp(λ(1 − s)) = ½, below 1 and above."""
    return _half_points(lambda log_s: k * log_s - lam * torch.expm1(log_s))


def _half_points(log_damping: Callable[[Tensor], Tensor]) -> Interval:
    """The two log s around 0 where the damping is ½: it has one peak, so each side is met once, or never (open)."""
    far = torch.tensor([-512.0, 512.0], dtype=torch.float64)  # e^±512 is still a float
    low, high = _last_free(lambda log_s: log_damping(log_s) >= -math.log(2), far).tolist()
    return low, high


def _by_sign(credit: Tensor, good: Interval, bad: Interval) -> tuple[Tensor, Tensor]:
    """`good` where A > 0, `bad` where A < 0, open where A = 0."""
    low, high = (torch.where(credit > 0, credit.new_tensor(g), credit.new_tensor(b))
                 for g, b in zip(good, bad, strict=True))
    return _open(low, high, credit == 0)


def _open(low: Tensor, high: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    return low.masked_fill(where, -torch.inf), high.masked_fill(where, torch.inf)


# -- trust regions: (method, old, mask, credit) -> (low, high), like credit --------------------------------------------


def _off_policy_sequence(method: Method, old: Tensor, mask: Tensor, credit: Tensor) -> tuple[Tensor, Tensor]:
    """Of 1/L_i Σ_t log ρ_it.  A < 0: (−δ, ∞)."""
    assert method.trust_high is not None
    return _by_sign(credit, (-math.inf, math.inf), (-method.trust_high, math.inf))


def _binary_tv(method: Method, old: Tensor, mask: Tensor, credit: Tensor) -> tuple[Tensor, Tensor]:
    """A > 0: (−∞, log(1 + δ_high/π_old)).  A < 0: (log(1 − δ_low/π_old), ∞), open where π_old ≤ δ_low."""
    assert method.trust_low is not None
    assert method.trust_high is not None
    high = torch.log1p(method.trust_high / old.exp())
    low = torch.log1p(-(method.trust_low / old.exp()).clamp(max=1.0))
    low, high = _open(low, high, credit == 0)
    return low.masked_fill(credit > 0, -torch.inf), high.masked_fill(credit < 0, torch.inf)


def _binary_kl(method: Method, old: Tensor, mask: Tensor, credit: Tensor) -> tuple[Tensor, Tensor]:
    """KL(Bernoulli(π_old) ‖ Bernoulli(π)) = δ solved for log ρ, above 0 for A > 0 and below it for A < 0."""
    assert method.trust_low is not None
    wide = old.double()
    # Below, KL ≥ π_old·|log ρ| − 1/e, so it exceeds δ before |log ρ| = (δ + 1)/π_old. Above, π ends at 1.
    down = -(method.trust_low + 1) / wide.exp().clamp(min=1e-300)
    far = torch.where(credit > 0, wide.abs(), down)
    edge = _last_free(lambda x: TRUSTS["binary_kl"](method, wide + x, wide, mask, credit), far).to(old.dtype)
    low, high = _open(edge, edge, credit == 0)
    return low.masked_fill(credit > 0, -torch.inf), high.masked_fill(credit < 0, torch.inf)


TRUST_EDGES: dict[str, Callable[[Method, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "off_policy_sequence": _off_policy_sequence,
    "binary_tv": _binary_tv,
    "binary_kl": _binary_kl,
}


def _last_free(free: Callable[[Tensor], Tensor], far: Tensor) -> Tensor:
    """By bisection, the x between 0, which is free, and `far` where `free` ends; ±∞ where even `far` is free."""
    inside, outside = torch.zeros_like(far), far
    for _ in range(128):
        middle = (inside + outside) / 2
        held = free(middle)
        inside, outside = torch.where(held, middle, inside), torch.where(held, outside, middle)
    return torch.where(free(far), torch.full_like(far, torch.inf).copysign(far), inside)
