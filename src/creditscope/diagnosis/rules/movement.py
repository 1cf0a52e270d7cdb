"""Does the policy move? Learning rate, ε, rounding, clipped gradients, frozen weights, a KL term that pulls back."""

from __future__ import annotations

import math

from creditscope.diagnosis import signs
from creditscope.diagnosis.finding import (
    FEW,
    Finding,
    State,
    expect_enough,
    finding,
    grade,
    lacking,
    last,
    level,
    over,
    series_of,
    unknown,
)
from creditscope.diagnosis.log import Log, Series, is_number
from creditscope.diagnosis.onset import crossed
from creditscope.diagnosis.signs import percent
from creditscope.diagnosis.thresholds import (
    ADAM_FULL,
    ADAM_RATE,
    BETA,
    BF16_RATE,
    CLIP_EPSILON,
    CLIP_ONCE,
    CLOSED,
    EPSILON_FACTOR,
    EPSILON_NORM,
    EPSILON_USUAL,
    GRAD_CLIP,
    HORIZON,
    KL_REWARD,
    KL_SIZE,
    MASK_LENGTH,
    MASK_ROWS,
    MASK_ROWS_BROKEN,
    MASK_TOKENS,
    MOVED,
    PULL_BROKEN,
    PULL_WATCH,
    RATE_SUM,
    REACHED,
    RISING,
    ROUNDED,
    ROUNDED_SOME,
    SGD_SUM,
    TRAINABLE,
    WARM,
)
from creditscope.methods.words import law
from creditscope.runs import schema

LOSS_ZERO = 1e-6
"""Below it a float32 loss is 0: rounding of centred advantages alone leaves about 1e-8."""
ADAM_EPSILON = 1e-8
"""ε of PyTorch's Adam, which TRL, verl and creditscope keep."""


def stalls(log: Log) -> bool:
    """Whether nothing says that the run learns."""
    return not signs.rises(log)


