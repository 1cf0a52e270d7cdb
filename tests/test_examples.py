"""Examples run, and run again where they have run before; the sample files are the packaged model's own."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

import mini
from cli import run, run_json
from creditscope import METHODS, Record, effective_credit, surrogate
from creditscope.batch.jsonl import read_jsonl
from creditscope.exact import prefix_bias
from creditscope.policy.loading import load_policy
from creditscope.policy.logp import token_logp
from creditscope.tasks import Problem, find_task
from makers import load_script

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_a_loop_of_ones_own_writes_a_record_that_doctor_report_and_inspect_read_and_runs_twice(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = load_script(ROOT / "examples" / "own_record.py")
    example.SETTINGS |= {"model": mini.model(), "task": mini.TASK, "group": 4, "prompts": 3, "max_tokens": 12}
    monkeypatch.chdir(tmp_path)
    with mini.known():
        assert [str(example.main()) for _ in range(2)] == ["runs/mine", "runs/mine-2"]
    capsys.readouterr()
    record = Record.open("runs/mine")
    assert (len(record.steps()), record.groups()) == (15, [0, 5, 10])
    for command in ("doctor", "report", "inspect", "inspect --prefix"):
        assert run(*command.split(), "runs/mine") == 0
    capsys.readouterr()
    rules = {found["rule"]: found["state"] for found in run_json(capsys, "doctor", "runs/mine")["findings"]}
    assert [rules[rule] for rule in ("reward missing", "reward constant", "dead groups")] == ["fine"] * 3
    assert run("report", "runs/mine", "runs/mine-2", "-o", "both.html") == 0
    # Identity: w as the loop kept it is w of the batch that the record gives back, by another route (closed form).
    batch, kept = record.rollouts(5), record.group(5)
    assert torch.allclose(prefix_bias(example.METHOD, batch).w, torch.as_tensor(kept["w"]).double(), atol=1e-6)
    assert (EXAMPLES / "own_record.py").read_text().count("← ") == 3  # as its docstring says


@pytest.mark.parametrize("lines", [[{"reward/mean": 0.5}] * 14, [{"mine": 1.0}] * 3])
def test_a_report_of_a_record_that_counts_no_rollouts_has_its_steps(lines: list[dict[str, float]], tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    with Record.create(tmp_path / "mine", {}) as record:
        for step, line in enumerate(lines):
            record.append(step, line)
    assert run("report", tmp_path / "mine") == 0
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_the_sample_rollouts_are_what_the_packaged_model_says_and_what_the_task_rewards() -> None:
    policy, task = load_policy("tiny", device="cpu"), find_task("arithmetic")
    labelled, plain = (read_jsonl(EXAMPLES / f"{name}.jsonl", dtype=torch.float64) for name in ("labelled", "rollouts"))
    assert torch.equal(labelled.tokens, plain.tokens)
    assert (plain.step, labelled.step is None) == (None, False)
    assert len({*plain.reward.tolist()}) == 2
    for i, length in enumerate(plain.lengths.tolist()):
        assert policy.decode(plain.tokens[i, :length].tolist()) == plain.text[i]
    prompts = [policy.encode(prompt) for prompt in plain.prompt]
    logp = token_logp(policy, prompts, plain.tokens, plain.mask, 1.0, grad=False)
    assert torch.allclose(logp.double(), plain.logp, atol=1e-4)  # six digits are kept
    lines = [json.loads(line) for line in (EXAMPLES / "problems.jsonl").read_text().splitlines()]
    answers = {line["prompt"]: line["answer"] for line in lines}
    score = load_script(ROOT / "examples" / "my_rewards.py").score
    for prompt, text, reward in zip(plain.prompt, plain.text, plain.reward.tolist(), strict=True):
        assert task.verify(Problem("", prompt, answers[prompt]), text).reward == reward
        assert score(text, {"answer": answers[prompt]}) == reward


@pytest.mark.slow
def test_the_sample_files_can_be_made_again(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        load_script(ROOT / "examples" / "sample_files.py").main(tmp_path, prompts=1, group=2)
    for name in ("rollouts.jsonl", "labelled.jsonl", "problems.jsonl"):
        made, shipped = ([json.loads(line) for line in (folder / name).read_text().splitlines()]
                         for folder in (tmp_path, EXAMPLES))
        assert [line.keys() for line in made] == [line.keys() for line in shipped[:len(made)]]
    assert made == shipped  # problems do not depend on the machine


def test_the_sample_run_is_whole_and_gives_w_back() -> None:
    """Identity: w as the lab kept it is w of the batch that the record gives back, through the surrogate."""
    record = Record.open(EXAMPLES / "run")
    assert (len(record.steps()), record.groups(), record.readings(), record.missing()) == (30, *[[0, 10, 20]] * 2, [])
    batch = record.rollouts(0)
    w = effective_credit(lambda logp: surrogate(METHODS["grpo"], logp, batch), batch.logp)
    assert torch.allclose(w, torch.as_tensor(record.group(0)["w"]).double(), atol=1e-6)
