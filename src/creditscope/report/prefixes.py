"""The tree of a group's answers: tokens that answers share are one node, with W = Σ_{i∈S} w_it.

The same nodes and sums as `creditscope.exact.shared_prefix`, for the rows of one group, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-6
"""|W| below this share of Σ|w| is float32 rounding of a sum that cancels: W is 0."""


@dataclass(frozen=True)
class Line:
    """A run of nodes that the same rows pass."""

    parent: int
    """Index of the line before, −1 at the root."""
    rows: tuple[int, ...]
    """S, by place in the group."""
    start: int
    stop: int
    """Columns [start, stop)."""
    low: float | None
    high: float | None
    """The least and the largest W along the run; None where the policy chose none of its tokens."""


def extents(mask: NDArray[Any]) -> NDArray[np.int64]:
    """(R,) columns up to the last chosen token."""
    width = mask.shape[1]
    return np.where(mask.any(axis=1), width - mask[:, ::-1].argmax(axis=1), 0) if width else np.zeros(len(mask), int)


def node_index(tokens: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.int64]:
    """(R, T) the node of each token, −1 past a row's last chosen one: rows that agree on y_≤t meet at column t.

    >>> node_index(np.array([[5, 6], [5, 7]]), np.ones((2, 2), dtype=bool)).tolist()
    [[0, 1], [0, 2]]
    """
    index = np.full(tokens.shape, -1, dtype=np.int64)
    extent, parent, count = extents(mask), np.zeros(len(tokens), dtype=np.int64), 0
    kinds = int(tokens.max(initial=0)) + 1
    for t in range(int(extent.max(initial=0))):
        rows = np.flatnonzero(extent > t)
        _, node = np.unique(parent[rows] * kinds + tokens[rows, t], return_inverse=True)
        index[rows, t] = parent[rows] = count + node
        count += int(node.max()) + 1
        if len(np.unique(node)) == len(rows):  # from here on everybody is alone
            tail = (np.arange(tokens.shape[1]) > t) & (np.arange(tokens.shape[1]) < extent[:, None])
            index[tail] = count + np.arange(tail.sum())
            break
    return index


def totals(index: NDArray[np.int64], mask: NDArray[Any], w: NDArray[Any]) -> NDArray[np.float64]:
    """(N,) W = Σ_{i∈S} w_it of every node, over the rows that chose it; NaN where none did."""
    count = int(index.max(initial=-1)) + 1
    node, value = index[mask], w[mask].astype(np.float64)
    total, mass, chosen = (np.bincount(node, weights=x, minlength=count) for x in (value, np.abs(value), None))
    total[np.abs(total) <= ROUNDING * mass] = 0.0
    return np.where(chosen > 0, total, np.nan)


def tree(tokens: NDArray[Any], mask: NDArray[Any], w: NDArray[Any]) -> list[Line]:
    """The tree of one group, nodes that the same rows pass merged into one line; `w` is (R, T)."""
    index = node_index(tokens, mask)
    total, extent = totals(index, mask, w), extents(mask)
    lines: list[Line] = []
    waiting = [(-1, tuple(np.flatnonzero(extent > 0).tolist()), 0)]
    while waiting:
        parent, passing, start = waiting.pop()
        for rows in _parting(index, passing, start):
            ahead = index[list(rows), start:int(extent[list(rows)].min())]
            stop = start + int(np.append((ahead == ahead[0]).all(axis=0), False).argmin())
            found = total[index[rows[0], start:stop]]
            found = found[~np.isnan(found)]
            ends = (float(found.min()), float(found.max())) if len(found) else (None, None)
            lines.append(Line(parent, rows, start, stop, *ends))
            waiting.append((len(lines) - 1, tuple(row for row in rows if extent[row] > stop), stop))
    return lines


def _parting(index: NDArray[np.int64], rows: tuple[int, ...], column: int) -> list[tuple[int, ...]]:
    parts: dict[int, list[int]] = {}
    for row in rows:
        parts.setdefault(int(index[row, column]), []).append(row)
    return sorted(map(tuple, parts.values()), key=len, reverse=True)
