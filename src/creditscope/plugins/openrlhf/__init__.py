"""OpenRLHF: its actor's training under the microscope.

    python -m creditscope.plugins.openrlhf --scope.out runs/mine -- ARGUMENTS OF openrlhf.cli.train_ppo_ray

In a script of your own, where an ActorPPOTrainer is at hand: `ScopeHook(trainer, every=10, out="runs/mine")`.
"""

from creditscope.errors import install_hint, require_module

with install_hint(__name__):
    require_module(__name__, "openrlhf")

    from creditscope.plugins.openrlhf.hook import ScopeHook

__all__ = ["ScopeHook"]
