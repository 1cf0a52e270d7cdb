"""P2.2 (arXiv:2601.05002, Prop. 1): the weight W = Σ_{i∈S} ω_i A_i of a prefix that answers share, against autograd on
a tabular policy. C.3 (ours): W under even weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.claims.verdict import ClaimVerdict, at_most, exact
from creditscope.exact import shared_prefix as closed
from creditscope.exact.p2 import EQUAL, apart
from creditscope.methods.axes import Method
from creditscope.methods.table import METHODS, even
from creditscope.objective.surrogate import effective_credit, surrogate


@dataclass(frozen=True)
class TabularPolicy:
    """A tabular policy over three symbols, one row of logits per context, and the answers of two prompts."""

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
    """Five and three answers of 2 to 7 tokens over two of the symbols; all share their first two tokens, and no reward
    is its group's mean, so that every answer has credit."""
    draw = torch.Generator().manual_seed(0)
    group = torch.tensor([0, 0, 1, 0, 1, 0, 1, 0])
    mask = torch.arange(7) < torch.tensor([6, 3, 5, 7, 4, 6, 2, 5])[:, None]
    tokens = torch.randint(1, 3, mask.shape, generator=draw)
    tokens[:, :2] = torch.tensor([1, 2])
    blank = torch.zeros(mask.shape, dtype=torch.float64)
    rollouts = Rollouts(tokens=tokens * mask, mask=mask, logp=blank, group=group,
                        reward=torch.tensor([1, 0, 0, 1, 0.75, 0, 1, 0.25], dtype=torch.float64))
    tree = closed.nodes(rollouts)
    # The context of a token is the node before it; that of a first token is its prompt.
    before = torch.cat([len(tree) + group[:, None], tree.index[:, :-1]], dim=1)
    used, slot = torch.unique(before[mask], return_inverse=True)
    context = torch.zeros_like(before).masked_scatter_(mask, slot)
    logits, shift = torch.randn(2, len(used), 3, generator=draw, dtype=torch.float64)
    empty = TabularPolicy(rollouts, tree, context, logits)
    # Times 0.75, so that GTPO's filter at ln 2 keeps some answers and drops others.
    entropy = 0.75 * (logits.softmax(1) * -logits.log_softmax(1)).sum(1)[context].masked_fill(~mask, 0.0)
    return replace(empty, rollouts=replace(rollouts, logp=empty.log_probs(logits), entropy=entropy,
                                           ref_logp=empty.log_probs(logits + 0.3 * shift)))


CANCELS = ("dr_grpo", "dapo", "rloo")
"""Rows that cancel on a prefix that the whole group shares, by P2's Prop. 1: one weight for all, and Σ A = 0."""
STAYS = ("grpo", "gspo", "gmpo", "sapo", "opo", "reinforce_pp", "cppo", "gtpo")
"""Rows that do not: 1/L_i, a mask, or a baseline that is not the group's mean."""
BY_LENGTH = ("grpo", "gspo", "gmpo", "sapo")
"""Rows whose weight is 1/L_i and nothing else."""
BY_TOKEN, BY_SEQUENCE = ("dr_grpo", "dapo", "grpo_even"), ("gcpo", "gspo_even")
"""Rows that cancel at ratio 1: with token ratios, which are equal on a shared token, and with sequence ratios."""
STEPS = (0.0, 0.1, 30.0)
"""Sizes of the inner step: none, one that passes no bound of 0.2, and one that passes many."""


def prefix_bias(*, methods: Mapping[str, Method] = METHODS,
                predict: Callable[..., closed.PrefixBias] = closed.prefix_bias) -> list[ClaimVerdict]:
    """P2.2: W = Σ_{i∈S} ω_i A_i at shared prefixes, which rows cancel there, and which answers 1/L_i favours."""
    world = tabular_policy()
    return [_predicted(world, methods, predict), _who_cancels(world, methods), _after_a_step(world, methods),
            *(_favours_short(methods[name]) for name in BY_LENGTH)]


def even_weights(*, methods: Mapping[str, Method] = METHODS, flatten: Callable[[Method], Method] = even
                 ) -> list[ClaimVerdict]:
    """C.3, ours: does `even(method)` remove what a method leaves on a prefix that the whole group shares?"""
    world, out = tabular_policy(), []
    for method in (methods[name] for name in STAYS):
        flat = flatten(method)
        before, after = _root(world, method), _root(world, flat)
        out.append(at_most(
            EQUAL, "what even weights leave on a prefix that the whole group shares, at ratio 1: Σ|W| / Σ|w|",
            flat.name, after, f"{method.name} leaves {before:.2g} of its mass there, {flat.name} {after:.2g}", n=1,
            of="batches"))
    return out


