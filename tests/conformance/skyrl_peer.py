"""What SkyRL's own code gives each token, for every `skyrl_*` row of `creditscope.methods.dialects`.

Advantages are those of its registry, scaled by its `apply_loss_reduction_to_advantages_minibatch`, and the loss that of
its registry; `kl_loss` is put together as its worker does. Its `safe_exp_delta` computes ratios in float32.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from batches import Batch
from stored_peer import EXACT, SINGLE, PeerCase, Stored, goldens, write
from torch import Tensor

BATCHES = ("on_policy", "off_policy", "graded", "near", "ragged")
_RATIO = {"tolerance": SINGLE}


def _kl(kind: str) -> dict[str, Any]:
    return {"label": f"kl_{kind}", "settings": {"advantage_estimator": "grpo", "loss_reduction": "sequence_mean",
                                                "kl_estimator_type": kind, "kl_loss_coef": 0.1},
            "changes": {"aggregate": "sequence_mean", "kl": kind, "beta": 0.1}, "tolerance": SINGLE}


_GRPO = {"advantage_estimator": "grpo"}
CASES: tuple[PeerCase, ...] = (
    PeerCase("skyrl_grpo", _GRPO, **_RATIO),
    PeerCase("skyrl_grpo", {**_GRPO, "loss_reduction": "sequence_mean"}, label="seq",
             changes={"aggregate": "sequence_mean"}, **_RATIO),
    PeerCase("skyrl_grpo", {**_GRPO, "loss_reduction": "prompt_mean"}, label="prompt_mean",
             changes={"aggregate": "group_token_mean"}, **_RATIO),
    PeerCase("skyrl_grpo", **_kl("k1")),
    PeerCase("skyrl_grpo", **_kl("k2")),
    PeerCase("skyrl_grpo", **_kl("k3")),
    PeerCase("skyrl_dr_grpo", {**_GRPO, "grpo_norm_by_std": False, "loss_reduction": "seq_mean_token_sum_norm",
                               "max_seq_len": 20}, changes={"max_tokens": 20}, **_RATIO),
    PeerCase("skyrl_dapo", {**_GRPO, "policy_loss_type": "dual_clip", "eps_clip_high": 0.28}, **_RATIO),
    PeerCase("skyrl_rloo", {"advantage_estimator": "rloo"}, **_RATIO),
    PeerCase("skyrl_reinforce_pp", {"advantage_estimator": "reinforce++"}, apart=("ragged",), **_RATIO),
    PeerCase("skyrl_ppo", {"advantage_estimator": "gae"}, **_RATIO),
    # Its group of one is not divided; ours is, by 1 + 1e-6.
    PeerCase("skyrl_maxrl", {"advantage_estimator": "maxrl"}, advantages=SINGLE, **_RATIO),
    PeerCase("skyrl_gspo", {**_GRPO, "policy_loss_type": "gspo", "loss_reduction": "sequence_mean",
                            "eps_clip_low": 3e-4, "eps_clip_high": 4e-4}),
    PeerCase("skyrl_sapo", {**_GRPO, "policy_loss_type": "sapo", "loss_reduction": "sequence_mean"}, tolerance=EXACT),
    PeerCase("skyrl_cispo", {**_GRPO, "policy_loss_type": "cispo"}, **_RATIO),
)
STORED = Stored(Path(__file__).with_name("skyrl_0.3.0.npz"), CASES, BATCHES)


def ready() -> None:
    """SkyRL's models of its API need typing_extensions.TypedDict before Python 3.12, and it takes typing's."""
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict


def credit(case: PeerCase, batch: Batch) -> tuple[Tensor, Tensor]:
    """(advantages, w) by SkyRL's own code."""
    ready()
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
    from skyrl.train.config import AlgorithmConfig

    settings = dict(case.settings)
    kl, beta = settings.pop("kl_estimator_type", None), settings.get("kl_loss_coef", 0.0)
    config = AlgorithmConfig(**settings, temperature=1.0)
    mask = batch["mask"].double()
    last = (batch["mask"] * torch.arange(1, mask.shape[1] + 1)).amax(1).sub(1).clamp(min=0)
    rewards = torch.zeros_like(mask).scatter(1, last[:, None], batch["reward"][:, None])
    advantages, _ = ppo_utils.compute_advantages_and_returns(
        rewards, mask, batch["group"].numpy(), config.advantage_estimator, config, values=batch["value"],
        grpo_norm_by_std=config.grpo_norm_by_std, gamma=config.gamma, lambd=config.lambd)
    order = batch["group"]
    starts = [0, *((order[1:] != order[:-1]).nonzero().flatten() + 1).tolist(), len(order)]
    scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        advantages, mask, config.loss_reduction, len(mask), config.max_seq_len or 0,
        prompt_boundaries=list(pairwise(starts)))
    logp = batch["logp"].clone().requires_grad_()
    loss, _ = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type)(
        logp, batch["old"], scaled, config=config, loss_mask=mask)
    if kl is not None:
        each = ppo_utils.compute_approx_kl(logp, batch["ref"], loss_mask=mask, kl_estimator_type=kl)
        loss = loss + beta * masked_mean(each, mask, dim=-1).mean()
    (slope,) = torch.autograd.grad(loss, logp)
    return advantages, -slope


if __name__ == "__main__":
    write(goldens("skyrl", version("skyrl"), CASES, credit, BATCHES))
