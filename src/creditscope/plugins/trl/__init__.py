"""TRL: its GRPO, RLOO and DPO trainers under the microscope, and any method or credit of the table in its loop."""

from creditscope.errors import install_hint, require_module

with install_hint(__name__):
    require_module(__name__, "trl")

    from creditscope.plugins.trl.callback import ScopeCallback
    from creditscope.plugins.trl.mixin import CreditMixin, ScopedGRPOTrainer

__all__ = ["CreditMixin", "ScopeCallback", "ScopedGRPOTrainer"]
