"""`creditscope papers check`: test the claims of both papers, and ours, on recorded runs or closed forms."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from creditscope.claims.evidence import Evidence, places, read_place, to_json
from creditscope.claims.page import SHAPES, by_place, claims_page, observed, sample, summary, told
from creditscope.claims.table import CLAIMS, check, find_claims, run_exact
from creditscope.claims.verdict import NOTHING, Claim, ClaimVerdict
from creditscope.cli.output import Output, new_table
from creditscope.cli.positionals import Runs
from creditscope.errors import CreditscopeError, printable
from creditscope.files.guards import resolved
from creditscope.files.writing import write_file
from creditscope.runs.compare import SETTINGS
from creditscope.runs.record import Record

LARGEST = 1e60
"""Largest number accepted; its square is still finite."""
COLOURS = {"✓": "green", "✗": "red", "?": "yellow"}


@dataclass(frozen=True)
class Check:
    """Test the claims of both papers, and ours, on recorded runs or by closed forms.

    A verdict is holds (✓), refuted (✗) or undecided (?), by a threshold in the code; for an estimate its 95 % interval
    decides. Undecided is no failure: the reason names the missing runs. Without runs and without --exact the claims are
    listed.

    For example:
      creditscope papers check --exact                                # closed forms and enumeration, seconds
      creditscope papers check runs/demo/r2 runs/demo/r4 runs/demo/r8
      creditscope papers check runs/p1-tiny-small --claim P1.5 --all  # a verdict for each definition of rank
      creditscope papers check results --strict                       # exit code 1 if a claim is refuted
    """

    runs: Runs = ()
    """Folders of runs, *.evidence.json files (papers check --save), or folders that hold some of either."""
    exact: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run the tests that need no run. They load torch."""
    claim: tuple[str, ...] = ()
    """Ids such as P1.5; by default all."""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Exit with 1 if a claim is refuted. Undecided is no failure."""
    each_verdict: Annotated[bool, tyro.conf.arg(name="all"), tyro.conf.FlagCreatePairsOff] = False
    """A line for every verdict, not one for each claim and subject."""
    why: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The reason of every verdict, not of the refuted alone."""
    save: Path | None = None
    """Write each run as NAME.evidence.json into this folder: a few kilobytes to publish and check again."""
    lean: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --save: leave out the microscope's readings of each group."""
    markdown: Path | None = None
    """Write the claims with their verdicts as a page."""
    output: Annotated[Output, tyro.conf.arg(name="")] = field(default_factory=Output)

    def run(self) -> int:
        claims = find_claims(self.claim)  # before anything is read: an id may be wrong
        if self.lean and self.save is None:
            raise CreditscopeError("--lean says what --save leaves out; give --save FOLDER too")
        if self.save and not self.runs:
            raise CreditscopeError(f"--save {self.save} keeps the evidence of runs; name some")
        if self.markdown and not self.runs and not self.exact:
            raise CreditscopeError(f"--markdown {self.markdown} has no verdict to show; name runs, or give --exact")
        if not self.runs and not self.exact:
            return self._list(claims)
        console = self.output.console()
        evidence = read_runs(self.runs) if self.runs else []
        folders = dict.fromkeys(resolved(place) for place in places(self.runs) if place.is_dir())
        missing = [fault for folder in folders for fault in Record.open(folder).told_missing()]
        verdicts: list[ClaimVerdict] = []
        if self.exact:
            with console.status("closed forms and enumeration: some seconds"):
                verdicts += run_exact(self.claim)
        if evidence:
            verdicts += check(evidence, self.claim)
        kept = [replace(run, groups={}, readings={}) for run in evidence] if self.lean else evidence
        files = save_evidence(self.save, kept) if self.save else []
        if self.markdown:
            write_file(self.markdown, claims_page(verdicts, [claim.id for claim in claims]))
            files.append(self.markdown)
        refuted = any(verdict.outcome == "refuted" for verdict in verdicts)
        if self.output.json:
            self.output.emit({"runs": [run.name for run in evidence], "summary": summary(verdicts),
                              "verdicts": [asdict(verdict) for verdict in verdicts], "faults": missing,
                              "files": [str(path) for path in files]})
        else:
            show(console, verdicts, each_verdict=self.each_verdict, why=self.why)
            for fault in missing:
                console.print(printable(fault), markup=False)
            if not verdicts:
                how = "name runs" if self.exact and not self.runs else "give --exact"
                console.print(f"{', '.join(claim.id for claim in claims)} cannot be tested this way: {how}.")
            if files:
                console.print(f"wrote {', '.join(str(path) for path in files[:3])}"
                              + (f" and {len(files) - 3} more" if len(files) > 3 else ""), markup=False)
            console.next("creditscope papers reproduce p1" if not self.runs else "the same with --markdown claims.md"
                         if self.each_verdict else "the same with --all for every definition")
        return 1 if self.strict and refuted else 0

    def _list(self, claims: Sequence[Claim]) -> int:
        told = [{key: value for key, value in asdict(claim).items() if key != "runs"} for claim in claims]
        if (console := self.output.console_or_json({"claims": told})) is None:
            return 0
        table = new_table("id", "claim", "where", "exact", "on runs: needs", justify="left")
        for claim in claims:
            table.add_row(*map(Text, (claim.id, claim.title, claim.where, "yes" if claim.exact else "",
                                      claim.ask if claim.runs else "")))
        console.print(table)
        console.print("Nothing was checked: name runs, or give --exact for what needs none.", markup=False)
        console.next("creditscope papers check --exact")
        return 0


