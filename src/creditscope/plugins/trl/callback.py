"""A GRPOTrainer, RLOOTrainer or DPOTrainer under the microscope, in one line; the training is not changed.

    trainer.add_callback(ScopeCallback(trainer, every=10, out="runs/mine"))

A reading takes the rows of the coming optimiser step, at the weights before it: one forward and backward pass, and one
forward pass after the step; the first reading, every 25th and the first after the model has changed also prove, by
further passes, that each row is attributed to the right rollout. Every rank reads its own rows. The metrics in WATCHED
go into TRL's logs as `creditscope/…`, all of them into a record for `creditscope report` and `papers check`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import DPOTrainer

from creditscope.batch import metrics
from creditscope.batch.groups import Groups
from creditscope.batch.groups import micro_batches as by_groups
from creditscope.errors import CreditscopeError, printable
from creditscope.methods.axes import Method
from creditscope.microscope import distributed as ranks
from creditscope.microscope.shards import many_ranks
from creditscope.optimizer.geometry import SampledUpdate
from creditscope.plugins.common import gather_ranks as together
from creditscope.plugins.common.arguments import check_counts, check_stop, holds_run, other_content
from creditscope.plugins.common.gather_ranks import Rows
from creditscope.plugins.common.observer import RankObserver
from creditscope.plugins.common.untouched import untouched
from creditscope.plugins.common.update import after_step, before_step, moved_by
from creditscope.plugins.trl import names, proving, zero
from creditscope.plugins.trl.alarm import TrainerAlarm
from creditscope.plugins.trl.generations import Generations
from creditscope.plugins.trl.passes import Inputs, chosen, entropy, take
from creditscope.plugins.trl.preferences import Preferences
from creditscope.plugins.trl.settings import settings_of, versions
from creditscope.plugins.trl.source import StepRows, TrainerSource
from creditscope.policy.loading import Policy
from creditscope.runs import schema
from creditscope.runs.record import Record

AGREE = 0.99
"""Cosine of TRL's gradient and ours below which the row of the table is not the trainer's loss."""

WATCHED = (schema.SIGNAL_LIVE_GROUPS, schema.SIGNAL_DEAD_GROUPS, schema.W_ZERO, schema.W_TOP10_MASS,
           schema.W_DEAD_ROWS, schema.W_SKIPPED_FIRST, schema.W_SKIPPED_LAST, schema.GRAM_GROUP_EFFECTIVE_RANK,
           schema.GRAM_GROUP_NORM_NULL, schema.GRAM_GROUP_W_NULL, schema.OVERSHOOT_PAST, schema.OVERSHOOT_DISTANCE,
           schema.OVERSHOOT_KL, schema.GRAD_NORM, schema.SCOPE_AGREEMENT, schema.REWARD_ERRORS,
           schema.ROLLOUTS_SAMPLED, schema.REWARD_EQUAL_TEXTS, schema.REWARD_EQUAL_TEXTS_APART,
           schema.SIGNAL_DISTINCT_TEXTS, schema.SIGNAL_DEAD_REWARD, schema.LENGTH_REWARD_CORRELATION,
           schema.PROMPTS_PASSES, schema.UPDATE_ZERO, schema.UPDATE_EPSILON_FACTOR, schema.UPDATE_TRAINABLE,
           schema.UPDATE_REACHED, schema.PAIRS_CHOSEN_CHANGE, schema.PAIRS_REJECTED_CHANGE, schema.PAIRS_CHOSEN_FELL,
           schema.SCOPE_NORM_RATIO, schema.SCOPE_ROW_ERROR, schema.GRAM_BETWEEN, schema.GRAD_KL_PULL,
           schema.GRAD_KL_SIZE)
"""In TRL's logs, where they exist; the record has all metrics."""


