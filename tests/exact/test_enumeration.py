"""exactness: enumeration equals the stupid sum, and says of each estimator what can be derived, or what it measured."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from creditscope import METHODS, CreditscopeError
from creditscope.credit import ESTIMATORS, find_estimator
from creditscope.exact.enumeration import (
    Exact,
    ExactTools,
    World,
    best_constant,
    constant_variance,
    continuation_noise,
    ladder_world,
    measure,
    tree_world,
)
from creditscope.tasks.turns import Ladder
from each import each
from makers import walk_probability
from makers_tree import Tree

MEAN = METHODS["p1_grpo"]
OTHERS = MEAN.but(name="others", baseline="leave_one_out")
EQUAL, UNEQUAL = Tree(tokens=2, depth=3), Tree(tokens=3, depth=3, stop=0)
GAME, START = Ladder(top=4, turns=3), 2
SEEDS = (0, 1, 2)
SIZE = 3
TINY = {"rtol": 0.0, "atol": 1e-12}


def draw(tree: Tree, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, rewards in 0 .. 1 of the answers, rewards in 0 .. 1 of the steps: graded, so that every token matters."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(tree.states), tree.tokens, generator=g, dtype=torch.float64)
    reward = torch.rand(len(tree.leaves), generator=g, dtype=torch.float64)
    return logits, reward, torch.rand(logits.shape, generator=g, dtype=torch.float64)


@cache
def world(tree: Tree, seed: int, steps: bool = False) -> World:
    logits, reward, step_reward = draw(tree, seed)
    return tree_world(tree, logits, step_reward=step_reward) if steps else tree_world(tree, logits, reward)


@cache
def binary(tree: Tree, seed: int) -> World:
    """Answers that are right or wrong, as rounding decides, with one of each at least."""
    logits, reward, _ = draw(tree, seed)
    reward = reward.round()
    reward[0], reward[-1] = 0.0, 1.0
    return tree_world(tree, logits, reward)


def policy(seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(GAME.turns, GAME.top + 1, 2, generator=g, dtype=torch.float64).softmax(dim=-1)


def met(d: Tensor, others: int) -> Tensor:
    """1 − (1−d)^n, the chance that one of n others comes to a state; exact for small d too."""
    return -torch.expm1(others * torch.log1p(-d.clamp(max=1.0)))


def reach(w: World) -> Tensor:
    return w.visits.sum(dim=1, keepdim=True)


def baseline_of(w: World, rows: Tensor) -> Tensor:
    """(B,) V(start) of the rows of whole groups: the mean reward of the others."""
    reward = w.rollouts.reward[rows].view(-1, SIZE)
    return ((reward.sum(dim=1, keepdim=True) - reward) / (SIZE - 1)).reshape(-1)


def credit_of(spec: str, w: World, error: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(B, T) credit in every group of the world, and the sequence of each row."""
    groups, _ = w.groups(SIZE)
    rows = groups.reshape(-1)
    return find_estimator(spec)(MEAN, w.batch(groups), ExactTools(w, rows, error)), rows


# -- the instrument ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_a_tree_s_world_has_the_tree_s_own_gradient_scores_and_values(tree: Tree) -> None:
    logits, reward, _ = draw(tree, 0)
    w = world(tree, 0)
    torch.testing.assert_close(w.chance, tree.probability(logits), **TINY)
    torch.testing.assert_close(w.visits, tree.reach(logits)[:, None] * logits.softmax(dim=1), **TINY)
    torch.testing.assert_close(w.gradient, tree.gradient(logits, reward), **TINY)
    torch.testing.assert_close(w.scores.view(-1, *logits.shape), tree.scores(logits), **TINY)
    torch.testing.assert_close(w.value[:, 0], tree.value(logits, reward)[0].expand(len(tree.leaves)), **TINY)
    assert w.value[torch.arange(len(tree.leaves)), w.rollouts.lengths].tolist() == reward.tolist()


