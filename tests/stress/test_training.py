"""Training that goes wrong: it stops with the reason in its record and with clean checkpoints, or goes on and says what
it could not read. A deterministic policy and dead groups are no fault, and end nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mini
from creditscope import CreditscopeError, Record
from creditscope.cli.main import main
from creditscope.lab import step as lab
from creditscope.lab.setup import make_optimizer
from creditscope.lab.step import Minibatch, take_step
from creditscope.lab.train import train
from creditscope.optimizer.brakes import Brake
from creditscope.policy.loading import load_policy
from creditscope.report.build import build
from creditscope.runs.config import Config

SMALL = Config(model=mini.model(), task=mini.TASK, prompts=2, group=4, steps=3, max_tokens=12, eval_problems=0,
               checkpoint_every=1, keep_every=1, lr=1e-4)
FULL = replace(SMALL, scope="full", probe="full", probe_every=1, inner_steps=2)
pytestmark = pytest.mark.usefixtures("mini_task")


def run(config: Config, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    list(train(config, out, {}, resume))
    return Record.open(out).steps()


def spoilt_after(calls: int, value: float) -> Callable[..., torch.Tensor]:
    """The surrogate, times NaN or ∞ from some call on."""
    real, count = lab.surrogate, 0

    def planted(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return real(*args) * (value if count > calls else 1.0)

    return planted


def sound(folder: Path) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in load_file(folder / "policy.safetensors").values())


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("scope", ["off", "light"])
def test_a_loss_that_is_not_finite_stops_the_run_with_its_reason_and_clean_checkpoints(
        scope: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "surrogate", spoilt_after(2, value))
    with pytest.raises(CreditscopeError, match=r"gradient.*(nan|inf|not finite)"):
        run(replace(SMALL, scope=scope), tmp_path / "run")
    record = Record.open(tmp_path / "run")
    *steps, last = record.steps()
    assert steps, "the steps before are whole"
    assert all("grad/norm" in line and "run/stopped" not in line for line in steps)
    assert last["step"] == len(steps)
    assert "gradient" in last["run/stopped"]
    assert all(sound(record.checkpoint_path(step)) for step in record.checkpoints())
    # Once the cause is gone the run goes on from there, and the line makes way for the step that it stood for.
    monkeypatch.undo()
    resumed = run(replace(SMALL, scope=scope), tmp_path / "run", resume=True)
    assert len(resumed) == SMALL.steps
    assert not any("run/stopped" in line for line in resumed)


def test_an_update_that_spoils_the_weights_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam with ε = 0 divides 0 by 0 where a gradient is 0: the norm was finite, the weights are not."""
    run(replace(SMALL, steps=1), tmp_path / "run")
    monkeypatch.setattr(torch.optim.AdamW, "step", poison)
    with pytest.raises(CreditscopeError, match=r"the update has made \S+ infinite or NaN"):
        run(SMALL, tmp_path / "run", resume=True)
    record = Record.open(tmp_path / "run")
    assert "infinite or NaN" in record.steps()[-1]["run/stopped"]
    assert record.checkpoints() == [1]
    assert sound(record.checkpoint_path(1))


def poison(self: torch.optim.Optimizer, closure: Any = None) -> None:
    with torch.no_grad():
        self.param_groups[0]["params"][-1].view(-1)[0] = torch.nan


def test_adam_without_epsilon_on_dead_groups_is_refused_and_not_trained_on(tmp_path: Path) -> None:
    """The same without a plant: at temperature 1e-6 all answers of a group are one, and every gradient is 0."""
    with pytest.raises(CreditscopeError, match=r"infinite or NaN.*--eps 0"):
        run(replace(SMALL, temperature=1e-6, eps=0.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "dapo"])
def test_a_certain_policy_trains_on_nothing_and_no_reading_is_made_up(method: str, tmp_path: Path) -> None:
    """By hand: every answer of a group is the same, so A = 0, w = 0, ∇ = 0, entropy 0; no rank, no null, no cosine."""
    steps = run(replace(FULL, temperature=1e-6, steps=4, method=method), tmp_path / "run")
    for line in steps:
        assert "absent" not in line
        assert line["signal/live_groups"] == line["gram/live_groups"] == 0
        assert line["entropy/mean"] == line["grad/norm"] == line["objective/value"] == 0
        assert not {"gram/effective_rank", "gram/group/effective_rank", "gram/cancellation", "w/top10_mass",
                    "update/cosine", "null/group/effective_rank"} & line.keys()
    first = load_policy(SMALL.model).model.state_dict()
    last = load_file(Record.open(tmp_path / "run").checkpoint_path(4) / "policy.safetensors")
    assert all(torch.equal(first[name], value) for name, value in last.items() if name in first)
    assert "</html>" in build([tmp_path / "run"])


def test_a_gradient_too_small_for_float32_squares_has_its_norm_in_the_record() -> None:
    """Twin: credit of 1e-30 against the same step with credit 1; torch's own norm of it is 0."""
    from creditscope.lab.rollout import roll_out
    from creditscope.tasks import find_task

    norms = {}
    for size in (1.0, 2.0**-100):
        config = replace(SMALL, method="reinforce", optimizer="sgd")
        policy, task = load_policy(SMALL.model), find_task(SMALL.task)
        problems = [p for p, _ in zip(task.problems("train", 5), range(2), strict=False)]
        batch = roll_out(policy, task, problems, 4, max_tokens=12, temperature=1.0, top_p=1.0,
                         generator=torch.Generator().manual_seed(0))
        credit = torch.full(batch.rollouts.mask.shape, size)
        update = take_step(Minibatch(policy, config.row, batch.rollouts, credit),
                           Brake(make_optimizer(policy, config)), clip_norm=config.clip_norm)
        assert update is not None
        norms[size] = update.norm
    assert norms[1.0] > 0.1
    assert norms[2.0**-100] == pytest.approx(norms[1.0] * 2.0**-100, rel=1e-4, abs=0)


# -- records with such lines -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run to whose record such lines were added: what was absent, what was NaN on disk, why it stopped."""
    out = tmp_path_factory.mktemp("wounded") / "run"
    with mini.known():
        run(replace(FULL, steps=3), out)
    file = out / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.pop("crc32", None)  # as whoever edits a record must
    lines[1] = {name: value for name, value in lines[1].items() if not name.startswith(("gram/", "reward/"))}
    lines[1] |= {"absent": {"reward/mean": "nan", "gram/effective_rank": "inf"}}
    lines[2] |= {"overshoot/kl": None}
    lines.append({"step": 3, "run/stopped": "the gradient's norm is nan"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["report", "doctor", "papers check"])
def test_readers_take_a_record_with_absent_readings_and_a_stop(verb: str, wounded: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main([*verb.split(), str(wounded), *(["--json"] if verb != "report" else [])])
    printed, complaint = capsys.readouterr()
    assert "creditscope:" not in complaint
    assert printed
    assert "NaN" not in printed.replace("infinite or NaN", "")
    assert "Infinity" not in printed
