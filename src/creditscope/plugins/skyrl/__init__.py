"""SkyRL: its policy workers under the microscope, read by a callback of its trainer.

    trainer = scoped(trainer, every=10, out="runs/mine")        # in get_trainer of your BasePPOExp
"""

from creditscope.errors import install_hint, require_module

with install_hint(__name__):
    require_module(__name__, "skyrl")

    from creditscope.plugins.skyrl.callback import SkyRLCallback, scoped

__all__ = ["SkyRLCallback", "scoped"]
