"""One operation at a time: which rule reads it, and that its rows are those of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope import operations, watch
from creditscope.microscope.calls import Call, name_of
from creditscope.microscope.gram import SPAN, dense_gram, products
from creditscope.microscope.recorder import weight_gram
from creditscope.microscope.rerun import again
from creditscope.microscope.scope import Microscope
from each import each
from one_by_one import against_loop, noise, perturbed, refused
from small_models import apart, grams, loop, total

N, T, D = 3, 5, 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextmanager
def rules() -> Iterator[set[tuple[str, str]]]:
    """(operation, rule) of the calls that rules take while the context is open."""
    found: set[tuple[str, str]] = set()

    def spied(rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(call: Call) -> Any:
            out = rule(call)
            if out is not None:
                found.add((name_of(call.func), rule.__name__))
            return out

        return run

    table = {func: spied(rule) for func, rule in operations.RULES.items()}
    with mock.patch.object(watch, "RULES", table), mock.patch.object(watch, "again", spied(again)):
        yield found


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


@each("make", NORMS.values())
@each("shape", [(N, D), (N, T, D), (N, T, 2, D)])
def test_norms_and_scales_are_exact_without_running_them_again(make: Callable[[], nn.Module],
                                                               shape: tuple[int, ...]) -> None:
    with rules() as found:
        against_loop(perturbed(make()), noise(*shape, seed=9))
    assert {rule for _, rule in found} <= {"spread", "layer_norm", "scaled"}


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


# Parameters of any shape, in any place.

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
def test_parameters_of_any_shape_are_exact(shape: tuple[int, ...]) -> None:
    model = perturbed(Table())
    with rules() as found:
        scope = against_loop(model, noise(*shape, seed=9))
    assert set(scope.layers) == {"number", "matrix", "stack", "inner.bias"}
    # einsum has no rule of its own: it is run again for each rollout.
    assert found == {("matmul", "product"), ("linear", "product"), ("mul", "spread"), ("einsum", "again")}


def test_a_module_with_parameters_that_is_called_twice_adds_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Table()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x) + x)

    against_loop(perturbed(Twice()), noise(N, T, D, seed=9))


class Stack(nn.Module):
    """Matrices of one stack, used one by one and, where asked, as a whole besides."""

    def __init__(self, also: bool = False) -> None:
        super().__init__()
        self.weight, self.also = nn.Parameter(torch.zeros(3, D, D)), also

    def forward(self, x: Tensor, *, scale: float = 0.5) -> Tensor:
        out = x.flatten(0, 1) @ self.weight[0] * scale
        out += 1.0
        out = out * F.linear(x.flatten(0, 1), self.weight[-1])
        return (out * self.weight.sum() if self.also else out).view_as(x)


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("n", [N, 1])
def test_matrices_of_a_stack_may_be_used_one_by_one_as_a_whole_or_both(also: bool, n: int) -> None:
    against_loop(perturbed(Stack(also)), noise(n, T, D, seed=9))


def test_a_bias_that_two_modules_hold_is_one_parameter() -> None:
    # As in BERT's head, where the bias is the head's and the decoder's.
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(D))
            self.decoder, self.other = nn.Linear(D, D), nn.Linear(D, D)
            self.decoder.bias = self.bias
            self.other.weight = self.decoder.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.decoder(x).tanh()) + self.bias

    scope = against_loop(perturbed(Head()), noise(N, T, D, seed=9))
    assert set(scope.layers) == {"bias", "decoder.weight", "other.bias"}


def test_a_module_may_use_another_modules_weight() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.ones(D, D))

        def forward(self, x: Tensor, table: nn.Module) -> Tensor:
            return x @ self.stack @ table.weight + F.linear(x, table.weight)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Linear(D, D, bias=False), Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.table)

    for shape in ((N, D), (N, T, D)):
        against_loop(perturbed(Outer()), noise(*shape, seed=9))


class Everywhere(nn.Module):
    """One table that is looked up, multiplied by, and squared."""

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


class Turned(nn.Module):
    """One matrix that is multiplied by as it is, and added to all rows turned."""

    def __init__(self, positions: int, first: bool) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.zeros(D, positions)), first

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.t() if self.first else self.weight.transpose(0, 1)
        return ((x + turned) @ self.weight).tanh() + x @ self.weight.detach()


@each("first", [False, True])
@each("shape", [(N, T, D), (4, 4, D), (T, N, D), (N, 1, D)])
def test_a_matrix_that_is_used_straight_and_turned_adds_its_rows_in_one_order(shape: tuple[int, ...],
                                                                              first: bool) -> None:
    # ⟨Gᵀ, Gᵀ⟩ = ⟨G, G⟩, so a use of one kind alone would not show rows that are not turned back.
    against_loop(perturbed(Turned(shape[1], first)), noise(*shape, seed=9))


def test_a_parameter_list_and_a_parameter_dict_are_exact() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(D), torch.zeros(D)])
            self.more = nn.ParameterDict({"matrix": torch.ones(D, D)})

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scales[0] + self.scales[1]) @ self.more["matrix"]

    against_loop(perturbed(nn.Sequential(nn.Linear(D, D), Sum())), noise(N, T, D, seed=9))


# Weights that are made of parameters.

def weight_norm(line: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(line)


def old_weight_norm(line: nn.Linear) -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(line)


def spectral_norm(line: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(line).eval()


def pruned(line: nn.Linear) -> nn.Module:
    return torch.nn.utils.prune.l1_unstructured(line, "weight", amount=0.5)


def symmetric(line: nn.Linear) -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    nn.utils.parametrize.register_parametrization(line, "weight", Symmetric())
    return line


@each("make", [weight_norm, old_weight_norm, spectral_norm, pruned, symmetric])
@each("bias", [True, False])
def test_a_weight_that_is_computed_from_parameters_gives_rows_to_those(make: Callable[[nn.Linear], nn.Module],
                                                                       bias: bool) -> None:
    import torch.nn.utils.prune  # noqa: F401

    model = perturbed(nn.Sequential(make(nn.Linear(D, D, bias=bias)), nn.Tanh(), nn.Linear(D, 2)))
    scope = against_loop(model, noise(N, T, D, seed=9))
    assert scope.layers.keys() == {name for name, p in model.named_parameters() if p.requires_grad}


class Made(nn.Module):
    """A weight of one parameter by one function, and a matrix product with it."""

    def __init__(self, make: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.zeros(shape)), make

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.make(self.weight))


MADE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "t": (lambda w: w.t(), (3, D)), "T": (lambda w: w.T, (3, D)), "mT": (lambda w: w.mT, (3, D)),
    "transpose twice": (lambda w: w.transpose(0, 1).transpose(-1, -2), (D, 3)),
    "view": (lambda w: w.view(D, 3), (3 * D,)), "view of the turned": (lambda w: w.t().reshape(D, 3), (D, 3)),
    "shift": (lambda w: 1 + w, (D, 3)), "shift by a number that is scaled": (lambda w: w.add(1.0, alpha=2), (D, 3)),
    "shift of a number by the scaled weight": (lambda w: torch.add(torch.ones(D, 3).double(), w, alpha=2), (D, 3)),
    "shift that widens": (lambda w: w + torch.zeros(D, 3), (3,)),
    "clone": (lambda w: w.clone(), (D, 3)), "slice": (lambda w: w[:, 1:4], (D, 5)), "rows": (lambda w: w[1:5], (6, 3)),
    "select": (lambda w: w[-1], (2, D, 3)), "select and turn": (lambda w: w[0].mT, (2, 3, D)),
    "select of the last axis": (lambda w: w[..., 0], (D, 3, 2)), "turned stack": (lambda w: w.mT[1], (2, 3, D)),
    "sum": (lambda w: w.sum(0), (2, D, 3)), "exp": (lambda w: w.exp(), (D, 3)), "diagonal": (torch.diag, (D,)),
    "product": (lambda w: w @ w.t(), (D, 3)), "cat": (lambda w: torch.cat([w, w * 2], dim=1), (D, 3)),
    "looked up": (lambda w: w[torch.tensor([0, 2, 2, 1])], (3, 5)), "chunk": (lambda w: w.chunk(2, dim=1)[1], (D, 6)),
    "unbind": (lambda w: w.unbind(0)[1], (2, D, 3)), "half": (lambda w: w.float().double(), (D, 3)),
    "outer": (lambda w: w[:, None] * w[None, :], (D,)), "filled": (lambda w: w.masked_fill(w > 0, 0.0), (D, 3)),
    "expand": (lambda w: w.expand(D, 3), (1, 3)), "squeeze": (lambda w: w.squeeze(0), (1, D, 3)),
}


@each("name", MADE)
def test_rows_return_through_whatever_a_weight_was_made_by(name: str) -> None:
    make, shape = MADE[name]
    tolerance = 1e-6 if name == "half" else 1e-12
    against_loop(perturbed(Made(make, *shape)), noise(N, T, D, seed=9), tolerance)


def test_a_tensor_made_of_parameters_may_be_kept_for_several_uses_and_meet_rows_later() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D, D))

        def forward(self, x: Tensor) -> Tensor:
            both = torch.sigmoid(self.a) * self.b
            return (x @ both).tanh() @ both.T + both.sum(0)

    against_loop(perturbed(Kept()), noise(N, T, D, seed=9))


def test_a_made_tensor_that_is_changed_in_place_after_its_use_is_refused() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(D))

        def forward(self, x: Tensor) -> Tensor:
            made = self.scale * 3.0
            out = x + made
            made.add_(1.0)
            return out * made

    model, x = perturbed(Changed()), noise(N, T, D, seed=9)
    with pytest.raises(CreditscopeError, match=r"changed in place after its use.*write the change out of place"), \
            Microscope(model):
        model(x).square().sum().backward()


# Torch's own modules.

class Swap(nn.Module):
    """A module between two swaps of positions and features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class TimeFirst(nn.Module):
    """A module whose rows are its second axis, between two swaps of rows and positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x.transpose(0, 1))
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class First(nn.Module):
    """The first of a module's results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


