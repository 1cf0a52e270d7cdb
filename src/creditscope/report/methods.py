"""The methods: this run's row in full, and the table of all rows beside it. Made from the rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditscope.methods.axes import Method
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.find import row_of
from creditscope.methods.table import GRPO, METHODS
from creditscope.methods.words import (
    advantage_equation,
    alpha_text,
    axis_meaning,
    equation,
    law,
    penalty_text,
    term_text,
)
from creditscope.report.markup import Html, join, tag
from creditscope.report.run import Run
from creditscope.report.section import Section, missing

Change = tuple[str, Any, Any]


def section(run: Run) -> Section:
    """The table, with the row of one run."""
    return of([run.config])


def of(configs: Sequence[Mapping[str, Any]]) -> Section:
    """The table, with the rows of some runs."""
    rows: dict[str, Method] = {}
    strange: dict[str, None] = {}
    for config in configs:
        row = row_of(config)
        if row is None:
            strange[str(config.get("method"))] = None
        else:
            rows.setdefault(f"{row.name}, β = {row.beta:g}" if row.beta else row.name, row)
    names = {row.name for row in rows.values()}
    body = join(
        *(missing(f"No row of the table is called {name}.", "creditscope methods") for name in strange),
        *(_one(label, row) for label, row in rows.items()),
        _table("methods-papers", f"All {len(METHODS)} rows of papers", METHODS, names),
        _table("methods-dialects", f"What TRL and verl compute under these names: {len(DIALECTS)} rows", DIALECTS,
               names))
    return Section(id="methods", title="Method",
                   lead="A method is a row of choices in J = Σ_it α_it · term_it − β·R. Each row is told by what "
                        "differs from GRPO.", body=body)


def changes(row: Method) -> list[Change]:
    """(axis, GRPO's value, this row's value) along which the row differs from GRPO; numbers that GRPO's choice alone
    needs are left out.

    >>> changes(METHODS["dr_grpo"])
    [('scale', 'group_std', 'none'), ('aggregate', 'sequence_mean', 'constant')]
    """
    return [(axis, theirs, ours) for axis, (theirs, ours) in row.diff(GRPO).items()
            if not (ours is None and axis.startswith("clip_") and row.bound != GRPO.bound)]


def _one(label: str, row: Method) -> Html:
    """A row in full."""
    found, value = changes(row), law(row)
    lines = [tag("li", tag("code", axis), f": {_short(theirs)} → {_short(ours)}", f" ({meaning})" if (
        meaning := axis_meaning(axis, ours)) not in ("", ours) else None) for axis, theirs, ours in found]
    return tag(
        "div", tag("h3", label, tag("span", f" {row.title}, arXiv:{row.arxiv}", class_="soft") if row.arxiv else None),
        tag("pre", equation(row)),
        tag("p", "It differs from GRPO in:" if found else "It is GRPO's own row."),
        tag("ul", *lines) if found else None,
        tag("p", tag("strong", "At ratio 1 "), tag("code", value.formula), f" {value.sentence}"),
        tag("p", row.note, class_="soft") if row.note else None, class_="method", data_method=row.name)


def _table(id: str, title: str, rows: Mapping[str, Method], own: set[str]) -> Html:
    headers = ("method", "differs from GRPO", "advantage A", "weight α", "term", "R", "J at ratio 1")
    head = tag("tr", *(tag("th", header, scope="col") for header in headers))
    body = [tag("tr", tag("th", name, " ← this run" if name in own else None, scope="row"),
                *(tag("td", cell) for cell in _cells(row)), class_="own" if name in own else None)
            for name, row in rows.items()]
    return tag("details", tag("summary", title), tag("div", tag("table", tag("thead", head), tag("tbody", *body)),
                                                     class_="wide", tabindex="0", role="region", aria_label=title),
               id=id)


def _cells(row: Method) -> tuple[str, ...]:
    differs = ", ".join(f"{axis} {_short(ours)}" for axis, _, ours in changes(row)) or "–"
    return (differs, advantage_equation(row).split("   ")[0], alpha_text(row), term_text(row), penalty_text(row),
            law(row).formula)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
