"""What the microscope costs: beside a plain forward and backward, and beside other ways to per-rollout gradients.

    python benchmarks/microscope.py --peers PYTHON     writes benchmarks/microscope.md and figures/microscope_*.svg
    python benchmarks/microscope.py --quick            a small version, printed only, in less than a minute

One step is zero_grad, forward, Σ w_it log π(y_it), backward, and the N × N Gram of the rollouts' gradients, read. Every
candidate also leaves the step's own gradient. Candidates take turns inside a process, and a ratio is to the plain step
of the same round. The model is written out below, so that all of them run the identical one; our rows are measured on
transformers' LlamaForCausalLM too. Opacus and BackPACK live in an environment of their own: BackPACK asks for
torchvision, which breaks `import transformers` on the CPU wheel. To make it, torch first and alone:

    python3 -m venv peers
    peers/bin/pip install torch==2.13.0 numpy
    peers/bin/pip install --no-deps opacus==1.6.0 backpack-for-pytorch==1.7.1 opt-einsum einops unfoldNd packaging scipy
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
SKETCH = 16
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
CPU = [torch.profiler.ProfilerActivity.CPU]
# Large blocks come from the system and go back to it at once, so that resident memory follows what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


# -- the model that all candidates share -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A Llama-like model and its batch. The default has 5.34 M parameters."""

    layers: int = 6
    hidden: int = 256
    vocab: int = 1024
    n: int = 16
    t: int = 64

    @property
    def heads(self) -> int:
        return self.hidden // 32

    @property
    def mlp(self) -> int:
        return self.hidden * 11 // 4


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, m = shape.hidden, shape.mlp
        self.heads = shape.heads
        self.norm, self.mlp_norm = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, m, bias=False), nn.Linear(d, m, bias=False)
        self.down = nn.Linear(m, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (z * cos + torch.cat((-z.chunk(2, -1)[1], z.chunk(2, -1)[0]), -1) * sin for z in (q, k))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Rotary attention, RMS norms, SwiGLU, untied head: ids (N, T) → log-odds (N, T, vocab)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden, eps=1e-6), nn.Linear(shape.hidden, shape.vocab, bias=False)
        angle = torch.arange(1024)[:, None] * 10000.0 ** -(torch.arange(16) / 16)
        self._turn = torch.cat((angle, angle), -1)  # no buffer: Opacus refuses those
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        turn = self._turn[: ids.shape[1]].to(x.dtype)
        cos, sin = turn.cos(), turn.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def hugging(shape: Shape) -> nn.Module:
    """The same shape as transformers builds it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads, intermediate_size=shape.mlp, vocab_size=shape.vocab,
        tie_word_embeddings=False, max_position_embeddings=1024, use_cache=False))


@dataclass(frozen=True)
class Problem:
    """A model with seeded weights and a batch: each position's token is chosen with credit w."""

    model: nn.Module
    ids: Tensor
    w: Tensor

    def loss(self, some: slice = slice(None), model: Callable[[Tensor], Any] | None = None) -> Tensor:
        """Σ w_it log π(y_it) over some rollouts."""
        out = (self.model if model is None else model)(self.ids[some, :-1])
        logits = out if isinstance(out, Tensor) else out.logits
        return (logits.log_softmax(-1).gather(-1, self.ids[some, 1:, None]).squeeze(-1) * self.w[some]).sum()


def problem(shape: Shape, transformers: bool = False) -> Problem:
    torch.manual_seed(0)
    model = hugging(shape) if transformers else Llama(shape)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab, (shape.n, shape.t + 1), generator=draw)
    # One advantage a rollout, bent a little from token to token.
    w = torch.randn(shape.n, 1, generator=draw) + 0.3 * torch.randn(shape.n, shape.t, generator=draw)
    return Problem(model, ids, w / shape.t)


def truth(p: Problem) -> dict[str, Tensor]:
    """The Gram of each parameter, from one backward for each rollout in float64."""
    model = p.model.double()
    twin = Problem(model, p.ids, p.w.double())
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(p.ids)):
        model.zero_grad(set_to_none=True)
        twin.loss(slice(i, i + 1)).backward()
        for name, q in model.named_parameters():
            assert q.grad is not None
            rows[name].append(q.grad.flatten())
    return {name: torch.stack(r) @ torch.stack(r).T for name, r in rows.items()}


