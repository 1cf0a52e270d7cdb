"""A user's own training loop with microscope and probe; and the same with a brake.

    python examples/own_loop.py

The five lines marked with an arrow are added; `backward()` and `optimizer.step()` stay.
"""

from functools import partial
from itertools import islice

import torch

from creditscope import METHODS, Microscope, spectrum, surrogate
from creditscope.lab.rollout import roll_out
from creditscope.optimizer.brakes import Recall
from creditscope.optimizer.probe import Probe
from creditscope.policy.loading import load_policy
from creditscope.policy.logp import token_logp
from creditscope.tasks import find_task


def sample(policy, seed, prompts=4, group=8):
    """A batch of sampled answers, and the function that gives log π of their tokens under the current weights."""
    task = find_task("arithmetic")
    batch = roll_out(policy, task, list(islice(task.problems("train", seed), prompts)), group, max_tokens=64,
                     temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(seed))
    rollouts = batch.rollouts
    return rollouts, partial(token_logp, policy, batch.rollouts.prompt_ids, rollouts.tokens, rollouts.mask, 1.0)


def plain(steps, inner=4):
    policy, method = load_policy("tiny", device="cpu"), METHODS["grpo"]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-4)
    probe = Probe(optimizer, policy.model.named_parameters(), every=1)  # ← 1: uses the optimiser's own hooks
    for step in range(steps):
        rollouts, forward = sample(policy, step)
        probe.begin(method, rollouts)  # ← 2: a new batch
        for _ in range(inner):
            optimizer.zero_grad()
            with Microscope(policy.model) as scope:  # ← 3: scope.gram is ⟨g_i, g_j⟩ of the rollouts' gradients
                logp = forward(grad=True)
                probe.see(logp)  # ← 4: log π before the update
                (-surrogate(method, logp, rollouts)).backward()
            optimizer.step()
        found = probe.finish(partial(forward, grad=False))  # ← 5: all numbers of the batch
        yield found | {"gram/effective_rank": spectrum(scope.gram).effective_rank}


def braked(steps, inner=4):
    policy, method = load_policy("tiny", device="cpu"), METHODS["grpo"]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-4)
    probe = Probe(optimizer, policy.model.named_parameters(), every=1)
    brake = Recall(optimizer)
    for step in range(steps):
        rollouts, forward = sample(policy, step)
        probe.begin(method, rollouts)
        brake.begin(method, rollouts)
        for _ in range(inner):
            logp = forward(grad=True)
            probe.see(logp)
            logp = brake.watch(logp)  # any loss may be built on it
            optimizer.zero_grad()
            (-surrogate(method, logp, rollouts)).backward()
            brake.step()
        yield probe.finish(partial(forward, grad=False))


if __name__ == "__main__":
    for name, run in (("plain AdamW", plain), ("with recall", braked)):
        for step, found in enumerate(run(steps=3)):
            rank = f"{found['gram/effective_rank']:.1f} directions; " if "gram/effective_rank" in found else ""
            print(f"{name}, batch {step}: {rank}{found['overshoot/past']:.1%} of tokens past their bound, "
                  f"{found['overshoot/distance']:.2f} nats on average, {found['overshoot/after']:.0%} of it after "
                  f"their own gradient had stopped; KL {found['overshoot/kl']:.4f}; a tenth of the credit would have "
                  f"changed the update by {found['optimizer/scale_change']:.1%}")
