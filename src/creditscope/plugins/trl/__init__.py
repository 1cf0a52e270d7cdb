"""TRL: its GRPO and RLOO trainers under the microscope, and any method or credit of the table in its loop."""

from creditscope.errors import install_hint

with install_hint(__name__):
    import trl  # noqa: F401

    from creditscope.plugins.trl.callback import ScopeCallback
    from creditscope.plugins.trl.mixin import CreditMixin, ScopedGRPOTrainer

__all__ = ["CreditMixin", "ScopeCallback", "ScopedGRPOTrainer"]
