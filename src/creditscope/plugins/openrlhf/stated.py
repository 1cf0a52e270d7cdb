"""The loss of OpenRLHF's settings, as a row of our table, and the settings of a run for its record."""

from __future__ import annotations

from typing import Any

from creditscope.methods.axes import Method
from creditscope.methods.dialects import openrlhf_row


def stated(args: Any) -> Method:
    """The row with the trainer's own numbers.

    Its bound is what `overshoot/…` is measured against. w is read from the trainer's own loss, and needs no row; a KL
    in the loss and the correction of the sampler's log-probs are therefore in w and not in the row.
    """
    row = openrlhf_row(args.algo.advantage.estimator, args.actor.policy_loss_type, args.actor.loss_agg_mode)
    low, high = args.actor.eps_clip_low_high
    return row.replace(clip_low=float(low), clip_high=float(high), dual_clip=args.actor.dual_clip)


def settings_of(trainer: Any, method: Method, every: int, gram: bool) -> dict[str, Any]:
    """Under the names of `creditscope lab train`; OpenRLHF's own are kept beside them, as its flags spell them."""
    args = trainer.args
    flat = dict(_flat(args))
    known = {"model": flat.get("actor.model_name_or_path"), "group": flat.get("rollout.n_samples_per_prompt"),
             "prompts": flat.get("rollout.batch_size"), "temperature": flat.get("rollout.temperature"),
             "lr": flat.get("actor.adam.lr"), "weight_decay": flat.get("actor.adam.weight_decay"),
             "eps": flat.get("actor.adam.eps"), "clip_norm": flat.get("actor.max_norm"),
             "seed": flat.get("train.seed"), "max_tokens": flat.get("rollout.max_new_tokens")}
    return {"engine": "openrlhf", "trainer": type(trainer).__name__, "task": "the trainer's", "method": method.name,
            "beta": args.algo.kl.init_coef if args.algo.kl.use_loss else 0.0, "inner_steps": args.train.max_epochs,
            "dtype": args.ds.param_dtype, "scope": "light" if gram else "off", "every": every,
            **{name: value for name, value in known.items() if value is not None}, "openrlhf": flat}


def _flat(args: Any, path: str = "") -> list[tuple[str, Any]]:
    """Settings that are plain values, by their dotted names; secrets are left out."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(args).items():
        if hasattr(value, "__dict__"):
            found += _flat(value, f"{path}{name}.")
        elif isinstance(value, bool | int | float | str) and not any(w in name for w in ("key", "token", "secret")):
            found.append((path + name, value))
    return found
