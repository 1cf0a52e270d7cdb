"""What many runs at once look like: a live table on a terminal, a line for each run that ended elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from creditscope.errors import printable
from creditscope.runs.compare import Glance, glance


class Fleet:
    """Follows runs through their records; `folders` are those that are still to do, by name.

    `budget` is the rollouts of each: one number for all, or one by name.
    """

    def __init__(self, console: Console, folders: Mapping[str, Path], budget: int | Mapping[str, int], reused: int,
                 quiet: bool = False) -> None:
        self._console, self._folders, self._reused, self._quiet = console, folders, reused, quiet
        self._budget = dict.fromkeys(folders, budget) if isinstance(budget, int) else budget
        self._begin = time.monotonic()
        self._seen = {name: glance(path) for name, path in folders.items()}
        self._before = self._spent()
        self._told: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> Fleet:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=2)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, running: Sequence[str], ended: Mapping[str, str | None]) -> None:
        """The state of things: names of running runs, and of those that ended, with the reason if they failed."""
        if self._quiet:
            return
        new = [name for name in ended if name not in self._told]
        for name in (*running, *new) if new or self._live is not None else ():
            self._seen[name] = glance(self._folders[name])
        for name in new:
            self._told.add(name)
            self._console.print(self._line(name, ended), markup=False)
        if self._live is not None:
            self._live.update(Group(self._bar(ended), self._table(running)))

    def _line(self, name: str, ended: Mapping[str, str | None]) -> str:
        failure = ended[name]
        seen = self._seen[name]
        what = (f"failed: {printable(failure)}" if failure is not None else
                f"{_share(seen)}  {seen.steps} steps  {seen.spent:,} rollouts")
        left = self._left(ended)
        return (f"{name}  {what}  ({len(ended) + self._reused} of {len(self._folders) + self._reused}"
                + (f", left {left}" if left else "") + ")")

    def _bar(self, ended: Mapping[str, str | None]) -> Table:
        bar = Table.grid(padding=(0, 1))
        total = len(self._folders) + self._reused
        share = self._reused + sum(min(1.0, seen.spent / self._budget[name]) for name, seen in self._seen.items())
        bar.add_row("runs", ProgressBar(total=total, completed=share, width=40), f"{len(ended) + self._reused}/{total}",
                    Text(f"left {self._left(ended) or '…'}"))
        return bar

    def _table(self, running: Sequence[str]) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in running:
            seen = self._seen[name]
            state = f"step {seen.steps}" if seen.steps else "starting"
            table.add_row(Text(name), Text(state), Text(f"{seen.spent:,} rollouts", justify="right"),
                          Text(_share(seen), style="bold"))
        return table

    def _spent(self) -> int:
        return sum(min(seen.spent, self._budget[name]) for name, seen in self._seen.items())

    def _left(self, ended: Mapping[str, str | None]) -> str:
        """Time for what is still to be spent, at the pace so far; nothing before there is a pace."""
        gained = self._spent() - self._before
        dropped = sum(max(0, self._budget[name] - self._seen[name].spent) for name in ended)
        if gained <= 0:
            return ""
        todo = sum(self._budget.values()) - self._spent() - dropped
        seconds = todo * (time.monotonic() - self._begin) / gained
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _share(seen: Glance) -> str:
    return "" if seen.accuracy is None else f"{seen.accuracy:.1%}"