# -- the candidates: each builds a step, and the step returns the Gram -----------------------------------------------

Step = Callable[[], Tensor | None]


def gram_of(rows: Iterable[Tensor]) -> Tensor:
    """Σ over parameters of G Gᵀ for stored rows G (N, ...), in their own precision."""
    return sum((g.flatten(1) @ g.flatten(1).T).double() for g in rows)  # type: ignore[return-value]


def plain(p: Problem) -> Step:
    def step() -> None:
        p.model.zero_grad(set_to_none=True)
        p.loss().backward()

    return step


def ours(exact: bool, sketch: int | None) -> Callable[[Problem], Step]:
    def build(p: Problem) -> Step:
        from creditscope.microscope.scope import Microscope

        def step() -> Tensor:
            p.model.zero_grad(set_to_none=True)
            with Microscope(p.model, exact=exact, sketch=sketch) as scope:
                p.loss().backward()
            return scope.gram if exact else scope.sketch.gram

        return step

    return build


def loop(p: Problem) -> Step:
    def step() -> Tensor:
        rows = [q.new_empty(len(p.ids), q.numel()) for q in p.model.parameters()]
        for i in range(len(p.ids)):
            p.model.zero_grad(set_to_none=True)
            p.loss(slice(i, i + 1)).backward()
            for row, q in zip(rows, p.model.parameters(), strict=True):
                row[i] = q.grad.flatten()  # type: ignore[union-attr]
        for row, q in zip(rows, p.model.parameters(), strict=True):
            q.grad = row.sum(0).view_as(q)
        return gram_of(rows)

    return step


def vmapped(p: Problem) -> Step:
    from torch.func import functional_call, grad, vmap

    def one(parameters: dict[str, Tensor], ids: Tensor, w: Tensor) -> Tensor:
        return Problem(p.model, ids[None], w[None]).loss(model=lambda x: functional_call(p.model, parameters, (x,)))

    each = vmap(grad(one), in_dims=(None, 0, 0))

    def step() -> Tensor:
        p.model.zero_grad(set_to_none=True)
        # torch's attention kernel for the CPU has no rule under vmap; the plain formula has one.
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            found = each({name: q.detach() for name, q in p.model.named_parameters()}, p.ids, p.w)
        for name, q in p.model.named_parameters():
            q.grad = found[name].sum(0)
        return gram_of(found.values())

    return step


def opacus(p: Problem) -> Step:
    from opacus import GradSampleModule

    sampled = GradSampleModule(p.model, loss_reduction="sum")

    def step() -> Tensor:
        sampled.zero_grad(set_to_none=True)  # drops the stored rows too
        p.loss(model=sampled).backward()
        return gram_of(q.grad_sample for q in p.model.parameters())

    return step


def backpack(p: Problem) -> Step:
    from backpack import backpack as collecting
    from backpack import extend
    from backpack.extensions import BatchGrad

    layers = [extend(m) for m in p.model.modules() if isinstance(m, nn.Linear | nn.Embedding)]

    def step() -> Tensor:
        p.model.zero_grad(set_to_none=True)
        for layer in layers:
            layer.weight.__dict__.pop("grad_batch", None)
        with collecting(BatchGrad()):
            p.loss().backward()
        return gram_of(layer.weight.grad_batch for layer in layers)

    return step


@dataclass(frozen=True)
class Candidate:
    title: str
    build: Callable[[Problem], Step]
    gives: str
    matrices: bool = False
    """Whether only parameters with two axes are covered; then the Gram is compared on those."""


CANDIDATES = {
    "plain": Candidate("plain forward and backward", plain, "the gradient"),
    "exact": Candidate("**Microscope**, exact", ours(True, None), "every parameter, each its own Gram, self-checked"),
    "both": Candidate(f"**Microscope**, exact and sketch {SKETCH}×{SKETCH}", ours(True, SKETCH), "both"),
    "sketch": Candidate(f"**Microscope**, sketch {SKETCH}×{SKETCH} alone", ours(False, SKETCH),
                        "an estimate of the total, every parameter"),
    "loop": Candidate("loop of N backwards, N×P stored", loop, "every parameter"),
    "vmap": Candidate("torch.func vmap(grad), N×P stored", vmapped, "every parameter"),
    "opacus": Candidate("Opacus GradSampleModule, N×P stored", opacus, "every parameter"),
    "backpack": Candidate("BackPACK BatchGrad, N×P stored", backpack, "Linear and Embedding only", matrices=True),
}
MINE, OTHERS, PEERS = ("plain", "exact", "both", "sketch"), ("loop", "vmap"), ("opacus", "backpack")


