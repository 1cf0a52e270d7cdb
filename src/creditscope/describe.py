"""A row in words and symbols: its equation, and its place in P2's table. Made from the row, never typed in."""

from __future__ import annotations

from creditscope.method import AXES, Method


def advantage_equation(m: Method) -> str:
    """A as a formula.

    >>> from creditscope.methods import GRPO
    >>> advantage_equation(GRPO)
    'A_i = (r_i − mean r) / std r'
    """
    if m.baseline == "external":
        return "A_it: given from outside"
    reward = {"loss": "r_i", "reward": "R_i", "token_reward": "R_it"}[m.kl_in]
    r = reward[0]
    baseline = {"none": "", "group_mean": f" − mean {r}", "leave_one_out": f" − mean_{{j≠i}} {r}_j",
                "length_weighted_mean": f" − ΣL{r}/ΣL"}[m.baseline]
    eps = f" + {m.std_eps:g}" if m.std_eps else ""
    centred = f"({reward}{baseline})" if baseline and m.scale != "none" else f"{reward}{baseline}"
    scaled = {
        "none": centred,
        "group_std": f"{centred} / {_group(f'std {r}{eps}')}",
        "batch_std": f"{centred} / {_group(f'std_batch {r}{eps}')}",
        "group_mean": f"{centred} / {_group(f'mean {r}{eps}')}",
        "live_groups": f"{centred} · groups/live groups",
        "nonzero_rewards": f"{centred} · B/#({r} ≠ 0)",
        "beta_density": f"{centred} / Beta(mean {r}; α, β)",
    }[m.scale]
    whitened = {"none": scaled, "rollouts": f"whiten_i({scaled})", "tokens": f"whiten_it({scaled})"}[m.whiten]
    cost = f" − {m.entropy_cost:g}·⟨H⟩_i" if m.entropy_cost else ""
    left = "A_it" if m.kl_in == "token_reward" else "A_i"
    tail = {"loss": "", "reward": "   R_i = r_i − β Σ_t log(π_old/π_ref)_it",
            "token_reward": "   R_it = r_i − β Σ_{t'≥t} log(π_old/π_ref)_it'"}[m.kl_in]
    return f"{left} = {whitened}{cost}{tail}"


def alpha_text(m: Method) -> str:
    """α: what each token's term is multiplied by, without the std that P2 counts into it."""
    rows = "B" if m.denominator == "all" else "B_kept"
    factor = {"sequence_mean": f"1/({rows}·L_i)", "sequence_sum": f"1/{rows}", "token_mean": "1/ΣL",
              "constant": f"1/({rows}·{m.max_tokens or 'L_max'})", "token_sum": "1"}[m.aggregate]
    threshold = f"{m.keep_threshold:.3g}" if m.keep_threshold is not None else ""
    keep = {"all": "", "live_groups": " · 1{group not unanimous}", "large_advantage": f" · 1{{|A_i| > {threshold}}}",
            "top_advantage": f" · 1{{|A_i| in top {threshold} of group}}",
            "low_entropy": f" · 1{{⟨H⟩_i ≤ {threshold}}}"}[m.keep]
    trust = {"none": "", "off_policy_sequence": f" · 1{{A ≥ 0 or mean_t log(π_old/π) ≤ {m.trust_high}}}",
             "binary_tv": f" · 1{{π − π_old within {m.trust_high} along A}}",
             "binary_kl": f" · 1{{KL(π_old‖π) ≤ {m.trust_high} along A}}"}[m.trust]
    return factor + ("" if m.token_weight == "none" else " · λ_it") + keep + trust


def ratio_text(m: Method) -> str:
    """s: what stands in the ratio's place."""
    return {"none": "log π_it", "token": "ρ_it", "sequence_mean": "s_i = exp(mean_t log ρ_it)",
            "sequence_product": "s_i = Π_t ρ_it", "sequence_token": "s_it = sg[s_i]·π_it/sg[π_it]"}[m.ratio]


def term_text(m: Method) -> str:
    """The policy term of one token: the bound applied to ratio and advantage."""
    a = "A_it" if m.kl_in == "token_reward" or m.baseline == "external" else "A_i"
    s = {"none": "log π_it", "token": "ρ_it", "sequence_mean": "s_i", "sequence_product": "s_i",
         "sequence_token": "s_it"}[m.ratio]
    clip = f"clip({s}, {_edge(m.clip_low, -1)}, {_edge(m.clip_high, +1)})"
    term = {
        "none": f"{s}·{a}",
        "clip": f"min({s}·{a}, {clip}·{a})",
        "clip_inside": f"exp(mean_t clip±(log ρ_it, −{m.clip_low}, {m.clip_high}))·{a}",
        "stop_gradient": f"sg[{clip}]·{a}·log π_it",
        "gate": f"{a}·4/τ·σ(τ({s} − 1)), τ₊ = {m.gate_pos}, τ₋ = {m.gate_neg}",
        "gamma": f"sg[s_i^k·exp(λ(1 − s_i))]·{a}·log π_it, (k, λ)₊ = {m.gamma_pos}, (k, λ)₋ = {m.gamma_neg}",
    }[m.bound]
    return f"max({term}, {m.dual_clip:g}·{a} if {a} < 0)" if m.dual_clip else term


def penalty_text(m: Method) -> str:
    """R: the KL term of the loss, or where else the KL went."""
    if m.kl == "none":
        return "none"
    if m.kl_in != "loss":
        return f"{m.kl.upper()} in the {m.kl_in.replace('_', ' ')}"
    name = m.kl.upper() + ("(π, π_old)" if m.kl_to == "old" else "") + (" of Σ_t" if m.kl_level == "sequence" else "")
    return f"s·{name}" if m.kl_weight == "ratio" else name


def equation(m: Method) -> str:
    """The whole objective in two lines."""
    beta = f"{m.beta:g}" if m.beta else "β"
    kl = "" if m.kl == "none" or m.kl_in != "loss" else f" − {beta}·{penalty_text(m)}"
    definition = "" if m.ratio in ("none", "token") or m.bound == "clip_inside" else f"   {ratio_text(m)}"
    return f"J = Σ_it {alpha_text(m)} · [{term_text(m)}]{kl}{definition}\n{advantage_equation(m)}"


def axis_meaning(axis: str, value: object) -> str:
    """What a value of an axis means, where the axis is one of names."""
    return AXES[axis].get(str(value), "") if axis in AXES else ""


def _edge(eps: float | None, sign: int) -> str:
    return ("0" if sign < 0 else "∞") if eps is None else f"{1 + sign * eps:g}"


def _group(text: str) -> str:
    return f"({text})" if "+" in text else text
