"""Every method as one row of data. No torch.

    axes      Method: a row, and the values that each axis can take
    bounds    bounds and trust regions, one row each
    links     links and scores of preference methods, one row each
    table     the rows, each a cited diff of another
    dialects  the same names as TRL and verl compute them
    find      a row by name
    words     a row as equations and sentences
"""

from creditscope.methods import table
from creditscope.methods.axes import AXES, Method
from creditscope.methods.table import *  # noqa: F403

__all__ = ["AXES", "Method"]
__all__ += table.__all__