# -- measurements, each in a process of its own ----------------------------------------------------------------------


def take_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round. The order turns from round to round: no one always follows another."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for r in range(rounds):
        for name in names[r % len(names):] + names[: r % len(names)]:
            gc.collect()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(q, 4) for q in statistics.quantiles(values, n=4, method="inclusive")]


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """[lower quartile, median, upper quartile] of the ratio to the plain step of the same round."""
    return {name: quartiles([a / b for a, b in zip(s, seconds["plain"], strict=True)]) for name, s in seconds.items()}


def time_worker(shape: Shape, names: Sequence[str], rounds: int, transformers: bool) -> dict[str, Any]:
    exact = truth(problem(shape, transformers))
    whole = sum(exact.values())
    matrices = sum(k for name, k in exact.items() if "norm" not in name)
    steps, errors = {}, {}
    for name in names:
        steps[name] = CANDIDATES[name].build(problem(shape, transformers))
        found, want = steps[name](), matrices if CANDIDATES[name].matrices else whole
        errors[name] = None if found is None else float((found - want).norm() / want.norm())
    seconds = take_turns(steps, rounds)
    return {"ratio": ratios(seconds), "plain": statistics.median(seconds["plain"]), "error": errors}


def memory_worker(name: str, shapes: Sequence[Shape], transformers: bool) -> dict[str, Any]:
    """Peak bytes over what lies there before a step: as torch's allocator counts them, and as resident memory."""
    result = {}
    for shape in shapes:
        p = problem(shape, transformers)
        step = CANDIDATES[name].build(p)
        step()
        _drop(p.model)
        before, peaks = _resident("VmRSS"), []
        for _ in range(2):
            _drop(p.model)
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            step()
            peaks.append(_resident("VmHWM"))
        _drop(p.model)
        with torch.profiler.profile(activities=CPU, profile_memory=True) as prof:
            step()
        events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        result[str(shape.t)] = {"allocator": peak, "resident": max(peaks) - before}
        del step, p
        gc.collect()
    return result


def _drop(model: nn.Module) -> None:
    """Forget what the last step left: gradients, and rows stored beside them."""
    for q in model.parameters():
        q.grad = None
        q.__dict__.pop("grad_batch", None)
        if hasattr(q, "grad_sample"):
            q.grad_sample = None
    gc.collect()


def _resident(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def weights_of(shape: Shape) -> int:
    """Parameters of the linear layers: those whose rows are made and multiplied."""
    return shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.mlp) + shape.hidden * shape.vocab


