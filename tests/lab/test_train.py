"""The loop: bit-reproducible, resumable after a kill, exact under accumulation."""

from __future__ import annotations

import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cli
import mini
from creditscope import METHODS, CreditscopeError, Rollouts
from creditscope.batch.groups import deal
from creditscope.lab.rollout import Drawn, roll_out, step_tensors
from creditscope.lab.setup import make_optimizer
from creditscope.lab.step import Minibatch, take_step
from creditscope.lab.train import train
from creditscope.objective.advantages import token_advantage
from creditscope.optimizer.brakes import Brake
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import token_logp
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.tasks import Step, Verdict, find_task
from each import each
from makers import make

pytestmark = pytest.mark.usefixtures("mini_task")

SMALL = Config(prompts=2, group=4, steps=3, max_tokens=56, eval_problems=8, checkpoint_every=1, keep_every=2, lr=1e-4)
MINI = replace(SMALL, model=mini.model(), task=mini.TASK, max_tokens=None, eval_problems=0, lr=1e-2)


def run(config: Config, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    list(train(config, out, {}, resume))
    return facts(out)


def facts(out: Path) -> list[dict[str, Any]]:
    """The recorded steps without the times, which no seed can fix."""
    return [{k: v for k, v in s.items() if not k.startswith("time/")} for s in Record.open(out).steps()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    record = Record.open(out)
    return load_file(record.checkpoint_path(record.checkpoints()[-1]) / "policy.safetensors")


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the packaged model, for tests that read it."""
    out = tmp_path_factory.mktemp("train") / "run"
    run(SMALL, out)
    return out


@cache
def sampled(temperature: float) -> tuple[Policy, dict[str, torch.Tensor], Drawn]:
    """A policy in float64, its weights, and rollouts of four problems."""
    policy, task = load_policy(MINI.model, dtype="float64"), find_task(MINI.task)
    batch = roll_out(policy, task, list(islice(task.problems("train", 2), 4)), 4, max_tokens=24, top_p=1.0,
                     temperature=temperature, generator=torch.Generator().manual_seed(0))
    return policy, {name: p.detach().clone() for name, p in policy.trainable().items()}, batch


def fresh(temperature: float) -> tuple[Policy, Drawn]:
    """The policy as it was when it sampled the rollouts, and the rollouts."""
    policy, start, batch = sampled(temperature)
    with torch.no_grad():
        for name, p in policy.trainable().items():
            p.copy_(start[name])
    return policy, batch


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal_bit_by_bit_and_another_seed_differs(tmp_path: Path) -> None:
    config = replace(MINI, eval_problems=8)
    first, second = run(config, tmp_path / "a"), run(config, tmp_path / "b")
    assert first == second
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not equal(weights(tmp_path / "a"), load_file(Path(MINI.model) / "model.safetensors")), "nothing was learnt"
    assert run(replace(config, seed=1), tmp_path / "c") != first


@pytest.mark.slow
def test_a_run_cut_into_pieces_is_the_run_in_one_piece(recorded: Path, tmp_path: Path) -> None:
    run(replace(SMALL, steps=1), tmp_path / "cut")
    run(replace(SMALL, steps=2), tmp_path / "cut", resume=True)
    assert run(SMALL, tmp_path / "cut", resume=True) == facts(recorded)
    assert equal(weights(tmp_path / "cut"), weights(recorded))


def test_the_first_and_the_last_line_hold_evaluations_with_intervals(recorded: Path) -> None:
    steps = facts(recorded)
    assert len(steps) == SMALL.steps + 1
    for line in (steps[0], steps[-1]):
        assert 0 <= line["eval/low"] <= line["eval/accuracy"] <= line["eval/high"] <= 1
    assert "reward/mean" not in steps[-1]
    assert (recorded / "model" / "model.safetensors").exists()


def test_the_training_forward_reproduces_the_samplers_log_probs(recorded: Path) -> None:
    gaps = [s["policy/sampler_gap"] for s in facts(recorded)[:-1]]
    assert len(gaps) == SMALL.steps
    assert max(gaps) < 1e-4


def test_updates_on_other_minibatches_are_no_gap_between_sampler_and_trainer(tmp_path: Path) -> None:
    assert max(line["policy/sampler_gap"] for line in run(replace(MINI, minibatches=2), tmp_path / "run")) < 1e-4


def test_kept_groups_hold_credit_text_and_steps(recorded: Path) -> None:
    record = Record.open(recorded)
    assert record.groups() == [0, 2]
    group = record.group(0)
    rows, width = group["tokens"].shape
    assert rows == 8
    assert group["w"].shape == group["entropy"].shape == group["credit"].shape == (rows, width)
    assert (group["w"][~group["mask"]] == 0).all()
    for i in range(rows):
        assert "".join(group["pieces"][i]) == group["text"][i]
        chosen = group["step"][i][group["mask"][i]]
        named = chosen[chosen >= 0]
        assert (named[1:] >= named[:-1]).all(), "steps follow each other"


@pytest.mark.slow
@each("name", sorted(set(METHODS) - {"ppo"}))
def test_every_method_of_the_table_takes_steps(name: str, tmp_path: Path) -> None:
    # At this temperature some rows have an entropy below ln 2, without which gtpo learns nothing.
    config = replace(MINI, method=name, steps=1, inner_steps=2, minibatches=2, resample=1, temperature=0.3, seed=2)
    (step,) = run(config, tmp_path / "run")
    assert step["reward/mean"] >= 0
    assert "absent" not in step
    assert step["optimizer/updates"] == 4
    assert step["grad/norm"] > 0
    assert not equal(weights(tmp_path / "run"), load_file(Path(MINI.model) / "model.safetensors"))


@each("name", ["grpo", "gspo", "dapo", "reinforce_pp", "gtpo"])
def test_accumulation_changes_memory_and_not_the_gradient(name: str) -> None:
    grads = {}
    for accumulate in (1, 3):
        config = replace(MINI, method=name, accumulate=accumulate, clip_norm=None, temperature=0.3)
        policy, batch = fresh(config.temperature)
        credit = token_advantage(config.row, batch.rollouts).expand_as(batch.rollouts.mask)
        take_step(Minibatch(policy, config.row, batch.rollouts, credit, accumulate=accumulate,
                            temperature=config.temperature), Brake(make_optimizer(policy, config)))
        grads[accumulate] = torch.cat([p.grad.flatten() for p in policy.trainable().values()])  # type: ignore[union-attr]
    assert grads[1].norm() > 0
    assert torch.allclose(grads[1], grads[3], rtol=1e-9, atol=1e-12 * float(grads[1].abs().max()))


def test_the_recorded_credit_is_the_group_relative_reward_and_w_has_its_sign(tmp_path: Path) -> None:
    run(replace(MINI, steps=1, prompts=4, method="p1_grpo"), tmp_path / "run")
    group = Record.open(tmp_path / "run").group(0)
    assert group["credit"].any(), "a mixed group, else nothing is tested"
    for g in set(group["group"].tolist()):
        rows = group["group"] == g
        expected = group["reward"][rows] - group["reward"][rows].mean()
        assert abs(group["credit"][rows][:, 0] - expected).max() < 1e-6
    # w = A/B, up to nothing: the method has no ratio.
    assert abs(group["w"] - group["credit"] * group["mask"] / 16).max() < 1e-7


@each("name", ["grpo", "p1_grpo", "gspo", "cispo", "sapo"])
def test_a_step_raises_the_objective_that_it_climbs(name: str) -> None:
    config = replace(MINI, method=name, optimizer="sgd", lr=1e-4, clip_norm=1.0)
    policy, batch = fresh(config.temperature)
    r = batch.rollouts
    credit = token_advantage(config.row, r).expand_as(r.mask)
    update = take_step(Minibatch(policy, config.row, r, credit), Brake(make_optimizer(policy, config)), clip_norm=1.0)
    assert update is not None
    moved = token_logp(policy, batch.rollouts.prompt_ids, r.tokens, r.mask, 1.0, grad=False) - update.logp
    # First order: ΔJ = Σ w Δlog π = lr·‖∇J‖², the gradient being clipped to norm 1 where it is longer.
    gained = float((update.w * moved).sum())
    assert update.norm > 0
    assert gained == pytest.approx(config.lr * update.norm * min(1.0, update.norm), rel=0.02)


def test_minibatches_hold_whole_groups_and_every_row_once() -> None:
    group = torch.tensor([5, 5, 9, 9, 9, 2, 7, 7])
    parts = deal(group, 2)
    assert sorted(torch.cat(parts).tolist()) == list(range(8))
    assert not set(group[parts[0]].tolist()) & set(group[parts[1]].tolist())


@pytest.mark.slow
def test_a_kl_term_does_nothing_while_the_policy_is_its_own_reference_and_something_later(tmp_path: Path) -> None:
    plain = run(MINI, tmp_path / "plain")
    pulled = run(replace(MINI, beta=5.0), tmp_path / "pulled")
    assert pulled[0]["grad/norm"] == pytest.approx(plain[0]["grad/norm"], rel=1e-3)
    assert plain[0]["grad/norm"] > 0
    ours, theirs = weights(tmp_path / "plain"), weights(tmp_path / "pulled")
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_dapo_replaces_dead_groups_and_counts_what_it_spent(tmp_path: Path) -> None:
    config = replace(MINI, method="dapo", prompts=4, group=2, steps=2)
    steps = run(config, tmp_path / "run")
    lazy = run(replace(config, resample=0), tmp_path / "lazy")
    assert sum(s["rollouts/sampled"] for s in steps) > sum(s["rollouts/sampled"] for s in lazy)
    assert all(s["rollouts/used"] == 8 for s in steps)
    # The signal is that of the first draw, which replacing does not beautify: same seed, same first step.
    for honest in ("reward/mean", "signal/dead_groups", "length/mean"):
        assert steps[0][honest] == lazy[0][honest]
    assert steps[0]["signal/used_live_groups"] > lazy[0]["signal/used_live_groups"]


def test_credit_that_is_whitened_over_the_batch_does_not_see_minibatches(tmp_path: Path) -> None:
    config = replace(MINI, method="reinforce_pp", steps=1, keep_every=1)
    run(config, tmp_path / "one")
    run(replace(config, minibatches=2), tmp_path / "two")
    one, two = (Record.open(tmp_path / name).group(0) for name in ("one", "two"))
    assert one["credit"].any()
    assert (one["credit"] == two["credit"]).all()
    assert len(two["credit"]) == 8, "every minibatch is kept"


def test_dr_grpo_divides_by_the_trainers_limit_and_not_by_the_longest_answer(tmp_path: Path) -> None:
    config = replace(MINI, method="dr_grpo", steps=1, max_tokens=60)
    run(config, tmp_path / "run")
    group = Record.open(tmp_path / "run").group(0)
    assert group["w"].shape[1] < 60
    # w = A/(B·L_max) at ratio 1 (the gap to the sampler is below 1e-4).
    expected = group["credit"] * group["mask"] / (8 * 60)
    assert expected.any(), "a mixed group, else nothing is tested"
    assert abs(group["w"] - expected).max() <= 1e-4 * abs(expected).max()


def test_a_lora_run_leaves_a_model_that_can_be_trained_again(tmp_path: Path) -> None:
    run(replace(MINI, lora=4, steps=1), tmp_path / "run")
    again = run(replace(MINI, model=str(tmp_path / "run" / "model"), steps=1), tmp_path / "again")
    assert len(again) == 1


def test_fewer_steps_than_were_taken_is_refused(tmp_path: Path) -> None:
    before = run(replace(MINI, steps=2), tmp_path / "run")
    with pytest.raises(CreditscopeError, match="has taken 2 steps already; give --steps 2 or more"):
        run(replace(MINI, steps=1), tmp_path / "run", resume=True)
    assert facts(tmp_path / "run") == before, "a refusal changes nothing"
    assert Record.open(tmp_path / "run").config["steps"] == 2


def test_run_json_holds_the_settings_of_the_last_resume(tmp_path: Path) -> None:
    run(replace(MINI, steps=1), tmp_path / "run")
    run(replace(MINI, steps=2), tmp_path / "run", resume=True)
    assert Record.open(tmp_path / "run").config["steps"] == 2


def test_a_mistake_does_not_spoil_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match="context"):
        run(replace(MINI, eval_problems=8, max_tokens=10**6), tmp_path / "run")
    assert len(run(replace(MINI, steps=1), tmp_path / "run")) == 1


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing more is an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_disk_that_fills_up_ends_the_run_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most((Path(MINI.model) / "model.safetensors").stat().st_size // 2):
        assert cli.run("lab", "train", *FLAGS, "--checkpoint-every", 2, "--steps", 2, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "what was recorded so far is whole" in said
    assert "Traceback" not in said
    assert ["run/stopped" in line for line in Record.open(tmp_path / "run").steps()] == [False, False, True]


@each(("damage", "message"), [
    ("cut", "cannot load the model of .*; bring the folder whole from where it was made"),
    ("shape", r"are not those of its config\.json: lm_head\.weight has the shape \(\d+, 16\) there and \(\d+, 8\) by "
              "the config; bring both from one place")])
def test_a_damaged_model_folder_is_refused_in_words(damage: str, message: str, tmp_path: Path) -> None:
    shutil.copytree(MINI.model, tmp_path / "model")
    load_policy(str(tmp_path / "model"))
    if damage == "cut":
        path = tmp_path / "model" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:5000])
    else:
        path = tmp_path / "model" / "config.json"
        path.write_text(path.read_text().replace('"hidden_size": 16', '"hidden_size": 8'))
    with pytest.raises(CreditscopeError, match=message):
        load_policy(str(tmp_path / "model"))


def test_a_draw_without_steps_joins_one_with_steps() -> None:
    none, empty, _ = step_tensors([Verdict(0.0)], [["a", "b"]], 2)
    some, reward, _ = step_tensors([Verdict(1.0, (Step(0, 1, 1.0),))], [["a", "b"]], 2)
    assert (none.tolist(), tuple(empty.shape)) == ([[-1, -1]], (1, 0))
    assert (some.tolist(), reward.tolist()) == ([[0, -1]], [[1.0]])
    base = make([1.0], group=[0], lengths=[2])
    joined = Rollouts.cat([replace(base, step=none, step_reward=empty), replace(base, step=some, step_reward=reward)])
    assert joined.step_reward is not None
    assert joined.step_reward.tolist() == [[0.0], [1.0]]


def test_lora_trains_adapters_alone_and_takes_the_base_as_its_reference(tmp_path: Path) -> None:
    steps = run(replace(MINI, lora=4, beta=0.1), tmp_path / "run")
    assert len(steps) == MINI.steps
    assert all("lora_" in name for name in weights(tmp_path / "run"))
    policy = load_policy(MINI.model, lora=4)
    prompt, tokens = policy.encode("Question: 1"), torch.tensor([[5, 6]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(0.1)
    moved = token_logp(policy, [prompt], tokens, mask, 1.0)
    base = token_logp(policy.reference(), [prompt], tokens, mask, 1.0)
    assert torch.allclose(base, token_logp(load_policy(MINI.model), [prompt], tokens, mask, 1.0), atol=1e-5)
    assert not torch.allclose(moved, base, atol=1e-3)


def test_sgd_schedules_and_warm_up_reach_the_optimiser(tmp_path: Path) -> None:
    config = replace(MINI, optimizer="sgd", momentum=0.9, schedule="linear", warmup=1, lr=0.3)
    assert [s["optimizer/lr"] for s in run(config, tmp_path / "run")] == [0.3, 0.3, pytest.approx(0.15)]


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    before = run(replace(MINI, steps=1), tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "000001" / "policy.safetensors"
    other = load_file(path)
    name = sorted(other)[0]
    other[name] = torch.zeros(3, 3)
    save_file(other, path)
    (path.parent / "SHA256SUMS").unlink()  # it is whole, but another's
    with pytest.raises(CreditscopeError, match=rf"belongs to another model: {name} is \(3, 3\) there"):
        run(MINI, tmp_path / "run", resume=True)
    assert facts(tmp_path / "run") == before, "a refusal changes nothing"


def test_a_checkpoint_cut_in_half_says_how_to_go_on(tmp_path: Path) -> None:
    run(replace(MINI, steps=2), tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "000002" / "policy.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CreditscopeError, match="delete that folder to resume from the one before"):
        run(MINI, tmp_path / "run", resume=True)


@each("changes, message", [
    ({"group": 1}, "--group 1: method 'grpo' compares a rollout with its group"),
    ({"method": "ppo", "credit": "entropy_mask"}, "method 'ppo' has none; choose gae"),
    ({"credit": "prefx_tree"}, "unknown credit 'prefx_tree'; did you mean 'prefix_tree'"),
    ({"credit": "outcome,share"}, "'share' is no option; write outcome,key=value"),
    ({"credit": "salt", "accumulate": 8, "scope": "off"}, "would put each of 8 into a micro-batch of its own"),
    ({"credit": "prefix_tree", "method": "reinforce", "group": 1}, "--group 1: --credit prefix_tree compares"),
    ({"credit": "optimal_token", "top_p": 0.9}, "--top-p 0.9: --credit optimal_token reads"),
    ({"credit": "mine:own", "critic_warmup": 99}, "leaves no step to the policy"),
    ({"resample": 100}, "--resample must be at most 99"),
    ({"critic_warmup": 1}, "--credit outcome has no critic"),
    ({"method": "ppo", "critic_warmup": 99}, "leaves no step to the policy"),
    ({"critic": "heads"}, "unknown --critic 'heads'"),
    ({"rollouts": -1}, "--rollouts must be at least 0"),
    ({"method": "dapo", "beta": 0.1}, "has no KL term"),
    ({"minibatches": 3}, "cannot deal out --prompts 2"),
    ({"lr": 0.0}, "--lr must be above 0"),
    ({"schedule": "cosin"}, "unknown --schedule 'cosin'; did you mean 'cosine'"),
    ({"steps": 0}, "--steps must be at least 1, got 0"),
    ({"temperature": 0.0}, "--temperature must be above 0"),
    ({"lr": float("inf")}, r"--lr must be a number from 0 to 1e\+12, got inf"),
    ({"lr": 1e38}, r"--lr must be a number from 0 to 1e\+12, got 1e\+38"),
    ({"weight_decay": -1.0}, "--weight-decay must be a number from 0 to .*, got -1.0"),
    ({"momentum": 1.0}, "--momentum must be below 1"),
    ({"top_p": float("nan")}, "--top-p must be above 0"),
    ({"top_p": 2.0}, "--top-p must be above 0 and at most 1, got 2.0"),
    ({"max_tokens": 0}, "--max-tokens must be at least 1, got 0"),
    ({"seed": 2**31}, "--seed must be in 0"),
    ({"seed": 10**20}, "--seed must be a whole number"),
])
def test_settings_that_cannot_work_are_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        replace(SMALL, **changes)


@each("changes, message", [
    ({"model": "no/such/folder"}, "no model 'no/such/folder'"),
    ({"model": "absent.gguf"}, "no such GGUF file"),
    ({"task": "arithmatic"}, "did you mean 'arithmetic'"),
    ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ({"device": "cuda:99"}, "cannot use device 'cuda:99'"),
    ({"max_tokens": 10**6}, "problem test-0 has a prompt of .* over the context of 256"),
    ({"reward": "mod:fn"}, "--reward mod:fn: task 'arithmetic' judges answers itself; a function as --reward"),
])
def test_what_cannot_be_loaded_is_named_and_leaves_a_readable_record(changes: dict[str, Any], message: str,
                                                                     tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=message):
        run(replace(SMALL, **{"model": MINI.model} | changes), tmp_path / "run")
    if (tmp_path / "run").exists():
        assert Record.open(tmp_path / "run").steps() == []


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    load_policy(MINI.model).model.save_pretrained(tmp_path / "bare")
    with pytest.raises(CreditscopeError, match=r"bare has no tokenizer.json, the tokenizer; bring the file there"):
        load_policy(str(tmp_path / "bare"))


FLAGS = (MINI.model, "--prompts", "2", "--group", "4", "--max-tokens", "12", "--eval-problems", "0", "--lr", "1e-2")


@pytest.mark.slow
def test_ctrl_c_keeps_everything_and_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    child = cli.start("lab", "train", *FLAGS, "--steps", 10**5, "--checkpoint-every", 10**5, "--out", out)
    waited = time.monotonic()
    while not (out / "steps.jsonl").exists() or (out / "steps.jsonl").read_bytes().count(b"\n") < 2:
        assert child.poll() is None, child.communicate()
        assert time.monotonic() - waited < 400, "the run did not get under way"
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=400)
    assert child.returncode == 130
    assert "Traceback" not in stderr
    assert f"--out {out} --resume" in stdout
    record = Record.open(out)
    done = len(record.steps())
    assert record.checkpoints()[-1] == done
    # The printed command is enough: settings that are not given are the run's own.
    assert cli.run("lab", "train", "--out", out, "--resume", "--steps", done + 1) == 0
    assert len(record.steps()) == done + 1
    assert f"creditscope report {out}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_longer_run_that_is_stopped_does_not_pass_for_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    out, append = tmp_path / "run", Record.append

    def then_stop(record: Record, step: int, line: dict[str, Any]) -> None:
        append(record, step, line)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    def unheard(*_: object) -> None:
        raise AssertionError("the verb does not catch SIGTERM")

    assert cli.run("lab", "train", *FLAGS, "--steps", 1, "--out", out) == 0
    assert "--resume" not in capsys.readouterr().out
    before = signal.signal(signal.SIGTERM, unheard)
    monkeypatch.setattr(Record, "append", then_stop)
    try:
        assert cli.run("lab", "train", "--out", out, "--resume", "--steps", 500) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(Record.open(out).steps()) == 3
    assert f"--out {out} --resume" in capsys.readouterr().out


def test_text_from_a_reward_cannot_move_the_cursor_and_a_bracket_in_a_path_is_no_markup(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad_reward.py").write_text("def score(text, row):\n    raise ValueError('\\x1b]0;gone\\x07')\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 3)
    monkeypatch.chdir(tmp_path)
    assert cli.run("lab", "train", *FLAGS, "--task", "jsonl:p.jsonl", "--reward", "bad_reward:score", "--steps", 1,
                   "--out", "odd[/name]") == 0
    stdout, stderr = capfd.readouterr()
    assert "\x1b" not in stdout + stderr
    assert "8 answers could not be judged" in stderr
    assert "odd[/name]" in stdout


def test_a_second_run_into_the_same_folder_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(replace(MINI, steps=1), tmp_path / "run")
    assert cli.run("lab", "train", *FLAGS, "--steps", 1, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "already holds a run; continue it with --resume or choose another --out" in said
    assert "Traceback" not in said


def test_metrics_reach_a_tracker_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("accelerate.state")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        monkeypatch.setattr(kind, "_shared_state", {})  # one accelerator for each process: here, for this test
    out = tmp_path / "run"
    assert cli.run("lab", "train", *FLAGS, "--steps", 2, "--out", out, "--log", "tensorboard") == 0
    events = next((out / "creditscope").rglob("events.out.*"))
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    logged = [e.value for e in reader.Scalars("length/mean")]
    assert len(set(logged)) == 2
    assert logged == pytest.approx([s["length/mean"] for s in Record.open(out).steps()])
