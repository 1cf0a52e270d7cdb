"""The critic: what it reads, what it learns, and that the policy does not feel it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mini
from creditscope import METHODS, CreditscopeError, Rollouts, effective_credit, surrogate
from creditscope.lab.checkpoint import load_checkpoint, save_checkpoint
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.policy.critic import KINDS, Critic, reward_to_go
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import token_logp
from creditscope.tasks import find_task
from each import each
from makers import make

PPO = METHODS["ppo"]
MODEL = mini.model()
BOTH = [(kind, lora) for kind in KINDS for lora in (0, 4)]


@cache
def drawn(seed: int = 0, prompts: int = 3, group: int = 4) -> Drawn:
    """Rollouts of the small model; tests share them and change none."""
    with mini.known():
        return rolled(MODEL, mini.TASK, seed, prompts, group, max_tokens=24)


def rolled(model: str, name: str, seed: int, prompts: int, group: int, max_tokens: int) -> Drawn:
    policy, task = load_policy(model), find_task(name)
    problems = list(islice(task.problems("train", seed), prompts))
    return roll_out(policy, task, problems, group, max_tokens=max_tokens, temperature=1.0, top_p=1.0,
                    generator=torch.Generator().manual_seed(seed))


def snapshot(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


def taught(policy: Policy, kind: str = "head", fits: int = 3, **options: Any) -> Critic:
    """A critic that has left its constant behind."""
    critic = Critic(policy, kind=kind, **options)
    for _ in range(fits):
        critic.fit(drawn().rollouts)
    return critic


# -- what it reads ---------------------------------------------------------------------------------------------------


def test_returns_to_go_by_hand() -> None:
    # γ = ½ and chosen tokens 1, 3 and 4 of four: two, one and none of them follow.
    batch = replace(make([8.0], [0], [4]), mask=torch.tensor([[True, False, True, True]]))
    assert reward_to_go(batch, 0.5).tolist() == [[2.0, 0.0, 4.0, 8.0]]
    assert reward_to_go(batch, 1.0).tolist() == [[8.0, 0.0, 8.0, 8.0]]
    assert reward_to_go(batch, 0.0).tolist() == [[0.0, 0.0, 0.0, 8.0]]


@each("lora", [0, 4])
def test_the_value_before_a_token_is_the_heads_answer_to_the_text_before_it(lora: int) -> None:
    policy = load_policy(MODEL, dtype="float64", lora=lora)
    critic, batch = taught(policy, lr=1e-2), drawn()
    values = critic.values(batch.rollouts)
    for i in (0, 5):
        length = int(batch.rollouts.lengths[i])
        for t in (0, 1, length - 1):
            text = [*batch.rollouts.prompt_ids[i], *batch.rollouts.tokens[i, :t].tolist()]
            with torch.no_grad():
                state = policy.model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, -1]
                expected = critic._head(state)
            assert float(values[i, t]) == pytest.approx(float(expected), abs=1e-9)
    assert float(values[batch.rollouts.mask].std()) > 1e-3, "states differ, else nothing is tested"
    assert not bool(values[~batch.rollouts.mask].any())


def test_a_value_is_blind_to_the_token_it_stands_before() -> None:
    policy = load_policy(MODEL, dtype="float64")
    critic, batch = taught(policy, lr=1e-2), drawn()
    r, t = batch.rollouts, 7
    tokens = r.tokens.clone()
    tokens[:, t] = tokens[:, t] % 90 + 3
    before, after = (critic.values(x) for x in (r, replace(r, tokens=tokens)))
    assert torch.equal(before[:, :t + 1], after[:, :t + 1])
    assert not torch.equal(before[:, t + 1], after[:, t + 1])


@each("kind", KINDS)
def test_padding_and_micro_batches_change_no_value(kind: str) -> None:
    policy = load_policy(MODEL, dtype="float64")
    critic, batch = taught(policy, kind), drawn()
    r = batch.rollouts
    whole = critic.values(r)
    bare = Rollouts(tokens=r.tokens, mask=r.mask, logp=r.logp, reward=r.reward, group=r.group)
    longer = replace(make([0.0], [9], [r.tokens.shape[1] + 9], dtype=torch.float32), ref_logp=None, entropy=None)
    wide = Rollouts.cat([bare, longer])
    long_prompt = [3] * (max(len(p) for p in batch.rollouts.prompt_ids) + 11)
    wide = replace(wide, prompt_ids=[*r.prompt_ids, long_prompt])
    padded = critic.values(wide)[:len(r), :r.tokens.shape[1]]
    torch.testing.assert_close(padded, whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(critic.values(r, parts=5), whole, rtol=0, atol=1e-10)


def test_values_skip_what_others_wrote_but_have_read_it() -> None:
    policy = load_policy(MODEL, dtype="float64")
    critic, batch = taught(policy, lr=1e-2), drawn()
    hole = batch.rollouts.mask.clone()
    hole[:, 4:7] = False
    whole = critic.values(batch.rollouts)
    holed = critic.values(replace(batch.rollouts, mask=hole))
    torch.testing.assert_close(holed, whole.masked_fill(~hole, 0.0), rtol=0, atol=1e-12)


# -- what it learns --------------------------------------------------------------------------------------------------


@each("kind", KINDS)
def test_fitting_one_batch_again_and_again_lowers_its_loss(kind: str) -> None:
    critic, batch = Critic(load_policy(MODEL), kind=kind), drawn()
    losses = [critic.fit(batch.rollouts)["critic/loss"] for _ in range(12)]
    returns = reward_to_go(batch.rollouts, 1.0)[batch.rollouts.mask].double()
    # First V = 0, so the loss is the mean square; then the bias is the mean, so it is at most about the variance.
    assert losses[0] == pytest.approx(float(returns.square().mean()), rel=1e-5)
    assert losses[1] < 1.02 * float(returns.var(correction=0))
    assert losses[-1] < 0.95 * losses[1]


@pytest.mark.slow
def test_a_model_learns_to_foretell_fresh_rollouts_from_their_prompts() -> None:
    # The reward is the parity of the prompt's first token, which stands 3 to 6 tokens before the values.
    critic, found = Critic(load_policy(MODEL), kind="model", lr=1e-2), []
    draw = torch.Generator().manual_seed(0)
    for _ in range(100):
        prompts, tokens = (torch.randint(10, 18, (32, n), generator=draw) for n in (3, 4))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        rollouts = Rollouts(tokens=tokens + 20, mask=mask, logp=-mask.float(), reward=(prompts[:, 0] % 2).float(),
                            group=torch.arange(32), prompt_ids=prompts.tolist())
        found.append(critic.fit(rollouts))
    explained = [line["critic/explained_variance"] for line in found]
    assert abs(explained[0]) < 1e-6, "a constant explains nothing"
    assert sum(explained[-6:]) / 6 > 0.8, explained


@pytest.mark.nightly
def test_the_packaged_model_learns_to_foretell_fresh_rollouts_from_their_prompts() -> None:
    # Not the task's own reward: of that, fresh batches of 64 showed an explained variance of about 0.04 after 100 fits
    # (one seed). How many lines an answer will have stands in the question. A head did not learn that in 24 batches at
    # three settings, so only the model is held to it.
    critic, found = Critic(load_policy("tiny"), kind="model"), []
    for seed in range(24):
        batch = rolled("tiny", "arithmetic", 100 + seed, prompts=8, group=2, max_tokens=56)
        lines = [float(text.count("\n") >= 3) for text in batch.rollouts.text]
        found.append(critic.fit(replace(batch.rollouts, reward=torch.tensor(lines))))
    explained = [line.get("critic/explained_variance", 0.0) for line in found]
    assert abs(explained[0]) < 1e-6, "a constant explains nothing"
    assert sum(explained[-6:]) / 6 > 0.2, explained


def test_micro_batches_give_the_same_fit() -> None:
    batch, found = drawn(), []
    for parts in (1, 5):
        critic = Critic(load_policy(MODEL, dtype="float64"), kind="model", epochs=2)
        metrics = critic.fit(batch.rollouts, parts)
        found.append((metrics, snapshot(critic.trainable())))
    (one, whole), (two, dealt) = found
    assert one == pytest.approx(two, abs=1e-9)
    # Adam turns a gradient of rounding size into a step of lr = 1e-4, so compare where the gradient is not that small.
    moved = torch.cat([(whole[n] - dealt[n]).abs().flatten() for n in whole])
    assert float(moved.median()) < 1e-12
    assert float((moved > 1e-8).double().mean()) < 1e-3


def test_the_explained_variance_is_that_of_the_values_before_the_step() -> None:
    critic, batch = taught(load_policy(MODEL), lr=1e-2), drawn(1)
    values = critic.values(batch.rollouts)
    metrics = critic.fit(batch.rollouts)
    mask = batch.rollouts.mask
    target, value = reward_to_go(batch.rollouts, 1.0)[mask].double(), values[mask].double()
    assert metrics["critic/loss"] == pytest.approx(float((target - value).square().mean()), rel=1e-6)
    assert metrics["critic/explained_variance"] == pytest.approx(
        float(1 - (target - value).var() / target.var()), abs=1e-6)
    assert not torch.equal(critic.values(batch.rollouts), values), "and then it moved"


def test_returns_that_are_all_equal_have_no_explained_variance() -> None:
    batch = drawn()
    metrics = Critic(load_policy(MODEL)).fit(replace(batch.rollouts, reward=torch.ones(12)))
    assert set(metrics) == {"critic/loss"}


def test_gamma_reaches_the_target() -> None:
    critic, batch = Critic(load_policy(MODEL), gamma=0.9), drawn()
    expected = reward_to_go(batch.rollouts, 0.9)[batch.rollouts.mask].square().mean()
    assert critic.fit(batch.rollouts)["critic/loss"] == pytest.approx(float(expected), rel=1e-5)


# -- what the policy feels -------------------------------------------------------------------------------------------


@each("kind, lora", BOTH)
def test_the_policy_has_the_same_weights_gradients_and_w_as_without_a_critic(kind: str, lora: int) -> None:
    policy, batch = load_policy(MODEL, lora=lora), drawn()
    r = batch.rollouts
    credit = torch.randn(r.mask.shape, generator=torch.Generator().manual_seed(0)) * r.mask

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        policy.model.zero_grad()
        live = token_logp(policy, batch.rollouts.prompt_ids, r.tokens, r.mask, 1.0)
        w = effective_credit(lambda lp: surrogate(PPO, lp, r, credit), live)
        live.backward(w)  # type: ignore[no-untyped-call]
        return w, {name: p.grad.clone() for name, p in policy.trainable().items() if p.grad is not None}

    w, gradients = step()
    weights = snapshot(policy.trainable())
    policy.model.zero_grad()
    critic = taught(policy, kind)
    critic.values(r)
    assert all(p.grad is None for p in policy.model.parameters())
    assert same(snapshot(policy.trainable()), weights)
    again, repeated = step()
    assert torch.equal(w, again)
    assert same(gradients, repeated)
    mine = {id(p) for p in policy.model.parameters()}
    assert not any(id(p) in mine for p in critic.trainable().values())


@each("kind, lora", BOTH)
def test_every_parameter_of_the_critic_learns(kind: str, lora: int) -> None:
    policy = load_policy(MODEL, lora=lora)
    critic = Critic(policy, kind=kind)
    before = snapshot(critic.trainable())
    for _ in range(3):  # a zero last layer lets the layers below it learn from the second step on
        critic.fit(drawn().rollouts)
    stuck = [name for name, p in critic.trainable().items() if torch.equal(p, before[name])]
    assert stuck == []
    assert any(name.startswith("body.") for name in before) == (kind == "model")
    assert all("lora_" in name for name in before if name.startswith("body.")) or not lora


@pytest.mark.filterwarnings("ignore:TF32")
@each("kind", KINDS)
def test_the_head_on_a_bfloat16_policy_works_in_float32(kind: str) -> None:
    # Virtual machines that announce AMX and do not allow it kill every bfloat16 product of oneDNN.
    with torch.backends.mkldnn.flags(enabled=False):
        critic, r = Critic(load_policy(MODEL, dtype="bfloat16"), kind=kind), drawn().rollouts
        losses = [critic.fit(r)["critic/loss"] for _ in range(6)]
        assert losses[-1] < losses[1], losses
        assert critic.values(r).dtype == torch.float32
    kinds = {name.split(".")[0]: p.dtype for name, p in critic.trainable().items()}
    assert kinds == {"head": torch.float32} | ({"body": torch.bfloat16} if kind == "model" else {}), kinds


# -- seeds and checkpoints -------------------------------------------------------------------------------------------


@each("kind", KINDS)
def test_one_seed_is_one_critic_bit_by_bit_and_the_global_generator_is_left_alone(kind: str) -> None:
    policy = load_policy(MODEL)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    one = taught(policy, kind)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(456)
    two, other = taught(policy, kind), taught(policy, kind, seed=1)
    assert same(one.trainable(), two.trainable())
    assert not same(one.trainable(), other.trainable())


@each("kind", KINDS)
def test_a_critic_from_a_checkpoint_goes_on_bit_by_bit(kind: str, tmp_path: Path) -> None:
    def start() -> tuple[Policy, torch.optim.Optimizer, Critic]:
        policy = load_policy(MODEL)
        return policy, torch.optim.AdamW(policy.trainable().values(), 1e-4), Critic(policy, kind=kind)

    policy, optimizer, critic = start()
    first, second = drawn(), drawn(1)
    critic.fit(first.rollouts)
    save_checkpoint(tmp_path, policy, optimizer, {"step": 1}, critic)
    expected = critic.fit(second.rollouts)
    again, fresh, restored = start()
    assert load_checkpoint(tmp_path, again, fresh, restored) == {"step": 1}
    assert restored.fit(second.rollouts) == expected
    assert same(restored.trainable(), critic.trainable())


def test_a_checkpoint_without_a_critic_or_with_another_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    policy = load_policy(MODEL)
    optimizer = torch.optim.AdamW(policy.trainable().values(), 1e-4)
    save_checkpoint(tmp_path, policy, optimizer, {"step": 1})
    with pytest.raises(CreditscopeError, match="has no critic, and this run needs one; resume it with the settings"):
        load_checkpoint(tmp_path, policy, optimizer, Critic(policy))
    save_checkpoint(tmp_path, policy, optimizer, {"step": 1}, Critic(policy, width=8))
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(1.0)
    moved = snapshot(policy.trainable())
    with pytest.raises(CreditscopeError, match=r"another critic: head.1.bias is \(8,\) there and \(256,\) in"):
        load_checkpoint(tmp_path, policy, optimizer, Critic(policy))
    assert same(policy.trainable(), moved)
    (tmp_path / "critic_optimizer.safetensors").write_bytes(b"half")
    with pytest.raises(CreditscopeError, match=r"cannot read the checkpoint .* delete that folder"):
        load_checkpoint(tmp_path, policy, optimizer, Critic(policy, width=8))


@each("options, message", [
    ({"kind": "modle"}, "unknown critic 'modle'; did you mean 'model'"),
    ({"epochs": 0}, "epochs of the critic must be at least 1, got 0"),
    ({"lr": 0.0}, "lr of the critic must be above 0 and finite, got 0.0"),
    ({"gamma": 1.1}, "gamma of the critic must be in 0 .. 1, got 1.1"),
])
def test_a_critic_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        Critic(load_policy(MODEL), **options)
