"""The claims of arXiv:2606.29238 that need no run: closed forms, and sums over every group that could be drawn.

Each function tests one claim. The world, the rows and the laws are optional arguments, so that tests can pass ones for
which the claim is wrong. Sums over all groups are exact up to rounding: no interval, and a threshold of rounding size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from creditscope.claims.verdict import Band, ClaimVerdict, at_most, exact
from creditscope.credit import ESTIMATORS, find_estimator
from creditscope.exact.enumeration import ExactTools, World, best_constant, measure, tree_world
from creditscope.methods.axes import Method
from creditscope.methods.table import METHODS
from creditscope.microscope.geometry import ranks, weighted
from creditscope.microscope.spectrum import spectrum
from creditscope.objective.advantages import advantage
from creditscope.objective.surrogate import surrogate
from creditscope.runs.intervals import mean_interval
from creditscope.tasks.tree import Tree

TINY = 1e-12
"""The rounding of float64 sums of order 1. A wrong sign or a forgotten factor misses by 1e-3 and more."""
SAMPLES = 4000
"""Groups in the sampled test: they resolve the variance to about 1 %."""
BAND = 0.05
"""The share by which the sampled variance may miss its law: five times what 4,000 groups resolve. R in place of R − 1
misses by 14 % at R = 8."""
HALF_DIGIT = 0.005
"""Half a unit of the last digit that the paper's table prints."""

SIZES = (2, 4, 8)
"""R of the paper's experiments."""
GROUP = 3
"""R where every group of a world's sequences is visited."""
CHANCES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
EPSILONS = tuple(round(0.1 * i, 1) for i in range(1, 10))
PRINTED = {(2, 0.3): 1.34, (4, 0.3): 0.93, (8, 0.3): 0.44, (16, 0.3): 0.10}
"""(R, ε) -> 2exp(−2Rε²) as App. A.2 prints it."""

P1_GRPO, RLOO = METHODS["p1_grpo"], METHODS["rloo"]
LABELS = {"steps", "states", "scores"}
"""Needs of an estimator that an output-only reward does not give."""
SHORT = {"spo_chain": "spo_chain,every=1"}
"""Options for answers of three tokens: by default a segment has three uncertain tokens."""
STATE_BASELINE = "gae,lam=1,whiten=false"
"""r_i − V(y_<t) with the exact V."""

Law = tuple[tuple[float, ...], tuple[float, ...]]
"""Values of a reward and their probabilities."""
Groups = Callable[[Law, int], tuple[Tensor, Tensor]]
"""(law, R) -> (G, R) rewards of every ordered group that can be drawn, and (G,) its probability."""

LAWS: tuple[Law, ...] = (((0.0, 1.0), (0.9, 0.1)), ((0.0, 1.0), (0.5, 0.5)), ((0.0, 1.0), (0.2, 0.8)),
                         ((0.0, 0.5, 1.0), (0.2, 0.5, 0.3)), ((-1.0, 0.0, 2.0), (0.5, 0.3, 0.2)))
SAMPLED: Law = ((0.0, 1.0), (0.7, 0.3))


def binary(p: float) -> Law:
    return (0.0, 1.0), (1 - p, p)


def variance(law: Law) -> float:
    """σ² = E[(r − E r)²]."""
    values, chances = law
    mean = math.fsum(p * x for x, p in zip(values, chances, strict=True))
    return math.fsum(p * (x - mean) ** 2 for x, p in zip(values, chances, strict=True))


def independent(law: Law, size: int) -> tuple[Tensor, Tensor]:
    """Every ordered group of independent draws: Π_i P(r_i)."""
    values, chances = (torch.tensor(part, dtype=torch.float64) for part in law)
    index = torch.cartesian_prod(*[torch.arange(len(values))] * size)
    return values[index], chances[index].prod(dim=1)