def scaling_worker(shapes: Sequence[Shape], budget: float, rounds: tuple[int, int]) -> dict[str, Any]:
    """Ours, exact, at each shape, for `budget` seconds each, and the skinny product's own rate at the first."""
    points = []
    for shape in shapes:
        steps = {name: CANDIDATES[name].build(problem(shape)) for name in ("plain", "exact")}
        start = time.perf_counter()
        take_turns(steps, 0)
        once = time.perf_counter() - start
        seconds = take_turns(steps, max(rounds[0], min(rounds[1], int(budget / once))))
        points.append({"shape": asdict(shape), "ratio": ratios(seconds)["exact"],
                       "plain": statistics.median(seconds["plain"])})
    n = shapes[0].n
    rows = torch.randn(n, (8 << 20) // (4 * n))  # a block of per-rollout gradients as `gram.materialise` holds it
    took = take_turns({"plain": lambda: torch.mm(rows, rows.t())}, 40)["plain"]
    return {"points": points, "skinny": statistics.median(took) / (n * rows.numel())}


def profile_worker(shapes: Sequence[Shape], rounds: int) -> dict[str, Any]:
    """Self time of every operator in a step, in milliseconds, by what it does: plain, exact and sketch."""
    result: dict[str, Any] = {}
    for shape in shapes:
        for name in ("plain", "exact", "sketch"):
            step = CANDIDATES[name].build(problem(shape))
            for _ in range(2):
                step()
            runs = []
            for _ in range(rounds):
                table = dict.fromkeys(PARTS, 0.0)
                with torch.profiler.profile(activities=CPU, record_shapes=True) as prof:
                    start = time.perf_counter()
                    step()
                    wall = 1e3 * (time.perf_counter() - start)
                for row in prof.key_averages(group_by_input_shape=True):
                    table[part(row.key, row.input_shapes, shape)] += row.self_cpu_time_total / 1e3
                table[PARTS[-1]] += wall - sum(table.values())
                runs.append(table)
            result[f"{shape.t} {name}"] = {key: statistics.median(run[key] for run in runs) for key in PARTS}
        build = []
        from creditscope.microscope.scope import Microscope

        model = problem(shape).model
        for _ in range(rounds):
            start = time.perf_counter()
            Microscope(model)
            build.append(1e3 * (time.perf_counter() - start))
        result[f"{shape.t} build"] = statistics.median(build)
    return result


PARTS = ("mm: outputs, gradients of inputs, plain weight gradients", "bmm: per-rollout gradients of weights",
         "their products, N × N", "their sum over rollouts", "norms of the self-check", "projections of the sketch",
         "look-up: index, unique, index_add", "copies, fills, casts", "attention, softmax, activations, norms",
         "Python, hooks, waiting")


def part(op: str, shapes: Any, shape: Shape) -> str:
    """Which line of the profile an operator belongs to; the shared model itself has no bmm."""
    first, second = (list(shapes[i]) if len(shapes) > i else [] for i in (0, 1))
    if op in ("aten::mm", "aten::addmm"):
        if first[:1] == [1]:
            return PARTS[3]
        if first[0] <= shape.n and second[1] <= shape.n and first[1] > second[1]:
            return PARTS[2]
        return PARTS[5] if second[1:] == [SKETCH] else PARTS[0]
    if op in ("aten::bmm", "aten::baddbmm"):
        # Per-rollout gradients are N matrices with T inside; products of rows are small matrices, many inside.
        if op == "aten::baddbmm" or second[2:] == [SKETCH] == first[2:]:
            return PARTS[5]
        return PARTS[1] if first[0] == shape.n and first[2] == shape.t else PARTS[2]
    if op == "aten::sum" and len(first) >= 2 and first[0] == shape.n and shape.t not in first[1:2]:
        return PARTS[3]
    words = {PARTS[4]: ("vector_norm",), PARTS[6]: ("index", "unique", "embedding", "gather", "scatter", "sort"),
             PARTS[7]: ("copy", "clone", "fill", "zero", "empty", "resize"),
             PARTS[-1]: ("Backward", "_Linear", "_Spread")}
    return next((line for line, some in words.items() if op.startswith(("aten", "_")) and any(w in op for w in some)),
                PARTS[-1] if op.startswith("autograd::") else PARTS[8])


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "time": time_worker, "memory": memory_worker, "scaling": scaling_worker, "profile": profile_worker}


def ask(kind: str, python: str = sys.executable, **job: Any) -> dict[str, Any]:
    """What a fresh process measures."""
    plainly = {key: [asdict(s) if isinstance(s, Shape) else s for s in v] if isinstance(v, list | tuple) else
               asdict(v) if isinstance(v, Shape) else v for key, v in job.items()}
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    if kind == "memory":
        environment |= {**MALLOC, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, __file__, "--worker", kind, json.dumps(plainly)], capture_output=True, text=True,
                          check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{kind} {plainly} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def answer(kind: str, job: dict[str, Any]) -> None:
    if kind != "memory":
        torch.set_num_threads(THREADS)
    if "shape" in job:
        job["shape"] = Shape(**job["shape"])
    if "shapes" in job:
        job["shapes"] = [Shape(**s) for s in job["shapes"]]
    print(json.dumps(WORKERS[kind](**job)))


# -- the page --------------------------------------------------------------------------------------------------------


def model_line(measured: dict[str, Any]) -> Callable[[Shape], float]:
    """ratio(N, T) = 1 + (α N + β)/(γ T), from ONE point and the skinny product's own rate.

    Plain costs γ·N·T·P. Ours adds N²·P products at the rate of a skinny matrix product alone (α) and the traffic of N·P
    numbers, written and read again (β): β is what is left of the measured difference at that point.
    """
    at = measured["points"][0]
    shape = Shape(**at["shape"])
    size = weights_of(shape)
    gamma = at["plain"] / (shape.n * shape.t * size)
    alpha = measured["skinny"]
    beta = at["plain"] * (at["ratio"][1] - 1) / (shape.n * size) - alpha * shape.n
    return lambda s: 1 + (alpha * s.n + beta) / (gamma * s.t)