def read_runs(paths: Iterable[Path]) -> list[Evidence]:
    """The evidence under these paths, with distinct names. A run and its own summary count once."""
    inside = list(dict.fromkeys(resolved(place) for place in places(paths)))
    found: list[Evidence] = []
    seen: set[bytes] = set()
    for place, name in zip(inside, names(inside), strict=True):
        run = _sound(place, read_place(place))
        whole = json.dumps(json.loads(to_json(replace(run, name=""))), sort_keys=True)
        digest = hashlib.blake2b(whole.encode(), digest_size=16).digest()  # saves memory over many runs
        if digest not in seen:
            seen.add(digest)
            found.append(replace(run, name=name))
    return found


def names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ; a seed alone is no name.

    >>> names([Path("p1/r8/seed-0"), Path("p1/r16/seed-0")]), names([Path("old/a.evidence.json")])
    (['r8-seed-0', 'r16-seed-0'], ['a'])
    """
    parts = [(*place.parts[:-1], place.name.removesuffix(".evidence.json")) for place in places]
    for length in range(1, max((len(part) for part in parts), default=0) + 1):
        found = ["-".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found) and not any(re.fullmatch(r"seed-\d+", name) for name in found):
            break
    return found if parts else []


def _sound(place: Path, run: Evidence) -> Evidence:
    """The run, if its settings have their types and its numbers are finite; the files are untrusted."""
    for name, kind in SETTINGS.items():
        value = run[name]
        if value is not None and (isinstance(value, bool) or
                                  not isinstance(value, int | float if kind is float else kind)):
            raise CreditscopeError(f"{place}: {name} is {value!r:.60}, not a {kind.__name__}; is this a run of "
                                   f"creditscope lab train?")
    columns: list[Mapping[str, Any]] = [run.groups, run.readings, run.turns]
    numbers = [(name, value) for some in (run.config, run.versions) for name, value in some.items()
               if isinstance(value, int | float)]
    numbers += [(name, value) for name in run.columns.names for value in run.columns.column(name).values.tolist()]
    numbers += [(name, value) for some in columns for name, values in some.items() for value in values]
    for name, value in numbers:
        if value is not None and not abs(value) <= LARGEST:
            raise CreditscopeError(f"{place} is damaged: {name} is {value!r:.60}, not a number; train the run again, "
                                   f"or leave it out")
    return run


def save_evidence(folder: Path, evidence: Iterable[Evidence]) -> list[Path]:
    """Write NAME.evidence.json for each run."""
    files = {folder / f"{run.name}.evidence.json": run for run in evidence}
    for path, run in files.items():
        write_file(path, to_json(run))
    return list(files)


TABLE = 120
"""Columns from which the verdicts are a table; below it they are listed under their claims."""


def show(console: Console, verdicts: Sequence[ClaimVerdict], each_verdict: bool = False, why: bool = False) -> None:
    """A line per claim and subject, or per verdict; the reasons of the refuted, or of all; the totals."""
    places = by_place(verdicts)
    untested = [] if each_verdict else [claim for claim, where in places if where == NOTHING]
    lines: list[tuple[str, str, str, Text, tuple[str, ...]]] = []
    reasons: list[tuple[str, str]] = []
    for (claim, where), some in places.items():
        for own in [[verdict] for verdict in some] if each_verdict else [some] if where != NOTHING else []:
            first, words = own[0], told(own)
            what, subject = (first.definition, first.subject) if each_verdict else (CLAIMS[claim].title, where)
            numbers = (observed(first), first.expected, sample(first)) if len(own) == 1 else ("", "", "")
            lines.append((claim, what, subject, Text(words, COLOURS[words[0]]), numbers))
        told_of = some if why else [verdict for verdict in some if verdict.outcome == "refuted"]
        shown = told_of if each_verdict or why else told_of[:1]
        more = f" (and {len(told_of) - len(shown)} more: --all)" if len(told_of) > len(shown) else ""
        several = len({verdict.definition for verdict in some}) > 1
        reasons += [(SHAPES[v.outcome], f"{claim} [{v.subject}]{f' {v.definition}' if several and v.definition else ''}"
                                        f": {v.reason}{more}") for v in shown]
    if console.width >= TABLE:
        heads = ("id", "claim", "on", "verdict", *NUMBERS)
        table = new_table(*heads, left=heads[:-1])
        for claim, what, subject, verdict, cells in lines:
            table.add_row(claim, *(Text(printable(text)) for text in (what, subject)), verdict,
                          *(Text(printable(text)) for text in cells))
        console.print(table)
    else:
        show_listed(console, lines)
    if untested:
        more = "" if why else "; --why says what each needs"
        console.print(f"? not tested: {', '.join(untested)}{more}", markup=False)
    for shape, reason in reasons:
        console.print(Text(f"{shape} ", COLOURS[shape]) + Text(printable(reason), "default"))
    console.print(f"{summary(verdicts)}. ✗ is a statement that fails, not an error of this program.", markup=False)


NUMBERS = ("observed", "expected", "n")


def show_listed(console: Console, lines: Sequence[tuple[str, str, str, Text, tuple[str, ...]]]) -> None:
    """Each claim with its title, and below it its verdicts, each with the subject and the numbers it has."""
    for claim, group in itertools.groupby(lines, key=lambda line: line[0]):
        console.print(Text(f"{claim}  {CLAIMS[claim].title}", "bold"))
        for _, what, subject, words, numbers in group:
            about = [subject, *([what] if what != CLAIMS[claim].title else [])]
            facts = [f"{name} {number}" for name, number in zip(NUMBERS, numbers, strict=True) if number]
            told_here = Text(f"  {printable('; '.join(filter(None, [*about, *facts])))}", "default")
            console.print(Padding(words + told_here, (0, 0, 0, 2)))
    if lines:
        console.print()
