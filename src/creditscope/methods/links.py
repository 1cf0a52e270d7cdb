"""Links and scores, one row each: how a preference method judges the two answers of a pair.

    J = 1/P Σ_g φ(u_g)        u_g = β Σ_{i∈g} A_i·h_i − γ        w_it = 1/P · φ'(u_g) · β · A_i · ∂h_i/∂log π_it

φ is the link, h_i the score of an answer, A = +1 for the chosen and −1 for the rejected one, γ the target margin. A
pair is a group: of R answers the best and the worst are its two, the others have A = 0. Where the link is of single
answers, u_i = β·A_i·(h_i − z). Functions use methods of tensors only, so that the tables need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from creditscope.methods.axes import Method

CERTAIN = -1e-9
"""The largest mean log-probability of which odds are taken: those of a certain answer are infinite."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link φ of the margin u."""

    text: str
    """The meaning, as `creditscope list methods` prints it."""
    formula: Callable[[Method, str], str]
    """φ in symbols, given those of u."""
    value: Callable[[Method, Tensor], Tensor]
    """φ(u)."""
    slope: Callable[[Method, Tensor], Tensor]
    """φ'(u)."""
    rests: str
    """Where φ' is 0, or goes to 0: there the pair no longer moves the policy."""
    takes: tuple[str, ...] = ()
    """Numbers of a method that it reads, besides β and γ; all of them are required."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score h_i of an answer, of x_it = log π_it or log(π/π_ref)_it."""

    text: str
    formula: str
    """h_i in symbols."""
    reference: bool
    """Whether x is relative to a reference policy."""
    value: Callable[[Tensor, Tensor], Tensor]
    """(x, mask) -> (B, T) whose sum over t is h_i; x is 0 where the mask is False."""
    pull: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x, mask, credit) -> ∂/∂log π_it of Σ_t' A_it'·value_it', broadcastable to (B, T); A = 1 gives ∂h_i/∂log π_it."""
    even: str
    """The score of the same x in which all tokens of a pair weigh the same; its own name where they do."""

    def __str__(self) -> str:
        return self.text


# -- links --------------------------------------------------------------------------------------------------------


def log_sigmoid(u: Tensor) -> Tensor:
    """log σ(u) = −log(1 + e^−u), with slope 1/2 at u = 0 and without overflow."""
    return -u.new_zeros(()).logaddexp(-u)


def _flip(m: Method) -> float:
    assert m.flip is not None
    return m.flip


LINKS: dict[str, Link] = {
    "none": Link(text="no link: the term of a token has a ratio and a bound", formula=lambda m, u: "",
                 value=lambda m, u: u, slope=lambda m, u: u * 0 + 1, rests="nowhere"),
    "logistic": Link(text="log σ(u)", formula=lambda m, u: f"log σ({u})", value=lambda m, u: log_sigmoid(u),
                     slope=lambda m, u: (-u).sigmoid(), rests="u → ∞"),
    "robust": Link(
        text="((1−ε) log σ(u) − ε log σ(−u))/(1−2ε): unbiased where a share ε of the labels is wrong",
        formula=lambda m, u: f"({1 - _flip(m):g}·log σ({u}) − {_flip(m):g}·log σ(−{u}))/{1 - 2 * _flip(m):g}",
        value=lambda m, u: ((1 - _flip(m)) * log_sigmoid(u) - _flip(m) * log_sigmoid(-u)) / (1 - 2 * _flip(m)),
        slope=lambda m, u: ((1 - _flip(m)) * (-u).sigmoid() + _flip(m) * u.sigmoid()) / (1 - 2 * _flip(m)),
        rests="nowhere: φ' → ε/(1−2ε) as u → ∞", takes=("flip",)),
    "square": Link(text="−(u − ½)²/β²", formula=lambda m, u: f"−({u} − ½)²/β²",
                   value=lambda m, u: -((u - 0.5) / m.beta) ** 2, slope=lambda m, u: (1 - 2 * u) / m.beta**2,
                   rests="u = ½; beyond it the sign of w is reversed"),
    "hinge": Link(text="−max(0, 1 − u)", formula=lambda m, u: f"−max(0, 1 − {u})", value=lambda m, u: -(1 - u).relu(),
                  slope=lambda m, u: (u < 1).to(u.dtype), rests="u ≥ 1"),
    "sigmoid": Link(text="σ(u)", formula=lambda m, u: f"σ({u})", value=lambda m, u: u.sigmoid(),
                    slope=lambda m, u: u.sigmoid() * (-u).sigmoid(), rests="u → ±∞"),
}


# -- scores -------------------------------------------------------------------------------------------------------


def _length(mask: Tensor) -> Tensor:
    """(B, 1) L_i, at least 1."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return x.sum(dim=1, keepdim=True) / _length(mask)


def _log_odds(x: Tensor, mask: Tensor) -> Tensor:
    """h_i = log(p_i/(1 − p_i)), p_i = exp(mean_t log π_it), spread evenly over the tokens."""
    m = _mean(x, mask).clamp(max=CERTAIN)
    return (m - (-m.expm1()).log()) / _length(mask) * mask.to(x.dtype)


def _log_odds_pull(x: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """mean_t A_it / (L_i·(1 − p_i)); 0 where the answer is certain."""
    m = _mean(x, mask)
    each = _mean(credit.expand_as(mask) * mask.to(x.dtype), mask)
    return each * (m <= CERTAIN).to(x.dtype) / (-m.clamp(max=CERTAIN).expm1()) / _length(mask)


SCORES: dict[str, Score] = {
    "none": Score(text="no score", formula="", reference=False, value=lambda x, mask: x,
                  pull=lambda x, mask, credit: credit * 0, even="none"),
    "log_ratio": Score(text="Σ_t log(π/π_ref)_it", formula="Σ_t log(π/π_ref)_it", reference=True,
                       value=lambda x, mask: x, pull=lambda x, mask, credit: credit, even="log_ratio"),
    "log_ratio_mean": Score(text="1/L_i Σ_t log(π/π_ref)_it", formula="1/L_i Σ_t log(π/π_ref)_it", reference=True,
                            value=lambda x, mask: x / _length(mask),
                            pull=lambda x, mask, credit: credit / _length(mask), even="log_ratio"),
    "log_prob": Score(text="Σ_t log π_it, no reference", formula="Σ_t log π_it", reference=False,
                      value=lambda x, mask: x, pull=lambda x, mask, credit: credit, even="log_prob"),
    "log_prob_mean": Score(text="1/L_i Σ_t log π_it, no reference", formula="1/L_i Σ_t log π_it", reference=False,
                           value=lambda x, mask: x / _length(mask),
                           pull=lambda x, mask, credit: credit / _length(mask), even="log_prob"),
    "log_odds": Score(text="log of p_i/(1 − p_i), p_i = exp(1/L_i Σ_t log π_it), no reference",
                      formula="log(p_i/(1 − p_i)), p_i = exp(1/L_i Σ_t log π_it)", reference=False,
                      value=_log_odds, pull=_log_odds_pull, even="log_prob"),
}