def figure(title: str, xs: Sequence[float], measured: Sequence[Sequence[float]], line: Sequence[float]) -> str:
    """Points with their quartiles, and the predicted line; x is logarithmic."""
    from math import log2

    width, height, left, top, low = 420, 260, 48, 34, 216
    ceiling = max(1.1, *(m[2] for m in measured), *line) * 1.02
    floor = min(1.0, *(m[0] for m in measured))

    def across(x: float) -> float:
        return left + 20 + (width - left - 50) * (log2(x) - log2(xs[0])) / (log2(xs[-1]) - log2(xs[0]))

    def up(y: float) -> float:
        return low - (low - top) * (y - floor) / (ceiling - floor)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
           f'font-size="11" role="img" aria-label="{escape(title)}">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>',
           f'<text x="{left}" y="18" font-size="12" fill="#222">{escape(title)}</text>']
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2) if (ceiling - floor) / s <= 7)
    tick = -int(-floor // step) * step
    while tick <= ceiling:
        out.append(f'<path d="M{left} {up(tick):.1f}H{width - 12}" stroke="#e4e4e4"/><text x="{left - 6}" '
                   f'y="{up(tick) + 4:.1f}" text-anchor="end" fill="#555">{tick:.2f}</text>')
        tick += step
    out += [f'<text x="{across(x):.1f}" y="{low + 18}" text-anchor="middle" fill="#555">{x:g}</text>' for x in xs]
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in zip(xs, line, strict=True))
    out.append(f'<polyline points="{path}" fill="none" stroke="#c0392b" stroke-width="1.5" stroke-dasharray="5 3"/>')
    for x, (first, middle, third) in zip(xs, measured, strict=True):
        out.append(f'<path d="M{across(x):.1f} {up(first):.1f}V{up(third):.1f}" stroke="#1f4e79"/>'
                   f'<circle cx="{across(x):.1f}" cy="{up(middle):.1f}" r="3.5" fill="#1f4e79"/>')
    out.append(f'<text x="{left}" y="{height - 8}" fill="#555">● measured, with quartiles   '
               f'<tspan fill="#c0392b">- - predicted from one point</tspan></text></svg>\n')
    return "\n".join(out)


