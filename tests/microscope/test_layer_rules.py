"""One module at a time: which rule reads it, and that the rule is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope.gram import dense_gram, weight_gram
from creditscope.microscope.layers import embedding, functional, layer_norm, linear, spread
from creditscope.microscope.scope import Microscope
from creditscope.microscope.whole import whole
from small_models import apart, gradient, grams, loop, total

N, T, D = 3, 5, 4


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def against_loop(model: nn.Module, x: Tensor, tolerance: float = 1e-12, **kwargs: Any) -> Microscope:
    """Σ (random credit · output) under the microscope, against one backward a row."""
    with torch.no_grad():
        credit = torch.cos(torch.arange(model(x).numel(), dtype=torch.float64)).view(model(x).shape)
    want = loop(model, [lambda i=i: (model(x[i:i + 1]) * credit[i:i + 1]).sum() for i in range(len(x))])
    plain = gradient(model, lambda: (model(x) * credit).sum())
    model.zero_grad(set_to_none=True)
    with Microscope(model, **kwargs) as scope:
        (model(x) * credit).sum().backward()
    for name, rows in want.items():
        if rows.any():
            assert apart(scope.layers[name], rows @ rows.T) <= tolerance, name
    assert apart(scope.gram, total(grams(want))) <= tolerance
    for name, p in model.named_parameters():
        if p.requires_grad and p.grad is not None:
            assert torch.allclose(p.grad, plain[name], rtol=0, atol=tolerance * float(plain[name].abs().max()) + 1e-14)
    assert scope.coverage == 1.0
    return scope


def rules(model: nn.Module) -> dict[str, Callable[..., Any]]:
    return {site.where: rule for site, rule in Microscope(model)._plan}


def perturbed(model: nn.Module) -> Any:
    """A float64 model without parameters at their initial 0 or 1."""
    for i, p in enumerate(model.double().parameters()):
        p.data += 0.3 * noise(*p.shape, seed=i)
    return model


# By hand.

def test_a_linear_layers_gram_by_hand() -> None:
    # y = w·x, loss = Σ_i c_i y_i, x₀ = (1, 2), x₁ = (3, −1), c = (2, 1): g₀ = (2, 4), g₁ = (3, −1).
    # K = [[20, 2], [2, 10]], and the bias has rows 2 and 1: [[4, 2], [2, 1]].
    model = nn.Linear(2, 1).double()
    x, c = torch.tensor([[1.0, 2], [3, -1]]).double(), torch.tensor([[2.0], [1]]).double()
    with Microscope(model) as scope:
        (c * model(x)).sum().backward()
    assert scope.layers["weight"].tolist() == [[20, 2], [2, 10]]
    assert scope.layers["bias"].tolist() == [[4, 2], [2, 1]]
    assert scope.gram.tolist() == [[24, 4], [4, 11]]
    assert scope.gram.dtype == torch.float64
    # ‖∇‖² = |(5, 3)|² + 3² = 43 = 24 + 4 + 4 + 11.
    assert float(scope.gram.sum()) == 43
    assert scope.checks["weight"].from_grad == pytest.approx(34)


def test_an_embeddings_gram_by_hand() -> None:
    # Rollout 0 looks up 1, 1, 2 and rollout 1 looks up 2, 0, 0, with credits 1, 2, 3 and 4, 5, 6 on a table (3, 1):
    # g₀ = (0, 1 + 2, 3) and g₁ = (5 + 6, 0, 4). K = [[18, 12], [12, 137]].
    model = nn.Embedding(3, 1).double()
    credit = torch.tensor([[1.0, 2, 3], [4, 5, 6]]).double()
    with Microscope(model) as scope:
        (credit * model(torch.tensor([[1, 1, 2], [2, 0, 0]])).squeeze(-1)).sum().backward()
    assert scope.gram.tolist() == [[18, 12], [12, 137]]


def test_a_tied_head_by_hand() -> None:
    # One weight w = (w₀, w₁) as a table (2, 1) and as a head. Rollout i looks up id_i, with loss c_i·w_{k_i}·w_{id_i}:
    # g_i = c_i (w_{k_i} e_{id_i} + w_{id_i} e_{k_i}). With w = (2, 3), id = (0, 1), k = (1, 1), c = (1, 10):
    # g₀ = 3 e₀ + 2 e₁ = (3, 2), g₁ = 10 (3 e₁ + 3 e₁) = (0, 60). K = [[13, 120], [120, 3600]].
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(2, 1), nn.Linear(1, 2, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids))

    model = Tied().double()
    model.table.weight.data = torch.tensor([[2.0], [3.0]]).double()
    with Microscope(model) as scope:
        (model(torch.tensor([[0], [1]]))[:, 0, 1] * torch.tensor([1.0, 10]).double()).sum().backward()
    assert scope.gram.tolist() == [[13, 120], [120, 3600]]
    assert list(scope.layers) == ["table.weight"]


# Norms and scales.

class UnitOffsetNorm(nn.Module):
    """Gemma's: x/rms(x)·(1 + w)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Gate(nn.Module):
    """A trainable scale, a trainable shift of size 1 and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.full((D,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift) * self.frozen


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(D), "LayerNorm without bias": lambda: nn.LayerNorm(D, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(D), "1 + w": UnitOffsetNorm, "gate": Gate,
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("shape", [(N, D), (N, T, D), (N, T, 2, D)], ids=str)
def test_norms_and_scales_are_read_by_copies_for_each_row(make: Callable[[], nn.Module],
                                                          shape: tuple[int, ...]) -> None:
    model = perturbed(make())
    (rule,) = rules(model).values()
    assert getattr(rule, "func", rule) in (spread, layer_norm)
    against_loop(model, noise(*shape, seed=9))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_layer_norm_with_one_frozen_parameter_reads_the_other(frozen: str) -> None:
    model = perturbed(nn.LayerNorm(D))
    getattr(model, frozen).requires_grad_(False)
    scope = against_loop(model, noise(N, T, D, seed=9))
    assert set(scope.layers) == {"weight", "bias"} - {frozen}


def test_a_norm_by_position_gives_each_segment_its_own_row() -> None:
    model, x, c = perturbed(nn.LayerNorm(D)), noise(2, T, D, seed=9), noise(2, T, D, seed=8)
    segments = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, -1, -1]])
    want = loop(model, [lambda i=i: (model(x) * c)[segments == i].sum() for i in range(3)])
    with Microscope(model, segments=segments) as scope:
        (model(x) * c)[segments >= 0].sum().backward()
    assert apart(scope.gram, total(grams(want))) <= 1e-12


# Modules that are run again for each row.

class Table(nn.Module):
    """A number, a matrix and a stack of matrices, and an inner layer that is frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(0.5))
        self.matrix, self.stack = nn.Parameter(torch.zeros(D, D)), nn.Parameter(torch.zeros(2, D, D))
        self.inner = nn.Linear(D, D)
        self.inner.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x @ self.matrix) * self.number
        return torch.einsum("...d,edf->...f", torch.tanh(x), self.stack)


