"""The surrogate again in Python floats, one rollout and one token at a time, without padding.

    J(log π; log π*) = Σ_it α_it · bound(s_it, A_it) − β · R        log π*: the log π inside sg[·]

It is written from the definitions of the axes (`methods.AXES`) and shares no code with `objective`. w comes from
central differences of J in log π with log π* fixed. A bound or trust region without a slow form here is evaluated by
its row, one number at a time; that is the only use of torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from creditscope.methods import bounds
from creditscope.methods.axes import Method

STEP = 1e-5
Tokens = list[list[float]]


@dataclass(frozen=True)
class TwinRollout:
    """One rollout, without padding."""

    group: int
    reward: float
    tokens: list[int]
    old: list[float]
    ref: list[float]
    entropy: list[float]


def answers(move: float, seed: int) -> tuple[list[TwinRollout], Tokens]:
    """Three groups of four (right and wrong, graded, unanimous) and the log-probs of a policy that moved."""
    draw = random.Random(seed)  # the same sequence on every platform
    rewards = [1.0, 0.0, 0.0, 1.0, 0.9, 0.2, 0.6, 0.1, 1.0, 1.0, 1.0, 1.0]
    lengths = [3, 5, 2, 4, 1, 4, 3, 5, 2, 3, 4, 2]
    rows, logp = [], []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        old = [-0.3 - 1.5 * draw.random() for _ in range(length)]
        rows.append(TwinRollout(i // 4, reward, [draw.randrange(2) for _ in range(length)], old,
                           [x + 0.3 * (draw.random() - 0.5) for x in old],
                           [(0.2 + 0.25 * (i % 4)) * (0.5 + draw.random()) for _ in range(length)]))
        logp.append([min(x + 2 * move * (draw.random() - 0.5), -1e-3) for x in old])
    return rows, logp


def at_the_bounds(m: Method, rows: Sequence[TwinRollout], turn: int) -> Tokens:
    """Log-probs a twentieth inside or outside the method's own bounds, to test the values of the bounds.

    With a sequence ratio all tokens of an answer have moved alike; `turn` permutes the four places.
    """
    out: Tokens = []
    alike = m.ratio.startswith("sequence") or m.trust == "off_policy_sequence"
    for i, row in enumerate(rows):
        moves = []
        for t in range(len(row.tokens)):
            side, share = ((1, 1.05), (1, 0.95), (-1, 1.05), (-1, 0.95))[(i + i // 4 + (0 if alike else t) + turn) % 4]
            size = share * ((m.clip_high if side > 0 else m.clip_low) or 0.2)
            if m.trust == "off_policy_sequence":
                moves.append(side * share * (m.trust_high or 0.0))
            elif m.trust == "binary_tv":
                moves.append(math.log1p(side * share * (m.trust_high or 0.0) / math.exp(row.old[t])))
            else:
                moves.append(side * size if m.bound == "clip_inside" else math.log1p(side * size))
        if m.trust == "off_policy_sequence" and len(moves) > 1:
            moves[:2] = moves[0] + 0.6, moves[1] - 0.6  # otherwise every dropped token is also clipped
        spread = len(moves) if m.ratio == "sequence_product" else 1
        out.append([min(x + move / spread, -1e-3) for x, move in zip(row.old, moves, strict=True)])
    return out


def credit(m: Method, rows: Sequence[TwinRollout], logp: Tokens, own: Tokens) -> Tokens:
    """w_it = (J(log π_it + h) − J(log π_it − h)) / 2h."""
    out: Tokens = []
    for i, row in enumerate(logp):
        out.append([])
        for t in range(len(row)):
            ends = []
            for h in (STEP, -STEP):
                moved = [list(some) for some in logp]
                moved[i][t] += h
                ends.append(objective(m, rows, moved, logp, own))
            out[-1].append((ends[0] - ends[1]) / (2 * STEP))
    return out


def objective(m: Method, rows: Sequence[TwinRollout], logp: Tokens, held: Tokens, own: Tokens) -> float:
    """J with the credit `own`."""
    if m.link != "none":
        return _preferred(m, rows, logp, held, own)
    keep = KEEPS[m.keep](m, rows, own)
    share = _shares(m, rows, keep)
    weight = _conflict(rows) if m.token_weight == "conflict" else [[1.0] * len(row.tokens) for row in rows]
    total = 0.0
    for i, row in enumerate(rows):
        if not keep[i]:
            continue
        s = _ratios(m, row, logp[i], held[i])
        for t in range(len(row.tokens)):
            a = own[i][t]
            bound = BOUNDS.get(m.bound, _stated)
            term = a * logp[i][t] if m.ratio == "none" else bound(m, row, logp[i], held[i], own[i], s, t)
            total += share[i] * weight[i][t] * term * TRUSTS.get(m.trust, _stated_trust)(m, row, held[i], a, t)
            if m.has_loss_kl:
                total -= m.beta * share[i] * _penalty(m, row, logp[i], s, t)
    return total


def advantages(m: Method, rows: Sequence[TwinRollout]) -> Tokens:
    """A_it of a method with its own baseline."""
    drift = [[m.beta * (o - r) if m.has_reward_kl else 0.0 for o, r in zip(row.old, row.ref, strict=True)]
             for row in rows]
    if m.kl_in == "token_reward":
        togo = [[row.reward - sum(d[t:]) for t in range(len(d))] for row, d in zip(rows, drift, strict=True)]
        flat = [x for some in togo for x in some]
        mean, std = _mean(flat), _std(flat)
        return [[(x - mean) / std for x in some] for some in togo]
    reward = [row.reward - sum(d) for row, d in zip(rows, drift, strict=True)]
    each = [_advantage(m, rows, reward, i) for i in range(len(rows))]
    if m.whiten == "tokens":
        flat = [a for a, row in zip(each, rows, strict=True) for _ in row.tokens]
        each = [(a - _mean(flat)) / _std(flat) for a in each]
    each = [a - m.entropy_cost * _mean(row.entropy) for a, row in zip(each, rows, strict=True)]
    return [[a] * len(row.tokens) for a, row in zip(each, rows, strict=True)]


def _advantage(m: Method, rows: Sequence[TwinRollout], reward: list[float], i: int) -> float:
    mates = [j for j, row in enumerate(rows) if row.group == rows[i].group]
    own = [reward[j] for j in mates]
    lengths = [len(rows[j].tokens) for j in mates]
    if m.centred and max(own) - min(own) < 1e-12:
        return 0.0
    baseline = {"none": 0.0, "group_mean": _mean(own), "leave_one_out": (sum(own) - reward[i]) / (len(own) - 1),
                "length_weighted_mean": sum(n * r for n, r in zip(lengths, own, strict=True)) / sum(lengths)}
    if m.scale == "label":
        return 1.0 if reward[i] > 0 else -1.0
    if m.scale == "extremes":  # of equal ones the first
        return float(mates[own.index(max(own))] == i) - float(mates[own.index(min(own))] == i)
    live = [g for g in _groups(rows) if len({reward[j] for j in g}) > 1]
    divide = {"none": lambda: 1.0, "group_std": lambda: _std(own), "group_mean": lambda: _mean(own),
              "live_groups": lambda: len(live) / len(_groups(rows)),
              "beta_density": lambda: _density([_mean([reward[j] for j in g]) for g in _groups(rows)], _mean(own))}
    return (reward[i] - baseline[m.baseline]) / divide[m.scale]()


def _density(rates: list[float], p: float) -> float:
    """The Beta density at p whose a and b fit the groups' success rates by moments, tempered by 1/3."""
    mean = _mean(rates)
    fit = mean * (1 - mean) / _std(rates) ** 2 - 1
    a, b = max(1.0, 1 + fit * mean / 3), max(1.0, 1 + fit * (1 - mean) / 3)
    beta = math.exp(math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))
    return float(p ** (a - 1) * (1 - p) ** (b - 1) / beta)


