"""OpenRLHF's and SkyRL's own trainers, read in their own passes: the stored readings (`openrlhf_live.py`,
`skyrl_live.py`) are those of our row, and where the packages are installed the trainers are driven again."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from creditscope import Rollouts, effective_credit, surrogate
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.objective.bounds import beyond

HERE = Path(__file__).parent
STORED = {"openrlhf": HERE / "openrlhf_0.11.2.npz", "skyrl": HERE / "skyrl_0.3.0.npz"}
ROWS = {"openrlhf": DIALECTS["openrlhf_dr_grpo"].replace(clip_low=0.2, clip_high=0.28),
        "skyrl": DIALECTS["skyrl_grpo"].replace(clip_low=0.2, clip_high=0.2)}
READINGS = [(name, number) for name in STORED for number in (0, 1)]


@cache
def arrays(name: str) -> dict[str, NDArray[np.generic]]:
    with np.load(STORED[name], allow_pickle=False) as found:
        return dict(found)


def metric(name: str, number: int, key: str) -> float:
    names = arrays(name)[f"names{number}"].tolist()
    return float(arrays(name)[f"values{number}"][names.index(f"creditscope/{key}")])


def reading(name: str, number: int) -> dict[str, torch.Tensor]:
    start = f"group{number}/"
    return {key.removeprefix(start): torch.from_numpy(value) for key, value in arrays(name).items()
            if key.startswith(start)}


def our_w(method: Method, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """w of the row on the rows of the update: the credit is the trainer's."""
    rollouts = Rollouts(tokens=found["tokens"], mask=found["mask"], logp=found["logp"].double(),
                        reward=found["reward"].double(), group=found["group"])
    return effective_credit(lambda logp: surrogate(method, logp, rollouts, found["credit"].double()),
                            found["live_logp"].double())


@pytest.mark.conformance
@pytest.mark.parametrize(("name", "number"), READINGS)
def test_w_in_the_trainers_own_backward_is_that_of_our_row(name: str, number: int) -> None:
    found = reading(name, number)
    # The trainers compute in float32, and the record stores it.
    torch.testing.assert_close(found["w"].double(), our_w(ROWS[name], found), rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize(("name", "changes"), [
    ("openrlhf", {"aggregate": "sequence_mean"}), ("openrlhf", {"clip_high": 0.2}), ("skyrl", {"clip_low": 0.01}),
    ("skyrl", {"aggregate": "sequence_mean"})])
def test_a_row_with_another_choice_has_another_w(name: str, changes: dict[str, object]) -> None:
    far = [float((reading(name, number)["w"] - our_w(ROWS[name].replace(**changes), reading(name, number))).abs().max()
                 / reading(name, number)["w"].abs().max()) for number in (0, 1)]
    assert max(far) > 0.01


@pytest.mark.parametrize(("name", "number"), READINGS)
def test_overshoot_counts_the_tokens_past_the_bound_after_the_step(name: str, number: int) -> None:
    found = reading(name, number)
    live = found["mask"] & (found["credit"] != 0)
    past = beyond(ROWS[name], found["after_logp"].double(), found["logp"].double(), found["mask"],
                  found["credit"].double()) > 0
    assert metric(name, number, "overshoot/past") == pytest.approx(float(past[live].double().mean()))
    assert not torch.equal(found["after_logp"], found["live_logp"])


@pytest.mark.parametrize(("name", "number"), READINGS)
def test_one_of_four_groups_is_dead_at_least(name: str, number: int) -> None:
    assert metric(name, number, "signal/dead_groups") >= 0.25


def test_the_second_reading_is_of_the_second_update_where_the_ratio_has_moved() -> None:
    for name in STORED:
        first, second = reading(name, 0), reading(name, 1)
        # In train mode and in evaluation the same model gives the same log-probs but for rounding.
        torch.testing.assert_close(first["live_logp"], first["logp"], rtol=0, atol=1e-5)
        assert (second["live_logp"] - second["logp"]).abs().max() > 1e-2


def test_skyrls_groups_lie_whole_in_a_micro_batch_and_openrlhf_shuffles_rows() -> None:
    for number in (0, 1):
        assert metric("skyrl", number, "gram/group/effective_rank") >= 1
        assert metric("openrlhf", number, "gram/cut_groups") >= 1
        assert metric("openrlhf", number, "sketch/group/effective_rank") >= 1


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(STORED))
def test_the_trainer_gives_the_stored_readings_again_and_trains_as_without_us(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} lives in its own environment")
    done = subprocess.run([sys.executable, "-c", AGAIN.format(name=name)], cwd=HERE, capture_output=True, text=True,
                          timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


AGAIN = """
import sys, tempfile
from pathlib import Path
import numpy as np, torch
import {name}_live as live
from test_live_readings import STORED

with tempfile.TemporaryDirectory() as folder:
    fresh = live.stored(Path(folder) / "run")
with np.load(STORED["{name}"]) as stored:
    assert set(stored) == set(fresh)
    for key in stored:
        if stored[key].dtype.kind == "f":
            np.testing.assert_allclose(fresh[key], stored[key], rtol=1e-3, atol=1e-5, err_msg=key)
alone, watched, geometry = (getattr(one, "actor", None) or one.model for one in (
    live.drive(None, scoped=False)[0], live.drive(None, gram=False)[0], live.drive(None)[0]))
for a, b, c in zip(*(policy.parameters() for policy in (alone, watched, geometry)), strict=True):
    assert torch.equal(a, b), "the training is another one under the hook"
    torch.testing.assert_close(a, c, rtol=0, atol=1e-5)  # the microscope's products are rounded in another order
"""
