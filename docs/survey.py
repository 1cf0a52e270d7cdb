"""The numbers of docs/credit.md: every estimator in small random worlds, by enumeration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

import torch

from creditscope.credit import ESTIMATORS
from creditscope.exact.enumeration import (
    Exact,
    World,
    best_constant,
    constant_variance,
    continuation_noise,
    ladder_world,
    measure,
    tree_world,
)
from creditscope.methods.table import METHODS
from creditscope.tasks.tree import Tree
from creditscope.tasks.turns import Ladder

SIZE = 3
SEEDS = range(11)
SPREAD = 2.0  # std of the logits: some tokens are nearly sure, others open
WRONG = 0.3  # std of a wrong critic's error
UNEQUAL = Tree(tokens=3, depth=3, stop=0)
EQUAL = Tree(tokens=2, depth=3)
GAME, START = Ladder(top=4, turns=3), 2
ROUNDING = 1e-12
ROWS = {"group_mean": METHODS["p1_grpo"], "leave_one_out": METHODS["p1_grpo"].but(name="loo", baseline="leave_one_out")}


@dataclass(frozen=True)
class Line:
    """One line of the table: an estimator with options, under a row with that baseline."""

    spec: str
    baseline: str = "group_mean"
    wrong: bool = False
    """The critic errs, or the learned reward of a prefix, in each state by another amount."""

    @property
    def name(self) -> str:
        return self.spec.split(",")[0]

    @property
    def steps(self) -> bool:
        return "steps" in ESTIMATORS[self.name].needs

    @property
    def label(self) -> str:
        options = self.spec.removesuffix(",whiten=false").partition(",")[2]
        wrong = "wrong critic" if "critic" in ESTIMATORS[self.name].needs else "wrong scores"
        notes = [options.replace(",", ", "), wrong if self.wrong else "",
                 "leave-one-out" if self.baseline == "leave_one_out" else ""]
        return ", ".join([self.name, *filter(None, notes)])


PLAIN = Line("leave_one_out")
LINES = (
    Line("outcome"), PLAIN, Line("optimal_scalar"), Line("optimal_sequence"), Line("optimal_token"),
    *(Line(name, baseline) for name in ("step_reward", "step_return", "turn_return", "state_return")
      for baseline in ROWS),
    Line("monte_carlo"), Line("spo_chain,every=1"), Line("spo_chain,every=1,probability=0.5"), Line("prefix_tree"),
    Line("prefix_share"), *(Line(f"gae,lam={lam},whiten=false", wrong=wrong) for wrong in (False, True)
                            for lam in (1.0, 0.5, 0.0)),
    *(Line(f"prefix_score,lam={lam}", wrong=wrong) for wrong in (False, True) for lam in (0.0, 1.0)),
    Line("entropy_mask"), Line("entropy_shaping"), Line("salt"),
)


@cache
def worlds(tree: Tree, steps: bool) -> list[tuple[World, torch.Tensor]]:
    """Random worlds, each with the error of a wrong critic. Rewards are 0 or 1, of a whole answer or of a step."""
    found = []
    for seed in SEEDS:
        draw = torch.Generator().manual_seed(seed)
        logits = SPREAD * torch.randn(len(tree.states), tree.tokens, generator=draw, dtype=torch.float64)
        reward = torch.randint(0, 2, (len(tree.leaves),), generator=draw).double()
        reward[0], reward[-1] = 0.0, 1.0  # something to learn in every world
        step_reward = torch.randint(0, 2, logits.shape, generator=draw).double()
        error = WRONG * torch.randn(len(tree.states), generator=draw, dtype=torch.float64)
        world = tree_world(tree, logits, step_reward=step_reward) if steps else tree_world(tree, logits, reward)
        found.append((world, error))
    return found


@cache
def measured(line: Line, tree: Tree, size: int = SIZE) -> list[Exact]:
    """The line in each of the random worlds."""
    return [measure(line.spec, ROWS[line.baseline], world, size, error if line.wrong else None)
            for world, error in worlds(tree, line.steps)]


@cache
def plain(steps: bool, tree: Tree, size: int = SIZE) -> list[Exact]:
    """Outcome credit with a leave-one-out baseline in the same worlds."""
    return [measure(PLAIN.spec, ROWS[PLAIN.baseline], world, size) for world, _ in worlds(tree, steps)]


def typical(line: Line, what: str, tree: Tree = UNEQUAL, size: int = SIZE) -> float:
    """The median over the worlds of one property of `Exact`."""
    return median(getattr(one, what) for one in measured(line, tree, size))


def ratios(line: Line, what: str, tree: Tree = UNEQUAL, size: int = SIZE) -> list[float]:
    """A property over that of plain outcome credit, world by world."""
    return [getattr(one, what) / getattr(other, what)
            for one, other in zip(measured(line, tree, size), plain(line.steps, tree, size), strict=True)]


def relative(line: Line, what: str, tree: Tree = UNEQUAL, size: int = SIZE) -> float:
    """The median over the worlds of those ratios."""
    return median(ratios(line, what, tree, size))


def quieter(line: Line, tree: Tree = UNEQUAL, size: int = SIZE) -> int:
    """In how many worlds the gradient has less noise than that of plain outcome credit."""
    return sum(ratio < 1 - ROUNDING for ratio in ratios(line, "noise", tree, size))


def worst(line: Line, what: str, tree: Tree = UNEQUAL) -> float:
    return max(getattr(one, what) for one in measured(line, tree))


def best_constant_noise(size: int) -> float:
    """Noise with b* itself as the baseline, over that of plain outcome credit."""
    return median(constant_variance(world, best_constant(world), size) / one.gradient_variance
                  for (world, _), one in zip(worlds(UNEQUAL, False), plain(False, UNEQUAL, size), strict=True))


def drawn_variance(samples: int) -> float:
    """Variance of monte_carlo's credit with values from K continuations, over that of plain outcome credit."""
    lines = zip(worlds(UNEQUAL, False), measured(Line("monte_carlo"), UNEQUAL), plain(False, UNEQUAL), strict=True)
    return median((own.variance + continuation_noise(world, samples)) / one.variance for (world, _), own, one in lines)


