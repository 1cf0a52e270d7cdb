"""SkyRL 0.3.0, `RayPPOTrainer`: names as in train/trainer.py, train/generators/utils.py and the policy worker's
`forward_backward` (backends/skyrl_train/workers/worker.py), settings as in train/config/config.py."""

from __future__ import annotations

import math

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer, by_constant
from creditscope.methods import dialects, table
from creditscope.methods.axes import Method
from creditscope.runs import schema

_ALGORITHM = "trainer.algorithm"
_ESTIMATORS = {"grpo": table.GRPO, "rloo": dialects.VERL_RLOO.replace(dual_clip=None), "gae": table.PPO,
               "reinforce++": table.REINFORCE_PP}
_LOSSES = {"gspo": table.GSPO, "sapo": table.SAPO, "cispo": table.CISPO}
_MEANS = {"token_mean": "token_mean", "sequence_mean": "sequence_mean", "seq_mean_token_sum_norm": "constant"}


def skyrl_method(s: Settings) -> Method | None:
    """advantage_estimator, policy_loss_type and loss_reduction as one row; without a KL term, as its loss."""
    estimator, loss = s.word(f"{_ALGORITHM}.advantage_estimator"), s.word(f"{_ALGORITHM}.policy_loss_type")
    plain = loss in ("regular", "dual_clip")
    row = _ESTIMATORS.get(estimator) if plain else _LOSSES.get(loss) if estimator == "grpo" else None
    mean = _MEANS.get(s.word(f"{_ALGORITHM}.loss_reduction"))
    if row is None or mean is None:
        return None
    scaled = row.scale != "group_std" or s.switch(f"{_ALGORITHM}.grpo_norm_by_std")
    return row.replace(aggregate=mean, **({} if scaled else {"scale": "none", "std_eps": 0.0}))


def skyrl_updates(s: Settings) -> int | None:
    """update_epochs_per_batch · ⌈train_batch_size / policy_mini_batch_size⌉, both in prompts; unknown where it is
    asynchronous, as answers are then of several policies."""
    if s.switch("trainer.fully_async.enabled"):
        return None
    batches = s.number("trainer.train_batch_size") / max(1.0, s.number("trainer.policy_mini_batch_size"))
    return max(1, math.ceil(s.number("trainer.update_epochs_per_batch")) * math.ceil(batches))


