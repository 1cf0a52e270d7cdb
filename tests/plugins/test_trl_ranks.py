"""Real TRL trainers on two processes, under DDP and FSDP2, against one process with the same rows.

`make test` starts two processes for a part of the scenarios; `make nightly` starts them by torchrun for all of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="its trainers are read")

from creditscope.runs.record import Record
from plugins import trl_two_ranks as ranks
from plugins.trl_makers import in_double
from small_models import apart

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

HERE = Path(__file__).parent
SECONDS = 600  # forty short trainings on a busy machine
ALONE = ("time/", "crc32", "entropy/mean")  # TRL's entropy is that of its last micro-batch
IN_ONE_PROCESS = ("length/reward_correlation", "grad/kl_")  # they would need a further gather, or pass
CLOSE = 1e-7  # the model's norms are computed in float32, whatever its precision
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
            "localhost:0"]
WHOLE = pytest.param("whole", marks=pytest.mark.nightly)
in_whole = pytest.mark.parametrize("folder", [WHOLE], indirect=True)


def of(*names: str) -> pytest.MarkDecorator:
    """Each of the names in the folder of all scenarios, and those that are in PART in the folder of these too."""
    return pytest.mark.parametrize(("folder", "name"), [
        *(("part", name) for name in names if name in ranks.PART),
        *(pytest.param("whole", name, marks=pytest.mark.nightly) for name in names)], indirect=["folder"])


@pytest.fixture(scope="module", params=["part", WHOLE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left, scenarios in one start, and beside it what one process makes of the same rows."""
    folder = tmp_path_factory.mktemp("ranks")
    launcher = TORCHRUN if request.param == "whole" else []
    done = subprocess.run([sys.executable, *launcher, str(HERE / "trl_two_ranks.py"), str(folder)],
                          capture_output=True, text=True, check=False, timeout=SECONDS,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    with in_double():
        for name in ranks.SCRIPTED:
            if not any(path.name.startswith(name) for path in folder.iterdir()):
                continue
            live = ranks.watched(ranks.build(name, 1), folder / f"{name} alone")
            torch.save(ranks.ended(live), folder / f"{name} alone.pt")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert told["ranks"] == 2
    return told


def steps(folder: Path, name: str) -> list[dict[str, Any]]:
    return Record.open(folder / name).steps()


def by_rows(kept: dict[str, Any]) -> list[int]:
    """An order of the rows that does not hang on who had them."""
    return sorted(range(len(kept["group"])), key=lambda i: (int(kept["group"][i]), kept["text"][i]))


# -- the training does not notice --------------------------------------------------------------------------------------


def test_two_ranks_train_as_trl_does_and_the_reading_is_not_noticed(found: dict[str, Any]) -> None:
    assert found["parity"]["same"]
    assert found["parity"]["ours"] < 1e-12
    assert found["parity"]["wrong"] > 0.1  # the control: half the weight is half the gradient


@in_whole
def test_sharded_weights_end_the_same_bit_by_bit(found: dict[str, Any]) -> None:
    told = found["sharding"]
    assert told["kind"].startswith("FSDP")
    assert told["parameters"] == ["DTensor"]
    assert told["watched"]
    assert told["no gram"]
    assert not told["left"], "the control: whole weights that a forward leaves in place are old ones after the step"


def test_a_step_without_a_reading_sends_nothing_more(found: dict[str, Any]) -> None:
    plain, read = found["traffic"]["plain"], found["traffic"]["read once"]
    assert read[0] > plain[0]
    assert read[1:] == plain[1:]


# -- all ranks' rows ---------------------------------------------------------------------------------------------------


@of(*ranks.RUNS)
def test_readings_of_two_ranks_are_those_of_one_process_with_the_same_rows(name: str, folder: Path) -> None:
    alone, both = steps(folder, f"{name.split()[0]} alone"), steps(folder, name)
    assert len(alone) == len(both) == 2
    for one, two in zip(alone, both, strict=True):
        assert "scope/absent" not in two, two["scope/absent"]
        for key in set(one) & set(two):
            # A group that lies on both ranks has no exact block, so means over groups are over the others.
            if isinstance(one[key], str | list):  # the files that were kept, and an alarm's sentence
                assert two[key] == one[key], key
            elif not key.startswith(ALONE) and not (name.startswith("cut") and key.startswith("gram/")):
                assert two[key] == pytest.approx(one[key], rel=CLOSE, abs=1e-12), key
        new = set(two) - set(one)
        assert all(key.startswith("sketch/") or key == "gram/cut_groups" for key in new), new
        gone = {key for key in set(one) - set(two) if not key.startswith(("gram/", *IN_ONE_PROCESS))}
        assert not gone, gone


@of(*ranks.RUNS)
def test_rows_credits_and_grams_of_two_ranks_are_those_of_one_process(name: str, folder: Path) -> None:
    alone, both = Record.open(folder / f"{name.split()[0]} alone"), Record.open(folder / name)
    for step in (0, 1):
        one, two = alone.group(step), both.group(step)
        ours, theirs = by_rows(one), by_rows(two)
        assert [one["text"][i] for i in ours] == [two["text"][i] for i in theirs]
        for key in ("w", "credit", "live_logp", "after_logp"):
            a, b = one[key][ours][one["mask"][ours]], two[key][theirs][two["mask"][theirs]]
            assert b == pytest.approx(a, rel=1e-6, abs=1e-7), key  # kept in float32
        k, s = alone.reading(step)["gram"][np.ix_(ours, ours)], both.reading(step)["gram"][np.ix_(theirs, theirs)]
        met = ~np.isnan(s)
        assert apart(torch.tensor(s[met]), torch.tensor(k[met])) < CLOSE
        same = one["group"][ours][:, None] == one["group"][ours][None, :]
        # Group 1 lies on both ranks in `cut`, and group 3 has no token in `masked`.
        without = {"cut": 1, "masked": 3}.get(name.split()[0], -1)
        assert (met | ~same)[one["group"][ours] != without].all(), "every whole group has its block"
        assert not met[one["group"][ours] == without].any(), "part of a group is not the group"


@of(*ranks.RUNS)
def test_our_gradient_is_the_one_that_trl_steps_on_over_all_ranks(name: str, folder: Path,
                                                                  found: dict[str, Any]) -> None:
    told = found["readings"][name]
    lines = steps(folder, name)
    assert min(line["scope/agreement"] for line in lines) > 1 - 1e-12
    assert [line["grad/norm"] for line in lines] == pytest.approx(told["norms"], rel=1e-9)
    weights = torch.load(folder / f"{name.split()[0]} alone.pt")
    assert apart(torch.tensor(told["weights"], dtype=torch.float64), weights) < CLOSE


@of("cut", "cut sharded")
def test_a_group_on_two_ranks_is_counted_and_sketched(name: str, folder: Path) -> None:
    for line in steps(folder, name):
        assert line["gram/cut_groups"] == 1
        assert 1 <= line["gram/live_groups"] <= 2
        assert line["sketch/group/effective_rank"] > 1
        assert 0 < line["sketch/relative_error"] < 1


@of("dapo", "masked sharded")
def test_where_no_group_is_on_two_ranks_none_is_counted(name: str, folder: Path) -> None:
    assert all(line["gram/cut_groups"] == 0 for line in steps(folder, name))


# -- what must not pass in silence -------------------------------------------------------------------------------------


FAILS = {
    "one rank fails": "rank 1 could not take part in the reading: RuntimeError: planted",
    "one sharded rank fails": "rank 1 could not take part in the reading: RuntimeError: planted",
    "wrong rows on a rank": "rank 1 could not take part in the reading: .* through rollout .*'model.layers.0.mlp",
    "sum for mean": "self-check failed: with s = 1 .*s = 0.5 would fit best",
    "nothing on a rank": "rank 1 could not take part in the reading: .*no token of the step is learned from"}


@of(*FAILS)
def test_a_reading_that_one_rank_cannot_make_is_absent_on_all_and_training_goes_on(
        name: str, found: dict[str, Any]) -> None:
    absent = found["absent"][name]
    assert len(absent) == 2
    for why in absent:
        assert why is not None
        assert re.search(FAILS[name], why), why


@in_whole
def test_another_loss_on_two_ranks_is_noticed(folder: Path) -> None:
    assert steps(folder, "another loss")[0]["scope/agreement"] < 0.99


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_line_on_two_ranks_leaves_one_record_equal_to_one_process(folder: Path) -> None:
    ranks.command(folder, 1)
    alone, both = (Record.open(folder / f"command {world}") for world in (1, 2))
    assert both.config["processes"] == 2
    assert [line["step"] for line in both.steps()] == [0, 1, 2]  # two steps and the last evaluation, written once
    assert both.readings() == alone.readings() == [0, 1]
    for one, two in zip(alone.steps(), both.steps(), strict=True):
        assert len({"gram/group/effective_rank", "eval/accuracy"} & set(two)) >= 1
        for key in set(one) & set(two):
            if key == "kept":
                assert two[key] == one[key]
            elif not key.startswith("time/"):  # a float32 norm inside the model: batches round apart
                assert two[key] == pytest.approx(one[key], rel=1e-5), key
    assert (folder / "command 2" / "model").is_dir()
