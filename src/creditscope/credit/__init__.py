"""Credit A_it: estimators that give each token its own credit, one per file, all with one signature.

    estimate(method, rollouts, tools) -> (B, T) credit, for surrogate(method, logp, rollouts, credit)

The method's row decides the rest: scale, whitening, weights, ratio, bound.
`ESTIMATORS` lists them without torch; `find_estimator("prefix_tree")` gives one by name, with options after commas.
"""

from creditscope.credit.choice import Chosen, find_estimator
from creditscope.credit.table import ESTIMATORS, NEEDS, Estimator

__all__ = ["ESTIMATORS", "NEEDS", "Chosen", "Estimator", "find_estimator"]
