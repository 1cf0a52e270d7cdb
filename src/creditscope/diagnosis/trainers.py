"""Names of metrics and settings, defaults, and what settings imply: TRL 1.16, verl 0.9.1 and creditscope's record.

Names and defaults are the trainers' own (`GRPOTrainer`; verl's v1 trainer); the tests compare TRL's with its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.errors import CreditscopeError
from creditscope.methods import dialects
from creditscope.methods.axes import OWN_CREDIT, Method
from creditscope.methods.find import row_of
from creditscope.runs import schema

FACTS = {
    "method": "the row of the table that the settings make, or None",
    "loss": "the same in the trainer's own words",
    "updates": "optimiser steps on each batch of rollouts: at 1 every ratio is 1; None where it is not known",
    "beta": "weight of the KL term in the loss; None where the log shows one of unknown weight",
    "group": "R, rollouts per prompt",
    "limit": "most tokens of an answer, where the logged share of cut ones is relative to the longest; else None",
    "masked": "whether truncated answers are left out of the loss",
    "ceiling": "CISPO's ceiling on the ratio, or None",
    "dropped": "whether dead groups are dropped before the loss",
    "dead_counted": "whether the logged share of dead groups counts groups",
    "per_token": "whether the logged entropy is nats per token",
    "sampler": "whether another engine than the trainer's own forward draws the samples",
    "horizon": "the constant that divides each answer's token sum, or None",
}
"""Name -> meaning. Every trainer has all of them."""
NOTHING: dict[str, Callable[[Settings], Any]] = {
    "limit": lambda s: None, "masked": lambda s: False, "ceiling": lambda s: None, "dropped": lambda s: False}
"""Facts of a trainer that has no such setting."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    name: str
    version: str
    marks: frozenset[str]
    """Metrics that no other program writes: a log with one of them is this trainer's."""
    metrics: Mapping[str, str]
    """Our name -> its name."""
    defaults: Mapping[str, Any]
    facts: Mapping[str, Callable[[Settings], Any]]
    changes: Mapping[str, str]
    """Rule -> the setting to change, as this trainer spells it."""
    proofs: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Metric -> the setting that alone writes it. Absent metrics prove nothing: an export may be partial."""


def trl_method(s: Settings) -> Method | None:
    """loss_type, importance_sampling_level, scale_rewards and beta as one row."""
    try:
        row = dialects.trl_row(s.word("loss_type"), s.word("importance_sampling_level"), s.word("scale_rewards"))
    except CreditscopeError:  # a loss that this version does not know
        return None
    return row.replace(beta=s.optional("beta") or 0.0)


def _by_constant(row: Method | None) -> bool:
    return row is not None and row.aggregate == "constant"


def trl_updates(s: Settings) -> int | None:
    """⌈μ · steps_per_generation / gradient_accumulation_steps⌉, at least 2 where a batch straddles an optimiser step.

    With generation_batch_size, steps_per_generation depends on the number of processes, which is not known: None.
    """
    if s.get("generation_batch_size") is not None and s.get("steps_per_generation") is None:
        return None
    accumulate = max(1.0, s.number("gradient_accumulation_steps"))
    uses = max(1.0, s.number("num_iterations") * (s.optional("steps_per_generation") or accumulate))
    return 1 if accumulate % uses == 0 else max(2, math.ceil(uses / accumulate))


def _trl_ceiling(s: Settings) -> float | None:
    row = dialects.TRL_LOSSES.get(s.word("loss_type"))
    if row is None or row.stops != "cap":
        return None
    high = s.optional("epsilon_high")
    return s.number("epsilon") if high is None else high


TRL = Trainer(
    name="TRL", version="1.16",
    proofs={"cispo_clip_ratio": ("loss_type", "cispo"), "vespo/phi_seq_mean": ("loss_type", "vespo"),
            "kl": ("beta", None), "sampling/sampling_logp_difference/mean": ("use_vllm", True)},
    marks=frozenset({"reward_std", "frac_reward_zero_std", "completions/clipped_ratio"}),
    metrics={
        "loss": "loss", schema.GRAD_NORM: "grad_norm", "lr": "learning_rate", schema.REWARD_MEAN: "reward",
        schema.REWARD_STD: "reward_std", "dead": "frac_reward_zero_std", "entropy": "entropy",
        schema.LENGTH_MEAN: "completions/mean_length", schema.LENGTH_MAX: "completions/max_length",
        "truncated": "completions/clipped_ratio", "clip": "clip_ratio/region_mean", "cispo": "cispo_clip_ratio",
        "kl": "kl", schema.SAMPLER_RATIO: "sampling/importance_sampling_ratio/mean",
        schema.SAMPLER_GAP: "sampling/sampling_logp_difference/mean",
    },
    defaults={
        "loss_type": "dapo", "importance_sampling_level": "token", "scale_rewards": "group", "beta": 0.0,
        "multi_objective_aggregation": "sum_then_normalize", "num_iterations": 1, "steps_per_generation": None,
        "generation_batch_size": None, "gradient_accumulation_steps": 1, "epsilon": 0.2, "epsilon_high": None,
        "num_generations": 8, "max_completion_length": 512, "mask_truncated_completions": False, "use_vllm": False,
    },
    facts={
        "method": trl_method,
        "loss": lambda s: f"loss_type={s.word('loss_type')}",
        "updates": trl_updates,
        "beta": lambda s: s.optional("beta"),
        "group": lambda s: s.number("num_generations"),
        **NOTHING,  # no limit: an answer is cut where its last token is not the end
        "masked": lambda s: s.switch("mask_truncated_completions"),
        "ceiling": _trl_ceiling,
        "dead_counted": lambda s: (s.word("scale_rewards") != "batch"
                                   and s.word("multi_objective_aggregation") != "normalize_then_sum"),
        "per_token": lambda s: True,
        "sampler": lambda s: s.switch("use_vllm"),
        "horizon": lambda s: s.optional("max_completion_length") if _by_constant(
            dialects.TRL_LOSSES.get(s.word("loss_type"))) else None,
    },
    changes={
        "clip": "num_iterations=2, or steps_per_generation above gradient_accumulation_steps, to reuse a batch; "
                "epsilon acts only then",
        "clip idle": "a smaller epsilon, or a larger learning_rate or num_iterations",
        "clip much": "a smaller learning_rate, num_iterations or steps_per_generation",
        "dead groups": "prompts of middling difficulty, more num_generations, or a reward with more levels",
        "dead counted": "scale_rewards='group' or 'none': then frac_reward_zero_std counts groups",
        "dilution": "drop unanimous groups in a subclass of GRPOTrainer: loss_type has no value that does",
        "cispo cap": "epsilon_high=5.0: here it is the ceiling itself, not what is added to 1",
        "truncation": "max_completion_length (raise it)",
        "length constant": "max_completion_length near the lengths that occur, or loss_type='dapo'",
        "KL only": "beta=0.0, or prompts that leave fewer groups unanimous",
        "entropy": "entropy_coef=0.001, a smaller learning_rate, or epsilon_high=0.28 with num_iterations above 1",
        "learning rate": "learning_rate, warmup_steps or lr_scheduler_type",
        "gradient": "bf16=False (float32), a smaller learning_rate, max_grad_norm",
        "reward": "the reward function, or the prompts: print completions with log_completions=True",
        "length drift": "loss_type='dapo' or 'dr_grpo' (no 1/L of each answer), or a length term in the reward",
        "sampler": "vllm_importance_sampling_mode='token_truncate', and the same dtype in vLLM and the trainer",
        "reward trend": "a smaller learning_rate, or beta=0.04 to stay near the reference; if only the prompts "
                        "got harder, nothing",
        "saturation": "harder prompts where the reward is high, easier ones where it is low",
    })

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
    name="verl", version="0.9.1", marks=frozenset({"actor/pg_loss", "critic/score/mean", "response_length/clip_ratio"}),
    metrics={
        "loss": "actor/pg_loss", schema.GRAD_NORM: "actor/grad_norm", "lr": "actor/lr", "entropy": "actor/entropy",
        schema.REWARD_MEAN: "critic/score/mean", schema.REWARD_MAX: "critic/score/max",
        schema.REWARD_MIN: "critic/score/min", schema.LENGTH_MEAN: "response_length/mean",
        schema.LENGTH_MAX: "response_length/max",
        "truncated": "response_length/clip_ratio", "clip": "actor/pg_clipfrac", "kl": "actor/kl_loss",
        schema.SAMPLER_RATIO: "rollout_corr/rollout_is_mean", schema.SAMPLER_GAP: "training/rollout_probs_diff_mean",
        schema.ADVANTAGE_MAX: "critic/advantages/max", schema.ADVANTAGE_MIN: "critic/advantages/min",
    },
    defaults={
        "algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.rollout_correction.bypass_mode": False, "algorithm.filter_groups.enable": False,
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.loss_agg_mode": "token-mean", f"{_ACTOR}.loss_scale_factor": None, f"{_ACTOR}.ppo_epochs": 1,
        f"{_ACTOR}.ppo_mini_batch_size": 256, "data.train_batch_size": 1024, "data.max_response_length": 512,
        f"{_ACTOR}.use_kl_loss": False, f"{_ACTOR}.kl_loss_coef": 0.001, "actor_rollout_ref.rollout.n": 1,
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
    },
    changes={
        "clip": f"{_ACTOR}.ppo_epochs=2, or {_ACTOR}.ppo_mini_batch_size below data.train_batch_size, to reuse a "
                f"batch; {_ACTOR}.clip_ratio acts only then",
        "clip idle": f"a smaller {_ACTOR}.clip_ratio_low and clip_ratio_high, or a larger {_ACTOR}.optim.lr",
        "clip much": f"a smaller {_ACTOR}.optim.lr or {_ACTOR}.ppo_epochs, a larger {_ACTOR}.ppo_mini_batch_size",
        "dead groups": "algorithm.filter_groups.enable=True with algorithm.filter_groups.metric=reward, prompts of "
                       "middling difficulty, or a larger actor_rollout_ref.rollout.n",
        "dead counted": "algorithm.filter_groups.enable=True: then training/filter_groups/evicted_samples counts them",
        "dilution": "algorithm.filter_groups.enable=True",
        "truncation": "data.max_response_length (raise it)",
        "length constant": f"{_ACTOR}.loss_scale_factor near the lengths that occur, or {_ACTOR}.loss_agg_mode="
                           f"token-mean",
        "KL only": f"{_ACTOR}.use_kl_loss=False, or algorithm.filter_groups.enable=True",
        "entropy": f"{_ACTOR}.entropy_coeff=0.001, a smaller {_ACTOR}.optim.lr, or {_ACTOR}.clip_ratio_high=0.28",
        "learning rate": f"{_ACTOR}.optim.lr, {_ACTOR}.optim.lr_warmup_steps or {_ACTOR}.optim.lr_scheduler_type",
        "gradient": f"{_ACTOR}.fsdp_config.dtype, a smaller {_ACTOR}.optim.lr, {_ACTOR}.optim.clip_grad",
        "reward": "the reward function, or the prompts: dump answers with trainer.rollout_data_dir=FOLDER",
        "length drift": f"{_ACTOR}.loss_agg_mode=token-mean (no 1/L of each answer), or a length term in the reward",
        "sampler": "algorithm.rollout_correction.rollout_is=token, and the same dtype in rollout and actor",
        "reward trend": f"a smaller {_ACTOR}.optim.lr, or {_ACTOR}.use_kl_loss=True; if only the prompts got harder, "
                        f"nothing",
        "saturation": "harder prompts where the score is high, easier ones where it is low",
    })

def _own_method(s: Settings) -> Method | None:
    row = row_of({"method": s.word("method"), "beta": s.optional("beta")})
    return None if row is None else row.under(s.get("credit"))


OURS = Trainer(
    name="creditscope", version="", marks=frozenset({schema.CREDIT_DEAD_GROUPS, schema.SIGNAL_DEAD_GROUPS,
                                                     schema.POLICY_SAMPLER_GAP}),
    metrics={
        **{key: key for key in (schema.GRAD_NORM, schema.REWARD_MEAN, schema.REWARD_STD, schema.LENGTH_MEAN,
                                schema.LENGTH_MAX, schema.EVAL_LOW, schema.EVAL_HIGH)},
        "loss": schema.OBJECTIVE_VALUE, "lr": schema.OPTIMIZER_LR, "dead": schema.CREDIT_DEAD_GROUPS,
        "entropy": schema.ENTROPY_MEAN, "truncated": schema.LENGTH_TRUNCATED, "past": schema.OVERSHOOT_PAST,
        "eval": schema.EVAL_ACCURACY, schema.SAMPLER_GAP: schema.POLICY_SAMPLER_GAP,
    },
    defaults={"method": "grpo", "credit": None, "beta": None, "inner_steps": 1, "minibatches": 1, "group": 8,
              "max_tokens": None},
    facts={
        "method": _own_method,
        "loss": lambda s: f"--method {s.word('method')}" + (f" --credit {s.word('credit')}" if s.get("credit") else ""),
        "updates": lambda s: int(s.number("inner_steps") * s.number("minibatches")),
        "beta": lambda s: None if (row := _own_method(s)) is None else row.beta if row.kl_in == "loss" else 0.0,
        "group": lambda s: s.number("group"),
        **NOTHING,
        "dropped": lambda s: (row := _own_method(s)) is not None and row.keep == "live_groups",
        "dead_counted": lambda s: True,
        "per_token": lambda s: True,
        "sampler": lambda s: False,
        "horizon": lambda s: s.optional("max_tokens") if _by_constant(_own_method(s)) else None,
    },
    changes={
        "clip": "--inner-steps 2 or --minibatches 2, to reuse a batch",
        "clip idle": "more --inner-steps, or a larger --lr",
        "clip much": "fewer --inner-steps, a smaller --lr, or --brake shorten",
        "past": "--probe light writes it",
        "dead groups": "--group (more rollouts), easier or harder problems, or --method dapo",
        "dead counted": "none: signal/dead_groups counts groups",
        "dilution": "--method dapo, which drops unanimous groups and draws others",
        "truncation": "--max-tokens (raise it)",
        "length constant": "--max-tokens near the lengths that occur, or --method dapo",
        "KL only": "--beta 0, or --method dapo",
        "entropy": "a smaller --lr, or --method dapo (ε_high 0.28)",
        "learning rate": "--lr, --warmup or --schedule",
        "gradient": "--dtype float32, a smaller --lr, --clip-norm",
        "reward": "the reward function or the task",
        "length drift": "--method dapo or dr_grpo (no 1/L of each answer)",
        "sampler": "--top-p 1 and --dtype float32",
        "reward trend": "a smaller --lr; if only the problems got harder, nothing",
        "saturation": "harder problems where the reward is high, easier ones where it is low",
    })


def _trl_fact(name: str) -> Callable[[Settings], Any]:
    """A fact of TRL's from the settings that a record keeps under `trl`."""
    def fact(s: Settings) -> Any:
        theirs = s.get("trl")
        return TRL.facts[name](Settings(theirs if isinstance(theirs, Mapping) else {}, {}, TRL.defaults, s.source))

    return fact


