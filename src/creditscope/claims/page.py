"""Verdicts and evidence as pages: every claim with its verdicts; P1's Table 1 and curves beside ours."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from creditscope.claims.evidence import Evidence, cells, mean_of
from creditscope.claims.reading import from_three, sweeps, with_outcome
from creditscope.claims.table import CLAIMS, find_claims
from creditscope.claims.verdict import NOTHING, ClaimVerdict
from creditscope.claims.verdict import SHAPES as SHAPES
from creditscope.errors import printable
from creditscope.runs.intervals import Interval, mean_interval
from creditscope.runs.numbers import spanned

ROUNDING = 1e-9
"""Below it a number is the rounding of a float64 sum, which differs from machine to machine."""


def place(subject: str) -> str:
    """The place of a verdict: the model · task · method of its runs; "no run"; or "exact", for closed forms and
    enumeration.

    >>> place("tiny · arithmetic · grpo, μ = 4"), place("torch.optim.AdamW, one parameter"), place("runs")
    ('tiny · arithmetic · grpo', 'exact', 'no run')
    """
    parts = subject.split(" · ")
    if len(parts) >= 3:
        return " · ".join([*parts[:-1], parts[-1].partition(",")[0]])
    return NOTHING if subject in ("runs", NOTHING) else "exact"


def by_place(verdicts: Sequence[ClaimVerdict]) -> dict[tuple[str, str], list[ClaimVerdict]]:
    """(claim, place) -> its verdicts, in the order of the claims."""
    out: dict[tuple[str, str], list[ClaimVerdict]] = {}
    for verdict in verdicts:
        out.setdefault((verdict.claim, place(verdict.subject)), []).append(verdict)
    order = list(CLAIMS)
    return dict(sorted(out.items(), key=lambda item: order.index(item[0][0])))


def told(verdicts: Sequence[ClaimVerdict]) -> str:
    """The outcomes of one claim on one subject: a word where they agree, else how many of each.

    >>> from creditscope.claims.verdict import ClaimVerdict
    >>> some = [ClaimVerdict(claim="P1.5", definition=d, subject="", outcome=o, reason="")
    ...         for d, o in (("full", "refuted"), ("qv", "refuted"), ("cut to 2", "holds"))]
    >>> told(some), told(some[:1]), told(some[:2])
    ('✗ 2 refuted, ✓ 1 holds', '✗ refuted', '✗ refuted (2 of 2)')
    """
    count = Counter(verdict.outcome for verdict in verdicts)
    if len(count) > 1:
        return ", ".join(f"{SHAPES[outcome]} {count[outcome]} {outcome}"
                         for outcome in ("refuted", "holds", "undecided") if outcome in count)
    (outcome, n), = count.items()
    return f"{SHAPES[outcome]} {outcome}" + (f" ({n} of {n})" if n > 1 else "")


def number(value: float) -> str:
    """Three digits; a number below rounding is 0.

    >>> number(0.12345), number(1234.5), number(-3e-17), number(2.0)
    ('0.123', '1,234', '0', '2')
    """
    if abs(value) < ROUNDING:
        return "0"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def observed(verdict: ClaimVerdict) -> str:
    """The observed value with its interval; empty where there is none."""
    if verdict.observed is None:
        return ""
    ends = "" if verdict.interval is None else f" [{number(verdict.interval[0])}, {number(verdict.interval[1])}]"
    return number(verdict.observed) + ends


def sample(verdict: ClaimVerdict) -> str:
    """n and what it counts."""
    return "" if verdict.n is None else f"{verdict.n:,} {verdict.of}".rstrip()


def summary(verdicts: Sequence[ClaimVerdict]) -> str:
    """How many verdicts of each kind.

    >>> summary([])
    'no verdict'
    """
    if not verdicts:
        return "no verdict"
    count = Counter(verdict.outcome for verdict in verdicts)
    claims = len({verdict.claim for verdict in verdicts})
    return (f"{claims} claim{'s' * (claims > 1)}, {len(verdicts)} verdict{'s' * (len(verdicts) > 1)}: "
            f"{count['holds']} hold, {count['refuted']} refuted, {count['undecided']} undecided")


def plain(text: str) -> str:
    r"""Untrusted text for a cell of a table, with tags, links, cell ends and new lines escaped.

    >>> plain("a|b <i>*c*[d](e)\nf")
    'a\\|b &lt;i&gt;\\*c\\*\\[d\\](e) f'
    """
    return re.sub(r"([\\`*|\[\]~])", r"\\\1", html.escape(printable(" ".join(text.split())), quote=False))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; the cells are ready to print."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def readme_table(verdicts: Sequence[ClaimVerdict]) -> str:
    """One line per claim: id, claim, and its verdict on each subject."""
    found: dict[str, list[str]] = {}
    for (claim, where), some in by_place(verdicts).items():
        found.setdefault(claim, []).append(f"{told(some)}: {plain(where)}")
    rows = [[claim, plain(CLAIMS[claim].title), "<br>".join(cells)] for claim, cells in found.items()]
    return "\n".join(table(["", "claim", "verdict"], rows)) + "\n"


def verdict_table(verdicts: Sequence[ClaimVerdict], columns: Mapping[str, str]) -> str:
    """One line per claim, one column per kind of subject: `columns` maps its title to how its places begin.
    A cell without a verdict stays empty.
    """
    found: dict[str, dict[str, list[ClaimVerdict]]] = {}
    for (claim, where), some in by_place(verdicts).items():
        for title, start in columns.items():
            if where.startswith(start):
                found.setdefault(claim, {}).setdefault(title, []).extend(v for v in some if v.observed is not None)
    rows = [[claim, plain(CLAIMS[claim].title),
             *(told(own[title]) if own.get(title) else "" for title in columns)] for claim, own in found.items()]
    return "\n".join(table(["", "claim", *columns], rows)) + "\n"


READING = """\
A verdict is ✓ holds, ✗ refuted or ? undecided. Each test compares one number with a threshold that stands in the code;
where the number is an estimate its 95 % interval decides, and must lie wholly on one side. A claim that depends on a
definition has one verdict per definition.
"""


def claims_page(verdicts: Sequence[ClaimVerdict], ids: Sequence[str] = (), about: str = "") -> str:
    """Every claim of `ids`: statement, place, rule, verdicts by definition and subject, and how to run it again.

    `about` says what the verdicts were reached on; a claim without a verdict says what it needs.
    """
    out = ["# Claims\n", READING]
    out += [f"{about}\n"] * bool(about) + [f"{summary(verdicts).capitalize()}.\n", readme_table(verdicts)]
    for claim in find_claims(ids):
        out += [f"## {claim.id} {claim.title}\n", f"{claim.statement}\n", f"- where: {claim.where}",
                f"- rule: {claim.rule}", *([f"- needs: {claim.ask}"] if claim.ask else []), ""]
        own = [verdict for verdict in verdicts if verdict.claim == claim.id]
        out += [*_found(own), ""] if own else ["No verdict yet.\n"]
        commands = [f"creditscope papers check --exact --claim {claim.id}"] * (claim.exact is not None)
        commands += [f"creditscope papers check RUN... --claim {claim.id}"] * (claim.runs is not None)
        out += ["Again:\n", "```", *commands, "```\n"]
    return "\n".join(out)


def _found(verdicts: Sequence[ClaimVerdict]) -> list[str]:
    rows = [[plain(v.definition), plain(v.subject), f"{SHAPES[v.outcome]} {v.outcome}", observed(v), plain(v.expected),
             plain(v.threshold), plain(sample(v)), plain(v.reason)] for v in verdicts]
    return table(["definition", "subject", "verdict", "observed", "expected", "rule", "n", "why"], rows)


PRINTED = {2: ("≈ 2", "0.6–0.7", "2"), 4: ("≈ 2", "0.7–0.8", "3"), 8: ("≈ 2", "0.5–0.6", "7")}
"""R -> effective rank, top-1 share and "max rank" as arXiv:2606.29238 prints them (Table 1)."""
LEGEND = """\
- P1: as printed in arXiv:2606.29238, Table 1 (Nemotron-4B, GSM8K). All else is measured here.
- r_eff: effective rank (Σσ)²/Σσ² of a group's R rollout gradients, mean over live groups and readings, then over runs.
  all: every parameter in one matrix; a layer: each q_proj and v_proj by itself, then their mean, as P1 did; q and v:
  those of all layers in one matrix. cut to 2: what an SVD truncated to two values prints.
