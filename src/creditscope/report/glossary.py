"""Every metric that the page shows: its equation, what it means, and where it comes from, under an anchor to link to.

A definition that stands in the code is taken from there, so that the page cannot say another thing than what is
computed. `anchor` gives a metric's place: the same reading of a batch, of a group, of scores or of one layer has one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from creditscope.microscope import geometry
from creditscope.microscope.spectrum import Spectrum, orthogonal_null
from creditscope.report.markup import Html, tag
from creditscope.report.run import Run
from creditscope.report.section import Section

P1 = "arXiv:2606.29238"
P2 = "arXiv:2601.05002"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of the glossary."""

    name: str
    """As the page says it."""
    equation: str = ""
    text: str
    source: str = ""


def _said(thing: Any) -> str:
    """The first sentence of what the code says of a function or a property."""
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split()).rstrip(".")


SIGNAL = {
    "reward_mean": Term(name="mean reward", equation="1/B Σ_i r_i", text="Over the rollouts that the step used."),
    "reward_std": Term(name="reward std", equation="√(Σ_i (r_i − mean r)² / (B − 1))",
                       text="Over the batch. What a group gives depends on its own spread, σ_r."),
    "reward_steps": Term(name="step reward", text="Mean reward of the reasoning steps, where the task labels them."),
    "reward_errors": Term(name="reward errors", text="Rollouts on which the reward function failed; "
                                                     "reward/first_error is the first message."),
    "signal_groups": Term(name="groups", equation="P", text="Prompts of the step, each with R rollouts."),
    "signal_live_groups": Term(name="live groups", text="Groups whose rewards differ. Only these give a gradient under "
                                                        "a group baseline.", source=f"{P1}, Corollary 4.2"),
    "signal_used_live_groups": Term(name="live groups used",
                                    text="The same after unanimous groups were sampled again, where the method does."),
    "signal_dead_groups": Term(name="dead groups", equation="1 − live groups / P",
                               text="Share of groups whose rewards are all equal. Rollouts that are right with "
                                    "probability p make a group dead with probability p^R + (1 − p)^R.",
                               source=f"{P1}, Corollary 4.2"),
    "length_mean": Term(name="length", equation="L_i", text="Tokens of an answer, mean over the batch."),
    "length_max": Term(name="longest answer", text="Tokens of the longest answer of the step."),
    "length_empty": Term(name="empty answers", text="Answers without a token."),
    "length_truncated": Term(name="truncated", text="Share of answers that were cut at the limit of tokens."),
    "entropy_mean": Term(name="entropy", equation="H = −Σ_v π(v) log π(v)",
                         text="Of the sampling distribution, nats a token, mean over the chosen tokens."),
    "objective_value": Term(name="loss, J", equation="J = Σ_it α_it · term_it − β·R",
                            text="The objective at the step's first update; the loss is −J. At ratio 1 centred "
                                 "advantages make it 0, or a statistic of lengths: no measure of progress.",
                            source=f"{P2}, Proposition 4"),
    "grad_norm": Term(name="gradient norm", equation="‖∇J‖", text="At the step's first update, before clipping."),
    "policy_sampler_gap": Term(name="sampler gap", equation="max_it |log π_train − log π_sampler|",
                               text="How far the training forward and the sampler disagree on the same tokens."),
}
CREDIT = {
    "w": Term(name="w, effective credit", equation="w_it = ∂J/∂log π(y_it)",
              text="What the objective really gives a token. The gradient is Σ_it w_it ∇log π(y_it). A token with "
                   "w = 0 while A ≠ 0 is clipped or dropped."),
    "advantage": Term(name="A, advantage", equation="A_it", text="What the estimator said of a token, before weights, "
                                                                 "ratios and clipping."),
    "ratio": Term(name="ρ, ratio", equation="ρ_it = π(y_it)/π_old(y_it)",
                  text="1 at the first update on a batch: nothing can be clipped there."),
    "credit_top10_mass": Term(name="credit on the top tenth", equation="Σ_{top 10 %} |w_it| / Σ_it |w_it|",
                              text="Share of all credit on the tenth of the tokens that has most. Even credit has "
                                   "10 %."),
    "credit_zero": Term(name="tokens without credit", equation="#(w_it = 0) / ΣL",
                        text="Dead groups, clipped tokens, and tokens that the estimator leaves out."),
    "credit_positive_mass": Term(name="credit that pushes up", equation="Σ max(w_it, 0) / Σ |w_it|",
                                 text="One half where advantages are centred and weights are even."),
    "credit_within": Term(name="credit inside a rollout", equation="Σ_it (A_it − Ā_i)² / Σ_it A_it²",
                          text="Share of credit that differs between tokens of one answer: 0 for outcome credit.",
                          source=f"{P1}, Theorem 3.1"),
    "credit_dead_groups": Term(name="groups without credit",
                               text="Share of groups in which no token has credit. Token credit may live where all "
                                    "rewards are equal."),
    "critic_loss": Term(name="critic loss", equation="mean (G_it − V_it)²",
                        text="Of the critic on a batch that it has not learnt from yet."),
    "critic_explained_variance": Term(name="explained variance", equation="1 − Var(G − V)/Var(G)",
                                      text="1 is a perfect critic, 0 one that knows only the mean."),
    "prefix": Term(name="W, weight on a shared prefix", equation="W = Σ_{i∈S} w_it",
                   text="What the answers S that share a prefix do to it together. It cancels where the weights of a "
                        "whole group are even.", source=f"{P2}, Proposition 1"),
}
DIRECTIONS = {
    "gram": Term(name="K, Gram matrix", equation="K_ij = ⟨g_i, g_j⟩, g_i = Σ_t w_it ∇log π(y_it)",
                 text="Inner products of the rollouts' gradients over all trainable parameters. Its entries sum to "
                      "‖∇J‖²."),
    "singular_values": Term(name="σ, singular values", equation="σ_k² = eigenvalues of K",
                            text="How far the rollouts of a group push along each direction."),
    "effective_rank": Term(name="effective rank", equation=_said(Spectrum.effective_rank),
                           text="How many directions a group's rollouts push in. The one the paper reads; \"about 2\" "
                                "whatever R is its claim.", source=f"{P1}, Table 1"),
    "effective_rank_truncated_2": Term(
        name="effective rank, cut to 2", equation="(σ₁ + σ₂)² / (σ₁² + σ₂²) = 1 + 2√(f(1−f)), f = σ₁²/(σ₁² + σ₂²)",
        text="What an SVD cut to two values prints. It cannot exceed 2, and reads 1.5 to 2 for most data."),
    "centred_effective_rank": Term(name="centred effective rank", equation="(Σσ)²/Σσ² of the rows A_i(ψ_i − ψ̄)",
                                   text=_said(geometry.centred) + "."),
    "entropy_rank": Term(name="entropy rank", equation=_said(Spectrum.entropy_rank),
                         text="The number of equal values that would have the same entropy."),
    "participation_ratio": Term(name="participation ratio", equation=_said(Spectrum.participation_ratio),
                                text="The same idea on energies σ²: large values count more."),
    "stable_rank": Term(name="stable rank", equation=_said(Spectrum.stable_rank),
                        text="Energy in units of the largest direction's."),
    "energy_rank_90": Term(name="energy rank, 90 %", equation="min k: Σ_{j≤k} σ_j² ≥ 0.9 Σσ²",
                           text=_said(Spectrum.energy_rank) + ", q = 0.9."),
    "energy_rank_99": Term(name="energy rank, 99 %", equation="min k: Σ_{j≤k} σ_j² ≥ 0.99 Σσ²",
                           text="The same with 99 % of the energy."),
    "numerical_rank": Term(name="numerical rank", equation="#(σ > σ₁·√(N·eps))", text=_said(Spectrum.numerical_rank)
                           + ": the rest is rounding."),
    "top1": Term(name="top-1 share", equation=_said(Spectrum.top1),
                 text="1 where all rollouts push along one line.", source=f"{P1}, Table 1"),
    "orthogonal_null": Term(name="null, orthogonal", equation="4k(R−k)/R", text=_said(orthogonal_null)
                            + ". Over a batch the nulls of its groups add."),
    "credit_null": Term(name="null of the credits", equation="(Σ|c|)² / Σc²",
                        text="Effective rank of orthogonal scores of equal norm under these credits: what the credits "
                             "alone allow."),
    "norm_null": Term(name="null of the norms", equation="(Σ‖g_i‖)² / Σ‖g_i‖²",
                      text="Effective rank of orthogonal rows with the measured norms. The measured rank never exceeds "
                           "it; what is between them is alignment."),
    "norm_top1": Term(name="largest rollout", equation="max ‖g_i‖² / Σ‖g_i‖²",
                      text="Share of the energy in one rollout's gradient."),
    "norm_effective_number": Term(name="effective rollouts", equation="(Σ‖g_i‖²)² / Σ‖g_i‖⁴",
                                  text="How many rollouts of equal norm would be as concentrated."),
    "cancellation": Term(name="what survives the sum", equation="‖Σ g_i‖² / Σ‖g_i‖²",
                         text="0 when rollouts cancel, 1 when they are orthogonal, N when they are identical."),
    "conflict": Term(name="conflict", equation="#(cos(g_i, g_j) < 0) / #(i < j)",
                     text="Share of pairs of rollouts that push against each other."),
    "noise_scale": Term(name="noise scale", equation="B = tr Σ / ‖G‖²",
                        text="The batch size at which sampling noise equals signal, counted in rollouts.",
                        source="arXiv:1812.06162"),
    "noise_scale_groups": Term(name="noise scale in groups", equation="B = tr Σ / ‖G‖²",
                               text="The same counted in groups, which are independent where rollouts of one prompt "
                                    "are not.", source="arXiv:1812.06162"),
    "live_groups": Term(name="groups with a gradient", text="Groups whose block of the Gram is not 0."),
    "baseline_mean": Term(name="group mean", equation="b = mean r", text="The baseline that is used, mean over groups "
                                                                         "with right and wrong answers."),
    "baseline_optimal": Term(name="best baseline", equation="b* = E[r‖ψ‖²] / E[‖ψ‖²]",
                             text="The constant of least variance. It is the mean where Cov(‖ψ‖², r) = 0.",
                             source=f"{P1}, abstract"),
    "baseline_variance_lost": Term(name="variance lost by the mean", equation="Σ(V(mean) − V(b*)) / ΣV(b*)",
                                   text="V(b) = Σ_i (r_i − b)²‖ψ_i‖². Never negative in a sample: read it beside "
                                        "what chance gives."),
    "baseline_variance_lost_by_chance": Term(
        name="lost by chance", equation="R·Var(‖ψ‖²)·Var(r) / ((R−1)·E‖ψ‖²)",
        text="What the best baseline would gain if norms and rewards had nothing to do with each other."),
    "tokens_head_top1": Term(name="largest token", equation="max x / Σx, x = ‖∇_W log π(y_t)‖²",
                             text="Share of the score's energy in one token, W the output head alone."),
    "tokens_head_top10": Term(name="largest tenth of tokens", equation="Σ_{top 10 %} x / Σx",
                              text="Share of the score's energy in a tenth of the tokens, output head alone."),
    "tokens_head_effective_share": Term(name="effective share of tokens", equation="(Σx)²/Σx² / ΣL",
                                        text="1 where all tokens have the same score norm, output head alone."),
}
OPTIMISER = {
    "overshoot_past": Term(name="past the bound", equation="#(past) / #(bounded)",
                           text="Share of the tokens with a bound that stand past it after an update. A trainer that "
                                "reads ratios before the step never sees it."),
    "overshoot_distance": Term(name="distance past the bound", equation="mean |log ρ − log bound|",
                               text="Nats, over the tokens that are past."),
    "overshoot_overshoot": Term(name="overshoot", equation="past · distance",
                                text="Nats past the bound, mean over all bounded tokens."),
    "overshoot_max": Term(name="farthest token", text="Nats past the bound of the token that is farthest."),
    "overshoot_after": Term(name="moved after the stop",
                            equation="Σ(distance − distance when first past) / Σ distance",
                            text="Share of the distance that a token moved after its own gradient was zero. Negative "
                                 "where tokens came back.", source=f"{P2}, Proposition 3"),
    "overshoot_kl": Term(name="KL to the sampler", equation="mean (ρ − 1 − log ρ)",
                         text="KL(π_old ‖ π) a token after the update."),
    "overshoot_carry": Term(name="carry", equation="Σ Δ_{c+1} / Σ Δ_c",
                            text="The first move after the gradient stopped, over the move that crossed."),
    "overshoot_carry_predicted": Term(
        name="carry, predicted", equation="C_{T,k} → (β₁/√β₂)^{k+1}",
        text="What Adam's momentum alone gives at these steps; μ for SGD.", source=f"{P2}, Eq. 36"),
    "overshoot_by_momentum": Term(name="overshoot by momentum", equation="⟨∇D, Δ_momentum⟩, D = Σ distance",
                                  text="What the old gradients in the updates did to the overshoot, first order, nats "
                                       "a bounded token."),
    "overshoot_by_fresh": Term(name="overshoot by fresh gradients", equation="⟨∇D, Δ_fresh⟩",
                               text="The same of the gradient of the moment."),
    "overshoot_by_decay": Term(name="overshoot by decay", equation="⟨∇D, Δ_decay⟩", text="The same of weight decay."),
    "optimizer_scale_change": Term(
        name="change at a tenth of the credit", equation="‖Δ(φ) − Δ(1)‖ / ‖Δ(1)‖, φ = 1/10",
        text="How the update would differ had all credit since the start been a tenth. AdamW sees φ only through "
             "ε/φ: 0 is blind, 0.9 follows the scale.", source=f"{P2}, Proposition 2"),
    "optimizer_scale_change_now": Term(name="change at a tenth, from now on", equation="the same, moments as they are",
                                       text="For this step alone."),
    "optimizer_lr": Term(name="learning rate", text="Of the step."),
    "optimizer_updates": Term(name="updates", equation="μ · minibatches", text="Optimiser steps on the batch."),
    "update_momentum": Term(name="share of momentum", equation="⟨Δ_momentum, Δ⟩ / ‖Δ‖²",
                            text="How much of the batch's first update comes from older gradients."),
    "update_cosine": Term(name="cosine of the update", equation="cos(Δ, −∇)",
                          text="1 for plain SGD; below where momentum, normalisation or decay turn the step."),
    "update_ratio": Term(name="relative update", equation="‖Δ‖ / ‖θ‖", text="Of the batch's first update."),
    "update_zero": Term(name="weights not moved", equation="#(Δ = 0) / weights",
                        text="In the precision that the weights are stored in."),
    "update_zero_bf16": Term(name="lost in bfloat16", equation="#(bf16(θ + Δ) = bf16(θ)) / weights",
                             text="Share of weights whose update bfloat16 would round away."),
    "brake_recalled": Term(name="credit recalled", text="With --brake recall: share of credit that was taken back from "
                                                        "tokens at their bound."),
    "brake_length": Term(name="length of a step", text="With --brake shorten: mean factor on the update."),
}
LEARNING = {
    "eval_accuracy": Term(name="accuracy", equation="#(reward > ½) / problems",
                          text="Share of unseen problems that one sample solves."),
    "eval_low": Term(name="interval of the accuracy", text="eval/low and eval/high: 95 % Wilson interval over the "
                                                          "problems of one evaluation."),
    "eval_reward": Term(name="reward on unseen problems", text="Mean over the problems of an evaluation."),
    "eval_problems": Term(name="problems", text="Of an evaluation."),
    "interval": Term(name="95 % interval over seeds", equation="mean ± t_{0.975, n−1} · s/√n",
                     text="Student's t over runs that differ only in the seed; fewer than three runs have none."),
    "rollouts_sampled": Term(name="rollouts sampled", text="For the batch of the step."),
    "rollouts_used": Term(name="rollouts used", text="What was trained on, after unanimous groups were replaced."),
    "rollouts_spent": Term(name="rollouts spent", text="Sampled in the step, continuations for values included. Runs "
                                                       "are comparable at equal rollouts."),
    "adapt_group": Term(name="R of the step", text="With --adapt: rollouts per prompt, as the rule set it."),
    "adapt_switched": Term(name="credit switched", text="With --adapt: 1 once the rule has changed the credit."),
    "scope_ratio": Term(name="cost of looking", text="A pass under the microscope over a plain one, timed on the first "
                                                     "step."),
    "scope_share": Term(name="share of looking", text="Share of a step's time that the microscope took."),
    "time_step": Term(name="seconds", text="time/step is the whole step; time/sample, time/credit, time/train, "
                                           "time/scope, time/probe and time/eval are its parts."),
}
PARTS: Mapping[str, Mapping[str, Term]] = {
    "Signal": SIGNAL, "Credit": CREDIT, "Directions": DIRECTIONS, "Optimiser": OPTIMISER, "Learning and cost": LEARNING}
