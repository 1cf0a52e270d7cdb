"""Bugs planted in the microscope's own code, one by one: each is noticed, by the check of every pass or by the proof.

The check of every pass is Σ_ij K_ij = ‖∇‖² for every parameter. It is blind to rows that are swapped inside a layer,
and to factors that are wrong for gradient and rows alike: these tests say so too, and `prove` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from creditscope import CreditscopeError, Microscope
from creditscope.microscope import operations, recorder, scope, watch
from creditscope.microscope.gram import EmbeddingRows
from creditscope.microscope.proof import Proofs, drawn, halves, prove
from creditscope.microscope.recorder import Recorder, weight_gram
from creditscope.microscope.rows import RowOwners
from creditscope.microscope.sources import ParameterSource
from depth import FULL
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
    patch.setattr(Recorder, "matrix", lambda self, source, delta, a: real(self, source, delta, a) / 2)


def doubled_hook(patch: pytest.MonkeyPatch) -> None:
    real = Recorder._add

    def planted(self: Recorder, name: str, gram: Tensor) -> None:
        real(self, name, gram)
        if name.endswith("up_proj.weight"):
            real(self, name, gram)

    patch.setattr(Recorder, "_add", planted)


def unseen_layer(patch: pytest.MonkeyPatch) -> None:
    real = watch.Watch.__init__

    def planted(self: watch.Watch, found: Recorder, *rest: Any) -> None:
        real(self, found, *rest)
        del self._known[id(found.parameters[LAYER])]

    patch.setattr(watch.Watch, "__init__", planted)


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
    real = EmbeddingRows.gram
    patch.setattr(EmbeddingRows, "gram", lambda self, head=None: real(self))


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
    (unseen_layer, "cannot split into rows, first .*up_proj.*no torch call that uses it was seen"),
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

        def planted(self: Recorder, source: ParameterSource, delta: Tensor, a: Tensor) -> Tensor:
            return real(self, source, delta[order], a[order]) if source.names == (LAYER,) else \
                real(self, source, delta, a)

        patch.setattr(Recorder, "matrix", planted)

    return plant


def stale_activations(patch: pytest.MonkeyPatch) -> None:
    """A layer that multiplies its gradients by the activations of the micro-batch before."""
    real = Recorder.matrix
    before: dict[tuple[str, ...], Tensor] = {}

    def planted(self: Recorder, source: ParameterSource, delta: Tensor, a: Tensor) -> Tensor:
        old = before.get(source.names, a)
        before[source.names] = a.clone()
        return real(self, source, delta, old if old.shape == a.shape else a)

    patch.setattr(Recorder, "matrix", planted)


def transposed_twice(patch: pytest.MonkeyPatch) -> None:
    """Conv1D keeps its weight as (in, out): read the other way round, a square one has every shape right."""
    real = Recorder.matrix
    patch.setattr(Recorder, "matrix", lambda self, source, delta, a: real(
        self, source, *((a, delta) if source.names[0].endswith("0.attn.c_proj.weight") else (delta, a))))


def picked_tokens_dealt_to_the_next(patch: pytest.MonkeyPatch) -> None:
    """Experts see tokens that were picked: each is given to the owner of the token before it."""
    real = RowOwners.gathered
    patch.setattr(RowOwners, "gathered", lambda self, owner, *rest: real(self, owner.roll(1), *rest))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(i, j) for i in range(ROWS) for j in range(i)])
def test_swapped_rows_pass_the_check_of_every_pass_and_fail_the_proof(pair: tuple[int, int],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, credit = look()
    truth = grams(by_loop(model, ids, credit))[LAYER]
    swapped_rows(*pair)(monkeypatch)
    assert apart(passes(model, ids, credit).layers[LAYER], truth) > 0.05  # wrong, and nothing was said
    model.zero_grad(set_to_none=True)
    words = rf"alone has a gradient through rollout ({pair[0]}|{pair[1]}) \(1 such\) at '{re.escape(LAYER)}'"
    with pytest.raises(CreditscopeError, match=words):
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_picked_tokens_under_the_wrong_names_pass_the_check_of_every_pass_and_fail_the_proof(
        family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, credit = look(family)
    truth = {name: gram for name, gram in grams(by_loop(model, ids, credit)).items() if ".experts." in name}
    picked_tokens_dealt_to_the_next(monkeypatch)
    seen = passes(model, ids, credit)
    assert apart(total({name: seen.layers[name] for name in truth}), total(truth)) > 0.05
    with pytest.raises(CreditscopeError, match="alone has a gradient through rollout"):
        proof(model, ids, credit)


class Hidden(torch.autograd.Function):
    """Rows in another order, by a function of the model's own that goes around torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return torch.from_numpy(x.numpy(force=True)[order.numpy()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.order.argsort()], None


