"""Our own small trainer: a policy, a sampler, one loop."""
