"""SALT: advantages split along the eigenvectors of the group's Gram, with the residual strengthened."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.advantages import token_advantage


def salt(method: Method, rollouts: Rollouts, tools: Tools, *, rank: int = 1) -> Tensor:
    """A' = P A + (1 + c)(A − P A), group by group.

    P projects onto the `rank` top eigenvectors of K_ij = ⟨ψ_i, ψ_j⟩. c = 1 − ‖Σ A_i ψ_i‖ / Σ |A_i|‖ψ_i‖ is the
    cancellation: 0 where all A_i ψ_i are parallel, 1 where their sum is 0.
    """
    own = token_advantage(method, rollouts)
    if own.shape[1] != 1:
        raise CreditscopeError(f"credit 'salt' splits one advantage per rollout, but method {method.name!r} has one "
                               f"per token; choose another method, or drop its KL in the token reward")
    gram = tools.gram()
    out = own[:, 0].clone()
    for group in Groups(rollouts.group).ids.tolist():
        rows = (rollouts.group == group).nonzero()[:, 0]
        out[rows] = split(own[rows, 0].double(), gram[rows][:, rows].double(), rank).to(out.dtype)
    return out[:, None].expand_as(rollouts.mask)


def split(advantage: Tensor, gram: Tensor, rank: int) -> Tensor:
    """(R,) the advantages of one group with their residual part strengthened by its cancellation.

    >>> split(torch.tensor([1., -1.]).double(), torch.eye(2).double(), 2).tolist()
    [1.0, -1.0]
    """
    if not bool(torch.isfinite(gram).all()):
        raise CreditscopeError("credit 'salt' needs the Gram of a whole group, but entries of this one are not finite; "
                               "let the rows of a group meet in one backward pass")
    length = gram.diagonal().clamp(min=0).sqrt()
    apart = (advantage.abs() * length).sum()
    if not bool(apart > 0):
        return advantage
    together = (advantage @ gram @ advantage).clamp(min=0).sqrt()
    cancellation = (1 - together / apart).clamp(0, 1)
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors[:, -rank:]
    shared: Tensor = vectors @ (vectors.T @ advantage)
    return shared + (1 + cancellation) * (advantage - shared)
