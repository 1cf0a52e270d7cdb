"""P1's experiment at P1's size, in cost and exactness: the shape of Nemotron-Mini-4B with random weights.

    python -m benchmarks.gpu.nemotron [--small]      writes benchmarks/gpu/nemotron.md; --small tries a small model

One group of N rollouts, half of them right, behind prompts of 64 tokens, through the trainer's own forward and P1's
GRPO loss. (a) A plain forward and backward beside the same under the microscope, every parameter, turn by turn.
(b) The microscope's Gram of chosen layers beside that of N single backwards, and the ranks that each gives. Nothing
is learned here, and nothing is said about what a trained model's rank is.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu.microscope import SHAPE, SMALL, make_model, sync
from torch import Tensor

from creditscope import METHODS, Microscope, Rollouts, effective_credit, spectrum, surrogate
from creditscope.lab.policy import Policy, token_logp
from creditscope.microscope.spectrum import Spectrum, orthogonal_null

METHOD = METHODS["p1_grpo"]
SETTINGS = [(8, 256), (8, 512), (16, 256), (16, 512)]
PROMPT = 64
COLUMNS = 1 << 24
"""Columns of the rows that are multiplied at once in float32; their sums are added in float64."""
RANKS = {"r_eff": lambda s: s.effective_rank, "cut to 2": lambda s: s.truncated(2).effective_rank,
         "entropy": lambda s: s.entropy_rank, "participation": lambda s: s.participation_ratio,
         "stable": lambda s: s.stable_rank, "90 %": lambda s: s.energy_rank(0.9), "99 %": lambda s: s.energy_rank(0.99),
         "top-1": lambda s: s.top1}


class Bench:
    """A model, a group of N rollouts of T tokens, and P1's loss on it."""

    def __init__(self, model: Any, n: int, t: int, vocabulary: int, device: str) -> None:
        random = torch.Generator().manual_seed(1)
        self.model, self.device, self.scope = model, device, Microscope(model)
        self.policy = Policy("random", model, tokenizer=None)
        self.prompts = torch.randint(vocabulary, (1, PROMPT), generator=random).expand(n, -1).tolist()
        tokens = torch.randint(vocabulary, (n, t), generator=random).to(device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        old = token_logp(self.policy, self.prompts, tokens, mask, 1.0, grad=False)
        reward = torch.arange(n, device=device).remainder(2).float()
        self.rollouts = Rollouts(tokens=tokens, mask=mask, logp=old, reward=reward,
                                 group=torch.zeros(n, dtype=torch.int64, device=device))

    def logp(self, rows: slice) -> Tensor:
        return token_logp(self.policy, self.prompts[rows], self.rollouts.tokens[rows], self.rollouts.mask[rows], 1.0)

    def objective(self, logp: Tensor) -> Tensor:
        return surrogate(METHOD, logp, self.rollouts)

    def plain(self) -> None:
        (-self.objective(self.logp(slice(None)))).backward()

    def measured(self) -> None:
        with self.scope:
            self.plain()


def timed(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Plain and measured in turn: median milliseconds, the median of the turns' ratios with quartiles, peak memory."""
    steps = {"plain": bench.plain, "measured": bench.measured}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    peak = dict.fromkeys(steps, float("nan"))
    for turn in range(rounds + 2):  # two to warm up: kernels are built, the allocator settles
        for name, step in steps.items():
            bench.model.zero_grad(set_to_none=True)
            if bench.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = sync(bench.device)
            step()
            seconds = sync(bench.device) - start
            if turn >= 2:
                spent[name].append(seconds)
            if bench.device == "cuda":
                peak[name] = torch.cuda.max_memory_allocated() / 2**30
    ratios = [a / b for a, b in zip(spent["measured"], spent["plain"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {name: {"ms": 1e3 * statistics.median(found), "gib": peak[name]} for name, found in spent.items()} | {
        "ratio": {"median": middle, "low": low, "high": high}}


def chosen(model: Any) -> list[str]:
    """q_proj and v_proj, which P1 tracks, of the first, middle and last layer; the middle's MLP; the head."""
    count = model.config.num_hidden_layers
    layers = sorted({0, count // 2, count - 1})
    names = [f"model.layers.{i}.self_attn.{kind}_proj.weight" for kind in "qv" for i in layers]
    return [*names, *(f"model.layers.{count // 2}.mlp.{kind}_proj.weight" for kind in ("up", "down")), "lm_head.weight"]


def by_loop(bench: Bench, names: list[str], w: Tensor) -> dict[str, Tensor]:
    """Grams of N single backwards: rollout i's loss is −Σ_t w_it log π(y_it), and its row is kept."""
    parameters = dict(bench.model.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for i in range(len(w)):
        loss = -(bench.logp(slice(i, i + 1)) * w[i:i + 1]).sum()
        for name, g in zip(names, torch.autograd.grad(loss, [parameters[name] for name in names]), strict=True):
            rows[name].append(g.flatten())
    return {name: gram(rows.pop(name)) for name in names}


def gram(rows: list[Tensor]) -> Tensor:
    out = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows[0].device)
    for start in range(0, rows[0].numel(), COLUMNS):
        some = torch.stack([row[start:start + COLUMNS].float() for row in rows])
        out += torch.stack([(some * row).sum(dim=1, dtype=torch.float64) for row in some])
    return out.cpu()


def exactness(bench: Bench) -> dict[str, Any]:
    """max|ΔK|/max|K| and the ranks from both, layer by layer; the self-check over every parameter."""
    bench.model.zero_grad(set_to_none=True)
    bench.measured()
    names = chosen(bench.model)
    ours, eps = {name: bench.scope.layers[name].clone() for name in names}, bench.scope.eps
    check = max(c.error for c in bench.scope.checks.values())
    count = len(bench.scope.layers)
    bench.model.zero_grad(set_to_none=True)
    loop = by_loop(bench, names, effective_credit(bench.objective, bench.rollouts.logp))
    out = {name: {"error": float((ours[name] - loop[name]).abs().max() / loop[name].abs().max()),
                  "microscope": ranks(spectrum(ours[name], eps)), "loop": ranks(spectrum(loop[name], eps))}
           for name in names}
    return {"layers": out, "check": check, "parameters": count, "of": len(list(bench.model.parameters())),
            "coverage": bench.scope.coverage}


def ranks(found: Spectrum) -> dict[str, float]:
    return {name: float(rank(found)) for name, rank in RANKS.items()}


def page(results: dict[str, Any]) -> str:
    """The results as markdown."""
    lines = [f"# P1's loss at {results['parameters'] / 1e9:.2f} B parameters", "",
             f"{results['machine']}, torch {torch.__version__}, transformers {transformers.__version__}, "
             f"{results['dtype']}, every parameter, random weights: `python -m benchmarks.gpu.nemotron`. One group of "
             f"N rollouts of T tokens behind prompts of {PROMPT}, P1's GRPO loss. Median of {results['rounds']} turns "
             f"(quartiles of the turns' ratios).", "",
             "| N | T | plain ms | under the microscope ms | ratio | peak GiB, plain | peak GiB, measured |",
             "|---|---|---|---|---|---|---|"]
    for row in results["cost"]:
        a, b, r = row["plain"], row["measured"], row["ratio"]
        lines.append(f"| {row['n']} | {row['t']} | {a['ms']:.1f} | {b['ms']:.1f} | ×{r['median']:.3f} ({r['low']:.3f}, "
                     f"{r['high']:.3f}) | {a['gib']:.1f} | {b['gib']:.1f} |")
    e = results["exactness"]
    lines += ["", f"Exactness, N = {e['n']}, T = {e['t']}: the microscope's Gram of one pass beside that of {e['n']} "
              f"single backwards in the same precision, max|ΔK|/max|K|, and the largest difference of any rank. The "
              f"self-check over {e['parameters']} of {e['of']} parameters is off by {e['check']:.1e} at most. "
              f"Orthogonal scores of equal norm would have r_eff = {orthogonal_null(e['n'] // 2, e['n']):.1f}.", "",
              "| layer | error | ranks differ by | " + " | ".join(RANKS) + " |", "|---" * (len(RANKS) + 3) + "|"]
    for name, found in e["layers"].items():
        ours, loop = found["microscope"], found["loop"]
        apart = max(abs(ours[k] - loop[k]) for k in RANKS)
        short = name.removeprefix("model.").removesuffix(".weight")
        lines.append(f"| `{short}` | {found['error']:.1e} | {apart:.1e} | " + " | ".join(
            f"{ours[k]:.3g}" for k in RANKS) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model in float32, to try the script anywhere")
    parser.add_argument("--rounds", type=int, default=7, help="turns of both candidates")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"), help="where the page goes")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.small:
        raise SystemExit("this benchmark needs a GPU; try --small")
    shape = SMALL if args.small else SHAPE
    dtype = torch.float32 if args.small else torch.bfloat16
    model = make_model(shape, device, dtype)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    results: dict[str, Any] = {"machine": machine, "dtype": str(dtype).removeprefix("torch."),
                               "parameters": sum(p.numel() for p in model.parameters()), "rounds": args.rounds,
                               "cost": []}
    for n, t in SETTINGS if not args.small else [(8, 16)]:
        bench = Bench(model, n, t, shape["vocab_size"], device)
        results["cost"].append({"n": n, "t": t} | timed(bench, args.rounds))
        print(json.dumps(results["cost"][-1]), flush=True)
        if "exactness" not in results:
            results["exactness"] = {"n": n, "t": t} | exactness(bench)
        model.zero_grad(set_to_none=True)
        del bench
        gc.collect()
    print(json.dumps(results, indent=2))
    args.out.write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
