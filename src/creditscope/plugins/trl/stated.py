"""The loss of a TRL trainer's settings, as a row of our table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS, trl_dpo_row, trl_row

NUMBERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "clip": lambda trainer: {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high,
                             "dual_clip": trainer.args.delta},
    "stop_gradient": lambda trainer: {"clip_high": trainer.epsilon_high - 1},  # TRL's is the ceiling itself
    "gate": lambda trainer: {"gate_pos": trainer.args.sapo_temperature_pos,
                             "gate_neg": trainer.args.sapo_temperature_neg},
    "gamma": lambda trainer: {"gamma_pos": (trainer.args.vespo_k_pos, trainer.args.vespo_lambda_pos),
                              "gamma_neg": (trainer.args.vespo_k_neg, trainer.args.vespo_lambda_neg)},
}
"""Bound -> the trainer's own numbers for it."""


def stated(trainer: Any) -> Method:
    """The row of the trainer's settings; settings that no axis of the table has are refused by name.

    `scope/agreement` detects a subclass with another loss.
    """
    kind = getattr(trainer, "loss_type", None)
    if kind is None:  # RLOO: its KL is in its rewards, and so in the advantages that we read
        return DIALECTS["trl_rloo"].replace(clip_low=trainer.epsilon_low, clip_high=trainer.epsilon_high)
    args = trainer.args
    row = trl_row(kind, args.importance_sampling_level, str(args.scale_rewards))
    weighs = row.bound == "gamma"  # by the sequence's ratio, which these settings would change
    vllm = bool(args.use_vllm and args.vllm_importance_sampling_correction)
    for broken, name, repair in (
            (args.top_entropy_quantile < 1, "top_entropy_quantile", "set it to 1"),
            (vllm and weighs, "vllm_importance_sampling_correction", "set it to False, or another loss_type"),
            (args.use_vllm and args.off_policy_mask_threshold is not None, "off_policy_mask_threshold",
             "set it to None"),
            (bool(args.beta) and weighs and args.use_bias_correction_kl, "use_bias_correction_kl",
             "set it to False")):
        if broken:
            raise CreditscopeError(f"{name}={getattr(args, name)!r} with loss_type={kind!r}: no row of the table has "
                                   f"such a loss; {repair} to read this trainer")
    if row.bound == "clip" and args.delta is not None and args.delta <= 1 + trainer.epsilon_high:
        raise CreditscopeError(f"delta={args.delta} is not above 1 + epsilon_high = {1 + trainer.epsilon_high:g}: it "
                               f"then binds before the clip does, which no row of the table has; raise delta, or set "
                               f"it to None, to read this trainer")
    changes = NUMBERS[row.bound](trainer)
    if row.aggregate == "constant":
        changes["max_tokens"] = trainer.max_completion_length
    if args.off_policy_mask_threshold is not None:
        changes |= {"trust": "off_policy_sequence", "trust_high": args.off_policy_mask_threshold}
    if args.beta:
        changes |= {"beta": args.beta, "kl": "k3", "kl_weight": "ratio" if args.use_bias_correction_kl else "none"}
    return row.replace(**changes)


def stated_pairs(trainer: Any) -> tuple[str, Method | None]:
    """The name of a DPOTrainer's loss, and its row; None for a loss that no row has: w does not need one."""
    name = "+".join(f"trl_dpo_{kind}" for kind in trainer.loss_types)
    other = (trainer.f_divergence_type != "reverse_kl", trainer.ld_alpha is not None, trainer.use_weighting)
    if any(other):
        return name, None
    row = trl_dpo_row(trainer.loss_types, trainer.loss_weights, trainer.args.beta, trainer.args.label_smoothing)
    return name if row is None else row.name, row
