"""The effect of a method's weights on a prefix that answers share.

A node is a token with its context. The rows S of a group that pass it have the same log π there, so

    ∂J/∂log π(node) = W = Σ_{i∈S} w_it,   w_it = ω_it A_it        (arXiv:2601.05002, Prop. 1)

With one ω for the whole group and Σ_i A_i = 0, a node that the whole group shares has W = 0. With ω = 1/L_i short
answers have more weight. W is of the policy term alone: a KL term in the loss does not depend on credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.prefixes import shared
from creditscope.methods.axes import Method
from creditscope.methods.bounds import BOUNDS
from creditscope.objective.advantages import token_advantage
from creditscope.objective.links import link_pull
from creditscope.objective.ratios import LOG_RATIOS, ratio, trusted
from creditscope.objective.surrogate import check_credit, effective_credit, surrogate
from creditscope.objective.weights import alpha, kept
from creditscope.runs import schema


@dataclass(frozen=True)
class Nodes:
    """The tree of the answers of each group, one node per chosen token and its context."""

    index: Tensor
    """(B, T) the node of each chosen token, -1 elsewhere."""
    group: Tensor
    """(N,) the group's id."""
    depth: Tensor
    """(N,) the column of the token."""
    rows: Tensor
    """(N,) |S|, the number of rows that pass."""
    whole: Tensor
    """(N,) bool: at least two rows, and they are the whole group."""

    def __len__(self) -> int:
        return len(self.group)

    @property
    def shared(self) -> Tensor:
        """(N,) bool: at least two rows pass."""
        return self.rows > 1

    def sum(self, value: Tensor) -> Tensor:
        """(N,) Σ_{i∈S} of a (B, T) value."""
        chosen = self.index >= 0
        return value.new_zeros(len(self)).index_add_(0, self.index[chosen], value[chosen])

    def spread(self, value: Tensor) -> Tensor:
        """(B, T) each node's value at its tokens, 0 elsewhere."""
        return torch.where(self.index >= 0, value[self.index.clamp(min=0)], 0.0)


def nodes(rollouts: Rollouts) -> Nodes:
    """The nodes of a batch: rows of one group with equal y_≤t share a node at column t.

    >>> r = Rollouts(tokens=torch.tensor([[5, 6], [5, 7]]), mask=torch.ones(2, 2, dtype=torch.bool),
    ...              logp=torch.zeros(2, 2), reward=torch.tensor([1., 0.]), group=torch.tensor([0, 0]))
    >>> nodes(r).index.tolist(), nodes(r).rows.tolist()
    ([[0, 1], [0, 2]], [2, 1, 1])
    """
    sibling, common = shared(rollouts)
    size, width = rollouts.mask.shape
    column = torch.arange(width, device=sibling.device)
    first = torch.full((size, width), size, device=sibling.device)  # the first row that shares y_≤t names the node
    for seat in range(sibling.shape[1]):
        meets = column < common[:, seat, None]
        first = torch.where(meets, torch.minimum(first, sibling[:, seat, None]), first)
    names, slot, rows = torch.unique((first * width + column)[rollouts.mask], return_inverse=True, return_counts=True)
    index = torch.full((size, width), -1, device=sibling.device).masked_scatter_(rollouts.mask, slot)
    row = names // width
    members = Groups(rollouts.group).size[row]
    return Nodes(index, rollouts.group[row], names % width, rows, (rows == members) & (rows > 1))


@dataclass(frozen=True)
class PrefixBias:
    """Credit, ω and w of each token and W of each node of a batch under a method."""

    nodes: Nodes
    credit: Tensor
    """(B, T) A_it, 0 where the mask is False."""
    weight: Tensor
    """(B, T) ω_it."""
    w: Tensor
    """(B, T) w_it."""
    even: Tensor
    """(N,) ω̄ Σ_{i∈S} A_it, ω̄ the mean of ω over the tokens of the whole group: W if the group weighed evenly."""

    @property
    def total(self) -> Tensor:
        """(N,) W."""
        return self.nodes.sum(self.w)

    @property
    def mass(self) -> Tensor:
        """(N,) Σ_{i∈S} |w_it|."""
        return self.nodes.sum(self.w.abs())

    @property
    def bias(self) -> Tensor:
        """(N,) W − ω̄ Σ_{i∈S} A_it: what the weighting adds."""
        return self.total - self.even


