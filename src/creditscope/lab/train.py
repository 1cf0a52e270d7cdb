"""The loop: sample, judge, weigh, step, record. It reads from top to bottom.

How it departs from the papers it runs: dropout is off, so that the first ratio is 1; π_old is the sampler's own
log-prob, not a recomputed one, and the gap between the two is reported at every step; gradients are accumulated through
w, so that a micro-batch changes memory and nothing else, whatever the method's denominators are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditscope import metrics
from creditscope.errors import CreditscopeError
from creditscope.groups import Groups
from creditscope.lab.checkpoint import load_checkpoint, save_checkpoint
from creditscope.lab.config import Config
from creditscope.lab.evaluate import evaluate
from creditscope.lab.policy import Policy, load_policy, token_logp
from creditscope.lab.rollout import Batch, replace_dead, roll_out
from creditscope.objective import effective_credit, surrogate
from creditscope.record import Record
from creditscope.rollouts import Rollouts
from creditscope.tasks import Problem, Task, find_task

Metrics = dict[str, Any]


def train(config: Config, out: Path, versions: dict[str, Any], resume: bool = False,
          stop: Callable[[], bool] = lambda: False) -> Iterator[Metrics]:
    """Run the training and yield the metrics of each step once they are on disk.

    The last item holds the final evaluation. `stop` is asked after each step: an early end keeps everything.
    """
    policy = load_policy(config.model, device=config.device, dtype=config.dtype, lora=config.lora, chat=config.chat,
                         seed=config.seed)
    task = find_task(config.task, **({"reward": config.reward} if config.reward else {}))
    method, max_tokens = config.row, config.max_tokens or task.max_tokens
    reference = policy.reference() if config.needs_reference else None
    optimizer = make_optimizer(policy, config)
    settings = asdict(config) | {"log": list(config.log)}
    record = Record.resume(out, settings, config.free) if resume else Record.create(out, settings, versions)

    with record:
        done, used = restore(record, policy, optimizer)
        problems = problem_stream(task, config.seed, skip=used)
        for step in range(done, config.steps):
            clock = Clock()
            line: Metrics = {}
            if config.eval_problems and (step == 0 or (config.eval_every and step % config.eval_every == 0)):
                line |= evaluate(policy, task, config, max_tokens)
                clock.lap("eval")

            # Sample. A method that drops unanimous groups may have them replaced by fresh prompts.
            def draw(count: int, attempt: int, step: int = step) -> Batch:
                nonlocal used
                used += count
                generator = torch.Generator(policy.device).manual_seed(stream_seed(config.seed, step, attempt))
                return roll_out(policy, task, list(islice(problems, count)), config.group, max_tokens=max_tokens,
                                temperature=config.temperature, top_p=config.top_p, generator=generator)

            batch = draw(config.prompts, 0)
            for attempt in range(1, config.resample + 1 if method.keep == "live_groups" else 1):
                if not bool(batch.dead.any()):
                    break
                batch = replace_dead(batch, draw(config.prompts, attempt))
            clock.lap("sample")

            # Weigh and step.
            rollouts = batch.rollouts
            if reference is not None:
                rollouts = replace(rollouts, ref_logp=token_logp(
                    reference, batch.prompts, rollouts.tokens, rollouts.mask, config.temperature, grad=False))
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate(step)
            first: Update | None = None
            for _ in range(config.inner_steps):
                for rows in deal(rollouts.group, config.minibatches):
                    part, prompts = rollouts.rows(rows), [batch.prompts[i] for i in rows.tolist()]
                    update = take_step(policy, optimizer, config, part, prompts)
                    first = first or update
            clock.lap("train")
            assert first is not None

            # Record.
            line |= batch_metrics(batch) | first.metrics | {"optimizer/lr": config.learning_rate(step)}
            line |= clock.metrics()
            record.append(step, line)
            if config.keep_every and step % config.keep_every == 0:
                record.save_group(step, kept_arrays(first))
            ends = step + 1 == config.steps or stop()
            if ends or (step + 1) % config.checkpoint_every == 0:
                with record.checkpoint(step + 1) as folder:
                    save_checkpoint(folder, policy, optimizer, {"step": step + 1, "problems": used})
            yield {"step": step} | line
            if ends:
                break

        if record.checkpoints()[-1:] != [config.steps]:
            return  # somebody stopped it: there is more to come
        policy.model.save_pretrained(out / "model")
        policy.tokenizer.save_pretrained(out / "model")
        if config.eval_problems:
            line = evaluate(policy, task, config, max_tokens)
            record.rewind(config.steps)
            record.append(config.steps, line)
            yield {"step": config.steps} | line


# -- the pieces ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """What one optimiser step did: w and the log-probs it was computed at, and numbers about them."""

    rows: Rollouts
    w: Tensor
    logp: Tensor
    metrics: Metrics


def take_step(policy: Policy, optimizer: torch.optim.Optimizer, config: Config, part: Rollouts,
              prompts: Sequence[Sequence[int]]) -> Update:
    """One optimiser step on −J: ∇J = Σ_it w_it ∇log π_it, micro-batch by micro-batch."""
    method = config.row

    def forward(rows: Tensor, grad: bool) -> Tensor:
        chosen = [prompts[i] for i in rows.tolist()]
        return token_logp(policy, chosen, part.tokens[rows], part.mask[rows], config.temperature, grad)

    chunks = torch.arange(len(part), device=part.tokens.device).chunk(config.accumulate)
    live = [forward(rows, grad=len(chunks) == 1) for rows in chunks]
    logp = torch.cat([x.detach() for x in live])
    value = float(surrogate(method, logp, part))
    w = effective_credit(lambda lp: surrogate(method, lp, part), logp)

    optimizer.zero_grad(set_to_none=True)
    for i, rows in enumerate(chunks):
        with_graph = live[i] if len(chunks) == 1 else forward(rows, grad=True)
        torch.autograd.backward(with_graph, -w[rows].to(with_graph.dtype))
    parameters = list(policy.trainable().values())
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or torch.inf)
    if not bool(torch.isfinite(norm)):
        raise CreditscopeError(f"the gradient's norm is {norm.item()}; the run's record is whole up to the step "
                               f"before. Lower --lr, set --clip-norm, or use --dtype float32")
    optimizer.step()
    gap = (logp - part.logp).abs()[part.mask]  # how far the training forward stands from the sampler
    return Update(part, w, logp, metrics.credit(w, part.mask) | {
        "objective/value": value, "grad/norm": float(norm), "policy/sampler_gap": float(gap.max())})


def make_optimizer(policy: Policy, config: Config) -> torch.optim.Optimizer:
    parameters = list(policy.trainable().values())
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, config.lr, weight_decay=config.weight_decay)


def restore(record: Record, policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Go back to the newest checkpoint, or to the start: (steps done, problems used)."""
    kept = record.checkpoints()
    if not kept:
        record.rewind(0)
        return 0, 0
    state = load_checkpoint(record.checkpoint_path(kept[-1]), policy, optimizer)
    record.rewind(state["step"])
    return state["step"], state["problems"]


