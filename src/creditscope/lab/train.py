"""The loop: sample, judge, assign credit, update, record. It reads from top to bottom.

How it departs from the papers it runs: dropout is off, so that the first ratio is 1; π_old is the sampler's own
log-prob, not a recomputed one, and the gap between the two is reported at every step; gradients are accumulated through
w, so that a micro-batch changes memory and nothing else, whatever the method's denominators are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditscope.batch import answers, metrics
from creditscope.batch.groups import deal
from creditscope.batch.observer import StepObserver
from creditscope.batch.rollouts import Rollouts
from creditscope.credit import find_estimator
from creditscope.diagnosis.alarm import Alarm
from creditscope.errors import CreditscopeError
from creditscope.lab.checkpoint import load_checkpoint, save_checkpoint
from creditscope.lab.evaluate import evaluate
from creditscope.lab.given import check_pairs, given, pair_stream, pairs_of
from creditscope.lab.inputs import read_inputs, require_same
from creditscope.lab.rollout import Drawn, by_reward_model, replace_dead, roll_out
from creditscope.lab.setup import (
    CONTINUING,
    check_problems,
    make_critic,
    make_optimizer,
    make_probe,
    problem_stream,
    require_finite,
    stream_seed,
)
from creditscope.lab.step import Minibatch, PolicyPasses, Update, take_step
from creditscope.lab.tools import LabTools, check_first
from creditscope.microscope.observer import Observer
from creditscope.objective.kept import kept_arrays
from creditscope.objective.links import pair_changes, pair_metrics
from creditscope.objective.weights import with_limit
from creditscope.optimizer.brakes import find_brake
from creditscope.optimizer.geometry import reached_share, trainable_share
from creditscope.optimizer.kl_pull import KLPull
from creditscope.optimizer.probe import Probe
from creditscope.policy.loading import load_policy
from creditscope.policy.logp import rollout_logp
from creditscope.policy.reward_model import check_reward_folder, load_reward_model
from creditscope.runs import schema
from creditscope.runs.adapt import Setting, decide
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.runs.stopped import stopped
from creditscope.tasks import find_task

Metrics = dict[str, Any]


def train(config: Config, out: Path, versions: dict[str, Any], resume: bool = False,
          stop: Callable[[], bool] = lambda: False, alarm: Alarm | None = None) -> Generator[Metrics, None, bool]:
    """Run the training and yield the metrics of each step once they are on disk; at last, those of the evaluation.

    `stop` is asked after each step, and `alarm` sees each: an early end keeps everything. Returns whether the run came
    to its end.
    """
    if resume:
        Record.open(out)
    else:
        Record.require_free(out)  # before the model is loaded
    run = Training(config, alarm)
    record = open_record(config, out, versions, resume)
    with record, stopped(record, fresh=not resume) as begun:
        run.restore(record)
        for step in range(run.done, config.steps if not run.spent_all else run.done):
            begun.append(step)
            line = run.step(step, record)
            ends = step + 1 == config.steps or run.spent_all or stop() or bool(alarm and alarm.stop)
            if ends or (step + 1) % config.checkpoint_every == 0:
                run.checkpoint(record, step + 1)
            yield {"step": step} | line
            if ends:
                break

        last = record.checkpoints()[-1]
        if not (last == config.steps or run.spent_all):
            return False  # somebody stopped it: there is more to come
        with record.folder("model") as folder:
            run.policy.save(folder)
        if config.eval_problems:
            line = evaluate(run.policy, run.task, config, run.max_tokens)
            record.rewind(last)
            record.append(last, line)
            yield {"step": last} | line
        return True


def open_record(config: Config, out: Path, versions: dict[str, Any], resume: bool) -> Record:
    """A new record, or the one to go on with."""
    settings = asdict(config) | {"log": list(config.log), "also": list(config.also)}
    if not resume:
        return Record.create(out, settings, versions)
    if (taken := max(Record.open(out).checkpoints(), default=0)) > config.steps:
        raise CreditscopeError(f"{out} has taken {taken} steps already; give --steps {taken} or more")
    return Record.resume(out, settings, config.free)


class Training:
    """A run in memory: the policy with its optimiser, and how far it has come."""

    def __init__(self, config: Config, alarm: Alarm | None = None) -> None:
        self.config, self.alarm = config, alarm
        self.pairs = None if config.pairs is None else pairs_of(config.pairs, config.prompts)
        self.task = find_task(config.task, **config.task_options)
        if config.learned is not None:
            check_reward_folder(config.learned)
        self.policy = load_policy(config.model, device=config.device, dtype=config.dtype, lora=config.lora,
                                  chat=config.chat, seed=config.seed, recompute=config.recompute)
        self.learned = None if config.learned is None else load_reward_model(config.learned, self.policy)
        if self.pairs is not None:
            check_pairs(self.policy, self.pairs, str(config.pairs))
        self.estimators = {spec: find_estimator(spec) for spec in config.credits}
        for chosen in self.estimators.values():
            check_problems(self.task, config, chosen)
        self.others = [self.estimators[spec] for spec in config.also]
        self.max_tokens = config.max_tokens or self.task.max_tokens
        self.method = with_limit(config.row, self.max_tokens)
        self.reference = self.policy.reference() if config.needs_reference else None
        self.optimizer = make_optimizer(self.policy, config)
        self.brake = find_brake(config.brake, self.optimizer)
        self.probe = make_probe(self.policy, self.optimizer, config)
        self.pull = KLPull(self.policy.trainable().values())
        self.critic = make_critic(self.policy, config, self.estimators[config.estimator], self.others)
        self.observer = Observer(self.policy.model, config.scope == "full", self.policy.trainable()) \
            if config.scope != "off" else None
        self.inputs = read_inputs(config, self.policy, self.task)
        self.done = self.used = self.spent = self.spent_before = 0
        """Steps done, problems used, rollouts spent, and rollouts spent before the last step."""
        self.lines: list[Metrics] = []
        """The record so far, where --adapt reads it."""

    @property
    def spent_all(self) -> bool:
        """Whether the budget of --rollouts is spent."""
        return 0 < self.config.rollouts <= self.spent

    def restore(self, record: Record) -> None:
        """Go back to the newest checkpoint, or to the start."""
        kept = record.checkpoints()
        if kept:
            state = load_checkpoint(record.checkpoint_path(kept[-1]), self.policy, self.optimizer, self.critic)
            require_same(state.get("inputs"), self.inputs, record.path)
            self.done, self.used = state["step"], state["problems"]
        record.rewind(self.done)
        if kept:
            self.spent = state.get("spent", sum(line.get(schema.ROLLOUTS_SAMPLED, 0) for line in record.steps()))
            self.spent_before = state.get("before", self.spent)
        if kept and self.probe is not None:
            self.probe.batches = self.done
            if self.probe.clipping is not None:
                # A checkpoint of a run that was not probed does not know its norms: they may have been anything.
                low, high, count = state.get("norms", (0.0, math.inf, 10**9))
                self.probe.clipping.before = float(low), float(high), int(count)
        if self.alarm is not None:
            for line in record.steps():
                self.alarm.note(line["step"], line)
        self.problems: Iterator[Any]
        if self.pairs is None:
            self.problems = problem_stream(self.task, self.config.seed, skip=0)
        else:
            self.problems = pair_stream(self.pairs, self.config.seed)
        self.seen = answers.PromptsSeen()
        drawn: Iterator[Any] = islice(self.problems, self.used)
        self.seen.add(problem.prompt for problem in drawn)
        self.lines = record.steps() if self.config.adapt != "none" else []  # a long run must not hold what is not read

    def checkpoint(self, record: Record, done: int) -> None:
        """Write everything that a later process needs to go on."""
        state: Metrics = {"step": done, "problems": self.used, "spent": self.spent, "before": self.spent_before,
                          "inputs": self.inputs}
        if self.probe is not None and self.probe.clipping is not None:
            state["norms"] = list(self.probe.clipping.extent)
        with record.checkpoint(done) as folder:
            save_checkpoint(folder, self.policy, self.optimizer, state, self.critic)

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, step: int, record: Record) -> Metrics:
        """Sample a batch, assign credit, make its updates, and write all of it down."""
        config, clock = self.config, Clock()
        line: Metrics = {}
        now = decide(config.adapt, Setting(config.group, config.estimator), self.lines, config.rollouts)
        if config.adapt != "none":
            line |= {schema.ADAPT_GROUP: now.group, schema.ADAPT_SWITCHED: int(now.credit != config.estimator)}
        if config.eval_problems and evaluation_due(config, step, self.spent, self.spent_before):
            line |= evaluate(self.policy, self.task, config, self.max_tokens)
            clock.lap("eval")

        drawn, batch = self.sample(step, now.group)
        rollouts = batch.rollouts
        clock.lap("sample")

        # Credit is the whole batch's, so that what is whitened or counted over it does not see minibatches.
        tools = self.tools(step, batch)
        for chosen in self.estimators.values() if step == 0 else ():
            check_first(chosen.row.needs, batch, config.under(chosen.spec))
        credit = self.estimators[now.credit](self.method, rollouts, tools)
        clock.lap("credit")
        # Before --critic-warmup is over, the critic alone learns.
        look = self.observer if step >= config.critic_warmup and step % config.every == 0 else None
        if look is not None and self.others:
            look.assign(lambda: self.other_credits(step, batch))
            clock.lap("scope")
        if self.critic is not None:
            line |= self.critic.fit(rollouts, parts=config.accumulate)
        clock.lap("credit")

        updates = self.learn(step, rollouts, credit, look)
        clock.lap("train")
        if look is not None:
            clock.move("train", "scope", look.seconds + self.pull.seconds)
        after = None
        if updates and self.probe is not None:
            after, readings = self.close(step, rollouts, record, self.probe)
            line |= readings
            clock.lap("probe")

        line |= batch_metrics(drawn, batch, tools) | self.seen.metrics() | metrics.assigned(credit, rollouts)
        if updates:
            w, live = gather(updates, rollouts)
            line |= metrics.spread(w, rollouts.mask) | self.update_metrics(step, updates, rollouts)
            first = updates[0][0]  # at ratio 1: no bound leaves a token out
            line |= metrics.untrained((credit[first.rows] != 0) & rollouts.mask[first.rows], first.w != 0)
            line |= self.pull.metrics | pair_metrics(self.method, live, rollouts, credit)
            if after is not None:
                line |= pair_changes(self.method, live, after, rollouts, credit)
        also = {} if look is None else look.others
        if updates and look is not None:
            line |= look.metrics(rollouts, w, clock.spent)
            record.save_reading(step, look.arrays(rollouts, w))
            look.reset()
            clock.lap("scope")
        line |= clock.metrics()
        if updates and config.keep_every and step % config.keep_every == 0:
            record.save_group(step, kept_arrays(self.method, rollouts, credit, w, live, after, also,
                                                self.policy.special()))
        self.write(step, record, line)
        return line

    def sample(self, step: int, group: int) -> tuple[Drawn, Drawn]:
        """What was drawn at first, and the batch to learn from: a method that drops unanimous groups may have them
        replaced by fresh prompts."""
        config = self.config

        def draw(attempt: int) -> Drawn:
            self.used += config.prompts
            problems = list(islice(self.problems, config.prompts))
            self.seen.add(problem.prompt for problem in problems)
            if self.pairs is not None:
                return given(self.policy, problems, config.temperature)
            generator = torch.Generator(self.policy.device).manual_seed(stream_seed(config.seed, step, attempt))
            found = roll_out(self.policy, self.task, problems, group, max_tokens=self.max_tokens,
                             temperature=config.temperature, top_p=config.top_p, generator=generator)
            return found if self.learned is None else by_reward_model(self.learned, found)

        drawn = batch = draw(0)
        for attempt in range(1, config.resample + 1 if self.method.keep == "live_groups" else 1):
            if not bool(batch.dead.any()):
                break
            batch = replace_dead(batch, draw(attempt))
        if self.reference is not None:
            ref_logp = rollout_logp(self.reference, batch.rollouts, config.temperature, grad=False)
            batch = replace(batch, rollouts=replace(batch.rollouts, ref_logp=ref_logp))
        return drawn, batch

    def tools(self, step: int, batch: Drawn) -> LabTools:
        """What a credit estimator may use on this batch."""
        config = self.config
        return LabTools(self.policy, self.task, config, batch, max_tokens=self.max_tokens, critic=self.critic,
                        learned=self.learned, seed=stream_seed(config.seed, step, CONTINUING),
                        progress=step / config.steps)

    def other_credits(self, step: int, batch: Drawn) -> dict[str, Tensor]:
        """(B, T) credit by each name of --also, with tools of its own: what these sample is not counted as spent."""
        return {other.spec: other(self.method, batch.rollouts, self.tools(step, batch)) for other in self.others}

    def learn(self, step: int, rollouts: Rollouts, credit: Tensor, look: Observer | None) -> list[list[Update]]:
        """The updates of each pass over the batch; the observer of the microscope sees the first pass alone."""
        config, probe = self.config, self.probe
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate(step)
        observers: list[StepObserver] = [one for one in (look, probe) if one is not None]
        for one in (*observers, self.pull, self.brake):
            one.begin(self.method, rollouts, credit)
        if look is not None or (probe is not None and probe.due):
            observers.append(self.pull)
        if probe is not None:
            # Once another minibatch has moved tokens, a full probe takes a backward pass of its own.
            probe.own_pass = look is not None and config.probe == "full" and config.minibatches > 1
        passes: list[list[Update]] = []
        for inner in range(config.inner_steps if step >= config.critic_warmup else 0):
            updates = []
            for rows in deal(rollouts.group, config.minibatches):
                minibatch = Minibatch(self.policy, self.method, rollouts, credit, rows=rows,
                                      accumulate=config.accumulate, temperature=config.temperature)
                update = take_step(minibatch, self.brake, observers, config.clip_norm)
                require_finite(self.policy, config)
                updates += [] if update is None else [update]
            if not updates:
                break  # the brake wants no more of this batch
            passes.append(updates)
            if inner == 0 and look is not None:
                observers.remove(look)
                if probe is not None:
                    probe.own_pass = False
        if look is not None:
            look.after_updates()
        return passes

    def close(self, step: int, rollouts: Rollouts, record: Record, probe: Probe) -> tuple[Tensor | None, Metrics]:
        """The probe's reading of the batch, and log π after its last update where the probe's schedule pays for it."""
        passes = PolicyPasses(self.policy, rollouts, accumulate=self.config.accumulate,
                              temperature=self.config.temperature)
        forward = cache(lambda: passes.logp().to(rollouts.logp.dtype))
        line = probe.finish(forward)
        shares = {schema.UPDATE_TRAINABLE: trainable_share(self.policy.model),
                  schema.UPDATE_REACHED: reached_share(self.policy.model)}
        line |= {name: share for name, share in shares.items() if share is not None}
        if probe.arrays():
            record.save_optimizer(step, probe.arrays())
        return forward() if probe.due else None, line

    def update_metrics(self, step: int, passes: Sequence[Sequence[Update]], rollouts: Rollouts) -> Metrics:
        first = passes[0][0]  # later minibatches are of a policy that has moved
        gap = (first.logp - rollouts.logp[first.rows]).abs()[rollouts.mask[first.rows]]
        return {schema.POLICY_SAMPLER_GAP: float(gap.max()),
                schema.OBJECTIVE_VALUE: first.value, schema.GRAD_NORM: first.norm,
                schema.OPTIMIZER_LR: self.config.learning_rate(step),
                schema.OPTIMIZER_UPDATES: sum(map(len, passes))} | self.brake.metrics()

    def write(self, step: int, record: Record, line: Metrics) -> None:
        """The line last: who sees it finds everything that was kept of the step."""
        config = self.config
        if self.alarm is not None and (told := self.alarm.see(step, line)):
            line[schema.RUN_ALARM] = "\n".join(told)
        record.append(step, line)
        if config.adapt != "none":
            self.lines.append(line)
        record.thin(step, config.keep_most, {"scope": config.every, "groups": config.keep_every,
                                             "optimizer": config.probe_every})
        self.spent, self.spent_before = self.spent + line[schema.ROLLOUTS_SPENT], self.spent


def evaluation_due(config: Config, step: int, spent: int, before: int) -> bool:
    """At the start, every --eval-every steps, and whenever another --eval-rollouts have been spent."""
    if step == 0 or (config.eval_every and step % config.eval_every == 0):
        return True
    return config.eval_rollouts > 0 and spent // config.eval_rollouts > before // config.eval_rollouts


def gather(passes: Sequence[Sequence[Update]], rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(B, T) w and live log-probs of the first pass, in the batch's order; rows without an update are as sampled."""
    updates = passes[0]
    w, live = updates[0].w.new_zeros(rollouts.mask.shape), rollouts.logp.to(updates[0].logp.dtype).clone()
    for update in updates:
        w[update.rows], live[update.rows] = update.w, update.logp
    return w, live


