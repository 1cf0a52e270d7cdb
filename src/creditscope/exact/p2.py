"""P2's claims (arXiv:2601.05002) that need no run: its formulas against autograd and against torch's own optimisers.

Everything is float64 on batches of a few answers. Each claim is a function that returns its verdicts; its keyword
arguments are what is put to the test, so that something wrong can be put there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.claims.verdict import Verdict, decided, missing
from creditscope.exact import prefix_bias as closed
from creditscope.exact.p2_table import BETA, TABLE, Objective, Symbols
from creditscope.exact.ratio_one import value_at_ratio_one
from creditscope.methods.axes import Method
from creditscope.methods.table import GRPO, METHODS, even
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.optimizer.replay import carry
from creditscope.optimizer.scale import PHIS, RewardParts, sweep

EQUAL = 1e-9
"""Relative difference below which two results are one formula: float64 sums of some dozen terms round at 1e-15, and a
forgotten factor is of order 1."""


# -- P2.1: ten methods as rows of one surrogate -----------------------------------------------------------------------

MOVES = (0.0, 3e-4, 0.4)
"""How far log π has moved since sampling, std: not at all, about GSPO's bounds, and past everybody's."""
FROM_TABLE = ("gcpo",)
"""Rows of ours that were written from P2's table for want of the method's own text: agreement would prove nothing."""


def ten_methods(*, methods: Mapping[str, Method] = METHODS) -> list[Verdict]:
    """Each row's w_it = ∂J/∂log π_it against that of the method's own loss, as printed and, if it departs, repaired."""
    out, batches = [], _moved_groups()
    for name, row in TABLE.items():
        if name not in methods:
            out.append(missing("P2.1", name, f"a row {name!r} in the table of methods", "as printed"))
            continue
        forms = {"as printed": row.printed}
        if row.repaired is not None:
            forms[f"repaired: {row.repair}"] = row.repaired
        for form, objective in forms.items():
            apart = [_apart(_own_credit(methods[name], batch, logp), _table_credit(objective, batch, logp))
                     for batch, logp in batches]
            worst = max(apart)
            reason = f"w differs by up to {worst:.2g} of its largest entry over {len(apart)} batches"
            circular = name in FROM_TABLE
            if circular:
                reason = f"needs {name}'s own loss: our row was written from this table, so that w differs by " \
                         f"{worst:.2g} says nothing"
            out.append(Verdict(
                claim="P2.1", definition=f"w_it of the row {form}, max |Δ| / max |w|", subject=name,
                outcome="undecided" if circular else decided(worst <= EQUAL), observed=worst, expected="0",
                threshold=f"≤ {EQUAL:g}", n=len(apart), of="batches", reason=reason))
    return out


def _moved_groups() -> list[tuple[Rollouts, Tensor]]:
    """Random groups of six answers, with log-probs of a policy that has moved since.

    They have some hundred tokens, so that some lie near every bound.
    """
    out = []
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        mask = torch.arange(30) < torch.tensor([10, 25, 15, 20, 30, 5])[:, None]
        logp, ref, entropy, move = (torch.rand(mask.shape, generator=draw, dtype=torch.float64) * mask
                                    for _ in range(4))
        batch = Rollouts(tokens=torch.randint(1, 5, mask.shape, generator=draw) * mask, mask=mask, logp=-logp,
                         reward=torch.tensor([1, 0, 0, 1, 0, 0.5], dtype=torch.float64),
                         group=torch.zeros(6, dtype=torch.int64), ref_logp=-ref, entropy=entropy)
        # Uniform on ±√3: mean 0, std 1.
        out += [(batch, batch.logp + size * math.sqrt(3) * (2 * move - 1) * mask) for size in MOVES]
    return out


def _own_credit(method: Method, batch: Rollouts, logp: Tensor) -> Tensor:
    return effective_credit(lambda lp: surrogate(_weighed(method), lp, batch), logp)


def _table_credit(objective: Objective, batch: Rollouts, logp: Tensor) -> Tensor:
    return effective_credit(lambda lp: objective(Symbols(batch, lp)), logp)


def _weighed(method: Method) -> Method:
    """The row with the table's β, where its loss has a KL term."""
    return method if method.kl == "none" else method.replace(beta=BETA)


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """max |Δ| / max |ours|."""
    return float((ours - theirs).abs().max() / ours.abs().max())


