"""Per-turn returns with a baseline per state."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.steps import centred, labels, spread, to_go, turn_key
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.methods.axes import Method


def state_return(method: Method, rollouts: Rollouts, tools: Tools) -> Tensor:
    """A_it = G_ih − b(s_ih), b the method's baseline over all turns of the group that begin in the same state.

    A state is Markov: where time matters, the task puts the turn into it. A turn alone in its state is compared with
    the siblings' same turn, as in `turn_return`; 0 there would shrink credit where states are rare, and so bias the
    gradient. Where no state recurs within one answer, being alone does not depend on the action chosen there.
    """
    step, reward, exists = labels(rollouts, "state_return")
    if not bool(exists.any()):
        return in_units(method, reward.new_zeros(len(rollouts), 1), rollouts)
    state = rollouts.require("step_state", "credit 'state_return'")
    # One key per (group, state).
    pairs = torch.stack([rollouts.group[:, None].expand_as(state), state], dim=2).flatten(0, 1)
    key = torch.unique(pairs, dim=0, return_inverse=True)[1].view_as(state)
    go = to_go(reward)
    by_state = centred(method, go, key, exists, rollouts.lengths)
    by_turn = centred(method, go, turn_key(rollouts, reward), exists, rollouts.lengths)
    alone = torch.bincount(key[exists], minlength=int(key.max()) + 1)[key] <= 1
    return in_units(method, spread(torch.where(alone, by_turn, by_state), step), rollouts)
