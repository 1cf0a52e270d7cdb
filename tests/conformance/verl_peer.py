"""What verl's own code gives each token, for every `verl_*` row of `creditscope.methods.dialects`.

`CASES` says which settings of verl a row stands for; it can be read anywhere. `verl_credit` needs verl, which cannot
live in our test environment (it pulls tensordict and transformers down), so the arrays are stored and read back by
`test_verl.py`. In an environment that has verl:

    python tests/conformance/verl_peer.py tests/conformance/verl_0.9.1.npz
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import Batch, batches
from torch import Tensor

# How far verl's formula, not its rounding, may stand from ours; relative to the largest |value| of the batch.
EXACT = 1e-12
WHITENED = 1e-9  # masked_mean divides by n + 1e-8, and these batches have n > 70 tokens
PER_SEQUENCE = 1.1e-8  # a sequence's sum is divided by L + 1e-8, and L = 1 occurs
GEOMETRIC = 4e-8  # geo_mean divides so twice, in its advantage and in its exponent: (2 + |log s|)·1e-8


@dataclass(frozen=True)
class Case:
    """One of our rows, `changes` made to it with `.but(...)`, and the settings of verl that it claims to equal."""

    row: str
    estimator: str
    loss: str = "vanilla"
    agg: str = "token-mean"
    label: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    estimator_args: Mapping[str, Any] = field(default_factory=dict)
    actor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ActorConfig; what is not named keeps verl's default (clip 0.2 on both sides, dual clip at 3)."""
    dro_beta: float | None = None
    kl_loss: tuple[str, float] | None = None
    """(kl_loss_type, kl_loss_coef) with use_kl_loss=True."""
    kl_reward: float = 0.0
    """kl_coef with use_kl_in_reward=True and kl_penalty='kl'."""
    global_rows: bool = False
    """True passes global_batch_size = all rows, as verl's trainers do; else agg_loss counts rows that are not empty."""
    tolerance: float = EXACT

    @property
    def name(self) -> str:
        return f"{self.row}{'+' if self.label else ''}{self.label}"

    @property
    def settings(self) -> str:
        """verl's settings in verl's words, for people to read."""
        told: dict[str, Any] = {"adv_estimator": self.estimator, **self.estimator_args, "loss_mode": self.loss}
        if self.loss not in _FIXED_AGGREGATE:
            told["loss_agg_mode"] = self.agg
        told |= self.actor
        if self.dro_beta is not None:
            told["dro_beta"] = self.dro_beta
        if self.kl_loss:
            told |= {"kl_loss_type": self.kl_loss[0], "kl_loss_coef": self.kl_loss[1]}
        if self.kl_reward:
            told |= {"use_kl_in_reward": True, "kl_coef": self.kl_reward}
        if self.global_rows:
            told["global_batch_size"] = "B"
        return ", ".join(f"{key}={value}" for key, value in told.items())


_FIXED_AGGREGATE = ("sapo", "geo_mean")  # losses that do not listen to loss_agg_mode
_NO_STD = {"norm_adv_by_std_in_grpo": False}
_SEQ = {"agg": "seq-mean-token-mean", "tolerance": PER_SEQUENCE}
_NORM = {"agg": "seq-mean-token-sum-norm"}


def _kl(kind: str, ours: str | None = None) -> dict[str, Any]:
    return {"label": f"kl_{kind}", "kl_loss": (kind, 0.1), "changes": {"kl": ours or kind, "beta": 0.1}}


