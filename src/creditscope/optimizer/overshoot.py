"""Overshoot: how far tokens go past their bound while one batch is used for several updates.

A bound stops a token's own gradient; momentum, weight decay and the gradients of other tokens still move the token.
`Overshoot` reads the log-probs that a trainer computes anyway: pass k shows the effect of k updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method
from creditscope.objective.bounds import edges_of, overhang
from creditscope.objective.surrogate import check_credit
from creditscope.objective.weights import alpha, kept
from creditscope.optimizer.families import Parts
from creditscope.runs import schema


@dataclass(frozen=True)
class OvershootReading:
    """The batch after k updates. A number that does not exist is None."""

    updates: int
    """k: the earlier readings of each row. One update happened between two readings of a row, or one per minibatch."""
    tokens: int  # tokens that have an edge
    past: float | None  # the share of them past it
    distance: float | None  # mean nats past the edge, over those past it
    overshoot: float | None  # mean nats past the edge, over all that have one: past · distance
    max: float | None  # the largest distance
    after: float | None
    """Σ (distance − distance when first seen past) / Σ distance: the share moved after the token's own gradient was
    stopped. Negative where tokens came back on the whole."""
    kl: float | None  # KL(π_old ‖ π) per token: mean over chosen tokens of ρ − 1 − log ρ, ρ = π/π_old


class Overshoot:
    """The tokens of one batch over its updates, from the log-probs of every pass.

    >>> from creditscope.methods.table import METHODS
    >>> batch = Rollouts(tokens=torch.tensor([[5]]), mask=torch.tensor([[True]]), logp=torch.tensor([[-1.]]),
    ...                  reward=torch.tensor([1.]), group=torch.tensor([0]))
    >>> track = Overshoot(METHODS["grpo"], batch, credit=torch.tensor([1.]))
    >>> for logp in (-1.0, -0.75, -0.7):  # the edge is at −1 + log 1.2 = −0.8177
    ...     track.see(torch.tensor([[logp]]))
    >>> round(track.readings()[-1].distance, 4), round(track.carry(0), 4)
    (0.1177, 0.2)
    """

    def __init__(self, method: Method, rollouts: Rollouts, credit: Tensor) -> None:
        """`credit` is (B,), (B, 1) or (B, T). Tokens that the method does not learn from (α = 0) have no edge."""
        self.stops = method.stops
        """The token's own gradient past the edge: "zero", "half" or "cap"; None where the method has no edge. Where
        not "zero", "stopped" means "first seen past the edge"."""
        self._mask, self._old = rollouts.mask, rollouts.logp.double()
        credit = check_credit(credit, rollouts).detach().double()
        learns = alpha(method, rollouts, kept(method, rollouts, credit), torch.float64) != 0
        self._credit = credit.expand_as(self._mask).masked_fill(~learns, 0.0)
        self._edges = edges_of(method, self._old, self._mask, self._credit)

        self._sights = torch.zeros(len(rollouts), dtype=torch.int64, device=self._mask.device)
        # Of every token: its overhang in the direction of A when last seen; consecutive sights past the edge; and of
        # these, the distance at the first and the move that led to it (0: not seen).
        self._forward = torch.zeros_like(self._old)
        self._held = torch.zeros_like(self._mask, dtype=torch.int64)
        self._entry = torch.zeros_like(self._old)
        self._carrier = torch.zeros_like(self._old)
        # Of every sight of a row: its number, and sums over the row's tokens. Of every lag: the sums of `carry`.
        self._rows: list[Tensor] = []
        self._lags = self._old.new_zeros(0, 2)

    @torch.no_grad()
    def see(self, logp: Tensor, rows: Tensor | None = None) -> None:
        """One pass: log π of the chosen tokens before the coming update, of the whole batch or of its rows `rows`.

        The effect of the last update is seen only if the caller runs one more pass.
        """
        index = self._index(logp, rows)
        logp, old, mask = logp.double(), self._old[index], self._mask[index]
        forward, backward = self._overhang(logp, index)
        nearest = torch.maximum(forward, backward)
        distance = nearest.clamp(min=0)
        past, held = distance > 0, self._held[index]

        again = (self._sights[index] > 0)[:, None] & (forward > -torch.inf)
        move = torch.where(again, forward - self._forward[index], 0.0)
        crossed = past & (held == 0)
        entry = torch.where(crossed, distance, self._entry[index])
        carrier = torch.where(crossed, move * (forward > 0), self._carrier[index])

        self._lags = torch.cat([self._lags, self._lags.new_zeros(1, 2)])
        both = torch.stack([move, carrier], dim=2) * ((held > 0) & (carrier > 0))[:, :, None]
        self._lags.index_add_(0, (held - 1).clamp(min=0).flatten(), both.flatten(0, 1))

        log_ratio = (logp - old).masked_fill(~mask, 0.0)
        self._rows.append(torch.stack([
            self._sights[index], (nearest > -torch.inf).sum(1), past.sum(1), distance.sum(1),
            ((distance - entry) * past).sum(1), distance.amax(1), (torch.expm1(log_ratio) - log_ratio).sum(1),
            mask.sum(1)], dim=1))
        self._sights[index] += 1
        self._forward[index], self._entry[index], self._carrier[index] = forward, entry, carrier
        self._held[index] = torch.where(past, held + 1, 0)

    @property
    def bounded(self) -> int:
        found = torch.zeros_like(self._mask)
        for edge in self._edges:
            found = found | edge.low.isfinite() | edge.high.isfinite()
        return int(found.sum())

    def loss(self, logp: Tensor, rows: Tensor | None = None) -> Tensor:
        """D = Σ_it distance_it, differentiable in `logp`; `first_order` takes its gradient in θ."""
        return torch.maximum(*self._overhang(logp, self._index(logp, rows))).clamp(min=0).sum()

    def readings(self) -> list[OvershootReading]:
        """One reading for each sight number k = 0, 1, ... of the rows."""
        if not self._rows:
            return []
        sums = torch.cat(self._rows).cpu()  # one transfer
        return [_reading(sums[sums[:, 0] == k]) for k in range(int(sums[:, 0].max()) + 1)]

    def carry(self, lag: int = 0) -> float | None:
        """The share of the step across the edge that is repeated while the token's own gradient is stopped.

            carry(k) = Σ Δ_{c+k+1} / Σ Δ_c

        Δ_j is a token's move between its sights j − 1 and j, in the log-ratio that its edge bounds, positive in the
        direction of A. Move c crossed the edge. Both sums run over the tokens that crossed in the direction of A and
        were outside at sights c, ..., c + k; None where there is no such token. It equals C_{T,k} of arXiv:2601.05002,
        Eq. 36, where a token moves alone under a gradient that was constant for c = T − 1 updates.
        """
        if not 0 <= lag < len(self._lags):
            return None
        return _per(*self._lags[lag].tolist())

    def metrics(self) -> dict[str, float]:
        """The last reading, and those after k = 1, 2, ... updates under `overshoot/k/`; empty before any update."""
        readings = self.readings()[1:]
        if not readings:
            return {}
        # Where minibatches stopped early, rows were seen unequally often: a last pass over all rows counts alone.
        last = _reading(self._rows[-1].cpu()) if len(self._rows[-1]) == len(self._mask) else readings[-1]
        found: dict[str, float | None] = {schema.OPTIMIZER_OVERSHOOT: last.overshoot,
                                          schema.OVERSHOOT_CARRY: self.carry()}
        found |= {f"overshoot/{name}": getattr(last, name) for name in ("past", "distance", "max", "after", "kl")}
        for each in readings:
            found |= {f"overshoot/{each.updates}/{name}": getattr(each, name)
                      for name in ("past", "distance", "overshoot", "after", "kl")}
        return {name: value for name, value in found.items() if value is not None}

    def _overhang(self, logp: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return overhang([edge.rows(index) for edge in self._edges], logp.double(), self._old[index], self._mask[index],
                        self._credit[index])

    def _index(self, logp: Tensor, rows: Tensor | None) -> Tensor:
        size, width = self._mask.shape
        index = torch.arange(size, device=self._mask.device) if rows is None else rows.to(self._mask.device)
        if index.dim() != 1 or index.dtype != torch.int64:
            raise CreditscopeError(f"rows must be an int64 tensor (n,) of row numbers, got {index.dtype} "
                                   f"{tuple(index.shape)}; a mask becomes one by mask.nonzero().squeeze(1)")
        if tuple(logp.shape) != (len(index), width):
            raise CreditscopeError(f"logp must be (rows, T) = ({len(index)}, {width}), got {tuple(logp.shape)}")
        if len(torch.unique(index)) < len(index) or bool(((index < 0) | (index >= size)).any()):
            raise CreditscopeError(f"rows must be different numbers from 0 to {size - 1}, got {index.tolist()}")
        return index


def _reading(rows: Tensor) -> OvershootReading:
    """The reading of rows (n, 8): sight number, bounded, past, Σ distance, Σ after, max distance, Σ k3, chosen."""
    updates, _, _, _, _, furthest, _, _ = rows.amax(0).tolist()
    _, tokens, past, distance, after, _, k3, chosen = rows.sum(0).tolist()
    return OvershootReading(
        updates=int(updates), tokens=int(tokens), past=_per(past, tokens), distance=_per(distance, past),
        overshoot=_per(distance, tokens), max=furthest if past else None, after=_per(after, distance),
        kl=_per(k3, chosen))


def _per(total: float, count: float) -> float | None:
    return total / count if count else None


def first_order(slope: Mapping[Tensor, Tensor], parts: Mapping[Tensor, Parts]) -> dict[str, float]:
    """The change of the total overshoot D = Σ_it distance_it by each part of the coming update, to first order.

        ΔD ≈ ⟨∇D, Δθ⟩ = ⟨∇D, momentum⟩ + ⟨∇D, fresh⟩ + ⟨∇D, decay⟩

    `slope` is ∇D by parameter; `parts` is `state.split(optimizer)`. Tokens that are still inside have no slope.
    """
    missing = sum(p not in slope for p in parts)
    if missing:
        raise CreditscopeError(f"slope lacks {missing} of the {len(parts)} parameters that the update moves; take the "
                               f"gradient of Overshoot.loss over all of them")
    return {name: sum(float((slope[p].double() * getattr(part, name).double()).sum()) for p, part in parts.items())
            for name in ("momentum", "fresh", "decay")}
