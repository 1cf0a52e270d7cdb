"""w = −∂loss/∂log π of TRL's own preference trainers: DPOTrainer, KTOTrainer, CPOTrainer (SimPO) and ORPOTrainer.

A real trainer is built for each setting, and its own loss is computed on given pairs. Only the language model is
replaced: it returns the log-probs of the batch, or logits that have them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from batches import batches
from torch import Tensor

from creditscope import Rollouts, effective_credit, surrogate
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.selftest.trl_live import _folder, _model_folder

PROMPT, WORDS = 1, 6
"""The one token of every prompt, and the words of the tiny model."""


@dataclass(frozen=True)
class PreferenceCase:
    """A row of `DIALECTS`, with `changes`, and the TRL settings that must give the same w."""

    dialect: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10
    """Of max|Δw| / max|w|."""

    @property
    def row(self) -> Method:
        return DIALECTS[self.dialect].replace(**self.changes)

    def __str__(self) -> str:
        return f"{self.dialect}-{self.config}({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"


CASES = [
    PreferenceCase("trl_dpo", "DPOConfig", {"loss_type": ["sigmoid"]}),
    PreferenceCase("trl_dpo", "DPOConfig", {"loss_type": ["sigmoid"], "beta": 0.5}, {"beta": 0.5}),
    PreferenceCase("trl_dpo_hinge", "DPOConfig", {"loss_type": ["hinge"], "beta": 0.4}, {"beta": 0.4}),
    PreferenceCase("trl_dpo_robust", "DPOConfig", {"loss_type": ["robust"], "label_smoothing": 0.2}, {"flip": 0.2}),
    PreferenceCase("trl_dpo_norm", "DPOConfig", {"loss_type": ["sigmoid_norm"], "beta": 2.0}, {"beta": 2.0}),
    PreferenceCase("trl_ipo", "DPOConfig", {"loss_type": ["ipo"]}),
    PreferenceCase("trl_ipo", "DPOConfig", {"loss_type": ["ipo"], "beta": 0.7}, {"beta": 0.7}),
    PreferenceCase("trl_kto", "KTOConfig", {}),
    PreferenceCase("trl_kto", "KTOConfig", {"beta": 0.5}, {"beta": 0.5}),
    PreferenceCase("trl_apo_zero_unpaired", "KTOConfig", {"loss_type": "apo_zero_unpaired"}),
    PreferenceCase("trl_cpo", "CPOConfig", {"loss_type": "sigmoid"}),
    PreferenceCase("trl_cpo", "CPOConfig", {"loss_type": "hinge", "cpo_alpha": 0.3}, {"link": "hinge", "sft": 0.3}),
    PreferenceCase("trl_simpo", "CPOConfig", {"loss_type": "simpo"}),
    PreferenceCase("trl_simpo", "CPOConfig", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
                   {"sft": 0.0, "beta": 2.0, "margin": 1.0}),
    # TRL takes odds in float32, whatever the log-probs are.
    PreferenceCase("trl_orpo", "ORPOConfig", {}, tolerance=1e-5),
    PreferenceCase("trl_orpo", "ORPOConfig", {"beta": 2.5}, {"link_weight": 2.5}, tolerance=1e-5),
]


def pair_batches() -> dict[str, tuple[Rollouts, Tensor]]:
    """Groups of two with live log-probs: chosen first, in the order of the batches, unequal lengths, no ties."""
    out = {}
    for name in ("on_policy", "off_policy", "graded"):
        batch = batches()[name]
        rows, group = [], []
        for g in range(4):
            members = (batch["group"] == g).nonzero().squeeze(1)
            reward = batch["reward"][members]
            if reward.max() > reward.min():
                rows += [int(members[reward.argmax()]), int(members[reward.argmin()])]
                group += [g, g]
        at = torch.tensor(rows)
        out[name] = (Rollouts(tokens=batch["tokens"][at], mask=batch["mask"][at], logp=batch["old"][at],
                              reward=torch.tensor([1.0, 0.0] * (len(rows) // 2), dtype=torch.float64),
                              group=torch.tensor(group), ref_logp=batch["ref"][at]), batch["logp"][at])
    return out


def our_w(case: PreferenceCase, rollouts: Rollouts, logp: Tensor) -> Tensor:
    return effective_credit(lambda live: surrogate(case.row, live, rollouts), logp)


def trl_w(case: PreferenceCase, rollouts: Rollouts, logp: Tensor) -> Tensor:
    """(B, T) w of TRL, in the order of the rollouts."""
    trainer = _trainer(case.config, tuple(sorted((k, tuple(v) if isinstance(v, list) else v)
                                                 for k, v in case.settings.items())))
    leaf = logp.detach().clone().requires_grad_()
    live = leaf.masked_fill(~rollouts.mask, 0.0)  # as TRL's model: what is no token of an answer has log-prob 0
    loss = LOSSES[case.config](trainer, rollouts, live)
    return -torch.autograd.grad(loss, leaf)[0]


def table() -> list[dict[str, Any]]:
    """One dictionary a case, for the page that shows our rows beside TRL's code."""
    lines = []
    for case in CASES:
        both = [(our_w(case, *batch), trl_w(case, *batch)) for batch in pair_batches().values()]
        worst = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in both)
        settings = ", ".join(f"{name}={value!r}" for name, value in case.settings.items())
        lines.append({"row": case.dialect, "changes": dict(case.changes), "settings": f"{case.config}({settings})",
                      "difference": worst})
    return lines


