"""Rows of many micro-batches, proven by weighted sketches against passes without the microscope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from creditscope import CreditscopeError
from creditscope.microscope import distributed as ranks
from creditscope.microscope.recorder import Recorder
from creditscope.microscope.scope import Microscope
from creditscope.microscope.sources import ParameterSource
from small_models import batch, build, objective


def weighted(model: Any, ids: Tensor, credit: Tensor) -> tuple[Microscope, Tensor]:
    """A reading, and then the gradient of the losses weighted at random in `.grad`."""
    with Microscope(model, sketch=4) as scope:
        objective(model, ids, credit).backward()
    h = ranks.draw_weights(len(ids), seed=3, rank=0)
    model.zero_grad(set_to_none=True)
    objective(model, ids, credit * h[:, None]).backward()
    return scope, h


def test_weighted_sketches_add_up_to_the_sketch_of_the_weighted_losses_gradient() -> None:
    model = build("llama")
    scope, h = weighted(model, *batch())
    assert ranks.prove_rows(scope, h, scale=1.0).error < 1e-7  # the model's norms compute in float32


def test_other_weights_than_those_of_the_passes_are_found_out() -> None:
    model = build("llama")
    scope, h = weighted(model, *batch())
    with pytest.raises(CreditscopeError, match="rows are not those of their rollouts"):
        ranks.prove_rows(scope, h.flip(0), scale=1.0)


def test_rows_of_one_layer_that_change_places_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Recorder.matrix

    def planted(self: Recorder, source: ParameterSource, delta: Tensor, a: Tensor) -> Tensor:
        order = torch.tensor([1, 0, 2, 3]) if "up_proj" in source.names[0] else torch.arange(len(a))
        return real(self, source, delta[order], a[order])

    monkeypatch.setattr(Recorder, "matrix", planted)
    model = build("llama")
    scope, h = weighted(model, *batch())
    with pytest.raises(CreditscopeError, match="rows are not those of their rollouts"):
        ranks.prove_rows(scope, h, scale=1.0)


def test_weights_differ_by_seed_and_rank_and_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    drawn = [ranks.draw_weights(5, seed, rank) for seed in (0, 1) for rank in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert torch.equal(torch.get_rng_state(), before)
