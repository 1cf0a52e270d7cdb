"""F.linear of parameters and rows takes a code path of its own; a call here must not, or gives the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope import watch
from creditscope.microscope.scope import Microscope
from each import each
from one_by_one import against_loop, noise, perturbed, refused
from small_models import apart

N, T, D = 3, 5, 4


class Model(nn.Module):
    """A first product, whose result has the usual layout, and then `use`."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], out: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.use = use
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, out, bias=bias)
        self.vector = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.first(x))


def model_of(use: Callable[[Any, Tensor], Tensor], **kwargs: Any) -> Model:
    return perturbed(Model(use, **kwargs))  # type: ignore[no-any-return]


@each("bias", [False, True])
def test_parameters_and_rows_take_the_path(bias: bool) -> None:
    met: list[Any] = []
    with mock.patch.object(watch.Watch, "_met", lambda self, func, *rest: met.append(func)):
        model, x = model_of(lambda m, h: m.last(h), bias=bias), noise(N, T, D)
        against_loop(model_of(lambda m, h: m.last(h), bias=bias), x)
        with Microscope(model) as scope:
            model(x).sum().backward()
    assert met == []
    assert scope.coverage == 1


def changed_after_it_was_made(m: Any, h: Tensor) -> Tensor:
    weight = m.last.weight * 2.0
    weight.mul_(3.0)
    return F.linear(h, weight, m.last.bias)


def times_a_vector(m: Any, h: Tensor) -> Tensor:
    return F.linear(h, m.vector)


def with_a_bias_made_of_a_parameter(m: Any, h: Tensor) -> Tensor:
    return F.linear(h, m.last.weight, m.last.bias.exp())


def twice_with_one_matrix(m: Any, h: Tensor) -> Tensor:
    return F.linear(h[:, 0], m.last.weight) + F.linear(h, m.last.weight, m.last.bias).sum(dim=1)


def positions_as_rows(m: Any, h: Tensor) -> Tensor:
    return F.linear(h.flatten(0, 1), m.last.weight, m.last.bias).view(*h.shape[:2], -1)


@each("use", [changed_after_it_was_made, times_a_vector, with_a_bias_made_of_a_parameter,
              twice_with_one_matrix, positions_as_rows])
def test_rows_are_those_of_a_loop(use: Callable[[Any, Tensor], Tensor]) -> None:
    against_loop(model_of(use), noise(N, T, D))


def test_rows_that_were_turned_in_place_are_no_longer_in_the_order_of_the_batch() -> None:
    def use(m: Any, h: Tensor) -> Tensor:
        h = h.clone()
        h[:] = h.flip(0)
        return F.linear(h, m.last.weight, m.last.bias)

    refused(model_of(use), noise(N, T, D), "made of several rollouts'")


def test_a_frozen_bias_has_no_row() -> None:
    model = model_of(lambda m, h: m.last(h))
    model.last.bias.requires_grad_(False)
    scope = against_loop(model, noise(N, T, D))
    assert "last.bias" not in scope.layers


def test_a_bias_with_two_axes_is_a_use_of_its_own() -> None:
    model = model_of(lambda m, h: F.linear(h, m.last.weight, m.wide))
    model.wide = nn.Parameter(noise(1, 2))
    against_loop(model, noise(N, T, D))


def test_one_vector_whose_length_is_that_of_the_batch_is_no_batch() -> None:
    # Means over positions and features: one number per row, and there are as many rows as features.
    model = model_of(lambda m, h: F.linear(h.mean(dim=-1).mean(dim=-1), m.last.weight, m.last.bias))
    refused(model, noise(D, T, D), "leading axes")
    assert model.last.weight.grad is not None  # refused after the backward, which is the trainer's own


def test_rows_that_a_foreign_function_gave_a_gradient_are_not_trusted() -> None:
    class Fill(torch.autograd.Function):
        """Writes the mean over rows into its first argument, which needs no gradient before."""

        @staticmethod
        def forward(ctx: Any, into: Tensor, value: Tensor) -> Tensor:
            ctx.mark_dirty(into)
            return into.copy_(value.mean(dim=0, keepdim=True).expand_as(value))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, grad.mean(dim=0, keepdim=True).expand_as(grad)

    def use(m: Any, h: Tensor) -> Tensor:
        into = torch.zeros_like(h.detach() * 1.0)
        into = into + h.detach() * 0
        Fill.apply(into, h)
        return F.linear(into, m.last.weight, m.last.bias)

    refused(model_of(use), noise(N, T, D), "Fill is code that no torch call shows")


