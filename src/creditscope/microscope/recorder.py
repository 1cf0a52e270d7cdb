"""Collects the reports of operations during one backward pass and makes each parameter's Gram of them.

A parameter used several times (a tied head, a layer called twice) has rows g_i = Σ_calls g_i^(c), whose products need
all its calls: its factors are kept until the pass is over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import EmbeddingRows, Scratch, dense_gram, materialise
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sketch import ParameterBlock, Sketcher
from creditscope.microscope.sources import Key, ParameterSource, coarsest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def in_backward() -> bool:
    """Whether autograd is running in this thread: then a forward is a checkpoint's recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass
class Waiting:
    """The calls of one parameter that is used several times."""

    factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    lookups: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    dense: Tensor | None = None
    head: Tensor | None = None
    """(N, U, d) the rows of a tied head whose Gram is already counted, for the ids `head_ids` (U,), sorted."""
    head_ids: Tensor | None = None


class Recorder:
    """Collects (N, N) Grams and sketches by parameter name while a backward pass runs."""

    def __init__(self, owners: tuple[Tensor | None, Tensor | None], exact: bool, sketcher: Sketcher | None,
                 parameters: Mapping[str, Tensor]) -> None:
        self._owners, self.exact, self.sketcher = owners, exact, sketcher
        self.parameters = dict(parameters)
        """Name → its tensor in the graph: the parameter, or an engine's replacement of it."""
        # While ZeRO-3 has emptied a parameter, `ds_shape` is its shape.
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(getattr(p, "ds_shape", p.shape))
                                                   for name, p in parameters.items()}
        self.known: RowOwners | None = None  # the batch's owners
        self.grams: dict[str, Tensor] = {}
        self.sketch: Tensor | None = None
        self.blocks: dict[str, ParameterBlock] = {}
        """Parameters of which this rank holds a part (tensor parallel), and which part."""
        self.mesh: DeviceMesh | None = None  # the ranks that hold the parts
        self.block_sketch: Tensor | None = None  # the sketch of the parts: only these add up over the ranks
        self.strays: list[tuple[str, Tensor]] = []
        self.mixing: list[tuple[str, Tensor]] = []
        self.missed: dict[str, str] = {}  # parameters that an operation used in a way that gives no rows → why
        self.walks = True  # whether to search the graph: among many ranks engines insert functions of their own
        self.walked: set[Any] = set()  # kinds of passes whose graph was searched
        self.roots: list[Tensor] = []  # the tensors that the backward started from
        self.nodes: set[Any] = set()
        """The graph nodes, besides those of our own rules, through which parameters are known to be used."""
        self.turned: list[Tensor] = []  # results of the present call whose rows are their second axis
        self.uses: list[tuple[Key, str, bool]] = []
        """(key, kind, whether its other factors require a gradient) of each use, in the order of the forward."""
        self.calls: Counter[tuple[Key, str]] = Counter()
        self._parts: defaultdict[str, set[int | None]] = defaultdict(set)
        self.precision: dict[str, torch.dtype] = {}
        """The reports' precision by parameter; a parameter without a report is not covered."""
        self._ids: defaultdict[Key, list[Tensor]] = defaultdict(list)
        self._waiting: defaultdict[Key, Waiting] = defaultdict(Waiting)
        self._forward = self._backward = self._stale = False
        self.entered = self.closed = self.pulling = False
        self.entered_with_grad = False
        self._scratch = Scratch()

    def meet(self, lead: tuple[int, ...], device: torch.device) -> None:
        """Take the batch's leading axes from the model's input. One batch per context."""
        if not lead:
            raise CreditscopeError("the model was given one vector without an axis of rows; give a batch of one row")
        if 0 in lead:
            raise CreditscopeError(f"the model was given an empty batch, of shape {lead}; skip it")
        if self.known is None:
            self.known = RowOwners.of(lead, *self._owners, device)
        elif (self.known.batch, self.known.width) != (lead[0], lead[1] if len(lead) > 1 else None):
            raise CreditscopeError(f"the microscope saw a batch of shape {(self.known.batch, self.known.width)} and "
                                   f"then one of shape {lead}; open one context for each batch")

    def rows(self, x: Tensor, features: int = 1) -> RowOwners:
        """The batch's owners; where the model's input is unknown, the first operation's input is used."""
        if self.known is None:
            self.meet(tuple(x.shape[: min(2, x.dim() - features)]), x.device)
        assert self.known is not None
        return self.known

    def turned_owner(self, y: Tensor) -> Tensor:
        """The owners of a result whose rows, or positions, are its second axis."""
        assert self.known is not None
        owners = self.known.owners.cpu()
        return owners.flatten().repeat_interleave(y.shape[1] // owners.numel()).expand(y.shape[0], -1)

    @property
    def batch(self) -> int | None:
        return None if self.known is None else self.known.batch

    def forward(self, kind: str, source: ParameterSource | None, follows: bool = True,
                ids: Tensor | None = None) -> None:
        """An operation uses a parameter; the second use by a checkpoint inside the backward is not counted."""
        if in_backward() or source is None:
            return
        self._forward = True
        self._stale |= self._backward
        keys = [Key(name) for name in source.names] if source.key is None else [source.key]
        for key in keys:
            if source.ids is not None and ids is None and self.known is not None:
                kind, ids = "lookup", source.ids.expand(self.known.count, -1)
            self.calls[key, kind if source.key is not None else "dense"] += 1
            self._parts[key.name].add(key.part)
            self.uses.append((key, kind, follows))
            if ids is not None:
                self._ids[key].append(ids)

    def backward(self) -> None:
        if self.closed:
            raise CreditscopeError("backward ran after the Microscope was closed; call loss.backward() inside the with "
                                   "block that holds the forward pass")
        if self._stale:
            raise _twice()
        self._backward = True

    def once(self, ctx: object) -> None:
        """Refuse a second backward through the same forward (retain_graph)."""
        if getattr(ctx, "spent", False):
            raise _twice()
        ctx.spent = True  # type: ignore[attr-defined]
        if not self._backward and self.roots and self.walks:
            kinds = frozenset((key.name, kind) for key, kind, _ in self.uses)
            if kinds not in self.walked:  # a pass of another kind than those before
                self.walked.add(kinds)
                self.miss_unseen()
        self.backward()

    def miss_unseen(self) -> None:
        """Note parameters with an edge in the graph from neither a rule nor an operation that was seen.

        The self-check compares sums, in which an unseen use may cancel.
        """
        names = {id(p): name for name, p in self.parameters.items()}
        known, todo, seen = self.nodes, [x.grad_fn for x in self.roots if x.grad_fn is not None], set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for after, _ in node.next_functions:
                if after is None:
                    continue
                name = names.get(id(getattr(after, "variable", None)))
                if name is not None and node not in known and type(node).__name__.removesuffix("Backward") not in RULED:
                    self.missed.setdefault(name, f"no torch call that uses it was seen, but {node.name()} does")
                elif name is None:
                    todo.append(after)

    @property
    def seen(self) -> tuple[bool, bool]:
        return self._forward, self._backward

    def repeats(self) -> bool:
        """Whether the uses are one sequence repeated, each time from inputs without a gradient: several forwards.

        Not asked where the model itself was called: its calls are counted, and one call may use a part of it twice.
        """
        if self.entered_with_grad:
            return False
        starts = [i for i, use in enumerate(self.uses) if use == self.uses[0] and not use[2]]
        return any(len(self.uses) % i == 0 and self.uses == self.uses[:i] * (len(self.uses) // i)
                   for i in starts[1:])

    # -- reports: each returns the gradient of the source's tensor ----------------------------------------------------

    def matrix(self, source: ParameterSource, delta: Tensor, a: Tensor) -> Tensor:
        """D_i = Σ_t δ_it a_itᵀ, given (N, T, o) and (N, T, d)."""
        key = source.key
        if key is None or not source.matrix or self._overlaps(key):
            return self.dense(source, torch.bmm(delta.transpose(1, 2), a))
        first, second = (a, delta) if source.turned else (delta, a)
        self._note(key.name, coarsest(a.dtype, source.precision))
        if self.sketcher is not None:
            self._sketch(key.name, self.sketcher.matrix(key.name, first, second, self._block(key)))
        if not self.exact or not self._alone(key):
            if self.exact:
                self._waiting[key].factors.append((first, second))
            dw = first.flatten(0, 1).t() @ second.flatten(0, 1)
        else:
            dw, gram = weight_gram(first, second, self._scratch)
            self._add(key.name, gram)
            if self.calls[key, "lookup"]:
                seen = self._looked_up(key)
                self._waiting[key].head = torch.bmm(first[:, :, seen].transpose(1, 2), second)
                self._waiting[key].head_ids = seen
        return dw.t() if source.turned else dw

    def blocks_of_matrix(self, source: ParameterSource, deltas: Iterable[tuple[int, Tensor]], a: Tensor) -> Tensor:
        """`matrix` of a weight whose δ come in blocks of outputs, (first output, (N, T, block)), and are not kept.

        The Grams of the blocks add up, as those of different parameters do.
        """
        key = source.key
        assert key is not None
        if self.exact and not self._alone(key):  # its other calls meet these rows: the factors are kept
            return self.matrix(source, torch.cat([delta for _, delta in deltas], dim=2), a)
        self._note(key.name, coarsest(a.dtype, source.precision))
        dw: Tensor = a.new_empty(source.shape)
        seen = self._looked_up(key) if self.exact and self.calls[key, "lookup"] else None
        met = []
        for start, delta in deltas:
            part = slice(start, start + delta.shape[2])
            if self.sketcher is not None:
                block = ParameterBlock(source.shape, (start, 0))
                self._sketch(key.name, self.sketcher.matrix(key.name, delta, a, block))
            if not self.exact:
                torch.mm(delta.flatten(0, 1).t(), a.flatten(0, 1), out=dw[part])
                continue
            dw[part], gram = weight_gram(delta, a, self._scratch)
            self._add(key.name, gram)
            if seen is not None:
                inside = seen[(seen >= part.start) & (seen < part.stop)] - start
                met.append(torch.bmm(delta[:, :, inside].transpose(1, 2), a))
        if seen is not None:
            self._waiting[key].head, self._waiting[key].head_ids = torch.cat(met, dim=1), seen
        return dw

    def _alone(self, key: Key) -> bool:
        """Whether the rows of a matrix meet no other rows than those of look-ups."""
        return self.calls[key, "matrix"] <= 1 and self.calls[key, "dense"] == 0

    def _looked_up(self, key: Key) -> Tensor:
        """The ids, sorted, that look-ups of a parameter read."""
        seen: Tensor = torch.unique(torch.cat([ids.flatten() for ids in self._ids[key]]))
        return seen

    def lookup(self, source: ParameterSource, ids: Tensor, delta: Tensor) -> None:
        """Row ids_it of rollout i gets δ_it, given (N, T) and (N, T, d)."""
        key = source.key
        if key is None or not source.matrix or source.turned or key.part is not None or self._overlaps(key):
            wide = torch.promote_types(delta.dtype, torch.float32)
            rows = delta.new_zeros(len(ids), *source.tensor.shape, dtype=wide)
            slot = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
            self.dense(source, rows.index_put_((slot, ids), delta.to(rows.dtype), accumulate=True))
            return
        self._note(key.name, delta.dtype)
        if self.sketcher is not None:
            self._sketch(key.name, self.sketcher.rows(key.name, ids, delta, source.shape[0], self.blocks.get(key.name)))
        if not self.exact:
            return
        if self._count(key) > 1:
            self._waiting[key].lookups.append((ids, delta))
        else:
            self._add(key.name, EmbeddingRows(ids, delta).gram())

    def dense(self, source: ParameterSource, g: Tensor) -> Tensor:
        """Explicit rows (N, *tensor.shape)."""
        total = g.sum(dim=0)
        if source.ids is not None and source.key is not None:
            ids, delta = source.ids.expand(len(g), -1), source.straight(g)
            if source.padding >= 0:
                delta = delta.masked_fill((ids == source.padding)[..., None], 0)
            self.lookup(self.own(source), ids, delta)
        elif source.key is None:
            self.pulling = True
            try:
                found = source.pull(g.to(source.tensor.dtype), self.parameters)
            finally:
                self.pulling = False
            for name, rows in found.items():
                self._explicit(Key(name), rows, coarsest(source.precision, g.dtype))
        else:
            self._explicit(source.key, source.straight(g), coarsest(g.dtype, source.precision))
        return total

    def _explicit(self, key: Key, g: Tensor, precision: torch.dtype) -> None:
        if key.part is not None and self._overlaps(key):  # also used as a whole: take rows of the whole parameter
            whole = g.new_zeros(len(g), *self.shapes[key.name])
            whole[:, key.part] = g
            key, g = Key(key.name), whole
        self._note(key.name, precision)
        g = g.to(torch.promote_types(g.dtype, self.parameters[key.name].dtype))
        if self.sketcher is not None:
            block = self.blocks.get(key.name)
            if key.part is not None:
                block, rows = ParameterBlock(self.shapes[key.name], (key.part, *[0] * (g.dim() - 1))), g[:, None]
            else:
                rows = g
            self._sketch(key.name, self.sketcher.dense(key.name, rows, block))
        if self.exact:
            if self._count(key) > 1 or self._overlaps(key):
                held = self._waiting[key].dense
                self._waiting[key].dense = g if held is None else held + g
            else:
                self._add(key.name, dense_gram(g))

    def own(self, source: ParameterSource) -> ParameterSource:
        name = source.names[0]
        return ParameterSource.parameter(name, self.parameters[name])

    def stray(self, name: str, total: Tensor | None) -> None:
        if total is not None:
            self.strays.append((name, total))

    def miss(self, source: ParameterSource, why: str) -> None:
        for name in source.names:
            self.missed.setdefault(name, why)

    def _note(self, name: str, precision: torch.dtype) -> None:
        self.precision[name] = coarsest(precision, self.precision.get(name, torch.float64))

    def _count(self, key: Key) -> int:
        return sum(self.calls[key, kind] for kind in ("matrix", "lookup", "dense"))

    def _overlaps(self, key: Key) -> bool:
        """Whether a stack is used both as a whole and matrix by matrix."""
        parts = self._parts[key.name]
        return None in parts and len(parts) > 1

    def _block(self, key: Key) -> ParameterBlock | None:
        if key.part is None:
            return self.blocks.get(key.name)
        _, height, width = self.shapes[key.name]
        return ParameterBlock((self.shapes[key.name][0] * height, width), (key.part * height, 0))

    @torch.no_grad()
    def settle(self) -> None:
        for key, waiting in self._waiting.items():
            gram = joint_gram(waiting, self.shapes[key.name])
            if gram is not None:
                self._add(key.name, gram)
        self._waiting.clear()

    def require_apart(self) -> None:
        """An error where padding has a gradient, or an operation that was run again mixes rows."""
        for where, total in self.strays:
            if float(total) > 0:
                raise CreditscopeError(f"positions of no rollout (−1) have a gradient in {where}; mask them out of the "
                                       f"loss, or give them to a rollout")
        for where, gap in self.mixing:
            if not float(gap) <= 1:
                raise CreditscopeError(
                    f"{where} gives one rollout another result alone than in its batch (by {float(gap):.2g} times what "
                    f"rounding explains): it mixes rows, so they have no gradients of their own")

    def _add(self, name: str, gram: Tensor) -> None:
        self.grams[name] = self.grams[name] + gram if name in self.grams else gram

    def _sketch(self, name: str, rows: Tensor) -> None:
        if name in self.blocks:
            self.block_sketch = rows if self.block_sketch is None else self.block_sketch + rows
        else:
            self.sketch = rows if self.sketch is None else self.sketch + rows


RULED = ("_Multiply", "_Stack", "_Lookup", "_Spread", "_Along", "_WatchedHead")
"""The graph nodes of our own rules."""


def weight_gram(delta: Tensor, a: Tensor, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
    """(N,T,o), (N,T,d) → dW = Σ_i dW_i (o,d) and K_ij = ⟨dW_i, dW_j⟩, with dW_i = Σ_t δ_it a_itᵀ."""
    if delta.is_cuda:
        from creditscope.microscope import routes  # it loads Triton, which takes a while

        return routes.weight_gram(delta, a)
    return materialise(delta, a, scratch or Scratch())


def joint_gram(waiting: Waiting, shape: tuple[int, ...]) -> Tensor | None:
    """The Gram of g_i = Σ_calls g_i^(c), less the part that was added when a tied head reported; None if it was all."""
    lookup = EmbeddingRows(*_joined(waiting.lookups)) if waiting.lookups else None
    delta, a = _joined(waiting.factors) if waiting.factors else (None, None)
    if waiting.dense is not None:
        # A mixture with explicit rows is rare: all rows are held.
        rows = waiting.dense
        if delta is not None and a is not None:
            rows = rows + torch.bmm(delta.transpose(1, 2), a).view_as(rows)
        if lookup is not None:
            whole = rows.new_zeros(len(rows), *shape)
            whole[:, lookup.seen] = lookup.slice(0, rows.shape[-1]).to(rows.dtype)
            rows = rows + whole
        return dense_gram(rows)
    head, gram = waiting.head, None
    if head is not None and lookup is not None and waiting.head_ids is not None:
        head = head[:, torch.isin(waiting.head_ids, lookup.seen)]  # only these look-ups got a gradient
    if delta is not None and a is not None:
        _, gram = weight_gram(delta, a)
        if lookup is not None:
            head = torch.bmm(delta[:, :, lookup.seen].transpose(1, 2), a)
    if lookup is not None:
        looked = lookup.gram(head)
        gram = looked if gram is None else gram + looked
    return gram


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.cat(some, dim=1) for some in zip(*pairs, strict=True)]


def _twice() -> CreditscopeError:
    return CreditscopeError("two backward passes ran inside one Microscope, so rows of different passes would be added "
                            "up; open one context for each forward and backward (gradients may accumulate over them)")