TORCHS: dict[str, Callable[[], nn.Module]] = {
    "Conv1d": lambda: Swap(nn.Conv1d(D, D, 3, padding=2)), "GroupNorm": lambda: Swap(nn.GroupNorm(2, D)),
    "PReLU": lambda: nn.PReLU(), "PReLU by channels": lambda: Swap(nn.PReLU(D)),
    "attention": lambda: SelfAttention(D, 2, batch_first=True),
    "attention, time first": lambda: TimeFirst(SelfAttention(D, 2)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True, norm_first=True),
    "encoder layer, time first": lambda: TimeFirst(nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0)),
    "Linear, time first": lambda: TimeFirst(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D))),
    "LSTM, time first": lambda: TimeFirst(nn.LSTM(D, D)),
}


@pytest.mark.slow
@each("make", TORCHS.values())
@each("shape", [(N, T, D), (T, T, D), (2, 2, D)])
@each("graded", [False, True])
def test_torchs_own_modules_are_exact_also_where_rows_are_the_second_axis(make: Callable[[], nn.Module],
                                                                          shape: tuple[int, ...], graded: bool) -> None:
    against_loop(perturbed(make()), noise(*shape, seed=9).requires_grad_(graded))


@pytest.mark.parametrize("graded", [False, True], ids=["data", "with a gradient"])
@pytest.mark.parametrize(("make", "ids"), [(lambda: First(nn.GRU(D, D, batch_first=True)), False),
                                           (lambda: nn.EmbeddingBag(7, D, mode="sum"), True)])
