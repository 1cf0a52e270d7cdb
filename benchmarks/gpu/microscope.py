"""The microscope on a GPU at four billion parameters: exact Gram and sketch beside the plain step, and its exactness.

    python benchmarks/gpu/microscope.py [--tiny]      writes benchmarks/gpu/microscope.md; --tiny tries a small model

Random weights in the shape of Nemotron-Mini-4B (4.19 B parameters, vocabulary 256,000), bfloat16, every parameter
trainable: nothing is learned here, it is the cost of a step and the correctness of its Gram. Candidates take turns, and
each ratio is to the plain step of the same turn; the table has medians and quartiles.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import NemotronConfig, NemotronForCausalLM

from creditscope import Microscope
from creditscope.microscope import routes
from creditscope.microscope.sketch import Sketcher

SHAPE = {"hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 9216, "vocab_size": 256_000, "max_position_embeddings": 4096}
SMALL = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
         "intermediate_size": 160, "vocab_size": 512, "max_position_embeddings": 512}
SETTINGS = [(8, 512), (16, 256), (8, 1024)]


def make_model(shape: dict[str, int], device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return NemotronForCausalLM(NemotronConfig(**shape)).eval()
    finally:
        torch.set_default_dtype(before)


def loss(model: Any, ids: Tensor, w: Tensor) -> Tensor:
    """−Σ w_it log π(y_it)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    chosen = logits.gather(2, ids[:, 1:, None]).squeeze(2) - logits.logsumexp(dim=2)
    return -(chosen * w).sum()


