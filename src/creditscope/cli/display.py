"""The metrics of a run in progress: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from creditscope.cli.progress import Progress
from creditscope.errors import printable
from creditscope.runs import schema


class Display:
    """Shows the metrics of each step of a run of `total` steps."""

    def __init__(self, console: Console, label: str, total: int, every: int = 10, quiet: bool = False) -> None:
        self._label, self._total, self._every = label, total, every
        self._progress = Progress(console, label, quiet)
        self._eval = ""
        self._warned: set[str] = set()
        self._seen, self._spent = 0, 0.0

    def __enter__(self) -> Display:
        self._progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.__exit__()

    def begin(self, problems: int) -> None:
        """Say what the first seconds are spent on."""
        first = f", then one answer to each of {problems} test problems" if problems else ""
        self._progress.say(f"{self._label}  loading the model{first}")

    def show(self, m: dict[str, Any]) -> None:
        """One step's metrics, or the final evaluation. Warnings are for everyone, the rest not for programs."""
        if schema.REWARD_MEAN in m:
            self._warn(m)
        if schema.EVAL_ACCURACY in m:
            self._eval = f"test {m[schema.EVAL_ACCURACY]:.1%} [{m[schema.EVAL_LOW]:.1%}, {m[schema.EVAL_HIGH]:.1%}]"
            if not self._progress.live:
                self._progress.say(f"{self._label}  step {m['step']}  {self._eval}")
        if schema.REWARD_MEAN not in m:
            return
        self._seen += 1
        self._spent += m[schema.TIME_STEP] - m.get(schema.TIME_EVAL, 0.0)
        if self._progress.live:
            done = m["step"] + 1
            self._progress.show(done, self._total, f"{self._label}  {done}/{self._total}", self._panel(m))
        elif m["step"] % self._every == 0 or m["step"] + 1 == self._total:
            left = self._spent / self._seen * (self._total - m["step"] - 1)
            self._progress.say(f"{self._label}  step {m['step']:>4}  " + "  ".join(
                f"{name} {value}" for name, value in readings(m).items()) + f"  left {left:.0f} s")

    def _panel(self, m: dict[str, Any]) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, value in readings(m).items():
            table.add_row(Text(name, style="dim"), value)
        if self._eval:
            table.add_row(Text("evaluation", style="dim"), self._eval)
        return table

    def _warn(self, m: dict[str, Any]) -> None:
        """Say once, on the error stream, each thing that would otherwise spoil a run in silence."""
        found = {}
        if m[schema.LENGTH_TRUNCATED] > 0.2:
            found["cut"] = f"{m[schema.LENGTH_TRUNCATED]:.0%} of the answers were cut at the limit; raise --max-tokens"
        if m.get(schema.REWARD_ERRORS):
            found["errors"] = (f"{m[schema.REWARD_ERRORS]} answers could not be judged; the first: "
                               f"{m[schema.REWARD_FIRST_ERROR]}")
        if m.get(schema.POLICY_SAMPLER_GAP, 0.0) > 0.01:
            found["gap"] = (f"the training forward is off the sampler by {m[schema.POLICY_SAMPLER_GAP]:.2g} in "
                            f"log-prob, so ratios do not start at 1; use --top-p 1, and float32 weights")
        for cause, text in found.items():
            if cause not in self._warned:
                self._warned.add(cause)
                Console(stderr=True).print(f"warning: {printable(text)}", markup=False, highlight=False)


def readings(m: dict[str, Any]) -> dict[str, str]:
    """The few numbers that say how a run goes."""
    parts = {name: m[f"time/{name}"] for name in ("sample", "train", "scope") if f"time/{name}" in m}
    spent = ", ".join(f"{k} {v:.2f}" for k, v in parts.items())
    out = {"reward": f"{m[schema.REWARD_MEAN]:.3f}",
           "live groups": f"{m[schema.SIGNAL_LIVE_GROUPS]}/{m[schema.SIGNAL_GROUPS]}",
           "entropy": f"{m[schema.ENTROPY_MEAN]:.3f}" if schema.ENTROPY_MEAN in m else "",
           "length": f"{m[schema.LENGTH_MEAN]:.1f}", "rank": rank(m),
           "time": f"{m[schema.TIME_STEP]:.2f} s" + (f" ({spent})" if spent else "")}
    return {name: value for name, value in out.items() if value}


def rank(m: dict[str, Any]) -> str:
    """r_eff of a group's rollout gradients beside that of orthogonal scores of equal norm with the same w."""
    if schema.GRAM_GROUP_EFFECTIVE_RANK not in m:
        return ""
    null = m.get(schema.GRAM_GROUP_W_NULL)
    return f"{m[schema.GRAM_GROUP_EFFECTIVE_RANK]:.1f}" + (f" (null {null:.1f})" if null is not None else "")
