"""A record of a user's own training loop, which `creditscope doctor` and `creditscope report` read.

    python examples/own_record.py
    creditscope doctor runs/mine
    creditscope report runs/mine

The three lines marked with an arrow write the record. A metric has the key of docs/record.md; one that was not measured
is left out. A record of rewards alone can be read too: `Record.create("runs/mine", {})`, then
`record.append(step, {"reward/mean": 0.5})`.
"""

import sys
from functools import partial
from itertools import islice

import torch

from creditscope import METHODS, Record, advantage, effective_credit, surrogate
from creditscope.batch.metrics import assigned, signal, spread
from creditscope.files.writing import free_path
from creditscope.lab.rollout import roll_out
from creditscope.objective.kept import kept_arrays
from creditscope.policy.loading import load_policy
from creditscope.policy.logp import token_logp
from creditscope.tasks import find_task

METHOD = METHODS["grpo"]
SETTINGS = {"model": "tiny", "task": "arithmetic", "method": METHOD.name, "prompts": 4, "group": 8, "max_tokens": 64,
            "optimizer": "adamw", "lr": 1e-4, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0, "steps": 15}


def sample(policy, seed):
    """A batch of sampled answers, and the function that gives log π of their tokens under the current weights."""
    task = find_task(SETTINGS["task"])
    rollouts = roll_out(policy, task, list(islice(task.problems("train", seed), SETTINGS["prompts"])),
                        SETTINGS["group"], max_tokens=SETTINGS["max_tokens"], temperature=1.0, top_p=1.0,
                        generator=torch.Generator().manual_seed(seed)).rollouts
    return rollouts, partial(token_logp, policy, rollouts.prompt_ids, rollouts.tokens, rollouts.mask, 1.0, grad=True)


def main(out="runs/mine"):
    policy = load_policy(SETTINGS["model"], device="cpu")
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=SETTINGS["lr"], eps=SETTINGS["eps"],
                                  weight_decay=SETTINGS["weight_decay"])
    out = free_path(out)  # runs/mine-2 where runs/mine is there: a record is never written over
    with Record.create(out, SETTINGS) as record:  # ← 1: the folder, and the settings that the doctor reads
        for step in range(SETTINGS["steps"]):
            rollouts, forward = sample(policy, step)
            logp = forward()
            objective = surrogate(METHOD, logp, rollouts)
            optimizer.zero_grad()
            (-objective).backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), SETTINGS["clip_norm"])
            optimizer.step()

            old = logp.detach()
            credit = advantage(METHOD, rollouts.reward, rollouts.group)[:, None].expand_as(rollouts.mask)
            w = effective_credit(lambda live, rollouts=rollouts: surrogate(METHOD, live, rollouts), old)
            if step % 5 == 0:
                record.save_group(step, kept_arrays(METHOD, rollouts, credit, w, old))  # ← 2: before the step's line
            found = signal(rollouts) | assigned(credit, rollouts) | spread(w, rollouts.mask) | {
                "objective/value": float(objective.detach()), "grad/norm": float(norm), "optimizer/lr": SETTINGS["lr"]}
            record.append(step, found)  # ← 3: the metrics of the step
            print(f"step {step}: reward {found['reward/mean']:.2f}, dead groups {found['signal/dead_groups']:.0%}")
    print(f"wrote {out}\nNext: creditscope doctor {out}   creditscope report {out}")
    return out


if __name__ == "__main__":
    main(*sys.argv[1:2])
