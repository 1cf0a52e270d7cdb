"""Statistics over the rows of each group, vectorised: groups of any size, in any order, with any ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError, require


def check_real(value: Tensor, what: str) -> None:
    """Refuse anything but a tensor of real numbers."""
    require(value, Tensor, what, "convert it with torch.as_tensor(...)")
    if value.is_complex():
        raise CreditscopeError(f"{what} must be real, got {value.dtype}; take its real part")


def wide(value: Tensor) -> Tensor:
    """At least float32: half precision is for storage, not for sums."""
    return value if value.dtype == torch.float64 else value.float()


class Groups:
    """The partition of B rows into groups; every statistic has one value per row.

    >>> g = Groups(torch.tensor([7, 7, 3]))
    >>> g.mean(torch.tensor([1., 3., 5.])).tolist()
    [2.0, 2.0, 5.0]
    """

    ids: Tensor
    index: Tensor
    counts: Tensor

    def __init__(self, ids: Tensor) -> None:
        self.ids, self.index, self.counts = torch.unique(ids, return_inverse=True, return_counts=True)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> Tensor:
        """(B,) number of rows in the row's group."""
        return self.counts[self.index]

    def totals(self, value: Tensor) -> Tensor:
        """(P, ...) Σ over each group of value (B, ...)."""
        return value.new_zeros(len(self), *value.shape[1:]).index_add_(0, self.index, value)

    def sum(self, value: Tensor) -> Tensor:
        """(B,) Σ_{j ∈ group(i)} value_j."""
        return self.totals(value)[self.index]

    def mean(self, value: Tensor) -> Tensor:
        """(B,) mean over the row's group."""
        return self.sum(value) / self.size

    def std(self, value: Tensor, ddof: int) -> Tensor:
        """(B,) √(Σ (value − mean)² / (n − ddof)) over the row's group; NaN where n = ddof."""
        centred = value - self.mean(value)
        unit = binary_unit(self.largest(centred))
        centred = centred / unit
        return (self.sum(centred * centred) / (self.size - ddof)).sqrt() * unit

    def largest(self, value: Tensor) -> Tensor:
        """(B,) max |value| over the row's group."""
        return value.new_zeros(len(self)).scatter_reduce_(0, self.index, value.abs(), "amax")[self.index]

    def unanimous(self, value: Tensor) -> Tensor:
        """(B,) True where all values of the row's group are equal up to rounding.

        max − min ≤ 8·eps·max|value|. The mean of equal floats may miss them by an ulp, and a std of one ulp would
        turn that into an advantage of one. eps is float32's at most: rewards in half precision stay distinct.
        """
        value = wide(value)
        high = value.new_full((len(self),), -torch.inf).scatter_reduce_(0, self.index, value, "amax")
        low = value.new_full((len(self),), torch.inf).scatter_reduce_(0, self.index, value, "amin")
        rounding = 8 * torch.finfo(value.dtype).eps * torch.maximum(high.abs(), low.abs())
        return ((high - low) <= rounding)[self.index]


def binary_unit(largest: Tensor) -> Tensor:
    """2^k ≤ largest < 2^(k+1), 1 where it is 0: numbers in this unit can be squared.

    Squares of float32 overflow above 2e19 and underflow below 1e-23. Dividing by a power of two and multiplying by it
    is exact, so ordinary numbers keep every bit.

    >>> binary_unit(torch.tensor([3e30, 5.0, 0.0])).tolist() == [2.0**101, 4.0, 1.0]
    True
    """
    limits = torch.finfo(largest.dtype)
    sound = largest.where((largest > 0) & largest.isfinite(), 1.0).clamp(min=limits.tiny)
    return torch.ldexp(torch.ones_like(sound), torch.frexp(sound).exponent - 1)


def std(value: Tensor, ddof: int) -> Tensor:
    """The standard deviation of all values, whatever their size."""
    unit = binary_unit(value.abs().amax())
    return (value / unit).std(correction=ddof) * unit


def deal(group: Tensor, parts: int) -> list[Tensor]:
    """Row indices, on the CPU, of each minibatch: whole groups, dealt out evenly.

    >>> [rows.tolist() for rows in deal(torch.tensor([7, 7, 3, 3, 5, 5]), 2)]
    [[0, 1, 2, 3], [4, 5]]
    """
    which = Groups(group).index.cpu() % parts
    return [(which == part).nonzero().squeeze(1) for part in range(parts)]


def micro_batches(group: Tensor, parts: int) -> list[Tensor]:
    """Row indices, on the CPU, of each micro-batch: whole groups where there are enough of them, so that the rows of a
    group meet in one pass."""
    if parts <= len(Groups(group)):
        return deal(group, parts)
    return list(torch.arange(len(group)).chunk(parts))


def joint_passes(group: Tensor, chunks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Row indices of passes in which every two rows of a group meet, none of more rows than the largest of `chunks`.

    They are `chunks` themselves where these are whole groups. A group that these cut apart is a pass of its own where
    its R rows are no more than the n of a pass; else it is dealt into q = ⌈R / ⌊n/2⌋⌉ parts, and any two of them are a
    pass: q(q−1)/2 passes.

    >>> group = torch.tensor([7, 7, 7, 7])
    >>> [rows.tolist() for rows in joint_passes(group, micro_batches(group, 2))]
    [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    """
    group = group.cpu()
    number = torch.zeros(len(group))
    for n, chunk in enumerate(chunks):
        number[chunk] = n
    cut = ~Groups(group).unanimous(number)
    if not bool(cut.any()):
        return chunks
    most = max(map(len, chunks))
    if most < 2:
        raise CreditscopeError("passes of one rollout compare no two rollouts of a group; give passes of two or more")
    passes = [whole for chunk in chunks if len(whole := chunk[~cut[chunk]])]
    for g in sorted(set(group[cut].tolist())):
        rows = (group == g).nonzero().squeeze(1)
        passes += [rows] if len(rows) <= most else [
            torch.cat(pair) for pair in combinations(rows.split(most // 2), 2)]
    return passes
