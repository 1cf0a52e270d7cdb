"""Tensors made of parameters alone, and how rows are pulled back through them.

    D = h(p)        rows of D, (N, *D.shape)  →  rows of p: (∂h/∂p)ᵀ applied to each

Where h transposes, reshapes, casts, shifts or takes one matrix of a stack, its transpose is known in closed form and
factors of a row stay factors. Any other h is pulled back through autograd's own graph of D, once per rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError


class Key(NamedTuple):
    """A parameter, or one matrix of a stack of matrices: the unit whose rows are added up before products are taken."""

    name: str
    part: int | None = None


@dataclass(frozen=True, eq=False)
class ParameterSource:
    """A tensor D = h(p) made of the parameters `names`."""

    tensor: Tensor
    names: tuple[str, ...]
    key: Key | None  # the parameter (or part of one) of which it is a plain image; None where h is anything else
    shape: tuple[int, ...]  # the key's own shape; () where there is no key
    turned: bool = False  # whether the last two axes are swapped
    ids: Tensor | None = None
    """Where it holds rows of the key that were looked up, alike for all rollouts: their ids, flat."""
    padding: int = -1  # the id that gets no gradient
    precision: torch.dtype = torch.float64  # the coarsest precision between the parameters and this tensor
    node: Any = None  # the graph node of `tensor` when it was made: a later change in place gives it another

    @staticmethod
    def parameter(name: str, p: Tensor) -> ParameterSource:
        shape = tuple(getattr(p, "ds_shape", p.shape))  # while ZeRO-3 has emptied it, `ds_shape` is its shape
        return ParameterSource(p, (name,), Key(name), shape, precision=p.dtype)

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix of the key's own shape, or its transpose: factors of rows stay factors."""
        return (self.key is not None and self.ids is None and len(self.shape) == 2
                and tuple(self.tensor.shape) == self._own)

    @property
    def _own(self) -> tuple[int, ...]:
        return (*self.shape[:-2], *self.shape[:-3:-1]) if self.turned else self.shape

    def straight(self, rows: Tensor) -> Tensor:
        """(N, *tensor.shape) rows of a plain image → (N, *shape) rows of its key."""
        rows = rows.transpose(-1, -2) if self.turned else rows
        return rows.reshape(len(rows), *self.shape)

    def pull(self, rows: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(N, *tensor.shape) → name → (N, *shape), through the user's own graph of D."""
        if self.tensor.grad_fn is not self.node:
            raise CreditscopeError(f"a tensor made of {' and '.join(self.names)} was changed in place after its use, "
                                   f"so rows cannot return through it; write the change out of place")
        sought = [parameters[name] for name in self.names]
        # A checkpoint may run a forward inside, which has to be watched as the first one was.
        with _hooks_off([*sought, self.tensor]), torch._C._EnableTorchFunction():
            try:
                found: Sequence[Tensor | None] = torch.autograd.grad(self.tensor, sought, rows, retain_graph=True,
                                                                     allow_unused=True, is_grads_batched=True)
            except RuntimeError:  # an operation of h that has no batched form
                each = [torch.autograd.grad(self.tensor, sought, row, retain_graph=True, allow_unused=True)
                        for row in rows]
                found = [None if some[0] is None else torch.stack([g.to_dense() if g.is_sparse else g for g in some])
                         for some in zip(*each, strict=True)]
        return {name: g for name, g in zip(self.names, found, strict=True) if g is not None}


@contextmanager
def _hooks_off(tensors: Sequence[Tensor]) -> Iterator[None]:
    """The users' hooks on these tensors do not run: they are for the gradient, once, not for each row."""
    held = [(hooks, dict(hooks)) for t in tensors if (hooks := t._backward_hooks)]
    try:
        for hooks, _ in held:
            hooks.clear()
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


@cache
def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    return max((d for d in dtypes if d.is_floating_point), key=lambda d: torch.finfo(d).eps)


SAME, RESHAPE, TURN, SHIFT, SELECT = "same", "reshape", "turn", "shift", "select"


def torch_functions(names: str, *owners: Any, ends: Sequence[str] = ("",)) -> list[Any]:
    """Torch's functions of these names, by default of torch and Tensor; `ends` ("", "_") adds those in place."""
    found = [getattr(owner, name + end, None) for name in names.split() for owner in owners or (torch, Tensor)
             for end in ends]
    return [f for f in found if callable(f)]


IMAGES: dict[Any, str] = {
    **dict.fromkeys(torch_functions("to float double half bfloat16 type type_as contiguous clone cuda cpu"), SAME),
    **dict.fromkeys(torch_functions("view reshape flatten unflatten unsqueeze squeeze view_as reshape_as ravel"),
                    RESHAPE),
    **dict.fromkeys(torch_functions("t transpose swapaxes swapdims adjoint"), TURN),
    torch.Tensor.T.__get__: TURN, torch.Tensor.mT.__get__: TURN,  # type: ignore[attr-defined]
    **dict.fromkeys(torch_functions("add"), SHIFT),
    torch.Tensor.__getitem__: SELECT,
}
"""Torch's functions of one parameter whose transpose is known."""


def made(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor,
         of: Sequence[ParameterSource]) -> ParameterSource:
    """The source that `out` = func(...) of these sources and constants is."""
    names = tuple(dict.fromkeys(name for source in of for name in source.names))
    precision = coarsest(out.dtype, *(source.precision for source in of))
    general = ParameterSource(out, names, None, (), precision=precision, node=out.grad_fn)
    source = of[0]
    if len(of) > 1 or source.key is None or (args and args[0] is not source.tensor and IMAGES.get(func) != SHIFT):
        return general
    image = replace(source, tensor=out, precision=precision, node=out.grad_fn)
    before, after = tuple(source.tensor.shape), tuple(out.shape)
    kind = IMAGES.get(func)
    fine = {
        SAME: after == before,
        RESHAPE: out.numel() == source.tensor.numel() and not source.turned,
        SHIFT: after == before and not kwargs,
    }
    if kind in fine:
        return image if fine[kind] else general
    if source.ids is not None:
        return general
    if kind == TURN and before == source._own and len(before) >= 2 and _last_two(func, args[1:], kwargs, len(before)):
        return replace(image, turned=not source.turned)
    if kind == SELECT and before == source.shape and len(before) == 3 and not source.turned \
            and source.key.part is None and _is_number(args[1]):
        return replace(image, key=Key(source.key.name, int(args[1]) % before[0]), shape=before[1:])
    return general


def _is_number(index: Any) -> bool:
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype in (torch.int64, torch.int32)
    return isinstance(index, int) and not isinstance(index, bool)


def _last_two(func: Any, axes: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> bool:
    """Whether a call of TURN's functions swaps the last two axes of a tensor of so many."""
    given = [*axes, *kwargs.values()]
    if func == torch.Tensor.mT.__get__:  # type: ignore[attr-defined]
        return True
    if func == torch.Tensor.T.__get__:  # type: ignore[attr-defined]
        return dim == 2
    if not given:
        return dim == 2 or func in torch_functions("adjoint")
    return len(given) == 2 and {int(a) % dim for a in given} == {dim - 2, dim - 1}
