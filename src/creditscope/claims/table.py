"""The claims: each statement in our words, where it stands, the rule that decides, what it needs, and its tests.

P1 is arXiv:2606.29238, P2 is arXiv:2601.05002, C are claims of our own. No torch until an exact test is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from creditscope.claims import ours, p1_credit, p1_learning, p1_rank, p2_runs
from creditscope.claims.evidence import Evidence
from creditscope.claims.verdict import Claim, ClaimVerdict
from creditscope.errors import require_module, unknown
from creditscope.runs.kinds import HALF

ROWS = (
    Claim(
        id="P1.1", title="One reward per answer gives all its tokens the same credit", where="Theorem 3.1",
        statement="With a reward for the whole answer and γ = 1, every token of a rollout has the same advantage.",
        rule="Exact: the variance of credit inside a rollout is 0 to rounding for outcome credit, and above 0 for "
             f"every estimator of token credit. Runs: the share of credit that differs inside a rollout is at most "
             f"{p1_credit.ROUNDING:g} in every step under outcome credit, and above it under token credit. A state "
             "baseline under the same reward is the counter-case: if it is not uniform, the choice of the baseline is "
             "what makes credit uniform, not the reward.",
        exact="exact.p1:uniform_credit", runs=p1_credit.uniform_credit,
        ask="any run of creditscope lab train: credit/within of every step"),
    Claim(
        id="P1.2", title="Advantages of a group sum to zero and repel each other", where="Theorem 4.1 i–iii",
        statement="Σ_i A_i = 0, Var(A_i) = (R−1)/R·σ² and Cov(A_i, A_j) = −σ²/R.",
        rule=f"Exact: to rounding, over every group that could be drawn. Runs: |Σw|/Σ|w| of the w that reaches "
             f"the gradient is at most {p1_credit.SUM_ROUNDING:g} in every group; w is float32.",
        exact="exact.p1:moments", runs=p1_credit.zero_sum, ask="a run with --scope light"),
    Claim(
        id="P1.3", title="Chebyshev bounds the share of rollouts with a signal", where="Theorem 4.1 iv",
        statement="The share of rollouts with |A_i| > ε is at most (R−1)σ²/(Rε²).",
        rule="The exact share stays under the bound in every case; how loose the bound is is printed, not judged.",
        exact="exact.p1:chebyshev"),
    Claim(
        id="P1.4", title="Unanimous groups give no gradient, and training makes more of them", where="Corollary 4.2",
        statement="The signal falls with σ_r; a unanimous group has a gradient of exactly 0, and their share, "
                  "p^R + (1−p)^R, grows over training.",
        rule=f"The Gram of a unanimous group is exactly 0. The share of dead groups lies within "
             f"±{p1_credit.LAW_BAND} of the law for one p: five groups in a hundred, since P1 gives no number. It "
             "grows if the last third of a run's steps has more of them than the first, with an interval over runs "
             "above 0.",
        exact="exact.p1:dead_groups", runs=p1_credit.sparsity, ask="a run with --scope light"),
    Claim(
        id="P1.5", title="The effective rank is about 2 whatever R", where="Table 1, Figure 1",
        statement="(Σσ)²/Σσ² of the matrix of a group's rollout gradients is about 2 for R = 2, 4 and 8.",
        rule=f"One verdict per definition: the mean's interval lies {p1_rank.ABOUT_TWO}, what rounds to 2, at every R. "
             f"And one for \"whatever R\": the slope of log rank on log R lies within ±{p1_rank.FLAT:.2f}, which "
             "from R = 2 to 32 leads from one end of that band to the other.",
        runs=p1_rank.rank_about_two,
        ask="runs that differ in --group alone, with --scope light: creditscope papers reproduce p1"),
    Claim(
        id="P1.6", title="One direction holds half to four fifths of the energy", where="Table 1, Figure 2",
        statement="σ₁²/Σσ² is 0.6–0.7, 0.7–0.8 and 0.5–0.6 for R = 2, 4 and 8, and the largest rank is 2, 3 and 7.",
        rule=f"The mean's interval lies inside the printed band, {p1_rank.DIGIT} wider at each end, half of the last "
             "printed digit; the largest rank of a group equals the printed one.",
        runs=p1_rank.top_share,
        ask="runs that differ in --group alone, with --scope light: creditscope papers reproduce p1"),
    Claim(
        id="P1.7", title="Larger groups learn faster all the same", where="Figure 3",
        statement="Accuracy rises faster with a larger R, though the rank does not.",
        rule="Accuracy of the larger R less that of the smaller, paired by seed, has an interval above 0: at equal "
             "steps, as the figure has it, and at equal rollouts, which cost the same.",
        runs=p1_learning.larger_groups_learn_faster,
        ask="runs that differ in --group alone, three seeds each, with evaluations on the way (--eval-every): "
            "creditscope papers reproduce p1"),
    Claim(
        id="P1.8", title="Over several turns a group baseline is biased, within a bound", where="Eq. 22–27",
        statement="At turn h credit misses by Bias_h = Σ_{h'<h} r_h' + v(s_h) − v(s_0), at most (h−1)·r_max + 2·V_max, "
                  "and 0 where there is one turn.",
        rule="Exact: Bias_h equals its formula and stays under its bound, to rounding. Runs: its mean square grows "
             "with the turn, and is smaller with the mean of the same turn, or state, for a baseline.",
        exact="exact.p1_turns:multi_turn", runs=p1_credit.multi_turn, ask="a run with --task turns --keep-every 1"),
    Claim(
        id="P1.9", title="Hoeffding bounds the error of a group's mean, as the table prints", where="Appendix A.2",
        statement="P(|v̂_R − v| > ε) ≤ 2·exp(−2Rε²), with a table of its values.",
        rule="The bound holds in every case, and the printed values are right to half of their last digit.",
        exact="exact.p1:hoeffding"),
    Claim(
        id="P1.10", title="The group mean shrinks the gradient by 1/R; leave-one-out does not", where="Related work",
        statement="The group mean is a stand-in with a bias of O(1/R), E[ĝ] = (R−1)/R·∇J; leave-one-out removes it.",
        rule="E[ĝ] = (R−1)/R·∇J with the group mean and ∇J with leave-one-out, to rounding, by enumeration.",
        exact="exact.p1:group_mean_factor"),
    Claim(
        id="P1.11", title="The group mean is the baseline of least variance", where="Abstract, Section 2.4",
        statement="There are conditions under which the group mean is optimal. The optimum is "
                  "b* = E[r‖ψ‖²]/E[‖ψ‖²], which is the mean if and only if Cov(‖ψ‖², r) = 0.",
        rule=f"Exact: the mean is the constant baseline of least variance, to rounding, in each world. Runs: what the "
             f"mean loses against b*, beyond what chance gives, is below {p1_credit.LOST:.0%} of the variance, and b* "
             f"lies within ±{p1_credit.APART} of it.",
        exact="exact.p1:optimal_baseline", runs=p1_credit.baseline, ask="a run with --scope full"),
    Claim(
        id="P1.12", title="Leave-one-out or token credit breaks the low rank", where="Section 8, an open question",
        statement="Other baselines, token-level credit or step rewards raise the effective rank well above 2.",
        rule=f"One verdict per credit: it multiplies the rank of the same rollouts by more than {p1_rank.RAISED} and "
             f"takes it above {p1_rank.ABOUT_TWO.high}, where \"about 2\" ends. Exact: leave-one-out multiplies "
             "all rows of a group by one number, so it changes no rank.",
        exact="exact.p1:leave_one_out_rank", runs=p1_rank.other_credit,
        ask="a run with --scope light that reads other credits too: creditscope lab train --also step_reward ..."),
    Claim(
        id="P1.13", title="The effective rank falls with the spread of rewards", where="Section 8, an open question",
        statement="The effective rank of a group falls as σ_r goes to 0.",
        rule=f"The correlation of rank and σ_r over the groups of a run, at least {p1_rank.PAIRED_GROUPS} of them, has "
             "an interval over runs above 0; also for the rank over its orthogonal null, which falls with σ_r by "
             "itself.",
        runs=p1_rank.rank_and_spread, ask="a run with --scope light and live groups"),
    Claim(
        id="P1.14", title="A schedule that watches the rank beats a fixed R", where="Section 8, an idea",
        statement="Raising R, or switching to denser credit, when the rank falls learns more from equal rollouts.",
        rule="Accuracy at the end of the budget less that of the best fixed setting, and less that of a control that "
             "raises R late whatever the rank, paired by seed: both intervals above 0.",
        runs=p1_learning.rank_aware,
        ask="runs with --adapt and runs with a fixed --group at equal --rollouts, five seeds: "
            "creditscope papers reproduce p1 --budget full"),
    Claim(
        id="P2.1", title="Ten methods are special cases of one surrogate", where="Eq. 1, Table 1",
        statement="J = E Σ α·min(s·A, clip(s)·A) − β·R with ten choices of α, s and R is ten published methods.",
        rule="w = ∂J/∂log π of the printed row equals that of the method's own loss to 1e-9; a row that departs is "
             "judged again with its repair. A row of ours that was written from the table is undecided: it would agree "
             "with itself.",
        exact="exact.p2:ten_methods"),
    Claim(
        id="P2.2", title="A shared prefix is pushed, unless the weights are uniform", where="Proposition 1",
        statement="On a prefix that a subset S shares the gradient is multiplied by Σ_{i∈S} ω_i A_i. Uniform weights "
                  "over a whole group cancel exactly; 1/L_i favours short right answers.",
        rule="On a tabular policy the predicted weight equals autograd's to 1e-9 at ratio 1 and after steps; the "
             "methods that should cancel do, the others do not.",
        exact="exact.p2_prefix:prefix_bias"),
    Claim(
        id="P2.3", title="AdamW is blind to the scale of rewards", where="Propositions 2, 5 and 6",
        statement="Without a KL term r → φr gives the same AdamW update as ε/(φ√v̂) → 0. A KL term and a large ε break "
                  "it, decoupled weight decay does not.",
        rule="Exact: the way made in five steps changes by less than 1e-3 where ε/(φ√v̂) is below that, for what is "
             "said to be blind, and by more for what is said to break it. Runs: had all credit been a tenth, the "
             f"update would have changed by less than {p2_runs.UNSEEN:.0%}; what follows the scale changes by 90 %.",
        exact="exact.p2_optimizer:blind_to_scale", runs=p2_runs.blind_to_scale, ask="a run with --probe light"),
    Claim(
        id="P2.4", title="Momentum carries tokens on after the clip has stopped them",
        where="Propositions 3 and 7, Eq. 36",
        statement="After its gradient is zeroed Adam goes on moving a token by C_{T,k} of its last step, which tends "
                  "to (β₁/√β₂)^{k+1}.",
        rule="Exact: a real AdamW agrees with the printed values to their digits, and with the closed form to 1e-9. "
             "Runs: a part of the distance past the bound is moved after the token's own gradient stopped, and the "
             f"first move after it lies within ±{p2_runs.CLOSE:g} of a full step of C.",
        exact="exact.p2_optimizer:overshoot", runs=p2_runs.overshoot,
        ask="a run with --inner-steps 2 or more, --probe light and --probe-every 1"),
    Claim(
        id="P2.5", title="The loss is no signal of progress", where="Proposition 4, Appendix A",
        statement="At ratio 1 length-normalised weights give J = −β·E[R] whatever the policy earns, constant weights a "
                  "statistic of lengths, general weights a covariance.",
        rule="Exact: J at ratio 1 is what Proposition 4 leaves of it, to 1e-9, and does not move when every reward "
             "rises by 1. Runs: J is 0 to rounding where nothing is left of it, and elsewhere its correlation with the "
             f"reward stays within ±{p2_runs.NO_SIGNAL:g}, 9 % of what the reward does.",
        exact="exact.p2:loss_value", runs=p2_runs.loss_value, ask="any run of creditscope lab train"),
    Claim(
        id="P2.6", title="A clip that knows momentum holds tokens at their bound", where="Limitations, left open",
        statement="A momentum-aware rule cuts the distance past the bound and costs no accuracy.",
        rule="One verdict per brake, paired by seed with plain AdamW: the relative change of the distance past the "
             f"bound has an interval below {HALF:.0%}, and that of the accuracy lies above −{100 * p2_runs.LITTLE:g} "
             "points (chosen after the runs).",
        runs=p2_runs.momentum_aware,
        ask="runs that differ in --brake alone, three seeds each: creditscope papers reproduce p2"),
    Claim(
        id="C.1", title="Low rank comes from few answers with most score norm", where="ours",
        statement="What takes the effective rank of a group below that of orthogonal scores of equal norm is that a "
                  "few rollouts hold most of the score norm, more than that scores are alike.",
        rule=f"Of the gap log(null of the credits / rank), unequal norms cover more than {ours.HALF:g}, at each R and "
             "in each of two orders, because norms and alignment overlap: norms first, and norms last (added after the "
             f"runs). A mean gap below {ours.LOW_RANK:.2f}, a rank within a tenth of what the credits allow, leaves "
             "nothing to explain.",
        runs=ours.norm_concentration, ask="a run with --scope light"),
    Claim(
        id="C.2", title="An SVD cut to two values prints about 2 for any data", where="ours",
        statement="Cut to its two largest singular values, any matrix has an effective rank of 1 + 2√(f(1−f)), f the "
                  "share of the first of the two: about 2 for every share in P1's Table 1, whatever the data.",
        rule=f"The formula holds to rounding; and of unrelated matrices, and of recorded groups with R ≥ 4, at least "
             f"{ours.SHARE:.0%} read {ours.LEAST} to 2. Rank-one data would read 1.",
        exact="claims.ours:truncated_two", runs=ours.truncated_two_runs, ask="a run with --scope light"),
    Claim(
        id="C.3", title="Even weights take the pull off a shared prefix", where="ours",
        statement="With one weight for every token of a group in place of 1/L_i and its kin, `even(method)`, what a "
                  "method leaves on a prefix that the whole group shares cancels.",
        rule="Σ|W| / Σ|w| on such a prefix is 0 to rounding, one verdict for each row of the table that leaves some.",
        exact="exact.p2_prefix:even_weights"),
    Claim(
        id="C.4", title="DPO needs no group baseline, and its credit is as uniform", where="ours",
        statement="Of the contrast that is drawn between P1's GRPO and DPO: preferences need no baseline of the group, "
                  "give all tokens of an answer the same w, cancel on a shared prefix, and ignore the reward's scale; "
                  "β takes its place.",
        rule="Exact, for every preference method, on pairs of unequal length at a policy that has moved: each "
             "difference is at most 1e-9 of max|w|. Statements that hold for some scores or at the reference alone are "
             "also tested where they should fail.",
        exact="exact.preferences:contrast"),
)

CLAIMS: Mapping[str, Claim] = MappingProxyType({claim.id: claim for claim in ROWS})


def find_claims(ids: Sequence[str] = ()) -> list[Claim]:
    """The claims of these ids, in the order of the table; all where none is named."""
    for name in ids:
        if name not in CLAIMS:
            raise unknown("claim", name, CLAIMS, see="creditscope papers check")
    return [claim for claim in CLAIMS.values() if not ids or claim.id in ids]


def run_exact(ids: Sequence[str] = ()) -> Iterator[ClaimVerdict]:
    """The verdicts that need no run: closed forms and enumeration. Torch loads with the first test that needs it."""
    for claim in find_claims(ids):
        if claim.exact is not None:
            require_module("a claim by closed form or enumeration", "torch")
            module, _, function = claim.exact.partition(":")
            yield from _stamped(claim, getattr(importlib.import_module(f"creditscope.{module}"), function)())


def check(evidence: Sequence[Evidence], ids: Sequence[str] = ()) -> list[ClaimVerdict]:
    """The verdicts on the evidence of runs."""
    return [verdict for claim in find_claims(ids) if claim.runs is not None
            for verdict in _stamped(claim, claim.runs(evidence))]


def _stamped(claim: Claim, verdicts: Iterable[ClaimVerdict]) -> Iterator[ClaimVerdict]:
    """The verdicts with the id of their claim."""
    return (replace(verdict, claim=claim.id) for verdict in verdicts)