def credited(method: Method, reward: Tensor) -> Tensor:
    """(G, R) A_i of every group, by the method's own row."""
    number = torch.arange(len(reward)).repeat_interleave(reward.shape[1])
    return advantage(method, reward.flatten(), number).view_as(reward)


@cache
def answers() -> World:
    """Answers of one to three tokens out of three, of which 0 ends the answer; right where their sum is even."""
    tree = Tree(tokens=3, depth=3, stop=0)
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(len(tree.states), tree.tokens, generator=draw, dtype=torch.float64)
    reward = torch.tensor([float(sum(leaf) % 2 == 0) for leaf in tree.leaves], dtype=torch.float64)
    return tree_world(tree, logits, reward)


def token_range(credit: Tensor, mask: Tensor) -> Tensor:
    """(B,) max_t A_it − min_t A_it over the tokens of each rollout."""
    return credit.masked_fill(~mask, -torch.inf).amax(dim=1) - credit.masked_fill(~mask, torch.inf).amin(dim=1)


def uniform_credit(*, world: World | None = None, credit: str = "outcome", state_baseline: str = STATE_BASELINE,
                   estimators: Sequence[str] | None = None) -> list[ClaimVerdict]:
    """P1.1: with a reward on the whole answer, every token of a rollout has the same credit."""
    world = answers() if world is None else world
    subject = _enumerated(world)
    if estimators is None:
        estimators = [name for name, row in ESTIMATORS.items() if not LABELS & set(row.needs)]
    groups, _ = world.groups(GROUP)
    batch, tools = world.batch(groups), ExactTools(world, groups.reshape(-1))

    def ranges(spec: str) -> Tensor:
        return token_range(find_estimator(SHORT.get(spec, spec))(P1_GRPO, batch, tools), batch.mask)

    own, by_state = ranges(credit), ranges(state_baseline)
    worst, by_value = float(own.max()), float(by_state.max())
    apart = [name for name in estimators if float(ranges(name).max()) > TINY]
    rule = "max − min over the tokens of a rollout ≤ {:g} in every group"
    return [
        at_most(TINY, f"{credit} credit, group-mean baseline: max − min over a rollout's tokens", subject, worst,
                f"credit inside a rollout differs by {worst:.2g} at most", threshold=rule, n=len(batch), of="rollouts"),
        at_most(TINY, "output-only reward forces uniform credit: the same reward, baseline v(s_t)", subject, by_value,
                "with a baseline that knows the state, credit differs between the tokens of "
                f"{int((by_state > TINY).sum()):,} of {len(batch):,} rollouts, by up to {by_value:.2g}",
                threshold=rule, n=len(batch), of="rollouts"),
        exact("output-only reward forces uniform credit: every estimator without labels", subject, not apart,
              len(apart), f"{len(apart)} of {len(estimators)} estimators tell tokens apart from the same reward"
              f"{_named(apart)}", expected="0 not uniform", threshold=rule.format(TINY), n=len(estimators),
              of="estimators"),
    ]


def moments(*, method: Method = P1_GRPO, laws: Sequence[Law] = LAWS, sizes: Sequence[int] = SIZES,
            groups: Groups = independent, samples: int = SAMPLES) -> list[ClaimVerdict]:
    """P1.2: Σ_i A_i = 0, Var(A_i) = (R−1)/R σ², Cov(A_i, A_j) = −σ²/R."""
    subject = f"{method.name}, {len(laws)} laws of reward, R = {_list(sizes)}"
    sums, own, cross = [], [], []
    for law, size in product(laws, sizes):
        reward, chance = groups(law, size)
        a = credited(method, reward)
        mean = (chance[:, None] * a).sum(dim=0)
        covariance = (chance[:, None] * a).T @ a - mean[:, None] * mean
        error = (covariance - variance(law) * (torch.eye(size, dtype=a.dtype) - 1 / size)).abs()
        sums.append(float(a.sum(dim=1).abs().max()))
        own.append(float(error.diagonal().max()))
        cross.append(float((error - error.diagonal().diag()).max()))
    return [
        equal("Σ_i A_i in every group", subject, max(sums), "0", len(sums)),
        equal("Var(A_i) over all ordered groups", subject, max(own), "(R−1)/R σ²", len(own)),
        equal("Cov(A_i, A_j) over all ordered groups", subject, max(cross), "−σ²/R", len(cross)),
        _sampled_variance(method, groups, max(sizes), samples),
    ]