- null: r_eff of orthogonal scores of equal norm under the same w.
- top-1: σ₁²/Σσ². rank: singular values above rounding; P1's "max rank" is a bound for centred scores.
- reward std: in live groups. before, after: test problems solved by one sample at temperature 1.
- [ ]: 95 % t-interval over runs; fewer than three runs have none.
"""


Cell = Callable[[int, Sequence[Evidence]], str]
"""(R, its runs) -> the cell of the table."""


def _printed(place: int) -> Cell:
    return lambda size, runs: PRINTED[size][place] if size in PRINTED else ""


def _mean(column: str) -> Cell:
    """Of a column of the evidence, with its interval."""
    return lambda size, runs: "" if (found := mean_of(runs, column)) is None else str(found)


def _accuracy(place: int) -> Cell:
    """At the first (0) or the last (−1) evaluation of the runs that have one."""
    def cell(size: int, runs: Sequence[Evidence]) -> str:
        values = [points[place][1] for run in runs if (points := run.points())]
        return spanned(from_three(mean_interval(values)), ".1f", 100) if values else ""

    return cell


COLUMNS: Mapping[str, Cell] = {
    "R": lambda size, runs: str(size),
    "P1: r_eff": _printed(0),
    "r_eff, all": _mean("all/effective_rank"),
    "all, cut to 2": _mean("all/effective_rank_truncated_2"),
    "r_eff, a layer": _mean("layer/effective_rank"),
    "a layer, cut to 2": _mean("layer/effective_rank_truncated_2"),
    "r_eff, q and v": _mean("qv/effective_rank"),
    "null": _mean("w_null"),
    "P1: top-1": _printed(1),
    "top-1, all": _mean("all/top1"),
    "top-1, a layer": _mean("layer/top1"),
    "P1: max rank": _printed(2),
    "rank, all": _mean("all/numerical_rank"),
    "reward std": _mean("reward_std"),
    "before, %": _accuracy(0),
    "after, %": _accuracy(-1),
    "runs": lambda size, runs: str(len(runs)),
}


def table1(runs: Sequence[Evidence]) -> str:
    """P1's Table 1 beside ours, a table for every family of runs with outcome credit that differ in R alone."""
    out = ["# P1's Table 1, and ours\n"]
    for family in sweeps(with_outcome(runs), lambda run: len(run.column("all/effective_rank"))):
        rows = [[cell(size, own) for cell in COLUMNS.values()] for size, own in cells(family, "group").items()]
        out += [f"## {plain(family[0].subject)}\n", *table(list(COLUMNS), rows), ""]
    return "\n".join([*out, LEGEND])