def _root(world: TabularPolicy, method: Method, logp: Tensor | None = None) -> float:
    """Σ|W| / Σ|w| over the nodes that a whole group shares, both by autograd: 0 cancels, 1 all pull one way."""
    bare = method.bare
    live = world.rollouts.logp if logp is None else logp
    w = effective_credit(lambda lp: surrogate(bare, lp, world.rollouts), live)
    total, mass = closed.measured(bare, world.rollouts, world.tree, live), world.tree.sum(w.abs())
    return float(total[world.tree.whole].abs().sum() / mass[world.tree.whole].sum())


def _predicted(world: TabularPolicy, methods: Mapping[str, Method], predict: Callable[..., closed.PrefixBias]
               ) -> ClaimVerdict:
    errors = []
    outside = torch.randn(world.rollouts.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for method in methods.values():
        credit = outside if method.external else None
        bare = method.bare
        for size in STEPS:
            logp = world.step(bare, size) if credit is None else world.rollouts.logp + 0.01 * size * outside
            found = closed.measured(bare, world.rollouts, world.tree, logp, credit)
            told = predict(bare, world.rollouts, logp, credit).total
            errors.append(apart(found, told))
    return at_most(EQUAL, "W = Σ ω_i A_i predicted and by autograd, at every node, at ratio 1 and after an inner step; "
                   "max |Δ| / max |W|", "tabular policy", max(errors), "the predicted W differs from autograd's "
                   f"by up to {max(errors):.2g} of the largest", n=len(errors), of="methods and steps")


def _who_cancels(world: TabularPolicy, methods: Mapping[str, Method]) -> ClaimVerdict:
    roots = {name: _root(world, methods[name]) for name in (*CANCELS, *STAYS)}
    wrong = [name for name, root in roots.items() if (root <= EQUAL) != (name in CANCELS)]
    least = min(roots[name] for name in STAYS)
    reason = f"{len(wrong)} of {len(roots)} rows are not as listed: {', '.join(wrong)}" if wrong else \
        f"as listed: three rows cancel, and of the other eight the least leaves {least:.2g} of its mass"
    return exact("who cancels on a prefix that the whole group shares, at ratio 1: Σ|W| / Σ|w|", "tabular policy",
                 not wrong, len(wrong), reason, expected=f"{', '.join(CANCELS)}; not {', '.join(STAYS)}",
                 threshold=f"cancels: ≤ {EQUAL:g}", n=len(roots), of="methods")


def _after_a_step(world: TabularPolicy, methods: Mapping[str, Method]) -> ClaimVerdict:
    roots = {name: _root(world, row, world.step(row, STEPS[1]))
             for name in (*BY_TOKEN, *BY_SEQUENCE)
             for row in [methods[name].replace(bound="none", clip_low=None, clip_high=None, beta=0.0)]}
    wrong = [name for name, root in roots.items() if (root <= EQUAL) != (name in BY_TOKEN)]
    least = min(roots[name] for name in BY_SEQUENCE)
    reason = f"token ratios still cancel, and sequence ratios leave at least {least:.2g} of their mass" \
        if not wrong else f"{len(wrong)} of {len(roots)} rows are not so: {', '.join(wrong)}"
    return exact("after one inner step without clipping, of rows that cancel at ratio 1: Σ|W| / Σ|w|", "tabular policy",
                 not wrong, least, reason, threshold=f"cancels: ≤ {EQUAL:g}", n=len(roots), of="methods",
                 expected=f"{', '.join(BY_TOKEN)} still cancel; {', '.join(BY_SEQUENCE)} no longer")


def _favours_short(method: Method) -> ClaimVerdict:
    """A good and a bad answer that share their first token: W > 0 where the good one is shorter, < 0 where longer."""
    wrong, cases = 0, 36
    for good, bad in product(range(1, 7), repeat=2):
        total = float(closed.measured(method.bare, *_pair(good, bad))[0])
        wrong += (total > EQUAL) != (bad > good) or (total < -EQUAL) != (good > bad)
    return exact("1/L_i favours short positive answers: the sign of W where a good and a bad answer share their first "
                 "token, lengths 1 to 6", method.name, wrong == 0, wrong, "W has the sign of L_bad − L_good in "
                 f"{cases - wrong} of {cases} pairs", expected="W > 0 iff the good answer is shorter",
                 threshold="no pair of another sign", n=cases, of="pairs")


def _pair(good: int, bad: int) -> tuple[Rollouts, closed.Nodes]:
    """Two answers that share their first token and no other."""
    lengths = torch.tensor([good, bad])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.tensor([[2], [3]]).expand_as(mask).clone()
    tokens[:, 0] = 1
    batch = Rollouts(tokens=tokens * mask, mask=mask, logp=-1.0 * mask.double(),
                     reward=torch.tensor([1.0, 0.0], dtype=torch.float64), group=torch.tensor([0, 0]))
    return batch, closed.nodes(batch)
