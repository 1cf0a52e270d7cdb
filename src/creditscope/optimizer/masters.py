"""Float32 copies of a half-precision model's weights, which the optimiser moves in their place.

    g_m = Σ float32(∇_p)        m ← m + Δ(g_m)        p ← bf16(m)

A step of 1e-6 on a weight of 0.02 is lost in bfloat16, whose neighbours there are 1e-4 apart; in m it adds up. The
gradients of several micro-batches are added in float32 too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


class Masters:
    """The masters of named parameters; a parameter that is float32 or wider is its own.

    >>> p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> masters = Masters({"p": p})
    >>> optimizer = torch.optim.SGD(masters.named.values(), lr=1.0)
    >>> for _ in range(4):
    ...     p.grad = torch.full_like(p, -1 / 512)       # bfloat16 has no number between 1 and 1 + 1/128
    ...     masters.collect(); optimizer.step(); masters.spread(); optimizer.zero_grad()
    >>> masters.named["p"].item(), p.item()
    (1.0078125, 1.0078125)
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.named = {name: nn.Parameter(p.detach().float()) if p.dtype in HALF else p for name, p in named.items()}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = [
            (p, self.named[name]) for name, p in named.items() if p.dtype in HALF]

    @torch.no_grad()
    def collect(self) -> None:
        """Add the model's gradients to the masters' and clear them."""
        for p, master in self._pairs:
            if p.grad is not None:
                wide: Tensor = p.grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                p.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Round the masters into the model's weights, whose addresses stay."""
        if self._pairs:
            torch._foreach_copy_([p.data for p, _ in self._pairs], [master.data for _, master in self._pairs])
