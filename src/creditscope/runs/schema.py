"""The record's schema: every metric key once, with its equation, its unit, one sentence and who writes it.

    metrics[schema.REWARD_MEAN]                  a key is a str, so that JSON and dicts take it as it is
    schema.GRAM_GROUP("top1")                    a key of a family: the same reading of other rows
    schema.OVERSHOOT_UPDATE("past", 3)           "overshoot/3/past"
    schema.metric("gram/group/top1").sentence    what a key means, None where it is in no schema

Two words: credit is A_it, what an estimator gives a token; w is w_it = ∂J/∂log π(y_it), what the objective makes of it.
A key is area/name. `runs.arrays` has the npz arrays, `runs.formats` the names of older records. Standard library only:
every floor may read it. `runs.metric` says what a row is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from creditscope.runs.metric import KeyFamily as KeyFamily
from creditscope.runs.metric import Metric as Metric
from creditscope.runs.pair_metrics import PAIRS_ACCURACY as PAIRS_ACCURACY
from creditscope.runs.pair_metrics import PAIRS_CHOSEN_CHANGE as PAIRS_CHOSEN_CHANGE
from creditscope.runs.pair_metrics import PAIRS_CHOSEN_FELL as PAIRS_CHOSEN_FELL
from creditscope.runs.pair_metrics import PAIRS_CHOSEN_LOGP as PAIRS_CHOSEN_LOGP
from creditscope.runs.pair_metrics import PAIRS_CHOSEN_REWARD as PAIRS_CHOSEN_REWARD
from creditscope.runs.pair_metrics import PAIRS_COUNT as PAIRS_COUNT
from creditscope.runs.pair_metrics import PAIRS_MARGIN as PAIRS_MARGIN
from creditscope.runs.pair_metrics import PAIRS_REJECTED_CHANGE as PAIRS_REJECTED_CHANGE
from creditscope.runs.pair_metrics import PAIRS_REJECTED_LOGP as PAIRS_REJECTED_LOGP
from creditscope.runs.pair_metrics import PAIRS_REJECTED_REWARD as PAIRS_REJECTED_REWARD

P1 = "arXiv:2606.29238"
P2 = "arXiv:2601.05002"

# -- the samples ------------------------------------------------------------------------------------------------------

_signal = partial(Metric, writer="batch.metrics")
_answers = partial(Metric, writer="batch.answers")
_train = partial(Metric, writer="lab.train")
_offline = partial(Metric, writer="offline.scope")
_read = partial(Metric, writer="diagnosis.trainers.verl")

REWARD_MEAN = _signal("reward/mean", "mean reward", "reward", "Over the rollouts that the step used.", "1/B Σ_i r_i")
REWARD_STD = _signal("reward/std", "reward std", "reward",
                     "Over the batch. What a group gives depends on its own spread, σ_r.",
                     "√(Σ_i (r_i − mean r)² / (B − 1))")
REWARD_STEPS = _signal("reward/steps", "step reward", "reward",
                       "Mean reward of the reasoning steps, where the task labels them.")
REWARD_GOLD_MEAN = _answers("reward/gold_mean", "gold reward", "reward",
                            "The task's verifier on the same answers, where a learned reward is trained on.",
                            "1/B Σ_i gold_i")
REWARD_GOLD_CORRELATION = _answers(
    "reward/gold_correlation", "learned and gold reward", "correlation",
    "Of the learned reward with the verifier's, inside groups, pooled over them: below 0 the advantage pays for wrong "
    "answers. Absent where one of the two differs in no group.",
    "Σ(r − r̄_g)(gold − gold̄_g) / √(Σ(r − r̄_g)² · Σ(gold − gold̄_g)²)")
REWARD_ERRORS = _train("reward/errors", "reward errors", "rollouts",
                       "Rollouts on which the reward function failed; reward/first_error is the first message.")
REWARD_FIRST_ERROR = _train("reward/first_error", "first reward error", "text",
                            "What the reward function said when it first failed.", term="reward_errors")
REWARD_LOST_TO_FORM = _train("reward/lost_to_form", "lost to form", "share",
                             "Share of answers that earn nothing although their number is the reference: it is not "
                             "marked as --answer asks. Answers cut at the limit do not count. Absent where the task "
                             "compares no numbers.", "#(r_i = 0, last number of y_i = reference) / B")
REWARD_MIN = _signal("reward/min", "smallest reward", "reward", "Over the batch; of a trainer's log, as that has it.",
                     "min_i r_i")
REWARD_MAX = _signal("reward/max", "largest reward", "reward", "Over the batch; of a trainer's log, as that has it.",
                     "max_i r_i")
REWARD_EQUAL_TEXTS = _answers("reward/equal_texts", "pairs of equal answers", "pairs",
                              "Pairs of rollouts of one prompt whose answers are the same tokens; TRL on many "
                              "ranks compares texts.",
                              "#(i < j: one group, y_i = y_j)")
REWARD_EQUAL_TEXTS_APART = _answers("reward/equal_texts_apart", "equal answers, other reward", "pairs",
                                    "How many of the pairs of equal answers have different rewards. A verifier that "
                                    "reads the answer alone gives 0.", "#(i < j: one group, y_i = y_j, r_i ≠ r_j)")
SIGNAL_GROUPS = _signal("signal/groups", "groups", "groups", "Prompts of the step, each with R rollouts.", "P")
SIGNAL_LIVE_GROUPS = _signal("signal/live_groups", "live groups", "groups",
                             "Groups whose rewards differ. Only these give a gradient under a group baseline.",
                             source=f"{P1}, Corollary 4.2")
SIGNAL_USED_LIVE_GROUPS = _train("signal/used_live_groups", "live groups used", "groups",
                                 "The same after unanimous groups were sampled again, where the method does.")
SIGNAL_DEAD_GROUPS = _signal("signal/dead_groups", "dead groups", "share",
                             "Share of groups whose rewards are all equal. Rollouts that are right with probability p "
                             "make a group dead with probability p^R + (1 − p)^R.", "1 − live groups / P",
                             source=f"{P1}, Corollary 4.2")
SIGNAL_DISTINCT_TEXTS = _answers("signal/distinct_texts", "distinct answers", "share",
                                 "1 where no two rollouts of a prompt give the same tokens, 1/R where all do.",
                                 "Σ_g #distinct answers of g / B")
SIGNAL_DEAD_REWARD = _answers("signal/dead_reward", "reward of dead groups", "reward",
                              "Mean reward of the rollouts of dead groups: it tells all right from all wrong. Absent "
                              "where no group is dead.", "mean r_i over dead groups")
SIGNAL_DEAD_ONE_TEXT = _answers("signal/dead_one_text", "dead groups of one answer", "share",
                                "Share of the dead groups whose answers are all the same tokens. Absent where no group "
                                "is dead.", "#(dead g: one distinct answer) / #(dead g)")
SIGNAL_SILENT_ROWS = Metric("signal/silent_rows", "rows without credit", "share",
                            "Share of a micro-batch's rollouts in which every A_it is 0.", writer="plugins.verl.loss")
LENGTH_MEAN = _signal("length/mean", "length", "tokens", "Tokens of an answer, mean over the batch.", "L_i")
LENGTH_MAX = _signal("length/max", "longest answer", "tokens", "Tokens of the longest answer of the step.")
LENGTH_EMPTY = _signal("length/empty", "empty answers", "rollouts", "Answers without a token.")
LENGTH_TRUNCATED = _train("length/truncated", "truncated", "share",
                          "Share of answers that were cut at the limit of tokens.")
LENGTH_REWARD_CORRELATION = _answers(
    "length/reward_correlation", "length and reward", "correlation",
    "Inside groups, pooled over them; truncated answers are left out where truncation is known. Absent where lengths "
    "or rewards differ in no group, and in records of TRL on many ranks.",
    "Σ(L − L̄_g)(r − r̄_g) / √(Σ(L − L̄_g)² · Σ(r − r̄_g)²)")
LENGTH_CHARACTERS = _offline("length/characters", "characters", "characters",
                             "Of an answer, mean over the batch, where the file has no tokens.")
ENTROPY_MEAN = _signal("entropy/mean", "entropy", "nats per token",
                       "Of the sampling distribution, mean over the chosen tokens.", "H = −Σ_v π(v) log π(v)")
PROMPTS_SEEN = _answers("prompts/seen", "distinct prompts", "prompts",
                        "Sampled since the start of the run, this step included. A record of TRL lacks it after a "
                        "resume.", "#distinct prompts")
PROMPTS_PASSES = _answers("prompts/passes", "passes over the prompts", "groups per prompt",
                          "How often a prompt was sampled on average so far, groups that were replaced included.",
                          "groups sampled / distinct prompts")
ROLLOUTS_SAMPLED = _train("rollouts/sampled", "rollouts sampled", "rollouts", "For the batch of the step.")
ROLLOUTS_USED = _train("rollouts/used", "rollouts used", "rollouts",
                       "What was trained on, after unanimous groups were replaced.")
ROLLOUTS_SPENT = _train("rollouts/spent", "rollouts spent", "rollouts",
                        "Sampled in the step, continuations for values included. Runs are comparable at equal "
                        "rollouts.")
ROLLOUTS_PER_GROUP = _offline("rollouts/per_group", "R of the batch", "rollouts",
                              "Rollouts of each prompt, where all have as many.")
FILE_PART = _offline("file/part", "file", "count", "Number of the file that the batch ended in.")
FILE_ROW = _offline("file/row", "row of the file", "count", "Rows read until the end of the batch.")
FILE_BYTE = _offline("file/byte", "byte of the file", "bytes", "Where the batch ended.")
FILE_HASH = _offline("file/hash", "hash of the file", "text", "Of all bytes until there: a resumed reading checks it.")
FILE_STEP = _offline("file/step", "step of the file", "count", "The trainer's step that the rows of the batch name.")
FILE_BATCH = _offline("file/batch", "hash of the batch", "text", "Of the batch's rows: a step that goes on is known.")

# -- credit A, and w --------------------------------------------------------------------------------------------------

_spread = partial(Metric, writer="batch.metrics")
_verl_w = partial(Metric, writer="plugins.verl.loss")
_verl_batch = partial(Metric, writer="plugins.verl.engine")

CREDIT_WITHIN = _spread("credit/within", "credit inside a rollout", "share",
                        "Share of A² that differs between tokens of one answer: 0 for outcome credit.",
                        "Σ_it (A_it − Ā_i)² / Σ_it A_it²", source=f"{P1}, Theorem 3.1")
CREDIT_DEAD_GROUPS = _spread("credit/dead_groups", "groups without credit", "share",
                             "Share of groups in which every A_it is 0. Token credit may live where all rewards are "
                             "equal.")
W_TOP10_MASS = _spread("w/top10_mass", "w on the top tenth", "share",
                       "Share of Σ|w| on the tenth of the tokens that has most. Even w has 10 %.",
                       "Σ_{top 10 %} |w_it| / Σ_it |w_it|")
W_ZERO = _spread("w/zero", "tokens with w = 0", "share",
                 "Dead groups, clipped tokens, and tokens that the estimator leaves out.", "#(w_it = 0) / ΣL")
W_POSITIVE_MASS = _spread("w/positive_mass", "w that pushes up", "share",
                          "One half where advantages are centred and weights are even.", "Σ max(w_it, 0) / Σ |w_it|")
W_DEAD_ROWS = _spread("w/dead_rows", "answers with credit and no w", "share",
                      "Of the answers with credit, those that have w = 0 on every token, at the step's first update. "
                      "In TRL's records, those whose tokens the loss's mask leaves out, cut ones apart; among many "
                      "ranks of the first one's rows.",
                      "#(i: A_i ≠ 0, w_i = 0) / #(i: A_i ≠ 0)")
W_SKIPPED_FIRST = _spread("w/skipped_first", "first tokens not trained", "tokens",
                          "At the start of an answer that has w, median over these: with credit and without w.",
                          "median_i #(t: A_it ≠ 0, before the first w_it ≠ 0)")
W_SKIPPED_LAST = _spread("w/skipped_last", "last tokens not trained", "tokens", "The same at the end.",
                         "median_i #(t: A_it ≠ 0, after the last w_it ≠ 0)")
W_STOPPED = _verl_w("w/stopped", "stopped tokens", "share",
                    "Tokens of a micro-batch that have credit and no w: clipped or dropped.",
                    "#(w_it = 0, A_it ≠ 0) / ΣL")
W_POSITIVE = _verl_w("w/positive", "tokens pushed up", "share", "Of the tokens of a micro-batch.", "#(w_it > 0) / ΣL")
W_BATCH_TOP10_MASS = _verl_batch("w/batch_top10_mass", "w on the top tenth", "share",
                                 "w/top10_mass of the whole mini-batch, on updates that are read.")
W_BATCH_ZERO = _verl_batch("w/batch_zero", "tokens with w = 0", "share", "w/zero of the whole mini-batch.")
W_BATCH_POSITIVE_MASS = _verl_batch("w/batch_positive_mass", "w that pushes up", "share",
                                    "w/positive_mass of the whole mini-batch.")
CRITIC_LOSS = Metric("critic/loss", "critic loss", "reward²", "Of the critic on a batch that it has not learnt from "
                     "yet.", "mean (G_it − V_it)²", writer="policy.critic")
CRITIC_EXPLAINED_VARIANCE = Metric("critic/explained_variance", "explained variance", "share",
                                   "1 is a perfect critic, 0 one that knows only the mean.", "1 − Var(G − V)/Var(G)",
                                   writer="policy.critic")
ADVANTAGE_MIN = _read("advantage/min", "smallest advantage", "advantage", "As a trainer's log has it.")
ADVANTAGE_MAX = _read("advantage/max", "largest advantage", "advantage", "As a trainer's log has it.")

_prefix = partial(Metric, writer="exact.shared_prefix", source=f"{P2}, Proposition 1")
PREFIX_NODES = _prefix("prefix/nodes", "shared tokens", "nodes", "Nodes of the tree of answers that several share.")
PREFIX_ROOT_NODES = _prefix("prefix/root_nodes", "tokens of a whole group", "nodes", "Nodes that a whole group shares.")
PREFIX_TOKENS = _prefix("prefix/tokens", "tokens on shared nodes", "share", "Of all tokens of the batch.")
PREFIX_MASS = _prefix("prefix/mass", "w on shared nodes", "share", "Share of Σ|w| on shared nodes.")
PREFIX_ROOT = _prefix("prefix/root", "W of whole groups", "share",
                      "Over the nodes that a whole group shares: 0 cancels, 1 all pull one way.", "Σ|W| / Σ_i|w_it|")
PREFIX_BIAS = _prefix("prefix/bias", "prefix bias", "share",
                      "Over all shared nodes: 0 where the group weighs evenly.", "Σ|W − ω̄ΣA| / Σ_i|w_it|")
PREFIX_LENGTH_POSITIVE = _prefix("prefix/length_positive", "length exponent, A > 0", "exponent",
                                 "Of the weights of answers with A > 0: −1 for 1/L_i, 0 for even weights.", "ω ∝ L^x")
PREFIX_LENGTH_NEGATIVE = _prefix("prefix/length_negative", "length exponent, A < 0", "exponent",
                                 "The same of answers with A < 0.", "ω ∝ L^x")

# -- the gradient -----------------------------------------------------------------------------------------------------

OBJECTIVE_VALUE = _train("objective/value", "loss, J", "reward",
                         "The objective at the step's first update; the loss is −J. At ratio 1 centred advantages make "
                         "it 0, or a statistic of lengths: no measure of progress.", "J = Σ_it α_it · term_it − β·R",
                         source=f"{P2}, Proposition 4")
GRAD_NORM = _train("grad/norm", "gradient norm", "‖∇J‖", "At the step's first update, before clipping.", "‖∇J‖")
_pull = partial(Metric, writer="optimizer.kl_pull")
GRAD_KL_PULL = _pull("grad/kl_pull", "pull of the KL term", "ratio",
                     "1 where the KL term of the loss takes back all that the reward gives; negative where both point "
                     "one way. On the rows of a reading, where the loss has such a term; absent in records of TRL on "
                     "many ranks.",
                     "−⟨g_KL, g_R⟩ / ‖g_R‖², w = w_R + w_KL")
GRAD_KL_SIZE = _pull("grad/kl_size", "size of the KL term", "ratio", "Its gradient beside that of the reward.",
                     "‖g_KL‖ / ‖g_R‖")
POLICY_SAMPLER_GAP = _train("policy/sampler_gap", "sampler gap", "nats",
                            "How far the training forward and the sampler disagree on the same tokens.",
                            "max_it |log π_train − log π_sampler|")
POLICY_REFERENCE_KL = _train("policy/reference_kl", "KL to the reference", "nats per answer",
                             "Of the sampling policy, estimated on its own answers; where a run has a reference and "
                             "samples.",
                             "1/B Σ_it (log π_old − log π_ref)_it")
POLICY_LOGP = _offline("policy/logp", "source of log π_old", "text", "file, or model where the file has none.")
POLICY_RESPELLED = _offline("policy/respelled", "respelled answers", "rollouts",
                            "Answers whose tokens are not those that the tokenizer would write.")
SAMPLER_GAP = _read("sampler/gap", "sampler gap", "nats", "As a trainer's log has it: a mean or a maximum.")
SAMPLER_RATIO = _read("sampler/ratio", "sampler ratio", "ratio", "Mean of π_train/π_sampler, as a log has it.")

# -- readings of a Gram: one definition, whatever rows it is of -------------------------------------------------------

_of = partial(Metric, writer="microscope.geometry")
_RANKS = (
    _of("effective_rank", "effective rank", "directions",
        "How many directions a group's rollouts push in.",
        "r_eff = (Σσ)² / Σσ², on singular values", source=f"{P1}, Table 1"),
    _of("effective_rank_truncated_2", "effective rank, cut to 2", "directions",
        "What an SVD cut to two values prints. It cannot exceed 2, and reads 1.5 to 2 for most data.",
        "(σ₁ + σ₂)² / (σ₁² + σ₂²) = 1 + 2√(f(1−f)), f = σ₁²/(σ₁² + σ₂²)"),
    _of("entropy_rank", "entropy rank", "directions", "The number of equal values that would have the same entropy.",
        "exp H(p), p_i = σ_i / Σσ"),
    _of("participation_ratio", "participation ratio", "directions",
        "The same idea on energies σ²: large values count more.", "(Σσ²)² / Σσ⁴"),
    _of("stable_rank", "stable rank", "directions", "Energy in units of the largest direction's.", "Σσ² / σ₁²"),
    _of("energy_rank_90", "energy rank, 90 %", "directions", "The fewest directions that hold 90 % of the energy Σσ².",
        "min k: Σ_{j≤k} σ_j² ≥ 0.9 Σσ²"),
    _of("energy_rank_99", "energy rank, 99 %", "directions", "The same with 99 % of the energy.",
        "min k: Σ_{j≤k} σ_j² ≥ 0.99 Σσ²"),
    _of("numerical_rank", "numerical rank", "directions",
        "How many values stand above the floor: the rest is rounding.", "#(σ > σ₁·√(N·eps))"),
    _of("top1", "top-1 share", "share", "Share of the energy in one direction: 1 where all rollouts push along one "
        "line.", "σ₁² / Σσ²", source=f"{P1}, Table 1"),
    _of("cancellation", "what survives the sum", "ratio",
        "0 when rollouts cancel, 1 when they are orthogonal, N when they are identical.", "‖Σ g_i‖² / Σ‖g_i‖²"),
    _of("conflict", "conflict", "share", "Share of pairs of rollouts that push against each other.",
        "#(cos(g_i, g_j) < 0) / #(i < j)"),
)
_NULLS = (
    _of("centred_effective_rank", "centred effective rank", "directions",
        "Rows of w times the score less the group's mean score: rank at most R − 1 for R rows.",
        "(Σσ)²/Σσ² of the rows w_i(ψ_i − ψ̄)"),
    _of("orthogonal_null", "null, orthogonal", "directions",
        "Effective rank of orthogonal scores of equal norm under binary reward, k right answers of R. Over a batch the "
        "nulls of its groups add.", "4k(R−k)/R"),
    _of("w_null", "null of w", "directions",
        "Effective rank of orthogonal scores of equal norm under these w: what w alone allows.", "(Σ|w|)² / Σw²"),
    _of("norm_null", "null of the norms", "directions",
        "Effective rank of orthogonal rows with the measured norms. The measured rank never exceeds it; what is "
        "between them is alignment.", "(Σ‖g_i‖)² / Σ‖g_i‖²"),
    _of("norm_top1", "largest rollout", "share", "Share of the energy in one rollout's gradient.",
        "max ‖g_i‖² / Σ‖g_i‖²"),
    _of("norm_effective_number", "effective rollouts", "rollouts",
        "How many rollouts of equal norm would be as concentrated.", "(Σ‖g_i‖²)² / Σ‖g_i‖⁴"),
)
_BATCH = (
    _of("noise_scale", "noise scale", "rollouts",
        "The batch size at which sampling noise equals signal, counted in rollouts.", "B = tr Σ / ‖G‖²",
        source="arXiv:1812.06162"),
    _of("noise_scale_groups", "noise scale in groups", "groups",
        "The same counted in groups, which are independent where rollouts of one prompt are not.", "B = tr Σ / ‖G‖²",
        source="arXiv:1812.06162"),
    _of("between", "agreement of groups", "ratio",
        "Mean inner product of two live groups' gradients over their mean square: 0 in expectation where groups are "
        "noise, 1 where all are equal. Needs two live groups.",
        "(‖Σ_a G_a‖² − Σ_a‖G_a‖²) / ((P − 1)·Σ_a‖G_a‖²), G_a = Σ_{i∈a} g_i"),
    _of("live_groups", "groups with a gradient", "groups", "Groups whose block of the Gram is not 0."),
)
READINGS: Mapping[str, Metric] = MappingProxyType({str(own): own for own in (*_RANKS, *_NULLS, *_BATCH)})


def _some(*names: str) -> dict[str, Metric]:
    return {name: READINGS[name] for name in names}


_GROUP = {name: own for name, own in READINGS.items() if own not in _BATCH}
GRAM = KeyFamily("gram/", "of the batch's rows g_i = Σ_t w_it ∇log π(y_it)", "microscope.geometry", READINGS)
GRAM_GROUP = KeyFamily("gram/group/", "the same of each group's rows, the mean over live groups", "microscope.geometry",
                       _GROUP)
SCORES = KeyFamily("scores/", "of the unweighted scores ψ_i = Σ_t ∇log π(y_it), with --scope full",
                   "microscope.observer", READINGS)
SCORES_GROUP = KeyFamily("scores/group/", "the same of each group's scores, the mean over groups",
                         "microscope.observer", _GROUP)
NULL_GROUP = KeyFamily("null/group/", "of rows whose w is shuffled inside the group, the mean of 100 draws",
                       "microscope.observer", _some("effective_rank", "cancellation", "conflict"))
ALSO = KeyFamily("also/NAME/", "of the same rollouts under the credit NAME of --also", "microscope.observer",
                 _some("effective_rank"))
SKETCH = KeyFamily("sketch/", "of all ranks' rows, from their sketches", "plugins.common.gather_ranks",
                   _some("effective_rank", "top1", "conflict"))
SKETCH_GROUP = KeyFamily("sketch/group/", "the same by group, cut groups too", "plugins.common.gather_ranks",
                         _some("effective_rank", "top1", "conflict"))
EVIDENCE = tuple(KeyFamily(pattern, sentence, "claims.evidence", _GROUP | {"equal_norm_rank": _of(
    "equal_norm_rank", "effective rank at equal norms", "directions", "Of the group's rows with all scores rescaled to "
    "one norm.")}) for pattern, sentence in (
        ("all/", "of a group's rows, every parameter; a column of an evidence file"),
        ("qv/", "the same of all q_proj and v_proj together"),
        ("layer/", "the same of each q_proj and v_proj by itself, the mean over them"),
        ("credit:NAME/", "the same of the rollouts under the credit NAME of --also")))

GRAM_CENTRED_EFFECTIVE_RANK = GRAM("centred_effective_rank")
GRAM_ORTHOGONAL_NULL = GRAM("orthogonal_null")
GRAM_LIVE_GROUPS = GRAM("live_groups")
GRAM_BETWEEN = GRAM("between")
GRAM_NOISE_SCALE_GROUPS = GRAM("noise_scale_groups")
GRAM_GROUP_EFFECTIVE_RANK = GRAM_GROUP("effective_rank")
GRAM_GROUP_EFFECTIVE_RANK_TRUNCATED_2 = GRAM_GROUP("effective_rank_truncated_2")
GRAM_GROUP_CENTRED_EFFECTIVE_RANK = GRAM_GROUP("centred_effective_rank")
GRAM_GROUP_ORTHOGONAL_NULL = GRAM_GROUP("orthogonal_null")
GRAM_GROUP_W_NULL = GRAM_GROUP("w_null")
GRAM_GROUP_NORM_NULL = GRAM_GROUP("norm_null")
GRAM_GROUP_TOP1 = GRAM_GROUP("top1")
SCORES_LIVE_GROUPS = SCORES("live_groups")
GRAM_CUT_GROUPS = Metric("gram/cut_groups", "cut groups", "groups",
                         "Groups whose rows were dealt to several ranks or micro-batches: they have sketches alone.",
                         writer="plugins.common.gather_ranks")
GRAM_WHOLE_GROUPS = _verl_batch("gram/whole_groups", "whole groups", "groups",
                                "Groups whose rows met in one micro-batch: their Grams are exact.")
GRAM_CHECK = _verl_batch("gram/check", "error of the reading", "ratio",
                         "Of the identity that proves the ranks' Grams.", "|Σ K − ‖∇‖²| / ‖∇‖²")
SKETCH_RELATIVE_ERROR = Metric("sketch/relative_error", "error of the sketch", "ratio",
                               "Standard error of a sketched inner product, over ‖g_i‖‖g_j‖.",
                               writer="plugins.common.gather_ranks")

_look = partial(Metric, writer="microscope.observer")
MATRIX_STABLE_RANK_LOW = _look("matrix/stable_rank_low", "stable rank of a layer's gradient, at least", "directions",
                               "Lower bound, mean over the layers' gradient matrices.", "Σσ² / σ₁²", term="stable_rank")
MATRIX_STABLE_RANK_HIGH = _look("matrix/stable_rank_high", "stable rank of a layer's gradient, at most", "directions",
                                "Upper bound.", "Σσ² / σ₁²", term="stable_rank")
MATRIX_EFFECTIVE_RANK_LOW = _look("matrix/effective_rank_low", "effective rank of a layer's gradient, at least",
                                  "directions", "Lower bound, mean over the layers' gradient matrices.",
                                  "(Σσ)² / Σσ²", term="effective_rank")
MATRIX_EFFECTIVE_RANK_HIGH = _look("matrix/effective_rank_high", "effective rank of a layer's gradient, at most",
                                   "directions", "Upper bound.", "(Σσ)² / Σσ²", term="effective_rank")
BASELINE_MEAN = _look("baseline/mean", "group mean", "reward",
                      "The baseline that is used, mean over groups with right and wrong answers.", "b = mean r")
BASELINE_OPTIMAL = _look("baseline/optimal", "best baseline", "reward",
                         "The constant of least variance. It is the mean where Cov(‖ψ‖², r) = 0.",
                         "b* = E[r‖ψ‖²] / E[‖ψ‖²]", source=f"{P1}, abstract")
BASELINE_VARIANCE_LOST = _look("baseline/variance_lost", "variance lost by the mean", "share",
                               "V(b) = Σ_i (r_i − b)²‖ψ_i‖². Never negative in a sample: read it beside what chance "
                               "gives.", "Σ(V(mean) − V(b*)) / ΣV(b*)")
BASELINE_VARIANCE_LOST_BY_CHANCE = _look("baseline/variance_lost_by_chance", "lost by chance", "share",
                                         "What the best baseline would gain if norms and rewards had nothing to do "
                                         "with each other.", "R·Var(‖ψ‖²)·Var(r) / ((R−1)·E‖ψ‖²)")
TOKENS_HEAD_TOP1 = _look("tokens/head_top1", "largest token", "share",
                         "Share of the score's energy in one token, W the output head alone.",
                         "max x / Σx, x = ‖∇_W log π(y_t)‖²")
TOKENS_HEAD_TOP10 = _look("tokens/head_top10", "largest tenth of tokens", "share",
                          "Share of the score's energy in a tenth of the tokens, output head alone.",
                          "Σ_{top 10 %} x / Σx")
TOKENS_HEAD_EFFECTIVE_SHARE = _look("tokens/head_effective_share", "effective share of tokens", "share",
                                    "1 where all tokens have the same score norm, output head alone.",
                                    "(Σx)²/Σx² / ΣL")
SCOPE_RATIO = _look("scope/ratio", "cost of looking", "ratio",
                    "A pass under the microscope over a plain one, timed on the first step.")
SCOPE_SHARE = _look("scope/share", "share of looking", "share", "Share of a step's time that the microscope took.")
_trl = partial(Metric, writer="plugins.trl.callback")
SCOPE_AGREEMENT = _trl("scope/agreement", "agreement with TRL", "cosine",
                       "Of the rows' gradient with the one that TRL took.", "cos(∇J, ∇J_TRL)")
SCOPE_NORM_RATIO = _trl("scope/norm_ratio", "norm beside TRL's", "ratio", "1 where no factor is missing; c is the clip "
                        "norm. Absent in float16.", "min(‖∇J‖, c)/‖∇J_TRL‖")
SCOPE_ROW_ERROR = Metric("scope/row_error", "w of the row beside TRL's", "ratio", "0 where the row that TRL's settings "
                         "state is its loss; of preferences.", "‖w_row − w‖ / ‖w‖",
                         writer="plugins.trl.preferences")
SCOPE_ABSENT = _trl("scope/absent", "why nothing was read", "text", "The error of a step that was not read.")

# -- the optimiser ----------------------------------------------------------------------------------------------------

_over = partial(Metric, writer="optimizer.overshoot")
_probe = partial(Metric, writer="optimizer.probe")
_moved = partial(Metric, writer="optimizer.geometry")

OVERSHOOT_PAST = _over("overshoot/past", "past the bound", "share",
                       "Share of the tokens with a bound that stand past it after an update. A trainer that reads "
                       "ratios before the step never sees it.", "#(past) / #(bounded)")
OVERSHOOT_DISTANCE = _over("overshoot/distance", "distance past the bound", "nats", "Over the tokens that are past.",
                           "mean |log ρ − log bound|")
OPTIMIZER_OVERSHOOT = _over("optimizer/overshoot", "overshoot", "nats",
                            "Nats past the bound, mean over all bounded tokens.", "past · distance",
                            term="overshoot_overshoot")
OVERSHOOT_MAX = _over("overshoot/max", "farthest token", "nats", "Nats past the bound of the token that is farthest.")
OVERSHOOT_AFTER = _over("overshoot/after", "moved after the stop", "share",
                        "Share of the distance that a token moved after its own gradient was zero. Negative where "
                        "tokens came back.", "Σ(distance − distance when first past) / Σ distance",
                        source=f"{P2}, Proposition 3")
OVERSHOOT_KL = _over("overshoot/kl", "KL to the sampler", "nats per token", "KL(π_old ‖ π) after the update.",
                     "mean (ρ − 1 − log ρ)")
OVERSHOOT_CARRY = _over("overshoot/carry", "carry", "ratio",
                        "The first move after the gradient stopped, over the move that crossed.", "Σ Δ_{c+1} / Σ Δ_c")
OVERSHOOT_CARRY_PREDICTED = _probe("overshoot/carry_predicted", "carry, predicted", "ratio",
                                   "What Adam's momentum alone gives at these steps; μ for SGD.",
                                   "C_{T,k} → (β₁/√β₂)^{k+1}", source=f"{P2}, Eq. 36")
OVERSHOOT_BY_MOMENTUM = _probe("overshoot/by_momentum", "overshoot by momentum", "nats per bounded token",
                               "What the old gradients in the updates did to the overshoot, first order.",
                               "⟨∇D, Δ_momentum⟩, D = Σ distance")
OVERSHOOT_BY_FRESH = _probe("overshoot/by_fresh", "overshoot by fresh gradients", "nats per bounded token",
                            "The same of the gradient of the moment.", "⟨∇D, Δ_fresh⟩")
OVERSHOOT_BY_DECAY = _probe("overshoot/by_decay", "overshoot by decay", "nats per bounded token",
                            "The same of weight decay.", "⟨∇D, Δ_decay⟩")
OVERSHOOT_UPDATE = KeyFamily("overshoot/K/", "after the K-th update on the batch", "optimizer.overshoot", {
    "past": OVERSHOOT_PAST, "distance": OVERSHOOT_DISTANCE, "overshoot": OPTIMIZER_OVERSHOOT, "after": OVERSHOOT_AFTER,
    "kl": OVERSHOOT_KL})
OPTIMIZER_SCALE_CHANGE = _probe("optimizer/scale_change", "change at a tenth of the credit", "ratio",
                                "How the update would differ had all credit since the start been a tenth. AdamW sees φ "
                                "only through ε/φ: 0 is blind, 0.9 follows the scale.",
                                "‖Δ(φ) − Δ(1)‖ / ‖Δ(1)‖, φ = 1/10", source=f"{P2}, Proposition 2")
OPTIMIZER_SCALE_CHANGE_NOW = _probe("optimizer/scale_change_now", "change at a tenth, from now on", "ratio",
                                    "For this step alone.", "the same, moments as they are")
OPTIMIZER_LR = _train("optimizer/lr", "learning rate", "rate", "Of the step.")
OPTIMIZER_UPDATES = _train("optimizer/updates", "updates", "updates", "Optimiser steps on the batch.",
                           "μ · minibatches")
UPDATE_MOMENTUM = _probe("update/momentum", "share of momentum", "share",
                         "How much of the batch's first update comes from older gradients.", "⟨Δ_momentum, Δ⟩ / ‖Δ‖²")
UPDATE_COSINE = _moved("update/cosine", "cosine of the update", "cosine",
                       "1 for plain SGD; below where momentum, normalisation or decay turn the step.", "cos(Δ, −∇)")
UPDATE_RATIO = _moved("update/ratio", "relative update", "ratio", "Of the batch's first update.", "‖Δ‖ / ‖θ‖")
UPDATE_ZERO = _moved("update/zero", "weights not moved", "share",
                     "In the precision that the weights are stored in.", "#(Δ = 0) / weights")
UPDATE_ZERO_BF16 = _moved("update/zero_bf16", "lost in bfloat16", "share",
                          "Share of weights whose update bfloat16 would round away.",
                          "#(bf16(θ + Δ) = bf16(θ)) / weights")
UPDATE_EPSILON_FACTOR = _probe(
    "update/epsilon_factor", "factor of ε", "factor",
    "By which ε shortens Adam's step: 1 where it has no effect. Over a sample of the weights, at most 4096 of each "
    "parameter, those that have had a gradient (v̂ > 0). Absent for optimisers without v.", "median √v̂ / (√v̂ + ε)")
UPDATE_TRAINABLE = _train("update/trainable", "trained share", "share", "Share of the model's parameters that are "
                          "trained.", "#(weights with requires_grad) / weights")
UPDATE_REACHED = _train("update/reached", "reached share", "share",
                        "Share of the model's weights that training can change: trained ones, and those that a trained "
                        "adapter (LoRA) adds to, however few weights it has.",
                        "#(weights trained, or under a trained adapter) / #(weights of no adapter)")
BRAKE_RECALLED = Metric("brake/recalled", "w recalled", "share",
                        "With --brake recall: share of Σ|w| that was taken back from tokens at their bound.",
                        writer="optimizer.brakes")
BRAKE_LENGTH = Metric("brake/length", "length of a step", "ratio", "With --brake shorten: mean factor on the update.",
                      writer="optimizer.brakes")

# -- learning and cost ------------------------------------------------------------------------------------------------

_eval = partial(Metric, writer="lab.evaluate")
EVAL_ACCURACY = _eval("eval/accuracy", "accuracy", "share", "Share of unseen problems that one sample solves.",
                      "#(reward > ½) / problems")
EVAL_LOW = _eval("eval/low", "interval of the accuracy", "share",
                 "eval/low and eval/high: 95 % Wilson interval over the problems of one evaluation.")
EVAL_HIGH = _eval("eval/high", "interval of the accuracy", "share", "Its upper end.", term="eval_low")
EVAL_REWARD = _eval("eval/reward", "reward on unseen problems", "reward", "Mean over the problems of an evaluation.")
EVAL_PROBLEMS = _eval("eval/problems", "problems", "problems", "Of an evaluation.")
ADAPT_GROUP = _train("adapt/group", "R of the step", "rollouts", "With --adapt: rollouts per prompt, as the rule set "
                     "it.")
ADAPT_SWITCHED = _train("adapt/switched", "credit switched", "0 or 1",
                        "With --adapt: 1 once the rule has changed the credit.")
RUN_STOPPED = Metric("run/stopped", "why the run stopped", "text", "The error that ended it, in a line of its own.",
                     writer="runs.stopped")
RUN_ALARM = _train("run/alarm", "alarm", "text",
                   "The findings of the diagnosis that were broken for the first time at this step, one per line.")
TIME_STEP = _train("time/step", "seconds", "seconds",
                   "time/step is the whole step; time/sample, time/credit, time/train, time/scope, time/probe and "
                   "time/eval are its parts.")
_part = partial(_train, unit="seconds", term="time_step")
TIME_SAMPLE = _part("time/sample", "seconds of sampling", sentence="Sampling and judging the answers.")
TIME_CREDIT = _part("time/credit", "seconds of credit", sentence="The estimator, its continuations and its critic.")
TIME_TRAIN = _part("time/train", "seconds of training", sentence="Forward, backward and update.")
TIME_SCOPE = _part("time/scope", "seconds of the microscope", sentence="What reading Grams took beyond the step.")
TIME_PROBE = _part("time/probe", "seconds of the probe", sentence="What reading the optimiser took.")
TIME_EVAL = _part("time/eval", "seconds of evaluation", sentence="Solving unseen problems.")

# -- all of it --------------------------------------------------------------------------------------------------------

FAMILIES: tuple[KeyFamily, ...] = (GRAM, GRAM_GROUP, SCORES, SCORES_GROUP, NULL_GROUP, ALSO, SKETCH, SKETCH_GROUP,
                                OVERSHOOT_UPDATE, *EVIDENCE)
CONSTANTS: Mapping[str, str] = MappingProxyType(
    {str(own): name for name, own in globals().items() if isinstance(own, Metric)})
"""Key -> the name of its constant here."""
METRICS: Mapping[str, Metric] = MappingProxyType(
    {key: globals()[name] for key, name in CONSTANTS.items()}
    | {str(own): own for family in FAMILIES if family.closed for own in map(family, family.readings)})
"""Every key without K or NAME."""
AREAS = frozenset(own.area for own in METRICS.values())


def metric(key: str) -> Metric | None:
    """What a key means; None where the schema does not have it.

    >>> metric("overshoot/3/past").name, metric("reward/men")
    ('past the bound', None)
    """
    return METRICS.get(key) or next((found for family in FAMILIES if (found := family.find(key)) is not None), None)
