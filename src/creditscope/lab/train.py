"""The loop: sample, judge, weigh, step, record. It reads from top to bottom.

How it departs from the papers it runs: dropout is off, so that the first ratio is 1; π_old is the sampler's own
log-prob, not a recomputed one, and the gap between the two is reported at every step; gradients are accumulated through
w, so that a micro-batch changes memory and nothing else, whatever the method's denominators are.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditscope.batch import metrics
from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.credit import Chosen, find_estimator
from creditscope.errors import CreditscopeError
from creditscope.files.memory import enough_memory
from creditscope.lab.checkpoint import load_checkpoint, save_checkpoint
from creditscope.lab.evaluate import evaluate
from creditscope.lab.lens import Lens
from creditscope.lab.rollout import Batch, replace_dead, roll_out
from creditscope.lab.tools import LabTools, check_first, task_gives
from creditscope.methods.axes import Method
from creditscope.microscope.gram import squared_norms
from creditscope.objective.bounds import beyond
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.objective.weights import alpha, kept
from creditscope.optimizer.brakes import Brake, clip_factor, find_brake
from creditscope.optimizer.probe import Probe
from creditscope.optimizer.scale import Clipping, RewardParts
from creditscope.policy.critic import Critic
from creditscope.policy.loading import Policy, head_norms, load_policy, token_logp
from creditscope.runs.adapt import Setting, decide
from creditscope.runs.config import MOST_DRAWS, Config
from creditscope.runs.record import Record
from creditscope.tasks import Problem, Task, find_task

Metrics = dict[str, Any]
LESS = "raise --accumulate, or lower --prompts, --group or --max-tokens; --scope light or off takes less too"
"""What to do where a pass does not fit."""
VANISHING = 1e-15
"""Norms below it are taken again with care: squares of a nearly certain policy's gradient are 0 in float32."""


