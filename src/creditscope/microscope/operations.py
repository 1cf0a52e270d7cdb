"""One rule per operation on a parameter: how its rows are read in the backward pass.

Modules are left alone. `watch` sees each torch call; where a call brings a parameter (or a tensor made of parameters)
together with activations, a rule of this file takes the call:

| rule | operations | rows | gradient that goes on |
|---|---|---|---|
| product | linear, matmul, mm, addmm | dW_i = Σ_t δ_it a_itᵀ | Σ_i dW_i |
| stack | bmm, grouped_mm: one matrix per expert | the same, matrix by matrix | the same |
| lookup | embedding, indexing by ids | row v: Σ_{t: id_it = v} δ_it | autograd's formula |
| spread | entry by entry, with broadcasting; layer_norm | a copy of the parameter per row | the copies' sum |
| scaled | rms_norm | Σ_t δ_it x_it / rms(x_it) | autograd's own |
| again | any other operation | the operation is run again on each rollout's part of its arguments | autograd's own |

A rule runs the very function that the model called, so results are what they were. A rule that does not fit returns
None, and the next one is tried; where none fits the call runs as it is, and the parameter is refused at the end of the
pass, with the reason, unless `allow` names it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import has_triton
from creditscope.microscope.layouts import usual_owner
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.rows import Rows
from creditscope.microscope.sources import Key, Source, coarsest

Func = Callable[..., Any]


@dataclass(eq=False, slots=True)
class Call:
    """One torch call that brings parameters and activations together."""

    func: Func
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    """What it is, in words."""
    recorder: Recorder
    source: Callable[[Any], Source | None]
    """What an argument is in terms of parameters; None for anything else."""
    rows_of: Callable[[Tensor], Rows]
    """The owners of an activation; an error where they cannot be told."""
    has_rows: Callable[[Any], bool]
    """Whether an argument is an activation."""
    nodes: set[Any]
    """Where to note the graph nodes of operations that run as they are."""
    ran: list[Any] = field(default_factory=list)
    """The call's result, once it has run as it is: it is not to run again."""


