"""Preference methods beside group methods (C.4): which properties of credit change, and which stay. Float64, exact.

    w_it = 1/P · φ'(u_g) · β · A_i · ∂h_i/∂log π_it        u_g = β Σ_{i∈g} A_i·h_i − γ
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.claims.verdict import ClaimVerdict, at_most
from creditscope.credit.gae import gae
from creditscope.credit.tools import Tools
from creditscope.exact.p2 import EQUAL, apart
from creditscope.methods.axes import Method
from creditscope.methods.table import METHODS, PREFERENCES
from creditscope.objective.surrogate import effective_credit, surrogate

LIVE = 3
"""Groups of `pairs` that are no tie."""
PREFIX = 2
"""Tokens that the two answers of a pair share."""
STEPS, RATE = 5, 1e-2
"""Steps of AdamW, and their learning rate."""
KL = 0.1
"""β of a KL term, where a row has one."""
BETAS = (0.5, 2.0)
"""Factors on β."""


@dataclass(frozen=True)
class Readings:
    """What one row shows on the pairs of `pairs()`; each is 0 where the property is there."""

    within: float
    """max over answers of max_t w_it − min_t w_it, over max |w|."""
    baseline: float
    """max |Δw| / max |w| when the baseline, or the critic, is left out."""
    scale: float
    """max |Δw| / max |w| when all rewards are halved, and a critic's values with them."""
    adamw: float
    """max |Δθ| / max |θ| after `STEPS` steps of AdamW on the policy term, when all rewards are halved."""
    penalised: float | None
    """The same with the row's KL term at β = `KL`; None for a row without one."""
    prefix: float
    """Σ_g |Σ_i w_it| / Σ|w_it| over the tokens that the answers of a pair share."""
    tie: float
    """max |w| over the answers of a tie, over max |w|."""
    beta_start: float
    """max |Δ(w/max|w|)| when β is halved and doubled, at the reference: what the first update of Adam sees of β."""
    beta_moved: float
    """The same at a policy that has left the reference."""
    rank: int
    """Rank of the matrix of the answers' gradients."""


