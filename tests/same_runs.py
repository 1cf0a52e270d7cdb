"""Whether two records are of one run: every line but its times, every array, and the weights bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from creditscope.runs.record import SHELVES, Record

TIMED = ("time/", "scope/ratio", "scope/share")
"""Metrics that no seed can fix."""


def untimed(path: Path) -> list[dict[str, Any]]:
    """The lines without their times, and without the sums over them."""
    return [{name: value for name, value in line.items() if not name.startswith((*TIMED, "crc32"))}
            for line in Record.open(path).steps()]


def differences(one: Path, other: Path) -> list[str]:
    """In what two records differ."""
    found = ["steps.jsonl"] * (untimed(one) != untimed(other))
    for names in ("checkpoints/*/*", "model/*", *(f"{shelf}/*.npz" for shelf in SHELVES)):
        here, there = ({path.relative_to(root) for path in root.glob(names)} for root in (one, other))
        found += [f"{name} is in one of them" for name in sorted(here ^ there)]
        found += [str(name) for name in sorted(here & there) if not _same(one / name, other / name)]
    return found


def _same(one: Path, other: Path) -> bool:
    if one.suffix != ".npz":
        return one.read_bytes() == other.read_bytes()
    with np.load(one, allow_pickle=False) as a, np.load(other, allow_pickle=False) as b:
        return set(a) == set(b) and all(a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes()
                                        for name in a)