def train(config: Config, out: Path, versions: dict[str, Any], resume: bool = False,
          stop: Callable[[], bool] = lambda: False) -> Generator[Metrics, None, bool]:
    """Run the training and yield the metrics of each step once they are on disk; at last, those of the evaluation.

    `stop` is asked after each step: an early end keeps everything. Returns whether the run came to its end.
    """
    policy = load_policy(config.model, device=config.device, dtype=config.dtype, lora=config.lora, chat=config.chat,
                         seed=config.seed)
    task = find_task(config.task, **({"reward": config.reward} if config.reward else {}))
    estimators = {spec: find_estimator(spec) for spec in config.credits}
    for chosen in estimators.values():
        check_problems(task, config, chosen)
    max_tokens = config.max_tokens or task.max_tokens
    method = with_limit(config.row, max_tokens)
    reference = policy.reference() if config.needs_reference else None
    optimizer = make_optimizer(policy, config)
    brake, probe = find_brake(config.brake, optimizer), make_probe(policy, optimizer, config)
    own, others = estimators[config.estimator], [estimators[spec] for spec in config.also]
    critic = make_critic(policy, config, own) if "critic" in own.row.needs else None
    if critic is None:
        check_without_critic(config, others)
    lens = Lens(policy, config) if config.scope != "off" else None
    settings = asdict(config) | {"log": list(config.log), "also": list(config.also)}
    if resume and (taken := max(Record.open(out).checkpoints(), default=0)) > config.steps:
        raise CreditscopeError(f"{out} has taken {taken} steps already; give --steps {taken} or more")
    record = Record.resume(out, settings, config.free) if resume else Record.create(out, settings, versions)

    with record, undone(record, fresh=not resume) as begun:
        done, used, spent, before = restore(record, policy, optimizer, critic, probe)
        problems = problem_stream(task, config.seed, skip=used)
        adapts = config.adapt != "none"
        lines = record.steps() if adapts else []  # a long run must not hold what nobody will read
        for step in range(done, config.steps if not 0 < config.rollouts <= spent else done):
            begun.append(step)
            clock = Clock()
            line: Metrics = {}
            now = decide(config.adapt, Setting(config.group, config.estimator), lines, config.rollouts)
            estimator = estimators[now.credit]
            if adapts:
                line |= {"adapt/group": now.group, "adapt/switched": int(now.credit != config.estimator)}
            if config.eval_problems and evaluation_due(config, step, spent, before):
                line |= evaluate(policy, task, config, max_tokens)
                clock.lap("eval")

            # Sample. A method that drops unanimous groups may have them replaced by fresh prompts.
            def draw(count: int, attempt: int, step: int = step, now: Setting = now) -> Batch:
                nonlocal used
                used += count
                generator = torch.Generator(policy.device).manual_seed(stream_seed(config.seed, step, attempt))
                return roll_out(policy, task, list(islice(problems, count)), now.group, max_tokens=max_tokens,
                                temperature=config.temperature, top_p=config.top_p, generator=generator)

            drawn = batch = draw(config.prompts, 0)
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
            # Credit is the whole batch's, so that what is whitened or counted over it does not see minibatches.
            make_tools = partial(LabTools, policy, task, config, replace(batch, rollouts=rollouts),
                                 max_tokens=max_tokens, chunks=micro_batches(rollouts.group, config.accumulate),
                                 critic=critic, seed=stream_seed(config.seed, step, CONTINUING),
                                 progress=step / config.steps)
            tools = make_tools()
            for chosen in estimators.values() if step == 0 else ():
                check_first(chosen.row.needs, batch, config.under(chosen.spec))
            credit = estimator(method, rollouts, tools)
            clock.lap("credit")
            learns = step >= config.critic_warmup  # before that the critic alone does
            look = lens if lens is not None and learns and step % config.every == 0 else None
            if look is not None and others:
                look.assign(partial(other_credits, others, method, rollouts, make_tools))
                clock.lap("scope")
            if critic is not None:
                line |= critic.fit(batch.prompts, rollouts, parts=config.accumulate)
            clock.lap("credit")
            brake.begin(method, rollouts, credit)
            if probe is not None:
                probe.begin(method, rollouts, credit)
            updates: list[Update] = []
            opening = 0  # updates of the first pass
            for inner in range(config.inner_steps if learns else 0):
                taken = len(updates)
                for rows in deal(rollouts.group, config.minibatches):
                    part, prompts = rollouts.rows(rows), [batch.prompts[i] for i in rows.tolist()]
                    updates += take_step(policy, brake, method, config, part, prompts, credit[rows], rows,
                                         look if inner == 0 else None, probe)
                opening = len(updates) if inner == 0 else opening
                if len(updates) == taken:
                    break  # the brake wants no more of this batch
            if look is not None:
                look.after_updates()
            clock.lap("train")
            if look is not None:
                clock.move("train", "scope", look.seconds)
            after = None  # log π after the last update, where the probe's schedule pays for that pass
            if probe is not None and updates:
                close = cache(partial(log_probs, policy, batch, rollouts, config))
                line |= probe.finish(close)
                after = close() if probe.due else None
                if probe.arrays():
                    record.save_optimizer(step, probe.arrays())
                clock.lap("probe")

            # Record: w and log-probs of the first pass over the batch.
            line |= batch_metrics(drawn, batch, tools) | metrics.assigned(credit, rollouts)
            if updates:
                w, live = gather(updates[:opening], rollouts)
                line |= metrics.spread(w, rollouts.mask)
                line |= {"policy/sampler_gap": float((live - rollouts.logp).abs()[rollouts.mask].max()),
                         "objective/value": updates[0].value, "grad/norm": updates[0].norm,
                         "optimizer/lr": config.learning_rate(step), "optimizer/updates": len(updates)}
                line |= brake.metrics()
            also = {} if look is None else look.others
            if look is not None:
                line |= look.metrics(rollouts, w, clock.spent)
                record.save_reading(step, look.arrays(rollouts, w))
                look.reset()
                clock.lap("scope")
            line |= clock.metrics()
            if updates and config.keep_every and step % config.keep_every == 0:
                record.save_group(step, kept_arrays(method, rollouts, credit, w, live, after, also))
            record.append(step, line)  # at last: who sees the line finds everything that was kept of the step
            if adapts:
                lines.append(line)
            record.thin(step, config.keep_most, {"scope": config.every, "groups": config.keep_every,
                                                 "optimizer": config.probe_every})
            spent, before = spent + line["rollouts/spent"], spent
            ends = step + 1 == config.steps or 0 < config.rollouts <= spent or stop()
            if ends or (step + 1) % config.checkpoint_every == 0:
                with record.checkpoint(step + 1) as folder:
                    state: Metrics = {"step": step + 1, "problems": used, "spent": spent, "before": before}
                    if probe is not None and probe.clipping is not None:
                        state["norms"] = list(probe.clipping.extent)
                    save_checkpoint(folder, policy, optimizer, state, critic)
            yield {"step": step} | line
            if ends:
                break

        last = record.checkpoints()[-1]
        if not (last == config.steps or 0 < config.rollouts <= spent):
            return False  # somebody stopped it: there is more to come
        with record.folder("model") as folder:
            policy.save(folder)
        if config.eval_problems:
            line = evaluate(policy, task, config, max_tokens)
            record.rewind(last)
            record.append(last, line)
            yield {"step": last} | line
        return True