def page(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    base = Shape(layers=2, t=32) if args.quick else Shape()
    lengths = (32,) if args.quick else (64, 256)
    rounds = 3 if args.quick else args.rounds
    timed: dict[tuple[str, str, int], dict[str, Any]] = {}
    batches = [(sys.executable, "", MINE + OTHERS), (sys.executable, "transformers", MINE)]
    if args.peers:
        batches.append((args.peers, "", ("plain", *PEERS)))
    for python, where, names in batches:
        for t in lengths:
            start = time.perf_counter()
            got = ask("time", python, shape=replace(base, t=t), names=names, rounds=rounds, transformers=bool(where))
            for name in names:
                timed.setdefault((where, name, t), {"ratio": got["ratio"][name], "error": got["error"][name],
                                                    "plain": got["plain"]})
            medians = {name: ratio[1] for name, ratio in got["ratio"].items()}
            print(f"T={t} {where} {time.perf_counter() - start:.0f} s", medians, flush=True)

    start = time.perf_counter()
    jobs = [(python, where, name) for python, where, names in batches for name in names
            if (python, name) != (args.peers, "plain") and not (args.quick and where)]
    shapes = [replace(base, t=t) for t in lengths]
    with ThreadPoolExecutor(THREADS) as pool:  # nothing is timed here
        found = pool.map(lambda j: ask("memory", j[0], name=j[2], shapes=shapes, transformers=bool(j[1])), jobs)
        memory = {(where, name): got for (_, where, name), got in zip(jobs, found, strict=True)}
    print(f"memory {time.perf_counter() - start:.0f} s", flush=True)

    start = time.perf_counter()
    short = [16, 32] if args.quick else [16, 32, 64, 128, 256, 512]
    lines = {"N": [replace(base, n=n) for n in ((4, 16) if args.quick else (4, 8, 16, 32, 64))],
             "T": [replace(base, t=t) for t in short],
             "P": [replace(base, hidden=h) for h in ((128, 256) if args.quick else (128, 192, 256, 384, 512))],
             "layers": [replace(base, layers=n) for n in ((1, 2) if args.quick else (2, 4, 6, 8, 12))]}
    distinct = list(dict.fromkeys([base, *(s for line in lines.values() for s in line)]))
    scaling = ask("scaling", shapes=distinct, budget=0.5 if args.quick else 5.0,
                  rounds=(3, 5) if args.quick else (5, 15))
    print(f"scaling {time.perf_counter() - start:.0f} s", flush=True)
    start = time.perf_counter()
    profile = ask("profile", shapes=shapes, rounds=2 if args.quick else 5)
    print(f"profile {time.perf_counter() - start:.0f} s", flush=True)
    peers = "".join(f", {name}" for name in (versions_in(args.peers) if args.peers else []))
    text = [heading(base, lengths, rounds, peers, timed), cost_table(lengths, timed, memory), profile_table(profile)]
    figures, words = scaling_text(lines, scaling)
    return "\n".join([*text, words]), figures


def heading(base: Shape, lengths: Sequence[int], rounds: int, peers: str,
            timed: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    count = sum(p.numel() for p in problem(base).model.parameters())
    versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}{peers}"
    seconds = ", ".join(f"{timed['', 'plain', t]['plain']:.2f} s at T = {t}" for t in lengths)
    malloc = ", ".join(f"{key}={value}" for key, value in MALLOC.items())
    return (
        f"# What the microscope costs\n\n"
        f"{platform.machine()}{_cpu()}, {THREADS} threads, {versions}, float32. Llama-like, {count / 1e6:.1f} M "
        f"parameters ({base.layers} layers of {base.hidden}, MLP {base.mlp}, vocabulary {base.vocab}, untied), "
        f"N = {base.n} rollouts of T tokens, loss Σ w_it log π(y_it). A plain forward and backward takes "
        f"{seconds}.\n\n"
        f"Time is the median over {rounds} rounds of the ratio to the plain step of the same round, the candidates "
        f"taking turns, with quartiles. A step ends when the N × N Gram can be read, and leaves the gradient in place. "
        f"Ours includes making the Microscope, and the self-check.\n\n"
        f"Memory is a step's peak over what lay there before it, as a ratio to plain's: as torch's allocator counts "
        f"it (profiler events, the same in every run) and, in brackets, as resident memory (VmHWM, the higher of "
        f"2 steps; {malloc}), each candidate in a process of its own. The first is the one to read; the "
        f"second has the libraries' own buffers in it and is noisy.\n\n"
        f"Error is ‖K − K*‖ / ‖K*‖ against one float64 backward for each rollout, at T = {lengths[-1]}, over the "
        f"parameters that a candidate covers.\n")


def versions_in(python: str) -> list[str]:
    code = ("import importlib.metadata as m; print('Opacus ' + m.version('opacus')); "
            "print('BackPACK ' + m.version('backpack-for-pytorch'))")
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return " (" + next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")) + ")"
    except (OSError, StopIteration):
        return ""


