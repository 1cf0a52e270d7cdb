"""Which rollout each vector of an activation belongs to, followed through torch's functions.

An activation descends from what the model was given. Most have the usual layout, (B, ...) or (B·T, ...), in the order
of the batch. Functions that are known to keep it are listed here, by what they do to axes; those that pick, turn, cut,
join or scatter vectors do the same to an array of owners; after any other function nothing is known, and a parameter
that meets the result is refused. Nothing is told by the shape of a tensor alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from creditscope.microscope.rows import Rows


class Usual:
    """The layout of the batch."""


USUAL = Usual()
Layout = Usual | Tensor | None
"""The usual one; the rollout of each unit, over as few leading axes as tell it, on the CPU; None where unknown."""


def _named(names: str, *owners: Any) -> set[Any]:
    found = {getattr(owner, name + end) for name in names.split() for owner in owners or (torch, Tensor, F)
             for end in ("", "_") if hasattr(owner, name + end)}
    return {f for f in found if callable(f)}


ELEMENTWISE = _named("""abs absolute neg negative positive exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square
    reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma
    sign sgn round floor ceil trunc fix frac nan_to_num relu relu6 gelu silu mish softplus softsign elu celu selu
    leaky_relu hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink threshold rrelu logsigmoid log_sigmoid
    sinc isnan isinf isfinite logical_not bitwise_not to float double half bfloat16 long int short bool type type_as
    contiguous clone detach alias cuda cpu requires_grad_ zero_ fill_ fill data dropout alpha_dropout feature_dropout
    add sub subtract mul multiply div divide true_divide floor_divide rsub pow float_power remainder fmod maximum
    minimum fmax fmin where lerp addcmul addcdiv atan2 arctan2 logaddexp logaddexp2 xlogy hypot copysign ldexp clamp
    clip clamp_min clamp_max masked_fill eq ne lt gt le ge greater less greater_equal less_equal not_equal logical_and
    logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift heaviside
    mse_loss l1_loss smooth_l1_loss retain_grad register_hook polar isin copy_
    fake_quantize_per_tensor_affine""") | {Tensor.__invert__, Tensor.data.__get__}  # type: ignore[attr-defined]
ELEMENTWISE |= _named(" ".join(f"__{way}{name}__" for way in ("", "r", "i") for name in (
    "add", "sub", "mul", "div", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "eq", "ne", "lt", "gt", "le",
    "ge", "neg", "lshift", "rshift")), Tensor)
"""Each entry of the result comes from the entries at its place, with broadcasting."""

_AXIS = {1: """softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin mean sum nanmean nansum amax amin
    max min aminmax var std var_mean std_mean prod logsumexp median argmax argmin any all sort argsort select narrow
    gather scatter scatter_add scatter_reduce index_select unsqueeze unbind unflatten glu diff cosine_similarity
    count_nonzero""",
         2: """topk kthvalue split chunk tensor_split split_with_sizes roll repeat_interleave norm normalize renorm
    take_along_dim"""}
ALONG = {func: place for place, names in _AXIS.items() for func in _named(names)}
"""Functions along the axes that this argument names (`dim`), or along all: other axes keep their order."""
ALONG[Tensor.unfold] = 1
SWAPS = _named("transpose swapaxes swapdims permute movedim moveaxis t adjoint") \
    | {Tensor.T.__get__, Tensor.mT.__get__, Tensor.mH.__get__, Tensor.H.__get__}  # type: ignore[attr-defined]
RESHAPES = _named("reshape view flatten ravel view_as reshape_as")
JOINS = _named("cat concat concatenate")
PICKS = {Tensor.__getitem__}
EXTREMES = {torch.max, torch.min, Tensor.max, Tensor.min}
LOOKUPS = {Tensor.__getitem__, torch.embedding, F.embedding, torch.index_select, Tensor.index_select}
PUTS = _named("index_add index_copy")
CUTS = _named("split chunk tensor_split split_with_sizes narrow select index_select unbind flip roll repeat_interleave")
"""Functions that move whole vectors along axis 0: the same call on the owners gives the owners of its result."""
LAST = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, torch.view_as_complex, torch.view_as_real}
MATRICES = {torch.linalg.solve_triangular, torch.linalg.inv, torch.linalg.solve, torch.linalg.cholesky, torch.inverse,
            torch.matrix_exp, torch.linalg.matrix_exp}
"""Functions of the last two axes."""
PRODUCTS = _named("matmul bmm baddbmm mm addmm") | {Tensor.__matmul__, Tensor.__rmatmul__}
FIRST = {F.linear, F.scaled_dot_product_attention, F.group_norm, torch.group_norm, F.conv1d, F.conv2d, torch.conv1d,
         torch.conv2d, F.conv_transpose1d, F.unfold, F.avg_pool1d, F.max_pool1d, F.interpolate, F.bilinear, F.pad,
         torch._C._nn.pad, F.one_hot, F.gumbel_softmax, torch.embedding, F.multi_head_attention_forward} \
    | _named("tril triu expand expand_as broadcast_to repeat tile")
"""Functions of the leading axes of their first argument, decided one by one in `_first`."""
UNOWNED = -2
"""The owner of entries that were made of constants."""
FACTORIES = _named("zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones "
                   "new_empty new_full new_tensor")


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Tensor]:
    """The tensors among a call's arguments, also in lists and tuples: pytree's way costs as much as the call itself.

    >>> len(tensors_of((torch.ones(1), [torch.ones(1), (torch.ones(1), 2)]), {"dim": 0}))
    3
    """
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) in (list, tuple):
            found += tensors_of(x)
    return found


def usual_owner(rows: Rows, x: Tensor) -> Tensor | None:
    """The owners of a tensor in the usual layout, over its leading axes; None where it has no such axes."""
    if x.dim() == 0:
        return None
    owners, tokens = rows.owners.cpu(), rows.batch * (rows.width or 1)
    if owners.dim() == 2:  # by position
        if x.dim() > 1 and x.shape[:2] == owners.shape:
            return owners
        return owners.reshape(-1) if x.shape[0] == tokens else None
    if x.shape[0] == rows.batch:
        return owners
    return owners.repeat_interleave(rows.width or 1) if x.shape[0] == tokens else None


def lean(owner: Tensor) -> Tensor:
    """Without trailing axes along which nothing changes.

    >>> lean(torch.tensor([[0, 0], [1, 1]])).tolist()
    [0, 1]
    """
    while owner.dim() > 1 and owner.shape[-1] > 0 and (one := _one(owner, owner.dim() - 1)) is not None:
        owner = one
    return owner


def _one(owner: Tensor, axis: int) -> Tensor | None:
    """The owners without an axis along which they do not change; None where they do. Constants take any owner."""
    one = owner.amax(dim=axis)
    same = (owner == one.unsqueeze(axis)) | (owner == UNOWNED)
    return one if bool(same.all()) else None


def settled(rows: Rows, owner: Layout, y: Tensor) -> Layout:
    """The usual layout where these owners are those of the usual layout."""
    if not isinstance(owner, Tensor):
        return owner
    owner = lean(owner)
    usual = usual_owner(rows, y)
    if usual is None:
        return owner
    usual = lean(usual)
    return USUAL if owner.shape == usual.shape and torch.equal(owner, usual) else owner


def stays(func: Any, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether a result surely has the usual layout, where its arguments have it and rows are the first axis: fast."""
    quick = _QUICK.get(func)
    if quick is None or y.dim() == 0:
        return False
    size = y.shape[0]
    for t in given:
        if t.dim() == 0 or t.shape[0] != size:
            return False
    return quick(func, args, kwargs, y, given)


