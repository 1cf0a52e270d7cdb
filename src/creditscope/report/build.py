"""Records to a page: one run in full, several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from creditscope.claims.evidence import places
from creditscope.errors import CreditscopeError
from creditscope.report import (
    claims,
    compare,
    directions,
    glossary,
    header,
    layers,
    methods,
    optimizer,
    settings,
    steps,
    tokens,
)
from creditscope.report.page import page
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section, missing
from creditscope.report.settings import Several

SECTIONS: tuple[Callable[[Run], Section], ...] = (
    steps.section, tokens.section, directions.section, layers.section, optimizer.section, claims.section,
    methods.section, glossary.section)
"""The page from top to bottom, below the first screen."""


def read(paths: Sequence[Path], told: Callable[[int, int], None] = lambda done, total: None) -> Run | Several:
    """One run's folder, or all that is to be compared: several, or a file of evidence, which is no whole run. `told`
    hears how many of several are read."""
    found = places(paths)
    return read_run(found[0]) if len(found) == 1 and not found[0].is_file() else settings.read(paths, told)


def build(paths: Sequence[Path], live: bool = False) -> str:
    """The file's text."""
    return page_of(read(paths), live)


def made(make: Callable[[Run], Section], run: Run) -> Section:
    """A section, or why it could not be made: one odd array does not take the page with it."""
    try:
        return make(run)
    except (CreditscopeError, *claims.ODD) as error:
        name = make.__module__.rpartition(".")[2]
        run.faults.append(f"{name}: not as a run has it ({type(error).__name__}: {error})")
        return Section(id=name, title=name.capitalize(),
                       body=missing("This part of the record is not as a run has it."))


def page_of(found: Run | Several, live: bool = False) -> str:
    """The sections come first: what they could not read is said on the first screen."""
    if isinstance(found, Run):
        parts, title = [made(make, found) for make in SECTIONS], found.name
        first = header.first_screen(found)
    else:
        parts, title = compare.sections(found), f"{len(found.entries)} runs"
        first = compare.first_screen(found)
    return page(f"{title}: creditscope report", first, parts, live)
