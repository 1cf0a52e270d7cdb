"""verl 0.9.1's FSDP2 engine on two processes, stored by `verl_two_ranks.py`, against one backward a rollout.

The reference knows nothing of ranks, micro-batches or padding: it is `surrogate` on the fourteen real rollouts at once.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from creditscope import METHODS, Rollouts, effective_credit, spectrum, surrogate
from creditscope.batch.metrics import spread
from creditscope.methods.dialects import DIALECTS
from creditscope.microscope.sketch import Sketcher
from creditscope.objective.advantages import token_advantage
from depth import FULL
from each import each
from plugins import verl_batch

HERE = Path(__file__).parent
GOLDEN = HERE / "verl_golden" / "engine.npz"
TINY = HERE.parents[1] / "src/creditscope/models/tiny"
STORED = (*verl_batch.METHODS, "vanilla", "packed")
RUNS = STORED if FULL else ("dapo", "packed", "kimi")
UPDATES = list(product(RUNS, (0, 1)))
REAL = [row for row in verl_batch.everyone() if not row.uid.startswith("pad")]
ROWS = len(verl_batch.everyone())
EXACT = 1e-10  # float64, two versions of transformers, a sum of 1.3 million products


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as stored:
        return dict(stored)


def said(run: str, update: int, rank: int = 0, kind: str = "said") -> dict[str, float]:
    """The metrics that verl's engine gave back on a rank, or what verl's own reduction puts into its log."""
    names, values = (golden()[f"{run}/{rank}/{update}/{kind}/{what}"] for what in ("names", "values"))
    return dict(zip(names.tolist(), values.tolist(), strict=True))


def rollouts(old: list[Tensor]) -> Rollouts:
    mask = verl_batch.padded([row.mask for row in REAL])
    return Rollouts(tokens=verl_batch.padded([row.response for row in REAL]), mask=mask, logp=verl_batch.padded(old),
                    reward=torch.tensor([row.reward for row in REAL], dtype=torch.float64),
                    group=torch.tensor(["abcd".index(row.uid) for row in REAL]))


def reference(run: str) -> list[dict[str, Any]]:
    """For each of two updates: loss, norm, Gram of all rows, w. Packing changes nothing in it."""
    return _reference("dapo" if run == "packed" else run)


@cache
def _reference(run: str) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    parameters = list(model.parameters())
    with torch.no_grad():
        batch = rollouts([verl_batch.logp(model, row) + row.drift for row in REAL])
    if run == "vanilla":
        # creditscope_grpo counts rows, so its advantages carry 16/14 for the two rows of padding.
        method, credit = DIALECTS["verl_grpo"], token_advantage(METHODS["grpo"], batch) * ROWS / len(REAL)
    else:
        method, credit = METHODS[run], None
    if run == "kimi":
        # Its penalty is no part of A, so nothing takes the two rows of padding out of verl's count.
        method = method.but(name="kimi_padded", beta=method.beta * len(REAL) / ROWS)
    out = []
    for _ in range(2):
        live = [verl_batch.logp(model, row) for row in REAL]
        logp = verl_batch.padded([x.detach() for x in live])
        w = effective_credit(lambda x: surrogate(method, x, batch, credit), logp)
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad((-w[i, : len(x)] * x).sum(), parameters)])
                for i, x in enumerate(live)]
        stacked = torch.stack(rows)
        out.append({"loss": -float(surrogate(method, logp, batch, credit)), "norm": float(stacked.sum(0).norm()),
                    "gram": (stacked @ stacked.T).numpy(), "w": w, "mask": batch.mask,
                    "sketch": torch.stack([_sketched(model, row) for row in rows])})
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(
                torch.nn.utils.parameters_to_vector(parameters) - verl_batch.LR * stacked.sum(0), parameters)
    return out


def _sketched(model: Any, flat: Tensor) -> Tensor:
    sizes = [p.numel() for p in model.parameters()]
    parts = zip(model.named_parameters(), flat.split(sizes), strict=True)
    return Sketcher().gradient((name, g.view_as(p)) for (name, p), g in parts)


def live(run: str) -> str:
    """Whole groups with a gradient: d is unanimous, and only a penalty moves it."""
    return "acd" if run == "kimi" else "ac"


@pytest.mark.slow
@pytest.mark.deep
@each("run, update", UPDATES)
def test_loss_and_gradient_norm_of_two_ranks_equal_those_of_one_surrogate(run: str, update: int) -> None:
    loss = np.mean([said(run, update, rank)["loss"] for rank in (0, 1)])
    assert loss == pytest.approx(reference(run)[update]["loss"], rel=EXACT)
    assert said(run, update)["grad_norm"] == pytest.approx(reference(run)[update]["norm"], rel=EXACT)


@pytest.mark.deep
@each("run, update", UPDATES)
def test_the_engines_gram_equals_one_backward_a_rollout(run: str, update: int) -> None:
    whole = reference(run)[update]["gram"]
    for rank, uids in ((0, "ad"), (1, "c")):
        stored = {name.rpartition("/")[2] for name in golden() if name.startswith(f"{run}/{rank}/{update}/block/")}
        assert stored == set(uids), "b lies on both ranks, and padding is no group"
        for uid in uids:
            where = [i for i, row in enumerate(REAL) if row.uid == uid]
            expected = whole[np.ix_(where, where)]
            found = golden()[f"{run}/{rank}/{update}/block/{uid}"]
            np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT * max(whole.max(), 1e-300))
            assert (expected.max() > 0) == (uid in live(run))


@pytest.mark.deep
@each("run", RUNS)
def test_the_batch_trains_and_clips_bind_in_it(run: str) -> None:
    first, second = reference(run)
    assert abs(first["norm"] - second["norm"]) > 1e-3 * first["norm"], "the second update is another one"
    if run in ("dapo", "gspo", "grpo_even", "cppo", "vanilla", "packed"):
        given = first["mask"] & (first["w"] == 0)
        assert 0 < int(given.sum()) < int(first["mask"].sum())


@pytest.mark.deep
@each("run, update", UPDATES)
def test_readings_in_verls_metrics_are_those_of_the_whole_batch(run: str, update: int) -> None:
    told, here = said(run, update), reference(run)[update]
    assert told == pytest.approx(said(run, update, rank=1) | _of_rank(told), rel=1e-12), "the same on both ranks"
    assert (told["signal/groups"], told["gram/whole_groups"], told["gram/cut_groups"]) == (4, 3, 1)
    assert told["gram/live_groups"] == len(live(run))
    ranks = []
    for uid in live(run):
        where = [i for i, row in enumerate(REAL) if row.uid == uid]
        ranks.append(spectrum(here["gram"][np.ix_(where, where)], 1e-14).effective_rank)
    assert told["gram/group/effective_rank"] == pytest.approx(np.mean(ranks), rel=1e-7)
    for name, value in spread(here["w"].float(), here["mask"]).items():  # verl's ranks send float32
        assert told[name.replace("w/", "w/batch_")] == pytest.approx(value, rel=1e-5)
    assert told["gram/check"] < 1e-12


def _of_rank(told: dict[str, float]) -> dict[str, float]:
    """What each rank says for itself and verl reduces: its loss, and the loss's own readings."""
    mine = ("loss", "actor/", "w/zero", "w/stopped", "w/positive", "signal/silent")
    return {name: value for name, value in told.items() if name.startswith(mine)}


