"""Training on preferences: pairs of sampled groups, and pairs of a file in the place of sampled answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import mini
from creditscope import CreditscopeError
from creditscope.batch.pairs import Pair, write_pairs
from creditscope.diagnosis.trainers import who_wrote
from creditscope.lab.given import pair_stream
from creditscope.lab.train import train
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from each import each

pytestmark = pytest.mark.usefixtures("mini_task")

PAIRS = [Pair("1 + 1 =", " 2", " 3"), Pair("2 + 2 =", " 4 = 4", " 5"), Pair("3 + 3 =", " 6", " 7 + 8")]
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
    assert {line["pairs/count"] for line in lines} == {2}
    assert lines[0]["pairs/rejected_change"] < lines[0]["pairs/chosen_change"]
    assert who_wrote(Record.open(tmp_path / "run").config).pairs


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
        assert line["w/zero"] > 0.2  # of four answers two have no w


def test_every_pass_has_each_pair_once_in_an_order_of_the_seed() -> None:
    one, two = (list(islice(pair_stream(PAIRS, seed), 9)) for seed in (0, 1))
    assert all(sorted(map(repr, one[at:at + 3])) == sorted(map(repr, PAIRS)) for at in (0, 3, 6))
    assert one != two


@each("changes, said", [
    ({"method": "grpo"}, "method 'grpo' learns from sampled answers"),
    ({"method": "kto"}, "method 'kto' learns from sampled answers"),
    ({"group": 4}, "--group 4: a pair of --pairs has two answers"),
    ({"rollouts": 64}, "--rollouts 64: with --pairs no answer is sampled"),
    ({"credit": "leave_one_out"}, "labels its answers"),
])
def test_settings_that_have_no_place_beside_pairs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CreditscopeError, match=said):
        replace(MINI, **{"pairs": "pairs.jsonl", **changes})


def test_a_group_of_one_and_a_beta_of_zero_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="method 'dpo' compares a rollout with its group"):
        replace(MINI, group=1)
    with pytest.raises(CreditscopeError, match="give β > 0"):
        replace(MINI, beta=0.0)


def test_equal_answers_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "same.jsonl").write_text('{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 2"}\n')
    with pytest.raises(CreditscopeError, match=r"same.jsonl, line 1: 'chosen' and 'rejected' are equal"):
        next(train(replace(MINI, pairs=str(tmp_path / "same.jsonl")), tmp_path / "run", {}))
