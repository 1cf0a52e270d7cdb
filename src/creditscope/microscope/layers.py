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
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """One module under the microscope: its path, its original forward, and its trainable parameters' names."""

    where: str
    module: nn.Module
    original: Forward
    names: dict[str, str]
    """Attribute → the parameter's name in the model, for parameters that need a gradient."""


Rule = Callable[[Site, Recorder], Forward]

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
        with _replaced(site.module, _copies(site, recorder, x)), nullcontext() if bare else _Instead(BROADCAST):
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


_SWAP = threading.RLock()


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


# -- whole: anything else, once per rollout ----------------------------------------------------------------------------


_TENSOR = object()
"""Stands where a call's results hold a tensor."""


@dataclass
class _Call:
    """One call of a module that is run again for each rollout."""

    site: Site
    recorder: Recorder
    paths: list[str]
    """Paths of the trainable parameters inside the module, one for each parameter."""
    aliases: dict[str, str]
    """Further paths of parameters that are shared inside the module → their path in `paths`."""
    leaves: list[Any]
    """The call's arguments, flattened; tensors are put in from outside."""
    spec: Any
    autocast: tuple[str, bool, torch.dtype]
    results: list[Any] | None = None
    results_spec: Any = None

    def run(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Any]:
        """The module's results, flattened, from these tensors."""
        supply = iter(inputs)
        filled = [next(supply) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        kind, enabled, dtype = self.autocast
        tensors = dict(zip(self.paths, parameters, strict=True))
        tensors |= {alias: tensors[path] for alias, path in self.aliases.items()}
        with _replaced(self.site.module, tensors), \
                torch.autocast(kind, dtype=dtype, enabled=enabled):
            results, self.results_spec = pytree.tree_flatten(self.site.original(*args, **kwargs))
        return results


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, inputs: int, *tensors: Tensor) -> Any:
        results = call.run(tensors[:inputs], tensors[inputs:])
        call.results = [_TENSOR if isinstance(r, Tensor) else r for r in results]
        outputs = tuple(r.clone() if any(r is t for t in tensors) else r for r in results if isinstance(r, Tensor))
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.inputs, ctx.marks = call, inputs, [_mark(o) for o in outputs]
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _Call = ctx.call
        recorder, where = call.recorder, call.site.where
        recorder.once(ctx)
        saved = ctx.saved_tensors  # once: a checkpoint computes them for the asking
        inputs, parameters = saved[: ctx.inputs], saved[ctx.inputs:]
        need = ctx.needs_input_grad[2:]
        rows = recorder.rows(inputs[0])
        back = [torch.zeros_like(t) if n else None for t, n in zip(inputs, need, strict=False)]
        each = [p.new_zeros(rows.count, *p.shape) for p in parameters]
        for i in range(rows.count):
            cut = [rows.piece(t, i) for t in inputs]
            if all(c is None for c in cut):
                raise CreditscopeError(f"{where} got no tensor laid out by the batch's {rows.batch} rows, so its "
                                       f"rollouts cannot be told; name the module around it in slow=[...]")
            leaves = [(t if c is None else c).detach().requires_grad_(n)
                      for t, c, n in zip(inputs, cut, need, strict=False)]
            weights = [p.detach().requires_grad_() for p in parameters]
            try:
                with torch.enable_grad():
                    again = [r for r in call.run(leaves, weights) if isinstance(r, Tensor)]
            except RuntimeError as error:
                raise CreditscopeError(f"{where} is measured as a whole, but could not be run for one rollout alone: "
                                       f"{error}. Name the module around it in slow=[...]") from error
            wanted, cotangents = [], []
            for mark, now, grad in zip(ctx.marks, again, grads, strict=True):
                then, alone = rows.piece(mark, i), _mark(now.detach())
                if then is None or then.shape != alone.shape:
                    raise CreditscopeError(f"{where} returns a tensor with leading axes {tuple(mark.shape[:-1])}, not "
                                           f"laid out by rows; name the module around it in slow=[...]")
                if now.is_floating_point():
                    recorder.mixing.append((where, _gap(then, alone, now.dtype)))
                part = None if grad is None else rows.piece(grad, i)
                if part is not None and now.requires_grad:
                    wanted.append(now)
                    cotangents.append(part)
            sought = [t for t in (*leaves, *weights) if t.requires_grad]
            if i == 0:
                _refuse_outsiders(where, wanted, sought)
            found = iter(torch.autograd.grad(wanted, sought, cotangents, allow_unused=True) if wanted
                         else [None] * len(sought))
            for total, leaf, c in zip(back, leaves, cut, strict=True):
                g = next(found) if leaf.requires_grad else None
                if g is not None and total is not None:
                    total.add_(g) if c is None else rows.place(total, g, i)
            for row in each:
                g = next(found)
                if g is not None:
                    row[i] = g
        sums = [recorder.dense(call.site.names[path], rows_of) for path, rows_of in zip(call.paths, each, strict=True)]
        return None, None, *back, *sums


