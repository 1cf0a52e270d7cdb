"""Float32 masters: small steps add up, gradients of micro-batches are added in float32, checkpoints keep them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mini
from creditscope import Record
from creditscope.lab.setup import make_optimizer
from creditscope.lab.train import train
from creditscope.optimizer.masters import Masters
from creditscope.policy.loading import load_policy
from creditscope.runs.config import Config

HALF = Config(model=mini.model(), task=mini.TASK, prompts=2, group=4, steps=4, max_tokens=12, eval_problems=0,
              checkpoint_every=2, keep_every=0, lr=1e-6, dtype="bfloat16")


def test_gradients_of_micro_batches_are_added_in_float32() -> None:
    """1 + 1/256 is 1 in bfloat16: 256 such micro-batches add up to 2 in float32."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = Masters({"p": p})
    for g in [1.0] + [1 / 256] * 256:
        p.grad = torch.full_like(p, g)
        masters.collect()
    assert p.grad is None
    assert masters.named["p"].grad is not None
    assert masters.named["p"].grad.item() == 2.0


def test_a_float32_parameter_beside_half_ones_is_its_own_master() -> None:
    wide, half = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = Masters({"wide": wide, "half": half})
    assert masters.named["wide"] is wide
    assert masters.named["half"].dtype == torch.float32


@pytest.mark.usefixtures("mini_task")
def test_four_steps_of_1e_6_move_the_masters_and_few_of_the_bfloat16_weights(tmp_path: Path) -> None:
    """Adam's step is at most lr = 1e-6 per weight, times 4; a bfloat16 weight of 0.02 has neighbours 6e-5 away."""
    for _ in train(HALF, tmp_path / "run", {}):
        pass
    record = Record.open(tmp_path / "run")
    kept = load_file(record.checkpoint_path(4) / "policy.safetensors")
    start = load_policy(HALF.model, dtype="bfloat16").trainable()
    moved = torch.cat([(kept[name] - p.detach().float()).abs().flatten() for name, p in start.items()])
    assert {p.dtype for p in kept.values()} == {torch.float32}
    assert 0 < float(moved.max()) <= 4.1e-6
    assert float((moved > 0).double().mean()) > 0.5
    line = record.steps()[0]
    assert line["update/zero"] < 0.5  # the update is that of the masters
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {p.dtype for p in saved.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("mini_task")
def test_a_resumed_run_goes_on_from_its_masters_bit_by_bit(tmp_path: Path) -> None:
    half, whole = tmp_path / "half", tmp_path / "whole"
    for _ in train(HALF, whole, {}):
        pass
    for _ in train(replace(HALF, steps=2), half, {}):
        pass
    for _ in train(HALF, half, {}, resume=True):
        pass
    one, other = (load_file(Record.open(f).checkpoint_path(4) / "policy.safetensors") for f in (half, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.usefixtures("mini_task")
def test_everything_that_reads_a_step_reads_it_through_masters_too(tmp_path: Path) -> None:
    """One run in float32 and one in bfloat16 from the same weights write the same metrics and arrays.

    Without norm clipping: under it `optimizer/scale_change` exists only where all steps were clipped alike, and the two
    runs, which do not draw the same answers, need not agree on that.
    """
    lines = []
    for dtype in ("float32", "bfloat16"):
        config = replace(HALF, steps=2, scope="full", probe="full", probe_every=1, also=("salt",), beta=0.1,
                         inner_steps=2, accumulate=2, recompute=True, clip_norm=None, dtype=dtype)
        for _ in train(config, tmp_path / dtype, {}):
            pass
        lines.append(Record.open(tmp_path / dtype).steps()[0])
    assert lines[0].keys() == lines[1].keys()
    assert lines[1]["update/ratio"] == pytest.approx(lines[0]["update/ratio"], rel=0.05)


@pytest.mark.usefixtures("mini_task")
@pytest.mark.parametrize("brake", ["none", "shorten", "recall"])
def test_after_every_update_the_model_holds_the_rounded_masters(brake: str, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr("creditscope.lab.train.require_finite", lambda policy, _: held.append(all(
        torch.equal(p, policy.trainable()[name].bfloat16()) for name, p in policy.model.named_parameters())))
    config = replace(HALF, steps=1, inner_steps=3, brake=brake, lr=1e-2, accumulate=2)
    for _ in train(config, tmp_path / brake, {}):
        pass
    assert len(held) == 3
    assert all(held)


def test_a_float32_policy_keeps_no_masters() -> None:
    policy = load_policy(HALF.model)
    make_optimizer(policy, HALF)
    assert policy.masters is None
    assert all(p is policy.trainable()[name] for name, p in policy.model.named_parameters())
