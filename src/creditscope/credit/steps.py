"""Steps of an answer: the step of each token, its reward, and the baseline over other steps."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.advantages import BASELINES


def labels(rollouts: Rollouts, who: str) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T) step of each token, (B, S) step rewards, (B, S) which steps exist; refuse rollouts without labels.

    A labelled batch may hold no step: then S = 1 and no step exists.
    """
    reward = rollouts.step_reward
    if rollouts.step is None or reward is None:
        raise CreditscopeError(f"credit {who!r} needs step labels, and these rollouts have none; use a task that "
                               f"judges steps, such as arithmetic, or give step and step_reward in the file")
    back = (rollouts.step >= 0) & (rollouts.step < rollouts.step.cummax(dim=1).values)
    if bool(back.any()):
        i, t = back.nonzero()[0].tolist()
        raise CreditscopeError(f"credit {who!r} needs steps in order: row {i}, column {t} goes back to step "
                               f"{int(rollouts.step[i, t])}; number the steps of an answer as they come")
    if reward.shape[1] == 0:
        none = reward.new_zeros(len(rollouts), 1)
        return rollouts.step, wide(none), none.bool()
    column = torch.arange(reward.shape[1], device=reward.device)
    exists = column < rollouts.step.amax(dim=1, keepdim=True) + 1
    # A reward past the last token's step still counts: the text may have been cut by the tokenizer.
    exists = exists | ((reward != 0).flip(1).cumsum(1).flip(1) > 0)
    return step_of(rollouts.step), wide(reward), exists


def step_of(step: Tensor) -> Tensor:
    """(B, T) the step of each token; a token in none belongs to the step before it, at the start to the first.

    >>> step_of(torch.tensor([[-1, 0, -1, 1], [-1, -1, -1, -1]])).tolist()
    [[0, 0, 0, 1], [-1, -1, -1, -1]]
    """
    filled = step.cummax(dim=1).values  # steps come in order
    return torch.where((filled < 0) & (step.amax(dim=1, keepdim=True) >= 0), 0, filled)


def to_go(reward: Tensor) -> Tensor:
    """(B, S) G_s = Σ_{s' ≥ s} r_s'.

    >>> to_go(torch.tensor([[1., 0., 2.]])).tolist()
    [[3.0, 2.0, 2.0]]
    """
    return reward.flip(1).cumsum(1).flip(1)


def turn_key(rollouts: Rollouts, reward: Tensor) -> Tensor:
    """(B, S) one number per (group, turn)."""
    number = torch.unique(rollouts.group, return_inverse=True)[1][:, None]
    turn = torch.arange(reward.shape[1], device=reward.device)
    key: Tensor = number * reward.shape[1] + turn
    return key


def centred(method: Method, value: Tensor, key: Tensor, exists: Tensor, length: Tensor) -> Tensor:
    """(B, S) value minus the method's own baseline over all steps with the same `key`; 0 where no step exists.

    A step alone with its key, and a difference by rounding alone, give 0.
    """
    rows, _ = exists.nonzero(as_tuple=True)
    picked, groups = value[exists], Groups(key[exists])
    name = method.baseline if method.baseline in BASELINES else "group_mean"
    rest = picked - BASELINES[name](picked, groups, length[rows].to(picked.dtype))
    if name != "none":
        rest = rest.masked_fill(groups.unanimous(picked), 0.0)
    return torch.zeros_like(value).masked_scatter(exists, rest)


def spread(value: Tensor, step: Tensor) -> Tensor:
    """(B, T) each token gets its step's value; a row without steps gets 0."""
    known = value.gather(1, step.clamp(min=0))
    return known.masked_fill(step < 0, 0.0)
