"""A tabular policy, one row of logits per context, with answers that share prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.exact import prefix_bias as closed
from creditscope.methods.axes import Method
from creditscope.objective.surrogate import surrogate


@dataclass(frozen=True)
class TabularPolicy:
    """A tabular policy over three symbols, one row of logits a context, and the answers of two prompts."""

    rollouts: Rollouts
    tree: closed.Nodes
    context: Tensor
    """(B, T) the row of logits that each token is drawn from."""
    logits: Tensor

    def log_probs(self, logits: Tensor) -> Tensor:
        """(B, T) log π of the chosen tokens."""
        chosen = logits.log_softmax(dim=1)[self.context].gather(2, self.rollouts.tokens[..., None]).squeeze(2)
        return chosen.masked_fill(~self.rollouts.mask, 0.0)

    def step(self, method: Method, size: float) -> Tensor:
        """(B, T) log π after one inner step of plain gradient ascent on the method's J: θ + size·∇J."""
        leaf = self.logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad(surrogate(method, self.log_probs(leaf), self.rollouts), leaf)
        return self.log_probs(self.logits + size * slope)


def tabular_policy() -> TabularPolicy:
    """Five and three answers of 2 to 7 tokens over two of the symbols, so that they share much; two tokens are common
    to all, and no reward is the mean of its group, so that no answer goes without credit."""
    draw = torch.Generator().manual_seed(0)
    group = torch.tensor([0, 0, 1, 0, 1, 0, 1, 0])
    mask = torch.arange(7) < torch.tensor([6, 3, 5, 7, 4, 6, 2, 5])[:, None]
    tokens = torch.randint(1, 3, mask.shape, generator=draw)
    tokens[:, :2] = torch.tensor([1, 2])
    blank = torch.zeros(mask.shape, dtype=torch.float64)
    rollouts = Rollouts(tokens=tokens * mask, mask=mask, logp=blank, group=group,
                        reward=torch.tensor([1, 0, 0, 1, 0.75, 0, 1, 0.25], dtype=torch.float64))
    tree = closed.nodes(rollouts)
    # The context of a token is the node before it; that of a first token is its prompt. Nothing follows a last node.
    before = torch.cat([len(tree) + group[:, None], tree.index[:, :-1]], dim=1)
    used, slot = torch.unique(before[mask], return_inverse=True)
    context = torch.zeros_like(before).masked_scatter_(mask, slot)
    logits, shift = torch.randn(2, len(used), 3, generator=draw, dtype=torch.float64)
    empty = TabularPolicy(rollouts, tree, context, logits)
    # Three quarters of it: GTPO's filter at ln 2 then keeps some answers and drops others.
    entropy = 0.75 * (logits.softmax(1) * -logits.log_softmax(1)).sum(1)[context].masked_fill(~mask, 0.0)
    return replace(empty, rollouts=replace(rollouts, logp=empty.log_probs(logits), entropy=entropy,
                                           ref_logp=empty.log_probs(logits + 0.3 * shift)))
