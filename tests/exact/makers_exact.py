"""What the tests of exact claims share: one verdict out of several, and tables of methods that were changed."""

from __future__ import annotations

from creditscope import METHODS, Method
from creditscope.claims.verdict import ClaimVerdict


def said(verdicts: list[ClaimVerdict], subject: str, definition: str = "") -> ClaimVerdict:
    """The one verdict on a subject whose definition holds these words."""
    (found,) = [v for v in verdicts if v.subject == subject and definition in v.definition]
    return found


def swapped(**rows: Method) -> dict[str, Method]:
    """Our table with some rows exchanged."""
    return {**METHODS, **{name: row.replace(name=name) for name, row in rows.items()}}
