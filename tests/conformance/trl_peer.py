"""The settings of TRL that our TRL rows claim to equal, and the batches on which both give w.

TRL's side is computed by `creditscope.selftest.trl_live`, out of its own trainers: the self-test runs it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from batches import Batch, batches
from ours import as_rollouts
from torch import Tensor

from creditscope import effective_credit, surrogate
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.selftest.trl_live import EOS, MAX_TOKENS, advantage_and_credit, trainer_of

EVEN = ("on_policy", "off_policy", "graded", "near", "edges", "edges_product")  # TRL's groups have one size
TOLERANCE = 1e-10  # of max|Δw| / max|w|, everything in float64


@dataclass(frozen=True)
class Case:
    """A row of `DIALECTS`, possibly with `changes`, and the TRL settings that must give the same credit."""

    dialect: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[str, ...] = EVEN

    @property
    def text(self) -> str:
        """The settings as they are written in Python."""
        return f"{self.config}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    @property
    def config(self) -> str:
        return "RLOOConfig" if self.dialect == "trl_rloo" else "GRPOConfig"

    @property
    def row(self) -> Method:
        row = DIALECTS[self.dialect]
        return row.but(name=f"{row.name}_changed", **self.changes) if self.changes else row

    def __str__(self) -> str:
        return f"{self.dialect}-{self.text}"


def _cases() -> Iterator[Case]:
    """Every TRL row as it stands and with KL; then, one at a time, the settings that reach another branch."""
    kl = {"beta": 0.04}
    plain_kl = kl | {"use_bias_correction_kl": False}
    sequence = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    constant = {"max_tokens": MAX_TOKENS}
    rows: dict[str, dict[str, Any]] = {
        "trl_grpo": {"loss_type": "grpo"},
        "trl_dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "trl_dapo": {"loss_type": "dapo"},
        "trl_bnpo": {"loss_type": "bnpo"},
        "trl_cispo": {"loss_type": "cispo"},
        "trl_sapo": {"loss_type": "sapo"},
        "trl_gspo": {"loss_type": "grpo"} | sequence,
        "trl_luspo": {"loss_type": "luspo"} | sequence,
        "trl_vespo": {"loss_type": "vespo"},
        "trl_grpo_v32": {"loss_type": "grpo", "scale_rewards": "none", "off_policy_mask_threshold": 0.5},
        "trl_grpo_batch": {"loss_type": "grpo", "scale_rewards": "batch"},
        "trl_rloo": {"beta": 0.0},
    }
    for name, settings in rows.items():
        own = constant if name == "trl_dr_grpo" else {}
        yield Case(name, settings, own)
        if name == "trl_vespo":
            # TRL weighs KL by the token's ratio even where the policy term has the sequence's: no axis says that.
            yield Case(name, settings | plain_kl, kl | {"kl": "k3"})
        else:
            yield Case(name, settings | kl, own | kl)

    grpo, gspo = rows["trl_grpo"], rows["trl_gspo"]
    yield Case("trl_grpo", grpo | plain_kl, kl | {"kl_weight": "none"})
    yield Case("trl_grpo", grpo | {"delta": 3.0}, {"dual_clip": 3.0})
    yield Case("trl_grpo", grpo | {"delta": 3.0} | kl, kl | {"dual_clip": 3.0})
    yield Case("trl_grpo", grpo | {"scale_rewards": "none"}, {"scale": "none"})
    yield Case("trl_grpo", grpo | {"gradient_accumulation_steps": 2})
    yield Case("trl_dapo", rows["trl_dapo"] | {"epsilon_high": 0.28}, {"clip_high": 0.28})
    yield Case("trl_dapo", rows["trl_dapo"] | {"gradient_accumulation_steps": 2})
    yield Case("trl_dr_grpo", rows["trl_dr_grpo"] | {"gradient_accumulation_steps": 2}, constant)
    yield Case("trl_cispo", rows["trl_cispo"] | {"epsilon_high": 5.0}, {"clip_high": 4.0})
    yield Case("trl_gspo", gspo | {"delta": 3.0}, {"dual_clip": 3.0})
    yield Case("trl_luspo", {"loss_type": "luspo"}, {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2})
    yield Case("trl_sapo", rows["trl_sapo"] | {"importance_sampling_level": "sequence"}, {"ratio": "sequence_mean"})
    yield Case("trl_grpo_v32", rows["trl_grpo_v32"] | {"off_policy_mask_threshold": 0.1}, {"trust_high": 0.1})
    for name in ("trl_grpo", "trl_dr_grpo", "trl_dapo", "trl_gspo", "trl_luspo", "trl_rloo"):
        yield Case(name, rows[name] | {"mask_truncated_completions": True},
                   constant if name == "trl_dr_grpo" else {}, ("truncated",))


CASES = list(_cases())


def trl_credit(case: Case, batch: Batch, dtype: torch.dtype = torch.float64) -> Tensor:
    """(B, T) w of TRL. Its advantages are computed in `dtype`; a real run has float32."""
    return trl_advantage_and_credit(case, batch, dtype)[1]


def trl_advantage_and_credit(case: Case, batch: Batch, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(B,) A and (B, T) w of TRL."""
    return advantage_and_credit(case.config, case.settings, batch, dtype)


