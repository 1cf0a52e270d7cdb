"""`trust=`: code that no torch call shows is refused, exact where its author is right, and found where he is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope.proof import prove
from creditscope.microscope.scope import Microscope
from small_models import apart, grams, loop, total

ROWS, T, D = 5, 4, 3


class Bent(torch.autograd.Function):
    """tanh, by a function of the model's own that goes around torch. Rows stay where they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.from_numpy(np.tanh(x.numpy(force=True)))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


@torch.library.custom_op("trusted::bent", mutates_args=())
def bent(x: Tensor) -> Tensor:
    """tanh, by an operator of the model's own."""
    return torch.from_numpy(np.tanh(x.numpy(force=True)))


bent.register_autograd(lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2),
                       setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


class Rolled(torch.autograd.Function):
    """Every row in the place of the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return torch.from_numpy(np.roll(x.numpy(force=True), by, 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.roll(-ctx.by, 0), None


class Centred(torch.autograd.Function):
    """Less the mean over the rows of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        given = x.numpy(force=True)
        return torch.from_numpy(given - given.mean(0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class Between(nn.Module):
    """Two linear layers, with somebody's own code before, between or after them."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.before, self.after = before, after
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.second(self.before(self.first(x))))


def given() -> tuple[Tensor, Tensor]:
    """x (B, T, D) and credit (B,)."""
    torch.manual_seed(1)
    return torch.randn(ROWS, T, D, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)


def loss(model: nn.Module, weights: Tensor | None = None) -> Tensor:
    x, credit = given()
    return (model(x).sin().sum((1, 2)) * credit * (1 if weights is None else weights)).sum()


def measured(model: nn.Module, **kwargs: Any) -> Microscope:
    model.zero_grad()
    with Microscope(model, **kwargs) as scope:
        loss(model).backward()
    return scope


def proven(model: nn.Module, **kwargs: Any) -> float:
    return prove(Microscope(model, **kwargs), lambda weights: loss(model, weights).backward(), ROWS)


def refuses(words: str) -> Any:
    return pytest.raises(CreditscopeError, match=words)


def truth(model: nn.Module) -> Tensor:
    """One backward for each rollout."""
    each = torch.eye(ROWS, dtype=torch.float64)
    return total(grams(loop(model, [lambda w=w: loss(model, w) for w in each])))


BENT = [("Bent", Bent.apply), ("trusted::bent", bent)]


@pytest.mark.parametrize(("name", "code"), BENT)
def test_what_comes_after_code_that_no_call_shows_is_refused_with_the_name_to_trust(name: str, code: Any) -> None:
    with refuses(rf"2 parameter\(s\).*cannot split into rows, first 'second.weight': .*{name} is code that no torch "
                 rf"call shows.*trust=\['{name}'\]"):
        measured(Between(code))


@pytest.mark.parametrize("pattern", ["the name", "a pattern"])
@pytest.mark.parametrize(("name", "code"), BENT)
def test_code_that_leaves_rows_in_place_and_is_trusted_is_exact_and_proven(name: str, code: Any, pattern: str) -> None:
    model, trust = Between(code), [name if pattern == "the name" else f"{name[:3]}*"]
    scope = measured(model, trust=trust)
    assert scope.coverage == 1.0
    assert set(scope.layers) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert apart(scope.gram, truth(model)) <= 1e-12
    assert proven(model, trust=trust) < 0.5


@pytest.mark.parametrize(("name", "code"), BENT)
def test_parameters_before_the_code_need_no_trust(name: str, code: Any) -> None:
    model = Between(lambda x: x, code)
    assert apart(measured(model).gram, truth(model)) <= 1e-12
    assert proven(model) < 0.5


def test_trust_in_one_function_is_no_trust_in_another() -> None:
    model = Between(lambda x: Rolled.apply(Bent.apply(x), 0))
    with refuses(r"Rolled is code that no torch call shows.*trust=\['Rolled'\]"):
        measured(model, trust=["Bent"])
    with refuses(r"Bent is code that no torch call shows.*trust=\['Bent'\]"):
        measured(model, trust=["Rolled"])
    assert apart(measured(model, trust=["Bent", "Rolled"]).gram, truth(model)) <= 1e-12


def test_rows_that_trusted_code_moves_and_puts_back_pass_the_check_and_fail_the_proof() -> None:
    model = Between(lambda x: Rolled.apply(x, 1), lambda x: Rolled.apply(x, -1))
    scope = measured(model, trust=["Rolled"])
    assert max(check.error for check in scope.checks.values()) <= 1e-13
    assert apart(scope.gram, truth(model)) > 0.05
    with refuses("alone has a gradient through rollout"):
        proven(model, trust=["Rolled"])


def test_rows_that_trusted_code_mixes_fail_the_proof() -> None:
    model = Between(Centred.apply)
    measured(model, trust=["Centred"])
    with refuses("alone has a gradient through rollout.*mixes rows"):
        proven(model, trust=["Centred"])


def test_trust_does_not_cover_a_parameter_that_is_used_in_the_code() -> None:
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return torch.from_numpy(x.numpy(force=True) * weight.numpy(force=True))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).flatten(0, -2).sum(0)

    model = Between(lambda x: Times.apply(x, model.scale))
    model.scale = nn.Parameter(torch.full((D,), 0.7, dtype=torch.float64))
    with refuses(r"1 parameter\(s\).*first 'scale': no torch call that uses it was seen, but TimesBackward does. Name "
                 r"it in allow=\['scale'\]"):
        measured(model, trust=["Times"])
    scope = measured(model, trust=["Times"], allow=["scale"])
    assert "scale" not in scope.layers
    assert scope.coverage < 1


def test_with_owners_of_positions_trusted_code_keeps_each_position_where_it_is() -> None:
    segments = torch.tensor([[0, 0, 1, 1]] * ROWS) + 2 * torch.arange(ROWS)[:, None]
    model, (x, credit) = Between(Bent.apply), given()

    def part(owner: int | None = None) -> Tensor:
        chosen = torch.ones_like(segments) if owner is None else (segments == owner)
        return (model(x).sin().sum(2) * chosen * credit[:, None]).sum()

    want = total(grams(loop(model, [lambda i=i: part(i) for i in range(2 * ROWS)])))
    model.zero_grad()
    with Microscope(model, segments=segments, trust=["Bent"]) as scope:
        part().backward()
    assert apart(scope.gram, want) <= 1e-12


@pytest.mark.parametrize("trust", ["Bent", [Bent], None, 3])
def test_trust_is_a_list_of_names(trust: Any) -> None:
    with refuses(r"trust= is a list of patterns for names"):
        Microscope(Between(Bent.apply), trust=trust)


class CheckpointRoll(torch.autograd.Function):
    """Its name has the word of a function that is trusted; it was written here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.roll(1, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].roll(-1, 0)


def test_a_function_is_not_trusted_for_its_name() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    model, x = nn.Sequential(first, second), torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(CreditscopeError, match=r"trust=\['CheckpointRoll'\]"), Microscope(model):
        second(CheckpointRoll.apply(model[0](x))).square().sum().backward()


# -- the limit between two passes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollouts", [8, 128])
@pytest.mark.parametrize("lost", [0, 1])
def test_in_bfloat16_a_rollout_that_the_microscope_loses_is_above_the_limit(lost: int, rollouts: int) -> None:
    """One of N independent rows is 1/√2N of the scale √(Σ‖g_i‖² + ‖∇‖²): 0.25 and 0.06. The limits are 0.12 and 0.06.
    A projection of that row is smaller or larger, so a model of one parameter could hide it; this one has 16."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))).bfloat16()
    x, scope = torch.randn(rollouts, 1, 64).bfloat16(), Microscope(model)
    c = torch.randn(rollouts, 1, 64).bfloat16()

    def backward(weights: Tensor) -> None:
        kept = weights.clone()
        if scope._open is not None:
            kept[:lost] = 0
        ((model(x) * c).sum((1, 2)) * kept.to(x)).sum().backward()

    if lost:
        with pytest.raises(CreditscopeError, match="changes the gradient"):
            prove(scope, backward, rollouts)
    else:
        assert prove(scope, backward, rollouts) < 1
