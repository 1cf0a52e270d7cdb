"""Which rollout each vector of an activation belongs to, followed through torch's functions.

Most activations have the usual layout, (B, ...) or (B·T, ...), in the order of the batch. `MOVES` has a row per
function: what the function does to the array of owners, and when a result surely has the usual layout. After any other
function nothing is known, and a parameter that meets the result is refused. The shape of a tensor alone never decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from creditscope.microscope.owners import (
    UNOWNED,
    USUAL,
    Layout,
    aligned,
    axes_of,
    front,
    leads,
    lean,
    merged,
    on_front,
    reshaped,
    settled,
    spread_owners,
    usual_owner,
    without_axis,
)
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sources import torch_functions


def _named(names: str, *owners: Any) -> set[Any]:
    return set(torch_functions(names, *(owners or (torch, Tensor, F)), ends=("", "_")))


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
EXTREMES = {torch.max, torch.min, Tensor.max, Tensor.min}
INDEXED = {Tensor.__getitem__, torch.embedding, torch.index_select, Tensor.index_select}
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
FACTORIES = _named("zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones "
                   "new_empty new_full new_tensor")

_AXIS_OF = {"split": 0, "chunk": 0, "tensor_split": 0, "split_with_sizes": 0, "unbind": 0, "topk": -1, "sort": -1,
            "argsort": -1, "kthvalue": -1, "glu": -1, "normalize": 1, "diff": -1, "cosine_similarity": 1}
"""The axis along which a function works where none is named."""


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Tensor]:
    """The tensors among a call's arguments, also in lists and tuples; pytree takes as long as the call itself."""
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) in (list, tuple):
            found += tensors_of(x)
    return found


