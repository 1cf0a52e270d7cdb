"""TRL 1.16, `DPOTrainer`, which learns from pairs of given answers: names and defaults are its own."""

from __future__ import annotations

from creditscope.diagnosis.log import LogSettings as Settings
from creditscope.diagnosis.trainers.trainer import FACTS, Trainer
from creditscope.diagnosis.trainers.trl import TRL
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.methods.dialects import trl_dpo_row
from creditscope.runs import schema

_SHARED = ("learning_rate", "adam_epsilon", "weight_decay", "grad_clip", "optimizer", "steps", "dtype")


def _losses(s: Settings) -> list[str]:
    """loss_type, a name or a list of them."""
    given = s.get("loss_type")
    return [f"{name}"[:80] for name in given[:20]] if isinstance(given, list | tuple) else [s.word("loss_type")]


def dpo_method(s: Settings) -> Method | None:
    """loss_type, loss_weights, beta and label_smoothing as one row; None where no row has such a loss."""
    if s.word("f_divergence_type") != "reverse_kl" or s.get("ld_alpha") is not None or s.switch("use_weighting"):
        return None
    losses, weights = _losses(s), s.get("loss_weights")
    try:
        return trl_dpo_row(losses, [float(x) for x in weights] if weights else None, s.number("beta"),
                           s.number("label_smoothing"))
    except (CreditscopeError, TypeError, ValueError):  # of a version with other settings
        return None


TRL_DPO = Trainer(
    name="TRL's DPOTrainer", version="1.16", speech="trl", pairs=True, gain="margin",
    marks=frozenset({"rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"}),
    metrics={
        "loss": "loss", schema.GRAD_NORM: "grad_norm", "lr": "learning_rate", "entropy": "entropy",
        schema.REWARD_MEAN: "rewards/margins", schema.PAIRS_MARGIN: "rewards/margins",
        schema.PAIRS_ACCURACY: "rewards/accuracies", schema.PAIRS_CHOSEN_REWARD: "rewards/chosen",
        schema.PAIRS_REJECTED_REWARD: "rewards/rejected", schema.PAIRS_CHOSEN_LOGP: "logps/chosen",
        schema.PAIRS_REJECTED_LOGP: "logps/rejected",
    },
    aliases={name: TRL.aliases[name] for name in ("lr", "epoch", "tokens", "eval loss")},
    defaults={"loss_type": ["sigmoid"], "loss_weights": None, "beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None,
              "f_divergence_type": "reverse_kl", "use_weighting": False},
    paths={name: TRL.paths[name] for name in _SHARED},
    facts={**{name: lambda s: None for name in FACTS},
           "method": dpo_method, "loss": lambda s: f"loss_type={'+'.join(_losses(s))}", "updates": lambda s: 1,
           "beta": lambda s: 0.0,  # of a KL term: β here is the factor on the scores
           "group": lambda s: 2.0, "masked": lambda s: False, "dropped": lambda s: False,
           "dead_counted": lambda s: False, "per_token": lambda s: True, "sampler": lambda s: False},
    remedies={
        "dead groups": "loss_type='sigmoid' where a hinge has every margin, or pairs whose answers differ",
        "learning rate": "a larger learning_rate: ×10 (the default of DPOConfig is 1e-6)",
        "reward trend": "a smaller learning_rate, or a larger beta; if only the pairs got harder, nothing",
        "displacement": "loss_type=['sigmoid', 'sft'] with loss_weights=[1.0, 1.0], a larger beta, or a smaller "
                        "learning_rate; leave out pairs whose two answers are nearly the same"})
