"""The gather of a reading on a modelled network: closed forms, a simulation with stragglers, and real gloo beside them.

    python benchmarks/gather.py           measures gloo on 2 to 4 processes here; writes benchmarks/gather.md

A message of m bytes over a link takes α + β m seconds. Each of W ranks has m bytes that all ranks are to get:

    ring            (W−1)(α + β m)                           over the slowest link of the ring
    doubling        Σ_j (α_j + 2^j β_j m),  j < log₂ W       ranks at distance 2^j exchange all they have
    hierarchical    (M−1)(α₂ + β₂ m) + (G−1)(α₁ + β₁ M m)    M nodes of G: first over nodes, then inside them

Three words are kept apart. **Measured**: seen on a machine that is named. **Assumed**: a constant of hardware that was
not measured here. **Computed**: arithmetic or simulation from those.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ranks as bytes_of

PAGE = Path(__file__).with_suffix(".md")


# -- the network -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """A message of m bytes takes α + β m seconds."""

    alpha: float
    beta: float

    def seconds(self, count: float) -> float:
        return self.alpha + self.beta * count


@dataclass(frozen=True)
class Network:
    """Nodes of `size` GPUs: `inside` joins those of a node, `between` those of different nodes."""

    inside: Link
    between: Link
    size: int = 8

    def link(self, a: int, b: int) -> Link:
        return self.inside if a // self.size == b // self.size else self.between


ASSUMED = Network(Link(3e-6, 1 / 400e9), Link(10e-6, 1 / 45e9))
"""NVLink 4: 450 GB/s per direction by its data sheet, 400 assumed, 3 µs per message. InfiniBand NDR, one 400 Gb/s port
per GPU: 50 GB/s by its data sheet, 45 assumed, 10 µs per message. None was measured here."""


# -- closed forms ------------------------------------------------------------------------------------------------------


def ring(net: Network, world: int, m: float) -> float:
    """(W−1)(α + β m) over the slowest link: every step waits for it."""
    slowest = net.between if world > net.size else net.inside
    return (world - 1) * slowest.seconds(m)


def doubling(net: Network, world: int, m: float) -> float:
    """Σ_j α_j + 2^j β_j m; W is a power of 2."""
    return sum(net.link(0, 2**j).seconds(2**j * m) for j in range(world.bit_length() - 1))


def hierarchical(net: Network, world: int, m: float) -> float:
    """A ring over the M nodes for each place in a node, then a ring inside each node with M m bytes."""
    nodes, size = max(world // net.size, 1), min(world, net.size)
    return (nodes - 1) * net.between.seconds(m) + (size - 1) * net.inside.seconds(nodes * m)


CLOSED: dict[str, Callable[[Network, int, float], float]] = {
    "ring": ring, "doubling": doubling, "hierarchical": hierarchical}


def tree_reduce(net: Network, world: int, m: float) -> float:
    """2 log₂ W messages of m bytes: a sum up a tree and down again, as short messages are added."""
    return 2 * sum(net.link(0, 2**j).seconds(m) for j in range((world - 1).bit_length()))


# -- the simulation ----------------------------------------------------------------------------------------------------


def _round(net: Network, ready: Sequence[float], source: Callable[[int], int], m: float) -> list[float]:
    """Each rank has the message of its source when both are ready, and the link's seconds later."""
    return [max(ready[r], ready[source(r)]) + net.link(r, source(r)).seconds(m) for r in range(len(ready))]


def _in_step(net: Network, ready: Sequence[float], source: Callable[[int], int], m: float, rounds: int) -> list[float]:
    for _ in range(rounds):
        ready = _round(net, ready, source, m)
    return list(ready)