@dataclass(frozen=True, eq=False)
class Moved:
    """One call of activations whose owners are known."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[Tensor]
    given: list[Tensor]  # the arguments that belong to rows
    owners: dict[int, Any]  # by identity, the owners of each of them; None for a scalar
    packed: bool  # whether owners are named for each position of packed rows

    @property
    def name(self) -> str:
        return str(getattr(self.func, "__name__", ""))

    @property
    def x(self) -> Tensor:
        """The first argument where it belongs to rows, else the first that does."""
        return self.args[0] if self.args and id(self.args[0]) in self.owners else self.given[0]

    @property
    def owner(self) -> Tensor:
        found = self.owners[id(self.x)]
        if found is None:
            raise ValueError("a scalar has no owner")
        return found  # type: ignore[no-any-return]

    @property
    def parts(self) -> list[tuple[Any, Tensor]]:
        return [(self.owners[id(t)], t) for t in self.given]

    def option(self, place: int, *names: str, default: Any = None) -> Any:
        named = next((self.kwargs[name] for name in names if name in self.kwargs), None)
        return named if named is not None else self.args[place] if len(self.args) > place else default


Rule = Callable[[Moved], list[Layout]]


def _each(rule: Callable[[Moved, Tensor], Layout]) -> Rule:
    return lambda call: [rule(call, y) for y in call.results]


def _merge(call: Moved, y: Tensor) -> Layout:
    return merged(call.parts, y)


def _keep(call: Moved, y: Tensor) -> Layout:
    return call.owner if leads(call.owner, y) else None


def _reshape(call: Moved, y: Tensor) -> Layout:
    return reshaped(call.owner, call.x, y)


def _grouped(call: Moved, y: Tensor) -> Layout:
    """Vectors sorted by experts, times matrices that belong to no row."""
    return _keep(call, y) if len(call.given) == 1 else None


def _of_matrices(call: Moved, y: Tensor) -> Layout:
    return merged(call.parts, y) if all(o.dim() <= t.dim() - 2 for o, t in call.parts) else None


def _extreme(call: Moved) -> list[Layout]:
    both = len(call.args) == 2 and isinstance(call.args[1], Tensor)
    return _each(_merge)(call) if both else _along(call)


def _look_up(call: Moved) -> list[Layout]:
    """Rows of a table, by ids that belong to rows; where the table itself has rows, its own rule."""
    table = (call.args[1] if call.func is F.embedding else call.args[0]) if len(call.args) > 1 else None
    if id(table) not in call.owners:
        return _each(_grouped)(call)
    if call.func is Tensor.__getitem__:
        return _each(_pick)(call)
    if call.func is F.embedding:
        return [None] * len(call.results)
    return _each(_first)(call) if call.func is torch.embedding else _along(call)


def _stack(call: Moved, y: Tensor) -> Layout:
    axis = axes_of(call.option(1, "dim", default=0), y.dim())[0]
    wide = max(axis, *(o.dim() for o in call.owners.values()))
    each = [front(on_front(call.owners[id(t)], t), wide).expand(t.shape[:wide]) for t in call.args[0]]
    return torch.stack(each, dim=axis)


def _pick(call: Moved, y: Tensor) -> Layout:
    """x[index]: owners are picked by the same index."""
    x, owner, index = call.x, call.owner, call.args[1]
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
    full = front(on_front(owner, x), axes).expand(x.shape[:axes])
    found = full[tuple(i.cpu() if isinstance(i, Tensor) else i for i in index)]
    return found if found.dim() == y.dim() - (x.dim() - axes) and leads(found, y) and found.dim() else None


def _swap(call: Moved, y: Tensor) -> Layout:
    # The call on an array whose axes all differ in length gives the order of the axes.
    probe = torch.empty(*range(2, 2 + call.x.dim()), device="meta")
    order = [n - 2 for n in call.func(probe, *call.args[1:], **call.kwargs).shape]
    axes = 1 + max(order.index(k) for k in range(call.owner.dim()))
    return front(on_front(call.owner, call.x).permute(order), axes).expand(y.shape[:axes])


def _along(call: Moved) -> list[Layout]:
    """Functions along some axes. Along axes of the owners, only those that move whole vectors are followed."""
    func, args, x, owner, results, name = call.func, call.args, call.x, call.owner, call.results, call.name
    given = call.option(ALONG.get(func, 1), "dim", "dims", "axis", default=_AXIS_OF.get(name))
    if isinstance(given, Tensor):  # max(x, y)
        return [None] * len(results)
    if name == "unsqueeze":
        axis = int(given or 0) % (x.dim() + 1)
        return [owner.unsqueeze(axis) if axis < owner.dim() else owner]
    if name == "roll" and given is None:
        return [None] * len(results)
    axes = axes_of(given, x.dim()) if name != "flip" else axes_of(args[1:] if len(args) > 2 else args[1], x.dim())
    if all(a >= owner.dim() for a in axes):
        return [owner if leads(owner, y) else None for y in results]
    if func in CUTS:
        more, other = pytree.tree_map_only(Tensor, Tensor.cpu, (tuple(args[1:]), dict(call.kwargs)))
        return list(pytree.tree_leaves(func(on_front(owner, x), *more, **other)))
    return [_without(owner, axes, x, y) for y in results]


def _without(owner: Tensor, axes: list[int], x: Tensor, y: Tensor) -> Layout:
    """Owners after a sum or the like; None where it brings vectors of several rollouts together."""
    for axis in sorted((a for a in axes if a < owner.dim()), reverse=True):
        one = without_axis(owner, axis) if owner.shape[axis] else None
        if one is None:
            return None
        owner = owner if y.shape == x.shape else one.unsqueeze(axis) if y.dim() == x.dim() else one
    return owner if owner.dim() and leads(owner, y) else None


def _join(call: Moved, y: Tensor) -> Layout:
    parts = [t for t in call.args[0] if t.numel()]
    axis = axes_of(call.option(1, "dim", "axis", default=0), y.dim())[0]
    held = [call.owners.get(id(t)) for t in parts]
    known = [o for o in held if o is not None]
    if all(axis >= o.dim() for o in known):  # constants get the owners of the rows that they are joined to
        return merged([(o, t.narrow(axis, 0, 1)) for o, t in zip(held, parts, strict=True) if o is not None],
                       y.narrow(axis, 0, 1))
    axes = max(*(o.dim() for o in known), axis + 1)
    full = [torch.full(t.shape[:axes], UNOWNED) if o is None else spread_owners(o, t.shape[:axes])
            for o, t in zip(held, parts, strict=True)]
    return torch.cat(full, dim=axis)


def _put(call: Moved, y: Tensor) -> Layout:
    """index_add and index_copy along axis 0: each place has the owner of its vectors."""
    into, axis, index, source = call.args[:4]
    came = call.owners.get(id(source))
    if axis % into.dim() != 0 or came is None or came.dim() != 1:
        return None
    held = call.owners.get(id(into))
    held = torch.full((len(into),), UNOWNED) if held is None else held
    if held.dim() != 1:
        return None
    index = index.cpu()
    new = held.clone()
    new[index] = came
    fits = (new[index] == came) & ((held[index] == UNOWNED) | (held[index] == came))
    return new if bool(fits.all()) else None


def _einsum(call: Moved, y: Tensor) -> Layout:
    """Rows stay rows where all activations and the result name them by the same letters, in front."""
    equation, *operands = call.args
    operands = [*operands[0]] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    sides = equation.replace(" ", "").split("->")
    letters, out = sides[0].split(","), sides[1]
    found: Tensor | None = None
    for term, x in zip(letters, operands, strict=True):
        owner = call.owners.get(id(x))
        if owner is None:
            continue
        named = term[: owner.dim()]
        for axis in reversed(range(len(named))):
            if named[axis] not in out:  # summed over: owners must not differ along it
                one = without_axis(owner, axis) if owner.dim() > 1 else None
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


def _multiply(call: Moved, y: Tensor) -> Layout:
    """a @ b: b's axis before the last is summed over; all leading axes stay.

    In packed rows attention multiplies positions of several rollouts, and its mask removes them: the product then
    belongs to a's positions.
    """
    name, owners = call.name, call.owners
    args = [*call.args, *(call.kwargs[key] for key in ("input", "other", "batch1", "batch2", "mat1", "mat2")
                          if key in call.kwargs)]
    a, b = args[1:3] if "add" in name else (args[1], args[0]) if name == "__rmatmul__" else args[:2]
    left, right = owners.get(id(a)), owners.get(id(b))
    if "add" in name and id(args[0]) in owners and aligned(owners[id(args[0])], args[0], y) is None:
        return None
    parts: list[tuple[Any, Tensor]] = []
    if left is not None:
        if a.dim() < 2 or left.dim() >= a.dim():
            return None
        full = a.select(-1, 0).unsqueeze(-1)
        parts.append((left, full if a.dim() == y.dim() else full.reshape(*[1] * (y.dim() - a.dim()), *full.shape)))
    if right is not None and not (call.packed and left is not None and b.dim() > 2):
        if b.dim() < 3 or right.dim() > b.dim() - 2:
            return None
        parts.append((right, b.select(-2, 0).unsqueeze(-2) if b.dim() == y.dim() else b))
    return merged(parts, y)


def _first(call: Moved, y: Tensor) -> Layout:
    """Functions whose results keep the leading axes of their first argument."""
    name, x, owner = call.name, call.x, call.owner
    if name in ("tril", "triu") and owner.dim() > x.dim() - 2:
        return None
    if name in ("expand", "expand_as", "broadcast_to"):
        return aligned(owner, x, y)
    if name in ("repeat", "tile"):
        return call.func(on_front(owner, x), *call.args[1:], **call.kwargs)  # type: ignore[no-any-return]
    if name == "pad":
        amounts = call.option(1, "pad")
        if any(amounts[2 * (x.dim() - owner.dim()):]):
            return None
    if name in ("linear", "embedding") and any(t is not x for t in call.given):
        return None
    # Their batch is the first axis; some of them mix or move positions.
    if name not in ("linear", "one_hot", "gumbel_softmax", "embedding", "scaled_dot_product_attention", "pad",
                    "bilinear") and owner.dim() > 1:
        return None
    if any(o.dim() == owner.dim() == 1 and not torch.equal(o, owner) for o, _ in call.parts):
        return None
    return _keep(call, y)


Quick = Callable[[Any, Sequence[Any], dict[str, Any], Tensor, Sequence[Tensor]], bool]


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
    return bool(axis % y.dim()) and all(t.dim() == y.dim() for t in given)


def _stay_along(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    place, default = ALONG[func], _AXIS_OF.get(getattr(func, "__name__", ""))
    axis = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if not isinstance(axis, int) or isinstance(axis, bool) or not args or args[0] is not given[0]:
        return False
    wide = max(given[0].dim(), y.dim())
    return bool(axis % wide) and all(t.dim() == given[0].dim() for t in given)


def _stay_aligned(func: Any, args: Any, kwargs: Any, y: Tensor, given: Sequence[Tensor]) -> bool:
    for t in given:  # noqa: SIM110 (a generator takes three times as long, and this is asked at most torch calls)
        if t.dim() != y.dim():
            return False
    return True


MATMULS = {torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm, Tensor.__matmul__}
_TABLE: tuple[tuple[Iterable[Any], Rule, Quick | None], ...] = (
    (FIRST, _each(_first), None),
    ({F.linear, F.scaled_dot_product_attention}, _each(_first), lambda *call: True),
    (LAST, _each(_keep), lambda *call: True),
    (MATRICES, _each(_of_matrices), None),
    (CUTS, _along, None),
    (ALONG, _along, _stay_along),
    ({torch.squeeze, Tensor.squeeze}, _each(_reshape), None),
    (SWAPS, _each(_swap), None),
    ({torch.transpose, Tensor.transpose}, _each(_swap),
     lambda f, args, kwargs, y, given: len(args) == 3 and bool(args[1] % y.dim() and args[2] % y.dim())),
    (RESHAPES, _each(_reshape), lambda *call: True),
    (PRODUCTS, _each(_multiply), None),
    (MATMULS, _each(_multiply), lambda f, args, kwargs, y, given: all(t.dim() == y.dim() > 2 for t in given)),
    (EXTREMES, _extreme, _stay_along),
    ({torch.stack}, _each(_stack), None),
    (JOINS, _each(_join), _stay_joined),
    (PUTS, _each(_put), None),
    (ELEMENTWISE, _each(_merge), _stay_aligned),
    ({F.embedding}, _look_up, None),
    (INDEXED, _look_up, _stay_looked_up),
)
"""(functions, what they do to owners, when a result surely keeps the usual layout); a later row wins."""
MOVES: dict[Any, Rule] = {func: move for functions, move, _ in _TABLE for func in functions}
_QUICK: dict[Any, Quick] = {func: quick for functions, _, quick in _TABLE if quick is not None for func in functions}
_BY_NAME: dict[str, Rule] = {"einsum": _each(_einsum), "grouped_mm": _each(_grouped)}
"""Functions that torch calls under several objects."""


def stays(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Any],
         given: Sequence[Tensor]) -> bool:
    """Whether results surely have the usual layout, where the arguments have it and rows are the first axis: fast."""
    quick = _QUICK.get(func)
    if quick is None:
        return False
    for y in results:
        if type(y) is not Tensor or y.dim() == 0:
            return False
        size = y.size(0)  # not len(y), which is a function in Python
        for t in given:
            if t.dim() == 0 or t.size(0) != size:
                return False
        if not quick(func, args, kwargs, y, given):
            return False
    return True


def after(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor], rows: RowOwners,
          layout_of: Any) -> list[Layout]:
    """The layouts of a call's results; `layout_of(x)` is that of an argument, False for one that belongs to no row."""
    given = [x for x in tensors_of(args, kwargs) if layout_of(x) is not False]
    if any(layout_of(x) is None for x in given):
        return [None] * len(results)
    owners = {id(x): usual_owner(rows, x) if layout_of(x) is USUAL else layout_of(x) for x in given}
    given = [x for x in given if owners[id(x)] is not None or x.requires_grad]  # a mask over pairs of packed positions
    owners = {id(x): owners[id(x)] for x in given}
    if not given or any(owners[id(x)] is None and x.dim() > 0 for x in given):
        return [None] * len(results)
    try:
        rule = MOVES.get(func) or _BY_NAME.get(getattr(func, "__name__", "").strip("_"))
        call = Moved(func, args, kwargs, results, given, owners, rows.by_position)
        found = [None] * len(results) if rule is None else rule(call)
    except (RuntimeError, IndexError, TypeError, ValueError, KeyError):
        found = [None] * len(results)
    return [settled(rows, owner, y) for owner, y in zip(found, results, strict=True)]
