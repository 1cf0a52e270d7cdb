"""Output of a verb: JSON for programs, a plain console where there is no terminal, colour where there is."""

from __future__ import annotations

import json
import sys
from collections.abc import Container
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from creditscope.errors import printable


class Screen(Console):
    """A console that shows control characters and does not obey them: a path or a name may come from anybody."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def next(self, *commands: str) -> None:
        """The line that every verb ends with. A terminal may wrap it, but no newline is put into a command."""
        self.print(f"Next: {'   '.join(commands)}", markup=False, soft_wrap=True)


def new_table(*headers: str, title: str = "", justify: JustifyMethod = "right",
              left: Container[str] | None = None) -> Table:
    """A table with these heads; columns in `left` are texts, by default the first, the others are justified as told."""
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
        """A console for people. Without a terminal it is wide enough that tables keep their columns."""
        terminal = sys.stdout.isatty() and not self.plain
        return Screen(force_terminal=terminal, no_color=not terminal, highlight=False,
                      width=None if sys.stdout.isatty() else 200)

    def emit(self, value: Any) -> None:
        """Print a value as JSON. Not-a-number is not JSON, so it is refused rather than written. Control characters
        above the ASCII ones, which JSON leaves as they are, are escaped: a terminal would obey them. So is every
        character outside ASCII where the output is not UTF-8: a question mark would be another value."""
        ascii_only = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
        text = json.dumps(value, indent=2, ensure_ascii=ascii_only, allow_nan=False)
        print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))
