"""Bounds and trust regions, one row each: the token's term, its edges, and words for both.

    s·A under a bound:  A·φ(log s)         a trust region drops the term of a token outside it

A new one is one row. Functions use methods of tensors only, so that the tables need no torch. `credit` is A; `m` is
the method with its numbers (ε, τ, ...).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from creditscope.errors import CreditscopeError

if TYPE_CHECKING:
    from torch import Tensor

    from creditscope.methods.axes import Method

T = TypeVar("T")
Span = tuple[float, float]
Rule = tuple[Callable[[Any], bool], str]
"""(impossible, the error with its repair); `m` in the text is the method."""
Factor = Callable[["Method", "Tensor", "Tensor"], "Tensor"]
"""(method, log-ratio, credit) -> a factor on A, broadcastable to (B, T)."""
OPEN: Span = (-math.inf, math.inf)
EXP_LIMIT = {size: 0.9 * math.log(largest) for size, largest in
             {2: 65504.0, 4: (2 - 2**-23) * 2.0**127, 8: sys.float_info.max}.items()}
"""Bytes of a float -> nine tenths of the largest x whose exp is finite."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One bound φ of x = log s, by what carries the gradient.

        ratio       term = A·φ(x)                     w = α·A·φ'(x), through s
        log_prob    term = A·sg[φ(x)]·log π           w = α·A·φ(x): the ratio is a number
        tokens      term = A·exp(mean_t φ(log ρ_it))  each log ρ is bounded before the mean over the sequence
    """

    text: str
    """The meaning, as `creditscope list methods` prints it."""
    formula: Callable[[Method, str, str], str]
    """The term in symbols, given those of s and of A."""
    term: Factor
    """φ."""
    slope: Factor | None = None
    """φ'; None where log π carries the gradient."""
    height: Callable[[Method], Span] = lambda m: (1.0, 1.0)
    """φ(0), at ratio 1: where A > 0, and where A < 0."""
    height_text: str = ""
    """The same in symbols."""
    edge: Callable[[Method], tuple[Span, Span]] = lambda m: (OPEN, OPEN)
    """The free interval of the log-ratio: where A > 0, and where A < 0."""
    stops: Literal["zero", "half", "cap"] | None
    """The token's own gradient past the edge; None where there is no edge."""
    carrier: Literal["ratio", "log_prob", "tokens"] = "ratio"
    takes: tuple[str, ...] = ()
    """Numbers of a method that it reads."""
    needs: tuple[str, ...] = ()
    """Required numbers among them."""
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __post_init__(self) -> None:
        if (self.slope is None) != (self.carrier == "log_prob"):
            raise CreditscopeError(f"bound {self.text!r}: a slope is given unless log π carries the gradient, and here "
                                   f"the carrier is {self.carrier!r}")

    @property
    def acts_on(self) -> str | None:
        """The log-ratio that the edge is of; None for the method's own."""
        return "token" if self.carrier == "tokens" else None


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """One trust region: the term of a token outside it is dropped, whatever the bound."""

    text: str
    formula: Callable[[Method], str]
    """The condition in symbols, as a factor of α."""
    keeps: Callable[[Method, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(method, log π, log π_old, mask, credit) -> bool, broadcastable to (B, T); None where nothing is dropped."""
    edge: Callable[[Method, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """(method, log π_old, credit) -> (low, high) of the log-ratio `acts_on`."""
    acts_on: str = "token"
    stops: Literal["zero"] | None = "zero"
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return self.text


# -- arithmetic of tensors, without torch ---------------------------------------------------------------------------


def _given(number: T | None) -> T:
    """A number that the row's `needs` or `rules` require."""
    assert number is not None
    return number


def exp_bounded(x: Tensor) -> Tensor:
    """exp(x), held at e^80 in float32 and e^638 in float64: beyond, a clipped token would get 0 · ∞ = NaN."""
    return x.clamp(max=EXP_LIMIT[x.element_size()]).exp()


def by_sign(where: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers, in the precision of `like` (a where on Python floats would be float32)."""
    return like.new_tensor(yes).where(where, like.new_tensor(no))


def _clamp(x: Tensor, low: float | None, high: float | None) -> Tensor:
    return x if low is None and high is None else x.clamp(low, high)


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _last_free(free: Callable[[Tensor], Tensor], far: Tensor) -> Tensor:
    """By bisection, the x between 0, which is free, and `far` where `free` ends; ±∞ where even `far` is free."""
    inside, outside = far * 0, far
    for _ in range(128):
        middle = (inside + outside) / 2
        held = free(middle)
        inside, outside = middle.where(held, inside), outside.where(held, middle)
    return far.new_full(far.shape, math.inf).copysign(far).where(free(far), inside)


def _half_points(log_damping: Callable[[float], float]) -> Span:
    """The two log s around 0 where w(s)/w(1) = ½; ±∞ where a side has none. w has one peak."""

    def last(far: float) -> float:
        if log_damping(far) >= -math.log(2):
            return math.copysign(math.inf, far)
        inside = 0.0
        for _ in range(128):
            middle = (inside + far) / 2
            inside, far = (middle, far) if log_damping(middle) >= -math.log(2) else (inside, middle)
        return inside

    return last(-512.0), last(512.0)  # e^±512 is still a float


# -- clip: A·min(s, 1+ε_high) for A > 0, A·max(s, 1−ε_low) for A < 0 ---------------------------------------------------


def _limits(m: Method) -> tuple[float | None, float | None]:
    """1 − ε_low and 1 + ε_high; None where that side is open."""
    return (None if m.clip_low is None else 1 - m.clip_low), (None if m.clip_high is None else 1 + m.clip_high)


def _log_limits(m: Method) -> Span:
    low, high = _limits(m)
    return (-math.inf if low is None or low <= 0 else math.log1p(-_given(m.clip_low)),
            math.inf if high is None else math.log1p(_given(m.clip_high)))


def _clip(m: Method, x: Tensor, credit: Tensor) -> Tensor:
    """min(s, 1+ε_high) for A > 0; for A < 0 max(s, 1−ε_low), and at most c under dual clip."""
    s, (low, high) = exp_bounded(x), _limits(m)
    return _clamp(s, None, high).where(credit > 0, _clamp(s, low, m.dual_clip))


def _clip_slope(m: Method, x: Tensor, credit: Tensor) -> Tensor:
    """s, and 0 where s > 1+ε_high with A > 0, s < 1−ε_low with A < 0, or s > c with A < 0 under dual clip."""
    s, (low, high) = exp_bounded(x), _limits(m)
    good, bad = s <= (high or math.inf), (s >= (low or 0.0)) & (s <= (m.dual_clip or math.inf))
    return s * good.where(credit > 0, bad)


def _clip_edge(m: Method) -> tuple[Span, Span]:
    """A > 0: (−∞, log(1 + ε_high)).  A < 0: (log(1 − ε_low), log c), c the dual clip."""
    low, high = _log_limits(m)
    return (-math.inf, high), (low, math.inf if m.dual_clip is None else math.log(m.dual_clip))


def _clip_formula(m: Method, s: str, a: str) -> str:
    term = f"min({s}·{a}, {_clip_text(m, s)}·{a})"
    return f"max({term}, {m.dual_clip:g}·{a} if {a} < 0)" if m.dual_clip else term


def _clip_text(m: Method, s: str) -> str:
    low, high = _limits(m)
    return f"clip({s}, {0 if low is None else low:g}, {'∞' if high is None else f'{high:g}'})"


# -- clip_inside: exp(mean_t of the clipped log ρ_it)·A ----------------------------------------------------------------


def _inside(m: Method, x: Tensor, credit: Tensor) -> Tensor:
    """min(log ρ, ε_high) for A ≥ 0, max(log ρ, −ε_low) for A < 0."""
    return x.clamp(max=_given(m.clip_high)).where(credit >= 0, x.clamp(min=-_given(m.clip_low)))


# -- gate: A·4/τ·σ(τ(s − 1)), τ = τ₊ for A > 0 and τ₋ else; its slope at s = 1 is A ------------------------------------


def _gate_sigmoid(m: Method, x: Tensor, credit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """s, τ and σ(τ(s − 1))."""
    s, tau = exp_bounded(x), by_sign(credit > 0, _given(m.gate_pos), _given(m.gate_neg), credit)
    return s, tau, (tau * (s - 1)).sigmoid()


def _gate(m: Method, x: Tensor, credit: Tensor) -> Tensor:
    """4/τ·σ(τ(s − 1))."""
    _, tau, sigmoid = _gate_sigmoid(m, x, credit)
    return sigmoid * 4 / tau


def _gate_slope(m: Method, x: Tensor, credit: Tensor) -> Tensor:
    """4σ(1 − σ)·s."""
    s, _, sigmoid = _gate_sigmoid(m, x, credit)
    return 4 * sigmoid * (1 - sigmoid) * s


@functools.cache
def _half_gate(tau: float) -> Span:
    """log s with w(s)/w(1) = s·4σ'(τ(s − 1)) = s / cosh²(τ(s − 1)/2) = ½, below 1 and above."""

    def log_damping(log_s: float) -> float:
        half = abs(tau * math.expm1(log_s)) / 2
        return log_s - 2 * (half + math.log1p(math.exp(-2 * half)) - math.log(2))  # log cosh without overflow

    return _half_points(log_damping)


# -- gamma: sg[φ]·A·log π, φ(s) = s^k·exp(λ(1 − s)) --------------------------------------------------------------------


def _gamma(m: Method, x: Tensor, credit: Tensor) -> Tensor:
    """log φ = λ + k·log s − λ·s, (k, λ) by the sign of A; φ(1) = 1."""
    both = zip(_given(m.gamma_pos), _given(m.gamma_neg), strict=True)
    k, lam = (by_sign(credit >= 0, good, bad, credit) for good, bad in both)
    return (lam + k * x - lam * x.exp()).exp()


@functools.cache
def _half_gamma(k: float, lam: float) -> Span:
    """log s with w(s)/w(1) = φ(s) = ½, below 1 and above."""
    return _half_points(lambda log_s: k * log_s - lam * math.expm1(log_s))


# -- the bounds --------------------------------------------------------------------------------------------------------

_FLOOR: Rule = (lambda m: m.clip_low is not None and m.clip_low < 0,
                "clip_low={m.clip_low} puts the floor above 1; give ε_low ≥ 0")
_CEILING: Rule = (lambda m: m.clip_high is not None and m.clip_high < 0,
                  "clip_high={m.clip_high} puts the ceiling below 1; give ε_high ≥ 0")

BOUNDS: dict[str, Bound] = {
    "none": Bound(
        text="s·A", formula=lambda m, s, a: f"{s}·{a}",
        term=lambda m, x, credit: exp_bounded(x), slope=lambda m, x, credit: exp_bounded(x), stops=None),
    "clip": Bound(
        text="min(s·A, clip(s)·A)", formula=_clip_formula,
        term=_clip, slope=_clip_slope, edge=_clip_edge, stops="zero", takes=("clip_low", "clip_high", "dual_clip"),
        rules=(
            (lambda m: m.clip_low is None and m.clip_high is None,
             "bound='clip' needs clip_low or clip_high; set one, or bound='none'"),
            _FLOOR,
            (lambda m: m.clip_low is not None and m.clip_low >= 1,
             "clip_low={m.clip_low} puts the floor at or below 0, which never binds; give ε_low < 1 or None"),
            _CEILING,
            (lambda m: m.dual_clip is not None and m.dual_clip <= 1 + (m.clip_high or 0.0),
             "dual_clip={m.dual_clip} must exceed 1 + clip_high"))),
    "clip_inside": Bound(
        text="each log ρ_it is clipped before the mean over the sequence",
        formula=lambda m, s, a: f"exp(mean_t clip±(log ρ_it, −{m.clip_low}, {m.clip_high}))·{a}",
        term=_inside,
        slope=lambda m, x, credit: (x <= _given(m.clip_high)).where(credit >= 0, x >= -_given(m.clip_low)),  # 1 inside
        edge=lambda m: ((-math.inf, _given(m.clip_high)), (-_given(m.clip_low), math.inf)),  # of log ρ_it
        stops="zero", carrier="tokens",
        takes=("clip_low", "clip_high"), needs=("clip_low", "clip_high"),
        rules=(
            (lambda m: m.ratio != "sequence_mean",
             "bound='clip_inside' clips before the mean over a sequence, but ratio={m.ratio!r}; "
             "set ratio='sequence_mean'"), _FLOOR, _CEILING)),
    "stop_gradient": Bound(
        text="sg[clip(s)]·A·log π", formula=lambda m, s, a: f"sg[{_clip_text(m, s)}]·{a}·log π_it",
        term=lambda m, x, credit: _clamp(exp_bounded(x), *_limits(m)),
        height=lambda m: (min(1.0, 1 + (m.clip_high or 0.0)),) * 2,  # a ceiling may stand below 1
        edge=lambda m: (_log_limits(m),) * 2, stops="cap", carrier="log_prob", takes=("clip_low", "clip_high"),
        rules=(
            _FLOOR,
            (lambda m: m.clip_high is not None and m.clip_high <= -1,
             "clip_high={m.clip_high} puts the ceiling at or below 0; the ceiling is 1 + clip_high"))),
    "gate": Bound(
        text="A·4/τ·sigmoid(τ(s−1))",
        formula=lambda m, s, a: f"{a}·4/τ·σ(τ({s} − 1)), τ₊ = {m.gate_pos}, τ₋ = {m.gate_neg}",
        term=_gate, slope=_gate_slope, height=lambda m: (2 / _given(m.gate_pos), 2 / _given(m.gate_neg)),
        height_text="2/τ±",
        edge=lambda m: (_half_gate(_given(m.gate_pos)), _half_gate(_given(m.gate_neg))),
        stops="half", takes=("gate_pos", "gate_neg"),
        rules=(
            (lambda m: not (m.gate_pos and m.gate_neg and m.gate_pos > 0 and m.gate_neg > 0),
             "bound='gate' needs gate_pos > 0 and gate_neg > 0, got {m.gate_pos} and {m.gate_neg}"),)),
    "gamma": Bound(
        text="sg[φ(s)]·A·log π, φ(s) = s^k·exp(λ(1−s))",
        formula=lambda m, s, a: (f"sg[{s}^k·exp(λ(1 − {s}))]·{a}·log π_it, (k, λ)₊ = {m.gamma_pos}, "
                                 f"(k, λ)₋ = {m.gamma_neg}"),
        term=_gamma, edge=lambda m: (_half_gamma(*_given(m.gamma_pos)), _half_gamma(*_given(m.gamma_neg))),
        stops="half", carrier="log_prob", takes=("gamma_pos", "gamma_neg"),
        needs=("gamma_pos", "gamma_neg"),
        rules=(
            (lambda m: m.ratio != "sequence_product",
             "bound='gamma' is a weight on the sequence's product ratio, but ratio={m.ratio!r}; "
             "set ratio='sequence_product'"),)),
}


# -- trust regions -----------------------------------------------------------------------------------------------------


def _binary_tv(m: Method, logp: Tensor, old: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """Keep where π − π_old ≤ δ_high for A > 0, and π − π_old ≥ −δ_low else."""
    moved = logp.exp() - old.exp()
    return (moved <= _given(m.trust_high)).where(credit > 0, moved >= -_given(m.trust_low))


def _binary_tv_edge(m: Method, old: Tensor, credit: Tensor) -> tuple[Tensor, Tensor]:
    """A > 0: (−∞, log(1 + δ_high/π_old)).  A < 0: (log(1 − δ_low/π_old), ∞), open where π_old ≤ δ_low."""
    low, high = -(_given(m.trust_low) / old.exp()).clamp(max=1.0), _given(m.trust_high) / old.exp()
    return _one_sided(low.log1p(), high.log1p(), credit)


def _binary_kl(m: Method, logp: Tensor, old: Tensor, credit: Tensor) -> Tensor:
    """Keep where KL(Bernoulli(π_old) ‖ Bernoulli(π)) ≤ δ, or the token moved against the sign of A."""
    p, q = old.exp(), logp.exp()
    tiny = 1e-8  # both probabilities may round to 1
    kl = p * (old - logp) + (1 - p) * ((1 - p + tiny) / (1 - q + tiny)).log()
    return ((kl <= _given(m.trust_high)) | (q <= p)).where(credit > 0, (kl <= _given(m.trust_low)) | (q >= p))


def _binary_kl_edge(m: Method, old: Tensor, credit: Tensor) -> tuple[Tensor, Tensor]:
    """KL(Bernoulli(π_old) ‖ Bernoulli(π)) = δ solved for log ρ, above 0 for A > 0 and below it for A < 0."""
    wide = old.double()
    # Below, KL ≥ π_old·|log ρ| − 1/e, so it exceeds δ before |log ρ| = (δ + 1)/π_old. Above, π ends at 1.
    far = wide.abs().where(credit > 0, -(_given(m.trust_low) + 1) / wide.exp().clamp(min=1e-300))
    edge = _last_free(lambda x: _binary_kl(m, wide + x, wide, credit), far).to(old.dtype)
    return _one_sided(edge, edge, credit)


def _one_sided(low: Tensor, high: Tensor, credit: Tensor) -> tuple[Tensor, Tensor]:
    """A floor where A < 0 alone, a ceiling where A > 0 alone."""
    return low.masked_fill(credit > 0, -math.inf), high.masked_fill(credit < 0, math.inf)


_STAYS: Rule = (lambda m: min(m.trust_low or 0.0, m.trust_high or 0.0) < 0,
                "trust_low={m.trust_low} and trust_high={m.trust_high} would drop tokens before the policy has moved; "
                "give both ≥ 0")
_WEIGHS: Rule = (lambda m: m.ratio == "none",
                 "trust={m.trust!r} weighs by a ratio, but ratio='none'; set ratio='token' and bound='stop_gradient'")

TRUSTS: dict[str, TrustRegion] = {
    "none": TrustRegion(text="every token", formula=lambda m: "", stops=None),
    "off_policy_sequence": TrustRegion(
        text="drops a sequence with A < 0 whose mean log(π_old/π) is above a threshold",
        formula=lambda m: f"1{{A ≥ 0 or mean_t log(π_old/π) ≤ {m.trust_high}}}",
        keeps=lambda m, logp, old, mask, credit: (credit >= 0) | (_mean(old - logp, mask) <= _given(m.trust_high)),
        edge=lambda m, old, credit: (  # of 1/L_i Σ_t log ρ_it: (−δ, ∞) where A < 0
            by_sign(credit < 0, -_given(m.trust_high), -math.inf, credit), credit.new_full(credit.shape, math.inf)),
        acts_on="sequence_mean", takes=("trust_high",),
        needs=("trust_high",), rules=(_STAYS,)),
    "binary_tv": TrustRegion(
        text="drops a token whose probability moved too far in the direction of A",
        formula=lambda m: f"1{{π − π_old within {m.trust_high} along A}}",
        keeps=_binary_tv, edge=_binary_tv_edge, takes=("trust_low", "trust_high"), needs=("trust_low", "trust_high"),
        rules=(_WEIGHS, _STAYS)),
    "binary_kl": TrustRegion(
        text="drops a token whose binary KL grew too large in the direction of A",
        formula=lambda m: f"1{{KL(π_old‖π) ≤ {m.trust_high} along A}}",
        keeps=lambda m, logp, old, mask, credit: _binary_kl(m, logp, old, credit), edge=_binary_kl_edge,
        takes=("trust_low", "trust_high"), needs=("trust_low", "trust_high"), rules=(_WEIGHS, _STAYS)),
}
