"""Intercepts every torch call of a pass; those that use parameters go through the rules of `operations`.

A `TorchFunctionMode` is open from the beginning of the forward to the end of the backward. It keeps which tensors are
made of parameters alone (`sources`), which descend from the model's inputs, and how those are laid out (`layouts`). Any
other tensor is a constant.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from creditscope.errors import CreditscopeError
from creditscope.microscope.calls import Call, again_differentiated, in_place, name_of, note_nodes, opaque, opened
from creditscope.microscope.layouts import FACTORIES, after, stays, tensors_of
from creditscope.microscope.operations import ONE_CALL, RULES, linear, looked_up, product
from creditscope.microscope.owners import USUAL, Layout, put_in, same, settled, usual_owner
from creditscope.microscope.recorder import RULED, Recorder, in_backward
from creditscope.microscope.rerun import again
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.shards import is_shard, on_shards
from creditscope.microscope.sources import Key, ParameterSource, made

BACKWARDS = {Tensor.backward, torch.autograd.grad, torch.autograd.backward}
ENGINES = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.")
"""Modules whose autograd functions gather, scatter and hook tensors for a training engine."""
TRUSTED = (*ENGINES, "torch.utils.checkpoint", "creditscope.microscope.", "bitsandbytes.", "flash_attn.")
"""Modules whose autograd functions leave rows in place. The last two, and deepspeed's, were not run here."""
CONSTANT = "constant"
"""The attribute of tensors that belong to no row."""
_Getter = types.MethodWrapperType
SET = Tensor.__setitem__


@dataclass(frozen=True, eq=False)
class Mark:
    """An activation with a layout of its own."""

    tensor: Tensor
    owner: Tensor | None
    """The rollout of each unit, over the leading axes that it depends on, on the CPU; None where unknown."""
    graded: bool
    """Whether it required a gradient then: one that requires it only later came out of an unwatched function."""


