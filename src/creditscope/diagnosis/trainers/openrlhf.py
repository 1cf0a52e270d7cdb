"""OpenRLHF 0.11.2, `PPOTrainer`: names as in trainer/ppo_trainer.py (`_compute_rollout_stats`), ray/ppo_actor.py
(`training_step`) and ppo_utils/experience_maker.py, settings as in cli/train_ppo_ray.py."""

from __future__ import annotations

import math

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer
from creditscope.methods import dialects, table
from creditscope.methods.axes import Method
from creditscope.runs import schema

_ESTIMATORS = {"group_norm": table.GRPO, "dr_grpo": table.DR_GRPO, "gae": table.PPO,
               "rloo": dialects.VERL_RLOO.replace(dual_clip=None),
               "reinforce": table.REINFORCE_PP, "reinforce_baseline": table.REINFORCE_PP_BASELINE}
_MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}


def openrlhf_method(s: Settings) -> Method | None:
    """algo.advantage.estimator, actor.policy_loss_type and actor.loss_agg_mode as one row; without a KL term."""
    estimator, mean = s.word("algo.advantage.estimator"), _MEANS.get(s.word("actor.loss_agg_mode"))
    if s.word("actor.policy_loss_type") == "gspo":  # its ratio is a sequence's, and so is its mean
        return table.GSPO if estimator == "group_norm" else None
    row = _ESTIMATORS.get(estimator)
    return None if row is None or mean is None else row.replace(aggregate=mean)


def openrlhf_updates(s: Settings) -> int:
    """max_epochs · ⌈rollout.batch_size · n_samples_per_prompt / train.batch_size⌉; the last counts answers."""
    answers = s.number("rollout.batch_size") * s.number("rollout.n_samples_per_prompt")
    return max(1, math.ceil(s.number("train.max_epochs")) * math.ceil(answers / max(1.0, s.number("train.batch_size"))))


OPENRLHF = Trainer(
    name="OpenRLHF", version="0.11.2", speech="own", flag="--",
    marks=frozenset({"rollout/truncated_rate", "rollout/response_length_mean", "ppo_clip_ratio", "logprobs_diff"}),
    metrics={
        "loss": "policy_loss", schema.GRAD_NORM: "actor_grad_norm", "lr": "actor_lr",
        schema.REWARD_MEAN: "rollout/reward_mean", schema.REWARD_STD: "rollout/reward_std",
        schema.LENGTH_MEAN: "rollout/response_length_mean", "truncated": "rollout/truncated_rate",
        "clip": "ppo_clip_ratio", "entropy": "entropy_loss", "kl": "kl",
    },
    aliases={  # of a step of the actor, not of the rollouts; before 0.9 the only ones
        schema.REWARD_MEAN: ("reward",), schema.LENGTH_MEAN: ("response_length",),
        "truncated": ("response_clip_ratio",), "kl old": ("ppo_kl",), "spread in groups": ("group_reward_std",),
    },
    held_out=r"eval_(?!response_length|truncated).+_pass1",
    absent={
        schema.REWARD_MIN: "not logged", schema.REWARD_MAX: "not logged",
        "dead": "not counted; `group_reward_std` is the mean of the groups' stds", schema.LENGTH_MAX: "not logged",
        schema.SAMPLER_RATIO: "not logged",
        schema.SAMPLER_GAP: "`vllm_kl` is the mean of a signed difference, and small where both signs occur",
    },
    defaults={
        "algo.advantage.estimator": "gae", "algo.kl.use_loss": False, "algo.kl.init_coef": 0.01,
        "algo.dynamic_filtering_enable": False, "actor.policy_loss_type": "ppo", "actor.loss_agg_mode": "token-mean",
        "rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1, "train.batch_size": 128, "train.max_epochs": 1,
        "algo.advantage.is_correction_level": "off",
    },
    paths={
        "learning_rate": "actor.adam.lr", "adam_epsilon": "actor.adam.eps", "weight_decay": "actor.adam.weight_decay",
        "grad_clip": "actor.max_norm", "optimizer": "actor.optim", "temperature": "rollout.temperature",
        "top_p": "rollout.top_p", "clip_low": "actor.eps_clip", "dtype": "ds.param_dtype",
        "limit": "rollout.max_new_tokens", "group": "rollout.n_samples_per_prompt", "lora": "ds.lora.rank",
    },
    words={
        "beta": "algo.kl.init_coef", "epochs": "train.max_epochs", "minibatch": "train.batch_size",
        "prompts": "rollout.batch_size", "warmup": "actor.lr_warmup_ratio", "schedule": "actor.lr_scheduler",
        "drop": "algo.dynamic_filtering_enable", "correction": "algo.advantage.is_correction_level=token",
        "even": "actor.loss_agg_mode=token-mean",
    },
    remedies={"entropy": "a smaller --actor.adam.lr, or --actor.eps_clip_low_high 0.2 0.28 with several updates per "
              "batch"},
    rollouts="none: one decoded answer per step goes to the console and to trackers",
    facts={
        "method": openrlhf_method,
        "loss": lambda s: (f"estimator={s.word('algo.advantage.estimator')}, "
                           f"policy_loss_type={s.word('actor.policy_loss_type')}"),
        "updates": openrlhf_updates,
        "beta": lambda s: s.number("algo.kl.init_coef") if s.switch("algo.kl.use_loss") else 0.0,
        "group": lambda s: s.number("rollout.n_samples_per_prompt"),
        **NOTHING,  # no limit: truncated_rate counts answers that the sampler says were cut
        "dropped": lambda s: s.switch("algo.dynamic_filtering_enable"),
        "dead_counted": lambda s: False,
        "per_token": lambda s: True,
        "sampler": lambda s: True,
        "horizon": lambda s: None,
    },)
