"""Bugs planted in the microscope's own code, one by one: each is noticed, by the check of every pass or by the proof.

The check of every pass is Σ_ij K_ij = ‖∇‖² for every parameter. It is blind to rows that are swapped inside a layer,
and to factors that are wrong for gradient and rows alike: these tests say so too, and `prove` finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from creditscope import CreditscopeError, Microscope
from creditscope.microscope import layers, recorder, scope
from creditscope.microscope.gram import Lookup, weight_gram
from creditscope.microscope.proof import halves, prove
from creditscope.microscope.recorder import Recorder
from small_models import FAMILIES, apart, batch, build, by_loop, grams, objective, total

ROWS = 5
LAYER = "model.layers.0.mlp.up_proj.weight"
Plant = Callable[[pytest.MonkeyPatch], None]


def look(family: str = "llama", **changes: Any) -> tuple[Any, Tensor, Tensor]:
    ids, credit = batch(ROWS, 9)
    return build(family, **changes), ids, credit


def passes(model: Any, ids: Tensor, credit: Tensor) -> Microscope:
    with Microscope(model) as seen:
        objective(model, ids, credit).backward()
    return seen


def proof(model: Any, ids: Tensor, credit: Tensor) -> float:
    return prove(Microscope(model), lambda w: objective(model, ids, credit * w[:, None]).backward(), len(ids))


# -- what the check of every pass sees ---------------------------------------------------------------------------------


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    def planted(delta: Tensor, a: Tensor, scratch: Any = None) -> tuple[Tensor, Tensor]:
        dw, gram = weight_gram(delta, a, scratch)
        return dw, gram / len(delta)

    patch.setattr(recorder, "weight_gram", planted)


def averaged_gradient(patch: pytest.MonkeyPatch) -> None:
    """An engine that averages over two ranks, and nobody undoes it."""
    real = Recorder.matrix
    patch.setattr(Recorder, "matrix", lambda self, name, delta, a: real(self, name, delta, a) / 2)


def doubled_hook(patch: pytest.MonkeyPatch) -> None:
    real = Recorder._add

    def planted(self: Recorder, name: str, gram: Tensor) -> None:
        real(self, name, gram)
        if name.endswith("up_proj.weight"):
            real(self, name, gram)

    patch.setattr(Recorder, "_add", planted)


def dropped_layer(patch: pytest.MonkeyPatch) -> None:
    real = scope.plan
    patch.setattr(scope, "plan", lambda *args: [(site, rule) for site, rule in real(*args)
                                                if not site.where.endswith("0.mlp.up_proj")])


def replicated_layer_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Tensor parallel: each rank holds the whole norm, and its Grams are added over two ranks as if they were parts."""

    def planted(found: Recorder) -> None:
        for name in found.grams:
            if "norm" in name:
                found.grams[name] = 2 * found.grams[name]

    patch.setattr(scope, "add_parts", planted)


def tied_head_counted_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recorder, "joint_gram", lambda waiting, height: None)


def tied_head_without_its_cross_terms(patch: pytest.MonkeyPatch) -> None:
    real = Lookup.gram
    patch.setattr(Lookup, "gram", lambda self, head=None: real(self))


def last_position_lost(patch: pytest.MonkeyPatch) -> None:
    def planted(delta: Tensor, a: Tensor, scratch: Any = None) -> tuple[Tensor, Tensor]:
        return weight_gram(delta, a, scratch)[0], weight_gram(delta[:, :-2], a[:, :-2])[1]

    patch.setattr(recorder, "weight_gram", planted)


def nan_in_the_gram(patch: pytest.MonkeyPatch) -> None:
    def planted(delta: Tensor, a: Tensor, scratch: Any = None) -> tuple[Tensor, Tensor]:
        dw, gram = weight_gram(delta, a, scratch)
        return dw, gram * torch.nan

    patch.setattr(recorder, "weight_gram", planted)


