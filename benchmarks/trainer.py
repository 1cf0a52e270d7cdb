"""One GRPO step of creditscope beside one of TRL's GRPOTrainer: same model, problems, batch and optimiser, in one run.

    python benchmarks/trainer.py           writes benchmarks/trainer.md

Each engine runs in a process of its own, in turn, so that each has its own memory and load slows both alike. A step is
sampling, scoring, loss, backward and AdamW; the first steps of each process warm up and are not counted.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

PROMPTS, GROUP, STEPS, WARM, ROUNDS = 8, 8, 14, 4, 3
LR = 1e-5


def ours() -> list[float]:
    from creditscope.lab.train import train
    from creditscope.runs.config import Config

    config = Config(prompts=PROMPTS, group=GROUP, steps=STEPS, lr=LR, eval_problems=0, keep_every=0,
                    checkpoint_every=10**6, method="dr_grpo")
    with tempfile.TemporaryDirectory() as folder:
        return [m["time/step"] for m in train(config, Path(folder) / "run", {}) if "time/step" in m]


def trls() -> list[float]:
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    from creditscope.policy.loading import TINY, load_policy
    from creditscope.tasks import find_task

    task = find_task("arithmetic")
    problems = {p.prompt: p for p in islice(task.problems("train", 0), PROMPTS * STEPS)}
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.perf_counter() - self.start)

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return [task.verify(problems[p], c).reward for p, c in zip(prompts, completions, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
            num_generations=GROUP, per_device_train_batch_size=PROMPTS * GROUP, max_steps=STEPS, learning_rate=LR,
            lr_scheduler_type="constant", max_completion_length=task.max_tokens, loss_type="dr_grpo",
            scale_rewards="none", temperature=1.0, max_grad_norm=1.0, logging_steps=10**6, disable_tqdm=True)
        trainer = trl.GRPOTrainer(model=str(TINY), args=arguments, reward_funcs=reward,
                                  train_dataset=Dataset.from_list([{"prompt": p} for p in problems]),
                                  processing_class=load_policy("tiny").tokenizer, callbacks=[Clock()])
        trainer.train()
    return times


def measure(engine: str) -> dict[str, float]:
    """Median step and peak memory of a fresh process."""
    done = subprocess.run([sys.executable, __file__, engine], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    results: dict[str, list[dict[str, float]]] = {"creditscope": [], "TRL": []}
    for _ in range(ROUNDS):
        for engine, runs in results.items():
            runs.append(measure(engine))
            print(engine, runs[-1], flush=True)
    step = {engine: statistics.median(r["step"] for r in runs) for engine, runs in results.items()}
    memory = {engine: statistics.median(r["memory"] for r in runs) for engine, runs in results.items()}
    import torch
    import transformers
    import trl

    lines = ["# A training step beside TRL's\n\n",
             f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers "
             f"{transformers.__version__}, TRL {trl.__version__}. Packaged model, arithmetic, Dr.GRPO, {PROMPTS} × "
             f"{GROUP} rollouts, AdamW. Median of {STEPS - WARM} steps in each of {ROUNDS} processes, the engines "
             f"in turn.\n\n",
             "| engine | s a step | rollouts a second | peak memory, MB | step time ÷ ours |\n",
             "| --- | --- | --- | --- | --- |\n"]
    lines += [f"| {engine} | {step[engine]:.3f} | {PROMPTS * GROUP / step[engine]:.0f} | {memory[engine]:.0f} | "
              f"{step[engine] / step['creditscope']:.2f} |\n" for engine in results]
    (Path(__file__).parent / "trainer.md").write_text("".join(lines))
    print("".join(lines[2:]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        seconds = (ours if sys.argv[1] == "creditscope" else trls)()[WARM:]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"step": statistics.median(seconds), "memory": peak}))
    else:
        main()
