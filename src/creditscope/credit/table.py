"""The table of estimators, and their specs (`name,option=value`). No torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from creditscope.errors import CreditscopeError, unknown
from creditscope.files.specs import Option, read_spec

NEEDS: Mapping[str, str] = MappingProxyType({
    "steps": "a task that judges single steps, or step labels in the file",
    "states": "a task that names the state in which each turn begins",
    "entropy": "the entropy of the sampling distribution at each token",
    "collision": "Σπ² of the sampling distribution at each token",
    "continuations": "a policy to sample from and a verifier",
    "critic": "a learned value function",
    "scores": "a learned reward that scores every prefix (--reward model:FOLDER)",
    "gram": "a backward pass under the microscope",
})
"""Inputs of estimators besides rewards and tokens, and their source."""

BASES = ("reward", "advantage")


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One row. Its function is `name` in the file `name`."""

    name: str
    title: str
    equation: str
    needs: tuple[str, ...] = ()
    siblings: bool = False
    """True where a rollout alone in its group gets no credit."""
    per_answer: bool = False
    """True where all tokens of a rollout get one number."""
    across_groups: bool = False
    """True where a rollout's credit depends on other groups of the batch."""
    one_prompt: bool = False
    """True where it compares the beginnings of answers to one prompt."""
    variants: tuple[str, ...] = ()
    """Further specs for studies of all estimators."""
    scheduled: Mapping[str, object] = field(default_factory=dict)
    """Option values under which credit depends on the progress of the run."""
    builds_on: str = "reward"
    """reward: replaces r_i − b_i, the method scales it. advantage: reshapes the advantage that the method computed."""
    cost: str
    """Cost beyond the step: rollouts, forward or backward passes."""
    cites: str
    options: Mapping[str, Option] = field(default_factory=dict)
    claim: str = ""
    """The paper's statement about bias; docs/credit.md compares it with enumeration."""
    note: str = ""
    """Where it departs from its paper."""

    def __post_init__(self) -> None:
        for need in self.needs:
            if need not in NEEDS:
                raise unknown(f"need of estimator {self.name!r}:", need, NEEDS)
        if self.builds_on not in BASES:
            raise unknown(f"builds_on of estimator {self.name!r}:", self.builds_on, BASES)

    @property
    def function(self) -> Callable[..., Any]:
        """(method, rollouts, tools, **options) -> (B, T). Torch loads here, not with the list."""
        found: Callable[..., Any] = getattr(importlib.import_module(f"creditscope.credit.{self.name}"), self.name)
        return found

    def require(self, given: frozenset[str], where: str) -> None:
        """Refuse a place that lacks a need of the estimator, before the run starts."""
        for need in self.needs:
            if need not in given:
                raise CreditscopeError(f"credit {self.name!r} needs {NEEDS[need]}, which {where} does not give; choose "
                                       f"another of: creditscope list credits")


OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
SAMPLES = Option(4, "K, continuations at each cut", low=1, high=4096)

