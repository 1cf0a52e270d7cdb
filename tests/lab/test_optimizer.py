"""Probes and brakes in the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mini
from creditscope import CreditscopeError, Record
from creditscope.lab.train import train
from creditscope.runs.config import Config

SMALL = Config(model=mini.model(), task=mini.TASK, steps=3, prompts=2, group=4, eval_problems=0, keep_every=0,
               checkpoint_every=1, lr=3e-4, device="cpu", inner_steps=3, probe_every=1)
pytestmark = pytest.mark.usefixtures("mini_task")


def lines(config: Config, out: Path, resume: bool = False, stop_after: int | None = None) -> list[dict[str, Any]]:
    seen = 0

    def stop() -> bool:
        return stop_after is not None and seen + 1 >= stop_after

    for _ in train(config, out, {}, resume, stop):
        seen += 1
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in Record.open(out).steps()]


@pytest.mark.slow
@pytest.mark.parametrize("brake", ["none", "recall", "shorten,share=0.02", "restart", "kl_stop,limit=0.0001"])
def test_every_brake_trains_and_closes_its_accounts(brake: str, tmp_path: Path) -> None:
    found = lines(replace(SMALL, brake=brake), tmp_path / "run")
    assert len(found) == 3
    assert any(line["optimizer/overshoot"] > 0 for line in found)
    for line in found:
        assert 1 <= line["optimizer/updates"] <= 3
        assert line["policy/sampler_gap"] < 1e-4
    if brake.startswith("shorten"):
        assert found[0]["overshoot/past"] <= 0.02 + 0.02  # along the line, not on the path
    if brake.startswith("kl_stop"):
        assert min(line["optimizer/updates"] for line in found) < 3


def test_a_brake_that_stops_in_the_first_pass_leaves_the_other_rows_as_sampled(tmp_path: Path) -> None:
    config = replace(SMALL, brake="kl_stop,limit=1e-9", minibatches=2, lr=1e-3, steps=1, seed=1)
    line = lines(config, tmp_path / "run")[0]
    assert line["optimizer/updates"] == 1
    assert line["overshoot/past"] > 0, "the update has moved tokens"
    assert line["policy/sampler_gap"] < 1e-4


@pytest.mark.slow
def test_a_probe_changes_nothing_that_is_learnt(tmp_path: Path) -> None:
    runs = {level: lines(replace(SMALL, probe=level), tmp_path / level) for level in ("off", "light", "full")}
    for off, *others in zip(*runs.values(), strict=True):
        for line in others:
            assert {k: line[k] for k in off} == off
    assert "overshoot/by_momentum" in runs["full"][-1]
    assert Record.open(tmp_path / "full").optimizer_readings() == [0, 1, 2]
    assert Record.open(tmp_path / "light").optimizer_readings() == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"optimizer": "adam", "weight_decay": 0.1}])
def test_what_does_not_scale_with_reward_is_followed_by_full_over_a_resume(changes: dict[str, Any],
                                                                          tmp_path: Path) -> None:
    config = replace(SMALL, probe="full", clip_norm=None, **changes)
    whole = lines(config, tmp_path / "whole")
    lines(config, tmp_path / "cut", stop_after=2)
    assert lines(config, tmp_path / "cut", resume=True) == whole
    assert all("optimizer/scale_change" in line for line in whole)
    # With β = 0 and no weight decay the optimiser is far more blind.
    plain = lines(replace(SMALL, probe="full", clip_norm=None), tmp_path / "plain")
    assert whole[-1]["optimizer/scale_change"] > 2 * plain[-1]["optimizer/scale_change"]
    with pytest.raises(CreditscopeError, match="its probe is 'full', not 'light'"):
        lines(replace(config, probe="light"), tmp_path / "cut", resume=True)
    with pytest.raises(CreditscopeError, match=r"its clip_norm is left out, not 1\.0"):
        lines(replace(config, clip_norm=1.0), tmp_path / "cut", resume=True)


@pytest.mark.parametrize(("changes", "message"), [
    ({"inner_steps": 1, "brake": "recall"}, "acts from the second update"),
    ({"beta1": 0.0, "brake": "recall"}, "acts on momentum"),
    ({"optimizer": "sgd", "brake": "recall"}, "acts on momentum"),
    ({"momentum": 0.9}, "--momentum 0.9 is SGD's; --optimizer adamw has --beta1"),
    ({"method": "p1_grpo", "brake": "recall"}, "has no bound"),
    ({"brake": "recal"}, "did you mean 'recall'"),
    ({"probe": "lite"}, "did you mean 'light'"),
    ({"beta1": 1.0}, "--beta1 must be below 1")])
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        replace(SMALL, **changes)
