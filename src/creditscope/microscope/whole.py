"""The rule for any module that no other rule fits: it is run again for each rollout, with all that is inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from creditscope.errors import CreditscopeError
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.site import Forward, Site, replaced

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
        with replaced(self.site.module, tensors), \
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