BY_TRL = replace(OURS, metrics={**OURS.metrics, "dead": schema.SIGNAL_DEAD_GROUPS})
"""A record that TRL's loop wrote: credit is read at some steps, rewards at every step."""
SCRIPT = replace(
    BY_TRL, defaults={**OURS.defaults, "trl": None},
    facts={**OURS.facts, **{name: _trl_fact(name) for name in ("masked", "ceiling", "sampler")},
           "loss": lambda s: s.word("method") + (f" with credit {s.word('credit')}" if s.get("credit") else "")},
    changes={**TRL.changes, "dead counted": OURS.changes["dead counted"],
             "past": "a smaller every= of ScopeCallback reads it more often"})
"""A record that TRL's callback wrote in the user's own script, with TRL's settings."""


def who_wrote(given: Mapping[str, Any]) -> Trainer:
    """The variant of OURS that wrote a record. Under token credit a group with one reward need not be dead."""
    if given.get("engine") != "trl":
        return OURS
    found = SCRIPT if is_script(given) else BY_TRL
    return found if given.get("credit") in (None, OWN_CREDIT) else replace(found, metrics=OURS.metrics)


def is_script(given: Mapping[str, Any]) -> bool:
    """Whether a script of the user's own trained, and TRL's callback wrote the record."""
    return given.get("engine") == "trl" and isinstance(given.get("trainer"), str)


TRAINERS = (TRL, VERL, OURS)
SIGNS = frozenset({"vespo/phi_seq_mean"})
"""Metrics that are read only for the settings they prove."""
KNOWN = SIGNS.union(*(trainer.metrics.values() for trainer in (*TRAINERS, BY_TRL)))
"""Every metric that is kept in memory."""
