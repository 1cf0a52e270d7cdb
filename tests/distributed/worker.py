"""Several ranks: each runs every engine on its share of a batch and writes down what it read.

    python tests/distributed/worker.py FOLDER SCENARIOS…   one process per rank; FOLDER/SCENARIOS/RANK.pt is its results

The ranks are forked from a process that has loaded torch, which takes longer than what they do. They find each other
through a file, so no port has to be free.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from creditscope import CreditscopeError, Microscope
from creditscope.microscope import distributed, shards
from creditscope.microscope.distributed import across
from creditscope.microscope.proof import prove
from creditscope.microscope.proof_ranks import prove_ranks
from creditscope.microscope.sketch import Sketcher
from small_models import batch, build, objective

N, K, FAMILY = 8, 6, "qwen2"
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
SPLIT = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
SHARES = {"even": [(0, 4), (4, 8)], "uneven": [(0, 5), (5, 8)], "four": [(0, 2), (2, 4), (4, 6), (6, 8)]}
PARTS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
ROWS = ("o_proj", "down_proj")

Saved = dict[str, Any]


def main(rank: int, which: str, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world)
    assert dist.get_world_size() == world
    results: dict[str, Saved] = {}
    for scenario in SCENARIOS[which]:
        dist.barrier()
        results[scenario.__name__] = scenario(rank)
    torch.save({"world": dist.get_world_size(), **results}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def share(rank: int, how: str = "even") -> tuple[slice, Tensor, Tensor]:
    ids, credit = batch(N, 9)
    mine = slice(*SHARES[how][rank])
    return mine, ids[mine], credit[mine]


def measured(model: nn.Module, called: Callable[..., Any], ids: Tensor, credit: Tensor, sketch: Any = None,
             **options: Any) -> Microscope:
    """A scope on `model` around the backward pass of what is `called`."""
    with Microscope(model, sketch=sketch or Sketcher(K), **options) as scope:
        (-objective(called, ids, credit)).backward()
    return scope


def saved(scope: Microscope, reading: Any) -> Saved:
    return {"layers": scope.layers, "blocks": reading.blocks, "split": list(reading.split), "group": reading.group,
            "rank": reading.rank, "rows": reading.sketch.rows, "gram": reading.sketch.gram, "scale": reading.scale,
            "error": reading.check.error, "local_error": max(check.error for check in scope.checks.values()),
            "norm": sum(float(whole(p.grad).square().sum()) for p in scope.parameters.values())}


def whole(grad: Any) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad  # type: ignore[no-any-return]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that collectives bring to this rank from others; a sum by a ring brings its tensor 2(W−1)/W times."""
    gather, reduce, total, world = dist.all_gather, dist.all_reduce, [0], dist.get_world_size()

    def all_gather(found: list[Tensor], x: Tensor, **kwargs: Any) -> Any:
        total[0] += (len(found) - 1) * x.numel() * x.element_size()
        return gather(found, x, **kwargs)

    def all_reduce(x: Tensor, **kwargs: Any) -> Any:
        total[0] += 2 * (world - 1) * x.numel() * x.element_size() // world
        return reduce(x, **kwargs)

    with mock.patch.object(dist, "all_gather", all_gather), mock.patch.object(dist, "all_reduce", all_reduce):
        yield total


def said(what: Callable[[], Any]) -> str:
    """The error that a call ends in."""
    try:
        what()
    except CreditscopeError as error:
        return str(error)
    return "no error"