@pytest.mark.parametrize(("plant", "words"), [
    (wrong_scale, "self-check failed"),
    (averaged_gradient, "self-check failed"),
    (doubled_hook, "self-check failed.*up_proj"),
    (dropped_layer, "did not see.*up_proj"),
    (replicated_layer_counted_twice, "self-check failed.*norm"),
    (last_position_lost, "self-check failed"),
    (nan_in_the_gram, "self-check failed.*nan"),
])
def test_the_check_of_every_pass_notices(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, credit = look()
    passes(model, ids, credit)
    model.zero_grad(set_to_none=True)
    plant(monkeypatch)
    with pytest.raises(CreditscopeError, match=words):
        passes(model, ids, credit)


@pytest.mark.parametrize("plant", [tied_head_counted_once, tied_head_without_its_cross_terms])
def test_the_check_of_every_pass_notices_half_a_tied_head(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, credit = look(tie_word_embeddings=True)
    passes(model, ids, credit)
    model.zero_grad(set_to_none=True)
    plant(monkeypatch)
    with pytest.raises(CreditscopeError, match=r"self-check failed for 'model.embed_tokens.weight'"):
        passes(model, ids, credit)


# -- what it cannot see, and the proof does ----------------------------------------------------------------------------


def swapped_rows(first: int, second: int) -> Plant:
    """Rows of one layer change places, in its activations and its gradients alike."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = Recorder.matrix
        order = torch.arange(ROWS)
        order[[first, second]] = order[[second, first]]

        def planted(self: Recorder, name: str, delta: Tensor, a: Tensor) -> Tensor:
            return real(self, name, delta[order], a[order]) if name == LAYER else real(self, name, delta, a)

        patch.setattr(Recorder, "matrix", planted)

    return plant


def stale_activations(patch: pytest.MonkeyPatch) -> None:
    """A layer that multiplies its gradients by the activations of the micro-batch before."""
    real = Recorder.matrix
    before: dict[str, Tensor] = {}

    def planted(self: Recorder, name: str, delta: Tensor, a: Tensor) -> Tensor:
        old = before.get(name, a)
        before[name] = a.clone()
        return real(self, name, delta, old if old.shape == a.shape else a)

    patch.setattr(Recorder, "matrix", planted)


def transposed_twice(patch: pytest.MonkeyPatch) -> None:
    """Conv1D keeps its weight as (in, out): read the other way round, a square one has every shape right."""
    real = Recorder.matrix
    patch.setattr(Recorder, "matrix", lambda self, name, delta, a:
                  real(self, name, a, delta) if name.endswith("0.attn.c_proj.weight") else real(self, name, delta, a))


@pytest.mark.parametrize("pair", [(i, j) for i in range(ROWS) for j in range(i)])
def test_swapped_rows_pass_the_check_of_every_pass_and_fail_the_proof(pair: tuple[int, int],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, credit = look()
    truth = grams(by_loop(model, ids, credit))[LAYER]
    swapped_rows(*pair)(monkeypatch)
    assert apart(passes(model, ids, credit).layers[LAYER], truth) > 0.05  # wrong, and nothing was said
    model.zero_grad(set_to_none=True)
    with pytest.raises(CreditscopeError, match=f"the rows of '{LAYER}' are not those of their rollouts"):
        proof(model, ids, credit)


def test_stale_activations_pass_the_check_of_every_pass_and_fail_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient and rows are made of the same wrong factors, so they agree with each other."""
    model, ids, credit = look()
    truth = total(grams(by_loop(model, ids, credit)))
    stale_activations(monkeypatch)
    passes(model, *batch(ROWS, 9, seed=7))
    model.zero_grad(set_to_none=True)
    assert apart(passes(model, ids, credit).gram, truth) > 0.05
    passes(model, *batch(ROWS, 9, seed=7))
    with pytest.raises(CreditscopeError, match="the microscope changes the gradient of"):
        proof(model, ids, credit)


def test_a_transposed_conv1d_passes_the_check_of_every_pass_and_fails_the_proof(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """⟨Gᵀ, Gᵀ⟩ = ⟨G, G⟩: the Gram is right, and the training step would be wrong."""
    model, ids, credit = look("gpt2")
    transposed_twice(monkeypatch)
    passes(model, ids, credit)
    with pytest.raises(CreditscopeError, match=r"changes the gradient of 'transformer.h.0.attn.c_proj.weight'"):
        proof(model, ids, credit)


class Sorting(nn.Module):
    """A model that sorts its rows by their first token for two of its layers, as some do by length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.out = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        order = ids[:, 0].argsort()
        inner: Tensor = self.inner(self.embed(ids)[order]).tanh()
        out: Tensor = self.out(inner[order.argsort()])
        return out


def test_a_model_that_sorts_its_rows_is_found_out_by_the_proof_alone() -> None:
    model = Sorting().double()
    ids, credit = batch(ROWS, 9)

    def backward(weights: Tensor) -> None:
        chosen = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        (chosen * credit * weights[:, None]).sum().backward()

    with Microscope(model) as seen:
        backward(torch.ones(ROWS).double())
    assert all(check.error < 1e-12 for check in seen.checks.values())
    with pytest.raises(CreditscopeError, match=r"the rows of 'inner.weight' are not those of their rollouts"):
        prove(Microscope(model), backward, ROWS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_proof_is_silent_on_every_family(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype)
    ids, credit = batch(ROWS, 9)
    with torch.backends.mkldnn.flags(enabled=False):
        assert proof(model, ids, credit) < 0.5
    assert all(p.grad is None for p in model.parameters())


def test_the_proof_puts_the_gradients_back() -> None:
    model, ids, credit = look()
    objective(model, ids, credit).backward()
    before = {p: (p.grad, p.grad.clone()) for p in model.parameters()}
    proof(model, ids, credit)
    assert all(p.grad is same and torch.equal(p.grad, value) for p, (same, value) in before.items())


@pytest.mark.parametrize("rollouts", [1, 2, 3, 8, 9, 64])
def test_any_two_rollouts_are_in_different_halves_and_there_are_as_few_as_can_be(rollouts: int) -> None:
    found = halves(rollouts)
    assert len(found) == (rollouts - 1).bit_length()
    assert len({tuple(half[i].item() for half in found) for i in range(rollouts)}) == rollouts


def test_the_layers_module_calls_the_recorder_that_is_patched_here() -> None:
    """The plants above change `Recorder`: a rule that went around it would not be tested by them."""
    assert layers.Recorder is Recorder
