"""The readings of a whole run: which batch and which of its updates are read, the record, and lines for a tracker."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from creditscope.batch.answers import answer_metrics, numbered, text_hashes
from creditscope.batch.metrics import signal
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.plugins.common.arguments import check_counts, holds_run, other_content
from creditscope.plugins.common.reader import StepReading
from creditscope.runs import schema
from creditscope.runs.record import Record

PREFIX = "creditscope/"
"""Of our keys in a trainer's own logs."""
READ = (schema.SIGNAL_LIVE_GROUPS, schema.SIGNAL_DEAD_GROUPS, schema.W_ZERO, schema.W_TOP10_MASS,
        schema.GRAM_GROUP_EFFECTIVE_RANK, schema.GRAM_GROUP_NORM_NULL, schema.GRAM_GROUP_W_NULL, schema.GRAM_BETWEEN,
        schema.GRAM_CUT_GROUPS, schema.SKETCH_GROUP("effective_rank"), schema.SKETCH_RELATIVE_ERROR,
        schema.OVERSHOOT_PAST, schema.OVERSHOOT_DISTANCE, schema.OVERSHOOT_KL, schema.REWARD_EQUAL_TEXTS,
        schema.REWARD_EQUAL_TEXTS_APART, schema.SIGNAL_DISTINCT_TEXTS, schema.SIGNAL_DEAD_REWARD,
        schema.LENGTH_REWARD_CORRELATION, schema.UPDATE_ZERO, schema.UPDATE_EPSILON_FACTOR)
"""In a trainer's own logs, where they exist; the record has all metrics."""


class Session:
    """Every `every` batches one update is read, the updates of a batch in turn: at the first the ratio is always 1.

    A line of the record is one batch. `out` is its folder, new or empty; without it the metrics in READ go to the
    trainer's logs alone. A reading that fails is absent, with its reason in the record: the training goes on.
    """

    def __init__(self, trainer: str, every: int, out: str | Path | None) -> None:
        check_counts(every, None)
        self._trainer, self.every = trainer, every
        self._out = Path(out) if out is not None else None
        self._record: Record | None = None
        self._warned: set[str] = set()
        self._line: dict[str, Any] = {}
        self._reading: StepReading | None = None
        self._start = time.perf_counter()
        self.batches = 0
        if self._out is not None:
            other = other_content(self._out)
            if other:
                raise CreditscopeError(f"{other}: give another out=, a folder that is new or empty")
            if holds_run(self._out):
                raise CreditscopeError(f"{self._out} already holds a run: give another out=, or delete the folder")

    def begin(self, config: Callable[[], Mapping[str, Any]], versions: Mapping[str, Any]) -> None:
        """A batch begins; at the first one the record is created."""
        if self._out is not None and self._record is None:
            self._record = Record.create(self._out, config(), versions)
        self._start, self._line, self._reading = time.perf_counter(), {}, None

    def update(self, updates: int) -> int | None:
        """The number of the update of this batch that is read, of `updates`; None where none is."""
        number, at = divmod(self.batches, self.every)
        return number % max(1, updates) if at == 0 else None

    def note(self, found: Mapping[str, Any]) -> None:
        self._line |= found

    def take(self, reading: StepReading | None) -> None:
        if reading is not None:
            self._reading = reading
            self._line |= reading.metrics

    def end(self) -> dict[str, float]:
        """Write the batch's line; the metrics for the trainer's logs, under PREFIX."""
        self._line[schema.TIME_STEP] = time.perf_counter() - self._start
        if self._record is not None:
            with self.reason("recorded"):
                if self._reading is not None:
                    self._record.save_group(self.batches, self._reading.groups)
                    if self._reading.scope is not None:
                        self._record.save_reading(self.batches, self._reading.scope)
                self._record.append(self.batches, self._line)
        self.batches += 1
        return {PREFIX + name: float(self._line[name]) for name in READ if name in self._line}

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None
            print(f"wrote {self._out}; next: creditscope report {self._out}", flush=True)

    @contextmanager
    def reason(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a diagnostic must not end the training
            why = str(error) if isinstance(error, CreditscopeError) else f"{type(error).__name__}: {error}"
            self.absent(why, f"batch {self.batches} was not {what}")

    def absent(self, why: str, what: str = "the reading is not whole") -> None:
        """A reading, or a part of one, that does not exist: a line of the record says why, and one warning."""
        self._line[schema.SCOPE_ABSENT] = why
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"creditscope: {self._trainer}: {what}: {why}", stacklevel=3)


def batch_metrics(rollouts: Rollouts) -> dict[str, Any]:
    """`reward/…`, `signal/…` and `length/…` of all rollouts that the trainer learns from, and their number."""
    same = numbered(text_hashes(rollouts.tokens, rollouts.mask))
    count = len(rollouts)
    return signal(rollouts) | answer_metrics(same, rollouts.reward, rollouts.group, rollouts.lengths) | {
        schema.ROLLOUTS_SAMPLED: count, schema.ROLLOUTS_USED: count, schema.ROLLOUTS_SPENT: count}