def _sampled_variance(method: Method, groups: Groups, size: int, samples: int) -> ClaimVerdict:
    """Mean of A_i² over drawn groups, over (R−1)/R σ². Groups are independent, their rollouts are not."""
    reward, chance = groups(SAMPLED, size)
    drawn = torch.multinomial(chance, samples, replacement=True, generator=torch.Generator().manual_seed(0))
    share = credited(method, reward[drawn]).square().mean(dim=1) / (variance(SAMPLED) * (size - 1) / size)
    found, band = mean_interval(share.tolist()), Band(1 - BAND, 1 + BAND)
    outcome, more = band.judge(found), band.enough(found)
    needs = f"needs {'more' if more is None else f'about {more:,}'} groups: " if outcome == "undecided" else ""
    return ClaimVerdict(definition="Var(A_i) of groups drawn at random, over (R−1)/R σ²", outcome=outcome,
                   subject=f"{method.name}, binary reward with p = {SAMPLED[1][1]:g}, R = {size}",
                   reason=f"{needs}the sampled variance is {found.mean:.3f} times the law's", observed=found.mean,
                   interval=found.ends, expected="1", threshold=f"interval within 1 ± {BAND:g}", n=samples,
                   of="groups")


def chebyshev(*, method: Method = P1_GRPO, sizes: Sequence[int] = SIZES, chances: Sequence[float] = CHANCES,
              epsilons: Sequence[float] = EPSILONS, groups: Groups = independent) -> list[ClaimVerdict]:
    """P1.3: P(|A_i| > ε) ≤ (R−1)σ² / (Rε²)."""
    cases = []
    for size, p in product(sizes, chances):
        reward, chance = groups(binary(p), size)
        a = credited(method, reward).abs()
        cases += [(float((chance * (a > eps).double().mean(dim=1)).sum()),
                   (size - 1) * variance(binary(p)) / (size * eps**2)) for eps in epsilons]
    return [_bounded("share of rollouts with |A_i| > ε against (R−1)σ²/(Rε²)",
                     f"{method.name}, binary reward, R = {_list(sizes)}", cases)]


def dead_law(p: float, size: int) -> float:
    """P(dead group) = p^R + (1−p)^R."""
    return p**size + (1 - p) ** size


def dead_groups(*, method: Method = P1_GRPO, methods: Mapping[str, Method] = METHODS, world: World | None = None,
                sizes: Sequence[int] = SIZES, chances: Sequence[float] = CHANCES,
                groups: Groups = independent) -> list[ClaimVerdict]:
    """P1.4: a unanimous group has no gradient, and there are p^R + (1−p)^R of them."""
    world = answers() if world is None else world
    return [*_dead_share(method, sizes, chances, groups), *_dead_gradients(method, methods, world)]


def _dead_share(method: Method, sizes: Sequence[int], chances: Sequence[float], groups: Groups) -> list[ClaimVerdict]:
    subject = f"{method.name}, binary reward, R = {_list(sizes)}"
    errors, gaps = [], []
    for size in sizes:
        dead = []
        for p in chances:
            reward, chance = groups(binary(p), size)
            dead.append(float(chance[(credited(method, reward) == 0).all(dim=1)].sum()))
            errors.append(abs(dead[-1] - dead_law(p, size)))
        gaps.append(statistics.fmean(dead) - dead_law(statistics.fmean(chances), size))
    return [
        equal("share of groups whose every advantage is 0", subject, max(errors), "p^R + (1−p)^R", len(errors)),
        exact("share of dead groups over prompts of different p, less the law at their mean", subject,
              min(gaps) >= -TINY, min(gaps), f"prompts of different difficulty have a share that is {min(gaps):.3f} to "
              f"{max(gaps):.3f} above the law at their mean p", expected="≥ 0 (Jensen)",
              threshold=f"≥ −{TINY:g} for every R", n=len(sizes), of="group sizes"),
    ]


