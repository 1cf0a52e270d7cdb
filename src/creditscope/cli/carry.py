"""`creditscope papers carry`: the share of a full step that Adam still makes after a token's gradient is 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from creditscope.cli.optimizer import MEASURE
from creditscope.cli.output import Output, new_table
from creditscope.errors import CreditscopeError
from creditscope.optimizer.carry import carry, carry_limit

STEPS, LAGS = (2, 10, 50, 1000), range(5)


@dataclass(frozen=True)
class Carry:
    """Print C_{T,k} of arXiv:2601.05002, Eq. 36: steps that Adam makes after the gradient is 0.

    For example:
      creditscope papers carry                             # torch's defaults
      creditscope papers carry --betas 0.9 0.95
    """

    betas: tuple[float, float] = (0.9, 0.999)
    """β₁ and β₂ of Adam."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        try:
            rows = {step: [carry(step, lag, self.betas) for lag in LAGS] for step in STEPS}
            limit = [carry_limit(lag, self.betas) for lag in LAGS]
        except OverflowError:
            raise CreditscopeError(f"--betas {self.betas[0]} {self.betas[1]}: the carry is too large for a float; give "
                                   f"a larger β₂") from None
        data = {"betas": self.betas, "lags": list(LAGS), "steps": rows, "limit": limit}
        if (console := self.output.console_or_json(data)) is None:
            return 0
        table = new_table("T", *(f"k = {lag}" for lag in LAGS), left=(),
                          title=f"C_{{T,k}} of Adam, β₁ = {self.betas[0]:g}, β₂ = {self.betas[1]:g}")
        for name, row in [*rows.items(), ("∞", limit)]:
            table.add_row(str(name), *(f"{value:.4f}" for value in row))
        console.print(table)
        console.print("A gradient that lasted T − 1 steps is 0 from step T on. C_{T,k} is the share of a full step "
                      "that Adam still makes at step T + k.\narXiv:2601.05002, Eq. 36; ε = 0.", markup=False)
        console.next(MEASURE, "creditscope inspect RUN")
        return 0