@contextmanager
def undone(record: Record, fresh: bool) -> Iterator[list[int]]:
    """A run that is refused before its first step is over leaves no folder behind; one that an error ends later says
    why in its record. Steps are put into the list as they begin: a refused resumption begins none, and changes nothing.
    """
    begun: list[int] = []
    try:
        yield begun
    except CreditscopeError as error:
        lines = record.steps()
        if fresh and not lines:
            shutil.rmtree(record.path, ignore_errors=True)
        elif begun:
            with suppress(CreditscopeError):  # the disk may be what stopped it
                record.append(max([begun[-1], *(line["step"] + 1 for line in lines)]), {"run/stopped": str(error)})
        raise


# -- the pieces ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """What one optimiser step did to the rows `rows` of the batch."""

    rows: Tensor
    w: Tensor
    logp: Tensor
    value: float
    """J at the log-probs before the step."""
    norm: float
    """The gradient's norm before it was clipped."""


@dataclass(frozen=True)
class Sight:
    """A minibatch before its step: log π, w = ∂J/∂log π, and the w that is pulled back."""

    logp: Tensor
    w: Tensor
    pulled: Tensor


@enough_memory("passing the batch through the model", LESS)
def take_step(policy: Policy, brake: Brake, method: Method, config: Config, part: Rollouts,
              prompts: Sequence[Sequence[int]], credit: Tensor, rows: Tensor, lens: Lens | None = None,
              probe: Probe | None = None) -> list[Update]:
    """One optimiser step on −J: ∇J = Σ_it w_it ∇log π_it, micro-batch by micro-batch, under lens and probe if any.

    The brake may change w and the step; where it wants no step on these rows, the list is empty.
    """
    optimizer = brake.optimizer
    chunks = micro_batches(part.group, config.accumulate)

    def forward(chunk: Tensor, grad: bool) -> Tensor:
        chosen = [prompts[i] for i in chunk.tolist()]
        return token_logp(policy, chosen, part.tokens[chunk], part.mask[chunk], config.temperature, grad)

    def whole() -> Tensor:
        """log π of all rows, without a graph."""
        return torch.cat([forward(chunk, grad=False) for chunk in chunks])[torch.cat(chunks).argsort()]

    def weigh(logp: Tensor, by: Tensor) -> Tensor:
        return effective_credit(lambda lp: surrogate(method, lp, part, by), logp)

    def pull(chunk: Tensor, cotangent: Callable[[Tensor], Tensor | None]) -> None:
        live = forward(chunk, grad=True)
        by = cotangent(live)
        if by is not None:
            torch.autograd.backward(live, by.to(live.dtype))

    def score(live: Tensor, chunk: Tensor) -> Tensor:
        return part.mask[chunk].to(live.dtype)

    if lens is not None:
        lens.calibrate(lambda weights: pull(chunks[0], lambda live: score(live, chunks[0]) * weights.to(live)[:, None]),
                       len(chunks[0]))
        for chunk in chunks if config.scope == "full" else ():
            lens.read_scores(rows[chunk], partial(pull, chunk, partial(score, chunk=chunk)))
            lens.read_tokens(rows[chunk], partial(head_norms, policy, [prompts[i] for i in chunk.tolist()],
                                                  part.tokens[chunk], part.mask[chunk], config.temperature),
                             part.mask[chunk])
        if lens.others:
            before = cache(whole)
            lens.read_others(rows, chunks, lambda other: weigh(before(), other),
                             lambda chunk, w: pull(chunk, lambda live: w))

    optimizer.zero_grad(set_to_none=True)
    sight: list[Sight] = []
    splits = probe is not None and probe.parts is not None and method.has_loss_kl

    def look_at(logp: Tensor) -> bool:
        """The whole minibatch at once: what the objective says, and what the brake makes of it."""
        if not brake.goes_on(logp, rows):
            return False
        w = weigh(logp, credit)
        sight.append(Sight(logp, w, brake.reweigh(w, logp, rows)))
        return True

    # With one micro-batch, w comes from the same forward that is pulled back; with several it must come first.
    if (len(chunks) > 1 or splits) and not look_at(whole()):
        return []
    if splits:
        bare = method.but(name=method.name, beta=0.0)
        kl = sight[0].w - effective_credit(lambda lp: surrogate(bare, lp, part, credit), sight[0].logp)
        for chunk in chunks:
            pull(chunk, lambda live, chunk=chunk: -(sight[0].pulled - kl)[chunk])  # type: ignore[misc]
        rewards = {p: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.trainable().values()}
        optimizer.zero_grad(set_to_none=True)

    # The microscope bears one backward pass, and once another minibatch has moved tokens a full probe takes its own.
    apart = probe if lens is not None and config.probe == "full" and config.minibatches > 1 else None

    def descend(live: Tensor, chunk: Tensor) -> Tensor | None:
        if not sight and not look_at(live.detach()):
            return None
        if probe is not None and apart is None:
            probe.see(live, rows[chunk])
        return -sight[0].pulled[chunk]

    for chunk in chunks:
        run = partial(pull, chunk, partial(descend, chunk=chunk))
        run() if lens is None else lens.watch(rows[chunk], run)
        if apart is not None and sight:
            apart.see(forward(chunk, grad=True), rows[chunk])
    if not sight:
        return []
    value = float(surrogate(method, sight[0].logp, part, credit))
    if lens is not None and config.scope == "full":
        lens.before_update()
    parameters = list(policy.trainable().values())
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm or torch.inf))
    if not math.isfinite(norm):
        raise CreditscopeError(f"the gradient's norm is {norm}; the run's record is whole up to the step "
                               f"before. Lower --lr, set --clip-norm, or use --dtype float32")
    if norm < VANISHING:
        norm = float(squared_norms([p.grad for p in parameters if p.grad is not None]).sum().sqrt())
    clipped = 1.0 if config.clip_norm is None else clip_factor(norm, config.clip_norm)
    if probe is not None:
        if probe.clipping is not None:
            probe.clipping.norms.append(norm)
        if probe.parts is not None:
            probe.parts.update({p: rewards[p] * clipped for p in parameters} if splits else
                               {p: p.grad for p in parameters if p.grad is not None})
    brake.step(whole, clipped)
    spoilt = next((name for name, p in policy.trainable().items() if not bool(torch.isfinite(p).all())), None)
    if spoilt is not None:
        raise CreditscopeError(f"the update has made {spoilt} infinite or NaN; the checkpoints are from before. Lower "
                               f"--lr {config.lr:g}, or raise --eps {config.eps:g}")
    return [Update(rows, sight[0].w, sight[0].logp, value, norm)]


