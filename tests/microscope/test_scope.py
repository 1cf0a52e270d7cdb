"""The context itself: what it leaves behind, what it checks, what it refuses, and its sketch."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from creditscope import CreditscopeError
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

@pytest.mark.slow
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


def test_a_failure_in_the_middle_of_a_layer_leaves_no_mode_open_and_the_model_as_it_was() -> None:
    class Fails(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.weight if self.weight.dim() == 1 else x @ self.weight
            raise ZeroDivisionError(f"in a layer, after {out.shape}")

    for shape in ((4,), (4, 4)):
        model = nn.Sequential(nn.Linear(4, 4), Fails(shape)).double()
        before = state(model)
        with pytest.raises(ZeroDivisionError), Microscope(model):
            model(torch.ones(2, 4).double()).sum().backward()
        assert state(model) == before
        assert _get_current_function_mode_stack() == []


def test_a_mode_that_was_opened_inside_and_is_open_still_stays_open() -> None:
    class Quiet(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, mode = nn.Linear(4, 2), Quiet()
    scope = Microscope(model)
    scope.__enter__()
    mode.__enter__()
    try:
        model(torch.ones(2, 4)).sum().backward()
        scope.__exit__(None, None, None)
        assert _get_current_function_mode_stack() == [mode]
    finally:
        mode.__exit__(None, None, None)
    assert scope.coverage == 1


def test_making_a_microscope_runs_no_module_moves_no_random_state_and_changes_no_buffer() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return F.dropout(super().forward(x))

    model, random = nn.Sequential(Counts(), nn.LayerNorm(4)).train(), torch.get_rng_state()
    before = state(model)
    scope = Microscope(model, sketch=4)
    assert (float(model[0].calls), state(model)) == (0, before)
    assert torch.equal(torch.get_rng_state(), random)
    with scope:
        model(torch.ones(2, 3, 4)).sum().backward()
    assert float(model[0].calls) == 1


def test_random_numbers_and_results_are_those_of_the_same_pass_without_the_microscope() -> None:
    found = []
    for watched in (False, True):
        model, (ids, credit) = build("gpt2", torch.float32, resid_pdrop=0.3, attn_pdrop=0.3).train(), batch()
        torch.manual_seed(3)
        with Microscope(model) if watched else contextlib.nullcontext():
            loss = objective(model, ids, credit)
            loss.backward()
        found.append((loss.detach(), torch.rand(3), {n: p.grad.clone() for n, p in model.named_parameters()}))
    (plain, number, grads), (loss, same, under) = found
    assert torch.equal(loss, plain)
    assert torch.equal(same, number)
    largest = max(float(g.abs().max()) for g in grads.values())
    assert all(float((under[n] - g).abs().max()) <= 1e-6 * largest for n, g in grads.items())


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """gc passes over what there was before the test: a million objects of torch and transformers."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_microscope_keeps_no_activation_and_its_model_alive_only_as_long_as_itself(only_new_objects: None) -> None:
    model, gone = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), []
    alive = weakref.ref(model[1])
    model[0].register_forward_hook(lambda module, args, out: gone.append(weakref.ref(out)))
    with Microscope(model) as scope:
        model(torch.ones(2, 3, 4)).square().sum().backward()
    gc.collect()
    assert [ref() for ref in gone] == [None]
    del model, scope
    gc.collect()
    assert alive() is None


def test_the_parts_of_a_model_may_be_called_one_by_one_unless_their_input_is_made_inside() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    want = loop(model, [lambda i=i: model(x[i:i + 1]).sin().sum() for i in range(3)])
    with Microscope(model) as scope:
        model[1](model[0](x)).sin().sum().backward()
    assert apart(scope.gram, total(grams(want))) <= 1e-12
    # Whether a tensor that was made inside holds rows cannot be told, unless the model itself is given it.
    model.zero_grad()
    with refuses("no forward of the model with rows.*call the model itself"), Microscope(model):
        model[1](model[0](torch.tensor(x.tolist(), dtype=torch.float64))).sin().sum().backward()
    model.zero_grad()
    with Microscope(model) as scope:
        model(torch.tensor(x.tolist(), dtype=torch.float64)).sin().sum().backward()
    assert apart(scope.gram, total(grams(want))) <= 1e-12


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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["well", "checkpointed", "checkpointed, reentrant", "torch.autograd.backward",
                                 "one Microscope", "refused", "backward fails"])
