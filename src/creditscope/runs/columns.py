"""The steps of a run by column: one array per metric in place of one dict per step, a tenth of the memory.

`Steps` is read like the list of mappings that it was made of, or by column: the rows that have a name, and its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeGuard, overload

import numpy as np
from numpy.typing import NDArray

BLOCK = 128
Rows = NDArray[np.int64]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file is a finite number that a float can hold.

    >>> is_number(1), is_number("1"), is_number(True), is_number(10**400)
    (True, False, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Column(NamedTuple):
    at: Rows
    """The rows that have the name, ascending."""
    values: NDArray[Any]
    """float64 or int64 where all values are of this type, otherwise objects."""

    def only(self, keep: NDArray[np.bool_]) -> Column:
        return self if keep.all() else Column(self.at[keep], self.values[keep])

    def of(self, rows: Rows) -> Column:
        return self.only(np.isin(self.at, rows, assume_unique=True))


NONE = Column(np.empty(0, np.int64), np.empty(0))


class Row(Mapping[str, Any]):
    """One step as a view of the columns."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: Mapping[str, Column], row: int) -> None:
        self._columns, self._row = columns, row

    def __getitem__(self, name: str) -> Any:
        (at, values), row = self._columns[name], self._row
        place = row if row < len(at) and at.item(row) == row else int(at.searchsorted(row))  # no row before is left out
        if place == len(at) or at.item(place) != row:
            raise KeyError(name)
        return values.item(place)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._columns if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Steps(Sequence[Mapping[str, Any]]):
    """Steps in order.

    >>> steps = Steps.of([{"step": 0, "loss": 0.5}, {"step": 1}, {"step": 2, "loss": 0.25}])
    >>> steps[-1]["loss"], len(steps), steps.column("loss").at.tolist(), steps.together("step", "loss")
    (0.25, 3, [0, 2], [(0, 0.5), (2, 0.25)])
    """

    def __init__(self, columns: Mapping[str, Column], rows: Rows, whole: bool = True) -> None:
        self._columns, self._rows, self._whole = columns, rows, whole

    @classmethod
    def of(cls, steps: Iterable[Mapping[str, Any]]) -> Steps:
        if isinstance(steps, Steps):
            return steps
        parts: dict[str, list[Column]] = {}
        source, count = iter(steps), 0
        while block := list(islice(source, BLOCK)):
            every = np.arange(count, count + len(block))
            for name in dict.fromkeys(chain.from_iterable(block)):
                try:
                    found = Column(every, _typed([step[name] for step in block]))
                except KeyError:
                    have = np.array([name in step for step in block])
                    found = Column(every[have], _typed([step[name] for step in block if name in step]))
                parts.setdefault(name, []).append(found)
            count += len(block)
        every = np.arange(count)
        return cls({name: _joined(parts.pop(name), every) for name in list(parts)}, every)

    # -- as a list of mappings -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Steps:
        if isinstance(index, slice):
            assert index.step in (None, 1), "steps are taken in order"
            return self._some(self._rows[index])
        return Row(self._columns, int(self._rows[index]))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (Row(self._columns, row) for row in self._rows.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    # -- by column -----------------------------------------------------------------------------------------------

    @property
    def names(self) -> Collection[str]:
        """The columns, in the order of first appearance, of all steps that these were taken from."""
        return self._columns.keys()

    def column(self, name: str) -> Column:
        """The values under a name, by their places in this sequence; empty for an unknown name."""
        found = self._columns.get(name, NONE)
        if self._whole:
            return found
        if not len(self._rows):
            return NONE
        place = np.minimum(np.searchsorted(self._rows, found.at), len(self._rows) - 1)
        return Column(place, found.values).only(self._rows[place] == found.at)

    def numbers(self, name: str) -> Column:
        """The finite numbers under a name, as float64."""
        found = self.column(name)
        kept = found.only(np.array([is_number(value) for value in found.values], dtype=bool)
                          if found.values.dtype == object else np.isfinite(found.values))
        return Column(kept.at, kept.values.astype(np.float64, copy=False))

    def having(self, *names: str) -> Steps:
        rows = self._rows
        for name in names:
            rows = rows[np.isin(rows, self._columns.get(name, NONE).at, assume_unique=True)]
        return self._some(rows)

    def together(self, *names: str) -> list[tuple[Any, ...]]:
        """The values under these names, of the steps that have them all."""
        some = self.having(*names)
        return list(zip(*(some.column(name).values.tolist() for name in names), strict=True))

    def numeric(self, keep: Callable[[str], bool]) -> Steps:
        """The columns whose name is kept, and of these the values that are int or float."""
        def kept(column: Column) -> Column:
            if column.values.dtype != object:
                return column
            found = column.only(np.array([isinstance(value, int | float) for value in column.values], dtype=bool))
            return Column(found.at, _typed(found.values.tolist()))

        return self._with({name: kept(column) for name, column in self._columns.items() if keep(name)})

    def finite(self) -> Steps:
        return self._with({name: column.only(np.isfinite(column.values.astype(np.float64)))
                           for name, column in self._columns.items()})

    def _with(self, columns: Mapping[str, Column]) -> Steps:
        return Steps({name: column for name, column in columns.items() if len(column.at)}, self._rows, self._whole)

    def _some(self, rows: Rows) -> Steps:
        return self if len(rows) == len(self._rows) else Steps(self._columns, rows, whole=False)


def _typed(values: Sequence[Any]) -> NDArray[Any]:
    """An array that gives the same values back."""
    kinds = set(map(type, values))
    if kinds == {float} or kinds == {int}:
        return np.array(values, np.float64 if kinds == {float} else np.int64)
    return np.fromiter(values, dtype=object, count=len(values))


def _joined(parts: Sequence[Column], every: Rows) -> Column:
    """One column of its parts; complete columns share the array `every`."""
    kinds = {part.values.dtype for part in parts}
    values = np.concatenate([part.values if len(kinds) == 1 else part.values.astype(object) for part in parts])
    return Column(every if len(values) == len(every) else np.concatenate([part.at for part in parts]), values)
