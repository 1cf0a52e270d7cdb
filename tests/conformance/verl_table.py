"""Our `verl_*` rows against the arrays that verl's own code gave (`verl_peer.py`). Needs creditscope, not verl."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from batches import batches
from ours import as_rollouts
from torch import Tensor
from verl_peer import CASES, Case

from creditscope import effective_credit, surrogate
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.objective.advantages import token_advantage

GOLDENS = Path(__file__).with_name("verl_0.9.1.npz")


@cache
def goldens() -> dict[str, np.ndarray]:
    """The stored arrays: see `verl_peer.goldens`."""
    with np.load(GOLDENS, allow_pickle=False) as stored:
        return dict(stored)


def verls(case: Case, batch: str) -> tuple[Tensor, Tensor]:
    """(advantages, w) as verl gave them."""
    row = goldens()["cases"].tolist().index(case.name)
    return tuple(torch.from_numpy(goldens()[f"{what}/{batch}"][row]) for what in ("advantages", "w"))


def method_of(case: Case) -> Method:
    """The dialect row with the case's changes made to it."""
    row = DIALECTS[case.row]
    return row.replace(**case.changes) if case.changes else row


def ours(case: Case, batch: str) -> tuple[Tensor, Tensor]:
    """(advantages, w) of our row. A row that takes credit from outside is given verl's: it has a critic, we do not."""
    method, here = method_of(case), batches()[batch]
    rollouts = as_rollouts(here)
    outside = verls(case, batch)[0] if method.baseline == "external" else None
    credit = token_advantage(method, rollouts) if outside is None else outside
    w = effective_credit(lambda logp: surrogate(method, logp, rollouts, outside), here["logp"])
    return credit.expand_as(here["logp"]), w


def apart(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """max |a − b| / max |b| over the tokens that count; the difference itself where b is 0 throughout."""
    a, b = a[mask], b[mask]
    return float((a - b).abs().max() / (b.abs().max() or 1.0))


def differences(case: Case, batch: str) -> tuple[float, float]:
    """How far our advantages and our w stand from verl's, relative to verl's largest."""
    mask = batches()[batch]["mask"]
    (our_a, our_w), (their_a, their_w) = ours(case, batch), verls(case, batch)
    return apart(our_a, their_a, mask), apart(our_w, their_w, torch.ones_like(mask))  # w must be 0 on padding too


def table() -> list[dict[str, object]]:
    """One entry a case: row, our changes to it, verl's settings, largest relative difference, tolerance, passes."""
    out: list[dict[str, object]] = []
    for case in CASES:
        worst = max(max(differences(case, batch)) for batch in batches())
        out.append({"case": case.name, "row": case.row, "changes": dict(case.changes), "verl": case.settings,
                    "difference": worst, "tolerance": case.tolerance, "passes": worst <= case.tolerance})
    return out


if __name__ == "__main__":
    for entry in table():
        print(f"{'ok ' if entry['passes'] else 'NO '} {entry['difference']:.1e} {entry['case']:<38} {entry['verl']}")
