"""`creditscope scope`: what a file of rollouts holds, and what a method and its credit give the tokens. No model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from creditscope.catalogue import find
from creditscope.credit.choice import parse
from creditscope.verbs.output import Output

if TYPE_CHECKING:
    from creditscope.method import Method
    from creditscope.rollouts import Rollouts


@dataclass(frozen=True)
class Scope:
    """Read a file of rollouts as one batch: its signal, and the credit that a method gives its tokens.

    One JSON object a line, with tokens, logp, reward and group, and optionally prompt, text, pieces, mask, ref_logp,
    entropy, collision, step (of each token, -1 for none), step_reward, step_state.

    For example:
      creditscope scope rollouts.jsonl
      creditscope scope rollouts.jsonl --method dapo --json
      creditscope scope labelled.jsonl --credit step_return        step labels from the file
    """

    file: Annotated[Path, tyro.conf.Positional]
    """JSON lines, one rollout a line."""
    method: str = "grpo"
    """A row of the table: creditscope methods."""
    credit: str | None = None
    """Who gets the credit: creditscope credit. What needs a model or a sampler cannot be had from a file."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        method = find(self.method)
        if self.credit is not None:
            parse(self.credit)  # a wrong name is told before torch is loaded
        from creditscope.rollouts_jsonl import read_jsonl

        facts: dict[str, Any] = {"file": self.file.name, "method": method.name}
        facts |= {"credit": self.credit} if self.credit else {}
        facts |= readings(method, read_jsonl(self.file), self.credit)
        if self.output.json:
            self.output.emit(facts)
            return 0
        console = self.output.console()
        for name, value in facts.items():
            console.print(f"{name:<22}", f"{value:.4g}" if isinstance(value, float) else value, markup=False)
        console.print(f"Next: creditscope methods {method.name}")
        return 0


def readings(method: Method, rollouts: Rollouts, credit: str | None = None) -> dict[str, Any]:
    """Signal of a batch, and the credit it gets at ratio 1: the method's own, or an estimator's."""
    from creditscope import metrics
    from creditscope.credit import find_estimator
    from creditscope.credit.tools import Tools
    from creditscope.objective import effective_credit, surrogate

    given = None if credit is None else find_estimator(credit)(method, rollouts, Tools())
    w = effective_credit(lambda logp: surrogate(method, logp, rollouts, given), rollouts.logp)
    size = {"rollouts": len(rollouts), "tokens": int(rollouts.mask.sum())}
    spread = {} if given is None else metrics.assigned(given, rollouts)
    return size | metrics.signal(rollouts) | spread | metrics.credit(w, rollouts.mask)
