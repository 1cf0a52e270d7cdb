"""What `creditscope selftest` verifies on the user's own machine: one check a row of `table`, one subject a file."""

from creditscope.errors import require_module

require_module(__name__, "transformers")
