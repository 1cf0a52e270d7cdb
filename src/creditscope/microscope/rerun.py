"""The rule for any other operation: it is run again, in the backward pass, on each rollout's part of its arguments.

    f(a, p)_i = f(a_i, p)        row i of p = (∂f(a_i, p)/∂p)ᵀ δ_i

How the arguments are cut into parts is tested on the call's own values: the operation on one rollout's part must give
that rollout's part of the result, in the forward for two rollouts and in the backward for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from creditscope.errors import CreditscopeError
from creditscope.microscope.calls import PLAIN, Call, attach
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sources import ParameterSource, coarsest


@dataclass(frozen=True)
class _Cut:
    """Which leaves of a call's arguments are cut, along the axis of rows, to run it for one rollout."""

    at: frozenset[int]
    axis: int
    rows: RowOwners

    def part(self, x: Tensor, i: int) -> Tensor | None:
        if self.axis == 0:
            return self.rows.piece(x, i)
        part = self.rows.piece(x.transpose(0, 1), i) if x.dim() > 1 else None
        return None if part is None else part.transpose(0, 1)

    @staticmethod
    def axes(rows: RowOwners) -> list[tuple[int, RowOwners]]:
        """The axes along which rows may lie, the first one first."""
        if rows.picked and rows.owner is not None:
            same = rows.owner.dim() == 2 and bool((rows.owner == rows.owner[:1]).all())
            return [(0, rows), *([(1, rows.gathered(rows.owner[0].cpu(), rows.owner.device))] if same else [])]
        return [(0, rows)] if rows.by_position else [(0, rows), (1, rows)]


def again(call: Call) -> Any:
    """Any operation: unchanged, and in the backward pass once more for each rollout's part of its arguments."""
    func, recorder = call.func, call.recorder
    flat, spec = pytree.tree_flatten((call.args, call.kwargs))
    tensors = {k: leaf for k, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
    sources = {k: s for k, leaf in tensors.items() if (s := call.source(leaf)) is not None and leaf.requires_grad}
    x = next((leaf for k, leaf in tensors.items() if k not in sources and call.has_rows(leaf)), None)
    if x is None:
        raise CreditscopeError(f"{call.where} meets no activation whose rows are known")
    if {type(leaf) for leaf in tensors.values()} - PLAIN:
        kinds = sorted({type(leaf).__name__ for leaf in tensors.values() if type(leaf) not in PLAIN})
        raise CreditscopeError(f"{call.where} computes with {', '.join(kinds)}, subclasses of Tensor")
    rows, where = call.rows_of(x), call.where
    kind = x.device.type
    casts = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def run(leaves: Sequence[Any]) -> list[Tensor]:
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        with torch.autocast(casts[0], enabled=casts[1], dtype=casts[2]):
            return [y for y in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(y, Tensor)]

    versions = [t._version for t in tensors.values()]
    before = _random_state(x)
    out = func(*call.args, **call.kwargs)
    call.ran.append(out)
    if not torch.equal(before, _random_state(x)):
        raise CreditscopeError(f"{where} draws random numbers, so it cannot be run again for each rollout; turn "
                               f"dropout off (model.eval())")
    if versions != [t._version for t in tensors.values()]:
        raise CreditscopeError(f"{where} changes its arguments in place, so it cannot be run again for each rollout; "
                               f"write it out of place")
    results = [y for y in pytree.tree_leaves(out) if isinstance(y, Tensor)]
    bare = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat]
    marks = [_mark(y.detach()) for y in results]
    cut = _find_cut(call, rows, bare, sources, x, [y.detach() for y in results], run)
    if cut is None:
        raise CreditscopeError(f"{where} gives one rollout another result alone than in its batch: its arguments "
                               f"{[tuple(t.shape) for t in tensors.values()]} are not laid out by the batch's "
                               f"{rows.batch} rows, or it mixes them")
    for source in sources.values():
        recorder.forward("dense", source, x.requires_grad)
    graded = [k for k, y in enumerate(results) if y.requires_grad]

    def report(grads: tuple[Tensor | None, ...]) -> None:
        given = dict(zip(graded, grads, strict=True))
        each = {k: s.tensor.new_zeros(rows.count, *s.tensor.shape) for k, s in sources.items()}
        for i in range(rows.count):
            leaves, held = list(bare), {}
            for k in sources:
                held[k] = leaves[k] = bare[k].detach().requires_grad_()
            with torch.enable_grad():
                for k in cut.at:
                    leaves[k] = cut.part(leaves[k], i)
                if any(0 in leaf.shape for leaf in leaves if isinstance(leaf, Tensor)):
                    continue  # a rollout without vectors here
                now = run(leaves)
            wanted, cotangents = [], []
            for k, (mark, y) in enumerate(zip(marks, now, strict=True)):
                grad = given.get(k)
                part = None if grad is None else cut.part(grad, i)
                then = cut.part(mark, i)
                if then is not None and y.is_floating_point():
                    recorder.mixing.append((where, _gap(then, _mark(y.detach()), y.dtype)))
                if part is not None and y.requires_grad:
                    wanted.append(y)
                    cotangents.append(part.reshape(y.shape))
            if wanted:
                found = torch.autograd.grad(wanted, list(held.values()), cotangents, allow_unused=True)
                for k, g in zip(held, found, strict=True):
                    if g is not None:
                        each[k][i] = g.to_dense() if g.is_sparse else g
        for k, source in sources.items():
            short = coarsest(source.precision, casts[2]) if casts[1] else source.precision
            recorder.dense(replace(source, precision=short), each[k])
        for grad in grads:
            if grad is not None and cut.axis == 0 and grad.dim() > 0:
                recorder.stray(where, rows.stray(grad))

    attached = attach(call, out, report)
    if cut.axis == 1 and not rows.picked:  # its results have the same layout
        recorder.turned.extend(y for y in pytree.tree_leaves(attached) if isinstance(y, Tensor) and y.dim() > 1
                               and y.shape[1] in (rows.batch, rows.batch * (rows.width or 1)))
    return attached