def test_results_whose_rows_are_not_their_first_axis_alone_are_refused_by_name(make: Callable[[], nn.Module], ids: bool,
                                                                               graded: bool) -> None:
    # A GRU returns (B, T, d) and a state (1, B, d); a bag sees all ids in one line, and where each bag begins.
    x = torch.tensor([[0, 1, 1], [6, 2, 0], [3, 3, 3]]) if ids else noise(N, T, D, seed=9).requires_grad_(graded)
    refused(perturbed(make()), x, r"(gru|embedding_bag) with '(inner.weight_ih_l0|weight)'.*gives one rollout another "
                                  r"result alone.*are not laid out by the batch's 3 rows")


def test_bilinear_layers_are_exact() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.Bilinear(D, D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.pairs(x, x.tanh())

    against_loop(perturbed(Pairs()), noise(N, T, D, seed=9))


def test_batch_norm_in_eval_mode_has_rows_of_its_own() -> None:
    model = perturbed(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Linear(D, 2))).eval()
    model[1].running_mean = noise(D)
    against_loop(model, noise(N, D, seed=9))


# Linear layers and embeddings in other clothes.

def test_one_vector_without_an_axis_of_rows_is_refused() -> None:
    model = nn.Linear(D, 1).double()
    with pytest.raises(CreditscopeError, match="a batch of one row"), Microscope(model):
        F.relu(model(noise(D))).sum().backward()
    with pytest.raises(CreditscopeError, match=r"no forward of the model with rows.*call the model itself"), \
            Microscope(model):
        F.relu(model.forward(noise(D))).sum().backward()


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


