"""Training on preferences: pairs of sampled groups, and pairs of a file in the place of sampled answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import mini
from creditscope import CreditscopeError
from creditscope.batch.pairs import Pair, write_pairs
from creditscope.diagnosis.optimizer_numbers import read as read_findings
from creditscope.diagnosis.trainers import who_wrote
from creditscope.lab.given import pair_stream, pairs_of
from creditscope.lab.inputs import read_inputs, require_same
from creditscope.lab.train import train
from creditscope.policy.loading import load_policy
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.tasks import find_task
from each import each

pytestmark = pytest.mark.usefixtures("mini_task")

PAIRS = [Pair("1 + 1 = ", "2", "3"), Pair("2 + 2 = ", "4 = 4", "5"), Pair("3 + 3 = ", "6", "7 + 8")]
MINI = Config(method="dpo", model=mini.model(), task=mini.TASK, prompts=2, steps=4, eval_problems=0, checkpoint_every=1,
              lr=1e-2, probe_every=2)


def run(config: Config, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    list(train(config, out, {}, resume))
    return [{k: v for k, v in s.items() if not k.startswith("time/")} for s in Record.open(out).steps()]


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    return str(tmp_path / "pairs.jsonl")


@pytest.mark.slow
def test_given_pairs_are_learnt_and_nothing_is_sampled(file: str, tmp_path: Path) -> None:
    config = replace(MINI, pairs=file)
    lines = run(config, tmp_path / "run")
    assert config.group == 2
    assert lines[0]["pairs/margin"] == pytest.approx(0.0, abs=1e-5)  # π is the reference
    assert lines[-1]["pairs/margin"] > 0.1
    assert lines[-1]["pairs/accuracy"] == 1
    assert {line["rollouts/spent"] for line in lines} == {0}
    assert not any("policy/reference_kl" in line for line in lines)  # the mean over given answers is no KL
    assert {line["pairs/count"] for line in lines} == {2}
    assert lines[0]["pairs/rejected_change"] < lines[0]["pairs/chosen_change"]
    assert who_wrote(Record.open(tmp_path / "run").config).pairs
    assert {key for line in lines for key in line if key.startswith("reward/")} == set()  # labels are no rewards
    assert read_findings(tmp_path / "run").steps == len(lines) == 4


@pytest.mark.slow
def test_a_function_of_the_user_judges_the_evaluations_beside_pairs(file: str, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    problems = (f'{{"prompt": "{i} + 1 = ", "answer": "2"}}\n' for i in range(60))
    (tmp_path / "problems.jsonl").write_text("".join(problems))
    (tmp_path / "judge_of_pairs.py").write_text("def score(text, row):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    lines = run(replace(MINI, pairs=file, task="jsonl:problems.jsonl", reward="judge_of_pairs:score", max_tokens=4,
                        eval_problems=2, steps=1), tmp_path / "run")
    assert [line["eval/accuracy"] for line in lines] == [1.0, 1.0]


@pytest.mark.slow
def test_a_stopped_run_on_pairs_goes_on_bit_by_bit(file: str, tmp_path: Path) -> None:
    whole = run(replace(MINI, pairs=file), tmp_path / "whole")
    run(replace(MINI, pairs=file, steps=2), tmp_path / "parts")
    assert run(replace(MINI, pairs=file), tmp_path / "parts", resume=True) == whole


@pytest.mark.slow
def test_of_sampled_groups_two_answers_are_moved(tmp_path: Path) -> None:
    lines = run(replace(MINI, group=4, steps=2), tmp_path / "run")
    live = [line for line in lines if line["signal/live_groups"]]
    assert live
    for line in live:
        assert line["pairs/count"] == line["signal/live_groups"]
        assert "policy/reference_kl" in line
        assert line["w/zero"] > 0.2  # of four answers two have no w


def moved_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: 1.5 * weight for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})


@each(("change", "said"), [
    (lambda place: write_pairs(place / "pairs.jsonl", PAIRS[::-1]), "pairs.jsonl of its pairs"),
    (lambda place: moved_weights(place / "base"), "model.safetensors of its model")])
def test_a_run_does_not_go_on_with_other_pairs_or_another_reference(change: Callable[[Path], None], said: str,
                                                                    tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    shutil.copytree(mini.model(), tmp_path / "base")
    config = replace(MINI, model=str(tmp_path / "base"), pairs=str(tmp_path / "pairs.jsonl"), probe="off")
    before = run(replace(config, steps=1), tmp_path / "run")
    change(tmp_path)
    with pytest.raises(CreditscopeError, match=f"cannot resume .*run: {said} is not as it was when the run began; "
                                               "bring it back, or start a new run with another --out"):
        run(config, tmp_path / "run", resume=True)
    assert len(Record.open(tmp_path / "run").steps()) == len(before)


def test_the_tasks_file_and_the_base_under_adapters_are_known_by_their_sums(tmp_path: Path) -> None:
    policy, data = load_policy(mini.model(), device="cpu"), tmp_path / "data.jsonl"
    data.write_text("1")
    config = Config(model=mini.model(), task=f"gsm8k:{data}")
    task = find_task(config.task)
    found = read_inputs(config, policy, task)
    assert set(found) == {"task"}  # a checkpoint has all weights of a policy that is trained whole
    adapted = read_inputs(replace(config, lora=2), policy, task)
    assert set(adapted["model"]) == {"config.json", "model.safetensors", "tokenizer.json"}
    require_same(found, read_inputs(config, policy, task), tmp_path)
    data.write_text("2")
    with pytest.raises(CreditscopeError, match=r"data.jsonl of its task is not as it was"):
        require_same(found, read_inputs(config, policy, task), tmp_path)


@each(("source", "read"), [
    ("", {"train.jsonl", "test.jsonl"}), ("test.jsonl", {"train.jsonl", "test.jsonl"}),
    ("pairs.jsonl", {"pairs.jsonl"})])
def test_the_sums_are_of_the_files_that_the_task_reads(source: str, read: set[str], tmp_path: Path) -> None:
    for name in ("train", "test", "pairs"):
        (tmp_path / f"{name}.jsonl").write_text(name)
    policy, config = load_policy(mini.model(), device="cpu"), Config(task=f"gsm8k:{tmp_path / source}")
    assert set(read_inputs(config, policy, find_task(config.task))["task"]) == read


def test_a_file_that_was_added_is_to_be_taken_away(tmp_path: Path) -> None:
    told = {"reward": {"config.json": "1"}}
    with pytest.raises(CreditscopeError, match=r"b\.safetensors of its reward was not there when .*; take it away, or"):
        require_same(told, {"reward": {"config.json": "1", "b.safetensors": "2"}}, tmp_path)


def test_a_checkpoint_of_an_earlier_version_tells_no_sums_and_is_resumed(file: str, tmp_path: Path) -> None:
    config = replace(MINI, pairs=file, probe="off")
    run(replace(config, steps=1), tmp_path / "run")
    kept = tmp_path / "run" / "checkpoints" / "000001"
    state = json.loads((kept / "state.json").read_text())
    assert set(state.pop("inputs")) == {"pairs", "model"}
    (kept / "state.json").write_text(json.dumps(state))
    (kept / "SHA256SUMS").unlink()
    write_pairs(file, PAIRS[::-1])
    assert len(run(replace(config, steps=2), tmp_path / "run", resume=True)) == 2


def test_every_pass_has_each_pair_once_in_an_order_of_the_seed() -> None:
    one, two = (list(islice(pair_stream(PAIRS, seed), 9)) for seed in (0, 1))
    assert all(sorted(map(repr, one[at:at + 3])) == sorted(map(repr, PAIRS)) for at in (0, 3, 6))
    assert one != two


@each("changes, said", [
    ({"method": "grpo"}, "method 'grpo' learns from sampled answers"),
    ({"method": "kto"}, "method 'kto' learns from sampled answers"),
    ({"group": 4}, "--group 4: a pair of --pairs has two answers"),
    ({"rollouts": 64}, "--rollouts 64: with --pairs no answer is sampled"),
    ({"resample": 0}, "--resample 0: with --pairs no answer is sampled"),
    ({"reward": "model:rm"}, "--reward model:rm: with --pairs no answer is sampled"),
    ({"credit": "leave_one_out"}, "labels its answers"),
])
def test_settings_that_have_no_place_beside_pairs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CreditscopeError, match=said):
        replace(MINI, **{"pairs": "pairs.jsonl", **changes})


def test_a_group_of_one_and_a_beta_of_zero_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="method 'dpo' compares a rollout with its group"):
        replace(MINI, group=1)
    for beta in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(CreditscopeError, match=f"--beta must be above 0, .*, got {beta}: method 'dpo' multiplies"):
            replace(MINI, beta=beta)
    with pytest.raises(CreditscopeError, match=r"--beta must be a number from 0 to .*, got -1"):
        replace(MINI, method="grpo", beta=-1.0)


@each(("bad", "said"), [
    (Pair("2 + 2 = ", "4 ☃", "5"), "'chosen': the tokenizer of .* does not give the text back"),
    (Pair("Warum 2 = ", "4", "5"), "its prompt 'Warum 2 = ' has text that the tokenizer of .* does not know"),
    (Pair("2 + 2 = ", "4", " 5" * 300), "prompt and answer have 60. tokens, over the context of 256"),
])
def test_a_pair_that_cannot_be_learnt_from_is_refused_with_its_line_before_the_first_step(
        bad: Pair, said: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", [*PAIRS, bad])
    (tmp_path / "pairs.jsonl").write_text("\n" + (tmp_path / "pairs.jsonl").read_text())  # blank lines count
    with pytest.raises(CreditscopeError, match=f"pairs.jsonl, line 5.*{said}"):
        next(train(replace(MINI, pairs=str(tmp_path / "pairs.jsonl"), prompts=1), tmp_path / "run", {}))
    assert not (tmp_path / "run").exists()


@each(("name", "said"), [("nosuch.jsonl", "no such file"), (".", "it is a folder")])
def test_a_file_of_pairs_that_is_none_is_named_with_its_flag_and_with_the_command_that_makes_one(
        name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=rf"--pairs {name}: {said}; .*creditscope lab pairs --out FILE makes"):
        next(train(replace(MINI, pairs=name), tmp_path / "run", {}))


def test_a_step_of_more_pairs_than_the_file_has_is_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=r"--prompts 4: .*pairs.jsonl has 3; give --prompts 3 or fewer"):
        next(train(replace(MINI, pairs=file, prompts=4), tmp_path / "run", {}))
    assert not (tmp_path / "run").exists()
    assert len(pairs_of(file, 3)) == 3


def test_equal_answers_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "same.jsonl").write_text('{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 2"}\n')
    with pytest.raises(CreditscopeError, match=r"same.jsonl, line 1: 'chosen' and 'rejected' are equal"):
        next(train(replace(MINI, pairs=str(tmp_path / "same.jsonl")), tmp_path / "run", {}))