def sharded(model: Any, mesh: DeviceMesh | None = None, divide: float | None = None) -> Any:
    """fully_shard as its users apply it: every block, then the rest."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    half = next(model.parameters()).dtype == torch.bfloat16
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if divide is not None:
            module.set_gradient_divide_factor(divide)
    return model


def parallel(model: Any, mesh: DeviceMesh | None = None, embedding: Any = None) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {"model.embed_tokens": embedding or RowwiseParallel(input_layouts=Replicate()),
                            "lm_head": ColwiseParallel(output_layouts=Replicate())}
    for block in ("self_attn", "mlp"):
        for name in PARTS[block]:
            plan[f"model.layers.*.{block}.{name}"] = RowwiseParallel() if name in ROWS else ColwiseParallel()
    return parallelize_module(model, mesh, plan)


# -- data parallel -----------------------------------------------------------------------------------------------------


def ddp(rank: int) -> Saved:
    model = build(FAMILY)
    engine = nn.parallel.DistributedDataParallel(model)
    mine, ids, credit = share(rank)
    scope = measured(model, engine, ids, credit)
    with counted() as received:
        reading = across(scope, GROUPS[mine], engine=engine)
    results = saved(scope, reading) | {"received": received[0]}
    results["no engine"] = said(lambda: across(scope, GROUPS[mine]))
    results["sum for mean"] = said(lambda: across(scope, GROUPS[mine], scale=1.0))
    results["one rank is wrong"] = said(lambda: across(scope, GROUPS[mine][: 4 - rank], engine=engine))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    results["clipped"] = said(lambda: across(scope, GROUPS[mine], engine=engine))
    model.zero_grad()
    results["no gradient"] = said(lambda: across(scope, GROUPS[mine], engine=engine))
    return results


def fsdp(rank: int) -> Saved:
    model = sharded(build(FAMILY))
    mine, ids, credit = share(rank)
    scope = measured(model, model, ids, credit)
    results = saved(scope, across(scope, GROUPS[mine]))
    results["split groups"] = saved(scope, across(scope, SPLIT[mine]))
    results["sum for mean"] = said(lambda: across(scope, GROUPS[mine], scale=1.0))
    return results


def fsdp_uneven(rank: int) -> Saved:
    model = sharded(build(FAMILY))
    mine, ids, credit = share(rank, "uneven")
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS[mine]))


def fsdp_sum(rank: int) -> Saved:
    """The engine is told to add up: what it says is read, and what one would assume fails."""
    model = sharded(build(FAMILY), divide=1.0)
    mine, ids, credit = share(rank)
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS[mine])) | {
        "mean for sum": said(lambda: across(scope, GROUPS[mine], scale=0.5))}


def fsdp_checkpointed(rank: int) -> Saved:
    model = sharded(build(FAMILY))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    mine, ids, credit = share(rank)
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS[mine]))


def fsdp_accumulated(rank: int) -> Saved:
    """Two micro-batches, reduced after the second only."""
    model = sharded(build(FAMILY))
    mine, ids, credit = share(rank)
    model.set_requires_gradient_sync(False)
    first = measured(model, model, ids[:2], credit[:2])
    model.set_requires_gradient_sync(True)
    second = measured(model, model, ids[2:], credit[2:])
    groups = [GROUPS[mine][:2], GROUPS[mine][2:]]
    return saved(second, across([first, second], groups)) | {
        "a micro-batch is missing": said(lambda: across(second, groups[1])),
        "cut": across([first, second], [torch.tensor([9, 8]), torch.tensor([8, 7])]).split}


def fsdp_tied(rank: int) -> Saved:
    model = sharded(build(FAMILY, tie_word_embeddings=True))
    mine, ids, credit = share(rank)
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS[mine]))


def fsdp_bfloat16(rank: int) -> Saved:
    model = sharded(build(FAMILY, torch.bfloat16))
    mine, ids, credit = share(rank)
    # oneDNN's bfloat16 dies of an illegal instruction on virtual machines that announce AMX and do not allow it.
    with torch.backends.mkldnn.flags(enabled=False):
        scope = measured(model, model, ids, credit)
        return saved(scope, across(scope, GROUPS[mine])) | {
            "sum for mean": said(lambda: across(scope, GROUPS[mine], scale=1.0))}


def seeds_differ(rank: int) -> Saved:
    model = sharded(build(FAMILY))
    mine, ids, credit = share(rank)
    scope = measured(model, model, ids, credit, sketch=Sketcher(K, seed=rank))
    return {"error": said(lambda: across(scope, GROUPS[mine]))}


# -- the proof of rows -------------------------------------------------------------------------------------------------


def proof_ddp(rank: int) -> Saved:
    model = build(FAMILY)
    engine = nn.parallel.DistributedDataParallel(model)
    results = proofs(rank, model, engine, engine=engine)

    def fails(weights: Tensor) -> None:
        if rank == 1:
            raise CreditscopeError("planted")
        (-objective(engine, *share(rank)[1:])).backward()

    scope = Microscope(model, sketch=Sketcher(K))
    results["one rank fails"] = said(lambda: prove_ranks(scope, fails, 4, engine=engine))
    results["still trains"] = said(lambda: measured(model, engine, *share(rank)[1:]))
    return results


def proof_fsdp(rank: int) -> Saved:
    model = sharded(build(FAMILY))
    return proofs(rank, model, model)


def proof_uneven(rank: int) -> Saved:
    """Five rollouts and three; accumulated gradients, buffers and random numbers stay as they are."""
    model = sharded(build(FAMILY))
    _, ids, credit = share(rank, "uneven")
    (-objective(model, ids, credit)).backward()
    before = [whole(p.grad).clone() for p in model.parameters()], torch.get_rng_state()
    scope = Microscope(model, sketch=Sketcher(K))
    worst = prove_ranks(scope, losses(model, ids, credit), len(ids))
    after = [whole(p.grad) for p in model.parameters()], torch.get_rng_state()
    same = all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)) and torch.equal(before[1], after[1])
    return {"worst": worst, "restored": same}


def proof_by_hand(rank: int) -> Saved:
    """A loop that adds up gradients itself, after passes that send nothing."""
    model = build(FAMILY)
    _, ids, credit = share(rank)

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)

    return {"worst": prove_ranks(Microscope(model, sketch=Sketcher(K)), losses(model, ids, credit), 4, scale=1.0,
                                 reduce=reduce)}


def proof_tp(rank: int) -> Saved:
    model = parallel(build(FAMILY))
    ids, credit = batch(N, 9)
    return {"worst": prove_ranks(Microscope(model, sketch=Sketcher(K)), losses(model, ids, credit), N)}


def losses(called: Any, ids: Tensor, credit: Tensor) -> Callable[[Tensor], None]:
    return lambda weights: (-objective(called, ids, credit * weights[:, None])).backward()


def proofs(rank: int, model: nn.Module, called: Any, **how: Any) -> Saved:
    """The proof of right rows, in full and of one half; then of rows under planted faults."""
    _, ids, credit = share(rank)
    right = losses(called, ids, credit)
    scope = Microscope(model, sketch=Sketcher(K))
    results: Saved = {"worst": prove_ranks(scope, right, 4, **how)}
    results["one half"] = prove_ranks(scope, right, 4, seed=5, **how)

    def caught(scope: Microscope = scope, backward: Callable[[Tensor], None] = right, **more: Any) -> str:
        return said(lambda: prove_ranks(scope, backward, 4, **(how | more)))

    swapped = Microscope(model, rows=torch.tensor([1, 0, 2, 3]), sketch=Sketcher(K))
    results["wrong rollout on rank 1"] = caught(swapped if rank == 1 else scope)
    results["wrong scale"] = caught(scale=1.0)
    gather = distributed._Peers.gather

    def turned(self: Any, mine: Tensor, counts: Any) -> Tensor:
        return gather(self, mine, counts).roll(4, 0)  # rank 1's rows stand in rank 0's place, and the reverse

    with mock.patch.object(distributed._Peers, "gather", turned):
        results["ranks change places"] = caught()

    real = Microscope.sketch.fget  # type: ignore[attr-defined]

    def exchanged(self: Microscope) -> Any:
        """Each rank sends the other's rows: they add up to the same gradient."""
        found = real(self)
        rows = [torch.empty_like(found.rows) for _ in range(2)]
        dist.all_gather(rows, found.rows.contiguous())
        return replace(found, rows=rows[1 - rank])

    with mock.patch.object(Microscope, "sketch", property(exchanged)):
        results["a rank sends another's rows"] = caught()

    def mixed(weights: Tensor) -> None:
        """On rank 1 the loss of a rollout runs through its neighbour too."""
        (-objective(called, ids, credit * (weights + rank * 0.5 * weights.roll(1))[:, None])).backward()

    results["losses mix on rank 1"] = caught(backward=mixed)
    results["for one process"] = said(lambda: prove(scope, right, 4))
    return results


