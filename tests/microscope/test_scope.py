"""The context itself: what it leaves behind, what it checks, what it refuses, and its sketch."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope import layers
from creditscope.microscope.scope import Microscope
from creditscope.microscope.sketch import Sketcher
from small_models import apart, batch, build, by_loop, gradient, grams, loop, objective, total


def state(model: nn.Module) -> list[Any]:
    """All that a context could leave behind, by identity where identity matters."""
    kept: list[Any] = []
    for name, module in model.named_modules():
        hooks = {key: dict(value) for key, value in vars(module).items() if key.endswith(("hooks", "with_kwargs"))}
        own = {key: id(value) for key, value in vars(module).items()}
        kept.append((name, module.forward, own, hooks, list(vars(module))))
    kept += [(name, id(p), p.requires_grad, dict(p._backward_hooks or {}), p._version, p.data_ptr())
             for name, p in model.named_parameters(remove_duplicate=False)]
    return kept


class Breaks(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


# Left behind.

@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_oss"])
@pytest.mark.parametrize("how", ["well", "forward fails", "backward fails", "nothing is done"])
def test_the_model_is_afterwards_what_it_was_before(family: str, how: str) -> None:
    model, (ids, credit) = build(family), batch()
    model.register_forward_pre_hook(lambda module, args: None)
    own = model.get_output_embeddings()
    own.forward = own.forward  # a forward of its own, as wrappers give
    before = state(model)
    try:
        with Microscope(model):
            assert state(model) != before
            if how == "forward fails":
                objective(model, ids, credit[:, :-1])
            elif how == "backward fails":
                Breaks.apply(objective(model, ids, credit)).backward()
            elif how == "well":
                objective(model, ids, credit).backward()
    except (RuntimeError, ZeroDivisionError):
        assert how.endswith("fails")
    else:
        assert not how.endswith("fails")
    assert state(model) == before


def test_a_failure_in_the_middle_of_a_layer_leaves_the_layers_parameters_in_place() -> None:
    class Fails(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad and not isinstance(self.weight, nn.Parameter):
                raise ZeroDivisionError("in a layer")
            return x * self.weight if self.weight.dim() == 1 else x @ self.weight

    for shape in ((4,), (4, 4)):
        model = nn.Sequential(nn.Linear(4, 4), Fails(shape)).double()
        before = state(model)
        with pytest.raises(ZeroDivisionError), Microscope(model):
            model(torch.ones(2, 4).double()).sum().backward()
        assert state(model) == before


def test_a_model_can_be_copied_pickled_and_measured_again_afterwards() -> None:
    model, (ids, credit) = build("llama"), batch()
    with Microscope(model) as scope:
        objective(model, ids, credit).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with Microscope(twin) as again:
            objective(twin, ids, credit).backward()
        assert torch.equal(again.gram, scope.gram)


def test_nothing_that_was_measured_holds_the_graph_or_the_models_activations() -> None:
    model, (ids, credit) = build("llama", tie_word_embeddings=True), batch()
    with Microscope(model) as scope:
        objective(model, ids, credit).backward()
    assert not scope.gram.requires_grad
    assert all(gram.grad_fn is None for gram in scope.layers.values())


# Reading.

def test_the_total_is_the_sum_over_layers_is_symmetric_and_its_entries_add_up_to_the_squared_gradient() -> None:
    model, (ids, credit) = build("qwen2"), batch()
    with Microscope(model) as scope:
        objective(model, ids, credit).backward()
    assert torch.allclose(scope.gram, torch.stack(list(scope.layers.values())).sum(0))
    assert torch.equal(scope.gram, scope.gram.T)
    assert torch.linalg.eigvalsh(scope.gram).min() > 0
    squared = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert float(scope.gram.sum()) == pytest.approx(squared, rel=1e-12)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert scope.checks[name].from_grad == pytest.approx(float(p.grad.square().sum()), rel=1e-9, abs=1e-25)


def test_two_readings_of_one_pass_are_equal_and_twice_the_credit_is_four_times_the_gram() -> None:
    model, (ids, credit) = build("llama"), batch()
    found = []
    for scale in (1, 1, 2):
        with Microscope(model) as scope:
            objective(model, ids, scale * credit).backward()
        found.append(scope.gram)
    assert torch.equal(found[0], found[1])
    assert apart(found[2], 4 * found[0]) <= 1e-14


# The self-check.

def test_a_head_used_besides_its_module_fails_the_self_check_by_name() -> None:
    model, (ids, credit) = build("llama"), batch()
    with pytest.raises(CreditscopeError, match=r"self-check failed for 'lm_head.weight'.*tolerance 1e-09") as caught, \
            Microscope(model):
        (objective(model, ids, credit) + model.lm_head.weight.square().sum()).backward()
    # Both numbers and how far they are apart are printed.
    assert re.search(r"Σ K = [\d.e+-]+, but ‖∇‖² = [\d.e+-]+ \(off by [\d.e+-]+", str(caught.value))


def test_a_gradient_that_an_engine_scales_fails_the_self_check_unless_the_tolerance_allows_it() -> None:
    model, (ids, credit) = build("llama"), batch()
    handle = model.model.norm.weight.register_hook(lambda g: g / 2)
    with pytest.raises(CreditscopeError, match=r"self-check failed for 'model.norm.weight'"), Microscope(model):
        objective(model, ids, credit).backward()
    with Microscope(model, tolerance=1.0) as scope:
        objective(model, ids, credit).backward()
    # ‖∇/2‖² = ΣK/4.
    check = scope.checks["model.norm.weight"]
    assert check.from_grad == pytest.approx(check.from_gram / 4)
    handle.remove()


def test_rounding_errors_are_far_below_the_tolerance_in_every_precision() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model, (ids, credit) = build("gpt2", dtype), batch()
            with Microscope(model) as scope:
                objective(model, ids, credit).backward()
            assert all(check.error < check.tolerance / 4 for check in scope.checks.values()), dtype


def fused(model: Any, ids: Tensor, credit: Tensor) -> Tensor:
    """A fused head: multiplies by lm_head.weight itself."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = F.linear(hidden, model.lm_head.weight)
    return (logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * credit).sum()


