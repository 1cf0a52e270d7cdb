"""Preferences: scores of answers, margins of pairs, and the link between them.

    J = λ Σ_it α_it · φ(u_it) + sft · mean log π(chosen)        u_it: the margin of the pair, or of the answer

Every token of a pair has the pair's term, as every token of an answer has its sequence's ratio: with α = 1/(P·ΣL_g) the
sum is the mean over pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.methods.links import LINKS, SCORES
from creditscope.runs import schema


def compared(method: Method, logp: Tensor, rollouts: Rollouts) -> Tensor:
    """(B, T) x_it = log π_it, or log(π/π_ref)_it where the score is relative to a reference; 0 outside the mask."""
    if SCORES[method.score].reference:
        reference = rollouts.require("ref_logp", f"method {method.name!r}, which compares with a reference policy,")
        logp = logp - reference.to(logp.dtype)
    return logp.masked_fill(~rollouts.mask, 0.0)


def margins(method: Method, logp: Tensor, rollouts: Rollouts, credit: Tensor) -> Tensor:
    """(B, 1) u of each row's pair, or of its own answer.

        pair     u_g = β Σ_{it∈g} A_it·x_it − γ,  Σ_t x_it = h_i       answer   u_i = β Σ_t A_it·(x_it − z/L_i)
    """
    x = SCORES[method.score].value(compared(method, logp, rollouts), rollouts.mask)
    if method.anchor == "batch_mean":
        z = x.sum(dim=1).mean().clamp(min=0).detach()
        x = (x - z / rollouts.lengths[:, None].clamp(min=1)).masked_fill(~rollouts.mask, 0.0)
    own = (credit * x).sum(dim=1)
    whole = Groups(rollouts.group).sum(own) if method.link_over == "pair" else own
    return (method.beta * whole - method.margin)[:, None]


def linked(method: Method, logp: Tensor, rollouts: Rollouts, credit: Tensor) -> Tensor:
    """(B, 1) λ·φ(u), the term of each token before its weight α."""
    return method.link_weight * LINKS[method.link].value(method, margins(method, logp, rollouts, credit))


def link_pull(method: Method, logp: Tensor, rollouts: Rollouts, credit: Tensor, weight: Tensor, of: Tensor) -> Tensor:
    """(B, T) w of the link's term in closed form for of = A, and ω of w = ω·A for of = 1; `weight` (B, T) is α.

        w_it = λ·β·φ'(u)·A_i·∂h_i/∂log π_it · Σ α,   over the tokens that share u: those of the pair, or of the answer
    """
    u = margins(method, logp, rollouts, credit)
    share = weight.sum(dim=1)
    share = Groups(rollouts.group).sum(share) if method.link_over == "pair" else share
    pull = SCORES[method.score].pull(compared(method, logp, rollouts), rollouts.mask, of)
    found = method.link_weight * method.beta * LINKS[method.link].slope(method, u) * share[:, None] * pull
    return found.expand_as(rollouts.mask).masked_fill(~rollouts.mask, 0.0)


def pair_metrics(method: Method, logp: Tensor, rollouts: Rollouts, credit: Tensor) -> dict[str, float]:
    """pairs/… of a batch at `logp`: margins, implied rewards β·h and log π of the answers with A > 0 and with A < 0.

    Empty where the method has no link, or no answer has both signs in its group.
    """
    sides = _sides(method, rollouts, credit)
    if sides is None:
        return {}
    chosen, rejected = sides
    x = SCORES[method.score].value(compared(method, logp, rollouts), rollouts.mask).sum(dim=1).double() * method.beta
    total = logp.masked_fill(~rollouts.mask, 0.0).sum(dim=1).double()
    margin = x[chosen] - x[rejected]
    return {schema.PAIRS_COUNT: len(chosen), schema.PAIRS_MARGIN: float(margin.mean()),
            schema.PAIRS_ACCURACY: float((margin > 0).double().mean()),
            schema.PAIRS_CHOSEN_REWARD: float(x[chosen].mean()),
            schema.PAIRS_REJECTED_REWARD: float(x[rejected].mean()),
            schema.PAIRS_CHOSEN_LOGP: float(total[chosen].mean()),
            schema.PAIRS_REJECTED_LOGP: float(total[rejected].mean())}


def pair_changes(method: Method, before: Tensor, after: Tensor, rollouts: Rollouts, credit: Tensor
                 ) -> dict[str, float]:
    """pairs/…_change: Σ_t log π of the chosen and of the rejected answers, after the updates less before."""
    sides = _sides(method, rollouts, credit)
    if sides is None:
        return {}
    moved = (after - before).masked_fill(~rollouts.mask, 0.0).sum(dim=1).double()
    chosen, rejected = (moved[rows] for rows in sides)
    return {schema.PAIRS_CHOSEN_CHANGE: float(chosen.mean()), schema.PAIRS_REJECTED_CHANGE: float(rejected.mean()),
            schema.PAIRS_CHOSEN_FELL: float((chosen < 0).double().mean())}


def _sides(method: Method, rollouts: Rollouts, credit: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows of the chosen and of the rejected answers, pair by pair; None where the method has no pairs."""
    if not method.linked or method.link_over != "pair":
        return None
    sign = credit.masked_fill(~rollouts.mask, 0.0).sum(dim=1).sign()
    order = rollouts.group.argsort(stable=True)
    chosen, rejected = (order[sign[order] == side] for side in (1, -1))
    same = len(chosen) == len(rejected) and torch.equal(rollouts.group[chosen], rollouts.group[rejected])
    return (chosen, rejected) if same and len(chosen) else None


def supervised(method: Method, logp: Tensor, rollouts: Rollouts, credit: Tensor) -> Tensor:
    """The mean log π of the answers with A > 0: over answers of 1/L_i Σ_t log π_it, or over all their tokens."""
    good = rollouts.mask & (credit > 0).expand_as(rollouts.mask)
    length = good.sum(dim=1, keepdim=True).to(logp.dtype)
    count = length.sum() if method.sft_mean == "tokens" else (length > 0).sum().to(logp.dtype)
    each = length.new_ones(()) if method.sft_mean == "tokens" else length.clamp(min=1)
    return torch.where(good, logp / each, 0.0).sum() / count.clamp(min=1)
