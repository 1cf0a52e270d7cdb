"""NeMo-RL 0.6.0, `grpo_train`: names as in algorithms/grpo.py, experience/rollouts.py and loss/loss_functions.py,
defaults as in examples/configs/grpo_math_1B.yaml. Trackers have `train/` before each name."""

from __future__ import annotations

import math

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer
from creditscope.methods import table
from creditscope.methods.axes import Method
from creditscope.runs import schema


def nemo_rl_method(s: Settings) -> Method | None:
    """adv_estimator, the leave-one-out baseline and the loss's mean as one row; None for other losses."""
    other = ("sequence_level_importance_ratios", "use_cispo", "disable_ppo_ratio")
    if s.word("grpo.adv_estimator.name") != "grpo" or any(s.switch(f"loss_fn.{name}") for name in other):
        return None
    row = table.GRPO.replace(aggregate="token_mean" if s.switch("loss_fn.token_level_loss") else "sequence_mean",
                             beta=s.number("loss_fn.reference_policy_kl_penalty"))
    if s.switch("grpo.use_leave_one_out_baseline"):
        row = row.replace(baseline="leave_one_out")
    return row if s.switch("grpo.normalize_rewards") else row.replace(scale="none", std_eps=0.0)


def nemo_rl_updates(s: Settings) -> int:
    """⌈num_prompts_per_step · num_generations_per_prompt / train_global_batch_size⌉."""
    if s.switch("loss_fn.force_on_policy_ratio"):
        return 1
    answers = s.number("grpo.num_prompts_per_step") * s.number("grpo.num_generations_per_prompt")
    return max(1, math.ceil(answers / max(1.0, s.number("policy.train_global_batch_size"))))


NEMO_RL = Trainer(
    name="NeMo-RL", version="0.6.0", speech="own",
    marks=frozenset({"mean_gen_tokens_per_sample", "gen_kl_error", "token_mult_prob_error", "Generation KL Error"}),
    metrics={
        "loss": "loss", schema.GRAD_NORM: "grad_norm", "lr": "lr", schema.REWARD_MEAN: "reward",
        "entropy": "approx_entropy", schema.LENGTH_MEAN: "mean_gen_tokens_per_sample",
        schema.LENGTH_MAX: "max_gen_tokens_per_sample", "truncated": "truncation_rate", "kl": "kl_penalty",
        schema.SAMPLER_RATIO: "sampling_importance_ratio",
        schema.ADVANTAGE_MAX: "advantages/max", schema.ADVANTAGE_MIN: "advantages/min",
    },
    aliases={  # the console
        "loss": ("Loss",), schema.REWARD_MEAN: ("Avg Reward", "Avg Total Reward"),
        schema.LENGTH_MEAN: ("Mean Generation Length",), "sampler kl": ("gen_kl_error", "Generation KL Error"),
    },
    held_out=r"validation/accuracy",
    absent={
        schema.REWARD_STD: "not logged", schema.REWARD_MIN: "not logged", schema.REWARD_MAX: "not logged",
        "dead": "`baseline_reward/pct_0` and `pct_1` are logged by its asynchronous loop alone",
        "clip": "`probs_ratio_clamped` is the mean of the bounded ratio, not a share of tokens",
        schema.SAMPLER_GAP: "`gen_kl_error` is a KL; `token_mult_prob_error` the mean of exp|Δlog π|",
    },
    defaults={
        "grpo.adv_estimator.name": "grpo", "grpo.normalize_rewards": True, "grpo.use_leave_one_out_baseline": True,
        "grpo.num_prompts_per_step": 32, "grpo.num_generations_per_prompt": 16, "grpo.overlong_filtering": False,
        "grpo.use_dynamic_sampling": False, "policy.train_global_batch_size": 512,
        "loss_fn.reference_policy_kl_penalty": 0.01, "loss_fn.use_kl_in_reward": False,
        "loss_fn.sequence_level_importance_ratios": False, "loss_fn.use_cispo": False,
        "loss_fn.disable_ppo_ratio": False, "loss_fn.token_level_loss": True, "loss_fn.force_on_policy_ratio": False,
    },
    paths={
        "learning_rate": "policy.optimizer.kwargs.lr", "adam_epsilon": "policy.optimizer.kwargs.eps",
        "weight_decay": "policy.optimizer.kwargs.weight_decay", "grad_clip": "policy.max_grad_norm",
        "optimizer": "policy.optimizer.name", "temperature": "policy.generation.temperature",
        "top_p": "policy.generation.top_p", "top_k": "policy.generation.top_k", "clip_low": "loss_fn.ratio_clip_min",
        "clip_high": "loss_fn.ratio_clip_max", "steps": "grpo.max_num_steps", "dtype": "policy.precision",
        "limit": "policy.generation.max_new_tokens", "group": "grpo.num_generations_per_prompt",
    },
    words={
        "beta": "loss_fn.reference_policy_kl_penalty", "minibatch": "policy.train_global_batch_size",
        "prompts": "grpo.num_prompts_per_step", "warmup": "total_iters of policy.scheduler",
        "schedule": "policy.scheduler", "drop": "grpo.use_dynamic_sampling=true", "dump": "logger.log_dir",
        "correction": "loss_fn.use_importance_sampling_correction=true", "even": "loss_fn.token_level_loss=true",
    },
    rollouts="LOG_DIR/exp_N/train_data_stepN.jsonl, with tokens, masks and log-probs of the sampler",
    facts={
        "method": nemo_rl_method,
        "loss": lambda s: (f"adv_estimator={s.word('grpo.adv_estimator.name')}, "
                           f"token_level_loss={s.word('loss_fn.token_level_loss')}"),
        "updates": nemo_rl_updates,
        "beta": lambda s: 0.0 if s.switch("loss_fn.use_kl_in_reward") else s.number(
            "loss_fn.reference_policy_kl_penalty"),
        "group": lambda s: s.number("grpo.num_generations_per_prompt"),
        **NOTHING,
        "masked": lambda s: s.switch("grpo.overlong_filtering"),
        "dropped": lambda s: s.switch("grpo.use_dynamic_sampling"),
        "dead_counted": lambda s: False,
        "per_token": lambda s: True,
        "sampler": lambda s: True,
        "horizon": lambda s: None,
    },)
