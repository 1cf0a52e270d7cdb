"""TRL under DeepSpeed ZeRO 0, 1 and 2: readings in front of the engine's own step.

DeepSpeed is not in the test environment. `zero_0.19.8.json` is what `trl_zero.py` found with DeepSpeed's and
accelerate's own code on two processes; the nightly test runs it again where DeepSpeed is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="its trainers are read")

from creditscope.errors import CreditscopeError
from creditscope.plugins.trl import ScopeCallback, zero
from creditscope.plugins.trl.passes import untouched
from plugins import trl_zero

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

HERE = Path(__file__).parent
STORED: dict[str, Any] = json.loads((HERE / "zero_0.19.8.json").read_text())
STAGES = (0, 1, 2)


class Engine:
    """The names of DeepSpeed's engine that accelerate and we call, around one weight: loss θ², a step of 0.1 ∇."""

    def __init__(self) -> None:
        self.theta, self.boundary = torch.tensor(1.0, requires_grad=True), False
        self.seen: list[float] = []

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        assert self.theta.grad is not None
        self.theta.data -= 0.1 * self.theta.grad
        self.theta.grad = None


def test_accelerates_backward_steps_the_engine_and_a_reading_is_taken_between() -> None:
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    engine = Engine()

    def read() -> None:
        engine.seen.extend([float(engine.theta.detach()), float(engine.theta.grad)])

    end = zero.before_steps(engine, read)
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward(engine.theta.square(), sync_gradients=False)
    assert engine.seen == [], "an accumulated micro-batch is no step"
    wrapper.backward(engine.theta.square(), sync_gradients=True)
    # At θ = 1, ∇ = 2 twice; then θ = 1 − 0.1·4.
    assert engine.seen == [1.0, 4.0]
    assert float(engine.theta.detach()) == pytest.approx(0.6)
    engine.boundary, engine.theta.grad = False, torch.zeros(())
    engine.step()
    assert len(engine.seen) == 2, "a call of step inside an accumulation is no step"
    end()
    wrapper.backward(engine.theta.square(), sync_gradients=True)
    assert len(engine.seen) == 2
    with pytest.raises(CreditscopeError, match=r"a Linear has no step\(\)"):
        zero.before_steps(torch.nn.Linear(1, 1), lambda: None)


def test_hooks_behind_a_gradient_are_off_in_passes_of_our_own_and_then_on() -> None:
    model = torch.nn.Linear(2, 1)
    called: list[Any] = []
    model.weight.register_post_accumulate_grad_hook(called.append)
    with untouched(model):
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
    assert called == []
    model(torch.ones(1, 2)).sum().backward()
    assert called == [model.weight]


@pytest.mark.parametrize("stage", STAGES)
def test_under_zero_the_training_ends_at_the_same_weights_and_our_gradient_is_its_own(stage: int) -> None:
    found = STORED[f"zero {stage}"]
    assert (found["engine"], found["stage"]) == ("DeepSpeedEngine", stage)
    assert found["same"], "bit by bit, with readings and without"
    assert found["unwrapped"]
    assert len(found["steps"]) == 2
    assert all(line["scope/agreement"] > 1 - 1e-6 and "scope/absent" not in line for line in found["steps"])
    if found["norms"]:  # stage 0 in float32 does not say
        assert [line["grad/norm"] for line in found["steps"]] == pytest.approx(found["norms"], rel=1e-6)
    assert "ZeRO 3" in STORED["zero 3"]
    assert "set the stage to 2 or less" in STORED["zero 3"]


def test_readings_under_zero_are_those_of_one_process_with_the_same_rows(tmp_path: Path) -> None:
    live = trl_zero.build(1)
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "alone", groups=None))
    live.train()
    alone = trl_zero.lines(tmp_path / "alone")
    for stage in STAGES:
        for one, two in zip(alone, STORED[f"zero {stage}"]["steps"], strict=True):
            for key in set(one) & set(two):  # float32; few weights round to no change
                assert two[key] == pytest.approx(one[key], rel=1e-4, abs=2e-3 if key == "update/zero" else 1e-9), key


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_what_is_stored_is_what_deepspeed_does(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(HERE / "trl_zero.py"), str(tmp_path / "now.json")], capture_output=True,
                          text=True, check=False, timeout=600,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    now = json.loads((tmp_path / "now.json").read_text())
    for stage in STAGES:
        assert now[f"zero {stage}"]["same"]
        for one, two in zip(now[f"zero {stage}"]["steps"], STORED[f"zero {stage}"]["steps"], strict=True):
            assert two == pytest.approx(one, rel=1e-4)
