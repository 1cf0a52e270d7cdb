"""Kronecker sketches: k² numbers per rollout whose inner products estimate those of the gradients.

    S_i = Σ_parameters P_out dW_i P_inᵀ / k        E⟨S_i, S_j⟩ = ⟨g_i, g_j⟩

The exact Gram needs two rollouts in one backward pass. Sketches, k × k and linear in the gradient, compare rollouts of
different micro-batches, ranks or steps; `Sketch.relative_error` estimates their error from the sketch itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.spectrum import at_least

VECTOR_CHUNK = 4096  # entries of a 1-D parameter at a time: (N, 4096, k) is the largest thing it makes


@lru_cache(1024)  # a Microscope per step makes a Sketcher per step
def signs(seed: int, name: str, side: str, size: int, k: int) -> Tensor:
    """The projection of one side of one parameter: ±1, (size, k) int8, E[p pᵀ] = I for each column p.

    The signs are the bits of SHAKE-256 of (seed, side, name): the same in every process, on every device and in every
    version of torch. Signs and not Gaussians: they are exact in bfloat16, and p² = 1 lowers the variance.

    >>> signs(0, "head.weight", "out", 3, 4).tolist()
    [[-1, -1, 1, -1], [-1, -1, -1, 1], [1, 1, 1, -1]]
    """
    count = size * k
    stream = hashlib.shake_256(f"creditscope sketch|{seed}|{side}|{name}".encode()).digest((count + 7) // 8)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=count)
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1).view(size, k)


@dataclass(frozen=True)
class ParameterBlock:
    """The part of a parameter of this `shape` that begins at `start`: one rank's part."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


