"""The microscope in the trainer: what it records is right, on schedule, and changes nothing about the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mini
from creditscope import CreditscopeError, Record, Rollouts, spectrum
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.lab.setup import make_optimizer
from creditscope.lab.step import Minibatch, take_step
from creditscope.lab.train import train
from creditscope.microscope import observer as observer_module
from creditscope.microscope.observer import Block, Observer, _joined, row_w
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.sketch import Sketcher
from creditscope.microscope.sources import ParameterSource
from creditscope.objective.advantages import token_advantage
from creditscope.optimizer.brakes import Brake
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import head_norms, token_logp
from creditscope.runs.config import Config
from creditscope.tasks import find_task
from makers import make
from small_models import build

pytestmark = pytest.mark.usefixtures("mini_task")
LOOK = Config(model=mini.model(), task=mini.TASK, prompts=3, group=4, steps=2, max_tokens=12, eval_problems=0,
              checkpoint_every=1, keep_every=0, lr=1e-4, scope="full", dtype="float64")


def sampled(config: Config) -> tuple[Policy, Drawn]:
    """The policy's head is tied to its embedding, as the packaged model's is."""
    policy = load_policy(config.model, dtype=config.dtype)
    policy.model.lm_head.weight = policy.model.get_input_embeddings().weight
    task = find_task(config.task)
    problems = [problem for problem, _ in zip(task.problems("train", 0), range(config.prompts), strict=False)]
    batch = roll_out(policy, task, problems, config.group, max_tokens=12, temperature=1.0, top_p=1.0,
                     generator=torch.Generator().manual_seed(1))
    # Rewards of our own: one dead group, two live ones, so that every reading has something to read.
    reward = torch.tensor([0.0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1], dtype=batch.rollouts.reward.dtype)
    return policy, replace(batch, rollouts=replace(batch.rollouts, reward=reward))


def looked(config: Config) -> tuple[Policy, Observer, Rollouts, torch.Tensor, dict[str, torch.Tensor], Drawn]:
    """One step under the microscope: also the weights as they were."""
    policy, batch = sampled(config)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    observer = Observer(policy.model, config.scope == "full")
    credit = token_advantage(config.row, batch.rollouts).expand_as(batch.rollouts.mask)
    update = take_step(Minibatch(policy, config.row, batch.rollouts, credit, accumulate=config.accumulate),
                       Brake(make_optimizer(policy, config)), [observer], config.clip_norm)
    assert update is not None
    observer.after_updates()
    return policy, observer, batch.rollouts, update.w, before, batch


def slow_rows(policy: Policy, batch: Drawn, w: torch.Tensor) -> torch.Tensor:
    """(N, P) the rows one by one, by plain autograd."""
    rows = []
    for i in range(len(batch.rollouts)):
        policy.model.zero_grad()
        r = batch.rollouts.rows(torch.tensor([i]))
        logp = token_logp(policy, [batch.rollouts.prompt_ids[i]], r.tokens, r.mask, 1.0)
        torch.autograd.backward(logp, w[i:i + 1, : logp.shape[1]].to(logp.dtype))
        rows.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                               for p in policy.trainable().values()]))
    return torch.stack(rows)


@pytest.mark.slow
def test_the_recorded_grams_are_those_of_rows_taken_one_by_one() -> None:
    policy, observer, rollouts, w, before, batch = looked(LOOK)
    arrays = observer.arrays(rollouts, w)
    policy.model.load_state_dict(before, strict=False)
    for name, weight in (("gram", w), ("scores", rollouts.mask.double())):
        rows = slow_rows(policy, batch, weight)
        slow = (rows @ rows.T).numpy()
        assert np.abs(arrays[name] - slow).max() < 1e-10 * np.abs(slow).max()
    # Parameter by parameter the groups' blocks add up to the groups' blocks of the whole.
    for block, group in zip(arrays["layers"].sum(axis=0), arrays["layer_groups"], strict=True):
        rows_of = arrays["group"] == group
        inside = arrays["gram"][np.ix_(rows_of, rows_of)]
        assert np.abs(block - inside).max() <= 1e-5 * max(np.abs(inside).max(), 1e-12)


@pytest.mark.slow
def test_the_readings_are_those_of_the_recorded_grams() -> None:
    _, observer, rollouts, w, _, _ = looked(LOOK)
    arrays, line = observer.arrays(rollouts, w), observer.metrics(rollouts, w, observer.seconds + 1.0)
    live = [arrays["group"] == g for g in (0, 2)]  # group 1 is unanimous
    ranks = [spectrum(arrays["gram"][np.ix_(rows, rows)], float(arrays["eps"])).effective_rank for rows in live]
    assert line["gram/group/effective_rank"] == pytest.approx(np.mean(ranks))
    assert line["gram/live_groups"] == 2
    assert line["scores/live_groups"] == 3
    # k = 2 and k = 1 of R = 4: 4·2·2/4 = 4 and 4·1·3/4 = 3.
    assert line["gram/group/orthogonal_null"] == pytest.approx(3.5)
    assert 0 < line["scope/share"] < 1
    assert line["scope/ratio"] > 0
    # b* = Σ r‖ψ‖² / Σ‖ψ‖² in each mixed group, then the mean of the two.
    norms, reward = np.diag(arrays["scores"]), arrays["reward"]
    best = [(norms * reward)[rows].sum() / norms[rows].sum() for rows in live]
    assert line["baseline/optimal"] == pytest.approx(np.mean(best))
    assert line["baseline/mean"] == pytest.approx((0.5 + 0.25) / 2)


def test_the_path_holds_the_sketches_of_the_gradient_and_of_the_update() -> None:
    policy, observer, rollouts, w, before, batch = looked(LOOK)
    arrays = observer.arrays(rollouts, w)
    moved = {name: p.detach() - before[name] for name, p in policy.trainable().items()}
    assert np.allclose(arrays["path_update"], Sketcher().gradient(moved.items()).double().numpy())
    policy.model.load_state_dict(before, strict=False)
    total, at = slow_rows(policy, batch, -w).sum(dim=0), 0
    gradient = {}
    for name, p in policy.trainable().items():
        gradient[name] = total[at:at + p.numel()].view_as(p)
        at += p.numel()
    assert np.abs(arrays["path_gradient"]).max() > 1e-3
    assert np.allclose(arrays["path_gradient"], Sketcher().gradient(gradient.items()).double().numpy(), atol=1e-8)


@pytest.mark.slow
def test_the_norms_of_single_tokens_are_those_of_the_head_alone() -> None:
    policy, observer, rollouts, w, before, batch = looked(LOOK)
    policy.model.load_state_dict(before, strict=False)
    norms = observer.arrays(rollouts, w)["token_norms_head"]
    line = observer.metrics(rollouts, w, observer.seconds + 1.0)
    head = torch.nn.Linear(1, 1, bias=False)  # an untied head: the policy's is tied to its embedding
    head.weight = torch.nn.Parameter(policy.model.get_output_embeddings().weight.detach().clone())
    policy.model.lm_head = head
    for i, t in ((0, 0), (3, 1), (9, 4)):
        assert rollouts.mask[i, t]
        r = rollouts.rows(torch.tensor([i]))
        logp = token_logp(policy, [batch.rollouts.prompt_ids[i]], r.tokens, r.mask, 1.0)[0, t]
        (grad,) = torch.autograd.grad(logp, head.weight)
        assert norms[i, t] == pytest.approx(float(grad.norm()), rel=1e-9)
    x = np.sort(norms[rollouts.mask.numpy()] ** 2)[::-1]
    assert line["tokens/head_top10"] == pytest.approx(x[: len(x) // 10].sum() / x.sum())


def test_what_a_model_does_to_its_logits_after_the_head_is_in_the_norms_of_the_head() -> None:
    model = build("gemma2", final_logit_softcapping=0.5).double()
    policy = Policy("capped", model, tokenizer=None)
    tokens, mask = torch.tensor([[5, 7, 9]]), torch.ones(1, 3, dtype=torch.bool)
    rollouts = Rollouts(tokens=tokens, mask=mask, logp=torch.zeros(1, 3), reward=torch.zeros(1),
                        group=torch.zeros(1, dtype=torch.int64), prompt_ids=[[3, 4]])
    norms = head_norms(policy, rollouts, 1.0)
    head = torch.nn.Linear(1, 1, bias=False)
    head.weight = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
    model.lm_head = head
    for t in range(3):
        (grad,) = torch.autograd.grad(token_logp(policy, [[3, 4]], tokens, mask, 1.0)[0, t], head.weight)
        assert float(norms[0, t]) == pytest.approx(float(grad.norm()), rel=1e-6)


@pytest.mark.slow
def test_the_path_of_a_step_with_several_updates_is_where_they_led_together(tmp_path: Path) -> None:
    config = replace(LOOK, prompts=4, minibatches=2, inner_steps=2, steps=1)
    start = load_policy(LOOK.model, dtype="float64").trainable()
    list(train(config, tmp_path, {}))
    end = load_file(Record.open(tmp_path).checkpoint_path(1) / "policy.safetensors")
    moved = {name: end[name] - p.detach() for name, p in start.items()}
    want = Sketcher().gradient(moved.items()).double().numpy()
    assert np.linalg.norm(Record.open(tmp_path).reading(0)["path_update"] - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.slow
def test_micro_batches_keep_groups_whole_so_their_readings_do_not_change() -> None:
    _, observer, rollouts, w, _, _ = looked(LOOK)
    _, parted, same, v, _, _ = looked(replace(LOOK, accumulate=2))
    one, two = observer.metrics(rollouts, w, observer.seconds + 1.0), parted.metrics(same, v, parted.seconds + 1.0)
    shared = [name for name in one if "/group/" in name or name.startswith("baseline/")]
    assert len(shared) > 20
    for name in shared:
        assert two[name] == pytest.approx(one[name], rel=1e-6), name
    # Rows of different micro-batches never met: no reading of the batch, and NaN in the Gram.
    assert "gram/effective_rank" in one
    assert "gram/effective_rank" not in two
    # The agreement of groups needs no entry between micro-batches: the norm of the whole gradient has their sum.
    assert two["gram/between"] == pytest.approx(one["gram/between"], rel=1e-5)
    assert np.isnan(parted.arrays(same, v)["gram"]).any()
    assert not np.isnan(observer.arrays(rollouts, w)["gram"]).any()


@pytest.mark.slow
def test_looking_changes_the_run_by_rounding_only(tmp_path: Path) -> None:
    def last(scope: str) -> dict[str, torch.Tensor]:
        list(train(replace(LOOK, scope=scope), tmp_path / scope, {}))
        return load_file(Record.open(tmp_path / scope).checkpoint_path(2) / "policy.safetensors")

    plain, start = last("off"), load_policy(LOOK.model, dtype="float64").trainable()
    assert max(float((plain[name] - p.detach()).abs().max()) for name, p in start.items()) > 1e-4, "it learns"
    for scope in ("light", "full"):
        for name, weight in last(scope).items():
            assert torch.allclose(weight, plain[name], rtol=0, atol=1e-9), (scope, name)


@pytest.mark.slow
def test_readings_come_on_schedule_and_a_rewound_run_forgets_them(tmp_path: Path) -> None:
    config = replace(LOOK, scope="light", every=2, steps=3, dtype="float32")
    list(train(config, tmp_path, {}))
    record = Record.open(tmp_path)
    assert record.readings() == [0, 2]
    read: list[dict[str, Any]] = record.steps()
    assert ["gram/live_groups" in step for step in read] == [True, False, True]
    with Record.resume(tmp_path, record.config, frozenset()) as again:
        again.rewind(2)
        assert again.readings() == [0]
    with pytest.raises(CreditscopeError, match=r"no readings were kept of step 2; kept: \[0\]"):
        Record.open(tmp_path).reading(2)


def test_a_batch_without_any_signal_is_read_without_readings_of_rank() -> None:
    policy, batch = sampled(LOOK)
    r = replace(batch.rollouts, reward=torch.ones_like(batch.rollouts.reward))
    observer = Observer(policy.model, LOOK.scope == "full")
    credit = token_advantage(LOOK.row, r).expand_as(r.mask)
    update = take_step(Minibatch(policy, LOOK.row, r, credit), Brake(make_optimizer(policy, LOOK)), [observer],
                       LOOK.clip_norm)
    assert update is not None
    line = observer.metrics(r, update.w, observer.seconds + 1.0)
    assert line["gram/live_groups"] == 0
    assert not any(name.startswith(("gram/group/", "baseline/", "null/", "matrix/")) for name in line)
    assert line["scores/group/effective_rank"] > 1  # the scores are there all the same


def test_row_credit_is_absent_when_tokens_of_one_answer_differ() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert row_w(torch.tensor([[1.0, 2.0]]), mask) is None
    found = row_w(torch.tensor([[1.0, 1.0]]), mask)
    assert found is not None
    assert found.tolist() == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "group", "accumulate"), [
    (3, 4, 4),  # micro-batches of 3 rows, which no group fits: each group in parts of one row, 6 passes
    (1, 12, 2),  # 2 of 6 rows: parts of three rows, 6 passes
])
def test_groups_that_micro_batches_cut_apart_have_the_same_grams(prompts: int, group: int, accumulate: int) -> None:
    """Identity: K_ij from a pass of two parts of a group is K_ij from a pass of the batch."""
    config = replace(LOOK, also=("leave_one_out",), prompts=prompts, group=group)
    _, whole, rollouts, w, _, batch = looked(config)
    policy, cut, same, v, before, _ = looked(replace(config, accumulate=accumulate))
    assert torch.allclose(v, w, rtol=1e-12, atol=0)
    want, got = whole.arrays(rollouts, w), cut.arrays(same, v)
    inside = rollouts.group[:, None].eq(rollouts.group).numpy()
    for name in ("gram", "scores"):
        assert np.abs(got[name] - want[name])[inside].max() < 1e-11 * want[name][inside].max(), name
        assert np.isnan(got[name][~inside]).all(), "rollouts of different groups never met"
    order = [got["layer_names"].tolist().index(name) for name in want["layer_names"]]
    assert got["layer_groups"].tolist() == want["layer_groups"].tolist()
    assert np.allclose(got["layers"][order], want["layers"], rtol=1e-6, atol=1e-6 * want["layers"].max())
    one, two = whole.metrics(rollouts, w, whole.seconds + 1.0), cut.metrics(same, v, cut.seconds + 1.0)
    shared = [name for name in one if "/group/" in name or name.startswith(("baseline/", "also/", "tokens/"))]
    assert len(shared) > 20
    for name in [*shared, *{"gram/between"} & set(one)]:
        assert two[name] == pytest.approx(one[name], rel=1e-5), name
    # Twin: the first group's rows one by one, by plain autograd at the weights before the update.
    for name, p in policy.trainable().items():
        p.data.copy_(before[name])
    rows = slow_rows(policy, batch, w)
    first = (rollouts.group == rollouts.group[0]).nonzero().squeeze(1)
    assert np.allclose(got["gram"][np.ix_(first, first)], (rows @ rows.T)[first][:, first], rtol=0,
                       atol=1e-11 * float((rows @ rows.T).max()))


def test_the_norms_that_passes_differ_by_are_part_of_the_precision() -> None:
    """Hand: row 1 has norms 4 and 5 in two passes, and the largest entry is 10: 1/10."""
    def block(rows: list[int], gram: list[list[float]]) -> Block:
        return Block(torch.tensor(rows), np.array(gram), {"w": np.array(gram)}, 1e-14)

    joined = _joined([block([3, 1], [[10.0, 1.0], [1.0, 4.0]]), block([3, 5], [[10.0, 2.0], [2.0, 6.0]]),
                      block([1, 5], [[5.0, 3.0], [3.0, 6.0]])])
    assert joined.rows.tolist() == [1, 3, 5]
    assert joined.gram.tolist() == [[5, 1, 3], [1, 10, 2], [3, 2, 6]]
    assert joined.layers["w"].tolist() == joined.gram.tolist()
    assert joined.eps == 0.1


def test_micro_batches_of_one_rollout_are_refused_with_the_numbers() -> None:
    replace(LOOK, accumulate=11)
    with pytest.raises(CreditscopeError, match=r"--scope full compares .* --accumulate 12 would put each of 12 .* 11"):
        replace(LOOK, accumulate=12)
    # Of --pairs a group has two rollouts, whatever --group is by default.
    with pytest.raises(CreditscopeError, match="would put each of 8 into a micro-batch of its own; give at most 7"):
        Config(method="dpo", pairs="pairs.jsonl", prompts=4, accumulate=8, scope="light")
    with pytest.raises(CreditscopeError, match="ligth"):
        replace(LOOK, scope="ligth")


def test_swapped_rows_are_found_by_the_proof_of_the_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Can-fail: the check of every pass is blind to rows that change places."""
    real = Recorder.matrix

    def planted(self: Recorder, source: ParameterSource, delta: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        order = torch.arange(len(delta)).flip(0) if source.names[0].endswith("up_proj.weight") else slice(None)
        return real(self, source, delta[order], a[order])

    monkeypatch.setattr(Recorder, "matrix", planted)
    with pytest.raises(CreditscopeError, match="alone has a gradient through rollout 0"):
        looked(LOOK)


def test_answers_are_right_or_wrong_only_where_all_rewards_of_the_batch_are() -> None:
    """A graded reward in another pass counts: how a batch is cut must not change what is read."""
    rows = torch.tensor([0, 1])
    plain, graded = make([0, 1, 1, 0], [0, 0, 1, 1], [2] * 4), make([0, 1, 0.5, 0], [0, 0, 1, 1], [2] * 4)
    right = observer_module._right(plain, rows)
    assert right is not None
    assert right.tolist() == [False, True]
    assert observer_module._right(graded, rows) is None
