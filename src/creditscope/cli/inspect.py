"""`creditscope inspect`: rollouts of a file, or the optimiser and the prefix bias of a run, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from creditscope.cli.optimizer import show_runs
from creditscope.cli.output import Output
from creditscope.cli.positionals import Paths
from creditscope.cli.prefix import PrefixView, is_run
from creditscope.cli.rollouts import RolloutsView
from creditscope.errors import CreditscopeError, command_line
from creditscope.files.hub import refuse_missing
from creditscope.offline.settings import Settings

READ_BY_PREFIX = ("--model", "--format", "--reward-field", "--temperature", "--chat", "--device", "--dtype")
"""Flags of a file that say how its tokens are read."""


@dataclass(frozen=True, kw_only=True)
class FileFlags(Settings):
    """The settings of a file as flags; --method is the command's own, because --prefix reads it too."""

    method: Annotated[str, tyro.conf.Suppress] = Settings.method


@dataclass(frozen=True)
class Inspect:
    """Show rollouts or runs in numbers: signal, credit, w, prefix bias; of a run what the optimiser did.

    A file of rollouts: one JSON object per line with prompt, response and reward is enough; answers to equal prompts
    are a group. Other inputs: dumps of TRL (log_completions), verl (rollout_data_dir), SkyRL, AReaL, prime-rl, NeMo-RL
    and ms-swift, requests in OpenAI's style, parquet, and folders of such files. Optional fields:
    group, step, tokens, logp, mask, entropy, step labels (docs/offline.md). A batch is the rows of one training step,
    or whole groups; the file is streamed. Means over the batches are printed; --out keeps every batch in a record, for
    `report` and `papers check`.

    A run: overshoot past the bound, reward scale, update geometry, and whether the loss follows the reward, from its
    record alone. Several runs make one table.

    With --prefix, of a file or a run: the effect of a method's weights on the first tokens that the answers of a group
    share. Their gradient is multiplied by W = sum of weight times advantage. Even weights and a group-mean baseline
    give W = 0 where the whole group shares them; 1/L_i gives short answers more weight (arXiv:2601.05002, Prop. 1).

    For example:
      creditscope inspect rollouts.jsonl                  # signal, credit, w under GRPO
      creditscope inspect rollouts.jsonl --method dapo --json
      creditscope inspect labelled.jsonl --credit step_return     # labels of steps
      creditscope inspect outputs/completions --out runs/mine     # what TRL logged
      creditscope inspect rollouts.jsonl --model tiny --out runs/mine --resume
      creditscope inspect runs/a                          # the optimiser of a run
      creditscope inspect runs/a runs/b                   # beside each other
      creditscope inspect runs/a --prefix                 # every method, kept rollouts
      creditscope inspect rollouts.jsonl --prefix --method gspo   # one method in full
    """

    paths: Paths
    """A file of rollouts (JSON lines or parquet), a folder of such files, or folders of runs."""
    method: str | None = None
    """A row of the table (creditscope list methods). By default grpo; with --prefix all rows, and NAME_even is a row
    with even weights."""
    prefix: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show the prefix bias alone, in full."""
    step: int | None = None
    """With --prefix: the training step whose rollouts to read; by default the last."""
    why: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also print what each number means."""
    settings: Annotated[FileFlags, tyro.conf.arg(name="")] = field(default_factory=FileFlags)
    out: Path | None = None
    """Of a file: write a record into this folder."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on where the record in --out ends. The file and the settings must be the same."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        self._check()
        first = self.paths[0]
        if self.prefix:
            return PrefixView(first, self.method, self.step, self.settings, self.output).run()
        if is_run(first):
            show_runs(self.paths, self.output, self.why)
            return 0
        settings = replace(self.settings, method=self.method or Settings.method)
        return RolloutsView(first, settings, self.out, self.resume, self.why, self.output).run()

    def _check(self) -> None:
        """Refuse paths that are not there, and flags that would have no effect."""
        if not self.paths:
            raise CreditscopeError("nothing to inspect: name a file of rollouts, such as rollouts.jsonl, or a run")
        for path in self.paths:
            if not path.exists():
                raise CreditscopeError(f"{path} does not exist; name a file of rollouts, a folder of them, or a run")
        runs = [path for path in self.paths if is_run(path)]
        if len(self.paths) > 1 and (self.prefix or len(runs) < len(self.paths)):
            other = next((path for path in self.paths if path not in runs), self.paths[1])
            why = "--prefix reads one path" if self.prefix else f"several paths are runs, and {other} is none"
            raise CreditscopeError(f"{why}; inspect it alone: {command_line('inspect', other)}")
        if self.step is not None and not self.prefix:
            raise CreditscopeError(f"--step {self.step} chooses the rollouts of --prefix; give --prefix too")
        of_files = [*self.settings.flags(), *(["--out"] if self.out else []), *(["--resume"] if self.resume else [])]
        if runs and of_files:
            raise CreditscopeError(f"{of_files[0]} is for files of rollouts, and {runs[0]} is a run; leave it out")
        if runs and self.method and not self.prefix:
            raise CreditscopeError(f"--method {self.method}: a run has its own method; leave it out, or give --prefix")
        if self.settings.model is not None:
            refuse_missing(self.settings.model)
        unread = [name for name in of_files if name.startswith("--") and name not in READ_BY_PREFIX]
        if self.prefix and unread:
            raise CreditscopeError(f"{unread[0]} has no effect with --prefix, which reads one batch under the methods' "
                                   f"own advantages and writes no record; leave one of them out")
