"""What OpenRLHF's own code gives each token, for every `openrlhf_*` row of `creditscope.methods.dialects`.

Advantages are those of its RemoteExperienceMaker, the loss that of its PolicyLoss, with its own counts of tokens and
rows; `kl_loss` is put together as its `training_step` does. Its modules import flash_attn and vllm, whose kernels none
of this calls: where they are not installed, `absent` stands for them.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any

import torch
from batches import Batch
from stored_peer import EXACT, PER_SEQUENCE, SINGLE, PeerCase, Stored, absent, goldens, write
from torch import Tensor

BATCHES = ("on_policy", "off_policy", "graded", "near")  # OpenRLHF's groups are of one size
_SEQ = {"loss_agg_mode": "seq-mean-token-mean"}


def _kl(kind: str) -> dict[str, Any]:
    return {"label": f"kl_{kind}", "settings": {"estimator": "group_norm", "kl.estimator": kind, "kl.init_coef": 0.1},
            "changes": {"kl": kind, "beta": 0.1}, "tolerance": SINGLE}


CASES: tuple[PeerCase, ...] = (
    PeerCase("openrlhf_grpo", {"estimator": "group_norm"}),
    PeerCase("openrlhf_grpo", {"estimator": "group_norm", **_SEQ}, label="seq", changes={"aggregate": "sequence_mean"},
             tolerance=PER_SEQUENCE),
    PeerCase("openrlhf_grpo", {"estimator": "group_norm", "dual_clip": 3.0}, label="dual_clip",
             changes={"dual_clip": 3.0}),
    PeerCase("openrlhf_grpo", {"estimator": "group_norm", "eps_clip_low_high": (0.2, 0.28)}, label="clip_high",
             changes={"clip_high": 0.28}),
    PeerCase("openrlhf_grpo", **_kl("k1")),
    PeerCase("openrlhf_grpo", **_kl("k2")),
    PeerCase("openrlhf_grpo", **_kl("k3")),
    PeerCase("openrlhf_dr_grpo", {"estimator": "dr_grpo"}),
    PeerCase("openrlhf_rloo", {"estimator": "rloo"}),
    PeerCase("openrlhf_reinforce_pp", {"estimator": "reinforce"}, tolerance=SINGLE, advantages=SINGLE),
    PeerCase("openrlhf_reinforce_pp_baseline", {"estimator": "reinforce_baseline"}, tolerance=SINGLE,
             advantages=SINGLE),
    PeerCase("openrlhf_ppo", {"estimator": "gae"}, advantages=EXACT),
    PeerCase("openrlhf_gspo", {"estimator": "group_norm", "policy_loss_type": "gspo",
                               "eps_clip_low_high": (3e-4, 4e-4)}, tolerance=PER_SEQUENCE),
)
STORED = Stored(Path(__file__).with_name("openrlhf_0.11.2.npz"), CASES, BATCHES)


def credit(case: PeerCase, batch: Batch) -> tuple[Tensor, Tensor]:
    """(advantages, w) by OpenRLHF's own code."""
    absent()
    from openrlhf.models.loss import PolicyLoss, aggregate_loss
    from openrlhf.models.utils import compute_approx_kl
    from openrlhf.utils.loss_utils import get_loss_batch_info

    told, mask = case.settings, batch["mask"]
    advantages = _advantages(told["estimator"], batch)
    low, high = told.get("eps_clip_low_high", (0.2, 0.2))
    loss_of = PolicyLoss(clip_eps_low=low, clip_eps_high=high, dual_clip=told.get("dual_clip"),
                         token_level_loss=told.get("loss_agg_mode", "token-mean") == "token-mean",
                         policy_loss_type=told.get("policy_loss_type", "ppo"))
    logp = batch["logp"].clone().requires_grad_()
    # Its counts are float32: as exact here, being whole numbers.
    counts = get_loss_batch_info(Names(), mask)
    loss = loss_of(logp, batch["old"], advantages, action_mask=mask, **counts)[0]
    if "kl.init_coef" in told:
        kl = compute_approx_kl(logp, batch["ref"], log_probs_old=batch["old"], kl_estimator=told["kl.estimator"])
        loss = loss + told["kl.init_coef"] * aggregate_loss(kl, mask, **counts)
    (slope,) = torch.autograd.grad(loss, logp)
    return advantages, -slope


def _advantages(estimator: str, batch: Batch) -> Tensor:
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    maker = object.__new__(RemoteExperienceMaker)
    maker.strategy = Names(args=Names(
        rollout=Names(n_samples_per_prompt=4, max_new_tokens=9), reward=Names(
            clip_range=None, overlong_buffer_len=None, overlong_penalty_factor=0.0, stop_properly_penalty_coef=None),
        algo=Names(advantage=Names(estimator=estimator, gamma=1.0, lambd=0.95, no_std_norm=False))))
    maker.advantage_estimator, maker.kl_ctl = estimator, Names(value=0.0)
    rows = len(batch["reward"])
    made = Experience(rewards=batch["reward"].clone(), action_mask=batch["mask"], index=list(range(rows)),
                      values=batch["value"], kl=torch.zeros_like(batch["logp"]), info={},
                      response_length=batch["mask"].sum(1), truncated=torch.zeros(rows))
    found: Tensor = maker.compute_advantages_and_returns([made])[0].advantages
    return found


if __name__ == "__main__":
    write(goldens("openrlhf", version("openrlhf"), CASES, credit, BATCHES))