class Sketcher:
    """Makes sketches, (N, k²), of per-rollout gradients. Those of different parameters are added.

    Every parameter has its own projections, drawn from its name, so that E⟨S of one, S of another⟩ = 0 and the sum over
    parameters is a sketch of the whole gradient. Layers with the same input (q, k, v) do not share its projection: that
    would add Σ ‖A_q B_kᵀ‖²/k over their pairs to the variance.

    >>> sketcher = Sketcher(k=4)
    >>> delta, a = torch.ones(2, 3, 5), torch.ones(2, 3, 7)
    >>> weight = torch.einsum("nto,nti->noi", delta, a)
    >>> torch.equal(sketcher.matrix("w", delta, a), sketcher.dense("w", weight))
    True
    """

    def __init__(self, k: int = 16, seed: int = 0) -> None:
        self.k = at_least(2, k, "k of a sketch (16 by default; with one row its error cannot be measured)")
        self.seed = seed
        self._projections: dict[tuple[str, str, torch.device, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def matrix(self, name: str, delta: Tensor, a: Tensor, block: ParameterBlock | None = None) -> Tensor:
        """S_i = Σ_t (P_out δ_it)(P_in a_it)ᵀ / k, for dW_i = Σ_t δ_it a_itᵀ; (N, T, d_out), (N, T, d_in) -> (N, k²).

        `delta` belongs to the parameter's first dimension. The sketches of all blocks add up to that of the parameter.
        """
        out, into = (None, None) if block is None else zip(block.shape, block.start, strict=True)
        return self._outer(delta @ self._projection(name, "out", delta, delta.shape[-1], out),
                           a @ self._projection(name, "in", a, a.shape[-1], into))

    @torch.no_grad()
    def rows(self, name: str, index: Tensor, delta: Tensor, count: int, block: ParameterBlock | None = None) -> Tensor:
        """S_i = Σ_t (column index_it of P_out)(P_in δ_it)ᵀ / k, for an embedding: dW_i = Σ_t e_{index_it} δ_itᵀ.

        A head tied to the embedding has the same name and projections, so the two sketches add up to that of their
        summed (count, d) gradient. In a `block`, index counts from its first row.
        """
        into = None
        if block is not None:
            index, count, into = index + block.start[0], block.shape[0], (block.shape[1], block.start[1])
        table = self._projection(name, "out", delta, count)
        return self._outer(torch.nn.functional.embedding(index, table),
                           delta @ self._projection(name, "in", delta, delta.shape[-1], into))

    @torch.no_grad()
    def vector(self, name: str, g: Tensor, block: ParameterBlock | None = None) -> Tensor:
        """S_i = P_out diag(g_i) P_inᵀ / k, for a 1-D parameter: (N, d) -> (N, k²).

        Entry (r, s) is Σ_c p_rc q_sc g_c with signs that are independent for every pair (r, s). A count sketch has the
        same variance, but lacks the rows and columns from which `Sketch.variance` estimates the error.
        """
        whole = None if block is None else (block.shape[0], block.start[0])
        left, right = (self._projection(name, side, g, g.shape[1], whole) for side in ("out", "in"))
        total = torch.zeros(len(g), self.k * self.k, device=g.device, dtype=_wide(g.dtype))
        for part in (slice(c, c + VECTOR_CHUNK) for c in range(0, g.shape[1], VECTOR_CHUNK)):
            total += self._outer(g[:, part, None] * left[part], right[part].expand(len(g), -1, -1))
        return total

    @torch.no_grad()
    def dense(self, name: str, g: Tensor, block: ParameterBlock | None = None) -> Tensor:
        """S_i = P_out dW_i P_inᵀ / k of explicit gradients (N, *shape); a stack (E, d_out, d_in) is (E·d_out, d_in)."""
        if g.dim() < 3:
            return self.vector(name, g.reshape(len(g), -1), block)
        out = into = None
        if block is not None:
            inner = prod(block.shape[1:-1])
            if any(block.start[1:-1]) or tuple(g.shape[2:-1]) != block.shape[1:-1]:
                raise CreditscopeError(f"{name}: of a stack {block.shape} a block may be cut along the first or the "
                                       f"last dimension, this one begins at {block.start}")
            out, into = (block.shape[0] * inner, block.start[0] * inner), (block.shape[-1], block.start[-1])
        g = g.reshape(len(g), -1, g.shape[-1])
        left = self._projection(name, "out", g, g.shape[1], out)
        right = self._projection(name, "in", g, g.shape[2], into)
        wide = _wide(g.dtype)
        with _unrounded(g):
            if g.shape[1] >= g.shape[2]:
                s = (left.t() @ g).to(wide) @ right.to(wide)
            else:
                s = left.t().to(wide) @ (g @ right).to(wide)
        return s.flatten(1) / self.k

    @torch.no_grad()
    def gradient(self, named: Iterable[tuple[str, Tensor]]) -> Tensor:
        """The sketch, (k²,), of one whole gradient or update {name: tensor}."""
        total: Tensor | None = None
        for name, g in named:
            row = self.dense(name, g[None])[0]
            total = row if total is None else total + row.to(total.device)
        if total is None:
            raise CreditscopeError("no tensor to sketch: give (name, tensor) pairs, for example ((n, p.grad) for n, p "
                                   "in model.named_parameters() if p.grad is not None)")
        return total

    def _projection(self, name: str, side: str, like: Tensor, size: int,
                    whole: tuple[int, int] | None = None) -> Tensor:
        """±1 as (size, k); with `whole` = (size of the side, first row), those rows of the side's signs."""
        if whole is not None:
            return self._projection(name, side, like, whole[0])[whole[1]:whole[1] + size]
        key = (name, side, like.device, like.dtype)
        found = self._projections.get(key)
        if found is None:
            made = signs(self.seed, name, side, size, self.k)
            found = self._projections[key] = made.to(device=like.device, dtype=like.dtype)
        if len(found) != size:
            # Two parameters of one name would share signs, and their cross terms would not average out.
            raise CreditscopeError(f"parameter {name!r} had size {len(found)} on its {side} side and now has {size}: "
                                   f"one name is one parameter; pass its full name in the model")
        return found

    def _outer(self, u: Tensor, v: Tensor) -> Tensor:
        """Σ_t u_it v_itᵀ / k in float32 or wider: (N, T, k) twice -> (N, k²)."""
        wide = _wide(torch.promote_types(u.dtype, v.dtype))
        with _unrounded(u):
            u, v = u.to(wide), v.to(wide)
            return torch.baddbmm(u.new_empty(()), u.transpose(1, 2), v, beta=0, alpha=1 / self.k).flatten(1)


def _unrounded(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off where it is on: a backward pass inside it would silently round the sketch to bfloat16."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Sketch:
    """Sketches of N rollouts, summed over the parameters `names`, and the Gram they estimate."""

    rows: Tensor
    """(N, k²)."""
    k: int
    seed: int
    names: tuple[str, ...]
    """The parameters whose gradients are inside. Sketches of different parameters are not comparable."""

    def __post_init__(self) -> None:
        if self.rows.dim() != 2 or self.rows.shape[1] != self.k**2:
            raise CreditscopeError(f"a sketch with k = {self.k} has rows (N, {self.k**2}), got "
                                   f"{tuple(self.rows.shape)}")

    @property
    def gram(self) -> Tensor:
        """K̂ = S Sᵀ, (N, N) float64 on the CPU, with E K̂ = K. Its rank is at most k²."""
        s = self._double()
        return s @ s.T

    @property
    def variance(self) -> Tensor:
        """An unbiased estimate of Var K̂_ij, (N, N), from the sketch alone: a two-way analysis of variance.

            Var K̂ = E (MS_row + MS_col − MS_rest)/k²

        K̂_ij is the mean of the k × k table X_rs = k² S_irs S_jrs, whose rows and columns are independent draws; MS are
        the mean squares between its rows, between its columns and of the rest. Single entries can be below 0.
        """
        k, s = self.k, self._double().view(-1, self.k, self.k)
        square = self.gram.square()
        between_rows = k * sum((g.square() for g in _slices(s)), torch.zeros_like(square)) - square
        between_cols = k * sum((g.square() for g in _slices(s.mT)), torch.zeros_like(square)) - square
        cells = s.flatten(1).square()
        rest = k**2 * (cells @ cells.T) - square - between_rows - between_cols
        return (between_rows + between_cols) / (k - 1) - rest / (k - 1) ** 2

    @property
    def relative_error(self) -> float:
        """The estimated ‖K̂ − K‖_F / ‖K‖_F: √(V/(‖K̂‖² − V)), V = Σ Var K̂_ij, since E‖K̂‖² = ‖K‖² + V.

        Infinite when noise alone explains K̂ (a larger k is needed), nan when K̂ is 0.
        """
        v, square = max(float(self.variance.sum()), 0.0), float(self.gram.square().sum())
        if square == 0:
            return float("nan")
        return (v / (square - v)) ** 0.5 if v < square else float("inf")

    @staticmethod
    def cat(sketches: Sequence[Sketch]) -> Sketch:
        """The rollouts of several micro-batches or ranks, one after another."""
        if not sketches:
            raise CreditscopeError("no sketches were given: give at least one")
        first = sketches[0]
        for i, other in enumerate(sketches):
            for what, mine, theirs in (("k", first.k, other.k), ("seed", first.seed, other.seed)):
                if mine != theirs:
                    raise CreditscopeError(f"sketches are comparable only with the same projections: {what} is {mine} "
                                           f"in the first and {theirs} in number {i}. Give every rank the same "
                                           f"Sketcher(k, seed)")
            here, there = set(first.names), set(other.names)
            if here != there:
                raise CreditscopeError(f"sketches must cover the same parameters: only the first has "
                                       f"{', '.join(sorted(here - there)[:4]) or 'nothing'}, only number {i} has "
                                       f"{', '.join(sorted(there - here)[:4]) or 'nothing'}")
        return Sketch(torch.cat([s.rows.to(first.rows.device) for s in sketches]), first.k, first.seed, first.names)

    def _double(self) -> Tensor:
        # On the CPU: some accelerators have no float64, and N × k² is small.
        return self.rows.detach().cpu().double()


def _slices(s: Tensor) -> Iterable[Tensor]:
    """The Gram's k summands, one for each row r of the k × k sketches: Σ_s S_irs S_jrs, (N, N)."""
    return (s[:, r] @ s[:, r].T for r in range(s.shape[1]))
