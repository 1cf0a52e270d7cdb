"""Every metric that the page shows: its equation, its meaning and its source, under an anchor to link to.

Definitions are those of `runs.schema`; here are the words that are no metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from creditscope.files.markup import Html, join, tag
from creditscope.report.run import Run
from creditscope.report.section import Section
from creditscope.runs import schema
from creditscope.runs.schema import P1, P2, Metric

_word = partial(Metric, unit="", writer="")
WORDS = {str(word): word for word in (
    _word("w", "w, effective credit", equation="w_it = ∂J/∂log π(y_it)",
          sentence="What the objective makes of a token's credit. The gradient is Σ_it w_it ∇log π(y_it). A token with "
                   "w = 0 while A ≠ 0 is clipped or dropped."),
    _word("advantage", "A, credit", equation="A_it",
          sentence="What the estimator gave a token, before weights, ratios and clipping: its advantage."),
    _word("ratio", "ρ, ratio", equation="ρ_it = π(y_it)/π_old(y_it)",
          sentence="1 at the first update on a batch: nothing can be clipped there."),
    _word("prefix", "W, weight on a shared prefix", equation="W = Σ_{i∈S} w_it", source=f"{P2}, Proposition 1",
          sentence="Sum over the answers S that share a prefix. It is 0 where the weights of a whole group are equal."),
    _word("gram", "K, Gram matrix", equation="K_ij = ⟨g_i, g_j⟩, g_i = Σ_t w_it ∇log π(y_it)",
          sentence="Inner products of the rollouts' gradients over all trainable parameters; their sum is ‖∇J‖²."),
    _word("singular_values", "σ, singular values", equation="σ_k² = eigenvalues of K",
          sentence="How far the rollouts of a group push along each direction."),
    _word("interval", "95 % interval over seeds", equation="mean ± t_{0.975, n−1} · s/√n",
          sentence="Student's t over runs that differ only in the seed; fewer than three runs have none."))}
HOMES: Mapping[str, tuple[str, ...]] = {
    "Signal": ("reward", "pairs", "signal", "length", "entropy", "objective", "grad", "policy"),
    "Credit": ("w", "advantage", "ratio", "credit", "critic", "prefix"),
    "Directions": ("gram", "singular_values", "sketch", "baseline", "tokens"),
    "Optimiser": ("overshoot", "optimizer", "update", "brake"),
    "Learning and cost": ("eval", "interval", "prompts", "rollouts", "adapt", "scope", "time", "run"),
}
"""Heading -> areas of metrics and words, in the order of the page."""


def _terms(place: str) -> dict[str, Metric]:
    out = {place: WORDS[place]} if place in WORDS else {}
    for metric in schema.METRICS.values():
        if metric.area == place and metric.recorded and metric.area != "prefix":
            out.setdefault(metric.term, metric)
    return out


PARTS: Mapping[str, Mapping[str, Metric]] = {
    heading: {name: term for place in places for name, term in _terms(place).items()}
    for heading, places in HOMES.items()}
TERMS: Mapping[str, Metric] = {key: term for part in PARTS.values() for key, term in part.items()}


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
    place = anchor(metric)
    return tag("a", text or TERMS[place.removeprefix("glossary-")].name, href=f"#{place}")


def section(run: Run | None = None, papers: bool = False) -> Section:
    """The terms, folded up by heading; with `papers` each with the place of its definition."""
    parts = [tag("details", tag("summary", heading, tag("span", f" {len(terms)} terms", class_="soft")),
                 tag("dl", *(_lines(key, term, papers) for key, term in terms.items())), class_="glossary")
             for heading, terms in PARTS.items()]
    return Section(id="glossary", title="Glossary",
                   lead="B rollouts in groups of R, T tokens. r reward, A advantage, ρ ratio, ψ_i = Σ_t ∇log π(y_it) "
                        "score, g_i gradient of rollout i, Δ update." + (f" P1 is {P1}, P2 is {P2}." if papers else ""),
                   body=join(*parts))


def _lines(key: str, term: Metric, papers: bool) -> Html:
    soft = "; ".join(filter(None, (f"unit: {term.unit}" if term.unit else "", term.source if papers else "")))
    return tag("div", tag("dt", term.name, id=f"glossary-{key}"),
               tag("dd", tag("code", term.equation, class_="equation") if term.equation else None,
                   tag("span", term.sentence), tag("span", f" {soft}", class_="soft") if soft else None))
