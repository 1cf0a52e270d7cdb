"""Methods under which a shared prefix cancels, on sampled groups: the tables of docs/prefix_bias.md.

    python benchmarks/prefix.py            float64, 4 prompts × 8 rollouts, two policies; prints the tables

The policies are the packaged model, whose answers to one question have nearly one length, and the same after the
warm-up of benchmarks/length.py, whose answers are short or long. Every method gets the same rollouts. W is read at
ratio 1, and after 1 and 3 passes over the batch by AdamW (lr 1e-4) on that method's own objective; each reading is
compared with autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import length
import torch

from creditscope.exact.shared_prefix import measured, prefix_bias, prefix_metrics
from creditscope.lab.rollout import Drawn, roll_out
from creditscope.methods.axes import Method
from creditscope.methods.table import METHODS, even
from creditscope.objective.surrogate import surrogate
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import token_logp
from creditscope.tasks import Task, find_task

PASSES = (0, 1, 3)
CANCELS = 1e-9
EVEN = ("gspo_token", "gmpo", "sapo", "gcpo", "opo", "gtpo", "cppo")
HEADER = ("method", "cancels", "root", "bias", "exponent, A > 0", "A < 0", "root, 1 pass", "root, 3", "bias, 3")


def readings(start: Policy, batch: Drawn, method: Method) -> tuple[dict[int, dict[str, float]], float]:
    """Passes -> summary, and the largest distance of the closed form from autograd."""
    rollouts, policy = batch.rollouts, replace(start, model=copy.deepcopy(start.model))
    optimizer = torch.optim.AdamW(policy.trainable().values(), 1e-4, weight_decay=0.0)
    found, apart = {}, 0.0
    for done in range(max(PASSES) + 1):
        logp = token_logp(policy, batch.rollouts.prompt_ids, rollouts.tokens, rollouts.mask, 1.0)
        if done in PASSES:
            live = logp.detach()
            closed = prefix_bias(method, rollouts, live)
            found[done] = prefix_metrics(closed, rollouts)
            apart = max(apart, float((closed.total - measured(method, rollouts, closed.nodes, live)).abs().max()))
        if done < max(PASSES):
            optimizer.zero_grad()
            (-surrogate(method, logp, rollouts)).backward()
            optimizer.step()
    return found, apart


def report(policy: Policy, task: Task, rows: Sequence[Method]) -> None:
    """The table of one policy's answers."""
    batch = roll_out(policy, task, list(islice(task.problems("train", 0), 4)), 8, max_tokens=task.max_tokens,
                     temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(0))
    rollouts = batch.rollouts
    # The sampler's log-probs are those of the training forward up to rounding; here π_old is the forward's own.
    old = token_logp(policy, batch.rollouts.prompt_ids, rollouts.tokens, rollouts.mask, 1.0, grad=False)
    batch = replace(batch, rollouts=replace(rollouts, logp=old, reward=rollouts.reward.double()))
    plain = prefix_metrics(prefix_bias(METHODS["p1_grpo"], batch.rollouts), batch.rollouts)
    lengths = rollouts.lengths
    print(f"\n{len(rollouts)} rollouts of {int(lengths.min())} to {int(lengths.max())} tokens, reward "
          f"{rollouts.reward.mean():.3f}, {plain['prefix/tokens']:.1%} of the tokens on {plain['prefix/nodes']} shared "
          f"nodes, {plain['prefix/root_nodes']} of them of a whole group\n")
    print("| " + " | ".join(HEADER) + " |\n" + "| --- " * len(HEADER) + "|")
    worst = 0.0
    for row in rows:
        found, apart = readings(policy, batch, row)
        worst = max(worst, apart)
        cells = [shown(found[done], name) for done, name in (
            (0, "root"), (0, "bias"), (0, "length_positive"), (0, "length_negative"), (1, "root"), (3, "root"),
            (3, "bias"))]
        print(f"| {row.name} | {'yes' if found[0]['prefix/root'] < CANCELS else 'no'} | " + " | ".join(cells) + " |",
              flush=True)
    print(f"\nThe closed form is within {worst:.0e} of autograd in all {len(rows) * len(PASSES)} readings.")


def shown(reading: dict[str, float], name: str) -> str:
    value = reading.get(f"prefix/{name}")
    if value is None:
        return "–"
    return "0" if abs(value) < CANCELS else f"{value:.3f}" if abs(value) >= 5e-4 else f"{value:.0e}"


def main() -> None:
    torch.set_num_threads(1)
    rows = [row for row in METHODS.values() if row.baseline != "external"] + [even(METHODS[name]) for name in EVEN]
    report(load_policy("tiny", device="cpu", dtype="float64"), find_task("arithmetic"), rows)
    policy = load_policy("tiny", device="cpu")
    length.warm_up(policy, length.answers(policy, 2560, seed=7), "hidden", 80)
    report(replace(policy, model=policy.model.double()), length.TASK, rows)


if __name__ == "__main__":
    main()
