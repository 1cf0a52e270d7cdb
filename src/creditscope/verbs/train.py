"""`creditscope train`: the lab's loop with a face."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from creditscope.errors import CreditscopeError
from creditscope.lab.config import Config
from creditscope.verbs.display import Display, Interrupt
from creditscope.verbs.env import environment
from creditscope.verbs.output import Output


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """The run's settings as flags, the model first and without one. The trainer itself knows no command line."""

    model: Annotated[str, tyro.conf.Positional] = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""


@dataclass(frozen=True)
class Train:
    """Train a model by group-based reinforcement learning and record every step.

    Examples:
      creditscope train                                        the packaged model, arithmetic, GRPO, R = 8
      creditscope train --method dapo --group 16 --steps 100
      creditscope train HuggingFaceTB/SmolLM2-135M-Instruct --task gsm8k:train.jsonl --lora 16
      creditscope train --out runs/mine --resume               go on after a stop or a kill
    """

    config: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)
    out: Path | None = None
    """The run's folder; by default runs/MODEL-TASK-METHOD-rR-sSEED."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the newest checkpoint in --out."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        out = self.out or default_out(self.config)
        console = Console(stderr=True, quiet=True) if self.output.json else self.output.console()
        last, stopped = run_training(self.config, out, console, self.resume)
        if self.output.json:
            self.output.emit({"out": str(out), "stopped": stopped, "last": last})
            return 130 if stopped else 0
        again = f"creditscope train --out {out} --resume"
        console.print(f"wrote {out}: run.json, steps.jsonl, groups/, checkpoints/" + ("" if stopped else ", model/"))
        console.print(f"Next: {again}" if stopped else f"Next: creditscope train {out / 'model'}")
        return 130 if stopped else 0


def run_training(config: Config, out: Path, console: Console, resume: bool = False,
                 label: str | None = None) -> tuple[dict[str, Any], bool]:
    """Train and show it: (the last metrics, whether somebody stopped it)."""
    # Heavy imports wait until there is something to train, so that --help answers at once.
    from creditscope.lab.trackers import Trackers
    from creditscope.lab.train import train

    trackers = Trackers(config.log, out, asdict(config))
    last: dict[str, Any] = {}
    with Interrupt(console) as stop, Display(console, label or config.method, config.steps) as display:
        try:
            for metrics in train(config, out, environment()["packages"], resume, stop):
                display.show(metrics)
                trackers.log(metrics)
                last = metrics
        finally:
            trackers.close()
    return last, stop.asked and not (out / "model").exists()


def default_out(config: Config) -> Path:
    """runs/MODEL-TASK-METHOD-rR-sSEED, with nothing in it that a path could stumble over."""
    parts = [Path(config.model).stem, config.task.split(":")[0], config.method, f"r{config.group}", f"s{config.seed}"]
    name = "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in part) for part in parts)
    if not name.strip("._-"):
        raise CreditscopeError(f"cannot make a folder name from --model {config.model!r}; give --out")
    return Path("runs") / name