def test_an_uncovered_parameter_is_an_error_unless_allowed_by_name_and_then_lowers_the_coverage() -> None:
    model, (ids, credit) = build("llama"), batch()
    with pytest.raises(CreditscopeError, match=r"1 parameter\(s\) got a gradient.*'lm_head.weight'.*allow"), \
            Microscope(model):
        fused(model, ids, credit).backward()
    model.zero_grad()
    with Microscope(model, allow=["lm_head.*"]) as scope:
        fused(model, ids, credit).backward()
    squares = {name: float(p.grad.square().sum()) for name, p in model.named_parameters() if p.grad is not None}
    assert scope.coverage == pytest.approx(1 - squares["lm_head.weight"] / sum(squares.values()), rel=1e-9)
    assert "lm_head.weight" not in scope.layers
    rows = {name: g for name, g in by_loop(model, ids, credit).items() if name != "lm_head.weight"}
    assert apart(scope.gram, total(grams(rows))) <= 1e-12
    # A tied table is seen when it is looked up, but not when it is multiplied by.
    tied = build("llama", tie_word_embeddings=True)
    with pytest.raises(CreditscopeError, match=r"self-check failed for 'model.embed_tokens.weight'"), Microscope(tied):
        fused(tied, ids, credit).backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_of_a_module_that_is_run_again_used_besides_it_fails_the_self_check(autocast: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Centres()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x - x) + x @ self.inner.weight

    model, x = Both(), torch.randn(3, 5, 4)
    with torch.backends.mkldnn.flags(enabled=False), refuses("self-check failed for 'inner.weight'"), Microscope(model):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = model(x)
        out.float().square().sum().backward()
    assert model.inner.weight.grad is not None
    assert model.inner.weight.grad.any()