REWARDS = frozenset({schema.REWARD_MEAN, schema.REWARD_STD, schema.REWARD_MIN, schema.REWARD_MAX})
"""Metrics of what a verifier or a reward model gave to sampled answers."""


def batch_metrics(drawn: Drawn, used: Drawn, tools: LabTools) -> Metrics:
    """What was sampled at first, before any group was replaced; what it cost; what could not be judged.

    Continuations that were sampled for values are rollouts too: `rollouts/spent` counts both.
    """
    sampled, out = drawn.rollouts, metrics.signal(drawn.rollouts)
    if used.sampled:
        out |= answers.answer_metrics(answers.answer_numbers(sampled), sampled.reward, sampled.group, sampled.lengths,
                                      ~drawn.finished)
    else:  # the labels of given pairs are no rewards
        out = {name: value for name, value in out.items() if name not in REWARDS}
    out |= {
        schema.SIGNAL_USED_LIVE_GROUPS: metrics.signal(used.rollouts)[schema.SIGNAL_LIVE_GROUPS],
        schema.ROLLOUTS_SAMPLED: used.sampled, schema.ROLLOUTS_USED: len(used.rollouts),
        schema.ROLLOUTS_SPENT: used.sampled + tools.continuations,
        schema.LENGTH_TRUNCATED: float((~drawn.finished).double().mean())}
    if drawn.gold is not None:
        out |= answers.gold_metrics(drawn.gold, sampled.reward, sampled.group)
    if used.rollouts.ref_logp is not None and used.sampled:  # answers of --pairs are not the policy's own
        out[schema.POLICY_REFERENCE_KL] = metrics.reference_kl(used.rollouts)
    if drawn.lost is not None:
        out[schema.REWARD_LOST_TO_FORM] = float(drawn.lost.double().mean())
    errors = used.errors + tools.errors
    if errors:
        out |= {schema.REWARD_ERRORS: len(errors), schema.REWARD_FIRST_ERROR: errors[0]}
    return out


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
        return {f"time/{name}": spent for name, spent in self._laps.items()} | {schema.TIME_STEP: self.spent}
