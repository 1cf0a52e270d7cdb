"""A loss that leaves out tokens with credit is found; no method of the table is flagged for what it does by design."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mini
from creditscope.batch.metrics import untrained
from creditscope.batch.rollouts import Rollouts
from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.finding import Finding
from creditscope.diagnosis.read import read
from creditscope.lab import step as lab_step
from creditscope.lab.train import train
from creditscope.methods.table import METHODS
from creditscope.runs.config import Config
from each import each

pytestmark = pytest.mark.usefixtures("mini_task")
FIRST, LAST, ROWS = "w/skipped_first", "w/skipped_last", "w/dead_rows"


def config(**changes: Any) -> Config:
    return Config(**{"model": mini.model(), "task": mini.TASK, "group": 4, "prompts": 4, "steps": 5, "probe": "off",
                     "eval_problems": 0, "keep_every": 0, "checkpoint_every": 100, **changes})


def trained(settings: Config, out: Path) -> tuple[list[dict[str, Any]], Finding]:
    """The lines of a run, and the finding of the rule."""
    lines = list(train(settings, out, {}))
    return lines, {each.rule: each for each in diagnose(read(out)).findings}["mask"]


def test_rows_and_tokens_by_hand() -> None:
    given = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    # Row 0 trains its third token, row 1 its second and third, row 2 none; row 3 has no credit.
    w = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    # Before the first: 2 and 1. After the last: 0 and 1. The median of two is the smaller one.
    assert untrained(given, w) == {ROWS: pytest.approx(1 / 3), FIRST: 1, LAST: 0}


def test_without_credit_there_is_nothing_to_train_and_without_w_no_token_to_count_from() -> None:
    one = torch.ones(2, 3).bool()
    assert untrained(~one, one) == {}
    assert untrained(one, ~one) == {ROWS: 1.0}


def first_three(mask: Tensor) -> Tensor:
    return mask & (torch.arange(mask.shape[1]) >= 3)


def last_token(mask: Tensor) -> Tensor:
    return mask & (torch.arange(mask.shape[1]) < mask.sum(dim=1, keepdim=True) - 1)


def shifted(mask: Tensor) -> Tensor:
    return mask & mask.roll(1, 1)


def odd_rows(mask: Tensor) -> Tensor:
    return mask & (torch.arange(len(mask)) % 2 == 0)[:, None]


@pytest.mark.parametrize(("bug", "says"), [
    (first_three, "the first 3 tokens of most answers"), (last_token, "the last token of most answers"),
    (shifted, "the first token of most answers"), (odd_rows, "of the answers have w = 0 on every token")])
def test_a_planted_mask_is_found_in_the_record(bug: Callable[[Tensor], Tensor], says: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    right = lab_step.surrogate

    def wrong(method: Any, logp: Tensor, rollouts: Rollouts, credit: Tensor | None = None) -> Tensor:
        return right(method, logp, replace(rollouts, mask=bug(rollouts.mask)), credit)

    monkeypatch.setattr(lab_step, "surrogate", wrong)
    _, found = trained(config(), tmp_path / "run")
    assert found.bad, found.sentence
    assert says in found.sentence


@pytest.mark.slow
@each("name", sorted(METHODS))
def test_no_method_is_flagged_for_its_own_loss(name: str, tmp_path: Path) -> None:
    row = METHODS[name]
    more = {"resample": 0} if row.keep == "live_groups" else {}
    lines, found = trained(config(method=name, inner_steps=2, minibatches=2, **more), tmp_path / "run")
    assert found.state == "fine", found.sentence
    if row.keep in ("all", "live_groups") and row.token_weight == "none":
        assert {line[key] for line in lines for key in (ROWS, FIRST, LAST) if key in line} == {0}
