"""Per-turn returns with per-turn baselines: what came before a turn is not credited to it."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.credit.steps import centred, labels, spread, to_go
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.method import Method
from creditscope.rollouts import Rollouts


def turn_return(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = G_ih − b_h,  G_ih = Σ_{s ≥ h} r_is,  h = s(t), b_h the method's baseline over the siblings' turn h."""
    step, reward, exists = labels(rollouts, "turn_return")
    # One key for each (group, turn): group ids are any integers, so they are numbered first.
    number = torch.unique(rollouts.group, return_inverse=True)[1][:, None]
    key = number * reward.shape[1] + torch.arange(reward.shape[1], device=reward.device)
    return in_units(method, spread(centred(method, to_go(reward), key, exists, rollouts.lengths), step), rollouts)