def _preferred(m: Method, rows: Sequence[TwinRollout], logp: Tokens, held: Tokens, own: Tokens) -> float:
    """λ times the mean of φ over pairs, or over answers, and the mean log π of the chosen answers."""
    anchor = max(0.0, _mean([_score(m, row, p) for row, p in zip(rows, held, strict=True)])) \
        if m.anchor == "batch_mean" else 0.0
    margin = [m.beta * own[i][0] * (_score(m, row, logp[i]) - anchor) for i, row in enumerate(rows)]
    if m.link_over == "pair":
        margin = [sum(margin[i] for i in g) - m.margin for g in _groups(rows) if any(own[i][0] for i in g)]
    link: dict[str, Callable[[float], float]] = {
        "logistic": lambda u: -math.log1p(math.exp(-u)), "square": lambda u: -((u / m.beta - 0.5 / m.beta) ** 2),
        "hinge": lambda u: -max(0.0, 1 - u), "sigmoid": lambda u: 1 / (1 + math.exp(-u)),
        "robust": lambda u: ((1 - (m.flip or 0)) * link["logistic"](u) - (m.flip or 0) * link["logistic"](-u))
        / (1 - 2 * (m.flip or 0))}
    total = m.link_weight * _mean([link[m.link](u) for u in margin])
    good = [p for p, a in zip(logp, own, strict=True) if a[0] > 0]
    means = [_mean(p) for p in good] if m.sft_mean == "answers" else [x for p in good for x in p]
    return total + m.sft * _mean(means) if m.sft else total


