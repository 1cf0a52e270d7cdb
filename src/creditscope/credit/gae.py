"""GAE over the critic's TD errors δ.

    δ_t = r_t + γ V_{t+1} − V_t        A_t = Σ_l (γλ)^l δ_{t+l}                    (arXiv:1506.02438, Eq. 16)

t counts the tokens that the policy chose; others are skipped, without a discount. r_t is the rollout's reward on its
last chosen token and 0 before. V after that token is 0, also where the answer was cut at the limit, since the verifier
has judged the text as it is. λ = 1 is r − V, unbiased for any critic; at λ = 0 credit is δ_t, biased by the critic's
errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.batch.groups import wide
from creditscope.batch.rollouts import Rollouts
from creditscope.credit.tools import Tools
from creditscope.credit.units import in_units
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method

WHITEN_EPS = 1e-8


def gae(method: Method, rollouts: Rollouts, tools: Tools, *, gamma: float = 1.0, lam: float = 1.0,
        schedule: str = "constant", alpha: float = 0.05, whiten: bool = True) -> Tensor:
    """(B, T) A_t of the critic's V in the method's units, whitened over the batch's tokens as PPO's code has it.

        constant   λ
        length     λ_i = 1 − 1/(α L_i), at least 0: longer answers look further     (VAPO, arXiv:2504.05118)
        linear     from 1 at the start of the training to λ at its end

    Order: A in reward units; then the row's own KL, scale, whitening and entropy cost (`in_units`). `whiten` is the
    whitening of a row that has none. The critic predicts the reward alone, so KL in the reward is added with λ = γ = 1
    and no baseline.
    """
    values = _checked(tools.critic(), rollouts)
    decay = lambdas(rollouts.lengths, schedule=schedule, lam=lam, alpha=alpha, progress=tools.progress)
    credit = advantages(wide(rollouts.reward), values, rollouts.mask, gamma, decay.to(values))
    if whiten and method.whiten == "none":
        # A row with baseline="external" may not whiten: its credit is whitened where it is made, here.
        method = method.replace(baseline="none", whiten="tokens", whiten_eps=WHITEN_EPS)
    return in_units(method, credit, rollouts)


def advantages(reward: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor) -> Tensor:
    """(B, T) A_t in reward units from reward (B,), values (B, T) and λ (B,); 0 where the mask is False.

    By doubling: A^(1) = δ, A^(2n)_t = A^(n)_t + (γλ)^n A^(n)_{t+n}, ⌈log₂ T⌉ operations on (B, T) in place of T.

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


def _checked(values: Tensor, rollouts: Rollouts) -> Tensor:
    """The critic's values, of the batch's shape and finite where a token was chosen."""
    if values.shape != rollouts.mask.shape:
        raise CreditscopeError(f"the critic must give one value per token, {tuple(rollouts.mask.shape)}, got "
                               f"{tuple(values.shape)}")
    bad = ~torch.isfinite(values) & rollouts.mask
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise CreditscopeError(f"the critic's value of row {row}, column {column} is {values[row, column].item()} (and "
                               f"{int(bad.sum()) - 1} more are not finite); lower its learning rate and start it anew")
    return wide(values).detach()
