"""`creditscope list credits`: the list of credit estimators, or one of them in full."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import tyro
from rich.markup import escape

from creditscope.cli.output import WIDE, Output, new_table
from creditscope.credit.table import ESTIMATORS, NEEDS, Estimator, parse
from creditscope.errors import CreditscopeError

BASES = {"reward": "the rewards; the method scales and whitens it",
         "advantage": "the method's own advantage, which it reshapes"}


@dataclass(frozen=True)
class Credits:
    """Show the list of credit estimators, or one: equation, options, requirements, cost, source.

    An estimator gives A_it, the credit of each token; the method (creditscope list methods) gives everything else.

    For example:
      creditscope list credits              # the list
      creditscope list credits monte_carlo  # one, with its options
      creditscope list credits gae --json   # for a program
      creditscope lab train --credit monte_carlo,samples=8
      creditscope lab compare credit        # train with each and compare
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """An estimator's name, such as prefix_tree."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        name = parse(self.name)[0] if self.name else None
        if name is None:
            self._list()
        elif name in ESTIMATORS:
            self._one(ESTIMATORS[name])
        else:
            raise CreditscopeError(f"{name} is your own function, and is not in the list; creditscope lab train "
                                   f"--credit {name} uses it")
        return 0

    def _list(self) -> None:
        if (console := self.output.console_or_json({name: asdict(row) for name, row in ESTIMATORS.items()})) is None:
            return
        wide = console.width >= WIDE
        table = new_table("credit", *("equation",) * wide, "needs", "cost", "from", justify="left")
        for name, row in ESTIMATORS.items():
            texts = (row.equation,) * wide + (", ".join(row.needs) or "–", row.cost, row.cites)
            table.add_row(name, *(escape(text) for text in texts))
        console.print(table)
        if not wide:
            console.print(f"Equations are left out below {WIDE} columns.")
        console.print("r_i: reward of rollout i   A_i: the method's advantage   A_it: credit of its token t   "
                      "s(t): the token's step   R: rollouts per group")
        console.next("creditscope list credits NAME", "creditscope lab train --credit NAME",
                     "creditscope lab compare credit")

    def _one(self, row: Estimator) -> None:
        if (console := self.output.console_or_json(asdict(row) | {"example": example(row)})) is None:
            return
        console.print(f"[bold]{row.name}[/]  {escape(row.title)}\n\n{escape(row.equation)}\n")
        facts = {"made from": BASES[row.builds_on], "cost": row.cost,
                 "needs": "; ".join(NEEDS[need] for need in row.needs) or "nothing but rewards and tokens",
                 "claim": row.claim, "note": row.note, "from": row.cites}
        options = [("option", f"{name}={_text(one.default)}   {one.meaning}") for name, one in row.options.items()]
        for name, text in (*facts.items(), *options):
            if text:
                console.print(f"[bold]{name}[/]  {escape(text)}")
        console.print(f"\nTry: {example(row)}", markup=False)
        console.print("Its bias and variance, by enumeration, are in docs/credit.md of the repository.")


def example(row: Estimator) -> str:
    """A command that runs as it stands: the packaged task judges steps, but only `turns` names states. A learned reward
    is trained first."""
    words = ",".join([row.name, *(f"{name}={_text(o.default)}" for name, o in list(row.options.items())[:1])])
    given = {"states": " --task turns", "scores": " --reward model:runs/reward"}
    return f"creditscope lab train --credit {words}" + "".join(given.get(need, "") for need in row.needs)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