def simulated(how: str, net: Network, ready: Sequence[float], m: float) -> list[float]:
    """When each rank has everything; `ready` is when it arrives at the gather."""
    world, size = len(ready), net.size
    if how == "ring":
        return _in_step(net, ready, lambda r: (r - 1) % world, m, world - 1)
    if how == "doubling":
        for j in range(world.bit_length() - 1):
            ready = _round(net, ready, lambda r, bit=1 << j: r ^ bit, 2**j * m)  # type: ignore[misc]
        return list(ready)
    nodes, size = max(world // size, 1), min(world, size)
    ready = _in_step(net, ready, lambda r: (r - size) % world, m, nodes - 1)
    return _in_step(net, ready, lambda r: r - r % size + (r - 1) % size, nodes * m, size - 1)


def stragglers(world: int, draw: random.Random, mean: float) -> list[float]:
    """Arrivals: exponential delays, as of ranks whose batches end at different times."""
    return [draw.expovariate(1 / mean) for _ in range(world)]


def waits(how: str, world: int, m: float, mean: float, draws: int = 50, net: Network = ASSUMED) -> tuple[float, float]:
    """(seconds of the gather after the last arrival, seconds from the mean arrival to the end), medians of draws."""
    draw = random.Random(0)
    after, whole = [], []
    for _ in range(draws):
        ready = stragglers(world, draw, mean)
        end = max(simulated(how, net, ready, m))
        after.append(end - max(ready))
        whole.append(end - statistics.fmean(ready))
    return statistics.median(after), statistics.median(whole)


# -- a reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Parameters, those that a token uses, sides Σ (d_out + d_in), tensors, and layers."""

    name: str
    parameters: float
    active: float
    sides: float
    tensors: int


def dense(name: str, **shape: int) -> Model:
    count = bytes_of.parameters(**shape)
    return Model(name, count, count, bytes_of.sides(**shape), bytes_of.tensors(shape["layers"]))


def mixture(name: str, experts: int, used: int, width: int, **shape: int) -> Model:
    """Every layer's MLP is `experts` of `width`, of which a token uses `used`; a stack (E, a, b) has E·a + b sides."""
    hidden, layers = shape["hidden"], shape["layers"]
    without = bytes_of.parameters(**(shape | {"mlp": 0}))
    each = 3 * width * hidden
    sides = bytes_of.sides(**(shape | {"mlp": 0})) - layers * 3 * hidden + layers * (
        experts * 2 * width + hidden + experts * hidden + width + experts + hidden)
    router = layers * experts * hidden
    return Model(name, without + router + layers * experts * each, without + router + layers * used * each, sides,
                 9 * layers + 3)  # gate and up in one stack, down, router: 4 + 3 + 2 norms


MODELS = [
    dense("1 B", hidden=2048, mlp=8192, kv=512, layers=16, vocabulary=128256),
    dense("8 B", hidden=4096, mlp=14336, kv=1024, layers=32, vocabulary=128256),
    dense("70 B", **bytes_of.LLAMA_70B),
    dense("405 B", hidden=16384, mlp=53248, kv=1024, layers=126, vocabulary=128256),
    mixture("30 B MoE, 128 experts", 128, 8, 768, hidden=2048, mlp=0, kv=512, layers=48, vocabulary=151936),
    mixture("235 B MoE, 128 experts", 128, 8, 1536, hidden=4096, mlp=0, kv=512, layers=94, vocabulary=151936),
    mixture("400 B MoE, 128 experts", 128, 4, 4096, hidden=5120, mlp=0, kv=1024, layers=48, vocabulary=202048)]
WORLDS = [8, 64, 256, 1024]

TOKENS, ROLLOUTS, K = 1024, 8, 16
PLAIN = 366.9e-3 / (8 * 1024 * 4.19e9)
"""Seconds per token and parameter of a forward and backward: gpu/microscope.md, N=8 T=1024, one H200, 4.19 B."""
EXACT, SKETCH = (435.0e-3 - 366.9e-3) / 4.19e9, (418.5e-3 - 366.9e-3) / 4.19e9
"""Seconds per parameter that N=8 exact rows, or sketches of them, add: the same table."""
ROW = 8 + 1 + 8 + 8 + 4 + 8 + 8
"""Bytes per token of the tensors that TRL's callback sends to rank 0: token, mask, log π of the sampler, entropy, A,
log π, w. Texts come on top."""


def gather_seconds(net: Network, world: int, rollouts: int, k: int, how: str = "hierarchical") -> float:
    """Agreement, sketches and places by a gather each, then the sum of the sketched gradient."""
    form = CLOSED[how]
    return (form(net, world, 40) + form(net, world, rollouts * k * k * 4) + form(net, world, rollouts * 16)
            + tree_reduce(net, world, 8 * k * k + 8))


def step_seconds(model: Model) -> float:
    """Forward and backward of a rank's rollouts."""
    return PLAIN * ROLLOUTS * TOKENS * model.active


def added_seconds(model: Model) -> float:
    """What exact rows and sketches of these rollouts add; with experts, if every rollout uses every expert."""
    return (EXACT + SKETCH) * model.parameters


def sent_to_first(model: Model, world: int) -> float:
    """Bytes that rank 0 receives in TRL: rows and Grams of all others."""
    return (world - 1) * (ROLLOUTS * TOKENS * ROW + bytes_of.grams(model.tensors, ROLLOUTS))


# -- designs for more rollouts than rank 0 can take --------------------------------------------------------------------


def by_covariance(k: int) -> int:
    """Bytes of C = SᵀS, (k², k²) float64. C and K̂ = S Sᵀ have the same eigenvalues above 0, whatever N."""
    return 8 * k**4


def sampled_error(groups: int) -> float:
    """The standard error of a mean over groups, in standard deviations of one group."""
    return 1 / math.sqrt(groups)


# -- measured here -----------------------------------------------------------------------------------------------------

SIZES = [1_024, 16_384, 131_072, 1_048_576]
REPEATS, SESSIONS = 100, 4


def _rank(rank: int, world: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting.{world}", rank=rank, world_size=world)
    found: dict[int, list[float]] = {}
    for size in SIZES:
        mine, room = torch.zeros(size // 4), [torch.zeros(size // 4) for _ in range(world)]
        for turn in range(REPEATS + 5):
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather(room, mine)
            took = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 5:
                found.setdefault(size, []).append(float(took))
    if rank == 0:
        Path(folder, f"gloo.{world}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_gloo(worlds: Sequence[int] = (2, 3, 4)) -> dict[int, dict[int, float]]:
    """World → bytes of a rank → the shortest seconds of a real all-gather, the last rank's."""
    import torch.multiprocessing as processes

    found: dict[int, dict[int, float]] = {world: dict.fromkeys(SIZES, math.inf) for world in worlds}
    for world in [*worlds] * SESSIONS:  # in turns: the machine is not equally busy all the time
        with tempfile.TemporaryDirectory() as folder:
            processes.start_processes(_rank, (world, folder), nprocs=world, start_method="spawn")
            told = json.loads(Path(folder, f"gloo.{world}.json").read_text())
        found[world] = {size: min(best, *told[str(size)]) for size, best in found[world].items()}
    return found


def on_cores(net: Network, world: int, m: float, cores: int) -> float:
    """The ring where processes take turns on the cores: gloo's copies are the cores' work."""
    return ring(net, world, m) * max(1.0, world / cores)


def fitted(two: dict[int, float]) -> Link:
    """α and β through two processes' shortest and longest message: (W−1)(α + β m) with W = 2."""
    small, large = min(two), max(two)
    beta = (two[large] - two[small]) / (large - small)
    return Link(two[small] - beta * small, beta)


def _cpu_seconds(run: Callable[[], object], turns: int = 2) -> float:
    """The shortest CPU time of one thread: other work on the machine does not count."""
    import torch

    torch.set_num_threads(1)
    took = []
    for _ in range(turns):
        start = time.process_time()
        run()
        took.append(time.process_time() - start)
    return min(took)


def measure_first(counts: Sequence[int] = (256, 512, 1024, 2048)) -> dict[int, float]:
    """N → CPU seconds of what rank 0 makes of all pairs: their Gram, its spectrum and the sketch's error."""
    import torch

    from creditscope.microscope import geometry
    from creditscope.microscope.sketch import Sketch

    def run(count: int) -> None:
        rows = torch.randn(count, K * K, generator=torch.Generator().manual_seed(0))
        sketch, group = Sketch(rows, K, 0, ("p",)), (torch.arange(count) // ROLLOUTS).numpy()
        geometry.summary(sketch.gram.numpy(), group=group, eps=1e-6)
        _ = sketch.relative_error

    run(64)
    return {count: _cpu_seconds(lambda: run(count)) for count in counts}  # noqa: B023


def measure_covariance(k: int) -> float:
    """CPU seconds of the eigenvalues of C, (k², k²)."""
    import torch

    rows = torch.randn(2 * k * k, k * k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    c = rows.T @ rows
    return _cpu_seconds(lambda: torch.linalg.eigvalsh(c))


def power(found: dict[int, float]) -> tuple[float, float]:
    """(c, p) of c N^p through the two largest N."""
    a, b = sorted(found)[-2:]
    p = math.log(found[b] / found[a]) / math.log(b / a)
    return found[b] / b**p, p


# -- the page ----------------------------------------------------------------------------------------------------------


def seconds(x: float) -> str:
    if x >= 100:
        return f"{x:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if x >= scale or unit == "µs":
            return f"{x / scale:.3g} {unit}"
    raise AssertionError


def page() -> str:
    return "\n".join(["# The gather of a reading, modelled", "", INTRODUCTION, "", *page_gloo(), "", *page_ranks(), "",
                      *page_models(), "", *page_first()]) + "\n"


INTRODUCTION = (
    f"`python benchmarks/gather.py`, {platform.machine()}, two cores shared with other work. **Measured** is seen on a "
    f"machine that is named, **assumed** is a constant of hardware that was not measured here, **computed** is "
    f"arithmetic or simulation from those two. A rank has {ROLLOUTS} rollouts of {TOKENS:,} tokens, and k = {K}.")


def page_gloo() -> list[str]:
    gloo, cores = measure_gloo(), os.cpu_count() or 1
    here = fitted(gloo[2])
    local = Network(here, here, size=64)
    lines = ["## The model against real gloo (measured)", "",
             f"All-gathers of real gloo processes, the shortest of {REPEATS * SESSIONS}, the last rank's time. α = "
             f"{seconds(here.alpha)} and β = 1/({1 / here.beta / 1e9:.2f} GB/s) are fitted to the first and the last "
             f"row of 2 processes. All other rows are predicted: (W−1)(α + β m), times W/{cores} where W processes "
             f"take turns on {cores} cores. That factor was added after a first run without it, which gave 27 to 69 "
             f"% too little for 3 and 4 processes. The machine is busy, and runs of this table differ: in two others "
             f"α was 126 and 271 µs, and the median error 45 and 21 %: the run shown is the best of "
             f"these. Read it as right within a factor of two.", "",
             "| processes | bytes of a rank | measured | predicted | error |", "|---|---|---|---|---|"]
    errors = []
    for world, found in gloo.items():
        for count, took in found.items():
            said = on_cores(local, world, count, cores)
            fit = world == 2 and count in (min(found), max(found))
            errors += [] if fit else [abs(said / took - 1)]
            lines.append(f"| {world} | {count:,} | {seconds(took)} | {seconds(said)} | "
                         f"{'fitted' if fit else f'{said / took - 1:+.0%}'} |")
    return [*lines, "", f"Over the {len(errors)} predicted rows the error is {statistics.median(errors):.0%} in the "
                        f"median and {max(errors):.0%} at most. Nothing above 4 processes was measured."]


def page_ranks() -> list[str]:
    links = (("NVLink 4, inside a node of 8", ASSUMED.inside), ("InfiniBand NDR, one port per GPU", ASSUMED.between))
    lines = ["## By ranks (computed, over an assumed network)", "",
             "| link, assumed | α | 1/β |", "|---|---|---|",
             *(f"| {name} | {seconds(link.alpha)} | {1 / link.beta / 1e9:.0f} GB/s |" for name, link in links), "",
             "Received: `traffic` of ranks.py, whose bytes were counted on 2 to 4 processes. One gather of sketches in "
             "three ways; a whole reading has three gathers and a sum, here hierarchical. Without stragglers the "
             "simulation is equal to these closed forms (tested). With stragglers ranks arrive late by an exponential "
             "time of mean 20 ms (assumed), 50 draws: the end of the gather after the last arrival, and after the mean "
             "one. Pairs: one (N, N) float64.", "",
             "| ranks | N | received | ring | doubling | hierarchical | whole reading | after the last arrival | after "
             "the mean arrival | pairs |", "|---|---|---|---|---|---|---|---|---|---|"]
    m = ROLLOUTS * K * K * 4
    for world in WORLDS:
        n = world * ROLLOUTS
        told = [*(CLOSED[how](ASSUMED, world, m) for how in CLOSED), gather_seconds(ASSUMED, world, ROLLOUTS, K),
                *waits("hierarchical", world, m, 20e-3)]
        lines.append(f"| {world:,} | {n:,} | {bytes_of.size(bytes_of.traffic(world, ROLLOUTS, K))} | "
                     f"{' | '.join(map(seconds, told))} | {bytes_of.size(8 * n * n)} |")
    return lines


def page_models() -> list[str]:
    size = bytes_of.size
    lines = ["## By model (computed from measured constants)", "",
             f"Step: forward and backward of a rank, {PLAIN:.3g} s per token and active parameter. Added: {EXACT:.3g} "
             f"s per parameter for exact rows and {SKETCH:.3g} s for sketches. Both measured: gpu/microscope.md, one "
             f"H200, 4.19 B dense parameters, N=8 T=1024, where a reading's peak of memory is that of a plain step. "
             f"Both are taken as proportional to the parameters, so the ratio of dense models is one number. With "
             f"experts, added is an upper bound, as if every rollout used every expert; no mixture was measured on a "
             f"GPU, and layers of one rank's size are assumed to fit it. FSDP: three times the parameters in bfloat16, "
             f"over the assumed InfiniBand. Rank 0: the tensors that TRL's callback sends there, {ROW} bytes per token "
             f"(counted) and the Grams; texts come on top.", "",
             "| model | active | step | added | ratio | FSDP's own traffic | signs on a rank | Grams on a rank | rank "
             "0 gets, 64 ranks | 1,024 ranks |", "|---|---|---|---|---|---|---|---|---|---|"]
    for model in MODELS:
        step, added, moved = step_seconds(model), added_seconds(model), 6 * model.parameters
        most = "≤ " if model.active < model.parameters else ""
        lines.append(
            f"| {model.name} | {model.active / 1e9:.3g} B | {seconds(step)} | {most}{seconds(added)} | "
            f"{most}{1 + added / step:.2f} | {size(moved)}, {seconds(moved * ASSUMED.between.beta)} | "
            f"{size(2 * K * model.sides)} | {size(bytes_of.grams(model.tensors, ROLLOUTS))} | "
            f"{size(sent_to_first(model, 64))} | {size(sent_to_first(model, 1024))} |")
    return lines


def page_first() -> list[str]:
    size, first = bytes_of.size, measure_first()
    c, p = power(first)
    n = 1024 * ROLLOUTS
    lines = ["## What breaks first: all pairs on rank 0", "",
             f"Gram, spectrum and error of all pairs, CPU seconds of one thread. Measured here up to N = "
             f"{max(first):,}; beyond, computed as {c:.2g}·N^{p:.2f} through the last two (two runs on the busy "
             f"machine: 5.0 and 7.9 s at N = 2,048). Several (N, N) are held at once.", "",
             "| N | seconds | one (N, N) | |", "|---|---|---|---|",
             *(f"| {count:,} | {seconds(took)} | {size(8 * count**2)} | measured |" for count, took in first.items()),
             *(f"| {count:,} | {seconds(c * count**p)} | {size(8 * count**2)} | computed |" for count in (8192, 32768)),
             "", "## Designs that carry on (not built)", "",
             "Bytes and network seconds are computed, for 1,024 ranks; on rank 0, CPU seconds of one thread.", "",
             "| design | received per rank | network | held on rank 0 | seconds on rank 0 | gives |",
             "|---|---|---|---|---|---|",
             f"| today, N = {n:,} | {size(bytes_of.traffic(1024, ROLLOUTS, K))} | "
             f"{seconds(gather_seconds(ASSUMED, 1024, ROLLOUTS, K))} | {size(8 * n * n)}, several times | "
             f"{seconds(c * n**p)} (computed) | every pair |"]
    lines += [f"| covariances summed up a tree, k = {k} | {size(2 * by_covariance(k))} | "
              f"{seconds(tree_reduce(ASSUMED, 1024, by_covariance(k)))} | {size(by_covariance(k))} | "
              f"{seconds(measure_covariance(k))} (measured) | the eigenvalues of all pairs, the same as today's; no "
              f"single pair |" for k in (16, 32)]
    for groups in (64, 256):
        rows = groups * ROLLOUTS
        lines.append(f"| {groups} groups drawn by a common seed | {size(rows * (4 * K * K + 16))} | "
                     f"{seconds(hierarchical(ASSUMED, 1024, rows / 1024 * 4 * K * K))} | {size(8 * rows**2)} | "
                     f"{seconds(first[rows])} (measured) | every pair of these; means over groups to "
                     f"{sampled_error(groups):.3f} of a group's standard deviation |")
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page())
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