def test_passes_leave_no_tensor_behind(how: str, only_new_objects: None) -> None:
    model, (ids, credit) = build("llama"), batch()
    if "checkpointed" in how:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": "reentrant" in how})
    if how == "refused":
        model.lm_head.weight.register_hook(lambda g: g / 2)
    kept = Microscope(model) if how == "one Microscope" else None

    def step() -> int:
        with contextlib.suppress(CreditscopeError, ZeroDivisionError), kept or Microscope(model):
            loss = objective(model, ids, credit)
            loss = Breaks.apply(loss) if how == "backward fails" else loss
            torch.autograd.backward(loss) if how == "torch.autograd.backward" else loss.backward()
        del loss
        model.zero_grad()
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    step()
    before = step()
    assert [step() - before for _ in range(3)] == [0, 0, 0]


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

class Own(torch.autograd.Function):
    """h Wᵀ by a kernel of the trainer's own: torch's calls do not show it."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return torch.from_numpy(h.numpy(force=True) @ weight.numpy(force=True).T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        h, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ h.flatten(0, 1)


def test_a_penalty_on_a_weight_belongs_to_no_rollout_and_is_refused_by_name() -> None:
    model, (ids, credit) = build("llama"), batch()
    with refuses(r"1 parameter\(s\) got a gradient.*cannot split into rows, first 'lm_head.weight'"), Microscope(model):
        (objective(model, ids, credit) + model.lm_head.weight.square().sum()).backward()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_head_used_besides_in_a_kernel_is_refused_by_name_unless_it_is_allowed(allowed: bool) -> None:
    model, (ids, credit) = build("llama"), batch()
    one = torch.ones(1, 1, 32, dtype=torch.float64)
    with contextlib.nullcontext() if allowed else refuses(
            r"1 parameter\(s\) got a gradient that the microscope cannot split into rows, first 'lm_head.weight': no "
            r"torch call that uses it was seen, but OwnBackward does. Name it in allow=\['lm_head.weight'\]"), \
            Microscope(model, allow=["lm_head.*"] if allowed else []) as scope:
        (objective(model, ids, credit) + Own.apply(one, model.lm_head.weight).square().sum()).backward()
    if allowed:  # what was seen of it is not all of it
        assert "lm_head.weight" not in scope.layers


def test_a_gradient_that_an_engine_scales_fails_the_self_check() -> None:
    model, (ids, credit) = build("llama"), batch()
    handle = model.model.norm.weight.register_hook(lambda g: g / 2)
    with refuses(r"self-check failed for 'model.norm.weight'.*tolerance 1e-09") as caught, Microscope(model):
        objective(model, ids, credit).backward()
    # Both numbers and how far they are apart are printed: ‖∇/2‖² = ΣK/4.
    told = re.search(r"Σ K = ([\d.e+-]+), but ‖∇‖² = ([\d.e+-]+) \(off by [\d.e+-]+", str(caught.value))
    assert told is not None
    assert float(told[2]) == pytest.approx(float(told[1]) / 4, rel=1e-4)
    handle.remove()


def test_rounding_errors_are_far_below_the_tolerance_in_every_precision() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model, (ids, credit) = build("gpt2", dtype), batch()
            with Microscope(model) as scope:
                objective(model, ids, credit).backward()
            assert all(check.error < check.tolerance / 4 for check in scope.checks.values()), dtype


def fused(model: Any, ids: Tensor, credit: Tensor) -> Tensor:
    """A fused head: multiplies by lm_head.weight in a kernel."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = Own.apply(hidden, model.lm_head.weight)
    return (logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * credit).sum()


def test_an_uncovered_parameter_is_an_error_unless_allowed_by_name_and_then_lowers_the_coverage() -> None:
    model, (ids, credit) = build("llama"), batch()
    with pytest.raises(CreditscopeError, match=r"1 parameter\(s\) got a gradient that the microscope cannot split into "
                                               r"rows, first 'lm_head.weight': no torch call.*"
                                               r"Name it in allow=\['lm_head.weight'\]"), Microscope(model):
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
    with refuses("first 'model.embed_tokens.weight': no torch call that uses it was seen, but OwnBackward does"), \
            Microscope(tied):
        fused(tied, ids, credit).backward()


def test_a_parameter_that_is_refused_in_one_place_has_no_part_in_the_gram_when_it_is_allowed() -> None:
    # What is known of its rows is not all of them.
    model = nn.Sequential(nn.Linear(4, 4), Centres(rows=True)).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    with refuses(r"first '1.weight': .*(gives one rollout another result alone|made of several rollouts)"), \
            Microscope(model):
        model(x).square().sum().backward()
    model.zero_grad()
    with Microscope(model, allow=["1.weight"]) as scope:
        model(x).square().sum().backward()
    assert set(scope.layers) == {"0.weight", "0.bias"}
    assert 0 < scope.coverage < 1