def _score(m: Method, row: TwinRollout, logp: list[float]) -> float:
    """h of one answer, with any credit the same for all its tokens."""
    apart = sum(logp) - sum(row.ref)
    chance = math.exp(_mean(logp))
    return {"log_ratio": apart, "log_ratio_mean": apart / len(logp), "log_prob": sum(logp),
            "log_prob_mean": _mean(logp), "log_odds": math.log(chance / (1 - chance))}[m.score]


def _top(m: Method, rows: Sequence[TwinRollout], own: Tokens) -> list[bool]:
    """In each group the ⌊share·R⌋ largest |A|, at least one; of equal ones the first."""
    out = [False] * len(rows)
    for group in _groups(rows):
        count = max(1, math.floor((m.keep_threshold or 0.0) * len(group)))
        for i in sorted(group, key=lambda i: (-max(map(abs, own[i])), i))[:count]:
            out[i] = True
    return out


KEEPS: dict[str, Callable[[Method, Sequence[TwinRollout], Tokens], list[bool]]] = {
    "all": lambda m, rows, own: [True] * len(rows),
    "live_groups": lambda m, rows, own: [
        len({other.reward for other in rows if other.group == row.group}) > 1 for row in rows],
    "large_advantage": lambda m, rows, own: [max(map(abs, some)) > (m.keep_threshold or 0.0) for some in own],
    "top_advantage": _top,
    "low_entropy": lambda m, rows, own: [_mean(row.entropy) <= (m.keep_threshold or 0.0) for row in rows],
}


def _shares(m: Method, rows: Sequence[TwinRollout], keep: list[bool]) -> list[float]:
    """The factor of each token of a rollout, without its token weight."""
    counted = [k or m.denominator == "all" for k in keep]
    length = [len(row.tokens) for row in rows]
    number, tokens = sum(counted), sum(n for n, c in zip(length, counted, strict=True) if c)
    groups = [[j for j in g if counted[j]] for g in _groups(rows)]
    prompts = sum(1 for g in groups if g)

    def group_tokens(i: int) -> int:
        return sum(length[j] for j in range(len(rows)) if rows[j].group == rows[i].group and counted[j])

    formula: dict[str, Callable[[int], float]] = {
        "sequence_mean": lambda i: 1 / (number * length[i]), "sequence_sum": lambda i: 1 / number,
        "token_mean": lambda i: 1 / tokens, "constant": lambda i: 1 / (number * (m.max_tokens or max(length))),
        "group_token_mean": lambda i: 1 / (prompts * group_tokens(i))}
    return [formula[m.aggregate](i) for i in range(len(rows))]