def problem_stream(task: Task, seed: int, skip: int) -> Iterator[Problem]:
    """Train problems without end, epoch after epoch where the task has a last one, from number `skip` on."""

    def endless() -> Iterator[Problem]:
        epoch = 0
        while True:
            empty = True
            for problem in task.problems("train", seed + epoch):
                empty = False
                yield problem
            if empty:
                raise CreditscopeError(f"task {task.name!r} has no train problems")
            epoch += 1

    return islice(endless(), skip, None)


def deal(group: Tensor, parts: int) -> list[Tensor]:
    """Row indices of each minibatch: whole groups, dealt out evenly."""
    which = Groups(group).index % parts
    return [(which == part).nonzero().squeeze(1) for part in range(parts)]


def stream_seed(seed: int, step: int, attempt: int) -> int:
    """A seed of its own for every draw, so that a resumed run needs no generator state."""
    return (seed * 1_000_003 + step) * 101 + attempt


class Clock:
    """Seconds spent on each part of a step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def metrics(self) -> Metrics:
        return {f"time/{name}": spent for name, spent in self._laps.items()} | {
            "time/step": time.perf_counter() - self._start}


def batch_metrics(batch: Batch) -> Metrics:
    """What was sampled, what it cost, and what could not be judged."""
    out = metrics.signal(batch.rollouts) | {
        "rollouts/sampled": batch.sampled, "rollouts/used": len(batch.rollouts),
        "length/truncated": float((~batch.finished).double().mean())}
    if batch.errors:
        out |= {"reward/errors": len(batch.errors), "reward/first_error": batch.errors[0]}
    return out


def kept_arrays(update: Update) -> dict[str, Any]:
    """The rollouts of an update as plain arrays, with the w they were given."""
    rows = update.rows
    arrays = {"tokens": rows.tokens, "mask": rows.mask, "logp": rows.logp, "reward": rows.reward, "group": rows.group,
              "entropy": rows.entropy, "step": rows.step, "step_reward": rows.step_reward, "ref_logp": rows.ref_logp,
              "w": update.w, "live_logp": update.logp}
    out: dict[str, Any] = {k: v.float().cpu().numpy() if v.is_floating_point() else v.cpu().numpy()
                           for k, v in arrays.items() if v is not None}
    width = rows.tokens.shape[1]
    out["prompt"], out["text"] = np.array(list(rows.prompt)), np.array(list(rows.text))
    out["pieces"] = np.array([[*row, *[""] * (width - len(row))] for row in rows.pieces])
    return out