def sync(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Bench:
    """One model and batch, and the ways to take a step on it."""

    def __init__(self, model: Any, n: int, t: int, vocabulary: int, device: str) -> None:
        random = torch.Generator().manual_seed(1)
        self.model, self.device = model, device
        self.ids = torch.randint(vocabulary, (n, t), generator=random).to(device)
        reward = torch.rand(n, generator=random)
        self.w = (((reward - reward.mean()) / t)[:, None].expand(n, t - 1)).to(device)
        self.exact = Microscope(model)
        self.sketch = Microscope(model, exact=False, sketch=Sketcher(16))

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def plain(self) -> None:
        loss(self.model, self.ids, self.w).backward()

    def measured(self) -> None:
        with self.exact:
            self.plain()

    def plain_torch(self) -> None:
        """Exact, without the Triton kernels."""
        kept, routes.route = routes.route, lambda *_: "chunks"
        try:
            self.measured()
        finally:
            routes.route = kept

    def sketched(self) -> None:
        with self.sketch:
            self.plain()

    def loop(self) -> None:
        for i in range(len(self.ids)):
            self.clear()
            loss(self.model, self.ids[i:i + 1], self.w[i:i + 1]).backward()


def timed(bench: Bench, candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    memory: dict[str, float] = {}
    for turn in range(rounds + 2):  # two to warm up: kernels are built, the allocator settles
        for name, step in candidates.items():
            bench.clear()
            if bench.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = sync(bench.device)
            step()
            spent = sync(bench.device) - start
            if turn >= 2:
                seconds[name].append(spent)
            if bench.device == "cuda":
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
    out = {}
    for name, spent in seconds.items():
        ratios = [a / b for a, b in zip(spent, seconds["plain"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        out[name] = {"ms": 1e3 * statistics.median(spent), "ratio": statistics.median(ratios), "low": low, "high": high,
                     "gib": memory.get(name, float("nan"))}
    return out


def exactness(bench: Bench) -> dict[str, float]:
    """The Gram from one pass beside that of N separate backward passes, parameter by parameter."""
    n = len(bench.ids)
    bench.clear()
    bench.measured()
    ours = {name: k.clone() for name, k in bench.exact.layers.items()}
    check = max(c.error for c in bench.exact.checks.values())
    rows: dict[str, list[Tensor]] = {name: [] for name in ours}
    for i in range(n):
        bench.clear()
        loss(bench.model, bench.ids[i:i + 1], bench.w[i:i + 1]).backward()
        for name, p in bench.model.named_parameters():
            rows[name].append(p.grad.flatten())
    bench.clear()
    worst, total, whole = 0.0, torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    for name, found in rows.items():
        reference = torch.zeros(n, n, dtype=torch.float64, device=bench.device)
        for start in range(0, found[0].numel(), 1 << 24):  # float32 products of 16 M columns at most, summed in float64
            some = torch.stack([g[start:start + (1 << 24)].float() for g in found])
            reference += torch.stack([(some * row).sum(dim=1, dtype=torch.float64) for row in some])
        reference = reference.cpu()
        worst = max(worst, float((ours[name] - reference).abs().max() / reference.abs().max()))
        total, whole = total + ours[name], whole + reference
        found.clear()
    return {"total": float((total - whole).abs().max() / whole.abs().max()), "worst": worst, "check": check}


def profile(bench: Bench, top: int = 12) -> list[tuple[str, float, float]]:
    """Where the time goes: GPU milliseconds by kernel, ours and plain."""
    from torch.profiler import ProfilerActivity

    found: list[dict[str, float]] = []
    for step in (bench.measured, bench.plain):
        bench.clear()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            step()
            sync(bench.device)
        times: dict[str, float] = {}
        for event in prof.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name] = times.get(event.name, 0.0) + event.self_device_time_total / 1e3
        found.append(times)
    ours, plain = found
    order = sorted(ours, key=lambda name: abs(ours[name] - plain.get(name, 0.0)), reverse=True)[:top]
    return [(name, ours[name], plain.get(name, 0.0)) for name in order] + [
        ("all kernels", sum(ours.values()), sum(plain.values()))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model in float32, to try the script anywhere")
    parser.add_argument("--rounds", type=int, default=9, help="turns of all candidates")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"), help="where the table goes")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        raise SystemExit("this benchmark needs a GPU; try --tiny")
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    shape = SMALL if args.tiny else SHAPE
    model = make_model(shape, device, torch.float32 if device == "cpu" else torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    lines = [f"# The microscope at {count / 1e9:.2f} B parameters", "",
             f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}, bfloat16, every "
             f"parameter. Median of {args.rounds} turns (quartiles); each ratio is to the plain step of its own turn.",
             "", "| setting | candidate | ms | ratio | peak GiB |", "|---|---|---|---|---|"]
    exact: dict[str, dict[str, float]] = {}
    kernels_of: list[str] = []
    for n, t in SETTINGS if not args.tiny else [(4, 16)]:
        bench = Bench(model, n, t, shape["vocab_size"], device)
        candidates = {"plain": bench.plain, "exact, all parameters": bench.measured, "sketch 16×16": bench.sketched,
                      "exact, plain torch": bench.plain_torch, "loop of N backwards (nothing stored)": bench.loop}
        results = timed(bench, candidates, args.rounds)
        for name, r in results.items():
            lines.append(f"| N={n} T={t} | {name} | {r['ms']:.1f} | ×{r['ratio']:.3f} ({r['low']:.3f}, "
                         f"{r['high']:.3f}) | {r['gib']:.2f} (×{r['gib'] / results['plain']['gib']:.3f}) |")
            print(lines[-1], flush=True)
        if device == "cuda":
            kernels_of += ["", f"GPU milliseconds by kernel, N={n} T={t}, one profiled step each. Where a step above "
                           f"takes longer than all its kernels, the GPU waited for the host.", "",
                           "| kernel | exact | plain |", "|---|---|---|"]
            kernels_of += [f"| `{name[:90].replace('|', ' ')}` | {a:.2f} | {b:.2f} |" for name, a, b in profile(bench)]
        if (n, t) == SETTINGS[0] or args.tiny:
            exact[f"N={n} T={t}"] = exactness(bench)
            print(exact, flush=True)
        del bench, candidates
        gc.collect()
    lines += ["", "Exactness: max|ΔK|/max|K| against N separate backward passes in the same precision, whose rows are "
                  "kept, multiplied in float32 and added in float64.", "",
              "| setting | all parameters | worst parameter | self-check, largest error |", "|---|---|---|---|"]
    lines += [f"| {name} | {e['total']:.1e} | {e['worst']:.1e} | {e['check']:.1e} |" for name, e in exact.items()]
    lines += kernels_of
    args.out.write_text("\n".join(lines) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
