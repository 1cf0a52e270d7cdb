"""A method by its name, or by the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creditscope.errors import CreditscopeError, unknown
from creditscope.methods.axes import OWN_CREDIT, Method
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.table import METHODS


def find(name: str) -> Method:
    """A paper's method or a library's dialect of one.

    >>> find("dr_grpo").aggregate
    'constant'
    """
    table = {**METHODS, **DIALECTS}
    if name not in table:
        raise unknown("method", name, METHODS, see="creditscope list methods")
    return table[name]


def row_of(settings: Mapping[str, Any]) -> Method | None:
    """The row that a run's settings name, with the run's own β; None where this version has no such row.

    >>> row_of({"method": "grpo", "beta": 0.04}).beta
    0.04
    """
    name, beta = settings.get("method"), settings.get("beta")
    try:
        row = find(name) if isinstance(name, str) else None
        return row if row is None or beta is None else row.replace(beta=beta)
    except (CreditscopeError, TypeError, OverflowError):  # settings are untrusted
        return None


def credit_of(settings: Mapping[str, Any]) -> str:
    """The credit estimator of a run's settings, as --credit spells it; where none is named, the method's default."""
    row = row_of(settings)
    return str(settings.get("credit") or (OWN_CREDIT if row is None else row.default_credit))