class Added(nn.Linear):
    """GPT-2's: one call for the product and the bias, on flat positions."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight.t()).view(*x.shape[:-1], -1)


class ScaledSum(Added):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch.addmm(self.bias, flat, self.weight.t(), beta=0.5, alpha=2).view(*x.shape[:-1], -1)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


class Straight(nn.Linear):
    """The value of a linear layer, with another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach() + 3 * (self.weight - self.weight.detach()), self.bias)


class Named(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(bias=self.bias, weight=self.weight, input=x)


@each("kind", [Written, Added, ScaledSum, Doubled, Straight, Named])
@each("shape", [(N, D), (N, T, D)])
def test_a_linear_layer_may_be_written_in_any_way(kind: type[nn.Linear], shape: tuple[int, ...]) -> None:
    against_loop(perturbed(kind(D, 3)), noise(*shape, seed=9))
    model = perturbed(kind(D, 3))
    model.weight.requires_grad_(False)
    assert set(against_loop(model, noise(*shape, seed=9)).layers) == {"bias"}


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


@each("how", ["whole", "bias apart", "weight apart", "bias changed"])
@each("frozen", [False, True])
def test_a_router_is_exact_however_it_uses_its_weight_and_bias(how: str, frozen: bool) -> None:
    model = perturbed(Router(how))
    model.bias.requires_grad_(not frozen)
    with rules() as found:
        against_loop(model, noise(N, T, D, seed=9))
    assert {rule for _, rule in found} <= {"product", "spread"}


class Offset(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 2) * 3.0


class Indexed(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Selected(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.index_select(self.weight, 0, ids.flatten()).view(*ids.shape, -1)


class FromTheEnd(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[-1 - ids]


class OneHot(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, len(self.weight)).to(self.weight) @ self.weight


class Sliced(nn.Embedding):
    """Whisper's: positions are a slice of the table, shared by all rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[1:1 + ids.shape[1]]


class Ranged(nn.Embedding):
    """Positions of shape (T,), shared by all rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]))


class RangedRow(nn.Embedding):
    """Positions of shape (1, T), shared by all rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1])[None])


class Expanded(nn.Embedding):
    """Positions of shape (B, T) that are the same in every row."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]).expand(ids.shape))


class Learned(nn.Embedding):
    """Positions as a parameter of shape (1, T, d) would be added."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[None, :ids.shape[1]]


@each("kind", [nn.Embedding, Offset, Indexed, Selected, FromTheEnd, OneHot, Sliced, Ranged,
                                  RangedRow, Expanded, Learned])
@each("rows", [3, 5])
@each("first", [True, False])
def test_embeddings_are_exact_however_they_are_looked_up(kind: type[nn.Embedding], rows: int, first: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(9, D), kind(9, D)

        def forward(self, ids: Tensor) -> Tensor:
            one, other = self.tokens(ids), self.places(ids)
            return torch.tanh(one + other if first else other + one)

    ids = torch.tensor([[0, 1, 1, 6, 2], [6, 6, 6, 6, 6], [3, 2, 1, 0, 5], [2, 2, 1, 1, 0], [4, 5, 6, 0, 3]])
    against_loop(perturbed(Model()), ids[:rows])


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


@pytest.mark.parametrize("how", ["expand", "repeat"])
def test_a_prompt_of_parameters_put_before_the_rows_is_exact(how: str) -> None:
    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.line = nn.Parameter(torch.zeros(2, D)), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            prompt = self.prompt.expand(len(x), 2, D) if how == "expand" else self.prompt.repeat(len(x), 1, 1)
            return self.line(torch.cat([prompt, x], dim=1).tanh())

    against_loop(perturbed(Soft()), noise(N, T, D, seed=9))


@pytest.mark.parametrize("called_with", [False, True])
def test_a_module_may_be_called_without_a_tensor_and_return_what_has_no_rows(called_with: bool) -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.ones(1, D))

        def forward(self, *x: Tensor) -> Tensor:
            return self.prompt * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.line = Prompt(), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x + (self.prompt(x) if called_with else self.prompt()))

    for shape in ((N, D), (N, T, D)):
        against_loop(perturbed(Model()), noise(*shape, seed=9))


def test_a_tensor_that_all_rows_share_gets_its_whole_gradient() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D, D))

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return torch.einsum("btd,df->btf", x * shared, self.weight)

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


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_with_gradients_divided_by_counts_is_refused_by_name(sparse: bool) -> None:
    # Counts are the batch's, so no rollout has a row of its own; a sparse gradient has no dense rows to add.
    model = perturbed(nn.Embedding(5, D, scale_grad_by_freq=not sparse, sparse=sparse))
    with pytest.raises(CreditscopeError, match=r"'weight'.*allow=\['weight'\]|self-check failed for 'weight'"), \
            Microscope(model):
        model(torch.tensor([[0, 0, 1], [0, 2, 3]])).square().sum().backward()


def test_an_embedding_that_renormalises_its_table_is_exact_where_the_table_stays_as_it_is() -> None:
    # max_norm shortens looked-up rows in place, before the look-up. The first call leaves nothing for the next.
    model, ids = nn.Embedding(5, D, max_norm=1.0).double(), torch.tensor([[0, 1, 1], [2, 3, 4]])
    model(ids)
    against_loop(model, ids)


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


# Rows that are picked, moved or pooled on the way.

class Moves(nn.Module):
    """Two layers and a norm around one function of an activation."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.move = move
        self.first, self.norm, self.last = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.move(torch.tanh(self.first(x))))).sin()


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda h: h[:, -1], "last kept": lambda h: h[:, -1:], "first": lambda h: h.select(1, 0),
    "mean": lambda h: h.mean(1), "mean kept": lambda h: h.mean(dim=1, keepdim=True), "max": lambda h: h.amax(dim=1),
    "max with places": lambda h: h.max(dim=1).values, "sum of a slice": lambda h: h[:, 1:3].sum(1),
    "each row's own place": lambda h: h[torch.arange(len(h)), (h[:, :, 0].argmax(1))],
    "gather": lambda h: h.gather(1, h[:, :, :1].argmax(1, keepdim=True).expand(-1, 1, D)).squeeze(1),
    "heads": lambda h: h.view(*h.shape[:2], 2, 2).transpose(1, 2).flatten(2).reshape(len(h), 2, -1)[..., :D],
    "features turned": lambda h: h.transpose(1, 2)[:, :, :D], "flat": lambda h: h.flatten(0, 1).view_as(h),
    "cumulative": lambda h: h.cumsum(1), "flipped in time": lambda h: h.flip(1), "rolled": lambda h: h.roll(1, dims=1),
    "padded": lambda h: F.pad(h, (0, 0, 1, 1)), "slice": lambda h: h[:, ::2],
    "unfold": lambda h: h.unfold(1, D, 1)[..., 0, :], "stack": lambda h: torch.stack([h, -h], 2),
    "time first and back": lambda h: h.transpose(0, 1).tanh().transpose(0, 1),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "product of rows": lambda h: torch.bmm(h @ h.mT, h), "unbound": lambda h: torch.stack(h.unbind(1), dim=1),
    "one by one": lambda h: torch.stack([row.tanh() for row in h]), "chunks": lambda h: torch.cat(h.chunk(2, dim=1), 1),
    "chunks of rows": lambda h: torch.cat([part.tanh() for part in h.split(1)]),
}


