"""What creditscope adds to TRL.

    python benchmarks/in_trl.py         the packaged model, P = 8, R = 8; writes benchmarks/in_trl.md

The callback's share is the time inside its calls over the rest of the same steps, over whole schedules, so both see the
same machine. The mixin is compared pass by pass on one batch, in turn: TRL's own loss and backward, ours, and ours with
the lens open inside TRL's backward.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from creditscope.lab.policy import load_policy
from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer
from creditscope.plugins.trl.engine import Judge
from creditscope.tasks import find_task

PAGE = Path(__file__).with_suffix(".md")
EVERY, SCHEDULES, PASSES = 10, 4, 15
EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "_generated")


def trainer(kind: Any, scratch: str, **extra: Any) -> Any:
    """TRL on word problems."""
    policy, task = load_policy("tiny", device="cpu"), find_task("arithmetic")
    problems = list(islice(task.problems("train", 0), 400))
    judge = Judge(task, policy, problems)
    args = trl.GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        num_generations=8, per_device_train_batch_size=64, max_completion_length=64, logging_steps=1000,
        max_steps=1 + EVERY * SCHEDULES, save_strategy="no", learning_rate=3e-5, dataloader_pin_memory=False)
    rows = Dataset.from_list([{"prompt": judge.prompt(i), "number": i} for i in range(len(problems))])
    return kind(model=policy.model, args=args, reward_funcs=judge.reward, train_dataset=rows,
                processing_class=policy.tokenizer, **extra)


class Stopwatch:
    """Seconds inside some calls of an object."""

    def __init__(self, of: Any, names: tuple[str, ...]) -> None:
        self.spent = 0.0
        for name in names:
            setattr(of, name, self._timed(getattr(of, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - start

        return timed


class Steps(transformers.TrainerCallback):
    """When each step ended; the first warms everything up."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.at = watch, []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at.append((time.perf_counter(), self.watch.spent))


def callback(groups: int | None, scratch: str) -> tuple[float, float]:
    """(share that the callback adds, seconds of a step without it), readings at every tenth step."""
    live = trainer(trl.GRPOTrainer, scratch)
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


def passes(scratch: str) -> dict[str, float]:
    """Median seconds of a forward and backward on one batch, each way in turn."""
    live = trainer(ScopedGRPOTrainer, scratch, method="trl_dapo", every=1)
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
        start = time.perf_counter()
        loss = own(live, live.model, batch) if kind == "trl" else live._compute_loss(live.model, batch)
        loss.backward()
        spent = time.perf_counter() - start
        if kind == "lens":
            start = time.perf_counter()
            scope._lens.close(torch.arange(len(batch["completion_ids"])))
            scope._open = False
            spent += time.perf_counter() - start
        return spent

    found: dict[str, list[float]] = {"trl": [], "ours": [], "lens": []}
    for _ in range(PASSES + 2):
        for kind, seconds in found.items():
            seconds.append(run(kind))
    pairs = {"ours / trl": ("ours", "trl"), "lens / ours": ("lens", "ours"), "lens / trl": ("lens", "trl")}
    out = {name: statistics.median(seconds[2:]) for name, seconds in found.items()}
    return out | {name: statistics.median(a / b for a, b in zip(found[x][2:], found[y][2:], strict=True))
                  for name, (x, y) in pairs.items()}


def main() -> None:
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        some, step = callback(4, scratch)
        every, again = callback(None, scratch)
        found = passes(scratch)
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())
    def by(pair: str) -> str:
        return f"×{found[pair]:.2f}"

    lines = [
        "# What creditscope adds to TRL", "",
        f"`python benchmarks/in_trl.py` on two cores of an {cpu}, {threads} thread(s), nothing else running; torch "
        f"{torch.__version__}, TRL {trl.__version__}. The packaged model (1.25 M parameters), P = 8, R = 8, up to 64 "
        f"tokens, float32.", "",
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
    PAGE.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
