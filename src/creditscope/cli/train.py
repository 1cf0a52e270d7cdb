"""`creditscope lab train`: run the lab's loop, or TRL's, and show its steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from creditscope.cli.display import Display
from creditscope.cli.env import environment
from creditscope.cli.interrupt import Interrupt
from creditscope.cli.output import Output, Screen
from creditscope.cli.progress import drive
from creditscope.errors import CreditscopeError, command_line, printable, require_module
from creditscope.files.hub import refuse_missing
from creditscope.runs import schema
from creditscope.runs.config import Config
from creditscope.runs.numbers import mean
from creditscope.runs.record import Record
from creditscope.runs.settings import learned_reward

ALARM_EVERY = 5
"""Steps between two diagnoses of a run in progress: each takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class TrainFlags(Config):
    """The run's settings as flags; the model is positional."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""


@dataclass(frozen=True)
class Train:
    """Train a model by group-based reinforcement learning and record every step.

    For example:
      creditscope lab train                                        # the packaged model, arithmetic, GRPO, R = 8
      creditscope lab train --method dapo --group 16 --steps 100
      creditscope lab train HuggingFaceTB/SmolLM2-135M-Instruct --task gsm8k:train.jsonl --lora 16
      creditscope lab train --credit optimal_token                 # credit for tokens, not only for answers
      creditscope lab train --method ppo --critic-warmup 5         # a critic, which learns alone at first
      creditscope lab train --inner-steps 4 --brake recall         # several updates per batch, with a brake on momentum
      creditscope lab train --scope light --every 5                # read the geometry of the gradients every fifth step
      creditscope lab train --scope light --also step_return salt  # the same rollouts under other credits
      creditscope lab train --scope light --adapt raise_group      # more rollouts per prompt once the rank has fallen
      creditscope lab train --out runs/mine --resume               # go on after a stop or a kill
      creditscope lab train --engine trl                           # the same by TRL's loop, also under torchrun
      creditscope lab train --method dpo                           # preferences: the best and the worst of each group
      creditscope lab train --method dpo --pairs pairs.jsonl       # given pairs, as creditscope lab pairs makes them
      creditscope lab train --reward model:runs/reward             # a learned reward, the verifier's beside it
    """

    config: Annotated[TrainFlags, tyro.conf.arg(name="")] = field(default_factory=TrainFlags)
    out: Path | None = None
    """The run's folder; by default runs/MODEL-TASK-METHOD[-CREDIT]-rR-sSEED."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the newest checkpoint in --out."""
    engine: Literal["lab", "trl"] = "lab"
    """The training loop: lab, or trl (extra trl), which also runs under torchrun and accelerate launch."""
    alarm: bool = True
    """Diagnose the steps so far, as creditscope doctor would, and print each finding once when it is broken."""
    stop_on: Literal["broken"] | None = None
    """End the run at the first broken finding, with exit code 1; the record is kept and can be resumed."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        if self.stop_on and not self.alarm:
            raise CreditscopeError("--stop-on broken needs the diagnosis: leave out --no-alarm")
        out = self.out or default_out(self.config)
        console = self.output.console()
        if self.engine == "trl":
            if self.resume:
                raise CreditscopeError("--resume: --engine trl keeps no checkpoint; start anew with another --out, "
                                       "from a trained folder: creditscope lab train RUN/model --engine trl")
            last, finished = run_by_trl(self.config, out, console, quiet=self.output.json or not leads(),
                                        alarm=self.alarm, stop_on=self.stop_on)
            if not leads():
                return 0 if finished else 130
        else:
            if self.resume and max(Record.open(out).checkpoints(), default=0) == (most := self.config.steps):
                console.print(f"{out} has taken its {most} steps: only the model and the evaluation are made again; "
                              f"to go on, give --steps {2 * most}", markup=False)
            try:
                last, finished = run_training(self.config, out, console, self.resume, quiet=self.output.json,
                                              alarm=self.alarm, stop_on=self.stop_on)
            except KeyboardInterrupt:
                if (out / "run.json").exists():
                    Screen(stderr=True).print(f"interrupted; the record is valid. Next: {self._go_on(out)}",
                                              markup=False, highlight=False, soft_wrap=True)
                raise
        code = 0 if finished else 1 if self.stop_on and schema.RUN_ALARM in last else 130
        if self.output.json:
            self.output.emit({"out": str(out), "finished": finished, "last": last})
            return code
        if steps := [step for step in Record.open(out).steps() if schema.SCOPE_SHARE in step]:
            console.print(f"microscope: {len(steps)} readings; a pass costs ×{steps[-1][schema.SCOPE_RATIO]:.2f} of a "
                          f"plain one (timed side by side on the first step), "
                          f"{mean([step[schema.SCOPE_SHARE] for step in steps]):.0%} of a step's time")
        folders = [f"{name}/" for name in ("groups", "scope", "checkpoints", "model") if any((out / name).glob("*"))]
        console.print(f"wrote {out}: {', '.join(['run.json', 'steps.jsonl', *folders])}", markup=False)
        if finished or self.engine == "trl":
            console.next(command_line("report", out))
        else:
            if code == 1:
                console.print(f"stopped by --stop-on {self.stop_on} after step {last['step']} of {self.config.steps}; "
                              f"to change a setting, begin another run with another --out", markup=False)
            console.next(command_line("doctor", out) if code == 1 else self._go_on(out))
        return code

    def _go_on(self, out: Path) -> str:
        """The command that continues the run."""
        # run.json is untrusted, so a function of the user's own has to be given again.
        own = {name: words for name, words in named(asdict(self.config)).items() if any(map(is_own, words))}
        scope = ["--scope", self.config.scope] if "also" in own else []  # without it, --also alone is refused
        return command_line("lab", "train", "--out", out, "--resume", *scope,
                       *(word for name, words in own.items() for word in (f"--{name}", *words)))

    def as_recorded(self, args: Sequence[str]) -> Train:
        """The settings of the run that this command resumes, as defaults for reading its words `args` once more."""
        out = self.out or default_out(self.config)
        known = {f.name for f in fields(TrainFlags)}
        stored = {name: value for name, value in Record.open(out).config.items() if name in known}
        for name, words in named(stored).items():
            for word in words:
                if is_own(word) and word not in given(args, name):
                    raise CreditscopeError(f"{out} was trained with --{name} {printable(word)}, a function of "
                                           f"yours. run.json is untrusted: give --{name} again")
        lists = {name: tuple(stored.get(name, ())) for name in ("log", "also")}
        return Train(config=TrainFlags(**(stored | lists)), out=out)


def named(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Flag -> the names it was given, of the flags that accept the user's own module:function."""
    one = {name: [settings.get(name) or ""] for name in ("credit", "reward")}
    return {name: [str(word) for word in words] for name, words in (one | {"also": settings.get("also", ())}).items()}


