"""TRL 1.16, `GRPOTrainer`: names and defaults are its own; the tests compare them with its code."""

from __future__ import annotations

import math

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer, by_constant
from creditscope.errors import CreditscopeError
from creditscope.methods import dialects
from creditscope.methods.axes import Method
from creditscope.runs import schema


def trl_method(s: Settings) -> Method | None:
    """loss_type, importance_sampling_level, scale_rewards and beta as one row."""
    try:
        row = dialects.trl_row(s.word("loss_type"), s.word("importance_sampling_level"), s.word("scale_rewards"))
    except CreditscopeError:  # a loss that this version does not know
        return None
    return row.replace(beta=s.optional("beta") or 0.0)


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
    name="TRL", version="1.16", speech="trl",
    proofs={"cispo_clip_ratio": ("loss_type", "cispo"), "vespo/phi_seq_mean": ("loss_type", "vespo"),
            "kl": ("beta", None), "sampling/sampling_logp_difference/mean": ("use_vllm", True)},
    marks=frozenset({"reward_std", "frac_reward_zero_std", "completions/clipped_ratio", "completions/mean_length",
                     "completion_length"}),
    metrics={
        "loss": "loss", schema.GRAD_NORM: "grad_norm", "lr": "learning_rate", schema.REWARD_MEAN: "reward",
        schema.REWARD_STD: "reward_std", "dead": "frac_reward_zero_std", "entropy": "entropy",
        schema.LENGTH_MEAN: "completions/mean_length", schema.LENGTH_MAX: "completions/max_length",
        "truncated": "completions/clipped_ratio", "clip": "clip_ratio/region_mean", "cispo": "cispo_clip_ratio",
        "kl": "kl", schema.SAMPLER_RATIO: "sampling/importance_sampling_ratio/mean",
        schema.SAMPLER_GAP: "sampling/sampling_logp_difference/mean",
    },
    aliases={  # TRL 0.14 to 0.16, Unsloth; ms-swift; columns that transformers adds
        schema.LENGTH_MEAN: ("completion_length",), "length/min": ("completions/min_length",),
        "truncated": ("response_clip_ratio",), "clip": ("clip_ratio",), "entropy": ("entropy/mean",),
        "lr": ("lr",), "epoch": ("epoch",), "tokens": ("num_tokens",), schema.EVAL_REWARD: ("eval_reward",),
        "eval loss": ("eval_loss",),
    },
    absent={schema.REWARD_MIN: "not logged", schema.REWARD_MAX: "not logged"},
    rollouts="OUTPUT_DIR/completions/*.parquet (`log_completions=True`)",
    defaults={
        "loss_type": "dapo", "importance_sampling_level": "token", "scale_rewards": "group", "beta": 0.0,
        "multi_objective_aggregation": "sum_then_normalize", "num_iterations": 1, "steps_per_generation": None,
        "generation_batch_size": None, "gradient_accumulation_steps": 1, "epsilon": 0.2, "epsilon_high": None,
        "num_generations": 8, "max_completion_length": 512, "mask_truncated_completions": False, "use_vllm": False,
    },
    paths={
        "learning_rate": "learning_rate", "adam_epsilon": "adam_epsilon", "weight_decay": "weight_decay",
        "grad_clip": "max_grad_norm", "optimizer": "optim", "temperature": "temperature", "top_p": "top_p",
        "top_k": "top_k", "clip_low": "epsilon", "clip_high": "epsilon_high", "steps": "max_steps", "dtype": "dtype",
        "limit": "max_completion_length", "group": "num_generations",
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
        "horizon": lambda s: s.optional("max_completion_length") if by_constant(
            dialects.TRL_LOSSES.get(s.word("loss_type"))) else None,
    },)
