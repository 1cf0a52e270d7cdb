"""OpenRLHF: its actor's training under the microscope.

    CREDITSCOPE_OUT=runs/mine python -m creditscope.plugins.openrlhf.train ARGUMENTS OF openrlhf.cli.train_ppo_ray

In a script of your own, where an ActorPPOTrainer is at hand: `ScopeHook(trainer, every=10, out="runs/mine")`.
"""

from creditscope.plugins.openrlhf.hook import ScopeHook

__all__ = ["ScopeHook"]
