"""Bytes that one reading across ranks sends and holds: counted on processes here, computed for large runs.

    python benchmarks/ranks.py        2, 3 and 4 gloo processes, FSDP2, the packaged model; writes benchmarks/ranks.md

Bytes are counted from the tensors that go into torch.distributed's collectives during `across`, and the seconds of
`across` are set against those of the step's forward and backward, side by side. The table for large runs is arithmetic
from the same formulas, for a Llama of 70 billion parameters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from creditscope.microscope.distributed import across
from creditscope.microscope.scope import Microscope
from creditscope.microscope.sketch import Sketcher

PAGE = Path(__file__).with_suffix(".md")
MEASURED = [(2, 4, 16), (2, 16, 16), (2, 16, 32), (3, 8, 16), (4, 8, 16), (4, 8, 32)]
"""(ranks, rollouts on each, k)."""
COMPUTED = [(8, 16, 16), (64, 8, 32), (256, 8, 32), (1024, 8, 32), (1024, 8, 64)]
LLAMA_70B = {"hidden": 8192, "mlp": 28672, "kv": 1024, "layers": 80, "vocabulary": 128256}
SHORT, REPEATS = 64, 5


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def sides(hidden: int, mlp: int, kv: int, layers: int, vocabulary: int) -> int:
    """Σ (d_out + d_in) over the parameters of a Llama: one row of k signs for each."""
    attention = 2 * (hidden + hidden) + 2 * (kv + hidden)
    block = attention + 3 * (mlp + hidden) + 2 * 2 * hidden
    return layers * block + 2 * (vocabulary + hidden) + 2 * hidden


def parameters(hidden: int, mlp: int, kv: int, layers: int, vocabulary: int) -> int:
    block = 2 * hidden * hidden + 2 * kv * hidden + 3 * mlp * hidden + 2 * hidden
    return layers * block + 2 * vocabulary * hidden + hidden


def tensors(layers: int) -> int:
    """Parameters that have a Gram of their own."""
    return 9 * layers + 3


def grams(layers: int, rollouts: int) -> int:
    """Bytes of a micro-batch's exact Grams: L tensors of (n, n) float64."""
    return 8 * layers * rollouts**2


def traffic(world: int, rollouts: int, k: int, itemsize: int = 4) -> int:
    """Bytes that one rank receives in `across`, with n rollouts on each of W ranks and sketches of b-byte numbers:

        (W−1)·(n·(k²·b + 16) + 40) + 2·(W−1)/W·(8·k² + 8)

    Sketches, group and micro-batch of each rollout, and what the ranks must agree on; then the sum over ranks of the
    sketched gradient and a count, by a ring.
    """
    return (world - 1) * (rollouts * (k * k * itemsize + 16) + 40) + 2 * (world - 1) * (8 * k * k + 8) // world


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, world: int, rollouts: int, k: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    from creditscope.policy.loading import load_policy

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world)
    model: Any = load_policy("tiny", device="cpu").model
    fully_shard(model)
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, model.config.vocab_size, (rollouts, SHORT), generator=draw)
    weight = torch.randn(rollouts, SHORT, generator=draw)
    group = torch.arange(rollouts) // 4 + rank * rollouts
    sketcher, seconds, received = Sketcher(k), [], [0]
    for _ in range(REPEATS):
        model.zero_grad()
        start = time.perf_counter()
        with Microscope(model, sketch=sketcher) as scope:
            (model(input_ids=ids, use_cache=False).logits.logsumexp(-1) * weight).sum().backward()
        middle = time.perf_counter()
        received[0] = 0
        with mock.patch.object(dist, "all_gather", _gather(received)), \
                mock.patch.object(dist, "all_reduce", _reduce(received, world)):
            reading = across(scope, group)
        seconds.append((middle - start, time.perf_counter() - middle))
    held = {"sketch": reading.sketch.rows.numel() * reading.sketch.rows.element_size(),
            "grams": sum(g.numel() * g.element_size() for g in scope.layers.values()), "layers": len(scope.layers),
            "error": reading.check.error, "received": received[0], "seconds": seconds}
    (folder / f"rank.{rank}.json").write_text(json.dumps(held))
    dist.destroy_process_group()


