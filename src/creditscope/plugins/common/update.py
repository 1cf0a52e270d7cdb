"""The size of a trainer's update at a reading: a sample of the weights before and after it. No function here fails: a
reading that cannot be taken is absent, and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from creditscope.microscope.shards import many_ranks
from creditscope.optimizer.geometry import SampledUpdate, epsilon_factor, reached_share, trainable_share
from creditscope.runs import schema


def before_step(model: nn.Module, every: bool = False) -> SampledUpdate | None:
    """Copies at most 4096 entries of each parameter that has a gradient; of shards, of this rank's part.

    `every`: of each that is trained, because an engine may hold its gradient elsewhere.
    """
    try:
        return SampledUpdate(p for p in model.parameters() if p.requires_grad and (every or p.grad is not None))
    except Exception:  # as a diagnostic must not end the training
        return None


def moved_by(update: SampledUpdate | None) -> Tensor | None:
    """This rank's part of the sums of `SampledUpdate`."""
    try:
        return None if update is None else update.sums(dist.get_world_size() if many_ranks() else 1)
    except Exception:
        return None


def after_step(moved: Sequence[Tensor | None], optimizer: Any, model: nn.Module) -> dict[str, float]:
    """`update/…` after the step, from the sums of all ranks. The factor of ε is read on the first rank's weights."""
    sums = [one for one in moved if one is not None]
    out: dict[str, float | None] = {}
    if sums and len(sums) == len(moved):
        out |= SampledUpdate.read(torch.stack(sums).sum(0))
    with suppress(Exception):  # an optimiser of another kind
        out[schema.UPDATE_EPSILON_FACTOR] = epsilon_factor(optimizer)
    with suppress(Exception):
        out[schema.UPDATE_TRAINABLE], out[schema.UPDATE_REACHED] = trainable_share(model), reached_share(model)
    return {name: value for name, value in out.items() if value is not None}
