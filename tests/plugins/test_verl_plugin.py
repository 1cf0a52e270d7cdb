"""Registration: what verl knows afterwards, and the sentence where it cannot. Each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import creditscope
from creditscope import METHODS
from creditscope.errors import CreditscopeError
from creditscope.plugins.verl.loss import refuse_settings
from creditscope.plugins.verl.names import REQUIRED, assert_registered, load
from creditscope.plugins.verl.table import refuse_method

EXAMPLE = Path(__file__).parents[2] / "examples/verl"
SRC = str(Path(creditscope.__file__).parents[1])
with_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl lives in its own environment")
without_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is here")

ALGOS = """
POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY = {}, {}
def register_policy_loss(name): return lambda f: POLICY_LOSS_REGISTRY.setdefault(name, f)
"""
WHOLE = ALGOS + "register_adv_est = register_policy_loss\n"


TWICE = """
import sys
told = []
for engine in ({}, {"FSDPEngineWithLMHead": type("FSDPEngineWithLMHead", (), {})}):
    try:
        import verl.trainer.ppo.core_algos as algos, verl.workers.engine.fsdp.transformer_impl as there
        algos.POLICY_LOSS_REGISTRY.clear()
        vars(there).update(engine)
        import creditscope.plugins.verl.plugin
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
print(" and then ".join(told))
"""
"""Loading torch takes two seconds: the plugin is imported a second time where the first import failed."""


def run(code: str, path: Path | None = None, **environment: str) -> str:
    """What a fresh process prints last, or the last line of its error."""
    places = [str(path)] if path else []
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment | {
        "PYTHONPATH": os.pathsep.join([*places, SRC, *sys.path]), "CUDA_VISIBLE_DEVICES": ""})
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def old_verl(folder: Path, algos: str) -> Path:
    """A verl whose modules are all there, empty but for core_algos."""
    for module in REQUIRED:
        place = folder / Path(*module.split("."))
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text(algos if module.endswith("core_algos") else "")
        for above in place.relative_to(folder).parents:
            (folder / above / "__init__.py").touch() if above != Path() else None
    return folder


@without_verl
def test_without_verl_the_extra_is_named() -> None:
    with pytest.raises(CreditscopeError, match=r"pip install 'creditscope\[verl\]'"):
        load("verl.trainer.ppo.core_algos")
    with pytest.raises(CreditscopeError, match="needs verl"):
        assert_registered()


@pytest.mark.slow
@without_verl
def test_a_version_whose_names_are_gone_is_refused_in_one_sentence(tmp_path: Path) -> None:
    said = run(TWICE, old_verl(tmp_path, WHOLE), VERL_ENGINE_VENDOR="creditscope")
    no_engine, no_method = said.split(" and then ")
    assert "it has no 'FSDPEngineWithLMHead'" in no_engine
    assert "tested with verl 0.9.1: install one of these" in no_engine
    assert "it has no 'forward_backward_batch'" in no_method


@without_verl
def test_a_core_without_its_registry_is_refused(tmp_path: Path) -> None:
    said = run("from creditscope.plugins.verl import assert_registered; assert_registered()", old_verl(tmp_path, ALGOS))
    assert "core_algos cannot be used as creditscope relies on it (it has no 'register_adv_est')" in said


@without_verl
def test_a_plugin_that_was_not_loaded_is_told_with_the_way_to_see_why(tmp_path: Path) -> None:
    said = run("from creditscope.plugins.verl import assert_registered; assert_registered()", old_verl(tmp_path, WHOLE))
    assert "VERL_USE_EXTERNAL_MODULES=creditscope.plugins.verl.plugin" in said


@without_verl
def test_a_name_that_verl_does_not_have_is_told_with_the_nearest(tmp_path: Path) -> None:
    one = WHOLE + "POLICY_LOSS_REGISTRY['creditscope_gspo'] = print\n"
    said = run("from creditscope.plugins.verl import assert_registered as known; known('vanilla', 'creditscope_gsop')",
               old_verl(tmp_path, one))
    assert "unknown name in verl 'creditscope_gsop'; did you mean 'creditscope_gspo'?" in said


@with_verl
def test_verl_knows_every_row_estimator_and_the_engine() -> None:
    said = run("import verl, creditscope.plugins.verl as plugin\n"
               "from creditscope import METHODS\nfrom creditscope.credit import ESTIMATORS\n"
               "from verl.trainer.ppo.core_algos import get_policy_loss_fn, get_adv_estimator_fn\n"
               "from verl.workers.engine import EngineRegistry\n"
               "plugin.assert_registered('creditscope_dapo', 'creditscope_turn_return', 'vanilla')\n"
               "for name in METHODS: get_policy_loss_fn('creditscope_' + name)\n"
               "for name in [*METHODS, *ESTIMATORS]: get_adv_estimator_fn('creditscope_' + name)\n"
               "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)",
               VERL_USE_EXTERNAL_MODULES="creditscope.plugins.verl.plugin", VERL_ENGINE_VENDOR="creditscope")
    assert said == "ScopedEngine"


@with_verl
def test_without_the_vendor_verl_keeps_its_own_engine() -> None:
    said = run("import verl\nfrom verl.workers.engine import EngineRegistry\n"
               "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)",
               VERL_USE_EXTERNAL_MODULES="creditscope.plugins.verl.plugin", VERL_ENGINE_DEVICE="cuda")
    assert said == "FSDPEngineWithLMHead"


@with_verl
def test_the_entry_point_registers(tmp_path: Path) -> None:
    info = tmp_path / "probe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\ncreditscope = creditscope.plugins.verl.plugin\n")
    said = run("import verl\nfrom creditscope.plugins.verl import assert_registered\n"
               "assert_registered('creditscope_gspo')\nprint('registered')", tmp_path)
    assert said == "registered"


@with_verl
def test_a_wrong_name_ends_in_one_sentence() -> None:
    said = run("import verl\nfrom creditscope.plugins.verl import assert_registered\n"
               "assert_registered('creditscope_gsop')", VERL_USE_EXTERNAL_MODULES="creditscope.plugins.verl.plugin")
    assert "unknown name in verl 'creditscope_gsop'; did you mean 'creditscope_gspo'?" in said


# -- the example -------------------------------------------------------------------------------------------------------


def test_the_examples_names_are_ours_and_fit_each_other() -> None:
    told = yaml.safe_load((EXAMPLE / "creditscope.yaml").read_text())
    actor = told["actor_rollout_ref"]["actor"]
    name = told["algorithm"]["adv_estimator"].removeprefix("creditscope_")
    assert actor["policy_loss"]["loss_mode"] == f"creditscope_{name}"
    refuse_method(METHODS[name])
    refuse_settings(METHODS[name], actor["loss_agg_mode"], SimpleNamespace(**actor))
    assert actor["ppo_micro_batch_size_per_gpu"] % told["actor_rollout_ref"]["rollout"]["n"] == 0
    assert actor["loss_scale_factor"] == told["data"]["max_response_length"]


@with_verl
def test_verl_reads_the_examples_settings() -> None:
    said = run("import verl\nfrom hydra import compose, initialize_config_dir\n"
               f"with initialize_config_dir({str(EXAMPLE)!r}, version_base=None): told = compose('creditscope')\n"
               "print(told.algorithm.adv_estimator, told.actor_rollout_ref.actor.clip_ratio_c, told.trainer.use_v1)")
    assert said == "creditscope_dapo 3.0 True"