# -- tensor parallel ---------------------------------------------------------------------------------------------------


def tp(rank: int) -> Saved:
    model = parallel(build(FAMILY))
    ids, credit = batch(N, 9)
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS))


def tp_by_features(rank: int) -> Saved:
    model = parallel(build(FAMILY), embedding=ColwiseParallel(output_layouts=Replicate()))
    ids, credit = batch(N, 9)
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS))


def tp_counted_twice(rank: int) -> Saved:
    """Every layer's Gram added over the ranks, as if all of them were cut."""
    right = shards.add_parts

    def wrong(recorder: Any) -> None:
        for name, gram in recorder.grams.items():
            if name not in recorder.blocks:
                dist.all_reduce(gram)
        right(recorder)

    model = parallel(build(FAMILY))
    ids, credit = batch(N, 9)
    with mock.patch("creditscope.microscope.scope.add_parts", wrong):
        return {"error": said(lambda: measured(model, model, ids, credit))}


def tp_refused(rank: int) -> Saved:
    model = build(FAMILY)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"model.norm": SequenceParallel(use_local_output=True)})
    ids, credit = batch(N, 8)
    return {"error": said(lambda: measured(model, model, ids, credit))}


# -- four ranks --------------------------------------------------------------------------------------------------------


def hybrid(rank: int) -> Saved:
    """Parameters cut in two, and held twice."""
    model = sharded(build(FAMILY), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts")))
    mine, ids, credit = share(rank, "four")
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS[mine]))