"""Heading -> key -> term, in the order of the page."""
TERMS: Mapping[str, Term] = {key: term for part in PARTS.values() for key, term in part.items()}

SAME = re.compile(r"^(gram|scores|null|matrix|also/[^/]+|all|qv|layer|credit:[^/]+)/(group/)?")
"""The same reading of other rows: one definition."""
ALIASES = {"optimizer_overshoot": "overshoot_overshoot", "eval_high": "eval_low", "reward_first_error": "reward_errors",
           "effective_rank_low": "effective_rank", "effective_rank_high": "effective_rank",
           "stable_rank_low": "stable_rank", "stable_rank_high": "stable_rank"}


def key(metric: str) -> str | None:
    """The key of a metric's term, None where it has none.

    >>> key("gram/group/top1"), key("reward/mean"), key("overshoot/3/past"), key("time/train"), key("no/such")
    ('top1', 'reward_mean', 'overshoot_past', 'time_step', None)
    """
    name = SAME.sub("", metric)
    name = re.sub(r"^overshoot/\d+/", "overshoot/", name)
    name = "time_step" if name.startswith("time/") else name.replace("/", "_")
    name = ALIASES.get(name, name)
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
    source = tag("span", f" {term.source}", class_="soft") if term.source else None
    return tag("div", tag("dt", term.name, id=f"glossary-{key}"),
               tag("dd", tag("code", term.equation, class_="equation") if term.equation else None,
                   tag("span", term.text), source))
