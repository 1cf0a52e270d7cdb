"""Command lines of 0.1: old words -> the words of today. Each works for one more version, with a line that says so."""

from __future__ import annotations

from collections.abc import Sequence

GONE = "0.3"
"""The version in which old names are no longer read."""

RENAMED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("demo",), ("lab", "demo")),
    (("train",), ("lab", "train")),
    (("warmup",), ("lab", "warmup")),
    (("compare",), ("lab", "compare")),
    (("check",), ("papers", "check")),
    (("reproduce",), ("papers", "reproduce")),
    (("localise",), ("papers", "localise")),
    (("methods",), ("list", "methods")),
    (("credit",), ("list", "credits")),
    (("optimizer", "--brakes"), ("list", "brakes")),
    (("optimizer", "--carry"), ("papers", "carry")),
    (("optimizer",), ("inspect", "--why")),
    (("scope",), ("inspect",)),
    (("prefix",), ("inspect", "--prefix")),
    (("report", "--claims"), ("report", "--papers")),
)
"""A flag among the old words may stand anywhere in the line. The first row that fits counts."""


def renamed(args: Sequence[str]) -> tuple[list[str], str]:
    """The line in today's words, and the hint, "" where no word is old.

    >>> renamed(["optimizer", "--json", "--brakes"])
    (['list', 'brakes', '--json'], "'optimizer --brakes' is now 'list brakes'; the old name will be removed in 0.3")
    """
    for old, new in RENAMED:
        if args[:1] == list(old[:1]) and all(word in args for word in old):
            rest = [word for word in args[1:] if word not in old[1:]]
            return [*new, *rest], f"{' '.join(old)!r} is now {' '.join(new)!r}; the old name will be removed in {GONE}"
    return list(args), ""
