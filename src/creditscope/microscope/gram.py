"""Per-rollout gradients of one parameter, as their sum and their Gram matrix; N×P numbers are never held.

Index legend: i, j rollouts (N); t positions of a rollout (T); o, d outputs and inputs of a weight.
Products are taken in the rows' own precision (float32 for bfloat16 rows) and added up in float64.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from creditscope.batch.groups import binary_unit

SCRATCH = {"cpu": 8 << 20, "cuda": 64 << 20}
"""Bytes of per-rollout gradients held at a time: on a CPU about what its caches hold, on a GPU its L2."""


class Scratch:
    """Memory for the rows that are held at a time, reused by all layers: new pages cost more than the products."""

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def take(self, count: int, like: Tensor) -> Tensor:
        """`count` numbers of like's kind; the last ones taken are overwritten."""
        if self._room is None or len(self._room) < count or self._room.dtype != like.dtype:
            self._room = like.new_empty(count)
        return self._room[:count]


def materialise(delta: Tensor, a: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """`recorder.weight_gram` on a CPU: per-rollout gradients of a block of outputs at a time, then their products."""
    dtype = a.dtype
    if dtype in (torch.bfloat16, torch.float16):
        delta, a = delta.float(), a.float()
    (n, _, outputs), inputs = delta.shape, a.shape[2]
    parts = -(-outputs * n * inputs * a.element_size() // SCRATCH["cpu"])
    block = -(-outputs // min(parts, outputs))
    dw, grams = a.new_empty(outputs, inputs), []
    for start in range(0, outputs, block):
        some = delta[:, :, start:start + block].transpose(1, 2)
        each = scratch.take(n * some.shape[1] * inputs, a).view(n, some.shape[1], inputs)
        torch.bmm(some, a, out=each)
        grams.append(products(each.view(n, -1)))
        torch.sum(each, dim=0, out=dw[start:start + block])
    return dw.to(dtype), _total(grams)


def dense_gram(g: Tensor) -> Tensor:
    """(N, ...) explicit rows → (N, N) float64, a slice of columns at a time."""
    flat = g.reshape(len(g), -1)
    if flat.dtype in (torch.bfloat16, torch.float16) and not flat.is_cuda:
        flat = flat.float()
    width = max(1, (1 << 22) // len(flat))
    return _total([products(flat[:, start:start + width]) for start in range(0, flat.shape[1], width)])


SPAN = 1 << 12
"""Columns of a product that are summed in the rows' own precision; the sums of spans are added up in float64. A flat
float32 sum over 2²¹ columns of two rows is off by 6e-5 of the largest entry, one by spans by 3e-8, in the same time:
torch multiplies one long product of few rows on one thread, and spans on all."""
SQUARABLE = (1e-20, 1e30)
"""Squared norms of float32 rows between which products neither overflow nor lose digits."""


def products(rows: Tensor) -> Tensor:
    """(N, c) → (N, N) inner products, never rounded to half precision; on a CPU of rows of any size.

    Products that float32 cannot hold are taken again, in a unit of the rows' own size. On a GPU that test would cost a
    synchronisation; there the self-check fails.
    """
    if rows.is_cuda:
        half = rows.dtype in (torch.bfloat16, torch.float16)
        return torch.mm(rows, rows.t(), out_dtype=torch.float32) if half else torch.mm(rows, rows.t())
    gram = _products(rows)
    if rows.dtype == torch.float64 or SQUARABLE[0] <= float(gram.max()) <= SQUARABLE[1]:  # the largest ‖row‖²
        return gram
    unit = binary_unit(rows.abs().max()) if rows.numel() else rows.new_ones(())
    return _products(rows / unit).double() * unit.double().square()


def across(rows: Tensor, others: Tensor) -> Tensor:
    """(N, c), (M, c) → (N, M) inner products, of rows of any size as in `products`."""
    gram = torch.mm(rows, others.t())
    if rows.is_cuda or rows.dtype == torch.float64 or SQUARABLE[0] <= float(gram.abs().max()) <= SQUARABLE[1]:
        return gram
    unit, other = binary_unit(rows.abs().max()), binary_unit(others.abs().max())
    return torch.mm(rows / unit, (others / other).t()).double() * unit.double() * other.double()


def _products(rows: Tensor) -> Tensor:
    n, columns = rows.shape
    whole = columns // SPAN * SPAN
    if not whole:
        return torch.mm(rows, rows.t())
    spans = rows[:, :whole].view(n, -1, SPAN).transpose(0, 1)
    gram = torch.bmm(spans, spans.transpose(1, 2)).sum(dim=0, dtype=torch.float64)
    return gram if whole == columns else gram + torch.mm(rows[:, whole:], rows[:, whole:].t())


def _total(grams: list[Tensor]) -> Tensor:
    return grams[0].double() if len(grams) == 1 else torch.stack([gram.double() for gram in grams]).sum(dim=0)


class EmbeddingRows:
    """Per-rollout gradients of an embedding: row v of rollout i is Σ_{t: id_it = v} δ_it, over the ids that occur."""

    def __init__(self, ids: Tensor, delta: Tensor) -> None:
        n = len(ids)
        self.seen, place = torch.unique(ids, return_inverse=True)
        self._slot = (place + torch.arange(n, device=ids.device)[:, None] * len(self.seen)).flatten()
        self._delta = delta.reshape(-1, delta.shape[-1])
        self.count = n

    def slice(self, start: int, stop: int) -> Tensor:
        """(N, U, c) the gradients of features start to stop, in float32 or wider."""
        some = self._delta[:, start:stop]
        some = some.to(torch.promote_types(some.dtype, torch.float32))
        out = some.new_zeros(self.count * len(self.seen), some.shape[1])
        return out.index_add_(0, self._slot, some).view(self.count, len(self.seen), -1)

    def gram(self, head: Tensor | None = None) -> Tensor:
        """(N, N) of E_i, or of H_i + E_i less ⟨H_i, H_j⟩ where `head` (N, U, d) holds the rows `seen` of a tied head.

        ⟨H_i + E_i, H_j + E_j⟩ = HH + HE + EH + EE: only the rows of H for ids that occur meet E.
        """
        width, room = self._delta.shape[1], SCRATCH["cuda" if self._delta.is_cuda else "cpu"]
        step = max(1, min(width, room // (4 * self.count * max(1, len(self.seen)))))
        gram = torch.zeros(self.count, self.count, dtype=torch.float64, device=self._delta.device)
        for start in range(0, width, step):
            rows = self.slice(start, start + step).flatten(1)
            gram += products(rows)
            if head is not None:
                cross = across(head[:, :, start:start + step].to(rows.dtype).flatten(1), rows)
                gram += cross + cross.t()
        return gram


def squared_norms(grads: list[Tensor]) -> Tensor:
    """‖g‖² of each gradient, in float64, reading it once.

    A float32 norm over millions of entries is wrong by 3e-4 on a CPU; norms of 4,096 entries are not.
    """
    if not grads:
        return torch.zeros(0, dtype=torch.float64)
    if grads[0].is_cuda:
        # In float64: squares of float32 underflow and overflow. The time is that of reading the gradients.
        return torch.stack(torch._foreach_norm(grads, 2, torch.float64)).square()
    rows: list[Tensor] = []
    for g in grads:
        flat = g.detach().reshape(-1)
        flat = flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat
        whole = len(flat) // 4096 * 4096
        parts = [torch.linalg.vector_norm(flat[:whole].view(-1, 4096), dim=1)] if whole else []
        if whole < len(flat):
            parts.append(torch.linalg.vector_norm(flat[whole:]).reshape(1))
        rows.append(torch.cat(parts) if len(parts) > 1 else parts[0] if parts else flat.new_zeros(1))
    owner = torch.repeat_interleave(torch.tensor([len(r) for r in rows]))
    squares = torch.cat([r.double() for r in rows]).square()
    totals = torch.zeros(len(grads), dtype=torch.float64).index_add_(0, owner, squares)
    for i in ((totals < SQUARABLE[0]) | ~(totals < SQUARABLE[1])).nonzero().flatten().tolist():
        if grads[i].dtype != torch.float64 and grads[i].numel():
            wide = grads[i].detach().float()
            unit = binary_unit(wide.abs().max())
            totals[i] = torch.linalg.vector_norm(wide / unit, dtype=torch.float64).square() * unit.double().square()
    return totals


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
