"""One rule per kind of layer: how its call is replaced so that per-rollout gradients can be read in the backward pass.

Each rule builds a new `forward` for one module. A custom autograd.Function per call, not a module hook: hooks fire
twice under checkpointing. The layer computes what it always computed; only the gradient of its parameters takes our
route.

| rule | for | rows |
|---|---|---|
| linear | nn.Linear, Conv1D (GPT-2, transposed) | dW_i = Σ_t δ_it a_itᵀ |
| functional | modules that call F.linear with their weight (routers) | the same |
| embedding | nn.Embedding and its subclasses | row v: Σ_{t: id_it = v} δ_it |
| spread | norms and scales: parameters act by broadcasting | a copy for each row; autograd sums over its positions |
| whole | anything else, with all that is inside it | the module is run again for each rollout |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import has_triton
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.rows import Rows
from creditscope.microscope.site import Forward, Rule, Site, replaced
from creditscope.microscope.whole import whole

# -- linear ------------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, site: Site, recorder: Recorder,
                transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.site, ctx.recorder, ctx.transposed = site, recorder, transposed
        out = F.linear(x, weight.t() if transposed else weight, bias)
        # With a bias, torch returns a view of a flat product; views from a custom Function may not be changed in place.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.recorder.once(ctx)
        x, weight = ctx.saved_tensors
        site, recorder, transposed = ctx.site, ctx.recorder, ctx.transposed
        rows = recorder.rows(x)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = grad @ (weight.t() if transposed else weight)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            delta = rows.arrange(grad, site.where, blank=True)
            recorder.stray(site.where, rows.stray(grad))
        if ctx.needs_input_grad[1]:
            a = rows.arrange(x, site.where)
            dw = recorder.matrix(site.names["weight"], *((a, delta) if transposed else (delta, a)))
        if ctx.needs_input_grad[2]:
            db = recorder.dense(site.names["bias"], delta.sum(dim=1))
        return dx, dw, db, None, None, None


def linear(site: Site, recorder: Recorder, transposed: bool = False) -> Forward:
    module: Any = site.module

    def forward(input: Tensor) -> Tensor:  # the name that torch gives it
        x, rows = input, recorder.rows(input)
        recorder.forward("matrix", site.names.get("weight"))
        if "bias" in site.names:
            recorder.forward("dense", site.names["bias"])
        if not torch.is_grad_enabled():
            return site.original(x)  # type: ignore[no-any-return]
        rows.owned(tuple(x.shape[:-1]), site.where)  # refused here rather than in the middle of a backward
        x, weight, bias = autocast(x, module.weight, module.bias)
        return _Linear.apply(x, weight, bias, site, recorder, transposed)  # type: ignore[no-any-return, no-untyped-call]

    return forward


def functional(site: Site, recorder: Recorder) -> Forward:
    """A module that multiplies by its weight through F.linear somewhere inside its forward: the routers of experts."""
    held = site.module._parameters

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is not held["weight"]:
            return F.linear(x, weight, bias)
        if bias is not None and bias is not held.get("bias"):
            return ours(x, weight) + bias
        recorder.rows(x)
        recorder.forward("matrix", site.names["weight"])
        recorder.forward("dense", None if bias is None else site.names.get("bias"))
        if not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        recorder.rows(x).owned(tuple(x.shape[:-1]), site.where)
        x, weight, bias = autocast(x, weight, bias)
        return _Linear.apply(x, weight, bias, site, recorder, False)  # type: ignore[no-any-return, no-untyped-call]

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Instead({F.linear: ours}):
            return site.original(*args, **kwargs)

    return forward


def autocast(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """What F.linear does under autocast, made visible: a custom Function is not cast for us."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *parameters
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
                 for t in (x, *parameters))