# -- a small world: a table of logits, and answers that share prefixes ------------------------------------------------


@dataclass(frozen=True)
class World:
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


def make_world() -> World:
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
    empty = World(rollouts, tree, context, logits)
    # Three quarters of it: GTPO's filter at ln 2 then keeps some answers and drops others.
    entropy = 0.75 * (logits.softmax(1) * -logits.log_softmax(1)).sum(1)[context].masked_fill(~mask, 0.0)
    return replace(empty, rollouts=replace(rollouts, logp=empty.log_probs(logits), entropy=entropy,
                                           ref_logp=empty.log_probs(logits + 0.3 * shift)))


# -- P2.2: prefix bias ------------------------------------------------------------------------------------------------

CANCELS = ("dr_grpo", "dapo", "rloo")
"""Rows that P2's Prop. 1 makes cancel on a prefix that the whole group shares: one weight for all, and Σ A = 0."""
STAYS = ("grpo", "gspo", "gmpo", "sapo", "opo", "reinforce_pp", "cppo", "gtpo")
"""Rows that it does not: 1/L_i, a mask, or a baseline that is not the group's mean."""
BY_LENGTH = ("grpo", "gspo", "gmpo", "sapo")
"""Rows whose weight is 1/L_i and nothing else."""
BY_TOKEN, BY_SEQUENCE = ("dr_grpo", "dapo", "grpo_even"), ("gcpo", "gspo_even")
"""Rows that cancel at ratio 1, with a ratio of the token, which all that share it have, and with one of the answer."""
STEPS = (0.0, 0.1, 30.0)
"""Sizes of the inner step: none, one that stops nobody with a bound of 0.2, and one that stops many."""


def prefix_bias(*, methods: Mapping[str, Method] = METHODS,
                predict: Callable[..., closed.PrefixBias] = closed.prefix_bias) -> list[Verdict]:
    """W = Σ_{i∈S} ω_i A_i at shared prefixes, who cancels there, and whom 1/L_i favours."""
    lacking = [name for name in dict.fromkeys((*CANCELS, *STAYS, *BY_TOKEN, *BY_SEQUENCE)) if name not in methods]
    if lacking:
        return [missing("P2.2", "tabular policy", f"the rows {', '.join(lacking)} in the table of methods")]
    world = make_world()
    return [_predicted(world, methods, predict), _who_cancels(world, methods), _after_a_step(world, methods),
            *(_favours_short(methods[name]) for name in BY_LENGTH)]


def even_weights(*, methods: Mapping[str, Method] = METHODS, flatten: Callable[[Method], Method] = even
                 ) -> list[Verdict]:
    """C.3, ours: does `even(method)` remove what a method leaves on a prefix that the whole group shares?"""
    lacking = [name for name in STAYS if name not in methods]
    if lacking:
        return [missing("C.3", "tabular policy", f"the rows {', '.join(lacking)} in the table of methods")]
    world = make_world()
    return [_evened(world, methods[name], flatten(methods[name])) for name in STAYS]


def _root(world: World, method: Method, logp: Tensor | None = None) -> float:
    """Σ|W| / Σ|w| over the nodes that a whole group shares, both by autograd: 0 cancels, 1 all pull one way."""
    bare = method.replace(beta=0.0)
    live = world.rollouts.logp if logp is None else logp
    w = effective_credit(lambda lp: surrogate(bare, lp, world.rollouts), live)
    total, mass = closed.measured(bare, world.rollouts, world.tree, live), world.tree.sum(w.abs())
    return float(total[world.tree.whole].abs().sum() / mass[world.tree.whole].sum())


