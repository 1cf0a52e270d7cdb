"""Our own small trainer: a policy, a sampler, one loop."""

from creditscope.errors import require_module

require_module(__name__, "torch", extra="lab")
