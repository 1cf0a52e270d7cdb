"""A batch of rollouts: tokens, masks, log-probs, rewards and groups, checked where it is made."""

from creditscope.errors import require_module

require_module(__name__, "torch")
