"""Pairs from sampled groups, the reward that is trained on them, and training against it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mini
from cli import run, run_json
from creditscope import CreditscopeError
from creditscope.batch.answers import PromptsSeen
from creditscope.batch.metrics import reference_kl
from creditscope.batch.pairs import Pair, read_pairs, write_pairs
from creditscope.lab.pairs import best_and_worst, make_pairs
from creditscope.lab.reward import batches, encode_pairs, measure_pairs, preference_loss, states_of, train_reward
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.lab.train import Training, train
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.reward_model import fresh_reward_model, load_reward_model
from creditscope.runs import schema
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.runs.reward_plan import RewardPlan
from each import each
from makers import make

pytestmark = pytest.mark.usefixtures("mini_task")
PROMPTS = [f"Question: {n} + 2\nAnswer:\n" for n in range(40)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(mini.model(), device="cpu")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that end in 7 are preferred: one token tells them apart."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    write_pairs(path, [Pair(prompt, f"{n} + 2 = 7", f"{n} + 2 = 5") for n, prompt in enumerate(PROMPTS)])
    return path


def finished(work: Any) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("reward") / "reward"
    plan = RewardPlan(pairs=str(pairs), model=mini.model(), epochs=6, batch=16, lr=1e-2, device="cpu")
    return out, finished(train_reward(plan, out, {}))


# -- the loss and its training ---------------------------------------------------------------------------------------


def test_the_loss_is_minus_log_sigma_of_the_difference() -> None:
    # s_c − s_r = 2 and −1: (log(1 + e⁻²) + log(1 + e)) / 2 = (0.126928 + 1.313262) / 2.
    found = preference_loss(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0]))
    assert float(found) == pytest.approx(0.720095, abs=1e-6)


@pytest.mark.slow
@pytest.mark.conformance
def test_the_loss_is_that_of_trls_reward_trainer(policy: Policy) -> None:
    """TRL's own compute_loss on the same model and ids: chosen rows first, then rejected, padded on the right."""
    trl = pytest.importorskip("trl")
    reward = fresh_reward_model(policy)
    torch.nn.init.normal_(reward.head.weight, generator=torch.Generator().manual_seed(1))
    found = encode_pairs(policy, [Pair(PROMPTS[1], "1 + 2 = 7", "1 + 2 = 5"), Pair(PROMPTS[2], "7", "2 + 2 = 5")])
    rows = [[*side.prompt, *side.answer] for side in (*(p.chosen for p in found), *(p.rejected for p in found))]
    width = max(map(len, rows))
    inputs = {"input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
              "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])}
    alone = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(args=SimpleNamespace(center_rewards_coefficient=None), model=reward.model,
                              accelerator=alone, _metrics={"eval": defaultdict(list)}, _total_train_tokens=0)
    theirs = trl.RewardTrainer.compute_loss(trainer, reward.model, inputs)
    assert measure_pairs(reward, found)["loss"] == pytest.approx(float(theirs.detach()), rel=1e-5)


def test_the_first_loss_is_log_2_and_a_preference_that_one_token_shows_is_learnt(
        trained: tuple[Path, dict[str, Any]], pairs: Path, policy: Policy) -> None:
    out, notes = trained
    assert notes["losses"][0] == pytest.approx(math.log(2))
    assert notes["held_out"]["accuracy"] == 1.0
    assert notes["held_out"]["low"] < 1.0  # the interval knows that few pairs are held out
    assert notes["pairs"] + notes["held_out"]["pairs"] == len(PROMPTS)
    assert json.loads((out / "reward.json").read_text())["held_out"] == notes["held_out"]
    encoded = encode_pairs(policy, read_pairs(pairs))
    assert measure_pairs(load_reward_model(out, policy), encoded)["accuracy"] == 1.0


def test_equal_scores_count_one_half(policy: Policy, pairs: Path) -> None:
    found = measure_pairs(fresh_reward_model(policy), encode_pairs(policy, read_pairs(pairs)))  # a head of zeros
    assert found["accuracy"] == 0.5
    assert found["low"] + found["high"] == pytest.approx(1.0)


def test_prompts_are_held_out_whole_and_epochs_see_every_pair_once() -> None:
    rows = list(batches(5, 2, 2, seed=0))
    assert [len(part) for part in rows] == [2, 2, 1, 2, 2, 1]
    first, second = ([*rows[at], *rows[at + 1], *rows[at + 2]] for at in (0, 3))
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4]
    assert rows[:3] != rows[3:]


