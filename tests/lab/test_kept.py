"""What a kept step says of its tokens beside the rollouts: who was stopped, where they ended, other credits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mini
from creditscope import Record
from creditscope.lab.train import train
from creditscope.runs.config import Config

pytestmark = pytest.mark.usefixtures("mini_task")

SMALL = Config(model=mini.model(), task=mini.TASK, prompts=4, group=4, steps=2, eval_problems=0, checkpoint_every=1,
               keep_every=1, lr=3e-2, device="cpu", probe="off")


def run(config: Config, out: Path) -> Record:
    list(train(config, out, {}))
    return Record.open(out)


def facts(record: Record) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/") and k != "kept"} for line in record.steps()]


def test_clipped_is_where_w_is_0_though_a_is_not(tmp_path: Path) -> None:
    # The second minibatch is recorded after the first one's update, so some of its tokens are past the clip.
    kept = run(replace(SMALL, method="grpo", minibatches=2), tmp_path / "run").group(1)
    assert kept["clipped"].dtype == bool
    assert kept["clipped"].any()
    assert (kept["clipped"] == ((kept["w"] == 0) & (kept["credit"] != 0) & kept["mask"])).all()


def test_a_method_without_a_bound_clips_nothing(tmp_path: Path) -> None:
    kept = run(replace(SMALL, method="p1_grpo", minibatches=2), tmp_path / "run").group(1)
    assert kept["credit"].any()
    assert not kept["clipped"].any()


def test_what_lies_past_the_bound_afterwards_is_the_overshoot_that_the_step_reports(tmp_path: Path) -> None:
    record = run(replace(SMALL, method="grpo", inner_steps=2, probe="light", probe_every=1, steps=1), tmp_path / "run")
    (line,), kept = record.steps(), record.group(0)
    bounded = kept["mask"] & (kept["credit"] != 0)
    assert line["overshoot/past"] > 0
    assert (kept["after_past"][bounded] > 0).mean() == pytest.approx(line["overshoot/past"], rel=1e-12)
    assert kept["after_past"][bounded].astype(float).mean() == pytest.approx(line["optimizer/overshoot"], rel=1e-6)
    assert (kept["after_past"][~bounded] == 0).all()
    log_ratio = (kept["after_logp"] - kept["logp"])[kept["mask"]].astype(float)
    assert (np.expm1(log_ratio) - log_ratio).mean() == pytest.approx(line["overshoot/kl"], rel=1e-4)


@pytest.mark.slow
def test_log_probs_afterwards_are_kept_only_where_the_probe_asked_for_them(tmp_path: Path) -> None:
    record = run(replace(SMALL, probe="light", probe_every=2), tmp_path / "run")
    assert {"after_logp", "after_past"} <= set(record.group(0))
    assert not {"after_logp", "after_past"} & set(record.group(1))
    assert "after_logp" not in run(SMALL, tmp_path / "unprobed").group(0)


@pytest.mark.slow
def test_other_credits_are_kept_at_the_steps_that_were_read(tmp_path: Path) -> None:
    record = run(replace(SMALL, method="p1_grpo", scope="light", every=2, also=("leave_one_out", "step_reward")),
                 tmp_path / "run")
    kept = record.group(0)
    assert kept["other_names"].tolist() == ["leave_one_out", "step_reward"]
    assert kept["other_credit"].shape == (2, *kept["mask"].shape)
    # Without a std, leaving a rollout out of its own baseline is R/(R−1) = 4/3 of the group mean's credit.
    chosen = kept["mask"]
    assert kept["credit"][chosen].any()
    assert np.abs(kept["other_credit"][0][chosen] - 4 / 3 * kept["credit"][chosen]).max() < 1e-6
    assert not {"other_names", "other_credit"} & set(record.group(1))


def test_keeping_changes_nothing_of_the_run(tmp_path: Path) -> None:
    config = replace(SMALL, inner_steps=2, probe="light", probe_every=1)
    kept, bare = (run(replace(config, keep_every=every), tmp_path / str(every)) for every in (1, 0))
    assert kept.groups() == [0, 1]
    assert bare.groups() == []
    assert facts(kept) == facts(bare)
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("1", "0")]
    assert models[0] == models[1]
