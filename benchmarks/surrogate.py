"""Time of w for 4,096 rollouts × 1,024 tokens, each method beside a hand-written GRPO loss in the same run.

    python benchmarks/surrogate.py         prints a table and writes benchmarks/surrogate.md
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from creditscope import METHODS, Rollouts, effective_credit, surrogate

B, T, R, REPEATS = 4096, 1024, 8, 5


def batch() -> tuple[Rollouts, Tensor]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(T) < torch.randint(T // 4, T + 1, (B, 1), generator=draw)
    old = -torch.rand(B, T, generator=draw) * mask
    rollouts = Rollouts(tokens=torch.randint(1, 999, (B, T), generator=draw) * mask, mask=mask, logp=old,
                        reward=torch.randint(0, 2, (B,), generator=draw).float(),
                        group=torch.arange(B // R).repeat_interleave(R),
                        ref_logp=old, entropy=torch.rand(B, T, generator=draw) * mask)
    return rollouts, old + 0.1 * torch.randn(B, T, generator=draw) * mask


def by_hand(rollouts: Rollouts) -> Callable[[Tensor], Tensor]:
    """GRPO with nothing but its formula: no checks, equal groups assumed."""
    reward = rollouts.reward.view(-1, R)
    a = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1, 1)

    def objective(logp: Tensor) -> Tensor:
        ratio = (logp - rollouts.logp).exp()
        term = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        return ((term * rollouts.mask).sum(1) / rollouts.mask.sum(1)).mean()

    return objective


def median(job: Callable[[], object]) -> float:
    job()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    rollouts, logp = batch()
    plain = median(lambda: effective_credit(by_hand(rollouts), logp))
    lines = [f"# w of {B:,} rollouts × {T:,} tokens\n\n",
             f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, float32; median of "
             f"{REPEATS}. A hand-written GRPO loss takes {plain * 1e3:.0f} ms in the same run.\n\n",
             "| method | ms | × hand-written GRPO |\n| --- | --- | --- |\n"]
    for name, method in METHODS.items():
        credit = logp if method.baseline == "external" else None
        took = median(lambda m=method, c=credit: effective_credit(lambda lp: surrogate(m, lp, rollouts, c), logp))
        lines.append(f"| {name} | {took * 1e3:.0f} | {took / plain:.2f} |\n")
        print(lines[-1], end="", flush=True)
    (Path(__file__).parent / "surrogate.md").write_text("".join(lines))


if __name__ == "__main__":
    main()
