"""verl: our credits and losses under their names in its registries, and its FSDP2 engine under the microscope.

    algorithm.adv_estimator=creditscope_dapo
    actor_rollout_ref.actor.policy_loss.loss_mode=creditscope_dapo
    VERL_ENGINE_VENDOR=creditscope
"""

from creditscope.plugins.verl.names import assert_registered

__all__ = ["assert_registered"]
