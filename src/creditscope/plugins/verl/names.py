"""The names of verl that we use and those that we register, and errors for missing ones.

verl loads plugins through entry points and logs a failure at DEBUG level only: a missing name would show as an unknown
loss at the first update. `assert_registered` raises before.
"""

from __future__ import annotations

import importlib
from typing import Any

from creditscope.errors import CreditscopeError, MissingExtra, install_hint, unknown
from creditscope.files.versions import version

TESTED = ("0.9.1",)
"""The versions on which the tests ran."""
PREFIX = "creditscope_"
VENDOR = "creditscope"
"""What VERL_ENGINE_VENDOR is set to for the engine under the microscope."""

REQUIRED = {
    "verl.trainer.ppo.core_algos": ("register_adv_est", "register_policy_loss", "ADV_ESTIMATOR_REGISTRY",
                                    "POLICY_LOSS_REGISTRY"),
    "verl.workers.engine": ("EngineRegistry",),
    "verl.workers.engine.fsdp.transformer_impl": ("FSDPEngineWithLMHead",),
    "verl.workers.utils.padding": ("no_padding_2_padding",),
    "verl.utils.tensordict_utils": ("get",),
}
"""module -> names that must be there."""
OVERRIDDEN = ("forward_backward_batch", "forward_step", "prepare_model_outputs", "_gradient_sync_context",
              "get_data_parallel_group", "_get_packed_pad_size")
"""Of the FSDP engine: extended or called by ours."""


def load(module: str) -> Any:
    """A module of verl; an error where it lacks a name that we use."""
    try:
        with install_hint(module):
            found = importlib.import_module(module)
    except MissingExtra:
        raise
    except ImportError as error:
        raise _gone(module, str(error)) from error
    for name in REQUIRED[module]:
        if not hasattr(found, name):
            raise _gone(module, f"it has no {name!r}")
    return found


def require_engine(engine: type) -> None:
    missing = [name for name in OVERRIDDEN if not hasattr(engine, name)]
    if missing:
        raise _gone(f"{engine.__module__}.{engine.__name__}", f"it has no {missing[0]!r}")


def assert_registered(*names: str) -> None:
    """An error unless the plugin is loaded and each `creditscope_…` among `names` is in verl's registries."""
    algos = load("verl.trainer.ppo.core_algos")
    known = [name for table in (algos.POLICY_LOSS_REGISTRY, algos.ADV_ESTIMATOR_REGISTRY) for name in table
             if str(name).startswith(PREFIX)]
    if not known:
        raise CreditscopeError("verl has no creditscope_* loss: the plugin was not loaded, and verl logs the reason at "
                               "DEBUG level only. Set VERL_USE_EXTERNAL_MODULES=creditscope.plugins.verl.plugin, which "
                               "raises it, and see that VERL_USE_EXTERNAL_PLUGINS is not 'none'")
    for name in names:
        if name.startswith(PREFIX) and name not in known:
            raise unknown("name in verl", name, set(known))


def _gone(where: str, why: str) -> CreditscopeError:
    return CreditscopeError(f"verl {version('verl') or '(unknown)'}: {where} cannot be used as creditscope relies on "
                            f"it ({why}); tested with verl {', '.join(TESTED)}: install one of these")