@pytest.mark.parametrize("shape", [(N, D), (N, T, D)], ids=str)
def test_any_module_with_parameters_of_any_shape_can_be_measured_as_a_whole(shape: tuple[int, ...]) -> None:
    model = perturbed(Table())
    model.inner.weight.requires_grad_(False)
    assert rules(model) == {"the model": whole}
    scope = against_loop(model, noise(*shape, seed=9))
    assert set(scope.layers) == {"number", "matrix", "stack", "inner.bias"}


def test_a_whole_module_may_see_flattened_positions_return_several_tensors_and_be_changed_in_place() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, D, D))

        def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, dict[str, Any]]:
            return x @ self.weight[0] * scale, {"more": x @ self.weight[1], "name": "second"}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor) -> Tensor:
            first, rest = self.experts(x.flatten(0, 1), scale=0.5)
            assert rest["name"] == "second"
            first += 1.0
            return (first * rest["more"]).view_as(x)

    model = perturbed(Model())
    assert rules(model) == {"experts": whole}
    against_loop(model, noise(N, T, D, seed=9))
    against_loop(model, noise(1, T, D, seed=9))


def test_a_parameter_shared_inside_a_whole_module_is_replaced_everywhere() -> None:
    # As in BERT's head, where the bias is the head's and the decoder's. The stack makes the module a whole one.
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(D))
            self.decoder, self.other = nn.Linear(D, D), nn.Linear(D, D)
            self.decoder.bias = self.bias
            self.other.weight = self.decoder.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.decoder(x).tanh()) * self.stack.sum()

    model = perturbed(Head())
    assert rules(model) == {"the model": whole}
    against_loop(model, noise(N, T, D, seed=9))


