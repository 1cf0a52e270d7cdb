"""prime-rl 0.8.0 with verifiers 0.4.0: names as in orchestrator/metrics.py, trainer/rl/train.py and rl/loss.py,
settings as in prime_rl/configs. Orchestrator and trainer append to one metrics.jsonl, several rows per step."""

from __future__ import annotations

from creditscope.diagnosis.trainers.trainer import NOTHING, Trainer
from creditscope.runs import schema

_ALL = "agg/all"

PRIME_RL = Trainer(
    name="prime-rl", version="0.8.0", speech="own",
    marks=frozenset({f"{_ALL}/reward/mean", "mismatch_kl/all/mean", "entropy/all/mean", "optim/grad_norm",
                     "reward/all/mean"}),
    metrics={
        "loss": "loss/mean", schema.GRAD_NORM: "optim/grad_norm", "lr": "optim/lr",
        schema.REWARD_MEAN: f"{_ALL}/reward/mean", schema.REWARD_MIN: f"{_ALL}/reward/min",
        schema.REWARD_MAX: f"{_ALL}/reward/max", "dead": f"{_ALL}/solved_none + {_ALL}/solved_all",
        "entropy": "entropy/all/mean", schema.LENGTH_MEAN: f"{_ALL}/num_output_tokens/mean",
        schema.LENGTH_MAX: f"{_ALL}/num_output_tokens/max", "truncated": f"{_ALL}/is_truncated/mean",
        "clip": "is_masked/mean",
    },
    aliases={  # the console, and 0.2 to 0.5
        schema.REWARD_MEAN: ("Reward", "reward/all/mean"), "loss": ("Loss",), "entropy": ("Entropy",), "lr": ("LR",),
        schema.GRAD_NORM: ("Grad. Norm",), "sampler kl": ("mismatch_kl/all/mean",),
    },
    renames={rf"({_ALL})/[^/]+/((?:reward|num_output_tokens)/(?:mean|min|max)|is_truncated/mean|solved_(?:none|all))":
             r"\1/\2"},
    held_out=r"eval/[^/]+/effective/[^/]+/avg@\d+",
    console=r"SUCCESS\s+Step \d+ \|",
    absent={
        schema.REWARD_STD: "mean, minimum, maximum and two percentiles are logged",
        "kl": "no reference: `kl_tau` weighs (log π − log μ)², μ the sampler",
        schema.SAMPLER_RATIO: "not logged", schema.SAMPLER_GAP: "`mismatch_kl` is the mean of ρ − log ρ − 1",
    },
    defaults={
        "orchestrator.algo.type": "grpo", "orchestrator.group_size": 1, "trainer.loss.type": "default",
        "orchestrator.train.filter_zero_advantages": True,
    },
    paths={
        "learning_rate": "trainer.optim.lr", "weight_decay": "trainer.optim.weight_decay",
        "grad_clip": "trainer.optim.max_norm", "optimizer": "trainer.optim.type",
        "temperature": "orchestrator.train.sampling.temperature", "clip_low": "trainer.loss.dppo_mask_low",
        "clip_high": "trainer.loss.dppo_mask_high", "steps": "orchestrator.max_steps",
        "dtype": "trainer.model.optimization_dtype",
        "limit": "orchestrator.train.sampling.max_completion_tokens", "group": "orchestrator.group_size",
        "lora": "trainer.model.lora.rank",
    },
    words={
        "prompts": "orchestrator.batch_size", "schedule": "trainer.scheduler.type",
        "drop": "orchestrator.train.filter_zero_advantages=true",
        "master": "trainer.model.optimization_dtype=float32", "dump": "orchestrator.monitors.file",
        "correction": "a smaller orchestrator.max_off_policy_steps",
    },
    remedies={"KL level": "a smaller trainer.optim.lr, or a larger trainer.loss.kl_tau",
              "clip": "none: trainer.loss.dppo_mask_low and dppo_mask_high compare with the sampler",
              "updates": "a smaller orchestrator.max_off_policy_steps",
              "entropy": "a smaller trainer.optim.lr"},
    rollouts="`rollouts/step_N/train/all/traces.jsonl`: episodes of verifiers",
    facts={
        "method": lambda s: None,  # DPPO's mask with a squared log-ratio: no row of the table
        "loss": lambda s: f"algo={s.word('orchestrator.algo.type')}, loss={s.word('trainer.loss.type')}",
        "updates": lambda s: None,  # the ratio is taken against the sampler
        "beta": lambda s: 0.0,
        "group": lambda s: s.number("orchestrator.group_size"),
        **NOTHING,
        "dropped": lambda s: s.switch("orchestrator.train.filter_zero_advantages"),
        "dead_counted": lambda s: True,
        "per_token": lambda s: True,
        "sampler": lambda s: True,
        "horizon": lambda s: None,
    },)