def _answering(logp: Tensor) -> Callable[..., Any]:
    """A model whose tokens have these log-probs."""
    def model(**_: Any) -> Any:
        blank = torch.zeros_like(logp)
        return SimpleNamespace(log_probs=logp, entropy=blank, mean_logits=blank, log_sum_sq_probs=blank,
                               is_top1=blank.bool())

    return model


def _inputs(rollouts: Rollouts) -> dict[str, Tensor]:
    """A prompt of one token before each answer."""
    ids = torch.cat([torch.full((len(rollouts), 1), PROMPT), rollouts.tokens], dim=1)
    chosen = torch.cat([torch.zeros(len(rollouts), 1, dtype=torch.int64), rollouts.mask.long()], dim=1)
    seen = chosen.clone()
    seen[:, 0] = 1
    return {"input_ids": ids, "attention_mask": seen, "completion_mask": chosen}


def _dpo(trainer: Any, rollouts: Rollouts, live: Tensor) -> Tensor:
    order = torch.cat([torch.arange(0, len(rollouts), 2), torch.arange(1, len(rollouts), 2)])
    inputs = {name: value[order] for name, value in _inputs(rollouts).items()}
    assert rollouts.ref_logp is not None
    trainer.ref_model = _answering(rollouts.ref_logp[order])
    loss: Tensor = trainer._compute_loss(_answering(live[order]), inputs, False)
    return loss


def _kto(trainer: Any, rollouts: Rollouts, live: Tensor) -> Tensor:
    inputs = _inputs(rollouts)
    # z of TRL is of answers to other prompts; here they are the batch's own.
    inputs |= {f"KL_{name}": value for name, value in inputs.items()} | {"label": (rollouts.reward > 0)}
    assert rollouts.ref_logp is not None
    trainer.ref_model = _answering(rollouts.ref_logp)
    found = trainer._compute_loss(_answering(live), inputs, False)
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss


def _concatenated(trainer: Any, rollouts: Rollouts, live: Tensor) -> Tensor:
    """CPO and ORPO read logits: the chosen word has its log-prob, the others share the rest."""
    inputs = _inputs(rollouts)
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    batch: dict[str, Tensor] = {}
    for side, first in (("chosen", 0), ("rejected", 1)):
        batch |= {f"{side}_input_ids": inputs["input_ids"][first::2], f"{side}_labels": labels[first::2],
                  f"{side}_attention_mask": inputs["attention_mask"][first::2]}
    ordered = torch.cat([live[0::2], live[1::2]])
    ids = torch.cat([inputs["input_ids"][0::2], inputs["input_ids"][1::2]])

    def model(*_: Any, **__: Any) -> Any:
        rest = (-ordered.clamp(max=-1e-9).expm1() / (WORDS - 1)).log()
        logits = rest[..., None].expand(*ordered.shape, WORDS).scatter(2, ids[:, 1:, None], ordered[..., None])
        return SimpleNamespace(logits=torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1))

    loss: Tensor = trainer.get_batch_loss_metrics(model, batch)[0]
    return loss


LOSSES: dict[str, Callable[[Any, Rollouts, Tensor], Tensor]] = {
    "DPOConfig": _dpo, "KTOConfig": _kto, "CPOConfig": _concatenated, "ORPOConfig": _concatenated}


@cache
def _trainer(config: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home: Any
    if config == "CPOConfig":
        import trl.experimental.cpo as home
    elif config == "ORPOConfig":
        import trl.experimental.orpo as home
    else:
        import trl as home
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = getattr(home, config)(output_dir=_folder().name, use_cpu=True, bf16=False, report_to=[],
                                          per_device_train_batch_size=2, gradient_checkpointing=False, **given)
        rows = [{"prompt": "t0", "chosen": " t1 t2", "rejected": " t3"}] * 2
        if config == "KTOConfig":
            rows = [{"prompt": "t0", "completion": " t1 t2", "label": True},
                    {"prompt": "t1", "completion": " t3", "label": False}]
        trainer = getattr(home, config.replace("Config", "Trainer"))(
            model=AutoModelForCausalLM.from_pretrained(_model_folder()), args=arguments,
            train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(_model_folder()))
    trainer.model.train()
    return trainer