@pytest.mark.slow
@each("name", KEPT)
@each("shape", [(N, T, D), (T, T, D), (4, 4, D), (6, 4, D)])
def test_activations_may_be_picked_pooled_and_turned_inside_their_rows(name: str, shape: tuple[int, ...]) -> None:
    against_loop(perturbed(Moves(KEPT[name])), noise(*shape, seed=9))


class Order(nn.Module):
    """Layers that see rows or tokens in another order, number or layout, and the result put back."""

    def __init__(self, there: Callable[[Tensor], Tensor], back: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.inner = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.scale, self.there, self.back = nn.Parameter(torch.ones(D)), there, back

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.back(h, self.inner(self.norm(self.there(h)) * self.scale).tanh())


def by_first(h: Tensor) -> Tensor:
    return h[:, 0, 0].argsort()


def chosen(h: Tensor) -> Tensor:
    return h[..., 0] > 0


ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "rows sorted": (lambda h: h[by_first(h)], lambda h, y: y[by_first(h).argsort()]),
    "rows selected": (lambda h: h.index_select(0, by_first(h)), lambda h, y: y[by_first(h).argsort()]),
    "rows flipped": (lambda h: h.flip(0), lambda h, y: y.flip(0)),
    "rows rolled": (lambda h: h.roll(1, 0), lambda h, y: y.roll(-1, 0)),
    "time first": (lambda h: h.transpose(0, 1), lambda h, y: y.transpose(0, 1)),
    "time first by permute": (lambda h: h.permute(1, 0, 2), lambda h, y: y.permute(1, 0, 2)),
    "time first and flat": (lambda h: h.transpose(0, 1).reshape(-1, D),
                            lambda h, y: y.view(h.shape[1], h.shape[0], D).transpose(0, 1)),
    "tokens by mask": (lambda h: h[chosen(h)], lambda h, y: h.masked_scatter(chosen(h)[..., None], y)),
    "tokens by mask, put by mask": (lambda h: h[chosen(h)], lambda h, y: h.clone().index_put((chosen(h),), y)),
    "flat tokens by mask": (lambda h: h.flatten(0, 1)[chosen(h).flatten()],
                            lambda h, y: torch.zeros_like(h.flatten(0, 1)).index_add(
                                0, chosen(h).flatten().nonzero().flatten(), y).view_as(h)),
    "tokens by index": (lambda h: h.flatten(0, 1)[h[..., 0].flatten().argsort()],
                        lambda h, y: y[h[..., 0].flatten().argsort().argsort()].view_as(h)),
    "tokens by index_select": (lambda h: h.view(-1, D).index_select(0, h[..., 0].flatten().argsort()),
                               lambda h, y: y[h[..., 0].flatten().argsort().argsort()].view_as(h)),
    "tokens by two indices": (lambda h: h[chosen(h).nonzero(as_tuple=True)],
                              lambda h, y: h.masked_scatter(chosen(h)[..., None], y)),
    "rows from the second on": (lambda h: h[1:], lambda h, y: torch.cat([h[:1], y])),
    "every second row": (lambda h: h[::2], lambda h, y: h.index_copy(0, torch.arange(0, len(h), 2), y)),
    "rows split": (lambda h: torch.cat(h.split(1)[::-1]), lambda h, y: y.flip(0)),
    "rows repeated": (lambda h: h.repeat_interleave(2, dim=0), lambda h, y: y.view(len(h), 2, *h.shape[1:]).sum(1)),
}
COPIES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "beams": (lambda h: h[:, None].expand(-1, 2, -1, -1).flatten(0, 1),
              lambda h, y: y.view(len(h), 2, *h.shape[1:]).sum(1)),
    "batch twice": (lambda h: torch.cat([h, -h]), lambda h, y: y[:len(h)] + y[len(h):]),
}


