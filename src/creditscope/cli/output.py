"""Output of a verb: JSON, or a console with colour on a terminal and plain elsewhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from creditscope.errors import printable

WIDE = 150
"""Columns of a terminal from which a table has its equations."""
PADDING = 3
"""Columns between two cells of a table."""

STATE_COLOURS = {"broken": "red", "watch": "yellow", "unknown": "dim", "fine": "green"}
"""State of a finding -> its colour on a terminal; the sign says the same."""


class Screen(Console):
    """A console that escapes control characters: paths and names are untrusted."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def print_columns(self, headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "",
                      left: Container[str] | None = None, dim: Container[int] = ()) -> None:
        """A table of short cells. Columns that do not fit follow below, each part beside the first column."""
        headers = [escape(printable(header)) for header in headers]
        texts = [[Text(printable(cell), "dim" if number in dim else "") for cell in row]
                 for number, row in enumerate(rows)]
        widths = [PADDING + max(map(cell_len, "\n".join([header, *(row[at].plain for row in texts)]).splitlines()))
                  for at, header in enumerate(headers)]
        for number, part in enumerate(fitting(widths, self.width)):
            table = new_table(*(headers[at] for at in part), title=title if number == 0 else "", left=left)
            for row in texts:
                table.add_row(*(row[at] for at in part))
            self.print(table)

    def next(self, *commands: str) -> None:
        """The last line of a verb. No newline is put into a command; a terminal may wrap it."""
        self.print(f"Next: {'   '.join(commands)}", markup=False, soft_wrap=True)


def columns() -> int:
    """Columns of an output that is no terminal: 80 fit every screen and mail."""
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and 20 <= int(given) <= 10_000 else 80


def fitting(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns of each part of a table: the first, and as many of the others as there is room for.

    >>> fitting([10, 30, 30, 30], 75), fitting([10, 99], 75)
    ([[0, 1, 2], [0, 3]], [[0, 1]])
    """
    parts: list[list[int]] = [[0]]
    for at, width in enumerate(widths[1:], start=1):
        if len(parts[-1]) > 1 and sum(widths[i] for i in parts[-1]) + width > room:
            parts.append([0])
        parts[-1].append(at)
    return parts


def new_table(*headers: str, title: str = "", justify: JustifyMethod = "right",
              left: Container[str] | None = None) -> Table:
    """A table; columns in `left`, by default the first, are left-justified, the others as `justify` says."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for number, header in enumerate(headers):
        text = number == 0 if left is None else header in left
        table.add_column(header, justify="left" if text else justify, overflow="fold", no_wrap=number == 0)
    return table


@dataclass(frozen=True, kw_only=True)
class Output:
    """How results are printed."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object and nothing else."""
    plain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """No colour and no live display; the default where the output is not a terminal."""

    def console(self) -> Screen:
        """A console; without a terminal it has 80 columns, or as many as the variable COLUMNS says."""
        terminal = sys.stdout.isatty() and not self.plain
        return Screen(force_terminal=terminal, no_color=not terminal, highlight=False,
                      width=None if sys.stdout.isatty() else columns())

    def console_or_json(self, value: Any) -> Screen | None:
        """Under --json print the value and return None; else return the console."""
        if not self.json:
            return self.console()
        self.emit(value)
        return None

    def emit(self, value: Any) -> None:
        """Print a value as JSON; NaN is refused. Control characters beyond ASCII, which JSON does not escape, are
        escaped for the terminal, and where the output is not UTF-8 every character beyond ASCII."""
        ascii_only = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
        text = json.dumps(value, indent=2, ensure_ascii=ascii_only, allow_nan=False)
        print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))
