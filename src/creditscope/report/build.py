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
"""The page from top to bottom, below the first screen; the claims are on it only with --papers."""


def read(paths: Sequence[Path], told: Callable[[int, int], None] = lambda done, total: None) -> Run | Several:
    """One run's folder; or several runs, or a file of evidence, to compare. `told(done, total)` reports progress."""
    found = places(paths)
    return read_run(found[0]) if len(found) == 1 and not found[0].is_file() else settings.read(paths, told)


def made(make: Callable[[Run], Section], run: Run) -> Section:
    """A section, or why it could not be made: one bad array must not lose the page."""
    try:
        return make(run)
    except (CreditscopeError, *claims.ODD) as error:
        name = make.__module__.rpartition(".")[2]
        run.faults.append(f"{name}: not as a run has it ({type(error).__name__}: {error})")
        return Section(id=name, title=name.capitalize(),
                       body=missing("This part of the record is not as a run has it."))


def build(paths: Sequence[Path], live: bool = False, with_claims: bool = False) -> str:
    return page_of(read(paths), live, with_claims)


def page_of(found: Run | Several, live: bool = False, with_claims: bool = False) -> str:
    """The file's text. Sections are made before the first screen, which lists what they could not read."""
    if isinstance(found, Run):
        parts = [made(make, found) for make in SECTIONS if with_claims or make is not claims.section]
        first, title = header.first_screen(found), found.name
    else:
        parts, title = compare.sections(found, with_claims), f"{len(found.entries)} runs"
        first = compare.first_screen(found)
    return page(f"{title}: creditscope report", first, parts, live)