# -- embedding ---------------------------------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, site: Site, recorder: Recorder) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.height, ctx.padding, ctx.site, ctx.recorder = len(weight), padding, site, recorder
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.recorder.once(ctx)
        (ids,) = ctx.saved_tensors
        site, recorder = ctx.site, ctx.recorder
        rows = recorder.rows(ids, features=0)
        if ctx.padding >= 0:  # a padding row gets no gradient, in torch as here
            grad = grad.masked_fill((ids == ctx.padding)[..., None], 0)
        dw = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.height, ctx.padding, False)
        delta = rows.arrange(grad, site.where, blank=True)
        recorder.stray(site.where, rows.stray(grad))
        recorder.lookup(site.names["weight"], rows.arrange(ids[..., None], site.where).squeeze(-1), delta)
        return None, dw, None, None, None


def embedding(site: Site, recorder: Recorder) -> Forward:
    module: Any = site.module
    for setting, fine in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if getattr(module, setting) != fine:
            raise CreditscopeError(f"{site.where} is an embedding with {setting}={getattr(module, setting)}, which the "
                                   f"microscope does not read; set {setting}={fine}")

    def look_up(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        ids = recorder.rows(ids, features=0).expand(ids)
        arranged = recorder.rows(ids, features=0).arrange(ids[..., None], site.where).squeeze(-1)
        recorder.forward("lookup", site.names["weight"], ids=arranged)
        if not torch.is_grad_enabled():
            return F.embedding(ids, module.weight)
        padding = -1 if module.padding_idx is None else module.padding_idx
        return _Embedding.apply(ids, module.weight, padding, site, recorder)  # type: ignore[no-any-return, no-untyped-call]

    if type(module).forward is nn.Embedding.forward:
        return look_up

    def forward(*args: Any, **kwargs: Any) -> Any:  # a subclass that calls nn.Embedding.forward somewhere inside
        def ours(ids: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
            return look_up(ids) if weight is module.weight else F.embedding(ids, weight, *rest, **named)

        def index(table: Tensor, at: Any) -> Tensor:
            if table is module.weight and isinstance(at, slice):
                at = torch.arange(len(table), device=table.device)[at]
            if table is module.weight and isinstance(at, Tensor) and at.dtype == torch.int64:
                return look_up(at)
            return table[at]

        with _Instead({F.embedding: ours, Tensor.__getitem__: index}):
            return site.original(*args, **kwargs)

    return forward


class _Instead(TorchFunctionMode):
    """Within this context, calls of some torch functions go elsewhere."""

    def __init__(self, table: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))


# -- spread: parameters that act by broadcasting -----------------------------------------------------------------------


class _Spread(torch.autograd.Function):
    """p → one copy for each row. The copies are views; what comes back is one gradient a row."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, lead: tuple[int, ...], site: Site, name: str, recorder: Recorder,
                rows: Rows) -> Tensor:
        ctx.features, ctx.site, ctx.name, ctx.recorder, ctx.rows = p.dim(), site, name, recorder, rows
        return p.expand(*lead, *p.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.recorder.once(ctx)
        rows: Rows = ctx.rows
        ctx.recorder.stray(ctx.site.where, rows.stray(grad))
        return ctx.recorder.dense(ctx.name, rows.fold(grad, ctx.features)), None, None, None, None, None


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


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
                eps: float = 1e-5) -> Tensor:
    if weight is None and bias is None:
        return F.layer_norm(x, list(shape), None, None, eps)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x, weight, bias = (None if t is None else t.float() for t in (x, weight, bias))  # type: ignore[assignment]
    return _RowLayerNorm.apply(x, tuple(shape), weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    plain = F.rms_norm(x, list(shape), None, eps)
    return plain if weight is None else plain * weight


BROADCAST: dict[Any, Callable[..., Any]] = {F.layer_norm: _layer_norm, F.rms_norm: _rms_norm}


def spread(site: Site, recorder: Recorder, bare: bool = False) -> Forward:
    """`bare` where the module broadcasts by itself; else torch's own norms inside it are given rules that do."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder.forward("dense", *site.names.values())
        if not torch.is_grad_enabled():
            return site.original(x, *args, **kwargs)
        with replaced(site.module, _copies(site, recorder, x)), nullcontext() if bare else _Instead(BROADCAST):
            return site.original(x, *args, **kwargs)

    return forward


def layer_norm(site: Site, recorder: Recorder, offset: float) -> Forward:
    """nn.LayerNorm, and subclasses that scale by weight + offset (Nemotron's 1P): `spread` without detours."""
    module: Any = site.module
    detour = spread(site, recorder)

    def forward(input: Tensor) -> Any:  # the name that torch gives it
        x = input
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):  # each class casts in its own way
            return detour(x)
        recorder.forward("dense", *site.names.values())
        copies = _copies(site, recorder, x)
        weight = copies["weight"] + offset if offset else copies["weight"]
        return _layer_norm(x, module.normalized_shape, weight, copies.get("bias"), module.eps)

    return forward


