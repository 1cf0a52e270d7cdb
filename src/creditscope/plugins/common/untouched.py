"""Passes of our own over a trainer's model that leave the trainer as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[dict[nn.Parameter, Tensor | None]]:
    """Inside, dropout is off and gradients start empty; afterwards gradients, modes and random state are restored.

    Hooks that run when a gradient has been added to `.grad` are off too: by them ZeRO reduces it and empties `.grad`,
    and an optimiser that steps inside the backward pass would step. Gradient checkpointing stays on: HF switches it off
    together with training mode. Yields the trainer's gradients.
    """
    modes = {module: module.training for module in model.modules()}
    grads = {p: p.grad for p in model.parameters()}
    hooks = [(held, dict(held)) for p in grads if (held := getattr(p, "_post_accumulate_grad_hooks", None))]
    device = next(iter(grads)).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            for held, _ in hooks:
                held.clear()
            for module, mode in modes.items():
                module.training = mode and bool(getattr(module, "gradient_checkpointing", False))
            for p in grads:
                p.grad = None
            yield grads
        finally:
            for held, kept in hooks:
                held.update(kept)
            for module, mode in modes.items():
                module.training = mode
            for p, grad in grads.items():
                p.grad = grad
