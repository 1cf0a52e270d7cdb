"""One GRPO step of creditscope beside one of TRL's GRPOTrainer: a real model, a real task and one GPU.

    python benchmarks/trainer_gpu.py MODEL --task gsm8k:DIR                          writes benchmarks/trainer_gpu.md
    python benchmarks/trainer_gpu.py MODEL --task gsm8k:DIR --engines lab scope trl trl-bf16
    python benchmarks/trainer_gpu.py tiny --task arithmetic --max-tokens 64 --device cpu --dtype float32 --page FILE

Engines: `lab` is `creditscope lab train`; `scope` the same with --scope light at every step; `trl` is an unmodified
GRPOTrainer with float32 weights, under autocast where --dtype is bfloat16; `trl-bf16` the same with bfloat16 weights.
All get the same prompts in the same order, the same settings and the task's verifier. Each runs in a process of its
own: memory is its own, and where one fails or takes longer than --limit-seconds, the others are still measured.
A step's seconds are those between the ends of two steps, so the first step, a warm-up, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

ENGINES = {"lab": "creditscope", "scope": "creditscope, --scope light", "trl": "TRL",
           "trl-bf16": "TRL, bfloat16 weights"}
Step = dict[str, float]
"""at: the time of the step's end; sample: seconds of sampling and judging; tokens and reward of its completions."""


def now(device: str) -> float:
    """Seconds, after the device has finished."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def by_lab(at: argparse.Namespace, scope: str) -> Iterator[Step]:
    from creditscope.lab.train import train
    from creditscope.runs.config import Config

    # The last step of a run writes a checkpoint: one more is asked for, and not taken.
    config = Config(
        model=at.model, task=at.task, method="trl_grpo", beta=0.0, prompts=at.prompts, group=at.group,
        steps=at.steps + 1, lr=at.lr, accumulate=at.accumulate, temperature=at.temperature, max_tokens=at.max_tokens,
        device=at.device, dtype=at.dtype, scope=scope, eval_problems=0, checkpoint_every=10**6)
    with tempfile.TemporaryDirectory() as folder:
        for line in islice(train(config, Path(folder) / "run", {}), at.steps):
            yield {"at": now(at.device), "sample": line["time/sample"], "reward": line["reward/mean"],
                   "tokens": line["length/mean"] * at.prompts * at.group}


def by_trl(at: argparse.Namespace, weights: str) -> Iterator[Step]:
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from creditscope.lab.setup import problem_stream
    from creditscope.plugins.trl.engine import Judge
    from creditscope.policy.loading import load_policy
    from creditscope.tasks import find_task

    task, policy = find_task(at.task), load_policy(at.model, device=at.device, dtype=weights)
    torch.backends.cuda.enable_cudnn_sdp(True)  # load_policy switches it off; TRL runs with torch's default
    problems = list(islice(problem_stream(task, 0, 0), at.steps * at.prompts))
    judge = Judge(task, policy, problems)
    steps: list[Step] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps[-1]["at"] = now(at.device)

    def reward(**columns: Any) -> list[float]:
        found = judge.reward(**columns)
        steps.append({"reward": statistics.mean(found), "tokens": sum(map(len, columns["completion_ids"]))})
        return found

    def timed(sample: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = now(at.device)
            batch = sample(*args)
            steps[-1]["sample"] = now(at.device) - start
            return batch

        return call

    # Dataset.from_list hashes its rows by dill, which fails on pyarrow's classes under Python 3.12.
    rows = InMemoryTable.from_pylist([{"prompt": judge.prompt(i), "number": i} for i in range(len(problems))])
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, seed=0, use_cpu=at.device == "cpu", bf16=at.dtype == "bfloat16",
            gradient_checkpointing=False, num_generations=at.group, gradient_accumulation_steps=at.accumulate,
            per_device_train_batch_size=at.prompts * at.group // at.accumulate, max_steps=at.steps,
            learning_rate=at.lr, lr_scheduler_type="constant", max_grad_norm=1.0, loss_type="grpo", beta=0.0,
            temperature=at.temperature, max_completion_length=at.max_tokens, shuffle_dataset=False,
            disable_dropout=True, save_strategy="no", dataloader_pin_memory=at.device == "cuda", disable_tqdm=True,
            log_level="error", report_to="none")
        trainer = GRPOTrainer(model=policy.model, args=settings, reward_funcs=reward, callbacks=[Ends()],
                              train_dataset=Dataset(rows, fingerprint="problems"), processing_class=policy.tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer._generate_and_score_completions = timed(trainer._generate_and_score_completions)
        trainer.train()
    yield from steps


def measure(at: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Medians over the steps after the first, in this process."""
    import torch

    steps = list(by_lab(at, "light" if engine == "scope" else "off") if engine in ("lab", "scope") else
                 by_trl(at, "bfloat16" if engine == "trl-bf16" else "float32"))
    spent = [after["at"] - before["at"] for before, after in pairwise(steps)]
    cuda = at.device == "cuda"
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    return {
        "step": statistics.median(spent), "sample": statistics.median(s["sample"] for s in steps[1:]),
        "train": statistics.median(whole - s["sample"] for whole, s in zip(spent, steps[1:], strict=True)),
        "tokens": statistics.median(s["tokens"] for s in steps[1:]),
        "rate": statistics.median(s["tokens"] / whole for whole, s in zip(spent, steps[1:], strict=True)),
        "reward": statistics.mean(s["reward"] for s in steps),
        "peak": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0, "machine": machine}