def _copies(site: Site, recorder: Recorder, x: Tensor) -> dict[str, Tensor]:
    """One copy of each parameter for each row; frozen ones beside them must broadcast alike."""
    copies: dict[str, Tensor] = {}
    held = site.module._parameters
    for attribute, name in site.names.items():
        p = held[attribute]
        assert p is not None
        rows = recorder.rows(x, features=max(1, p.dim()))
        lead = rows.spread_shape(tuple(x.shape[:-1]), p.dim(), site.where)
        copies[attribute] = _Spread.apply(p, lead, site, name, recorder, rows)  # type: ignore[no-untyped-call]
    for attribute, frozen in held.items() if len(copies) < len(held) else ():
        if frozen is not None and attribute not in copies:
            copies[attribute] = frozen.expand(*next(iter(copies.values())).shape[: -frozen.dim()], *frozen.shape)
    return copies


def spreads(module: nn.Module, original: Forward, attributes: Sequence[str], rule: Rule) -> bool:
    """Whether the rule gives the module's value and its rows' gradients: tried on a small input."""
    parameters = [module._parameters[name] for name in attributes]
    if any(p is None or p.dim() != 1 for p in parameters) or next(module.children(), None) is not None:
        return False
    if any(p is not None and torch.finfo(p.dtype).bits < 32 for p in parameters):
        if "forward" in module.__dict__:
            return False
        module = copy.deepcopy(module).float()  # half precision would let a wrong rule pass
        original, parameters = module.forward, [module._parameters[name] for name in attributes]
    first = parameters[0]
    assert first is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, first.shape[-1], generator=generator).to(first.device, first.dtype)
    recorder = Recorder((None, None), exact=False, sketcher=None)
    recorder.heights = {}
    rows: dict[str, Tensor] = {}
    recorder.dense = lambda name, g: rows.setdefault(name, g).sum(dim=0)  # type: ignore[method-assign]
    try:
        with torch.enable_grad():
            ours = rule(Site("probe", module, original, {a: a for a in attributes}), recorder)(x)
            plain = original(x)
            if not (isinstance(plain, Tensor) and plain.shape == x.shape and _close(ours, plain)):
                return False
            weight = torch.randn(plain.shape, generator=generator).to(plain)
            torch.autograd.grad(ours, parameters, weight)  # type: ignore[arg-type]
            for i in range(2):
                alone = torch.autograd.grad(original(x[i:i + 1]), parameters, weight[i:i + 1])  # type: ignore[arg-type]
                if not all(_close(rows[a][i], g) for a, g in zip(attributes, alone, strict=True)):
                    return False
    except Exception:  # whatever a module says to an input it was not made for: it is measured as a whole
        return False
    return True


def _close(ours: Tensor, other: Tensor) -> bool:
    rounding = torch.finfo(other.dtype).eps
    return ours.shape == other.shape and bool(
        (ours - other).abs().max() <= 64 * rounding * other.abs().max().clamp(min=1e-30))


