"""Arrays of owners: the rollout of each unit of an activation, over the leading axes that it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from creditscope.microscope.rows import RowOwners


class Usual:
    """The layout of the batch."""


USUAL = Usual()
Layout = Usual | Tensor | None
"""The usual one; an array of owners on the CPU; None where unknown."""
UNOWNED = -2
"""The owner of entries that were made of constants."""


def usual_owner(rows: RowOwners, x: Tensor) -> Tensor | None:
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
    """Owners without trailing axes along which they do not change: [[0, 0], [1, 1]] → [0, 1]."""
    while owner.dim() > 1 and owner.shape[-1] > 0 and (one := without_axis(owner, owner.dim() - 1)) is not None:
        owner = one
    return owner


def without_axis(owner: Tensor, axis: int) -> Tensor | None:
    """The owners without an axis along which they do not change; None where they do. Constants have any owner."""
    one = owner.amax(dim=axis)
    same = (owner == one.unsqueeze(axis)) | (owner == UNOWNED)
    return one if bool(same.all()) else None


def settled(rows: RowOwners, owner: Layout, y: Tensor) -> Layout:
    """USUAL where these owners are those of the usual layout, else the owners."""
    if not isinstance(owner, Tensor):
        return owner
    owner = lean(owner)
    usual = usual_owner(rows, y)
    if usual is None:
        return owner
    usual = lean(usual)
    return USUAL if owner.shape == usual.shape and torch.equal(owner, usual) else owner


def same(one: Layout | bool, other: Layout | bool) -> bool:
    """Whether two layouts are known and equal; False stands for a tensor that belongs to no row."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other and one is not None


def leads(owner: Tensor, y: Tensor) -> bool:
    return y.dim() >= owner.dim() and tuple(y.shape[: owner.dim()]) == tuple(owner.shape)


def on_front(owner: Tensor, x: Tensor) -> Tensor:
    """Owners with all axes of x, of length 1 where they do not depend on an axis."""
    return owner.reshape(*owner.shape, *[1] * (x.dim() - owner.dim()))


def front(full: Tensor, axes: int) -> Tensor:
    """The first axes alone, of an array that does not depend on the others."""
    return full.flatten(axes).select(-1, 0) if axes < full.dim() else full


def spread_owners(owner: Tensor, shape: Sequence[int]) -> Tensor:
    """Owners over more axes, along which they do not change."""
    return owner.reshape(*owner.shape, *[1] * (len(shape) - owner.dim())).expand(shape)


def axes_of(axes: Any, dim: int) -> list[int]:
    if isinstance(axes, int) and not isinstance(axes, bool):
        axes = [axes]
    return [a % dim for a in axes] if isinstance(axes, list | tuple | torch.Size) and axes else [*range(dim)]


def aligned(owner: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """Owners of x over the leading axes of y, to which x is broadcast; None where they would be other axes."""
    if x.dim() == y.dim() and leads(owner, y):
        return owner
    if x.dim() > y.dim():
        return None
    full = owner.reshape(*[1] * (y.dim() - x.dim()), *owner.shape)
    return full.expand(y.shape[: full.dim()]) if full.dim() <= y.dim() else None


def merged(parts: list[tuple[Any, Tensor]], y: Tensor) -> Layout:
    """The owners on which tensors that are combined entry by entry agree; constants agree with all."""
    found: Tensor | None = None
    for owner, x in parts:
        if x.dim() == 0 and owner is None:
            return None  # a scalar made of all rows
        mine = None if owner is None else aligned(owner, x, y)
        if mine is None:
            return None
        if found is None:
            found = mine
            continue
        if found.dim() != mine.dim():
            wide = y.shape[: max(found.dim(), mine.dim())]
            found, mine = spread_owners(found, wide), spread_owners(mine, wide)
        if not bool(((found == mine) | (found == UNOWNED) | (mine == UNOWNED)).all()):
            return None
        found = torch.maximum(found, mine)
    return found


def reshaped(owner: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """Owners of the vectors of y, a reshape of x; None where one has several owners."""
    if y.dim() == 0 or y.numel() == 0 or y.numel() != x.numel():
        return None
    unit, vector = x.numel() // owner.numel(), y.shape[-1] if y.dim() > 1 else 1
    lead = y.shape[:-1] if y.dim() > 1 else y.shape
    if unit % vector == 0:
        return owner.flatten().repeat_interleave(unit // vector).reshape(lead)
    one = without_axis(owner.flatten().reshape(-1, vector // unit), 1) if vector % unit == 0 else None
    return None if one is None else one.reshape(lead)


def put_in(into: Tensor, index: Any, value: Tensor, held: Tensor | None, came: Tensor) -> Layout:
    """Owners after into[index] = value, given those of `into` (None for constants) and of `value`."""
    whole = torch.full(into.shape, UNOWNED) if held is None else spread_owners(held, into.shape).clone()
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(i.cpu() if isinstance(i, Tensor) else i for i in index)
    place = whole[index]
    new = spread_owners(came, value.shape).expand(place.shape)
    if not bool(((place == UNOWNED) | (place == new)).all()):
        return None
    whole[index] = new
    return whole if bool((whole[index] == new).all()) else None