class Sorting(nn.Module):
    """A model that sorts its rows by their first token for two of its layers, as some do by length."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.out = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)
        self.move = Hidden.apply if hidden else lambda x, order: x[order]

    def forward(self, ids: Tensor) -> Tensor:
        order = ids[:, 0].argsort()
        inner: Tensor = self.inner(self.move(self.embed(ids), order)).tanh()
        out: Tensor = self.out(self.move(inner, order.argsort()))
        return out


@pytest.mark.parametrize("hidden", [False, True])
def test_a_model_that_sorts_its_rows_is_exact_and_one_that_hides_it_is_found_out_by_the_proof_alone(
        hidden: bool) -> None:
    model = Sorting(hidden).double()
    ids, credit = batch(ROWS, 9)
    assert not torch.equal(ids[:, 0].argsort(), torch.arange(ROWS))

    def backward(weights: Tensor) -> None:
        chosen = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        (chosen * credit * weights[:, None]).sum().backward()

    if hidden:  # such a function is taken to leave rows where they are only where somebody has said so
        with pytest.raises(CreditscopeError, match=r"Hidden is code that no torch call shows.*trust=\['Hidden'\]"), \
                Microscope(model):
            backward(torch.ones(ROWS).double())
        model.zero_grad()
    with Microscope(model, trust=["Hidden"] if hidden else []) as seen:
        backward(torch.ones(ROWS).double())
    assert all(check.error < 1e-12 for check in seen.checks.values())
    if not hidden:
        assert prove(Microscope(model), backward, ROWS) < 0.5
        return
    with pytest.raises(CreditscopeError, match="alone has a gradient through rollout"):
        prove(Microscope(model, trust=["Hidden"]), backward, ROWS)


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
KINDS = ("llama", "gpt2", "gemma2", "gpt_oss")
"""One family for each kind of layer: dense; Conv1D; a tied head and norms of 1 + w; experts and attention sinks."""


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(("family", "dtype"), [(family, dtype) for family in sorted(FAMILIES) for dtype in DTYPES
                                               if FULL or dtype == torch.float32 or family in KINDS])
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


def test_the_proof_puts_buffers_and_random_numbers_back_and_starts_every_pass_from_the_same() -> None:
    class Counts(nn.Module):
        """Dropout, and a buffer that scales the result by how often the module was called."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(16, 50)
            self.register_buffer("calls", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return nn.functional.dropout(self.line(x) * self.calls, 0.5, training=True)

    torch.manual_seed(0)
    model, x = Counts().double(), torch.randn(ROWS, 9, 16, dtype=torch.float64)
    state = torch.get_rng_state()
    worst = prove(Microscope(model), lambda w: (model(x).sin().sum((1, 2)) * w).sum().backward(), ROWS)
    assert worst < 0.5
    assert float(model.calls) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_readings_are_proven_at_first_every_so_often_and_when_the_model_has_changed() -> None:
    model, proofs = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Proofs(every=3)
    assert [proofs.due(model) for _ in range(7)] == ["all", None, None, "one", None, None, "one"]
    model[0].bias.requires_grad_(False)
    assert proofs.due(model) == "all"
    model.eval()
    assert proofs.due(model) == "all"
    assert proofs.due(model) in (None, "one")


def test_a_model_that_does_not_change_is_proven_at_every_25th_reading() -> None:
    model, proofs = nn.Linear(2, 2), Proofs()
    found = [proofs.due(model) for _ in range(101)]
    assert {number: what for number, what in enumerate(found) if what is not None} == {
        0: "all", 25: "one", 50: "one", 75: "one", 100: "one"}


class Other(nn.Linear):
    """Another class of module, with the same parameters."""


CHANGES = {
    "a layer goes to eval mode": lambda m: m[1].eval(),
    "a parameter is frozen": lambda m: m[0].bias.requires_grad_(False),
    "a frozen parameter is thawed": lambda m: m[2].bias.requires_grad_(True),
    "another precision": lambda m: m.double(),
    "a parameter of another shape": lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(3, 2))),
    "a parameter is added": lambda m: m.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "a parameter is taken away": lambda m: setattr(m[0], "bias", None),
    "a forward hook": lambda m: m[0].register_forward_hook(lambda module, args, out: None),
    "a forward pre-hook": lambda m: m[0].register_forward_pre_hook(lambda module, args: None),
    "a forward of its own": lambda m: setattr(m[0], "forward", m[0].forward),
    "another class": lambda m: setattr(m[0], "__class__", Other),
    "a module is added": lambda m: m.append(nn.Tanh()),
}


