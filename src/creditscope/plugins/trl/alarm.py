"""The diagnosis of a TRL run while it trains: our line of each step and what TRL computed for its log, from memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from creditscope.diagnosis.alarm import Alarm
from creditscope.microscope.shards import many_ranks
from creditscope.plugins.common import gather_ranks
from creditscope.runs.numbers import mean

LOGGED = ("loss", "grad_norm", "learning_rate")
"""Metrics that TRL has only when it logs."""


class TrainerAlarm:
    """`creditscope.diagnosis.alarm` in a trainer. Rank 0 diagnoses; with `stop_on` all ranks stop together."""

    def __init__(self, trainer: Any, config: Mapping[str, Any], every: int, stop_on: str | None) -> None:
        self._trainer, self._stop_on = trainer, stop_on
        self._alarm = Alarm(config, every, stop_on)
        self._first = bool(trainer.is_world_process_zero())
        self._seen: dict[str, int] = {}
        self._failed = False

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """The steps of a run that is resumed."""
        for line in lines:
            self._alarm.note(line["step"], line)

    def step(self, step: int, line: Mapping[str, Any], control: Any) -> str:
        """The findings that are broken for the first time, one per line; an error of the alarm is a warning."""
        told: list[str] = []
        due = self._alarm.due(step)
        if self._first:
            try:
                self._alarm.note(step, {**self._fresh(), **line})
                told = self._alarm.look(step) if due else []
            except Exception as error:  # a diagnostic must not end the training
                if not self._failed:
                    self._failed = True
                    warnings.warn(f"creditscope: no diagnosis at step {step}: {type(error).__name__}: {error}",
                                  stacklevel=2)
        if due and self._stop_on is not None:
            stop = int(self._alarm.stop)
            if many_ranks():  # a rank that stopped alone would leave the others waiting
                stop = gather_ranks.most(stop, self._trainer.accelerator.device)
            control.should_training_stop = bool(control.should_training_stop or stop)
        if told:
            self._trainer._metrics["train"]["creditscope/alarm"].append(1.0)
        return "\n".join(told)

    def logged(self, step: int, logs: Mapping[str, Any]) -> None:
        """What TRL knows only when it logs, for the step that was just made. TRL empties its lists after this."""
        self._seen = {}
        if self._first:
            self._alarm.note(step, {name: logs[name] for name in LOGGED if name in logs})

    def _fresh(self) -> dict[str, float]:
        """The metrics that TRL has computed since the last step, each a mean over its micro-batches."""
        lists = {name: values for name, values in self._trainer._metrics["train"].items()
                 if not name.startswith("creditscope/")}
        new = {name: [value for value in values[self._seen.get(name, 0):] if isinstance(value, int | float)]
               for name, values in lists.items()}
        self._seen = {name: len(values) for name, values in lists.items()}
        return {name: mean(values) for name, values in new.items() if values}
