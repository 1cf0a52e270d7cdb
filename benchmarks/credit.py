"""The time that each credit estimator adds to a training step, in one run.

    python benchmarks/credit.py            the packaged model, P = 8, R = 8; writes benchmarks/credit.md

Each round samples a batch, computes the credit of every estimator, and takes the optimiser's step with outcome credit,
so that all have the same batches and the same load of the machine. A share is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditscope.credit import ESTIMATORS, find_estimator
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.lab.setup import make_optimizer
from creditscope.lab.step import Minibatch, take_step
from creditscope.lab.tools import LabTools
from creditscope.optimizer.brakes import Brake
from creditscope.policy.critic import Critic
from creditscope.policy.loading import load_policy
from creditscope.runs.config import Config
from creditscope.tasks import find_task

PAGE = Path(__file__).with_suffix(".md")


def timed(job: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = job()
    return time.perf_counter() - start, out


def processor() -> str:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")] if Path("/proc/cpuinfo").exists() else [platform.processor()]
    return names[0] if names else "unknown processor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds

    config = Config(lr=1e-4, device="cpu")
    policy, task, method = load_policy("tiny", device="cpu"), find_task("arithmetic"), config.row
    optimizer, problems = make_optimizer(policy, config), task.problems("train", 0)
    critics = {kind: Critic(policy, kind=kind) for kind in ("head", "model")}
    names = [name for name in ESTIMATORS if "states" not in ESTIMATORS[name].needs and name != "gae"]
    spent: dict[str, list[float]] = {name: [] for name in [*names, "gae, head", "gae, model"]}
    plain: list[float] = []
    for turn in range(rounds + 1):
        sampling, batch = timed(partial(
            roll_out, policy, task, list(islice(problems, config.prompts)), config.group, max_tokens=task.max_tokens,
            temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(turn)))

        def assign(name: str, critic: Critic | None, batch: Drawn, turn: int) -> Tensor:
            tools = LabTools(policy, task, config, batch, task.max_tokens, turn, 0.0, critic)
            credit = find_estimator(name)(method, batch.rollouts, tools)
            if critic is not None:
                critic.fit(batch.rollouts)
            return credit

        found = {name: timed(partial(assign, name, None, batch, turn)) for name in names}
        found |= {f"gae, {kind}": timed(partial(assign, "gae", critic, batch, turn))
                  for kind, critic in critics.items()}
        credit = found["outcome"][1]
        training, _ = timed(partial(take_step, Minibatch(policy, method, batch.rollouts, credit), Brake(optimizer),
                                    clip_norm=config.clip_norm))
        if turn:  # the first round warms up
            plain.append(sampling + training)
            for name, (seconds, _) in found.items():
                spent[name].append(seconds)

    step = statistics.median(plain)
    lines = ["# What credit costs\n\n",
             f"`python benchmarks/credit.py --rounds {rounds}`: packaged model, task arithmetic, P = 8, R = 8, "
             f"{processor()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}. A plain step (sampling, "
             f"judging, forward, backward, AdamW) took {1000 * step:.0f} ms, median of {rounds}. *share*: the "
             f"estimator's time over the plain step of the same round, median. Times of continuations, critic and Gram "
             f"are inside; Σπ², which optimal_token reads, is kept by the sampler and is part of the plain step "
             f"([continuing.md](continuing.md) has what it costs there).\n\n",
             "| estimator | ms | share of a plain step |\n| --- | --- | --- |\n"]
    for name, seconds in spent.items():
        share = statistics.median(s / p for s, p in zip(seconds, plain, strict=True))
        lines.append(f"| {name} | {1000 * statistics.median(seconds):.1f} | {100 * share:.2f} % |\n")
    PAGE.write_text("".join(lines))
    print("".join(lines))


if __name__ == "__main__":
    main()
