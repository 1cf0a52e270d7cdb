"""A tabular policy on a tree of token sequences, small enough to enumerate for exact expectations.

A state is a prefix of tokens with its own row of logits z(s, ·). A sequence ends after `depth` tokens, or at once with
the token `stop`.

    q(s,a) = v(s·a)     v(s) = Σ_a π(a|s) q(s,a)     v(leaf) = r(leaf)     J = v(∅)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError

LARGEST = 200_000  # rows that are still quick to sum over


@dataclass(frozen=True, kw_only=True)
class Tree:
    """All sequences of `tokens` symbols up to `depth`; symbol `stop` (if any) ends one early.

    >>> tree = Tree(tokens=2, depth=2)
    >>> tree.leaves
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> tree.solve(torch.zeros(3, 2), torch.tensor([0., 0., 0., 1.]))[1][tree.states[()]]
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

    # -- values --------------------------------------------------------------------------------

    def solve(self, logits: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """(S, A) q(s,a), the expected reward after taking a in s, and (S,) v(s), of which the root's is J."""
        if tuple(logits.shape) != (len(self.states), self.tokens):
            raise CreditscopeError(f"logits must have shape (states, tokens) = ({len(self.states)}, {self.tokens}), "
                                   f"got {tuple(logits.shape)}")
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