def _find_cut(call: Call, rows: RowOwners, bare: list[Any], sources: dict[int, ParameterSource], x: Tensor,
              results: Sequence[Tensor], run: Callable[[Sequence[Any]], list[Tensor]]) -> _Cut | None:
    """The first way to cut the arguments that gives two rollouts their parts of the results."""
    half = any(isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) for leaf in bare)
    if half:  # in half precision a wrong way may pass within rounding
        try:
            wide = [leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf
                    for leaf in bare]
            with torch.no_grad():
                bare, results = wide, run(wide)
        except RuntimeError:
            pass
    for axis, owners in _Cut.axes(rows):
        fits = [k for k, leaf in enumerate(bare) if isinstance(leaf, Tensor) and leaf.dim() > axis
                and _Cut(frozenset(), axis, owners).part(leaf, 0) is not None]
        others = [k for k in fits if k not in sources]
        sure = [k for k in others if call.has_rows(pytree.tree_leaves((call.args, call.kwargs))[k])] if axis == 0 \
            else others
        ways = [frozenset(sure), frozenset(fits), frozenset({*sure, *(k for k in fits if k in sources)}),
                frozenset(others)]
        for at in dict.fromkeys(way for way in ways if way):
            if _fits(_Cut(at, axis, owners), bare, results, run):
                return _Cut(at, axis, owners)
    return None


@torch.no_grad()
def _fits(cut: _Cut, bare: Sequence[Any], results: Sequence[Tensor],
          run: Callable[[Sequence[Any]], list[Tensor]]) -> bool:
    for i in dict.fromkeys((0, cut.rows.count - 1)):
        leaves = [cut.part(leaf, i) if k in cut.at else leaf for k, leaf in enumerate(bare)]
        if any(leaf is None or (isinstance(leaf, Tensor) and 0 in leaf.shape) for k, leaf in enumerate(leaves)
               if k in cut.at):
            continue
        try:
            now = run(leaves)
        except (RuntimeError, IndexError, ValueError):
            return False
        if len(now) != len(results):
            return False
        for y, alone in zip(results, now, strict=True):
            then = cut.part(y, i)
            if then is None or then.numel() != alone.numel():
                return False
            if y.is_floating_point() and not float(_gap(_mark(then.reshape(alone.shape)), _mark(alone), y.dtype)) <= 1:
                return False
    return True


def _random_state(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


def _mark(out: Tensor) -> Tensor:
    """(*lead, d) → (*lead, 2): each vector's product with fixed signs, and its norm, to compare results by."""
    wide = out.to(torch.promote_types(out.dtype, torch.float32)) if out.is_floating_point() else out.float()
    wide = torch.where(wide.abs() < 1e30, wide, wide.sign())  # masks are −∞, or nearly
    wide = wide if wide.dim() > 1 else wide[..., None]
    signs = torch.arange(wide.shape[-1], device=wide.device).mul(0.7548776662466927).frac().ge(0.5)
    return torch.stack([torch.where(signs, wide, -wide).sum(-1), torch.linalg.vector_norm(wide, dim=-1)], dim=-1)


def _gap(then: Tensor, now: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest difference of two marks in units of 4096 roundings (of float32 at least), at most an eighth."""
    if then.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=then.device)
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    scale = min(4096 * rounding, 0.125) * then[..., 1].max().clamp(min=1e-30)
    return ((then - now.reshape(then.shape)).abs().max() / scale).double()
