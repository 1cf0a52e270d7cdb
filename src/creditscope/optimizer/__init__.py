"""What the optimiser does to the credit: replay, reward scale, overshoot, update geometry, and brakes.

The public names are loaded on first use: importing the package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from creditscope.errors import install_hint

_HOME = {"Brake": "brakes", "KlStop": "brakes", "Probe": "probe", "Recall": "brakes", "Restart": "brakes",
         "Shorten": "brakes"}
__all__ = ["Brake", "KlStop", "Probe", "Recall", "Restart", "Shorten"]

if TYPE_CHECKING:
    from creditscope.optimizer.brakes import Brake, KlStop, Recall, Restart, Shorten
    from creditscope.optimizer.probe import Probe


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'creditscope.optimizer' has no attribute {name!r}")
    with install_hint(f"creditscope.optimizer.{name}"):
        return getattr(importlib.import_module(f"creditscope.optimizer.{_HOME[name]}"), name)