def test_when_all_that_is_trained_is_uncovered_that_is_said() -> None:
    model, (ids, credit) = build("llama"), batch()
    model.model.requires_grad_(False)
    with pytest.raises(CreditscopeError, match=r"'lm_head.weight'.*allow"), Microscope(model):
        fused(model, ids, credit).backward()
    with pytest.raises(CreditscopeError, match="nothing was measured"), Microscope(model, allow=["lm_head.weight"]):
        fused(model, ids, credit).backward()


# Bad use.

def refuses(words: str) -> Any:
    return pytest.raises(CreditscopeError, match=words)


def test_a_backward_after_the_context_is_refused() -> None:
    model, (ids, credit) = build("llama"), batch()
    with refuses("a forward ran inside the Microscope, but no backward"), Microscope(model):
        loss = objective(model, ids, credit)
    with refuses("backward ran after the Microscope was closed"):
        loss.backward()


@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])
def test_a_backward_whose_forward_ran_before_the_context_is_refused(checkpoint: bool) -> None:
    model, (ids, credit) = build("llama"), batch()
    if checkpoint:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    loss = objective(model, ids, credit)
    with refuses("its forward ran before the with block"), Microscope(model):
        loss.backward()


def test_two_backwards_in_one_context_are_refused_of_one_graph_or_of_two() -> None:
    model, (ids, credit) = build("llama"), batch()
    with refuses("two backward passes ran inside one Microscope"), Microscope(model):
        loss = objective(model, ids, credit)
        loss.backward(retain_graph=True)
        loss.backward()
    with refuses("two forward passes ran inside one Microscope"), Microscope(model):
        for _ in range(2):
            objective(model, ids, credit).backward()
    # Chosen and rejected answers in two calls: rollout i of each would be one row.
    with refuses("two forward passes ran inside one Microscope.*put them into one batch"), Microscope(model):
        (objective(model, ids, credit) - objective(model, ids.flip(0), credit)).backward()


def test_batches_of_two_shapes_in_one_context_are_refused() -> None:
    model, (ids, credit) = build("llama"), batch()
    with refuses(r"a batch of shape \(4, 9\) and then one of shape \(2, 9\)"), Microscope(model):
        loss = objective(model, ids, credit)
        with torch.no_grad():
            objective(model, ids[:2], credit[:2])
        loss.backward()


def test_reading_before_or_without_a_pass_is_refused() -> None:
    model, (ids, credit) = build("llama"), batch()
    scope = Microscope(model)
    for read in ("gram", "layers", "coverage", "checks", "sketch"):
        with refuses("nothing to read yet"):
            getattr(scope, read)
    with scope, refuses("nothing to read yet"):
        _ = scope.gram
    with scope:
        objective(model, ids, credit).backward()
        with refuses("read after the block has ended"):
            _ = scope.gram
    assert scope.gram.shape == (4, 4)
    with pytest.raises(ZeroDivisionError), scope:
        raise ZeroDivisionError
    with refuses("nothing to read yet"):  # not the numbers of the pass before
        _ = scope.gram


def test_a_microscope_does_not_nest_and_two_do_not_share_a_model() -> None:
    model, (ids, credit) = build("llama"), batch()
    with Microscope(model) as scope:
        with refuses("open already"), scope:
            pass
        for other in (model, model.model):
            with refuses("another Microscope is open on this model"), Microscope(other):
                pass
        objective(model, ids, credit).backward()
    later = Microscope(model)
    with scope:
        with refuses("another Microscope is open on this model"), later:
            pass
        objective(model, ids, credit).backward()
    assert apart(scope.gram, total(grams(by_loop(model, ids, credit)))) <= 1e-12


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), lambda: nn.BatchNorm1d(4, affine=False),
                                  lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(),
                                  lambda: nn.SyncBatchNorm(4)])
def test_batch_statistics_are_refused_also_without_parameters(make: Callable[[], nn.Module]) -> None:
    with refuses(r"1 \((Sync)?BatchNorm.*\) mixes the rows of a batch through its statistics"):
        Microscope(nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)))


