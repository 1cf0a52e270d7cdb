"""P2's claims (arXiv:2601.05002) about the optimiser that need no run, against torch's own: AdamW is blind to the scale
of rewards (P2.3), and momentum moves tokens on after the clip has stopped them (P2.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from creditscope.claims.verdict import ClaimVerdict, at_most, exact
from creditscope.exact.p2 import EQUAL
from creditscope.exact.p2_prefix import TabularPolicy, tabular_policy
from creditscope.methods.table import GRPO
from creditscope.objective.surrogate import surrogate
from creditscope.optimizer.carry import carry
from creditscope.optimizer.scale import PHIS, RewardParts, sweep

SAME = 1e-3
"""Relative change below which two runs made the same way, and ε/(φ√v̂) below which P2's limit is reached: to first order
they are one number."""
SIZES = (100.0, 300.0, 50.0, 200.0, 120.0)
"""Factors of the rewards of the five steps: gradient norms differ, and both ε are far below √v̂ for several φ at which
a KL term still matters."""
PLAIN = GRPO.but(name="plain", scale="none", bound="none", clip_low=None, clip_high=None)
"""GRPO without clip and without the std, which would remove the reward's scale before the optimiser."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Settings of training, and whether the update is claimed to be blind to the scale."""

    name: str
    says: Literal["blind", "broken"]
    by: str = "P2"
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: Mapping[str, Any]
    beta: float = 0.0
    clip: float = math.inf
    """Of the gradient's norm."""
    drowned: bool = False
    """True to test where ε is larger than φ√v̂ everywhere, not where it is far smaller."""

    @property
    def eps(self) -> float:
        """Adam's ε; 0 for an optimiser that has none."""
        return float(self.settings.get("eps", 0.0))


def _adam(eps: float, decay: float = 0.0) -> Mapping[str, Any]:
    return MappingProxyType({"lr": 1e-2, "eps": eps, "weight_decay": decay})


CONDITIONS = (
    Condition(name="AdamW, ε = 1e-8, β = 0", says="blind", settings=_adam(1e-8)),
    Condition(name="AdamW, ε = 1e-5, β = 0", says="blind", settings=_adam(1e-5)),
    Condition(name="AdamW, ε = 1e-5 above φ√v̂, β = 0", says="broken", settings=_adam(1e-5), drowned=True),
    Condition(name="AdamW, ε = 1e-8, β = 10", says="broken", settings=_adam(1e-8), beta=10.0),
    Condition(name="AdamW, ε = 1e-5, β = 10", says="broken", settings=_adam(1e-5), beta=10.0),
    Condition(name="AdamW, ε = 1e-8, decoupled weight decay", says="blind", settings=_adam(1e-8, decay=0.1)),
    Condition(name="Adam, ε = 1e-8, coupled L2", says="broken", by="we", optimizer=torch.optim.Adam,
              settings=_adam(1e-8, decay=0.1)),
    Condition(name="AdamW, ε = 1e-8, gradient-norm clipping", says="broken", by="we", settings=_adam(1e-8), clip=6.0),
    Condition(name="SGD, β = 0", says="broken", optimizer=torch.optim.SGD, settings={"lr": 1e-5}),
    Condition(name="SGD, β = 10", says="broken", optimizer=torch.optim.SGD, settings={"lr": 1e-5}, beta=10.0),
)
"""At φ = 1 the gradient norms of the five steps lie on both sides of the clip."""


def blind_to_scale(*, conditions: Sequence[Condition] = CONDITIONS,
                   predict: Callable[..., Any] = sweep) -> list[ClaimVerdict]:
    """P2.3: train a tabular policy with rewards times φ, for φ from 1e-6 to 1e3, and compare the ways made."""
    world = tabular_policy()
    closed_form = [c for c in conditions if c.eps and c.clip == math.inf and not c.drowned]
    return [*(_judged(world, condition) for condition in conditions), _replayed(world, closed_form, predict)]


def _judged(world: TabularPolicy, condition: Condition) -> ClaimVerdict:
    where = "> 1" if condition.drowned else f"≤ {SAME:g}"
    reference, _, _ = _train(world, condition, PHIS[-1])
    changes = {}
    for phi in PHIS[:-1]:
        way, smallest, largest = _train(world, condition, phi)
        if condition.eps > largest if condition.drowned else condition.eps <= SAME * smallest:
            changes[phi] = float((way - reference).norm() / reference.norm())
    worst = max(changes, key=lambda phi: changes[phi])
    blind = changes[worst] <= SAME
    definition = "way made in five steps with rewards times φ against φ = 1000: ‖Δ‖ relative, largest over φ"
    if condition.eps:
        definition += f", where ε/(φ√v̂) {where} at every coordinate"
    return exact(definition, condition.name, blind == (condition.says == "blind"), changes[worst],
                 f"the way changes by {changes[worst]:.2g} at φ = {worst:g}", threshold=f"blind: ≤ {SAME:g}",
                 expected=f"{condition.says}, {condition.by} say{'s' * (condition.by != 'we')}", n=len(changes), of="φ")


def _parts(world: TabularPolicy, logits: Tensor, phi: float, beta: float, step: int) -> tuple[Tensor, Tensor]:
    """−∇J of the reward's part with rewards times φ, and of the KL term."""
    rollouts = replace(world.rollouts, reward=phi * SIZES[step] * world.rollouts.reward)
    leaf = logits.detach().clone().requires_grad_()
    logp = world.log_probs(leaf)
    (reward,) = torch.autograd.grad(-surrogate(PLAIN, logp, rollouts), leaf, retain_graph=True)
    if beta == 0:
        return reward, torch.zeros_like(reward)
    drag = surrogate(PLAIN.but(name="drag", beta=beta), logp, rollouts, credit=torch.zeros(len(rollouts)).double())
    return reward, torch.autograd.grad(-drag, leaf)[0]