def unwatched(backward: Any) -> Any:
    """A backward that runs once, and unseen: what the microscope computes for itself is none of the model's calls.

    Saved tensors are taken before, for a checkpoint computes them for the asking, and that has to be seen.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        ctx.recorder.once(ctx)
        ctx.kept = ctx.saved_tensors
        try:
            with torch._C.DisableTorchFunction():
                return backward(ctx, *grads)
        finally:  # the graph may live on, and with it this
            ctx.kept = ctx.call = ctx.report = None

    return staticmethod(once_differentiable(run))


def name_of(func: Func) -> str:
    """What torch calls a function.

    >>> name_of(torch.Tensor.T.__get__), name_of(F.linear)
    ('T', 'linear')
    """
    if getattr(func, "__name__", "") == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", "__get__"))
    return str(getattr(func, "__name__", func)).strip("_")


# -- product -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Product:
    """x ↦ x Wᵀ + b, or x W + b where `transposed`."""

    where: str
    recorder: Recorder
    rows: Rows
    weight: Source | None
    bias: Source | None
    transposed: bool
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.recorder = product, product.recorder
        return _plain(product.run(x, weight, bias))

    @unwatched
    def backward(ctx: Any, grad: Tensor) -> Any:
        product: _Product = ctx.product
        recorder, rows, where = product.recorder, product.rows, product.where
        x, weight = ctx.kept
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = grad @ (weight.t() if product.transposed else weight)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            delta = rows.arrange(grad, where, blank=True)
            recorder.stray(where, rows.stray(grad))
        if ctx.needs_input_grad[1]:
            assert product.weight is not None
            a = rows.arrange(x, where)
            dw = recorder.matrix(product.weight, *((a, delta) if product.transposed else (delta, a)))
        if ctx.needs_input_grad[2]:
            assert product.bias is not None
            db = recorder.dense(product.bias, delta.sum(dim=1))
        return dx, dw, db, None


def product(call: Call) -> Any:
    """F.linear(x, W, b), x @ W, torch.addmm(b, x, W), where W or b is made of parameters and x is an activation."""
    if call.func is F.linear:
        x, weight, bias = call.args if len(call.args) == 3 else _named(call, "input", "weight", "bias")
        transposed = False
    elif call.func is torch.addmm or call.func is torch.Tensor.addmm:
        bias, x, weight = _named(call, "input", "mat1", "mat2")
        if set(call.kwargs) & {"beta", "alpha", "out"}:
            return None
        transposed = True
    else:
        (x, weight), bias, transposed = _named(call, "input", "other")[:2], None, True
        if call.kwargs.keys() - {"input", "other", "mat2", "tensor2"}:
            return None
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2 or call.source(x) is not None:
        return None
    sources = call.source(weight), None if bias is None else call.source(bias)
    free = [t for t, s in ((weight, sources[0]), (bias, sources[1])) if isinstance(t, Tensor) and s is None]
    if sources == (None, None) or any(t.requires_grad for t in free) or (bias is not None and bias.dim() != 1):
        return None
    if {type(t) for t in (x, weight, bias) if t is not None} - PLAIN:
        return None  # a tensor with a meaning of its own: quantised, masked, ragged
    rows = call.rows_of(x)
    where = call.where
    rows.owned(tuple(x.shape[:-1]), where)  # refused here rather than in the middle of a backward
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    if call.func is F.linear:
        run = F.linear
    elif transposed and bias is not None:
        run = _addmm
    else:
        run = _matmul
    for source, kind in zip(sources, ("matrix", "dense"), strict=True):
        call.recorder.forward(kind, source, x.requires_grad)
    made = _Product(where, call.recorder, rows, *sources, transposed, run)
    factors = autocast(x, weight, bias)
    call.nodes.update(t.grad_fn for t in factors[1:] if t is not None and t is not weight and t is not bias)
    return _Multiply.apply(*factors, made)  # type: ignore[no-untyped-call]


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.matmul(x, weight)


def _addmm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return torch.addmm(bias, x, weight)


def autocast(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """What products do under autocast, made visible: a custom Function is not cast for us."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *parameters
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
                 for t in (x, *parameters))


# -- stack -------------------------------------------------------------------------------------------------------------