def test_a_head_is_trained_on_states_that_do_not_change(pairs: Path, tmp_path: Path, policy: Policy) -> None:
    plan = RewardPlan(pairs=str(pairs), model=mini.model(), train="head", epochs=2, device="cpu")
    finished(train_reward(plan, tmp_path / "head", {}))
    reward, encoded = load_reward_model(tmp_path / "head", policy), encode_pairs(policy, read_pairs(pairs))
    assert torch.equal(states_of(reward, encoded), states_of(fresh_reward_model(policy), encoded))
    assert bool(reward.head.weight.any())


@each(("change", "message"), [
    ({"train": "tail"}, "unknown --train 'tail'"), ({"epochs": 0}, "--epochs must be at least 1, got 0"),
    ({"lr": -1.0}, "--lr must be a number from 0"), ({"pairs": "none.jsonl"}, "PAIRS none.jsonl: no such file")])
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        finished(train_reward(RewardPlan(**{"pairs": "x", "model": mini.model(), **change}), tmp_path / "out", {}))
    assert not (tmp_path / "out").exists()


@each("words", [["pairs"], ["reward", "good.jsonl"], ["warmup", "tiny", "--task", "arithmetic"]])
def test_ctrl_c_says_that_nothing_was_written(words: list[str], pairs: Path, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    def pressed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"creditscope.lab.{words[0]}.load_policy", pressed)
    shutil.copy(pairs, "good.jsonl")
    assert run("lab", *words, "--out", "new") == 130
    assert capsys.readouterr().err == ("creditscope: interrupted; nothing was written, and the same command starts "
                                       "again\n")
    assert not Path("new").exists()


@each(("words", "message"), [
    (["pairs", "--out", "there.jsonl"], "--out there.jsonl is there already; choose another --out"),
    (["pairs", "--out", "folder"], "--out folder is a folder; give the name of a file, such as folder/pairs.jsonl"),
    (["reward", "good.jsonl", "--out", "folder"], "--out folder is there already and not empty"),
    (["reward", "good.jsonl", "--out", "f" * 300], "File name too long"),
    (["pairs", "--out", "f" * 300], "File name too long"),
    (["reward", "none.jsonl", "--out", "new"], "PAIRS none.jsonl: no such file"),
    (["reward", "there.jsonl", "--out", "new"], "there.jsonl, line 1: not valid JSON")])
