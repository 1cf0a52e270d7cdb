"""Table 1 of arXiv:2601.05002, each row written out from the paper, independent of our own table.

    J = Σ_i Σ_t α_it · min(s_it A_i, clip(s_it, 1−ε_low, 1+ε_up) A_i) − β R(θ)        A_i = r_i − mean(r)   (Eq. 1)

The std is part of α. The table is stated for one mixed group. Its ε, γ and β are each method's own; a method without a
clip has ε = ∞. Its KL has no aggregate; the method's own is used. Where a row departs from the paper of its method,
`repaired` is the row of that paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts

BETA = 0.07
"""β of the rows that have a KL term; any value above rounding will do."""


class Symbols:
    """The table's symbols for a batch of one group: (B, 1) or (B, T), with gradients in `logp`."""

    def __init__(self, rollouts: Rollouts, logp: Tensor) -> None:
        assert rollouts.ref_logp is not None
        assert rollouts.entropy is not None
        self.mask = rollouts.mask.to(logp.dtype)
        self.count, self.length = len(rollouts), self.mask.sum(dim=1, keepdim=True)
        self.tokens = self.mask.sum()
        self.credit = (rollouts.reward - rollouts.reward.mean())[:, None]
        self.sigma = rollouts.reward.std()
        self.log_pi = logp
        self.token_ratio = (logp - rollouts.logp).exp()
        self.log_sequence = ((logp - rollouts.logp) * self.mask).sum(dim=1, keepdim=True)
        self.k3 = (rollouts.ref_logp - logp).exp() - (rollouts.ref_logp - logp) - 1
        self.a = 1 / (self.count * self.length * self.sigma)
        """a_i = 1/(R·L_i·σ_r)."""
        self.near = (self.log_sequence.detach() / self.length >= -0.5) | (self.credit >= 0)
        """M of GRPO (V3.2), with δ = ½."""
        self.entropy = (rollouts.entropy * self.mask).sum(dim=1, keepdim=True) / self.length
        self.calm = self.entropy <= math.log(2)
        """δ_i of GTPO."""
        self.conflict = _conflict(rollouts, self.credit)
        """λ_it of GTPO."""

    def sum(self, value: Tensor) -> Tensor:
        """Σ_i Σ_t over the chosen tokens."""
        return (value * self.mask).sum()

    def clipped(self, s: Tensor, low: float, high: float) -> Tensor:
        """min(s A, clip(s, 1−ε_low, 1+ε_up) A)."""
        return torch.minimum(s * self.credit, s.clamp(1 - low, 1 + high) * self.credit)

    def large(self, unit: Tensor | float) -> Tensor:
        """1{|A_i| > γ}, γ = ½, with A in units of `unit`."""
        return (self.credit / unit).abs() > 0.5


def _conflict(rollouts: Rollouts, credit: Tensor) -> Tensor:
    """λ_it = 2 (A > 0) or 0 (A < 0) on the common prefix, or suffix, with an answer of the other sign; else 1."""
    answers = [row[:length] for row, length in zip(rollouts.tokens.tolist(), rollouts.lengths.tolist(), strict=True)]
    sign = credit.squeeze(1).sign().tolist()
    weight = torch.ones_like(rollouts.logp)
    for i, mine in enumerate(answers):
        rivals = [other for other, s in zip(answers, sign, strict=True) if sign[i] * s < 0]
        for ends in (range(len(mine)), range(-1, -len(mine) - 1, -1)):
            for t in ends:
                if not any(-len(other) <= t < len(other) and other[t] == mine[t] for other in rivals):
                    break
                weight[i, t % len(mine)] = 1 + sign[i]
    return weight


def _grpo(x: Symbols) -> Tensor:
    """α = a_i, s = ρ, R = K3."""
    return x.sum(x.a * x.clipped(x.token_ratio, 0.2, 0.2)) - BETA * x.sum(x.k3 / (x.count * x.length))


def _grpo_v32(x: Symbols) -> Tensor:
    """α = M_it/(R L_i), s = ρ, R = ρ·K3."""
    share = 1 / (x.count * x.length)
    return x.sum(x.near * share * x.clipped(x.token_ratio, 0.2, 0.2)) - BETA * x.sum(share * x.token_ratio * x.k3)


def _gspo(x: Symbols, exponent: Tensor | float = 1.0) -> Tensor:
    """α = a_i, s = sg[(π(y)/π_old(y))^exponent / π_t]·π_t."""
    s = (x.log_sequence * exponent).exp().detach() * (x.log_pi - x.log_pi.detach()).exp()
    return x.sum(x.a * x.clipped(s, 3e-4, 4e-4))


def _gtpo(x: Symbols) -> Tensor:
    """α = δ_i λ_it/(R L_i), s = ρ, R = 1/R Σ_i δ_i⟨H⟩_i/L_i Σ_t ρ λ_it with weight 0.1."""
    weight = x.calm * x.conflict / (x.count * x.length) * x.token_ratio
    return x.sum(weight * x.credit) - 0.1 * x.sum(weight * x.entropy)


def _dapo(x: Symbols) -> Tensor:
    """α = 1/(σ_r ΣL), s = ρ."""
    return x.sum(x.clipped(x.token_ratio, 0.2, 0.28) / (x.sigma * x.tokens))