def micro_batches(group: Tensor, parts: int) -> list[Tensor]:
    """Row indices of each micro-batch: whole groups where there are enough of them, so that a group's rows meet."""
    if parts <= len(Groups(group)):
        return deal(group, parts)
    return list(torch.arange(len(group), device=group.device).chunk(parts))


def gather(updates: Sequence[Update], rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(B, T) w and live log-probs of one pass, rows in the batch's order; those without an update are as sampled."""
    w, live = updates[0].w.new_zeros(rollouts.mask.shape), rollouts.logp.to(updates[0].logp.dtype).clone()
    for update in updates:
        w[update.rows], live[update.rows] = update.w, update.logp
    return w, live


def with_limit(method: Method, max_tokens: int) -> Method:
    """The row with the trainer's own limit as L_max, where its aggregate divides by one."""
    if method.aggregate != "constant" or method.max_tokens is not None:
        return method
    return replace(method, max_tokens=max_tokens)


def check_problems(task: Task, config: Config, estimator: Chosen) -> None:
    """Meet the first problems before anything is written: a wrong path is found now, not in a run's folder."""
    first = next(iter(task.problems("train", config.seed)), None)
    if first is None:
        raise CreditscopeError(f"task {config.task!r} has no train problems")
    estimator.row.require(task_gives(task, first), f"task {config.task!r}")
    if config.eval_problems and next(iter(task.problems("test")), None) is None:
        raise CreditscopeError(f"task {config.task!r} has no test problems; give it some, or --eval-problems 0")


def check_without_critic(config: Config, others: Sequence[Chosen]) -> None:
    """Refuse what needs a critic in a run whose own credit has none."""
    if config.critic_warmup:
        raise CreditscopeError(f"--critic-warmup {config.critic_warmup}: --credit {config.estimator} has no critic; "
                               f"leave it out, or say what it needs: needs = ('critic',)")
    for other in others:
        if "critic" in other.row.needs:
            raise CreditscopeError(f"--also {other.spec}: it needs a critic, and --credit {config.estimator} trains "
                                   f"none; leave it out, or train with --credit gae")


def other_credits(others: Sequence[Chosen], method: Method, rollouts: Rollouts,
                  make_tools: Callable[[], LabTools]) -> dict[str, Tensor]:
    """(B, T) credit by each name of --also, with tools of its own: what these sample is not counted as spent."""
    return {other.spec: other(method, rollouts, make_tools()) for other in others}


def make_optimizer(policy: Policy, config: Config) -> torch.optim.Optimizer:
    parameters = list(policy.trainable().values())
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    family = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return family(parameters, config.lr, (config.beta1, config.beta2), config.eps, config.weight_decay)


def make_probe(policy: Policy, optimizer: torch.optim.Optimizer, config: Config) -> Probe | None:
    """The probe of --probe. The part of the gradient that does not scale with reward is followed by `full` alone:
    a KL term takes a pass of its own to tell apart."""
    if config.probe == "off":
        return None
    parts = RewardParts(optimizer) if config.probe == "full" and config.unscaled else None
    clipping = None if config.clip_norm is None else Clipping(config.clip_norm)
    return Probe(optimizer, policy.trainable().items(), config.probe, config.probe_every, clipping, parts)


def log_probs(policy: Policy, batch: Batch, rollouts: Rollouts, config: Config) -> Tensor:
    """(B, T) log π of the batch under the present weights."""
    out = torch.zeros_like(rollouts.logp)
    for chunk in micro_batches(rollouts.group, config.accumulate):
        prompts = [batch.prompts[i] for i in chunk.tolist()]
        out[chunk] = token_logp(policy, prompts, rollouts.tokens[chunk], rollouts.mask[chunk], config.temperature,
                                grad=False).to(out.dtype)
    return out


def make_critic(policy: Policy, config: Config, estimator: Chosen) -> Critic:
    # The critic's targets are discounted as the estimator's credit is.
    return Critic(policy, kind=config.critic, lr=config.critic_lr, gamma=float(estimator.options.get("gamma", 1.0)),
                  seed=config.seed)


def restore(record: Record, policy: Policy, optimizer: torch.optim.Optimizer,
            critic: Critic | None, probe: Probe | None) -> tuple[int, int, int, int]:
    """Go back to the newest checkpoint, or to the start: (steps done, problems used, rollouts spent, and before)."""
    kept = record.checkpoints()
    if not kept:
        record.rewind(0)
        return 0, 0, 0, 0
    state = load_checkpoint(record.checkpoint_path(kept[-1]), policy, optimizer, critic)
    record.rewind(state["step"])
    if probe is not None:
        probe.batches = state["step"]
        if probe.clipping is not None:
            # A checkpoint of a run that was not probed does not know its norms: they may have been anything.
            low, high, count = state.get("norms", (0.0, math.inf, 10**9))
            probe.clipping.before = float(low), float(high), int(count)
    spent = state.get("spent", sum(line["rollouts/sampled"] for line in record.steps() if "rollouts/sampled" in line))
    return state["step"], state["problems"], spent, state.get("before", spent)


def evaluation_due(config: Config, step: int, spent: int, before: int) -> bool:
    """At the start, every --eval-every steps, and whenever another --eval-rollouts have been spent."""
    if step == 0 or (config.eval_every and step % config.eval_every == 0):
        return True
    return config.eval_rollouts > 0 and spent // config.eval_rollouts > before // config.eval_rollouts


def problem_stream(task: Task, seed: int, skip: int) -> Iterator[Problem]:
    """Train problems without end, epoch after epoch where the task has a last one, from number `skip` on."""

    def endless() -> Iterator[Problem]:
        epoch = 0
        while True:
            yield from task.problems("train", seed + epoch)
            epoch += 1

    return islice(endless(), skip, None)


def deal(group: Tensor, parts: int) -> list[Tensor]:
    """Row indices of each minibatch: whole groups, dealt out evenly."""
    which = Groups(group).index % parts
    return [(which == part).nonzero().squeeze(1) for part in range(parts)]


CONTINUING = MOST_DRAWS + 1  # the "attempt" whose random numbers continue answers


def stream_seed(seed: int, step: int, attempt: int) -> int:
    """A seed of its own for every draw, so that a resumed run needs no generator state."""
    return (seed * 1_000_003 + step) * (CONTINUING + 1) + attempt


class Clock:
    """Seconds spent on each part of a step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def move(self, source: str, target: str, seconds: float) -> None:
        """Book seconds of one part under another."""
        self._laps[source] -= seconds
        self._laps[target] = self._laps.get(target, 0.0) + seconds

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._start

    def metrics(self) -> Metrics:
        return {f"time/{name}": spent for name, spent in self._laps.items()} | {
            "time/step": time.perf_counter() - self._start}


def batch_metrics(drawn: Batch, used: Batch, tools: LabTools) -> Metrics:
    """What was sampled at first, before any group was replaced; what it cost; what could not be judged.

    Continuations that were sampled for values are rollouts too: `rollouts/spent` counts both.
    """
    out = metrics.signal(drawn.rollouts) | {
        "signal/used_live_groups": metrics.signal(used.rollouts)["signal/live_groups"],
        "rollouts/sampled": used.sampled, "rollouts/used": len(used.rollouts),
        "rollouts/spent": used.sampled + tools.continuations,
        "length/truncated": float((~drawn.finished).double().mean())}
    errors = used.errors + tools.errors
    if errors:
        out |= {"reward/errors": len(errors), "reward/first_error": errors[0]}
    return out


def kept_arrays(method: Method, rollouts: Rollouts, credit: Tensor, w: Tensor, live: Tensor,
                after: Tensor | None = None, also: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """The rollouts of a step as plain arrays, with the credit they were given and the w it became.

    `live` and `after` are log π of the recorded pass and after the last update, `also` the credits of --also.
    """
    names = ("tokens", "mask", "logp", "reward", "group", "entropy", "step", "step_reward",
             "step_state", "ref_logp")
    tensors = {name: getattr(rollouts, name) for name in names} | {
        "credit": credit, "w": w, "live_logp": live, "clipped": past_bound(method, rollouts, credit, live) > 0}
    if after is not None:
        tensors |= {"after_logp": after, "after_past": past_bound(method, rollouts, credit, after)}
    if also:
        tensors["other_credit"] = torch.stack([other.expand_as(rollouts.mask) for other in also.values()])
    out: dict[str, Any] = {k: v.float().cpu().numpy() if v.is_floating_point() else v.cpu().numpy()
                           for k, v in tensors.items() if v is not None}
    width = rollouts.tokens.shape[1]
    out["prompt"], out["text"] = np.array(list(rollouts.prompt)), np.array(list(rollouts.text))
    out["pieces"] = np.array([[*row, *[""] * (width - len(row))] for row in rollouts.pieces])
    return out | ({"other_names": np.array(list(also))} if also else {})


def past_bound(method: Method, rollouts: Rollouts, credit: Tensor, logp: Tensor) -> Tensor:
    """(B, T) nats past the bound at `logp`, 0 inside it and where the method does not learn (α = 0): as `Overshoot`."""
    own = credit.double().expand_as(rollouts.mask)
    learns = alpha(method, rollouts, kept(method, rollouts, own), torch.float64) != 0
    return beyond(method, logp.double(), rollouts.logp.double(), rollouts.mask, own.masked_fill(~learns, 0.0))
