"""Trackers by name, through accelerate's interface: what it knows (tensorboard, wandb, trackio, mlflow) works here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError, install_hint, unknown


class Trackers:
    """Sends the metrics of each step to the trackers that were asked for; to none, at no cost, where none were."""

    def __init__(self, names: tuple[str, ...], out: Path, config: dict[str, Any]) -> None:
        self._names, self._out, self._config = names, out, config
        self._accelerator: Any = None
        if names:
            _check(names)

    def log(self, metrics: dict[str, Any]) -> None:
        if not self._names:
            return
        if self._accelerator is None:  # not before the first step: some trackers write into the run's folder at once
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=True, log_with=list(self._names), project_dir=str(self._out))
            plain = {k: v for k, v in self._config.items() if isinstance(v, int | float | str | bool)}
            self._accelerator.init_trackers("creditscope", config=plain)
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and k != "step"}
        self._accelerator.log(numbers, step=metrics["step"])

    def close(self) -> None:
        if self._accelerator is not None:
            self._accelerator.end_training()


def _check(names: tuple[str, ...]) -> None:
    """Refuse a tracker that is unknown or not installed, before anything is trained."""
    with install_hint("--log"):
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    known, installed = {str(t) for t in LOGGER_TYPE_TO_CLASS}, {str(t) for t in get_available_trackers()}
    for name in names:
        if name not in known:
            raise unknown("tracker", name, known)
        if name not in installed:
            raise CreditscopeError(f"--log {name}: that tracker is not installed; pip install {name}. "
                                   f"Installed: {', '.join(sorted(installed)) or 'none'}")