def _conflict(rows: Sequence[TwinRollout]) -> Tokens:
    """2 or 0 on the tokens of the leading or trailing run that good and bad answers of the group share; 1 elsewhere."""
    mean = {row.group: _mean([other.reward for other in rows if other.group == row.group]) for row in rows}
    good = [row.reward - mean[row.group] for row in rows]

    def run(i: int, read: Callable[[list[int]], list[int]]) -> int:
        """The number of tokens from that end on that are, each, in a good and in a bad answer at the same place."""
        mine = read(rows[i].tokens)
        for t, token in enumerate(mine):
            sides = {good[j] > 0 for j, row in enumerate(rows) if row.group == rows[i].group and good[j] != 0
                     and t < len(row.tokens) and read(row.tokens)[t] == token}
            if len(sides) < 2:
                return t
        return len(mine)

    out = []
    for i, row in enumerate(rows):
        n = len(row.tokens)
        lead, trail = run(i, lambda x: x), run(i, lambda x: x[::-1])
        value = 1.0 if good[i] == 0 else 2.0 * (good[i] > 0)
        out.append([value if t < lead or n - 1 - t < trail else 1.0 for t in range(n)])
    return out


def _ratios(m: Method, row: TwinRollout, logp: list[float], held: list[float]) -> list[float]:
    """s_it of every token."""
    x = [a - b for a, b in zip(logp, row.old, strict=True)]
    still = _mean([a - b for a, b in zip(held, row.old, strict=True)])
    formula: dict[str, Callable[[int], float]] = {
        "none": lambda t: 0.0, "token": lambda t: x[t], "sequence_mean": lambda t: _mean(x),
        "sequence_product": lambda t: sum(x), "sequence_token": lambda t: still + logp[t] - held[t]}
    return [math.exp(formula[m.ratio](t)) for t in range(len(x))]


def _clamp(m: Method, s: float) -> float:
    low = -math.inf if m.clip_low is None else 1 - m.clip_low
    return min(max(s, low), math.inf if m.clip_high is None else 1 + m.clip_high)


SlowBound = Callable[[Method, TwinRollout, list[float], list[float], list[float], list[float], int], float]


def _inside(m: Method, row: TwinRollout, logp: list[float], held: list[float], own: list[float], s: list[float],
            t: int) -> float:
    """exp(mean of the log-ratios, each clipped on the side that raises the objective) · A."""
    low, high = -(m.clip_low or 0.0), m.clip_high or 0.0
    each = [min(x, high) if a >= 0 else max(x, low)
            for x, a in zip((p - o for p, o in zip(logp, row.old, strict=True)), own, strict=True)]
    return math.exp(_mean(each)) * own[t]


def _gate(m: Method, row: TwinRollout, logp: list[float], held: list[float], own: list[float], s: list[float],
          t: int) -> float:
    tau = (m.gate_pos if own[t] > 0 else m.gate_neg) or math.nan
    return own[t] * 4 / tau / (1 + math.exp(-tau * (s[t] - 1)))


def _gamma(m: Method, row: TwinRollout, logp: list[float], held: list[float], own: list[float], s: list[float],
           t: int) -> float:
    k, lam = (m.gamma_pos if own[t] >= 0 else m.gamma_neg) or (math.nan, math.nan)
    still = math.exp(sum(held) - sum(row.old))
    return float(still**k) * math.exp(lam * (1 - still)) * own[t] * logp[t]


