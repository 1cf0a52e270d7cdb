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

SECTIONS: tuple[Callable[..., Section], ...] = (
    steps.section, tokens.section, directions.section, layers.section, optimizer.section, claims.section,
    methods.section, glossary.section)
"""The page from top to bottom, below the first screen; the claims are on it only with --papers."""
CITING = (methods.section, glossary.section)
"""They name papers with --papers only: the page is about the run."""


def read(paths: Sequence[Path], told: Callable[[int, int], None] = lambda done, total: None) -> Run | Several:
    """One run's folder; or several runs, or a file of evidence, to compare. `told(done, total)` reports progress."""
    found = places(paths)
    return read_run(found[0]) if len(found) == 1 and not found[0].is_file() else settings.read(paths, told)


def made(make: Callable[..., Section], run: Run, papers: bool = False) -> Section:
    """A section, or why it could not be made: one bad array must not lose the page."""
    try:
        return make(run, papers=papers) if make in CITING else make(run)
    except (CreditscopeError, *claims.ODD) as error:
        name = make.__module__.rpartition(".")[2]
        run.faults.append(f"{name}: not as a run has it ({type(error).__name__}: {error})")
        return Section(id=name, title=name.capitalize(),
                       body=missing("This part of the record is not as a run has it."))


def build(paths: Sequence[Path], live: bool = False, papers: bool = False) -> str:
    return page_of(read(paths), live, papers)


def page_of(found: Run | Several, live: bool = False, papers: bool = False) -> str:
    """The file's text; with `papers` also the papers' claims, put to these runs, and where definitions come from.

    Sections are made before the first screen, which lists what they could not read.
    """
    if isinstance(found, Run):
        parts = [made(make, found, papers) for make in SECTIONS if papers or make is not claims.section]
        first, title = header.first_screen(found), found.name
    else:
        parts, title = compare.sections(found, papers), f"{len(found.entries)} runs"
        first = compare.first_screen(found)
    return page(f"{title}: creditscope report", first, parts, live)
