"""Does the update depend on the reward's scale? The probe's prediction against training again with rewards times φ.

    python benchmarks/scale.py            packaged model, one batch of real answers; writes benchmarks/scale.md

Dr.GRPO, which does not divide by a std, takes six updates on the same 32 answers, from the same weights, once with
rewards as they are and once for each φ with rewards times φ. The probe reads the live state before the sixth update of
the first run and predicts the change of that update; the other runs measure it. The weights also differ after five
updates, which the probe cannot know: that is the remaining difference of the two numbers.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from creditscope import METHODS, Method, Rollouts, effective_credit, surrogate
from creditscope.lab.rollout import roll_out
from creditscope.optimizer.scale import Clipping, RewardParts, ScaleSweep, sweep
from creditscope.policy.loading import load_policy
from creditscope.policy.logp import token_logp
from creditscope.tasks import find_task

PAGE = Path(__file__).with_suffix(".md")
PHIS, STEPS, LR = (1e-6, 1e-3, 0.1, 10.0, 1e3), 6, 1e-5
ROW = METHODS["dr_grpo"].but(name="dr_grpo_64", max_tokens=64)

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
WORLDS: dict[str, tuple[Make, float, float | None]] = {
    "AdamW, ε = 1e-8": (lambda p: torch.optim.AdamW(p, LR, eps=1e-8), 0.0, None),
    "AdamW, ε = 1e-5": (lambda p: torch.optim.AdamW(p, LR, eps=1e-5), 0.0, None),
    "AdamW, KL term, β = 0.05": (lambda p: torch.optim.AdamW(p, LR), 0.05, None),
    "AdamW, norm clipped at 0.01": (lambda p: torch.optim.AdamW(p, LR), 0.0, 0.01),
    "Adam, L2 0.01": (lambda p: torch.optim.Adam(p, LR, weight_decay=0.01), 0.0, None),
    "SGD, momentum 0.9": (lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9), 0.0, None),
}


def run(make: Make, beta: float, clip: float | None, phi: float, batch: tuple[Rollouts, list[list[int]]],
        probe: bool) -> tuple[Tensor, ScaleSweep | None]:
    """The last update of a run with rewards times φ and, if asked, what the probe says before it."""
    policy = load_policy("tiny", device="cpu")
    rollouts, prompts = replace(batch[0], reward=phi * batch[0].reward), batch[1]
    named = policy.trainable()
    parameters = list(named.values())
    optimizer = make(parameters)
    apart = beta > 0 or any(g["weight_decay"] and not g.get("decoupled_weight_decay") for g in optimizer.param_groups)
    parts, clipping = RewardParts(optimizer) if apart else None, Clipping(clip) if clip else None
    found = None
    for step in range(STEPS):
        def pull(row: Method) -> dict[Tensor, Tensor]:
            logp = token_logp(policy, prompts, rollouts.tokens, rollouts.mask, 1.0, grad=True)
            w = effective_credit(lambda lp: surrogate(row, lp, rollouts), logp)
            optimizer.zero_grad()
            logp.backward(-w)
            return {p: p.grad.clone() for p in parameters if p.grad is not None}

        rewards = pull(ROW)
        if beta:
            pull(ROW.but(name="with_kl", beta=beta))
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf))
        if clipping is not None:
            clipping.norms.append(norm)
            rewards = {p: p.grad for p in rewards if p.grad is not None}
        if parts is not None:
            parts.update(rewards)
        if probe and step == STEPS - 1:
            found = sweep(optimizer, named.items(), PHIS, "start", parts, clipping)
        before = torch.cat([p.detach().flatten() for p in parameters])
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters]) - before, found


def main() -> None:
    torch.manual_seed(0)
    policy, task = load_policy("tiny", device="cpu"), find_task("arithmetic")
    batch = roll_out(policy, task, list(islice(task.problems("train", 0), 4)), 8, max_tokens=64, temperature=1.0,
                     top_p=1.0, generator=torch.Generator().manual_seed(0))
    # The reference of the KL term differs from the initial policy, else its gradient would start at 0.
    with torch.no_grad():
        for p in policy.trainable().values():
            p.mul_(1 + 0.02 * torch.randn_like(p))
    ref = token_logp(policy, batch.rollouts.prompt_ids, batch.rollouts.tokens, batch.rollouts.mask, 1.0, grad=False)
    data = replace(batch.rollouts, ref_logp=ref), batch.rollouts.prompt_ids
    lines = []
    for name, (make, beta, clip) in WORLDS.items():
        one, found = run(make, beta, clip, 1.0, data, probe=True)
        assert found is not None
        cells = []
        for i, phi in enumerate(PHIS):
            other, _ = run(make, beta, clip, phi, data, probe=False)
            told = float((other - one).norm() / one.norm())
            foretold = float(found.change[i])
            cells.append(f"{'–' if math.isnan(foretold) else f'{foretold:.3g}'} / {told:.3g}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else [platform.processor()]
    PAGE.write_text("\n".join([
        "# Does the update see the reward's scale?", "",
        f"`python benchmarks/scale.py`: packaged model, Dr.GRPO, one batch of 32 answers, update {STEPS}, {names[0]}, "
        f"torch {torch.__version__}. Each cell: relative change of the update with all rewards times φ, "
        "‖Δ(φ) − Δ(1)‖/‖Δ(1)‖, as the probe foretells it from the live state / as training again with φ·r shows it. "
        "–: the state does not determine it. 0: blind to the scale. With a KL term the runs part most: its gradient "
        "depends on where each has gone.", "",
        "| optimiser | " + " | ".join(f"φ = {phi:g}" for phi in PHIS) + " |", "|" + "---|" * (len(PHIS) + 1), *lines,
        ""]))


if __name__ == "__main__":
    main()
