"""The token matrix: twins against explicit per-token gradients of small models in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from creditscope import CreditscopeError
from creditscope.microscope.tokens import lanczos, token_energy, token_gram_head, token_spectrum
from each import each

LogProbs = Callable[[dict[str, Tensor]], Tensor]


def llama(attention: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, attn_implementation=attention,
        tie_word_embeddings=False)).double().eval()


def gpt2(attention: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=32, attn_implementation=attention, bos_token_id=0,
        eos_token_id=0)).double().eval()


def batch(model: nn.Module) -> tuple[LogProbs, dict[str, Tensor], Tensor]:
    """Two rollouts of six tokens, the second padded by one: log-probs of the nine tokens that count, θ and w."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 23, (2, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5] = 0

    def logp_fn(params: dict[str, Tensor]) -> Tensor:
        logits = functional_call(model, params, (ids,), {"attention_mask": mask, "use_cache": False}).logits
        logp = logits[:, :-1].log_softmax(dim=-1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.as_tensor(logp[mask[:, 1:].bool()])

    w = torch.randn(9, dtype=torch.float64, generator=generator)
    return logp_fn, dict(model.named_parameters()), w


def explicit(logp_fn: LogProbs, params: dict[str, Tensor], w: Tensor) -> Tensor:
    """(n, P) the token rows themselves, a backward each."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    rows = []
    for t, logp in enumerate(logp_fn(leaves)):
        grads = torch.autograd.grad(logp, list(leaves.values()), retain_graph=True, materialize_grads=True)
        rows.append(w[t] * torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


# The head alone.

def head_inputs(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head weight and chosen tokens of `batch`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 23, (2, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5] = 0
    with torch.no_grad():
        states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
    kept = mask[:, 1:].bool()
    return states[:, :-1][kept], model.get_output_embeddings().weight, ids[:, 1:][kept]  # type: ignore[operator]


def test_the_heads_gram_by_hand() -> None:
    # Two words, W = 0: π = ½, δ = (½, −½) for word 0 and (−½, ½) for word 1, δ·δ' = ±½.
    # h = 2, 1, 1 and w = 1, 3, 1: K₀₁ = 1·3·(2·1)·(−½) = −3.
    k = token_gram_head(torch.tensor([[2.0], [1.0], [1.0]]), torch.zeros(2, 1), torch.tensor([0, 1, 0]),
                        torch.tensor([1.0, 3.0, 1.0]))
    assert k.tolist() == [[2.0, -3.0, 1.0], [-3.0, 4.5, -1.5], [1.0, -1.5, 0.5]]


@given(st.integers(1, 9), st.integers(2, 30), st.integers(1, 33), st.floats(.3, 3.), st.booleans(), st.integers(0, 99))
def test_the_heads_gram_is_that_of_explicit_gradients(n: int, vocabulary: int, chunk: int, temperature: float,
                                                      biased: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    h, w = torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)
    y = torch.randint(0, vocabulary, (n,), generator=g)
    params = {"weight": torch.randn(vocabulary, 4, generator=g, dtype=torch.float64)}
    if biased:
        params["bias"] = torch.randn(vocabulary, generator=g, dtype=torch.float64)

    def logp_fn(p: dict[str, Tensor]) -> Tensor:
        return (nn.functional.linear(h, p["weight"], p.get("bias")) / temperature).log_softmax(-1).gather(
            1, y[:, None])[:, 0]

    rows = explicit(logp_fn, params, w)
    found = token_gram_head(h, params["weight"], y, w, params.get("bias"), temperature, chunk)
    assert torch.allclose(found, rows @ rows.T)


def test_a_llamas_head_gram_is_its_heads_and_sums_to_the_heads_gradient() -> None:
    model = llama()
    logp_fn, params, w = batch(model)
    hidden, weight, tokens = head_inputs(model)
    k = token_gram_head(hidden, weight, tokens, w, chunk=5)
    rows = explicit(logp_fn, {"lm_head.weight": params["lm_head.weight"]}, w)
    assert torch.allclose(k, rows @ rows.T, rtol=1e-5, atol=1e-8)
    assert float(k.sum()) == pytest.approx(float(rows.sum(dim=0).square().sum()), rel=1e-5)


def test_the_head_alone_is_not_the_model() -> None:
    # It is a part: K − K_head is a Gram too, of all the other parameters. But it holds half of the energy here, and two
    # tokens may agree in the head and disagree below it.
    model = llama()
    logp_fn, params, w = batch(model)
    head, rows = token_gram_head(*head_inputs(model), w), explicit(logp_fn, params, w)
    whole = rows @ rows.T
    assert float(torch.linalg.eigvalsh(whole - head)[0]) > -1e-9
    assert float(head.trace() / whole.trace()) < 0.9
    of_head, of_whole = (k / torch.outer(k.diag(), k.diag()).sqrt() for k in (head, whole))
    assert float((of_head - of_whole).abs().max()) > 0.1
    assert token_spectrum(logp_fn, params, w, k=1).values[0] > 1.1 * float(torch.linalg.eigvalsh(head)[-1].sqrt())


# The whole model.

@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_leading_values_are_those_of_explicit_rows(make: Callable[[str], nn.Module], attention: str) -> None:
    logp_fn, params, w = batch(make(attention))
    rows = explicit(logp_fn, params, w)
    found = token_spectrum(logp_fn, params, w, k=4)
    # A Llama's norms and softmax work in float32 whatever its weights, hence 1e-5.
    assert np.allclose(found.values, torch.linalg.svdvals(rows)[:4].numpy(), rtol=1e-5)
    assert found.converged.all()
    assert found.tokens == 9


def test_a_padding_row_of_the_embedding_is_treated_as_the_trainers_backward_treats_it() -> None:
    # Autograd gives no gradient to an embedding's `padding_idx` row, forward-mode differentiation moves it: with a tied
    # head, and the padding token among the inputs (as when it is the end token too), the two are not transposes.
    torch.manual_seed(0)
    embedding = nn.Embedding(5, 4, padding_idx=0).double()
    with torch.no_grad():
        embedding.weight[0] = 1.0
    ids, y = torch.tensor([0, 1, 2, 0, 3]), torch.tensor([1, 2, 0, 3, 4])

    def logp_fn(p: dict[str, Tensor]) -> Tensor:
        logits = functional_call(embedding, p, (ids,)).tanh() @ p["weight"].T
        return logits.log_softmax(-1).gather(1, y[:, None])[:, 0]

    params, w = dict(embedding.named_parameters()), torch.ones(5, dtype=torch.float64)
    found = token_spectrum(logp_fn, params, w, k=5)
    assert np.allclose(found.values, torch.linalg.svdvals(explicit(logp_fn, params, w)).numpy(), atol=1e-8)


def mlp(n: int = 40) -> tuple[LogProbs, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    x, y, w = torch.randn(n, 6, dtype=torch.float64), torch.randint(0, 5, (n,)), torch.randn(n, dtype=torch.float64)
    return (lambda p: functional_call(model, p, (x,)).log_softmax(-1).gather(1, y[:, None])[:, 0],
            dict(model.named_parameters()), w)


def test_few_products_give_the_leading_values_and_the_residuals_bound_their_error() -> None:
    logp_fn, params, w = mlp()
    truth = torch.linalg.svdvals(explicit(logp_fn, params, w)).numpy()
    for steps in (3, 5, 8, 12):
        found = token_spectrum(logp_fn, params, w, k=3, steps=steps)
        assert found.matvecs <= steps
        assert (found.values <= truth[:3] + 1e-9).all()
        for value, residual in zip(found.values, found.residuals, strict=True):
            assert np.abs(truth - value).min() <= residual + 1e-9
    assert token_spectrum(logp_fn, params, w, k=3, steps=3).converged.tolist()[2] is False
    enough = token_spectrum(logp_fn, params, w, k=3, tolerance=1e-8)
    assert enough.converged.all()
    assert enough.matvecs < 40
    assert np.allclose(enough.values, truth[:3])


def test_all_values_are_exact_when_every_token_has_had_its_step() -> None:
    logp_fn, params, w = mlp(12)
    found = token_spectrum(logp_fn, params, w, k=12)
    truth = torch.linalg.svdvals(explicit(logp_fn, params, w)).numpy()
    assert np.allclose(found.values, truth, atol=1e-6 * truth[0])
    assert found.matvecs == 12


def test_tokens_without_credit_are_left_out() -> None:
    logp_fn, params, w = mlp(20)
    w[5:] = 0
    found = token_spectrum(logp_fn, params, w, k=5)
    assert found.tokens == 5
    assert np.allclose(found.values, torch.linalg.svdvals(explicit(logp_fn, params, w)[:5]).numpy())
    with pytest.raises(CreditscopeError, match="1 ≤ k ≤ 5, the number of tokens with credit, got k = 6"):
        token_spectrum(logp_fn, params, w, k=6)


def test_some_layers_can_be_looked_at_alone() -> None:
    logp_fn, params, w = mlp()
    some = {name: p for name, p in params.items() if name.startswith("0.")}
    whole = torch.linalg.svdvals(explicit(logp_fn, params, w))[:2].numpy()
    part = torch.linalg.svdvals(explicit(logp_fn, some, w))[:2].numpy()
    assert np.allclose(token_spectrum(logp_fn, some, w, k=2).values, part)
    assert (part < whole - 1e-3).all()
    unused = {**params, "critic.weight": torch.ones(3, dtype=torch.float64)}
    found = token_spectrum(lambda p: logp_fn({name: p[name] for name in params}), unused, w, k=2)
    assert np.allclose(found.values, whole)


def test_values_from_coarse_parameters_are_not_called_converged() -> None:
    # Orthogonal rows w_t x_t: σ = 3, 2, 1 exactly, but products in bfloat16 are good to 2⁻⁷ of σ₁, far from 1e-6.
    x, w = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
    for dtype, fine in ((torch.float64, True), (torch.float32, True), (torch.bfloat16, False)):
        found = token_spectrum(lambda p: p["theta"] * x.to(p["theta"]), {"theta": torch.zeros(3, dtype=dtype)}, w, k=3)
        assert found.converged.tolist() == [fine] * 3
        assert np.abs(found.values - [3.0, 2.0, 1.0]).max() <= found.residuals[0]


def test_the_same_seed_gives_the_same_values_and_leaves_the_global_state_and_gradients_alone() -> None:
    logp_fn, params, w = mlp()
    before = torch.get_rng_state()
    first, again = (token_spectrum(logp_fn, params, w, k=2, seed=3) for _ in range(2))
    token_energy(logp_fn, params, w)
    assert torch.equal(torch.get_rng_state(), before)
    assert (first.values == again.values).all()
    assert all(p.grad is None for p in params.values())


def test_the_energy_is_that_of_explicit_rows_within_its_error() -> None:
    logp_fn, params, w = mlp()
    truth = float(explicit(logp_fn, params, w).square().sum())
    mean, error = token_energy(logp_fn, params, w, draws=400)
    assert abs(mean - truth) < 4 * error
    assert error < 0.1 * truth
    # One orthogonal row a token: every choice of signs gives Σw² exactly.
    mean, error = token_energy(lambda p: p["theta"], {"theta": torch.zeros(3)}, torch.tensor([1.0, -2.0, 2.0]))
    assert (mean, error) == (9.0, 0.0)


# Lanczos.

@given(st.integers(1, 25), st.integers(1, 5), st.integers(0, 99))
def test_lanczos_finds_the_leading_eigenvalues_of_any_gram(n: int, k: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 12, dtype=torch.float64, generator=g)
    a = rows @ rows.T
    k = min(k, n)
    values, residuals, used = lanczos(lambda v: a @ v, n, k, n, seed, 1e-9)
    truth = torch.linalg.eigvalsh(a).flip(0)[:k].numpy()
    assert np.allclose(values, truth, atol=1e-8 * truth[0])
    assert used <= n
    assert (residuals <= 1e-8 * truth[0]).all()


@pytest.mark.parametrize(("eigenvalues", "k"), [
    ([1.0] * 10, 3),
    ([1.0] * 5 + [0.5] * 5, 3),
    ([2.0, 1.0, 1.0, 1.0] + [0.0] * 8, 4),
    ([4.0, 4.0, 1.0] + [1e-3] * 30, 2),
])
def test_lanczos_finds_values_that_occur_several_times(eigenvalues: list[float], k: int) -> None:
    n = len(eigenvalues)
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    a = (q * torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
    values, _, used = lanczos(lambda v: a @ v, n, k, n, 0, 1e-9)
    assert values.tolist() == pytest.approx(eigenvalues[:k])
    assert used <= n


def test_lanczos_makes_no_copies_of_a_value_that_has_converged() -> None:
    # One value 10⁴ times the rest converges at once; without reorthogonalisation rounding brings it back as a "second".
    values = np.concatenate([[1e4], np.linspace(1, 2, 59)])
    a = torch.diag(torch.tensor(values))
    found, _, _ = lanczos(lambda v: a @ v, 60, 3, 60, 0, 1e-14)
    assert found.tolist() == pytest.approx([1e4, 2.0, values[-2]])


# What is refused.

def test_dropout_is_noticed() -> None:
    dropout = nn.Dropout(0.5)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta = {"theta": torch.ones(4, dtype=torch.float64)}
    with pytest.raises(CreditscopeError, match=r"other log-probs each time.*model.eval\(\)"):
        token_spectrum(lambda p: dropout(x) @ p["theta"], theta, torch.ones(6), k=2)


class Fused(torch.autograd.Function):
    """As fused kernels are: one derivative, and an error for a second."""

    error = "trying to differentiate twice a function that was marked with @once_differentiable"

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Second.apply(grad)


class Second(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(Fused.error)


def test_an_operation_without_a_second_derivative_is_named_with_its_remedy_and_another_error_stays_itself(
        monkeypatch: pytest.MonkeyPatch) -> None:
    theta = {"theta": torch.ones(4)}
    with pytest.raises(CreditscopeError, match=r"differentiated twice.*attn_implementation=\"eager\" or \"sdpa\""):
        token_spectrum(lambda p: Fused.apply(p["theta"]), theta, torch.ones(4), k=1)
    monkeypatch.setattr(Fused, "error", "out of memory")
    with pytest.raises(RuntimeError, match=r"^out of memory"):
        token_spectrum(lambda p: Fused.apply(p["theta"]), theta, torch.ones(4), k=1)


@each(("call", "message"), [
    (lambda: token_gram_head(torch.ones(3, 4), torch.ones(7, 5), torch.zeros(3).long(), torch.ones(3)),
     r"hidden \(n, d\), weight \(V, d\).*got hidden \(3, 4\), weight \(7, 5\)"),
    (lambda: token_gram_head(torch.ones(1, 4), torch.ones(7, 4), torch.tensor([-100]), torch.ones(1)),
     "0 to 6, got -100 to -100; leave padding out"),
    (lambda: token_gram_head(torch.ones(1, 4), torch.ones(7, 4), torch.tensor([0]), torch.ones(1), temperature=0.0),
     "must be above 0, got 0.0"),
    (lambda: token_spectrum(lambda p: p["theta"], {}, torch.ones(4)), "params is empty"),
    (lambda: token_spectrum(lambda p: p["theta"], {"theta": torch.ones(4).long()}, torch.ones(4)), "torch.int64"),
    (lambda: token_spectrum(lambda p: p["theta"], {"theta": torch.ones(4)}, torch.ones(2, 2)), r"got shape \(2, 2\)"),
    (lambda: token_spectrum(lambda p: p["theta"], {"theta": torch.ones(4)}, torch.zeros(4)), "token's credit is 0"),
    (lambda: token_spectrum(lambda p: p["theta"], {"theta": torch.ones(4)}, torch.ones(3), k=1),
     r"each of the 3 credits in w, got shape \(4,\)"),
    (lambda: token_spectrum(lambda p: torch.ones(4), {"theta": torch.ones(4)}, torch.ones(4), k=1),
     "does not depend on the parameters.*functional_call"),
    (lambda: token_spectrum(lambda p: p["theta"], {"theta": torch.ones(4)}, torch.ones(4), k=3, steps=2),
     "3 steps or more, got steps = 2"),
    (lambda: token_energy(lambda p: p["theta"], {"theta": torch.ones(4)}, torch.ones(4), draws=1), "two draws or more"),
])
def test_what_has_no_token_matrix_is_refused_in_words(call: Any, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        call()