Curves = dict[str, list[tuple[int, Interval]]]
"""R -> (step, mean over runs) in order."""
FIGURES: Mapping[str, tuple[str, Callable[[Evidence], Mapping[int, float]]]] = {
    "rank": ("effective rank, all parameters", lambda run: run.by_step("all/effective_rank")),
    "top1": ("top-1 energy share, all parameters", lambda run: run.by_step("all/top1")),
    "accuracy": ("accuracy on unseen problems", lambda run: dict(run.points(by="step"))),
}
"""P1's Figures 1 to 3: name -> (title, values by step)."""


def curves(runs: Sequence[Evidence], values: Callable[[Evidence], Mapping[int, float]]) -> Curves:
    """A number over training by R, with the interval over runs at every step that one of them has."""
    out: Curves = {}
    for size, own in cells(runs, "group").items():
        by_step: dict[int, list[float]] = {}
        for run in own:
            for step, value in values(run).items():
                if math.isfinite(value):
                    by_step.setdefault(step, []).append(value)
        if by_step:
            out[f"R = {size}"] = [(step, mean_interval(found)) for step, found in sorted(by_step.items())]
    return out


WHY = {"w alone": "w_null", "and the measured norms": "all/norm_null", "measured": "all/effective_rank",
       "measured, cut to 2": "all/effective_rank_truncated_2"}
"""C.1 as a figure: curve -> column of `groups`."""


def why_low(runs: Sequence[Evidence]) -> Curves:
    """The effective rank by R: of orthogonal scores of equal norm, of orthogonal scores of the measured norms, and as
    measured. Unequal norms explain the gap between the first two curves, alignment that between the next two.
    """
    out: Curves = {}
    for name, column in WHY.items():
        for size, own in cells(runs, "group").items():
            if (found := mean_of(own, column)) is not None:
                out.setdefault(name, []).append((size, found.value))
    return out
