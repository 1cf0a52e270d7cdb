"""Every threshold of the diagnosis once: a number, the rule that reads it, what it is a limit of, and why it is there.

    if share >= DEAD_WATCH:          a threshold is a float
    DEAD_WATCH.reason                the sentence that docs/doctor.md shows

`doctor`, the report, `lab compare` and the live alarm decide by these and by no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class Threshold(float):
    rule: str
    of: str
    """What it limits, with its unit."""
    reason: str

    def __new__(cls, value: float, rule: str, of: str, reason: str) -> Threshold:
        self = super().__new__(cls, value)
        self.rule, self.of, self.reason = rule, of, reason
        return self

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """In pickles and copies a threshold is a plain number."""
        return float, (float(self),)


# -- the reward -------------------------------------------------------------------------------------------------------

SILENT = Threshold(3, "reward constant", "readings in a row with one reward",
                   "Where nine answers of ten agree, all 16 of a batch do so by chance in 0.9^16 = 19 %, three batches "
                   "in a row in 0.6 %.")
MISSING = Threshold(0.05, "reward missing", "share of answers without a reward",
                    "One in twenty: a reward function that fails seldom costs little.")
MISSING_BROKEN = Threshold(0.2, "reward missing", "share of the reward that is missing from the mean",
                           "A fifth of the answers is punished whatever they say.")
FAILED_BROKEN = Threshold(0.3, "reward missing", "share of answers on which the reward function failed",
                          "Nearly one answer of three is punished whatever it says.")
FORM = Threshold(0.1, "form", "share of answers that have the right number and earn nothing",
                 "One in ten: more than wrong answers whose last number is right by chance.")
FORM_BROKEN = Threshold(0.5, "form", "the same over all answers with the right number",
                        "Of two right numbers one earns nothing: what is learnt is mostly the form.")
APART_WATCH = Threshold(0.02, "reward noise", "share of pairs with the same text and different rewards",
                        "A deterministic verifier gives exactly 0; a judge that samples gives a few percent.")
APART_BROKEN = Threshold(0.2, "reward noise", "the same share",
                         "Rewards that are right half of the time and independent of the answer give 0.5; at 0.2 a "
                         "fifth of the contrast inside groups is chance.")
APART_PAIRS = Threshold(20, "reward noise", "pairs", "At a share of 0.2, 20 pairs without one are a chance of 1 %.")
LENGTH_WATCH = Threshold(0.3, "reward length", "correlation of reward and length inside groups",
                         "Healthy runs lie between −0.2 and 0.2; where length is added to the reward it is 0.3 and "
                         "more.")
LENGTH_BROKEN = Threshold(0.8, "reward length", "the same correlation", "Then length explains two thirds of the "
                          "reward: 0.8² = 0.64.")
LENGTH_STEPS = Threshold(0.7, "reward length", "correlation of the changes of reward and length between steps",
                         "From a log alone: batches differ in reward for many reasons, so half of the variance "
                         "(0.7² ≈ 0.5) must go with length.")

GOLD_WATCH = Threshold(0.1, "reward hacked", "share of the verifier's reward at its best that is lost",
                       "A tenth: less than what batches of 64 answers differ by, so the interval decides below it.")
GOLD_BROKEN = Threshold(0.25, "reward hacked", "the same share",
                        "One right answer of four is gone while the number that is trained on went up.")

# -- contrast ---------------------------------------------------------------------------------------------------------

DEAD_WATCH = Threshold(0.5, "dead groups", "share of dead groups", "Half of the sampling is wasted.")
DEAD_BROKEN = Threshold(0.9, "dead groups", "share of dead groups", "Nine tenths of the sampling is wasted.")
DEAD_BOUND = Threshold(0.3, "dead groups", "share of readings in which the rewards' std is exactly 0",
                       "A lower bound: in such a reading every group is dead, in others some are.")
RIGHT = Threshold(0.8, "too easy", "mean reward, where 1 is the most",
                  "Of groups of 8 answers that are right with probability 0.8, 0.8^8 = 17 % are all right even if "
                  "prompts do not differ; where they do, most dead groups are.")
WRONG = Threshold(0.2, "too hard", "mean reward, where 0 is the least", "The same for wrong answers.")
DISTINCT = Threshold(0.35, "cold sampler", "distinct answers per rollout",
                     "Healthy runs with R = 8 have 0.6 and more; at temperature 0.05 it is 0.13, one text per group.")
ONE_TEXT = Threshold(1.5, "cold sampler", "distinct answers per group",
                     "One text in at least half of the groups, two in the others.")
COLD = Threshold(0.3, "cold sampler", "temperature, or top-p", "π^(1/T) at T = 0.3: a token of twice the probability "
                 "is drawn 2^3.3 = 10 times as often.")
HOT = Threshold(1.5, "hot sampler", "temperature", "Examples of TRL and verl use 0.6 to 1.2.")
HOT_ENTROPY = Threshold(2.5, "hot sampler", "nats per token at the start",
                        "e^2.5 = 12 likely tokens at every position; language models that write sense have 0.2 to 1.")
CUT_WATCH = Threshold(0.2, "truncation", "share of answers cut at the limit", "One answer of five is judged "
                      "incomplete.")
CUT_GROWN = Threshold(0.3, "truncation", "growth of the share of answers cut at the limit since the first readings",
                      "The cuts of the first batch are the limit's. Of 64 answers a share varies by ± 0.12 at most; a "
                      "growth of more than twice that is the policy's, and a cause that moved it explains it.")
CUT_BROKEN = Threshold(0.5, "truncation", "share of answers cut at the limit",
                       "Half of the rewards judge the limit; only to watch where the reward rises all the same.")
NEAR_LIMIT = Threshold(0.9, "truncation", "mean length over the limit", "Where the share of cut answers is not logged: "
                       "a mean of 0.9 needs most answers at the limit.")
DEAD_GROWTH = Threshold(0.2, "saturation", "growth of the share of dead groups",
                        "A run that learns has some: from 5 % to 15 or 20 % where accuracy goes from 45 % to 65 %.")
DILUTION = Threshold(2.0, "dilution", "factor on the gradient", "The step is halved, or twice as large on one batch as "
                     "on another.")

# -- movement ---------------------------------------------------------------------------------------------------------

MOVED = Threshold(1e-4, "small steps", "n²·D, nats per token",
                  "Steps that all point one way add lengths, so KL grows at most with the square of their number n; "
                  "below 1e-4 nats per token no answer changes. D is the KL after one step: healthy 1e-7 and more.")
RATE_SUM = Threshold(3e-6, "learning rate", "Σ η over the run, under Adam",
                     "Adam moves a weight by at most about η per step, so this is the farthest a weight can go; "
                     "full fine-tuning that learns has 3e-5 and more.")
WARM = Threshold(0.01, "learning rate", "learning rate over its largest",
                 "Below a hundredth a step counts as none.")
EARLY = Threshold(0.5, "learning rate", "steps made over steps planned",
                  "A warm-up is judged only where it has lasted for half of the run.")
RISING = Threshold(0.5, "learning rate", "largest learning rate so far over the one that was given",
                   "A schedule that still rises and has not reached half: most of the run had less.")
SGD_SUM = Threshold(0.1, "small steps", "Σ η·‖g‖ over the run, under SGD",
                    "The weights of a language model have norms of 10 to 1000: a hundredth of the smallest.")
EPSILON_FACTOR = Threshold(0.1, "epsilon", "median of √v̂/(√v̂ + ε)", "ε makes the median step ten times shorter.")
EPSILON_NORM = Threshold(0.01, "epsilon", "ε over the gradient's norm",
                         "Of N weights the typical gradient is ‖g‖/√N, at N = 1e6 a thousandth of the norm: ε is then "
                         "ten times √v̂.")
EPSILON_USUAL = Threshold(1e-6, "epsilon", "Adam's ε", "Trainers use 1e-8; up to 1e-6 is met.")
ROUNDED = Threshold(0.9, "rounding", "share of weights that an update leaves as they are",
                    "In bfloat16 an update below 2^-9 of a weight is lost; nine of ten weights do not move.")
ROUNDED_SOME = Threshold(0.5, "rounding", "the same share, where KL after most steps is exactly 0",
                         "KL of exactly 0 says that no logit changed; half of the weights explain it.")
ADAM_FULL = Threshold(0.5, "rounding", "median of √v̂/(√v̂ + ε), where the dtype is not known",
                      "Above it ε takes less than half, so steps are about η: float32 weights would show them.")
ADAM_RATE = Threshold(1e-7, "rounding", "learning rate, where the dtype is not known",
                      "float32 loses an update of 1e-7 only to weights above 1.7: 1e-7 / 2^-24.")
BF16_RATE = Threshold(1e-5, "rounding", "learning rate, where weights are stored in 16 bits",
                      "At 1e-5 every weight above 0.003 stays where it is, which is most of them.")
GRAD_CLIP = Threshold(1e-3, "gradient clip", "clip norm over the gradient's norm",
                      "The gradient is cut to a thousandth at every step.")
CLIP_EPSILON = Threshold(1e3, "gradient clip", "clip norm over Adam's ε",
                         "Of N = 1e6 weights the typical clipped gradient is a thousandth of the clip norm: ε itself.")
REACHED = Threshold(0.01, "frozen", "share of the weights that are trained or under a trained adapter",
                    "A LoRA of any rank on the queries and values of a 7B or 8B reaches 8 to 16 %; the norms of all "
                    "its layers are 0.004 %.")
TRAINABLE = Threshold(0.003, "frozen", "share of trained parameters, where what they reach was not read",
                      "A LoRA of rank 8 on a 7B trains 0.1 to 0.3 %: below, only what is known to have no adapter is "
                      "broken.")
MASK_ROWS = Threshold(0.1, "mask", "share of answers with credit and without w", "One in ten; a healthy run has 0.")
MASK_ROWS_BROKEN = Threshold(0.5, "mask", "the same share", "Half of the batch trains nothing.")
MASK_TOKENS = Threshold(1, "mask", "first or last tokens of an answer with credit and without w, in every reading",
                        "The median over the answers of a batch; a healthy run has 0.")
MASK_LENGTH = Threshold(1 / 3, "mask", "the same over the mean length", "A third of every answer is not trained.")
PULL_WATCH = Threshold(0.5, "KL pull", "−⟨g_KL, g_R⟩/‖g_R‖²", "Half of what the reward gives is taken back.")
KL_SIZE = Threshold(3.0, "KL pull", "‖g_KL‖/‖g_R‖",
                    "The KL term's gradient outweighs the reward's, which is then a small part of a step.")
PULL_BROKEN = Threshold(0.8, "KL pull", "−⟨g_KL, g_R⟩/‖g_R‖²", "Four fifths are taken back.")
BETA = Threshold(0.5, "KL pull", "weight of the KL term", "Examples of TRL and verl use 0 to 0.1.")
KL_REWARD = Threshold(2.0, "KL pull", "KL in the reward over the score",
                      "The penalty is twice the score: the policy is paid for staying.")
CLOSED = Threshold(0.01, "clip", "ε of the clip range", "1 ± 0.01 is left after one update; examples use 0.1 to 0.3.")
CLIP_ONCE = Threshold(0.01, "clip", "share of clipped tokens with one update per batch",
                      "Every ratio is 1 there; 1 % cannot be rounding.")
CLIP_MUCH = Threshold(0.2, "updates", "share of clipped tokens", "A fifth of every pass has no gradient.")
UPDATES_MANY = Threshold(8, "updates", "optimiser steps per batch", "Examples of TRL and verl use 1 to 4.")
CLIP_SOME = Threshold(0.05, "updates", "share of clipped tokens with so many steps per batch",
                      "One in twenty has left its bound: the batch is used up.")
PAST_WATCH = Threshold(0.05, "updates", "share of bounded tokens past their bound", "One in twenty.")
PAST_BROKEN = Threshold(0.2, "updates", "share of bounded tokens past their bound", "One in five.")
HORIZON = Threshold(0.1, "length constant", "mean length over the constant",
                    "A learning rate taken from another loss is ten times too small; Adam divides that out.")

# -- too far ----------------------------------------------------------------------------------------------------------

STEP_WATCH = Threshold(0.05, "step size", "KL after an update, nats per token",
                       "Three times the largest of a healthy run of the clinic (0.015); one of a real model has 7e-4.")
STEP_BROKEN = Threshold(0.2, "step size", "KL after an update, nats per token",
                        "An answer of 50 tokens is then e^10 times less likely than before the step.")
DECAY = Threshold(0.1, "weight decay", "Σ ηλ over the run", "Weights shrink by a tenth whatever is learnt.")
ENTROPY_LOW = Threshold(0.02, "entropy", "nats per token", "An answer of 50 tokens has e = 2.7 likely forms, fewer "
                        "than any group has rollouts.")
ENTROPY_LEFT = Threshold(0.3, "entropy", "entropy at the end over that at the start", "Less than a third is left.")
ENTROPY_GONE = Threshold(0.15, "entropy", "entropy at the end over that at the start",
                         "To watch even where the reward rises: a run that goes on has little left to explore.")
ENTROPY_RISE = Threshold(2.0, "entropy", "entropy at the end over that at the start, for a rise",
                         "The policy unlearns how to write.")
ENTROPY_NATS = Threshold(1.0, "entropy", "rise of the entropy, nats per token",
                         "e = 2.7 times as many likely tokens; a smaller rise of a low entropy is exploration.")
SHRUNK_WATCH = Threshold(1 / 3, "length drift", "length at the end over that at the start", "Two thirds are gone.")
SHRUNK_BROKEN = Threshold(0.1, "length drift", "length at the end over that at the start", "Nine tenths are gone.")
GROWN = Threshold(3.0, "length drift", "length at the end over that at the start", "The cost of a step has tripled.")
KL_WATCH = Threshold(0.5, "KL level", "KL to the reference, nats per token",
                     "An answer of 50 tokens is e^25 times likelier than under the reference.")
FIRST_STEPS = Threshold(10, "KL level", "last step of the first reading",
                        "A reading is the mean since the last one; later the policy may have left its reference.")
KL_FIRST = Threshold(0.05, "KL level", "KL to the reference at the first step, nats per token",
                     "A policy that starts at its reference has 0.")
SPIKE = Threshold(20.0, "gradient", "gradient norm over its median", "One batch outweighs twenty.")
ZERO_MANY = Threshold(0.5, "gradient", "share of readings with a gradient of exactly 0", "Half of the steps train "
                      "nothing.")
RATIO_WATCH = Threshold(0.1, "sampler", "distance of the mean ratio π_train/π_sampler from 1",
                        "A tenth of the weight was taken away.")
RATIO_BROKEN = Threshold(0.5, "sampler", "distance of the mean ratio from 1", "Half of the weight was taken away.")
GAP = Threshold(0.05, "sampler", "mean gap of a sampled token", "In log-prob (TRL, creditscope) a ratio off by 5 %, in "
                "probability (verl) by more.")

# -- direction --------------------------------------------------------------------------------------------------------

GAINED = Threshold(0.1, "no gain", "rise of the mean reward over the answers' std",
                   "For rewards of 0 and 1 around a half: 5 answers in 100. In a long log the interval excludes 0 for "
                   "changes too small to matter.")
FELL = Threshold(0.2, "reward trend", "fall of the mean reward over the answers' std",
                 "Twice the rise that counts: one of forty steady runs leaves its 95 % interval downwards by chance.")
COLLAPSED = Threshold(0.5, "reward trend", "the same", "For rewards of 0 and 1 around a half: 25 answers in 100.")
APART = Threshold(0.5, "held out", "training reward above the held-out one, over the rewards' range",
                  "Half of the range: harder held-out problems cost less.")
PASSES = Threshold(10, "memorised", "passes over each prompt", "Examples make 1 to 3 epochs.")
PASSES_MANY = Threshold(30, "memorised", "passes over each prompt", "Broken whatever the reward is.")
NO_GAIN = Threshold(100, "no gain", "steps", "Enough for a run that learns to show it, however noisy; with fewer, a "
                    "flat reward is to watch only where a gain of GAINED would have been visible.")
NO_GAIN_FEWEST = Threshold(30, "no gain", "steps",
                           "Runs that learn seldom show it sooner, however little noise there is.")
SAME = Threshold(0.0, "signal", "agreement of the groups' gradients",
                 "0 in expectation where gradients are noise.")
DISPLACED = Threshold(0.5, "displacement", "fall of β·log(π/π_ref) of the chosen answers since the start, in nats",
                      "With β = 0.1 the chosen answers are then e^−5 = 0.7 % as likely as under the reference.")
DISPLACED_ALL = Threshold(1.0, "displacement", "that fall over the growth of the margin",
                          "From 1 on the rejected answers fell at least twice as far as the margin grew: more "
                          "probability left the pair than was moved inside it.")

# -- sentences: what decides no state, but a sentence of `inspect`, of the report or of the live display ---------------

SENTENCES = ("overshoot", "reward scale", "update geometry", "loss as progress", "live warning", "several runs")
"""Under `rule` of the thresholds below."""
HELD = Threshold(0.01, "overshoot", "share of bounded tokens past the bound, below which the bound holds",
                 "One token in a hundred; five times less than the rule updates watches for.")
CARRY_CLOSE = Threshold(0.1, "overshoot", "distance of the measured carry from the predicted one, over the latter",
                        "The prediction is of one token alone; a tenth is left for what the others add.")
BLIND = Threshold(0.05, "reward scale", "change of the update at a tenth of the credit, below which it is blind to it",
                  "An update proportional to the credit changes by 0.9, one that ignores it by 0; a twentieth of the "
                  "update is close to none.")
FOLLOWS = Threshold(0.5, "reward scale", "the same change, above which the update follows the credit",
                    "More than half of the 0.9 by which an update proportional to the credit changes.")
TURNED = Threshold(0.5, "update geometry", "cosine of the update with minus the gradient of its batch",
                   "cos² = 0.25: below it less than a quarter of the update's squared length lies along the batch's "
                   "own gradient.")
LOST = Threshold(0.1, "update geometry", "share of weights that would not move in bfloat16",
                 "One weight in ten; the rule rounding calls it broken at nine in ten.")
CORRELATED = Threshold(0.5, "loss as progress", "|r| of J and the mean reward over the steps",
                       "r² = 0.25: below it less than a quarter of the reward's variance goes with J.")
SAMPLER_OFF = Threshold(0.01, "live warning", "largest gap in log-prob between the training forward and the sampler",
                        "A ratio then starts 1 % off 1; rounding in float32 gives 1e-5.")
RANGE_APART = Threshold(0.1, "several runs", "distance between the ends of two runs' rewards, over the wider range",
                        "The ends that were seen depend on the answers: less may be chance.")

THRESHOLDS: Mapping[str, Threshold] = MappingProxyType(
    {name: value for name, value in globals().items() if isinstance(value, Threshold)})
"""Name -> threshold, in the order of the rules."""
