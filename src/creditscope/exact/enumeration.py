"""The expectation of an estimator of credit over all groups of a finite world, without sampling.

In a world with N sequences a group of R is one of finitely many multisets, each with its probability, so that

    E[A | s, a]   the mean credit of a token a that was chosen in state s       beside the truth q(s, a) − v(s)
    E[ĝ], Var[ĝ]  ĝ = 1/R Σ_it A_it ∇log π(y_it)                                beside ∇J

are finite sums, exact up to rounding. Both are needed: since Σ_a π(a|s) ∇log π(a|s) = 0, an error of credit that
depends on s alone does not change the gradient,

    E[ĝ]_(s,a) = d(s) π(a|s) (E[A|s,a] − Σ_b π(b|s) E[A|s,b]).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from creditscope.batch.rollouts import STEP_FIELDS, TOKEN_FIELDS, Rollouts
from creditscope.credit import find_estimator
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.tasks.tree import LARGEST, Tree
from creditscope.tasks.turns import Ladder

BATCH = 256  # groups in one batch: K of their rollouts stays small


@dataclass(frozen=True, kw_only=True)
class World:
    """Every sequence of a policy table π(a|s), once."""

    rollouts: Rollouts
    """N rows in one group; each token is a step."""
    state: Tensor
    """(N, T) the row of π that each token was drawn from; −1 past the end."""
    policy: Tensor
    """(S, A) π(a|s)."""
    advantage: Tensor
    """(S, A) q(s,a) − v(s)."""
    value: Tensor
    """(N, T+1) E[r | the first t tokens]; from the end on, the reward."""

    @cached_property
    def chance(self) -> Tensor:
        """(N,) π(y), the probability of each sequence."""
        return self.rollouts.logp.sum(dim=1).exp()

    @cached_property
    def place(self) -> Tensor:
        """(N, T) s·A + a of each token, as an index into the flat (S, A); 0 past the end."""
        return (self.state.clamp(min=0) * self.policy.shape[1] + self.rollouts.tokens).masked_fill(self.state < 0, 0)

    @cached_property
    def visits(self) -> Tensor:
        """(S, A) d(s) π(a|s): the expected number of times that a sequence chooses a in s. Sums to E[L]."""
        return self.collect(self.chance[:, None].expand(self.state.shape))

    @cached_property
    def gradient(self) -> Tensor:
        """(S, A) ∂J/∂z(s,a) = d(s) π(a|s) (q(s,a) − v(s)), z the logits."""
        return self.visits * self.advantage

    @cached_property
    def scores(self) -> Tensor:
        """(N, S·A) ψ(y) = ∂log π(y)/∂z."""
        taken = self.per_token(self.rollouts.mask.to(self.policy.dtype))
        return (taken - self.policy * taken.sum(dim=2, keepdim=True)).flatten(1)

    def collect(self, weight: Tensor) -> Tensor:
        """(S, A) Σ of `weight` (N, T) over the tokens that choose a in s."""
        return self.per_token(weight).sum(dim=0)

    def per_token(self, weight: Tensor, rows: Tensor | None = None) -> Tensor:
        """(n, S, A) each row's `weight` (n, T) at the table entries of its tokens; of all rows, or of `rows`."""
        where, mask = self.place, self.rollouts.mask
        if rows is not None:
            where, mask = where[rows], mask[rows]
        flat = weight.new_zeros(len(where), self.policy.numel())
        return flat.scatter_add_(1, where, weight.masked_fill(~mask, 0.0)).view(-1, *self.policy.shape)

    def groups(self, size: int) -> tuple[Tensor, Tensor]:
        """(G, R) every multiset of sequences and (G,) its probability R!/Π_y n_y! · Π_i π(y_i)."""
        count = math.comb(len(self.rollouts) + size - 1, size) if size > 0 else 0
        if not 0 < count <= LARGEST:
            raise CreditscopeError(f"groups of {size} out of {len(self.rollouts)} sequences cannot be enumerated; use "
                                   f"a size in 1.. with at most {LARGEST} multisets, not {count}")
        found = list(itertools.combinations_with_replacement(range(len(self.rollouts)), size))
        orders = [math.factorial(size) // math.prod(math.factorial(n) for n in Counter(g).values()) for g in found]
        index = torch.tensor(found)
        return index, self.chance[index].prod(dim=1) * torch.tensor(orders, dtype=self.policy.dtype)

    def batch(self, groups: Tensor) -> Rollouts:
        """The groups (G, R) as rollouts, sampled on policy: row i·R + j is the j-th sequence of group i."""
        number = torch.arange(groups.shape[0]).repeat_interleave(groups.shape[1])
        given = {name: getattr(self.rollouts, name) for name in ("reward", *TOKEN_FIELDS, *STEP_FIELDS)}
        taken = {name: value[groups.reshape(-1)] for name, value in given.items() if value is not None}
        return Rollouts(group=number, **taken)


def tree_world(tree: Tree, logits: Tensor, reward: Tensor | None = None, step_reward: Tensor | None = None) -> World:
    """A tree whose sequences earn `reward` (N,) at their end, or `step_reward` ρ(s,a) (S, A) with every token.

    A state is a prefix, so only siblings with equal tokens so far share it.
    """
    mask, at = tree.mask, tree.visited.clamp(min=0)
    steps = None if step_reward is None else step_reward[at, tree.chosen].masked_fill(~mask, 0.0)
    total = reward if steps is None else steps.sum(dim=1)
    assert total is not None
    q, value = tree.solve(logits, total)
    return _world(tokens=tree.chosen, mask=mask, state=tree.visited, policy=logits.softmax(dim=1), reward=total,
                  step_reward=steps, advantage=q - value[:, None], value=value[at])


def ladder_world(game: Ladder, policy: Tensor, start: int) -> World:
    """The walks of a ladder from rung `start` under a policy (H, rungs, 2); a state is a turn and a rung."""
    walks = game.walks()
    along = [game.walk(start, moves) for moves in walks]
    moves, rungs = torch.tensor(walks), torch.tensor([states[:-1] for states, _ in along])
    earned = torch.tensor([rewards for _, rewards in along], dtype=policy.dtype)
    value = game.values(policy)
    turn = torch.arange(game.turns)
    after = torch.tensor([[game.move(s, a) for a in range(policy.shape[2])] for s in range(game.top + 1)])
    q = after / game.top + value[1:, after]
    return _world(tokens=moves, mask=torch.ones_like(moves, dtype=torch.bool), state=turn * (game.top + 1) + rungs,
                  policy=policy.flatten(0, 1), reward=earned.sum(dim=1), step_reward=earned,
                  advantage=(q - value[:-1, :, None]).flatten(0, 1),
                  value=earned.cumsum(dim=1) - earned + value[turn, rungs])


def _world(*, tokens: Tensor, mask: Tensor, state: Tensor, policy: Tensor, reward: Tensor, step_reward: Tensor | None,
           advantage: Tensor, value: Tensor) -> World:
    at, log_policy = state.clamp(min=0), policy.log()
    rollouts = Rollouts(
        tokens=tokens, mask=mask, logp=log_policy[at, tokens].masked_fill(~mask, 0.0), reward=reward,
        group=torch.zeros(len(tokens), dtype=torch.long), entropy=-(policy * log_policy).sum(dim=1)[at] * mask,
        collision=policy.square().sum(dim=1)[at] * mask,
        step=torch.arange(tokens.shape[1]).expand_as(tokens).masked_fill(~mask, -1), step_reward=step_reward,
        step_state=None if step_reward is None else state)
    ended = torch.where(mask, value, reward[:, None])
    return World(rollouts=rollouts, state=state, policy=policy, advantage=advantage,
                 value=torch.cat([ended, reward[:, None]], dim=1))


class ExactTools(Tools):
    """The exact values and Gram for an estimator: v itself and not the mean of K draws, whose noise
    `continuation_noise` gives. `error` (S,) is added to the critic's values and to the learned reward of prefixes."""

    def __init__(self, world: World, rows: Tensor, error: Tensor | None = None) -> None:
        self.world, self.rows, self.error = world, rows, error

    def values(self, cuts: Tensor, samples: int) -> Tensor:
        return self.world.value[self.rows].gather(1, cuts.clamp(min=0)).masked_fill(cuts < 0, torch.nan)

    def critic(self) -> Tensor:
        value = self.world.value[self.rows, :-1]
        return value if self.error is None else value + self.error[self.world.state[self.rows].clamp(min=0)]

    def scores(self) -> Tensor:
        """The values as a learned reward: right at the end of an answer, off by `error` before it."""
        value, state = self.world.value[self.rows], self.world.state[self.rows]
        if self.error is None:
            return value
        wrong = self.error[state.clamp(min=0)].masked_fill(state < 0, 0.0)
        return value + torch.nn.functional.pad(wrong, (0, 1))

    def gram(self) -> Tensor:
        scores = self.world.scores[self.rows]
        return scores @ scores.T


@dataclass(frozen=True, kw_only=True)
class Exact:
    """One estimator in one world, by enumeration. Every mean over (s, a) is weighted by visits."""

    world: World
    by_sequence: Tensor
    """(N, T) E[A_it | y_i], over the siblings."""
    by_token: Tensor
    """(S, A) E[A | s, a]; 0 where s is never visited."""
    variance: float
    """Mean of Var[A | s, a]."""
    gradient: Tensor
    """(S, A) E[ĝ]."""
    gradient_variance: float
    """E‖ĝ − E ĝ‖²."""

    @property
    def bias(self) -> float:
        """RMS of E[A|s,a] − (q − v), over the RMS of q − v: 1 for credit of 0."""
        return self._rms(self.by_token - self.world.advantage) / self._rms(self.world.advantage)

    @property
    def factor(self) -> float:
        """The c for which c·(q − v) is nearest to E[A|s,a]."""
        weight, truth = self.world.visits, self.world.advantage
        return float((weight * self.by_token * truth).sum() / (weight * truth * truth).sum())

    @property
    def shape(self) -> float:
        """The bias up to a factor: RMS of E[A|s,a] − c·(q − v), over the RMS of c·(q − v)."""
        fitted = self.factor * self.world.advantage
        return self._rms(self.by_token - fitted) / self._rms(fitted)

    @property
    def gradient_error(self) -> float:
        """‖E ĝ − ∇J‖ / ‖∇J‖."""
        return float((self.gradient - self.world.gradient).norm() / self.world.gradient.norm())

    @property
    def gradient_factor(self) -> float:
        """⟨E ĝ, ∇J⟩ / ‖∇J‖²."""
        return float((self.gradient * self.world.gradient).sum() / self.world.gradient.square().sum())

    @property
    def gradient_shape(self) -> float:
        """The error up to a factor: ‖E ĝ − c ∇J‖ / ‖c ∇J‖."""
        fitted = self.gradient_factor * self.world.gradient
        return float((self.gradient - fitted).norm() / fitted.norm())

    @property
    def cosine(self) -> float:
        """⟨E ĝ, ∇J⟩ / (‖E ĝ‖ ‖∇J‖)."""
        return self.gradient_factor * float(self.world.gradient.norm() / self.gradient.norm())

    @property
    def noise(self) -> float:
        """E‖ĝ − E ĝ‖² / ‖E ĝ‖², which no factor of the credit changes."""
        return self.gradient_variance / float(self.gradient.square().sum())

    def _rms(self, value: Tensor) -> float:
        weight = self.world.visits
        return float(((weight * value * value).sum() / weight.sum()).sqrt())


def measure(spec: str, method: Method, world: World, size: int, error: Tensor | None = None) -> Exact:
    """The estimator `spec`, under a method's row, over all groups of `size`; `error` (S,) is the critic's.

    >>> from creditscope.methods.table import METHODS
    >>> world = tree_world(Tree(tokens=2, depth=1), torch.zeros(1, 2).double(), torch.tensor([0., 1.]).double())
    >>> found = measure("outcome", METHODS["p1_grpo"], world, size=2)
    >>> found.by_token.tolist(), found.factor
    ([[-0.25, 0.25]], 0.5)
    """
    estimate = find_estimator(spec)
    groups, chance = world.groups(size)
    first = torch.zeros_like(world.rollouts.logp)
    second, summed, total = torch.zeros_like(first), torch.zeros_like(world.policy), 0.0
    batch = 1 if estimate.row.across_groups else BATCH
    for at in range(0, len(groups), batch):
        some, weight = groups[at : at + batch], chance[at : at + batch]
        rows = some.reshape(-1)
        credit = estimate(method, world.batch(some), ExactTools(world, rows, error))
        each = weight.repeat_interleave(size)[:, None] / size
        first.index_add_(0, rows, each * credit)
        second.index_add_(0, rows, each * credit * credit)
        given = world.per_token(credit, rows).view(len(some), size, *world.policy.shape).mean(dim=1)
        step = given - world.policy * given.sum(dim=2, keepdim=True)
        summed += (weight[:, None, None] * step).sum(dim=0)
        total += float((weight * step.square().sum(dim=(1, 2))).sum())
    seen = world.visits.masked_fill(world.visits == 0, 1.0)
    mean, square = world.collect(first) / seen, world.collect(second) / seen
    spread = (world.visits * (square - mean * mean)).sum() / world.visits.sum()
    return Exact(world=world, by_sequence=first / world.chance[:, None], by_token=mean, variance=float(spread),
                 gradient=summed, gradient_variance=total - float(summed.square().sum()))


def best_constant(world: World) -> Tensor:
    """b* = E[r‖ψ‖²] / E[‖ψ‖²], the constant baseline of least variance."""
    weight = world.chance * world.scores.square().sum(dim=1)
    return (weight * world.rollouts.reward).sum() / weight.sum()


def constant_variance(world: World, baseline: Tensor, size: int) -> float:
    """E‖ĝ − ∇J‖² of A_i = r_i − b with a constant b: (E[(r − b)²‖ψ‖²] − ‖∇J‖²) / R."""
    square = (world.rollouts.reward - baseline).square() * world.scores.square().sum(dim=1)
    return float((world.chance * square).sum() - world.gradient.square().sum()) / size


def continuation_noise(world: World, samples: int) -> float:
    """The variance that K draws in place of exact values add to the mean of Var[A | s, a], with a cut before every
    token. The start's value comes from the siblings and the end's is the reward, so neither is drawn.

        Var[V̂(y_<t)] + Var[V̂(y_≤t)],   Var[V̂] = Var[r | prefix] / K = v(1 − v)/K for rewards 0 and 1
    """
    if bool(((world.rollouts.reward != 0) & (world.rollouts.reward != 1)).any()):
        raise CreditscopeError("the noise of continuations is known for rewards 0 and 1 only")
    drawn = world.value * (1 - world.value)  # 0 from the end on, where V is the reward
    drawn = torch.cat([torch.zeros_like(drawn[:, :1]), drawn[:, 1:]], dim=1)
    both = (drawn[:, :-1] + drawn[:, 1:]).masked_fill(~world.rollouts.mask, 0.0)
    return float((world.chance[:, None] * both).sum() / world.visits.sum()) / samples
