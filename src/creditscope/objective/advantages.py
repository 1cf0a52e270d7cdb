"""A: from the rewards of a group to one advantage per rollout, or one per token where the method asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from creditscope.batch.groups import Groups, binary_unit, check_real, std, wide
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError, require
from creditscope.methods.axes import Method


def advantage(method: Method, reward: Tensor, group: Tensor, length: Tensor | None = None) -> Tensor:
    """(B,) A_i = (r_i − b_i) / scale_i, then whitened where the method whitens.

    `length` (B,) counts for methods that weigh rollouts by their tokens; without it all lengths are equal.

    >>> from creditscope.methods.table import METHODS
    >>> advantage(METHODS["rloo"], torch.tensor([1., 0., 0.]), torch.tensor([0, 0, 0])).tolist()
    [1.0, -0.5, -0.5]
    """
    check_method(method)
    reward, group, length = _checked(reward, group, length)
    _need_own_credit(method)
    groups = Groups(group)
    raw = _kept_raw(method, group, groups)
    centred = reward - BASELINES[method.baseline](reward, groups, length).masked_fill(raw, 0.0)
    if method.centred:
        # A unanimous group is 0 exactly: a std would magnify rounding in the mean.
        centred = centred.masked_fill(groups.unanimous(reward) & ~raw, 0.0)
    found = SCALES[method.scale](centred, reward, groups, method)
    if method.whiten != "none":  # over tokens a rollout counts L_i times
        weight = length if method.whiten == "tokens" else torch.ones_like(found)
        found = standardised(found, weight, method.whiten_eps, method.std)
    bad = ~torch.isfinite(found)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise CreditscopeError(f"the advantage of row {row} is {found[row].item()}: rewards of up to "
                               f"{float(reward.abs().max()):.3g} are too large to be added up in {reward.dtype}; "
                               f"divide them by a constant")
    return found


def token_advantage(method: Method, rollouts: Rollouts) -> Tensor:
    """The method's own credit for a batch, (B, 1) or (B, T), with KL in the reward and entropy costs applied.

        KL in the reward         r_i ← r_i − β Σ_t log(π_old/π_ref)_it                         (B, 1)
        KL in the token reward   A_it = whiten( r_i − β Σ_{t' ≥ t} log(π_old/π_ref)_it' )       (B, T)
    """
    _need_own_credit(method)
    reward, length = wide(rollouts.reward), rollouts.lengths
    if method.has_reward_kl:
        drift = method.beta * log_drift(method, rollouts)
        if method.kl_in == "token_reward":
            credit = reward[:, None] - drift.flip(1).cumsum(1).flip(1)
            chosen = rollouts.mask.to(credit.dtype)
            return standardised(credit, chosen, method.whiten_eps, method.std) if method.whiten == "tokens" else credit
        reward = reward - drift.sum(dim=1)
    plain = advantage(method, reward, rollouts.group, length)
    if method.entropy_cost:
        plain = plain - method.entropy_cost * mean_entropy(method, rollouts)
    return plain[:, None]


def log_drift(method: Method, rollouts: Rollouts) -> Tensor:
    """(B, T) log(π_old/π_ref) of the chosen tokens, 0 elsewhere."""
    reference = rollouts.require("ref_logp", f"method {method.name!r} with β = {method.beta}")
    return (wide(rollouts.logp) - wide(reference)).masked_fill(~rollouts.mask, 0.0)


def mean_entropy(method: Method, rollouts: Rollouts) -> Tensor:
    """(B,) ⟨H⟩_i = 1/L_i Σ_t H_it, 0 for an empty completion."""
    entropy = rollouts.require("entropy", f"method {method.name!r}")
    total = wide(entropy).masked_fill(~rollouts.mask, 0.0).sum(dim=1)
    return total / rollouts.lengths.clamp(min=1)


# -- baselines: (reward, groups, length) -> b, one value per row ---------------------------------------------------


def _leave_one_out(reward: Tensor, groups: Groups, length: Tensor) -> Tensor:
    """b_i = 1/(R−1) Σ_{j≠i} r_j; the rollout's own reward where it is alone."""
    others = groups.size - 1
    return torch.where(others > 0, (groups.sum(reward) - reward) / others.clamp(min=1), reward)


def _length_weighted_mean(reward: Tensor, groups: Groups, length: Tensor) -> Tensor:
    """b_i = Σ_j L_j r_j / Σ_j L_j; the plain mean where a whole group is empty."""
    total = groups.sum(length)
    return torch.where(total > 0, groups.sum(length * reward) / total.clamp(min=1), groups.mean(reward))


BASELINES: dict[str, Callable[[Tensor, Groups, Tensor], Tensor]] = {
    "none": lambda reward, groups, length: torch.zeros_like(reward),  # b_i = 0
    "group_mean": lambda reward, groups, length: groups.mean(reward),  # b_i = 1/R Σ_j r_j
    "leave_one_out": _leave_one_out,
    "length_weighted_mean": _length_weighted_mean,
}


# -- scales: (centred, reward, groups, method) -> scaled -----------------------------------------------------------


def _divide(value: Tensor, by: Tensor) -> Tensor:
    """value / by, and 0 where `by` is 0: there the numerator is 0 too."""
    return torch.where(by > 0, value / by.masked_fill(by <= 0, 1.0), torch.zeros_like(value))


def _by_group_std(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = (r_i − b_i) / (std(r in group) + ε); a group of one has std 1."""
    return _divide(centred, groups.std(reward, _ddof(method)).masked_fill(groups.size == 1, 1.0) + method.std_eps)


def _by_batch_std(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = (r_i − b_i) / (std(r in batch) + ε)."""
    if len(reward) <= _ddof(method):
        return torch.zeros_like(centred)
    return _divide(centred, std(reward, _ddof(method)) + method.std_eps)


def _by_group_mean(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = (r_i − m) / m, and 0 where m = 0: a group without one success has no maximum-likelihood gradient."""
    mean = groups.mean(reward)
    if bool((mean < 0).any()):
        row = int((mean < 0).nonzero()[0])
        raise CreditscopeError(f"method {method.name!r} divides by the group's mean reward, which must be ≥ 0: the "
                               f"group of row {row} has mean {mean[row].item():.4g}; make the rewards non-negative, "
                               f"or choose a method that does not divide by their mean, such as grpo")
    return _divide(centred, mean + method.std_eps)


def _by_live_groups(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = α (r_i − b_i), α = groups / groups that are not unanimous."""
    dead = groups.totals(groups.unanimous(reward).to(reward.dtype)) > 0
    return centred * (len(groups) / (~dead).sum().clamp(min=1).to(centred.dtype))


def _by_nonzero_rewards(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = α (r_i − b_i), α = rollouts / rollouts whose reward is not 0."""
    return centred * (len(reward) / (reward != 0).sum().clamp(min=1).to(centred.dtype))


def _by_beta_density(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = (r_i − p) / f(p; α, β), f the Beta density with α = max(1, 1 + a/3), β = max(1, 1 + b/3).

    (a, b) fit the Beta distribution of the groups' success rates p by moments (mean m, sample variance v):
    a = (m(1−m)/v − 1)·m, b = (m(1−m)/v − 1)·(1−m). With one group, or v = 0, nothing can be fitted and f = 1.
    """
    if bool(((reward < 0) | (reward > 1)).any()):
        row = int(((reward < 0) | (reward > 1)).nonzero()[0])
        raise CreditscopeError(f"method {method.name!r} models success rates, so rewards must lie in [0, 1]: "
                               f"row {row} has {reward[row].item():.4g}; rescale the rewards")
    p = (groups.totals(reward) / groups.counts).double()
    m, v = p.mean(), p.var() if len(p) > 1 else p.new_zeros(())
    # Rates that differ by rounding alone would be fitted by a spike of any height.
    varies = v > (8 * torch.finfo(reward.dtype).eps * m) ** 2
    fit = torch.where(varies, m * (1 - m) / v.clamp(min=torch.finfo(p.dtype).tiny) - 1, torch.zeros_like(m))
    alpha, beta = (1 + fit * m / 3).clamp(min=1), (1 + fit * (1 - m) / 3).clamp(min=1)
    log_f = torch.special.xlogy(alpha - 1, p) + torch.special.xlog1py(beta - 1, -p) \
        - (torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta))
    scaled = centred * torch.exp(-log_f).to(centred.dtype)[groups.index]
    # The density may vanish at p = 0 or 1, where the group is unanimous and has no advantage to divide.
    return torch.where(centred == 0, centred, scaled)


def _extremes(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = 1{i is the best of its group} − 1{i is its worst}, of equal ones the first; 0 in a unanimous group."""
    found = torch.zeros_like(centred)
    rows = torch.arange(len(reward), device=reward.device)
    for sign in (1.0, -1.0):
        best = (sign * reward).new_full((len(groups),), -torch.inf).scatter_reduce_(0, groups.index, sign * reward,
                                                                                    "amax")
        first = torch.where(sign * reward == best[groups.index], rows, len(rows))
        first = first.new_full((len(groups),), len(rows)).scatter_reduce_(0, groups.index, first, "amin")
        found[first] += sign
    return found.masked_fill(groups.unanimous(reward), 0.0)


def _label(centred: Tensor, reward: Tensor, groups: Groups, method: Method) -> Tensor:
    """A_i = +1 where r_i > 0, −1 elsewhere."""
    return torch.where(reward > 0, torch.ones_like(centred), -torch.ones_like(centred))


SCALES: dict[str, Callable[[Tensor, Tensor, Groups, Method], Tensor]] = {
    "none": lambda centred, reward, groups, method: centred,  # A_i = r_i − b_i
    "group_std": _by_group_std,
    "batch_std": _by_batch_std,
    "group_mean": _by_group_mean,
    "live_groups": _by_live_groups,
    "nonzero_rewards": _by_nonzero_rewards,
    "beta_density": _by_beta_density,
    "extremes": _extremes,
    "label": _label,
}


# -- whitening -------------------------------------------------------------------------------------------------


def standardised(value: Tensor, weight: Tensor, eps: float, kind: str = "sample") -> Tensor:
    """(x − μ)/√(σ² + ε) with μ, σ² the weighted mean and variance, of the `kind` that the axis std names; 0 where x
    varies by rounding alone."""
    total = weight.sum()
    count = total - int(kind == "sample")
    if total <= 1:
        raise CreditscopeError(f"cannot whiten over {int(total)} value(s); the batch needs at least 2")
    unit = binary_unit(value.abs().amax())
    mean = (value / unit * weight).sum() / total * unit
    centred = value - mean
    unit = binary_unit((centred * (weight > 0)).abs().amax())
    var = ((centred / unit) ** 2 * weight).sum() / count
    varies = var > (8 * torch.finfo(value.dtype).eps * mean / unit) ** 2
    if eps:  # beside ε a small variance may vanish; in a small unit ε itself would overflow
        unit = unit.clamp(min=1.0)
        var = ((centred / unit) ** 2 * weight).sum() / count
    return torch.where(varies, centred / unit / (var + eps / unit / unit).sqrt(), torch.zeros_like(centred))


# -- checks -----------------------------------------------------------------------------------------------------


def check_method(method: Method) -> None:
    """Refuse a name in the place of its row."""
    require(method, Method, "method", 'take its row: METHODS["grpo"], or creditscope.methods.find.find(name)')


def _checked(reward: Tensor, group: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    for name, value in (("reward", reward), ("group", group), ("length", reward if length is None else length)):
        check_real(value, name)
    if reward.dim() != 1 or reward.shape != group.shape:
        raise CreditscopeError(f"advantage needs reward (B,) and group (B,), got {tuple(reward.shape)} and "
                               f"{tuple(group.shape)}")
    if length is not None and length.shape != reward.shape:
        raise CreditscopeError(f"advantage needs length (B,) = {tuple(reward.shape)}, got {tuple(length.shape)}")
    if not bool(torch.isfinite(reward).all()):
        row = int((~torch.isfinite(reward)).nonzero()[0])
        raise CreditscopeError(f"reward must be finite: row {row} is {reward[row].item()}; drop or repair that rollout")
    reward = wide(reward)
    length = torch.ones_like(reward) if length is None else length.to(reward.dtype)
    return reward, group, length


def _need_own_credit(method: Method) -> None:
    if method.external:
        raise CreditscopeError(f"method {method.name!r} takes its credit from outside; "
                               f"pass credit=(B, T) to surrogate, for example from GAE with a critic")


def _kept_raw(method: Method, group: Tensor, groups: Groups) -> Tensor:
    """(B,) True for rollouts that are alone in their group and keep their raw reward."""
    lone = groups.size == 1
    if not method.centred or method.lone == "zero" or not bool(lone.any()):
        return torch.zeros_like(lone)
    if method.lone == "refuse":
        raise CreditscopeError(f"method {method.name!r} compares a rollout with its group, but group "
                               f"{group[lone][0].item()} has one rollout (of {int(lone.sum())} such groups); sample "
                               f"R ≥ 2, or choose lone='zero' or lone='keep' with .but(...)")
    return lone


def _ddof(method: Method) -> int:
    return 1 if method.std == "sample" else 0
