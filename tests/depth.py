"""How much of a sweep is tested: a part in `make test`, all of it in the gate (`make gate`).

`make gate` sets CREDITSCOPE_DEPTH=full and runs the tests marked `nightly`, which only it runs, and `deep`, which
take part of their cases in `make test`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

FULL = os.environ.get("CREDITSCOPE_DEPTH") == "full"
Case = TypeVar("Case")


def examples(full: int) -> int:
    """How many draws hypothesis makes: a quarter in `make test`."""
    return full if FULL else max(10, full // 4)


def some(cases: Sequence[Case], *always: Case, every: int = 4) -> list[Case]:
    """In `make test` each `every`-th case and those that stand for a branch of their own; at full depth all of them."""
    cases = list(cases)
    return cases if FULL else [case for n, case in enumerate(cases) if n % every == 0 or case in always]
