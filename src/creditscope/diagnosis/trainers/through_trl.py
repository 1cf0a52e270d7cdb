"""Trainers that run TRL's GRPOTrainer or transformers' Trainer and write its log: ms-swift, unsloth and open-r1, each
as its difference from TRL's row."""

from __future__ import annotations

from dataclasses import replace

from creditscope.diagnosis.trainers.trl import TRL
from creditscope.runs import schema

SWIFT = replace(
    TRL, name="ms-swift", version="4.6.0", through="TRL",
    # trainers/patcher.py adds these to each row of TRL's names, and writes logging.jsonl and args.json.
    marks=frozenset({"memory(GiB)", "train_speed(s/it)", "train_speed(iter/s)"}),
    metrics={**{ours: name for ours, name in TRL.metrics.items() if ours not in (schema.SAMPLER_RATIO,
                                                                                  schema.SAMPLER_GAP)},
             "entropy": "entropy/mean"},
    aliases={**TRL.aliases, "entropy": ("entropy",)},
    absent={schema.REWARD_MIN: "not logged", schema.REWARD_MAX: "not logged",
            schema.SAMPLER_RATIO: "`rollout_correction/…` is logged with `rollout_importance_sampling_mode` alone",
            schema.SAMPLER_GAP: "`rollout_correction/kl` is a KL"},
    proofs={name: proof for name, proof in TRL.proofs.items() if not name.startswith("sampling/")},
    defaults={**TRL.defaults, "beta": 0.04, "dynamic_sample": False},  # arguments/rlhf_args.py, `_init_grpo`
    paths={**TRL.paths, "dtype": "torch_dtype", "lora": "lora_rank"},
    flag="--",
    remedies={
        "rounding": "--torch_dtype float32",
        "no gain": "nothing yet: first find the cause, with `creditscope inspect` on completions.jsonl "
                   "(--log_completions true)",
        "sampler": "--rollout_importance_sampling_mode token_truncate, and the same dtype in vLLM and the trainer",
        "dead groups": "--dynamic_sample true, prompts of middling difficulty, or a larger --num_generations",
        "too easy": "harder prompts: leave out those that all answers solve, or --dynamic_sample true",
        "dilution": "--dynamic_sample true, which draws other prompts for unanimous groups",
        "KL only": "--beta 0, or --dynamic_sample true",
    },
    rollouts="OUTPUT_DIR/completions.jsonl (`--log_completions true`): one line of columns per step",
    facts={**TRL.facts, "dropped": lambda s: s.switch("dynamic_sample")})
UNSLOTH = replace(
    TRL, name="unsloth", version="2026.10.9", through="TRL", marks=frozenset({"frac_reward_zero_std_excluded"}),
    # models/rl_replacements.py logs completion_length beside TRL's columns, and kl also where beta is 0.
    together=frozenset({"completion_length", "completions/mean_length"}), console=r"==\(\(====\)\)==|Unsloth 20\d\d\.",
    proofs={name: proof for name, proof in TRL.proofs.items() if name != "kl"},
    rollouts="TRL's OUTPUT_DIR/completions/*.parquet")
OPEN_R1 = replace(
    TRL, name="open-r1", version="0.1.0.dev0", through="TRL", marks=frozenset(),
    # src/open_r1/grpo.py prints its arguments; rows are those of the TRL that it pins, 0.18.
    console=r"Script parameters GRPOScriptArguments\(",
    rollouts="TRL's OUTPUT_DIR/completions/*.parquet")
