"""The steps of a run as a dataframe: one row per step, one column per metric. Needs polars or pandas."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.errors import CreditscopeError, installed, unknown
from creditscope.files.jsonlines import encodable
from creditscope.runs.columns import Column, Steps

LIBRARIES = ("polars", "pandas")
"""The first that is installed is the default."""
NO_METRICS = ("absent", "kept")
"""What a line of steps.jsonl holds beside its step and its metrics."""


def frame(steps: Steps, library: str | None = None) -> Any:
    """`step` first, then the metrics in the order in which they first appear. What a step does not have is null.

    A column whose name is no UTF-8, which no run writes, is left out.
    """
    found = _library(library)
    names = dict.fromkeys(["step", *(name for name in steps.names if name not in NO_METRICS and encodable(name))])
    columns = {name: _whole(steps.column(name), len(steps)) for name in names}
    if found.__name__ == "polars":
        return found.DataFrame([found.Series(name, values, dtype=_polars_type(found, values), nan_to_null=True)
                                for name, values in columns.items()])
    return found.DataFrame({name: found.Series(values, dtype=_pandas_type(values)) for name, values in columns.items()})


def _library(name: str | None) -> Any:
    if name is not None and name not in LIBRARIES:
        raise unknown("dataframe library", name, LIBRARIES)
    wanted = LIBRARIES if name is None else (name,)
    here = next((one for one in wanted if installed(one)), None)
    if here is None:
        raise CreditscopeError(f"a dataframe needs {' or '.join(wanted)}, which {'is' if name else 'are'} not "
                               f"installed: pip install {wanted[0]}")
    if here == "polars":
        import polars

        return polars
    import pandas

    return pandas


def _whole(column: Column, count: int) -> NDArray[Any] | list[Any]:
    """One value per step: float64, NaN where there is none; int64 where no step lacks it; otherwise a list with None.

    Whole numbers and floats in one column are floats. What is neither number, text nor truth value becomes text.
    """
    at, values = column
    kinds = {type(value) for value in values.tolist()}
    if kinds <= {int, float} and float in kinds:
        out = np.full(count, np.nan)
        out[at] = values.astype(np.float64)
        return out
    if kinds <= {int} and len(at) == count:
        return values.astype(np.int64)
    told = values.tolist() if kinds in ({int}, {bool}) else [_text(value) for value in values.tolist()]
    rows: list[Any] = [None] * count
    for row, value in zip(at.tolist(), told, strict=True):
        rows[row] = value
    return rows


def _text(value: object) -> str:
    told = value if isinstance(value, str) else json.dumps(value)
    return told.encode("utf-8", "backslashreplace").decode()


def _kind(values: NDArray[Any] | list[Any]) -> type:
    if isinstance(values, np.ndarray):
        return float if values.dtype.kind == "f" else int
    return next((type(value) for value in values if value is not None), str)


def _polars_type(polars: Any, values: NDArray[Any] | list[Any]) -> Any:
    return {float: polars.Float64, int: polars.Int64, bool: polars.Boolean, str: polars.String}[_kind(values)]


def _pandas_type(values: NDArray[Any] | list[Any]) -> str:
    """Of pandas' types that know a missing value; float64 has NaN for it."""
    if isinstance(values, np.ndarray):
        return str(values.dtype)
    return {int: "Int64", bool: "boolean", str: "object"}[_kind(values)]