def test_the_losss_own_readings_are_means_over_micro_batches() -> None:
    told = said("dapo", 0)
    # Rank 0: four rows of a, all credited; then b, d, d, b, of which the two of d are silent.
    assert told["signal/silent_rows"] == pytest.approx((0 + 2 / 4) / 2)
    assert told["w/stopped"] < told["w/zero"]


@pytest.mark.deep
@each("run, update", UPDATES)
def test_groups_that_verl_cut_are_read_from_the_sketches_of_both_ranks(run: str, update: int) -> None:
    rows, found = reference(run)[update]["sketch"], []
    for uid in sorted({*live(run), "b"}):
        mine = rows[[i for i, row in enumerate(REAL) if row.uid == uid]]
        if mine.any():  # after cppo's first update nobody of b is kept
            found.append(spectrum((mine @ mine.T).numpy(), 1e-14).effective_rank)
    told = said(run, update)
    assert told["sketch/group/effective_rank"] == pytest.approx(np.mean(found), rel=1e-7)
    assert 0 < told["sketch/relative_error"] < 1


@each("run", STORED)
def test_readings_survive_verls_own_way_into_its_log(run: str) -> None:
    both, log = [said(run, 0, rank) for rank in (0, 1)], said(run, 0, kind="logged")
    readings = [name for name in both[0] if name.split("/")[0] in ("credit", "signal", "gram", "sketch")]
    assert len(readings) > 20
    for name in readings:
        assert log[f"actor/{name}"] == pytest.approx(np.mean([told[name] for told in both]), rel=1e-12), name


def test_the_golden_run_was_verls_own() -> None:
    assert str(golden()["verl"]) == "0.9.1"
    assert {name.split("/")[0] for name in golden()} == {"verl", "torch", *STORED}


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl lives in its own environment")
def test_the_golden_run_is_current(tmp_path: Path) -> None:
    fresh = tmp_path / "engine.npz"
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                    str(HERE / "verl_two_ranks.py"), str(fresh)], check=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    with np.load(fresh, allow_pickle=False) as again:
        assert set(again) == set(golden())
        for name in again:
            if again[name].dtype.kind == "f":
                np.testing.assert_allclose(golden()[name], again[name], rtol=1e-9, atol=1e-12, err_msg=name)