def test_a_bias_that_a_module_and_its_decoder_both_hold_is_read_at_the_decoder() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.decoder = nn.Parameter(torch.zeros(D)), nn.Linear(D, D)
            self.decoder.bias = self.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x)

    model = perturbed(Head())
    assert rules(model) == {"decoder": linear}
    against_loop(model, noise(N, T, D, seed=9))


def test_a_whole_module_that_uses_a_parameter_from_outside_is_refused() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.ones(D, D))

        def forward(self, x: Tensor, table: nn.Module) -> Tensor:
            return x @ self.stack @ table.weight

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Linear(D, D, bias=False), Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.table)

    model = perturbed(Outer())
    with pytest.raises(CreditscopeError, match=r"inner is measured as a whole, but uses a parameter of shape \(4, 4\)"):
        against_loop(model, noise(N, D))
    against_loop(model, noise(N, D), slow=[""])


def test_a_whole_module_called_twice_adds_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Table()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x) + x)

    against_loop(perturbed(Twice()), noise(N, T, D, seed=9))


class Everywhere(nn.Module):
    """One table that is looked up, multiplied by, and used in a module that is run again."""

    class Squares(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.number = weight, nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.square() * self.number.sum()

    def __init__(self, squares: bool, detach: bool) -> None:
        super().__init__()
        self.table, self.head, self.detach = nn.Embedding(6, D), nn.Linear(D, 6, bias=False), detach
        self.head.weight = self.table.weight
        self.squares = self.Squares(self.table.weight) if squares else None

    def forward(self, ids: Tensor) -> Tensor:
        again = self.table(ids + 2)  # ids that the first look-up may not have
        out = self.head(torch.tanh(self.table(ids)) + (again.detach() if self.detach else again))
        return out if self.squares is None else self.squares(out)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("detach", [False, True])
def test_a_parameter_used_in_several_ways_has_the_gram_of_its_summed_rows(squares: bool, detach: bool) -> None:
    model = perturbed(Everywhere(squares, detach))
    scope = against_loop(model, torch.tensor([[0, 1, 3], [3, 3, 0], [1, 0, 1]]))
    assert "table.weight" in scope.layers


def test_a_parametrized_layer_is_refused_with_its_name_and_exact_as_a_whole() -> None:
    model = perturbed(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)), nn.Linear(3, 2)))
    x = noise(N, T, D, seed=9)
    scope = against_loop(model, x)
    assert {name for name in scope.layers if name.startswith("0.")} == {
        "0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"}
    # Without a bias nothing but the parametrization holds parameters, and that is called without a tensor.
    bare = perturbed(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 3, bias=False)), nn.Linear(3, 2)))
    with pytest.raises(CreditscopeError, match=r"0.parametrizations.weight was called without a tensor"):
        against_loop(bare, x)
    against_loop(bare, x, slow=["0"])


def test_one_vector_without_an_axis_of_rows_is_refused() -> None:
    model = nn.Linear(D, 1).double()
    with pytest.raises(CreditscopeError, match="a batch of one row"), Microscope(model.requires_grad_()):
        F.relu(model.forward(noise(D))).sum().backward()


def test_a_parameter_list_is_measured_with_the_module_around_it() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(D), torch.zeros(D)])

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scales[0] + self.scales[1]

    model = perturbed(nn.Sequential(nn.Linear(D, D), Sum()))
    assert rules(model) == {"0": linear, "1": whole}
    against_loop(model, noise(N, T, D, seed=9))


def test_convolutions_group_norms_and_torchs_own_attention_are_measured_as_a_whole() -> None:
    class Swap(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(1, 2)).transpose(1, 2)

    convolution = perturbed(Swap(nn.Conv1d(D, D, 3, padding=2)))
    against_loop(convolution, noise(N, T, D, seed=9))
    against_loop(perturbed(Swap(nn.GroupNorm(2, D))), noise(N, T, D, seed=9))
    attention = perturbed(nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True))
    against_loop(attention, noise(N, T, D, seed=9))