def in_process(engine: str, limit: float) -> dict[str, Any]:
    """The measurement by a process of its own, or why there is none."""
    words = [sys.executable, __file__, *sys.argv[1:], "--measure", engine]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit,
                              env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {limit:.0f} s"}
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr, flush=True)
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def page(at: argparse.Namespace, results: dict[str, dict[str, Any]]) -> str:
    done = {engine: r for engine, r in results.items() if "failed" not in r}
    base = done["lab"]["step"] if "lab" in done else float("nan")
    name, half = "the packaged model" if at.model == "tiny" else Path(at.model).name, at.dtype == "bfloat16"
    lines = [
        "# A training step beside TRL's, on a real model", "",
        f"{next((r['machine'] for r in done.values()), at.device)}; Python {platform.python_version()}, torch "
        f"{version('torch')}, transformers {version('transformers')}, TRL {version('trl')}. Model: {name}, on "
        f"{at.task.partition(':')[0]}, {at.dtype}: GRPO, {at.prompts} prompts × {at.group} rollouts of up to "
        f"{at.max_tokens} tokens at temperature {at.temperature:g}, one AdamW update per batch (lr {at.lr:g}, no KL "
        f"term) from {at.accumulate} micro-batch(es) of {at.prompts * at.group // at.accumulate} rollouts, no "
        f"gradient checkpointing. Median of {at.steps - 1} step(s) after a first one; each engine in a process of its "
        f"own.", "",
        "| engine | s per step | sampling | training | tokens per step | tokens/s | peak GiB | mean reward | "
        "step time ÷ ours |", "|---|---|---|---|---|---|---|---|---|"]
    lines += [f"| {ENGINES[engine]} | {r['failed'].replace('|', '/')} | | | | | | | |" if "failed" in r else
              f"| {ENGINES[engine]} | {r['step']:.2f} | {r['sample']:.2f} | {r['train']:.2f} | {r['tokens']:,.0f} | "
              f"{r['rate']:,.0f} | {r['peak']:.1f} | {r['reward']:.3f} | {r['step'] / base:.2f} |"
              for engine, r in results.items()]
    lines += [
        "", "Sampling includes the verifier; training is the rest of the step. tokens/s are completion tokens over the "
        "whole step; peak is `torch.cuda.max_memory_allocated` of the process. Same prompts in the same order, same "
        "verifier. What differs:", "",
        "- Random numbers: each engine samples its own completions, so tokens per step differ.",
        *(["- Precision: creditscope samples and differentiates with bfloat16 weights and updates float32 copies; TRL "
           "has float32 weights under autocast (`bf16=True`), which casts them again in every forward pass."]
          if half else []),
        *(["- TRL with bfloat16 weights updates these directly, without float32 copies: an update below their "
           "resolution is lost. The row shows speed, not a setting to learn with."] if "trl-bf16" in results else []),
        "- Sampling: creditscope has its own sampler; TRL calls `model.generate` with its default cache. vLLM and "
        "continuous batching are not used.",
        "- Training: with several micro-batches creditscope takes one more forward pass, without a graph, to compute w "
        "first. Its steps include the record and the light optimiser probe. TRL has a fused output head, which also "
        "gives the entropy of each token.",
        "- Optimiser: both AdamW without weight decay; creditscope `torch.optim.AdamW`, TRL its default "
        "(`adamw_torch_fused`).", ""]
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("model", help="a folder in Hugging Face format, or tiny")
    words.add_argument("--task", required=True, help="as of creditscope lab train, such as gsm8k:data")
    words.add_argument("--prompts", type=int, default=8)
    words.add_argument("--group", type=int, default=8)
    words.add_argument("--max-tokens", type=int, default=300)
    words.add_argument("--steps", type=int, default=4, help="the first of them is a warm-up")
    words.add_argument("--temperature", type=float, default=0.7)
    words.add_argument("--lr", type=float, default=2e-6)
    words.add_argument("--accumulate", type=int, default=4, help="micro-batches per update")
    words.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    words.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    words.add_argument("--engines", nargs="+", choices=ENGINES, default=["lab", "trl"])
    words.add_argument("--limit-seconds", type=float, default=280, help="of each engine")
    words.add_argument("--page", type=Path, default=Path(__file__).with_suffix(".md"))
    words.add_argument("--measure", choices=ENGINES, help=argparse.SUPPRESS)
    at = words.parse_args()
    if at.steps < 2:
        words.error(f"--steps {at.steps}: the first step is not counted; give 2 or more")
    if at.prompts % at.accumulate:
        words.error(f"--accumulate {at.accumulate} does not divide --prompts {at.prompts}: micro-batches are of whole "
                    f"groups and of equal size")
    if at.dtype == "float32" and "trl-bf16" in at.engines:
        words.error("--engines trl-bf16 needs --dtype bfloat16")
    return at


def main() -> None:
    at = parsed()
    if at.measure:
        print("\n" + json.dumps(measure(at, at.measure)))
        return
    results: dict[str, dict[str, Any]] = {}
    for engine in at.engines:
        results[engine] = in_process(engine, at.limit_seconds)
        print(engine, results[engine], flush=True)
        at.page.write_text(page(at, results))  # after each: a command that is stopped keeps the rows so far
    print(at.page.read_text())


if __name__ == "__main__":
    main()
