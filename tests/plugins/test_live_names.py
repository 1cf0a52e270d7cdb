"""What the plugins of OpenRLHF and SkyRL refuse, in one sentence each. `test_live_readings.py` has their trainers."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace as Names
from typing import Any

import pytest

from creditscope.errors import CreditscopeError, MissingExtra
from creditscope.methods.dialects import openrlhf_row, skyrl_row
from creditscope.plugins.openrlhf import names as openrlhf
from creditscope.plugins.openrlhf.hook import ScopeHook
from creditscope.plugins.openrlhf.stated import stated


def arguments(**changes: Any) -> Names:
    """Settings as OpenRLHF's command nests them; a change is a dotted name with `__` for its dots."""
    args = Names(actor=Names(eps_clip_low_high=(0.1, 0.3), dual_clip=None, loss_agg_mode="token-mean",
                             policy_loss_type="ppo"),
                 algo=Names(advantage=Names(estimator="group_norm", is_correction_level="off"),
                            kl=Names(use_loss=False, init_coef=0.0)),
                 ds=Names(packing_samples=False, param_dtype="bf16", ring_attn_size=1, tensor_parallel_size=1),
                 train=Names(dynamic_batch_enable=False, max_epochs=1))
    for name, value in changes.items():
        *path, last = name.split("__")
        at = args
        for part in path:
            at = getattr(at, part)
        setattr(at, last, value)
    return args


def trainer(args: Names | None = None, **changes: Any) -> Names:
    args = args or arguments()
    found = Names(training_step=print, ppo_train=print, actor=Names(model=object()), actor_loss_fn=print,
                  actor_optim=None, replay_buffer=None, args=args,
                  strategy=Names(backward=print, optimizer_step=print, is_rank_0=lambda: True, args=args, stage=2))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("name", openrlhf.TRAINER)
def test_a_trainer_of_openrlhf_without_a_name_that_we_use_is_refused_by_that_name(name: str) -> None:
    other = trainer()
    delattr(other, name)
    with pytest.raises(CreditscopeError, match=rf"has no '{name}', which creditscope relies on; tested with openrlhf"):
        ScopeHook(other)


@pytest.mark.parametrize("name", openrlhf.ARGUMENTS)
def test_settings_without_one_that_we_read_are_refused_by_its_name(name: str) -> None:
    args = arguments()
    *path, last = name.split(".")
    at = args
    for part in path:
        at = getattr(at, part)
    delattr(at, last)
    with pytest.raises(CreditscopeError, match=f"the settings of openrlhf .* has no '{name}'"):
        ScopeHook(trainer(args))


@pytest.mark.parametrize(("changes", "says"), [
    ({"ds__param_dtype": "fp16"}, "train in bf16"), ({"ds__ring_attn_size": 2}, "--ds.ring_attn_size 2"),
    ({"ds__tensor_parallel_size": 4}, "--ds.tensor_parallel_size 4"),
    ({"algo__advantage__estimator": "flash_reinforce"}, "unknown advantage.estimator 'flash_reinforce'"),
])
def test_settings_that_cannot_be_read_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        ScopeHook(trainer(arguments(**changes)))


def test_an_actor_without_a_model_is_refused() -> None:
    with pytest.raises(CreditscopeError, match=r"holds no model.*in the process of the policy"):
        ScopeHook(trainer(actor=Names(model=None)))


def test_a_second_hook_on_one_trainer_is_refused() -> None:
    one = trainer()
    ScopeHook(one)
    with pytest.raises(CreditscopeError, match="already has a ScopeHook"):
        ScopeHook(one)


def test_the_geometry_is_left_out_with_a_reason_where_it_cannot_be_read() -> None:
    assert openrlhf.why_no_gram(trainer()) is None
    assert "packing_samples" in str(openrlhf.why_no_gram(trainer(arguments(ds__packing_samples=True))))
    sharded = trainer()
    sharded.strategy.stage = 3
    assert "zero_stage 3" in str(openrlhf.why_no_gram(sharded))


def test_the_row_of_openrlhfs_settings_has_its_own_numbers() -> None:
    row = stated(arguments(actor__dual_clip=3.0))
    assert (row.name, row.clip_low, row.clip_high, row.dual_clip) == ("openrlhf_grpo", 0.1, 0.3, 3.0)
    assert stated(arguments(actor__policy_loss_type="gspo")).name == "openrlhf_gspo"


@pytest.mark.parametrize(("call", "says"), [
    (lambda: openrlhf_row("group_norm", "sapo", "token-mean"), "unknown policy_loss_type 'sapo'"),
    (lambda: openrlhf_row("group_norm", "ppo", "token_mean"), "did you mean 'token-mean'"),
    (lambda: skyrl_row("grpo", "rollout_is", "token_mean"), "unknown policy_loss_type 'rollout_is'"),
    (lambda: skyrl_row("grpo", "regular", "token_mean_legacy"), "unknown loss_reduction"),
])
def test_a_loss_that_no_row_states_is_refused_with_the_choices(call: Any, says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        call()


def test_another_estimator_under_skyrls_other_losses_keeps_its_baseline_and_takes_their_bound() -> None:
    row = skyrl_row("rloo", "dual_clip", "sequence_mean")
    assert (row.baseline, row.dual_clip, row.aggregate) == ("leave_one_out", 3.0, "sequence_mean")


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is not None, reason="SkyRL is installed")
def test_without_skyrl_the_error_says_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=r"needs skyrl: pip install 'creditscope\[skyrl\]'"):
        importlib.import_module("creditscope.plugins.skyrl")


@pytest.mark.skipif(importlib.util.find_spec("openrlhf") is not None, reason="OpenRLHF is installed")
def test_without_openrlhf_the_command_says_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=r"needs openrlhf: pip install 'creditscope\[openrlhf\]'"):
        importlib.import_module("creditscope.plugins.openrlhf.train")
