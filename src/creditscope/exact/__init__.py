"""Closed forms and enumeration: the claims that need no run."""

from creditscope.errors import require_module

require_module(__name__, "torch")
