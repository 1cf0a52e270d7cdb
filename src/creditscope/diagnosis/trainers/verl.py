"""verl 0.9.1, its v1 trainer: names and defaults are its own."""

from __future__ import annotations

import math

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer
from creditscope.methods import dialects
from creditscope.methods.axes import Method
from creditscope.runs import schema

_ACTOR = "actor_rollout_ref.actor"
_VERL_LOSSES = {"gspo": dialects.VERL_GSPO, "sapo": dialects.VERL_SAPO, "cispo": dialects.VERL_CISPO,
                "gpg": dialects.VERL_GPG, "dppo_tv": dialects.VERL_DPPO, "dppo_kl": dialects.VERL_DPPO_KL}
_VERL_OWN_MEAN = {"geo_mean": dialects.VERL_GMPO, "dro": dialects.VERL_DRO}
"""Losses that do not average by agg_loss."""
_VERL_ADVANTAGES = {"grpo": dialects.VERL_GRPO, "grpo_vectorized": dialects.VERL_GRPO, "rloo": dialects.VERL_RLOO,
                    "rloo_vectorized": dialects.VERL_RLOO, "opo": dialects.VERL_OPO, "gae": dialects.VERL_PPO,
                    "reinforce_plus_plus": dialects.VERL_REINFORCE_PP,
                    "reinforce_plus_plus_baseline": dialects.VERL_REINFORCE_PP_BASELINE}
_VERL_MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum",
               "seq-mean-token-sum-norm": "constant", "token-sum": "token_sum"}


def verl_method(s: Settings) -> Method | None:
    """adv_estimator, loss_mode and loss_agg_mode as one row; without a KL term, as `actor/pg_loss` has none."""
    mode, estimator = s.word(f"{_ACTOR}.policy_loss.loss_mode"), s.word("algorithm.adv_estimator")
    losses = _VERL_LOSSES | _VERL_OWN_MEAN if "grpo" in estimator else {}
    row = _VERL_ADVANTAGES.get(estimator) if mode == "vanilla" else losses.get(mode)
    mean = _VERL_MEANS.get(s.word(f"{_ACTOR}.loss_agg_mode"))
    if row is None or mean is None:
        return None
    scaled = row.scale == "group_std" and s.switch("algorithm.norm_adv_by_std_in_grpo")
    scale = {"scale": "none", "std_eps": 0.0} if row.scale == "group_std" and not scaled else {}
    return row.replace(**scale, **({} if mode in _VERL_OWN_MEAN else {"aggregate": mean}))


def verl_updates(s: Settings) -> int | None:
    """ppo_epochs · ⌈train_batch_size / ppo_mini_batch_size⌉, both counted in prompts.

    None in bypass mode: the ratio is taken against the sampler, so one update does not keep it at 1.
    """
    if s.switch("algorithm.rollout_correction.bypass_mode"):
        return None
    batches = s.number("data.train_batch_size") / max(1.0, s.number(f"{_ACTOR}.ppo_mini_batch_size"))
    return max(1, math.ceil(s.number(f"{_ACTOR}.ppo_epochs") * math.ceil(batches)))