# -- which rule for which module ---------------------------------------------------------------------------------------


_FOUND: WeakKeyDictionary[nn.Module, tuple[Any, Rule]] = WeakKeyDictionary()
"""Rules found before, so that a Microscope made anew for each step does not try them again. They hold no module."""


def rule_for(module: nn.Module, original: Forward, attributes: Sequence[str]) -> Rule:
    """The rule for a module that owns these trainable parameters itself; `whole` where no other fits."""
    held = tuple((name, None if p is None else (p.dtype, p.device, p.shape)) for name, p in module._parameters.items())
    likeness = (type(module).forward, tuple(attributes), held)
    if "forward" in module.__dict__:  # a wrapper's, which may hold the module and keep it alive
        return _find_rule(module, original, attributes)
    known = _FOUND.get(module)
    if known is None or known[0] != likeness:
        known = _FOUND[module] = (likeness, _find_rule(module, original, attributes))
    return known[1]


def _find_rule(module: nn.Module, original: Forward, attributes: Sequence[str]) -> Rule:
    if "forward" not in module.__dict__ and "weight" in module._parameters and {*attributes} <= {"weight", "bias"}:
        forward = type(module).forward
        if forward is nn.Linear.forward:
            return linear
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' own; an import costs a second
            return lambda site, recorder: linear(site, recorder, transposed=True)
        if isinstance(module, nn.Embedding) and list(attributes) == ["weight"]:
            return embedding
    # Its own forward is kept wherever it calls F.linear: a probe cannot see all that a subclass does besides.
    if calls_linear(module, original, attributes):
        return functional
    if isinstance(module, nn.Linear) and multiplies(module, original):
        return linear
    broadcast: list[Rule] = [partial(spread, bare=True), spread]
    if isinstance(module, nn.LayerNorm) and "weight" in attributes:
        broadcast = [partial(layer_norm, offset=0.0), partial(layer_norm, offset=1.0), *broadcast]
    return next((rule for rule in broadcast if spreads(module, original, attributes, rule)), whole)


def calls_linear(module: nn.Module, original: Forward, attributes: Sequence[str]) -> bool:
    """Whether all uses of the module's parameters go through F.linear: tried with those uses cut from the graph."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or "weight" not in attributes or not {*attributes} <= {"weight", "bias"} \
            or next(module.children(), None) is not None:
        return False
    cut = 0

    def without_graph(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        nonlocal cut
        if w is not weight:
            return F.linear(x, w, b)
        cut += 1
        own = b is not None and b is module._parameters.get("bias")
        return F.linear(x, w.detach(), b.detach() if b is not None and own else b)

    x = torch.randn(2, 3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        with torch.enable_grad(), _Instead({F.linear: without_graph}):
            results = [r for r in pytree.tree_leaves(original(x)) if isinstance(r, Tensor)]
    except Exception:
        return False
    return cut > 0 and not any(r.requires_grad for r in results)


def multiplies(module: nn.Linear, original: Forward) -> bool:
    """Whether a subclass of nn.Linear, with a forward of its own, still is x ↦ x Wᵀ + b: tried on a small input."""
    parameters = [p for p in (module.weight, module.bias) if p is not None and p.requires_grad]
    if len(parameters) < sum(p.requires_grad for p in module.parameters()):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, module.in_features, generator=generator).to(module.weight)
    try:
        with torch.enable_grad():
            plain, theirs = F.linear(x, module.weight, module.bias), original(x)
            if not isinstance(theirs, Tensor) or not _close(plain, theirs):
                return False
            weight = torch.randn(plain.shape, generator=generator).to(plain)
            pairs = zip(torch.autograd.grad(plain, parameters, weight), torch.autograd.grad(theirs, parameters, weight),
                        strict=True)
            return all(_close(ours, other) for ours, other in pairs)
    except Exception:
        return False
