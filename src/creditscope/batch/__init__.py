"""A batch of rollouts: tokens, masks, log-probs, rewards and groups, checked where it is made."""
