"""A TRL run's settings under the names of `creditscope lab train`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from creditscope.files.versions import software
from creditscope.plugins.trl.source import TrainerSource

ARGUMENTS = ("loss_type", "loss_weights", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha",
             "use_weighting", "discopop_tau", "precompute_ref_log_probs", "sync_ref_model", "ref_model_sync_steps",
             "ref_model_mixup_alpha", "max_length", "truncation_mode", "importance_sampling_level", "epsilon",
             "epsilon_high", "delta", "beta", "scale_rewards", "off_policy_mask_threshold",
             "mask_truncated_completions", "num_generations", "num_iterations", "steps_per_generation",
             "gradient_accumulation_steps", "per_device_train_batch_size", "max_steps", "max_completion_length",
             "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "use_vllm", "gradient_checkpointing",
             "bf16", "fp16", "optim", "learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio",
             "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm")
"""Settings that are kept as TRL spells them."""


def settings_of(trainer: Any, source: TrainerSource, every: int, gram: bool) -> dict[str, Any]:
    args = trainer.args
    inner = trainer.accelerator.unwrap_model(trainer.model)
    name = str(getattr(inner.config, "_name_or_path", "") or type(inner).__name__)
    name = Path(name).name if Path(name).is_dir() else name
    return {
        "engine": "trl", "trainer": type(trainer).__name__, "model": name, "task": "the trainer's",
        "method": source.name, "beta": args.beta, "credit": getattr(trainer, "credit", None),
        "steps": trainer.state.max_steps, "accumulate": args.gradient_accumulation_steps,
        "processes": trainer.accelerator.num_processes, "lr": args.learning_rate, "weight_decay": args.weight_decay,
        "beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon,
        "clip_norm": args.max_grad_norm or None, "seed": args.seed, "dtype": dtype_of(inner),
        "scope": "light" if gram else "off", "every": every, **source.settings(),
        "trl": {key: _plain(getattr(args, key)) for key in ARGUMENTS if hasattr(args, key)}}


def dtype_of(model: nn.Module) -> str | None:
    """The type that most of the trained weights are stored in, as `--dtype` spells it."""
    sizes: Counter[str] = Counter()
    for p in model.parameters():
        sizes[str(p.dtype).removeprefix("torch.")] += p.numel() if p.requires_grad else 0
    return max(sizes, key=sizes.__getitem__, default=None)


def versions() -> dict[str, Any]:
    packages = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "numpy")
    return software(packages) | {"devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