def test_what_cannot_be_read_or_written_is_refused_before_the_model_is_loaded(
        words: list[str], message: str, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("pairs", "reward"):
        monkeypatch.setattr(f"creditscope.lab.{module}.load_policy", lambda *_, **__: pytest.fail("it is loaded"))
    shutil.copy(pairs, "good.jsonl")
    Path("there.jsonl").write_text("{mine")
    Path("folder").mkdir()
    Path("folder", "notes.txt").touch()
    assert run("lab", *words) == 2
    assert message in capsys.readouterr().err
    assert Path("there.jsonl").read_text() == "{mine"


def test_pairs_of_too_few_prompts_leave_nothing_to_measure_on(tmp_path: Path) -> None:
    write_pairs(tmp_path / "few.jsonl", [Pair("Question: 1 + 2\n", "7", "5")] * 3)
    with pytest.raises(CreditscopeError, match=r"of 3 pairs 0 are held out.*give pairs of more prompts"):
        finished(train_reward(RewardPlan(pairs=str(tmp_path / "few.jsonl"), model=mini.model()), tmp_path / "out", {}))


def test_the_kl_to_the_reference_is_the_mean_of_the_answers_sums() -> None:
    # (−1 + 3) + (−2 + 2) = 2 in the first answer, −1 + 2 = 1 in the second, whose second token is padding.
    batch = replace(make([0, 0], [0, 0], [2, 1]), logp=torch.tensor([[-1.0, -2.0], [-1.0, -9.0]]),
                    ref_logp=torch.tensor([[-3.0, -2.0], [-2.0, 0.0]]))
    assert reference_kl(batch) == 1.5


# -- pairs from groups -----------------------------------------------------------------------------------------------


def drawn(policy: Policy) -> Drawn:
    task = mini.Coins()
    return roll_out(policy, task, list(islice(task.problems("train", 0), 3)), 3, max_tokens=12, temperature=1.0,
                    top_p=1.0, generator=torch.Generator().manual_seed(0))


def with_rewards(batch: Drawn, rewards: list[float], done: list[bool]) -> Drawn:
    texts = [f"{i} + 2" for i in range(9)]
    return replace(batch, rollouts=replace(batch.rollouts, reward=torch.tensor(rewards), text=texts),
                   finished=torch.tensor(done))


def test_a_pair_is_the_best_and_the_worst_finished_answer_and_a_tie_gives_none(policy: Policy) -> None:
    batch = drawn(policy)
    prompts = batch.rollouts.prompt
    assert prompts is not None
    # Group 0: the first of two best, the worst of the finished. Group 1: all equal. Group 2: one answer ended.
    judged = with_rewards(batch, [0.5, 1, 1, 1, 1, 1, 0, 1, 0.5],
                          [True, True, True, True, True, True, False, True, False])
    assert best_and_worst(policy, judged) == [Pair(prompts[0], "1 + 2", "0 + 2")]


def test_groups_without_a_pair_say_how_many_answers_were_cut(tmp_path: Path) -> None:
    # One token per answer: whatever does not end at once is cut, and nothing has two finished answers that differ.
    config = settings(None, steps=2, max_tokens=1)
    with pytest.raises(CreditscopeError, match=r"none of 4 groups .*no pair \((100|\d\d)% of the answers were cut\); "
                                               r"raise --max-tokens"):
        finished(make_pairs(config, tmp_path / "pairs.jsonl", 4))
    assert not (tmp_path / "pairs.jsonl").exists()


# -- training against it ---------------------------------------------------------------------------------------------


def settings(folder: Path | None, **changes: Any) -> Config:
    given = {"model": mini.model(), "task": mini.TASK, "steps": 2, "prompts": 2, "group": 4, "eval_problems": 0,
             "device": "cpu", "reward": None if folder is None else f"model:{folder}"}
    return Config(**{**given, **changes})


def test_a_run_is_paid_by_the_model_and_the_verifier_is_kept_beside_it(
        trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    config = settings(trained[0])
    finished(train(config, tmp_path / "run", {}))
    lines = Record.open(tmp_path / "run").steps()
    plain = Training(settings(None))
    plain.problems = iter(list(islice(plain.task.problems("train", config.seed), 2)))
    plain.seen = PromptsSeen()
    judged = plain.sample(0, 4)[1].rollouts  # the same answers under the verifier
    assert lines[0][schema.REWARD_GOLD_MEAN] == pytest.approx(float(judged.reward.mean()))
    model = load_reward_model(trained[0], plain.policy)
    scores = model.scores(judged.prompt_ids, judged.tokens, judged.mask)
    assert lines[0][schema.REWARD_MEAN] == pytest.approx(float(scores.mean()), rel=1e-5)
    assert abs(lines[0][schema.POLICY_REFERENCE_KL]) < 1e-4  # the policy is the reference before its first update
    assert lines[1][schema.POLICY_REFERENCE_KL] != lines[0][schema.POLICY_REFERENCE_KL]
    assert -1 <= lines[0][schema.REWARD_GOLD_CORRELATION] <= 1


@each("credit", ["prefix_score", "monte_carlo,samples=2", "outcome"])
def test_credit_that_is_made_of_rewards_is_made_of_the_learned_one(
        trained: tuple[Path, dict[str, Any]], credit: str) -> None:
    run = Training(settings(trained[0], credit=credit))
    run.problems = iter(list(islice(run.task.problems("train", 0), 2)))
    run.seen = PromptsSeen()
    _, batch = run.sample(0, 4)
    tools = run.tools(0, batch)
    found = run.estimators[credit](run.method, batch.rollouts, tools)
    assert bool(found.any())
    ends = torch.where(batch.finished, batch.rollouts.extents, -1)[:, None]
    whole = tools.values(ends, 1)  # nothing is left to sample after an end token
    assert torch.allclose(whole[ends >= 0], batch.rollouts.reward[ends.flatten() >= 0], rtol=1e-4, atol=1e-5)


@each(("config", "message"), [
    ({"credit": "step_reward"}, "credit 'step_reward' needs a task that judges single steps.*which --reward model:"),
    ({"reward": "model:nowhere"}, "--reward model:nowhere: there is no such folder; creditscope lab reward"),
    ({"model": "FOLDER", "reward": None}, "is a LlamaForSequenceClassification, which scores answers and writes none; "
                                          "train against it with --reward model:"),
    ({"reward": None, "credit": "prefix_score"}, "needs a learned reward that scores every prefix.*task 'coins'")])
def test_what_a_learned_reward_cannot_do_is_refused_before_the_run(
        trained: tuple[Path, dict[str, Any]], tmp_path: Path, config: dict[str, Any], message: str) -> None:
    named = {name: str(trained[0]) if value == "FOLDER" else value for name, value in config.items()}
    with pytest.raises(CreditscopeError, match=message):
        finished(train(settings(trained[0], **named), tmp_path / "run", {}))
    assert not (tmp_path / "run").exists()


def test_labels_by_the_sign_of_a_reward_are_refused_for_a_learned_one_which_has_no_zero() -> None:
    with pytest.raises(CreditscopeError, match=r"method 'kto' labels an answer by whether its reward is above 0"):
        settings(Path("reward"), method="kto")
    assert settings(Path("reward"), method="dpo").learned == "reward"
    assert settings(None, method="kto").learned is None


@each(("changes", "message"), [
    ({"reward": "FOLDER"}, "--reward .*reward: task 'coins' judges answers itself; .* write --reward model:.*reward"),
    ({"task": "jsonl:pairs.jsonl"}, "--reward model:.*reward: task 'jsonl' has no verifier"),
    ({"reward": "model:"}, "--reward model: names no folder; write --reward model:FOLDER")])
def test_a_reward_in_the_wrong_place_is_named_with_the_right_one(
        trained: tuple[Path, dict[str, Any]], changes: dict[str, Any], message: str) -> None:
    if changes.get("reward") == "FOLDER":
        changes = {"reward": str(trained[0])}
    with pytest.raises(CreditscopeError, match=message):
        Training(settings(trained[0], **changes))


@each(("name", "message"), [
    ("tokenizer.json", "has no tokenizer.json, the tokenizer; bring the file there"),
    ("config.json", "has no config.json, the model's settings; bring the file there")])
def test_a_reward_folder_that_lacks_a_file_names_it(trained: tuple[Path, dict[str, Any]], policy: Policy,
                                                    tmp_path: Path, name: str, message: str) -> None:
    shutil.copytree(trained[0], tmp_path / "reward")
    (tmp_path / "reward" / name).unlink()
    with pytest.raises(CreditscopeError, match=message):
        load_reward_model(tmp_path / "reward", policy)


def test_a_reward_folder_that_is_not_there_is_told_before_the_policy_is_loaded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.lab.train.load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(CreditscopeError, match="there is no such folder; creditscope lab reward makes one"):
        finished(train(settings(tmp_path / "missing"), tmp_path / "run", {}))
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_on_with_another_learned_reward(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    reward = tmp_path / "reward"
    shutil.copytree(trained[0], reward)
    config = settings(reward, checkpoint_every=1, steps=1)
    finished(train(config, tmp_path / "run", {}))
    weights = load_file(reward / "model.safetensors")
    save_file({name: -weight for name, weight in weights.items()}, reward / "model.safetensors", {"format": "pt"})
    (reward / "SHA256SUMS").unlink(missing_ok=True)
    with pytest.raises(CreditscopeError, match=r"cannot resume .*: model.safetensors of its reward is not as it was"):
        finished(train(replace(config, steps=2), tmp_path / "run", {}, resume=True))


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pairs_reward_and_training_follow_each_other_by_the_commands_that_are_printed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    of, model = ("--task", mini.TASK), mini.model()
    counts = run_json(capsys, "lab", "pairs", model, *of, "--groups", "60", "--out", "pairs.jsonl")
    assert counts["pairs"] == len(read_pairs(tmp_path / "pairs.jsonl")) <= counts["groups"] == 60
    assert run("lab", "reward", "pairs.jsonl", "--model", model, "--epochs", "1", "--out", "reward") == 0
    told = capsys.readouterr().out
    assert "held out: " in told
    assert "not told from chance, 50%" in " ".join(told.split())  # five pairs tell nothing
    assert f"Next: creditscope lab train {model} --reward model:reward" in told
    assert run("lab", "train", model, *of, "--reward", "model:reward", "--steps", "1", "--prompts", "2",
               "--eval-problems", "0", "--out", "run") == 0
    assert re.search(r"step +0 +reward \S+ +verifier's [01]\.\d{3}", capsys.readouterr().out)
    assert schema.REWARD_GOLD_MEAN in Record.open(tmp_path / "run").steps()[0]
    # The folder is data, not code: a resumed run reads it from the record.
    assert run("lab", "train", "--out", "run", "--resume", "--steps", "2") == 0
    assert run("lab", "pairs", model, *of, "--reward", "model:reward", "--out", "other.jsonl") == 2
    assert "pairs are made by the task's verifier" in capsys.readouterr().err
