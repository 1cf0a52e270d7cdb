"""P2's Table 1 (arXiv:2601.05002), each row written out here from the paper, and compared with ours through w.

Eq. 1 with A_i = r_i − mean(r) and std inside α: J = Σ_i Σ_t α_it·min(s_it A_i, clip(s_it) A_i) − β R. One group, since
the table is stated for one. Where the table departs from a method's own paper, the code below says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from creditscope import METHODS, Rollouts, effective_credit, surrogate
from creditscope.methods import P2_TABLE_1
from creditscope.weights import conflict_weight
from makers import make, moved

BETA = 0.07


def clip_term(s: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)


class Parts:
    """The symbols of the table for one batch of one group."""

    def __init__(self, batch: Rollouts, logp: Tensor) -> None:
        self.m = batch.mask.double()
        self.R, self.L = len(batch), batch.lengths.double()[:, None]
        self.sigma = batch.reward.std()
        self.A = (batch.reward - batch.reward.mean())[:, None]
        self.log_pi = logp
        self.ratio = (logp - batch.logp).exp()
        self.sequence = ((logp - batch.logp) * self.m).sum(1, keepdim=True)
        ref = batch.ref_logp
        assert ref is not None
        self.K3 = (ref - logp).exp() - (ref - logp) - 1
        self.a = 1 / (self.R * self.L * self.sigma)
        self.keep = (self.sequence.detach() / self.L >= -0.5) | (self.A >= 0)
        self.H = (batch.entropy * self.m).sum(1, keepdim=True) / self.L  # type: ignore[operator]
        self.delta = self.H <= 0.6931471805599453
        self.lam = conflict_weight(batch)
        self.total = self.L.sum()

    def sum(self, x: Tensor) -> Tensor:
        return (x * self.m).sum()


def gspo(p: Parts) -> Tensor:
    s = (p.sequence / p.L).exp().detach() * (p.log_pi - p.log_pi.detach()).exp()  # with the exponent 1/|y|
    return p.sum(p.a * clip_term(s, p.A, 3e-4, 4e-4))


TABLE: dict[str, Callable[[Parts], Tensor]] = {
    "grpo": lambda p: p.sum(p.a * clip_term(p.ratio, p.A, .2, .2)) - BETA * p.sum(p.K3 / (p.R * p.L)),
    "grpo_v32": lambda p: p.sum(p.keep / (p.R * p.L) * clip_term(p.ratio, p.A, .2, .2))
    - BETA * p.sum(p.ratio * p.K3 / (p.R * p.L)),
    "gspo": gspo,
    "gtpo": lambda p: p.sum(p.delta * p.lam / (p.R * p.L) * p.ratio * p.A)
    - 0.1 * p.sum(p.delta * p.H / (p.R * p.L) * p.ratio * p.lam),
    "dapo": lambda p: p.sum(clip_term(p.ratio, p.A, .2, .28) / (p.sigma * p.total)),
    "cppo": lambda p: p.sum(p.a * ((p.A / p.sigma).abs() > 0.5) * clip_term(p.ratio, p.A, .2, .2))
    - BETA * p.sum(((p.A / p.sigma).abs() > 0.5) * p.K3 / (p.R * p.L)),
    "dr_grpo": lambda p: p.sum((clip_term(p.ratio, p.A, .2, .2) - BETA * p.K3) / p.R) / p.m.shape[1],
    "gpg": lambda p: p.sum(p.log_pi * p.A / p.total),
    "cispo": lambda p: p.sum(p.ratio.detach().clamp(max=1.28) * p.log_pi * p.A / (p.sigma * p.total)),
    "gcpo": lambda p: (clip_term(p.sequence.exp(), p.A, .2, .2) / (p.sigma * p.R)).sum(),
}


def test_the_ten_rows_are_all_here() -> None:
    assert tuple(TABLE) == P2_TABLE_1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.0, 3e-4, 0.4])
@pytest.mark.parametrize("name", P2_TABLE_1)
def test_our_row_has_the_credit_of_p2s_row(name: str, size: float, seed: int) -> None:
    # The table prints GSPO without its exponent 1/|y| and Dr.GRPO without its constant L_max: both papers have them.
    # Its KL is written without an aggregate; we take the method's own.
    batch = make([1, 0, 0, 1, 0, .5], group=[0] * 6, lengths=[2, 5, 3, 4, 6, 1], seed=seed)
    row = METHODS[name]
    row = row.but(name=name, beta=BETA) if row.kl != "none" else row
    logp = moved(batch, size, seed)
    ours = effective_credit(lambda lp: surrogate(row, lp, batch), logp)
    theirs = effective_credit(lambda lp: TABLE[name](Parts(batch, lp)), logp) * batch.mask
    assert torch.allclose(ours, theirs, atol=1e-12)