def _refuse_outsiders(where: str, results: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """A parameter that the module uses but does not hold would lose its gradient: the module runs without a graph."""
    ids, seen = {id(t) for t in known}, set()
    nodes = [r.grad_fn for r in results]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ids:
            raise CreditscopeError(f"{where} is measured as a whole, but uses a parameter of shape "
                                   f"{tuple(variable.shape)} that lies outside it; name the module that holds both in "
                                   f"slow=[...]")
        nodes.extend(next_node for next_node, _ in node.next_functions)


def _mark(out: Tensor) -> Tensor:
    """(*lead, d) → (*lead, 2): each vector's product with fixed signs, and its norm. Enough to know a result again."""
    wide = out.to(torch.promote_types(out.dtype, torch.float32)) if out.is_floating_point() else out.float()
    wide = wide if wide.dim() > 1 else wide[..., None]
    signs = torch.arange(wide.shape[-1], device=wide.device).mul(0.7548776662466927).frac().ge(0.5)
    return torch.stack([torch.where(signs, wide, -wide).sum(-1), torch.linalg.vector_norm(wide, dim=-1)], dim=-1)


def _gap(then: Tensor, now: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest difference of two marks in units of what rounding explains: 4096 roundings, at most an eighth.

    Roundings are float32's at least: routers and norms compute in it whatever the model's dtype.
    """
    if then.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=then.device)
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    scale = min(4096 * rounding, 0.125) * then[..., 1].max().clamp(min=1e-30)
    return ((then - now).abs().max() / scale).double()


def whole(site: Site, recorder: Recorder) -> Forward:
    """Here `site.names` has paths inside the module: everything below it is measured with it."""
    paths = list(site.names)
    path_of = {id(site.module.get_parameter(path)): path for path in paths}
    aliases = {path: path_of[id(p)] for path, p in site.module.named_parameters(remove_duplicate=False)
               if id(p) in path_of and path not in site.names}

    def forward(*args: Any, **kwargs: Any) -> Any:
        recorder.forward("dense", *site.names.values())
        if not torch.is_grad_enabled():
            return site.original(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        parameters = [site.module.get_parameter(path) for path in paths]
        kind = parameters[0].device.type
        call = _Call(site, recorder, paths, aliases, leaves, spec,
                     (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        if not inputs:
            raise CreditscopeError(f"{site.where} was called without a tensor, so its rollouts cannot be told; name "
                                   f"the module around it in slow=[...]")
        if any(hasattr(leaf, "get_seq_length") and hasattr(leaf, "update") for leaf in leaves):
            raise CreditscopeError(f"{site.where} is measured as a whole and was given a key-value cache, which a "
                                   f"second run would change; call the model with use_cache=False")
        recorder.rows(next((t for t in inputs if t.is_floating_point()), inputs[0]))
        outputs = iter(_Whole.apply(call, len(inputs), *inputs, *parameters))  # type: ignore[no-untyped-call]
        assert call.results is not None
        call.leaves = [torch.empty(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # drop the activations
        filled = [next(outputs) if r is _TENSOR else r for r in call.results]
        return pytree.tree_unflatten(filled, call.results_spec)

    return forward


@contextmanager
def _replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """The module with these tensors in place of the parameters at these paths."""
    with _SWAP:
        kept: list[tuple[nn.Module, str, nn.Parameter | None]] = []
        try:
            for path, tensor in tensors.items():
                parent, _, attribute = path.rpartition(".")
                owner = module.get_submodule(parent)
                kept.append((owner, attribute, owner._parameters[attribute]))
                owner._parameters[attribute] = tensor  # type: ignore[assignment]
            yield
        finally:
            for owner, attribute, parameter in kept:
                owner._parameters[attribute] = parameter


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
