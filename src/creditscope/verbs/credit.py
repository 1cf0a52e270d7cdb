"""`creditscope credit`: the list of credit estimators, and one of them under the glass."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich import box
from rich.markup import escape
from rich.table import Table

from creditscope.credit.estimator import NEEDS, Estimator
from creditscope.credit.table import ESTIMATORS
from creditscope.errors import unknown
from creditscope.verbs.output import Output

WIDE = 150
"""Columns of a terminal from which on equations fit into the list."""
BASES = {"reward": "the rewards; the method scales and whitens it",
         "advantage": "the method's own advantage, which it reshapes"}


@dataclass(frozen=True)
class Credit:
    """Show the list of credit estimators, or one: equation, options, what it needs and costs, where it comes from.

    An estimator says what each token of a rollout is worth; the method (creditscope methods) says the rest.

    For example:
      creditscope credit                          the list
      creditscope credit monte_carlo              one, with its options
      creditscope credit gae --json               for a program
      creditscope train --credit monte_carlo,samples=8
      creditscope compare credit                  train with each and compare
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """An estimator's name, such as prefix_tree."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        if self.name is None:
            self._list()
        elif self.name in ESTIMATORS:
            self._one(ESTIMATORS[self.name])
        else:
            raise unknown("credit", self.name, ESTIMATORS, see="creditscope credit")
        return 0

    def _list(self) -> None:
        if self.output.json:
            self.output.emit({name: asdict(row) for name, row in ESTIMATORS.items()})
            return
        console = self.output.console()
        wide = console.width >= WIDE
        table = Table(header_style="bold", pad_edge=False, box=box.SIMPLE_HEAD)
        table.add_column("credit", no_wrap=True)
        for header in ("equation",) * wide + ("needs", "cost", "from"):
            table.add_column(header, overflow="fold")
        for name, row in ESTIMATORS.items():
            texts = (row.equation,) * wide + (", ".join(row.needs) or "–", row.cost, row.cites)
            table.add_row(name, *(escape(text) for text in texts))
        console.print(table)
        if not wide:
            console.print(f"Equations are left out below {WIDE} columns.")
        console.print("r_i: reward of rollout i   A_i: the method's advantage   A_it: credit of its token t   "
                      "s(t): the token's step   R: rollouts a group")
        console.print("Next: creditscope credit NAME   creditscope train --credit NAME   creditscope compare credit")

    def _one(self, row: Estimator) -> None:
        settings = options(row)
        if self.output.json:
            self.output.emit(asdict(row) | {"options": settings, "example": example(row, settings)})
            return
        console = self.output.console()
        console.print(f"[bold]{row.name}[/]  {escape(row.title)}\n")
        console.print(f"{escape(row.equation)}\n")
        facts = {"made from": BASES[row.builds_on], "cost": row.cost,
                 "needs": "; ".join(NEEDS[need] for need in row.needs) or "nothing but rewards and tokens",
                 "claim": row.claim, "note": row.note, "from": row.cites}
        for name, text in facts.items():
            if text:
                console.print(f"[bold]{name}[/]  {escape(text)}")
        if settings:
            console.print("[bold]options[/]  " + escape(", ".join(f"{k}={_text(v)}" for k, v in settings.items())))
        console.print(f"\nTry: {example(row, settings)}", markup=False)
        console.print("Read: docs/credit.md")


def options(row: Estimator) -> dict[str, Any]:
    """The estimator's options with their defaults, from its signature; torch loads here, not with the list."""
    return {p.name: p.default for p in inspect.signature(row.function).parameters.values() if p.kind is p.KEYWORD_ONLY}


def example(row: Estimator, settings: dict[str, Any]) -> str:
    """A command that runs as it stands: the packaged task judges steps, but only `turns` names states."""
    words = ",".join([row.name, *(f"{k}={_text(v)}" for k, v in list(settings.items())[:1])])
    return f"creditscope train --credit {words}" + (" --task turns" if "states" in row.needs else "")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
