"""Progress of long work: a bar on a terminal, lines elsewhere, nothing under --json."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from creditscope.cli.output import Output
from creditscope.files.ticks import told_to


def drive(work: Generator[Any, None, Any], each: Callable[[Any], object]) -> Any:
    """Call `each` on every item and return the generator's value; the generator is closed also where `each` raises."""
    with contextlib.closing(work):
        while True:
            try:
                item = next(work)
            except StopIteration as end:
                return end.value
            each(item)


class Progress:
    """The display of every verb: `show` moves the bar, `say` prints a line, `tick` does both by tenths."""

    def __init__(self, console: Console, label: str, quiet: bool = False, transient: bool = False) -> None:
        self._console, self._label, self._quiet, self._tenth = console, label, quiet, 0
        self.live = console.is_terminal and not quiet
        self._bar = Bars(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("left"),
                         TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task(label, total=None)
        self._screen = Live(self._bar, console=console, refresh_per_second=4, transient=transient)
        self._first: float | None = None
        self._start = 0.0
        self._listening = told_to(self.convert)

    @classmethod
    def beside(cls, label: str, output: Output) -> Progress:
        """On the error stream, for verbs whose output is the result."""
        terminal = sys.stderr.isatty() and not output.plain
        return cls(Console(stderr=True, highlight=False, force_terminal=terminal), label, output.json, transient=True)

    def __enter__(self) -> Self:
        if self.live:
            self._screen.start()
        self._listening.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.__exit__(None, None, None)
        if self.live:
            self._screen.stop()

    def begin(self, what: str, problems: int) -> None:
        """The line before the first step: what is loaded, and how many problems are evaluated."""
        first = f", then one answer to each of {problems} test problems" if problems else ""
        self.say(f"{self._label}  loading {what}{first}")

    def convert(self, done: int, total: int) -> None:
        """The bar of a GGUF file's conversion, on a terminal; the bar of the steps starts anew after it."""
        if self.live and done < total:
            self._bar.update(self._task, completed=done, total=total, description=f"{self._label}  converting GGUF")
        elif self.live:
            self._bar.reset(self._task, total=None, description=self._label)

    def say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False, soft_wrap=True)  # one line of a log stays one

    def show(self, done: float, total: float, label: str = "", below: RenderableType | None = None) -> None:
        """The bar at done/total, with `below` under it."""
        if self._first is None:  # the pace counts from here: loading, and the steps of an earlier run, are not in it
            self._first, self._start = done, time.monotonic()
        if self.live:
            self._bar.update(self._task, completed=done, total=total, description=label or self._label)
            self._screen.update(self._bar if below is None else Group(self._bar, below))

    def tick(self, done: int, total: int, words: str = "") -> None:
        """done/total, with a line for every tenth where there is no bar; nothing where the total is not known."""
        if not total:
            return
        self.show(done, total, f"{self._label}  {words}".rstrip())
        if not self.live and done * 10 // total > self._tenth and (words or done < total):
            self._tenth = done * 10 // total
            left = self.left(done, total)
            self.say(f"{self._label}  {words or f'{done / total:.0%}'}" + (f"  left {left}" if left else ""))

    def left(self, done: float, total: float) -> str:
        """Time for the rest at the mean pace so far; nothing before there is a pace."""
        if self._first is None or done <= self._first:
            return ""
        seconds = (total - done) * (time.monotonic() - self._start) / (done - self._first)
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