CASES: tuple[Case, ...] = (
    # GRPO in every loss_agg_mode and with every KL loss.
    Case("verl_grpo", "grpo"),
    Case("verl_grpo", "grpo", agg="token-sum", label="token_sum", changes={"aggregate": "token_sum"}),
    Case("verl_grpo", "grpo", agg="seq-mean-token-sum", label="seq_sum", changes={"aggregate": "sequence_sum"}),
    Case("verl_grpo", "grpo", label="c_1.5", actor={"clip_ratio_c": 1.5}, changes={"dual_clip": 1.5}),
    Case("verl_grpo", "grpo", **_kl("k1")),
    Case("verl_grpo", "grpo", **_kl("k2")),
    Case("verl_grpo", "grpo", **_kl("k3")),
    Case("verl_grpo", "grpo", **_kl("k3+", ours="k2")),  # '+': the value is k3's, the gradient k2's
    Case("verl_grpo_seq", "grpo", **_SEQ),
    Case("verl_grpo_seq", "grpo", **(_SEQ | _kl("k3"))),
    Case("verl_grpo_seq", "grpo", **_SEQ, label="trainer", global_rows=True, changes={"denominator": "all"}),
    Case("verl_dr_grpo", "grpo", **_NORM, estimator_args=_NO_STD),
    Case("verl_dr_grpo", "grpo", **_NORM, estimator_args=_NO_STD, label="trainer", global_rows=True,
         actor={"loss_scale_factor": 20}, changes={"denominator": "all", "max_tokens": 20}),
    Case("verl_dapo", "grpo", actor={"clip_ratio_high": 0.28}),
    # Other advantages in the same clipped loss. A group of one: 'rloo' keeps its reward, 'rloo_vectorized' gives it 0.
    Case("verl_rloo", "rloo"),
    Case("verl_rloo", "rloo_vectorized", label="vectorized", changes={"lone": "zero"}),
    Case("verl_rloo", "rloo", label="kl_reward", kl_reward=0.1, changes={"kl": "k1", "kl_in": "reward", "beta": 0.1}),
    Case("verl_opo", "opo"),
    Case("verl_reinforce_pp", "reinforce_plus_plus", tolerance=WHITENED),
    Case("verl_reinforce_pp", "reinforce_plus_plus", label="kl_reward", kl_reward=0.1, changes={"beta": 0.1},
         tolerance=WHITENED),
    Case("verl_reinforce_pp_baseline", "reinforce_plus_plus_baseline", tolerance=WHITENED),
    Case("verl_reinforce_pp_baseline", "reinforce_plus_plus_baseline", **_kl("k2"), tolerance=WHITENED),
    Case("verl_ppo", "gae", estimator_args={"gamma": 1.0, "lam": 0.95}),
    # Other losses on GRPO's advantage.
    Case("verl_gspo", "grpo", "gspo", **_SEQ, actor={"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    Case("verl_gmpo", "grpo", "geo_mean", actor={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
         tolerance=GEOMETRIC),
    Case("verl_sapo", "grpo", "sapo", tolerance=PER_SEQUENCE),
    Case("verl_sapo", "grpo", "sapo", label="taus", actor={"tau_pos": 2.0, "tau_neg": 0.5},
         changes={"gate_pos": 2.0, "gate_neg": 0.5}, tolerance=PER_SEQUENCE),
    Case("verl_cispo", "grpo", "cispo"),
    Case("verl_gpg", "gpg", "gpg"),
    # clip_ratio_c caps DPPO's ratio. The loss says get("clip_ratio_c", 20.0), but ActorConfig always has it, at 3.
    Case("verl_dppo", "grpo", "dppo_tv", estimator_args=_NO_STD,
         actor={"clip_ratio_low": 0.15, "clip_ratio_high": 0.15}),
    Case("verl_dppo", "grpo", "dppo_tv", estimator_args=_NO_STD, label="c_20", changes={"clip_high": 19.0},
         actor={"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0}),
    Case("verl_dppo_kl", "grpo", "dppo_kl", estimator_args=_NO_STD,
         actor={"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}),
    Case("verl_dro", "grpo", "dro", dro_beta=0.1),
)


def verl_credit(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """(advantages, w), both (B, T): verl's registered estimator, and w = −∂loss/∂log π of its registered loss.

    torch's default is set to float64 meanwhile: verl divides integer counts, which would round to float32.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        advantages = _advantages(case, batch)
        leaf = batch["logp"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(_loss(case, batch, advantages, leaf), leaf)
    finally:
        torch.set_default_dtype(usual)
    return advantages, -slope


def _advantages(case: Case, batch: Batch) -> Tensor:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask = batch["mask"].long()  # as the trainers hand it to the estimators
    given: dict[str, Any] = {"token_level_rewards": _token_rewards(case, batch, mask), "response_mask": mask}
    if case.estimator == "gae":
        given |= {"values": batch["value"]}
    else:
        given |= {"index": batch["group"].numpy(), "config": AlgoConfig(gamma=1.0)}
    advantages, _ = get_adv_estimator_fn(case.estimator)(**given, **case.estimator_args)
    return advantages


def _token_rewards(case: Case, batch: Batch, mask: Tensor) -> Tensor:
    """The reward on the last token, as the reward managers place it; less β·log(π_old/π_ref) of each token."""
    rows = torch.arange(len(mask))
    last = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1) - 1  # −1 for an empty completion: the last column
    scores = torch.zeros_like(batch["logp"])
    scores[rows, last] = batch["reward"]
    if not case.kl_reward:
        return scores
    from verl.trainer.ppo.core_algos import kl_penalty

    # The arithmetic of ray_trainer.apply_kl_penalty, whose module cannot be imported without an inference server.
    return scores - case.kl_reward * kl_penalty(batch["old"], batch["ref"], kl_penalty="kl") * mask


def _loss(case: Case, batch: Batch, advantages: Tensor, logp: Tensor) -> Tensor:
    """verl.workers.utils.losses.ppo_loss without its unpadding and its entropy bonus."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
    from verl.workers.config import ActorConfig, PolicyLossConfig

    shares: dict[str, Any] = {"loss_scale_factor": case.actor.get("loss_scale_factor")}
    if case.global_rows:
        shares |= {"global_batch_size": len(logp)}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=case.agg,
                         policy_loss=PolicyLossConfig(loss_mode=case.loss, dro_beta=case.dro_beta),
                         global_batch_info=shares, **case.actor)
    loss, _ = get_policy_loss_fn(case.loss)(
        old_log_prob=batch["old"], log_prob=logp, advantages=advantages, response_mask=batch["mask"],
        loss_agg_mode=case.agg, config=config, rollout_is_weights=None)
    if case.kl_loss:
        kind, weight = case.kl_loss
        each = kl_penalty(logprob=logp, ref_logprob=batch["ref"], kl_penalty=kind)
        loss = loss + weight * agg_loss(each, batch["mask"], case.agg, **shares)
    return loss


def optimal_token(batch: Batch) -> Tensor:
    """(B, T) verl's optimal token baseline, with the defaults that its trainers leave in place."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask = batch["mask"].long()
    advantages, _ = get_adv_estimator_fn("optimal_token_baseline")(
        token_level_rewards=_token_rewards(CASES[0], batch, mask), response_mask=mask, index=batch["group"].numpy(),
        old_log_probs=batch["old"], sum_pi_squared=batch["collision"])
    return advantages


def goldens() -> dict[str, np.ndarray]:
    """For each batch, `w/BATCH` and `advantages/BATCH`, (cases, B, T) float64; `cases` names the rows, in order.

    `optimal_token/BATCH`, (B, T), is verl's credit of that name.
    """
    import verl

    stored: dict[str, np.ndarray] = {"verl": np.array(verl.__version__), "torch": np.array(torch.__version__),
                                     "cases": np.array([case.name for case in CASES])}
    for name, batch in batches().items():
        pairs = [verl_credit(case, batch) for case in CASES]
        assert all(value.dtype == torch.float64 for pair in pairs for value in pair)
        stored[f"advantages/{name}"] = np.stack([advantages.numpy() for advantages, _ in pairs])
        stored[f"w/{name}"] = np.stack([w.numpy() for _, w in pairs])
        stored[f"optimal_token/{name}"] = optimal_token(batch).numpy()
    return stored


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/conformance/verl_peer.py OUT.npz (in an environment with verl)")
    np.savez_compressed(sys.argv[1], **goldens())
    print(f"wrote {len(CASES)} cases to {sys.argv[1]}, {Path(sys.argv[1]).stat().st_size / 1000:.0f} kB")