def _train(world: TabularPolicy, condition: Condition, phi: float) -> tuple[Tensor, float, float]:
    """θ − θ₀ after real training, and the smallest and largest √v̂ on the way (∞ for SGD)."""
    theta = world.logits.clone().requires_grad_()
    optimizer = condition.optimizer([theta], **condition.settings)
    roots = []
    for step in range(len(SIZES)):
        theta.grad = torch.stack(_parts(world, theta, phi, condition.beta, step)).sum(0)
        torch.nn.utils.clip_grad_norm_([theta], condition.clip)
        optimizer.step()
        state = optimizer.state[theta]
        if "exp_avg_sq" in state:
            roots.append((state["exp_avg_sq"] / (1 - optimizer.param_groups[0]["betas"][1] ** (step + 1))).sqrt())
    met = torch.stack(roots) if roots else torch.tensor([math.inf])
    return theta.detach() - world.logits, float(met.min()), float(met.max())


def _replayed(world: TabularPolicy, conditions: Iterable[Condition], predict: Callable[..., Any]) -> ClaimVerdict:
    """The change that `scale.sweep` computes from the state of one run, against optimisers that are fed φr + k."""
    errors = []
    for condition in conditions:
        theta = world.logits.clone().requires_grad_()
        optimizer = condition.optimizer([theta], **condition.settings)
        follow = RewardParts(optimizer)
        seen = []
        for step in range(len(SIZES)):
            reward, rest = _parts(world, theta, 1.0, condition.beta, step)
            seen.append((theta.detach().clone(), reward, rest))
            theta.grad = reward + rest
            follow.update({theta: reward})
            if step == len(SIZES) - 1:
                told = predict(optimizer, [("logits", theta)], PHIS, "start", follow).change.tolist()
            optimizer.step()
        one = _fed(condition, seen, 1.0)
        for phi, change in zip(PHIS, told, strict=True):
            errors.append(abs(change - float((_fed(condition, seen, phi) - one).norm() / one.norm())))
    definition = "change of the update read from one run's state against a real optimiser fed the gradients with the " \
                 "reward's part times φ: |Δ|"
    return at_most(EQUAL, definition, "tabular policy", max(errors), "predicted and real change of the update differ "
                   f"by up to {max(errors):.2g}", n=len(errors), of="conditions and φ")


def _fed(condition: Condition, seen: Sequence[tuple[Tensor, Tensor, Tensor]], phi: float) -> Tensor:
    """The last update of a real optimiser that is fed φr + k at the recorded parameters."""
    theta = seen[0][0].clone().requires_grad_()
    optimizer = condition.optimizer([theta], **condition.settings)
    for start, reward, rest in seen:
        theta.data.copy_(start)
        theta.grad = phi * reward + rest
        optimizer.step()
    return theta.detach() - seen[-1][0]


PRINTED: Mapping[tuple[int, int], tuple[float, int]] = MappingProxyType({
    (2, 0): (0.6786, 4), (10, 0): (0.9047, 4), (50, 4): (0.6763, 4), (500, 0): (0.923, 3)})
"""(T, k) -> the value that P2 gives for β = (0.9, 0.95), and its digits. The last is its limit T → ∞: 0.95^500 is
7e-12."""
FREE_BETAS = ((0.9, 0.95), (0.9, 0.999), (0.8, 0.3), (0.0, 0.9))


def overshoot(*, printed: Mapping[tuple[int, int], tuple[float, int]] = PRINTED,
              closed_form: Callable[[int, int, tuple[float, float]], float] = carry) -> list[ClaimVerdict]:
    """P2.4: the share of a full step that a real AdamW still makes at step T+k, after a constant gradient for T−1 steps
    and then zeros."""
    out, subject = [], "torch.optim.AdamW, one parameter"
    for (step, lag), (value, digits) in printed.items():
        real = carried(step, (0.9, 0.95), lag)[lag]
        half = 0.5 * 10.0**-digits
        out.append(exact(f"share of a full step at T+k: T = {step}, k = {lag}, β = (0.9, 0.95)", subject,
                         abs(real - value) <= half, real, f"AdamW still makes {real:.6f} of a full step where {value} "
                         "is printed", expected=f"{value}", threshold=f"equal to {digits} digits: |Δ| ≤ {half:g}", n=1,
                         of="runs"))
    errors = [abs(closed_form(step, lag, betas) - share) for betas in FREE_BETAS for step in (2, 3, 10, 50)
              for lag, share in enumerate(carried(step, betas, 5))]
    out.append(at_most(EQUAL, "C_{T,k} in closed form (Eq. 36) against AdamW: |Δ| over T, k and β", subject,
                       max(errors), f"closed form and optimiser differ by up to {max(errors):.2g}", n=len(errors)))
    return out


def carried(step: int, betas: tuple[float, float], lag: int, device: torch.device | str = "cpu") -> list[float]:
    """Δ_{T+k} / lr for k = 0 … lag, after a constant gradient for T−1 steps, under which a full step is lr.

    The gradient is 1e6, beside which torch's ε of 1e-8 is 0, as in the closed form.
    """
    theta = torch.zeros(1, dtype=torch.float64, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([theta], lr=1.0, betas=betas, weight_decay=0.0, foreach=False)
    out = []
    for t in range(1, step + lag + 1):
        theta.grad = torch.full_like(theta, 1e6 * (t < step))
        before = float(theta.detach())
        optimizer.step()
        if t >= step:
            out.append(before - float(theta.detach()))
    return out