def test_a_recurrence_is_measured_with_the_module_around_it_because_its_state_is_not_laid_out_by_rows() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrence = nn.GRU(D, D, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.recurrence(x)[0]

    model = First().double()
    with pytest.raises(CreditscopeError, match="recurrence returns a tensor with leading axes"), Microscope(model):
        model(noise(N, T, D)).sum().backward()
    against_loop(model, noise(N, T, D, seed=9), slow=[""])


def test_batch_norm_in_eval_mode_has_rows_of_its_own() -> None:
    model = perturbed(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Linear(D, 2))).eval()
    model[1].running_mean = noise(D)
    against_loop(model, noise(N, D, seed=9))


# Linear layers and embeddings in other clothes.

def test_a_multilayer_perceptron_on_vectors_is_exact_also_with_activations_in_place() -> None:
    model = perturbed(nn.Sequential(nn.Linear(D, 6), nn.ReLU(inplace=True), nn.Linear(6, 6, False), nn.Linear(6, 2)))
    against_loop(model, noise(N, D, seed=9))
    model = perturbed(nn.Sequential(nn.Linear(D, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)))
    against_loop(model, noise(N, T, D, seed=9))


class Written(nn.Linear):
    """Falcon's: a linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


class Straight(nn.Linear):
    """The value of a linear layer, with another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach() + 3 * (self.weight - self.weight.detach()), self.bias)


def test_a_subclass_of_linear_is_read_as_linear_only_if_its_values_and_gradients_are() -> None:
    assert rules(perturbed(Written(D, 3))) == {"the model": linear}
    assert rules(perturbed(Doubled(D, 3))) == rules(perturbed(Straight(D, 3))) == {"the model": whole}
    for kind in (Written, Doubled, Straight):
        against_loop(perturbed(kind(D, 3)), noise(N, T, D, seed=9))


class Router(nn.Module):
    """As those of experts: scores and choices from a weight and a bias that F.linear takes."""

    def __init__(self, how: str = "whole") -> None:
        super().__init__()
        self.weight, self.bias, self.how = nn.Parameter(torch.zeros(3, D)), nn.Parameter(torch.zeros(3)), how

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        bias = None if self.how == "bias apart" else 2 * self.bias if self.how == "bias changed" else self.bias
        scores = F.linear(flat, self.weight, bias).softmax(-1)
        if self.how == "bias apart":
            scores = scores + self.bias
        if self.how == "weight apart":
            scores = scores + self.weight.square().sum()
        values, chosen = scores.topk(2, dim=-1)
        return (values * (1 + chosen)).view(*x.shape[:-1], 2)


def test_a_module_that_uses_its_weight_through_f_linear_alone_is_read_there_and_any_other_is_run_again() -> None:
    assert rules(perturbed(Router())) == {"the model": functional}
    against_loop(perturbed(Router()), noise(N, T, D, seed=9))
    for how in ("bias apart", "weight apart", "bias changed"):
        model = perturbed(Router(how))
        assert rules(model) == {"the model": whole}
        against_loop(model, noise(N, T, D, seed=9))
    frozen = perturbed(Router("bias apart"))
    frozen.bias.requires_grad_(False)
    assert rules(frozen) == {"the model": functional}
    against_loop(frozen, noise(N, T, D, seed=9))


class Offset(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 2) * 3.0


class Indexed(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Sliced(nn.Embedding):
    """Whisper's: positions are a slice of the table, shared by all rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[1:1 + ids.shape[1]]


class Ranged(nn.Embedding):
    """Positions of shape (T,), shared by all rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]))


