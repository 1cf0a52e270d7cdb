"""A language model as a policy: loading and vetting, sampling, decoding, scoring, critics."""

from creditscope.errors import require_module

require_module(__name__, "torch")
