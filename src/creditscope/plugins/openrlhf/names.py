"""The names of OpenRLHF that we use. It has no callbacks: they are listed here, and a trainer without one is refused.

Nothing here imports OpenRLHF: its modules load vllm, ray and deepspeed.
"""

from __future__ import annotations

from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.versions import version

TESTED = ("0.11.2",)
"""The versions whose own ActorPPOTrainer was driven."""

TRAINER = ("training_step", "ppo_train", "strategy", "actor", "actor_loss_fn", "actor_optim", "replay_buffer", "args")
"""Of an ActorPPOTrainer: wrapped or read."""
STRATEGY = ("backward", "optimizer_step", "is_rank_0", "args", "stage")
"""Of its strategy: wrapped or read."""
EXPERIENCE = ("sequences", "attention_mask", "action_mask", "action_log_probs", "advantages", "rewards")
"""Of a batch: read."""
ARGUMENTS = ("actor.eps_clip_low_high", "actor.dual_clip", "actor.loss_agg_mode", "actor.policy_loss_type",
             "algo.advantage.estimator", "algo.advantage.is_correction_level", "algo.kl.use_loss",
             "algo.kl.init_coef", "ds.packing_samples", "ds.param_dtype", "ds.ring_attn_size",
             "ds.tensor_parallel_size", "train.dynamic_batch_enable", "train.max_epochs")
"""Settings: read."""
ACTOR_MODULE, ACTOR = "openrlhf.trainer.ray.ppo_actor", "PolicyModelActor"
"""The Ray actor that makes the trainer, and its module."""
COMMAND = "openrlhf.cli.train_ppo_ray"
"""The module of the training command, which starts that actor by its name."""
RAY_CLASS = "__ray_metadata__.modified_class.__ray_actor_class__"
"""Of Ray: the plain class of an actor."""
INIT = "init_model_from_pretrained"
"""The actor's method that makes `.trainer`."""


def require(what: str, given: object, names: tuple[str, ...]) -> None:
    """Refuse an object of OpenRLHF that lacks one of `names`; a dot goes one object down."""
    for name in names:
        found: Any = given
        for step in name.split("."):
            if not hasattr(found, step):
                raise CreditscopeError(f"{what} of openrlhf {version('openrlhf') or '(unknown)'} has no {name!r}, "
                                       f"which creditscope relies on; tested with openrlhf {', '.join(TESTED)}: "
                                       f"install one of these")
            found = getattr(found, step)


def check_trainer(trainer: Any) -> None:
    """Refuse what cannot be read, in one sentence each."""
    require(type(trainer).__name__, trainer, TRAINER)
    require("the strategy", trainer.strategy, STRATEGY)
    require("the settings", trainer.args, ARGUMENTS)
    args = trainer.args
    if getattr(trainer.actor, "model", None) is None:
        raise CreditscopeError("this trainer's actor holds no model, so there is no policy to read: make the hook in "
                               "the process of the policy, after init_model_from_pretrained")
    if args.ds.param_dtype == "fp16":
        raise CreditscopeError("--ds.param_dtype fp16: DeepSpeed multiplies the loss by a scale that changes, and w "
                               "with it; train in bf16")
    for name, size in (("ring_attn_size", args.ds.ring_attn_size),
                       ("tensor_parallel_size", args.ds.tensor_parallel_size)):
        if size > 1:
            raise CreditscopeError(f"--ds.{name} {size}: several ranks then hold parts of one row, and the hook reads "
                                   f"ranks that have rows of their own; set it to 1")


def why_no_gram(trainer: Any) -> str | None:
    """Why the geometry cannot be read under these settings; None where it can."""
    if trainer.strategy.stage == 3:
        return "--ds.zero_stage 3 cuts the weights over the ranks: the Gram is read at stage 0, 1 or 2"
    if trainer.args.ds.packing_samples:
        return "--ds.packing_samples puts several rollouts into one row: the Gram is read without it"
    return None
