"""How TRL's logs beside this file were made: its real GRPOTrainer or DPOTrainer on the packaged model, twelve steps a
run or more.

    python tests/diagnosis/make_logs.py [NAME...]

Each folder gets TRL's trainer_state.json, what TRL printed, and the settings that were given, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import creditscope
from creditscope.tasks.arithmetic import Arithmetic

LOGS = Path(__file__).parent / "logs"
MODEL = Path(creditscope.__file__).parent / "models" / "tiny"
TASK = Arithmetic()
COMMON: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 64,
                          "learning_rate": 1e-4, "max_steps": 12, "logging_steps": 1}

PAIRS: dict[str, Any] = {"per_device_train_batch_size": 4, "max_length": 256, "learning_rate": 1e-4, "max_steps": 15,
                         "logging_steps": 1, "lr_scheduler_type": "constant"}
"""Of DPOTrainer's runs: the right answer of a problem beside that of the next one."""

Reward = Callable[..., list[float]]


def right(completions: list[str], number: list[int], **_: Any) -> list[float]:
    """1 for the right answer, 0 for another."""
    return [TASK.verify(PROBLEMS[n], text).reward for n, text in zip(number, completions, strict=True)]


def never(completions: list[str], **_: Any) -> list[float]:
    """A reward that cannot be had."""
    return [0.0] * len(completions)


def by_prompt(completions: list[str], number: list[int], **_: Any) -> list[float]:
    """0 or 1 by the prompt, whatever the answer: every group is dead, and no batch is unanimous for it."""
    return [float(n % 2) for n in number]


def half(completions: list[str], number: list[int], **_: Any) -> list[float]:
    """Prompts with an even number are always right; others at random, by their text."""
    return [1.0 if n % 2 == 0 else float(sum(map(ord, text)) % 2) for n, text in zip(number, completions, strict=True)]


RUNS: dict[str, tuple[Reward | None, dict[str, Any]]] = {
    "trl-dapo": (right, {"loss_type": "dapo"}),
    "trl-never": (never, {"loss_type": "grpo"}),
    "trl-batch": (half, {"loss_type": "grpo", "scale_rewards": "batch"}),
    "trl-batch-dead": (by_prompt, {"loss_type": "grpo", "scale_rewards": "batch", "shuffle_dataset": False}),
    "trl-cispo": (right, {"loss_type": "cispo"}),
    "trl-short": (right, {"loss_type": "dr_grpo", "max_completion_length": 8, "mask_truncated_completions": True}),
    "trl-fall": (right, {"loss_type": "grpo", "learning_rate": 3e-4, "max_steps": 24,
                         "lr_scheduler_type": "constant"}),
    "trl-wild": (right, {"loss_type": "grpo", "learning_rate": 1e-3, "max_steps": 24,
                         "lr_scheduler_type": "constant"}),
    "trl-dpo": (None, {"loss_type": ["sigmoid"], "beta": 0.1}),
    "trl-twice": (right, {"loss_type": "grpo", "num_iterations": 3, "learning_rate": 1e-3, "beta": 0.04}),
}
PROBLEMS = [problem for problem, _ in zip(TASK.problems("train"), range(48), strict=False)]


def pairs() -> list[dict[str, str]]:
    """The reference solution of a problem, preferred to that of the next."""
    return [{"prompt": one.prompt, "chosen": one.meta["solution"], "rejected": other.meta["solution"]}
            for one, other in pairwise(PROBLEMS)]


def make(name: str, logs: Path = LOGS, **more: Any) -> Path:
    """The run's folder, made anew under `logs`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    reward, given = RUNS[name]
    settings = (PAIRS if reward is None else COMMON) | given | more
    folder = logs / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as out:
        config = (DPOConfig if reward is None else GRPOConfig)(
            output_dir=out, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[], seed=0,
            save_strategy="no", disable_tqdm=True, **settings)
        parts: dict[str, Any] = {
            "args": config, "model": AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            "processing_class": AutoTokenizer.from_pretrained(MODEL, padding_side="left")}
        asked = {"prompt": [problem.prompt for problem in PROBLEMS], "number": range(len(PROBLEMS))}
        trainer = GRPOTrainer(reward_funcs=reward, train_dataset=Dataset.from_dict(asked), **parts) if reward else \
            DPOTrainer(train_dataset=Dataset.from_list(pairs()), **parts)
        with (folder / "train.log").open("w") as log, contextlib.redirect_stdout(log):
            trainer.train()
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
    (folder / "training_args.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for name in sys.argv[1:] or RUNS:
        make(name)
        print("made", name)
