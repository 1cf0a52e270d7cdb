"""All estimators of credit at the edges: rewards of 1e30 and 1e-30, a certain policy, empty answers, dead groups."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from creditscope import METHODS, Method, Rollouts, effective_credit, surrogate
from creditscope.credit import find_estimator
from creditscope.credit.table import ESTIMATORS
from makers import make

LENGTHS = {"mixed": [3, 2, 4, 1], "one empty": [4, 0, 1, 3], "single tokens": [1, 1, 1, 1]}
REWARDS = {"mixed": [1.0, 0.0, 1.0, 0.0], "dead": [1.0, 1.0, 1.0, 1.0], "half dead": [1.0, 0.5, 1.0, 1.0]}


def edge(reward: list[float], lengths: list[int], certain: bool, unit: float, dtype: torch.dtype) -> Rollouts:
    """Two groups of two with everything that an estimator may need; a certain policy has log π = 0 and Σπ² = 1."""
    plain = make([x * unit for x in reward], [0, 0, 1, 1], lengths, dtype=dtype)
    zero = torch.zeros_like(plain.logp)
    sure = {"logp": zero, "entropy": zero, "ref_logp": zero} if certain else {}
    column = torch.arange(plain.mask.shape[1]).clamp(max=1).expand_as(plain.mask)
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=dtype)
    return replace(plain, step=torch.where(plain.mask, column, -1), step_reward=labels * unit,
                   step_state=torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3]]), pieces=[["a\n"] * n for n in lengths],
                   collision=(zero + (1.0 if certain else 0.5)) * plain.mask, **sure)


def tools(rollouts: Rollouts, certain: bool, unit: float) -> Any:
    """A critic, learned scores, continuations worth a half, and the Gram of scores: 0 where the policy is certain."""
    gram = torch.zeros(4, 4).double() if certain else torch.eye(4).double() + 0.5

    def values(cuts: Tensor, samples: int) -> Tensor:
        return torch.where(cuts >= 0, 0.5 * unit, 0.0).to(rollouts.reward)

    def scores() -> Tensor:
        width = rollouts.mask.shape[1] + 1
        return unit * torch.arange(4 * width).view(4, width).sin().to(rollouts.reward)

    return SimpleNamespace(gram=lambda: gram, values=values, progress=0.5, scores=scores,
                           critic=lambda: 0.3 * unit * rollouts.mask.to(rollouts.reward))


def credited(name: str, method: Method, rollouts: Rollouts, certain: bool, unit: float) -> Tensor:
    return find_estimator(name)(method, rollouts, tools(rollouts, certain, unit))


def weights(method: Method, rollouts: Rollouts, credit: Tensor) -> Tensor:
    return effective_credit(lambda logp: surrogate(method, logp, rollouts, credit), rollouts.logp)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [2.0**100, 2.0**-100], ids=["1e30", "1e-30"])
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_credit_in_another_unit_is_credit_in_that_unit_and_w_is_finite(name: str, unit: float) -> None:
    """Identity: with std and ε in the same unit GRPO's credit has none; Dr.GRPO's is the unit times that of r."""
    for method in (METHODS["grpo"], METHODS["dr_grpo"]):
        bare = method.but(name="bare", std_eps=method.std_eps / unit)
        for lengths in LENGTHS.values():
            for reward in REWARDS.values():
                for certain in (False, True):
                    rollouts = edge(reward, lengths, certain, unit, torch.float32)
                    found = credited(name, method, rollouts, certain, unit)
                    assert bool(torch.isfinite(weights(method, rollouts, found)).all())
                    if name == "gae":  # it is whitened with an ε of its own
                        continue
                    truth = credited(name, bare, edge(reward, lengths, certain, 1.0, torch.float64), certain, 1.0)
                    truth = truth * (unit if method.scale == "none" else 1.0)
                    assert torch.allclose(found.double(), truth, rtol=1e-4, atol=1e-5 * float(truth.abs().max()))
