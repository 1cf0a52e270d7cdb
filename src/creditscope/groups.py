"""Statistics over the rows of each group, vectorised: groups of any size, in any order, with any ids."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """The partition of B rows into groups; every statistic comes back as one value a row.

    >>> g = Groups(torch.tensor([7, 7, 3]))
    >>> g.mean(torch.tensor([1., 3., 5.])).tolist()
    [2.0, 2.0, 5.0]
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids: Tensor
        self.index: Tensor
        self.counts: Tensor
        self.ids, self.index, self.counts = torch.unique(ids, return_inverse=True, return_counts=True)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def size(self) -> Tensor:
        """(B,) number of rows in the row's group."""
        return self.counts[self.index]

    def totals(self, value: Tensor) -> Tensor:
        """(P,) Σ over each group."""
        return value.new_zeros(len(self)).index_add_(0, self.index, value)

    def sum(self, value: Tensor) -> Tensor:
        """(B,) Σ_{j ∈ group(i)} value_j."""
        return self.totals(value)[self.index]

    def mean(self, value: Tensor) -> Tensor:
        """(B,) mean over the row's group."""
        return self.sum(value) / self.size

    def std(self, value: Tensor, ddof: int) -> Tensor:
        """(B,) √(Σ (value − mean)² / (n − ddof)) over the row's group; NaN where n = ddof."""
        centred = value - self.mean(value)
        return (self.sum(centred * centred) / (self.size - ddof)).sqrt()

    def unanimous(self, value: Tensor) -> Tensor:
        """(B,) True where all values of the row's group are equal up to rounding.

        The mean of equal floats may miss them by an ulp, and a std of one ulp would turn that into an advantage of
        one: so groups that differ by rounding alone are found by their range, not by their std. Rounding is float32's
        at least: rewards stored in half precision are told apart as far as they differ.
        """
        value = value if value.dtype == torch.float64 else value.float()
        high = value.new_full((len(self),), -torch.inf).scatter_reduce_(0, self.index, value, "amax")
        low = value.new_full((len(self),), torch.inf).scatter_reduce_(0, self.index, value, "amin")
        rounding = 8 * torch.finfo(value.dtype).eps * torch.maximum(high.abs(), low.abs())
        return ((high - low) <= rounding)[self.index]
