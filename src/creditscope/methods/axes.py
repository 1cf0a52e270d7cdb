"""A method: one frozen row of choices along the axes of the unified surrogate (arXiv:2601.05002, Eq. 1).

    J = Σ_it α_it · bound(s_it, A_it) − β · R          A: advantage   α: weight   s: ratio   R: penalty
    J = Σ_it α_it · φ(u_g(i))                          φ: link        u_g = β Σ_{i∈g} A_i·h_i − γ: margin of a pair

The second line is of preference methods: the two answers of a pair share one term. A row holds names and numbers only.
The functions behind the names are in `methods/bounds.py`, `methods/links.py` and `objective/`, in dictionaries keyed by
the name, so a new method is one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from creditscope.errors import CreditscopeError, unknown
from creditscope.methods.bounds import BOUNDS, TRUSTS, Rule
from creditscope.methods.links import LINKS, SCORES

OWN_CREDIT, CRITIC_CREDIT = "outcome", "gae"
"""Estimators of the credit table: the method's own advantage, and a critic's."""


# Every axis whose value is a name: name -> its meaning, as str(), in the words of `creditscope list methods`.
AXES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "baseline": {
        "none": "r_i as it is",
        "group_mean": "minus the mean reward of the group",
        "leave_one_out": "minus the mean reward of the others in the group",
        "length_weighted_mean": "minus Σ L r / Σ L over the group",
        "external": "credit comes from outside (a critic), one value per token",
    },
    "scale": {
        "none": "not scaled",
        "group_std": "divided by the group's reward std",
        "batch_std": "divided by the batch's reward std",
        "group_mean": "divided by the group's mean reward",
        "live_groups": "times groups / groups that are not unanimous",
        "nonzero_rewards": "times rollouts / rollouts with non-zero reward",
        "beta_density": "divided by the Beta density fitted to the groups' success rates",
        "extremes": "replaced by +1 for the best of the group, −1 for its worst, 0 for the others",
        "label": "replaced by +1 where r_i > 0, −1 elsewhere",
    },
    "whiten": {
        "none": "left as it is",
        "rollouts": "standardised over the rollouts of the batch",
        "tokens": "standardised over the tokens of the batch, so long answers count more",
    },
    "std": {"sample": "1/(R−1)", "population": "1/R"},
    "lone": {
        "refuse": "a group of one is an error",
        "zero": "a group of one gets advantage 0",
        "keep": "a group of one keeps its raw reward: baseline 0, std 1",
    },
    "keep": {
        "all": "every rollout",
        "live_groups": "groups that are not unanimous",
        "large_advantage": "rollouts with |A| above a threshold",
        "top_advantage": "in each group, the given share of rollouts with the largest |A|",
        "low_entropy": "rollouts whose mean token entropy is at most a threshold",
    },
    "denominator": {
        "all": "counts every rollout, also empty and dropped ones",
        "kept": "counts the rollouts that were kept and are not empty",
    },
    "token_weight": {
        "none": "1",
        "conflict": "2 or 0 on tokens that open or close both a good and a bad answer",
    },
    "aggregate": {
        "sequence_mean": "1/B Σ_i 1/L_i Σ_t",
        "sequence_sum": "1/B Σ_i Σ_t",
        "token_mean": "1/ΣL Σ_it",
        "group_token_mean": "1/P Σ_g 1/ΣL_g Σ_{it∈g}",
        "constant": "1/(B·L_max) Σ_it",
        "token_sum": "Σ_it",
    },
    "ratio": {
        "none": "log π in the ratio's place",
        "token": "ρ_it = π/π_old",
        "sequence_mean": "s_i = exp(mean_t log ρ_it)",
        "sequence_product": "s_i = Π_t ρ_it",
        "sequence_token": "sg[s_i]·π_it/sg[π_it], s_i = exp(mean_t log ρ_it)",
    },
    "bound": BOUNDS,
    "trust": TRUSTS,
    "link": LINKS,
    "score": SCORES,
    "link_over": {
        "pair": "u_g = β Σ_{i∈g} A_i·h_i − γ: one term per group, of its best and its worst answer",
        "answer": "u_i = β·A_i·(h_i − z): one term per answer",
    },
    "anchor": {"none": "z = 0", "batch_mean": "z = max(0, mean_i h_i) over the batch, without gradient"},
    "sft_mean": {"answers": "mean over the chosen answers of 1/L_i Σ_t", "tokens": "mean over all chosen tokens"},
    "kl": {"none": "none", "k1": "log(π/π_ref)", "k2": "½ log²(π/π_ref)", "k3": "π_ref/π − log(π_ref/π) − 1"},
    "kl_in": {
        "loss": "a term of the loss",
        "reward": "subtracted from the rollout's reward",
        "token_reward": "subtracted from each token's reward; credit is the return to go",
    },
    "kl_to": {"ref": "the reference policy", "old": "the policy that sampled"},
    "kl_level": {"token": "each token", "sequence": "the whole sequence's log-ratio"},
    "kl_weight": {"none": "1", "ratio": "the live ratio s_it"},
})


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table. Write a new one as its difference from another: `GRPO.but(name="mine", scale="none")`."""

    name: str
    title: str
    arxiv: str = ""
    """The arXiv id; several papers share a name, so the id decides."""

    # advantage A
    baseline: str = "group_mean"
    scale: str = "none"
    whiten: str = "none"
    std: str = "sample"
    std_eps: float = 0.0
    """Added to the std. The papers have none; each library has its own."""
    whiten_eps: float = 0.0
    """Added to the variance when whitening."""
    lone: str = "refuse"
    entropy_cost: float = 0.0
    """γ in A_i − γ⟨H⟩_i, with ⟨H⟩_i the mean token entropy of rollout i."""

    # weight α
    keep: str = "all"
    keep_threshold: float | None = None
    denominator: str = "all"
    token_weight: str = "none"
    aggregate: str = "sequence_mean"
    max_tokens: int | None = None
    """L_max of the constant aggregate; None takes the width of the batch."""
    local: bool = False
    """True where a trainer takes the aggregate's sums over its micro-batch, not over the step."""

    # ratio and bound s
    ratio: str = "token"
    bound: str = "none"
    clip_low: float | None = None
    """ε_low: the ratio's floor is 1 − ε_low; None for no floor."""
    clip_high: float | None = None
    """ε_high: the ratio's ceiling is 1 + ε_high; None for no ceiling."""
    dual_clip: float | None = None
    """c > 1: for A < 0 the objective does not fall below c·A."""
    gate_pos: float | None = None
    gate_neg: float | None = None
    """τ of the soft gate for A > 0 and for A ≤ 0."""
    gamma_pos: tuple[float, float] | None = None
    gamma_neg: tuple[float, float] | None = None
    """(k, λ) of the gamma weight for A ≥ 0 and for A < 0."""

    # trust region
    trust: str = "none"
    trust_low: float | None = None
    trust_high: float | None = None

    # preferences
    link: str = "none"
    score: str = "none"
    link_over: str = "pair"
    anchor: str = "none"
    margin: float = 0.0
    """γ: the margin that a pair should have."""
    flip: float | None = None
    """ε of the robust link: the share of pairs whose labels are exchanged."""
    link_weight: float = 1.0
    """λ: the weight of the link's term, beside a supervised one."""
    sft: float = 0.0
    """Weight of the mean log π of the chosen answers, a term beside the link's."""
    sft_mean: str = "answers"

    # penalty R
    kl: str = "none"
    kl_in: str = "loss"
    kl_to: str = "ref"
    kl_level: str = "token"
    kl_weight: str = "none"
    beta: float = 0.0
    """Weight of the KL term; in the table it is 0 where it would need a reference policy. Under a link it is the factor
    on the scores: DPO's loss is solved by the policy that a KL term of this weight gives, so it is never 0."""
    paper_beta: float | None = None
    """The weight that the paper used: `m.but(name="grpo_kl", beta=m.paper_beta)`."""

    # provenance
    parent: str | None = None
    cites: Mapping[str, str] = field(default_factory=dict, hash=False)
    """axis -> where the paper (or the code named) makes that choice."""
    note: str = ""
    """Where the row departs from its paper or from its authors' code."""

    def __post_init__(self) -> None:
        for axis, choices in AXES.items():
            if getattr(self, axis) not in choices:
                raise unknown(f"{axis} of method {self.name!r}:", getattr(self, axis), choices)
        for f in fields(self):
            value = getattr(self, f.name)
            numbers = value if isinstance(value, tuple) else (value,)
            numeric = "float" in str(f.type) or "int" in str(f.type)
            if numeric and value is not None and not all(isinstance(n, int | float) and math.isfinite(n)
                                                         for n in numbers):
                raise CreditscopeError(f"method {self.name!r}: {f.name} must be a finite number, got {value!r}")
        rows = _limit_faults(self, "bound", BOUNDS), _limit_faults(self, "trust", TRUSTS)
        for why in chain((why.format(m=self) for broken, why in _RULES if broken(self)), *rows):
            raise CreditscopeError(f"method {self.name!r}: {why}")

    def but(self, **changes: Any) -> Method:
        """A new row with `changes`, whose parent is this one. Citations are not inherited."""
        if "name" not in changes:
            raise CreditscopeError(f"{self.name!r}.but(...) needs name=, to tell the new row from its parent; the same "
                                   f"row with other values is .replace(...)")
        fresh: dict[str, Any] = {"title": changes["name"], "arxiv": "", "cites": {}, "note": "", "parent": self.name,
                                 "paper_beta": self.paper_beta if changes.get("kl", self.kl) == self.kl else None}
        return self._changed("but", fresh | changes)

    def replace(self, **changes: Any) -> Method:
        """The same row, by the same name, with other values: a run's own β, a trainer's limit.

        >>> Method(name="x", title="X", kl="k3").replace(beta=0.1).beta
        0.1
        """
        return self._changed("replace", changes)

    def _changed(self, verb: str, changes: dict[str, Any]) -> Method:
        known = {f.name for f in fields(self)}
        for axis in changes:
            if axis not in known:
                raise unknown(f"axis in {self.name!r}.{verb}(...):", axis, known)
        return replace(self, **changes)

    def under(self, credit: str | None) -> Method:
        """The row with the estimator `credit` in place of its own advantage; None is its own."""
        if credit in (None, OWN_CREDIT):
            return self
        return self.replace(baseline="external", scale="none", whiten="none", entropy_cost=0.0)

    def diff(self, other: Method) -> dict[str, tuple[Any, Any]]:
        """axis -> (other's value, this row's value), for the axes along which the two differ."""
        skip = {"name", "title", "arxiv", "parent", "cites", "note", "paper_beta"}
        pairs = {f.name: (getattr(other, f.name), getattr(self, f.name)) for f in fields(self) if f.name not in skip}
        return {axis: (theirs, ours) for axis, (theirs, ours) in pairs.items() if theirs != ours}

    @property
    def bare(self) -> Method:
        """The row without the terms that stand beside its policy term: no KL, no supervised term."""
        return self.replace(beta=0.0 if self.kl != "none" else self.beta, sft=0.0)

    @property
    def linked(self) -> bool:
        """True for a preference method: a link of scores in the place of bounded ratios."""
        return self.link != "none"

    @property
    def by_sign(self) -> bool:
        """True when A depends on whether a reward is above 0, so that rewards need a zero that means something."""
        return self.scale == "label"

    @property
    def labels(self) -> bool:
        """True when A is a label (+1, −1 or 0), whatever the size of the rewards."""
        return self.scale in ("extremes", "label")

    @property
    def needs_reference(self) -> bool:
        """True when the loss or the reward compares with a frozen reference policy."""
        return SCORES[self.score].reference or (self.kl != "none" and self.beta != 0.0 and self.kl_to == "ref")

    @property
    def has_loss_kl(self) -> bool:
        """True when a KL term with weight stands in the loss."""
        return self.kl != "none" and self.beta != 0.0 and self.kl_in == "loss"

    @property
    def has_reward_kl(self) -> bool:
        """True when a KL term with weight stands in the reward."""
        return self.beta != 0.0 and self.kl_in != "loss"

    @property
    def centred(self) -> bool:
        """True when the baseline needs siblings, so that a group of one carries no signal."""
        return self.baseline in ("group_mean", "leave_one_out", "length_weighted_mean")

    @property
    def external(self) -> bool:
        """True when credit comes from outside: the row has no advantage of its own."""
        return self.baseline == "external"

    @property
    def default_credit(self) -> str:
        """The estimator of a run that names none, as --credit spells it."""
        return CRITIC_CREDIT if self.external else OWN_CREDIT

    @property
    def carrier(self) -> str:
        """The carrier of the gradient of a token's term, a value of `Bound.carrier`; "link" for a preference method."""
        return "link" if self.linked else "log_prob" if self.ratio == "none" else BOUNDS[self.bound].carrier

    @property
    def stops(self) -> str | None:
        """The effect of crossing an edge on the token's own term: "zero", "half" or "cap"; None where there is no edge.

        A trust region drops the term, so it decides where a row has both. Under a sequence ratio the token's log-prob
        still moves the terms of tokens in the same sequence whose A has the other sign.
        """
        return TRUSTS[self.trust].stops or BOUNDS[self.bound].stops


