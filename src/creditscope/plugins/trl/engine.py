"""`creditscope lab train --engine trl`: the lab's command line, run by TRL's loop, also under torchrun.

Settings that TRL does not have are refused by the name of the flag.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from creditscope.credit import find_estimator
from creditscope.errors import CreditscopeError
from creditscope.lab.evaluate import evaluate
from creditscope.lab.setup import check_problems, make_optimizer, problem_stream
from creditscope.lab.tools import task_gives
from creditscope.plugins.common.arguments import holds_run, other_content
from creditscope.plugins.common.untouched import untouched
from creditscope.plugins.trl.mixin import ScopedGRPOTrainer
from creditscope.policy.loading import Policy, load_policy
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.tasks import Problem, Task, Verdict, find_task

DIFFERS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rollouts": ((0,), "it ends after --steps; leave --rollouts out"),
    "critic_warmup": ((0,), "it has no critic; leave it out"),
    "adapt": (("none",), "R is fixed at the start; leave it out"),
    "brake": (("none",), "it has its own optimiser step; leave it out"),
    "also": ((), "other credits are read in the lab; leave it out"),
    "eval_every": ((0,), "it evaluates before and after; leave it out"),
    "eval_rollouts": ((0,), "it evaluates before and after; leave it out"),
    "checkpoint_every": ((20,), "it keeps the last model alone; leave it out"),
    "scope": (("off", "light"), "use --scope light"),
    "probe": (("off", "light"), "use --probe light"),
    "device": (("auto", "cpu", "cuda"), "use --device auto, and choose GPUs with the launcher"),
}
"""Field -> (the values that TRL supports, what to do otherwise)."""


def train_by_trl(config: Config, out: Path, tell: Callable[[dict[str, Any]], None],
                 stop: Callable[[], bool] = lambda: False, alarm: bool = True, stop_on: str | None = None) -> bool:
    """Train, record, and `tell` each line; whether the run was completed. Rank 0 writes."""
    refuse(config)
    refuse_folder(out)
    task = find_task(config.task, **config.task_options)
    estimator = find_estimator(config.estimator)
    check_problems(task, config, estimator)
    policy = load_policy(config.model, device=config.device, dtype=config.dtype, lora=config.lora, chat=config.chat,
                         seed=config.seed)
    max_tokens = config.max_tokens or task.max_tokens
    problems = list(islice(problem_stream(task, config.seed, 0), config.steps * config.prompts))
    judge = Judge(task, policy, problems)
    steps = judge.steps if "steps" in task_gives(task, problems[0]) else None
    settings = asdict(config) | {"log": list(config.log), "also": list(config.also), "engine": "trl",
                                 "processes": ranks()}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = ScopedGRPOTrainer(
            model=policy.model, args=arguments(config, max_tokens, scratch), reward_funcs=judge.reward,
            train_dataset=Dataset.from_list([{"prompt": judge.prompt(i), "number": i} for i in range(len(problems))]),
            processing_class=policy.tokenizer, optimizers=(make_optimizer(policy, config), None),
            method=config.method, credit=config.estimator, steps=steps, out=out, tell=tell, config=settings,
            every=config.every if config.scope != "off" else max(config.keep_every, 1), gram=config.scope != "off",
            alarm=alarm, stop_on=stop_on)
        if trainer.accelerator.num_processes != ranks():
            raise CreditscopeError(f"{ranks()} processes were started, but the trainer sees "
                                   f"{trainer.accelerator.num_processes}: each would train alone. Launch with torchrun")
        if trainer.is_fsdp_enabled:
            raise CreditscopeError("the launcher shards the weights, and --engine trl evaluates and saves whole ones "
                                   "on one rank; launch with torchrun, or without FSDP")
        first = trainer.is_world_process_zero()
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Stopping(stop))
        if config.eval_problems and first:
            trainer.scope.extra = _evaluation(policy, task, config, max_tokens)
        trainer.train()
        done = trainer.state.global_step == trainer.state.max_steps
    if first and done:
        with Record.resume(out, settings, frozenset(settings)) as record:
            with record.folder("model") as folder:
                policy.save(folder)
            if config.eval_problems:
                line = _evaluation(policy, task, config, max_tokens)
                record.append(trainer.state.max_steps, line)
                tell({"step": trainer.state.max_steps} | line)
    return bool(done)


def refuse(config: Config) -> None:
    for name, (allowed, repair) in DIFFERS.items():
        value = getattr(config, name)
        if value not in allowed and value != ():  # --also is none by default
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise CreditscopeError(f"--{name.replace('_', '-')} {shown}: --engine trl cannot do that; {repair}")
    if config.row.linked:
        raise CreditscopeError(f"--method {config.method}: --engine trl runs GRPOTrainer, which has no pairs; leave "
                               f"--engine out, or put ScopeCallback on TRL's own DPOTrainer")
    if config.row.keep == "live_groups" and config.resample:
        raise CreditscopeError(f"--method {config.method} drops unanimous groups, and --engine trl draws no fresh "
                               f"prompts in their place; give --resample 0 to learn from the rest")
    if config.learned is not None:
        raise CreditscopeError(f"--reward {config.reward}: --engine trl is paid by the task's verifier; leave --engine "
                               f"out, or give the folder to a GRPOTrainer of your own, as reward_funcs")
    if config.group < 2:
        raise CreditscopeError(f"--group {config.group}: --engine trl needs 2 or more")
    if config.needs_reference and config.model.endswith(".gguf") and not config.lora:
        raise CreditscopeError(f"--beta {config.row.beta}: --engine trl loads its reference in Hugging Face format, "
                               f"not from {config.model}; add --lora, or leave --beta out")
    rows, parts = config.prompts * config.group, config.minibatches * config.accumulate * ranks()
    if rows % parts:
        raise CreditscopeError(f"--prompts {config.prompts} times --group {config.group} is {rows} rows, which "
                               f"--minibatches {config.minibatches}, --accumulate {config.accumulate} and {ranks()} "
                               f"process(es) do not divide evenly; change one of them")


def refuse_folder(out: Path) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    other = other_content(out)
    if other:
        raise CreditscopeError(f"{other}; choose another --out")
    if holds_run(out):
        raise CreditscopeError(f"{out} already holds a run, and --engine trl cannot go on with one; choose another "
                               f"--out, or delete the folder")


def arguments(config: Config, max_tokens: int, scratch: str) -> GRPOConfig:
    row, parts = config.row, config.minibatches * config.accumulate
    schedule = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    return GRPOConfig(
        output_dir=scratch, seed=config.seed, use_cpu=config.device == "cpu", bf16=False, gradient_checkpointing=False,
        num_generations=config.group, per_device_train_batch_size=config.prompts * config.group // (parts * ranks()),
        gradient_accumulation_steps=config.accumulate, steps_per_generation=parts, num_iterations=config.inner_steps,
        max_steps=config.steps * config.inner_steps * config.minibatches, learning_rate=config.lr,
        lr_scheduler_type=schedule, warmup_steps=config.warmup, max_grad_norm=config.clip_norm or 0.0,
        beta=row.beta if config.needs_reference else 0.0, temperature=config.temperature, top_p=config.top_p,
        max_completion_length=max_tokens, shuffle_dataset=False, disable_dropout=True, save_strategy="no",
        dataloader_pin_memory=config.device != "cpu" and torch.cuda.is_available(), logging_steps=1, disable_tqdm=True,
        ddp_find_unused_parameters=False, log_level="error", report_to=list(config.log) or "none")


class Judge:
    """A task for TRL: rewards of a batch, and the steps of an answer for credits that need them."""

    def __init__(self, task: Task, policy: Policy, problems: list[Problem]) -> None:
        self._task, self._policy, self._problems = task, policy, problems
        self._seen: dict[tuple[int, str], Verdict] = {}

    def prompt(self, number: int) -> Any:
        text = self._problems[number].prompt
        return [{"role": "user", "content": text}] if self._policy.chat else text

    def reward(self, completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        texts = [self._policy.decode(ids) for ids in completion_ids]
        self._seen = {(n, text): self._task.verify(self._problems[n], text)
                      for n, text in set(zip(number, texts, strict=True))}
        return [self._seen[pair].reward for pair in zip(number, texts, strict=True)]

    def steps(self, text: str, row: Mapping[str, Any]) -> list[list[Any]]:
        return [[s.start, s.end, s.reward, s.state] for s in self._seen[row["number"], text].steps]


class _Stopping(TrainerCallback):  # type: ignore[misc]
    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or self._stop()


def _evaluation(policy: Policy, task: Task, config: Config, max_tokens: int) -> dict[str, Any]:
    with untouched(policy.model):
        return evaluate(policy, task, config, max_tokens)


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