def test_a_ladder_s_world_has_the_gradient_that_autograd_finds() -> None:
    logits = policy(0).log().requires_grad_()
    chances = [walk_probability(GAME, logits.softmax(dim=-1), START, moves) for moves in GAME.walks()]
    earned = [sum(GAME.walk(START, moves)[1]) for moves in GAME.walks()]
    (auto,) = torch.autograd.grad(torch.stack([c * r for c, r in zip(chances, earned, strict=True)]).sum(), logits)
    w = ladder_world(GAME, policy(0), START)
    torch.testing.assert_close(w.gradient, auto.flatten(0, 1), **TINY)
    torch.testing.assert_close(w.value[:, -1], torch.tensor(earned, dtype=torch.float64), **TINY)


def test_multisets_with_their_orders_are_all_ordered_groups_one_token_at_a_time() -> None:
    tree = Tree(tokens=2, depth=2, stop=0)
    logits, reward, _ = draw(tree, 1)
    groups = tree.groups(SIZE)
    batch = tree.rollouts(logits, groups, reward)
    small = tree_world(tree, logits, reward)
    credit = find_estimator("prefix_tree")(MEAN, batch, ExactTools(small, groups.reshape(-1)))
    chance, scores = tree.chance(logits, groups), logits.softmax(dim=1)
    total, seen, square = (torch.zeros_like(logits) for _ in range(3))
    mean_gradient, mean_square = torch.zeros_like(logits), 0.0
    for g, group in enumerate(groups.tolist()):
        gradient = torch.zeros_like(logits)
        for i, y in enumerate(group):
            for t, a in enumerate(tree.leaves[y]):
                s, one = tree.states[tree.leaves[y][:t]], credit[SIZE * g + i, t]
                total[s, a] += chance[g] * one
                square[s, a] += chance[g] * one**2
                seen[s, a] += chance[g]
                gradient[s] -= one * scores[s] / SIZE
                gradient[s, a] += one / SIZE
        mean_gradient += chance[g] * gradient
        mean_square += float(chance[g] * gradient.square().sum())
    found = measure("prefix_tree", MEAN, small, SIZE)
    torch.testing.assert_close(found.by_token, total / seen, **TINY)
    torch.testing.assert_close(found.gradient, mean_gradient, **TINY)
    spread = (square - total**2 / seen).sum() / seen.sum()
    assert found.variance == pytest.approx(float(spread), abs=1e-12)
    assert found.gradient_variance == pytest.approx(mean_square - float(mean_gradient.square().sum()), abs=1e-12)


@each("name", ESTIMATORS)
def test_no_estimator_knows_the_order_of_a_group(name: str) -> None:
    w = world(UNEQUAL, 0, steps="steps" in ESTIMATORS[name].needs)
    groups = w.groups(SIZE)[0][::40]
    estimate = find_estimator(name)
    order = [2, 0, 1]
    first, again = (estimate(MEAN, w.batch(g), ExactTools(w, g.reshape(-1))).view(len(groups), SIZE, -1)
                    for g in (groups, groups[:, order]))
    assert first.abs().max() > 0.01
    torch.testing.assert_close(first[:, order], again, **TINY)


def test_the_expected_gradient_is_what_expected_credit_leaves_after_its_mean_in_each_state() -> None:
    for name in ("prefix_tree", "entropy_shaping", "optimal_token"):
        found = measure(name, MEAN, world(UNEQUAL, 0), SIZE)
        w = found.world
        own = (w.policy * found.by_token).sum(dim=1, keepdim=True)
        torch.testing.assert_close(found.gradient, w.visits * (found.by_token - own), **TINY)


def test_worlds_that_cannot_be_enumerated_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="8 sequences cannot be enumerated"):
        world(EQUAL, 0).groups(30)
    with pytest.raises(CreditscopeError, match="groups of 0"):
        world(EQUAL, 0).groups(0)


