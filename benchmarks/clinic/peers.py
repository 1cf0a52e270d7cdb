"""What people use today, as code: TRL's own warnings, and rules that look at one metric of the log.

Each rule takes a run (rows of TRL's log, its settings, the warnings that were printed) and gives a cause of the
clinic's table, or None. `first` asks them in the order in which a reader of a dashboard does: what was printed, what is
not a number, what is at its bound, and the flat reward last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Seen:
    """What a user of TRL sees of a run."""

    rows: Rows
    settings: Mapping[str, Any]
    warnings: Sequence[str] = ()

    def series(self, *names: str) -> list[float]:
        """The readings of the first name that the log has."""
        for name in names:
            found = [float(row[name]) for row in self.rows if isinstance(row.get(name), int | float)]
            if found:
                return found
        return []


def last(values: Sequence[float], share: float = 1 / 3) -> float:
    """Mean of the last third; NaN for none."""
    part = values[-max(1, round(len(values) * share)):]
    return sum(part) / len(part) if part else math.nan


def trl_warnings(run: Seen) -> str | None:
    """What TRL 1.16 prints about a run itself: rewards that are None.

    Its other warnings are of deprecated arguments, of combinations of losses and of vLLM's server.
    """
    return "reward missing" if any("returned None" in text for text in run.warnings) else None


def gradient(run: Seen) -> str | None:
    """grad_norm NaN, or ten times its median."""
    norms = run.series("grad_norm")
    if any(not math.isfinite(norm) for norm in norms):
        return "step size"
    middle = sorted(norms)[len(norms) // 2] if norms else 0.0
    return "step size" if middle > 0 and max(norms) > 10 * middle else None


def high_kl(run: Seen) -> str | None:
    """KL to the reference above 0.1 per token, at the end; logged where β is not 0."""
    return "step size" if last(run.series("kl")) > 0.1 else None


def clipped(run: Seen) -> str | None:
    """More than half of the completions reach the limit."""
    return "truncation" if last(run.series("completions/clipped_ratio")) > 0.5 else None


def zero_std(run: Seen) -> str | None:
    """More than 80 % of the groups have one reward."""
    return "dead groups" if last(run.series("frac_reward_zero_std")) > 0.8 else None


def entropy(run: Seen) -> str | None:
    """Entropy below 0.05 nats per token at the end: the sampler is called collapsed."""
    return "cold sampler" if last(run.series("entropy")) < 0.05 else None


def flat(run: Seen) -> str | None:
    """The reward's last third is less than 0.02 above its first third: the learning rate is blamed."""
    rewards = run.series("reward", "reward/mean")
    if len(rewards) < 9:
        return None
    third = len(rewards) // 3
    return "learning rate" if last(rewards) - sum(rewards[:third]) / third < 0.02 else None


PEERS: Mapping[str, Callable[[Seen], str | None]] = {
    "TRL's warnings": trl_warnings, "grad_norm NaN or spike": gradient, "KL > 0.1": high_kl,
    "clipped ratio > 0.5": clipped, "zero-std share > 0.8": zero_std, "entropy < 0.05": entropy,
    "flat reward": flat}


def first(run: Seen) -> str | None:
    """The first rule of PEERS that speaks."""
    return next((cause for rule in PEERS.values() if (cause := rule(run)) is not None), None)
