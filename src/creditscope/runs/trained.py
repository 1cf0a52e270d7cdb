"""Which lines of a record are training steps."""

from __future__ import annotations

from creditscope.runs import schema
from creditscope.runs.columns import Steps


def trained(steps: Steps) -> Steps:
    """The steps that learnt, without a last line that is an evaluation alone. A loop of one's own need not count
    rollouts: then the steps with a reward; or, where nothing was evaluated, all."""
    for key in (schema.ROLLOUTS_SPENT, schema.REWARD_MEAN):
        if len(found := steps.having(key)):
            return found
    return found if schema.EVAL_ACCURACY in steps.names else steps
