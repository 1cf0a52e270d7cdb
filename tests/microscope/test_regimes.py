"""How trainers really call a model: checkpoints, accumulation, autocast, packing, padding, adapters, pieces of a model.

The reference is always one backward per rollout, in float64 unless a test is about precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope.scope import Microscope
from small_models import VOCAB, apart, batch, build, by_loop, gradient, grams, loop, objective, total, trainable

EXACT = 1e-12


def check(model: nn.Module, loss: Callable[[], Tensor], want: dict[str, Tensor], tolerance: float = EXACT,
          **kwargs: Any) -> Microscope:
    """Run the loss under the microscope; Grams must be those of the rows `want`, .grad their sum."""
    model.zero_grad(set_to_none=True)
    with Microscope(model, **kwargs) as scope:
        loss().backward()
    size = float(total(grams(want)).abs().max())
    for name, gram in scope.layers.items():
        assert float((gram - grams(want)[name]).abs().max()) <= tolerance * size, name
    # A parameter without a Gram has no gradient.
    assert all(not rows.any() for name, rows in want.items() if name not in scope.layers)
    largest = max(float(rows.sum(0).abs().max()) for rows in want.values())
    for name, p in trainable(model).items():
        if p.grad is not None:
            assert float((p.grad.flatten() - want[name].sum(0)).abs().max()) <= tolerance * largest, name
    assert scope.coverage == 1.0
    return scope


# Checkpoints.

@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "opt", "mixtral", "gpt_oss"])
def test_checkpointing_changes_no_number(family: str, reentrant: bool) -> None:
    model, (ids, credit) = build(family, attention_dropout=0.0), batch()
    want = by_loop(model, ids, credit)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    tolerance = 1e-7 if family == "gemma" else EXACT  # Gemma's norms are float32 inside
    check(model, lambda: objective(model, ids, credit), want, tolerance)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_tied_head_over_checkpoints_is_exact_also_when_gradients_accumulate(reentrant: bool) -> None:
    model, (ids, credit) = build("llama", tie_word_embeddings=True), batch()
    want = by_loop(model, ids, credit)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    check(model, lambda: objective(model, ids, credit), want)
    with Microscope(model) as scope:  # .grad holds the first pass now
        objective(model, ids, credit).backward()
    assert apart(scope.gram, total(grams(want))) <= EXACT


class Shared(nn.Module):
    """One linear layer, one norm and one table, each used twice, inside and outside a reentrant checkpoint."""

    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line, self.norm = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.line(self.table(ids))).tanh() + self.table(ids.flip(1))
        x = torch.utils.checkpoint.checkpoint(lambda x: self.norm(self.line(x)), x, use_reentrant=self.reentrant)
        return x @ torch.linspace(-1, 1, 8).to(x)


def test_layers_that_are_called_twice_add_their_calls_before_the_products() -> None:
    torch.manual_seed(0)
    model, (ids, credit) = Shared().double(), batch()
    model.reentrant = False
    want = loop(model, [lambda i=i: (model(ids[i:i + 1])[:, 1:] * credit[i]).sum() for i in range(4)])
    check(model, lambda: (model(ids)[:, 1:] * credit).sum(), want)
    model.reentrant = True
    check(model, lambda: (model(ids)[:, 1:] * credit).sum(), want)
    with Microscope(model) as scope:  # .grad holds the last pass, and a checkpoint delivers gradients in parts
        (model(ids)[:, 1:] * credit).sum().backward()
    assert apart(scope.gram, total(grams(want))) <= EXACT
    # Adding the Grams of the calls instead of the rows would be off: the cross terms are not small.
    model.reentrant = False
    apart_calls = nn.ModuleDict({"a": copy.deepcopy(model.line), "b": copy.deepcopy(model.line)})
    model.line.forward = lambda x: apart_calls["b" if x.grad_fn.name() == "AddBackward0" else "a"](x)
    pieces = loop(apart_calls, [lambda i=i: (model(ids[i:i + 1])[:, 1:] * credit[i]).sum() for i in range(4)])
    summed = grams(pieces)["a.weight"] + grams(pieces)["b.weight"]
    assert apart(summed, grams(want)["line.weight"]) > 1e-3


# Accumulation and steps.

def test_gradients_accumulate_over_contexts_and_each_context_has_its_own_gram() -> None:
    model, (ids, credit) = build("llama", tie_word_embeddings=True), batch(6)
    whole = gradient(model, lambda: objective(model, ids, credit))
    want, scope = by_loop(model, ids, credit), Microscope(model)
    for part in (slice(0, 2), slice(2, 6)):
        with scope:
            objective(model, ids[part], credit[part]).backward()
        rows = {name: g[part] for name, g in want.items()}
        assert apart(scope.gram, total(grams(rows))) <= EXACT
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, whole[name], atol=1e-12)


def test_five_steps_of_adamw_with_the_microscope_are_five_steps_without() -> None:
    (ids, credit), plain = batch(), build("llama", torch.float32)
    watched = copy.deepcopy(plain)
    scope = Microscope(watched)
    for model in (plain, watched):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            if model is watched:
                want = total(grams(by_loop(copy.deepcopy(watched).double(), ids, credit)))
                with scope:
                    objective(model, ids, credit).backward()
                assert apart(scope.gram, want) <= 1e-6  # each step's own weights, not those of the first
            else:
                objective(model, ids, credit).backward()
            optimizer.step()
    for one, two in zip(plain.parameters(), watched.parameters(), strict=True):
        # Adam divides by |g|, so a gradient near 0 turns roundings into steps: 5 steps of 1e-3 at most, far less here.
        assert torch.allclose(one, two, atol=1e-5)


def test_a_layer_frozen_or_thawed_between_two_contexts_is_measured_as_it_is_then() -> None:
    model, (ids, credit) = build("llama"), batch()
    scope = Microscope(model)
    model.lm_head.weight.requires_grad_(False)
    want = by_loop(model, ids, credit)
    with scope:
        objective(model, ids, credit).backward()
    assert "lm_head.weight" not in scope.layers
    assert apart(scope.gram, total(grams(want))) <= EXACT
    model.lm_head.weight.requires_grad_(True)
    with scope:
        objective(model, ids, credit).backward()
    assert scope.layers.keys() == dict(model.named_parameters()).keys()


# Precision.

@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_under_autocast_the_gram_is_that_of_the_same_loop_under_autocast(family: str) -> None:
    model, (ids, credit) = build(family, torch.float32), batch()
    with torch.backends.mkldnn.flags(enabled=False):
        def loss(some: slice = slice(None)) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return objective(model, ids[some], credit[some])

        want = loop(model, [lambda i=i: loss(slice(i, i + 1)) for i in range(4)])
        # Gradients of weights are float32 sums of bfloat16 products here, rounded to bfloat16 in torch: up to 2⁻⁸ each.
        scope = check(model, loss, want, tolerance=8e-3)
    assert apart(scope.gram, total(grams(want))) <= 1e-3
    assert scope.layers["lm_head.weight" if family != "gpt2" else "transformer.wte.weight"].dtype == torch.float64
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_layers_in_a_float32_model_are_measured_in_their_own_precision(half: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3).to(half)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)).to(half)).float()

    torch.manual_seed(0)
    model, x, c = Mixed(), torch.randn(4, 5, 6), torch.randn(4, 5, 3)
    with torch.backends.mkldnn.flags(enabled=False):
        want = loop(model, [lambda i=i: (model(x[i:i + 1]) * c[i]).sum() for i in range(4)])
        scope = check(model, lambda: (model(x) * c).sum(), want, tolerance=8e-3)
    assert apart(scope.layers["first.weight"], grams(want)["first.weight"]) <= 1e-6
    assert apart(scope.layers["last.weight"], grams(want)["last.weight"]) <= 2e-3
    assert scope.checks["last.weight"].tolerance > scope.checks["first.weight"].tolerance


# Which rollout a position belongs to.

def test_padding_on_either_side_changes_nothing() -> None:
    model, (ids, credit) = build("llama"), batch(4, 9)
    length = torch.tensor([9, 5, 7, 3])
    want = loop(model, [lambda i=i, n=int(n): objective(model, ids[i:i + 1, :n], credit[i:i + 1, :n - 1])
                        for i, n in enumerate(length)])
    on = torch.arange(9) < length[:, None]
    # Padding holds real tokens, so only the mask keeps it out.
    check(model, lambda: objective(model, ids, credit * on[:, 1:], attention_mask=on.long()), want)
    left_ids, left_credit = ids.clone(), torch.zeros_like(credit)
    for i, n in enumerate(length.tolist()):
        left_ids[i, 9 - n:], left_credit[i, 9 - n:] = ids[i, :n], credit[i, :n - 1]
    places = (on.flip(1).long().cumsum(1) - 1).clamp(min=0)
    check(model, lambda: objective(model, left_ids, left_credit, attention_mask=on.flip(1).long(), position_ids=places),
          want, tolerance=1e-10)


def packed(family: str, lengths: list[list[int]], gap: int = 0) -> tuple[Any, dict[str, Tensor], Callable[[], Tensor],
                                                                        Tensor]:
    """Sequences packed into rows: (model, the unpacked rows, the packed loss, segments)."""
    # Eager attention takes its softmax in float32, so a row's width would show.
    model = build(family, attn_implementation="eager" if family == "gpt_oss" else "sdpa")
    width = max(sum(row) + gap * len(row) for row in lengths)
    rows, starts = len(lengths), []
    ids, credit = batch(rows, width)
    segments, places = torch.full((rows, width), -1), torch.zeros(rows, width, dtype=torch.long)
    weight = torch.zeros_like(credit)
    for r, row in enumerate(lengths):
        at = 0
        for n in row:
            segments[r, at:at + n], places[r, at:at + n] = len(starts), torch.arange(n)
            weight[r, at:at + n - 1] = credit[r, at:at + n - 1]
            starts.append((r, at, n))
            at += n + gap
    same = (segments[:, None, :, None] == segments[:, None, None, :]) & torch.ones(width, width).tril().bool()
    mask = torch.zeros(same.shape, dtype=torch.float64).masked_fill(~same, torch.finfo(torch.float64).min)
    want = loop(model, [lambda r=r, some=slice(at, at + n): objective(
        model, ids[r:r + 1, some], credit[r:r + 1, some.start:some.stop - 1]) for r, at, n in starts])
    return model, want, lambda: objective(model, ids, weight, attention_mask=mask, position_ids=places), segments


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "phi"])
@pytest.mark.parametrize("gap", [0, 2], ids=["dense", "with gaps"])
def test_packed_rows_with_segments_give_the_unpacked_gram(family: str, gap: int) -> None:
    model, want, loss, segments = packed(family, [[4, 6], [3, 5, 2]], gap)
    assert (bool((segments == -1).any())) == (gap > 0)
    scope = check(model, loss, want, segments=segments)
    assert scope.gram.shape == (5, 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("gap", [0, 1], ids=["dense", "with gaps"])
def test_packed_experts_and_packed_attention_with_sinks_are_exact(family: str, gap: int) -> None:
    model, want, loss, segments = packed(family, [[4, 6], [3, 5, 2]], gap)
    # GPT-OSS takes its softmax in float32.
    check(model, loss, want, tolerance=1e-6 if family == "gpt_oss" else EXACT, segments=segments)


def test_segments_may_join_pieces_of_one_rollout_from_several_rows() -> None:
    model, want, loss, segments = packed("llama", [[4, 6], [3, 5, 2]])
    joined = torch.tensor([0, 1, 0, 2, 1])  # pieces 0 and 2 are rollout 0, pieces 1 and 4 rollout 1
    rows = {name: torch.stack([g[joined == i].sum(0) for i in range(3)]) for name, g in want.items()}
    check(model, loss, rows, segments=joined[segments])


@pytest.mark.slow
@pytest.mark.parametrize("owner", [[0, 0, 1, 1], [1, 0, 0, 0], [0, 2, 1, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_rows_of_one_rollout_are_added_before_the_products(owner: list[int], family: str) -> None:
    model, (ids, credit) = build(family), batch()
    single, owners = by_loop(model, ids, credit), torch.tensor(owner)
    want = {name: torch.stack([g[owners == i].sum(0) for i in range(max(owner) + 1)]) for name, g in single.items()}
    scope = check(model, lambda: objective(model, ids, credit), want, rows=owners)
    # K of the rollouts is M K Mᵀ with the (N, B) membership M.
    member = (owners == torch.arange(max(owner) + 1)[:, None]).double()
    assert apart(scope.gram, member @ total(grams(single)) @ member.T) <= EXACT


def test_a_row_that_belongs_to_nobody_is_left_out_when_it_has_no_credit_and_refused_when_it_has() -> None:
    model, (ids, credit) = build("llama"), batch()
    owners, silent = torch.tensor([0, -1, 1, 2]), credit * torch.tensor([1.0, 0, 1, 1])[:, None]
    want = {name: g[[0, 2, 3]] for name, g in by_loop(model, ids, credit).items()}
    check(model, lambda: objective(model, ids, silent), want, rows=owners)
    with pytest.raises(CreditscopeError, match="of no rollout"), Microscope(model, rows=owners):
        objective(model, ids, credit).backward()


def test_one_rollout_alone_has_a_gram_of_one_number_its_squared_norm() -> None:
    model, (ids, credit) = build("llama"), batch(1)
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    plain = gradient(model, lambda: objective(model, ids, credit))
    assert float(scope.gram) == pytest.approx(sum(float(g.square().sum()) for g in plain.values()), rel=1e-12)


def test_a_rollout_without_credit_has_a_row_of_zeros() -> None:
    model, (ids, credit) = build("gpt2"), batch()
    credit[2] = 0
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    assert not scope.gram[2].any()
    assert scope.gram[1, 1] > 0


# The loss may mix rows; the model may not.

def test_a_loss_that_mixes_rows_is_read_as_its_credit_times_each_rows_own_scores() -> None:
    # J = log mean_i exp(s_i) − std(s), s_i = Σ_t log π_it: ∂J/∂s_i depends on all rows. The rows are
    # g_i = Σ_t w_it ∇log π_it with w = ∂J/∂log π, taken as numbers; they add up to the gradient of J.
    model, (ids, _) = build("llama"), batch()

    def mixed(logp: Tensor) -> Tensor:
        s = logp.sum(1)
        return s.logsumexp(0) - s.std()

    def chosen() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)

    logp = chosen().detach().requires_grad_()
    (credit,) = torch.autograd.grad(mixed(logp), logp)
    want = by_loop(model, ids, credit)
    check(model, lambda: mixed(chosen()), want)
    plain = gradient(model, lambda: mixed(chosen()))
    assert all(torch.allclose(want[name].sum(0), g.flatten(), atol=1e-12) for name, g in plain.items())


def test_a_loss_on_one_row_alone_gives_one_row_alone() -> None:
    # The isolation test: what any mixing inside a model, or a wrong owner of a position, would break.
    for family in ("llama", "gpt2", "opt", "mixtral"):
        model, (ids, credit) = build(family), batch()
        with Microscope(model) as scope:
            objective(model, ids, credit * (torch.arange(4) == 2)[:, None]).backward()
        for name, gram in scope.layers.items():
            others = gram.clone()
            others[2, 2] = 0
            assert not others.any(), name


# Adapters.

def adapted(family: str = "llama", **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = build(family)
    targets = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM",
                             fan_in_fan_out=family == "gpt2", **changes)
    wrapped = peft.get_peft_model(model, config).double().eval()
    torch.manual_seed(1)
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:  # zeros at the start, so lora_A would have no gradient
            p.data = torch.randn_like(p)
    return wrapped


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_adapters_on_a_frozen_model_only_adapters_are_measured(family: str) -> None:
    model, (ids, credit) = adapted(family), batch()
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    assert scope.layers.keys() == trainable(model).keys()
    assert all("lora_" in name for name in scope.layers)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_adapters_over_checkpoints_are_exact(reentrant: bool) -> None:
    model, (ids, credit) = adapted(), batch()
    want = by_loop(model, ids, credit)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    check(model, lambda: objective(model, ids, credit), want)


def test_a_trainable_bias_on_a_frozen_weight_is_measured_beside_the_adapters() -> None:
    model, (ids, credit) = adapted("gpt2", bias="all"), batch()
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    assert any(name.endswith("c_fc.bias") for name in scope.layers)
    assert not any(name.endswith("c_fc.weight") for name in scope.layers)


def test_adapters_with_a_magnitude_and_trained_embeddings_are_exact() -> None:
    # DoRA's magnitude module computes with the adapters' weights, which lie outside it.
    model, (ids, credit) = adapted(use_dora=True, modules_to_save=["embed_tokens", "lm_head"]), batch()
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    kinds = ("lora_magnitude_vector", "lora_A", "embed_tokens", "lm_head")
    assert all(any(kind in name for name in scope.layers) for kind in kinds)


def test_adapters_of_the_embedding_are_exact() -> None:
    peft, (ids, credit) = pytest.importorskip("peft"), batch()
    config = peft.LoraConfig(r=3, target_modules=["embed_tokens", "o_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(build("llama"), config).double().eval()
    for p in trainable(model).values():
        p.data = torch.randn_like(p)
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    assert any("lora_embedding_A" in name for name in scope.layers)


# Pieces of a model.

def test_the_head_may_be_called_on_some_positions_in_pieces_or_by_hand() -> None:
    model, (ids, credit) = build("llama"), batch()
    late = credit.clone()
    late[:, :4] = 0  # the loss is on the last four predictions

    def by_keeping() -> Tensor:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=5).logits[:, :-1]
        return (logits.log_softmax(-1).gather(2, ids[:, 5:, None]).squeeze(2) * late[:, 4:]).sum()

    check(model, by_keeping, by_loop(model, ids, late))

    def by_chunks() -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = torch.cat([model.lm_head(some) for some in hidden.split(3, dim=1)], dim=1)
        return (logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * credit).sum()

    check(model, by_chunks, by_loop(model, ids, credit))
    tied = build("llama", tie_word_embeddings=True)
    model = tied
    check(model, by_chunks, by_loop(model, ids, credit))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_the_model_may_be_given_embeddings_instead_of_ids(tie: bool) -> None:
    model, (ids, credit) = build("llama", tie_word_embeddings=tie), batch()

    def loss(some: slice = slice(None), keep: bool = True) -> Tensor:
        embeds = model.get_input_embeddings()(ids[some])
        logits = model(inputs_embeds=embeds if keep else embeds.detach(), use_cache=False).logits
        return (logits[:, :-1].log_softmax(-1).gather(2, ids[some, 1:, None]).squeeze(2) * credit[some]).sum()

    for keep in (True, False):
        want = loop(model, [lambda i=i, keep=keep: loss(slice(i, i + 1), keep) for i in range(4)])
        check(model, lambda keep=keep: loss(keep=keep), want)


def test_frozen_embeddings_and_a_frozen_layer_are_left_out() -> None:
    model, (ids, credit) = build("llama"), batch()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    assert not any("layers.0" in name or "embed" in name for name in scope.layers)


def test_a_pass_without_gradient_inside_the_context_changes_nothing() -> None:
    model, (ids, credit) = build("llama"), batch()
    want = by_loop(model, ids, credit)

    def loss() -> Tensor:
        with torch.no_grad():
            objective(model, ids, credit)
        return objective(model, ids, credit)

    check(model, loss, want)


def test_a_layer_that_is_frozen_in_part_is_measured_in_its_other_part() -> None:
    model, (ids, credit) = build("llama"), batch()
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    model.model.layers[1].input_layernorm.weight.requires_grad_(False)
    scope = check(model, lambda: objective(model, ids, credit), by_loop(model, ids, credit))
    assert "model.layers.1.mlp.up_proj.weight" not in scope.layers
    assert "model.layers.1.mlp.down_proj.weight" in scope.layers


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_the_heads_weight_may_be_multiplied_by_outside_its_module(tie: bool) -> None:
    # As fused losses do: the head's module is never called.
    model, (ids, credit) = build("llama", tie_word_embeddings=tie), batch()

    def loss() -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = F.linear(hidden, model.lm_head.weight)
        return (logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * credit).sum()

    check(model, loss, by_loop(model, ids, credit))


def test_the_loss_may_pick_the_tokens_of_completions_before_the_head() -> None:
    model, (ids, credit) = build("llama"), batch()
    on = torch.arange(8)[None] >= torch.tensor([0, 3, 5, 7])[:, None]

    def loss() -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[on])
        return (logits.log_softmax(-1).gather(1, ids[:, 1:][on][:, None]).squeeze(1) * credit[on]).sum()

    check(model, loss, by_loop(model, ids, credit * on))


def test_a_reward_head_on_the_last_token_is_exact() -> None:
    model, (ids, _) = build("llama"), batch()
    score = nn.Linear(32, 1).double()
    both = nn.ModuleDict({"model": model.model, "score": score})

    def loss(some: slice = slice(None)) -> Tensor:
        return score(model.model(input_ids=ids[some], use_cache=False).last_hidden_state[:, -1]).sigmoid().sum()

    check(both, loss, loop(both, [lambda i=i: loss(slice(i, i + 1)) for i in range(4)]))
