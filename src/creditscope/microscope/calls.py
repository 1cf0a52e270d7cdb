"""One torch call that brings parameters and activations together, and what all rules for such calls share."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from creditscope.errors import CreditscopeError
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sources import ParameterSource

Func = Callable[..., Any]
PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
"""Kinds of tensors whose operations are torch's own."""


@dataclass(eq=False, slots=True)
class Call:
    """One torch call that brings parameters and activations together."""

    func: Func
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str  # the operation and its parameters, for messages
    recorder: Recorder
    source: Callable[[Any], ParameterSource | None]  # the source of an argument made of parameters; None for any other
    rows_of: Callable[[Tensor], RowOwners]  # the owners of an activation; an error where they are unknown
    has_rows: Callable[[Any], bool]
    nodes: set[Any]  # collects the graph nodes of operations that run unchanged
    ran: list[Any] = field(default_factory=list)  # the call's result, once it has run unchanged: it must not run again


def again_differentiated() -> CreditscopeError:
    return CreditscopeError("the microscope reads one plain backward pass, and this one is to be differentiated again "
                            "(create_graph=True); run it outside the with block")


def unwatched(backward: Any) -> Any:
    """A backward that runs once, with the watch off, and cannot be differentiated again.

    Saved tensors are unpacked before: a checkpoint recomputes its forward then, and that has to be watched.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        ctx.recorder.once(ctx)
        ctx.kept = ctx.saved_tensors
        try:
            with torch._C.DisableTorchFunction():
                # Autograd runs a plain backward without a graph; torch's decorator would switch it off once more, in
                # two calls that the watch sees.
                if torch.is_grad_enabled():
                    raise again_differentiated()
                return backward(ctx, *grads)
        finally:  # the graph may outlive the pass
            ctx.kept = ctx.call = ctx.report = None

    return staticmethod(run)


def name_of(func: Func) -> str:
    """torch's name of a function: 'T' for Tensor.T.__get__, 'linear' for F.linear."""
    if getattr(func, "__name__", "") == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", "__get__"))
    return str(getattr(func, "__name__", func)).strip("_")


def opaque(func: Func) -> str:
    """The name of an operator registered with torch.library; "" for torch's own."""
    name = str(getattr(func, "_qualified_op_name", ""))
    if not name and isinstance(func, torch._ops.OpOverload):
        name = str(func._schema.name)
    return "" if "::" not in name or name.startswith(("aten::", "prims::", "prim::")) else name


def in_place(func: Func) -> bool:
    """Whether torch's function writes into its first argument, by its name: add_, but not __add__."""
    found = _IN_PLACE.get(func)
    if found is None:
        name = str(getattr(func, "__name__", ""))
        found = _IN_PLACE[func] = name.endswith("_") and not name.endswith("__")
    return found


_IN_PLACE: dict[Func, bool] = {}
"""By hand and not by lru_cache, which torch.compile warns of at every call."""


def arguments(call: Call, *names: str) -> list[Any]:
    """The call's arguments under these names, by place or by name; None where they are not given."""
    given = [*call.args, *[None] * len(names)][: len(names)]
    return [call.kwargs.get(name, value) for name, value in zip(names, given, strict=True)]


def unviewed(out: Tensor) -> Tensor:
    """Torch returns some products as views; views from a custom Function may not be changed in place."""
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out


class _Attach(torch.autograd.Function):
    """The identity on the results of a call; the backward passes their gradients to `report`."""

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
    """Add the graph nodes between a call's results and its arguments: a call may be many operations inside."""
    ends = {x.grad_fn for x in given if isinstance(x, Tensor) and x.grad_fn is not None}
    todo = [y.grad_fn for y in results if y.grad_fn is not None and y.grad_fn not in ends]
    while todo:
        node = todo.pop()
        if node in nodes:
            continue
        nodes.add(node)
        todo += [after for after, _ in node.next_functions
                 if after is not None and after not in ends and not hasattr(after, "variable")]


def attach(call: Call, out: Any, report: Callable[[tuple[Tensor | None, ...]], None]) -> Any:
    flat, spec = pytree.tree_flatten(out)
    at = [k for k, y in enumerate(flat) if isinstance(y, Tensor) and y.requires_grad]
    note_nodes(call.nodes, [flat[k] for k in at], pytree.tree_leaves((call.args, call.kwargs)))
    found = _Attach.apply(call.recorder, report, *(flat[k] for k in at))  # type: ignore[no-untyped-call]
    for k, y in zip(at, found, strict=True):
        flat[k] = y
    return pytree.tree_unflatten(flat, spec)


_BLIND = {"has_torch_function": lambda *_: False, "has_torch_function_unary": lambda *_: False,
          "has_torch_function_variadic": lambda *_: False}
_OPENED: dict[Func, Func] = {}


def opened(func: Func) -> Func:
    """A Python function of torch without its check for a `__torch_function__`: its body runs under the watch."""
    if func not in _OPENED:
        assert isinstance(func, types.FunctionType)
        copy = types.FunctionType(func.__code__, func.__globals__ | _BLIND, func.__name__, func.__defaults__,
                                  func.__closure__)
        copy.__kwdefaults__ = func.__kwdefaults__
        _OPENED[func] = copy
    return _OPENED[func]