def _gather(received: list[int]) -> Any:
    real = dist.all_gather

    def all_gather(found: list[Tensor], x: Tensor, **kwargs: Any) -> Any:
        received[0] += (len(found) - 1) * x.numel() * x.element_size()
        return real(found, x, **kwargs)

    return all_gather


def _reduce(received: list[int], world: int) -> Any:
    real = dist.all_reduce

    def all_reduce(x: Tensor, **kwargs: Any) -> Any:
        received[0] += 2 * (world - 1) * x.numel() * x.element_size() // world  # a ring's
        return real(x, **kwargs)

    return all_reduce


# -- all of them -------------------------------------------------------------------------------------------------------


def measure(world: int, rollouts: int, k: int) -> dict[str, Any]:
    """Rank 0's numbers; an error where one rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = [subprocess.Popen([sys.executable, __file__, "--rank", str(rank), "--world", str(world), "--rollouts",
                                     str(rollouts), "--k", str(k), "--folder", folder]) for rank in range(world)]
        try:
            codes = [one.wait(timeout=300) for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found: dict[str, Any] = json.loads((Path(folder) / "rank.0.json").read_text())
        return found


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def page() -> str:
    lines = ["# A reading across ranks: what it sends and holds", "",
             f"`python benchmarks/ranks.py`, torch {torch.__version__}. FSDP2 on gloo processes of one machine, the "
             f"packaged model in float32, {SHORT} tokens a rollout. Bytes are those that one rank receives in "
             f"`across`: counted from the tensors, and by the formula `traffic`. Share: seconds of `across` over "
             f"seconds of forward and backward with the microscope open, median of {REPEATS} pairs. They all share "
             f"two cores with other work, so the share is no more than an order of magnitude.", "",
             "| ranks | rollouts on each | k | counted | formula | exact Grams held | formula | self-check | share |",
             "|---|---|---|---|---|---|---|---|---|"]
    for world, rollouts, k in MEASURED:
        got = measure(world, rollouts, k)
        said, held = traffic(world, rollouts, k), grams(got["layers"], rollouts)
        if (said, held) != (got["received"], got["grams"]):
            raise SystemExit(f"the arithmetic is off: {said} bytes for {got['received']}, {held} for {got['grams']}")
        share = sorted(b / a for a, b in got["seconds"])[REPEATS // 2]
        lines.append(f"| {world} | {rollouts} | {k} | {got['received']:,} B | {said:,} B | {got['grams']:,} B | "
                     f"{held:,} B | {got['error']:.1e} | {share:.2f} |")
    shape = LLAMA_70B
    layers = tensors(shape["layers"])
    lines += ["", f"## By arithmetic: a Llama of {parameters(**shape) / 1e9:.1f} billion parameters, bfloat16", "",
              f"{layers} parameter tensors, Σ (d_out + d_in) = {sides(**shape):,}. Beside each rank's traffic stands "
              f"what FSDP moves in the same step, two gathers of the parameters and one scatter of gradients in "
              f"bfloat16.", "",
              "| ranks | rollouts on each | k | N | received for a reading | FSDP's step | all sketches | "
              "all-pairs Gram | exact Grams of a rank | signs |",
              "|---|---|---|---|---|---|---|---|---|---|"]
    for world, rollouts, k in COMPUTED:
        n = world * rollouts
        step = 3 * 2 * parameters(**shape) * (world - 1) / world
        lines.append(f"| {world:,} | {rollouts} | {k} | {n:,} | {size(traffic(world, rollouts, k))} | {size(step)} | "
                     f"{size(4 * n * k * k)} | {size(8 * n * n)} | {size(grams(layers, rollouts))} | "
                     f"{size(2 * k * sides(**shape))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rank", "world", "rollouts", "k"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.world, given.rollouts, given.k, given.folder)
    else:
        PAGE.write_text(page())
        print(PAGE.read_text())


if __name__ == "__main__":
    main()
