"""The metrics of a run in progress: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from creditscope.cli.progress import Progress
from creditscope.diagnosis.thresholds import SAMPLER_OFF
from creditscope.errors import printable
from creditscope.runs import schema

GAINS = {schema.REWARD_MEAN: "reward", schema.PAIRS_MARGIN: "margin"}
"""What is to rise, and its name in a line; given pairs have a margin alone."""


class Display(Progress):
    """Shows the metrics of each step of a run of `total` steps."""

    def __init__(self, console: Console, label: str, total: int, every: int = 10, quiet: bool = False) -> None:
        super().__init__(console, label, quiet)
        self._total, self._every = total, every
        self.last: dict[str, Any] = {}
        self._eval = ""
        self._warned: set[str] = set()
        self._seen, self._spent = 0, 0.0

    def step(self, m: dict[str, Any]) -> None:
        """One step's metrics, or the final evaluation. Warnings and alarms go to the error stream, also if quiet."""
        self.last = m
        for line in str(m.get(schema.RUN_ALARM, "")).splitlines():
            Console(stderr=True).print(printable(line), markup=False, highlight=False)
        if schema.EVAL_ACCURACY in m:
            self._eval = accuracy(m)
            if not self.live:
                self.say(f"{self._label}  step {m['step']}  {self._eval}")
        if not GAINS.keys() & m.keys():  # an evaluation alone, or a step on answers of an earlier one
            return
        self._warn(m)
        self._seen += 1
        self._spent += m[schema.TIME_STEP] - m.get(schema.TIME_EVAL, 0.0)
        done = m["step"] + 1
        if self.live:
            panel = Table.grid(padding=(0, 2))
            for name, value in (readings(m) | ({"evaluation": self._eval} if self._eval else {})).items():
                panel.add_row(Text(name, style="dim"), value)
            self.show(done, self._total, f"{self._label}  {done}/{self._total}", panel)
        elif m["step"] % self._every == 0 or done == self._total:
            left = self._spent / self._seen * (self._total - done)
            self.say(f"{self._label}  step {m['step']:>4}  " + "  ".join(
                f"{name} {value}" for name, value in readings(m).items()) + f"  left {left:.0f} s")

    def _warn(self, m: dict[str, Any]) -> None:
        """Print each fault that spoils a run without an error, once."""
        found = {}
        if m.get(schema.REWARD_ERRORS):
            found["errors"] = (f"{m[schema.REWARD_ERRORS]} answers could not be judged; the first: "
                               f"{m[schema.REWARD_FIRST_ERROR]}")
        if m.get(schema.POLICY_SAMPLER_GAP, 0.0) > SAMPLER_OFF:
            found["gap"] = (f"the training forward is off the sampler by {m[schema.POLICY_SAMPLER_GAP]:.2g} in "
                            f"log-prob, so ratios do not start at 1; use --top-p 1, and float32 weights")
        for text in (text for cause, text in found.items() if cause not in self._warned):
            Console(stderr=True).print(f"warning: {printable(text)}", markup=False, highlight=False)
        self._warned |= found.keys()


def accuracy(m: dict[str, Any]) -> str:
    """Test accuracy with its interval."""
    return f"test {m[schema.EVAL_ACCURACY]:.1%} [{m[schema.EVAL_LOW]:.1%}, {m[schema.EVAL_HIGH]:.1%}]"


def readings(m: dict[str, Any]) -> dict[str, str]:
    """The metrics shown during a run; rank: r_eff of a group's rollout gradients beside the null of the same w."""
    parts = {name: m[f"time/{name}"] for name in ("sample", "train", "scope") if f"time/{name}" in m}
    spent = ", ".join(f"{k} {v:.2f}" for k, v in parts.items())
    rank, null = m.get(schema.GRAM_GROUP_EFFECTIVE_RANK), m.get(schema.GRAM_GROUP_W_NULL)
    shown = GAINS | {schema.REWARD_GOLD_MEAN: "verifier's"}
    out = {**{name: f"{m[key]:.3f}" for key, name in shown.items() if key in m},
           "live groups": f"{m[schema.SIGNAL_LIVE_GROUPS]}/{m[schema.SIGNAL_GROUPS]}",
           "entropy": f"{m[schema.ENTROPY_MEAN]:.3f}" if schema.ENTROPY_MEAN in m else "",
           "length": f"{m[schema.LENGTH_MEAN]:.1f}",
           "rank": "" if rank is None else f"{rank:.1f}" + (f" (null {null:.1f})" if null is not None else ""),
           "time": f"{m[schema.TIME_STEP]:.2f} s" + (f" ({spent})" if spent else "")}
    return {name: value for name, value in out.items() if value}