class _Stack(torch.autograd.Function):
    """y[e] = x[e] W[e], for the vectors x[e] that go to expert e."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, source: Source, spans: list[tuple[int, Rows, Any]],
                run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.source, ctx.spans, ctx.recorder = call, source, spans, call.recorder
        return _plain(run(x, weight))

    @unwatched
    def backward(ctx: Any, grad: Tensor) -> Any:
        recorder: Recorder = ctx.call.recorder
        x, weight = ctx.kept
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
        for e, rows, at in ctx.spans:
            dx[at] = grad[at] @ weight[e].t()
            part, where = _matrix_of(ctx.source, e), ctx.call.where
            dw[e] = recorder.matrix(part, rows.arrange(x[at], where), rows.arrange(grad[at], where, blank=True))
            recorder.stray(where, rows.stray(grad[at]))
        return dx, dw, None, None, None, None


def _matrix_of(source: Source, e: int) -> Source:
    """Matrix e of a stack."""
    assert source.key is not None
    return replace(source, tensor=source.tensor[e].detach(), key=Key(source.key.name, e), shape=source.shape[1:])


def stack(call: Call) -> Any:
    """bmm of (E, B·T, d) and (E, d, o); grouped_mm of (n, d), sorted by expert, and (E, d, o)."""
    x, weight = (*call.args, None, None)[:2]
    source = call.source(weight)
    if not isinstance(x, Tensor) or source is None or source.key is None or source.key.part is not None \
            or weight.dim() != 3 or len(source.shape) != 3 or tuple(weight.shape) != source._own \
            or call.source(x) is not None or {type(x), type(weight)} - PLAIN \
            or torch.is_autocast_enabled(x.device.type):
        return None
    grouped = name_of(call.func) == "grouped_mm"
    rest = [*call.args[2:], *call.kwargs.values()]
    if grouped:
        ends = call.kwargs.get("offs", call.args[2] if len(call.args) > 2 else None)
        if x.dim() != 2 or not isinstance(ends, Tensor) or sum(r is not None for r in rest) != 1:
            return None
        picked = call.rows_of(x)
        if not picked.picked or picked.owner is None:
            return None
        owner, starts = picked.owner.flatten().cpu(), [0, *ends.tolist()]
        spans: list[tuple[int, Rows, Any]] = [
            (e, picked.gathered(owner[a:b], x.device), slice(a, b))
            for e, (a, b) in enumerate(pairwise(starts)) if b > a]
    else:
        rows = call.recorder.known
        if rest or x.dim() != 3 or rows is None:
            return None
        picked = call.rows_of(x)
        if not picked.picked or picked.owner is None or picked.owner.dim() != 2:
            return None
        spans = [(e, rows.gathered(picked.owner[e].cpu(), x.device), e) for e in range(len(weight))]
    for e, _, _ in spans:
        call.recorder.forward("matrix", _matrix_of(source, e), x.requires_grad)
    more, kwargs, func = call.args[2:], call.kwargs, call.func

    def run(a: Tensor, w: Tensor) -> Any:
        return func(a, w, *more, **kwargs)

    return _Stack.apply(x, weight, call, source, spans, run)  # type: ignore[no-untyped-call]


# -- lookup ------------------------------------------------------------------------------------------------------------


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, source: Source, recorder: Recorder, rows: Rows,
                where: str) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.height, ctx.padding, ctx.source, ctx.recorder = len(weight), padding, source, recorder
        ctx.rows, ctx.where = rows, where
        return F.embedding(ids, weight)

    @unwatched
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.kept
        rows, where = ctx.rows, ctx.where
        if ctx.padding >= 0:  # a padding row gets no gradient, in torch as here
            grad = grad.masked_fill((ids == ctx.padding)[..., None], 0)
        dw = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.height, ctx.padding, False)
        delta = rows.arrange(grad, where, blank=True)
        ctx.recorder.stray(where, rows.stray(grad))
        ctx.recorder.lookup(ctx.source, rows.arrange(ids[..., None], where).squeeze(-1), delta)
        return None, dw, None, None, None, None, None


def lookup(call: Call) -> Any:
    """torch.embedding(W, ids), W[ids], index_select(W, 0, ids), for ids that belong to rows."""
    found = looked_up(call.func, call.args, call.kwargs)
    if found is None and call.func is torch.embedding:
        raise CreditscopeError(f"{call.where} has sparse=True or scale_grad_by_freq=True, which the microscope does "
                               f"not read; set both to False")
    if found is None:
        return None
    weight, ids, padding = found
    source = call.source(weight)
    if source is None or not isinstance(ids, Tensor) or not call.has_rows(ids) or {type(weight), type(ids)} - PLAIN:
        return None
    where, rows = call.where, call.rows_of(ids)
    ids = ids.long()
    arranged = rows.arrange(ids[..., None], where).squeeze(-1)
    call.recorder.forward("lookup", source, False, ids=arranged)
    return _Lookup.apply(ids, weight, padding, source, call.recorder, rows, where)  # type: ignore[no-untyped-call]


def looked_up(func: Func, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, int] | None:
    """(table, ids, the id that gets no gradient) of a call that looks up rows of a matrix; None for any other."""
    padding = -1
    if func is torch.embedding:
        given = dict(zip(("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"), args, strict=False)) \
            | kwargs
        weight, ids = given["weight"], given["indices"]
        padding = int(given.get("padding_idx", -1))
        if given.get("scale_grad_by_freq") or given.get("sparse"):
            return None
    elif func is torch.Tensor.__getitem__ and len(args) == 2:
        weight, ids = args
        if isinstance(ids, slice):
            ids = torch.arange(len(weight), device=weight.device)[ids]
    elif func in (torch.index_select, torch.Tensor.index_select) and len(args) == 3 and args[1] == 0:
        weight, _, ids = args
    else:
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(ids, Tensor) \
            or ids.dtype not in (torch.int64, torch.int32):
        return None
    if func is torch.Tensor.__getitem__:
        ids = ids.remainder(len(weight))
    return weight, ids, padding


# -- spread: parameters that act by broadcasting -----------------------------------------------------------------------


class _Spread(torch.autograd.Function):
    """p → one copy for each row. The copies are views; what comes back is one gradient per row."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, lead: tuple[int, ...], where: str, source: Source, recorder: Recorder,
                rows: Rows) -> Tensor:
        ctx.features, ctx.where, ctx.source, ctx.recorder, ctx.rows = p.dim(), where, source, recorder, rows
        return p.expand(*lead, *p.shape)

    @unwatched
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows: Rows = ctx.rows
        ctx.recorder.stray(ctx.where, rows.stray(grad))
        return ctx.recorder.dense(ctx.source, rows.fold(grad, ctx.features)), None, None, None, None, None


