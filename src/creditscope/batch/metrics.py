"""Metrics of a batch. A metric that does not exist is absent, never 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, binary_unit, std
from creditscope.batch.rollouts import Rollouts
from creditscope.runs import schema


def signal(rollouts: Rollouts) -> dict[str, Any]:
    """Rewards, live groups, lengths, entropy and step rewards of the samples."""
    groups = Groups(rollouts.group)
    live = len(Groups(rollouts.group[~groups.unanimous(rollouts.reward)]))
    lengths = rollouts.lengths.double()
    out: dict[str, Any] = {
        schema.REWARD_MEAN: float(rollouts.reward.mean()), schema.REWARD_MIN: float(rollouts.reward.min()),
        schema.REWARD_MAX: float(rollouts.reward.max()), schema.SIGNAL_GROUPS: len(groups),
        schema.SIGNAL_LIVE_GROUPS: live,
        schema.SIGNAL_DEAD_GROUPS: 1 - live / len(groups), schema.LENGTH_MEAN: float(lengths.mean()),
        schema.LENGTH_MAX: int(lengths.max()), schema.LENGTH_EMPTY: int((lengths == 0).sum()),
    }
    if len(rollouts) > 1:
        out[schema.REWARD_STD] = float(std(rollouts.reward, 1))
    if rollouts.entropy is not None:
        out[schema.ENTROPY_MEAN] = float(rollouts.entropy[rollouts.mask].mean())
    if rollouts.step_reward is not None and rollouts.step is not None:
        column = torch.arange(rollouts.step_reward.shape[1], device=rollouts.step.device)
        exists = column <= rollouts.step.amax(dim=1, keepdim=True)
        if bool(exists.any()):
            out[schema.REWARD_STEPS] = float(rollouts.step_reward[exists].mean())
    return out


def reference_kl(rollouts: Rollouts) -> float:
    """1/B Σ_it (log π_old − log π_ref)_it, the unbiased estimate of KL(π_old ‖ π_ref) per answer."""
    assert rollouts.ref_logp is not None
    gap = (rollouts.logp.double() - rollouts.ref_logp.double()).masked_fill(~rollouts.mask, 0.0)
    return float(gap.sum() / len(rollouts))


def assigned(credit: Tensor, rollouts: Rollouts) -> dict[str, Any]:
    """Credit A as an estimator gave it: the share that differs inside a rollout, and the groups without any.

        within = Σ_it (A_it − Ā_i)² / Σ_it A_it²,  Ā_i = 1/L_i Σ_t A_it: 0 for outcome credit, whatever the outcome
    """
    given = credit.double().masked_fill(~rollouts.mask, 0.0)
    lengths = rollouts.lengths.clamp(min=1)[:, None]
    mean = given.sum(dim=1, keepdim=True) / lengths
    total = float((given * given).sum())
    groups = Groups(rollouts.group)
    silent = groups.totals((given != 0).any(dim=1).double()) == 0
    out: dict[str, Any] = {schema.CREDIT_DEAD_GROUPS: float(silent.double().mean())}
    if total > 0:
        rest = (given - mean).masked_fill(~rollouts.mask, 0.0)
        out[schema.CREDIT_WITHIN] = float((rest * rest).sum()) / total
    return out


def untrained(given: Tensor, trained: Tensor) -> dict[str, Any]:
    """Tokens with credit that the loss leaves out: whole rows, and the first and last ones of every row.

        dead rows = #(i: some A_it ≠ 0, all w_it = 0) / #(i: some A_it ≠ 0)
        skipped   = median_i #(tokens with A_it ≠ 0 before the first, after the last w_it ≠ 0), over the other rows

    `given` (B, T) is True where a token has credit, `trained` (B, T) where it has w or the loss's mask keeps it. The
    median, since a wrong mask hits the same tokens of most rows; one that is shifted around the end spares the longest.
    """
    trained = given & trained
    rows, live = given.any(dim=1), trained.any(dim=1)
    count, moved = (int(each.sum()) for each in (rows, live))
    if not count:
        return {}
    out: dict[str, Any] = {schema.W_DEAD_ROWS: 1 - moved / count}
    if moved:
        for name, flip in ((schema.W_SKIPPED_FIRST, False), (schema.W_SKIPPED_LAST, True)):
            has, is_trained = (each.flip(1) if flip else each for each in (given[live], trained[live]))
            out[name] = int((has & (is_trained.cumsum(dim=1) == 0)).sum(dim=1).median())
    return out


def spread(w: Tensor, mask: Tensor) -> dict[str, Any]:
    """How w is spread over the tokens; empty where all of it is 0."""
    w = w[mask]
    w = w / binary_unit(w.abs().amax())
    size = w.abs()
    total = float(size.sum())
    if total == 0:
        return {}
    top = size.sort(descending=True).values[: max(1, len(size) // 10)]
    return {schema.W_TOP10_MASS: float(top.sum()) / total, schema.W_ZERO: float((size == 0).double().mean()),
            schema.W_POSITIVE_MASS: float(w.clamp(min=0).sum()) / total}
