"""What we lean on in TRL is there, and the callback works on it: run for each version by `make contracts`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", reason="the other side of the contract")

from creditscope.errors import CreditscopeError  # noqa: E402
from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer, names  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from each import each  # noqa: E402
from plugins.trl_makers import dpo_trainer, trainer, weights  # noqa: E402

pytestmark = pytest.mark.conformance


def test_the_installed_version_is_one_that_was_tested() -> None:
    assert names.version("trl") in names.TESTED


@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
def test_a_trainer_has_the_names_that_the_callback_reads(kind: str) -> None:
    names.check_trainer(trainer(getattr(trl, kind)))


def test_the_methods_that_the_mixin_extends_take_what_it_gives() -> None:
    for name, taken in {"_generate_and_score_completions": 1, "_compute_loss": 2, "_clip_grad_norm": 1}.items():
        signature = inspect.signature(getattr(trl.GRPOTrainer, name))
        signature.bind(*[None] * (taken + 1))


@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
def test_the_reading_is_of_the_gradient_that_trl_computed(kind: str, tmp_path: Path) -> None:
    live = trainer(getattr(trl, kind))
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run"))
    live.train()
    lines = Record.open(tmp_path / "run").steps()
    assert len(lines) == 3
    assert all(line["scope/agreement"] > 1 - 1e-9 for line in lines)
    logged = [entry["grad_norm"] for entry in live.state.log_history if "grad_norm" in entry]
    assert [line["grad/norm"] for line in lines] == pytest.approx(logged, rel=1e-5)


def test_a_run_with_the_callback_ends_at_the_same_weights_bit_by_bit() -> None:
    plain = trainer(dtype="float32")
    plain.train()
    watched = trainer(dtype="float32")  # a trainer sets the seed when it is made
    watched.add_callback(ScopeCallback(watched, every=1))
    watched.train()
    assert torch.equal(weights(plain), weights(watched))


def test_our_row_trains_in_trls_loop() -> None:
    live = trainer(ScopedGRPOTrainer, extra={"method": "gspo", "every": 1})
    before = weights(live).clone()
    live.train()
    assert not torch.equal(before, weights(live))
    assert "creditscope/gram/group/effective_rank" in live.state.log_history[0]


@each("gone", ["_buffered_inputs", "_logs", "_generate_and_score_completions"])
def test_a_version_without_a_private_name_is_refused_by_version_and_name(gone: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(names, "version", lambda package: "9.9")

    class Other(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> None:
            if name == gone:
                raise AttributeError(name)

    with pytest.raises(CreditscopeError, match=rf"Other of trl 9\.9 has no '{gone}'.*tested with trl 1\.14\.2, 1\.16"):
        names.check_trainer(Other())


def test_a_batch_without_a_key_is_refused_by_its_name() -> None:
    with pytest.raises(CreditscopeError, match=r"a batch of trl .* has no 'advantages'"):
        names.require("a batch", dict.fromkeys(names.TENSORS[:-1]), names.TENSORS)


# -- DPOTrainer --------------------------------------------------------------------------------------------------------

reads_pairs = pytest.mark.skipif(not names.returns_log_probs(), reason="the model of this DPOTrainer returns logits")


@reads_pairs
def test_a_dpo_trainer_has_the_names_that_the_callback_reads() -> None:
    live = dpo_trainer()
    names.check_trainer(live)
    names.require("a batch", live.data_collator([live.train_dataset[0]]), names.PAIR_TENSORS)


@reads_pairs
def test_a_run_of_dpo_with_the_callback_ends_at_the_same_weights_bit_by_bit(tmp_path: Path) -> None:
    plain = dpo_trainer(dtype="float32")
    plain.train()
    watched = dpo_trainer(dtype="float32")
    watched.add_callback(ScopeCallback(watched, every=1, out=tmp_path / "run"))
    watched.train()
    assert torch.equal(weights(plain), weights(watched))
    lines = Record.open(tmp_path / "run").steps()
    assert [line["scope/agreement"] for line in lines] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert [line["scope/norm_ratio"] for line in lines] == pytest.approx([1.0, 1.0], rel=1e-5)


def test_a_version_whose_dpo_model_returns_logits_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(names, "FUSED", "gone")
    monkeypatch.setattr(names, "version", lambda package: "9.9")
    with pytest.raises(CreditscopeError, match=r"DPOTrainer of trl 9\.9 does not take log-probs.*install trl 1\.16\.0"):
        names.check_pairs(None)