def _broadcast(tensors: Sequence[Tensor]) -> Any:
    return torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]


def _copies(call: Call, x: Tensor, p: Tensor, source: Source, rows: Rows, where: str) -> Tensor | None:
    """A copy of p per row that broadcasts against x as p does; None where p is laid out by rows itself."""
    shape = tuple(p.shape)
    while shape and shape[0] == 1 and len(shape) > x.dim() - _own_axes(rows, x):
        shape = shape[1:]  # (1, T, d) broadcasts as (T, d)
    if len(shape) > x.dim() - _own_axes(rows, x):
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
    """A tensor made of parameters that is itself laid out by rows: rollout i's row is what arrives at its positions."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, source: Source, recorder: Recorder, rows: Rows, where: str) -> Tensor:
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
            owner = owner.to(grad.device).reshape(*owner.shape, *[1] * (grad.dim() - owner.dim()))
            recorder.dense(source, torch.stack([grad.masked_fill(owner != i, 0) for i in range(rows.count)]))
        return grad, None, None, None, None


def _along(call: Call, x: Tensor, p: Tensor, source: Source, rows: Rows, where: str) -> Tensor | None:
    axes = _own_axes(rows, x)
    if p.dim() != x.dim() or p.shape[:axes] != x.shape[:axes] or (not rows.picked and usual_owner(rows, x) is None):
        return None
    rows.owned(tuple(x.shape[:-1]), where)
    ids = None
    if source.ids is not None:
        ids = rows.arrange(source.ids.view(*p.shape[:-1], 1), where).squeeze(-1)
    call.recorder.forward("lookup" if ids is not None else "dense", source, x.requires_grad, ids=ids)
    return _Along.apply(p, source, call.recorder, rows, where)  # type: ignore[no-any-return, no-untyped-call]


def _own_axes(rows: Rows, x: Tensor) -> int:
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
    if {type(t) for t in tensors} - PLAIN or _broadcast(tensors) != x.shape:
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
    """LayerNorm(x)·W + b where W and b hold equal copies for each row, so the native kernel may use any one of them."""

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
            if mean.dtype != wide:  # a CPU keeps the statistics in half precision, which would show in the row
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
    x, shape, weight, bias, eps = _named(call, "input", "normalized_shape", "weight", "bias", "eps")
    if call.source(x) is not None or {type(t) for t in (x, weight, bias) if t is not None} - PLAIN:
        return None
    shape = tuple(shape)
    rows, where = call.rows_of(x), call.where
    if len(shape) > x.dim() - _own_axes(rows, x):
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


# -- operations that run as they are, with their rows taken beside -----------------------------------------------------


class _Attach(torch.autograd.Function):
    """The results of a call as they are; their gradients are shown to `report` on the way back."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, report: Callable[[tuple[Tensor | None, ...]], None],
                *results: Tensor) -> Any:
        ctx.recorder, ctx.report = recorder, report
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.aten._unsafe_view(y, y.shape) for y in results)

    @unwatched
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.report(grads)
        return None, None, *grads


