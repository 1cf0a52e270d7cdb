"""`creditscope lab warmup`: a short supervised training, so that groups of answers are mixed before reinforcement."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from creditscope.cli.display import accuracy
from creditscope.cli.env import environment
from creditscope.cli.interrupt import nothing_written
from creditscope.cli.output import Output
from creditscope.cli.progress import Progress, drive
from creditscope.errors import CreditscopeError, command_line, require_module
from creditscope.files.hub import refuse_missing
from creditscope.runs import schema
from creditscope.runs.config import Config

STEPS = 200
LR = 5e-4
"""The usual magnitude for small models; a cosine takes it to 0."""


@dataclass(frozen=True)
class Warmup:
    """Train a model on a task's demonstrations for a short while, so that its groups of answers are mixed.

    A group has a gradient only if some of its answers are right and some are wrong. A base model that does not know the
    form of an answer is always wrong. The warm-up trains on solutions of the train split (the loss is on their tokens,
    not on the prompt's), measures accuracy before and after, and writes a model folder with warmup.json. Prompts are
    made as in training, so train with the same --chat.

    For example:
      creditscope lab warmup SmolLM2-135M-Instruct.Q4_1.gguf --task gsm8k:data --epochs 4 --out runs/warm
      creditscope lab train runs/warm --task gsm8k:data --method p1_grpo
      creditscope lab warmup tiny --task turns --steps 60 --lr 2e-3 --out runs/turns  # learns two words, up and down
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """tiny (packaged), a folder in Hugging Face format, a .gguf file, or owner/name on the hub."""
    task: str
    """arithmetic; turns; gsm8k:FILE, gsm8k:FOLDER or gsm8k:OWNER/NAME; jsonl:FILE (with --reward)."""
    out: Path
    """The folder of the new model. It is written at the end; after a stop nothing is left."""
    steps: int | None = None
    """Batches to learn from; by default 200."""
    epochs: int | None = None
    """Passes over the train split, in place of --steps, for a task that is a file."""
    batch: int = 64
    """Examples per step."""
    lr: float = LR
    """Largest learning rate of AdamW: it rises over the first twentieth of the steps and falls as a cosine."""
    max_tokens: int | None = None
    """Longest answer, its end included; longer ones are left out. By default the task's, as in train."""
    eval_problems: int = 200
    """Test problems of the evaluation before and after; 0 for none."""
    reward: str | None = None
    """module:function for --task jsonl, as in train."""
    answer: str = "strict"
    """strict or flexible, of the evaluations before and after, as in train."""
    seed: int = 0
    """Fixes the examples and their order. On a CPU two runs with one seed give the same weights."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    dtype: str = "float32"
    """float32, bfloat16 or float64: of the weights."""
    chat: str = "auto"
    """on, off, or auto: wrap prompts in the chat template where the tokenizer has one."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        config = self.config()
        require_module("training", "transformers")
        refuse_missing(config.model)
        # Heavy imports wait until there is something to train, so that --help answers at once.
        from creditscope.lab.warmup import warm_up

        console = self.output.console()
        with nothing_written(), Progress(console, "warm-up", quiet=self.output.json) as progress:
            progress.begin("the model and the examples", self.eval_problems)
            notes = drive(warm_up(config, self.out, environment(), batch=self.batch, epochs=self.epochs),
                          partial(tell, progress))
        if self.output.json:
            self.output.emit({"out": str(self.out), **notes})
            return 0
        if notes["new_words"]:
            console.print(f"new in the vocabulary: {', '.join(notes['new_words'])}", markup=False)
        if notes["left_out"]:
            console.print(f"left out: {notes['left_out']} answers longer than {notes['settings']['max_tokens']} tokens")
        console.print(f"loss {notes['losses'][0]:.3f} → {notes['losses'][-1]:.3f}  {notes['seconds']:.0f} s")
        console.print(f"wrote {self.out}: the model, its tokenizer and warmup.json", markup=False)
        chat = [] if self.chat == "auto" else ["--chat", self.chat]
        console.next(command_line("lab", "train", self.out, "--task", self.task, *chat, "--method", "p1_grpo",
                                  "--scope", "light"))
        return 0

    def config(self) -> Config:
        if self.steps is not None and self.epochs is not None:
            raise CreditscopeError(f"--steps {self.steps} and --epochs {self.epochs} both say how long; give one")
        for name, value in (("epochs", self.epochs), ("batch", self.batch)):
            if value is not None and value < 1:
                raise CreditscopeError(f"--{name} must be at least 1, got {value}")
        return Config(model=self.model, task=self.task, reward=self.reward, answer=self.answer, lr=self.lr,
                      max_tokens=self.max_tokens, steps=STEPS if self.steps is None else self.steps,
                      eval_problems=self.eval_problems, seed=self.seed, device=self.device, dtype=self.dtype,
                      chat=self.chat)


def tell(progress: Progress, m: dict[str, Any]) -> None:
    step, steps = m["step"], m["steps"]
    if "examples" in m:
        progress.say(f"warm-up  {steps} steps on {m['examples']} examples")
    if schema.EVAL_ACCURACY in m:
        progress.say(f"warm-up  step {step}  {accuracy(m)} of {m[schema.EVAL_PROBLEMS]}")
    if "loss" in m:
        progress.tick(step, steps, f"step {step}/{steps}  loss {m['loss']:.3f}")
