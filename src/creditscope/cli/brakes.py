"""`creditscope list brakes`: the remedies against overshoot, or one of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

import tyro

from creditscope.cli.output import Output
from creditscope.optimizer.table import BRAKES, parse_brake


@dataclass(frozen=True)
class Brakes:
    """Show the brakes of creditscope lab train --brake: equation, cost, options.

    Over several updates on one batch a token can move past its bound after its own gradient has stopped, by the
    optimiser's momentum. A brake limits that.

    For example:
      creditscope list brakes                              # all
      creditscope list brakes shorten                      # one
      creditscope list brakes --json                       # for a program
      creditscope lab train --inner-steps 4 --brake recall
      creditscope lab compare brake                        # train with each and compare
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """A brake's name, such as recall."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        chosen = BRAKES if self.name is None else {name: BRAKES[name] for name in [parse_brake(self.name)[0]]}
        rows = [asdict(row) | {"idle": row.idle_bounds} for row in chosen.values()]
        if (console := self.output.console_or_json({"brakes": rows})) is None:
            return 0
        for row in chosen.values():
            console.print(f"[bold]{row.name}[/]  {row.title}")
            options = [f"{name}={option.default}: {option.meaning}" for name, option in row.options.items()]
            for line in filter(None, (row.equation, f"cost: {row.cost}", *options, row.note)):
                console.print(f"  {line}", markup=False)
        console.print("\nw = ∂J/∂log π of a token; w(1): at its first update.  c: the token's share of the first "
                      "moment.\nβ, γ: weights of the old moment and of the new gradient, β₁ and 1 − β₁ for Adam.  "
                      "Derivations: docs/optimizer.md", markup=False)
        brake = self.name if self.name not in (None, "none") else "recall"
        console.next(f"creditscope lab train --inner-steps 4 --brake {brake}")
        return 0