def note_nodes(nodes: set[Any], results: Sequence[Tensor], given: Sequence[Any]) -> None:
    """The graph nodes between a call's results and its arguments: a call may be many operations inside."""
    ends = {x.grad_fn for x in given if isinstance(x, Tensor) and x.grad_fn is not None}
    todo = [y.grad_fn for y in results if y.grad_fn is not None and y.grad_fn not in ends]
    while todo:
        node = todo.pop()
        if node in nodes:
            continue
        nodes.add(node)
        todo += [after for after, _ in node.next_functions
                 if after is not None and after not in ends and not hasattr(after, "variable")]


def _attach(call: Call, out: Any, report: Callable[[tuple[Tensor | None, ...]], None]) -> Any:
    flat, spec = pytree.tree_flatten(out)
    at = [k for k, y in enumerate(flat) if isinstance(y, Tensor) and y.requires_grad]
    note_nodes(call.nodes, [flat[k] for k in at], pytree.tree_leaves((call.args, call.kwargs)))
    found = _Attach.apply(call.recorder, report, *(flat[k] for k in at))  # type: ignore[no-untyped-call]
    for k, y in zip(at, found, strict=True):
        flat[k] = y
    return pytree.tree_unflatten(flat, spec)


def scaled(call: Call) -> Any:
    """torch.rms_norm(x, (d,), w, eps) = x / √(mean x² + eps) · w: rows Σ_t δ_it x_it / √(…)."""
    x, shape, weight, eps = _named(call, "input", "normalized_shape", "weight", "eps")
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

    return _attach(call, call.func(*call.args, **call.kwargs), report)


@dataclass(frozen=True)
class _Cut:
    """Which leaves of a call's arguments are cut, along the axis of rows, to run it for one rollout."""

    at: frozenset[int]
    axis: int
    rows: Rows

    def part(self, x: Tensor, i: int) -> Tensor | None:
        if self.axis == 0:
            return self.rows.piece(x, i)
        part = self.rows.piece(x.transpose(0, 1), i) if x.dim() > 1 else None
        return None if part is None else part.transpose(0, 1)

    @staticmethod
    def axes(rows: Rows) -> list[tuple[int, Rows]]:
        """The axes along which rows may lie, first of all the first."""
        if rows.picked and rows.owner is not None:
            same = rows.owner.dim() == 2 and bool((rows.owner == rows.owner[:1]).all())
            return [(0, rows), *([(1, rows.gathered(rows.owner[0].cpu(), rows.owner.device))] if same else [])]
        return [(0, rows)] if rows.by_position else [(0, rows), (1, rows)]


def again(call: Call) -> Any:
    """Any operation: as it is, and in the backward pass once more for each rollout's part of its arguments.

    How the arguments are to be cut is tried out on the call's own values: the operation on one rollout's part must give
    that rollout's part of the result.
    """
    func, recorder = call.func, call.recorder
    flat, spec = pytree.tree_flatten((call.args, call.kwargs))
    tensors = {k: leaf for k, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
    sources = {k: s for k, leaf in tensors.items() if (s := call.source(leaf)) is not None and leaf.requires_grad}
    x = next((leaf for k, leaf in tensors.items() if k not in sources and call.has_rows(leaf)), None)
    if x is None:
        raise CreditscopeError(f"{call.where} meets no activation whose rows are known")
    if {type(leaf) for leaf in tensors.values()} - PLAIN:
        kinds = sorted({type(leaf).__name__ for leaf in tensors.values() if type(leaf) not in PLAIN})
        raise CreditscopeError(f"{call.where} computes with {', '.join(kinds)}, tensors with a meaning of their own")
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

    attached = _attach(call, out, report)
    if cut.axis == 1 and not rows.picked:  # its results are laid out likewise, and say so
        recorder.turned.extend(y for y in pytree.tree_leaves(attached) if isinstance(y, Tensor) and y.dim() > 1
                               and y.shape[1] in (rows.batch, rows.batch * (rows.width or 1)))
    return attached


def _find_cut(call: Call, rows: Rows, bare: list[Any], sources: dict[int, Source], x: Tensor,
              results: Sequence[Tensor], run: Callable[[Sequence[Any]], list[Tensor]]) -> _Cut | None:
    """The first way to cut the arguments that gives two rollouts their parts of the results."""
    half = any(isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) for leaf in bare)
    if half:  # rounding would let a wrong way pass
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
    """(*lead, d) → (*lead, 2): each vector's product with fixed signs, and its norm. Enough to know a result again."""
    wide = out.to(torch.promote_types(out.dtype, torch.float32)) if out.is_floating_point() else out.float()
    wide = torch.where(wide.abs() < 1e30, wide, wide.sign())  # masks are −∞, or nearly
    wide = wide if wide.dim() > 1 else wide[..., None]
    signs = torch.arange(wide.shape[-1], device=wide.device).mul(0.7548776662466927).frac().ge(0.5)
    return torch.stack([torch.where(signs, wide, -wide).sum(-1), torch.linalg.vector_norm(wide, dim=-1)], dim=-1)


