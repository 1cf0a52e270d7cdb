"""`creditscope list methods`: the table of methods, or one of them in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich.markup import escape

from creditscope.cli.output import WIDE, Output, new_table
from creditscope.methods import words
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.find import find
from creditscope.methods.properties import properties, properties_of
from creditscope.methods.table import METHODS

_COLUMNS = {"zero_sum": "Σ A\n= 0", "uniform_credit": "even\ncredit", "prefix_cancels": "prefix\ncancels",
            "scale_invariant": "reward\nscale", "shift_invariant": "reward\nshift"}


@dataclass(frozen=True)
class Methods:
    """Show the table of methods, or one: equation, diff from its parent, citations, its loss at ratio 1, properties.

    For example:
      creditscope list methods              # all rows
      creditscope list methods dapo         # one row
      creditscope list methods --dialects   # what TRL and verl compute under these names
      creditscope list methods grpo --json  # for a program
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """A method's name, such as grpo or trl_cispo."""
    dialects: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """List the rows of TRL and verl instead of the papers'."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        if self.name is not None:
            self._one(find(self.name))
        else:
            self._table(DIALECTS if self.dialects else METHODS)
        return 0

    def _table(self, rows: Mapping[str, Method]) -> None:
        if (console := self.output.console_or_json({name: as_dict(row) for name, row in rows.items()})) is None:
            return
        formulas = ("advantage A", "weight α", "term", "R") if console.width >= WIDE else ()
        texts = ("method", "arXiv", *formulas)
        table = new_table(*texts, *_COLUMNS.values(), justify="center", left=texts,
                          title="J = Σ_it α_it · term_it − β·R      w_it = ∂J/∂log π_it")
        for name, row in rows.items():
            cells = (words.advantage_equation(row).split("   ")[0], words.alpha_text(row), words.term_text(row),
                     words.penalty_text(row))
            marks = [_mark(value) for value in asdict(properties(row)).values()]
            table.add_row(name, row.arxiv, *(escape(text) for text in cells[: len(formulas)]), *marks)
        console.print(table)
        if not formulas:
            console.print(f"Formulas are left out below {WIDE} columns.")
        console.print("Properties of the policy term at ratio 1, or of a preference method's pair term, without KL and "
                      "supervised terms; measured by the tests. yes: holds  no: does not  –: credit comes from "
                      "outside.")
        console.next("creditscope list methods NAME",
                     *([] if self.dialects else ["creditscope list methods --dialects"]))

    def _one(self, row: Method) -> None:
        if (console := self.output.console_or_json(as_dict(row))) is None:
            return
        link = f"  arXiv:{row.arxiv}" if row.arxiv else ""
        title = f"  {escape(row.title)}" if row.title != row.name else ""
        console.print(f"[bold]{row.name}[/]{title}{link}\n\n{escape(words.equation(row))}\n")
        if row.parent is not None:
            console.print(f"[bold]differs from {row.parent}[/]")
            for axis, (theirs, ours) in row.diff(find(row.parent)).items():
                meaning = words.axis_meaning(row, axis, ours)
                console.print(f"  {axis}: {theirs} → {ours}" + escape(f"   ({meaning})" if meaning else ""))
            console.print()
        if row.cites:
            console.print("[bold]where it stands[/]")
            for axis, place in row.cites.items():
                console.print(f"  {axis}: {escape(place)}")
            console.print()
        if row.note:
            console.print(f"[bold]note[/]  {escape(row.note)}\n")
        loss = words.law(row)
        console.print(f"[bold]at ratio 1[/]  {escape(loss.formula)}\n  {loss.sentence}\n")
        console.print(f"[bold]properties[/] ({properties_of(row)}; measured by the tests)")
        for name, value in asdict(properties(row)).items():
            console.print(f"  {name}: {_mark(value)}")


def as_dict(row: Method) -> dict[str, Any]:
    """A row as plain data: axes, equation, diff from the parent, J at ratio 1, and properties."""
    parent = find(row.parent) if row.parent is not None else None
    diff = {axis: list(pair) for axis, pair in row.diff(parent).items()} if parent is not None else {}
    return asdict(row) | {"equation": words.equation(row), "diff": diff, "at_ratio_one": asdict(words.law(row)),
                          "properties": asdict(properties(row)), "properties_of": properties_of(row)}


def _mark(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"