def fsdp_and_tp(rank: int) -> Saved:
    """Layers cut for the call and their parts cut again where they are kept."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(parallel(build(FAMILY), mesh["tp"]), mesh["dp"])
    mine, ids, credit = share(mesh["dp"].get_local_rank())
    scope = measured(model, model, ids, credit)
    return saved(scope, across(scope, GROUPS[mine], ranks=mesh["dp"].get_group())) | {
        "which ranks": said(lambda: across(scope, GROUPS[mine]))}


# -- DeepSpeed, where it is installed ----------------------------------------------------------------------------------


def zero(rank: int) -> Saved:
    """All stages, in float32: it has no float64."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    deepspeed = importlib.import_module("deepspeed")
    results: Saved = {}
    # On a CPU it would compile an operation for shared memory first, which nothing here needs.
    with mock.patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", return_value=None):
        deepspeed.init_distributed("gloo")
    for stage in range(4):
        model = build(FAMILY, torch.float32)
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage, "memory_efficient_linear": False},  # else its own autograd function
            "zero_allow_untested_optimizer": True})
        mine, ids, credit = share(rank)
        with Microscope(model, sketch=Sketcher(K)) as scope:
            engine.backward(-objective(engine, ids, credit))
        reading = across(scope, GROUPS[mine], engine=engine)
        results[str(stage)] = {"layers": scope.layers, "rows": reading.sketch.rows, "scale": reading.scale,
                               "sum for mean": said(partial(across, scope, GROUPS[mine], engine=engine, scale=1.0))}
        engine.destroy()
    return results


SCENARIOS: dict[str, list[Callable[[int], Saved]]] = {
    "two ranks": [ddp, fsdp, fsdp_uneven, fsdp_sum, fsdp_checkpointed, fsdp_accumulated, fsdp_tied, fsdp_bfloat16,
                  seeds_differ, tp, tp_by_features, tp_counted_twice, tp_refused],
    "proofs": [proof_ddp, proof_fsdp, proof_uneven, proof_by_hand, proof_tp],
    "four ranks": [hybrid, fsdp_and_tp],
    "deepspeed": [zero]}
WORLD = {"two ranks": 2, "proofs": 2, "four ranks": 4, "deepspeed": 2}

if __name__ == "__main__":
    build(FAMILY)  # transformers loads a family when it is asked for
    for which in sys.argv[2:]:
        world, folder = WORLD[which], Path(sys.argv[1]) / which
        folder.mkdir()
        processes.start_processes(main, (which, world, folder), nprocs=world, start_method="fork")