SKYRL = Trainer(
    name="SkyRL", version="0.3.0", speech="own",
    marks=frozenset({"reward/avg_raw_reward", "policy/policy_loss", "loss/avg_final_rewards",
                     "policy/policy_entropy"}),
    metrics={
        "loss": "policy/policy_loss", schema.GRAD_NORM: "policy/grad_norm", "lr": "policy/policy_lr",
        schema.REWARD_MEAN: "reward/avg_raw_reward", "entropy": "policy/policy_entropy",
        schema.LENGTH_MEAN: "generate/avg_num_tokens", schema.LENGTH_MAX: "generate/max_num_tokens",
        "clip": "policy/loss_metrics/clip_ratio", "kl": "policy/policy_kl",
        schema.SAMPLER_GAP: "policy/rollout_train_logprobs_abs_diff_mean",
    },
    aliases={  # 0.1 and 0.2; the reward after a KL term where one is in the reward
        schema.REWARD_MEAN: ("loss/avg_raw_rewards", "loss/avg_final_rewards"),
        "clip": ("policy/ppo_clip_ratio",), schema.GRAD_NORM: ("policy/raw_grad_norm",),
        "length/min": ("generate/min_num_tokens",), "epoch": ("trainer/epoch",),
        "groups dropped": ("reward/num_zero_variance_filtered",),
    },
    held_out=r"eval/all/avg_score",
    logged={"loss/kl_loss_coef": f"{_ALGORITHM}.kl_loss_coef"},
    proofs={"policy/policy_kl": (f"{_ALGORITHM}.use_kl_loss", True),
            "reward/num_zero_variance_filtered": (f"{_ALGORITHM}.zero_variance_filter", True)},
    absent={
        schema.REWARD_STD: "not logged: the mean, the mean of positive rewards and pass@n are",
        schema.REWARD_MIN: "not logged", schema.REWARD_MAX: "not logged",
        "dead": "`reward/num_zero_variance_filtered` is a number of groups, and only with `zero_variance_filter`",
        "truncated": "not logged: `stop_reasons` stay with the answers",
        schema.SAMPLER_RATIO: "only under the name of the correction that is set",
    },
    defaults={
        f"{_ALGORITHM}.advantage_estimator": "grpo", f"{_ALGORITHM}.policy_loss_type": "regular",
        f"{_ALGORITHM}.loss_reduction": "token_mean", f"{_ALGORITHM}.grpo_norm_by_std": True,
        f"{_ALGORITHM}.use_kl_loss": True, f"{_ALGORITHM}.kl_loss_coef": 0.001,
        f"{_ALGORITHM}.zero_variance_filter": False, f"{_ALGORITHM}.dynamic_sampling.type": None,
        f"{_ALGORITHM}.max_seq_len": None, "trainer.update_epochs_per_batch": 1, "trainer.train_batch_size": 1024,
        "trainer.policy_mini_batch_size": 256, "trainer.fully_async.enabled": False,
        "generator.n_samples_per_prompt": 5, "generator.apply_overlong_filtering": False,
    },
    paths={
        "learning_rate": "trainer.policy.optimizer_config.lr",
        "grad_clip": "trainer.policy.optimizer_config.max_grad_norm",
        "weight_decay": "trainer.policy.optimizer_config.weight_decay",
        "temperature": "generator.sampling_params.temperature", "top_p": "generator.sampling_params.top_p",
        "top_k": "generator.sampling_params.top_k", "clip_low": f"{_ALGORITHM}.eps_clip_low",
        "clip_high": f"{_ALGORITHM}.eps_clip_high", "steps": "trainer.max_training_steps",
        "limit": "generator.sampling_params.max_generate_length", "group": "generator.n_samples_per_prompt",
        "lora": "trainer.policy.model.lora.rank",
    },
    words={
        "beta": f"{_ALGORITHM}.kl_loss_coef", "epochs": "trainer.update_epochs_per_batch",
        "minibatch": "trainer.policy_mini_batch_size", "prompts": "trainer.train_batch_size",
        "warmup": "trainer.policy.optimizer_config.num_warmup_steps",
        "schedule": "trainer.policy.optimizer_config.scheduler", "drop": f"{_ALGORITHM}.dynamic_sampling.type=filter",
        "correction": f"{_ALGORITHM}.off_policy_correction.tis_ratio_type=token",
        "even": f"{_ALGORITHM}.loss_reduction=token_mean",
    },
    rollouts="`export_path/dumped_evals/…/DATASET.jsonl` of evaluations; batches of training (`dump_data_batch`) are "
             "pickles, which are not opened",
    facts={
        "method": skyrl_method,
        "loss": lambda s: (f"advantage_estimator={s.word(f'{_ALGORITHM}.advantage_estimator')}, "
                           f"policy_loss_type={s.word(f'{_ALGORITHM}.policy_loss_type')}, "
                           f"loss_reduction={s.word(f'{_ALGORITHM}.loss_reduction')}"),
        "updates": skyrl_updates,
        "beta": lambda s: s.number(f"{_ALGORITHM}.kl_loss_coef") if s.switch(f"{_ALGORITHM}.use_kl_loss") else 0.0,
        "group": lambda s: s.number("generator.n_samples_per_prompt"),
        **NOTHING,
        "masked": lambda s: s.switch("generator.apply_overlong_filtering"),
        "dropped": lambda s: (s.switch(f"{_ALGORITHM}.zero_variance_filter")
                              or s.word(f"{_ALGORITHM}.dynamic_sampling.type") == "filter"),
        "dead_counted": lambda s: False,
        "per_token": lambda s: True,
        "sampler": lambda s: True,
        "horizon": lambda s: s.optional(f"{_ALGORITHM}.max_seq_len") if by_constant(skyrl_method(s)) else None,
    },)