def _limit_faults(m: Method, axis: str, table: dict[str, Any]) -> Iterator[str]:
    """Faults of the method's bound or trust region: numbers missing, or belonging to another one."""
    name = getattr(m, axis)
    row = table[name]
    missing = [number for number in row.needs if getattr(m, number) is None]
    if missing:
        yield f"{axis}={name!r} needs {' and '.join(missing)}; give {'both' if missing[1:] else 'it'}, or {axis}='none'"
    others = {number: other for other, found in reversed(table.items()) for number in found.takes
              if number not in row.takes}
    stray = [number for number in others if getattr(m, number) is not None]
    if stray:
        given = " and ".join(f"{number}={getattr(m, number)}" for number in stray)
        verb, them = ("do nothing", "them") if stray[1:] else ("does nothing", "it")
        yield f"{given} {verb} with {axis}={name!r}; set {axis}={others[stray[0]]!r} or drop {them}"
    for broken, why in row.rules:
        if broken(m):
            yield why.format(m=m)


_RULES: tuple[Rule, ...] = (
    (lambda m: not isinstance(m.name, str) or not m.name.replace("_", "").isalnum() or m.name != m.name.lower(),
     "a name is lower-case letters, digits and underscores"),
    (lambda m: m.ratio == "none" and m.bound != "none",
     "bound={m.bound!r} needs a ratio to bound, but ratio='none'; set ratio='token' or bound='none'"),
    (lambda m: (m.keep in ("large_advantage", "top_advantage", "low_entropy")) != (m.keep_threshold is not None),
     "keep={m.keep!r} and keep_threshold={m.keep_threshold} do not go together; 'large_advantage', 'top_advantage' "
     "and 'low_entropy' need a threshold, the others have none"),
    (lambda m: m.keep == "top_advantage" and not 0 < (m.keep_threshold or 0) <= 1,
     "keep='top_advantage' keeps a share of each group: give 0 < keep_threshold ≤ 1, not {m.keep_threshold}"),
    (lambda m: m.linked != (m.score != "none"),
     "link={m.link!r} and score={m.score!r} do not go together; give both, or neither"),
    (lambda m: m.linked and (m.ratio, m.bound, m.trust, m.token_weight, m.kl) != ("none",) * 5,
     "a link takes log-probs through its score; set ratio, bound, trust, token_weight and kl to 'none'"),
    (lambda m: m.linked and not m.beta > 0, "beta={m.beta} multiplies the scores of link={m.link!r}; give β > 0"),
    (lambda m: not m.linked and (m.link_over, m.anchor, m.sft_mean, m.margin, m.flip, m.link_weight, m.sft)
     != ("pair", "none", "answers", 0.0, None, 1.0, 0.0),
     "link_over, anchor, margin, flip, link_weight, sft and sft_mean do nothing with link='none'; set link or drop "
     "them"),
    (lambda m: m.linked and m.link_over == "pair" and m.anchor != "none",
     "anchor={m.anchor!r} cancels between the two answers of a pair; set link_over='answer' or anchor='none'"),
    (lambda m: m.linked and m.link_over == "answer" and m.margin != 0.0,
     "margin={m.margin} is of a pair; set link_over='pair' or margin=0"),
    (lambda m: m.linked and (m.flip is not None) != ("flip" in LINKS[m.link].takes),
     "flip={m.flip} and link={m.link!r} do not go together; 'robust' needs flip, the others have none"),
    (lambda m: m.flip is not None and not 0 <= m.flip < 0.5,
     "flip={m.flip} is a share of exchanged labels; give 0 ≤ flip < 0.5"),
    (lambda m: m.sft < 0 or not m.link_weight > 0,
     "sft={m.sft} and link_weight={m.link_weight} would make chosen answers less likely; give sft ≥ 0 and "
     "link_weight > 0"),
    (lambda m: not m.linked and m.kl == "none" and m.beta != 0.0,
     "beta={m.beta} weighs a KL term, but kl='none'; set kl='k3', or 'k1' or 'k2'"),
    (lambda m: m.beta < 0, "beta={m.beta} would reward distance from the reference; give β ≥ 0"),
    (lambda m: m.kl == "none" and (m.kl_in, m.kl_to, m.kl_level, m.kl_weight) != ("loss", "ref", "token", "none"),
     "kl_in, kl_to, kl_level and kl_weight do nothing with kl='none'; set kl or drop them"),
    (lambda m: m.kl_in != "loss" and m.kl != "none" and (m.kl != "k1" or m.kl_to != "ref"),
     "KL in the reward is the log-ratio to the reference; set kl='k1' and kl_to='ref'"),
    (lambda m: m.kl_weight == "ratio" and (m.kl_in != "loss" or m.ratio == "none"),
     "kl_weight='ratio' needs KL in the loss and a ratio; set kl_in='loss' and ratio='token'"),
    (lambda m: m.kl_in == "token_reward" and (m.centred or m.scale != "none" or m.whiten == "rollouts"),
     "kl_in='token_reward' makes credit differ between tokens, which baseline={m.baseline!r}, scale={m.scale!r} and "
     "whiten={m.whiten!r} cannot follow; set baseline='none', scale='none' and whiten='tokens', or kl_in='reward'"),
    (lambda m: m.kl_level == "sequence" and not (m.kl_in == "loss" and m.kl == "k2"),
     "kl_level='sequence' is defined for kl='k2' in the loss only"),
    (lambda m: m.baseline == "external" and (m.scale != "none" or m.whiten != "none"),
     "baseline='external' takes credit as it comes; set scale='none' and whiten='none'"),
    (lambda m: m.std_eps < 0 or m.whiten_eps < 0, "std_eps and whiten_eps must be ≥ 0"),
    (lambda m: m.max_tokens is not None and (m.aggregate != "constant" or m.max_tokens < 1),
     "max_tokens={m.max_tokens} must be ≥ 1 and goes with aggregate='constant', not {m.aggregate!r}"),
)
