"""A row in words and symbols: its equation, its columns of P2's table, its loss at ratio 1."""

from __future__ import annotations

from dataclasses import dataclass

from creditscope.methods.axes import AXES, Method
from creditscope.methods.bounds import BOUNDS, TRUSTS
from creditscope.methods.links import LINKS, SCORES


def advantage_equation(m: Method) -> str:
    """A as a formula.

    >>> from creditscope.methods.table import GRPO
    >>> advantage_equation(GRPO)
    'A_i = (r_i − mean r) / std r'
    """
    if m.external:
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
        "extremes": f"1{{{reward} best of group}} − 1{{{reward} worst}}",
        "label": f"+1 if {reward} > 0 else −1",
    }[m.scale]
    whitened = {"none": scaled, "rollouts": f"whiten_i({scaled})", "tokens": f"whiten_it({scaled})"}[m.whiten]
    cost = f" − {m.entropy_cost:g}·⟨H⟩_i" if m.entropy_cost else ""
    left = "A_it" if m.kl_in == "token_reward" else "A_i"
    tail = {"loss": "", "reward": "   R_i = r_i − β Σ_t log(π_old/π_ref)_it",
            "token_reward": "   R_it = r_i − β Σ_{t'≥t} log(π_old/π_ref)_it'"}[m.kl_in]
    return f"{left} = {whitened}{cost}{tail}"


def alpha_text(m: Method) -> str:
    """α: the factor on each token's term, without the std that P2 includes in it."""
    rows, prompts = ("B", "P") if m.denominator == "all" else ("B_kept", "P_kept")
    factor = {"sequence_mean": f"1/({rows}·L_i)", "sequence_sum": f"1/{rows}", "token_mean": "1/ΣL",
              "group_token_mean": f"1/({prompts}·ΣL_g)",
              "constant": f"1/({rows}·{m.max_tokens or 'L_max'})", "token_sum": "1"}[m.aggregate]
    threshold = f"{m.keep_threshold:.3g}" if m.keep_threshold is not None else ""
    keep = {"all": "", "live_groups": " · 1{group not unanimous}", "large_advantage": f" · 1{{|A_i| > {threshold}}}",
            "top_advantage": f" · 1{{|A_i| in top {threshold} of group}}",
            "low_entropy": f" · 1{{⟨H⟩_i ≤ {threshold}}}"}[m.keep]
    trust = TRUSTS[m.trust].formula(m)
    return factor + ("" if m.token_weight == "none" else " · λ_it") + keep + (f" · {trust}" if trust else "")


def ratio_text(m: Method) -> str:
    """s: the ratio, or log π where there is none."""
    return {"none": "log π_it", "token": "ρ_it", "sequence_mean": "s_i = exp(mean_t log ρ_it)",
            "sequence_product": "s_i = Π_t ρ_it", "sequence_token": "s_it = sg[s_i]·π_it/sg[π_it]"}[m.ratio]


def term_text(m: Method) -> str:
    """The policy term of one token: the bound applied to ratio and advantage, or the link applied to the margin."""
    if m.linked:
        return _times(m.link_weight) + LINKS[m.link].formula(m, "u_g" if m.link_over == "pair" else "u_i")
    s = {"none": "log π_it", "token": "ρ_it", "sequence_mean": "s_i", "sequence_product": "s_i",
         "sequence_token": "s_it"}[m.ratio]
    return BOUNDS[m.bound].formula(m, s, _credit_symbol(m))


def margin_text(m: Method) -> str:
    """u, with the score that it compares.

    >>> from creditscope.methods.table import DPO
    >>> margin_text(DPO)
    'u_g = 0.1·Σ_{i∈g} A_i·h_i   h_i = Σ_t log(π/π_ref)_it'
    """
    h = f"   h_i = {SCORES[m.score].formula}"
    if m.link_over == "answer":
        anchored = "(h_i − z)" if m.anchor != "none" else "h_i"
        return f"u_i = {_times(m.beta)}A_i·{anchored}{h}" + ("   z = max(0, mean_i h_i)" if m.anchor != "none" else "")
    return f"u_g = {_times(m.beta)}Σ_{{i∈g}} A_i·h_i" + (f" − {m.margin:g}" if m.margin else "") + h


def penalty_text(m: Method) -> str:
    """R: the KL term of the loss, or the place of the KL in the reward."""
    if m.kl == "none":
        return "none"
    if m.kl_in != "loss":
        return f"{m.kl.upper()} in the {m.kl_in.replace('_', ' ')}"
    name = m.kl.upper() + ("(π, π_old)" if m.kl_to == "old" else "") + (" of Σ_t" if m.kl_level == "sequence" else "")
    return f"s·{name}" if m.kl_weight == "ratio" else name


def equation(m: Method) -> str:
    """The whole objective in two lines."""
    if m.linked:
        return f"J = {_value_text(m, 'margin')}\n{advantage_equation(m)}"
    beta = f"{m.beta:g}" if m.beta else "β"
    kl = "" if m.kl == "none" or m.kl_in != "loss" else f" − {beta}·{penalty_text(m)}"
    definition = "" if m.ratio in ("none", "token") or m.carrier == "tokens" else f"   {ratio_text(m)}"
    return f"J = Σ_it {alpha_text(m)} · [{term_text(m)}]{kl}{definition}\n{advantage_equation(m)}"


@dataclass(frozen=True)
class Law:
    """J at ratio 1, the state of every batch before its first update."""

    kind: str
    """A key of LAWS."""
    formula: str
    sentence: str
    """How to read the loss."""