@pytest.mark.slow
@each("name", ORDERS)
@each("shape", [(N, T, D), (5, 5, D), (4, 4, D), (2, 3, D)])
def test_layers_may_see_rows_and_tokens_in_another_order_number_or_layout(name: str, shape: tuple[int, ...]) -> None:
    # A row's place in the batch decides where it goes, so the loop takes it in its batch.
    against_loop(perturbed(Order(*ORDERS[name])), noise(*shape, seed=9), alone=False)


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_rows_are_exact(name: str) -> None:
    against_loop(perturbed(Order(*COPIES[name])), noise(N, T, D, seed=9))


def test_as_many_picked_tokens_as_rows_are_not_taken_for_rows() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.expert = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return h.sum(), self.expert(h.flatten(0, 1)[[0, 1, 2]])  # three tokens, all of row 0

    model, x = perturbed(Picks()), noise(N, T, D, seed=9)

    def loss(i: int) -> Tensor:
        h = model.inner(x[i:i + 1])
        return h.sum() + (model.expert(h.flatten(0, 1)[[0, 1, 2]]).square().sum() if i == 0 else 0)

    want = loop(model, [lambda i=i: loss(i) for i in range(N)])
    with Microscope(model) as scope:
        total_, picked = model(x)
        (total_ + picked.square().sum()).backward()
    assert apart(scope.gram, total(grams(want))) <= 1e-12
    assert not scope.layers["expert.weight"][1:].any()


class Relative(nn.Module):
    """T5's: a table (buckets, heads) that gives each pair of positions a bias, alike for all rows."""

    def __init__(self, biases: int = 7) -> None:
        super().__init__()
        self.line, self.bias = nn.Linear(D, D), nn.Embedding(biases, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x).view(*x.shape[:2], 2, -1).transpose(1, 2)
        place = torch.arange(x.shape[1])
        bias = self.bias((place[:, None] - place[None, :]).clamp(-3, 3) + 3).permute(2, 0, 1)[None]
        return ((h @ h.mT + bias).softmax(-1) @ h).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("shape", [(N, T, D), (4, 4, D), (2, 2, D), (2, 4, D)], ids=str)
