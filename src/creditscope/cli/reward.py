"""`creditscope lab reward`: a reward model from preference pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from creditscope.cli.env import environment
from creditscope.cli.interrupt import nothing_written
from creditscope.cli.output import Output
from creditscope.cli.progress import Progress, drive
from creditscope.errors import command_line, require_module
from creditscope.files.hub import refuse_missing
from creditscope.runs.reward_plan import RewardPlan

CHANCE = 0.5
"""Accuracy on pairs of a model that knows nothing."""


@dataclass(frozen=True, kw_only=True)
class RewardFlags(RewardPlan):
    """The plan as flags; the file is positional."""

    pairs: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PAIRS")]
    """JSON lines of TRL's preference format: prompt, chosen, rejected."""


@dataclass(frozen=True)
class Reward:
    """Train a reward model on preference pairs: s(x, y) with P(chosen preferred) = σ(s(x, chosen) − s(x, rejected)).

    The model gets a linear head of one label on its last hidden state; the loss is −log σ(s_chosen − s_rejected). A
    tenth of the prompts is held out, by their hash: accuracy there is the share of pairs with s_chosen > s_rejected,
    where a tie counts ½: ½ for a model that knows nothing. The folder is one of transformers'
    AutoModelForSequenceClassification, in safetensors, with reward.json.

    A learned reward is a stand-in. Training against it raises it; whether the answers get better is recorded beside it,
    as reward/gold_mean, and creditscope doctor compares the two.

    For example:
      creditscope lab pairs --out pairs.jsonl                      # pairs to learn from
      creditscope lab reward pairs.jsonl --out runs/reward         # on the packaged model
      creditscope lab train --reward model:runs/reward             # train against it
      creditscope lab reward pairs.jsonl --model runs/warm --train head --out runs/reward  # a large model: its head
    """

    config: Annotated[RewardFlags, tyro.conf.arg(name="")]
    out: Path
    """The folder of the new model. It is written at the end; after a stop nothing is left."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        plan = self.config
        require_module("training", "transformers")
        refuse_missing(plan.model)
        from creditscope.lab.reward import train_reward

        console = self.output.console()
        with nothing_written(), Progress(console, "reward", quiet=self.output.json) as progress:
            progress.begin("the model and the pairs", 0)

            def tell(m: dict[str, Any]) -> None:
                progress.tick(m["step"], m["steps"], f"step {m['step']}/{m['steps']}  loss {m['loss']:.3f}")

            notes = drive(train_reward(plan, self.out, environment()), tell)
        if self.output.json:
            self.output.emit({"out": str(self.out), **notes})
            return 0
        for name, found in (("learnt from", notes["train"]), ("held out", notes["held_out"])):
            console.print(f"{name}: {found['accuracy']:.1%} of {found['pairs']} pairs in order (95 % from "
                          f"{found['low']:.1%} to {found['high']:.1%}), loss {found['loss']:.3f}")
        console.print(f"wrote {self.out}: the model, its tokenizer and reward.json", markup=False)
        if notes["held_out"]["low"] <= CHANCE:
            console.print(f"warning: its accuracy on held-out pairs is not told from chance, {CHANCE:.0%}, and a "
                          f"policy learns nothing from a reward at chance; give more pairs, or more --epochs",
                          markup=False)
        console.next(command_line("lab", "train", plan.model, "--reward", f"model:{self.out}"))
        return 0
