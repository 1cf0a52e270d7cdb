"""Brakes: rules that take the optimiser's momentum into account and keep a token at its bound.

The clip sets a token's gradient to 0; its earlier gradients stay in the first moment. A brake wraps a torch optimiser:

    brake = Recall(torch.optim.AdamW(model.parameters(), lr=1e-4))
    brake.begin(method, rollouts)              # a new batch
    brake.ascend(forward)                      # an inner step, in place of backward() and step()

A loop with its own loss calls `logp = brake.watch(logp)` before it and `brake.step(forward)` in place of the step.
Derivations and measurements: docs/optimizer.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from creditscope.batch.observer import StepObserver
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.advantages import token_advantage
from creditscope.objective.bounds import beyond, bounded_tokens
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.optimizer.scale import REST, Clipping
from creditscope.optimizer.state import first_moment
from creditscope.optimizer.table import parse_brake
from creditscope.runs import schema

if TYPE_CHECKING:
    from creditscope.optimizer.probe import Probe

Forward = Callable[[], Tensor]
"""log π (B, T) of the chosen tokens under the present weights."""


class Brake(StepObserver):
    """No rule: the optimiser's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.method: Method | None = None

    def begin(self, method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> None:
        """A new batch, with the credit that the objective uses; by default the method's own advantage."""
        own = token_advantage(method, rollouts) if credit is None else credit
        own = own[:, None] if own.dim() == 1 else own
        self.method, self.rollouts, self.credit = method, rollouts, own.expand_as(rollouts.mask)
        self._rows = torch.arange(len(rollouts), device=rollouts.mask.device)

    def ascend(self, forward: Forward, clip_norm: float | None = None, probe: Probe | None = None) -> bool:
        """One inner step up the surrogate under the rule. False when the rule ends the updates on this batch."""
        logp = forward()
        if not self.goes_on(logp.detach()):
            return False
        if probe is not None:
            probe.see(logp)
        method, rollouts, credit = self._batch()
        w = effective_credit(lambda lp: surrogate(method, lp, rollouts, credit), logp)
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(logp, -self.reweigh(w, logp.detach()).to(logp.dtype))
        clipped = 1.0
        if clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters(), clip_norm)
            clipped = Clipping(clip_norm).coefficient(float(norm))
        self.step(forward, clipped)
        return True

    def watch(self, logp: Tensor, rows: Tensor | None = None) -> Tensor:
        """The same log-probs, for any loss: the rule changes the gradient that arrives at them."""
        self._batch()
        if not logp.requires_grad:
            raise CreditscopeError("brake.watch needs log-probs that carry a gradient; take them outside of no_grad")
        seen = logp.detach()
        out = logp.clone()
        out.register_hook(lambda grad: -self.reweigh(-grad, seen, rows).to(grad.dtype))  # type: ignore[no-untyped-call]
        return out

    # A rule may change `goes_on` and `reweigh` of `StepObserver`, and the step.

    def step(self, forward: Forward | None = None, clipped: float = 1.0) -> None:
        """The optimiser's step. `clipped` is the factor by which a norm clip has shortened the gradient.

        `forward` gives log π of the rows that were watched since the last step, in that order.
        """
        self.optimizer.step()

    def metrics(self) -> dict[str, float]:
        return {}

    def _batch(self) -> tuple[Method, Rollouts, Tensor]:
        if self.method is None:
            raise CreditscopeError("the brake has seen no batch: call brake.begin(method, rollouts) before the first "
                                   "inner step")
        return self.method, self.rollouts, self.credit

    def _past(self, logp: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, T) bool each: tokens of these rows past their bound, and tokens that have one."""
        method, rollouts, credit = self._batch()
        rows = self._rows if rows is None else rows
        old, mask, own = rollouts.logp[rows], rollouts.mask[rows], credit[rows]
        return beyond(method, logp, old, mask, own) > 0, bounded_tokens(method, old, mask, own)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True)
class Blend:
    """How an optimiser mixes a gradient into its first moment, and both into its update.

        c' = β·c + γ·w          update ∝ a·w + b·c'
    """

    beta: float
    gamma: float
    a: float = 0.0
    b: float = 1.0

    @property
    def debt(self) -> float:
        """bβ/(a + bγ): with w = −debt, the update's share of a token with moment 1 is 0."""
        return self.b * self.beta / (self.a + self.b * self.gamma)