def test_a_bias_for_pairs_of_positions_is_exact_also_where_rows_positions_and_heads_are_as_many(
        shape: tuple[int, ...]) -> None:
    against_loop(perturbed(Relative()), noise(*shape, seed=9))


# Experts.

class Experts(nn.Module):
    """A stack of experts on tokens that a router dealt out, by one of the ways that are in use."""

    def __init__(self, how: str, experts: int = 3) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(D, experts), nn.Parameter(torch.zeros(experts, D, D))
        self.bias, self.how = nn.Parameter(torch.zeros(experts, D)), how

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        score = self.router(flat).softmax(-1)
        chosen = score.argmax(-1)
        if self.how == "all":  # every expert sees every token
            each = torch.bmm(flat.expand(len(self.weight), -1, -1), self.weight) + self.bias[:, None]
            return torch.einsum("end,ne->nd", each, score).view_as(x)
        if self.how == "gathered":  # one matrix per token
            out = torch.bmm(flat[:, None], self.weight[chosen]).squeeze(1) + self.bias[chosen]
            return (out * score.gather(1, chosen[:, None])).view_as(x)
        out = torch.zeros_like(flat)
        for e in range(len(self.weight)):
            at = (chosen == e).nonzero().flatten()
            mixed = flat[at] @ self.weight[e] + self.bias[e]
            out = out.index_add(0, at, mixed * score[at, e, None])
        return out.view_as(x)


@each("how", ["loop", "all", "gathered"])
@each("shape", [(N, T, D), (4, 4, D), (2, 3, D), (3, 1, D)])
@each("graded", [False, True])
def test_experts_are_exact_however_tokens_are_dealt_out(how: str, shape: tuple[int, ...], graded: bool) -> None:
    # With 3 experts and 3 rows, the axis of experts has the length of the batch.
    against_loop(perturbed(Experts(how)), noise(*shape, seed=9).requires_grad_(graded))


