"""GAE: each token's surprise by the critic's own lights, δ, and what is left of the surprises that follow.

    δ_t = r_t + γ V_{t+1} − V_t        A_t = Σ_l (γλ)^l δ_{t+l}                    (arXiv:1506.02438, Eq. 16)

t counts the tokens that the policy chose: what others wrote between is stepped over, without a discount. r_t is the
rollout's reward on its last chosen token and 0 before. V after that token is 0, also where the answer was cut at the
limit: the verifier has judged the text as it stands, so its reward is all there will ever be.

λ = 1 is r − V, unbiased whatever the critic says; λ = 0 trusts the critic entirely.
"""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units, wide
from creditscope.errors import CreditscopeError, unknown
from creditscope.methods.axes import Method

SCHEDULES = ("constant", "length", "linear")
WHITEN_EPS = 1e-8


def gae(method: Method, rollouts: Rollouts, tools: Tools, *, gamma: float = 1.0, lam: float = 1.0,
        schedule: str = "constant", alpha: float = 0.05, whiten: bool = True) -> Tensor:
    """(B, T) A_t of the critic's V in the method's units, whitened over the batch's tokens as PPO's code has it.

        constant   λ
        length     λ_i = 1 − 1/(α L_i), at least 0: longer answers look further     (VAPO, arXiv:2504.05118)
        linear     from 1 at the start of the training to λ at its end

    Order: A in reward units; then the row's own KL, scale, whitening and entropy cost, in that order (`in_units`).
    `whiten` stands in for the row's whitening where it has none, so that it comes after the scale, which it would undo
    in part if it came before, and before the entropy cost, which is priced in whitened units.

    The critic knows the reward alone, so KL in the reward is a stream of its own, with λ = γ = 1 and no baseline.
    """
    _check_options(gamma, lam, schedule, alpha)
    values = _checked(tools.critic(), rollouts)
    decay = lambdas(rollouts.lengths, schedule=schedule, lam=lam, alpha=alpha, progress=tools.progress)
    credit = advantages(wide(rollouts.reward), values, rollouts.mask, gamma, decay.to(values))
    if whiten and method.whiten == "none":
        # "external" forbids a row to whiten because that is left to whoever makes the credit: here.
        method = method.replace(baseline="none", whiten="tokens", whiten_eps=WHITEN_EPS)
    return in_units(method, credit, rollouts)


def advantages(reward: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """(B, T) A_t in reward units from reward (B,), values (B, T) and λ (B,); 0 where the mask is False.

    The sum is built by doubling: A^(1) = δ, A^(2n)_t = A^(n)_t + (γλ)^n A^(n)_{t+n}, so ⌈log₂ T⌉ operations on (B, T)
    do for T steps of the recursion (13 for 8192 tokens), and nothing is divided that could overflow.

    >>> advantages(torch.tensor([1.]), torch.tensor([[.5, .75]]), torch.ones(1, 2).bool(), 1.0, torch.zeros(1))
    tensor([[0.2500, 0.2500]])
    """
    # Chosen tokens first, in their order; the columns behind them hold V = 0, which is also the terminal value.
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
    v = values.masked_fill(~mask, 0.0).gather(1, order)
    column = torch.arange(mask.shape[1], device=mask.device)
    last = column == mask.sum(dim=1, keepdim=True) - 1
    total = torch.where(last, reward[:, None].to(v), 0.0) + gamma * _earlier(v, 1) - v
    reach, power = 1, (gamma * lam)[:, None]
    while reach < mask.shape[1]:
        total = total + power * _earlier(total, reach)
        reach, power = 2 * reach, power * power
    return torch.zeros_like(total).scatter(1, order, total).masked_fill(~mask, 0.0)


def lambdas(lengths: Tensor, *, schedule: str, lam: float, alpha: float, progress: float) -> Tensor:
    """(B,) λ of each rollout, in float64.

    >>> lambdas(torch.tensor([10, 40]), schedule="length", lam=1.0, alpha=0.05, progress=0.0).tolist()
    [0.0, 0.5]
    """
    if schedule == "length":
        return (1 - 1 / (alpha * lengths.clamp(min=1).double())).clamp(min=0.0)
    now = 1 + (lam - 1) * progress if schedule == "linear" else lam
    return torch.full(lengths.shape, now, dtype=torch.float64, device=lengths.device)


def _earlier(value: Tensor, by: int) -> Tensor:
    """value_{t+by} in the place of value_t, 0 past the end."""
    return torch.nn.functional.pad(value[:, by:], (0, by))


def _check_options(gamma: float, lam: float, schedule: str, alpha: float) -> None:
    for name, value in {"gamma": gamma, "lam": lam}.items():
        if not 0 <= value <= 1:
            raise CreditscopeError(f"{name} of credit 'gae' must be in 0 .. 1, got {value}; 1 neither discounts nor "
                                   f"trusts the critic")
    if schedule not in SCHEDULES:
        raise unknown("schedule of credit 'gae':", schedule, SCHEDULES)
    if not 0 < alpha < float("inf"):
        raise CreditscopeError(f"alpha of credit 'gae' must be above 0 and finite, got {alpha}; λ = 1 − 1/(α L), and "
                               f"VAPO has 0.05")


def _checked(values: Tensor, rollouts: Rollouts) -> Tensor:
    """The critic's values, of the batch's shape and finite where a token was chosen."""
    if values.shape != rollouts.mask.shape:
        raise CreditscopeError(f"the critic must give one value a token, {tuple(rollouts.mask.shape)}, got "
                               f"{tuple(values.shape)}")
    bad = ~torch.isfinite(values) & rollouts.mask
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise CreditscopeError(f"the critic's value of row {row}, column {column} is {values[row, column].item()} (and "
                               f"{int(bad.sum()) - 1} more are not finite); lower its learning rate and start it anew")
    return wide(values).detach()