ROWS = (
    Estimator(
        name="outcome", per_answer=True, title="Outcome", builds_on="advantage", cost="nothing",
        equation="A_it = A_i",
        cites="Williams 1992; arXiv:2402.03300",
        claim="unbiased up to the factor (R−1)/R of a group-mean baseline"),
    Estimator(
        name="leave_one_out", per_answer=True, siblings=True, title="Leave-one-out baseline", cost="nothing",
        equation="A_it = r_i − mean_{j≠i} r_j",
        cites="arXiv:2402.14740", claim="unbiased"),
    Estimator(
        name="optimal_scalar", per_answer=True, siblings=True, title="Optimal scalar baseline", needs=("gram",),
        cost="one forward and backward pass under the microscope",
        equation="A_it = r_i − Σ_j r_j‖ψ_j‖² / Σ_j ‖ψ_j‖²",
        cites="Weaver and Tao 2001; Greensmith et al. 2004",
        claim="least variance of all constant baselines; with its own rollout in it, biased by O(1/R)"),
    Estimator(
        name="optimal_sequence", per_answer=True, siblings=True, title="Optimal scalar baseline, norms at the logits",
        needs=("collision",), cost="nothing: Σπ² is kept while sampling",
        equation="A_it = r_i − Σ_j r_j W_j / Σ_j W_j,  W_j = Σ_t (1 − 2π_jt + Σπ²_jt)",
        cites="Weaver and Tao 2001, with the norms of arXiv:2602.07078",
        note="Ours: optimal_scalar without its backward pass."),
    Estimator(
        name="optimal_token", title="Optimal token baseline", needs=("collision",),
        cost="nothing: Σπ² is kept while sampling",
        equation="A_it = r_i − Σ_j r_j W_jt / Σ_j W_jt,  W_jt = Σ_{u≤t} (1 − 2π_ju + Σπ²_ju)",
        cites="arXiv:2602.07078", claim="least variance under its proxy for the score's norm",
        note="Siblings that have ended count no more. The last survivor has no sibling left: baseline 0, as in verl."),
    Estimator(
        name="step_reward", title="Step rewards", needs=("steps",), cost="step labels",
        equation="A_it = r_i,s(t) − mean of the group's step rewards",
        cites="arXiv:2305.20050; arXiv:2402.03300, Sec. 4.1.3",
        claim="none: it maximises right steps, not right answers"),
    Estimator(
        name="step_return", title="Return to go of step rewards", needs=("steps",), cost="step labels",
        equation="A_it = Σ_{s ≥ s(t)} (r_is − mean of the group's step rewards)",
        cites="arXiv:2402.03300, Sec. 4.1.3",
        claim="none: the baseline sums over the steps that follow, so the number of steps matters",
        note="DeepSeekMath divides by the std of the step rewards; here the method's own scale divides."),
    Estimator(
        name="turn_return", siblings=True, title="Return to go, baseline of the turn", needs=("steps",),
        cost="step labels",
        equation="A_it = G_ih − mean_j G_jh,  G_ih = Σ_{s ≥ h} r_is,  h = s(t)",
        cites="arXiv:2606.29238, Eq. 22–27",
        claim="removes the rewards of earlier turns from credit, and v(s_h) − v(s_0) on average over states"),
    Estimator(
        name="state_return", title="Return to go, baseline of the state", needs=("steps", "states"), cost="step labels",
        equation="A_it = G_ih − mean_{j,k: s_jk = s_ih} G_jk; alone in its state: as turn_return",
        cites="arXiv:2505.10978",
        claim="removes P1's multi-turn bias where siblings meet in the same state"),
    Estimator(
        name="monte_carlo", title="Monte Carlo values at step ends", needs=("continuations",),
        cost="K continuations at each step's end",
        options={"samples": SAMPLES},
        equation="A_it = V(next cut) − V(cut before t),  V = mean reward of K continuations",
        cites="arXiv:2410.01679", claim="unbiased values at the cuts",
        note="The prompt's value is the mean reward of the rollout's siblings: they are its continuations already."),
    Estimator(
        name="spo_chain", title="Monte Carlo values, cuts at uncertain tokens", needs=("continuations",),
        cost="K continuations at each cut",
        options={"samples": SAMPLES, "every": Option(3, "m, uncertain tokens per segment", low=1),
                 "probability": Option(0.9, "ρ, below which a token is uncertain", low=0.001, high=1.0)},
        equation="as monte_carlo, a cut after every m-th token with π < ρ; credit on tokens with π < ρ alone",
        cites="arXiv:2505.23564", claim="unbiased values at the cuts; the mask drops what the policy is sure of"),
    Estimator(
        name="prefix_tree", one_prompt=True, siblings=True, title="Tree of shared prefixes",
        cost="nothing: (R, R, T) comparisons",
        equation="A_it = V(y_≤t) − V(y_<t),  V(prefix) = mean reward of the group's rollouts that share it",
        cites="arXiv:2506.05183; arXiv:2506.11902; arXiv:2509.21154",
        claim="values of shared nodes",
        note="With its own rollout in the parent's value credit shrinks by (n−1)/n: E = (q−v)·(1 − (1−(1−d)^R)/(R·d)), "
             "d the chance of reaching the node."),
    Estimator(
        name="prefix_share", one_prompt=True, title="Shared prefixes weigh 1/n", builds_on="advantage",
        cost="nothing: (R, R, T) comparisons",
        equation="A_it = A_i / n_it,  n_it rollouts of the group share y_≤t",
        cites="arXiv:2509.21154"),
    Estimator(
        name="gae", variants=("gae,lam=0",), scheduled={"schedule": "linear"},
        title="Generalised advantage estimation", needs=("critic",),
        cost="a critic: its forward and backward pass",
        options={"gamma": Option(1.0, "γ, discount per token", low=0.0, high=1.0),
                 "lam": Option(1.0, "λ; 1 trusts the reward, 0 the critic", low=0.0, high=1.0),
                 "schedule": Option("constant", "of λ: constant, by each answer's length, or linear from 1 to λ over "
                                    "the run", choices=("constant", "length", "linear")),
                 "alpha": Option(0.05, "α of schedule=length, λ_i = 1 − 1/(α L_i)", low=1e-6),
                 "whiten": Option(True, "over the batch's tokens, where the method does not")},
        equation="A_it = Σ_l (γλ)^l δ_i,t+l,  δ_it = r_it + γ V_i,t+1 − V_it",
        cites="arXiv:1506.02438; arXiv:1707.06347", claim="unbiased at λ = 1, or with an exact critic"),
    Estimator(
        name="prefix_score", variants=("prefix_score,lam=1",), title="Differences of a learned reward",
        needs=("scores",), cost="one forward pass of the reward model",
        options={"lam": Option(0.0, "λ; 0 gives a token its own difference, 1 all that follow", low=0.0, high=1.0)},
        equation="A_it = Σ_l λ^l d_i,t+l − mean of the group's tokens,  d_it = s(x, y_≤t) − s(x, y_<t)",
        cites="Ng et al. 1999", claim="none: the score of a prefix is not its value",
        note="Ours. Σ_t d_it = s(x, y) − s(x): the learned reward of the answer, dealt out to its tokens."),
    Estimator(
        name="entropy_mask", across_groups=True, title="Top 20 % entropy", needs=("entropy",), builds_on="advantage",
        cost="nothing",
        options={"share": Option(0.2, "of the batch's tokens that keep their credit", low=0.001, high=1.0)},
        equation="A_it = A_i · 1{H_it in the batch's top 20 %}",
        cites="arXiv:2506.01939", claim="none: most tokens are left out"),
    Estimator(
        name="entropy_shaping", title="Entropy shaping", needs=("entropy",), builds_on="advantage", cost="nothing",
        options={"base": Option(0.5, "α₁", low=0.0), "bonus": Option(0.5, "α₂", low=0.0)},
        equation="A_it = A_i (α₁ + α₂ h_it / mean_j h_jt),  h = H where A > 0 and 1/H where A < 0; j: same sign, alive",
        cites="arXiv:2508.04349",
        note="The paper shapes rewards of ±1 and standardises the two signs apart; here the factor shapes the method's "
             "advantage."),
    Estimator(
        name="salt", per_answer=True, title="SALT: spectral split", needs=("gram",), builds_on="advantage",
        cost="one forward and backward pass under the microscope",
        options={"rank": Option(1, "eigenvectors that count as shared", low=1)},
        equation="A' = P A + (1 + c)(A − P A),  P onto the top eigenvectors of the group's Gram, "
                 "c = 1 − ‖Σ A_i ψ_i‖ / Σ |A_i|‖ψ_i‖",
        cites="arXiv:2606.05800", claim="more directions in the update",
        note="Not token credit. How strongly the residual grows with the cancellation c is our choice."),
)

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({row.name: row for row in ROWS})


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name,key=value,…`, those of the list checked; nothing is imported.

    >>> parse("monte_carlo,samples=8")
    ('monte_carlo', {'samples': 8})
    """
    return read_spec("credit", spec, ESTIMATORS, "creditscope list credits; or give your own as module:function", OWN)