def test_batch_norm_switched_to_training_after_the_microscope_was_made_is_refused_on_entry() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    scope = Microscope(model)
    model.train()
    with refuses("mixes the rows"), scope:
        pass


class Centres(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) @ self.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_module_that_mixes_rows_is_found_out_when_it_is_run_again(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Centres()).to(dtype), torch.randn(3, 5, 4).to(dtype)
    with torch.backends.mkldnn.flags(enabled=False), refuses("1 gives one rollout another result alone.*mixes rows"), \
            Microscope(model):
        model(x).float().square().sum().backward()


def test_dropout_in_a_module_that_is_run_again_is_found_out() -> None:
    model = build("gpt_oss", attention_dropout=0.5).train()
    ids, credit = batch()
    with refuses("mixes rows, or it is random. Turn dropout off"), Microscope(model):
        objective(model, ids, credit).backward()
    # Where nothing is run again, dropout is part of each row's own path and harmless.
    torch.manual_seed(0)
    plain = build("llama", attention_dropout=0.5).train()
    with Microscope(plain) as scope:
        objective(plain, ids, credit).backward()
    assert scope.coverage == 1.0


def test_a_key_value_cache_in_a_module_that_is_run_again_is_refused() -> None:
    model, (ids, _) = build("gpt_oss"), batch()
    with refuses("use_cache=False"), Microscope(model):
        model(input_ids=ids, use_cache=True).logits.sum().backward()


def test_a_module_without_tensors_or_with_results_not_laid_out_by_rows_is_refused() -> None:
    class Prompt(nn.Module):
        def __init__(self, called_with: bool) -> None:
            super().__init__()
            self.prompt, self.called_with = nn.Parameter(torch.ones(1, 4)), called_with

        def forward(self, *x: Tensor) -> Tensor:
            return self.prompt * 2

    class Model(nn.Module):
        def __init__(self, called_with: bool) -> None:
            super().__init__()
            self.prompt, self.line = Prompt(called_with), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x + (self.prompt(x) if self.prompt.called_with else self.prompt()))

    x = torch.randn(3, 4, dtype=torch.float64)
    for called_with, words in ((False, "prompt was called without a tensor"), (True, "prompt returns a tensor with")):
        model = Model(called_with).double()
        with refuses(words), Microscope(model):
            model(x).sum().backward()
        # The module around it is laid out by rows.
        want = loop(model, [lambda i=i, model=model: model(x[i:i + 1]).sum() for i in range(3)])
        with Microscope(model, slow=[""]) as scope:
            model(x).sum().backward()
        assert apart(scope.gram, total(grams(want))) <= 1e-12