def blend(optimizer: torch.optim.Optimizer) -> Blend:
    """How a live optimiser mixes gradient and momentum.

        Adam:  m' = β₁m + (1 − β₁)g                SGD:  b' = μb + (1 − τ)g, the very first b' = g
        Nesterov adds the gradient once more:      SGD:  g + μb'          Muon:  (1 − μ)g + μb'
    """
    found = {_blend_of(optimizer, group) for group in optimizer.param_groups}
    if len(found) > 1:
        raise CreditscopeError(f"the optimiser's parameter groups have different momentum: {found}; a token has one "
                               f"share of it, so give all groups the same, or use another brake")
    return found.pop()


def _blend_of(optimizer: torch.optim.Optimizer, group: Mapping[str, object]) -> Blend:
    if "betas" in group:
        beta = float(group["betas"][0])  # type: ignore[index]
        return Blend(beta, 1 - beta)
    beta = float(group.get("momentum", 0.0))  # type: ignore[arg-type]
    if beta == 0:
        return Blend(0.0, 1.0)
    if "dampening" not in group:  # torch's Muon averages, it does not sum
        return Blend(beta, 1 - beta, a=1 - beta, b=beta) if group.get("nesterov") else Blend(beta, 1 - beta)
    first = all(first_moment(optimizer, p) is None for p in group["params"])  # type: ignore[attr-defined]
    gamma = 1.0 if first else 1 - float(group["dampening"])  # type: ignore[arg-type]
    return Blend(beta, gamma, a=1.0, b=beta) if group.get("nesterov") else Blend(beta, gamma)