def shrunk_by_node(size: int) -> float:
    """Largest |E[A|s,a] − (q − v)(1 − (1 − (1−d)^R)/(R·d))| of prefix_tree over all nodes of all worlds."""
    gaps = []
    for one in measured(Line("prefix_tree"), UNEQUAL, size):
        d = one.world.visits.sum(dim=1, keepdim=True).clamp(max=1.0)
        missed = -torch.expm1(size * torch.log1p(-d)) / (size * d)  # (1 − (1−d)^R)/(R·d), right for small d too
        gaps.append(one.by_token - one.world.advantage * (1 - missed))
    return max(float(gap.abs().max()) for gap in gaps)


def verdict(line: Line) -> str:
    """What the expected gradient is, as measured in every world."""
    if worst(line, "gradient_error") < ROUNDING and worst(line, "gradient_error", EQUAL) < ROUNDING:
        return "unbiased"
    if worst(line, "gradient_shape") < ROUNDING and worst(line, "gradient_shape", EQUAL) < ROUNDING:
        return f"unbiased up to the factor {typical(line, 'gradient_factor'):.3f}"
    found = f"biased, by {typical(line, 'gradient_shape'):.3f} beyond a factor"
    if worst(line, "gradient_error", EQUAL) < ROUNDING:
        return f"{found}; unbiased where all lengths are equal"
    if worst(line, "gradient_shape", EQUAL) < ROUNDING:
        return f"{found}; unbiased up to the factor {typical(line, 'gradient_factor', EQUAL):.3f} where all lengths " \
               "are equal"
    return found