# -- outcome credit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tree", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_leave_one_out_has_the_exact_gradient_though_its_credit_misses_by_v_minus_J(tree: Tree, seed: int) -> None:
    found = measure("leave_one_out", MEAN, world(tree, seed), SIZE)
    logits, reward, _ = draw(tree, seed)
    value = tree.value(logits, reward)
    torch.testing.assert_close(found.gradient, tree.gradient(logits, reward), **TINY)
    torch.testing.assert_close(found.by_token - found.world.advantage, (value - value[0])[:, None].expand_as(logits),
                               **TINY)
    assert found.bias > 0.3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_group_s_mean_shrinks_gradient_and_credit_by_R_minus_1_over_R_and_adds_no_noise(size: int) -> None:
    mean, others = (measure("outcome", row, world(EQUAL, 0), size) for row in (MEAN, OTHERS))
    share = (size - 1) / size
    torch.testing.assert_close(mean.gradient, share * mean.world.gradient, **TINY)
    torch.testing.assert_close(mean.by_token, share * others.by_token, **TINY)
    assert mean.gradient_factor == pytest.approx(share, abs=1e-12)
    assert mean.gradient_shape < 1e-12
    assert mean.gradient_error == pytest.approx(1 / size, abs=1e-12)
    assert mean.gradient_variance == pytest.approx(share**2 * others.gradient_variance, rel=1e-12)
    assert mean.noise == pytest.approx(others.noise, rel=1e-12)


def test_b_star_has_the_least_variance_of_all_constants_and_its_estimate_from_the_group_need_not() -> None:
    w = binary(EQUAL, 0)
    best = best_constant(w)
    least = constant_variance(w, best, SIZE)
    for other in (best - 0.05, best + 0.05, (w.chance * w.rollouts.reward).sum()):
        assert constant_variance(w, other, SIZE) > least
    # Without a baseline outcome credit is the constant 0.
    plain = measure("outcome", METHODS["reinforce"], w, SIZE)
    assert plain.gradient_variance == pytest.approx(constant_variance(w, torch.zeros(()), SIZE), rel=1e-12)
    others = [measure("leave_one_out", MEAN, binary(EQUAL, seed), SIZE).noise for seed in range(11)]
    own = [measure("optimal_scalar", MEAN, binary(EQUAL, seed), SIZE).noise for seed in range(11)]
    ratio = [a / b for a, b in zip(own, others, strict=True)]
    assert min(ratio) < 0.9 < 1.1 < max(ratio)


def test_the_optimal_scalar_is_biased_by_its_own_rollout_less_in_larger_groups() -> None:
    errors = [measure("optimal_scalar", MEAN, world(EQUAL, 1), size).gradient_error for size in (2, 3, 4, 5)]
    assert errors[0] > errors[1] > errors[2] > errors[3] > 0.1
    assert 1 < 5 * errors[3] / (2 * errors[0]) < 1.5  # R · error settles: O(1/R)


# -- values --------------------------------------------------------------------------------------------------------


@each("seed", SEEDS)
@each("spec", ["monte_carlo", "spo_chain,every=1,probability=1"])
@each("tree", [EQUAL, UNEQUAL])
def test_exact_values_at_a_cut_before_every_token_give_the_truth(tree: Tree, spec: str, seed: int) -> None:
    found = measure(spec, MEAN, world(tree, seed), SIZE)
    torch.testing.assert_close(found.by_token, found.world.advantage, **TINY)
    torch.testing.assert_close(found.gradient, found.world.gradient, **TINY)


def test_exact_values_leave_noise_in_the_first_token_alone() -> None:
    # V(start) is the mean of R − 1 siblings, so the first token's credit has variance J(1 − J)/(R − 1), later ones 0.
    found = measure("monte_carlo", MEAN, binary(EQUAL, 0), SIZE)
    j = found.world.value[0, 0]
    assert found.variance == pytest.approx(float(j * (1 - j) / (SIZE - 1)) / EQUAL.depth, abs=1e-12)


def test_the_mask_of_spo_chain_costs_what_the_policy_was_sure_of() -> None:
    found = {rho: measure(f"spo_chain,every=1,probability={rho}", MEAN, world(UNEQUAL, 1), SIZE) for rho in (0.9, 0.5)}
    sure = found[0.9].world.policy >= 0.9
    assert bool(sure.any())
    assert found[0.9].by_token[sure].abs().max() == 0
    # |q − v| = (1 − π)|q − q of the rest| ≤ 1 − ρ for rewards in 0 .. 1: what is dropped is small.
    assert found[0.9].world.advantage[sure].abs().max() <= 0.1
    assert 0 < found[0.9].gradient_error < 0.02 < 0.1 < found[0.5].gradient_error


