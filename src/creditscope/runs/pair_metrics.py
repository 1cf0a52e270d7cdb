"""Metrics of preference pairs: y_c is the chosen answer of a pair, y_r the rejected one, h(y) = log π(y)/π_ref(y) or
another score of the method's. TRL's plugin copies them from the trainer's log. `runs.schema` has them too. Standard
library only.
"""

from __future__ import annotations

from functools import partial

from creditscope.runs.metric import Metric

_pairs = partial(Metric, writer="objective.links")

PAIRS_COUNT = _pairs("pairs/count", "pairs", "pairs", "Of the step; a tie gives none.", "P")
PAIRS_MARGIN = _pairs("pairs/margin", "margin", "nats", "Of a pair's implicit rewards, before the step.",
                      "1/P Σ β (h(y_c) − h(y_r))")
PAIRS_ACCURACY = _pairs("pairs/accuracy", "pairs in order", "share", "Pairs whose margin is above 0.",
                        "#(h(y_c) > h(y_r)) / P")
PAIRS_CHOSEN_REWARD = _pairs("pairs/chosen_reward", "reward of the chosen", "nats", "Below 0 the chosen answer is less "
                             "likely than under the reference.", "1/P Σ β h(y_c)")
PAIRS_REJECTED_REWARD = _pairs("pairs/rejected_reward", "reward of the rejected", "nats", "As that of the chosen.",
                               "1/P Σ β h(y_r)")
PAIRS_CHOSEN_LOGP = _pairs("pairs/chosen_logp", "log π of the chosen", "nats", "Of whole answers.", "1/P Σ log π(y_c)")
PAIRS_REJECTED_LOGP = _pairs("pairs/rejected_logp", "log π of the rejected", "nats", "Of whole answers.",
                             "1/P Σ log π(y_r)")
PAIRS_CHOSEN_CHANGE = _pairs("pairs/chosen_change", "change of the chosen", "nats", "By the step, over the pairs that "
                             "were read.", "1/P Σ (log π_{s+1}(y_c) − log π_s(y_c))")
PAIRS_REJECTED_CHANGE = _pairs("pairs/rejected_change", "change of the rejected", "nats", "By the step, over the pairs "
                               "that were read.", "1/P Σ (log π_{s+1}(y_r) − log π_s(y_r))")
PAIRS_CHOSEN_FELL = _pairs("pairs/chosen_fell", "chosen that fell", "share", "Pairs whose chosen answer is less likely "
                           "after the step than before.", "#(log π_{s+1}(y_c) < log π_s(y_c)) / P")
