"""creditscope: see where the credit goes when a language model is trained by reinforcement.

Names load on first use, so that `import creditscope` is cheap and reading a record needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from creditscope.errors import install_hint

__version__ = "0.2.0"

_HOME = {
    "METHODS": "methods.table",
    "Method": "methods.axes",
    "Rollouts": "batch.rollouts",
    "advantage": "objective.advantages",
    "surrogate": "objective.surrogate",
    "effective_credit": "objective.surrogate",
    "Record": "runs.record",
    "spectrum": "microscope.spectrum",
    "Microscope": "microscope.scope",
    "CreditscopeError": "errors",
}
__all__ = ["METHODS", "CreditscopeError", "Method", "Microscope", "Record", "Rollouts", "advantage", "effective_credit",
           "spectrum", "surrogate"]

if TYPE_CHECKING:
    from creditscope.batch.rollouts import Rollouts
    from creditscope.errors import CreditscopeError
    from creditscope.methods.axes import Method
    from creditscope.methods.table import METHODS
    from creditscope.microscope.scope import Microscope
    from creditscope.microscope.spectrum import spectrum
    from creditscope.objective.advantages import advantage
    from creditscope.objective.surrogate import effective_credit, surrogate
    from creditscope.runs.record import Record


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'creditscope' has no attribute {name!r}")
    with install_hint(f"creditscope.{name}"):
        value = getattr(importlib.import_module(f"creditscope.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
