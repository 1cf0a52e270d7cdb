"""`creditscope scope`: what a file of rollouts holds, and what a method would give its tokens. No model needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from creditscope.catalogue import find
from creditscope.verbs.output import Output

if TYPE_CHECKING:
    from creditscope.method import Method
    from creditscope.rollouts import Rollouts


@dataclass(frozen=True)
class Scope:
    """Read a file of rollouts as one batch: its signal, and the credit that a method gives its tokens.

    One JSON object a line, with tokens, logp, reward and group, and optionally prompt, text, pieces, mask, ref_logp,
    entropy, step, step_reward.

    For example:
      creditscope scope rollouts.jsonl
      creditscope scope rollouts.jsonl --method dapo --json
    """

    file: Annotated[Path, tyro.conf.Positional]
    """JSON lines, one rollout a line."""
    method: str = "grpo"
    """A row of the table: creditscope methods."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        method = find(self.method)
        from creditscope.rollouts_jsonl import read_jsonl

        facts = {"file": self.file.name, "method": method.name} | readings(method, read_jsonl(self.file))
        if self.output.json:
            self.output.emit(facts)
            return 0
        console = self.output.console()
        for name, value in facts.items():
            console.print(f"{name:<22}", f"{value:.4g}" if isinstance(value, float) else value, markup=False)
        console.print(f"Next: creditscope methods {method.name}")
        return 0


def readings(method: Method, rollouts: Rollouts) -> dict[str, Any]:
    """Signal of a batch, and the credit it gets at ratio 1."""
    from creditscope import metrics
    from creditscope.objective import effective_credit, surrogate

    w = effective_credit(lambda logp: surrogate(method, logp, rollouts), rollouts.logp)
    size = {"rollouts": len(rollouts), "tokens": int(rollouts.mask.sum())}
    return size | metrics.signal(rollouts) | metrics.credit(w, rollouts.mask)