Quick = Callable[[Any, Sequence[Any], dict[str, Any], Tensor, Sequence[Tensor]], bool]


def _stay_aligned(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    return all(t.dim() == y.dim() for t in given)


def _stay_always(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    return True


def _stay_looked_up(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    if len(args) > 1 and args[0] is not given[0]:  # a table of constants or parameters, by ids
        return len(given) == 1
    if func is not Tensor.__getitem__:
        return func is not torch.embedding and _stay_along(func, args, kwargs, y, given)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if index and index[0] is Ellipsis:
        return len(index) <= args[0].dim() and all(isinstance(i, slice) for i in index[1:])
    return bool(index) and isinstance(index[0], slice) and index[0] == slice(None) \
        and all(isinstance(i, slice | int) for i in index)


def _stay_joined(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return bool(axis % y.dim()) and _stay_aligned(func, args, kwargs, y, given)


def _stay_multiplied(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    return all(t.dim() > 2 and t.dim() == y.dim() for t in given)


def _stay_swapped(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    return len(args) == 3 and bool(args[1] % y.dim() and args[2] % y.dim())


def _stay_along(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    place = ALONG[func]
    axis = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else _default(func)))
    if not isinstance(axis, int) or isinstance(axis, bool) or not args or args[0] is not given[0]:
        return False
    wide = max(given[0].dim(), y.dim())
    return bool(axis % wide) and all(t.dim() == given[0].dim() for t in given)


_QUICK: dict[Any, Quick] = {
    **dict.fromkeys(ALONG, _stay_along), **dict.fromkeys(ELEMENTWISE, _stay_aligned),
    **dict.fromkeys(RESHAPES, _stay_always), **dict.fromkeys(LAST, _stay_always),
    **dict.fromkeys([F.linear, F.scaled_dot_product_attention], _stay_always), **dict.fromkeys(JOINS, _stay_joined),
    **dict.fromkeys([torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm, Tensor.__matmul__], _stay_multiplied),
    **dict.fromkeys([torch.transpose, Tensor.transpose], _stay_swapped),
    **dict.fromkeys([Tensor.__getitem__, torch.embedding, torch.index_select, Tensor.index_select], _stay_looked_up)}


def after(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor], rows: Rows,
          layout_of: Any) -> list[Layout]:
    """The layouts of a call's results; `layout_of(x)` is that of an argument, False for one that belongs to no row."""
    given = [x for x in tensors_of(args, kwargs) if layout_of(x) is not False]
    if any(layout_of(x) is None for x in given):
        return [None] * len(results)
    owners = {id(x): usual_owner(rows, x) if layout_of(x) is USUAL else layout_of(x) for x in given}
    given = [x for x in given if owners[id(x)] is not None or x.requires_grad]  # a mask over pairs of packed positions
    owners = {id(x): owners[id(x)] for x in given}
    if not given:
        return [None] * len(results)
    if any(owners[id(x)] is None and x.dim() > 0 for x in given):
        return [None] * len(results)
    try:
        found = _after(func, args, kwargs, results, given, owners, rows)
    except (RuntimeError, IndexError, TypeError, ValueError, KeyError):
        found = [None] * len(results)
    return [settled(rows, owner, y) for owner, y in zip(found, results, strict=True)]


def _on_front(owner: Tensor, x: Tensor) -> Tensor:
    """Owners with all axes of x, of length 1 where they do not depend on them."""
    return owner.reshape(*owner.shape, *[1] * (x.dim() - owner.dim()))


def _front(full: Tensor, axes: int) -> Tensor:
    """The first axes alone, of an array that does not depend on the others."""
    return full.flatten(axes).select(-1, 0) if axes < full.dim() else full


def _after(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor], given: list[Tensor],
           owners: dict[int, Any], rows: Rows) -> list[Layout]:
    x = args[0] if args and id(args[0]) in owners else given[0]
    owner = owners.get(id(x))
    table = (args[1] if func is F.embedding else args[0]) if len(args) > 1 else None
    if func in LOOKUPS and id(table) not in owners:  # rows of a table, by ids that belong to rows
        return [owner if owner is not None and len(given) == 1 and _leads(owner, y) else None for y in results]
    if func is F.embedding:
        return [None] * len(results)
    if func in ELEMENTWISE:
        return [_merged([(owners[id(t)], t) for t in given], y) for y in results]
    if func in PUTS:
        return [_put(args, kwargs, owners, rows)]
    if func in JOINS:
        return [_joined(args, kwargs, owners, results[0], rows)]
    if func is torch.stack:
        axis = _axes(kwargs.get("dim", args[1] if len(args) > 1 else 0), results[0].dim())[0]
        wide = max(axis, *(o.dim() for o in owners.values()))
        each = [_front(_on_front(owners[id(t)], t), wide).expand(t.shape[:wide]) for t in args[0]]
        return [torch.stack(each, dim=axis)]
    if func is torch.einsum or getattr(func, "__name__", "") == "einsum":
        return [_einsum(args, owners, y) for y in results]
    if func in EXTREMES and len(args) == 2 and isinstance(args[1], Tensor):
        return [_merged([(owners[id(t)], t) for t in given], y) for y in results]
    if func in PRODUCTS:
        return [_product(func, args, kwargs, owners, y, rows.by_position) for y in results]
    if owner is None or not isinstance(x, Tensor):
        return [None] * len(results)
    if getattr(func, "__name__", "").strip("_") == "grouped_mm" and len(given) == 1:
        return [owner if _leads(owner, y) else None for y in results]
    if func in PICKS:
        return [_picked(args[1], owner, x, y) for y in results]
    if func in RESHAPES:
        return [reshaped(owner, x, y) for y in results]
    if func in SWAPS:
        return [_swapped(func, args, kwargs, owner, x, y) for y in results]
    if func is Tensor.squeeze or func is torch.squeeze:
        return [reshaped(owner, x, y) for y in results]
    if func in ALONG or func in CUTS:
        return _along(func, args, kwargs, owner, x, results)
    if func in MATRICES:
        batched = all(owners[id(t)].dim() <= t.dim() - 2 for t in given)
        return [_merged([(owners[id(t)], t) for t in given], y) if batched else None for y in results]
    if func in LAST:
        return [owner if _leads(owner, y) else None for y in results]
    if func in FIRST:
        return [_first(func, args, kwargs, owner, x, y, [(t, owners[id(t)]) for t in given]) for y in results]
    return [None] * len(results)


def _leads(owner: Tensor, y: Tensor) -> bool:
    return y.dim() >= owner.dim() and tuple(y.shape[: owner.dim()]) == tuple(owner.shape)


def _axes(axes: Any, dim: int) -> list[int]:
    if isinstance(axes, int) and not isinstance(axes, bool):
        axes = [axes]
    return [a % dim for a in axes] if isinstance(axes, list | tuple | torch.Size) and axes else [*range(dim)]


def _aligned(owner: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """Owners of x over the leading axes of y, to which x is broadcast; None where they would be other axes."""
    if x.dim() == y.dim() and _leads(owner, y):
        return owner
    if x.dim() > y.dim():
        return None
    full = owner.reshape(*[1] * (y.dim() - x.dim()), *owner.shape)
    return full.expand(y.shape[: full.dim()]) if full.dim() <= y.dim() else None


def _merged(parts: list[tuple[Any, Tensor]], y: Tensor) -> Layout:
    """The owners that tensors agree on which meet entry by entry; constants agree with all."""
    found: Tensor | None = None
    for owner, x in parts:
        if x.dim() == 0 and owner is None:
            return None  # a scalar made of all rows
        mine = None if owner is None else _aligned(owner, x, y)
        if mine is None:
            return None
        if found is None:
            found = mine
            continue
        if found.dim() != mine.dim():
            axes = max(found.dim(), mine.dim())
            found, mine = (o.reshape(*o.shape, *[1] * (axes - o.dim())).expand(y.shape[:axes]) for o in (found, mine))
        if not bool(((found == mine) | (found == UNOWNED) | (mine == UNOWNED)).all()):
            return None
        found = torch.maximum(found, mine)
    return found


def _picked(index: Any, owner: Tensor, x: Tensor, y: Tensor) -> Layout:
    """x[index]: owners are picked by the same index."""
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(torch.tensor(i) if isinstance(i, list) else i for i in index)
    used = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else i is not None and i is not Ellipsis
               for i in index)
    if any(i is Ellipsis for i in index):
        at = next(k for k, i in enumerate(index) if i is Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.dim() - used), *index[at + 1:])
    while index and isinstance(index[-1], slice) and index[-1] == slice(None):
        index = index[:-1]
    used = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else i is not None for i in index)
    axes = max(owner.dim(), used)  # the others are features
    full = _front(_on_front(owner, x), axes).expand(x.shape[:axes])
    found = full[tuple(i.cpu() if isinstance(i, Tensor) else i for i in index)]
    return found if found.dim() == y.dim() - (x.dim() - axes) and _leads(found, y) and found.dim() else None


def reshaped(owner: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """Owners of the vectors of y, the same numbers as x in the same order; None where one has several owners.

    >>> reshaped(torch.tensor([0, 0, 1, 1]), torch.zeros(4, 3), torch.zeros(2, 6)).tolist()
    [0, 1]
    """
    if y.dim() == 0 or y.numel() == 0 or y.numel() != x.numel():
        return None
    unit, vector = x.numel() // owner.numel(), y.shape[-1] if y.dim() > 1 else 1
    lead = y.shape[:-1] if y.dim() > 1 else y.shape
    if unit % vector == 0:
        return owner.flatten().repeat_interleave(unit // vector).reshape(lead)
    one = _one(owner.flatten().reshape(-1, vector // unit), 1) if vector % unit == 0 else None
    return None if one is None else one.reshape(lead)


def _swapped(func: Any, args: Sequence[Any], kwargs: dict[str, Any], owner: Tensor, x: Tensor, y: Tensor) -> Layout:
    """Owners move with their axes."""
    # An array whose axes all differ in length shows where each of them went.
    probe = torch.empty(*range(2, 2 + x.dim()), device="meta")
    order = [n - 2 for n in func(probe, *args[1:], **kwargs).shape]
    axes = 1 + max(order.index(k) for k in range(owner.dim()))
    return _front(_on_front(owner, x).permute(order), axes).expand(y.shape[:axes])


def _along(func: Any, args: Sequence[Any], kwargs: dict[str, Any], owner: Tensor, x: Tensor,
           results: Sequence[Tensor]) -> list[Layout]:
    """Functions along some axes. Along axes of the owners, only those that move whole vectors are followed."""
    place = ALONG.get(func, 1)
    named = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), None)
    given = named if named is not None else args[place] if len(args) > place else _default(func)
    if isinstance(given, Tensor):  # max(x, y)
        return [None] * len(results)
    name = getattr(func, "__name__", "")
    if name == "unsqueeze":
        axis = int(given or 0) % (x.dim() + 1)
        return [owner.unsqueeze(axis) if axis < owner.dim() else owner]
    if name == "roll" and given is None:
        return [None] * len(results)
    axes = _axes(given, x.dim()) if name != "flip" else _axes(args[1:] if len(args) > 2 else args[1], x.dim())
    if all(a >= owner.dim() for a in axes):
        return [owner if _leads(owner, y) else None for y in results]
    if func in CUTS:
        more, other = pytree.tree_map_only(Tensor, Tensor.cpu, (tuple(args[1:]), dict(kwargs)))
        return list(pytree.tree_leaves(func(_on_front(owner, x), *more, **other)))
    return [_without(owner, axes, x, y) for y in results]


def _default(func: Any) -> int | None:
    """The axis along which a function works where none is named."""
    return {"split": 0, "chunk": 0, "tensor_split": 0, "split_with_sizes": 0, "unbind": 0, "topk": -1, "sort": -1,
            "argsort": -1, "kthvalue": -1, "glu": -1, "normalize": 1, "diff": -1, "cosine_similarity": 1}.get(
                getattr(func, "__name__", ""))


def _without(owner: Tensor, axes: list[int], x: Tensor, y: Tensor) -> Layout:
    """Owners after a sum or the like; None where it brings vectors of several rollouts together."""
    for axis in sorted((a for a in axes if a < owner.dim()), reverse=True):
        one = _one(owner, axis) if owner.shape[axis] else None
        if one is None:
            return None
        owner = owner if y.shape == x.shape else one.unsqueeze(axis) if y.dim() == x.dim() else one
    return owner if owner.dim() and _leads(owner, y) else None


def _joined(args: Sequence[Any], kwargs: dict[str, Any], owners: dict[int, Any], y: Tensor, rows: Rows) -> Layout:
    parts = [t for t in args[0] if t.numel()]
    axis = _axes(kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)), y.dim())[0]
    held = [owners.get(id(t)) for t in parts]
    known = [o for o in held if o is not None]
    if all(axis >= o.dim() for o in known):  # constants beside rows take their owners
        return _merged([(o, t.narrow(axis, 0, 1)) for o, t in zip(held, parts, strict=True) if o is not None],
                       y.narrow(axis, 0, 1))
    axes = max(*(o.dim() for o in known), axis + 1)
    full = [torch.full(t.shape[:axes], UNOWNED) if o is None else
            o.reshape(*o.shape, *[1] * (axes - o.dim())).expand(t.shape[:axes])
            for o, t in zip(held, parts, strict=True)]
    return torch.cat(full, dim=axis)


def _put(args: Sequence[Any], kwargs: dict[str, Any], owners: dict[int, Any], rows: Rows) -> Layout:
    """index_add and index_copy along axis 0: each place belongs to whom its vectors came from."""
    into, axis, index, source = args[:4]
    came = owners.get(id(source))
    if axis % into.dim() != 0 or came is None or came.dim() != 1:
        return None
    held = owners.get(id(into))
    held = torch.full((len(into),), UNOWNED) if held is None else held
    if held.dim() != 1:
        return None
    index = index.cpu()
    new = held.clone()
    new[index] = came
    fits = (new[index] == came) & ((held[index] == UNOWNED) | (held[index] == came))
    return new if bool(fits.all()) else None


def put_in(into: Tensor, index: Any, value: Tensor, held: Tensor | None, came: Tensor) -> Layout:
    """into[index] = value, in place: owners of what was there (None for constants) and of what came."""
    whole = torch.full(into.shape, UNOWNED) if held is None else \
        held.reshape(*held.shape, *[1] * (into.dim() - held.dim())).expand(into.shape).clone()
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(i.cpu() if isinstance(i, Tensor) else i for i in index)
    place = whole[index]
    new = came.reshape(*came.shape, *[1] * (value.dim() - came.dim())).expand(value.shape).expand(place.shape)
    if not bool(((place == UNOWNED) | (place == new)).all()):
        return None
    whole[index] = new
    return whole if bool((whole[index] == new).all()) else None


def _einsum(args: Sequence[Any], owners: dict[int, Any], y: Tensor) -> Layout:
    """Rows stay rows where all activations and the result name them by the same letters, in front."""
    equation, *operands = args
    operands = [*operands[0]] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    sides = equation.replace(" ", "").split("->")
    letters, out = sides[0].split(","), sides[1]
    found: Tensor | None = None
    for term, x in zip(letters, operands, strict=True):
        owner = owners.get(id(x))
        if owner is None:
            continue
        named = term[: owner.dim()]
        for axis in reversed(range(len(named))):
            if named[axis] not in out:  # summed over: it must not tell rollouts apart
                one = _one(owner, axis) if owner.dim() > 1 else None
                if one is None:
                    return None
                owner, named = one, named[:axis] + named[axis + 1:]
        order = [out.index(c) for c in named]
        axes = 1 + max(order)
        shape = [owner.shape[order.index(k)] if k in order else 1 for k in range(axes)]
        sorted_axes = sorted(range(len(order)), key=lambda k: order[k])
        mine = lean(owner.permute(sorted_axes).reshape(shape).expand(y.shape[:axes]))
        if found is not None and not (found.shape == mine.shape and torch.equal(found, mine)):
            return None
        found = mine
    return found


def _product(func: Any, args: Sequence[Any], kwargs: dict[str, Any], owners: dict[int, Any], y: Tensor,
             packed: bool) -> Layout:
    """a @ b: b's axis before the last is summed over; all leading axes stay.

    In packed rows attention multiplies positions of several rollouts, and its mask takes them out again: the product
    then belongs to a's positions.
    """
    name = getattr(func, "__name__", "")
    args = [*args, *(kwargs[key] for key in ("input", "other", "batch1", "batch2", "mat1", "mat2") if key in kwargs)]
    a, b = args[1:3] if "add" in name else (args[1], args[0]) if name == "__rmatmul__" else args[:2]
    left, right = owners.get(id(a)), owners.get(id(b))
    if "add" in name and id(args[0]) in owners and _aligned(owners[id(args[0])], args[0], y) is None:
        return None
    parts: list[tuple[Any, Tensor]] = []
    if left is not None:
        if a.dim() < 2 or left.dim() >= a.dim():
            return None
        full = a.select(-1, 0).unsqueeze(-1)
        parts.append((left, full if a.dim() == y.dim() else full.reshape(*[1] * (y.dim() - a.dim()), *full.shape)))
    if right is not None and not (packed and left is not None and b.dim() > 2):
        if b.dim() < 3 or right.dim() > b.dim() - 2:
            return None
        parts.append((right, b.select(-2, 0).unsqueeze(-2) if b.dim() == y.dim() else b))
    return _merged(parts, y)


def _first(func: Any, args: Sequence[Any], kwargs: dict[str, Any], owner: Tensor, x: Tensor, y: Tensor,
           given: list[tuple[Tensor, Tensor]]) -> Layout:
    """Functions whose results keep the leading axes of their first argument, if they have them."""
    name = getattr(func, "__name__", "")
    if name in ("tril", "triu") and owner.dim() > x.dim() - 2:
        return None
    if name in ("expand", "expand_as", "broadcast_to"):
        return _aligned(owner, x, y)
    if name in ("repeat", "tile"):
        found: Tensor = func(_on_front(owner, x), *args[1:], **kwargs)
        return found
    if name == "pad":
        amounts = args[1] if len(args) > 1 else kwargs["pad"]
        if any(amounts[2 * (x.dim() - owner.dim()):]):
            return None
    if name in ("linear", "embedding") and any(t is not x for t, _ in given):
        return None
    # Their batch is the first axis; positions are mixed or moved by some of them.
    if name not in ("linear", "one_hot", "gumbel_softmax", "embedding", "scaled_dot_product_attention", "pad",
                    "bilinear") and owner.dim() > 1:
        return None
    if any(o.dim() == owner.dim() == 1 and not torch.equal(o, owner) for _, o in given):
        return None
    return owner if _leads(owner, y) else None
