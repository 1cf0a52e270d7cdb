"""The loss of SkyRL's settings, as a row of our table, and the settings of a run for its record."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from creditscope.methods.axes import Method
from creditscope.methods.dialects import skyrl_row

NUMBERS = {
    "clip": lambda a: {"clip_low": a.eps_clip_low, "clip_high": a.eps_clip_high,
                       "dual_clip": a.clip_ratio_c if a.policy_loss_type == "dual_clip" else None},
    "gate": lambda a: {"gate_pos": a.sapo.tau_pos, "gate_neg": a.sapo.tau_neg},
    "stop_gradient": lambda a: {"clip_low": a.cispo.cispo_eps_clip_low, "clip_high": a.cispo.cispo_eps_clip_high},
}
"""Bound -> the trainer's own numbers for it."""


def stated(algorithm: Any) -> Method:
    """The row with the trainer's own numbers.

    Its bound is what `overshoot/…` is measured against. w is read from the trainer's own loss, and needs no row; a KL
    in the loss and the correction of the sampler's log-probs are therefore in w and not in the row.
    """
    row = skyrl_row(str(algorithm.advantage_estimator), str(algorithm.policy_loss_type),
                    str(algorithm.loss_reduction))
    changes = dict(NUMBERS[row.bound](algorithm))
    if row.aggregate == "constant":
        changes["max_tokens"] = algorithm.max_seq_len
    if not algorithm.grpo_norm_by_std and row.scale == "group_std":
        changes |= {"scale": "none", "std_eps": 0.0}
    return row.replace(**changes)


def settings_of(trainer: Any, method: Method, every: int, gram: bool) -> dict[str, Any]:
    """Under the names of `creditscope lab train`; SkyRL's algorithm section is kept beside them."""
    cfg, algorithm = trainer.cfg.trainer, trainer.cfg.trainer.algorithm
    known = {"group": trainer.cfg.generator.n_samples_per_prompt, "prompts": cfg.train_batch_size,
             "temperature": algorithm.temperature, "lr": cfg.policy.optimizer_config.lr, "seed": cfg.seed,
             "clip_norm": cfg.policy.optimizer_config.max_grad_norm,
             "minibatches": max(1, cfg.train_batch_size // max(1, cfg.policy_mini_batch_size)),
             "model": cfg.policy.model.path}
    section = asdict(algorithm) if is_dataclass(algorithm) and not isinstance(algorithm, type) else {}
    return {"engine": "skyrl", "trainer": type(trainer).__name__, "task": "the trainer's", "method": method.name,
            "beta": algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
            "inner_steps": cfg.update_epochs_per_batch, "scope": "light" if gram else "off", "every": every,
            **{name: value for name, value in known.items() if value is not None},
            "skyrl": {name: value for name, value in section.items() if isinstance(value, bool | int | float | str)}}