def test_continuations_add_v_times_1_minus_v_over_K_at_each_cut_that_is_drawn() -> None:
    # Fair coins, two tokens, reward where they agree: after the first token v = ½. It is drawn once for each token.
    tree = Tree(tokens=2, depth=2)
    w = tree_world(tree, torch.zeros(3, 2).double(), torch.tensor([1.0, 0.0, 0.0, 1.0]).double())
    assert continuation_noise(w, 1) == pytest.approx(0.25)
    assert continuation_noise(w, 4) == pytest.approx(0.0625)
    with pytest.raises(CreditscopeError, match="rewards 0 and 1"):
        continuation_noise(world(EQUAL, 0, steps=True), 4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tree", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_the_prefix_tree_shrinks_the_truth_at_each_node_by_how_rarely_siblings_meet(tree: Tree, seed: int) -> None:
    found = measure("prefix_tree", MEAN, world(tree, seed), SIZE)
    d = reach(found.world)
    torch.testing.assert_close(found.by_token, found.world.advantage * (1 - met(d, SIZE) / (SIZE * d)), **TINY)
    assert found.gradient_shape > 0.01  # another factor in each node: no single one repairs the gradient


# -- critics -------------------------------------------------------------------------------------------------------


def gae(tree: Tree, lam: float, error: Tensor | None = None) -> Exact:
    return measure(f"gae,lam={lam},whiten=false", MEAN, world(tree, 0), SIZE, error)


def wrong(tree: Tree) -> Tensor:
    return 0.3 * torch.randn(len(tree.states), generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tree", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_gae_with_an_exact_critic_gives_the_truth_at_any_lambda(tree: Tree, lam: float) -> None:
    found = gae(tree, lam)
    torch.testing.assert_close(found.by_token, found.world.advantage, **TINY)
    torch.testing.assert_close(found.gradient, found.world.gradient, **TINY)


@pytest.mark.parametrize("tree", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_gae_with_a_wrong_critic_has_the_exact_gradient_at_lambda_1_and_no_other(tree: Tree) -> None:
    error = wrong(tree)
    found = gae(tree, 1.0, error)
    # A = r − V: credit misses by −error(s) in each state, the gradient by nothing.
    torch.testing.assert_close(found.by_token, found.world.advantage - error[:, None], **TINY)
    torch.testing.assert_close(found.gradient, found.world.gradient, **TINY)
    assert 0.02 < gae(tree, 0.5, error).gradient_error < gae(tree, 0.0, error).gradient_error


def test_a_critic_that_errs_by_a_constant_is_harmless_only_where_all_lengths_are_equal() -> None:
    # At λ = 0 a constant c cancels between neighbours and is left at the last token: −c there. Which token is the last
    # is known from the state where all lengths are equal, and chosen by the policy where one token stops.
    for tree in (EQUAL, UNEQUAL):
        error = torch.full((len(tree.states),), 0.3, dtype=torch.float64)
        found = gae(tree, 0.0, error)
        last = torch.tensor([[(*s, a) in tree.leaves for a in range(tree.tokens)] for s in tree.states])
        torch.testing.assert_close(found.by_token, found.world.advantage - 0.3 * last.double(), **TINY)
        assert (found.gradient_error < 1e-12) == (tree is EQUAL)
    assert found.gradient_error > 0.05


# -- reshaped advantages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mask_by_entropy_turns_the_gradient_away_and_a_mask_of_nothing_does_not(seed: int) -> None:
    w = world(Tree(tokens=2, depth=3, stop=0), seed)
    found, whole = (measure(f"entropy_mask,share={share}", MEAN, w, SIZE) for share in (0.2, 1.0))
    assert found.cosine < 0.97
    torch.testing.assert_close(whole.gradient, 2 / 3 * w.gradient, **TINY)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most"), [
    ("entropy_shaping", 1e-4, 0.01), ("salt", 5e-3, 0.03), ("prefix_share", 0.02, 0.06), ("optimal_scalar", 0.1, 0.4),
    ("optimal_token", 0.05, 0.7)])
def test_these_gradients_are_right_up_to_no_factor_but_nearly(name: str, least: float, most: float) -> None:
    for seed in SEEDS:
        assert least < measure(name, MEAN, world(UNEQUAL, seed), SIZE).gradient_shape < most


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefix_share", "entropy_shaping", "salt"])
def test_what_reshapes_an_advantage_is_proportional_to_it(name: str) -> None:
    mean, others = (measure(name, row, world(UNEQUAL, 0), SIZE) for row in (MEAN, OTHERS))
    torch.testing.assert_close(others.by_token, SIZE / (SIZE - 1) * mean.by_token, **TINY)


# -- steps and turns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_turn_returns_are_exact_where_all_have_the_turn_and_not_where_one_outlives_the_others(seed: int) -> None:
    for row, factor in ((OTHERS, 1.0), (MEAN, (SIZE - 1) / SIZE)):
        found = measure("turn_return", row, world(EQUAL, seed, steps=True), SIZE)
        torch.testing.assert_close(found.gradient, factor * found.world.gradient, **TINY)
    found = measure("turn_return", OTHERS, world(UNEQUAL, seed, steps=True), SIZE)
    assert found.gradient_shape > 1e-3
    # The last survivor gets 0, so turn h counts as often as another lives to see it.
    w = found.world
    alive = torch.stack([(w.chance * (w.rollouts.lengths > h)).sum() for h in range(UNEQUAL.depth)])
    turn = torch.tensor([len(prefix) for prefix in UNEQUAL.states])
    centred = found.by_token - (w.policy * found.by_token).sum(dim=1, keepdim=True)
    torch.testing.assert_close(centred, w.advantage * met(alive, SIZE - 1)[turn][:, None], **TINY)


@pytest.mark.parametrize("seed", SEEDS)
def test_state_returns_have_an_exact_gradient_where_all_take_all_turns_and_their_own_return_is_left_out(
        seed: int) -> None:
    found = measure("state_return", OTHERS, world(EQUAL, seed, steps=True), SIZE)
    torch.testing.assert_close(found.gradient, found.world.gradient, **TINY)
    # With its own return in it, a baseline of n siblings shrinks credit by (n−1)/n, another n in each state.
    assert measure("state_return", MEAN, world(EQUAL, seed, steps=True), SIZE).gradient_shape > 1e-3
    # The last survivor has nobody to be compared with.
    assert measure("state_return", OTHERS, world(UNEQUAL, seed, steps=True), SIZE).gradient_shape > 1e-3


@pytest.mark.parametrize("name", ["step_reward", "step_return"])
def test_leaving_one_step_out_is_not_leaving_the_rollout_out(name: str) -> None:
    for seed in SEEDS:
        assert measure(name, OTHERS, world(EQUAL, seed, steps=True), SIZE).gradient_error > 0.02


def turns(name: str, seed: int) -> tuple[Exact, Tensor]:
    """An estimator on the ladder with leave-one-out, and (H,) mean |E[A|s_h,a_h] − (q − v)|."""
    found = measure(name, OTHERS, ladder_world(GAME, policy(seed), START), SIZE)
    gap = (found.by_token - found.world.advantage).abs() * found.world.visits
    return found, gap.view(GAME.turns, -1).sum(dim=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_multi_turn_bias_is_the_advantage_s_and_not_the_gradient_s(seed: int) -> None:
    found, by_turn = turns("outcome", seed)
    w = found.world
    true = w.rollouts.reward[:, None] - w.value[:, :-1]  # G_h − v(s_h): what was earned before stands in both
    bias = torch.stack([GAME.bias(policy(seed), START, moves) for moves in GAME.walks()])
    torch.testing.assert_close(found.by_sequence - true, bias, **TINY)
    assert by_turn[0] < 1e-12
    assert by_turn[1:].min() > 0.1
    torch.testing.assert_close(found.gradient, w.gradient, **TINY)


@pytest.mark.parametrize("seed", SEEDS)
def test_turns_and_states_take_the_bias_out_of_credit_and_leave_the_gradient_exact(seed: int) -> None:
    (outcome, whole), (turn, by_turn), (state, by_state) = (
        turns(name, seed) for name in ("outcome", "turn_return", "state_return"))
    assert bool((by_turn[1:] < 0.9 * whole[1:]).all())
    assert bool((by_state[1:] < 0.9 * by_turn[1:]).all())
    for found in (turn, state):
        torch.testing.assert_close(found.gradient, found.world.gradient, **TINY)
        assert found.noise < 0.9 * outcome.noise


# -- laws, in every group of a tree --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["outcome", "leave_one_out"])
def test_centred_credit_sums_to_nothing_over_a_group(name: str) -> None:
    credit, _ = credit_of(name, world(EQUAL, 0))
    assert credit.abs().max() > 0.3
    assert credit.view(-1, SIZE, EQUAL.depth).sum(dim=1).abs().max() < 1e-12


def test_the_prefix_tree_telescopes_and_cancels_at_every_node() -> None:
    w = world(UNEQUAL, 0)
    credit, rows = credit_of("prefix_tree", w)
    reward = w.rollouts.reward[rows].view(-1, SIZE)
    torch.testing.assert_close(credit.sum(dim=1).view(-1, SIZE), reward - reward.mean(dim=1, keepdim=True), **TINY)
    at_node = w.per_token(credit, rows).view(-1, SIZE, *w.policy.shape).sum(dim=(1, 3))
    assert at_node.abs().max() < 1e-12


def test_monte_carlo_segments_sum_to_the_reward_less_the_start_s_value() -> None:
    w = world(UNEQUAL, 0)
    credit, rows = credit_of("monte_carlo", w)
    torch.testing.assert_close(credit.sum(dim=1), w.rollouts.reward[rows] - baseline_of(w, rows), **TINY)


def test_gae_is_the_reward_less_the_value_at_lambda_1_and_telescopes_at_lambda_0() -> None:
    w, error = world(UNEQUAL, 0), wrong(UNEQUAL)
    one, rows = credit_of("gae,lam=1,whiten=false", w, error)
    value = ExactTools(w, rows, error).critic()
    reward = w.rollouts.reward[rows]
    torch.testing.assert_close(one, (reward[:, None] - value).masked_fill(~w.rollouts.mask[rows], 0.0), **TINY)
    none, _ = credit_of("gae,lam=0,whiten=false", w, error)
    torch.testing.assert_close(none.sum(dim=1), reward - value[:, 0], **TINY)


def test_the_optimal_scalar_cancels_when_weighed_by_the_scores() -> None:
    w = world(UNEQUAL, 0)
    credit, rows = credit_of("optimal_scalar", w)
    square = w.scores[rows].square().sum(dim=1)
    assert (credit[:, 0] * square).view(-1, SIZE).sum(dim=1).abs().max() < 1e-12
    assert credit[:, 0].view(-1, SIZE).sum(dim=1).abs().max() > 0.1


def test_turn_returns_cancel_in_each_turn_and_state_returns_where_siblings_meet() -> None:
    w = world(UNEQUAL, 0, steps=True)
    credit, _ = credit_of("turn_return", w)
    assert credit.view(-1, SIZE, UNEQUAL.depth).sum(dim=1).abs().max() < 1e-12
    credit, rows = credit_of("state_return", w)
    taken = w.per_token(torch.ones_like(credit), rows).view(-1, SIZE, *w.policy.shape).sum(dim=(1, 3))
    sums = w.per_token(credit, rows).view(-1, SIZE, *w.policy.shape).sum(dim=(1, 3))
    assert sums[taken > 1].abs().max() < 1e-12
    assert sums[taken == 1].abs().max() > 0.1


def test_entropy_shaping_moves_credit_between_siblings_of_one_sign_and_keeps_its_sum_at_every_position() -> None:
    w = binary(UNEQUAL, 0)
    shaped, rows = credit_of("entropy_shaping", w)
    plain, _ = credit_of("outcome", w)
    mask = w.rollouts.mask[rows]
    for sign in (plain > 0, plain < 0):
        before, after = ((x * (sign & mask)).view(-1, SIZE, UNEQUAL.depth).sum(dim=1) for x in (plain, shaped))
        torch.testing.assert_close(after, before, **TINY)
    assert (shaped - plain).abs().max() > 0.1
    more, _ = credit_of("entropy_shaping,bonus=1.0", w)
    assert (more.view(-1, SIZE, UNEQUAL.depth).sum(dim=1).abs().max()) > 0.1
