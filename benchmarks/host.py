"""The microscope's own Python per layer of a Llama, and a step of 5.3 M parameters beside the plain step.

    python benchmarks/host.py                                    this version; printed only, half a minute
    PYTHONPATH=OTHER/src python benchmarks/host.py               another checkout's: run both in turn

Layers of width 32 leave nothing but Python to be timed, on one thread: the fastest of 40 passes. The step has the
candidates of `benchmarks/microscope.py`, on two threads, in turn: medians of ratios, quartiles. Nothing else may run:
beside one busy process a step on two threads of two cores takes 25 times as long.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import microscope as candidates
from creditscope import Microscope

LAYERS, PASSES = 8, 40
ROUNDS = {64: 25, 256: 7}
"""Tokens per rollout -> rounds."""


def narrow() -> nn.Module:
    torch.manual_seed(0)
    return candidates.hugging(candidates.Shape(layers=LAYERS, hidden=32, vocab=64))


def times(model: nn.Module, ids: torch.Tensor, watched: bool) -> tuple[float, float, float]:
    """Seconds of a forward, of a backward, and of entering, leaving and reading."""
    model.zero_grad(set_to_none=True)
    clock = [time.perf_counter()]
    scope = Microscope(model).__enter__() if watched else None
    clock.append(time.perf_counter())
    logp = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    clock.append(time.perf_counter())
    logp.sum().backward()  # type: ignore[no-untyped-call]
    clock.append(time.perf_counter())
    if scope is not None:
        scope.__exit__(None, None, None)
        assert scope.gram.shape == (len(ids), len(ids))
    clock.append(time.perf_counter())
    enter, forward, backward, leave = (b - a for a, b in itertools.pairwise(clock))
    return forward, backward, enter + leave


def python_per_layer() -> list[float]:
    """Milliseconds per layer that the microscope adds to a forward, a backward, and around them."""
    torch.set_num_threads(1)
    model, ids = narrow(), torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(1))
    found = [(times(model, ids, False), times(model, ids, True)) for _ in range(PASSES + 5)][5:]
    plain, watched = ([min(part) for part in zip(*side, strict=True)] for side in zip(*found, strict=True))
    return [1e3 * (b - a) / LAYERS for a, b in zip(plain, watched, strict=True)]


def ratios(tokens: int) -> dict[str, list[float]]:
    """Each candidate's step over the plain step of the same round."""
    torch.set_num_threads(2)
    problem = candidates.problem(candidates.Shape(t=tokens))
    steps: dict[str, Callable[[], object]] = {
        "plain": candidates.plain(problem), "exact": candidates.ours(True, None)(problem),
        "sketch": candidates.ours(False, candidates.SKETCH)(problem)}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(ROUNDS[tokens] + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if count >= 2:
                found[name].append(time.perf_counter() - start)
    return {name: [a / b for a, b in zip(found[name], found["plain"], strict=True)] for name in ("exact", "sketch")}


def main() -> None:
    forward, backward, around = python_per_layer()
    print(f"ms per layer: forward {forward:.2f}, backward {backward:.2f}, entering and leaving {around:.2f}")
    for tokens in ROUNDS:
        for name, values in ratios(tokens).items():
            low, _, high = statistics.quantiles(values, n=4)
            print(f"T = {tokens}: {name} ×{statistics.median(values):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
