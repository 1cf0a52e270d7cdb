"""The loss that a TRL trainer's settings state, as a row of our table."""

from __future__ import annotations

from typing import Any

from creditscope.errors import CreditscopeError, unknown
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS

ROWS = {"grpo": "trl_grpo", "dr_grpo": "trl_dr_grpo", "dapo": "trl_dapo", "bnpo": "trl_bnpo", "cispo": "trl_cispo",
        "sapo": "trl_sapo", "luspo": "trl_luspo", "vespo": "trl_vespo"}
"""loss_type -> row of `dialects`."""
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
SCALES = {"group": "group_std", "batch": "batch_std", "none": "none"}


def stated(trainer: Any) -> Method:
    """The row behind the trainer's settings. What no axis of the table can say is refused by its name.

    A subclass with a loss of its own is not seen here: the reading's `scope/agreement` tells.
    """
    kind = getattr(trainer, "loss_type", None)
    if kind is None:
        return _rloo(trainer)
    if kind not in ROWS:
        raise unknown("loss_type", kind, ROWS)
    args = trainer.args
    vllm = bool(args.use_vllm and args.vllm_importance_sampling_correction)
    for broken, name, repair in (
            (args.top_entropy_quantile < 1, "top_entropy_quantile", "set it to 1"),
            (vllm and kind == "vespo", "vllm_importance_sampling_correction", "set it to False, or another loss_type"),
            (args.use_vllm and args.off_policy_mask_threshold is not None, "off_policy_mask_threshold",
             "set it to None"),
            (bool(args.beta) and kind == "vespo" and args.use_bias_correction_kl, "use_bias_correction_kl",
             "set it to False")):
        if broken:
            raise CreditscopeError(f"{name}={getattr(args, name)!r} with loss_type={kind!r}: no row of the table says "
                                   f"what it makes of the loss; {repair} to read this trainer")
    if kind in CLIPPED and args.delta is not None and args.delta <= 1 + trainer.epsilon_high:
        raise CreditscopeError(f"delta={args.delta} is not above 1 + epsilon_high = {1 + trainer.epsilon_high:g}: it "
                               f"then binds before the clip does, which no row of the table says; raise delta, or set "
                               f"it to None, to read this trainer")
    row = DIALECTS[ROWS[kind]]
    changes: dict[str, Any] = {"scale": SCALES[args.scale_rewards]}
    if args.importance_sampling_level == "sequence" and kind != "vespo":
        changes["ratio"] = "sequence_mean"
    elif kind == "luspo":
        changes["ratio"] = "token"
    if kind in CLIPPED:
        changes |= {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high, "dual_clip": args.delta}
    elif kind == "cispo":
        changes["clip_high"] = trainer.epsilon_high - 1  # TRL's is the ceiling itself
    elif kind == "sapo":
        changes |= {"gate_pos": args.sapo_temperature_pos, "gate_neg": args.sapo_temperature_neg}
    else:
        changes |= {"gamma_pos": (args.vespo_k_pos, args.vespo_lambda_pos),
                    "gamma_neg": (args.vespo_k_neg, args.vespo_lambda_neg)}
    if kind == "dr_grpo":
        changes["max_tokens"] = trainer.max_completion_length
    if args.off_policy_mask_threshold is not None:
        changes |= {"trust": "off_policy_sequence", "trust_high": args.off_policy_mask_threshold}
    if args.beta:
        changes |= {"beta": args.beta, "kl": "k3", "kl_weight": "ratio" if args.use_bias_correction_kl else "none"}
    return _changed(row, changes)


def _rloo(trainer: Any) -> Method:
    """RLOO's KL is in its rewards, and so in the advantages that we read."""
    return _changed(DIALECTS["trl_rloo"], {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high})


def _changed(row: Method, changes: dict[str, Any]) -> Method:
    return row.but(name=row.name, title=row.title, parent=row.parent, note=row.note, **changes)