def _cppo(x: Symbols, unit: Tensor | float = 1.0) -> Tensor:
    """α = a_i·1{|A_i| > γ}, s = ρ, R = K3."""
    keep = x.large(unit)
    return x.sum(keep * x.a * x.clipped(x.token_ratio, 0.2, 0.2)) - BETA * x.sum(keep * x.k3 / (x.count * x.length))


def _dr_grpo(x: Symbols) -> Tensor:
    """α = 1/R, s = ρ, R = K3."""
    return x.sum(x.clipped(x.token_ratio, 0.2, 0.2) - BETA * x.k3) / x.count


def _gpg(x: Symbols) -> Tensor:
    """α = α̂/(F_norm ΣL), s = log π; one mixed group has α̂ = 1, and F_norm is 1."""
    return x.sum(x.log_pi * x.credit / x.tokens)


def _cispo(x: Symbols, cap: float = math.inf) -> Tensor:
    """α = M_it/(σ_r ΣL), s = sg[ρ]·log π; CISPO itself masks nothing, so M = 1."""
    return x.sum(x.token_ratio.detach().clamp(max=cap) * x.log_pi * x.credit / (x.sigma * x.tokens))


def _gcpo(x: Symbols) -> Tensor:
    """α = 1/(σ_r R), s = π(y)/π_old(y), one term per sequence."""
    return (x.clipped(x.log_sequence.exp(), 0.2, 0.2) / (x.sigma * x.count)).sum()


Objective = Callable[[Symbols], Tensor]


LAWS: Mapping[str, str] = MappingProxyType({
    "answers": "even over answers (1/L_i): J = −β·R",
    "tokens": "even over tokens: J = c·Σ A_i L_i − β·R",
    "general": "others: J = Σ (A_i − Ā)(ω_i − ω̄) − β·R"})
"""What is left of J at ratio 1, by the weights of a row."""


@dataclass(frozen=True)
class PrintedRow:
    """A row of the table as an objective, and its value at ratio 1 by Prop. 4."""

    printed: Objective
    repaired: Objective | None = None
    """The objective of the method's own paper or code, where the table departs from it."""
    repair: str = ""
    """The difference."""
    circular: bool = False
    """True where our own row was written from this table, so that agreement proves nothing."""
    penalty: Objective | None = None
    """β·R with the method's own aggregate."""
    divisor: Objective | None = None
    """1/c, where the weights are even over tokens."""
    weight: Objective | None = None
    """α_it·h_it of general weights; h is 1, or log π in the ratio's place."""

    @property
    def law(self) -> str:
        return "tokens" if self.divisor else "general" if self.weight else "answers"

    def value(self, batch: Rollouts) -> float:
        """J at ratio 1: Σ_t 1/L_i is 1 and Σ_i A_i is 0, so that weights even over answers leave the penalty alone."""
        x = Symbols(batch, batch.logp)
        value = 0.0
        if self.divisor:
            value = float((x.credit * x.length).sum() / self.divisor(x))
        elif self.weight:
            omega, credit = (self.weight(x) * x.mask).sum(dim=1), x.credit.squeeze(1)
            value = float(((credit - credit.mean()) * (omega - omega.mean())).sum())
        return value - (float(x.sum(self.penalty(x))) if self.penalty else 0.0)


def _kl(x: Symbols) -> Tensor:
    return BETA * (1 / (x.count * x.length)) * x.k3


TABLE: Mapping[str, PrintedRow] = MappingProxyType({
    "grpo": PrintedRow(_grpo, penalty=_kl),
    "grpo_v32": PrintedRow(_grpo_v32, penalty=_kl),
    "gspo": PrintedRow(_gspo, lambda x: _gspo(x, 1 / x.length), "the exponent 1/|y| of the sequence ratio"),
    "gtpo": PrintedRow(_gtpo, weight=lambda x: x.calm * x.conflict / (x.count * x.length),
                       penalty=lambda x: 0.1 * (1 / (x.count * x.length)) * x.entropy * x.calm * x.conflict),
    "dapo": PrintedRow(_dapo, divisor=lambda x: x.sigma * x.tokens),
    "cppo": PrintedRow(_cppo, lambda x: _cppo(x, x.sigma), "γ against (r − mean)/std, not against r − mean",
                       weight=lambda x: x.a * x.large(x.sigma), penalty=lambda x: _kl(x) * x.large(x.sigma)),
    "dr_grpo": PrintedRow(_dr_grpo, lambda x: _dr_grpo(x) / x.mask.shape[1], "the constant 1/L_max",
                          divisor=lambda x: torch.tensor(x.count * x.mask.shape[1]),
                          penalty=lambda x: BETA * x.k3 / (x.count * x.mask.shape[1])),
    "gpg": PrintedRow(_gpg, weight=lambda x: x.log_pi / x.tokens),
    "cispo": PrintedRow(_cispo, lambda x: _cispo(x, 1.28), "the cap 1 + ε_high on sg[ρ]",
                        weight=lambda x: x.log_pi / (x.sigma * x.tokens)),
    "gcpo": PrintedRow(_gcpo, circular=True),
})
