"""Per-turn returns with per-turn baselines, without the rewards of earlier turns."""

from __future__ import annotations

from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.steps import centred, labels, spread, to_go, turn_key
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def turn_return(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = G_ih − b_h,  G_ih = Σ_{s ≥ h} r_is,  h = s(t), b_h the method's baseline over the siblings' turn h."""
    step, reward, exists = labels(rollouts, "turn_return")
    rest = centred(method, to_go(reward), turn_key(rollouts, reward), exists, rollouts.lengths)
    return in_units(method, spread(rest, step), rollouts)
