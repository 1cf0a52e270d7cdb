"""What must not pass in silence: a loss of which parts are dropped, a reading of the wrong rows, a training cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from trl import GRPOTrainer

from creditscope.errors import CreditscopeError
from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer, callback, names
from creditscope.plugins.trl.batch import numbered
from each import each
from plugins.trl_makers import in_double, trainer

pytestmark = pytest.mark.slow


@each("settings", [
    {"entropy_coef": 0.5}, {"sapo_temperature_neg": 5.0}, {"vespo_k_pos": 7.0}, {"use_bias_correction_kl": False}])
def test_a_part_of_trls_loss_that_the_row_would_drop_is_refused_by_its_name(settings: dict[str, Any]) -> None:
    (name, _), = settings.items()
    with pytest.raises(CreditscopeError, match=f"{name}=.*the row of method 'grpo' decides that"):
        trainer(ScopedGRPOTrainer, **settings)


def test_a_step_that_spans_generations_is_refused() -> None:
    # Two micro-batches a generation, four a step: TRL keeps the last generation alone.
    live = trainer(per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=2)
    with pytest.raises(CreditscopeError, match="steps_per_generation=2 is no multiple of gradient_accumulation_steps"):
        ScopeCallback(live)


def test_readings_take_the_passes_over_a_batch_in_turn(tmp_path: Path) -> None:
    """With two passes a reading at every fourth step would always meet the first, where every ratio is 1."""
    live = trainer(num_iterations=2, max_steps=14)
    live.add_callback(ScopeCallback(live, every=4, out=tmp_path / "run"))
    live.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "w/zero" in line] == [0, 5, 8, 13]


class Harder(GRPOTrainer):  # type: ignore[misc]
    """A β and an ε that no setting tells."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        before = self.beta, self.epsilon_low, self.epsilon_high
        self.beta, self.epsilon_low, self.epsilon_high = 5.0, 0.001, 0.001
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta, self.epsilon_low, self.epsilon_high = before


def test_a_loss_that_differs_only_where_the_ratio_left_1_is_found() -> None:
    with in_double():
        live = trainer(Harder, beta=0.001, num_iterations=2, max_steps=6)
        live.add_callback(ScopeCallback(live, every=4))
        with pytest.warns(UserWarning, match="gradient and that of row 'trl_dapo' have cosine"):
            live.train()


def hooks(model: torch.nn.Module) -> tuple[int, int]:
    found = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    return sum(found), sum("forward" in m.__dict__ for m in model.modules())


def test_an_error_inside_a_step_leaves_the_model_as_it_was() -> None:
    live = trainer(ScopedGRPOTrainer, max_steps=1, extra={"every": 1})
    before, inner = hooks(live.model), live._log

    def fail(*_: Any) -> None:
        live._log = inner
        raise RuntimeError("planted")

    live._log = fail  # called between the forward and the backward
    with pytest.raises(RuntimeError, match="planted"):
        live.train()
    assert hooks(live.model) == before
    ids = torch.tensor([[2, 3, 4]])
    live.model(input_ids=ids, labels=ids).loss.backward()


def test_a_reading_that_fails_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(callback, "entropy", fail)
    live = trainer(max_steps=2)
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run"))
    with pytest.warns(UserWarning, match="was not read: RuntimeError: planted"):
        live.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["scope/absent"] for line in lines] == ["RuntimeError: planted"] * 2


# -- keys of a batch ---------------------------------------------------------------------------------------------------


@each(("settings", "keys"), [
    ({}, {"num_items_in_batch"}),
    ({"num_iterations": 2}, {"num_items_in_batch", "old_per_token_logps"}),
    ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}, {"num_items_in_batch"}),
    ({"steps_per_generation": 2}, {"num_items_in_batch", "old_per_token_logps"}),
    ({"beta": 0.1}, {"num_items_in_batch", "ref_per_token_logps"})])
def test_the_keys_that_are_asked_of_a_batch_are_those_that_trl_puts_there(settings: dict[str, Any],
                                                                          keys: set[str]) -> None:
    live = trainer(max_steps=1, **settings)
    assert set(names.batch_keys(live)) == {*names.TENSORS, *keys}
    seen: list[set[str]] = []
    inner = live._generate_and_score_completions
    live._generate_and_score_completions = lambda inputs: seen.append({*(found := inner(inputs))}) or found
    live.train()
    optional = {"old_per_token_logps", "importance_sampling_ratio", "tool_mask", "ref_per_token_logps"}
    assert seen[0] & optional == keys & optional
    assert seen[0] >= set(names.batch_keys(live))


@each(("settings", "key"), [
    ({"num_iterations": 2}, "old_per_token_logps"), ({}, "num_items_in_batch"), ({"beta": 0.1}, "ref_per_token_logps"),
    ({"tools": [len]}, "tool_mask"), ({"use_vllm": True}, "importance_sampling_ratio")])
def test_a_key_that_trl_renamed_is_refused_and_not_read_as_another_loss(settings: dict[str, Any], key: str) -> None:
    live = trainer(**{name: value for name, value in settings.items() if name not in ("tools", "use_vllm")})
    live.tools, live.args.use_vllm = settings.get("tools", []), settings.get("use_vllm", False)
    batch = {name: torch.zeros(4, 1) for name in names.batch_keys(live)}
    assert key in batch
    batch[f"new_{key}"] = batch.pop(key)
    with pytest.raises(CreditscopeError, match=f"a batch of trl .* has no '{key}', which creditscope relies on"):
        numbered(live, batch)
