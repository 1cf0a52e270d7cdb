"""A TRL trainer under DeepSpeed ZeRO 1 or 2: a reading in front of the engine's own step.

accelerate's `accelerator.backward` runs `engine.backward(loss)` and, at the last micro-batch, `engine.step()`; the
Trainer calls `on_pre_optimizer_step` when both are done. The rows of a step have to be read at the weights before it,
so `step` of this one engine is wrapped. Weights are whole on every rank, as under DDP; gradients are not in `.grad`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from creditscope.errors import CreditscopeError


def is_zero(trainer: Any) -> bool:
    kind = trainer.accelerator.distributed_type
    return str(getattr(kind, "value", kind)) == "DEEPSPEED"


def check_stage(trainer: Any) -> None:
    stage = int(trainer.accelerator.state.deepspeed_plugin.zero_stage)
    if stage > 2:
        raise CreditscopeError(f"the trainer's weights are cut up by ZeRO {stage}, whose passes cannot be repeated "
                               f"beside its own; set the stage to 2 or less, or shard with FSDP 2")


def before_steps(engine: Any, read: Callable[[], None]) -> Callable[[], None]:
    """Call `read` in front of each optimiser step of this engine; returns a function that ends it."""
    if not all(callable(getattr(engine, name, None)) for name in ("step", "is_gradient_accumulation_boundary")):
        raise CreditscopeError(f"a {type(engine).__name__} has no step() or no is_gradient_accumulation_boundary(), "
                               f"which creditscope relies on; tested with deepspeed 0.19.8")
    inner = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            read()
        return inner(*args, **kwargs)

    engine.step = step

    def end() -> None:
        if engine.__dict__.get("step") is step:
            del engine.step

    return end


def reduced(grads: Mapping[nn.Parameter, Tensor | None]) -> dict[nn.Parameter, Tensor | None]:
    """The gradients that the engine will step on, whole on every rank: every rank calls this."""
    whole = importlib.import_module("deepspeed.utils").safe_get_full_grad
    return {p: whole(p) if p.requires_grad else None for p in grads}