def group_gradients(method: Method, world: World, groups: Tensor) -> Tensor:
    """(G, S, A) ∂J/∂z of each group of a batch: every group has its own table of logits, so that none cancels."""
    batch, state = world.batch(groups), world.state[groups.reshape(-1)].clamp(min=0)
    table = world.policy.log().expand(len(groups), -1, -1).clone().requires_grad_()
    logp = table.log_softmax(dim=2)[batch.group[:, None], state, batch.tokens]
    # Exactly on policy, which is the reference too: the KL to either is 0, not rounding.
    held = logp.detach()
    (gradient,) = torch.autograd.grad(surrogate(method, logp, replace(batch, logp=held, ref_logp=held)), table)
    return gradient


def _dead_gradients(method: Method, methods: Mapping[str, Method], world: World) -> list[ClaimVerdict]:
    groups, _ = world.groups(GROUP)
    reward = world.rollouts.reward[groups]
    dead = (reward == reward[:, :1]).all(dim=1)
    subject, definition = _enumerated(world), "gradient of a unanimous group"
    asked = {name: row for name, row in methods.items() if not row.external}

    def largest(row: Method) -> float:
        return float(group_gradients(row, world, groups)[dead].abs().max())

    own = largest(method)
    moved = [name for name, row in asked.items() if largest(row) > 0]
    centred = [name for name in moved if asked[name].centred]
    return [
        at_most(0.0, definition, f"{method.name}, {subject}", own, "the largest entry of a unanimous group's gradient "
                f"is {own:.2g}", threshold="exactly 0", n=int(dead.sum()), of="unanimous groups"),
        exact(f"{definition}, every row of the table", subject, not moved, len(moved),
              f"{len(moved)} of {len(asked)} rows give a unanimous group a gradient{_named(moved)}, of those with a "
              f"baseline of the group {len(centred)}{_named(centred)}", expected="0 rows with a gradient",
              threshold="exactly 0", n=len(asked), of="methods"),
    ]


def hoeffding_bound(size: int, eps: float) -> float:
    """2 exp(−2Rε²), for rewards in 0 .. 1."""
    return 2 * math.exp(-2 * size * eps**2)


def hoeffding(*, sizes: Sequence[int] = (*SIZES, 16), chances: Sequence[float] = CHANCES,
              epsilons: Sequence[float] = EPSILONS, groups: Groups = independent,
              printed: Mapping[tuple[int, float], float] = PRINTED) -> list[ClaimVerdict]:
    """P1.9: P(|v̂_R − v| > ε) ≤ 2exp(−2Rε²), v̂_R the mean of R rewards; and the table of it."""
    cases = []
    for size, p in product(sizes, chances):
        reward, chance = groups(binary(p), size)
        off = (reward.mean(dim=1) - p).abs()
        # An error of exactly ε is not beyond ε, up to rounding.
        cases += [(float(chance[off > eps + TINY].sum()), hoeffding_bound(size, eps)) for eps in epsilons]
    return [_bounded("P(|v̂_R − v| > ε) against 2exp(−2Rε²)", f"binary reward, R = {_list(sizes)}", cases),
            _printed(printed)]


def _printed(printed: Mapping[tuple[int, float], float]) -> ClaimVerdict:
    off = {at: abs(value - hoeffding_bound(*at)) for at, value in printed.items()}
    worst = max(off, key=lambda at: off[at])
    wrong = sum(error > HALF_DIGIT for error in off.values())
    return exact("the printed table against 2exp(−2Rε²)", "App. A.2", not wrong, off[worst],
                 f"{wrong} of {len(off)} printed values are not the formula's, the furthest by {off[worst]:.3f}: at "
                 f"R = {worst[0]} and ε = {worst[1]:g} it prints {printed[worst]:g} for {hoeffding_bound(*worst):.3f}",
                 expected="0, rounding aside", threshold=f"largest difference ≤ {HALF_DIGIT:g}", n=len(off),
                 of="printed values")


