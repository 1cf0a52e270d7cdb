"""The table: every method as one row, written as its difference from a parent.

Equation numbers are the papers' own where the text could be read; "code" names the authors' repository. β is 0
wherever it would need a reference policy (see `Method.beta`); `paper_beta` holds what the paper used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from creditscope.methods.axes import Method
from creditscope.methods.links import SCORES

__all__ = [
    "BNPO", "CISPO", "CPO", "CPPO", "CPPO_TOPK", "DAPO", "DPO", "DPPO", "DPPO_KL", "DRO", "DR_GRPO", "GCPO", "GMPO",
    "GPG", "GRPO", "GRPO_EVEN", "GRPO_V32", "GSPO", "GSPO_EVEN", "GSPO_TOKEN", "GTPO", "IPO", "KIMI", "KTO", "LUSPO",
    "MAXRL", "METHODS", "OPO", "ORPO", "P1_GRPO", "P2_TABLE_1", "PPO", "PREFERENCES", "RDPO", "REINFORCE",
    "REINFORCE_PP", "REINFORCE_PP_BASELINE", "RLOO", "SAPO", "SIMPO", "SLIC", "VESPO"]

REINFORCE = Method(
    name="reinforce", title="REINFORCE", baseline="none", aggregate="sequence_sum", ratio="none",
    cites={"baseline": "Williams 1992: the reward itself", "aggregate": "Σ_t ∇log π, mean over rollouts"})

P1_GRPO = REINFORCE.but(
    name="p1_grpo", title="GRPO as studied in P1", arxiv="2606.29238", baseline="group_mean",
    cites={"baseline": "Eq. 15", "aggregate": "Eq. 19: 1/R Σ_i A_i ψ_i, no 1/L", "ratio": "no ratio, no clip, no KL"})

RLOO = REINFORCE.but(
    name="rloo", title="RLOO", arxiv="2402.14740", baseline="leave_one_out",
    kl="k1", kl_in="reward", paper_beta=0.03,
    cites={"baseline": "mean reward of the other k−1 samples", "aggregate": "the whole answer is one action",
           "kl_in": "β log(π/π_ref) of the sequence inside R", "paper_beta": "App. C: 0.03 TL;DR, 0.10 HH"})

OPO = REINFORCE.but(
    name="opo", title="OPO", arxiv="2505.23585", baseline="length_weighted_mean",
    cites={"baseline": "Σ L r / Σ L, optimal when ‖∇log π(y)‖² ∝ L", "ratio": "exact on-policy"},
    note="verl runs it through its clipped token-mean loss (`verl_opo`).")

GRPO = Method(
    name="grpo", title="GRPO", arxiv="2402.03300", scale="group_std", bound="clip", clip_low=0.2, clip_high=0.2,
    kl="k3", paper_beta=0.04,
    cites={"scale": "§4.1.2 (r − mean)/std", "aggregate": "Eq. 3: 1/G Σ 1/|o_i| Σ_t", "bound": "Eq. 3",
           "kl": "Eq. 4", "paper_beta": "§4.2"},
    note="The paper gives no ε for the std; a unanimous group has advantage 0 exactly.")

GRPO_V32 = GRPO.but(
    name="grpo_v32", title="GRPO (DeepSeek-V3.2)", arxiv="2512.02556", scale="none",
    trust="off_policy_sequence", trust_high=0.5, kl_weight="ratio",
    cites={"scale": "§3.1: R − mean(R)", "aggregate": "Eq. 5", "kl_weight": "Eq. 7", "trust": "Eq. 8–9; KL unmasked"},
    note="The paper prints no δ; 0.5 is ours.")

DR_GRPO = GRPO.but(
    name="dr_grpo", title="Dr.GRPO", arxiv="2503.20783", scale="none", aggregate="constant", paper_beta=None,
    cites={"scale": "no std", "aggregate": "code: token sum / generate_max_length, mean over sequences",
           "kl": "arXiv:2601.05002, Table 1: K3; the authors' code has β = 0"},
    note="L_max is max_tokens; a trainer sets it to its limit, and without one the width of the batch is taken.")

DAPO = GRPO.but(
    name="dapo", title="DAPO", arxiv="2503.14476", aggregate="token_mean", clip_high=0.28, keep="live_groups",
    denominator="kept", kl="none",
    cites={"scale": "Eq. 9", "aggregate": "Eq. 8: 1/Σ|o_i|", "clip_high": "0.28, §4.1",
           "keep": "Eq. 8: s.t. 0 < correct < G", "kl": "§2.3"},
    note="Eq. 8 divides by the tokens of one prompt's group; with several prompts we divide by the batch's, as the "
         "authors' trainer does. The overlong penalty is a reward, so it belongs to the task.")

GSPO = GRPO.but(
    name="gspo", title="GSPO", arxiv="2507.18071", ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4, kl="none",
    cites={"ratio": "Eq. 7", "aggregate": "Eq. 5", "clip_low": "§5.1", "clip_high": "§5.1"})

GSPO_TOKEN = GSPO.but(
    name="gspo_token", title="GSPO-token", arxiv="2507.18071", ratio="sequence_token", cites={"ratio": "Eq. 13–14"})

GMPO = GSPO.but(
    name="gmpo", title="GMPO", arxiv="2507.20673", bound="clip_inside", clip_low=0.4, clip_high=0.4,
    cites={"bound": "Eq. 4; code: clamp of each log-ratio at ±0.4, by the sign of A"})

SAPO = GRPO.but(
    name="sapo", title="SAPO", arxiv="2511.20347", bound="gate", clip_low=None, clip_high=None,
    gate_pos=1.0, gate_neg=1.05, kl="none", cites={"bound": "f(ρ) = 4/τ·σ(τ(ρ−1)), τ₊ = 1.0, τ₋ = 1.05"})

CISPO = GRPO.but(
    name="cispo", title="CISPO", arxiv="2506.13585", aggregate="token_mean", bound="stop_gradient",
    clip_low=None, clip_high=0.28, kl="none",
    cites={"scale": "Eq. 2", "aggregate": "Eq. 4", "bound": "Eq. 4–5", "clip_low": "§3.1: too large ever to bind"},
    note="The paper prints no ε_high; 0.28 is DAPO's, on whose recipe it builds.")

GPG = REINFORCE.but(
    name="gpg", title="GPG", arxiv="2504.02546", baseline="group_mean", scale="live_groups", aggregate="token_mean",
    cites={"scale": "code: α = groups / valid groups, F_norm = 1", "aggregate": "code (open-r1): mean over tokens"},
    note="Its vision code averages per sequence instead. verl counts non-zero rewards (`verl_gpg`).")

GCPO = GRPO.but(
    name="gcpo", title="GCPO", arxiv="2510.07790", ratio="sequence_product", kl="none",
    cites={"ratio": "arXiv:2601.05002, Table 1: π(y)/π_old(y)", "kl": "removed"},
    note="As P2 states it. Replacing an all-wrong group's answer by a golden one is sampling, not objective. Two more "
         "papers use the name.")

CPPO = GRPO.but(
    name="cppo", title="CPPO", arxiv="2503.22342", keep="large_advantage", keep_threshold=0.5,
    cites={"keep": "arXiv:2601.05002, Table 1: |A| > γ", "denominator": "Eq. 7: G"},
    note="The paper prints no γ; 0.5 is ours. Its experiments prune by rank: `cppo_topk`.")

CPPO_TOPK = CPPO.but(
    name="cppo_topk", title="CPPO (top-k)", arxiv="2503.22342", keep="top_advantage", keep_threshold=0.5,
    denominator="kept", cites={"keep": "Eq. 8–10: k = ⌊G(1−P)⌋, P = 0.5", "denominator": "Eq. 8–10: 1/k"},
    note="The authors' code ranks over the whole local batch instead of within each group.")

GTPO = GRPO.but(
    name="gtpo", title="GTPO (Simoni)", arxiv="2508.03772", scale="none", bound="none", clip_low=None, clip_high=None,
    kl="none", token_weight="conflict", keep="low_entropy", keep_threshold=0.6931471805599453, entropy_cost=0.1,
    cites={"token_weight": "λ: 2 if A > 0, 0 if A < 0 on conflict tokens", "keep": "δ: ⟨H⟩ ≤ ln 2",
           "entropy_cost": "code: γ = 0.1", "scale": "code: std division removed", "aggregate": "1/G Σ 1/|o_i| Σ_t"},
    note="The authors' code multiplies λ of both runs (a token in both weighs 4), divides by the conflict count and "
         "omits 1/G. The filter's exemption for a policy that starts above ln 2 is keep='all'.")

REINFORCE_PP = GRPO.but(
    name="reinforce_pp", title="REINFORCE++", arxiv="2501.03262", baseline="none", scale="none", whiten="tokens",
    aggregate="token_mean", kl="k1", kl_in="token_reward", paper_beta=0.01,
    cites={"whiten": "Eq. 5", "kl_in": "Eq. 4: r − β Σ_{i≥t} KL_i", "bound": "Eq. 1",
           "aggregate": "authors' OpenRLHF: token mean (Eq. 1 writes 1/|o| Σ_t)"})

REINFORCE_PP_BASELINE = REINFORCE_PP.but(
    name="reinforce_pp_baseline", title="REINFORCE++-baseline", arxiv="2501.03262", baseline="group_mean",
    kl="k2", kl_in="loss", cites={"baseline": "Eq. 6", "whiten": "Eq. 7", "kl": "Eq. 8"})

PPO = REINFORCE_PP.but(
    name="ppo", title="PPO", arxiv="1707.06347", baseline="external", whiten="none", kl="none", kl_in="loss",
    cites={"baseline": "A_t from GAE with a critic (arXiv:1506.02438)", "bound": "Eq. 7"},
    note="Credit comes from outside: surrogate(..., credit=(B, T)). In the lab it is gae's, whitened over tokens.")

MAXRL = DAPO.but(
    name="maxrl", title="MaxRL", arxiv="2602.02710", scale="group_mean", clip_high=0.2, keep="all", denominator="all",
    cites={"scale": "code: (r − m)/m; 0 where m = 0", "aggregate": "code: token mean", "clip_high": "code"})

DPPO = GRPO.but(
    name="dppo", title="DPPO (binary TV)", arxiv="2602.04879", scale="none", aggregate="sequence_sum",
    bound="stop_gradient", clip_low=None, clip_high=4.0, trust="binary_tv", trust_low=0.15, trust_high=0.15, kl="none",
    cites={"trust": "Eq. 12–13, δ = 0.15", "bound": "Eq. 23: min(ρ, C), C = 5", "scale": "App. C.1",
           "aggregate": "Eq. 23: Σ_t"},
    note="The ratio is to the engine that sampled: put its log-probs in Rollouts.logp.")

DPPO_KL = DPPO.but(
    name="dppo_kl", title="DPPO (binary KL)", arxiv="2602.04879", trust="binary_kl", trust_low=0.05, trust_high=0.05,
    cites={"trust": "Eq. 12 and 14, δ = 0.05"})

BNPO = GRPO.but(
    name="bnpo", title="BNPO", arxiv="2506.02864", scale="beta_density", aggregate="sequence_sum", clip_high=0.28,
    kl="none", cites={"scale": "code: α = max(1, 1 + a/3), β = max(1, 1 + b/3), a and b by moments",
                      "aggregate": "code: mean over sequences of token sums", "clip_high": "code"},
    note="TRL's loss_type='bnpo' is another thing, a token mean over the local batch (`trl_bnpo`).")

KIMI = P1_GRPO.but(
    name="kimi", title="Kimi k1.5 mirror descent", arxiv="2501.12599", kl="k2", kl_to="old", kl_level="sequence",
    beta=0.01, cites={"baseline": "Eq. 3: r − mean", "kl": "Eq. 3: τ/2 (log π/π_i)² of the sequence"},
    note="The penalty is the method, so its weight τ is on. The paper prints no τ; 0.01 is ours.")

LUSPO = GSPO.but(
    name="luspo", title="LUSPO", arxiv="2602.05261", aggregate="sequence_sum",
    cites={"aggregate": "GSPO's sequence objective times |y_i|"},
    note="Stated from TRL 1.16's code, not from the paper.")

VESPO = GRPO.but(
    name="vespo", title="VESPO", arxiv="2602.10693", aggregate="token_mean", ratio="sequence_product", bound="gamma",
    clip_low=None, clip_high=None, gamma_pos=(2.0, 3.0), gamma_neg=(3.0, 2.0), kl="none",
    cites={"bound": "φ(s) = s^k·exp(λ(1−s))"}, note="Stated from TRL 1.16's code, not from the paper.")

DRO = P1_GRPO.but(
    name="dro", title="DRO", arxiv="2405.19107", scale="group_std", aggregate="token_mean", kl="k2", kl_to="old",
    beta=0.1, cites={"kl": "½τ (log π/π_old)² of each token"},
    note="Stated from verl 0.9.1's code, not from the paper.")


DPO = P1_GRPO.but(
    name="dpo", title="DPO", arxiv="2305.18290", scale="extremes", keep="large_advantage", keep_threshold=0.0,
    denominator="kept", aggregate="group_token_mean", link="logistic", score="log_ratio", beta=0.1,
    cites={"link": "Eq. 7: −log σ(u)", "score": "Eq. 7: β log(π/π_ref) of each answer", "beta": "App. B: 0.1",
           "scale": "the preferred and the other answer of a prompt", "aggregate": "Eq. 7: mean over pairs"},
    note="A pair is a group of two. Of a larger group the best and the worst answer are the pair (the first of equal "
         "ones), and a tie gives no pair.")

IPO = DPO.but(
    name="ipo", title="IPO", arxiv="2310.12036", link="square",
    cites={"link": "Eq. 17: (h_c − h_r − 1/(2τ))², τ = β"},
    note="The paper sums log-probs over the answer. TRL takes their mean, and reports that the paper's experiments did "
         "so too (`trl_ipo`).")

SLIC = DPO.but(
    name="slic", title="SLiC-HF, with a reference", arxiv="2305.10425", link="hinge",
    cites={"link": "rank calibration: max(0, δ − log π(y_c) + log π(y_r)); β and the reference: arXiv:2309.06657"},
    note="As arXiv:2309.06657 states it beside DPO. The cross-entropy term of SLiC-HF is sft > 0.")

RDPO = DPO.but(
    name="rdpo", title="Robust DPO", arxiv="2403.00409", link="robust", flip=0.1,
    cites={"link": "unbiased under labels exchanged with probability ε"}, note="ε is of the data; 0.1 is ours.")

CPO = DPO.but(
    name="cpo", title="CPO", arxiv="2401.08417", score="log_prob", sft=1.0,
    cites={"score": "a uniform reference in DPO's loss", "sft": "the log-likelihood of the preferred answer"},
    note="The supervised term is a mean over the tokens of an answer, as trainers compute it.")

SIMPO = DPO.but(
    name="simpo", title="SimPO", arxiv="2405.14734", score="log_prob_mean", beta=2.0, margin=1.0,
    cites={"score": "Eq. 4: β/|y| log π(y)", "margin": "Eq. 6: γ", "beta": "2.0 to 2.5"},
    note="γ is 0.3 to 1.6 in the paper, by model; 1.0 is a value inside.")

ORPO = DPO.but(
    name="orpo", title="ORPO", arxiv="2403.07691", score="log_odds", beta=1.0, link_weight=0.1, sft=1.0,
    cites={"score": "Eq. 4: odds of exp(1/m Σ log π)", "sft": "Eq. 6: L_SFT + λ L_OR", "link_weight": "λ = 0.1"},
    note="β is 1: the odds ratio stands in the link as it is. TRL calls λ beta (`trl_orpo`).")

KTO = REINFORCE.but(
    name="kto", title="KTO", arxiv="2402.01306", scale="label", aggregate="sequence_mean", link="sigmoid",
    score="log_ratio", link_over="answer", anchor="batch_mean", beta=0.1,
    cites={"link": "Eq. 7–8: λ σ(±β(h − z))", "anchor": "z: KL to the reference, at least 0, without gradient",
           "scale": "desirable or not"},
    note="λ_D = λ_U = 1. The paper estimates z on answers of other prompts; here it is the mean score of the batch, "
         "which is that KL where the answers are the policy's own.")

PREFERENCES = ("dpo", "ipo", "slic", "rdpo", "cpo", "simpo", "orpo", "kto")
"""The preference methods: a link of scores in the place of bounded ratios."""


def even(method: Method) -> Method:
    """The row with one weight for all tokens of a group, and every prompt counting the same.

    A product ratio sums the L_i terms of its sequence on every token, so there the even weight is 1/(B·L_i). Under a
    link the score decides, and the weights of two answers are even where they have one link.

    >>> even(DAPO).name, even(DAPO).aggregate
    ('dapo_even', 'group_token_mean')
    """
    if method.linked:
        return method.but(name=f"{method.name}_even", score=SCORES[method.score].even)
    gathers = method.ratio == "sequence_product" and method.carrier != "log_prob"
    return method.but(name=f"{method.name}_even", aggregate="sequence_mean" if gathers else "group_token_mean",
                      max_tokens=None)


GRPO_EVEN = GRPO.but(
    name="grpo_even", title="GRPO with even weights", aggregate="group_token_mean",
    cites={"aggregate": "an answer to arXiv:2601.05002, Prop. 1: 1/P Σ_g 1/ΣL_g Σ_{it∈g}"},
    note="Ours. With one group it is DAPO's token mean; with several, each prompt still counts the same. Other rows: "
         "`even(method)`.")

GSPO_EVEN = GSPO.but(
    name="gspo_even", title="GSPO with even weights", aggregate="group_token_mean",
    cites={"aggregate": "an answer to arXiv:2601.05002, Prop. 1: 1/P Σ_g 1/ΣL_g Σ_{it∈g}"},
    note="Ours. Even at ratio 1 only: after a step the sequence ratios s_i differ, and so do the weights.")

METHODS: Mapping[str, Method] = MappingProxyType({m.name: m for m in (
    REINFORCE, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE, PPO, GRPO, GRPO_V32, DR_GRPO, DAPO, GSPO, GSPO_TOKEN, GMPO,
    CISPO, GPG, GCPO, CPPO, CPPO_TOPK, GTPO, SAPO, OPO, MAXRL, DPPO, DPPO_KL, BNPO, KIMI, LUSPO, VESPO, DRO, P1_GRPO,
    GRPO_EVEN, GSPO_EVEN, DPO, IPO, SLIC, RDPO, CPO, SIMPO, ORPO, KTO)})

P2_TABLE_1 = ("grpo", "grpo_v32", "gspo", "gtpo", "dapo", "cppo", "dr_grpo", "gpg", "cispo", "gcpo")
"""The ten rows of arXiv:2601.05002, Table 1, in its order."""
