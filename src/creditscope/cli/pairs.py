"""`creditscope lab pairs`: preference pairs from a policy's own answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from creditscope.cli.interrupt import nothing_written
from creditscope.cli.output import Output
from creditscope.cli.progress import Progress, drive
from creditscope.errors import CreditscopeError, command_line, require_module
from creditscope.files.hub import refuse_missing
from creditscope.runs.config import Config

BATCH = 32
"""Groups sampled at a time."""


@dataclass(frozen=True)
class Pairs:
    """Sample groups of answers and write one preference pair per group: the best and the worst by the task's verifier.

    A group whose rewards are all equal gives no pair. Answers that were cut at the limit are left out. The file has
    TRL's preference format, one JSON object per line: prompt, chosen, rejected. It is for `creditscope lab reward`,
    for `creditscope lab train --pairs`, and for any program that reads that format, such as TRL's DPOTrainer.

    For example:
      creditscope lab pairs --out pairs.jsonl                      # the packaged model on arithmetic, 1024 groups of 4
      creditscope lab pairs runs/warm --task gsm8k:data --group 8 --groups 256 --out pairs.jsonl
      creditscope lab reward pairs.jsonl --out runs/reward         # next: a reward model from them
      creditscope lab train --method dpo --pairs pairs.jsonl       # or a policy
    """

    out: Path
    """The file to write, which must not be there yet; it is complete or not there."""
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = "tiny"
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""
    task: str = "arithmetic"
    """arithmetic; turns; gsm8k:FILE, gsm8k:FOLDER or gsm8k:OWNER/NAME; jsonl:FILE (with --reward)."""
    groups: int = 1024
    """Prompts to sample; each gives one pair at most."""
    group: int = 4
    """R, answers per prompt."""
    reward: str | None = None
    """module:function for --task jsonl, as in train."""
    answer: str = "strict"
    """strict or flexible, as in train."""
    temperature: float = 1.0
    """Sampling temperature."""
    max_tokens: int | None = None
    """Longest answer; by default the task's."""
    seed: int = 0
    """Fixes prompts and samples."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    dtype: str = "float32"
    """float32, bfloat16 or float64: of the weights."""
    chat: str = "auto"
    """on, off, or auto: wrap prompts in the chat template where the tokenizer has one."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        if self.groups < 1:
            raise CreditscopeError(f"--groups must be at least 1, got {self.groups}")
        if self.group < 2:
            raise CreditscopeError(f"--group {self.group}: a pair needs 2 answers or more")
        size = min(BATCH, self.groups)
        config = Config(model=self.model, task=self.task, reward=self.reward, answer=self.answer, group=self.group,
                        prompts=size, steps=-(-self.groups // size), temperature=self.temperature,
                        max_tokens=self.max_tokens, seed=self.seed, device=self.device, dtype=self.dtype,
                        chat=self.chat)
        if config.learned is not None:
            raise CreditscopeError(f"--reward {self.reward}: pairs are made by the task's verifier; leave it out")
        require_module("sampling pairs", "transformers")
        refuse_missing(config.model)
        from creditscope.lab.pairs import make_pairs

        console = self.output.console()
        with nothing_written(), Progress(console, "pairs", quiet=self.output.json) as progress:
            def tell(m: dict[str, Any]) -> None:
                progress.tick(m["step"], m["steps"], f"{m['groups']} groups  {m['pairs']} pairs")

            notes = drive(make_pairs(config, self.out, self.groups), tell)
        if self.output.json:
            self.output.emit({"out": str(self.out), **notes})
            return 0
        console.print(f"wrote {self.out}: {notes['pairs']} pairs from {notes['groups']} groups", markup=False)
        console.next(command_line("lab", "reward", self.out, "--model", self.model, "--out", "runs/reward"))
        return 0