def statements() -> dict[str, list[tuple[str, bool | None]]]:
    """What each paper's claim comes to in these worlds, and whether it holds there; None where nobody claimed it."""
    outcome, scalar, token, step = (Line(x) for x in ("outcome", "optimal_scalar", "optimal_token", "step_return"))
    turn, state = (Line(name, "leave_one_out") for name in ("turn_return", "state_return"))
    vine, chain, bare = (Line(x) for x in ("monte_carlo", "spo_chain,every=1", "spo_chain,every=1,probability=1"))
    exact, wrong = ([Line(f"gae,lam={lam},whiten=false", wrong=wrong) for lam in (1.0, 0.5, 0.0)]
                    for wrong in (False, True))
    error = [typical(scalar, "gradient_error", EQUAL, size) for size in (2, 3, 4, 5)]
    best = best_constant_noise(SIZE)
    whole = median(one.bias for one in plain(True, UNEQUAL))
    return {
        "outcome": [("E ĝ = (R−1)/R ∇J", worst(outcome, "gradient_shape") < ROUNDING
                     and abs(typical(outcome, "gradient_factor") - (SIZE - 1) / SIZE) < ROUNDING)],
        "leave_one_out": [("E ĝ = ∇J", worst(PLAIN, "gradient_error") < ROUNDING)],
        "optimal_scalar": [
            (f"b* itself has less noise than leave-one-out ({best:.2f} of it)", best < 1),
            (f"its estimate from the group has less variance than the group's mean ({raw(scalar)})", calmer(scalar)),
            (f"not by shrinking alone: less noise than leave-one-out ({often(scalar)})", quieter(scalar) == len(SEEDS)),
            (f"biased by O(1/R) (error {listed(error)} for R = 2, 3, 4, 5 at equal lengths)",
             error[0] > error[1] > error[2] > error[3] > ROUNDING)],
        "optimal_token": [
            (f"less variance than the group's mean ({raw(token)})", calmer(token)),
            (f"not by shrinking alone: less noise than leave-one-out ({often(token)})", quieter(token) == len(SEEDS))],
        "step_return": [
            (f"the number of steps matters (error {typical(step, 'gradient_error'):.2f}; at equal lengths "
             f"{typical(step, 'gradient_error', EQUAL):.2f})",
             typical(step, "gradient_error") > typical(step, "gradient_error", EQUAL))],
        "turn_return": [
            (f"credit is nearer to q − v than an outcome's (bias {typical(turn, 'bias'):.2f}, outcome {whole:.2f}; "
             "both leave-one-out)", typical(turn, "bias") < whole)],
        "state_return": [
            (f"credit is nearer to q − v than a turn's (bias {typical(state, 'bias'):.2f}, turn "
             f"{typical(turn, 'bias'):.2f}; both leave-one-out)", typical(state, "bias") < typical(turn, "bias"))],
        "monte_carlo": [("E[A|s,a] = q − v with a cut before every token", worst(vine, "bias") < ROUNDING)],
        "spo_chain": [
            ("E[A|s,a] = q − v without the mask (ρ = 1)", worst(bare, "bias") < ROUNDING),
            (f"what the mask drops at ρ = 0.9 is small (gradient error {typical(chain, 'gradient_error'):.4f})",
             typical(chain, "gradient_error") < 0.01)],
        "prefix_tree": [
            ("E[A|s,a] = (q−v)·(1 − (1−(1−d)^R)/(R·d)) at every node", shrunk_by_node(SIZE) < ROUNDING),
            (f"less noise than leave-one-out {often(Line('prefix_tree'))}", None)],
        "gae": [
            ("E[A|s,a] = q − v with an exact critic, any λ", max(worst(x, "bias") for x in exact) < ROUNDING),
            ("E ĝ = ∇J at λ = 1 with a wrong critic", worst(wrong[0], "gradient_error") < ROUNDING),
            ("not so at λ < 1 with a wrong critic", min(typical(x, "gradient_error") for x in wrong[1:]) > 0.01)],
    }


def calmer(line: Line) -> bool:
    """Whether the gradient varies less than that of the group's mean in every world."""
    pairs = zip(measured(line, UNEQUAL), measured(Line("outcome"), UNEQUAL), strict=True)
    return all(one.gradient_variance < other.gradient_variance for one, other in pairs)


def raw(line: Line) -> str:
    own, mean = (relative(x, "gradient_variance") for x in (line, Line("outcome")))
    return f"{own:.2f} of leave-one-out's, the mean {mean:.2f}"


def often(line: Line) -> str:
    return (f"in {quieter(line)} of {len(SEEDS)} worlds, at equal lengths in {quieter(line, EQUAL)}; the median is "
            f"{relative(line, 'noise'):.2f} of it, at equal lengths {relative(line, 'noise', EQUAL):.2f}")


def listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


@dataclass(frozen=True)
class Turns:
    """One estimator on the ladder."""

    by_turn: list[float]
    """Mean |E[A|s_h,a_h] − (q − v)| at each turn, in rewards; the mean over the policies."""
    pathwise: float
    """Largest |(E[A_ih|y_i] − (G_h − v(s_h))) − Bias_h| over turns, walks and policies."""
    error: float
    """Largest gradient error."""
    noise: float
    """Median noise, over that of plain outcome credit."""


@cache
def ladder(name: str, baseline: str) -> Turns:
    """One estimator under random policies: what its credit misses at each turn, what its gradient misses."""
    missed, paths, errors, noises = [], [], [], []
    for seed in SEEDS:
        draw = torch.Generator().manual_seed(seed)
        policy = torch.randn(GAME.turns, GAME.top + 1, 2, generator=draw, dtype=torch.float64).softmax(dim=-1)
        world = ladder_world(GAME, policy, START)
        found = measure(name, ROWS[baseline], world, SIZE)
        gap = (found.by_token - world.advantage).abs() * world.visits
        missed.append(gap.view(GAME.turns, -1).sum(dim=1))  # a walk makes each turn once, so its visits sum to 1
        # G − E[G | first h turns] = G_h − v(s_h): what was earned before stands in both.
        true = world.rollouts.reward[:, None] - world.value[:, :-1]
        bias = torch.stack([GAME.bias(policy, START, moves) for moves in GAME.walks()])
        paths.append(float((found.by_sequence - true - bias).abs().max()))
        errors.append(found.gradient_error)
        noises.append(found.noise / measure(PLAIN.spec, ROWS["group_mean"], world, SIZE).noise)
    return Turns(torch.stack(missed).mean(dim=0).tolist(), max(paths), max(errors), median(noises))
