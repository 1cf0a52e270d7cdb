"""What the layers report during one backward pass, and how the reports of one parameter become its Gram.

A parameter used once is settled on the spot. One used several times (a tied head, a layer called twice) has rows
g_i = Σ_calls g_i^(c), whose products need all its calls: its factors wait until the pass is over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.microscope.gram import Lookup, Scratch, dense_gram, weight_gram
from creditscope.microscope.rows import Rows
from creditscope.microscope.sketch import Block, Sketcher

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def in_backward() -> bool:
    """Whether autograd is running in this thread: then a forward is a checkpoint being recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass
class Waiting:
    """The calls of one parameter that is used several times."""

    factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    lookups: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    dense: Tensor | None = None
    head: Tensor | None = None
    """(N, U, d) the rows of a tied head whose Gram is already counted, for the ids that were looked up."""
    head_ids: Tensor | None = None
    """(U,) those ids, sorted."""


class Recorder:
    """Collects (N, N) Grams and sketches by parameter name while a backward pass runs."""

    def __init__(self, owners: tuple[Tensor | None, Tensor | None], exact: bool, sketcher: Sketcher | None) -> None:
        self._owners, self.exact, self.sketcher = owners, exact, sketcher
        self._rows: Rows | None = None
        self.grams: dict[str, Tensor] = {}
        self.sketch: Tensor | None = None
        self.blocks: dict[str, Block] = {}
        """Parameters of which this rank holds a part (tensor parallel), and which part."""
        self.mesh: DeviceMesh | None = None
        """The ranks that hold the parts."""
        self.block_sketch: Tensor | None = None
        """The sketch of the parts, apart from `sketch`: only these add up over the ranks."""
        self.strays: list[tuple[str, Tensor]] = []
        self.mixing: list[tuple[str, Tensor]] = []
        self.calls: Counter[tuple[str, str]] = Counter()
        self.precision: dict[str, torch.dtype] = {}
        """The reports' precision, by parameter: those that reported are covered."""
        self._ids: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._waiting: defaultdict[str, Waiting] = defaultdict(Waiting)
        self._forward = self._backward = self._stale = False
        self.entered = self.entered_with_grad = self.closed = False
        self._scratch = Scratch()

    # -- the batch ----------------------------------------------------------------------------------------------------

    def meet(self, lead: tuple[int, ...], device: torch.device) -> None:
        """Learn the batch's leading axes from the model's input. One batch a context."""
        if not lead:
            raise CreditscopeError("the model was given one vector without an axis of rows; give a batch of one row")
        if self._rows is None:
            self._rows = Rows.of(lead, *self._owners, device)
        elif (self._rows.batch, self._rows.width) != (lead[0], lead[1] if len(lead) > 1 else None):
            raise CreditscopeError(f"the microscope saw a batch of shape {(self._rows.batch, self._rows.width)} and "
                                   f"then one of shape {lead}; open one context for each batch")

    def rows(self, x: Tensor, features: int = 1) -> Rows:
        """The batch's owners; where the model's own input was not seen, the first layer's input stands in for it."""
        if self._rows is None:
            self.meet(tuple(x.shape[: min(2, x.dim() - features)]), x.device)
        assert self._rows is not None
        return self._rows

    @property
    def count(self) -> int | None:
        return None if self._rows is None else self._rows.count

    @property
    def batch(self) -> int | None:
        return None if self._rows is None else self._rows.batch

    # -- the life of a pass -------------------------------------------------------------------------------------------

    def forward(self, kind: str, *names: str | None, ids: Tensor | None = None) -> None:
        """A layer is called. Checkpoints call it again inside the backward, which changes nothing."""
        if in_backward():
            return
        self._forward = True
        self._stale |= self._backward
        for name in names:
            if name is not None:
                self.calls[name, kind] += 1
                if ids is not None:
                    self._ids[name].append(ids)

    def backward(self) -> None:
        """A layer's gradient arrives."""
        if self.closed:
            raise CreditscopeError("backward ran after the Microscope was closed; call loss.backward() inside the with "
                                   "block that holds the forward pass")
        if self._stale:
            raise _twice()
        self._backward = True

    def once(self, ctx: object) -> None:
        """The same forward must not be taken back twice (retain_graph)."""
        if getattr(ctx, "spent", False):
            raise _twice()
        ctx.spent = True  # type: ignore[attr-defined]
        self.backward()

    @property
    def seen(self) -> tuple[bool, bool]:
        """Whether a forward and a backward were seen."""
        return self._forward, self._backward

    # -- reports: each returns the gradient that goes on to .grad -----------------------------------------------------

    def matrix(self, name: str, delta: Tensor, a: Tensor) -> Tensor:
        """dW_i = Σ_t δ_it a_itᵀ, given (N, T, o) and (N, T, d)."""
        self.precision[name] = a.dtype
        if self.sketcher is not None:
            self._sketch(name, self.sketcher.matrix(name, delta, a, self.blocks.get(name)))
        lookups = self.calls[name, "lookup"]
        alone = self.calls[name, "matrix"] <= 1 and self.calls[name, "dense"] == 0
        if not self.exact or not alone:
            if self.exact:
                self._waiting[name].factors.append((delta, a))
            return delta.flatten(0, 1).t() @ a.flatten(0, 1)
        dw, gram = weight_gram(delta, a, self._scratch)
        self._add(name, gram)
        if lookups:
            seen = torch.unique(torch.cat([ids.flatten() for ids in self._ids[name]]))
            self._waiting[name].head = torch.bmm(delta[:, :, seen].transpose(1, 2), a)
            self._waiting[name].head_ids = seen
        return dw

    def lookup(self, name: str, ids: Tensor, delta: Tensor) -> None:
        """Row ids_it of rollout i gets δ_it, given (N, T) and (N, T, d)."""
        self.precision.setdefault(name, delta.dtype)
        if self.sketcher is not None:
            self._sketch(name, self.sketcher.rows(name, ids, delta, self.heights[name], self.blocks.get(name)))
        if not self.exact:
            return
        if sum(self.calls[name, kind] for kind in ("matrix", "lookup", "dense")) > 1:
            self._waiting[name].lookups.append((ids, delta))
        else:
            self._add(name, Lookup(ids, delta).gram())

    def dense(self, name: str, g: Tensor) -> Tensor:
        """Explicit rows (N, *shape)."""
        self.precision[name] = g.dtype
        if self.sketcher is not None:
            self._sketch(name, self.sketcher.dense(name, g, self.blocks.get(name)))
        if self.exact:
            if sum(self.calls[name, kind] for kind in ("matrix", "lookup", "dense")) > 1:
                held = self._waiting[name].dense
                self._waiting[name].dense = g if held is None else held + g
            else:
                self._add(name, dense_gram(g))
        return g.sum(dim=0)

    def stray(self, name: str, total: Tensor | None) -> None:
        if total is not None:
            self.strays.append((name, total))

    heights: dict[str, int]
    """Rows of each looked-up parameter."""

    # -- the end ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self) -> None:
        """Take the products of the parameters that had to wait."""
        for name, waiting in self._waiting.items():
            gram = joint_gram(waiting, self.heights.get(name, 0))
            if gram is not None:
                self._add(name, gram)
        self._waiting.clear()

    def _add(self, name: str, gram: Tensor) -> None:
        self.grams[name] = self.grams[name] + gram if name in self.grams else gram

    def _sketch(self, name: str, rows: Tensor) -> None:
        if name in self.blocks:
            self.block_sketch = rows if self.block_sketch is None else self.block_sketch + rows
        else:
            self.sketch = rows if self.sketch is None else self.sketch + rows


def joint_gram(waiting: Waiting, height: int) -> Tensor | None:
    """The Gram of g_i = Σ_calls g_i^(c), less what was counted when a tied head reported; None where that was all."""
    lookup = Lookup(torch.cat([ids for ids, _ in waiting.lookups], dim=1),
                    torch.cat([delta for _, delta in waiting.lookups], dim=1)) if waiting.lookups else None
    delta = torch.cat([delta for delta, _ in waiting.factors], dim=1) if waiting.factors else None
    a = torch.cat([a for _, a in waiting.factors], dim=1) if waiting.factors else None
    if waiting.dense is not None:
        # A mixture with explicit rows is rare: hold all rows.
        rows = waiting.dense
        if delta is not None and a is not None:
            rows = rows + torch.bmm(delta.transpose(1, 2), a).view_as(rows)
        if lookup is not None:
            whole = rows.new_zeros(len(rows), height, rows.shape[-1])
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


def _twice() -> CreditscopeError:
    return CreditscopeError("two backward passes ran inside one Microscope, so rows of different passes would be added "
                            "up; open one context for each forward and backward (gradients may accumulate over them)")
