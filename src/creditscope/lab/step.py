"""One update: a minibatch's log π, its w, and the passes that pull w back, under the eyes of observers.

    ∇J = Σ_it w_it ∇log π_it,   w = ∂J/∂log π        micro-batch by micro-batch, then one step of the optimiser on −J
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from creditscope.batch.groups import joint_passes, micro_batches
from creditscope.batch.observer import Around, Cotangent, StepObserver
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.files.memory import enough_memory
from creditscope.methods.axes import Method
from creditscope.microscope.gram import squared_norms
from creditscope.microscope.scope import Microscope
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.optimizer.brakes import Brake
from creditscope.optimizer.scale import Clipping
from creditscope.policy.loading import Policy
from creditscope.policy.logp import head_norms, rollout_logp

LESS = ("add --recompute (8 answers of 512 tokens, 0.6 B weights in float32: 25.7 to 11.8 GiB), use --dtype bfloat16, "
        "raise --accumulate (above --prompts it cuts groups apart; readings stay exact and take passes of their own), "
        "or lower --prompts, --group or --max-tokens; --scope light or off takes less too")
"""What to do where a pass does not fit; measured in benchmarks/real_step.md."""
VANISHING = 1e-15
"""Norms below it are taken again in float64: squares of a nearly certain policy's gradient are 0 in float32."""


class PolicyPasses:
    """Passes of a batch, or of its rows `rows`, through a policy, by default in `micro_batches`."""

    def __init__(self, policy: Policy, batch: Rollouts, *, rows: Tensor | None = None, accumulate: int = 1,
                 chunks: Sequence[Tensor] | None = None, temperature: float = 1.0) -> None:
        self.policy, self.temperature = policy, temperature
        self.rows = torch.arange(len(batch)) if rows is None else rows
        self.rollouts = batch if rows is None else batch.rows(rows)
        self.chunks: Sequence[Tensor] = chunks or micro_batches(self.rollouts.group, accumulate)

    @cached_property
    def joint(self) -> Sequence[Tensor]:
        return joint_passes(self.rollouts.group, self.chunks)

    def forward(self, chunk: Tensor, grad: bool = True) -> Tensor:
        """(B, T) log π of a micro-batch."""
        return rollout_logp(self.policy, self.rollouts.rows(chunk), self.temperature, grad)

    def logp(self) -> Tensor:
        """(B, T) log π of all rows, without a graph."""
        order = torch.cat(list(self.chunks)).argsort()
        return torch.cat([self.forward(chunk, grad=False) for chunk in self.chunks])[order]

    def backward(self, cotangent: Cotangent, around: Around = lambda rows: nullcontext(),
                 chunks: Sequence[Tensor] | None = None, collect: bool = True) -> None:
        """Add Σ_it c_it ∇log π_it to the gradients, c = cotangent(log π, chunk), micro-batch by micro-batch.

        Without `collect` they stay in the model's own parameters, where a microscope around this call looks for them.
        """
        for chunk in self.chunks if chunks is None else chunks:
            with around(self.rows[chunk]):
                live = self.forward(chunk)
                by = cotangent(live, chunk)
                if by is not None:
                    torch.autograd.backward(live, by.to(live.dtype))
            if collect:
                self.policy.collect()

    def head_norms(self, chunk: Tensor) -> Tensor:
        """(B, T) ‖∇_W log π(y_t)‖ for the output head W alone."""
        return head_norms(self.policy, self.rollouts.rows(chunk), self.temperature)

    def score_gram(self) -> Tensor:
        """(B, B) ⟨ψ_i, ψ_j⟩ of the unweighted scores: the cotangent is 1 on every chosen token. NaN between rows that
        no pass has together. Gradients that parameters hold are put back."""
        whole = torch.full((len(self.rollouts), len(self.rollouts)), torch.nan, dtype=torch.float64)
        parameters = self.policy.trainable().values()
        kept = [p.grad for p in parameters]
        scope = Microscope(self.policy.model)
        for chunk in self.joint:
            self.policy.clear()
            with scope:
                self.backward(lambda live, part: self.rollouts.mask[part].to(live.dtype), chunks=[chunk], collect=False)
            whole[chunk[:, None], chunk] = scope.gram
        self.policy.clear()
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad
        return whole.to(self.policy.device)


