"""P2's claims (arXiv:2601.05002) about the objective that need no run: its table against the methods' own losses
(P2.1), and the value of J at ratio 1 (P2.5).

Everything is float64 on batches of a few answers. Each claim is a function that returns its verdicts; tests pass wrong
tables and formulas as its keyword arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.claims.verdict import ClaimVerdict, at_most
from creditscope.exact.p2_table import BETA, LAWS, TABLE, Objective, Symbols
from creditscope.exact.ratio_one import value_at_ratio_one
from creditscope.methods.axes import Method
from creditscope.methods.table import METHODS
from creditscope.objective.surrogate import effective_credit, surrogate

EQUAL = 1e-9
"""Relative difference below which two formulas are equal: float64 sums of some dozen terms round at 1e-15."""


def apart(ours: Tensor, theirs: Tensor) -> float:
    """max |Δ| / max |ours|."""
    return float((ours - theirs).abs().max() / ours.abs().max())


MOVES = (0.0, 3e-4, 0.4)
"""How far log π has moved since sampling, std: not at all, about GSPO's bounds, and past all bounds."""


def ten_methods(*, methods: Mapping[str, Method] = METHODS) -> list[ClaimVerdict]:
    """P2.1: each row's w_it = ∂J/∂log π_it against that of the method's own loss, as printed and as repaired."""
    out, batches = [], _moved_groups()
    for name, row in TABLE.items():
        method, forms = _weighed(methods[name]), {"as printed": row.printed}
        if row.repaired is not None:
            forms[f"repaired: {row.repair}"] = row.repaired
        for form, objective in forms.items():
            worst, n = max(_difference(method, objective, *batch) for batch in batches), len(batches)
            verdict = at_most(EQUAL, f"w_it of the row {form}, max |Δ| / max |w|", name, worst, f"w differs by up to "
                              f"{worst:.2g} of its largest entry over {n} batches", n=n, of="batches")
            if row.circular:
                verdict = replace(verdict, outcome="undecided", reason=f"needs {name}'s own loss: our row was written "
                                  f"from this table, so that w differs by {worst:.2g} says nothing")
            out.append(verdict)
    return out


def _difference(method: Method, objective: Objective, batch: Rollouts, logp: Tensor) -> float:
    return apart(effective_credit(lambda lp: surrogate(method, lp, batch), logp),
                 effective_credit(lambda lp: objective(Symbols(batch, lp)), logp))


def _moved_groups() -> list[tuple[Rollouts, Tensor]]:
    """Random groups of six answers with some hundred tokens, so that some lie near every bound; and moved log-probs."""
    out = []
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        mask = torch.arange(30) < torch.tensor([10, 25, 15, 20, 30, 5])[:, None]
        logp, ref, entropy, move = (torch.rand(mask.shape, generator=draw, dtype=torch.float64) * mask
                                    for _ in range(4))
        batch = Rollouts(tokens=torch.randint(1, 5, mask.shape, generator=draw) * mask, mask=mask, logp=-logp,
                         reward=torch.tensor([1, 0, 0, 1, 0, 0.5], dtype=torch.float64),
                         group=torch.zeros(6, dtype=torch.int64), ref_logp=-ref, entropy=entropy)
        # Uniform on ±√3: mean 0, std 1.
        out += [(batch, batch.logp + size * math.sqrt(3) * (2 * move - 1) * mask) for size in MOVES]
    return out


def _weighed(method: Method) -> Method:
    """The row with the table's β, where its loss has a KL term."""
    return method if method.kl == "none" else method.replace(beta=BETA)


def loss_value(*, methods: Mapping[str, Method] = METHODS,
               closed_form: Callable[[Method, Rollouts], Tensor] = value_at_ratio_one) -> list[ClaimVerdict]:
    """P2.5: J at ratio 1: its closed form, what Prop. 4 leaves of it, and its change when all rewards rise."""
    batches = [batch for batch, logp in _moved_groups() if torch.equal(batch.logp, logp)]
    rows = {name: _weighed(method) for name, method in methods.items()}
    own = [row for row in rows.values() if not row.external]
    told = [abs(float(closed_form(row, batch)) - _value(row, batch)) for row in own for batch in batches]
    shifted = [abs(_value(rows[name], replace(batch, reward=batch.reward + 1)) - _value(rows[name], batch))
               for name in TABLE for batch in batches]
    out = [_values("every method: J in closed form against the surrogate at ratio 1", len(own), told)]
    for law, words in LAWS.items():
        names = [name for name, row in TABLE.items() if row.law == law]
        out.append(_values(words, len(names), [abs(_value(rows[name], batch) - TABLE[name].value(batch))
                                               for name in names for batch in batches]))
    return [*out, _values("no progress signal: J with every reward 1 higher against J", len(TABLE), shifted)]


def _value(row: Method, batch: Rollouts) -> float:
    return float(surrogate(row, batch.logp, batch))


def _values(definition: str, methods: int, apart: Sequence[float]) -> ClaimVerdict:
    """The verdict on differences of J, which is of order 0.1."""
    return at_most(EQUAL, f"{definition}; |ΔJ|", f"random groups, {methods} methods", max(apart),
                   f"J differs by up to {max(apart):.2g}", n=len(apart), of="methods and batches")
