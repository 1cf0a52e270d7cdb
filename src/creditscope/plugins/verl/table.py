"""How a row of the table is split between the two places that verl has for it: an advantage estimator and a loss.

    J = Σ_it α_it · bound(s_it, A_it)        α_it = λ_it · a⁰_it

The estimator runs once, in the driver, on the whole batch with its groups; the loss runs on every rank and micro-batch.
So a⁰ is made of counts of rows and tokens, and λ, which needs groups, is multiplied into the advantage. That is exact,
because every bound is positively homogeneous: bound(s, λA) = λ·bound(s, A) for λ ≥ 0.
"""

from __future__ import annotations

from creditscope.credit import ESTIMATORS, NEEDS
from creditscope.errors import CreditscopeError
from creditscope.methods.axes import Method

GIVEN = frozenset({"steps"})
"""Needs of an estimator that verl meets besides rewards, mask and prompt id: steps are the turns of the answer."""
BY_TOKENS = ("prefix_tree", "prefix_share")
"""Estimators that compare the tokens of siblings, which verl does not pass."""


def countable(method: Method) -> Method:
    """The row with the weights a⁰: all rows, no weights of tokens or groups."""
    aggregate = "token_mean" if method.aggregate == "group_token_mean" else method.aggregate
    return method.replace(keep="all", keep_threshold=None, denominator="all", token_weight="none",
                      aggregate=aggregate)


def refuse_method(method: Method) -> None:
    if method.linked:
        raise CreditscopeError(f"method {method.name!r} has one term per pair, and verl's losses see single answers; "
                               f"run it with creditscope lab train, or with TRL's DPOTrainer")
    lacks = "the tokens" if method.token_weight != "none" else \
        "the entropy of each token" if method.entropy_cost or method.keep == "low_entropy" else ""
    if lacks:
        raise CreditscopeError(f"method {method.name!r} needs {lacks}, which verl does not hand to an advantage "
                               f"estimator; run it with creditscope lab train, or with TRL")


def refuse_credit(name: str) -> None:
    missing = next((need for need in ESTIMATORS[name].needs if need not in GIVEN), None)
    lacks = "the tokens" if name in BY_TOKENS else "" if missing is None else NEEDS[missing]
    if lacks:
        fit = ", ".join(row for row in ESTIMATORS if not _lacking(row))
        raise CreditscopeError(f"credit {name!r} needs {lacks}, which verl does not hand to an advantage estimator; "
                               f"choose one of: {fit}")


def _lacking(name: str) -> bool:
    return name in BY_TOKENS or any(need not in GIVEN for need in ESTIMATORS[name].needs)
