"""The edges of each token's bound, and its distance past them.

    free: low ≤ x ≤ high,  x = log s of the method's own ratio, or log ρ_it, or its mean over the sequence

Past an edge the token's own term is stopped, halved or capped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from creditscope.methods.axes import Method
from creditscope.methods.bounds import BOUNDS, TRUSTS, by_sign
from creditscope.objective.ratios import LOG_RATIOS


@dataclass(frozen=True)
class Edge:
    """The free interval of every token under one bound or trust region, (B, T) each, ±∞ where open."""

    of: str
    """The log-ratio x, a name in `LOG_RATIOS`."""
    low: Tensor
    high: Tensor

    def rows(self, index: Tensor) -> Edge:
        return Edge(self.of, self.low[index], self.high[index])


def edges_of(method: Method, old: Tensor, mask: Tensor, credit: Tensor) -> tuple[Edge, ...]:
    """The edges of a batch, in the precision of `old` (B, T). They depend on π_old and on A, not on π.

    `credit` is (B, 1) or (B, T). Tokens with A = 0, or where the mask is False, are open on both sides.
    """
    credit = credit.to(old.dtype).expand_as(mask).masked_fill(~mask, 0.0)
    found, bound, trust = [], BOUNDS[method.bound], TRUSTS[method.trust]
    if bound.stops:
        good, bad = bound.edge(method)
        low, high = (by_sign(credit > 0, yes, no, credit) for yes, no in zip(good, bad, strict=True))
        found.append((bound.acts_on or method.ratio, low, high))
    if trust.edge:
        found.append((trust.acts_on, *trust.edge(method, old, credit)))
    none = credit == 0
    # sequence_token has the value of the mean with another gradient; a distance needs its own.
    return tuple(Edge("sequence_mean" if of == "sequence_token" else of, low.masked_fill(none, -torch.inf),
                      high.masked_fill(none, torch.inf)) for of, low, high in found)


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
