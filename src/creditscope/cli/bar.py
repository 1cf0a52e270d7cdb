"""How far a long piece of work is, and how long it will take."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from creditscope.cli.output import Output


class Bar:
    """Progress on the error stream: a bar on a terminal, a line for every tenth elsewhere, nothing for a program."""

    def __init__(self, label: str, output: Output) -> None:
        self._label, self._quiet, self._tenth = label, output.json, 0
        self._first: int | None = None
        self._start = 0.0
        self._console = Console(stderr=True, highlight=False)
        self._live = sys.stderr.isatty() and not output.plain and not output.json
        self._progress = Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
                                  TextColumn("left"), TimeRemainingColumn(), console=self._console,
                                  disable=not self._live, transient=True)
        self._task = self._progress.add_task(label, total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._progress.stop()

    def show(self, done: int, total: int) -> None:
        """So much of so much; what has no end, as a pipe, is not shown."""
        if not total:
            return
        self._progress.update(self._task, completed=done, total=total)
        if self._first is None:  # the model is loaded by now, and what an earlier run did is behind us
            self._first, self._start = done, time.monotonic()
        elif not self._live and not self._quiet and done * 10 // total > self._tenth and done < total:
            self._tenth = done * 10 // total
            left = (time.monotonic() - self._start) * (total - done) / (done - self._first)
            self._console.print(f"{self._label}  {done / total:.0%}  left {left:.0f} s", markup=False)