def group_mean_factor(*, world: World | None = None, sizes: Sequence[int] = (2, 3, 4), method: Method = P1_GRPO,
                      others: Method = RLOO) -> list[ClaimVerdict]:
    """P1.10: E ĝ = (R−1)/R ∇J with the group's mean, ∇J with leave-one-out, so neither turns the update."""
    world = answers() if world is None else world
    subject = f"{method.name} and {others.name}, {len(world.rollouts)} sequences, every group of {_list(sizes)}"
    norm = float(world.gradient.norm())
    mean, rest, turned = [], [], []
    for size in sizes:
        own, left = (measure("outcome", row, world, size) for row in (method, others))
        mean.append(float((own.gradient - (size - 1) / size * world.gradient).norm()) / norm)
        rest.append(left.gradient_error)
        turned.append(1 - min(own.cosine, left.cosine))
    return [
        equal("E ĝ with the group's mean, over ‖∇J‖", subject, max(mean), "(R−1)/R ∇J", len(sizes), "group sizes"),
        equal("E ĝ with leave-one-out, over ‖∇J‖", subject, max(rest), "∇J", len(sizes), "group sizes"),
        equal("cosine of E ĝ with ∇J, both baselines", subject, max(turned), "1", len(sizes), "group sizes"),
    ]


@cache
def two_tokens(rewarded: int) -> World:
    """Two tokens out of two, the first drawn 9 to 1, the second evenly; the token at `rewarded` earns 1 if it is 1.

    ‖ψ‖² = 2(1 − π)² summed over the tokens depends on the first alone. So Cov(‖ψ‖², r) is 0 where the second is
    rewarded, and not where the first is.
    """
    tree = Tree(tokens=2, depth=2)
    logits = torch.zeros(3, 2, dtype=torch.float64)
    logits[0, 0] = math.log(9)
    return tree_world(tree, logits, tree.chosen[:, rewarded].double())


def constant_spread(world: World, baseline: float) -> float:
    """E‖x − E x‖², x = (r − b)ψ: the variance of one rollout's gradient."""
    x = (world.rollouts.reward - baseline)[:, None] * world.scores
    mean = (world.chance[:, None] * x).sum(dim=0)
    return float((world.chance * x.square().sum(dim=1)).sum() - mean.square().sum())


def least_spread(world: World) -> float:
    """The b of least variance: the minimum of the parabola through its values at −1, 0 and 1."""
    low, mid, high = (constant_spread(world, b) for b in (-1.0, 0.0, 1.0))
    return (low - high) / (2 * (low - 2 * mid + high))


def optimal_baseline(*, worlds: Mapping[str, World] | None = None) -> list[ClaimVerdict]:
    """P1.11: the mean reward is the baseline of least variance; truly b* = mean + Cov(‖ψ‖², r)/E‖ψ‖²."""
    worlds = worlds if worlds is not None else {"‖ψ‖² independent of r": two_tokens(1),
                                                "‖ψ‖² larger where r is": two_tokens(0)}
    out, errors = [], []
    for name, world in worlds.items():
        reward, norm = world.rollouts.reward, world.scores.square().sum(dim=1)
        mean = float((world.chance * reward).sum())
        covariance = float((world.chance * norm * (reward - mean)).sum())
        best = least_spread(world)
        lost = max(constant_spread(world, mean) / constant_spread(world, best) - 1, 0.0)
        errors += [abs(best - mean - covariance / float((world.chance * norm).sum())),
                   abs(best - float(best_constant(world)))]
        out.append(exact(
            "the mean reward is the constant baseline of least variance", name, abs(best - mean) <= TINY, best - mean,
            f"with Cov(‖ψ‖², r) = {covariance:.2g} the mean {mean:.3g} has {lost:.1%} more variance than b* = "
            f"{best:.3g}", expected="b* − mean = 0", threshold=f"|b* − mean| ≤ {TINY:g}", n=len(reward),
            of="sequences"))
    return [*out, equal("b of least variance, so the mean is it iff Cov(‖ψ‖², r) = 0", "; ".join(worlds), max(errors),
                        "mean + Cov(‖ψ‖², r)/E‖ψ‖² = E[r‖ψ‖²]/E[‖ψ‖²]", len(errors))]