class Other(Tensor):
    """A tensor with rules of its own, as quantised ones have."""


@each("what", ["rows", "weight", "bias"])
def test_a_tensor_of_another_class_is_refused_by_name(what: str) -> None:
    model, x = perturbed(nn.Linear(D, 2)), noise(N, T, D)
    if what == "rows":
        x = x.as_subclass(Other)
    else:
        setattr(model, what, nn.Parameter(getattr(model, what).detach().as_subclass(Other)))
    with pytest.raises(CreditscopeError, match="computes with Other"), Microscope(model):
        model(x).as_subclass(Tensor).square().sum().backward()


def test_a_bias_that_is_no_parameter_of_the_model_is_refused_by_name() -> None:
    def use(m: Any, h: Tensor) -> Tensor:
        m.made = nn.Parameter(torch.ones(2, dtype=h.dtype))
        return F.linear(h, m.last.weight, m.made)

    with pytest.raises(CreditscopeError, match="first 'made'"), Microscope(model := model_of(use)):
        model(noise(N, T, D)).sum().backward()


def test_inside_a_transform_rows_cannot_be_told() -> None:
    def under_vmap(m: Any, h: Tensor) -> Tensor:
        return torch.vmap(lambda scale: F.linear(h, m.last.weight, m.last.bias) * scale)(torch.ones(2)).sum(dim=0)

    refused(model_of(under_vmap), noise(N, T, D), "inside a transform of torch.func")


def test_a_pass_without_a_graph_before_is_no_second_forward() -> None:
    class Parts(nn.Module):
        """Called part by part; the frozen embedding is where rows are met."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(7, D), nn.Linear(D, 2)
            self.embed.weight.requires_grad_(False)

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

    model, ids = perturbed(Parts()), torch.arange(N * T).view(N, T) % 7
    with Microscope(model) as alone:
        model.last(model.embed(ids)).square().sum().backward()
    model.zero_grad()
    with Microscope(model) as scope:
        with torch.no_grad():
            model.last(model.embed(ids))
        model.last(model.embed(ids)).square().sum().backward()
    assert apart(scope.gram, alone.gram) <= 1e-12


def test_a_frozen_matrix_that_was_written_through_a_view_is_measured() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(D, D), nn.Parameter(torch.ones(2, D))
            self.frozen = nn.Parameter(torch.zeros(2, D), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            into = nn.Parameter(self.frozen.detach().clone(), requires_grad=False)
            into.copy_(self.weight)
            into[0].mul_(2.0)
            return F.linear(self.first(x), into)

    against_loop(perturbed(Written()), noise(N, T, D))


def test_positions_of_packed_rows_are_told_apart() -> None:
    model, x = model_of(lambda m, h: m.last(h)), noise(2, T, D)
    segments = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 3, -1]])
    keep = (segments >= 0)[..., None]
    with Microscope(model, segments=segments) as scope:
        (model(x) * keep).sum().backward()
    each_row = []
    for i in range(4):
        model.zero_grad(set_to_none=True)
        (model(x) * (segments == i)[..., None]).sum().backward()
        each_row.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    rows = torch.stack(each_row)
    assert apart(scope.gram, rows @ rows.T) <= 1e-12


@each("shape", [(2, D), (2, T - 1, D)])
def test_with_segments_rows_of_another_width_are_refused_after_the_backward(shape: tuple[int, ...]) -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 3, -1]])

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.other = nn.Linear(D, 2), nn.Linear(D, 2)

        def forward(self, x: Tensor, beside: Tensor) -> Tensor:
            return (self.main(x) * (segments >= 0)[..., None]).sum() + self.other(beside).sum()

    model = perturbed(Beside())
    with pytest.raises(CreditscopeError, match=r"'other.weight'.*leading axes"), \
            Microscope(model, segments=segments):
        model(noise(2, T, D), noise(*shape)).backward()
    with Microscope(model, segments=segments, allow=["other.*"]) as scope:
        model(noise(2, T, D), noise(*shape)).backward()
    assert 0 < scope.coverage < 1
