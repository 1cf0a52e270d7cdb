"""The microscope changes no gradient and no bit, a resumed run equals a whole one, a record gives back what it got."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from creditscope.lab.train import train
from creditscope.microscope.scope import Microscope
from creditscope.policy.loading import load_policy
from creditscope.runs import schema
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.selftest.check import WorstError, worst_of
from creditscope.selftest.gram import batch, objective, random_model

SMALL = Config(prompts=2, group=4, steps=2, max_tokens=32, eval_problems=0, checkpoint_every=1,
               keep_every=1, lr=1e-4, device="cpu", probe="off")
CLOCK = ("time/", schema.SCOPE_SHARE, schema.SCOPE_RATIO)
"""Metrics that depend on the clock."""

_folder = partial(tempfile.TemporaryDirectory, prefix="creditscope-selftest-", ignore_cleanup_errors=True)


@contextmanager
def _runs(*configs: Config) -> Iterator[list[Path]]:
    """The runs of these configurations, in a temporary folder."""
    with _folder() as folder:
        outs = [Path(folder) / str(i) for i in range(len(configs))]
        for config, out in zip(configs, outs, strict=True):
            list(train(config, out, {}))
        yield outs


def _weights(out: Path) -> dict[str, torch.Tensor]:
    record = Record.open(out)
    return load_file(record.checkpoint_path(record.checkpoints()[-1]) / "policy.safetensors")


def _facts(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in step.items() if not name.startswith(CLOCK)}
            for step in Record.open(out).steps()]


def differing(one: Path, two: Path) -> list[str]:
    """The weights, and the recorded numbers that both runs have, that are not equal bit by bit."""
    first, second = _weights(one), _weights(two)
    out = [f"weights {name}" for name in sorted(first.keys() ^ second.keys())]
    out += [f"weights {name}" for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    lines = list(zip(_facts(one), _facts(two), strict=False))
    out += ["the number of steps"] * (len(_facts(one)) != len(_facts(two)))
    return out + [f"step {a['step']} {name}" for a, b in lines for name in sorted(a.keys() & b.keys())
                  if a[name] != b[name]]


def _told(found: list[str], compared: str) -> WorstError:
    return WorstError(len(found), f"first: {min(found)}" if found else compared)


def same_gradient(device: torch.device) -> WorstError:
    """max|Δ∇| / max|∇| of every parameter: the gradient under the microscope against a plain backward."""
    model = random_model("llama_tied", device)
    given = batch(model)
    objective(model, *given).backward()  # type: ignore[no-untyped-call]
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    with Microscope(model):
        objective(model, *given).backward()  # type: ignore[no-untyped-call]
    return worst_of({name: float((p.grad - plain[name]).abs().max() / plain[name].abs().max())
                     for name, p in model.named_parameters()}, "parameters")


def same_bits(device: torch.device) -> WorstError:
    """The differences between training under the microscope and the same with more readings. On the CPU.

    The microscope in the trainer's backward sums gradients in another order (`same_gradient`); others change no bit.
    """
    seen = replace(SMALL, scope="light")
    with _runs(seen, replace(seen, also=("optimal_token", "prefix_tree"))) as (plain, read):
        start = load_policy(SMALL.model, device="cpu").trainable()
        moved = any(not torch.equal(value, start[name]) for name, value in _weights(plain).items())
        found = differing(plain, read) if moved else ["nothing was learnt"]
        return _told(found, f"{len(_weights(plain))} weights and {len(_facts(plain))} steps")


def trl_bits(device: torch.device) -> WorstError:
    """Weights of TRL's GRPOTrainer that differ after two steps with and without `ScopeCallback`. On the CPU."""
    from creditscope.plugins.trl import ScopeCallback
    from creditscope.selftest.trl_live import small_run

    plain, read = small_run(), small_run(lambda trainer: ScopeCallback(trainer, every=1))
    start = small_run(steps=0)
    if all(torch.equal(plain[name], value) for name, value in start.items()):
        return WorstError(len(start), "nothing was learnt")
    return _told([name for name, value in plain.items() if not torch.equal(value, read[name])], f"{len(plain)} weights")


def resumed(device: torch.device) -> WorstError:
    """The differences between a whole run and one that was cut after the first step and resumed. On the CPU."""
    with _runs(SMALL, replace(SMALL, steps=1)) as (whole, cut):
        list(train(SMALL, cut, {}, resume=True))
        return _told(differing(whole, cut), f"{len(_weights(whole))} weights and {len(_facts(whole))} steps")


def round_trip(device: torch.device) -> WorstError:
    """The numbers, text and arrays that a record does not give back as written, also after it was opened again."""
    draw = np.random.default_rng(0)
    lines: list[dict[str, float | int | str]] = [
        {"value": float(x), "tiny": 5e-324, "large": 1.7976931348623157e308, "words": "é∇ \n\"", "count": 2**53 + 1}
        for x in draw.standard_normal(50)]
    arrays: dict[str, NDArray[Any]] = {
        "float64": draw.standard_normal((3, 4)), "float32": draw.standard_normal(5).astype(np.float32),
        "bits": np.array([math.pi, -0.0, math.inf, math.nan]), "ids": np.arange(7), "text": np.array(["a", "∇é"])}
    found = []
    with _folder() as folder:
        out = Path(folder) / "run"
        config = {"seed": 0, "lr": 1e-4}
        with Record.create(out, config, {}) as record:
            for step, line in enumerate(lines[:25]):
                record.append(step, line)
            record.save_group(0, arrays)
        with Record.resume(out, config, frozenset()) as record:
            for step, line in enumerate(lines[25:], start=25):
                record.append(step, line)
        record = Record.open(out)
        read = [{name: value for name, value in line.items() if name != "step"} for line in record.steps()]
        found += ["steps"] * (read != lines) + ["config"] * (record.config != config)
        kept = record.group(0)
        found += [f"array {name}" for name, value in arrays.items()
                  if name not in kept or kept[name].dtype != value.dtype or kept[name].tobytes() != value.tobytes()]
    return _told(found, f"{len(lines)} steps and {len(arrays)} arrays")