def three_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_proven_anew_with_all_halves_and_then_no_more(change: str) -> None:
    model, proofs = three_layers(), Proofs()
    assert [proofs.due(model) for _ in range(2)] == ["all", None]
    CHANGES[change](model)
    assert [proofs.due(model) for _ in range(3)] == ["all", None, None]


def test_a_model_that_goes_to_eval_and_back_is_proven_both_times() -> None:
    model, proofs = three_layers(), Proofs()
    found = []
    for mode in (model.train, model.train, model.eval, model.eval, model.train):
        mode()
        found.append(proofs.due(model))
    assert found == ["all", None, "all", None, "all"]


def test_values_of_parameters_and_gradients_are_no_change_to_the_model() -> None:
    model, proofs = three_layers(), Proofs()
    assert proofs.due(model) == "all"
    torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(3, 2)).sum().backward()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert proofs.due(model) is None


@pytest.mark.parametrize(("what", "passes"), [("all", 2 + 3), ("one", 3)])
def test_a_first_proof_takes_a_pass_for_each_half_and_a_later_one_takes_three(what: str, passes: int) -> None:
    model, ids, credit = look()
    weights = []

    def backward(given: Tensor) -> None:
        weights.append(given)
        objective(model, ids, credit * given[:, None]).backward()

    proofs = Proofs()
    proofs.due(model)
    assert proofs.run(what, Microscope(model), backward, ROWS) < 0.5
    assert len(weights) == passes
    # Two passes have all rollouts, one of them without the microscope; the others have some of them.
    assert [bool((given == 1).all()) for given in weights] == [True, True] + [False] * (passes - 2)
    assert all(0 < int(given.sum()) < ROWS for given in weights[2:])


def test_after_a_proof_has_failed_the_next_one_takes_all_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One half, drawn at random, finds two rows that changed places in one of two cases: it cannot take back a no."""
    model, ids, credit = look()
    proofs, scope = Proofs(every=2), Microscope(model)

    def backward(weights: Tensor) -> None:
        objective(model, ids, credit * weights[:, None]).backward()

    assert proofs.due(model) == "all"
    with monkeypatch.context() as patch:
        swapped_rows(0, 1)(patch)
        with pytest.raises(CreditscopeError):
            proofs.run("all", scope, backward, ROWS)
    asked = [what for _ in range(2) if (what := proofs.due(model)) is not None]
    assert asked
    assert asked[0] == "all"
    proofs.run("all", scope, backward, ROWS)
    assert "all" not in [proofs.due(model) for _ in range(4)]


@pytest.mark.parametrize("rollouts", [2, 5, 64])
def test_a_half_drawn_anew_has_half_of_the_rollouts_and_moves_no_random_state(rollouts: int) -> None:
    state = torch.get_rng_state()
    found = [half for seed in range(20) for half in drawn(rollouts, seed)]
    assert all(int(half.sum()) == rollouts // 2 for half in found)
    assert len({tuple(half.tolist()) for half in found}) > 1
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn(1, 0) == []


@pytest.mark.parametrize("rollouts", [1, 2, 3, 8, 9, 64])
def test_any_two_rollouts_are_in_different_halves_and_there_are_as_few_as_can_be(rollouts: int) -> None:
    found = halves(rollouts)
    assert len(found) == (rollouts - 1).bit_length()
    assert len({tuple(half[i].item() for half in found) for i in range(rollouts)}) == rollouts


def test_the_rules_call_the_recorder_that_is_patched_here() -> None:
    """The plants above change `Recorder`: a rule that went around it would not be tested by them."""
    assert operations.Recorder is Recorder