@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_used_in_its_module_and_besides_is_exact(autocast: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).tanh() + x @ self.inner.weight

    torch.manual_seed(0)
    model, x = Both(), torch.randn(3, 5, 4)

    def loss(some: slice = slice(None)) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = model(x[some])
        return out.float().square().sum()

    with torch.backends.mkldnn.flags(enabled=False):
        want = loop(model, [lambda i=i: loss(slice(i, i + 1)) for i in range(3)])
        with Microscope(model) as scope:
            loss().backward()
    # A bfloat16 gradient is rounded by up to 2⁻⁸ per entry, a float32 one by 2⁻²⁴.
    assert apart(scope.gram, total(grams(want))) <= (8e-3 if autocast else 1e-6)


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
    with refuses("no forward of the model with rows: it ran before the with block"), Microscope(model):
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
    """Subtracts the mean over the batch: before its product, or in one operation with it."""

    def __init__(self, rows: bool = False) -> None:
        super().__init__()
        self.weight, self.rows = nn.Parameter(torch.ones(4, 4)), rows

    def forward(self, x: Tensor) -> Tensor:
        if not self.rows:
            return (x - x.mean(0)) @ self.weight
        mixing = torch.eye(len(x)).to(x) - 1 / len(x)
        return x @ self.weight + torch.einsum("bc,ctd,df->btf", mixing, x, self.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_operation_that_mixes_rows_is_found_out_when_it_is_run_again(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Centres(rows=True)).to(dtype), torch.randn(3, 5, 4).to(dtype)
    with torch.backends.mkldnn.flags(enabled=False), \
            refuses("first '1.weight': einsum with '1.weight' gives one rollout another result alone"), \
            Microscope(model):
        model(x).float().square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_that_meets_an_activation_made_of_several_rollouts_is_refused(dtype: torch.dtype) -> None:
    # The product itself mixes nothing: each vector x − mean has rows, but they are not its rollout's alone.
    model, x = nn.Sequential(nn.Linear(4, 4), Centres()).to(dtype), torch.randn(3, 5, 4).to(dtype)
    with torch.backends.mkldnn.flags(enabled=False), refuses("first '1.weight': .*made of several rollouts"), \
            Microscope(model):
        model(x).float().square().sum().backward()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_dropout_is_part_of_each_rows_own_path_and_harmless(family: str) -> None:
    model, (ids, credit) = build(family, attention_dropout=0.5).train(), batch()

    def loss(weight: Tensor) -> Tensor:
        torch.manual_seed(5)
        return objective(model, ids, credit * weight[:, None])

    want = loop(model, [lambda i=i: loss(torch.eye(4)[i]) for i in range(4)])
    with Microscope(model) as scope:
        loss(torch.ones(4)).backward()
    assert apart(scope.gram, total(grams(want))) <= 1e-12


def test_a_key_value_cache_changes_nothing() -> None:
    for family in ("llama", "gpt_oss"):
        model, (ids, credit) = build(family), batch()
        with Microscope(model) as scope:
            logits = model(input_ids=ids, use_cache=True).logits
            (logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * credit).sum().backward()
        assert apart(scope.gram, total(grams(by_loop(model, ids, credit)))) <= 1e-12


@pytest.mark.slow
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
    with pytest.raises(TypeError, match="unexpected keyword argument 'slow'"):
        Microscope(model, slow=["model.layer"])  # type: ignore[call-arg]
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

@pytest.mark.slow
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


@pytest.mark.slow
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
    with refuses("first '1.weight': no torch call that uses it was seen, but OwnBackward does"), \
            Microscope(model, exact=False, sketch=8):
        (model(x).square().sum() + Own.apply(torch.ones(1, 1, 5), model[1].weight).square().sum()).backward()
    model.zero_grad()
    model[1].weight.register_hook(lambda g: g / 2)  # it changes what arrives, not the rows
    with refuses("sketches do not add up to the sketch of the gradient.*exact=True says which"), \
            Microscope(model, exact=False, sketch=8):
        model(x).square().sum().backward()
    model.zero_grad()
    with refuses("self-check failed for '1.weight'"), Microscope(model):
        model(x).square().sum().backward()


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


def unseen(loss: Tensor, weights: list[Tensor]) -> None:
    """A backward that the watch does not see: the rules themselves have to refuse it."""
    with torch._C.DisableTorchFunction():
        torch.autograd.grad(loss, weights, create_graph=True)


@pytest.mark.parametrize("asked", [lambda loss, weights: torch.autograd.grad(loss, weights, create_graph=True),
                                   lambda loss, weights: torch.autograd.grad(loss, weights, None, True, True), unseen])
def test_a_backward_that_is_to_be_differentiated_again_is_refused_however_it_is_asked_for(asked: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    with pytest.raises(CreditscopeError, match="one plain backward pass"), Microscope(model):
        asked(model(torch.randn(4, 3)).square().sum(), list(model.parameters()))
