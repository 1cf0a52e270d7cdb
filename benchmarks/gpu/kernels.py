"""Weight gradient and Gram matrix on a GPU: every route of `microscope.routes` beside the plain product.

    python benchmarks/gpu/kernels.py        writes benchmarks/gpu/kernels.md (or OUT/kernels.md where OUT is set)

A layer's shapes are those of Nemotron-Mini-4B and SmolLM2-135M, numbers are random, in bfloat16. Times are medians of
CUDA events over 21 calls (11 for the largest layer) after 3, cycling through three sets of inputs so that they are not
in the cache, and queued behind a sleeping GPU so that the host's time does not show.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from creditscope.microscope.routes import ROUTES, route, seconds

SETTINGS = [(8, 512), (16, 256), (8, 256), (4, 1024), (32, 128)]
NEMOTRON = {(9216, 3072): 32, (3072, 9216): 32, (3072, 3072): 64, (1024, 3072): 64, (256000, 3072): 1}
SMOL = [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)]
STEP = {(8, 512): 190.7, (16, 256): 192.0, (8, 256): 109.5}  # ms, plain forward and backward of the 4.19 B shape

LIMITS = """What limits the best route, read once on the H200 at N = 8, T = 512, 9216 × 3072 (floor of the product by
operations 0.294 ms, cuBLAS 0.29), by leaving parts out and with Nsight Compute:

| `fused` | ms |
| --- | --- |
| products alone, nothing stored | 0.35 |
| and tiles rounded and stored to the ring of scratch | 0.43 |
| and read behind, multiplied and added: the whole | 0.51 |

The scratch, 0.45 GB written and read, does not stay in the L2 cache as planned: 0.47 GB go out to memory and 0.7 GB are
read (0.24 by cuBLAS), and the cache moves 4.2 GB where cuBLAS, whose blocks share what they load, moves 1.7; Triton 3.6
has no such shared loads. On the tensor cores the products of the columns wait behind the matrix product (0.70 ms where
the plain cores gave 0.62, in one earlier version), so they are on the plain cores, which the 136 products of 16
rollouts would overfill. There `ghost` is best, at 88 % of its floor by operations (0.26 ms), but 60 % for the head,
whose rows are 512 KB apart."""


def plain(delta: Tensor, a: Tensor) -> Tensor:
    return delta.flatten(0, 1).T @ a.flatten(0, 1)


def inputs(n: int, t: int, d_out: int, d_in: int) -> list[tuple[Tensor, Tensor]]:
    sets = 2 if d_out > 100_000 else 3
    return [(torch.randn(n, t, d_out, device="cuda", dtype=torch.bfloat16) * 1e-2,
             torch.randn(n, t, d_in, device="cuda", dtype=torch.bfloat16)) for _ in range(sets)]


def measure(f: Callable[[Tensor, Tensor], Any], data: list[tuple[Tensor, Tensor]], repeats: int) -> float:
    """Median milliseconds on the GPU."""
    for k in range(3):
        f(*data[k % len(data)])
    torch.cuda.synchronize()
    torch.cuda._sleep(60_000_000)
    events = []
    for k in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f(*data[k % len(data)])
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def main() -> None:
    lines = ["# Weight gradients and their Gram matrix on a GPU", "",
             f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, bf16, random "
             "numbers. Milliseconds, in brackets as predicted; `plain` is the weight gradient alone.", "",
             "| N, T | d_out × d_in | plain | fused | pass | ghost | chosen | extra | fastest |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    extra: dict[tuple[int, int], float] = {}
    plains: dict[tuple[int, int], float] = {}
    right, errors, lost, total = 0, [], 0.0, 0
    for n, t in SETTINGS:
        for d_out, d_in in [*NEMOTRON, *SMOL]:
            data = inputs(n, t, d_out, d_in)
            repeats = 11 if d_out > 100_000 else 21
            base = measure(plain, data, repeats)
            times = {name: measure(ROUTES[name], data, repeats)
                     for name in ("fused", "pass", "ghost") if name != "fused" or n <= 8}
            predicted = {name: 1e3 * seconds(name, n, t, d_out, d_in) for name in times}
            errors += [abs(predicted[name] / times[name] - 1) for name in times]
            chosen, best = route(n, t, d_out, d_in, torch.bfloat16), min(times, key=times.__getitem__)
            right += chosen == best
            lost = max(lost, times[chosen] / times[best] - 1)
            total += 1
            if (d_out, d_in) in NEMOTRON:
                count = NEMOTRON[d_out, d_in]
                extra[n, t] = extra.get((n, t), 0) + count * (times[chosen] - base)
                plains[n, t] = plains.get((n, t), 0) + count * base
            cells = [f"{times[name]:.3f} ({predicted[name]:.3f})" if name in times else "" for name in
                     ("fused", "pass", "ghost")]
            lines.append(f"| {n}, {t} | {d_out} × {d_in} | {base:.3f} | {' | '.join(cells)} | {chosen} | "
                         f"{times[chosen] - base:.3f} | {'yes' if chosen == best else best} |")
            print(lines[-1], flush=True)
            del data
    lines += ["", f"The chosen route was the fastest {right} times of {total}, and at worst {100 * lost:.0f} % slower "
              f"than the fastest. The model's error is {100 * statistics.median(errors):.0f} % in the median and "
              f"{100 * max(errors):.0f} % at worst.", "",
              "All Linear layers of the 4.19 B Nemotron-Mini shape (32 layers and the head), summed from the table; a "
              "plain forward and backward of it was measured earlier on an H200.", "",
              "| N, T | plain weight gradients | extra for the Gram | plain step | step with the Gram |",
              "| --- | --- | --- | --- | --- |"]
    for (n, t), more in extra.items():
        step = STEP.get((n, t))
        ratio = f"{step:.1f} ms | ×{(step + more) / step:.3f}" if step else " | "
        lines.append(f"| {n}, {t} | {plains[n, t]:.1f} ms | {more:.1f} ms | {ratio} |")
    lines += ["", LIMITS]
    text = "\n".join(lines) + "\n"
    print(text)
    Path(os.environ.get("OUT", Path(__file__).parent), "kernels.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
