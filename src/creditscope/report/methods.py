"""The method of a run: its row in full, and how it differs from GRPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditscope.files.markup import Html, join, tag
from creditscope.methods.axes import Method
from creditscope.methods.find import row_of
from creditscope.methods.table import GRPO
from creditscope.methods.words import axis_meaning, equation, law
from creditscope.report.run import Run
from creditscope.report.section import Section, missing

Change = tuple[str, Any, Any]


def section(run: Run, papers: bool = False) -> Section:
    return of([run.config], papers)


def of(configs: Sequence[Mapping[str, Any]], papers: bool = False) -> Section:
    """The rows of some runs; with `papers` each names its paper and where it departs from it."""
    rows: dict[str, Method] = {}
    strange: dict[str, None] = {}
    for config in configs:
        row = row_of(config)
        if row is None:
            strange[str(config.get("method"))] = None
        else:
            rows.setdefault(f"{row.name}, β = {row.beta:g}" if row.beta else row.name, row)
    body = join(
        *(missing(f"No row of the table is called {name}.", "creditscope list methods") for name in strange),
        *(_one(label, row, papers) for label, row in rows.items()),
        tag("p", "All rows, with their sources: ", tag("code", "creditscope list methods")))
    return Section(id="methods", title="Method",
                   lead="A method is a row of choices in J = Σ_it α_it · term_it − β·R. Each row is told by what "
                        "differs from GRPO.", body=body)


def changes(row: Method) -> list[Change]:
    """(axis, GRPO's value, this row's value) where they differ, without numbers that only GRPO's bound needs.

    >>> from creditscope.methods.table import DR_GRPO
    >>> changes(DR_GRPO)
    [('scale', 'group_std', 'none'), ('aggregate', 'sequence_mean', 'constant')]
    """
    return [(axis, theirs, ours) for axis, (theirs, ours) in row.diff(GRPO).items()
            if not (ours is None and axis.startswith("clip_") and row.bound != GRPO.bound)]


def _one(label: str, row: Method, papers: bool) -> Html:
    found, value, source = changes(row), law(row), f", arXiv:{row.arxiv}" if papers and row.arxiv else ""
    lines = [tag("li", tag("code", axis), f": {_short(theirs)} → {_short(ours)}", f" ({meaning})" if (
        meaning := axis_meaning(row, axis, ours)) not in ("", ours) else None) for axis, theirs, ours in found]
    return tag(
        "div", tag("h3", label, tag("span", f" {row.title}{source}", class_="soft")),
        tag("pre", equation(row)),
        tag("p", "It differs from GRPO in:" if found else "It is GRPO's own row."),
        tag("ul", *lines) if found else None,
        tag("p", tag("strong", "At ratio 1 "), tag("code", value.formula), f" {value.sentence}"),
        tag("p", row.note, class_="soft") if papers and row.note else None, class_="method", data_method=row.name)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