class Minibatch(PolicyPasses):
    """The rows of a batch that one update is made from, with the method and credit that give them w."""

    def __init__(self, policy: Policy, method: Method, batch: Rollouts, credit: Tensor, *, rows: Tensor | None = None,
                 accumulate: int = 1, chunks: Sequence[Tensor] | None = None, temperature: float = 1.0) -> None:
        super().__init__(policy, batch, rows=rows, accumulate=accumulate, chunks=chunks, temperature=temperature)
        self.method, self.credit = method, credit[self.rows]

    def value(self, logp: Tensor) -> float:
        """J at `logp`."""
        return float(surrogate(self.method, logp, self.rollouts, self.credit))

    def w(self, logp: Tensor, credit: Tensor | None = None, method: Method | None = None) -> Tensor:
        """(B, T) ∂J/∂log π at `logp`, under the minibatch's own credit and method or others."""
        by, row = self.credit if credit is None else credit, method or self.method
        return effective_credit(lambda live: surrogate(row, live, self.rollouts, by), logp)


@dataclass(frozen=True)
class Sight:
    """A minibatch before its update: log π, w = ∂J/∂log π, and the w that is pulled back."""

    logp: Tensor
    w: Tensor
    pulled: Tensor


@dataclass(frozen=True)
class Update:
    """What one step of the optimiser did to the rows `rows` of the batch."""

    rows: Tensor
    w: Tensor
    logp: Tensor
    value: float
    """J at the log-probs before the step."""
    norm: float
    """The gradient's norm before it was clipped."""


@enough_memory("passing the batch through the model", LESS)
def take_step(minibatch: Minibatch, brake: Brake, observers: Sequence[StepObserver] = (),
              clip_norm: float | None = None) -> Update | None:
    """One step of the optimiser on −J. None where the brake wants no further step on these rows."""
    everybody = [*observers, brake]
    for one in everybody:
        one.before(minibatch)
        minibatch.policy.clear()  # the next one reads its own passes alone

    # With one micro-batch, w comes from the same forward that is pulled back; with several it must come first.
    sight = None
    if len(minibatch.chunks) > 1 or any(one.early for one in everybody):
        sight = _sight(minibatch, minibatch.logp(), everybody)
        if sight is None:
            return None
        for one in everybody:
            one.weighed(minibatch, sight.logp, sight.pulled)
            minibatch.policy.clear()

    def descend(live: Tensor, chunk: Tensor) -> Tensor | None:
        nonlocal sight
        sight = sight or _sight(minibatch, live.detach(), everybody)
        if sight is None:
            return None
        for one in everybody:
            if not one.own_pass:
                one.see(live, minibatch.rows[chunk])
        return -sight.pulled[chunk]

    def around(rows: Tensor) -> ExitStack:
        stack = ExitStack()
        for one in everybody:
            stack.enter_context(one.around(rows))
        return stack

    minibatch.backward(descend, around)
    if sight is None:
        return None
    for one in everybody:
        for chunk in minibatch.chunks if one.own_pass else ():
            one.see(minibatch.forward(chunk), minibatch.rows[chunk])
    parameters = list(minibatch.policy.trainable().values())
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = _checked(float(total), parameters)
    for one in everybody:
        one.gradient(norm)
    if clip_norm is not None:
        clip_grads_with_norm_(parameters, clip_norm, total)
    factor = 1.0 if clip_norm is None else Clipping(clip_norm).coefficient(norm)
    for one in everybody:
        one.clipped(factor)
    value = minibatch.value(sight.logp)
    brake.step(minibatch.logp, factor)
    minibatch.policy.spread()  # once more: a brake may have shortened the step
    return Update(minibatch.rows, sight.w, sight.logp, value, norm)


def _sight(minibatch: Minibatch, logp: Tensor, everybody: Sequence[StepObserver]) -> Sight | None:
    """The whole minibatch at once: what the objective says, and what the observers make of it."""
    if not all(one.goes_on(logp, minibatch.rows) for one in everybody):
        return None
    w = pulled = minibatch.w(logp)
    for one in everybody:
        pulled = one.reweigh(pulled, logp, minibatch.rows)
    return Sight(logp, w, pulled)


def _checked(norm: float, parameters: Sequence[nn.Parameter]) -> float:
    """‖∇J‖, in float64 where its squares vanish in float32."""
    if not math.isfinite(norm):
        raise CreditscopeError(f"the gradient's norm is {norm}; what was recorded before this step is kept. Lower "
                               f"--lr, set --clip-norm, or use --dtype float32; at the first step look at --beta and "
                               f"the rewards")
    if norm >= VANISHING:
        return norm
    return float(squared_norms([p.grad for p in parameters if p.grad is not None]).sum().sqrt())
