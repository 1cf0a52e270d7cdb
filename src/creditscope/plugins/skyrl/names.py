"""The names of SkyRL that we use beyond its documented callbacks; a trainer or worker without one is refused."""

from __future__ import annotations

from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.versions import version

TESTED = ("0.3.0",)
"""The versions whose own worker, trainer methods and callbacks were driven."""

TRAINER = ("compute_advantages_and_returns", "build_models", "add_callback", "policy_model", "cfg", "tracker")
"""Of a RayPPOTrainer: wrapped or read. The callback's events are documented."""
WORKER = ("forward_backward", "_forward_backward_micro", "optim_step", "model", "optimizer", "cfg", "mesh_rank")
"""Of a policy worker: extended or read."""
BATCH = ("sequences", "attention_mask", "response_mask", "loss_mask", "advantages", "rewards")
"""Of a batch after its advantages were computed: read."""
EXPERIENCE = ("sequences", "attention_mask", "loss_mask", "action_log_probs", "num_actions")
"""Of a micro-batch: read."""
ALGORITHM = ("advantage_estimator", "policy_loss_type", "loss_reduction", "eps_clip_low", "eps_clip_high",
             "clip_ratio_c", "max_seq_len", "grpo_norm_by_std", "use_kl_loss", "kl_loss_coef", "temperature")
"""Of cfg.trainer.algorithm: read."""


def require(what: str, given: Any, names: tuple[str, ...]) -> None:
    """Refuse an object of SkyRL that lacks one of `names`; `given` may be a mapping of tensors."""
    missing = [name for name in names if not (name in given if hasattr(given, "keys") else hasattr(given, name))]
    if missing:
        raise CreditscopeError(f"{what} of skyrl {version('skyrl') or '(unknown)'} has no {missing[0]!r}, which "
                               f"creditscope relies on; tested with skyrl {', '.join(TESTED)}: install one of these")


def check_trainer(trainer: Any) -> None:
    """Refuse what cannot be read, in one sentence each."""
    require(type(trainer).__name__, trainer, TRAINER)
    require("cfg.trainer.algorithm", trainer.cfg.trainer.algorithm, ALGORITHM)
    cfg = trainer.cfg.trainer
    if cfg.strategy != "fsdp":
        raise CreditscopeError(f"trainer.strategy={cfg.strategy!r}: the workers of creditscope.plugins.skyrl are those "
                               f"of FSDP; set trainer.strategy=fsdp, or leave the callback out")
    if cfg.max_tokens_per_microbatch > 0:
        raise CreditscopeError(f"trainer.max_tokens_per_microbatch={cfg.max_tokens_per_microbatch}: rows are then "
                               f"dealt to micro-batches by their lengths, and their rewards cannot be followed; set "
                               f"it to -1, and micro_train_batch_size_per_gpu instead")
    if cfg.policy.sequence_parallel_size > 1:
        raise CreditscopeError(f"trainer.policy.sequence_parallel_size={cfg.policy.sequence_parallel_size}: several "
                               f"ranks then hold parts of one row; set it to 1")


def why_no_gram(cfg: Any) -> str | None:
    """Why the geometry cannot be read under the settings `cfg.trainer`; None where it can."""
    if cfg.remove_microbatch_padding:
        return "trainer.remove_microbatch_padding=true packs the rollouts into one row: the Gram is read with false"
    return None
