"""One batch of a source of rollouts in float64: the rows of one training step, or all rows where none names a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.offline.assemble import Assembled, assemble, assemble_for
from creditscope.offline.batches import Reader, SampleBatch
from creditscope.offline.dumps import Sample
from creditscope.offline.files import Source
from creditscope.offline.settings import Settings
from creditscope.policy.loading import load_policy


def read_one(path: Path, settings: Settings, step: int | None = None) -> tuple[Rollouts, int | None]:
    """(rollouts, their training step); by default the last step, and all rows where the source names none."""
    reader = Reader(Source(path), settings.format, settings.reward_field, rows=sys.maxsize)
    chosen, seen = _choose(reader, step)
    if chosen is None:
        names = f"it has {', '.join(map(str, seen[:8]))}{' ...' if len(seen) > 8 else ''}" if seen else "it names none"
        raise CreditscopeError(f"{path} has no rollouts of --step {step}: {names}; leave --step out for the last")
    got = _assembled(chosen.samples, settings)
    if not got.has_tokens:
        raise CreditscopeError(f"{path} has answers as text alone, and shared prefixes are counted in tokens; give "
                               f"--model, or tokens in the file")
    found = got.rollouts if got.has_logp else replace(got.rollouts, ref_logp=None)  # no log-ratio without log π_old
    return in_float64(found.to("cpu")), chosen.step


def _choose(reader: Reader, step: int | None) -> tuple[SampleBatch | None, list[int]]:
    """(the batch of the step, steps seen); of a source that names no step, all rows unless a step is asked for."""
    chosen, seen = None, []
    for batch in reader.batches():
        if step is None or batch.step == step:
            chosen = batch
        if batch.step is not None:
            seen.append(batch.step)
        if step is not None and chosen is not None:
            break
    return chosen, seen


def _assembled(samples: Sequence[Sample], settings: Settings) -> Assembled:
    if settings.model is None:
        return assemble(samples, torch.float64)
    policy = load_policy(settings.model, device=settings.device, dtype=settings.dtype, chat=settings.chat)
    return assemble_for(policy, samples, settings.temperature)


def in_float64(rollouts: Rollouts) -> Rollouts:
    """The same rollouts, floats in float64."""
    wide: dict[str, Any] = {f.name: value.double() for f in fields(Rollouts)
                            if isinstance(value := getattr(rollouts, f.name), Tensor) and value.is_floating_point()}
    return replace(rollouts, **wide)
