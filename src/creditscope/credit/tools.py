"""Inputs of estimators besides the rollouts: continuations, a critic, a learned reward, a Gram."""

from __future__ import annotations

from typing import TYPE_CHECKING

from creditscope.credit.table import NEEDS
from creditscope.errors import CreditscopeError

if TYPE_CHECKING:
    from torch import Tensor


class Tools:
    """No tool, as for rollouts from a file. The trainer and the enumerable tree override what they have."""

    progress: float = 0.0
    """Completed share of the training, for schedules."""

    def values(self, cuts: Tensor, samples: int) -> Tensor:
        """(B, C) V of each row's first cuts[i, c] tokens, from `samples` continuations; NaN where the cut is −1."""
        raise _absent("continuations")

    def critic(self) -> Tensor:
        """(B, T) the critic's V before each token."""
        raise _absent("critic")

    def scores(self) -> Tensor:
        """(B, T+1) a learned reward's score of the prompt, then of the answer up to and with each token."""
        raise _absent("scores")

    def gram(self) -> Tensor:
        """(B, B) float64 ⟨ψ_i, ψ_j⟩ of the rollouts' scores, exact inside groups, NaN between rows that never met."""
        raise _absent("gram")


def _absent(what: str) -> CreditscopeError:
    return CreditscopeError(f"this credit needs {NEEDS[what]}, and there is none here")
