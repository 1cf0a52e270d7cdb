"""Several observers of one update: each reads its own passes, whatever the others leave in the model's gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mini
from creditscope import Record
from creditscope.lab.train import train
from creditscope.runs import schema
from creditscope.runs.config import Config

pytestmark = pytest.mark.usefixtures("mini_task")
BOTH = Config(model=mini.model(), task=mini.TASK, prompts=2, group=4, steps=2, max_tokens=8, eval_problems=0,
              keep_every=0, checkpoint_every=9, method="grpo", beta=0.5, seed=1, lr=1e-3, dtype="float64", device="cpu")


def steps_of(config: Config, folder: Path) -> list[dict[str, float]]:
    list(train(config, folder, {}))
    return [line for line in Record.open(folder).steps() if schema.GRAD_NORM in line]


@pytest.mark.parametrize("scope", ["light", "full"])
def test_the_probe_reads_the_same_beside_a_microscope_with_passes_of_its_own(scope: str, tmp_path: Path) -> None:
    """Four micro-batches cut two groups apart, so the microscope takes passes between w and the update, as the probe
    does for the part of the gradient without the KL term."""
    base = replace(BOTH, probe="full", probe_every=1, accumulate=4)
    alone = steps_of(replace(base, scope="off"), tmp_path / "alone")
    beside = steps_of(replace(base, scope=scope), tmp_path / "beside")
    for one, other in zip(alone, beside, strict=True):
        read = {name: value for name, value in one.items() if name.startswith("optimizer/")}
        assert schema.OPTIMIZER_SCALE_CHANGE_NOW in read
        assert {name: other.get(name) for name in read} == pytest.approx(read, rel=1e-9)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_pull_of_the_kl_term_in_bfloat16_is_that_of_its_own_passes(accumulate: int, tmp_path: Path) -> None:
    """The passes of scope full leave gradients in the bfloat16 model, from which the float32 copies collect theirs."""
    base = replace(BOTH, dtype="bfloat16", probe="off", accumulate=accumulate, group=6, lr=3e-2)
    light, full = (steps_of(replace(base, scope=scope), tmp_path / scope) for scope in ("light", "full"))
    for one, other in zip(light, full, strict=True):
        for name in (schema.GRAD_KL_PULL, schema.GRAD_KL_SIZE):
            assert other[name] == pytest.approx(one[name], rel=1e-6)
