"""A row of the table as verl's policy loss: `actor.policy_loss.loss_mode=creditscope_NAME`.

    loss = −J = −Σ_it a⁰_it · bound(s_it, A_it) · dp_size

The row decides ratio, bound, clip and divisor; A comes from verl's advantages. Divisors are those of the global
mini-batch, so micro-batches and ranks change nothing. verl adds its own KL and entropy terms to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.surrogate import surrogate
from creditscope.plugins.verl.names import PREFIX, assert_registered
from creditscope.plugins.verl.table import countable, refuse_method
from creditscope.runs import schema

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float]]]

MODES = {"sequence_mean": "seq-mean-token-mean", "sequence_sum": "seq-mean-token-sum", "token_mean": "token-mean",
         "constant": "seq-mean-token-sum-norm", "token_sum": "token-sum"}
"""Our aggregate -> verl's loss_agg_mode."""
DECIDED = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0,
           "tau_neg": 1.05}
"""Settings of verl's losses that the row decides, with verl's defaults."""


def loss_of(method: Method) -> PolicyLossFn:
    """verl's policy loss for a row; the first call refuses wrong settings."""
    checked: list[bool] = []

    def compute(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor,
                loss_agg_mode: str = "token-mean", config: Any = None,
                rollout_is_weights: Tensor | None = None) -> tuple[Tensor, dict[str, float]]:
        if not checked:
            assert_registered(f"{PREFIX}{method.name}")
            refuse_method(method)
            refuse_settings(method, loss_agg_mode, config)
            checked.append(True)
        # A correction of the sampler multiplies the policy term; bounds are homogeneous, so it multiplies A.
        credit = advantages if rollout_is_weights is None else advantages * rollout_is_weights
        told = getattr(config, "global_batch_info", None) or {}
        return policy_loss(method, old_log_prob, log_prob, credit, response_mask.bool(), told)

    return compute


def policy_loss(method: Method, old: Tensor, logp: Tensor, credit: Tensor, mask: Tensor,
                told: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """(loss, readings) of a micro-batch; `told` is verl's global_batch_info. The loss's slope is −w."""
    row = limited(countable(method), told)
    if not bool(mask.any()):  # a micro-batch of verl's padding
        return logp.sum() * 0.0, readings(logp, credit, mask)
    rollouts = Rollouts(tokens=torch.zeros_like(mask, dtype=torch.int64), mask=mask, logp=old.detach(),
                        reward=torch.zeros(len(mask), device=mask.device),
                        group=torch.arange(len(mask), device=mask.device))
    live = logp.detach().requires_grad_()
    with torch.enable_grad():
        value = -surrogate(row, live, rollouts, credit) * share(row, rollouts, told)
        (slope,) = torch.autograd.grad(value, live)
    loss: Tensor = _Known.apply(logp, value.detach(), slope)  # type: ignore[no-untyped-call]
    return loss, readings(-slope, credit, mask)


class _Known(torch.autograd.Function):
    """A loss whose slope ∂loss/∂log π = −w was computed already."""

    @staticmethod
    def forward(ctx: Any, log_prob: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def share(row: Method, rollouts: Rollouts, told: Mapping[str, Any]) -> float:
    """The factor from a mean over this micro-batch to its part of the mini-batch, times the ranks that average.

        token mean       ΣL_here / ΣL_global · dp        else      B_here / B_global · dp
    """
    ranks = int(told.get("dp_size") or 1)
    if row.aggregate == "token_sum":
        return float(ranks)
    key = "batch_num_tokens" if row.aggregate == "token_mean" else "global_batch_size"
    here = int(rollouts.lengths.sum()) if row.aggregate == "token_mean" else len(rollouts)
    count = told.get(key)
    if count is None and ranks > 1:
        raise CreditscopeError(f"verl's config.global_batch_info has no {key!r}, and {ranks} ranks cannot be averaged "
                               f"without it; put it into the batch, as verl's own trainers do")
    return ranks * here / float(here if count is None else count)


def limited(row: Method, told: Mapping[str, Any]) -> Method:
    """The row with verl's loss_scale_factor as L_max, where its aggregate divides by one."""
    if row.aggregate != "constant" or row.max_tokens is not None:
        return row
    limit = told.get("loss_scale_factor")
    if limit is None:
        raise CreditscopeError(f"method {row.name!r} divides by L_max, and the width of a micro-batch changes from one "
                               f"to the next; set actor_rollout_ref.actor.loss_scale_factor to "
                               f"data.max_response_length")
    return row.replace(max_tokens=int(limit))


def refuse_settings(method: Method, mode: str, config: Any) -> None:
    fits = MODES[countable(method).aggregate]
    if mode not in ("token-mean", fits):
        raise CreditscopeError(f"loss_agg_mode={mode!r}: the row of method {method.name!r} decides that; leave it out, "
                               f"or set {fits!r} to give verl's KL and entropy terms the same")
    for name, default in DECIDED.items():
        value = getattr(config, name, default)
        if value != default:
            raise CreditscopeError(f"actor.{name}={value}: the row of method {method.name!r} decides that; leave it "
                                   f"out. Its numbers: creditscope list methods {method.name}")


@torch.no_grad()
def readings(w: Tensor, credit: Tensor, mask: Tensor) -> dict[str, float]:
    """Shares of this micro-batch's tokens and rows, NaN without a chosen token; verl averages them."""
    tokens, rows = int(mask.sum()), int(mask.any(dim=1).sum())
    given = (credit != 0) & mask
    silent = mask.any(dim=1) & ~given.any(dim=1)
    counts: dict[str, Tensor] = {schema.W_ZERO: ((w == 0) & mask).sum(), schema.W_STOPPED: (given & (w == 0)).sum(),
              schema.W_POSITIVE: ((w > 0) & mask).sum()}
    out = {name: float(count) / tokens if tokens else float("nan") for name, count in counts.items()}
    return out | {schema.SIGNAL_SILENT_ROWS: float(silent.sum()) / rows if rows else float("nan")}