def _stated(m: Method, row: TwinRollout, logp: list[float], held: list[float], own: list[float], s: list[float],
            t: int) -> float:
    """The term by φ of the bound's row, without its slope."""
    import torch

    bound = bounds.BOUNDS[m.bound]

    def phi(x: float, a: float) -> float:
        return bound.term(m, torch.tensor([[x]], dtype=torch.float64), torch.tensor([[a]], dtype=torch.float64)).item()

    if bound.carrier == "tokens":
        each = [phi(p - o, a) for p, o, a in zip(logp, row.old, own, strict=True)]
        return math.exp(_mean(each)) * own[t]
    if bound.carrier == "log_prob":
        return phi(math.log(_ratios(m, row, held, held)[t]), own[t]) * own[t] * logp[t]
    return phi(math.log(s[t]), own[t]) * own[t]


BOUNDS: dict[str, SlowBound] = {
    "none": lambda m, row, logp, held, own, s, t: s[t] * own[t],
    "clip": lambda m, row, logp, held, own, s, t: min(s[t] * own[t], _clamp(m, s[t]) * own[t]),
    "clip_inside": _inside,
    "stop_gradient": lambda m, row, logp, held, own, s, t:
        _clamp(m, _ratios(m, row, held, held)[t]) * own[t] * logp[t],
    "gate": _gate,
    "gamma": _gamma,
}


def _tv(m: Method, row: TwinRollout, held: list[float], a: float, t: int) -> bool:
    moved = math.exp(held[t]) - math.exp(row.old[t])
    return moved <= (m.trust_high or 0.0) if a > 0 else moved >= -(m.trust_low or 0.0)


def _kl(m: Method, row: TwinRollout, held: list[float], a: float, t: int) -> bool:
    p, q = math.exp(row.old[t]), math.exp(held[t])
    far = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return q <= p or far <= (m.trust_high or 0.0) if a > 0 else q >= p or far <= (m.trust_low or 0.0)


def _stated_trust(m: Method, row: TwinRollout, held: list[float], a: float, t: int) -> bool:
    """Whether the trust region's row keeps the token."""
    import torch

    keeps = bounds.TRUSTS[m.trust].keeps
    live, old = (torch.tensor([x], dtype=torch.float64) for x in (held, row.old))
    kept = True if keeps is None else keeps(m, live, old, torch.ones_like(live).bool(), torch.full_like(live, a))
    return bool(torch.as_tensor(kept).expand_as(live)[0, t])


TRUSTS: dict[str, Callable[[Method, TwinRollout, list[float], float, int], bool]] = {
    "none": lambda m, row, held, a, t: True,
    "off_policy_sequence": lambda m, row, held, a, t: a >= 0 or _mean(
        [o - h for o, h in zip(row.old, held, strict=True)]) <= (m.trust_high or 0.0),
    "binary_tv": _tv,
    "binary_kl": _kl,
}


def _penalty(m: Method, row: TwinRollout, logp: list[float], s: list[float], t: int) -> float:
    """The KL estimate of one token, or its part of the sequence's."""
    to = row.old if m.kl_to == "old" else row.ref
    x = logp[t] - to[t] if m.kl_level == "token" else sum(logp) - sum(to)
    value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) + x - 1}[m.kl]
    value = value if m.kl_level == "token" else value / len(logp)
    return value * s[t] if m.kl_weight == "ratio" else value


def _mean(x: Sequence[float]) -> float:
    return sum(x) / len(x)


def _std(x: Sequence[float]) -> float:
    return math.sqrt(sum((y - _mean(x)) ** 2 for y in x) / (len(x) - 1))


def _groups(rows: Sequence[TwinRollout]) -> list[list[int]]:
    return [[i for i, row in enumerate(rows) if row.group == g] for g in dict.fromkeys(row.group for row in rows)]
