"""The names of TRL that we use. Many are private, so they are listed here, and a trainer without one is refused."""

from __future__ import annotations

import sys
from typing import Any

from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

from creditscope.errors import CreditscopeError
from creditscope.files.versions import version
from creditscope.plugins.trl import zero

TESTED = ("1.14.2", "1.16.0")
"""The versions on which `make contracts` ran."""

ATTRIBUTES = ("_buffered_inputs", "_step", "_metrics", "_logs", "_generate_and_score_completions", "accelerator",
              "args", "current_gradient_accumulation_steps", "epsilon_high", "epsilon_low", "max_completion_length",
              "model", "num_generations", "num_iterations", "processing_class", "reward_weights", "temperature")
"""Of a trainer: read or wrapped by the callback."""
OVERRIDDEN = ("_generate_and_score_completions", "_compute_loss", "_clip_grad_norm")
"""Of a trainer: extended by the mixin."""
TENSORS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
"""Of every batch; `batch_keys` has the others."""
PAIR_ATTRIBUTES = ("_metrics", "accelerator", "args", "compute_loss", "current_gradient_accumulation_steps",
                   "f_divergence_type", "ld_alpha", "loss_types", "loss_weights", "model", "processing_class",
                   "ref_model", "use_weighting")
"""Of a DPOTrainer."""
FUSED = "add_fused_lm_head"
"""Of DPOTrainer's module: with it the model returns `log_probs`."""
PAIR_TENSORS = ("input_ids", "attention_mask", "completion_mask")
"""Of every batch of a DPOTrainer: rows of chosen answers, then of rejected ones."""
PAIR_SUMS = ("ref_chosen_logps", "ref_rejected_logps")
"""Of its batches too, with precompute_ref_log_probs."""
LATE = ("current_gradient_accumulation_steps",)  # set at the start of the first step


def require(what: str, given: object, names: tuple[str, ...]) -> None:
    """Refuse an object of TRL that lacks one of `names`; `given` may be a mapping."""
    has = given.__contains__ if isinstance(given, dict) else lambda name: hasattr(given, name)
    missing = [name for name in names if not has(name)]
    if missing:
        raise CreditscopeError(f"{what} of trl {version('trl') or '(unknown)'} has no {missing[0]!r}, which "
                               f"creditscope relies on; tested with trl {', '.join(TESTED)}: install one of these")


def batch_keys(trainer: Any) -> tuple[str, ...]:
    """The keys of a batch that this trainer generated, by its settings.

    The absence of a key has a meaning (π_old is the live policy, no tool output), so a key that TRL renamed would be
    read as another loss.
    """
    if isinstance(trainer, RLOOTrainer):
        return (*TENSORS, "old_logps")
    args = trainer.args
    corrected = bool(args.use_vllm and args.vllm_importance_sampling_correction)
    # TRL's words: if generation and optimisation steps are aligned, importance sampling isn't necessary.
    moves = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
    asked = {"old_per_token_logps": moves or corrected, "importance_sampling_ratio": corrected,
             "tool_mask": bool(getattr(trainer, "tools", None)), "ref_per_token_logps": bool(args.beta)}
    return (*TENSORS, "num_items_in_batch", *(name for name, given in asked.items() if given))


def check_trainer(trainer: Any) -> None:
    if isinstance(trainer, DPOTrainer):
        check_pairs(trainer)
    elif isinstance(trainer, GRPOTrainer | RLOOTrainer):
        check_generations(trainer)
    else:
        raise CreditscopeError(f"ScopeCallback reads GRPOTrainer, RLOOTrainer, DPOTrainer and their subclasses; this "
                               f"is {type(trainer).__name__}")
    check_engine(trainer)


def check_generations(trainer: Any) -> None:
    require(type(trainer).__name__, trainer, tuple(name for name in ATTRIBUTES if name not in LATE))
    parts, step = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
    if parts % step:
        raise CreditscopeError(f"steps_per_generation={parts} is no multiple of gradient_accumulation_steps={step}: an "
                               f"optimiser step then takes rows of several generations, of which TRL keeps the last "
                               f"alone; set steps_per_generation to a multiple")


def returns_log_probs() -> bool:
    """Whether the model of a DPOTrainer returns log π of each token, as in TRL 1.16; in 1.14.2 it returns logits."""
    return hasattr(sys.modules[DPOTrainer.__module__], FUSED)


def check_pairs(trainer: Any) -> None:
    if not returns_log_probs():
        raise CreditscopeError(f"the DPOTrainer of trl {version('trl') or '(unknown)'} does not take log-probs from "
                               f"its model ({FUSED} is missing), where their gradient is read; install trl "
                               f"{TESTED[-1]}")
    require(type(trainer).__name__, trainer, tuple(name for name in PAIR_ATTRIBUTES if name not in LATE))
    for name in ("padding_free", "use_liger_kernel"):
        # TRL 1.16 sets padding_free of the trainer back to False, with a warning.
        if getattr(trainer, name, getattr(trainer.args, name, False)):
            raise CreditscopeError(f"{name}=True changes the model's forward, and rows are read from the plain one; "
                                   f"set {name}=False")
    if _engine(trainer) == "DEEPSPEED":
        raise CreditscopeError("a DPOTrainer is not read under DeepSpeed, whose engine scales the gradient that w is "
                               "taken from; train in one process, with DDP or with FSDP 2")
    if getattr(trainer, "_is_vision_dataset", False):
        raise CreditscopeError("the dataset has images, and only text is read so far; leave the callback out")


def _engine(trainer: Any) -> str:
    """What accelerate trains with: NO for one process."""
    return str(getattr(trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type))


def check_engine(trainer: Any) -> None:
    kind = _engine(trainer)
    readable = "train in one process, with DDP, FSDP 2 or ZeRO 1 or 2"
    if kind == "FSDP" and getattr(getattr(trainer.accelerator.state, "fsdp_plugin", None), "fsdp_version", 1) != 2:
        raise CreditscopeError(f"the trainer's weights are sharded by FSDP 1, which cannot be read; set fsdp_version "
                               f"to 2, or {readable}")
    if zero.is_zero(trainer):
        zero.check_stage(trainer)
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"):
        raise CreditscopeError(f"the trainer runs under {kind}, which cannot be read; {readable}")
    shape = getattr(trainer.accelerator, "parallelism_config", None)
    cut = [name for name in ("tp", "cp", "sp") if getattr(shape, f"{name}_enabled", False)]
    if cut:
        raise CreditscopeError(f"{cut[0]}_size is above 1 in the trainer's parallelism_config, and the callback reads "
                               f"ranks that have rows of their own; set it to 1")
