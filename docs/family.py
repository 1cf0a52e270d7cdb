"""docs/preferences.md: the family of group and preference methods, each property by formula and by measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from creditscope.exact.preferences import Readings, contrast, readings
from creditscope.methods.axes import Method
from creditscope.methods.links import LINKS, SCORES
from creditscope.methods.properties import Properties, properties
from creditscope.methods.table import METHODS, PREFERENCES
from creditscope.methods.words import equation

BESIDE = ("ppo", "grpo", "dr_grpo", "rloo")
LARGE = 4
"""Answers of the larger groups."""
WITH_GAE = Properties(zero_sum=False, uniform_credit=False, prefix_cancels=False, scale_invariant=True,
                      shift_invariant=True)
"""Of credit r_i − V(s_it), whitened over the batch: V differs from token to token and is not the group's mean. A V that
has learned the rewards takes on their unit and their shift."""

HEAD = """# Preferences

DPO, IPO, SLiC, robust DPO, CPO, SimPO, ORPO and KTO are rows of the same [table](methods.md) under the same
`surrogate` and `effective_credit` as GRPO. A pair is a group of two: A = +1 for the better answer and −1 for the
other, by the order of their rewards; of a larger group the best and the worst are the pair, and a tie gives none. In
the place of a bounded ratio a link φ of the pair's margin stands:

```
J = 1/P Σ_g φ(u_g)      u_g = β Σ_{i∈g} A_i·h_i − γ      w_it = 1/P · φ'(u_g) · β · A_i · ∂h_i/∂log π_it
```

h_i is the score of an answer, such as Σ_t log(π/π_ref)_it. Links and scores are rows of `methods/links.py`: value,
slope and words. A new preference method is one row of `methods/table.py`. `creditscope list methods dpo` prints one;
`creditscope lab train --method dpo` trains it on pairs of sampled groups, with `--pairs FILE` on given ones
([lab.md](lab.md#preferences)).

"""
NOTES = """
How the columns are decided. *By formula* follows from the axes (`methods/properties.py`,
`methods/links.py`); *measured* is one call of `exact.preferences.readings` on four groups of unequal length whose
answers share two tokens and of which one is a tie, in float64, at ratio 1 or, for preferences, away from the
reference, without KL and supervised terms; for AdamW the policy is trained. 0 means that the property is there.

- **ppo** takes its credit from outside: here GAE at λ = 1, A_it = r_i − V(s_it), whitened over the batch's tokens, with
  a critic whose V is random and a function of the tokens so far. Without it V is 0; V is halved where rewards are.
- **w uniform**: (max_t w − min_t w)/max|w| inside an answer. One label per answer gives all its tokens one w:
  preferences do not solve what P1.1 says of outcome rewards.
- **Σ A = 0**: the two labels of a pair sum to 0, so Σ_i w_it = 0 at a position that both answers have, where their
  scores are sums.
- **prefix cancels**: Σ|Σ_i w_it|/Σ|w_it| over the tokens that a group shares. A score that is a mean has 1/L_i in w,
  and the shorter answer of a pair decides on the prefix, as in GRPO.
- **needs a baseline**: |Δw|/max|w| when it is left out. The order of two rewards has no baseline.
- **reward's scale**: |Δw|/max|w| when all rewards are halved.
- **scale-blind under AdamW**: |Δθ|/max|θ| after five steps of torch's AdamW on log π = start + ⟨s, θ⟩, s random, when
  all rewards are halved; of the policy term alone, and with the row's KL term at β = 0.1 where it has one. Where w
  follows the scale, AdamW hides it (P2.3) up to ε/√v̂, as long as nothing else is in the gradient; a preference has
  only the order of two rewards, so nothing is left to hide.
- **β's part**: how far w/max|w| turns when β is halved and doubled, at the reference and away from it. β is what the
  reward's scale is elsewhere. At the reference all pairs have u = −γ, so β is a common factor and AdamW does not see
  it; later it decides which pairs still count. Scores without a reference start at margins of their own, so they are
  never blind to β.
- **weight of a pair**: φ'(u). DPO's is σ(−u): a pair whose margin is large and right counts little, one in the wrong
  order most ([theory](theory.md)).
- **displacement**: u also grows where both answers lose probability, the rejected one faster; no row forbids that. The
  doctor's rule `displacement` reads `pairs/chosen_reward` and `pairs/margin`; steps of the probe have
  `pairs/chosen_change` too.
- **dead when**: a tie has no pair; beside that a pair rests where φ' does.
- **rank**: of the matrix of the answers' gradients with independent scores, in groups of two and of four, three of
  them no tie. A pair's Gram is 2×2, so a batch has rank ≤ 2 per pair, and its update lies in the span of one
  difference per pair; the other answers of a larger group have w = 0.
"""


def page(table: Callable[..., list[str]], mark: Callable[[bool | None], str], number: Callable[[float], str],
         code: Callable[[str], str]) -> str:
    rows = [METHODS[name] for name in (*BESIDE, *PREFERENCES)]
    lines = [line(row, mark, number) for row in rows]
    out = [HEAD, "## The family\n\n"]
    out += table(["method", "w uniform", "Σ A = 0", "prefix cancels", "needs a baseline", "reward's scale in w",
                  "scale-blind under AdamW", "β's part: at the reference, later", "dead when",
                  "rank, R = 2 and 4"], lines)
    out += [NOTES, "\n## The rows\n\n"]
    out += table(["method", "link φ", "score h", "reference", "objective"],
                 [[row.name, str(LINKS[row.link]), str(SCORES[row.score]), mark(row.needs_reference),
                   code(equation(row).split("\n")[0])] for row in rows if row.linked])
    out += ["\n## What holds and what does not (C.4)\n\n"]
    out += table(["statement", "methods", "verdict", "because"],
                 [[verdict.definition, verdict.subject, verdict.outcome, verdict.reason] for verdict in contrast()])
    return "".join(out)


def line(row: Method, mark: Callable[[bool | None], str], number: Callable[[float], str]) -> Sequence[str]:
    """One method: by formula, and in parentheses as measured."""
    told = WITH_GAE if row.external else properties(row)
    found, large = readings(row), readings(row, LARGE)

    def both(formula: bool | None, measured: float) -> str:
        return f"{mark(formula)} ({number(measured)})"

    needs = row.external or (row.centred and not row.labels)
    return [row.name, both(told.uniform_credit, found.within), mark(told.zero_sum),
            both(told.prefix_cancels, found.prefix), both(needs, found.baseline),
            both(not told.scale_invariant, found.scale), blind(row, told, found, mark, number),
            beta(row, found, number), dead(row, found),
            f"{found.rank} and {large.rank}"]


def blind(row: Method, told: Properties, found: Readings, mark: Callable[[bool | None], str],
          number: Callable[[float], str]) -> str:
    """By formula: where w is proportional to the rewards, or does not depend on their scale; with a KL term, the latter
    alone."""
    alone = f"{mark(bool(told.scale_invariant) or row.scale == 'none')} ({number(found.adamw)})"
    return alone if found.penalised is None else \
        f"{alone}; with KL {mark(bool(told.scale_invariant))} ({number(found.penalised)})"


def beta(row: Method, found: Readings, number: Callable[[float], str]) -> str:
    return f"{number(found.beta_start)}, {number(found.beta_moved)}" if row.linked else "–"


def dead(row: Method, found: Readings) -> str:
    tie = "ties" if found.tie == 0 else "a tie has w"
    return f"{tie}; {LINKS[row.link].rests}" if row.linked else tie
