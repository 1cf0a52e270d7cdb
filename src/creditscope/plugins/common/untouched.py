"""Passes of our own over a trainer's model that leave the trainer as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[dict[nn.Parameter, Tensor | None]]:
    """Inside, dropout is off and gradients start empty; afterwards gradients, modes and random state are restored.

    Yields the trainer's gradients. Gradient checkpointing stays on: HF switches it off together with training mode.
    """
    modes = {module: module.training for module in model.modules()}
    grads = {p: p.grad for p in model.parameters()}
    device = next(iter(grads)).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            for module, mode in modes.items():
                module.training = mode and bool(getattr(module, "gradient_checkpointing", False))
            for p in grads:
                p.grad = None
            yield grads
        finally:
            for module, mode in modes.items():
                module.training = mode
            for p, grad in grads.items():
                p.grad = grad