def _gap(then: Tensor, now: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest difference of two marks in units of what rounding explains: 4096 roundings, at most an eighth.

    Roundings are float32's at least: some operations compute in it whatever their arguments' dtype.
    """
    if then.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=then.device)
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    scale = min(4096 * rounding, 0.125) * then[..., 1].max().clamp(min=1e-30)
    return ((then - now.reshape(then.shape)).abs().max() / scale).double()


# -- which rule for which function -------------------------------------------------------------------------------------


def _all(names: str) -> list[Func]:
    owners = (torch, torch.Tensor)
    return [getattr(owner, name + end) for name in names.split() for owner in owners for end in ("", "_")
            if hasattr(owner, name + end)]


def _reflected(names: str) -> list[Func]:
    return [getattr(torch.Tensor, f"__{way}{name}__") for name in names.split() for way in ("", "r", "i")
            if hasattr(torch.Tensor, f"__{way}{name}__")]


ELEMENTWISE = ("add sub subtract mul multiply div divide true_divide rsub pow float_power maximum minimum fmax fmin "
               "where lerp addcmul addcdiv atan2 logaddexp logaddexp2 xlogy hypot copysign ldexp clamp clip remainder "
               "fmod")
RULES: dict[Any, Callable[[Call], Any]] = {
    **dict.fromkeys([F.linear, *_all("matmul mm addmm"), *_reflected("matmul")], product),
    **dict.fromkeys(_all("bmm"), stack),
    **{getattr(owner, name): stack for owner, name in ((torch, "_grouped_mm"), (F, "grouped_mm"))
       if hasattr(owner, name)},
    **dict.fromkeys([torch.embedding, torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select], lookup),
    **dict.fromkeys([*_all(ELEMENTWISE), *_reflected("add sub mul div truediv pow")], spread),
    torch.layer_norm: layer_norm, torch.rms_norm: scaled,
}
PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
"""Kinds of tensors whose operations are torch's own."""
ONE_CALL = {F.multi_head_attention_forward, F.scaled_dot_product_attention}
"""Functions written in Python that are measured as one operation: inside, rows are not the first axis."""


def _named(call: Call, *names: str) -> list[Any]:
    """The call's arguments under these names, by place or by name; None where they are not given."""
    given = [*call.args, *[None] * len(names)][: len(names)]
    return [call.kwargs.get(name, value) for name, value in zip(names, given, strict=True)]


def _plain(out: Tensor) -> Tensor:
    """Torch returns some products as views of flat ones; views from a custom Function may not be changed in place."""
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out


_BLIND = {"has_torch_function": lambda *_: False, "has_torch_function_unary": lambda *_: False,
          "has_torch_function_variadic": lambda *_: False}
_OPENED: dict[Func, Func] = {}


def opened(func: Func) -> Func:
    """A function of torch that is written in Python, without its question whether somebody wants to see it.

    So its body runs under the watch, and what it calls is seen.
    """
    if func not in _OPENED:
        assert isinstance(func, types.FunctionType)
        copy = types.FunctionType(func.__code__, func.__globals__ | _BLIND, func.__name__, func.__defaults__,
                                  func.__closure__)
        copy.__kwdefaults__ = func.__kwdefaults__
        _OPENED[func] = copy
    return _OPENED[func]