def cost_table(lengths: Sequence[int], timed: dict[tuple[str, str, int], dict[str, Any]],
               memory: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = ["| | " + " | ".join(f"T = {t}: time | memory" for t in lengths) + " | error | gives |",
             "|---|" + "---|---|" * len(lengths) + "---|---|"]
    for where, names in (("", MINE + OTHERS + PEERS), ("transformers", MINE)):
        for name in names:
            candidate = CANDIDATES[name]
            title = candidate.title + (", LlamaForCausalLM" if where else "")
            if (where, name, lengths[0]) not in timed:
                blank = " |" * (2 * len(lengths))
                lines.append(f"| {title} | not installed |{blank} {candidate.gives} |")
                continue
            cells = []
            for t in lengths:
                first, middle, third = timed[where, name, t]["ratio"]
                cells.append("1" if name == "plain" else f"{middle:.2f} ({first:.2f}–{third:.2f})")
                if (where, name) not in memory:
                    cells.append("")
                    continue
                own, reference = memory[where, name][str(t)], memory[where, "plain"][str(t)]
                cells.append(f"{reference['allocator'] / 1e6:.0f} MB" if name == "plain" else
                             f"{own['allocator'] / reference['allocator']:.2f} "
                             f"({own['resident'] / reference['resident']:.2f})")
            error = timed[where, name, lengths[-1]]["error"]
            lines.append(f"| {title} | " + " | ".join(cells) + f" | {'' if error is None else f'{error:.0e}'} | "
                         f"{candidate.gives} |")
    return "\n".join(lines) + "\n"


def profile_table(profile: dict[str, Any]) -> str:
    lengths = sorted({int(key.split()[0]) for key in profile})
    heads = [f"T = {t}: plain | exact | sketch" for t in lengths]
    lines = ["## Where the time goes\n",
             "Milliseconds of a step by operator: self times of torch.profiler, which itself slows small operators.\n",
             "| | " + " | ".join(heads) + " |", "|---|" + "---|---|---|" * len(lengths)]
    columns = [profile[f"{t} {name}"] for t in lengths for name in ("plain", "exact", "sketch")]
    lines += [f"| {key} | " + " | ".join(f"{column[key]:.1f}" for column in columns) + " |" for key in PARTS]
    lines.append("| sum | " + " | ".join(f"{sum(column.values()):.0f}" for column in columns) + " |")
    return "\n".join(lines) + (f"\n\nMaking the Microscope, which chooses a rule for each layer, takes "
                               f"{profile[f'{lengths[0]} build']:.1f} ms of the step.\n")


def scaling_text(lines: dict[str, list[Shape]], scaling: dict[str, Any]) -> tuple[dict[str, str], str]:
    points = {Shape(**p["shape"]): p["ratio"] for p in scaling["points"]}
    predict = model_line(scaling)
    base = Shape(**scaling["points"][0]["shape"])
    axes: dict[str, tuple[str, Callable[[Shape], float]]] = {
        "N": (f"rollouts N, T = {base.t}", lambda s: s.n), "T": (f"tokens T, N = {base.n}", lambda s: s.t),
        "P": (f"parameters P in millions, N = {base.n}, T = {base.t}", lambda s: round(weights_of(s) / 1e6, 1)),
        "layers": (f"layers, N = {base.n}, T = {base.t}", lambda s: s.layers)}
    figures, rows, gaps = {}, [], []
    for key, shapes in lines.items():
        title, x = axes[key]
        line = [predict(s) for s in shapes]
        figures[f"microscope_{key.lower()}.svg"] = figure(f"Microscope, exact: time ÷ plain by {title}",
                                                          [x(s) for s in shapes], [points[s] for s in shapes], line)
        for s, predicted in zip(shapes, line, strict=True):
            first, middle, third = points[s]
            rows.append(f"| {key} = {x(s):g} | {middle:.2f} ({first:.2f}–{third:.2f}) | {predicted:.2f} |")
            if s != base:
                gaps.append((abs(points[s][1] - predicted), f"{key} = {x(s):g}"))
    worst = max(gaps)
    words = (
        f"## Against N, T, P and depth\n\n"
        f"A plain step costs γ·N·T·P. Ours adds N²·P products, at the rate α of a skinny matrix product timed alone, "
        f"and the moving of N·P numbers (β): ratio = 1 + (α N + β)/(γ T), whatever P and the depth. γ and β are "
        f"taken from the one point N = {base.n}, T = {base.t}, {base.layers} layers of {base.hidden}; all else is "
        f"predicted. Over the other {len(gaps)} points the line is off by "
        f"{statistics.median(gap for gap, _ in gaps):.2f} in the median and by {worst[0]:.2f} at most ({worst[1]}). "
        f"P counts the weights of the linear layers, in millions.\n\n"
        "| | measured | predicted |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        + "\n".join(f"![{escape(axes[key][0])}](figures/microscope_{key.lower()}.svg)" for key in lines) + "\n")
    return figures, words


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        answer(sys.argv[2], json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has Opacus and BackPACK")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a small version; printed, and written only with --out")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where microscope.md and figures/ go")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    start = time.perf_counter()
    text, figures = page(args)
    print(f"\n{text}\n{time.perf_counter() - start:.0f} s", flush=True)
    out = args.out or (None if args.quick else HERE)
    if out is not None:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        (out / "microscope.md").write_text(text)
        for name, svg in figures.items():
            (out / "figures" / name).write_text(svg)


if __name__ == "__main__":
    main()
