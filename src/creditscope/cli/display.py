"""The metrics of a run in progress: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from creditscope.cli.progress import Progress
from creditscope.errors import printable


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
        if "reward/mean" in m:
            self._warn(m)
        if "eval/accuracy" in m:
            self._eval = f"test {m['eval/accuracy']:.1%} [{m['eval/low']:.1%}, {m['eval/high']:.1%}]"
            if not self._progress.live:
                self._progress.say(f"{self._label}  step {m['step']}  {self._eval}")
        if "reward/mean" not in m:
            return
        self._seen += 1
        self._spent += m["time/step"] - m.get("time/eval", 0.0)
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
        if m["length/truncated"] > 0.2:
            found["cut"] = f"{m['length/truncated']:.0%} of the answers were cut at the limit; raise --max-tokens"
        if m.get("reward/errors"):
            found["errors"] = f"{m['reward/errors']} answers could not be judged; the first: {m['reward/first_error']}"
        if m.get("policy/sampler_gap", 0.0) > 0.01:
            found["gap"] = (f"the training forward is off the sampler by {m['policy/sampler_gap']:.2g} in log-prob, so "
                            f"ratios do not start at 1; use --top-p 1, and float32 weights")
        for cause, text in found.items():
            if cause not in self._warned:
                self._warned.add(cause)
                Console(stderr=True).print(f"warning: {printable(text)}", markup=False, highlight=False)


def readings(m: dict[str, Any]) -> dict[str, str]:
    """The few numbers that say how a run goes."""
    parts = {name: m[f"time/{name}"] for name in ("sample", "train", "scope") if f"time/{name}" in m}
    spent = ", ".join(f"{k} {v:.2f}" for k, v in parts.items())
    out = {"reward": f"{m['reward/mean']:.3f}", "live groups": f"{m['signal/live_groups']}/{m['signal/groups']}",
           "entropy": f"{m['entropy/mean']:.3f}" if "entropy/mean" in m else "",
           "length": f"{m['length/mean']:.1f}", "rank": rank(m),
           "time": f"{m['time/step']:.2f} s" + (f" ({spent})" if spent else "")}
    return {name: value for name, value in out.items() if value}


def rank(m: dict[str, Any]) -> str:
    """r_eff of a group's rollout gradients beside that of orthogonal scores of equal norm with the same w."""
    if "gram/group/effective_rank" not in m:
        return ""
    null = m.get("gram/group/w_null")
    return f"{m['gram/group/effective_rank']:.1f}" + (f" (null {null:.1f})" if null is not None else "")