class ScopeCallback(TrainerCallback):  # type: ignore[misc]
    """Reads a GRPOTrainer, an RLOOTrainer, a DPOTrainer or a subclass every `every` optimiser steps.

    `out` is the folder of the record, new or empty unless training resumes; without it only the metrics in WATCHED are
    kept, in TRL's logs. A reading takes at most `groups` groups of the step, None for all; the first at each pass over
    a batch takes all, and compares our gradient with TRL's. `gram=False` leaves out the geometry and the backward pass.
    `tell` is called with each line of the record; `config` replaces the trainer's arguments in it.

    With `alarm`, every `every` steps the steps so far are diagnosed as `creditscope doctor` would: a finding that is
    broken for the first time is printed, once, and is `creditscope/alarm` = 1 in TRL's logs and `run/alarm` in the
    record. `stop_on="broken"` then also ends the training.
    """

    def __init__(self, trainer: Any, *, every: int = 10, out: str | Path | None = None, groups: int | None = 4,
                 gram: bool = True, tell: Callable[[dict[str, Any]], None] | None = None,
                 config: Mapping[str, Any] | None = None, alarm: bool = True, stop_on: str | None = None) -> None:
        names.check_trainer(trainer)
        check_counts(every, groups)
        check_stop(alarm, stop_on)
        self._trainer, self._every, self._groups, self._gram, self._tell = trainer, every, groups, gram, tell
        self._out, self._config = Path(out) if out is not None else None, config
        self._alarm: TrainerAlarm | None = None
        self._alarmed = alarm, stop_on
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        self._policy = Policy("the trainer's", trainer.accelerator.unwrap_model(trainer.model), tokenizer)
        self._held = 0  # readings in which our gradient was compared with TRL's
        self._record: Record | None = None
        self._undo: list[Callable[[], None]] = []  # under ZeRO, what ends the readings in front of its engine's steps
        self._open = False
        self._reading: tuple[StepRows, Rows] | None = None
        """The rows of the step: of this rank; of all ranks on the first, of this one elsewhere."""
        self._moving: SampledUpdate | None = None  # weights before the step of a reading
        self.extra: dict[str, Any] = {}  # further metrics for the next line of the record
        self._line: dict[str, Any] = {}
        self._start = 0.0
        self._warned: set[str] = set()
        self._first = bool(trainer.is_world_process_zero())  # whether this rank writes the record
        if getattr(trainer, "_entropy_bonus_enabled", False) or getattr(trainer, "aux_loss_enabled", False):
            self._warn("terms", "the trainer adds an entropy bonus or a router's loss, which no row has: readings are "
                                "of the policy term and the KL alone")
        other = other_content(self._out) if self._first and self._out is not None else None
        if other:
            raise CreditscopeError(f"{other}: give ScopeCallback another out=, a folder that is new or empty")
        self._source: TrainerSource = (Preferences if isinstance(trainer, DPOTrainer) else Generations)(trainer, every)

    @property
    def method(self) -> Method | None:
        """The row of the table with the trainer's loss; None for a loss of DPOTrainer that the table does not have."""
        return self._source.method

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state is not self._trainer.state:
            raise CreditscopeError("this ScopeCallback was made for another trainer: give it the one that it is added "
                                   "to, trainer.add_callback(ScopeCallback(trainer))")
        if sum(isinstance(other, ScopeCallback) for other in self._trainer.callback_handler.callbacks) > 1:
            raise CreditscopeError("this trainer already has a ScopeCallback: add one, once (ScopedGRPOTrainer brings "
                                   "its own)")
        if zero.is_zero(self._trainer):
            engine = self._trainer.accelerator.deepspeed_engine_wrapped.engine
            self._undo.append(zero.before_steps(engine, self._read))
        self._source.begin(resumed=state.global_step > 0)
        config = self._config or settings_of(self._trainer, self._source, self._every, self._gram)
        alarm, stop_on = self._alarmed
        if alarm and self._alarm is None:
            self._alarm = TrainerAlarm(self._trainer, config, self._every, stop_on)
        if not self._first or self._out is None or self._record is not None:
            return
        if state.global_step > 0 and (self._out / "run.json").exists():
            self._record = Record.resume(self._out, config, frozenset(config))
            self._record.rewind(state.global_step)
            if self._alarm is not None:
                self._alarm.recall(self._record.steps())
        elif holds_run(self._out):
            raise CreditscopeError(f"{self._out} already holds a run: give ScopeCallback another out=, delete the "
                                   f"folder, or go on with trainer.train(resume_from_checkpoint=True)")
        else:
            self._record = Record.create(self._out, config, versions())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start, self._line, self._reading, self._moving = time.perf_counter(), {}, None, None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._undo:  # else the engine has called it, and has stepped
            self._read()

    def _read(self) -> None:
        """After the last backward of an optimiser step and before the step."""
        scheduler = getattr(self._trainer, "lr_scheduler", None)
        if scheduler is not None:
            self._line[schema.OPTIMIZER_LR] = float(scheduler.get_last_lr()[0])
        self.close()
        if self.due and self._reading is None:
            with self._reason("read"):
                self._look()
        if self._reading is not None:
            self._moving = before_step(self._policy.model, bool(self._undo))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._reading is not None:
            with self._reason("read after the step"):
                self._look_after(*self._reading, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step - 1
        if not self._first:
            if self._alarm is not None:
                self._alarm.step(step, {}, control)
            return
        logs = self._trainer._metrics["train"]
        line = self._source.line()
        known = line | self._line
        for name in WATCHED:
            if name in known:
                logs[f"creditscope/{name}"].append(known[name])
        if logs.get("entropy"):
            line[schema.ENTROPY_MEAN] = logs["entropy"][-1]
        line |= self._line | self.extra | {schema.TIME_STEP: time.perf_counter() - self._start}
        self.extra = {}
        if self._alarm is not None and (told := self._alarm.step(step, line, control)):
            line[schema.RUN_ALARM] = told
            if self._tell is None:
                print(f"\n{printable(told)}", flush=True)  # below the progress bar's line
        if self._record is not None:
            with self._reason("recorded"):
                self._record.append(step, line)
        if self._tell is not None:
            self._tell({"step": step} | line)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        if self._alarm is not None:
            self._alarm.logged(state.global_step - 1, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        while self._undo:
            self._undo.pop()()
        if self._record is not None:
            self._record.close()
            self._record = None
            if self._tell is None:
                print(f"wrote {self._out}; next: creditscope report {self._out}")

    @property
    def due(self) -> bool:
        """Whether the coming optimiser step is on schedule, and its rows are known."""
        return self._source.due(self._trainer.state.global_step)

    def _look(self) -> None:
        """One pass over this rank's rows, groups whole, under the microscope; then the rows of all ranks."""
        start = time.perf_counter()
        model, observer = self._policy.model, self.observer
        observer.reset()
        window, chunks, whole = self._chosen()
        live = torch.zeros(window.rollouts.mask.shape, dtype=torch.float64, device=window.rollouts.mask.device)
        w, spread = torch.zeros_like(live), torch.zeros_like(live)

        def pull(chunk: Tensor, weights: Tensor | None = None) -> None:
            part = window.rows(chunk)
            z = self._logits(part.inputs)
            logp = chosen(z, part.inputs)
            credit = torch.zeros_like(logp)
            try:
                spread[chunk], live[chunk] = entropy(z).to(spread), logp.detach().to(live)
                credit = part.w(logp)
                w[chunk] = credit.to(w)
            finally:
                if self._gram:  # after an error too: where weights are sharded, other ranks wait in this backward
                    given = credit if weights is None else credit * weights.to(credit)[:, None]
                    torch.autograd.backward(logp, -given.to(logp.dtype))

        def look(chunk: Tensor) -> None:
            if self._gram:
                with observer.around(chunk):
                    pull(chunk)
            else:
                pull(chunk)

        found: ranks.RanksReading | None = None
        square = 0.0  # ‖∇‖² of the rows of all ranks
        with untouched(model) as theirs, torch.set_grad_enabled(self._gram):
            first = chunks[0] if chunks else torch.arange(1, device=live.device)  # all ranks take part
            proof = self._prove(window.rows(first).inputs) if self._gram and (chunks or many_ranks()) else None
            together.run(model, [partial(look, chunk) for chunk in chunks], lambda: self._idle(window))
            if self._gram and many_ranks():
                together.reduce(model)
                found = observer.across(window.rollouts.group, together.scale(model))
            if self._gram and (len(chunks) > 1 or many_ranks()):
                square = together.products([(p.grad, p.grad) for p in theirs if p.grad is not None])[1]
            if self._gram and whole:
                self._line |= self._agreement(zero.reduced(theirs) if self._undo else theirs)
            if self._gram:
                self._line |= self._source.terms(model, window, chunks, {p: p.grad for p in theirs})
            if proof is not None and many_ranks():
                proving.prove_gathered(observer, model, self._trainer.state.global_step, len(window.rollouts), chunks,
                                       pull, lambda: self._idle(window))
                ranks.agreed(observer.require_proof)

        def mine() -> Rows:
            sampled = window.sampled_by(live)
            if window.fresh:  # the sampling policy is the live one
                sampled = replace(sampled, entropy=spread)
            rows = Rows(sampled, window.credit, live, w, window.value(live), observer.blocks)
            return rows.in_step(together.scale(model), found.split if found else ()) if many_ranks() else rows

        self._note(window, ranks.agreed(mine), found, square)
        if whole and self._reading is not None:
            self._line[schema.OBJECTIVE_VALUE] = self._reading[1].value
        self._line[schema.TIME_SCOPE] = time.perf_counter() - start

    def _prove(self, inputs: Inputs) -> str | None:
        """What proof was due; where it failed, no reading is taken until another has passed."""
        observer = self.observer
        kind = proving.due(observer)
        try:
            if kind is not None:
                proving.prove_first(observer, kind, inputs, self._logits)
        except torch.OutOfMemoryError:  # a second set of gradients, where the trainer's own pass is read
            if many_ranks():
                raise
            self._warn("proof", "there is no room for the proof that each row is attributed to the right rollout: "
                                "readings are taken without it")
        ranks.agreed(observer.require_proof)
        return kind

    def _chosen(self) -> tuple[StepRows, list[Tensor], bool]:
        """This rank's rows of the step, those of each pass, and whether these are all the rows of all ranks."""
        size = self._source.rows_per_pass
        # Our gradient is compared with TRL's at each pass over a batch: at ratio 1 neither clip nor KL has an effect.
        limit = None if self._gram and self._held < self._source.updates else self._groups
        window = ranks.agreed(lambda: self._source.take(self._words, ended=not self._undo))
        # A group of answers that are all masked has w = 0 and needs no pass.
        ids = torch.unique(window.rollouts.group[window.rollouts.mask.any(dim=1)])
        cut = limit is not None and len(ids) > limit
        if cut:
            window = window.rows(torch.isin(window.rollouts.group, ids[:limit]).nonzero().squeeze(1))
        heard = torch.isin(window.rollouts.group, ids).nonzero().squeeze(1)
        parts = min(-(-len(heard) // size), len(ids[:limit]))
        chunks = [heard[chunk] for chunk in by_groups(window.rollouts.group[heard], parts)]
        return window, chunks, not together.most(int(cut), heard.device)

    def _look_after(self, window: StepRows, rows: Rows, step: int) -> None:
        """The same rows after the step; then the record is written."""
        start = time.perf_counter()
        model = self._policy.model
        size = self._source.rows_per_pass
        places = torch.arange(len(window.credit), device=window.credit.device)
        seen: list[Tensor] = []

        def see(place: Tensor) -> None:
            part = take(window.inputs, place)
            seen.append(chosen(self._logits(part), part).to(window.credit.device, torch.float64))

        with untouched(model), torch.no_grad():
            together.run(model, [partial(see, place) for place in torch.split(places, size)],
                         lambda: self._idle(window))
        moved = together.to_first(moved_by(self._moving))
        found = together.to_first(torch.cat(seen))
        if not self._first:
            return
        self._line |= after_step(moved, self._trainer.optimizer, model)
        after = together.stacked(found).to(rows.live)
        self._line |= self._source.moved(rows, after)
        if self._record is not None:
            self._record.save_group(step, self._source.arrays(rows, after, self._policy.special()))
            if rows.blocks and len(set(Groups(rows.rollouts.group).counts.tolist())) == 1:
                # Where a step takes part of a generation, groups are cut unevenly, and blocks do not stack.
                self._record.save_reading(step, self.observer.arrays(rows.rollouts, rows.w))
        self._line[schema.TIME_SCOPE] = self._line.get(schema.TIME_SCOPE, 0.0) + time.perf_counter() - start

    def _note(self, window: StepRows, mine: Rows, found: ranks.RanksReading | None = None, square: float = 0.0) -> None:
        """The metrics before the step, on the first rank."""
        gathered = together.to_first(mine)
        rows = together.joined(gathered) if gathered else mine
        self._reading = window, rows
        if not self._first:
            return
        observer = self.observer
        observer.blocks = rows.blocks
        # Rows of cut groups are in the gradient and in no block.
        observer.updates = [(len(rows.blocks), square)] if found is None or not found.split else []
        self._line |= self._source.assigned(rows) | metrics.spread(rows.w, rows.rollouts.mask)
        if rows.blocks:
            self._line |= observer.metrics(rows.rollouts, rows.w, 1.0)
        if found is not None:
            self._line |= together.sketched(found, observer.eps)

    @property
    def _words(self) -> Policy | None:
        return self._policy if self._out is not None else None

    def _logits(self, inputs: Inputs) -> Tensor:
        with self._trainer.accelerator.autocast():
            return self._source.logits(self._policy.model, inputs)

    def _idle(self, window: StepRows) -> None:
        """A pass with gradient 0, while other ranks have one more pass."""
        z = self._logits(take(window.inputs, slice(1)))
        if z.requires_grad:
            torch.autograd.backward(0 * z.sum())

    @cached_property
    def observer(self) -> RankObserver:
        """Made at the first reading: only then are all adapters and wrappers in place."""
        return RankObserver(self._policy.model)

    def _agreement(self, theirs: dict[nn.Parameter, Tensor | None]) -> dict[str, float]:
        """The cosine of TRL's gradient and ours, and the norm of ours, which is not clipped."""
        dot, ours, other = together.products([(p.grad, g) for p, g in theirs.items()
                                              if p.grad is not None and g is not None])
        if not ours * other > 0:
            return {schema.GRAD_NORM: ours**0.5}
        cosine = dot / (ours * other) ** 0.5
        self._held += 1
        if cosine < AGREE:
            self._warn("agreement", f"the trainer's gradient {self._source.apart.format(cosine=cosine)}")
        told: dict[str, float] = {schema.GRAD_NORM: ours**0.5, schema.SCOPE_AGREEMENT: cosine}
        if self._trainer.accelerator.scaler is None:  # else its factor may still be in TRL's gradient
            clip = self._trainer.args.max_grad_norm or math.inf
            told[schema.SCOPE_NORM_RATIO] = min(ours**0.5, clip) / other**0.5
        return told

    @contextmanager
    def _reason(self, what: str) -> Iterator[None]:
        """A reading that fails is absent, with the reason in the record; the training goes on."""
        try:
            yield
        except Exception as error:  # a diagnostic must not end the training
            self._reading = None
            why = str(error) if isinstance(error, CreditscopeError) else f"{type(error).__name__}: {error}"
            self._line[schema.SCOPE_ABSENT] = why
            self._warn(what, f"step {self._trainer.state.global_step} was not {what}: {why}")

    def _warn(self, cause: str, text: str) -> None:
        if self._first and cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(f"creditscope: {text}", stacklevel=2)

    # -- inside the trainer's own backward, for the mixin ------------------------------------------------------------

    @property
    def generations(self) -> Generations:
        assert isinstance(self._source, Generations)
        return self._source

    def open(self) -> bool:
        """Open the observer before a forward, where the coming backward is to be read."""
        self._open = self.due and self._gram and self._reading is None
        if self._open:
            self.observer.reset()
            self.observer.open()
        return self._open

    def seen(self, inputs: Inputs, live: Tensor) -> None:
        """The forward's log-probs; w is computed after the backward."""
        self._pending = inputs, live.detach()

    def close(self) -> None:
        """Read the pass, after the backward and before its gradient is scaled."""
        if not self._open:
            return
        self._open = False
        start = time.perf_counter()
        inputs, live = self._pending
        with self._reason("read"):
            observer = self.observer
            observer.close(torch.arange(len(live), device=live.device))
            window, model = self.generations.window([inputs], self._words), self._policy.model
            with untouched(model) as theirs:
                if self._gram:
                    self._prove(inputs)
                self._line |= self._source.terms(model, window, [torch.arange(len(live), device=live.device)], theirs)
            live = live.double()
            value = self._line[schema.OBJECTIVE_VALUE] = window.value(live)
            self._note(window, Rows(window.sampled_by(live), window.credit, live, window.w(live), value,
                                    observer.blocks))
        self._line[schema.TIME_SCOPE] = time.perf_counter() - start

    def abort(self) -> None:
        """Restore the model after an exception between `open` and `close`."""
        if self._open:
            self._open = False
            self.observer.abort()
