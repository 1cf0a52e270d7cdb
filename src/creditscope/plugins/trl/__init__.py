"""TRL: its GRPO and RLOO trainers under the microscope, and any method or credit of the table in its loop."""

from creditscope.errors import CreditscopeError

try:
    import trl  # noqa: F401
except ImportError:
    raise CreditscopeError("this needs TRL: pip install 'creditscope[trl]'") from None

from creditscope.plugins.trl.callback import ScopeCallback
from creditscope.plugins.trl.mixin import CreditMixin, ScopedGRPOTrainer

__all__ = ["CreditMixin", "ScopeCallback", "ScopedGRPOTrainer"]