def test_shuffled_tokens_are_refused_unless_the_module_around_them_is_measured_as_a_whole() -> None:
    class Routed(nn.Module):
        """Experts that see some tokens, in another order."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
            for expert, chosen in zip(self.experts, (flat[:, 0] > 0, flat[:, 0] <= 0), strict=True):
                out[chosen] = expert(flat[chosen])
            return out.view_as(x)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Routed()).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    with refuses(r"1.experts.0 got vectors with leading axes.*cannot be told.*slow"), Microscope(model):
        model(x).square().sum().backward()
    want = loop(model, [lambda i=i: model(x[i:i + 1]).square().sum() for i in range(3)])
    with Microscope(model, slow=["1"]) as scope:
        model(x).square().sum().backward()
    assert apart(scope.gram, total(grams(want))) <= 1e-12


def test_frozen_and_scattered_and_compiled_models_are_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with refuses("no trainable parameter"):
        Microscope(frozen)
    with refuses(r"several devices \(cpu, meta\)"):
        Microscope(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with refuses("the model is compiled"):
        Microscope(torch.compile(nn.Linear(2, 2)))  # type: ignore[arg-type]
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[1].compile()
    with refuses("1 is compiled"):
        Microscope(inner)
    by_hand = nn.Sequential(nn.Linear(2, 2))
    by_hand[0].forward = torch.compile(by_hand[0].forward)  # type: ignore[method-assign]
    with refuses("0 is compiled"):
        Microscope(by_hand)


def test_wrong_arguments_are_refused() -> None:
    model, (ids, credit) = build("llama"), batch()
    with refuses("exact=False leaves nothing to measure"):
        Microscope(model, exact=False)
    with refuses("not both"):
        Microscope(model, rows=torch.arange(4), segments=torch.zeros(4, 9).long())
    with refuses("slow names 'model.layer'"):
        Microscope(model, slow=["model.layer"])
    for owners, words in (({"rows": torch.arange(3)}, r"shape \(4,\), got \(3,\)"),
                          ({"rows": torch.tensor([0, 1, 3, 3])}, "without 2"),
                          ({"segments": torch.zeros(4, 8).long()}, r"shape \(4, 9\), got \(4, 8\)")):
        with refuses(words), Microscope(model, **owners):
            objective(model, ids, credit).backward()
    with Microscope(model, sketch=4, exact=False) as scope:
        objective(model, ids, credit).backward()
    with refuses("exact=False and has no exact Gram"):
        _ = scope.gram
    with Microscope(model) as scope:
        objective(model, ids, credit).backward()
    with refuses("keeps no sketch"):
        _ = scope.sketch


# The sketch.

@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma"])
def test_the_sketch_is_that_of_the_explicit_rows_with_or_without_the_exact_gram(family: str) -> None:
    model, (ids, credit) = build(family), batch()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sketcher = Sketcher(k=8, seed=3)
    want = sum(sketcher.dense(name, g.view(len(g), *shapes[name])) for name, g in by_loop(model, ids, credit).items())
    for exact in (True, False):
        model.zero_grad()
        with Microscope(model, sketch=Sketcher(k=8, seed=3), exact=exact) as scope:
            objective(model, ids, credit).backward()
        assert apart(scope.sketch.rows, want) <= 1e-12
        assert scope.coverage == 1.0
        plain = gradient(model, lambda: objective(model, ids, credit))
        assert all(p.grad is not None and apart(p.grad, plain[name]) <= 1e-6 for name, p in model.named_parameters())


def test_the_sketched_gram_is_as_far_from_the_exact_one_as_it_says() -> None:
    model, (ids, credit) = build("llama"), batch()
    errors, claims = [], []
    for seed in range(8):
        with Microscope(model, sketch=Sketcher(16, seed)) as scope:
            objective(model, ids, credit).backward()
        errors.append(float((scope.sketch.gram - scope.gram).norm() / scope.gram.norm()))
        claims.append(scope.sketch.relative_error)
    # Root mean square over seeds; eight of them know it to a quarter.
    rms, claimed = (torch.tensor(x).square().mean().sqrt() for x in (errors, claims))
    assert 0.5 < float(rms / claimed) < 2
    assert max(errors) < 0.5


def test_sketches_of_two_micro_batches_meet_in_one_gram() -> None:
    from creditscope.microscope.sketch import Sketch

    model, (ids, credit) = build("llama"), batch()
    parts = []
    for some in (slice(0, 1), slice(1, 4)):
        with Microscope(model, sketch=16, exact=False) as scope:
            objective(model, ids[some], credit[some]).backward()
        parts.append(scope.sketch)
    with Microscope(model, sketch=16) as scope:
        objective(model, ids, credit).backward()
    assert apart(Sketch.cat(parts).gram, scope.sketch.gram) <= 1e-12


def test_nobodys_positions_have_no_part_in_the_sketch() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(2, 4, 3, dtype=torch.float64)
    segments = torch.tensor([[0, 0, 1, -1], [-1, 2, 2, 2]])
    want = loop(model, [lambda i=i: model(x)[segments == i].square().sum() for i in range(3)])
    with Microscope(model, segments=segments, sketch=4) as scope:
        model(x)[segments >= 0].square().sum().backward()
    assert apart(scope.gram, total(grams(want))) <= 1e-12
    dense = sum(Sketcher(4).dense(name, g.view(3, *p.shape)) for (name, p), g in
                zip(model.named_parameters(), want.values(), strict=True))
    assert apart(scope.sketch.rows, dense) <= 1e-12


# Whose gradient it is.

def test_a_loss_of_one_rollout_proves_that_rows_are_not_mixed_and_a_mixed_loss_is_found() -> None:
    model, (ids, credit) = build("llama"), batch()
    alone = torch.zeros_like(credit)
    alone[2] = credit[2]
    with Microscope(model) as scope:
        objective(model, ids, alone).backward()
    scope.require_only(2)
    with refuses("the loss of rollout 1 alone has a gradient through rollout 2"):
        scope.require_only(1)
    model.zero_grad()
    with Microscope(model) as scope:
        logits = model(input_ids=ids, use_cache=False).logits
        ((logits[0] - logits.mean(dim=0)).square().sum()).backward()  # the batch's mean is in the loss of one row
    with refuses(r"the loss of rollout 0 alone has a gradient through rollout 1 \(\d+ such\).*the loss mixes rows"):
        scope.require_only(0)


def test_a_gradient_that_is_gone_before_the_block_has_ended_is_missed() -> None:
    model, (ids, credit) = build("llama"), batch()
    with refuses("is gone before the with block has ended.*zero_grad.. after the block"), Microscope(model):
        objective(model, ids, credit).backward()
        model.zero_grad()


def test_a_rule_found_once_is_remembered_found_anew_after_a_change_and_keeps_no_module_alive(
        monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    find = layers._find_rule

    def watched(module: nn.Module, *rest: Any) -> Any:
        tried.append(type(module).__name__)
        return find(module, *rest)

    monkeypatch.setattr(layers, "_find_rule", watched)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    Microscope(model)
    Microscope(model)
    assert tried == ["Linear", "LayerNorm"]
    model[1].bias.requires_grad_(False)
    Microscope(model)
    model[1].forward = model[1].forward  # a wrapper's forward is looked at each time
    Microscope(model)
    Microscope(model)
    assert tried[2:] == ["LayerNorm"] * 3
    alive = weakref.ref(model[1])
    del model
    gc.collect()
    assert alive() is None


# Found in review.

def test_without_grams_the_sketch_of_the_gradient_is_what_the_rows_sketches_must_add_up_to() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with Microscope(model, exact=False, sketch=8) as scope:
        model(x).square().sum().backward()
    (check,) = scope.checks.values()
    assert check.error < 1e-10
    assert check.from_gram == pytest.approx(check.from_grad, rel=1e-4)
    model.zero_grad()
    with refuses("sketches do not add up to the sketch of the gradient.*exact=True says which"), \
            Microscope(model, exact=False, sketch=8):
        (model(x).square().sum() + F.linear(x, model[1].weight[:, :4]).square().sum()).backward()


def test_a_subclass_of_linear_keeps_its_own_forward_and_arguments_may_be_named() -> None:
    class Clamped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.clamp(-2, 2))

    model, x = Clamped(4, 3).double(), 5 * torch.randn(3, 2, 4, dtype=torch.float64)
    plain = model(x)
    with Microscope(model) as scope:
        out = model(input=x)
        out.square().sum().backward()
    assert torch.equal(out, plain)
    want = torch.einsum("ntd,nto->nod", x.clamp(-2, 2), 2 * plain).flatten(1)
    assert torch.allclose(scope.layers["weight"], want @ want.T)


def test_a_gradient_that_is_not_finite_is_called_so() -> None:
    model = nn.Linear(2, 2)
    with refuses("the gradient of '(weight|bias)' is not finite.*overflowed, or the run has diverged"), \
            Microscope(model):
        (model(torch.ones(2, 2)) * torch.inf).sum().backward()


def test_as_many_picked_tokens_as_rows_are_not_taken_for_rows() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return h.sum() + self.expert(h.flatten(0, 1)[[0, 1, 2]]).square().sum()  # three tokens, all of row 0

    with refuses("expert got 3 vectors in a batch of 3 rows of 5 positions: whether.* cannot be told"), \
            Microscope(model := Picks()):
        model(torch.randn(3, 5, 4)).backward()
