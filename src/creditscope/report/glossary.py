"""Every metric that the page shows: its equation, what it means, and where it comes from, under an anchor to link to.

Definitions are those of `runs.schema`; here are the words that are no metric, and which part of the page an area is in.
The same reading of a batch, of a group, of scores or of one layer has one entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from creditscope.report.markup import Html, tag
from creditscope.report.run import Run
from creditscope.report.section import Section
from creditscope.runs import schema
from creditscope.runs.schema import P2, Metric


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of the glossary."""

    name: str
    """As the page says it."""
    equation: str = ""
    text: str
    unit: str = ""
    source: str = ""


WORDS = {
    "w": Term(name="w, effective credit", equation="w_it = ∂J/∂log π(y_it)",
              text="What the objective makes of a token's credit. The gradient is Σ_it w_it ∇log π(y_it). A token with "
                   "w = 0 while A ≠ 0 is clipped or dropped."),
    "advantage": Term(name="A, credit", equation="A_it", text="What the estimator gave a token, before weights, ratios "
                                                              "and clipping: its advantage."),
    "ratio": Term(name="ρ, ratio", equation="ρ_it = π(y_it)/π_old(y_it)",
                  text="1 at the first update on a batch: nothing can be clipped there."),
    "prefix": Term(name="W, weight on a shared prefix", equation="W = Σ_{i∈S} w_it",
                   text="What the answers S that share a prefix do to it together. It cancels where the weights of a "
                        "whole group are even.", source=f"{P2}, Proposition 1"),
    "gram": Term(name="K, Gram matrix", equation="K_ij = ⟨g_i, g_j⟩, g_i = Σ_t w_it ∇log π(y_it)",
                 text="Inner products of the rollouts' gradients over all trainable parameters. Its entries sum to "
                      "‖∇J‖²."),
    "singular_values": Term(name="σ, singular values", equation="σ_k² = eigenvalues of K",
                            text="How far the rollouts of a group push along each direction."),
    "interval": Term(name="95 % interval over seeds", equation="mean ± t_{0.975, n−1} · s/√n",
                     text="Student's t over runs that differ only in the seed; fewer than three runs have none."),
}
"""What the page names and no metric is."""
HOMES: Mapping[str, tuple[str, ...]] = {
    "Signal": ("reward", "signal", "length", "entropy", "objective", "grad", "policy"),
    "Credit": ("w", "advantage", "ratio", "credit", "critic", "prefix"),
    "Directions": ("gram", "singular_values", "sketch", "baseline", "tokens"),
    "Optimiser": ("overshoot", "optimizer", "update", "brake"),
    "Learning and cost": ("eval", "interval", "rollouts", "adapt", "scope", "time", "run"),
}
"""Heading -> areas of metrics and words, in the order of the page."""


def _terms(place: str) -> dict[str, Term]:
    """A word, and the metrics of an area."""
    out = {place: WORDS[place]} if place in WORDS else {}
    for metric in schema.METRICS.values():
        if metric.area == place and metric.recorded and metric.area != "prefix":
            out.setdefault(metric.term, _term(metric))
    return out


def _term(metric: Metric) -> Term:
    return Term(name=metric.name, equation=metric.equation, text=metric.sentence, unit=metric.unit,
                source=metric.source)


PARTS: Mapping[str, Mapping[str, Term]] = {
    heading: {name: term for place in places for name, term in _terms(place).items()}
    for heading, places in HOMES.items()}
"""Heading -> key -> term, in the order of the page."""
TERMS: Mapping[str, Term] = {key: term for part in PARTS.values() for key, term in part.items()}


def key(metric: str) -> str | None:
    """The key of a metric's term, None where it has none.

    >>> key("gram/group/top1"), key("reward/mean"), key("overshoot/3/past"), key("time/train"), key("no/such")
    ('top1', 'reward_mean', 'overshoot_past', 'time_step', None)
    """
    found = schema.metric(metric)
    name = metric if found is None else found.term
    return name if name in TERMS else None


def anchor(metric: str) -> str:
    """The id of a metric's term on the page: of a metric's name, or of a key such as `w`.

    >>> anchor("gram/group/effective_rank"), anchor("w")
    ('glossary-effective_rank', 'glossary-w')
    """
    found = key(metric)
    assert found is not None, f"{metric} has no entry in the glossary"
    return f"glossary-{found}"


def link(metric: str, text: str | None = None) -> Html:
    """A link to a metric's definition; its text is the term's name unless told."""
    place = anchor(metric)
    return tag("a", text or TERMS[place.removeprefix("glossary-")].name, href=f"#{place}")


def section(run: Run | None = None) -> Section:
    """The glossary. It is the same for every run."""
    parts = [tag("div", tag("h3", heading), tag("dl", *(_lines(key, term) for key, term in terms.items())))
             for heading, terms in PARTS.items()]
    return Section(id="glossary", title="Glossary",
                   lead="B rollouts in groups of R, T tokens. r reward, A advantage, ρ ratio, ψ_i = Σ_t ∇log π(y_it) "
                        "score, g_i gradient of rollout i, Δ update. P1 is arXiv:2606.29238, P2 is arXiv:2601.05002.",
                   body=tag("div", *parts, class_="glossary"))


def _lines(key: str, term: Term) -> Html:
    soft = "; ".join(filter(None, (f"unit: {term.unit}" if term.unit else "", term.source)))
    return tag("div", tag("dt", term.name, id=f"glossary-{key}"),
               tag("dd", tag("code", term.equation, class_="equation") if term.equation else None,
                   tag("span", term.text), tag("span", f" {soft}", class_="soft") if soft else None))