@pytest.mark.parametrize("kind", [nn.Embedding, Offset, Indexed, Sliced, Ranged])
def test_embeddings_and_their_subclasses_are_read_by_look_ups(kind: type[nn.Embedding]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(9, D), kind(9, D)

        def forward(self, ids: Tensor) -> Tensor:
            return torch.tanh(self.tokens(ids) + self.places(ids))

    model = perturbed(Model())
    assert rules(model) == {"tokens": embedding, "places": embedding}
    against_loop(model, torch.tensor([[0, 1, 1, 6, 2], [6, 6, 6, 6, 6], [3, 2, 1, 0, 5]]))


def test_a_model_may_put_a_prompt_of_its_own_before_its_embedding() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(9, D), nn.Linear(D, 2)

        def get_input_embeddings(self) -> nn.Module:
            return self.table

        def forward(self, ids: Tensor) -> Tensor:
            return self.line(self.table(torch.cat([torch.tensor([[7, 8]]).expand(len(ids), 2), ids], dim=1)).tanh())

    against_loop(perturbed(Prompted()), torch.tensor([[0, 1, 1, 6, 2], [6, 6, 6, 6, 6], [3, 2, 1, 0, 5]]))


def test_a_tensor_that_all_rows_share_gets_its_whole_gradient_from_a_module_that_is_run_again() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D, D))

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return (x * shared) @ self.weight

    model, x, shared = perturbed(Mixed()), noise(N, T, D), noise(D, seed=3).requires_grad_()
    (plain,) = torch.autograd.grad(model(x, shared).square().sum(), shared)
    with Microscope(model):
        model(x, shared).square().sum().backward()
    assert shared.grad is not None
    assert torch.allclose(shared.grad, plain, rtol=1e-12)


def test_the_padding_row_of_an_embedding_gets_no_gradient() -> None:
    model = perturbed(nn.Embedding(5, D, padding_idx=2))
    scope = against_loop(model, torch.tensor([[2, 2, 1], [0, 2, 0]]))
    assert not model.weight.grad[2].any()
    assert scope.layers["weight"][0, 1] == 0


@pytest.mark.parametrize(("setting", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)])
def test_an_embedding_with_other_arithmetic_is_refused_with_the_setting_to_change(setting: str, value: Any) -> None:
    scope = Microscope(nn.Embedding(5, D, **{setting: value}))
    with pytest.raises(CreditscopeError, match=f"{setting}={value}"), scope:
        pass


def test_a_module_under_two_paths_is_read_under_the_first() -> None:
    line = nn.Linear(D, D)
    model = perturbed(nn.Sequential(line, nn.Tanh(), line))
    scope = against_loop(model, noise(N, T, D, seed=9))
    assert list(scope.layers) == ["0.weight", "0.bias"]


def test_blocks_of_outputs_and_columns_add_up_to_the_same_gram(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = perturbed(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 11))), torch.randint(0, 7, (N, T))
    whole_gram = against_loop(model, x).gram
    # Room for one output of the layer, and for one feature of the table, at a time.
    monkeypatch.setattr("creditscope.microscope.gram.SCRATCH", {"cpu": 1, "cuda": 1})
    assert apart(against_loop(model, x).gram, whole_gram) <= 1e-14


# Half precision.

def test_products_of_half_precision_rows_are_not_rounded() -> None:
    rows = noise(N, 300).bfloat16()
    assert apart(dense_gram(rows), rows.double() @ rows.double().T) <= 1e-6
    delta, a = noise(N, 40, 6).bfloat16(), noise(N, 40, 5, seed=1).bfloat16()
    each = torch.einsum("nto,ntd->nod", delta.double(), a.double()).flatten(1)
    assert apart(weight_gram(delta, a)[1], each @ each.T) <= 1e-6


def test_a_layer_norms_row_in_bfloat16_is_rounded_once() -> None:
    # dw = Σ_t x̂_t δ_t. Rounding to the nearest bfloat16 moves a number by at most 2⁻⁸ of itself; statistics or products
    # that are rounded as well (torch keeps a bfloat16 mean on a CPU) move some of the 48 entries by more.
    for seed in range(12):
        x, c = noise(1, 64, D, seed=2 * seed).bfloat16(), noise(1, 64, D, seed=2 * seed + 1).bfloat16()
        exact = (F.layer_norm(x.double(), (D,)) * c.double()).sum((0, 1))
        half = nn.LayerNorm(D, bias=False).bfloat16()
        with Microscope(half):
            (half(x) * c).sum().backward()
        assert half.weight.grad is not None
        assert bool(((half.weight.grad.double() - exact).abs() <= 1.001 * 2**-8 * exact.abs() + 1e-6).all())
