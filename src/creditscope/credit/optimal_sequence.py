"""The optimal scalar baseline from a forward pass alone: norms of the scores at the logits."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.optimal_scalar import around
from creditscope.credit.optimal_token import logit_norms
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def optimal_sequence(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = r_i − Σ_j r_j W_j / Σ_j W_j,  W_j = Σ_t (1 − 2π_jt + Σ_v π_jt(v)²).

    W_j = Σ_t ‖∂log π(y_jt)/∂z_jt‖², z the logits: the weight of the optimal token baseline at the answer's end. It
    ignores the layers below the logits and the products between tokens.
    """
    norms = logit_norms(rollouts, "optimal_sequence").sum(dim=1)
    return in_units(method, around(rollouts, norms)[:, None], rollouts)
