"""What of verl we lean on, the names we add to it, and how a missing one is told.

verl loads plugins through entry points and says at DEBUG level only that one failed: a typo, or a version that moved a
name, shows up as an unknown loss at the first update. `assert_registered` says it in one sentence before.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from creditscope.errors import CreditscopeError, unknown
from creditscope.files.versions import version

TESTED = ("0.9.1",)
"""The versions on which the tests ran."""
PREFIX = "creditscope_"
VENDOR = "creditscope"
"""What VERL_ENGINE_VENDOR is set to for the engine under the microscope."""

LEANED_ON = {
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
"""Of the FSDP engine: what ours extends or calls."""


def installed() -> bool:
    """Whether there is a verl to plug into."""
    return importlib.util.find_spec("verl") is not None


def load(module: str) -> Any:
    """A module of verl with all that we need of it; an error that names what is gone."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        if error.name == "verl":
            raise CreditscopeError("this needs verl: pip install 'creditscope[verl]'") from None
        raise _gone(module, str(error)) from error
    for name in LEANED_ON[module]:
        if not hasattr(found, name):
            raise _gone(module, f"it has no {name!r}")
    return found


def require_engine(engine: type) -> None:
    """Refuse an FSDP engine that lacks a method of ours to extend."""
    missing = [name for name in OVERRIDDEN if not hasattr(engine, name)]
    if missing:
        raise _gone(f"{engine.__module__}.{engine.__name__}", f"it has no {missing[0]!r}")


def assert_registered(*names: str) -> None:
    """Step 0: every name that begins with `creditscope_` is in verl's registries, or an error says which is not.

    Without names it asks whether the plugin is loaded at all.

    >>> assert_registered("creditscope_dapo", "creditscope_turn_return")  # doctest: +SKIP
    """
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
