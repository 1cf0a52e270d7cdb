"""Formats of a record, and the names of older ones: everything that reads a record goes through `upgraded`.

Format 1 (0.1) called two quantities credit: A in some names, w in others. Format 2 says w for w. No name of one format
means another thing in the other, so a run of format 1 may be resumed: its record then holds both spellings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMAT = 2
READ = (1, FORMAT)

OLD: Mapping[str, Mapping[str, str]] = {
    "steps": {
        "credit/top10_mass": "w/top10_mass", "credit/zero": "w/zero", "credit/positive_mass": "w/positive_mass",
        "gram/credit_null": "gram/w_null", "gram/group/credit_null": "gram/group/w_null"},
    "scope": {"credit": "row_w"},
    "evidence": {"credit_null": "w_null", "credit_sum": "w_sum"},
}
"""Part of a record -> name in format 1 -> name now; `evidence`: columns of groups in an evidence file."""


def upgraded(values: Mapping[str, Any], part: str, form: int) -> dict[str, Any]:
    """The same values under the names of today; `part` is steps, groups, scope, optimizer or evidence.

    >>> upgraded({"step": 0, "credit/zero": 0.5, "credit/within": 0.0}, "steps", form=1)
    {'step': 0, 'w/zero': 0.5, 'credit/within': 0.0}
    """
    names = OLD.get(part, {}) if form < FORMAT else {}
    if not names:
        return dict(values)
    found = {names.get(name, name): value for name, value in values.items()}
    if isinstance(found.get("absent"), dict):
        found["absent"] = upgraded(found["absent"], part, form)
    return found