def _predicted(world: World, methods: Mapping[str, Method], predict: Callable[..., closed.PrefixBias]) -> Verdict:
    worst, cases = 0.0, 0
    outside = torch.randn(world.rollouts.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for method in methods.values():
        credit = outside if method.external else None
        bare = method.replace(beta=0.0)
        for size in STEPS:
            logp = world.step(bare, size) if credit is None else world.rollouts.logp + 0.01 * size * outside
            found = closed.measured(bare, world.rollouts, world.tree, logp, credit)
            told = predict(bare, world.rollouts, logp, credit).total
            worst, cases = max(worst, _apart(found, told)), cases + 1
    return Verdict(
        claim="P2.2", definition="W = Σ ω_i A_i predicted and by autograd, at every node, at ratio 1 and after an "
        "inner step; max |Δ| / max |W|", subject="tabular policy", outcome=decided(worst <= EQUAL),
        observed=worst, expected="0", threshold=f"≤ {EQUAL:g}", n=cases, of="methods and steps",
        reason=f"the predicted W differs from autograd's by up to {worst:.2g} of the largest")


def _who_cancels(world: World, methods: Mapping[str, Method]) -> Verdict:
    roots = {name: _root(world, methods[name]) for name in (*CANCELS, *STAYS)}
    wrong = [name for name, root in roots.items() if (root <= EQUAL) != (name in CANCELS)]
    least = min(roots[name] for name in STAYS)
    reason = f"as listed: three rows cancel, and of the other eight the least leaves {least:.2g} of its mass" \
        if not wrong else f"{len(wrong)} of {len(roots)} rows are not as listed: {', '.join(wrong)}"
    return Verdict(
        claim="P2.2", definition="who cancels on a prefix that the whole group shares, at ratio 1: Σ|W| / Σ|w|",
        subject="tabular policy", outcome=decided(not wrong), observed=float(len(wrong)), reason=reason,
        expected=f"{', '.join(CANCELS)}; not {', '.join(STAYS)}", threshold=f"cancels: ≤ {EQUAL:g}", n=len(roots),
        of="methods")


def _after_a_step(world: World, methods: Mapping[str, Method]) -> Verdict:
    roots = {name: _root(world, row, world.step(row, STEPS[1]))
             for name in (*BY_TOKEN, *BY_SEQUENCE) for row in [_unclipped(methods[name])]}
    wrong = [name for name, root in roots.items() if (root <= EQUAL) != (name in BY_TOKEN)]
    least = min(roots[name] for name in BY_SEQUENCE)
    reason = f"token ratios still cancel, and sequence ratios leave at least {least:.2g} of their mass" \
        if not wrong else f"{len(wrong)} of {len(roots)} rows are not so: {', '.join(wrong)}"
    return Verdict(
        claim="P2.2", definition="after one inner step without clipping, of rows that cancel at ratio 1: Σ|W| / Σ|w|",
        subject="tabular policy", outcome=decided(not wrong), observed=least, reason=reason,
        expected=f"{', '.join(BY_TOKEN)} still cancel; {', '.join(BY_SEQUENCE)} no longer",
        threshold=f"cancels: ≤ {EQUAL:g}", n=len(roots), of="methods")


def _unclipped(method: Method) -> Method:
    return method.replace(bound="none", clip_low=None, clip_high=None, beta=0.0)


def _favours_short(method: Method) -> Verdict:
    """A good and a bad answer that share their first token: W > 0 where the good one is shorter, < 0 where longer."""
    wrong, cases = 0, 0
    for good, bad in product(range(1, 7), repeat=2):
        total = float(closed.measured(method.replace(beta=0.0), *_pair(good, bad))[0])
        wrong += (total > EQUAL) != (bad > good) or (total < -EQUAL) != (good > bad)
        cases += 1
    return Verdict(
        claim="P2.2", definition="1/L_i favours short positive answers: the sign of W where a good and a bad answer "
        "share their first token, lengths 1 to 6", subject=method.name, outcome=decided(wrong == 0),
        observed=float(wrong), expected="W > 0 iff the good answer is shorter", threshold="no pair of another sign",
        n=cases, of="pairs", reason=f"W has the sign of L_bad − L_good in {cases - wrong} of {cases} pairs")


def _pair(good: int, bad: int) -> tuple[Rollouts, closed.Nodes]:
    """Two answers that share their first token and no other."""
    lengths = torch.tensor([good, bad])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.tensor([[2], [3]]).expand_as(mask).clone()
    tokens[:, 0] = 1
    batch = Rollouts(tokens=tokens * mask, mask=mask, logp=-1.0 * mask.double(),
                     reward=torch.tensor([1.0, 0.0], dtype=torch.float64), group=torch.tensor([0, 0]))
    return batch, closed.nodes(batch)


def _evened(world: World, method: Method, flat: Method) -> Verdict:
    before, after = _root(world, method), _root(world, flat)
    return Verdict(
        claim="C.3", definition="what even weights leave on a prefix that the whole group shares, at ratio 1: "
        "Σ|W| / Σ|w|", subject=flat.name, outcome=decided(after <= EQUAL), observed=after, expected="0",
        threshold=f"≤ {EQUAL:g}", n=1, of="batches",
        reason=f"{method.name} leaves {before:.2g} of its mass there, {flat.name} {after:.2g}")


# -- P2.3: the reward's scale -----------------------------------------------------------------------------------------

SAME = 1e-3
"""Relative change of the way made below which two runs made the same one, and ε/(φ√v̂) below which P2's limit is
reached: to first order the change is ε/(φ√v̂), so the two thresholds are one number."""
SIZES = (100.0, 300.0, 50.0, 200.0, 120.0)
"""Rewards of the five steps are multiplied by these: their gradients' norms differ, and they are so large that both ε
are far below √v̂ for several φ at which a KL term is still felt."""
PLAIN = GRPO.but(name="plain", scale="none", bound="none", clip_low=None, clip_high=None)
"""GRPO without the std, which would take the reward's scale away before the optimiser sees it, and without clip."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A way to train, and what P2, or we, say of it."""

    name: str
    says: Literal["blind", "broken"]
    by: str = "P2"
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: Mapping[str, Any]
    beta: float = 0.0
    clip: float = math.inf
    """Of the gradient's norm."""
    drowned: bool = False
    """True to ask where ε is larger than φ√v̂ everywhere, not where it is far smaller."""

    @property
    def eps(self) -> float:
        return float(self.settings.get("eps", 0.0))


def _adam(eps: float, decay: float = 0.0) -> Mapping[str, Any]:
    return MappingProxyType({"lr": 1e-2, "eps": eps, "weight_decay": decay})


CONDITIONS = (
    Condition(name="AdamW, ε = 1e-8, β = 0", says="blind", settings=_adam(1e-8)),
    Condition(name="AdamW, ε = 1e-5, β = 0", says="blind", settings=_adam(1e-5)),
    Condition(name="AdamW, ε = 1e-5 above φ√v̂, β = 0", says="broken", settings=_adam(1e-5), drowned=True),
    Condition(name="AdamW, ε = 1e-8, β = 10", says="broken", settings=_adam(1e-8), beta=10.0),
    Condition(name="AdamW, ε = 1e-5, β = 10", says="broken", settings=_adam(1e-5), beta=10.0),
    Condition(name="AdamW, ε = 1e-8, decoupled weight decay", says="blind", settings=_adam(1e-8, decay=0.1)),
    Condition(name="Adam, ε = 1e-8, coupled L2", says="broken", by="we", optimizer=torch.optim.Adam,
              settings=_adam(1e-8, decay=0.1)),
    Condition(name="AdamW, ε = 1e-8, gradient-norm clipping", says="broken", by="we", settings=_adam(1e-8), clip=6.0),
    Condition(name="SGD, β = 0", says="broken", optimizer=torch.optim.SGD, settings={"lr": 1e-5}),
    Condition(name="SGD, β = 10", says="broken", optimizer=torch.optim.SGD, settings={"lr": 1e-5}, beta=10.0),
)
"""With rewards as they are, gradient norms of the five steps lie on both sides of the clip."""


def blind_to_scale(*, conditions: Sequence[Condition] = CONDITIONS,
                   predict: Callable[..., Any] = sweep) -> list[Verdict]:
    """Train a tabular policy with rewards times φ, for φ from 1e-6 to 1e3, and see whether it goes the same way."""
    world = make_world()
    closed_form = [c for c in conditions if c.optimizer is not torch.optim.SGD and c.clip == math.inf and not c.drowned]
    return [*(_judged(world, condition) for condition in conditions), _replayed(world, closed_form, predict)]


def _judged(world: World, condition: Condition) -> Verdict:
    definition = "way made in five steps with rewards times φ against φ = 1000: ‖Δ‖ relative, largest over φ"
    where = "> 1" if condition.drowned else f"≤ {SAME:g}"
    reference, _, _ = _train(world, condition, PHIS[-1])
    changes = {}
    for phi in PHIS[:-1]:
        way, smallest, largest = _train(world, condition, phi)
        if condition.eps > largest if condition.drowned else condition.eps <= SAME * smallest:
            changes[phi] = float((way - reference).norm() / reference.norm())
    if not changes:
        return missing("P2.3", condition.name, f"a φ with ε/(φ√v̂) {where} at every coordinate", definition)
    worst = max(changes, key=lambda phi: changes[phi])
    blind = changes[worst] <= SAME
    return Verdict(
        claim="P2.3", definition=definition + ("" if condition.optimizer is torch.optim.SGD else
                                               f", where ε/(φ√v̂) {where} at every coordinate"),
        subject=condition.name, outcome=decided(blind == (condition.says == "blind")), observed=changes[worst],
        expected=f"{condition.says}, {condition.by} say{'s' * (condition.by != 'we')}", threshold=f"blind: ≤ {SAME:g}",
        n=len(changes), of="φ", reason=f"the way changes by {changes[worst]:.2g} at φ = {worst:g}")


def _parts(world: World, logits: Tensor, phi: float, beta: float, step: int) -> tuple[Tensor, Tensor]:
    """−∇J of the reward's part with rewards times φ, and of the KL term."""
    rollouts = replace(world.rollouts, reward=phi * SIZES[step] * world.rollouts.reward)
    leaf = logits.detach().clone().requires_grad_()
    logp = world.log_probs(leaf)
    (reward,) = torch.autograd.grad(-surrogate(PLAIN, logp, rollouts), leaf, retain_graph=True)
    if beta == 0:
        return reward, torch.zeros_like(reward)
    drag = surrogate(PLAIN.but(name="drag", beta=beta), logp, rollouts, credit=torch.zeros(len(rollouts)).double())
    return reward, torch.autograd.grad(-drag, leaf)[0]


def _train(world: World, condition: Condition, phi: float) -> tuple[Tensor, float, float]:
    """The way that real training makes, and the smallest and largest √v̂ that it met (∞ for SGD)."""
    theta = world.logits.clone().requires_grad_()
    optimizer = condition.optimizer([theta], **condition.settings)
    roots = []
    for step in range(len(SIZES)):
        theta.grad = torch.stack(_parts(world, theta, phi, condition.beta, step)).sum(0)
        torch.nn.utils.clip_grad_norm_([theta], condition.clip)
        optimizer.step()
        state = optimizer.state[theta]
        if "exp_avg_sq" in state:
            roots.append((state["exp_avg_sq"] / (1 - optimizer.param_groups[0]["betas"][1] ** (step + 1))).sqrt())
    met = torch.stack(roots) if roots else torch.tensor([math.inf])
    return theta.detach() - world.logits, float(met.min()), float(met.max())


def _replayed(world: World, conditions: Iterable[Condition], predict: Callable[..., Any]) -> Verdict:
    """The change that `scale.sweep` reads off the state of one run, against optimisers that are fed φr + k."""
    worst, cases = 0.0, 0
    for condition in conditions:
        theta = world.logits.clone().requires_grad_()
        optimizer = condition.optimizer([theta], **condition.settings)
        follow = RewardParts(optimizer)
        seen = []
        for step in range(len(SIZES)):
            reward, rest = _parts(world, theta, 1.0, condition.beta, step)
            seen.append((theta.detach().clone(), reward, rest))
            theta.grad = reward + rest
            follow.update({theta: reward})
            if step == len(SIZES) - 1:
                told = predict(optimizer, [("logits", theta)], PHIS, "start", follow).change.tolist()
            optimizer.step()
        one = _fed(condition, seen, 1.0)
        for phi, change in zip(PHIS, told, strict=True):
            real = float((_fed(condition, seen, phi) - one).norm() / one.norm())
            worst, cases = max(worst, abs(change - real)), cases + 1
    definition = "change of the update read from one run's state against a real optimiser fed the gradients with the " \
                 "reward's part times φ: |Δ|"
    if not cases:
        return missing("P2.3", "tabular policy", "a condition with Adam and without norm clipping", definition)
    return Verdict(
        claim="P2.3", definition=definition, subject="tabular policy", outcome=decided(worst <= EQUAL), observed=worst,
        expected="0", threshold=f"≤ {EQUAL:g}", n=cases, of="conditions and φ",
        reason=f"predicted and real change of the update differ by up to {worst:.2g}")


def _fed(condition: Condition, seen: Sequence[tuple[Tensor, Tensor, Tensor]], phi: float) -> Tensor:
    """The last update of a real optimiser that is fed φr + k at the parameters that were seen."""
    theta = seen[0][0].clone().requires_grad_()
    optimizer = condition.optimizer([theta], **condition.settings)
    for start, reward, rest in seen:
        theta.data.copy_(start)
        theta.grad = phi * reward + rest
        optimizer.step()
    return theta.detach() - seen[-1][0]


# -- P2.4: overshoot --------------------------------------------------------------------------------------------------

PRINTED: Mapping[tuple[int, int], tuple[float, int]] = MappingProxyType({
    (2, 0): (0.6786, 4), (10, 0): (0.9047, 4), (50, 4): (0.6763, 4), (500, 0): (0.923, 3)})
"""(T, k) -> the value that P2 gives for β = (0.9, 0.95), and its digits. The last is its limit T → ∞: 0.95^500 is
7e-12."""
FREE_BETAS = ((0.9, 0.95), (0.9, 0.999), (0.8, 0.3), (0.0, 0.9))


def overshoot(*, printed: Mapping[tuple[int, int], tuple[float, int]] = PRINTED,
              closed_form: Callable[[int, int, tuple[float, float]], float] = carry) -> list[Verdict]:
    """A real AdamW is fed a constant gradient for T−1 steps and then zeros: what of a full step is left at step T+k?"""
    out = []
    for (step, lag), (value, digits) in printed.items():
        real = _carried(step, (0.9, 0.95), lag)[lag]
        half = 0.5 * 10.0**-digits
        out.append(Verdict(
            claim="P2.4", definition=f"share of a full step at T+k: T = {step}, k = {lag}, β = (0.9, 0.95)",
            subject="torch.optim.AdamW, one parameter", outcome=decided(abs(real - value) <= half), observed=real,
            expected=f"{value}", threshold=f"equal to {digits} digits: |Δ| ≤ {half:g}", n=1, of="runs",
            reason=f"AdamW still makes {real:.6f} of a full step where {value} is printed"))
    worst, cases = 0.0, 0
    for betas in FREE_BETAS:
        for step in (2, 3, 10, 50):
            shares = _carried(step, betas, 5)
            worst = max(worst, *(abs(closed_form(step, lag, betas) - share) for lag, share in enumerate(shares)))
            cases += len(shares)
    out.append(Verdict(
        claim="P2.4", definition="C_{T,k} in closed form (Eq. 36) against AdamW: |Δ| over T, k and β",
        subject="torch.optim.AdamW, one parameter", outcome=decided(worst <= EQUAL), observed=worst, expected="0",
        threshold=f"≤ {EQUAL:g}", n=cases, of="cases", reason=f"closed form and optimiser differ by up to {worst:.2g}"))
    return out


def _carried(step: int, betas: tuple[float, float], lag: int) -> list[float]:
    """Δ_{T+k} / lr for k = 0 … lag, of a constant gradient that lasted T−1 steps: under it a full step is lr.

    The gradient is 1e6, beside which torch's ε of 1e-8 is the 0 that the closed form takes it for.
    """
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([theta], lr=1.0, betas=betas, weight_decay=0.0, foreach=False)
    out = []
    for t in range(1, step + lag + 1):
        theta.grad = torch.full_like(theta, 1e6 * (t < step))
        before = float(theta.detach())
        optimizer.step()
        if t >= step:
            out.append(before - float(theta.detach()))
    return out


# -- P2.5: the loss's value -------------------------------------------------------------------------------------------

ZERO, LENGTH, COVARIANCE = (("grpo", "grpo_v32", "gspo", "gcpo"), ("dr_grpo", "dapo"), ("gtpo", "cppo", "gpg", "cispo"))
"""The ten rows by P2's Prop. 4: weights that are even over answers, that are even over tokens, and the others."""


def loss_value(*, methods: Mapping[str, Method] = METHODS,
               closed_form: Callable[[Method, Rollouts], Tensor] = value_at_ratio_one) -> list[Verdict]:
    """J at ratio 1: its closed form, what Prop. 4 leaves of it, and whether it moves when every answer gets better."""
    lacking = [name for name in TABLE if name not in methods]
    if lacking:
        return [missing("P2.5", "random groups", f"the rows {', '.join(lacking)} in the table of methods")]
    batches = [batch for batch, logp in _moved_groups() if torch.equal(batch.logp, logp)]
    rows = {name: _weighed(method) for name, method in methods.items()}
    own = [row for row in rows.values() if not row.external]
    told = [abs(float(closed_form(row, batch)) - _value(row, batch)) for row in own for batch in batches]
    shifted = [abs(_value(rows[name], replace(batch, reward=batch.reward + 1)) - _value(rows[name], batch))
               for name in TABLE for batch in batches]
    laws = {"even over answers (1/L_i): J = −β·R": (ZERO, _nothing), "even over tokens: J = c·Σ A_i L_i − β·R":
            (LENGTH, _length_statistic), "others: J = Σ (A_i − Ā)(ω_i − ω̄) − β·R": (COVARIANCE, _covariance)}
    out = [_values("every method: J in closed form against the surrogate at ratio 1", len(own), told)]
    for law, (names, formula) in laws.items():
        out.append(_values(law, len(names), [abs(_value(rows[name], batch) - formula(name, batch))
                                             for name in names for batch in batches]))
    return [*out, _values("no progress signal: J with every reward 1 higher against J", len(TABLE), shifted)]


def _value(row: Method, batch: Rollouts) -> float:
    return float(surrogate(row, batch.logp, batch))


def _values(definition: str, methods: int, apart: Sequence[float]) -> Verdict:
    """Verdict on differences of J; J itself is of order 0.1."""
    return Verdict(
        claim="P2.5", definition=f"{definition}; |ΔJ|", subject=f"random groups, {methods} methods",
        outcome=decided(max(apart) <= EQUAL), observed=max(apart), expected="0", threshold=f"≤ {EQUAL:g}",
        n=len(apart), of="methods and batches", reason=f"J differs by up to {max(apart):.2g}")


def _penalty(name: str, x: Symbols) -> float:
    """β·R at ratio 1 with the method's own aggregate; GTPO's R is its entropy term."""
    share = 1 / (x.count * x.length)
    terms: dict[str, Tensor] = {
        "grpo": BETA * share * x.k3, "grpo_v32": BETA * share * x.k3, "cppo": BETA * share * x.k3 * x.large(x.sigma),
        "dr_grpo": BETA * x.k3 / (x.count * x.mask.shape[1]), "gtpo": 0.1 * share * x.entropy * x.calm * x.conflict}
    return float(x.sum(terms[name])) if name in terms else 0.0


def _nothing(name: str, batch: Rollouts) -> float:
    """J = −β·R: Σ_t 1/L_i is 1, and Σ_i A_i is 0."""
    return -_penalty(name, Symbols(batch, batch.logp))


def _length_statistic(name: str, batch: Rollouts) -> float:
    """J = c·Σ_i A_i L_i − β·R, c = 1/(R·L_max) for Dr.GRPO and 1/(σ_r ΣL) for DAPO."""
    x = Symbols(batch, batch.logp)
    constant = x.count * x.mask.shape[1] if name == "dr_grpo" else x.sigma * x.tokens
    return float((x.credit * x.length).sum() / constant) - _penalty(name, x)


def _covariance(name: str, batch: Rollouts) -> float:
    """J = Σ_i (A_i − Ā)(ω_i − ω̄) − β·R, ω_i = Σ_t α_it·h_it with h = 1, or log π in the ratio's place."""
    x = Symbols(batch, batch.logp)
    weights = {"gtpo": x.calm * x.conflict / (x.count * x.length), "cppo": x.a * x.large(x.sigma),
               "gpg": x.log_pi / x.tokens, "cispo": x.log_pi / (x.sigma * x.tokens)}
    omega = (weights[name] * x.mask).sum(dim=1)
    credit = x.credit.squeeze(1)
    return float(((credit - credit.mean()) * (omega - omega.mean())).sum()) - _penalty(name, x)