LAWS = {
    "zero": "A loss of 0 is what this method shows at ratio 1, whatever it learns: watch reward/mean.",
    "penalty": "The loss at ratio 1 is the KL term alone: it grows as the policy leaves the reference, whatever it "
               "learns. Watch reward/mean.",
    "length": "The loss at ratio 1 says whether good answers are longer than bad ones, not how many are good: watch "
              "reward/mean.",
    "weights": "The loss at ratio 1 says whether the weights favour good or bad answers, not how many are good: "
               "watch reward/mean.",
    "log_prob": "The loss at ratio 1 compares how likely good and bad answers are, not how many are good: watch "
                "reward/mean.",
    "outside": "The loss at ratio 1 says how the credit that was given is centred, not how many answers are good: "
               "watch reward/mean.",
    "reward": "The loss at ratio 1 is minus the reward, weighted: here it does follow reward/mean.",
    "margin": "The loss says how far apart the answers of a pair are, not how many answers are good: watch "
              "reward/mean where answers are sampled, and eval/accuracy.",
    "label": "The loss says how far each answer lies on the side of its label, not how many answers are good: watch "
             "reward/mean where answers are sampled, and eval/accuracy.",
}
MEANS = {("pair", "group_token_mean"): "1/P Σ_g", ("answer", "sequence_mean"): "1/B Σ_i"}
"""(what a link is applied to, aggregate) -> the mean over its terms: a score has its own sum over tokens."""


def law(m: Method) -> Law:
    """J = Σ_it α_it·h_it·A_it − β·R at ratio 1, by its axes (arXiv:2601.05002, Prop. 4).

        Σ_i A_i = 0 and 1/L_i       zero, or the penalty alone
        Σ_i A_i = 0 without 1/L_i   length: Σ_i A_i·L_i, which is 0 where all answers are equally long
        weights that depend on A    weights: a covariance of A with α·h, as Σ_i A_i = 0
        h = log π                   log_prob: a covariance of A with log π
        a link                      margin: a mean over pairs, J = φ(−γ) at the reference; label: over answers

    Whitening over tokens, or a length-weighted baseline, makes Σ_i A_i·L_i = 0: then the first two are exchanged. This
    holds where every group has at least two rollouts and no answer is empty.

    >>> from creditscope.methods.table import DAPO
    >>> law(DAPO).kind, law(DAPO).formula
    ('length', 'J = Σ_i A_i·L_i/ΣL')
    """
    kind = _kind(m)
    value = "" if kind == "zero" else _value_text(m, kind)
    if m.has_loss_kl and m.kl_to == "ref":  # the distance to the sampler is 0 at ratio 1
        kind = "penalty" if kind == "zero" else kind
        value += f" − {m.beta:g}·{m.kl.upper()}" + (" of Σ_t" if m.kl_level == "sequence" else "")
    return Law(kind, f"J = {value.removeprefix(' ') or 0}", LAWS[kind])


def _kind(m: Method) -> str:
    if m.linked:
        return "margin" if m.link_over == "pair" else "label"
    if m.carrier == "log_prob":
        return "log_prob"
    if m.external:
        return "outside"
    if m.baseline == "none" and m.whiten == "none":
        return "reward"
    filtered = m.keep not in ("all", "live_groups")
    good, bad = BOUNDS[m.bound].height(m)
    if filtered or m.entropy_cost or m.token_weight != "none" or good != bad:
        return "weights"
    # A baseline centres A in each group, whitening over the batch; a factor per group undoes the latter.
    by_group = m.keep == "live_groups" or m.aggregate == "group_token_mean"
    if by_group and m.baseline == "none":
        return "weights"
    in_group = "tokens" if m.baseline == "length_weighted_mean" else "rollouts"
    balanced = in_group if m.whiten == "none" else m.whiten
    counted = "rollouts" if m.aggregate == "sequence_mean" else "tokens"
    return "zero" if balanced == counted and (not by_group or balanced == in_group) else "length"


def _value_text(m: Method, kind: str) -> str:
    """Σ_it α_it·h_it·A_it at ratio 1, where no trust region drops anything."""
    if kind in ("margin", "label"):
        over = MEANS.get((m.link_over, m.aggregate))
        mean = f"{over} " if over else f"Σ_it {alpha_text(m)} · "
        sft = f" + {_times(m.sft)}mean log π(chosen)" if m.sft else ""
        return f"{mean}{term_text(m)}{sft}   {margin_text(m)}"
    alpha = alpha_text(m.replace(trust="none", trust_low=None, trust_high=None))
    if kind == "length" and m.whiten == "none" and m.aggregate != "sequence_mean":
        return "Σ_i A_i·L_i" + alpha.split(" ")[0].removeprefix("1")
    factors = [_credit_symbol(m), _height_text(m), "log π_it" if m.carrier == "log_prob" else ""]
    return f"Σ_it {alpha} · " + "·".join(filter(None, factors))


def _height_text(m: Method) -> str:
    """φ(1), where it is not 1."""
    bound = BOUNDS[m.bound]
    good, bad = bound.height(m)
    if good == bad == 1:
        return ""
    return bound.height_text or (f"{good:g}" if good == bad else f"({good:g} where A > 0, {bad:g} else)")


def _credit_symbol(m: Method) -> str:
    return "A_it" if m.kl_in == "token_reward" or m.external else "A_i"


def axis_meaning(m: Method, axis: str, value: object) -> str:
    """The meaning of a value of the row, for an axis of names."""
    if axis == "aggregate" and m.linked and (over := MEANS.get((m.link_over, str(value)))):
        return over
    return str(AXES[axis].get(str(value), "")) if axis in AXES else ""


def _times(number: float) -> str:
    return "" if number == 1 else f"{number:g}·"


def _group(text: str) -> str:
    return f"({text})" if "+" in text else text
