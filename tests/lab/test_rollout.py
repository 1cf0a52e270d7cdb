"""From verdicts to a batch: answers that are lost to their form are counted, cut ones are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from creditscope.lab import train as lab
from creditscope.lab.rollout import Drawn, replace_dead, roll_out
from creditscope.policy.loading import load_policy
from creditscope.runs.config import Config
from creditscope.tasks import Problem, Verdict
from creditscope.tasks.arithmetic import Arithmetic

SMALL = Config(group=4, prompts=4, steps=1, eval_problems=0, checkpoint_every=100, keep_every=0, device="cpu")


class Unmarked(Arithmetic):
    """Judges as if the model did not mark its answers: `#### 15` is read as `= 15`."""

    def verify(self, problem: Problem, text: str) -> Verdict:
        return super().verify(problem, text.replace("####", "="))


def drawn(task: Arithmetic, max_tokens: int = 80) -> Drawn:
    return roll_out(load_policy("tiny", device="cpu"), task, list(islice(task.problems("train"), 8)), 4, top_p=1.0,
                    max_tokens=max_tokens, temperature=1.0, generator=torch.Generator().manual_seed(0))


def test_right_answers_in_another_form_are_lost_and_no_other() -> None:
    marked, unmarked = drawn(Arithmetic()), drawn(Unmarked())
    assert marked.lost is not None
    assert unmarked.lost is not None
    assert not marked.lost.any()
    right = marked.rollouts.reward == 1
    assert 0 < right.sum() < len(right)
    assert unmarked.lost.equal(right & marked.finished)
    assert unmarked.rollouts.reward.sum() == 0


def test_flexible_pays_what_strict_loses() -> None:
    strict, flexible = drawn(Unmarked()), drawn(Unmarked(answer="flexible"))
    assert strict.lost is not None
    assert flexible.rollouts.reward[strict.lost].eq(1).all()
    assert flexible.lost is not None
    assert not flexible.lost.any()


def test_an_answer_that_was_cut_is_not_lost_to_its_form() -> None:
    batch = drawn(Unmarked(), max_tokens=20)
    assert batch.lost is not None
    assert (~batch.finished).any()
    assert not batch.lost[~batch.finished].any()


def test_lost_answers_stay_with_their_rows_where_groups_are_replaced() -> None:
    batch = drawn(Arithmetic())
    spare = replace(batch, lost=torch.ones_like(batch.finished))
    kept = replace(batch, lost=torch.zeros_like(batch.finished))
    joined = replace_dead(kept, spare)
    assert joined.lost is not None
    assert joined.lost.sum() == min(int(batch.dead.sum()), int((~batch.dead).sum())) > 0
    assert replace_dead(kept, replace(spare, lost=None)).lost is None


@pytest.mark.parametrize("answer", ["strict", "flexible"])
def test_the_record_has_the_share_that_is_lost(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def find(_: str, **options: Any) -> Arithmetic:
        made.append(options)
        return Unmarked(**options)

    monkeypatch.setattr(lab, "find_task", find)
    line = next(iter(lab.train(replace(SMALL, answer=answer), tmp_path / "run", {})))
    assert made == ([{"answer": "flexible"}] if answer == "flexible" else [{}])
    paid, lost = line["reward/mean"], line["reward/lost_to_form"]
    assert (paid > 0, lost > 0) == (answer == "flexible", answer == "strict")