def pairs(size: int = 2) -> tuple[Rollouts, Tensor]:
    """Four groups with unequal lengths and a shared prefix, the last a tie; and a policy that has moved."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(PREFIX + 1, 8, (4 * size,), generator=draw)
    mask = torch.arange(8) < lengths[:, None]
    tokens = torch.randint(3, 9, mask.shape, generator=draw)
    tokens[:, :PREFIX] = torch.tensor([1, 2])
    logp, ref, move = (torch.rand(mask.shape, generator=draw, dtype=torch.float64) for _ in range(3))
    reward = torch.rand(4 * size, generator=draw, dtype=torch.float64)
    reward[-size:] = 0.5
    batch = Rollouts(tokens=tokens * mask, mask=mask, logp=-(0.1 + logp) * mask, reward=reward,
                     group=torch.arange(4).repeat_interleave(size), ref_logp=-(0.1 + ref) * mask,
                     entropy=0.3 * move * mask)
    return batch, (batch.logp - 0.4 * move) * mask


@dataclass(frozen=True)
class GivenValues(Tools):
    """V before each token, (B, T), for rows that take their credit from outside."""

    v: Tensor

    def critic(self) -> Tensor:
        return self.v


def state_values(size: int = 2) -> Tensor:
    """A critic's V on `pairs(size)`: random, and the same for answers whose tokens so far are the same."""
    values = torch.rand(4, size, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values[:, :, :PREFIX + 1] = values[:, :1, :PREFIX + 1]
    return values.flatten(0, 1)


def readings(method: Method, size: int = 2, values: Tensor | None = None) -> Readings:
    """The row's policy term on pairs, or on larger groups: of a preference method away from its reference, of any other
    at ratio 1. A row that takes its credit from outside has that of `gae` with these values, by default `state_values`.
    """
    batch, moved = pairs(size)
    row, moved = method.bare, moved if method.linked else batch.logp
    values = state_values(size) if values is None else values
    w = _w(row, batch, moved, values)
    top = float(w.abs().max())
    tied, shared = batch.group == 3, w[batch.group != 3][:, :PREFIX]
    totals = Groups(batch.group[batch.group != 3]).totals(shared)
    held = replace(batch, ref_logp=moved)
    free = row if row.external or row.baseline == "none" else row.replace(baseline="none")
    halved = replace(batch, reward=batch.reward / 2)
    ends = w.masked_fill(~batch.mask, -torch.inf).amax(dim=1) - w.masked_fill(~batch.mask, torch.inf).amin(dim=1)
    return Readings(
        within=float(ends.max()) / top, baseline=apart(w, _w(free, batch, moved, 0 * values)),
        scale=apart(w, _w(row, halved, moved, values / 2)),
        adamw=_seen_by_adamw(row, batch, moved, values),
        penalised=None if method.kl == "none" else _seen_by_adamw(method.replace(beta=KL), batch, moved, values),
        prefix=float(totals.abs().sum() / shared.abs().sum()), tie=float(w[tied].abs().max()) / top,
        beta_start=_by_beta(row, held, moved), beta_moved=_by_beta(row, batch, moved),
        rank=int(torch.linalg.matrix_rank(_rows(w))))


def _w(method: Method, batch: Rollouts, logp: Tensor, values: Tensor | None = None) -> Tensor:
    credit = _credit(method, batch, values)
    return effective_credit(lambda live: surrogate(method, live, batch, credit=credit), logp)


def _credit(method: Method, batch: Rollouts, values: Tensor | None) -> Tensor | None:
    return gae(method, batch, GivenValues(values)) if method.external and values is not None else None


def _seen_by_adamw(method: Method, batch: Rollouts, start: Tensor, values: Tensor) -> float:
    halved = replace(batch, reward=batch.reward / 2)
    return apart(_trained(method, batch, start, values), _trained(method, halved, start, values / 2))


def _trained(method: Method, batch: Rollouts, start: Tensor, values: Tensor) -> Tensor:
    """θ after AdamW without decay on the row's J, for log π(y_it) = start_it + ⟨s_it, θ⟩ with independent s_it."""
    credit, scores = _credit(method, batch, values), _scores(start) / 8
    theta = torch.zeros(scores.shape[-1], dtype=start.dtype, requires_grad=True)
    optimizer = torch.optim.AdamW([theta], lr=RATE, weight_decay=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = -surrogate(method, start + (scores @ theta) * batch.mask, batch, credit=credit)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return theta.detach()


def _by_beta(method: Method, batch: Rollouts, logp: Tensor) -> float:
    """How the direction of w depends on β; 0 for a row without a link, whose policy term has none."""
    if not method.linked:
        return 0.0
    found = [_w(method.replace(beta=factor * method.beta), batch, logp) for factor in (1.0, *BETAS)]
    units = [w / w.abs().max() for w in found]
    return max(float((unit - units[0]).abs().max()) for unit in units)


def _rows(w: Tensor) -> Tensor:
    """(B, d) g_i = Σ_t w_it ∇log π(y_it) with one random, hence independent, score per token."""
    return (w[..., None] * _scores(w)).sum(dim=1)


def _scores(like: Tensor) -> Tensor:
    """(B, T, 64) random ∇log π(y_it)."""
    return torch.randn(*like.shape, 64, generator=torch.Generator().manual_seed(1), dtype=like.dtype)


def contrast(*, methods: Mapping[str, Method] = METHODS, names: Sequence[str] = PREFERENCES) -> list[ClaimVerdict]:
    """C.4: DPO needs no baseline of the group, and its credit is as uniform inside an answer as GRPO's."""
    found = {name: readings(methods[name]) for name in names}
    of_pairs = [name for name in names if methods[name].link_over == "pair"]
    by_sum = [name for name in of_pairs if methods[name].score in ("log_ratio", "log_prob")]
    by_mean = [name for name in of_pairs if name not in by_sum]
    ranks = {name: readings(methods[name], 4).rank / LIVE for name in of_pairs}
    referred = [name for name in of_pairs if methods[name].score == "log_ratio"]

    def verdict(field: str, over: Sequence[str], definition: str, said: str) -> ClaimVerdict:
        each = {name: float(getattr(found[name], field)) for name in over}
        worst = max(each, key=lambda name: each[name])
        return at_most(EQUAL, definition, ", ".join(over), each[worst], f"{said} {each[worst]:.2g} ({worst})",
                       n=len(over), of="methods")

    return [
        verdict("within", names, "w is uniform inside an answer: (max_t w − min_t w) / max|w|", "w differs by"),
        verdict("baseline", of_pairs, "no baseline is needed: |Δw| / max|w| without the group's mean",
                "without a baseline w changes by"),
        verdict("tie", of_pairs, "a tie gives no gradient: max|w| over its answers", "the w of a tie is"),
        verdict("tie", [name for name in names if name not in of_pairs],
                "a tie gives no gradient where each answer has its own link: max|w| over its answers / max|w|",
                "the w of a tie is"),
        verdict("prefix", by_sum, "the shared prefix of a pair cancels, scores that are sums: Σ|Σ_i w| / Σ|w|",
                "what is left is"),
        verdict("prefix", by_mean, "the shared prefix of a pair cancels, scores that are means: Σ|Σ_i w| / Σ|w|",
                "what is left is"),
        at_most(2.0, "rank of a group's gradients, whatever its size: of four answers, with independent scores",
                ", ".join(of_pairs), max(ranks.values()), f"a group of four has rank {max(ranks.values()):g}",
                expected="at most 2", n=len(of_pairs), of="methods"),
        verdict("scale", names, "w does not depend on the size of the rewards: |Δw| / max|w| at half of them",
                "w changes by"),
        verdict("beta_start", referred, "the direction of w does not depend on β at the reference", "it turns by"),
        verdict("beta_moved", referred, "the direction of w does not depend on β away from the reference",
                "it turns by"),
    ]
