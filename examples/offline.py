"""Rollouts that another system logged, read without training.

    python examples/offline.py [FILE] [MODEL]

Without a file it writes one first, with prompt, response and reward. The same from the command line:

    creditscope inspect examples/rollouts.jsonl --model tiny --out runs/mine
    creditscope report runs/mine
"""

import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch

from creditscope import Record
from creditscope.lab.rollout import roll_out
from creditscope.offline.scope import scope_file
from creditscope.offline.settings import Settings
from creditscope.policy.loading import load_policy
from creditscope.tasks import find_task


def write_log(file, steps=3, prompts=4, group=4):
    """A trainer's log: one line per answer with prompt, response, reward and step."""
    policy, task = load_policy("tiny", device="cpu"), find_task("arithmetic")
    with file.open("w") as out:
        for step in range(steps):
            batch = roll_out(policy, task, list(islice(task.problems("train", step), prompts)), group, max_tokens=64,
                             temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(step)).rollouts
            for prompt, text, reward in zip(batch.prompt, batch.text, batch.reward.tolist(), strict=True):
                out.write(json.dumps({"prompt": prompt, "response": text, "reward": reward, "step": step}) + "\n")


def read_log(file, model, out):
    """One line per batch, and the record written from it."""
    for read in scope_file(file, Settings(model=model, method="dapo", device="cpu"), out):
        found = read.line
        rank = f"{found['gram/group/effective_rank']:.1f}" if "gram/group/effective_rank" in found else "no"
        yield (f"{found['signal/live_groups']} of {found['signal/groups']} groups carry signal, reward "
               f"{found['reward/mean']:.2f}, entropy {found['entropy/mean']:.2f} nats, "
               f"{rank} directions per group; {read.done / read.size:.0%} read")
    yield f"{len(Record.open(out).steps())} steps in the record"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        given = [*sys.argv[1:], None, None]
        file = Path(given[0] or Path(folder) / "rollouts.jsonl")
        if given[0] is None:
            write_log(file)
        for said in read_log(file, given[1] or "tiny", Path(folder) / "run"):
            print(said)
