"""Rules for parameters that act by broadcasting: each rollout gets a copy, and the gradient of a copy is its row.

    y = f(x, p) entry by entry, with broadcasting        row i of p = Σ over rollout i's entries of δ ∂f/∂p

Layer norms and RMS norms scale their normalised input by such a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from creditscope.microscope.calls import PLAIN, Call, arguments, attach, name_of, unwatched
from creditscope.microscope.gram import has_triton
from creditscope.microscope.owners import on_front, usual_owner
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sources import ParameterSource


class _Spread(torch.autograd.Function):
    """p → one copy for each row, as a view; the backward gets one gradient per row."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, lead: tuple[int, ...], where: str, source: ParameterSource, recorder: Recorder,
                rows: RowOwners) -> Tensor:
        ctx.features, ctx.where, ctx.source, ctx.recorder, ctx.rows = p.dim(), where, source, recorder, rows
        return p.expand(*lead, *p.shape)

    @unwatched
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows: RowOwners = ctx.rows
        ctx.recorder.stray(ctx.where, rows.stray(grad))
        return ctx.recorder.dense(ctx.source, rows.fold(grad, ctx.features)), None, None, None, None, None


def _copies(call: Call, x: Tensor, p: Tensor, source: ParameterSource, rows: RowOwners, where: str) -> Tensor | None:
    """A copy of p per row that broadcasts against x as p does; None where p is laid out by rows itself."""
    shape = tuple(p.shape)
    while shape and shape[0] == 1 and len(shape) > x.dim() - own_axes(rows, x):
        shape = shape[1:]  # (1, T, d) broadcasts as (T, d)
    if len(shape) > x.dim() - own_axes(rows, x):
        return None
    if x.dim() == 1:
        rows.owned(tuple(x.shape), where)
    lead = rows.spread_shape(tuple(x.shape[:-1]), len(shape), where) if x.dim() > 1 else tuple(x.shape)
    call.recorder.forward("dense", source, x.requires_grad)
    lean = p if shape == tuple(p.shape) else p.reshape(shape)
    if lean is not p:
        call.nodes.add(lean.grad_fn)
    held = source if lean is p else replace(source, tensor=lean, node=lean.grad_fn)
    return _Spread.apply(lean, lead, where, held, call.recorder, rows)  # type: ignore[no-any-return, no-untyped-call]


class _Along(torch.autograd.Function):
    """A tensor made of parameters that is itself laid out by rows: rollout i's row is the gradient of its positions."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, source: ParameterSource, recorder: Recorder, rows: RowOwners,
                where: str) -> Tensor:
        ctx.source, ctx.recorder, ctx.rows, ctx.where = source, recorder, rows, where
        return p.view_as(p)

    @unwatched
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, recorder, rows, where = ctx.source, ctx.recorder, ctx.rows, ctx.where
        recorder.stray(where, rows.stray(grad))
        if source.ids is not None:
            ids = source.ids.view(grad.shape[:-1])
            recorder.lookup(recorder.own(source), rows.arrange(ids[..., None], where).squeeze(-1),
                            rows.arrange(grad, where, blank=True))
        else:
            owner = rows.owner if rows.picked else usual_owner(rows, grad)
            assert owner is not None
            owner = on_front(owner.to(grad.device), grad)
            recorder.dense(source, torch.stack([grad.masked_fill(owner != i, 0) for i in range(rows.count)]))
        return grad, None, None, None, None


def _along(call: Call, x: Tensor, p: Tensor, source: ParameterSource, rows: RowOwners, where: str) -> Tensor | None:
    axes = own_axes(rows, x)
    if p.dim() != x.dim() or p.shape[:axes] != x.shape[:axes] or (not rows.picked and usual_owner(rows, x) is None):
        return None
    rows.owned(tuple(x.shape[:-1]), where)
    ids = None
    if source.ids is not None:
        ids = rows.arrange(source.ids.view(*p.shape[:-1], 1), where).squeeze(-1)
    call.recorder.forward("lookup" if ids is not None else "dense", source, x.requires_grad, ids=ids)
    return _Along.apply(p, source, call.recorder, rows, where)  # type: ignore[no-any-return, no-untyped-call]


def own_axes(rows: RowOwners, x: Tensor) -> int:
    """How many leading axes of x name its rows."""
    if rows.picked:
        assert rows.owner is not None
        return rows.owner.dim()
    return 2 if rows.by_position and x.dim() > 2 else 1


def spread(call: Call) -> Any:
    """Any function that works element by element, with its parameters copied for each row."""
    if name_of(call.func) != getattr(call.func, "__name__", "") and call.source(call.args[0]) is not None:
        return None  # it changes a tensor made of parameters in place
    if len(call.args) == 2 and not call.kwargs:
        a, b = call.args
        p, x = (a, b) if call.source(a) is not None else (b, a)
        source = call.source(p)
        if source is not None and type(x) in PLAIN and type(p) in PLAIN and p.dim() < x.dim() \
                and x.shape[x.dim() - p.dim():] == p.shape and call.source(x) is None:
            copy = _copies(call, x, p, source, call.rows_of(x), call.where)
            if copy is not None:
                return call.func(copy, x) if p is a else call.func(x, copy)
    flat, spec = pytree.tree_flatten((call.args, call.kwargs))
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    x = max((t for t in tensors if call.source(t) is None and call.has_rows(t)), key=lambda t: t.dim())
    if {type(t) for t in tensors} - PLAIN \
            or torch.broadcast_shapes(*(t.shape for t in tensors)) != x.shape:  # type: ignore[no-untyped-call]
        return None
    rows, where = call.rows_of(x), call.where
    for k, leaf in enumerate(flat):
        source = call.source(leaf) if isinstance(leaf, Tensor) else None
        if source is not None:
            flat[k] = _copies(call, x, leaf, source, rows, where)
            if flat[k] is None:
                flat[k] = _along(call, x, leaf, source, rows, where)
            if flat[k] is None:
                return None
    args, kwargs = pytree.tree_unflatten(flat, spec)
    return call.func(*args, **kwargs)


class _RowLayerNorm(torch.autograd.Function):
    """LayerNorm(x)·W + b where W and b hold equal copies for each row: the native kernel uses the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None,
                eps: float) -> Tensor:
        one = [None if p is None else p.reshape(-1, *shape)[0] for p in (weight, bias)]
        out, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, *one, eps)
        ctx.save_for_backward(x, mean, rstd, *one)
        ctx.eps, ctx.normal, ctx.spread = eps, shape, [None if p is None else p.shape for p in (weight, bias)]
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return _RowLayerNorm._gradients(ctx, grad, x, mean, rstd, weight, bias)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Any, bias: Any) -> Any:
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx, _, _ = torch.ops.aten.native_layer_norm_backward(grad.contiguous(), x, ctx.normal, mean, rstd, weight,
                                                                 bias, [True, False, False])
        if _by_kernel(grad, x, mean, ctx.spread[0] or ctx.spread[1]):
            from creditscope.microscope import kernels

            dw, db = kernels.norm_rows(grad, x, mean, rstd)
            dw = dw.view(ctx.spread[0]).to(weight.dtype) if ctx.needs_input_grad[2] else None
            db = db.view(ctx.spread[1]).to(bias.dtype) if ctx.needs_input_grad[3] else None
            return dx, None, dw, db, None
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(x.dtype, torch.float32)  # as the native kernel does: products are not rounded
            if mean.dtype != wide:  # a CPU keeps the statistics in half precision
                axes = [-1 - i for i in range(len(ctx.normal))]
                mean = x.to(wide).mean(dim=axes, keepdim=True)
                rstd = torch.rsqrt((x.to(wide) - mean).square().mean(dim=axes, keepdim=True) + ctx.eps)
            dw = ((x.to(wide) - mean) * rstd).mul_(grad).sum_to_size(ctx.spread[0]).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            db = grad.sum_to_size(ctx.spread[1]).to(bias.dtype)
        return dx, None, dw, db, None


