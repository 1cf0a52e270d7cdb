"""GAE: by hand, against the plain recursion, and on a tree where every expectation is a finite sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.credit import find_estimator
from creditscope.credit.gae import advantages, gae, lambdas
from creditscope.credit.tools import Tools
from creditscope.objective.advantages import mean_entropy, standardised
from makers import make
from makers_tree import Tree

PPO = METHODS["ppo"]
EXACT: dict[str, float] = {"rtol": 0.0, "atol": 1e-12}


class Known(Tools):
    """Values that are known beforehand."""

    def __init__(self, values: Tensor, progress: float = 0.0) -> None:
        self._values, self.progress = values, progress

    def critic(self) -> Tensor:
        return self._values


def with_holes(seed: int, width: int = 9) -> tuple[Rollouts, Tensor]:
    """Five rows of random rewards and values, every token chosen by chance; one row chose nothing at all."""
    g = torch.Generator().manual_seed(seed)
    batch = make(torch.randn(5, generator=g, dtype=torch.float64).tolist(), [0, 0, 0, 1, 1], [width] * 5, seed=seed)
    mask = torch.rand(5, width, generator=g) < 0.6
    mask[0] = True
    mask[3] = False
    return replace(batch, mask=mask), torch.randn(5, width, generator=g, dtype=torch.float64)


def recursion(reward: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """A_t = δ_t + γλ A_{t+1}, token by token, row by row."""
    out = torch.zeros_like(values)
    for i in range(len(reward)):
        following_value = following_credit = 0.0
        outcome = float(reward[i])
        for t in reversed(mask[i].nonzero().squeeze(1).tolist()):
            delta = outcome + gamma * following_value - float(values[i, t])
            following_credit = delta + gamma * float(lam[i]) * following_credit
            following_value, outcome = float(values[i, t]), 0.0
            out[i, t] = following_credit
    return out


def test_three_tokens_by_hand() -> None:
    # γ = λ = ½, r = 2, V = ½, ¼, 1:
    #   δ₃ = 2 − 1 = 1            A₃ = 1
    #   δ₂ = ½·1 − ¼ = ¼          A₂ = ¼ + ¼·1 = ½
    #   δ₁ = ½·¼ − ½ = −⅜         A₁ = −⅜ + ¼·½ = −¼
    batch = make([2.0], [0], [3])
    values = torch.tensor([[0.5, 0.25, 1.0]], dtype=torch.float64)
    credit = gae(PPO, batch, Known(values), gamma=0.5, lam=0.5, whiten=False)
    assert credit.tolist() == [[-0.25, 0.5, 1.0]]


def test_text_that_others_wrote_is_stepped_over_without_a_discount() -> None:
    # The same three tokens with a stranger's between the first and the second, whose value means nothing.
    batch = replace(make([2.0], [0], [4]), mask=torch.tensor([[True, False, True, True]]))
    values = torch.tensor([[0.5, float("nan"), 0.25, 1.0]], dtype=torch.float64)
    credit = gae(PPO, batch, Known(values), gamma=0.5, lam=0.5, whiten=False)
    assert credit.tolist() == [[-0.25, 0.0, 0.5, 1.0]]


@given(seed=st.integers(0, 999), width=st.integers(1, 20), gamma=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
def test_doubling_is_the_recursion(seed: int, width: int, gamma: float) -> None:
    batch, values = with_holes(seed, width)
    lam = torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lam[:2] = torch.tensor([0.0, 1.0])
    fast = advantages(batch.reward, values, batch.mask, gamma, lam)
    torch.testing.assert_close(fast, recursion(batch.reward, values, batch.mask, gamma, lam), **EXACT)


def test_eight_thousand_tokens_in_float32_are_the_recursion_in_float64() -> None:
    g = torch.Generator().manual_seed(0)
    values, mask = torch.rand(2, 8192, generator=g), torch.rand(2, 8192, generator=g) < 0.9
    reward, lam = torch.tensor([1.0, 0.0]), torch.tensor([0.9975, 1.0])
    fast = advantages(reward, values, mask, 1.0, lam)
    slow = recursion(reward.double(), values.double(), mask, 1.0, lam.double())
    # 13 additions of numbers below 1, and at λ = 0.9975 sums of a few: some units in the last place of 1.
    assert fast.dtype == torch.float32
    assert float((fast - slow).abs().max()) < 1e-5


@given(seed=st.integers(0, 999))
def test_lambda_one_is_reward_minus_value_and_lambda_zero_is_delta(seed: int) -> None:
    batch, values = with_holes(seed)
    full = gae(PPO, batch, Known(values), lam=1.0, whiten=False)
    expected = (batch.reward[:, None] - values).masked_fill(~batch.mask, 0.0)
    torch.testing.assert_close(full, expected, **EXACT)
    # Σ_t δ_t telescopes to r − V before the first chosen token.
    deltas = gae(PPO, batch, Known(values), lam=0.0, whiten=False)
    for i in range(len(batch)):
        chosen = batch.mask[i].nonzero().squeeze(1)
        if len(chosen):
            assert float(deltas[i].sum()) == pytest.approx(float(batch.reward[i] - values[i, chosen[0]]), abs=1e-12)
            row = values[i, chosen].tolist()
            steps = [b - a for a, b in zip(row, [*row[1:], float(batch.reward[i])], strict=True)]
            assert deltas[i, chosen].tolist() == pytest.approx(steps, abs=1e-12)
        else:
            assert not bool(deltas[i].any())


# -- on the tree: a critic that is right, and one that is wrong ------------------------------------------------------


def draw(tree: Tree, seed: int) -> tuple[Tensor, Tensor, Rollouts]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tree.states), tree.tokens, generator=g, dtype=torch.float64)
    reward = torch.randn(len(tree.leaves), generator=g, dtype=torch.float64)
    return logits, reward, tree.rollouts(logits, tree.groups(1), reward)


def on_tokens(tree: Tree, worth: Tensor) -> Tensor:
    """(N, depth) a value for each state, where each sequence visits it."""
    return worth[tree.visited.clamp(min=0)]


trees = st.builds(Tree, tokens=st.integers(2, 3), depth=st.integers(1, 4), stop=st.sampled_from([None, 0]))


@given(tree=trees, seed=st.integers(0, 999))
def test_with_an_exact_critic_lambda_zero_is_q_minus_v_on_every_token(tree: Tree, seed: int) -> None:
    logits, reward, batch = draw(tree, seed)
    q, v = tree.q(logits, reward), tree.value(logits, reward)
    credit = gae(PPO, batch, Known(on_tokens(tree, v)), lam=0.0, whiten=False)
    truth = (q - v[:, None])[tree.visited.clamp(min=0), tree.chosen].masked_fill(~tree.mask, 0.0)
    torch.testing.assert_close(credit, truth, **EXACT)


@given(tree=trees, seed=st.integers(0, 999), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_with_an_exact_critic_any_lambda_is_q_minus_v_on_average(tree: Tree, seed: int, lam: float) -> None:
    logits, reward, batch = draw(tree, seed)
    q, v = tree.q(logits, reward), tree.value(logits, reward)
    credit = gae(PPO, batch, Known(on_tokens(tree, v)), lam=lam, whiten=False)
    # E[A | s, a]: the sequences through (s, a), each by its probability.
    chance = tree.probability(logits)[:, None].expand_as(credit)[tree.mask]
    where = (tree.visited * tree.tokens + tree.chosen)[tree.mask]
    total = torch.zeros(q.numel(), dtype=torch.float64)
    mean = total.index_add(0, where, chance * credit[tree.mask]) / total.index_add(0, where, chance)
    torch.testing.assert_close(mean.view_as(q), q - v[:, None], rtol=1e-9, atol=1e-12)


def expected_gradient(tree: Tree, logits: Tensor, credit: Tensor) -> Tensor:
    """Σ_y π(y) Σ_t A_t ∇log π(y_t), by autograd through the tree's own log-probs."""
    live = logits.clone().requires_grad_()
    weight = tree.probability(logits)[:, None] * credit
    (gradient,) = torch.autograd.grad((weight * tree.logp(live)).sum(), live)
    return gradient


