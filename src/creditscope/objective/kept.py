"""The rollouts of a step as arrays for groups/*.npz: the samples, A, w, and tokens past the bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.objective.bounds import beyond
from creditscope.objective.weights import alpha, kept

FIELDS = ("tokens", "mask", "logp", "reward", "group", "entropy", "step", "step_reward", "step_state", "ref_logp")


def kept_arrays(method: Method | None, rollouts: Rollouts, credit: Tensor, w: Tensor, live: Tensor,
                after: Tensor | None = None, also: Mapping[str, Tensor] | None = None,
                special: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The arrays of a batch with its credit A and its w.

    `live` and `after` are log π of the recorded pass and after the last update, `also` the credits of --also, `special`
    the names of tokens without a text. Without a method no token has a bound, and none is past one.
    """
    tensors = {name: getattr(rollouts, name) for name in FIELDS} | {
        "credit": credit, "w": w, "live_logp": live, "after_logp": after}
    if method is not None:
        tensors["clipped"] = past_bound(method, rollouts, credit, live) > 0
        tensors["after_past"] = None if after is None else past_bound(method, rollouts, credit, after)
    if also:
        tensors["other_credit"] = torch.stack([other.expand_as(rollouts.mask) for other in also.values()])
    out: dict[str, Any] = {k: v.float().cpu().numpy() if v.is_floating_point() else v.cpu().numpy()
                           for k, v in tensors.items() if v is not None}
    width = rollouts.tokens.shape[1]
    out["prompt"], out["text"] = np.array(list(rollouts.prompt)), np.array(list(rollouts.text))
    out["pieces"] = np.array([[*row, *[""] * (width - len(row))] for row in rollouts.pieces])
    names = {i: special[i] for i in np.unique(out["tokens"]).tolist() if i in special} if special else {}
    if names:
        out |= {"special_ids": np.array(list(names)), "special_names": np.array(list(names.values()))}
    return out | ({"other_names": np.array(list(also))} if also else {})


def past_bound(method: Method, rollouts: Rollouts, credit: Tensor, logp: Tensor) -> Tensor:
    """(B, T) nats past the bound at `logp`, 0 inside it and where the method does not learn (α = 0): as `Overshoot`."""
    own = credit.double().expand_as(rollouts.mask)
    learns = alpha(method, rollouts, kept(method, rollouts, own), torch.float64) != 0
    return beyond(method, logp.double(), rollouts.logp.double(), rollouts.mask, own.masked_fill(~learns, 0.0))
