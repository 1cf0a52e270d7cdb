"""One rule per operation on a parameter: how its rows are read in the backward pass.

`watch` intercepts each torch call; where a call combines a parameter (or a tensor made of parameters) with activations,
a rule of this file takes the call:

| rule | operations | rows | gradient that goes on |
|---|---|---|---|
| product | linear, matmul, mm, addmm | dW_i = Σ_t δ_it a_itᵀ | Σ_i dW_i |
| stack | bmm, grouped_mm: one matrix per expert | the same, matrix by matrix | the same |
| head | chosen_logp: log π through the output head | the same, a block of the vocabulary at a time | the same |
| lookup | embedding, indexing by ids | row v: Σ_{t: id_it = v} δ_it | autograd's formula |
| spread | entry by entry, with broadcasting; layer_norm | a copy of the parameter per row | the copies' sum |
| scaled | rms_norm | Σ_t δ_it x_it / rms(x_it) | autograd's own |
| again | any other operation | the operation is run again on each rollout's part of its arguments | autograd's own |

A rule runs the function that the model called, so results do not change. A rule that does not fit returns None, and the
next one is tried; where none fits the call runs unchanged, and the parameter is refused at the end of the pass, with
the reason, unless `allow` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.broadcast import layer_norm, scaled, spread
from creditscope.microscope.calls import PLAIN, Call, Func, arguments, name_of, unviewed, unwatched
from creditscope.microscope.head import chosen_logp, head
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sources import Key, ParameterSource, torch_functions


@dataclass(eq=False, slots=True)
class _Product:
    """x ↦ x Wᵀ + b, or x W + b where `transposed`."""

    where: str
    recorder: Recorder
    rows: RowOwners
    weight: ParameterSource | None
    bias: ParameterSource | None
    transposed: bool
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.recorder = product, product.recorder
        return unviewed(product.run(x, weight, bias))

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
        x, weight, bias = call.args if len(call.args) == 3 else arguments(call, "input", "weight", "bias")
        transposed = False
    elif call.func is torch.addmm or call.func is torch.Tensor.addmm:
        bias, x, weight = arguments(call, "input", "mat1", "mat2")
        if set(call.kwargs) & {"beta", "alpha", "out"}:
            return None
        transposed = True
    else:
        (x, weight), bias, transposed = arguments(call, "input", "other")[:2], None, True
        if call.kwargs.keys() - {"input", "other", "mat2", "tensor2"}:
            return None
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2 or call.source(x) is not None:
        return None
    sources = call.source(weight), None if bias is None else call.source(bias)
    free = [t for t, s in ((weight, sources[0]), (bias, sources[1])) if isinstance(t, Tensor) and s is None]
    if sources == (None, None) or any(t.requires_grad for t in free) or (bias is not None and bias.dim() != 1):
        return None
    if {type(t) for t in (x, weight, bias) if t is not None} - PLAIN:
        return None  # a tensor subclass: quantised, masked, ragged
    rows = call.rows_of(x)
    where = call.where
    rows.owned(tuple(x.shape[:-1]), where)  # refused here rather than in the middle of a backward
    run = F.linear if call.func is F.linear else _matmul
    return _multiply(x, weight, bias, _Product(where, call.recorder, rows, *sources, transposed, run), call.nodes)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, sources: tuple[ParameterSource, ParameterSource | None],
           recorder: Recorder, rows: RowOwners, nodes: set[Any]) -> Tensor:
    """`product` of F.linear where W and b are parameters themselves and x surely has the layout (B, ...)."""
    names = " and ".join(repr(source.names[0]) for source in sources if source is not None)
    made = _Product(f"linear with {names}", recorder, rows, *sources, False, F.linear)
    return _multiply(x, weight, bias, made, nodes)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, made: _Product, nodes: set[Any]) -> Tensor:
    for source, kind in ((made.weight, "matrix"), (made.bias, "dense")):
        if source is not None:
            made.recorder.forward(kind, source, x.requires_grad)
    factors = autocast(x, weight, bias)
    nodes.update([t.grad_fn for t in factors[1:] if t is not None and t is not weight and t is not bias])
    return _Multiply.apply(*factors, made)  # type: ignore[no-any-return, no-untyped-call]


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)


def autocast(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """The casts of products under autocast, which torch does not do for a custom Function."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *parameters
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
                 for t in (x, *parameters))


class _Stack(torch.autograd.Function):
    """y[e] = x[e] W[e], for the vectors x[e] that go to expert e."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, source: ParameterSource,
                spans: list[tuple[int, RowOwners, Any]], run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call, ctx.source, ctx.spans, ctx.recorder = call, source, spans, call.recorder
        return unviewed(run(x, weight))

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


def _matrix_of(source: ParameterSource, e: int) -> ParameterSource:
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
        spans: list[tuple[int, RowOwners, Any]] = [
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


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, source: ParameterSource, recorder: Recorder,
                rows: RowOwners, where: str) -> Tensor:
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


def _all(names: str) -> list[Func]:
    return torch_functions(names, ends=("", "_"))


def _reflected(names: str) -> list[Func]:
    return torch_functions(" ".join(f"__{way}{name}__" for name in names.split() for way in ("", "r", "i")), Tensor)


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
    torch.layer_norm: layer_norm, torch.rms_norm: scaled, chosen_logp: head,
}
ONE_CALL: set[Any] = {F.multi_head_attention_forward, F.scaled_dot_product_attention}
"""Functions written in Python that are measured as one operation: inside, rows are not the first axis."""