def random_scores(size: int, seed: int) -> NDArray[np.float64]:
    """(R, R) Gram of R Gaussian scores in 64 dimensions, their norms spread over a factor of ten."""
    draw = np.random.default_rng(seed)
    scores = draw.standard_normal((size, 64)) * 10 ** draw.random((size, 1))
    return np.asarray(scores @ scores.T, dtype=np.float64)


def leave_one_out_rank(*, method: Method = P1_GRPO, others: Method = RLOO, sizes: Sequence[int] = SIZES,
                       law: Law = LAWS[1]) -> list[ClaimVerdict]:
    """P1.12, exact part: does leave-one-out change the rank of the rollout matrix? Its rows are R/(R−1) times P1's."""
    subject = f"{others.name} beside {method.name}, R = {_list(sizes)}, random scores"
    errors, apart, seen = [], [], 0
    for size in sizes:
        mine, theirs = (credited(row, independent(law, size)[0]) for row in (method, others))
        errors.append(float((theirs - size / (size - 1) * mine).abs().max()))
        for g in (mine.any(dim=1) & theirs.any(dim=1)).nonzero()[:, 0].tolist():
            scores = random_scores(size, seed=g)
            one, two = (ranks(spectrum(weighted(scores, credit[g].numpy()))) for credit in (mine, theirs))
            apart += [abs(two[name] / value - 1) for name, value in one.items()]
            seen += 1
    names = sorted(one)
    return [
        equal("A_i with leave-one-out, in every group", subject, max(errors), "R/(R−1) (r_i − mean)", len(errors),
              "group sizes"),
        exact(f"leave-one-out changes a rank: {', '.join(names)}", subject, max(apart) > TINY, max(apart),
              f"by {len(names)} definitions the ranks differ by a share of {max(apart):.1g} at most",
              expected="> 0, if it breaks rank 2", threshold=f"relative difference > {TINY:g} by any definition",
              n=seen, of="groups"),
    ]


def equal(definition: str, subject: str, worst: float, expected: str, n: int, of: str = "cases") -> ClaimVerdict:
    """An equation, checked case by case."""
    return at_most(TINY, definition, subject, worst, f"the largest difference from {expected} is {worst:.1g}",
                   expected=expected, threshold="largest difference ≤ {:g}", n=n, of=of)


def _bounded(definition: str, subject: str, cases: Sequence[tuple[float, float]]) -> ClaimVerdict:
    """(value, its bound) case by case, and how loose the bound is."""
    worst = max(value / bound for value, bound in cases)
    idle = sum(bound >= 1 for _, bound in cases)
    ratios = [bound / value for value, bound in cases if bound < 1 and value > 0]
    loose = f"a bound below 1 is {statistics.median(ratios):.1f} times the truth (median)" if ratios else \
        "no bound below 1 has a truth above 0"
    return exact(definition, subject, worst <= 1 + TINY, worst, f"the truth is at most {worst:.2f} of the bound; "
                 f"{loose}, and {idle} of {len(cases)} bounds say nothing (≥ 1)", expected="≤ 1",
                 threshold="truth / bound ≤ 1 in every case", n=len(cases))


def _named(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _enumerated(world: World) -> str:
    return f"{len(world.rollouts)} sequences, every group of {GROUP}"


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
