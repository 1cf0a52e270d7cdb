"""A tabular policy on a tree of token sequences, small enough to enumerate for exact expectations.

A state is a prefix of tokens; it has its own row of logits z(s, ·). A sequence ends after `depth` tokens, or at once
with the token `stop`. With d(s) the probability of reaching s, everything is a finite sum:

    q(s,a) = v(s·a)     v(s) = Σ_a π(a|s) q(s,a)     v(leaf) = r(leaf)     J = v(∅)
    ∂J/∂z(s,a) = d(s) π(a|s) (q(s,a) − v(s))

and the expectation of any estimator ĝ over groups of R is Σ over all N^R groups of Π_i π(y_i) · ĝ.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError

LARGEST = 200_000  # rows that are still quick to sum over


@dataclass(frozen=True, kw_only=True)
class Tree:
    """All sequences of `tokens` symbols up to `depth`; symbol `stop` (if any) ends one early.

    >>> tree = Tree(tokens=2, depth=2)
    >>> tree.leaves
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> tree.value(torch.zeros(3, 2), torch.tensor([0., 0., 0., 1.]))[tree.states[()]]
    tensor(0.2500)
    """

    tokens: int = 2
    depth: int = 3
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.depth < 1:
            raise CreditscopeError(f"a tree needs tokens >= 2 and depth >= 1, got {self.tokens} and {self.depth}")
        if self.tokens**self.depth > LARGEST:
            raise CreditscopeError(f"{self.tokens}^{self.depth} sequences are too many to enumerate; "
                                   f"at most {LARGEST}")
        if self.stop is not None and not 0 <= self.stop < self.tokens:
            raise CreditscopeError(f"stop must be a token 0..{self.tokens - 1} or None, got {self.stop}")

    # -- states and sequences -----------------------------------------------------------------------------------

    @cached_property
    def states(self) -> dict[tuple[int, ...], int]:
        """Prefix -> its row of logits, root first, shorter before longer."""
        prefixes = (p for n in range(self.depth) for p in itertools.product(range(self.tokens), repeat=n))
        return {p: i for i, p in enumerate(p for p in prefixes if self.stop not in p)}

    @cached_property
    def leaves(self) -> list[tuple[int, ...]]:
        """Every finished sequence, in lexical order; N of them."""
        ends = ((*s, a) for s in self.states for a in range(self.tokens))
        return sorted(y for y in ends if y not in self.states)

    @cached_property
    def visited(self) -> Tensor:
        """(N, depth) row of logits used at each token; −1 past the end."""
        return self._table([[self.states[y[:t]] for t in range(len(y))] for y in self.leaves], fill=-1)

    @cached_property
    def chosen(self) -> Tensor:
        """(N, depth) the tokens; 0 past the end."""
        return self._table([list(y) for y in self.leaves], fill=0)

    @property
    def mask(self) -> Tensor:
        return self.visited >= 0

    def _table(self, rows: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (self.depth - len(row)) for row in rows])

    # -- values and gradients --------------------------------------------------------------------------------

    def logp(self, logits: Tensor) -> Tensor:
        """(N, depth) log π of every token of every sequence; 0 past the end."""
        self._check(logits)
        chosen = logits.log_softmax(dim=1)[self.visited.clamp(min=0), self.chosen]
        return chosen.masked_fill(~self.mask, 0.0)

    def probability(self, logits: Tensor) -> Tensor:
        """(N,) π(y) = Π_t π(y_t | y_<t); sums to 1."""
        return self.logp(logits).sum(dim=1).exp()

    def q(self, logits: Tensor, reward: Tensor) -> Tensor:
        """(S, A) q(s,a) = v(s·a), the expected reward after taking a in s."""
        return self._solve(logits, reward)[0]

    def value(self, logits: Tensor, reward: Tensor) -> Tensor:
        """(S,) v(s) = Σ_a π(a|s) q(s,a); the root's is J."""
        return self._solve(logits, reward)[1]

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
        q, v = self._solve(logits, reward)
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

    def _solve(self, logits: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        self._check(logits)
        if tuple(reward.shape) != (len(self.leaves),):
            raise CreditscopeError(f"reward must have one entry per sequence, shape ({len(self.leaves)},), "
                                   f"got {tuple(reward.shape)}")
        policy = logits.softmax(dim=1)
        worth = {leaf: reward[i].to(policy) for i, leaf in enumerate(self.leaves)}
        rows: list[Tensor] = []
        for prefix in reversed(self.states):  # children come later in the order, so they are done
            after = torch.stack([worth[(*prefix, a)] for a in range(self.tokens)])
            rows.append(after)
            worth[prefix] = (policy[self.states[prefix]] * after).sum()
        return torch.stack(rows[::-1]), torch.stack([worth[prefix] for prefix in self.states])

    def _check(self, logits: Tensor) -> None:
        if tuple(logits.shape) != (len(self.states), self.tokens):
            raise CreditscopeError(f"logits must have shape (states, tokens) = ({len(self.states)}, {self.tokens}), "
                                   f"got {tuple(logits.shape)}")

    # -- groups ------------------------------------------------------------------------------------------

    def groups(self, size: int) -> Tensor:
        """(N^size, size) every ordered group of sequences, as indices into `leaves`."""
        if size < 1 or len(self.leaves) ** size > LARGEST:
            raise CreditscopeError(f"{len(self.leaves)}^{size} groups cannot be enumerated; use a size in 1.. with at "
                                   f"most {LARGEST} groups")
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
