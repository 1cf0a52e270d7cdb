"""Rollouts from the arrays that a record kept of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from numpy.typing import NDArray

from creditscope.batch.rollouts import Rollouts
from creditscope.files.arrays import fitting
from creditscope.runs.arrays import ROLLOUTS


def rollouts_of(arrays: Mapping[str, NDArray[Any]]) -> Rollouts:
    """Rollouts with floats in float64; arrays that are no field are ignored."""
    known = {field.name: field.default is MISSING and field.default_factory is MISSING for field in fields(Rollouts)}
    found = fitting(arrays, ROLLOUTS, [name for name, needed in known.items() if needed])
    given: dict[str, Any] = {name: array.tolist() if array.dtype.kind == "U" else torch.as_tensor(array)
                             for name, array in found.items() if name in known}
    return Rollouts(**given)