class Recall(Brake):
    """A token past its bound gets the w that makes its share of the update 0, its moment included.

        w'_it = w_it − debt·(1 − d_it)·c_it  past the bound,  else w_it        d = clip(w_it / w_it(first sight), 0, 1)
        c_it ← β·c_it + γ·w'_it              debt = β/γ = 9 for β₁ = 0.9

    c_it is the token's share of the first moment in units of w: the moment is Σ_it c_it ∇log π_it, up to the change of
    the scores ∇log π_it. With a hard clip w = 0 and d = 0 past the bound, so c becomes 0 and stays 0; under a soft one
    c falls in proportion to w. It costs no pass.
    """

    def begin(self, method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> None:
        super().begin(method, rollouts, credit)
        self._account = torch.zeros_like(rollouts.mask, dtype=torch.float32)
        self._first = torch.zeros_like(self._account)
        self._pulled: list[tuple[Tensor, Tensor]] = []
        self._recalled = self._total = 0.0

    def reweigh(self, w: Tensor, logp: Tensor, rows: Tensor | None = None) -> Tensor:
        rows = self._rows if rows is None else rows
        self._account, self._first = self._account.to(w.dtype), self._first.to(w.dtype)
        first = self._first[rows]
        self._first[rows] = first = torch.where(first == 0, w, first)  # 0 while a token has only been past its bound
        damped = torch.where(first == 0, 1.0, w / first).clamp(0, 1)
        past, _ = self._past(logp, rows)
        owed = torch.where(past, blend(self.optimizer).debt * (1 - damped) * self._account[rows], 0.0)
        self._pulled.append((rows, w - owed))
        self._recalled += float(owed.abs().sum())
        self._total += float((w - owed).abs().sum())
        return w - owed

    def step(self, forward: Forward | None = None, clipped: float = 1.0) -> None:
        self._batch()
        if not self._pulled:
            raise CreditscopeError("recall has not seen this step's log-probs: build the loss on brake.watch(logp), or "
                                   "use brake.ascend(forward)")
        mix = blend(self.optimizer)
        self._account *= mix.beta
        for rows, pulled in self._pulled:
            self._account[rows] += mix.gamma * clipped * pulled
        self._pulled = []
        self.optimizer.step()

    def metrics(self) -> dict[str, float]:
        """Σ |w − w'| / Σ |w'| over the batch's steps: the share of w that cancels momentum."""
        return {schema.BRAKE_RECALLED: self._recalled / self._total} if self._total else {}


class Shorten(Brake):
    """A step is shortened until at most a share of the bounded tokens is past the bound.

        θ ← θ + a·Δ,   a the largest of 1, 0.95, …, 0 with share{x⁰ + a(x¹ − x⁰) past its bound} ≤ share

    x⁰ and x¹ are the log-probs before and after the whole step Δ; between them they are interpolated.
    """

    LENGTHS = tuple(1 - k / 20 for k in range(20))

    def __init__(self, optimizer: torch.optim.Optimizer, share: float = 0.01) -> None:
        super().__init__(optimizer)
        self._share = share

    def begin(self, method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> None:
        super().begin(method, rollouts, credit)
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._lengths: list[float] = []

    def reweigh(self, w: Tensor, logp: Tensor, rows: Tensor | None = None) -> Tensor:
        self._seen.append((self._rows if rows is None else rows, logp))
        return w

    @torch.no_grad()
    def step(self, forward: Forward | None = None, clipped: float = 1.0) -> None:
        self._batch()
        if not self._seen or forward is None:
            raise CreditscopeError("shorten compares the log-probs before and after the step: build the loss on "
                                   "brake.watch(logp) and give brake.step(forward), or use brake.ascend(forward)")
        rows, before = (torch.cat(x) for x in zip(*self._seen, strict=True))
        weights = [p.detach().clone() for p in self._parameters()]
        self.optimizer.step()
        length = self.length(before, forward().detach(), rows)
        if length < 1:
            for p, old in zip(self._parameters(), weights, strict=True):
                p.copy_(torch.lerp(old, p, length))
        self._lengths.append(length)
        self._seen = []

    def length(self, before: Tensor, after: Tensor, rows: Tensor | None = None) -> float:
        for a in self.LENGTHS:
            past, bounded = self._past(torch.lerp(before, after, a), rows)
            if int(past.sum()) <= self._share * int(bounded.sum()):
                return a
        return 0.0

    def metrics(self) -> dict[str, float]:
        return {schema.BRAKE_LENGTH: sum(self._lengths) / len(self._lengths)} if self._lengths else {}


class Restart(Brake):
    """The first moment is set to 0 with every batch.

    v and Adam's step counter are kept: the first inner steps are short, 1 − β₁, 1 − β₁², … of a full one.
    """

    def begin(self, method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> None:
        super().begin(method, rollouts, credit)
        for p in self._parameters():
            # The average of the part that does not scale with reward (RewardParts) belongs to the same moment.
            for moment in (first_moment(self.optimizer, p), self.optimizer.state.get(p, {}).get(REST[0])):
                if moment is not None:
                    moment.zero_()


class KlStop(Brake):
    """Early stopping: no further inner step once KL(old ‖ new) per token is above a limit.

        KL ≈ mean_it (ρ_it − 1 − log ρ_it)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, limit: float = 0.003) -> None:
        super().__init__(optimizer)
        self._limit = limit

    def goes_on(self, logp: Tensor, rows: Tensor | None = None) -> bool:
        _, rollouts, _ = self._batch()
        rows = self._rows if rows is None else rows
        moved = (logp - rollouts.logp[rows])[rollouts.mask[rows]]
        return not bool((torch.expm1(moved) - moved).mean() > self._limit)


CLASSES: Mapping[str, type[Brake]] = MappingProxyType(
    {"none": Brake, "recall": Recall, "shorten": Shorten, "restart": Restart, "kl_stop": KlStop})


def find_brake(spec: str, optimizer: torch.optim.Optimizer) -> Brake:
    """The brake of that name around an optimiser, options after commas: `shorten,share=0.02`."""
    name, options = parse_brake(spec)
    return CLASSES[name](optimizer, **options)
