"""A tree with probabilities, gradients and groups: expectations by enumeration, written apart from `exact`.

    ∂J/∂z(s,a) = d(s) π(a|s) (q(s,a) − v(s))        d(s): the probability of reaching s

The expectation of an estimator ĝ over groups of R is Σ over all N^R groups of Π_i π(y_i) · ĝ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.tasks import tree


class Tree(tree.Tree):
    def q(self, logits: Tensor, reward: Tensor) -> Tensor:
        """(S, A) q(s,a) = v(s·a), the expected reward after taking a in s."""
        return self.solve(logits, reward)[0]

    def value(self, logits: Tensor, reward: Tensor) -> Tensor:
        """(S,) v(s) = Σ_a π(a|s) q(s,a); the root's is J."""
        return self.solve(logits, reward)[1]

    def logp(self, logits: Tensor) -> Tensor:
        """(N, depth) log π of every token of every sequence; 0 past the end."""
        chosen = logits.log_softmax(dim=1)[self.visited.clamp(min=0), self.chosen]
        return chosen.masked_fill(~self.mask, 0.0)

    def probability(self, logits: Tensor) -> Tensor:
        """(N,) π(y) = Π_t π(y_t | y_<t); sums to 1."""
        return self.logp(logits).sum(dim=1).exp()

    def reach(self, logits: Tensor) -> Tensor:
        """(S,) d(s) = Π_t π(s_t | s_<t), the probability of passing through s."""
        policy = logits.softmax(dim=1)
        ways: list[Tensor] = []
        for prefix in self.states:
            parent = self.states[prefix[:-1]] if prefix else -1
            ways.append(ways[parent] * policy[parent, prefix[-1]] if prefix else policy.new_ones(()))
        return torch.stack(ways)

    def gradient(self, logits: Tensor, reward: Tensor) -> Tensor:
        """(S, A) ∂J/∂z(s,a) = d(s) π(a|s) (q(s,a) − v(s))."""
        q, v = self.solve(logits, reward)
        return self.reach(logits)[:, None] * logits.softmax(dim=1) * (q - v[:, None])

    def scores(self, logits: Tensor) -> Tensor:
        """(N, S, A) ψ(y) = ∂ log π(y)/∂z: one at each (s, a) taken, minus π(·|s) at each s visited."""
        policy = logits.softmax(dim=1)
        out = logits.new_zeros(len(self.leaves), *logits.shape)
        for row, leaf in enumerate(self.leaves):
            for t, token in enumerate(leaf):
                state = self.states[leaf[:t]]
                out[row, state] -= policy[state]
                out[row, state, token] += 1
        return out

    def groups(self, size: int) -> Tensor:
        """(N^size, size) every ordered group of sequences, as indices into `leaves`."""
        if size < 1 or len(self.leaves) ** size > tree.LARGEST:
            raise CreditscopeError(f"{len(self.leaves)}^{size} groups cannot be enumerated; use a size in 1.. with at "
                                   f"most {tree.LARGEST} groups")
        return torch.cartesian_prod(*[torch.arange(len(self.leaves))] * size).reshape(-1, size)

    def chance(self, logits: Tensor, groups: Tensor) -> Tensor:
        """(G,) Π_i π(y_i), the probability of drawing each group."""
        return self.logp(logits).sum(dim=1)[groups].sum(dim=1).exp()

    def rollouts(self, logits: Tensor, groups: Tensor, reward: Tensor) -> Rollouts:
        """The groups as a batch, sampled on policy: row i·size + j is the j-th sequence of group i."""
        rows = groups.reshape(-1)
        group = torch.arange(groups.shape[0]).repeat_interleave(groups.shape[1])
        return Rollouts(tokens=self.chosen[rows], mask=self.mask[rows], logp=self.logp(logits).detach()[rows],
                        reward=reward[rows], group=group)
