"""Metrics of TRL runs that separate causes: answers, prompts, the size of the update, ε, the KL term, groups."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", reason="its trainers are read")

from transformers import TrainerCallback  # noqa: E402

from creditscope.objective.surrogate import effective_credit  # noqa: E402
from creditscope.plugins.common.untouched import untouched  # noqa: E402
from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer  # noqa: E402
from creditscope.plugins.trl.batch import objective  # noqa: E402
from creditscope.plugins.trl.passes import chosen, logits  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from plugins.trl_makers import trainer  # noqa: E402

pytestmark = pytest.mark.conformance


class Seen:
    """A reward function that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], list[list[int]]]] = []

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.asked.append((prompts, completion_ids))
        return [float(ids.count(2)) for ids in completion_ids]

    __name__ = "seen"


def run(out: Path, beside: Any = None, kind: Any = None, groups: int | None = None, **settings: Any) -> list[Any]:
    live = trainer(kind, **settings)
    scope = ScopeCallback(live, every=1, out=out, groups=groups)
    live.add_callback(scope)
    if beside is not None:
        live.add_callback(beside(scope))
    live.train()
    return Record.open(out).steps()


@pytest.mark.parametrize("masked", [False, True])
def test_answers_are_those_that_the_reward_was_asked_about(masked: bool, tmp_path: Path) -> None:
    judge = Seen()
    lines = run(tmp_path / "run", funcs=judge, max_steps=3, max_completion_length=2, mask_truncated_completions=masked)
    assert sum(line["reward/equal_texts"] for line in lines) > 0
    prompts: list[str] = []
    for line, (asked, texts) in zip(lines, judge.asked, strict=True):
        rewards = [ids.count(2) for ids in texts]
        group = [i // 4 for i in range(len(texts))]
        same = [(i, j) for i, j in combinations(range(len(texts)), 2) if group[i] == group[j] and texts[i] == texts[j]]
        assert line["reward/equal_texts"] == len(same)
        assert line["reward/equal_texts_apart"] == 0
        assert line["signal/distinct_texts"] == len({(g, *t) for g, t in zip(group, texts, strict=True)}) / len(texts)
        assert line["reward/max"] == max(rewards)
        assert line["length/truncated"] == sum(ids[-1] not in (0, 1) for ids in texts) / len(texts)
        whole = [i for i, ids in enumerate(texts) if ids[-1] in (0, 1)]
        x, y = [], []
        for g in set(group):
            rows = [i for i in whole if group[i] == g]
            x += [len(texts[i]) - sum(len(texts[j]) for j in rows) / len(rows) for i in rows]
            y += [rewards[i] - sum(rewards[j] for j in rows) / len(rows) for i in rows]
        a, b = torch.tensor(x).double(), torch.tensor(y).double()
        if float((a @ a) * (b @ b)) > 1e-12:
            assert line["length/reward_correlation"] == pytest.approx(float(a @ b / ((a @ a) * (b @ b)).sqrt()))
        else:
            assert "length/reward_correlation" not in line
        prompts += asked[::4]
        assert line["prompts/seen"] == len(set(prompts))
        assert line["prompts/passes"] == len(prompts) / len(set(prompts))


def test_a_noisy_judge_is_seen_in_equal_answers(tmp_path: Path) -> None:
    def noisy(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    lines = run(tmp_path / "run", funcs=noisy, max_steps=2, max_completion_length=1)
    assert sum(line["reward/equal_texts_apart"] for line in lines) > 0


class WholeUpdate(TrainerCallback):
    """All weights before and after the step."""

    found: list[dict[str, float]]

    def __init__(self, scope: ScopeCallback) -> None:
        self.model, self.found = scope._policy.model, []
        type(self).last = self

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.before = torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()

    def on_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        now = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        delta = (now - self.before).double()
        inner = kwargs["optimizer"].optimizer
        roots = [(inner.state[p]["exp_avg_sq"].double() / (1 - 0.999 ** float(inner.state[p]["step"]))).sqrt().flatten()
                 for p in self.model.parameters()]
        root = torch.cat(roots)
        root = root[root > 0]
        self.found.append({"update/ratio": float(delta.norm() / self.before.double().norm()),
                           "update/zero": float((delta == 0).double().mean()), "update/trainable": 1.0,
                           "update/epsilon_factor": float((root / (root + 1e-3)).median())})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_of_the_update_is_that_of_all_weights(dtype: str, tmp_path: Path) -> None:
    lines = run(tmp_path / "run", WholeUpdate, dtype=dtype, max_steps=3, learning_rate=1e-4, adam_epsilon=1e-3,
                bf16=False)
    for line, expected in zip(lines, WholeUpdate.last.found, strict=True):
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert (lines[0]["update/zero"] > 0.5) == (dtype == "bfloat16")
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert settings["dtype"] == dtype
    assert settings["trl"]["adam_epsilon"] == 1e-3
    assert {"top_k", "min_p", "warmup_steps", "max_steps", "fp16", "max_grad_norm"} <= set(settings["trl"])


class SlowKL(TrainerCallback):
    """Both parts of J, each by its own backward over all rows of the step."""

    def __init__(self, scope: ScopeCallback) -> None:
        self.scope, self.found = scope, []
        type(self).last = self

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        window, _ = self.scope._reading
        model, parts = self.scope._policy.model, []
        for beta in (window.method.beta, 0.0):
            row = self.scope.method.replace(beta=beta)
            with untouched(model):
                live = chosen(logits(model, window.inputs, 1.0), window.inputs)
                w = effective_credit(lambda lp, row=row: objective(  # type: ignore[misc]
                    type(window)(**(vars(window) | {"method": row})), lp), live)
                live.backward(w)
                parts.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
        kl, reward = parts[0] - parts[1], parts[1]
        self.found.append({"grad/kl_pull": -float(kl @ reward / (reward @ reward)),
                           "grad/kl_size": float(kl.norm() / reward.norm())})


@pytest.mark.parametrize("kind", [None, ScopedGRPOTrainer])
def test_the_pull_of_the_kl_term_is_that_of_both_parts_of_trls_loss(kind: Any, tmp_path: Path) -> None:
    if kind is None:
        lines = run(tmp_path / "run", SlowKL, beta=0.5, learning_rate=1e-2, max_steps=3)
    else:
        live = trainer(kind, extra={"out": tmp_path / "run", "every": 1}, beta=0.5, learning_rate=1e-2, max_steps=3)
        live.add_callback(SlowKL(live.scope))
        live.train()
        lines = Record.open(tmp_path / "run").steps()
    assert lines[-1]["grad/kl_size"] > 1e-3
    for line, expected in zip(lines, SlowKL.last.found, strict=True):
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_without_a_kl_term_there_is_no_pull_and_groups_of_several_passes_agree_as_those_of_one(tmp_path: Path) -> None:
    one = run(tmp_path / "one", max_steps=1)[0]
    many = run(tmp_path / "many", max_steps=1, gradient_accumulation_steps=4, per_device_train_batch_size=4)[0]
    assert "grad/kl_pull" not in one
    assert "gram/effective_rank" not in many
    assert many["gram/between"] == pytest.approx(one["gram/between"], rel=1e-4)