def reach(log: Log) -> float | None:
    """n²·D: n the steps planned, D the KL per token after one step, the median over readings."""
    series = log.finite(schema.OVERSHOOT_KL)
    if not series or len(series) < 2:
        return None
    values = sorted(abs(value) for value in series.values)
    return signs.planned(log) ** 2 * values[len(values) // 2]


def still(log: Log) -> bool:
    """Whether the policy cannot move: n²·D below MOVED."""
    found = reach(log)
    return found is not None and found < MOVED


def small_steps(log: Log) -> Finding:
    """n²·D ≪ 1e-4 nats per token: the policy cannot change, whatever it learns."""
    found, series = reach(log), log.finite(schema.OVERSHOOT_KL)
    if found is None or series is None:
        return _small_sgd(log)
    if found >= MOVED:
        return finding("fine", f"The policy moves: n²·D = {found:.2g} nats per token", last(series))
    return finding("broken", f"The policy does not move: KL after a step is {last(series).mean:.2g} nats per token; "
                   f"over {signs.planned(log)} steps it can reach {found:.2g} at most", series,
                   why="Steps that all point one way add lengths, and KL grows with the square: KL ≤ n²·D.",
                   onset=series.rows[0].step,
                   follows=["learning rate", "epsilon", "rounding", "gradient clip", "frozen", "mask", "clip",
                            "reward constant", "one rollout", "cold sampler", "too easy", "too hard", "dead groups",
                            "truncation"])


def _small_sgd(log: Log) -> Finding:
    """From a log alone: under SGD the weights move by Σ η·min(‖g‖, clip) at most."""
    rate, norm = log.finite("lr"), log.finite(schema.GRAD_NORM)
    if not signs.by_sgd(log) or not rate or not norm:
        return lacking(log, "KL after a step was not read", {schema.OVERSHOOT_KL: 2}, signs.callback(log))
    clip = log.setting("grad_clip") or math.inf
    rows = [row.values for row in rate.rows if is_number(row.values.get(norm.name, math.nan))]
    moved = math.fsum(abs(row[rate.name]) * min(row[norm.name], clip) for row in rows) * signs.planned(log) / max(
        1, len(rows))
    if moved >= SGD_SUM or not stalls(log):
        return finding("fine", f"SGD can move the weights by {moved:.2g} in all", norm)
    return finding("broken", f"SGD moves the weights by {moved:.2g} at most over the whole run: Σ η‖g‖, with a "
                   f"learning rate of {max(rate.values):.2g} and a gradient norm of {last(norm).mean:.2g}", norm, rate,
                   why="‖θ_n − θ_0‖ ≤ Σ η‖g‖; the weights of a language model have norms of 10 to 1000. SGD needs "
                   "learning rates about 1e4 times those of Adam.", onset=0)


def learning_rate(log: Log) -> Finding:
    """A learning rate of 0 or nearly 0, a warm-up that outlasts the run, a schedule that ends early."""
    series = series_of(log, "lr", 1)
    values, top = series.values, max(series.values)
    zeros = sum(signs.exactly_zero(series, value) for value in values)
    if top == 0 and series.resolution:
        return unknown(f"{series.name} is printed as 0: it is below {series.resolution:g}",
                       settles=f"{log.spelled('learning_rate')}, by --config or --set")
    if zeros > len(values) / 2:
        return finding("broken", f"The learning rate is 0 in {zeros} of {len(values)} readings", series,
                       why="θ ← θ − η·update, and η = 0.", onset=crossed(series, lambda x: x == 0), remedy="schedule")
    if signs.is_early(log):  # a warm-up that goes on is no fault yet
        return _rate_sum(log, series)
    given = log.setting("learning_rate") or top
    low = sum(value < WARM * max(top, given) for value in values)
    if len(values) >= 2 * FEW and low > len(values) / 2:
        return finding("broken" if stalls(log) else "watch", f"The learning rate is below a hundredth of "
                       f"{max(top, given):.2g} in {low} of {len(values)} readings: warm-up or schedule leave little",
                       series, why="θ ← θ − η·update.", onset=crossed(series, lambda x: x < WARM * max(top, given)),
                       remedy="schedule")
    if len(values) >= 2 * FEW and values == sorted(set(values)) and log.setting("learning_rate") != top:
        return finding("broken" if stalls(log) and top < RISING * given else "watch" if stalls(log) else "fine",
                       f"The learning rate rises to the end of the log, up to {top:.2g}: all of it is warm-up",
                       series, why="η_t = η·t/T while the warm-up lasts.", onset=series.rows[0].step, remedy="schedule")
    return _rate_sum(log, series)


def _rate_sum(log: Log, series: Series) -> Finding:
    """Adam moves a weight by about η per step: Σ η over the run is the farthest that a weight can go."""
    size = log.setting("learning_rate") if signs.is_early(log) else None  # the mean so far may be of the warm-up
    total = max(size or 0.0, math.fsum(series.values) / len(series)) * signs.planned(log)
    short = total + series.resolution * signs.planned(log) < RATE_SUM and not signs.by_sgd(log)
    if not short or not (stalls(log) or still(log)):
        first = " (a warm-up begins at 0: the first step changes nothing)" if series.values[0] == 0 else ""
        return finding("fine", f"The learning rate goes from {series.values[0]:.2g} to {series.values[-1]:.2g}{first}",
                       series)
    return finding("broken", f"The learning rate is too small: Σ η = {total:.2g} over {signs.planned(log)} steps is "
                   f"the farthest that Adam can move a weight", series,
                   why="Adam's update is m̂/(√v̂ + ε), about 1 in size, times η; weights are 0.01 to 0.1 in size.",
                   onset=0)


def epsilon(log: Log) -> Finding:
    """ε of Adam beside √v̂: the factor √v̂/(√v̂ + ε) shortens the step."""
    given, factor = log.setting("adam_epsilon"), log.finite(schema.UPDATE_EPSILON_FACTOR)
    large = given is not None and given > EPSILON_USUAL
    why = "Δ = −η·m̂/(√v̂ + ε): where ε is much larger than √v̂, the step is η·m̂/ε."
    named = f"{log.spelled('adam_epsilon')} = {given:g}" if given is not None else "ε"
    if factor:
        recent = last(factor)
        if recent.mean > EPSILON_FACTOR or not large or not (stalls(log) or still(log)):
            return finding("fine", f"{named} shortens the median step by × {recent.mean:.2g}", recent)
        return finding("broken", f"Adam's ε stops the weights: {named} shortens the median step by × {recent.mean:.2g}",
                       recent, why=why, onset=0)
    if given is None:
        return unknown("Adam's ε was not given", settles=signs.SETTINGS_FILE)
    if not large:
        return finding("fine", f"{named} is usual")
    size = level(log, schema.GRAD_NORM)
    ratio = None if size is None or given is None else given / max(size.mean, 1e-300)
    if ratio is not None and ratio < EPSILON_NORM:
        return finding("fine", f"{named} is small beside the gradient's norm", size)
    return finding("broken" if stalls(log) else "watch", f"Adam's ε is far outside of what trainers use: {named}, "
                   f"{'and the gradient has norm ' + format(size.mean, '.2g') if size else 'usual is 1e-8'}", size,
                   settles="update/epsilon_factor, which ScopeCallback reads", why=why, onset=0)


def rounding(log: Log) -> Finding:
    """Updates below half the spacing of a weight in its dtype are lost: bf16 keeps 8 bits."""
    zero, kl = log.finite(schema.UPDATE_ZERO), log.finite(schema.OVERSHOOT_KL)
    low = any(word in log.word("dtype").lower() for word in ("bf16", "bfloat16", "float16", "fp16", "half"))
    why = ("bfloat16 spaces numbers by 2^(⌊log₂|θ|⌋ − 7): an update below half of that changes nothing. Adam moves by "
           "about η, so at η = 1e-6 every weight above 3e-4 stays.")
    if zero:
        recent = last(zero)
        same = bool(kl and len(kl) > 1 and sum(value == 0 for value in kl.values) > len(kl) / 2)
        rate = log.finite("lr")
        moving = rate is None or max(rate.values) > 0
        lost = recent.mean >= ROUNDED or (same and recent.mean > ROUNDED_SOME)
        known = f", stored as {log.word('dtype')}," if low else ""
        if lost and (low or _in_full(log, rate)) and moving and (stalls(log) or same):
            return finding("broken", f"Updates are lost in rounding: an update leaves {percent(recent.mean)} of the "
                           f"weights{known} as they are"
                           + (", and KL after the step is exactly 0" if same else ""), recent, kl,
                           onset=zero.rows[0].step, why=why)
        return finding("fine", f"An update moves {percent(1 - recent.mean)} of the weights", recent)
    rate = log.finite("lr")
    if not low or rate is None:
        return finding("fine", "Not in play: nothing says that weights are stored in 16 bits") if not low else unknown(
            "the share of weights that an update moves was not read", settles="ScopeCallback")
    top = max(rate.values)
    if 0 < top < BF16_RATE and stalls(log) and not signs.by_sgd(log):
        return finding("broken", f"Updates are lost in rounding: weights are stored as {log.word('dtype')}, and Adam "
                       f"moves them by about {top:.2g}", rate, settles="update/zero, which ScopeCallback reads",
                       onset=0, why=why)
    return finding("fine", f"Weights are stored as {log.word('dtype')}, with a learning rate of {top:.2g}", rate)


def _in_full(log: Log, rate: Series | None) -> bool:
    """Whether Adam's steps are as long as η, which float32 weights would show: where the dtype was not given."""
    factor = log.finite(schema.UPDATE_EPSILON_FACTOR)
    return bool(not log.word("dtype") and factor and last(factor).mean > ADAM_FULL and rate
                and max(rate.values) >= ADAM_RATE)


def grad_clip(log: Log) -> Finding:
    """A clip norm far below the gradient's norm: under SGD the step shrinks, under Adam ε takes over."""
    clip, norm = log.setting("grad_clip"), log.finite(schema.GRAD_NORM)
    if clip is None:
        return unknown("the norm that gradients are clipped to was not given", settles=signs.SETTINGS_FILE)
    if norm is None or clip <= 0 or clip >= GRAD_CLIP * norm.mean:
        return finding("fine", "Not in play: the clip norm is not far below the gradient's", norm)
    tiny = clip < CLIP_EPSILON * (log.setting("adam_epsilon") or ADAM_EPSILON) or signs.by_sgd(log)
    state: State = "fine" if not stalls(log) and not still(log) else "broken" if tiny or still(log) else "watch"
    return finding(state, f"The gradient is cut to {clip:g}, from a norm of {norm.mean:.2g}: "
                   f"{log.spelled('grad_clip')} = {clip:g}", norm,
                   why="g ← g·min(1, c/‖g‖). Adam divides the factor out until √v̂ falls below ε.", onset=0)


def frozen(log: Log) -> Finding:
    """The share of the weights that training can change: trained ones, and those that a trained adapter adds to."""
    trained, reached = log.finite(schema.UPDATE_TRAINABLE), log.finite(schema.UPDATE_REACHED)
    if trained is None:
        return unknown("the share of trained parameters was not read", settles=signs.callback(log))
    share, rank = trained.values[-1], log.setting("lora")
    many = reached.values[-1] >= REACHED if reached else share >= TRAINABLE or (rank or 0) > 0
    shown = trained.part(-1), reached.part(-1) if reached else None
    if many or signs.outcome(log) not in ("flat", "fell"):
        more = f", which reach {percent(reached.values[-1])} of the model" if reached else ""
        return finding("fine", f"{percent(share)} of the parameters are trained{more}", *shown)
    known = reached is not None or rank == 0
    return finding("broken" if known else "watch", f"Only {share:.2g} of the parameters are trained, and the "
                   f"{log.trainer.gain} does not rise", *shown,
                   why="Weights without a gradient stay; what is left moves the policy little. A LoRA has few weights "
                   "too, and reaches all of the matrices that it is added to.", onset=0,
                   settles="" if known else "whether adapters are trained: update/reached, which ScopeCallback reads")


def mask(log: Log) -> Finding:
    """Tokens that have credit and that the loss leaves out: whole answers, or the first or last tokens of most."""
    rows, row = level(log, schema.W_DEAD_ROWS), log.fact("method")
    if rows is None and signs.rises(log):
        return finding("fine", "Not in play: the reward rises")
    if rows is None:
        return lacking(log, "whether tokens with credit are trained was not read", {schema.W_DEAD_ROWS: FEW},
                       signs.callback(log))
    if row is not None and (row.keep not in ("all", "live_groups") or row.token_weight != "none"):
        return finding("fine", f"Not in play: {log.fact('loss')} leaves tokens with credit out")
    first, after = (level(log, metric) for metric in (schema.W_SKIPPED_FIRST, schema.W_SKIPPED_LAST))
    size, length = max((min(part.values) for part in (first, after) if part), default=0.0), level(
        log, schema.LENGTH_MEAN)
    if rows.mean < MASK_ROWS and size < MASK_TOKENS:
        return finding("fine", "Tokens with credit are trained", rows)
    much = rows.mean >= MASK_ROWS_BROKEN or (length is not None and size >= MASK_LENGTH * length.mean)
    place = "first" if first and min(first.values) == size else "last"
    said = [f"{percent(rows.mean)} of the answers have w = 0 on every token"] if rows.mean >= MASK_ROWS else []
    some = "token of most answers has" if size == 1 else f"{size:.3g} tokens of most answers have"
    said += [f"the {place} {some} w = 0"] if size >= MASK_TOKENS else []
    return finding("broken" if much and stalls(log) else "watch", f"Tokens with credit are not trained: "
                   f"{', and '.join(said)}", rows, first, after,
                   why="w = ∂J/∂log π is 0 where the loss leaves a token out: its mask is shifted, or of other rows.",
                   onset=rows.rows[0].step, follows=["sampler"])


def kl_pull(log: Log) -> Finding:
    """−⟨g_KL, g_R⟩/‖g_R‖²: the share of the reward's gradient that the KL term takes back."""
    pull, beta = log.finite(schema.GRAD_KL_PULL), log.fact("beta")
    paid = _kl_in_reward(log)
    if paid is not None:
        return paid
    if pull and len(pull) >= 2:
        return _measured_pull(log, pull, beta)
    if beta is None:
        return lacking(log, "the KL term's weight is not known", {schema.GRAD_KL_PULL: 2}, signs.SETTINGS_FILE)
    if beta < BETA:
        return finding("fine", f"Not in play: the KL term's weight is {beta:g}" if beta else
                       "There is no KL term in the loss")
    if not stalls(log):
        return finding("fine", f"The reward rises under a KL term of weight {beta:g}", level(log, "kl"))
    return finding("broken", f"The KL term outweighs the reward: β = {beta:g}, where examples use 0 to 0.1, and no "
                   f"rise of the reward was seen", level(log, "kl"),
                   why="∇J = Σ w ∇log π − β ∇KL: with a large β the policy stays at the reference.", onset=0,
                   settles="grad/kl_pull, which ScopeCallback reads")


def _measured_pull(log: Log, pull: Series, beta: float | None) -> Finding:
    """The pull, and the size of the KL term's gradient: one that outweighs the reward's turns the step wherever it
    points."""
    part, size = pull.part(len(pull) // 3), log.finite(schema.GRAD_KL_SIZE)
    times = sorted(size.values)[len(size) // 2] if size and len(size) >= 2 else 0.0
    state = max(grade(part.mean, PULL_WATCH, PULL_BROKEN), grade(times, KL_SIZE, KL_SIZE), key=("fine", "watch",
                                                                                               "broken").index)
    words = f"The KL term's gradient is × {times:.2g} the reward's" if times and part.mean < PULL_WATCH else \
        f"The KL term takes back {percent(part.mean)} of what the reward gives"
    return finding("fine" if not stalls(log) else state, words + (f" (β = {beta:g})" if beta else ""), part, size,
                   why="w = w_R + w_KL; −⟨g_KL, g_R⟩/‖g_R‖² = 1 where the two gradients cancel.",
                   onset=pull.rows[0].step)


def _kl_in_reward(log: Log) -> Finding | None:
    """verl can subtract β·KL from the score: then critic/rewards is what is learnt, and critic/score what was meant."""
    paid, score = log.series("score with kl"), log.series(schema.REWARD_MEAN)
    if not paid or not score or len(paid.finite) < FEW or len(score.finite) < FEW:
        return None
    cost = [row.values[paid.name] - row.values[score.name] for row in paid.finite.rows
            if is_number(row.values.get(score.name, math.nan))]
    if not cost:
        return None
    recent, unit = cost[-max(FEW, len(cost) // 3):], max(abs(value) for value in score.finite.values)
    mean = math.fsum(recent) / len(recent)
    if -mean < KL_REWARD * max(unit, 1e-9):
        return None
    return finding("broken", f"KL in the reward outweighs the score: it costs {-mean:.2g} per answer, beside a score "
                   f"of {last(score.finite).mean:.2g}", last(paid.finite), last(score.finite),
                   why="r = score − β·KL: the policy is paid for staying near the reference, or for short answers.",
                   onset=paid.rows[0].step)


def clip(log: Log) -> Finding:
    """A clip range so narrow that nothing is left after the first update; else what the clip ratio can say."""
    row, updates, recent = log.fact("method"), log.fact("updates"), level(log, "clip")
    edges = [value for name in ("clip_low", "clip_high") if (value := log.setting(name)) is not None]
    several = updates is None or updates > 1
    token = row is None or row.ratio == "token"  # a sequence's ratio is a mean over its tokens: GSPO has ε of 3e-4
    if row is not None and row.bound not in ("clip", "clip_inside"):
        return finding("fine", f"{log.fact('loss')} has no clip that zeroes a token: there is no clip ratio to read")
    if edges and max(edges) <= CLOSED and several and token:
        return finding("broken" if stalls(log) else "watch", f"The clip range is closed: 1 ± {max(edges):g} leaves no "
                       f"gradient after the first update on a batch", recent, why="Past 1 ± ε the term is constant in "
                       "π, so w = 0.", remedy="clip closed", onset=0)
    if updates == 1 and not (recent and max(recent.values) > 0):
        return finding("fine", "Nothing can be clipped: each batch gets one optimiser step, so every ratio is 1 and ε "
                       "has no effect. A clip ratio of 0 is no sign of health", recent,
                       why=f"ρ = π/π_old = 1 until the first step on a batch, and there is no second. A second needs "
                       f"{signs.remedy(log, 'clip')}.")
    if updates == 1 and not signs.assumes(log, "updates"):
        return finding("watch" if recent and recent.mean > CLIP_ONCE else "fine",
                       "Tokens are clipped although the settings say one optimiser step per batch: they are of another "
                       "run, or the old log-probs come from another engine", recent,
                       why="With one step per batch ρ = 1, which is inside 1 ± ε.", remedy="sampler")
    if recent is None:
        expect_enough(log, {"clip": FEW})
        return finding("fine", "Not in play: clipped tokens are not counted in this log")
    return finding("fine", f"{percent(recent.mean)} of the tokens are clipped{over(recent)}", recent)


def cispo(log: Log) -> Finding:
    """TRL clamps CISPO's ratio at epsilon_high itself, which defaults to epsilon = 0.2: sg[min(ρ, 0.2)] is 0.2."""
    ceiling = log.fact("ceiling")
    if ceiling is None or ceiling > 1:
        words = f"{log.fact('loss')} has no such cap" if ceiling is None else f"the cap {ceiling:g} lies above ratio 1"
        return finding("fine", f"Not in play: {words}")
    return finding("watch" if stalls(log) else "fine", f"CISPO's cap is {ceiling:g}: every ratio near 1 is cut to it, "
                   f"so the gradient is scaled by {ceiling:g} and the ratio corrects nothing", level(log, "cispo"),
                   why="The weight is sg[min(ρ, epsilon_high)]; below 1 it is a constant, which Adam divides out, and "
                   "the logged ratio is the share of tokens with A > 0.", onset=0)


def horizon(log: Log) -> Finding:
    """Dividing by a constant L_max scales the gradient by mean L / L_max against the token mean."""
    constant = log.fact("horizon")
    if constant is None:
        return finding("fine", f"Not in play: {log.fact('loss')} does not divide by a constant that is known")
    recent = last(series_of(log, schema.LENGTH_MEAN))
    share = recent.mean / max(constant, 1.0)
    return finding("watch" if share < HORIZON and signs.by_sgd(log) and stalls(log) else "fine",
                   f"Token sums are divided by {constant:.0f}, while answers have {recent.mean:.0f} tokens: the "
                   f"gradient is × {share:.2g} of the token mean's", recent, why="1/(B·L_max) Σ_it = (mean L / L_max) "
                   "· 1/ΣL Σ_it; Adam divides the factor out.")


def loss(log: Log) -> Finding:
    """At ratio 1 the loss is fixed by the method, whatever is learnt: explained, never bad."""
    series, row, named = series_of(log, "loss", 1), log.fact("method"), log.fact("loss")
    if row is None:
        return unknown(f"no row of `creditscope list methods` stands for {named}, so what its loss shows is not known")
    found = law(row)
    value = found.formula.removeprefix("J = ")
    if log.fact("beta") is None:
        value += " and the KL term, whose weight the log does not say,"
    start = f"is {series.values[0]:.2g} at first" if max(map(abs, series.values)) >= LOSS_ZERO else "is 0"
    meaning = found.sentence.replace(schema.REWARD_MEAN, log.trainer.metrics[schema.REWARD_MEAN])
    return finding("fine", f"The loss {start}, and no measure of progress: with {named} it is {value} at ratio 1, up "
                   f"to its sign. {meaning}", series.part(0, 6), why=f"{found.formula} until the first update on a "
                   "batch.")
