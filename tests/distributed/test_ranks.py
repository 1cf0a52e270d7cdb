"""Two real processes under DDP, FSDP2 and tensor parallel, against one process that holds everything."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from creditscope import CreditscopeError, Microscope
from creditscope.microscope.distributed import across
from creditscope.microscope.proof_ranks import prove_ranks
from creditscope.microscope.sketch import ParameterBlock, Sketcher
from small_models import apart, batch, build, by_loop, double, grams, objective, total

HERE = Path(__file__).resolve().parent
WORLD, N, K, FAMILY = 2, 8, 6, "qwen2"
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
SHARES = {"even": [slice(0, 4), slice(4, 8)], "uneven": [slice(0, 5), slice(5, 8)],
          "second micro-batch": [slice(2, 4), slice(6, 8)]}
DATA_PARALLEL = ["ddp", "fsdp", "fsdp_checkpointed"]
SECONDS = 600  # on a busy machine; seconds on another


def run(folder: Path, *scenarios: str) -> dict[str, list[dict[str, Any]]]:
    """What each process wrote down; all scenarios in one start, as starting is what takes the time."""
    path = os.pathsep.join([str(HERE.parent), *[p for p in sys.path if p]])
    done = subprocess.run([sys.executable, str(HERE / "worker.py"), str(folder), *scenarios], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS, check=False,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:]
    return {name: [torch.load(file, weights_only=True) for file in sorted((folder / name).glob("*.pt"))]
            for name in scenarios}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run(tmp_path_factory.mktemp("ranks"), "two ranks", "four ranks", "proofs")


@pytest.fixture(scope="module")
def ranks(started: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return started["two ranks"]


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """Per-parameter Grams of all eight rollouts by eight separate backward passes in this process."""
    return grams(by_loop(build(FAMILY), *batch(N, 9)))


@pytest.fixture(scope="module")
def alone_sketched() -> Tensor:
    model, (ids, credit) = build(FAMILY), batch(N, 9)
    with Microscope(model, sketch=Sketcher(K)) as scope:
        (-objective(model, ids, credit)).backward()
    return scope.sketch.rows


pytestmark = pytest.mark.slow


def test_there_were_two_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [one["world"] for one in ranks] == [WORLD, WORLD]


# Data parallel: exact blocks.

@pytest.mark.parametrize(("engine", "share"), [*((engine, "even") for engine in DATA_PARALLEL), ("fsdp_sum", "even"),
                                               ("fsdp_uneven", "uneven"), ("fsdp_accumulated", "second micro-batch")])
def test_every_layers_local_gram_is_the_loops(ranks: list[dict[str, Any]], alone: dict[str, Tensor], engine: str,
                                              share: str) -> None:
    for one, mine in zip(ranks, SHARES[share], strict=True):
        layers = one[engine]["layers"]
        assert layers.keys() == alone.keys()
        assert max(apart(layers[name], alone[name][mine, mine]) for name in alone) < 1e-12


@pytest.mark.parametrize("engine", DATA_PARALLEL)
def test_blocks_of_a_ranks_own_groups_are_exact_and_in_units_of_the_mean_gradient(
        ranks: list[dict[str, Any]], alone: dict[str, Tensor], engine: str) -> None:
    # Two ranks, a mean: ∇ = ½ Σ g_i, so a row is g_i/2 and its products are a quarter of the loop's.
    whole = total(alone) / 4
    for rank, one in enumerate(ranks):
        assert one[engine]["scale"] == 0.5
        assert sorted(one[engine]["blocks"]) == [2 * rank, 2 * rank + 1]
        for g, block in one[engine]["blocks"].items():
            rows = (g == GROUPS).nonzero().flatten()
            assert apart(block, whole[rows][:, rows]) < 1e-12


def test_a_tied_head_is_whole_under_fsdp(ranks: list[dict[str, Any]]) -> None:
    alone = grams(by_loop(build(FAMILY, tie_word_embeddings=True), *batch(N, 9)))
    for one, mine in zip(ranks, SHARES["even"], strict=True):
        assert apart(total(one["fsdp_tied"]["layers"]), total(alone)[mine, mine]) < 1e-12
        assert one["fsdp_tied"]["error"] < 1e-12


def test_an_engine_that_adds_up_is_read_as_such(ranks: list[dict[str, Any]], alone: dict[str, Tensor]) -> None:
    for one in ranks:
        assert one["fsdp_sum"]["scale"] == 1.0
        assert one["fsdp_sum"]["error"] < 1e-12
        for g, block in one["fsdp_sum"]["blocks"].items():
            rows = (g == GROUPS).nonzero().flatten()
            assert apart(block, total(alone)[rows][:, rows]) < 1e-12


# Data parallel: the sketch of all pairs.

@pytest.mark.parametrize("engine", [*DATA_PARALLEL, "fsdp_uneven", "fsdp_accumulated"])
def test_the_gathered_sketch_is_that_of_one_process_which_sees_all_rollouts(
        ranks: list[dict[str, Any]], alone_sketched: Tensor, engine: str) -> None:
    for one in ranks:
        assert apart(one[engine]["rows"], alone_sketched / 2) < 1e-12
        assert one[engine]["group"].tolist() == GROUPS.tolist()
        assert torch.equal(one[engine]["gram"], ranks[0][engine]["gram"])


def test_rows_say_which_rank_they_came_from(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["fsdp"]["rank"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ranks[0]["fsdp_uneven"]["rank"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("engine", [*DATA_PARALLEL, "fsdp_uneven", "fsdp_accumulated", "fsdp_tied", "fsdp_sum", "tp"])
def test_the_rows_of_all_ranks_add_up_to_the_reduced_gradient(ranks: list[dict[str, Any]], engine: str) -> None:
    for one in ranks:
        assert one[engine]["error"] < 1e-12
        assert one[engine]["local_error"] < 1e-12


@pytest.mark.parametrize(("engine", "scale"), [("ddp", 0.5), ("fsdp", 0.5), ("fsdp_sum", 1.0), ("tp", 1.0)])
def test_the_exact_gram_of_all_rollouts_times_the_scale_squared_sums_to_the_reduced_gradients_norm(
        ranks: list[dict[str, Any]], alone: dict[str, Tensor], engine: str, scale: float) -> None:
    for one in ranks:
        assert one[engine]["norm"] == pytest.approx(scale**2 * float(total(alone).sum()), rel=1e-12)


def test_bfloat16_is_right_to_a_hundredth_and_its_self_check_still_tells_a_sum_from_a_mean(
        ranks: list[dict[str, Any]]) -> None:
    model = build(FAMILY, torch.bfloat16)
    alone = total(grams(by_loop(double(model), *batch(N, 9)))) / 4
    for one in ranks:
        for g, block in one["fsdp_bfloat16"]["blocks"].items():
            rows = (g == GROUPS).nonzero().flatten()
            assert apart(block, alone[rows][:, rows]) < 2e-2
        assert one["fsdp_bfloat16"]["error"] < 5e-3
        assert "s = 0.5" in one["fsdp_bfloat16"]["sum for mean"]


# The proof of rows: errors are shares of a tolerance of 1e-6.

@pytest.mark.parametrize("engine", ["proof_ddp", "proof_fsdp", "proof_uneven", "proof_by_hand", "proof_tp"])
def test_right_rows_of_all_ranks_are_proven_to_rounding(started: dict[str, list[dict[str, Any]]], engine: str) -> None:
    for one in started["proofs"]:
        assert 0 < one[engine]["worst"] < 1e-8  # 1e-14 of the gradients
        assert one[engine].get("one half", 0) < 1e-8
        assert one[engine].get("restored", True), "gradients and random state are those from before"


PLANTED = {
    # Half [0, 1, 0, 1 | 0, 1, 0, 1] of all eight: row 0 of rank 1, which is rollout 5's, must be 0 and is not.
    "wrong rollout on rank 1": (r"rank 1 could not take part.*rollouts \[1, 3\] … alone .* through rollout 0",
                                r"^the loss of rollouts \[1, 3\] … alone has a gradient through rollout 0"),
    "losses mix on rank 1": ("rank 1 could not take part.*the loss mixes rows", "^the loss of .*the loss mixes rows"),
    "wrong scale": ("with s = 1 .*s = 0.5 would fit best",) * 2,
    "ranks change places": ("rows of rollouts 0 to 3 of all ranks are not those that this rank has sent",
                            "rows of rollouts 4 to 7 of all ranks are not those that this rank has sent"),
    # All eight rows add up to the same gradient: the half of rank 1 alone shows it.
    "a rank sends another's rows": (r"the ranks report are not those of their rollouts: the losses of "
                                    r"rollouts \[4, 5, 6, 7\] …",) * 2}


@pytest.mark.parametrize("engine", ["proof_ddp", "proof_fsdp"])
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_rows_is_raised_on_all_ranks(started: dict[str, list[dict[str, Any]]], engine: str,
                                                        fault: str) -> None:
    for one, words in zip(started["proofs"], PLANTED[fault], strict=True):
        assert re.search(words, one[engine][fault]), one[engine][fault]


def test_a_rank_that_cannot_run_the_proof_ends_it_on_all_and_training_goes_on(
        started: dict[str, list[dict[str, Any]]]) -> None:
    said = [one["proof_ddp"] for one in started["proofs"]]
    assert [one["one rank fails"] for one in said] == [
        "rank 1 could not take part in the reading: CreditscopeError: planted", "planted"]
    assert [one["still trains"] for one in said] == ["no error"] * 2


def test_a_sharded_pass_that_ends_halfway_is_raised_at_once_by_the_rank_that_knows() -> None:
    model, (ids, credit) = build("llama"), batch(4, 9)

    def stops(weights: Tensor) -> None:
        model(ids)
        raise RuntimeError("out of memory")

    with pytest.raises(CreditscopeError, match=r"out of memory\. Other ranks wait .* until its timeout"):
        prove_ranks(Microscope(model, sketch=4), stops, 4, engine=model, scale=1.0)
    assert prove_ranks(Microscope(model, sketch=4), lambda h: objective(model, ids, credit * h[:, None]).backward(),
                       4) < 1e-8


def test_the_proof_of_one_process_is_refused_on_two(started: dict[str, list[dict[str, Any]]]) -> None:
    assert "call proof_ranks.prove_ranks on all ranks" in started["proofs"][0]["proof_ddp"]["for one process"]


# Tensor parallel.

@pytest.mark.parametrize("cut", ["tp", "tp_by_features"])
def test_under_tensor_parallel_every_layer_is_the_loops_on_every_rank(
        ranks: list[dict[str, Any]], alone: dict[str, Tensor], cut: str) -> None:
    for one in ranks:
        assert one[cut]["layers"].keys() == alone.keys()
        assert max(apart(one[cut]["layers"][name], alone[name]) for name in alone) < 1e-12
        assert one[cut]["scale"] == 1.0


@pytest.mark.parametrize("cut", ["tp", "tp_by_features"])
def test_under_tensor_parallel_the_sketch_is_that_of_the_whole_layers(
        ranks: list[dict[str, Any]], alone_sketched: Tensor, cut: str) -> None:
    for one in ranks:
        assert apart(one[cut]["rows"], alone_sketched) < 1e-12


def test_on_four_ranks_parts_that_are_held_twice_count_once(
        started: dict[str, list[dict[str, Any]]], alone: dict[str, Tensor], alone_sketched: Tensor) -> None:
    four = started["four ranks"]
    assert [one["world"] for one in four] == [4] * 4
    for rank, one in enumerate(four):
        for engine, mine, scale in (("hybrid", slice(2 * rank, 2 * rank + 2), 0.25),
                                    ("fsdp_and_tp", SHARES["even"][rank // 2], 0.5)):
            assert one[engine]["scale"] == scale
            assert apart(total(one[engine]["layers"]), total(alone)[mine, mine]) < 1e-12
            assert apart(one[engine]["rows"], scale * alone_sketched) < 1e-12
            assert one[engine]["error"] < 1e-12
        assert "ranks=mesh" in one["fsdp_and_tp"]["which ranks"]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_under_every_stage_of_zero_layers_and_sketch_are_those_of_one_process_to_float32(
        tmp_path: Path, alone: dict[str, Tensor], alone_sketched: Tensor) -> None:
    for one, mine in zip(run(tmp_path, "deepspeed")["deepspeed"], SHARES["even"], strict=True):
        for stage in "0123":
            found = one["zero"][stage]
            assert found["layers"].keys() == alone.keys()
            assert apart(total(found["layers"]), total(alone)[mine, mine]) < 1e-6
            assert found["scale"] == 0.5
            assert apart(found["rows"].double(), alone_sketched / 2) < 1e-6
            assert "s = 0.5 would fit best" in found["sum for mean"]


def test_a_reading_receives_as_many_bytes_as_the_formula_says(ranks: list[dict[str, Any]]) -> None:
    # Two ranks, 4 rollouts each, k = 6, float64: 4·(36·8 + 16) + 40 gathered, 36·8 + 8 added up.
    assert [one["ddp"]["received"] for one in ranks] == [1256 + 296] * 2


# Controls that must fail.

def test_a_sum_taken_for_a_mean_and_a_mean_for_a_sum_fail_and_name_the_right_scale(
        ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        for words, right in ((one["ddp"]["sum for mean"], 0.5), (one["fsdp"]["sum for mean"], 0.5),
                             (one["fsdp_sum"]["mean for sum"], 1)):
            assert "self-check failed" in words
            assert f"s = {right} would fit best" in words


def test_a_replicated_layer_counted_on_each_rank_fails(ranks: list[dict[str, Any]]) -> None:
    # Two equal Grams added: Σ K is twice ‖∇‖², named for the first whole parameter, a norm.
    for one in ranks:
        assert "self-check failed" in one["tp_counted_twice"]["error"]
        assert "layernorm.weight" in one["tp_counted_twice"]["error"]


def test_a_group_split_across_ranks_gets_no_exact_block_as_its_parts_would_be_wrong(
        ranks: list[dict[str, Any]], alone: dict[str, Tensor]) -> None:
    # Group 1 has two rollouts on each rank.
    for rank, one in enumerate(ranks):
        found = one["fsdp"]["split groups"]
        assert found["split"] == [1]
        assert sorted(found["blocks"]) == [2 * rank]
        assert (found["group"] == 1).sum() == 4
    whole = total(alone)[2:6, 2:6]
    parts = torch.block_diag(whole[:2, :2], whole[2:, 2:])
    assert apart(parts, whole) > 0.01


def test_a_group_cut_by_micro_batches_is_named_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert [tuple(one["fsdp_accumulated"]["cut"]) for one in ranks] == [(7, 8, 9)] * 2


def test_different_seeds_on_the_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(ranks):
        assert "ranks must agree on the sketch's k and seed" in one["seeds_differ"]["error"]
        assert f"({K}, {rank})" in one["seeds_differ"]["error"]


def test_a_missing_micro_batch_and_a_clipped_or_spent_gradient_fail(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert "self-check failed" in one["fsdp_accumulated"]["a micro-batch is missing"]
        assert "self-check failed" in one["ddp"]["clipped"]
        assert "have no reduced gradient" in one["ddp"]["no gradient"]


def test_an_error_on_one_rank_ends_in_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    assert "rank 1 could not take part" in ranks[0]["ddp"]["one rank is wrong"]
    assert "shape (4,), got (3,)" in ranks[1]["ddp"]["one rank is wrong"]


def test_an_engine_that_does_not_say_how_it_reduces_is_not_guessed(ranks: list[dict[str, Any]]) -> None:
    assert "give engine=" in ranks[0]["ddp"]["no engine"]


def test_layouts_that_are_not_read_are_refused(ranks: list[dict[str, Any]]) -> None:
    words = ranks[0]["tp_refused"]["error"]
    assert "parameters are laid out over ranks as model.norm.weight (Replicate(),)" in words
    assert "no SequenceParallel" in words


# One process.

def test_alone_a_reading_is_the_scopes_own() -> None:
    model, (ids, credit) = build("llama"), batch(4, 9)
    group = torch.tensor([3, 3, 5, 5])
    with Microscope(model, sketch=8) as scope:
        objective(model, ids, credit).backward()
    reading = across(scope, group)
    assert torch.equal(reading.blocks[5], scope.gram[2:, 2:])
    assert torch.equal(reading.sketch.rows, scope.sketch.rows)
    assert reading.scale == 1.0
    assert reading.split == ()
    assert reading.check.error < 1e-14
    with pytest.raises(CreditscopeError, match="one tensor of group ids for each"):
        across([scope, scope], [group])
    with pytest.raises(CreditscopeError, match=r"shape \(4,\), got \(3,\)"):
        across(scope, group[:3])
    with pytest.raises(CreditscopeError, match="no scope was given"):
        across([], [])


def test_a_scope_without_a_sketch_cannot_be_read_across() -> None:
    model, (ids, credit) = build("llama"), batch(4, 9)
    with Microscope(model) as scope:
        objective(model, ids, credit).backward()
    with pytest.raises(CreditscopeError, match="keeps no sketch"):
        across(scope, torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("cut", [0, 1])
def test_sketches_of_the_blocks_of_a_gradient_add_up_to_the_sketch_of_the_whole(cut: int) -> None:
    g = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sketcher, shape = Sketcher(4), (7, 5)
    starts = [(0, 0), (3, 0)] if cut == 0 else [(0, 0), (0, 3)]
    parts = [g[:, :3], g[:, 3:]] if cut == 0 else [g[:, :, :3], g[:, :, 3:]]
    added = sum(sketcher.dense("w", part, ParameterBlock(shape, start))
                for part, start in zip(parts, starts, strict=True))
    assert apart(added, sketcher.dense("w", g)) < 1e-14
    wrong = sum(sketcher.dense("w", part, ParameterBlock(shape, (0, 0))) for part in parts)
    assert apart(wrong, sketcher.dense("w", g)) > 0.1


def test_a_stack_of_experts_is_cut_along_its_first_or_last_dimension_only() -> None:
    g = torch.randn(2, 4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sketcher, shape = Sketcher(4), (4, 3, 5)
    halves = [sketcher.dense("e", g[:, 2 * i:2 * i + 2], ParameterBlock(shape, (2 * i, 0, 0))) for i in range(2)]
    assert apart(halves[0] + halves[1], sketcher.dense("e", g)) < 1e-14
    with pytest.raises(CreditscopeError, match="along the first or the last dimension"):
        sketcher.dense("e", g[:, :, 1:], ParameterBlock(shape, (0, 1, 0)))
