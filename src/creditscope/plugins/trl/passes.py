"""A pass over TRL's batch that does not change the trainer.

TRL multiplies by the head's weight itself, tile by tile, where the microscope cannot read it. This is the model's plain
forward on the same ids and attention mask: it gives TRL's log-probs to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.policy.scoring import Scores

Inputs = Mapping[str, Any]


def logits(model: nn.Module, inputs: Inputs, temperature: float) -> Tensor:
    """(B, T, V) z/τ of each completion token, in float32 or wider."""
    if inputs.get("pixel_values") is not None:
        raise CreditscopeError("the batch has images, and only text is read so far; leave the callback out")
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attend = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    z: Tensor = model(input_ids=ids, attention_mask=attend, use_cache=False, logits_to_keep=width + 1).logits
    z = z[:, -width - 1:-1]
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    return z / temperature if temperature != 1.0 else z


def chosen(z: Tensor, inputs: Inputs) -> Tensor:
    """(B, T) log π of the chosen tokens, from their logits."""
    picked: Tensor = z.gather(2, inputs["completion_ids"][..., None]).squeeze(2) - z.logsumexp(dim=2)
    return picked


@torch.no_grad()
def entropy(z: Tensor) -> Tensor:
    """(B, T) −Σ_v π(v) log π(v), in nats."""
    found: Tensor = torch.special.entr(z.detach().softmax(dim=2)).sum(dim=2)
    return found


@torch.no_grad()
def score(trainer: Any, inputs: Inputs) -> Scores:
    """log π, entropy and Σπ² of every token under the present weights, a micro-batch at a time."""
    found = []
    rows, size = len(inputs["completion_ids"]), int(trainer.args.per_device_train_batch_size)
    model = trainer.accelerator.unwrap_model(trainer.model)
    with untouched(model), trainer.accelerator.autocast():
        for start in range(0, rows, size):
            part = take(inputs, slice(start, start + size))
            z = logits(model, part, trainer.temperature)
            found.append((chosen(z, part), entropy(z), z.softmax(dim=2).square().sum(dim=2)))
    return Scores(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def take(inputs: Inputs, rows: Any) -> dict[str, Any]:
    """The chosen rows of a batch; values without rows are kept."""
    return {name: value[rows] if isinstance(value, Tensor) and value.dim() else value
            for name, value in inputs.items()}


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
