"""How the verl logs beside this file were made: rewards and lengths are drawn, everything printed is verl's own code.

    python tests/diagnosis/make_verl_logs.py

Needs verl 0.9.1 beside creditscope. Advantages, loss, clip fraction, entropy, data metrics and the console line come
from verl's own functions, on tensors that are padded to the longest answer of the batch, as its v1 trainer has them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from creditscope.diagnosis.remedies import REMEDIES
from creditscope.diagnosis.trainers import VERL

LOGS = Path(__file__).parent / "logs"
PROMPTS, ROLLOUTS, STEPS = 16, 4, 12
Curve = Callable[[int], float]

# name -> chance of reward 1, mean length, limit, entropy per token, std of the log-ratio; each by step.
RUNS: dict[str, tuple[Curve, Curve, int, Curve, float]] = {
    "verl-steady": (lambda k: 0.4 + 0.02 * k, lambda k: 40, 512, lambda k: 0.6, 0.0),
    "verl-collapse": (lambda k: 0.0, lambda k: 100, 64, lambda k: 0.8 * math.exp(-0.5 * k), 0.3),
}


def lines(name: str) -> list[str]:
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage, compute_policy_loss_vanilla
    from verl.trainer.ppo.metric_utils import compute_data_metrics
    from verl.utils.logger.aggregate_logger import concat_dict_to_str
    from verl.workers.config import FSDPActorConfig

    chance, length, limit, entropy, spread = RUNS[name]
    draw = torch.Generator().manual_seed(0)
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=ROLLOUTS, ppo_micro_batch_size_per_gpu=1)
    out = []
    for step in range(STEPS):
        rows = PROMPTS * ROLLOUTS
        lengths = (length(step) + 8 * torch.randn(rows, generator=draw)).round().clamp(1, limit)
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        reward = (torch.rand(rows, generator=draw) < chance(step)).float()
        scores = torch.zeros(mask.shape)
        scores[torch.arange(rows), lengths.long() - 1] = reward
        uid = np.repeat(np.arange(PROMPTS), ROLLOUTS)
        advantages, returns = compute_grpo_outcome_advantage(scores, mask.float(), uid)
        old = -torch.rand(mask.shape, generator=draw)
        new = old + spread * torch.randn(mask.shape, generator=draw)
        loss, found = compute_policy_loss_vanilla(old, new, advantages, mask.float(), "token-mean", actor)
        batch = DataProto.from_dict({
            "token_level_scores": scores, "token_level_rewards": scores, "advantages": advantages, "returns": returns,
            "prompts": torch.zeros(rows, 20), "responses": torch.zeros(mask.shape), "response_mask": mask.float(),
            "prompt_length": torch.full((rows,), 20.0), "response_length": lengths.float()})
        bits = torch.full(mask.shape, entropy(step))
        metrics = {"actor/entropy": agg_loss(bits, mask.float(), "token-mean").item(), "actor/pg_loss": loss.item(),
                   **found, "actor/grad_norm": float(advantages.abs().mean()), "actor/lr": 1e-6,
                   "training/global_step": step + 1, **compute_data_metrics(batch, use_critic=False),
                   "training/num_turns/mean": np.float64(2.0)}
        out.append(concat_dict_to_str(metrics, step=step + 1))
    return out


def defaults() -> dict[str, Any]:
    """What verl's own configuration says of every setting that the doctor reads or names."""
    import verl
    import yaml

    folder = Path(verl.__file__).parent / "trainer" / "config"
    whole = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text())
    found = {}
    for path in sorted({*VERL.defaults, *named()}):
        value = whole
        for key in path.split("."):
            value = value[key]
        found[path] = value
    return found


def named() -> set[str]:
    """The settings in the texts of verl's remedies."""
    paths = {path for remedy in REMEDIES.values() for path in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", remedy.verl)}
    return paths - {"rollout.n"}


if __name__ == "__main__":
    (LOGS / "verl-defaults.json").write_text(json.dumps(defaults(), indent=2) + "\n")
    for name in RUNS:
        (LOGS / name).mkdir(parents=True, exist_ok=True)
        (LOGS / name / "console.log").write_text("".join(
            f"\x1b[36m(TaskRunner pid=4242)\x1b[0m {line}\n" for line in lines(name)))
        print("made", name)