def prefix_bias(method: Method, rollouts: Rollouts, logp: Tensor | None = None,
                credit: Tensor | None = None) -> PrefixBias:
    """ω, w and W in closed form, at the live `logp` (B, T); by default at ratio 1.

    `credit` (B, 1) or (B, T) replaces the method's own advantage, as it does in `surrogate`.
    """
    tree, mask = nodes(rollouts), rollouts.mask
    old = wide(rollouts.logp).masked_fill(~mask, 0.0)
    live = old if logp is None else wide(logp).masked_fill(~mask, 0.0)
    own = (token_advantage(method, rollouts) if credit is None else check_credit(credit, rollouts)).to(live.dtype)
    share = alpha(method, rollouts, kept(method, rollouts, own), live.dtype)
    trust = trusted(method, live, old, mask, own)
    share = share if trust is None else share * trust

    def through(credit: Tensor) -> Tensor:
        if method.linked:
            return link_pull(method, live, rollouts, own, share, credit)
        return effective(method, share * credit, live - old, mask, own)

    weight, tokens = through(torch.ones_like(own)), own.expand_as(mask).masked_fill(~mask, 0.0)
    groups = Groups(rollouts.group)
    mean = groups.sum(weight.sum(dim=1)) / groups.sum(rollouts.lengths).clamp(min=1)
    return PrefixBias(tree, tokens, weight, through(own), even=tree.sum(mean[:, None] * tokens))


def measured(method: Method, rollouts: Rollouts, tree: Nodes, logp: Tensor | None = None,
             credit: Tensor | None = None) -> Tensor:
    """(N,) W by autograd through `surrogate`: one leaf per node, which shifts the node's log π."""
    row = method.bare if method.has_loss_kl or method.linked else method
    live = rollouts.logp if logp is None else logp
    return effective_credit(lambda shift: surrogate(row, live + tree.spread(shift), rollouts, credit),
                            live.new_zeros(len(tree)))


def prefix_metrics(found: PrefixBias, rollouts: Rollouts) -> dict[str, Any]:
    """The metrics prefix/… of a batch (`runs.schema`); a metric that does not exist is absent."""
    tree, mass = found.nodes, found.mass
    out: dict[str, Any] = {schema.PREFIX_NODES: int(tree.shared.sum()), schema.PREFIX_ROOT_NODES: int(tree.whole.sum()),
                           schema.PREFIX_TOKENS: float(tree.rows[tree.shared].sum() / tree.rows.sum())}
    if float(mass.sum()) > 0:
        out[schema.PREFIX_MASS] = float(mass[tree.shared].sum() / mass.sum())
    for name, where, value in (("root", tree.whole, found.total), ("bias", tree.shared, found.bias)):
        if float(mass[where].sum()) > 0:
            out[f"prefix/{name}"] = float(value[where].abs().sum() / mass[where].sum())
    for name, sign in (("positive", 1), ("negative", -1)):
        power = length_exponent(found, rollouts, sign)
        out |= {} if power is None else {f"prefix/length_{name}": power}
    return out


def length_exponent(found: PrefixBias, rollouts: Rollouts, sign: int) -> float | None:
    """x of ω_i ∝ L_i^x among the rollouts of a group whose credit has that sign: −1 for 1/L_i, 0 for even weights.

        x = Σ (ℓ_i − ℓ̄_g) log ω_i / Σ (ℓ_i − ℓ̄_g)²,   ℓ = log L, ω_i the mean of ω_it over the tokens

    Rollouts with ω = 0 are left out; None where no two lengths differ.
    """
    length = rollouts.lengths.to(found.weight.dtype)
    weight = found.weight.sum(dim=1) / length.clamp(min=1)
    rows = (weight > 0) & (found.credit.sum(dim=1) * sign > 0)
    groups = Groups(rollouts.group[rows])
    x = length[rows].log()
    x = x - groups.mean(x)
    spread = float((x * x).sum())
    return float((x * weight[rows].log()).sum()) / spread if spread > 1e-12 else None


def effective(method: Method, part: Tensor, log_ratio: Tensor, mask: Tensor, credit: Tensor) -> Tensor:
    """(B, T) ∂/∂log π_it of Σ_it part_it · term_it/A_it: ω for part = α, w for part = α·A."""
    if method.ratio == "none":
        return part
    bound = BOUNDS[method.bound]
    if bound.slope is None:  # log π carries the gradient
        return part * bound.term(method, LOG_RATIOS[method.ratio](log_ratio, mask), credit)
    if bound.carrier == "tokens":
        mean = ratio(method, bound.term(method, log_ratio, credit), mask)
        return _carried(method, part * mean, mask) * bound.slope(method, log_ratio, credit)
    return _carried(method, part * bound.slope(method, LOG_RATIOS[method.ratio](log_ratio, mask), credit), mask)


def _carried(method: Method, pull: Tensor, mask: Tensor) -> Tensor:
    """Σ_t' pull_it' · ∂log s_it'/∂log π_it; log s_i is Σ_t log ρ_it for a sequence product, and its mean over t."""
    if method.ratio in ("sequence_product", "sequence_mean"):
        pull = pull.sum(dim=1, keepdim=True).expand_as(mask)
        if method.ratio == "sequence_mean":
            pull = pull / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return pull.masked_fill(~mask, 0.0)