def _by_kernel(grad: Tensor, x: Tensor, mean: Tensor, spread: Sequence[int]) -> bool:
    """Whether one pass of a GPU kernel can give the rows: (B, T, d) with one copy of the parameter for each of B."""
    return (grad.is_cuda and has_triton() and x.dim() == 3 and tuple(spread) == (len(x), 1, x.shape[2])
            and mean.dtype == torch.float32)


def layer_norm(call: Call) -> Any:
    """torch.layer_norm(x, shape, W, b, eps)."""
    x, shape, weight, bias, eps = arguments(call, "input", "normalized_shape", "weight", "bias", "eps")
    if call.source(x) is not None or {type(t) for t in (x, weight, bias) if t is not None} - PLAIN:
        return None
    shape = tuple(shape)
    rows, where = call.rows_of(x), call.where
    if len(shape) > x.dim() - own_axes(rows, x):
        return None
    copies: list[Tensor | None] = []
    lead = rows.spread_shape(tuple(x.shape[:-1]), len(shape), where)
    for p in (weight, bias):
        source = None if p is None else call.source(p)
        copies.append(p.expand(*lead, *p.shape) if source is None and p is not None else
                      None if source is None else _copies(call, x, p, source, rows, where))
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x, *copies = (None if t is None else t.float() for t in (x, *copies))
    return _RowLayerNorm.apply(x, shape, *copies, 1e-5 if eps is None else eps)  # type: ignore[no-untyped-call]


def scaled(call: Call) -> Any:
    """torch.rms_norm(x, (d,), w, eps) = x / √(mean x² + eps) · w: rows Σ_t δ_it x_it / √(…)."""
    x, shape, weight, eps = arguments(call, "input", "normalized_shape", "weight", "eps")
    source = None if weight is None else call.source(weight)
    if source is None or call.source(x) is not None or len(shape) != 1 or {type(x), type(weight)} - PLAIN:
        return None
    rows, where = call.rows_of(x), call.where
    rows.owned(tuple(x.shape[:-1]), where)
    call.recorder.forward("dense", source, x.requires_grad)
    held = x.detach()

    def report(grads: tuple[Tensor | None, ...]) -> None:
        (grad,) = grads
        assert grad is not None
        wide = held.to(torch.promote_types(held.dtype, torch.float32))
        rounding = torch.finfo(held.dtype).eps if eps is None else eps
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rounding)
        each = rows.arrange((unit * grad).to(unit.dtype), where, blank=True).sum(dim=1)
        call.recorder.stray(where, rows.stray(grad))
        call.recorder.dense(source, each.to(weight.dtype))

    return attach(call, call.func(*call.args, **call.kwargs), report)