def trl_high_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """(B, T) True for the tokens that TRL trains on with top_entropy_quantile=share."""
    trainer = trainer_of("GRPOConfig", {"loss_type": "grpo"})
    return trainer.get_high_entropy_mask(entropy, mask.int(), 1 - share)


def our_credit(case: Case, batch: Batch) -> Tensor:
    """(B, T) w of the case's row."""
    rollouts = as_rollouts(batch)
    return effective_credit(lambda logp: surrogate(case.row, logp, rollouts), batch["logp"])


def even_batches() -> dict[str, Batch]:
    """The batches TRL can take. It stores rewards in float32, so both sides get rewards that float32 can hold.

    `edges` puts each row just inside or just outside a bound, so that the bound's value is seen and not only its
    side; `edges_product` does so for the product of a row's ratios. `truncated` is `off_policy` with the mask that TRL
    makes when it drops completions without an end: empty rows.
    """
    even = {name: batch | {"reward": batch["reward"].float().double()}
            for name, batch in batches().items() if name in EVEN}
    tokens, mask = even["off_policy"]["tokens"], even["off_policy"]["mask"]
    last = tokens.gather(1, mask.sum(dim=1, keepdim=True) - 1)
    return even | {
        "edges": _edges(even["off_policy"], torch.ones(len(mask), 1)),
        "edges_product": _edges(even["off_policy"], 1 / mask.sum(dim=1, keepdim=True)),
        "truncated": even["off_policy"] | {"mask": mask & (last == EOS)},
    }


def _edges(batch: Batch, share: Tensor) -> Batch:
    """Rows in turn good and bad, each with one log-ratio at all its tokens, times `share`."""
    good = [1.199, 1.201, 1.279, 1.281, 1 + 3.9e-4, 1 + 4.1e-4, 4.99, 5.01]
    bad = [0.799, 0.801, 1 - 3.1e-4, 1 - 2.9e-4, 2.99, 3.01, 0.3, 9.0]
    log_ratio = torch.tensor([good, bad], dtype=torch.float64).T.reshape(-1, 1).log() * share
    old = (batch["old"] - 3) * batch["mask"]  # so far below 0 that no probability passes 1
    return batch | {"old": old, "ref": (batch["ref"] - 3) * batch["mask"], "logp": (old + log_ratio) * batch["mask"],
                    "reward": torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(8)}


def apart(ours: Tensor, theirs: Tensor) -> float:
    """max|Δw| / max|w|."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def table() -> list[dict[str, Any]]:
    """One dictionary a case, for the page that shows our rows beside TRL's code."""
    data = even_batches()
    lines = []
    for case in CASES:
        worst = max(apart(our_credit(case, data[name]), trl_credit(case, data[name])) for name in case.batches)
        lines.append({"row": case.dialect, "changes": dict(case.changes), "settings": case.text,
                      "difference": worst, "passes": worst <= TOLERANCE})
    return lines
