"""The time that creditscope adds to TRL.

    python benchmarks/in_trl.py                               the packaged model on the CPU; writes benchmarks/in_trl.md
    python benchmarks/in_trl.py MODEL --task gsm8k:DIR --max-tokens 256 --device cuda --dtype bfloat16 \\
        --page benchmarks/in_trl_gpu.md                       a model of your own on a GPU

The callback's share is the time inside its calls over the rest of the same steps, over whole schedules, so that both
have the same load. The mixin is compared pass by pass on one batch, in turn: TRL's own loss and backward, ours, and
ours with the microscope inside TRL's backward.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer
from creditscope.plugins.trl.engine import Judge
from creditscope.policy.loading import load_policy
from creditscope.tasks import find_task

PAGE = Path(__file__).with_suffix(".md")
EVERY, SCHEDULES, PASSES = 10, 4, 15
LOAD = os.getloadavg()[0]
EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "_generated")


@dataclass(frozen=True)
class Setting:
    """Model, task and device."""

    model: str
    task: str
    max_tokens: int
    device: str
    dtype: str
    page: Path


def trainer(at: Setting, kind: Any, scratch: str, **extra: Any) -> Any:
    """TRL on word problems."""
    policy, task = load_policy(at.model, device=at.device, dtype=at.dtype), find_task(at.task)
    problems = list(islice(task.problems("train", 0), 400))
    judge = Judge(task, policy, problems)
    args = trl.GRPOConfig(
        output_dir=scratch, use_cpu=at.device == "cpu", bf16=False, gradient_checkpointing=False, report_to="none",
        disable_tqdm=True,
        num_generations=8, per_device_train_batch_size=64, max_completion_length=at.max_tokens, logging_steps=1000,
        max_steps=1 + EVERY * SCHEDULES, save_strategy="no", learning_rate=3e-5, dataloader_pin_memory=False)
    rows = Dataset.from_list([{"prompt": judge.prompt(i), "number": i} for i in range(len(problems))])
    return kind(model=policy.model, args=args, reward_funcs=judge.reward, train_dataset=rows,
                processing_class=policy.tokenizer, **extra)


def now() -> float:
    """Seconds, after a synchronisation of the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Seconds inside some calls of an object."""

    def __init__(self, of: Any, names: tuple[str, ...]) -> None:
        self.spent = 0.0
        for name in names:
            setattr(of, name, self._timed(getattr(of, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += now() - start

        return timed


class Steps(transformers.TrainerCallback):
    """The time at which each step ended; the first is a warm-up."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.at = watch, []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at.append((now(), self.watch.spent))


def callback(at: Setting, groups: int | None, scratch: str) -> tuple[float, float]:
    """(share that the callback adds, seconds of a step without it), readings at every tenth step."""
    live = trainer(at, trl.GRPOTrainer, scratch)
    scope = ScopeCallback(live, every=EVERY, out=f"{scratch}/run-{groups}", groups=groups)
    watch = Stopwatch(scope, EVENTS)
    steps = Steps(watch)
    live.add_callback(scope)
    live.add_callback(steps)
    live.train()
    (start, before), (end, after) = steps.at[0], steps.at[-1]
    count = len(steps.at) - 1
    inside, whole = after - before, end - start
    return inside / (whole - inside), (whole - inside) / count


def passes(at: Setting, scratch: str) -> dict[str, float]:
    """Median seconds of a forward and backward on one batch, each way in turn."""
    live = trainer(at, ScopedGRPOTrainer, scratch, method="trl_dapo", every=1)
    live.args.max_steps = 1
    live.train()
    live.model.train()
    batch = live._buffered_inputs[0]
    own = type(live).__mro__[2]._compute_loss
    live.current_gradient_accumulation_steps = 1
    scope = live.scope

    def run(kind: str) -> float:
        live.model.zero_grad(set_to_none=True)
        scope._reading = None
        scope.open = (lambda: False) if kind != "lens" else type(scope).open.__get__(scope)
        start = now()
        loss = own(live, live.model, batch) if kind == "trl" else live._compute_loss(live.model, batch)
        loss.backward()
        spent = now() - start
        if kind == "lens":
            start = now()
            scope._lens.close(torch.arange(len(batch["completion_ids"])))
            scope._open = False
            spent += now() - start
        return spent

    found: dict[str, list[float]] = {"trl": [], "ours": [], "lens": []}
    for _ in range(PASSES + 2):
        for kind, seconds in found.items():
            seconds.append(run(kind))
    pairs = {"ours / trl": ("ours", "trl"), "lens / ours": ("lens", "ours"), "lens / trl": ("lens", "trl")}
    out = {name: statistics.median(seconds[2:]) for name, seconds in found.items()}
    return out | {name: statistics.median(a / b for a, b in zip(found[x][2:], found[y][2:], strict=True))
                  for name, (x, y) in pairs.items()}


def machine(at: Setting) -> str:
    if at.device == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())
    return f"two cores of an {cpu}, {torch.get_num_threads()} thread(s), load average {LOAD:.1f} at the start"


def setting() -> Setting:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("model", nargs="?", default="tiny")
    words.add_argument("--task", default="arithmetic")
    words.add_argument("--max-tokens", type=int, default=64)
    words.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    words.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    words.add_argument("--page", type=Path, default=PAGE)
    return Setting(**vars(words.parse_args()))


def main() -> None:
    at = setting()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        some, step = callback(at, 4, scratch)
        every, again = callback(at, None, scratch)
        found = passes(at, scratch)
    size = sum(p.numel() for p in load_policy(at.model, device="cpu").model.parameters()) / 1e6

    def by(pair: str) -> str:
        return f"×{found[pair]:.2f}"

    lines = [
        "# What creditscope adds to TRL", "",
        f"`python benchmarks/in_trl.py` on {machine(at)}; torch {torch.__version__}, TRL {trl.__version__}. "
        f"{'The packaged model' if at.model == 'tiny' else Path(at.model).stem} ({size:.3g} M parameters) on "
        f"{at.task.partition(':')[0]}, P = 8, R = 8, up to {at.max_tokens} tokens, {at.dtype}.", "",
        f"**Callback**, a reading at every {EVERY}th step: time inside its calls over the rest of the same "
        f"{EVERY * SCHEDULES} steps, a record with rollouts and Grams included. A reading is a forward and backward of "
        f"its own and a forward after the step.", "",
        "| | a step without it | added | target |", "|---|---|---|---|",
        f"| four groups a reading, the default | {step * 1e3:.0f} ms | {some:+.1%} | 5 % |",
        f"| all eight, `groups=None` | {again * 1e3:.0f} ms | {every:+.1%} | |", "",
        f"**Mixin**, one forward and backward of 64 rollouts, each way in turn, median of {PASSES} ratios:", "",
        "| | ms | of TRL's | of ours | target |", "|---|---|---|---|---|",
        f"| TRL's own loss (fused head) | {found['trl'] * 1e3:.0f} | | | |",
        f"| our loss | {found['ours'] * 1e3:.0f} | {by('ours / trl')} | | |",
        f"| our loss, lens open inside TRL's backward | {found['lens'] * 1e3:.0f} | {by('lens / trl')} | "
        f"{by('lens / ours')} | ×1.2 |", ""]
    page = "\n".join(lines)
    at.page.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
