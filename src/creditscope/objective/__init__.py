"""From a row of the table to the surrogate J and its effective credit w: advantage, weight, ratio, bound, penalty."""

from creditscope.errors import require_module

require_module(__name__, "torch")