class Prepared(nn.Module):
    """A layer and a norm on what was made of the model's input before any parameter was used."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare, self.line, self.norm = prepare, nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.line(self.prepare(x)).tanh())


PREPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: x * 2, "mean": lambda x: x.mean(1), "last": lambda x: x[:, -1], "a slice": lambda x: x[:, 1:],
    "a scaled slice": lambda x: x[:, 1:] * 2, "padded": lambda x: F.pad(x, (0, 0, 1, 0)),
    "joined": lambda x: torch.cat([x, -x], dim=1), "some positions": lambda x: x[:, [0, 1, 0]],
    "normed": lambda x: F.layer_norm(x, (D,)), "turned twice": lambda x: x.transpose(0, 1).tanh().transpose(0, 1),
    "reversed twice": lambda x: x.flip(0).flip(0), "copied": lambda x: x.clone(), "cast": lambda x: x.float().double(),
    "flat": lambda x: (x.flatten(0, 1) * 2).view_as(x),
}


@each("name", PREPARED)
@each("shape", [(N, T, D), (5, 5, D), (4, 4, D)])
def test_what_a_model_makes_of_its_input_before_any_layer_keeps_its_rows(name: str, shape: tuple[int, ...]) -> None:
    against_loop(perturbed(Prepared(PREPARED[name])), noise(*shape, seed=9))


@pytest.mark.parametrize("rows", [3, 5], ids=["3 rows of 5", "5 rows of 5"])
def test_ids_that_a_model_shifts_or_changes_before_its_only_look_up_keep_their_rows(rows: int) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.line = nn.Embedding(9, D), nn.Linear(D, 3)

        def forward(self, ids: Tensor) -> Tensor:
            start = torch.zeros_like(ids)  # T5's
            start[:, 1:] = ids[:, :-1] + 1
            return self.line(self.table(start).tanh())

    ids = torch.tensor([[0, 1, 1, 6, 2], [6, 6, 6, 6, 6], [3, 2, 1, 0, 5], [2, 2, 1, 1, 0], [4, 5, 6, 0, 3]])
    against_loop(perturbed(Shifted()), ids[:rows])


def test_an_expert_that_no_token_goes_to_has_no_row() -> None:
    model = perturbed(Experts("loop"))
    model.router.bias.data[1] = -1e3
    scope = against_loop(model, noise(N, T, D, seed=9))
    assert scope.layers["weight"].any()


# What has no rows.

def test_an_operation_that_mixes_rows_is_refused_with_the_parameter_and_the_reason() -> None:
    class Mixing(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.weight, self.how = nn.Parameter(torch.zeros(D, D)), how

        def forward(self, x: Tensor) -> Tensor:
            if self.how == "rows are summed over":
                return torch.einsum("btd,df->tf", x, self.weight)
            return F.batch_norm(x.mean(1), None, None, self.weight[0], self.weight[1], training=True)

    for how in ("rows are summed over", "statistics"):
        refused(perturbed(Mixing(how)), noise(N, T, D, seed=9).requires_grad_(),
                r"1 parameter\(s\) got a gradient.*cannot split into rows, first 'weight': (einsum|batch_norm) with "
                r"'weight' gives one rollout another result alone.*Name it in allow=\['weight'\]")


def test_an_autograd_function_of_the_models_own_is_refused_and_says_that_no_call_was_seen() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(D, D), nn.Parameter(torch.zeros(D, D))

        def forward(self, x: Tensor) -> Tensor:
            return Own.apply(self.first(x), self.weight)

    model, x = perturbed(Model()), noise(N, T, D, seed=9)
    refused(model, x, r"first 'weight': no torch call that uses it was seen, but OwnBackward does. "
                      r"Name it in allow=\['weight'\]")
    model.zero_grad()
    with Microscope(model, allow=["weight"]) as scope:
        model(x).square().sum().backward()
    assert scope.coverage < 1
    assert set(scope.layers) == {"first.weight", "first.bias"}


def test_an_operation_that_draws_random_numbers_is_refused_and_draws_them_once() -> None:
    model = perturbed(SelfAttention(D, 2, dropout=0.5, batch_first=True)).train()
    x = noise(N, T, D, seed=9).requires_grad_()
    torch.manual_seed(0)
    plain = model(x)
    after = torch.rand(1)
    torch.manual_seed(0)
    found = []
    with pytest.raises(CreditscopeError, match=r"multi_head_attention_forward.*draws random numbers.*model.eval\(\)"), \
            Microscope(model):  # noqa: PT012
        found += [model(x), torch.rand(1)]
        found[0].square().sum().backward()
    assert torch.equal(found[0], plain)
    assert torch.equal(found[1], after)


def test_a_parameter_that_meets_the_loss_without_rows_is_refused_or_fails_the_check() -> None:
    # A penalty on a weight belongs to no rollout.
    model, x = perturbed(nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2))), noise(N, T, D, seed=9)
    with pytest.raises(CreditscopeError, match=r"'1.weight'"), Microscope(model):
        (model(x).square().sum() + model[1].weight.square().sum()).backward()


def test_a_module_keeps_its_own_forward_and_runs_once_in_its_own_mode() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(D, D)), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            assert isinstance(self.weight, nn.Parameter)
            assert not torch.is_inference(x)
            return torch.einsum("btd,df->btf", x, self.weight)

    model = perturbed(Counts()).train()
    forward = type(model).forward
    with Microscope(model) as scope:
        assert type(model).forward is forward
        assert "forward" not in vars(model)
        out = model(noise(N, T, D, seed=9))
        out.sum().backward()
    assert (model.calls, float(model.seen), model.training) == (1, 1, True)
    assert scope.coverage == 1


# Half precision.

def test_products_of_half_precision_rows_are_not_rounded() -> None:
    rows = noise(N, 300).bfloat16()
    assert apart(dense_gram(rows), rows.double() @ rows.double().T) <= 1e-6
    delta, a = noise(N, 40, 6).bfloat16(), noise(N, 40, 5, seed=1).bfloat16()
    each = torch.einsum("nto,ntd->nod", delta.double(), a.double()).flatten(1)
    assert apart(weight_gram(delta, a)[1], each @ each.T) <= 1e-6


@pytest.mark.parametrize("columns", [SPAN - 1, SPAN, 3 * SPAN + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_products_are_their_float64_twins_also_of_a_slice(columns: int, dtype: torch.dtype) -> None:
    """Rows of so many columns are cut into spans and a rest; slices of rows are strided."""
    rows = noise(N, columns + 8).to(dtype)[:, 4:-4]
    limit = 1e-6 if dtype == torch.float32 else 1e-14
    assert apart(products(rows).double(), rows.double() @ rows.double().T) <= limit


def test_a_product_of_two_million_columns_is_as_exact_as_a_short_one() -> None:
    """A flat float32 sum over so many columns of two rows is off by 6e-5; ROUNDING says 1e-6 of float32."""
    rows = noise(2, 1 << 21).float()
    assert apart(products(rows).double(), rows.double() @ rows.double().T) <= 1e-7


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