VERL = Trainer(
    name="verl", version="0.9.1", speech="verl",
    marks=frozenset({"actor/pg_loss", "critic/score/mean", "response_length/clip_ratio"}),
    metrics={
        "loss": "actor/pg_loss", schema.GRAD_NORM: "actor/grad_norm", "lr": "actor/lr", "entropy": "actor/entropy",
        schema.REWARD_MEAN: "critic/score/mean", schema.REWARD_MAX: "critic/score/max",
        schema.REWARD_MIN: "critic/score/min", schema.LENGTH_MEAN: "response_length/mean",
        schema.LENGTH_MAX: "response_length/max",
        "truncated": "response_length/clip_ratio", "clip": "actor/pg_clipfrac", "kl": "actor/kl_loss",
        schema.SAMPLER_RATIO: "rollout_corr/rollout_is_mean", schema.SAMPLER_GAP: "training/rollout_probs_diff_mean",
        schema.ADVANTAGE_MAX: "critic/advantages/max", schema.ADVANTAGE_MIN: "critic/advantages/min",
    },
    aliases={  # 0.1 to 0.8; of the KL to the reference either the loss or the reward has a term
        "entropy": ("actor/entropy_loss",), "kl": ("actor/reward_kl_penalty", "critic/kl"),
        "kl old": ("actor/ppo_kl",), "score with kl": ("critic/rewards/mean",),
        "advantage": ("critic/advantages/mean",), schema.REWARD_STD: ("critic/score/std",),
        "length/min": ("response_length/min",), "epoch": ("training/epoch",),
        "value loss": ("critic/vf_loss",), "explained variance": ("critic/vf_explained_var",),
        "tokens": ("perf/total_num_tokens",),
    },
    proofs={"actor/kl_loss": (f"{_ACTOR}.use_kl_loss", True),
            "actor/reward_kl_penalty": ("algorithm.use_kl_in_reward", True),
            "critic/vf_loss": ("algorithm.adv_estimator", "gae")},
    logged={"actor/kl_coef": f"{_ACTOR}.kl_loss_coef", "actor/reward_kl_penalty_coeff": "algorithm.kl_ctrl.kl_coef",
            "critic/kl_coeff": "algorithm.kl_ctrl.kl_coef"},
    held_out=r"val-core/.+/mean@\d+|(?:val/)?test_score/.+",  # 0.3 and later, 0.1 and 0.2
    absent={"dead": "not counted; with `filter_groups.enable` those that were dropped are"},
    rollouts="`trainer.rollout_data_dir`: STEP.jsonl",
    defaults={
        "algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.rollout_correction.bypass_mode": False, "algorithm.filter_groups.enable": False,
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.loss_scale_factor": None, f"{_ACTOR}.ppo_epochs": 1,
        f"{_ACTOR}.ppo_mini_batch_size": 256, "data.train_batch_size": 1024, "data.max_response_length": 512,
        f"{_ACTOR}.use_kl_loss": False, f"{_ACTOR}.kl_loss_coef": 0.001, "actor_rollout_ref.rollout.n": 1,
    },
    paths={
        "learning_rate": f"{_ACTOR}.optim.lr", "weight_decay": f"{_ACTOR}.optim.weight_decay",
        "grad_clip": f"{_ACTOR}.optim.clip_grad", "optimizer": f"{_ACTOR}.optim.optimizer",
        "temperature": "actor_rollout_ref.rollout.temperature", "top_p": "actor_rollout_ref.rollout.top_p",
        "top_k": "actor_rollout_ref.rollout.top_k", "clip_low": f"{_ACTOR}.clip_ratio",
        "clip_high": f"{_ACTOR}.clip_ratio_high", "steps": "trainer.total_training_steps",
        "limit": "data.max_response_length", "group": "actor_rollout_ref.rollout.n",
    },
    facts={
        "method": verl_method,
        "loss": lambda s: (f"adv_estimator={s.word('algorithm.adv_estimator')}, "
                           f"loss_mode={s.word(f'{_ACTOR}.policy_loss.loss_mode')}, "
                           f"loss_agg_mode={s.word(f'{_ACTOR}.loss_agg_mode')}"),
        "updates": verl_updates,
        "beta": lambda s: s.number(f"{_ACTOR}.kl_loss_coef") if s.switch(f"{_ACTOR}.use_kl_loss") else 0.0,
        "group": lambda s: s.number("actor_rollout_ref.rollout.n"),
        **NOTHING,  # no ceiling: verl adds clip_ratio_high to 1
        "limit": lambda s: s.number("data.max_response_length"),
        "dropped": lambda s: s.switch("algorithm.filter_groups.enable"),
        "dead_counted": lambda s: False,
        "per_token": lambda s: s.word(f"{_ACTOR}.loss_agg_mode") in ("token-mean", "seq-mean-token-mean"),
        "sampler": lambda s: True,
        "horizon": lambda s: (s.optional(f"{_ACTOR}.loss_scale_factor") or s.number("data.max_response_length")
                              ) if s.word(f"{_ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm" else None,
    },)
