"""The unified surrogate J, and the effective credit w of any objective.

    J = Σ_it α_it · bound(s_it, A_it) − β · R        w_it = ∂J/∂log π(y_it)
    J = Σ_it α_it · φ(u_g) + sft · log π(chosen)     preferences: one term per pair, `objective/links.py`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from creditscope.batch.groups import check_real
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError, require
from creditscope.methods.axes import Method
from creditscope.objective.advantages import check_method, token_advantage
from creditscope.objective.links import linked, supervised
from creditscope.objective.penalties import penalty
from creditscope.objective.ratios import bounded, trusted
from creditscope.objective.weights import aggregate, alpha, kept


def surrogate(method: Method, logp: Tensor, rollouts: Rollouts, credit: Tensor | None = None) -> Tensor:
    """J of a batch, to maximise: `(-surrogate(...)).backward()` trains.

    `logp` (B, T) is log π_θ of the chosen tokens and carries the gradient. `credit` (B,) or (B, T) replaces the
    method's own advantage, unscaled. Half precision is computed in float32.
    """
    check_method(method)
    require(rollouts, Rollouts, "rollouts", "build it with Rollouts(tokens=..., mask=..., ...)")
    _check_logp(logp, rollouts)
    logp = logp.to(torch.promote_types(logp.dtype, torch.float32)).masked_fill(~rollouts.mask, 0.0)
    old = rollouts.logp.to(logp.dtype).masked_fill(~rollouts.mask, 0.0)
    own = token_advantage(method, rollouts) if credit is None else check_credit(credit, rollouts)
    own = own.detach().to(logp.dtype)
    keep = kept(method, rollouts, own)
    return weighted(method, logp, old, rollouts, own, alpha(method, rollouts, keep, logp.dtype),
                    aggregate(method, rollouts, keep, logp.dtype) if method.has_loss_kl else None)


def weighted(method: Method, logp: Tensor, old: Tensor, rollouts: Rollouts, credit: Tensor, weight: Tensor,
             share: Tensor | None) -> Tensor:
    """J = Σ_it α_it · bound(s_it, A_it) − β Σ_it a_it · R_it with given weights (B, T) α and a; log-probs 0 on padding.

    `share` is asked for where a KL term stands in the loss.
    """
    if method.linked:
        value = (weight * linked(method, logp, rollouts, credit)).sum()
        return value + method.sft * supervised(method, logp, rollouts, credit) if method.sft else value
    term = bounded(method, logp, logp - old, rollouts.mask, credit)
    trust = trusted(method, logp, old, rollouts.mask, credit)
    value = (weight * (term if trust is None else term * trust)).sum()
    if share is None or not method.has_loss_kl:
        return value
    return value - method.beta * (share * penalty(method, logp, logp - old, rollouts)).sum()


def effective_credit(objective: Callable[[Tensor], Tensor], logp: Tensor) -> Tensor:
    """w_it = ∂J/∂log π(y_it) of any objective, from this package or not.

    >>> effective_credit(lambda logp: (logp * torch.tensor([[2., 0.]])).sum(), torch.tensor([[-1., -1.]]))
    tensor([[2., 0.]])
    """
    check_real(logp, "logp")
    if not callable(objective):
        raise CreditscopeError(f"effective_credit needs a function from log-probs to one number, got "
                               f"{type(objective).__name__}; write lambda logp: surrogate(method, logp, rollouts)")
    leaf = logp.detach().to(torch.promote_types(logp.dtype, torch.float32)).clone().requires_grad_()
    with torch.enable_grad():
        value = objective(leaf)
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CreditscopeError(f"effective_credit needs an objective that returns one number, got {got}; sum it first")
    if not value.requires_grad:
        raise CreditscopeError("the objective does not depend on the log-probs it was given; "
                               "compute it from the argument, not from a detached copy")
    (w,) = torch.autograd.grad(value, leaf)
    return w


def _check_logp(logp: Tensor, rollouts: Rollouts) -> None:
    require(logp, Tensor, "logp", "convert it with torch.as_tensor(...)")
    if logp.shape != rollouts.mask.shape:
        raise CreditscopeError(f"logp must have the rollouts' shape {tuple(rollouts.mask.shape)}, "
                               f"got {tuple(logp.shape)}")
    if not logp.is_floating_point():
        raise CreditscopeError(f"logp must be floating point, got {logp.dtype}")


def check_credit(credit: Tensor, rollouts: Rollouts, who: str = "credit") -> Tensor:
    """(B, 1) or (B, T), finite wherever a token counts."""
    rows = len(rollouts)
    check_real(credit, who)
    if tuple(credit.shape) not in ((rows,), (rows, 1), tuple(rollouts.mask.shape)):
        raise CreditscopeError(f"{who} must be (B,) = ({rows},) or (B, T) = {tuple(rollouts.mask.shape)}, "
                               f"got {tuple(credit.shape)}")
    credit = credit[:, None] if credit.dim() == 1 else credit
    spread = credit.expand_as(rollouts.mask)
    bad = ~torch.isfinite(spread) & rollouts.mask
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise CreditscopeError(f"{who} must be finite: row {row}, column {column} is {spread[row, column].item()} (and "
                               f"{int(bad.sum()) - 1} more)")
    return credit.masked_fill(~torch.isfinite(credit), 0.0)
