"""Closed forms and enumeration: the claims that need no run, and the effect of weights on a shared prefix.

The public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from creditscope.errors import require_module

require_module(__name__, "torch")

_HOME = {"PrefixBias": "shared_prefix", "prefix_bias": "shared_prefix", "prefix_metrics": "shared_prefix"}
__all__ = ["PrefixBias", "prefix_bias", "prefix_metrics"]

if TYPE_CHECKING:
    from creditscope.exact.shared_prefix import PrefixBias, prefix_bias, prefix_metrics


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'creditscope.exact' has no attribute {name!r}")
    return getattr(importlib.import_module(f"creditscope.exact.{_HOME[name]}"), name)
