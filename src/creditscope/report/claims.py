"""The claims as cards: what the runs say of each, by which rule, and the command that tests it again.

Only claims on runs are tested here. Closed forms and enumeration load torch: `creditscope papers check --exact`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from creditscope.claims.evidence import ENOUGH, Evidence, read_evidence
from creditscope.claims.page import SHAPES, observed, sample, told
from creditscope.claims.table import CLAIMS, check
from creditscope.claims.verdict import Claim, ClaimVerdict
from creditscope.errors import CreditscopeError
from creditscope.files.markup import Html, join, tag
from creditscope.report.markup import table
from creditscope.report.run import Run
from creditscope.report.section import Section, missing

ODD = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)
"""Errors of a test on a record that was not written by creditscope lab train."""


def section(run: Run) -> Section:
    try:
        evidence = [read_evidence(run.record, run.steps)]
    except (CreditscopeError, *ODD) as error:
        return _section(missing(f"The claims could not be tested: {error}."), {})
    return of(evidence, [str(run.record.path)])


def of(evidence: Sequence[Evidence], paths: Sequence[str]) -> Section:
    """The claims on some runs; `paths` name them in commands."""
    found, broken = _checked(evidence)
    where = shlex.join(paths) if len(paths) == 1 else "RUN..."
    tested = {claim: some for claim, some in found.items() if any(v.observed is not None for v in some)}
    decided = {claim: some for claim, some in tested.items() if any(v.outcome != "undecided" for v in some)}
    undecided = {claim: some for claim, some in tested.items() if claim not in decided}
    none = tag("p", "None of the claims is decided by what is here.", class_="soft")
    body = join(
        tag("p", "All of it again: ", command(f"creditscope papers check {shlex.join(paths)} --all")),
        tag("div", *(tag("button", text, type="button", data_verdict=word, aria_pressed=str(word == "all").lower())
                     for word, text in FILTERS.items()),
            class_="bar", role="group", aria_label="Show the claims by verdict", id="claims-filter"),
        _cards(decided, where) if decided else none,
        _undecided(undecided, where, len(evidence)) if undecided else None,
        _listed("claims-untested", "not tested: what each needs", ["id", "claim", "needs"],
                [[claim, CLAIMS[claim].title, CLAIMS[claim].ask] for claim in found if claim not in tested], "? "),
        tag("p", f"Not tested, because the record holds something odd: {', '.join(broken)}.", class_="missing")
        if broken else None,
        _listed("claims-exact", join("checked without a run, by ", tag("code", "creditscope papers check --exact")),
                ["id", "claim"], [[one.id, one.title] for one in CLAIMS.values() if one.exact is not None]))
    return _section(body, {word: sum(any(verdict.outcome == word for verdict in some) for some in found.values())
                           for word in SHAPES})


def _section(body: Html, counts: Mapping[str, int]) -> Section:
    return Section(id="claims", title="Claims",
                   lead="What the papers say, put to a test that can fail. A number is held against a threshold that "
                        "stands in the code; where it is an estimate its 95 % interval must lie wholly on one side. "
                        "✗ is a statement that fails, not an error of this run.",
                   body=body, data={"counts": counts} if counts else None)


def _checked(evidence: Sequence[Evidence]) -> tuple[dict[str, list[ClaimVerdict]], list[str]]:
    """(claim -> its verdicts, the claims whose test raised)."""
    found: dict[str, list[ClaimVerdict]] = {}
    broken: list[str] = []
    for claim in CLAIMS.values():
        if claim.runs is None:
            continue
        try:
            found[claim.id] = check(evidence, [claim.id])
        except ODD:
            broken.append(claim.id)
    return found, broken


FILTERS: Mapping[str, str] = {"all": "all"} | {word: f"{shape} {word}" for word, shape in SHAPES.items()}


def command(line: str) -> Html:
    """A command that wraps between words only."""
    return tag("code", *(tag("span", word, " ") for word in line.split(" ")), class_="command")


def _cards(claims: Mapping[str, Sequence[ClaimVerdict]], where: str) -> Html:
    return tag("div", *(_card(CLAIMS[claim], some, where) for claim, some in claims.items()), class_="cards")


def _card(claim: Claim, verdicts: Sequence[ClaimVerdict], where: str) -> Html:
    """One claim: its verdict, the leading number, and the other definitions and subjects in a table."""
    lead = min(verdicts, key=lambda verdict: (_order(verdict), verdict.observed is None))
    rest = [verdict for verdict in verdicts if verdict is not lead]
    return tag(
        "article", tag("h3", told(verdicts), class_="verdict"), tag("p", tag("strong", f"{claim.id} "), claim.title),
        tag("p", tag("span", observed(lead) or "no number", class_="figure-number"), " ",
            " · ".join([f"expected {lead.expected}"] * bool(lead.expected) + [f"rule: {lead.threshold}"] *
                       bool(lead.threshold))),
        tag("p", lead.definition, tag("br"), " · ".join(filter(None, (lead.subject, sample(lead)))), class_="soft"),
        tag("p", f"{lead.outcome.capitalize()}: {lead.reason}."),
        _others(claim, rest) if rest else None,
        tag("details", tag("summary", "The statement and its rule"), tag("p", f"{claim.statement} ({claim.where})"),
            tag("p", claim.rule, class_="soft")),
        tag("p", command(f"creditscope papers check {where} --claim {claim.id} --all")),
        class_=f"card claim {lead.outcome}", id=f"claim-{claim.id}", data_claim=claim.id,
        data_verdict=" ".join(sorted({verdict.outcome for verdict in verdicts})))


def _order(verdict: ClaimVerdict) -> int:
    return ("refuted", "holds", "undecided").index(verdict.outcome)


def _others(claim: Claim, verdicts: Sequence[ClaimVerdict]) -> Html:
    subjects = len({verdict.subject for verdict in verdicts}) > 1
    rows: list[list[object]] = [
        [f"{SHAPES[v.outcome]} {v.outcome}", v.definition + (f" ({v.subject})" if subjects else ""), observed(v) or "–",
         v.threshold] for v in sorted(verdicts, key=_order)]
    return tag("details", tag("summary", f"{len(verdicts)} more, by definition or subject"),
               table(["verdict", "definition", "observed", "rule"], rows, aria_label=f"{claim.id} by definition"))


def _undecided(claims: Mapping[str, Sequence[ClaimVerdict]], where: str, runs: int) -> Html:
    """Claims with a number that does not decide; folded up for few runs."""
    few = runs < ENOUGH
    why = tag("p", f"A number of fewer than {ENOUGH} runs has no interval. Train the same with ",
              tag("code", "--seed 1"), " and ", tag("code", "--seed 2"), " into one folder, then ",
              tag("code", "creditscope papers check FOLDER --all"), ".") if few else None
    return tag("details", tag("summary", f"? {_claims(len(claims))} undecided, with a number"), why,
               _cards(claims, where), id="claims-undecided", open=not few)


def _listed(id: str, what: str, headers: list[object], rows: list[list[object]], mark: str = "") -> Html | None:
    return tag("details", tag("summary", f"{mark}{_claims(len(rows))} ", what), table(headers, rows, aria_label=id),
               id=id) if rows else None


def _claims(count: int) -> str:
    return f"{count} claim{'s' * (count != 1)}"
