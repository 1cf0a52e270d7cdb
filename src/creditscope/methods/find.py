"""A method by its name, wherever its row stands."""

from __future__ import annotations

from creditscope.errors import unknown
from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.table import METHODS


def find(name: str) -> Method:
    """A paper's method or a library's dialect of one.

    >>> find("dr_grpo").aggregate
    'constant'
    """
    table = {**METHODS, **DIALECTS}
    if name not in table:
        raise unknown("method", name, METHODS, see="creditscope methods")
    return table[name]