class Watch(TorchFunctionMode):
    def __init__(self, recorder: Recorder, modules: Iterable[nn.Module],
                 stand_in: Callable[[Tensor], str | None] | None, trust: Sequence[str]) -> None:
        super().__init__()
        self._recorder = recorder
        self._stand_in = stand_in
        """Among many ranks: the name of the parameter that an engine has replaced by this tensor, or None."""
        self._known: dict[int, ParameterSource | Mark] = {
            id(p): ParameterSource.parameter(name, p) for name, p in recorder.parameters.items() if not p.is_complex()}
        self._constants: dict[int, Tensor] = {}
        for module in modules:
            frozen = [p for p in module._parameters.values() if p is not None and not p.requires_grad]
            for x in (*frozen, *module._buffers.values(), *vars(module).values()):
                if isinstance(x, Tensor):
                    self._constants[id(x)] = x
        self._inputs: list[Tensor] = []
        self._token, self._still = object(), object()
        """Attributes of tensors that descend from rows in the usual layout, with and without a gradient. One marked
        as without that requires a gradient later came out of an unwatched function."""
        self._picked: dict[int, tuple[Tensor, RowOwners]] = {}
        self._places: dict[tuple[int, torch.Size], Mark] = {}
        """By address and shape: a reentrant checkpoint gives the same numbers in another tensor."""
        self._trust = tuple(trust)
        self._unseen_code: set[str] = set()  # autograd functions and operators, not torch's own, that made activations
        self.nodes: set[Any] = set()  # the graph nodes through which parameters are known to be used

    def given(self, tensors: list[Tensor]) -> None:
        """The model's inputs: they are laid out by rows, whatever their shape."""
        for x in tensors:
            self._lay(x, USUAL)
        self._inputs += tensors

    def leave(self) -> None:
        """Close the mode, also where modes that were opened after it are still open."""
        above = []
        stack: Any = overrides
        while self in stack._get_current_function_mode_stack():
            mode = stack._pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            stack._push_mode(mode)
        for x in self._inputs:
            x.__dict__.pop("_creditscope", None)
        self._known, self._constants, self._inputs, self._picked, self._places = {}, {}, [], {}, {}
        self.nodes = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is _Getter:  # shape, dtype, device: the most frequent calls
            found = func(*args)
            if not isinstance(found, Tensor):
                return found
        if func is F.linear and not kwargs and (out := self._linear(*args)) is not None:
            return out
        kwargs = kwargs or {}
        known, token, still = self._known, self._token, self._still
        given, plain = [], True  # tensors with rows; whether all of them have the usual layout
        tensors = tensors_of(args, kwargs)
        for x in tensors:
            if id(x) in known:
                return self._touched(func, args, kwargs, tensors)
            tag = getattr(x, "_creditscope", None)
            if tag is token or (tag is still and not x.requires_grad):
                given.append(x)
            elif x.requires_grad and id(x) not in self._constants:
                given.append(x)
                plain = False
        if self._stand_in is not None and getattr(func, "__name__", "") != "__get__" and self._meets_stand_in(args):
            return self._touched(func, args, kwargs, tensors)
        if func in BACKWARDS:
            return self._backward(func, args, kwargs)
        if not given:
            return self._constant(func, args, kwargs, tensors)
        rows = self._recorder.known
        if plain and rows is not None and not rows.by_position and func is not SET:
            base = args[0]._base if in_place(func) and isinstance(args[0], Tensor) else None
            before = None if base is None else self._layout(base)
            out = func(*args, **kwargs)
            results = (out,) if type(out) is Tensor else out if type(out) is tuple else ()
            if results and base is None and stays(func, args, kwargs, results, given):
                for y in results:
                    y._creditscope = token if y.requires_grad else still
            elif isinstance(out, Tensor | tuple | list):
                kept: dict[int, Layout | bool] = {id(x): USUAL for x in given}
                if base is not None:
                    kept[id(base)] = before
                self._lay_all(func, args, kwargs, out, kept)
            return out
        return self._moved(func, args, kwargs)

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> Tensor | None:
        """F.linear of parameters themselves and rows in the usual layout; None for any other.

        Most uses of parameters are such. `_touched` comes to the same in twice the time.
        """
        rows, matrix, shift = self._recorder.known, self._itself(weight), self._itself(bias)
        tag = getattr(x, "_creditscope", None)
        usual = type(x) is Tensor and id(x) not in self._known \
            and (tag is self._token or (tag is self._still and not x.requires_grad))
        if not usual or rows is None or rows.by_position or x.dim() < 2 or x.size(0) != rows.batch \
                or matrix is None or weight.dim() != 2 or (bias is not None and (shift is None or bias.dim() != 1)) \
                or self._stand_in is not None or not torch.is_grad_enabled() \
                or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        out = linear(x, weight, bias, (matrix, shift), self._recorder, rows, self.nodes)
        out._creditscope = self._token  # type: ignore[attr-defined]
        return out

    def _itself(self, p: Any) -> ParameterSource | None:
        """The source of a parameter that is used as it is."""
        found = self._known.get(id(p))
        if type(p) is nn.Parameter and isinstance(found, ParameterSource) and found.node is None:
            return found
        return None

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward under the watch: checkpoints run forwards inside it."""
        self._recorder.nodes = self.nodes
        roots = kwargs.get("tensors", kwargs.get("outputs", args[0] if args else None))
        self._recorder.roots += [x for x in pytree.tree_leaves(roots) if isinstance(x, Tensor)]
        if kwargs.get("create_graph"):
            raise again_differentiated()
        with self:
            return opened(func)(*args, **kwargs)

    def _constant(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """A call without rows and parameters: its result is a constant where all its arguments are."""
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and not out.requires_grad and all(
                getattr(x, "_creditscope", None) is CONSTANT or id(x) in self._constants for x in tensors):
            out._creditscope = CONSTANT  # type: ignore[attr-defined]
        return out

    def _touched(self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor]) -> Any:
        if func in BACKWARDS:
            return self._backward(func, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return self._unseen(func, args, kwargs)
        sources = [s for x in leaves if (s := self._source(x)) is not None]
        if not sources:
            return self._moved(func, args, kwargs)
        if isinstance(func, types.FunctionType) and func not in RULES and func not in ONE_CALL:
            with self:
                return opened(func)(*args, **kwargs)
        graph = torch.is_grad_enabled()
        if not graph:
            self._count(func, args, kwargs, sources)
        kept = self._layouts(func, args, leaves)
        if all(layout is False for layout in kept.values()):
            return self._derived(func, args, kwargs, sources)
        return self._met(func, args, kwargs, leaves, sources, kept) if graph else self._moved(func, args, kwargs)

    def _unseen(self, func: Any, args: Any, kwargs: Any) -> Any:
        for x in tensors_of(args, kwargs):
            if isinstance(source := self._known.get(id(x)), ParameterSource):
                self._recorder.miss(source, "it is used inside a transform of torch.func, where rows cannot be told")
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any, sources: list[ParameterSource]) -> None:
        """A pass without a graph may be a checkpoint's, whose uses return in the backward: they are counted here."""
        rule = RULES.get(func)
        found = looked_up(func, args, kwargs)
        for source in sources:
            if found is not None and found[0] is source.tensor and self._recorder.known is not None \
                    and self._has_rows(found[1]):
                self._recorder.forward("lookup", source, ids=found[1].reshape(1, -1))
            elif source.tensor.requires_grad:
                self._recorder.forward("matrix" if rule is product and source.tensor.dim() == 2 else "dense", source)

    def _derived(self, func: Any, args: Any, kwargs: Any, sources: list[ParameterSource]) -> Any:
        """A call of parameters and constants alone."""
        out = func(*args, **kwargs)
        for y in pytree.tree_leaves(out):
            if isinstance(y, Tensor) and y.requires_grad:
                found = made(func, args, kwargs, y, sources)
                looked = looked_up(func, args, kwargs)
                first = sources[0]
                if looked is not None and found.key is None and first.matrix and not first.turned \
                        and looked[0] is first.tensor and first.key is not None and first.key.part is None:
                    found = replace(first, tensor=y, ids=looked[1].flatten(), padding=looked[2],
                                    shape=(looked[1].numel(), y.shape[-1]), node=y.grad_fn)
                self._known[id(y)] = found
                note_nodes(self.nodes, [y], [source.tensor for source in sources])
            elif isinstance(y, Tensor) and id(y) not in self._known:
                self._constants[id(y)] = y
        return out

    def _met(self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor], sources: list[ParameterSource],
             kept: dict[int, Layout | bool]) -> Any:
        """A call of parameters and activations; `kept` has the layouts of its tensors."""
        if any(is_shard(source.tensor) for source in sources):
            layouts = [layout for x in leaves if (layout := kept[id(x)]) is not False]
            out = on_shards(self._recorder, func, args, kwargs, self._source, self._on_part)
            self._lay(out, USUAL if all(layout is USUAL for layout in layouts) else None)
            return out
        names = dict.fromkeys(repr(name) for source in sources for name in source.names)
        call = Call(func, args, kwargs, f"{name_of(func)} with {' and '.join(names)}", self._recorder, self._source,
                    self._rows_of, self._has_rows, self.nodes)
        self._recorder.turned.clear()
        try:
            if any(x.is_complex() for x in leaves):
                raise CreditscopeError(f"{call.where} computes with complex numbers, which are not read")
            rule = RULES.get(func)
            out = None if rule is None else rule(call)
            ran_again = out is None
            if ran_again:
                out = again(call)
        except CreditscopeError as error:
            for source in sources:
                self._recorder.miss(source, str(error))
            out = call.ran[0] if call.ran else func(*args, **kwargs)
            self._lay_all(func, args, kwargs, out, kept)
            return out
        rows = self._recorder.known
        assert rows is not None
        if type(out) is Tensor and not rows.by_position and not self._recorder.turned:
            given = [x for x in leaves if kept[id(x)] is not False]
            if all(kept[id(x)] is USUAL for x in given) and stays(func, args, kwargs, (out,), given):
                self._lay(out, USUAL)
                return out
        results = [y for y in pytree.tree_leaves(out) if isinstance(y, Tensor)]
        found = after(func, args, kwargs, results, rows, lambda x: kept.get(id(x), False))
        x = next(x for x in leaves if kept[id(x)] is not False)
        for y, layout in zip(results, found, strict=True):
            if any(y is z for z in self._recorder.turned):
                layout = settled(rows, self._recorder.turned_owner(y), y)
            elif layout is None and ran_again:  # `again` has shown that it acts on each rollout's part alone
                owner = usual_owner(rows, x) if kept[id(x)] is USUAL else kept[id(x)]
                if isinstance(owner, Tensor) and tuple(y.shape[: owner.dim()]) == tuple(owner.shape):
                    layout = settled(rows, owner, y)
            self._lay(y, layout)
        return out

    def _on_part(self, func: Any, args: tuple[Any, ...], parts: list[tuple[Tensor, Tensor]]) -> Any:
        """A call on this rank's parts of sharded tensors: (whole, part) of each parameter."""
        for whole, part in parts:
            found = self._source(whole)
            if found is not None:
                self._known[id(part)] = ParameterSource.parameter(found.names[0], part)
        for x in args:
            if isinstance(x, Tensor) and self._source(x) is None:
                self._lay(x, USUAL)
        leaves = [x for x in args if isinstance(x, Tensor)]
        return self._met(func, args, {}, leaves, [s for x in args if (s := self._source(x)) is not None],
                         self._layouts(func, args, leaves))

    def _source(self, x: Any) -> ParameterSource | None:
        found = self._known.get(id(x))
        if not isinstance(found, ParameterSource):
            return None
        if found.node is not None and found.node is not found.tensor.grad_fn:  # written into since it was made
            found = replace(found, key=None, shape=(), ids=None, turned=False, node=found.tensor.grad_fn)
            self._known[id(x)] = found
            self.nodes.add(found.node)
        return found

    def _meets_stand_in(self, args: Any) -> bool:
        """Whether an argument is a parameter with which an engine has replaced one of the model's."""
        assert self._stand_in is not None
        met = False
        for x in args:
            if isinstance(x, nn.Parameter) and x.requires_grad:
                name = self._stand_in(x)
                if name is not None:
                    self._known[id(x)] = ParameterSource(x, (name,), Key(name), tuple(x.shape), precision=x.dtype)
                    self._recorder.parameters[name] = x
                    met = True
        return met

    def _descends(self, x: Tensor) -> bool:
        """Whether an unknown tensor belongs to rows: it requires a gradient or was made of the model's inputs."""
        tag = getattr(x, "_creditscope", None)
        return tag is self._token or tag is self._still or (x.requires_grad and id(x) not in self._constants)

    def _has_rows(self, x: Any) -> bool:
        return isinstance(x, Tensor) and self._layout(x) is not False

    def _layout(self, x: Tensor) -> Layout | bool:
        """How a tensor is laid out; False for one that belongs to no row."""
        found = self._known.get(id(x))
        if isinstance(found, Mark):
            return found.owner if found.graded or not x.requires_grad or self._strange(x) is not None else None
        if isinstance(found, ParameterSource):
            return False
        if self._descends(x):
            tag = getattr(x, "_creditscope", None)
            return USUAL if tag is self._token or (tag is self._still and not x.requires_grad) else self._strange(x)
        if getattr(x, "_creditscope", None) is CONSTANT or id(x) in self._constants:
            return False
        return USUAL if self._came_from_outside(x) else False

    def _came_from_outside(self, x: Tensor) -> bool:
        """Whether a tensor that was there before, and is no buffer, has the shape of rows: the user's own data."""
        rows = self._recorder.known
        if self._recorder.entered:  # the model's inputs are known
            return False
        if rows is None:
            return x.dim() > (1 if x.is_floating_point() else 0)
        if rows.width is None:
            return x.shape[:1] == (rows.batch,) and x.dim() > (1 if x.is_floating_point() else 0)
        if x.shape[:1] == (rows.batch * rows.width,) and rows.width > 1:
            return x.dim() > 1 or not x.is_floating_point()
        # Where B = T, a table over pairs of positions has the same shape.
        return x.shape[:2] == (rows.batch, rows.width) and rows.batch != rows.width

    def _strange(self, x: Tensor) -> Layout | bool:
        """A tensor with a gradient that no torch call made: an autograd function's, a checkpoint's, or the user's."""
        same = self._places.get((x.data_ptr(), x.shape)) if self._places and type(x) is Tensor else None
        if x.grad_fn is None:  # inside a reentrant checkpoint, a part of the model's input; else shared by all rows
            rows = in_backward() or getattr(x, "_creditscope", None) is self._still
            return same.owner if same is not None else USUAL if rows else False
        own: Any = torch.autograd.function.BackwardCFunction
        if not isinstance(x.grad_fn, own) and getattr(x, "_creditscope", None) is CONSTANT:
            return None  # a constant that an unwatched call has written into
        if not isinstance(x.grad_fn, own):  # torch's own function, in an unwatched call: an engine's, perhaps
            before = [node for node, _ in x.grad_fn.next_functions if node is not None]
            engine = before and all(isinstance(node, own) and _module_of(node).startswith(ENGINES) for node in before)
            return same.owner if same is not None else USUAL if engine else None
        # Functions that are applied to each other have no torch call between them: each must be trusted.
        todo, layout = [x.grad_fn], USUAL
        while todo and layout is USUAL:
            node = todo.pop()
            layout = self._trusted(node.name().removesuffix("Backward"), _module_of(node))  # type: ignore[assignment]
            todo += [after for after, _ in node.next_functions if isinstance(after, own)
                     and after.name().removesuffix("Backward") not in RULED]
        return same.owner if same is not None and layout is USUAL else layout

    def _trusted(self, name: str, module: str) -> Layout:
        """The usual layout after code that no torch call shows, where it is trusted to leave rows in place."""
        if module.startswith(TRUSTED) or any(fnmatchcase(name, pattern) for pattern in self._trust):
            return USUAL
        self._unseen_code.add(name)
        return None

    def _rows_of(self, x: Tensor) -> RowOwners:
        layout = self._layout(x)
        if layout is None:
            code = sorted(self._unseen_code)
            raise CreditscopeError(
                f"an activation of shape {tuple(x.shape)} was made of several rollouts', or in a way that does not say "
                f"whose its vectors are" + (f": {code[0]} is code that no torch call shows. If it leaves rows where "
                                            f"they are, say so: trust=[{code[0]!r}]" if code else ""))
        if not isinstance(layout, Tensor):
            return self._recorder.rows(x, features=1 if x.is_floating_point() else 0)
        found = self._picked.get(id(layout))
        if found is None:
            assert self._recorder.known is not None
            found = self._picked[id(layout)] = layout, self._recorder.known.gathered(layout, x.device)
        return found[1]

    def _lay(self, y: Tensor, layout: Layout) -> None:
        if layout is USUAL:
            self._known.pop(id(y), None)
            y._creditscope = self._token if y.requires_grad else self._still  # type: ignore[attr-defined]
        elif layout is None and not y.requires_grad:  # no gradient flows through it: a constant
            self._known.pop(id(y), None)
            y._creditscope = CONSTANT  # type: ignore[attr-defined]
        else:
            assert layout is None or isinstance(layout, Tensor)
            self._known[id(y)] = mark = Mark(y, layout, y.requires_grad)
            if type(y) is Tensor and (place := y.data_ptr()):
                self._places[place, y.shape] = mark

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is SET:
            return self._set(args)
        kept = self._layouts(func, args, tensors_of(args, kwargs))
        out = func(*args, **kwargs)
        self._lay_all(func, args, kwargs, out, kept)
        return out

    def _layouts(self, func: Any, args: Any, tensors: list[Tensor]) -> dict[int, Layout | bool]:
        """The layouts of a call's tensors, and of the first one's base, before the call may write into them."""
        kept = {id(x): self._layout(x) for x in tensors}
        if args and in_place(func) and isinstance(args[0], Tensor) and args[0]._base is not None:
            kept[id(args[0]._base)] = self._layout(args[0]._base)
        return kept

    def _lay_all(self, func: Any, args: Any, kwargs: Any, out: Any, kept: dict[int, Layout | bool]) -> None:
        rows = self._recorder.known
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            self._lay(args[0], None)
        if rows is None or not isinstance(out, Tensor | tuple | list) \
                or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if func in FACTORIES and isinstance(out, Tensor):
            self._lay(out, None)
            return
        given = [x for x in tensors_of(args, kwargs) if kept.get(id(x), False) is not False]
        results = [y for y in pytree.tree_leaves(out) if isinstance(y, Tensor)]
        if not given:  # made of what all rows share
            self._constants |= {id(y): y for y in results}
            return
        if isinstance(out, Tensor) and not rows.by_position and all(kept[id(x)] is USUAL for x in given) \
                and stays(func, args, kwargs, (out,), given):
            found: list[Layout] = [USUAL]
        else:
            found = self._after(func, args, kwargs, results, rows, kept)
        for y, layout in zip(results, found, strict=True):
            base = y._base if in_place(func) else None
            before = kept.get(id(y))
            self._lay(y, layout)
            if base is not None and not same(before, layout):  # a view's base was written into too
                part = layout is USUAL and base.dim() == y.dim() and base.shape[0] == y.shape[0] \
                    and base.stride(0) == y.stride(0) and (kept.get(id(base), False) is USUAL or not kept.get(id(base)))
                self._constants.pop(id(base), None)
                self._lay(base, USUAL if part else None)

    def _after(self, func: Any, args: Any, kwargs: Any, results: list[Tensor], rows: RowOwners,
               kept: dict[int, Layout | bool]) -> list[Layout]:
        name = opaque(func)
        if name and all(layout is USUAL or layout is False for layout in kept.values()):
            return [self._trusted(name, "") if usual_owner(rows, y) is not None else None for y in results]
        return after(func, args, kwargs, results, rows, lambda x: kept.get(id(x), False))

    def _set(self, args: Any) -> None:
        into, index, value = args
        came = self._layout(value) if isinstance(value, Tensor) else False
        held, rows = self._layout(into), self._recorder.known
        into[index] = value
        if rows is None or came is False:
            return
        there, new = (usual_owner(rows, t) if layout is USUAL else layout if isinstance(layout, Tensor) else None
                      for t, layout in ((into, held), (value, came)))
        try:
            known = new is not None and held is not None
            layout = settled(rows, put_in(into, index, value, there, new), into) if known and new is not None else None
        except (RuntimeError, IndexError, TypeError, ValueError):
            layout = None
        self._constants.pop(id(into), None)
        self._lay(into, layout)


def _module_of(node: Any) -> str:
    return str(getattr(getattr(type(node), "_forward_cls", None), "__module__", ""))
