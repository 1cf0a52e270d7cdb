"""How much of the reward's gradient the KL term of the loss takes back.

    w = w_R + w_KL,   w_R the w of the same row with β = 0        g_R, g_KL = Σ_it w_it ∇log π_it of each part
    grad/kl_pull = −⟨g_KL, g_R⟩ / ‖g_R‖²        grad/kl_size = ‖g_KL‖ / ‖g_R‖
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from torch import Tensor

from creditscope.batch.observer import Passes, StepObserver
from creditscope.batch.rollouts import Rollouts
from creditscope.methods.axes import Method
from creditscope.optimizer.geometry import gather, square
from creditscope.runs import schema


def kl_pull(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> dict[str, float]:
    """The metrics from (g, g_KL) of each parameter, g = g_R + g_KL the whole gradient; None is 0.

    The sign of both may be that of the loss. Empty where g_R is 0, or a number is not finite.

    >>> import torch
    >>> kl_pull([(torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0]))])     # g_R = (2, 0)
    {'grad/kl_pull': 0.5, 'grad/kl_size': 0.7071067811865476}
    """
    rows = []
    for whole, kl in pairs:
        if whole is None and kl is None:
            continue
        pull = kl if kl is not None else whole.new_zeros(whole.shape)  # type: ignore[union-attr]
        reward = -pull if whole is None else whole - pull
        rows.append(gather([(pull * reward).sum().double(), square(pull), square(reward)]))
    if not rows:
        return {}
    dot, pull_square, reward_square = (math.fsum(column) for column in zip(*(row.tolist() for row in rows), strict=True))
    if not (reward_square > 0 and math.isfinite(dot + pull_square + reward_square)):
        return {}
    return {schema.GRAD_KL_PULL: 0.0 - dot / reward_square, schema.GRAD_KL_SIZE: math.sqrt(pull_square / reward_square)}


class KLPull(StepObserver):
    """Reads a batch's first update, by two passes of its own; nothing where the loss has no KL term."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        self._read = True

    def begin(self, method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> None:
        self._method, self._read, self.metrics, self.seconds = method, not method.has_loss_kl, {}, 0.0

    def before(self, minibatch: Passes) -> None:
        if self._read:
            return
        self._read, start = True, time.perf_counter()
        logp = minibatch.logp()
        w = minibatch.w(logp)
        kl = w - minibatch.w(logp, method=self._method.replace(beta=0.0))
        whole = self._pulled(minibatch, w)
        self.metrics = kl_pull(zip(whole, self._pulled(minibatch, kl), strict=True))
        for p in self._parameters:
            p.grad = None
        self.seconds = time.perf_counter() - start

    def _pulled(self, minibatch: Passes, w: Tensor) -> list[Tensor | None]:
        """Σ_it w_it ∇log π_it of each parameter."""
        for p in self._parameters:
            p.grad = None
        minibatch.backward(lambda _, chunk: w[chunk])
        return [p.grad for p in self._parameters]