def given(args: Sequence[str], name: str) -> list[str]:
    """The words after a flag.

    >>> given(["--also", "salt", "mine:f", "--steps", "3", "--credit=mine:g"], "also")
    ['salt', 'mine:f']
    """
    found, here = [], False
    for arg in args:
        if arg.startswith("--"):
            flag, _, arg = arg.partition("=")
            here = flag == f"--{name}"
        if here and not arg.startswith("--"):
            found.append(arg)
    return [word for word in found if word]


def is_own(word: str) -> bool:
    """Whether a name is the user's module:function, which is code; a learned reward is a folder of data."""
    return ":" in word and learned_reward(word) is None


def run_training(config: Config, out: Path, console: Console, resume: bool = False, label: str | None = None,
                 quiet: bool = False, alarm: bool = True, stop_on: str | None = None) -> tuple[dict[str, Any], bool]:
    """Train and show it: (the last metrics, whether the run came to its end)."""
    require_module("training", "transformers")
    refuse_missing(config.model)
    # Heavy imports wait until there is something to train, so that --help answers at once.
    from creditscope.diagnosis.alarm import Alarm
    from creditscope.lab.trackers import Trackers
    from creditscope.lab.train import train

    with contextlib.closing(Trackers(config.log, out, asdict(config))) as trackers, \
            Interrupt((out / "run.json").exists) as stop, \
            Display(console, label or name_of(config), config.steps, quiet=quiet) as display:
        display.begin("the model", config.eval_problems)

        def tell(line: dict[str, Any]) -> None:
            display.step(line)
            trackers.log(line)

        watch = Alarm(asdict(config), ALARM_EVERY, stop_on) if alarm else None
        finished = drive(train(config, out, environment(), resume, stop, watch), tell)
        return display.last, finished


def run_by_trl(config: Config, out: Path, console: Console, quiet: bool = False, alarm: bool = True,
               stop_on: str | None = None) -> tuple[dict[str, Any], bool]:
    """The same by TRL."""
    refuse_missing(config.model)
    from creditscope.plugins.trl.engine import train_by_trl

    updates = config.steps * config.inner_steps * config.minibatches
    with Interrupt() as stop, Display(console, f"{name_of(config)} by TRL", updates, quiet=quiet) as display:
        display.begin("the model", config.eval_problems)
        finished = train_by_trl(config, out, display.step, stop, alarm, stop_on)
        return display.last, finished


def leads() -> bool:
    """Whether this process has rank 0 among those of torchrun."""
    return os.environ.get("RANK", "0") == "0"


def name_of(config: Config) -> str:
    """The method, and the credit where it is not the method's own."""
    return ", ".join(filter(None, (config.method, config.credit)))


def default_out(config: Config) -> Path:
    """runs/MODEL-TASK-METHOD[-CREDIT]-rR-sSEED; characters that are unsafe in a path become _."""
    model = Path(config.model).name.removesuffix(".gguf")
    parts = [model, config.task.split(":")[0], *filter(None, (config.method, config.credit)), f"r{config.group}",
             f"s{config.seed}"]
    name = "-".join("".join(c if c.isalnum() or c in "._" else "_" for c in part) for part in parts)
    return Path("runs") / name.lstrip(".")
