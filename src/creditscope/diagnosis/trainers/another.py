"""Any other program with a reward per step. Its names are guessed from common ones; no setting is known or assumed."""

from __future__ import annotations

from creditscope.diagnosis.trainers.trainer import FACTS, Trainer
from creditscope.runs import schema

_REWARDS = ("reward", "reward_mean", "mean_reward", "avg_reward", "average_reward", "rewards_mean", "rewards/mean",
            "train_reward", "reward_avg", "mean_score", "rollout/raw_reward", "reward/avg_raw_reward",
            "objective/scores", "env/all/reward/total", schema.REWARD_MEAN)


ANOTHER = Trainer(
    name="another program", version="", speech="other", marks=frozenset(_REWARDS), metrics={
        "loss": "loss", schema.GRAD_NORM: "grad_norm", "lr": "lr", schema.REWARD_MEAN: "reward_mean",
        schema.REWARD_STD: "reward_std", "dead": "frac_reward_zero_std", "entropy": "entropy",
        schema.LENGTH_MEAN: "response_length", schema.LENGTH_MAX: "max_length", "truncated": "truncated",
        "clip": "clip_frac", "kl": "kl"},
    aliases={
        schema.REWARD_MEAN: _REWARDS, schema.REWARD_STD: ("std_reward", "reward/std", "rewards/std", "rewards_std"),
        schema.REWARD_MIN: ("reward_min", "min_reward"), schema.REWARD_MAX: ("reward_max", "max_reward"),
        "loss": ("policy_loss", "pg_loss", "actor_loss", "train_loss"),
        "lr": ("learning_rate", "actor_lr"), "epoch": ("epoch",),
        "kl": ("kl_divergence", "kl_mean", "mean_kl", "kl_loss", "kl_ref", "objective/kl"),
        "kl old": ("approx_kl", "ppo_kl"),
        "clip": ("clipfrac", "clip_fraction", "clip_ratio", "ppo_clip_ratio"),
        schema.GRAD_NORM: ("gradient_norm", "actor_grad_norm"),
        "entropy": ("mean_entropy", "policy_entropy", "entropy_mean", "entropy_loss"),
        "dead": ("frac_zero_std", "zero_std_frac", "dead_groups", "dead_group_frac", "frac_dead_groups"),
        "truncated": ("truncation_rate", "truncated_ratio", "frac_truncated", "clipped_ratio", "response_clip_ratio"),
        schema.LENGTH_MEAN: ("mean_length", "completion_length", "avg_response_length", "mean_response_length",
                             "mean_completion_length", "avg_length", "completion_len", "response_len", "gen_length"),
        schema.EVAL_REWARD: ("eval_reward", "val_reward", "eval_reward_mean", "eval_mean_reward", "test_reward",
                             "eval_accuracy", "eval_acc", "val_accuracy", "val_acc", "test_accuracy"),
    },
    paths={"limit": "max_tokens"}, defaults={},
    facts={**{name: lambda s: None for name in FACTS}, "loss": lambda s: "the loss of this program",
           "masked": lambda s: False, "dropped": lambda s: False, "dead_counted": lambda s: True,
           "per_token": lambda s: True, "sampler": lambda s: None})
