"""Memory that runs out is one sentence: what was being done, how much there is, and the settings that need less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from creditscope.cli.main import main
from creditscope.runs.record import Record

CUDA = ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is "
        "free. Process 1 has 77.9 GiB memory in use.")
SMALL = ("--steps", "1", "--prompts", "1", "--group", "2", "--max-tokens", "2", "--eval-problems", "0")


def fail(error: Exception) -> Callable[..., Any]:
    def instead(*args: Any, **kwargs: Any) -> Any:
        raise error
    return instead


@pytest.mark.slow
@pytest.mark.parametrize(("place", "error", "doing", "change"), [
    ("creditscope.lab.step.rollout_logp", torch.OutOfMemoryError(CUDA), "passing the batch through the model",
     "add --recompute (8 answers of 512 tokens, 0.6 B weights in float32: 25.7 to 11.8 GiB), use --dtype bfloat16"),
    ("creditscope.lab.rollout.sample", torch.OutOfMemoryError(CUDA), "sampling answers",
     "lower --max-tokens, or --prompts and --group; in an evaluation, --eval-problems"),
    ("creditscope.policy.loading._load", torch.OutOfMemoryError(CUDA), "loading the model", "choose a smaller one"),
    ("creditscope.lab.step.rollout_logp", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to "
                                                      "allocate 99 bytes"),
     "passing the batch through the model", "this machine has"),
    ("creditscope.lab.train.find_task", torch.OutOfMemoryError(CUDA), "", "raise --accumulate"),
])
def test_a_run_that_needs_more_memory_than_there_is_says_which_settings_need_less(
        place: str, error: Exception, doing: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(place, fail(error))
    with pytest.raises(SystemExit) as stop:
        main(["lab", "train", *SMALL, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith(f"creditscope: out of memory{f' while {doing}' if doing else ''} (")
    assert said.count("\n") == 1
    assert change in said
    assert ("2.50 GiB more were asked for" if isinstance(error, torch.OutOfMemoryError) else "99 bytes") in said
    if (tmp_path / "run" / "run.json").exists():
        assert Record.open(tmp_path / "run").steps() == [] or "run/stopped" in Record.open(tmp_path / "run").steps()[-1]


def test_scope_with_a_model_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    row = '{"prompt": "1+1=", "response": "2", "reward": %d}\n'
    file.write_text(row % 1 + row % 0)
    monkeypatch.setattr("creditscope.offline.assemble.score_tokens", fail(torch.OutOfMemoryError(CUDA)))
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(file), "--model", "tiny"])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert "out of memory while passing a batch through the model (2.50 GiB more were asked for" in said
    assert "lower --rows, or give --scope light or off" in said


def test_a_selftest_that_does_not_fit_is_no_failure_of_the_installation(monkeypatch: pytest.MonkeyPatch,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("creditscope.selftest.gram.Microscope", fail(torch.OutOfMemoryError(CUDA)))
    with pytest.raises(SystemExit) as stop:
        main(["selftest", "--device", "cpu"])
    assert stop.value.code == 2
    assert "out of memory while" in capsys.readouterr().err


def test_any_other_error_of_torch_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.lab.step.rollout_logp", fail(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["lab", "train", *SMALL, "--out", str(tmp_path / "run")])
