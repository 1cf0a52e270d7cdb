"""Checks of a record's arrays, which are untrusted: dtype, and shapes that fit together. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError

Arrays = Mapping[str, NDArray[Any]]
Table = Mapping[str, tuple[str, str]]
"""name -> (a kind of KINDS, a letter for each axis: equal letters are equal lengths)."""

KINDS = {"whole numbers": "iu", "truth values": "b", "numbers": "biuf", "finite numbers": "biuf", "texts": "U"}
"""Kind -> the codes of its numpy dtypes."""
LARGEST = 1e100
"""The square of a larger number may overflow."""
WIDE = {"whole numbers": np.int64, "numbers": np.float64, "finite numbers": np.float64}


def fitting(arrays: Arrays, table: Table, needed: Iterable[str] = ()) -> dict[str, NDArray[Any]]:
    """The arrays of the table, whole numbers as int64 and others as float64; absent ones and empty texts are left out.

    >>> table = {"group": ("whole numbers", "N"), "gram": ("numbers", "NN")}
    >>> fitting({"group": np.array([0, 0]), "gram": np.eye(3)}, table)
    Traceback (most recent call last):
    creditscope.errors.CreditscopeError: 'gram' is (3, 3) of float64, and should be numbers (2, 2)
    """
    found: dict[str, NDArray[Any]] = {}
    sizes: dict[str, int] = {}
    for name, (kind, axes) in table.items():
        array = arrays.get(name)
        if array is None or (kind == "texts" and array.size == 0):
            continue
        if array.ndim == len(axes):
            for axis, length in zip(axes, array.shape, strict=True):
                sizes.setdefault(axis, length)
        shape = tuple(sizes.get(axis, axis) for axis in axes)
        wide = kind != "texts" and array.dtype.itemsize > 8  # such as float128, which torch and JSON lack
        if array.shape != shape or array.dtype.kind not in KINDS[kind] or wide:
            expected = f"({', '.join(map(str, shape))})"
            raise CreditscopeError(f"{name!r} is {array.shape} of {array.dtype}, and should be {kind} {expected}")
        if kind == "finite numbers" and not (np.abs(array.astype(np.float64)) <= LARGEST).all():
            raise CreditscopeError(f"{name!r} holds a number that is not finite, or larger than {LARGEST:g}")
        found[name] = array.astype(WIDE.get(kind, array.dtype))
    for name in needed:
        if name not in found:
            raise CreditscopeError(f"there is no {name!r}")
    return found
