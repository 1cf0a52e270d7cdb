"""P2's Table 1 (arXiv:2601.05002), written out from the paper, against our table through w."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from creditscope import METHODS, Rollouts, effective_credit, surrogate
from creditscope.exact.p2_table import BETA, TABLE, Symbols
from creditscope.methods.table import P2_TABLE_1
from creditscope.objective.weights import conflict_weight
from each import each
from makers import make, moved

REPAIRED = [name for name, row in TABLE.items() if row.repaired is not None]


def group(seed: int) -> Rollouts:
    return make([1, 0, 0, 1, 0, .5], group=[0] * 6, lengths=[2, 5, 3, 4, 6, 1], seed=seed)


def ours(name: str, batch: Rollouts, logp: Tensor) -> Tensor:
    row = METHODS[name]
    row = row.replace(beta=BETA) if row.kl != "none" else row
    return effective_credit(lambda lp: surrogate(row, lp, batch), logp)


def theirs(objective: Callable[[Symbols], Tensor], batch: Rollouts, logp: Tensor) -> Tensor:
    return effective_credit(lambda lp: objective(Symbols(batch, lp)), logp)


def test_the_ten_rows_are_all_here() -> None:
    assert tuple(TABLE) == P2_TABLE_1


@each("seed", range(3))
@each("size", [0.0, 3e-4, 0.4])
@each("name", P2_TABLE_1)
def test_our_row_has_the_credit_of_p2s_row_as_its_method_has_it(name: str, size: float, seed: int) -> None:
    batch = group(seed)
    logp = moved(batch, size, seed)
    row = TABLE[name]
    assert torch.allclose(ours(name, batch, logp), theirs(row.repaired or row.printed, batch, logp), atol=1e-12)


@pytest.mark.parametrize("name", REPAIRED)
def test_what_was_repaired_makes_a_difference(name: str) -> None:
    batch = group(0)
    logp = moved(batch, 0.4, 0)
    assert not torch.allclose(ours(name, batch, logp), theirs(TABLE[name].printed, batch, logp), rtol=1e-2)


def test_four_rows_depart_from_their_methods_and_say_how() -> None:
    assert REPAIRED == ["gspo", "cppo", "dr_grpo", "cispo"]
    assert all(bool(row.repair) == (row.repaired is not None) for row in TABLE.values())


def test_grpo_and_dapo_of_two_answers_by_hand() -> None:
    # r = (1, 0): A = ±½, σ = 1/√2. At ratio 1 and β = 0: w = A/(R·L_i·σ) = ±½·√2/(2·L_i), and ±½·√2/ΣL for DAPO.
    batch = make([1, 0], [0, 0], [1, 3])
    batch = Rollouts(tokens=batch.tokens, mask=batch.mask, logp=batch.logp, reward=batch.reward, group=batch.group,
                     ref_logp=batch.logp, entropy=batch.entropy)  # at the reference K3 has no slope
    root = math.sqrt(2)
    grpo = theirs(TABLE["grpo"].printed, batch, batch.logp)
    assert grpo[0].tolist() == pytest.approx([root / 4, 0, 0], abs=1e-15)
    assert grpo[1].tolist() == pytest.approx([-root / 12] * 3, abs=1e-15)
    dapo = theirs(TABLE["dapo"].printed, batch, batch.logp)
    assert dapo[1].tolist() == pytest.approx([-root / 8] * 3, abs=1e-15)


def test_conflict_tokens_by_hand() -> None:
    # Good 1 2 3, bad 1 4 3 and 1 2: the good one shares 1 and 2 in front (each with some bad answer) and 3 at the end.
    batch = make([1, 0, 0], [0, 0, 0], [3, 3, 2])
    tokens = torch.tensor([[1, 2, 3], [1, 4, 3], [1, 2, 0]])
    batch = Rollouts(tokens=tokens, mask=batch.mask, logp=batch.logp, reward=batch.reward, group=batch.group,
                     ref_logp=batch.ref_logp, entropy=batch.entropy)
    assert Symbols(batch, batch.logp).conflict.tolist() == [[2, 2, 2], [0, 1, 0], [0, 0, 1]]


@each("seed", range(8))
def test_the_conflict_of_a_loop_is_the_one_of_our_weights(seed: int) -> None:
    batch = group(seed)
    assert torch.equal(Symbols(batch, batch.logp).conflict * batch.mask, conflict_weight(batch) * batch.mask)
