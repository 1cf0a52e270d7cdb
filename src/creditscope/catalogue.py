"""A method by its name, wherever its row stands."""

from __future__ import annotations

from creditscope.dialects import DIALECTS
from creditscope.errors import unknown
from creditscope.method import Method
from creditscope.methods import METHODS


def find(name: str) -> Method:
    """A paper's method or a library's dialect of one.

    >>> find("dr_grpo").aggregate
    'constant'
    """
    table = {**METHODS, **DIALECTS}
    if name not in table:
        raise unknown("method", name, METHODS, see="creditscope methods")
    return table[name]
