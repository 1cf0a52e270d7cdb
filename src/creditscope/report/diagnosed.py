"""The diagnosis as the first block of a page: headline, remedy, evidence, what followed, what would settle the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from creditscope.diagnosis.engine import SIGNS, Diagnosis
from creditscope.diagnosis.finding import Finding, State
from creditscope.files.markup import Html, tag


def sign(state: State) -> tuple[Html, str]:
    """The sign, which a screen reader leaves out, and the word."""
    return tag("span", SIGNS[state], class_="shape", aria_hidden="true"), state


def block(found: Diagnosis) -> Html:
    """What `creditscope doctor` prints."""
    first = found.first
    headline = f"{first.rule}: {first.sentence}." if first else found.headline[2:]  # its change and effects stand below
    others = [each for each in found.findings if each.bad and each is not first]
    return tag("div", tag("h2", "Diagnosis", id="diagnosis-title"),
               tag("p", *sign(found.state), class_="state"), tag("p", headline, class_="headline"),
               details(first, found.effects) if first else None,
               tag("ul", *map(_other, others), class_="others") if others else None,
               _open([each for each in found.findings if each.state == "unknown"]),
               _fine(found.findings),
               class_=f"diagnosis {found.state}", id="diagnosis", data_state=found.state,
               data_first=first.rule if first else None, role="region", aria_labelledby="diagnosis-title")


def details(found: Finding, effects: Sequence[Finding] = ()) -> Html:
    """Remedy, expectation, evidence, formula, effects by onset, and what was assumed."""
    assumed = ", ".join(f"{name}={value}" for name, value in (found.assumes or {}).items())
    rows: list[tuple[str, Sequence[object]]] = [
        ("Change", [found.change]), ("Expect", [found.expect]), ("Evidence", found.evidence), ("Why", [found.why]),
        ("Then", [chain(effects)]), ("Settled by", [found.settles]), ("Assumed", [assumed])]
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", *_lines(texts)), class_=name.lower().replace(" ", "-"))
                       for name, texts in rows if any(texts)))


def chain(effects: Iterable[Finding]) -> str:
    """Effects in order of onset: "step 12 length drift, step 20 entropy"."""
    return ", ".join(each.rule if each.onset is None else f"step {each.onset} {each.rule}" for each in effects)


def _lines(texts: Sequence[object]) -> list[object]:
    return [part for text in texts for part in (text, tag("br"))][:-1]


def _other(found: Finding) -> Html:
    """A finding in one line, folded open to its evidence."""
    cause = f" Follows from {found.follows[0]}." if found.follows else ""
    shown = replace(found, change="", expect="") if found.follows else found  # the change is that of the cause
    return tag("li", tag("details", tag("summary", tag("span", *sign(found.state), class_="state"),
                                        f" {found.rule}: {found.sentence}.{cause}"), details(shown)),
               class_=found.state, data_rule=found.rule, data_state=found.state)


def _open(unknown: Sequence[Finding]) -> Html | None:
    """The open questions, with what would settle each."""
    if not unknown:
        return None
    rows = [tag("li", f"{each.rule}: {each.sentence}.", f" Settled by: {each.settles}." if each.settles else "",
                data_rule=each.rule, data_state="unknown") for each in unknown]
    return tag("details", tag("summary", f"{SIGNS['unknown']} unknown: ", *_count(unknown)), tag("ul", *rows),
               class_="open")


def _fine(findings: Sequence[Finding]) -> Html | None:
    fine = [each for each in findings if each.state == "fine"]
    rows = [tag("li", f"{each.rule}: {each.sentence}.", data_rule=each.rule, data_state="fine") for each in fine]
    return tag("details", tag("summary", f"{SIGNS['fine']} fine: ", *_count(fine)), tag("ul", *rows),
               class_="fine-ones") if fine else None


def _count(findings: Sequence[Finding]) -> tuple[str, Html]:
    """How many, and their names, which a narrow page leaves to the list below."""
    names = tag("span", f": {', '.join(each.rule for each in findings)}", class_="names")
    return f"{len(findings)} question{'s' * (len(findings) > 1)}", names