@given(tree=trees, seed=st.integers(0, 999))
def test_at_lambda_one_any_critic_leaves_the_gradient_unbiased(tree: Tree, seed: int) -> None:
    logits, reward, batch = draw(tree, seed)
    wrong = torch.randn(len(tree.states), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    credit = gae(PPO, batch, Known(on_tokens(tree, wrong)), lam=1.0, whiten=False)
    torch.testing.assert_close(expected_gradient(tree, logits, credit), tree.gradient(logits, reward), **EXACT)


def test_below_lambda_one_a_wrong_critic_bends_the_gradient() -> None:
    tree = Tree(tokens=2, depth=3)
    logits, reward, batch = draw(tree, 0)
    wrong = torch.randn(len(tree.states), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    credit = gae(PPO, batch, Known(on_tokens(tree, wrong)), lam=0.5, whiten=False)
    truth = tree.gradient(logits, reward)
    assert float((expected_gradient(tree, logits, credit) - truth).norm() / truth.norm()) > 0.1


# -- schedules -------------------------------------------------------------------------------------------------------


def test_longer_answers_get_a_larger_lambda_and_short_ones_zero() -> None:
    # VAPO's α = 0.05: 1 − 1/(0.05·L) is ½ at 40 tokens, 0.9 at 200; at 20 it is 0 and below 20 it would be negative.
    found = lambdas(torch.tensor([0, 1, 20, 40, 200]), schedule="length", lam=1.0, alpha=0.05, progress=0.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.9])


def test_each_row_has_the_lambda_of_its_own_length() -> None:
    batch, values = with_holes(3)
    own = torch.tensor([max(0.0, 1 - 1 / (0.3 * max(n, 1))) for n in batch.lengths.tolist()], dtype=torch.float64)
    assert len(set(own.tolist())) >= 3, "rows that differ, else nothing is tested"
    found = gae(PPO, batch, Known(values), schedule="length", alpha=0.3, whiten=False)
    torch.testing.assert_close(found, recursion(batch.reward, values, batch.mask, 1.0, own), **EXACT)


@pytest.mark.parametrize(("progress", "now"), [(0.0, 1.0), (0.5, 0.75), (1.0, 0.5)])
def test_a_linear_schedule_goes_from_one_to_lambda(progress: float, now: float) -> None:
    batch, values = with_holes(4)
    found = gae(PPO, batch, Known(values, progress), schedule="linear", lam=0.5, whiten=False)
    assert torch.equal(found, gae(PPO, batch, Known(values), lam=now, whiten=False))


# -- in the method's units -------------------------------------------------------------------------------------------


def test_credit_is_whitened_over_the_chosen_tokens_unless_told_otherwise() -> None:
    batch, values = with_holes(5)
    raw, white = (gae(PPO, batch, Known(values), lam=0.9, whiten=on) for on in (False, True))
    chosen = white[batch.mask]
    assert float(chosen.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(chosen.std()) == pytest.approx(1.0, rel=1e-7)
    assert not bool(white[~batch.mask].any())
    assert torch.corrcoef(torch.stack([raw[batch.mask], chosen]))[0, 1].item() == pytest.approx(1.0)


def test_a_row_that_whitens_itself_is_not_whitened_by_another_epsilon() -> None:
    batch, values = with_holes(6)
    row = METHODS["reinforce_pp"].but(name="mine", whiten_eps=0.5)
    assert torch.equal(gae(row, batch, Known(values)), gae(row, batch, Known(values), whiten=False))


def test_a_kl_term_in_the_reward_is_paid_once_from_each_token_on() -> None:
    batch, values = with_holes(7)
    row = PPO.but(name="ppo_kl", kl="k1", kl_in="token_reward", beta=0.1)
    assert batch.ref_logp is not None
    drift = (batch.logp - batch.ref_logp).masked_fill(~batch.mask, 0.0)
    for lam in (0.0, 1.0):
        plain, paid = (gae(m, batch, Known(values), lam=lam, whiten=False) for m in (PPO, row))
        for i, t in batch.mask.nonzero().tolist():
            owed = 0.1 * float(drift[i, t:].sum())
            assert float(plain[i, t] - paid[i, t]) == pytest.approx(owed, abs=1e-12)


def test_whitening_comes_before_the_entropy_is_paid() -> None:
    batch, values = with_holes(8)
    row = PPO.but(name="ppo_entropy", entropy_cost=0.1)
    plain, paid = (gae(m, batch, Known(values)) for m in (PPO, row))
    owed = (0.1 * mean_entropy(row, batch))[:, None].expand_as(plain).masked_fill(~batch.mask, 0.0)
    torch.testing.assert_close(plain - paid, owed, **EXACT)


def test_whitening_comes_after_the_rows_own_scale() -> None:
    batch, values = with_holes(9)
    scaled = gae(METHODS["grpo"], batch, Known(values), whiten=False)
    weight = batch.mask.double()
    torch.testing.assert_close(gae(METHODS["grpo"], batch, Known(values)),
                               standardised(scaled, weight, 1e-8).masked_fill(~batch.mask, 0.0), **EXACT)


def test_the_list_finds_it_with_its_options() -> None:
    chosen = find_estimator("gae,lam=0.95,schedule=linear,whiten=false")
    batch, values = with_holes(1)
    found = chosen.function(PPO, batch, Known(values), **chosen.options)
    assert torch.equal(found, gae(PPO, batch, Known(values), lam=0.95, schedule="linear", whiten=False))


def test_half_precision_values_are_summed_in_float32() -> None:
    batch, values = with_holes(2)
    assert gae(PPO, replace(batch, reward=batch.reward.float()), Known(values.bfloat16())).dtype == torch.float32


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "message"), [
    ("gae,lam=1.5", r"lam of credit 'gae' must be a .*number in 0 .. 1, got 1.5"),
    ("gae,gamma=-0.1", r"gamma of credit 'gae' must be a .*number in 0 .. 1, got -0.1"),
    ("gae,gamma=nan", r"gamma of credit 'gae' must be a .*number in 0 .. 1, got nan"),
    ("gae,schedule=lenght", "unknown schedule of credit 'gae': 'lenght'; did you mean 'length'"),
    ("gae,alpha=0.0", "alpha of credit 'gae' must be a .*number of at least 1e-06, got 0.0"),
])
def test_options_that_cannot_work_are_refused(spec: str, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        find_estimator(spec)


def test_values_that_are_not_finite_or_not_of_the_batch_are_refused() -> None:
    batch, values = with_holes(0)
    values[0, 2] = float("inf")
    with pytest.raises(CreditscopeError, match=r"row 0, column 2 is inf \(and 0 more are not finite\); lower"):
        gae(PPO, batch, Known(values))
    with pytest.raises(CreditscopeError, match=r"one value per token, \(5, 9\), got \(5, 8\)"):
        gae(PPO, batch, Known(values[:, 1:]))
    with pytest.raises(CreditscopeError, match="needs a learned value function, and there is none here"):
        gae(PPO, batch, Tools())
