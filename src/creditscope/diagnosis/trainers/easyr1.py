"""EasyR1 at b44b311, a fork of verl 0.2 with settings of its own: what differs from verl's row. Names as in
verl/trainer/metrics.py and core_algos.py of that repository, settings as in its verl/trainer/config.py and
workers/*/config.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING
from creditscope.diagnosis.trainers.verl import VERL
from creditscope.methods import dialects
from creditscope.methods.axes import Method
from creditscope.runs import schema

_ESTIMATORS = {"grpo": dialects.VERL_GRPO, "rloo": dialects.VERL_RLOO, "gae": dialects.VERL_PPO,
               "reinforce_plus_plus": dialects.VERL_REINFORCE_PP}
_MEANS = {"token": "token_mean", "seq": "sequence_mean"}


def easyr1_method(s: Settings) -> Method | None:
    """adv_estimator and loss_avg_mode as one of verl's rows, for its default loss."""
    row, mean = _ESTIMATORS.get(s.word("algorithm.adv_estimator")), _MEANS.get(s.word("worker.actor.loss_avg_mode"))
    plain = s.word("worker.actor.loss_type") == "default"
    return None if row is None or mean is None or not plain else row.replace(aggregate=mean)


def easyr1_updates(s: Settings) -> int:
    """ppo_epochs · ⌈rollout_batch_size / global_batch_size⌉, both counted in prompts."""
    batches = s.number("data.rollout_batch_size") / max(1.0, s.number("worker.actor.global_batch_size"))
    return max(1, math.ceil(s.number("worker.actor.ppo_epochs")) * math.ceil(batches))


EASYR1 = replace(
    VERL, name="EasyR1", version="b44b311", speech="own", through="verl",
    marks=frozenset({"actor/pg_clipfrac_higher"}),
    metrics={**{ours: name for ours, name in VERL.metrics.items()
                if ours not in (schema.SAMPLER_RATIO, schema.SAMPLER_GAP)},
             "clip": "actor/pg_clipfrac_higher", "entropy": "actor/entropy_loss"},
    aliases={**{ours: names for ours, names in VERL.aliases.items() if ours not in ("entropy", schema.REWARD_STD)},
             "kl": ("actor/kl_penalty",)},
    held_out=r"val/reward_score",
    proofs={"actor/kl_loss": ("algorithm.use_kl_loss", True)}, logged={"actor/kl_coef": "algorithm.kl_coef"},
    absent={schema.REWARD_STD: "mean, minimum and maximum are logged", "dead": "not counted",
            schema.SAMPLER_RATIO: "not logged", schema.SAMPLER_GAP: "not logged"},
    defaults={
        "algorithm.adv_estimator": "grpo", "algorithm.use_kl_loss": False, "algorithm.kl_coef": 0.001,
        "algorithm.disable_kl": False, "algorithm.online_filtering": False, "worker.actor.loss_type": "default",
        "worker.actor.loss_avg_mode": "token", "worker.actor.ppo_epochs": 1, "worker.actor.global_batch_size": 256,
        "data.rollout_batch_size": 512, "data.max_response_length": 512, "worker.rollout.n": 1,
    },
    paths={
        "learning_rate": "worker.actor.optim.lr", "weight_decay": "worker.actor.optim.weight_decay",
        "grad_clip": "worker.actor.max_grad_norm", "optimizer": "worker.actor.optim.strategy",
        "temperature": "worker.rollout.temperature", "top_p": "worker.rollout.top_p", "top_k": "worker.rollout.top_k",
        "clip_low": "worker.actor.clip_ratio_low", "clip_high": "worker.actor.clip_ratio_high",
        "steps": "trainer.max_steps", "dtype": "worker.actor.fsdp.torch_dtype", "limit": "data.max_response_length",
        "group": "worker.rollout.n", "lora": "worker.actor.model.lora.rank",
    },
    words={
        "beta": "algorithm.kl_coef", "epochs": "worker.actor.ppo_epochs", "minibatch": "worker.actor.global_batch_size",
        "prompts": "data.rollout_batch_size", "warmup": "worker.actor.optim.lr_warmup_ratio",
        "schedule": "worker.actor.optim.lr_scheduler_type", "drop": "algorithm.online_filtering=true",
        "dump": "trainer.val_generations_to_log", "master": "worker.actor.fsdp.torch_dtype=fp32",
        "even": "worker.actor.loss_avg_mode=token",
    },
    rollouts="none: `generations.log` has answers of evaluations as plain text, without a mark where one ends",
    facts={
        **VERL.facts,
        "method": easyr1_method,
        "loss": lambda s: (f"adv_estimator={s.word('algorithm.adv_estimator')}, "
                           f"loss_type={s.word('worker.actor.loss_type')}"),
        "updates": easyr1_updates,
        "beta": lambda s: s.number("algorithm.kl_coef") if s.switch("algorithm.use_kl_loss") else 0.0,
        "group": lambda s: s.number("worker.rollout.n"),
        **NOTHING,  # no limit: clip_ratio counts answers as long as the padded response, which is max_response_length
        "dropped": lambda s: s.switch("algorithm.online_filtering"),
        "per_token": lambda s: True,
        "horizon": lambda s: None,
    })
