"""Our credit as verl's advantages: `algorithm.adv_estimator=creditscope_NAME`.

NAME is a method (its own advantage) or an estimator (scaled as in the method `algorithm.creditscope_method`, by default
grpo). Groups come from verl's uid. A group without a chosen token is padding that verl appends: it is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.credit import find_estimator
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.methods.find import find
from creditscope.objective.weights import aggregate, alpha, kept
from creditscope.plugins.verl.table import countable, refuse_credit, refuse_method

METHOD_KEY = "creditscope_method"
"""In verl's `algorithm` section: the row that scales the credit of an estimator."""

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]


def estimator_of(credit: str, method: Method | None = None) -> AdvantageFn:
    """verl's estimator: A_it = λ_it · credit_it in the units of `method`, or of the configured one."""

    def compute(token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None,
                **_: Any) -> tuple[Tensor, Tensor]:
        row = method or find((config.get(METHOD_KEY, None) if config is not None else None) or "grpo")
        if method is not None and method.external:
            raise CreditscopeError(f"method {method.name!r} takes its credit from a critic: set "
                                   f"algorithm.adv_estimator=gae, and keep creditscope_{method.name} as the loss")
        refuse_method(row)
        refuse_credit(credit)
        if index is None:
            raise CreditscopeError("verl passed no uid, so answers to one prompt are unknown; put 'uid' into the "
                                   "batch, as verl's own trainers do")
        rewards, chosen = token_level_rewards, response_mask.bool()
        group = numbered(index).to(chosen.device)
        real = Groups(group).sum(chosen.sum(dim=1)) > 0
        out = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)
        if bool(real.any()):
            rollouts = rollouts_of(rewards[real], chosen[real], group[real])
            estimate = find_estimator(credit)(lenient(row, rollouts.group), rollouts, Tools())
            out[real] = estimate * group_share(row, rollouts, estimate, len(chosen))
        out = out.to(rewards.dtype)
        return out, out

    return compute


def rollouts_of(rewards: Tensor, mask: Tensor, group: Tensor) -> Rollouts:
    """verl's padded tensors as Rollouts, without tokens. Steps are turns."""
    step, step_reward = turns(rewards, mask)
    return Rollouts(tokens=torch.zeros_like(mask, dtype=torch.int64), mask=mask,
                    logp=torch.zeros(mask.shape, dtype=torch.float64, device=mask.device),
                    reward=rewards.double().sum(dim=1), group=group, step=step, step_reward=step_reward)


def turns(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(step (B, T), step_reward (B, S)): a turn is a run of chosen tokens, its reward all up to the next turn's start.

    >>> turns(torch.tensor([[0., 1., 2., 4.]]), torch.tensor([[True, True, False, True]]))
    (tensor([[ 0,  0, -1,  1]]), tensor([[3., 4.]], dtype=torch.float64))
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turn = ((mask & ~before).cumsum(dim=1) - 1).clamp(min=0)  # positions before the first turn belong to it
    paid = torch.zeros(len(mask), int(turn.max()) + 1, dtype=torch.float64, device=mask.device)
    paid.scatter_add_(1, turn, rewards.double())
    return turn.masked_fill(~mask, -1), paid


def group_share(method: Method, rollouts: Rollouts, credit: Tensor, rows: int) -> Tensor:
    """(B, T) λ_it = α_it / a⁰_it, with `rows` the rows that the loss counts, padding included."""
    plain = countable(method)
    weight = alpha(method, rollouts, kept(method, rollouts, credit), torch.float64)
    counted = aggregate(plain, rollouts, torch.ones_like(rollouts.mask[:, 0]), torch.float64)
    if plain.aggregate in ("sequence_mean", "sequence_sum", "constant"):
        counted = counted * len(rollouts) / rows
    return weight / counted.masked_fill(~rollouts.mask, 1.0)


def lenient(method: Method, group: Tensor) -> Method:
    """The row with A = 0 for a rollout alone in its group; refused where all are alone."""
    if method.centred and bool((Groups(group).size == 1).all()):
        raise CreditscopeError(f"method {method.name!r} compares a rollout with its group, and each of the "
                               f"{len(group)} groups has one rollout; set actor_rollout_ref.rollout.n to 2 or more")
    return method.replace(lone="zero") if method.lone == "refuse" else method


def numbered(index: Sequence[Any]) -> Tensor:
    """(B,) group ids, in the order in which the prompts appear: b, a, b → 0, 1, 0."""
    seen: dict[Any, int] = {}
    return torch.tensor([seen.setdefault(uid.item() if isinstance(uid, Tensor) else uid, len(seen)) for uid in index])
