"""Update geometry against numbers by hand and against vectors that are kept whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from creditscope import CreditscopeError, spectrum
from creditscope.microscope.sketch import Sketch, Sketcher
from creditscope.optimizer.geometry import (
    ENTRIES,
    NAMES,
    SampledUpdate,
    UpdateGeometry,
    epsilon_factor,
    reached_share,
    trainable_share,
)
from creditscope.policy.loading import load_policy
from creditscope.runs import schema
from small_models import batch, build, objective


def move(geometry: UpdateGeometry, p: Tensor, grad: list[float], to: list[float]) -> dict[str, float]:
    """The reading of a step that brought p there, whatever the optimiser."""
    p.grad = torch.tensor(grad, dtype=p.dtype)
    geometry.before()
    p.data.copy_(torch.tensor(to, dtype=p.dtype))
    return geometry.after()


def test_the_numbers_by_hand() -> None:
    # θ = (3, 4, 0, 0) -> (3, 4, 1, −2): Δ = (0, 0, 1, −2), ‖Δ‖ = √5, ‖θ‖ = 5. −g = (0, 2, 2, 0): cos = 2/(√5·√8).
    p = nn.Parameter(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    found = move(UpdateGeometry([("p", p)]), p, [0.0, -2.0, -2.0, 0.0], [3.0, 4.0, 1.0, -2.0])
    assert tuple(found) == NAMES
    assert list(found.values()) == pytest.approx([2 / 40**0.5, 5**0.5 / 5, 0.5, 0.5], rel=1e-12)


def test_a_step_that_bfloat16_would_lose_by_hand() -> None:
    # Between 1 and 2 bfloat16 numbers are 2⁻⁷ apart: 1 + 2⁻⁹ rounds back to 1, 1 + 2⁻⁷ does not. Around 0 any step
    # counts, and −2 → −2 is no step in either precision.
    p = nn.Parameter(torch.tensor([1.0, 1.0, 0.0, -2.0]))
    found = move(UpdateGeometry([("p", p)]), p, [1.0] * 4, [1 + 2**-9, 1 + 2**-7, 1e-12, -2.0])
    assert found["update/zero"] == 0.25
    assert found["update/zero_bf16"] == 0.5


def test_plain_sgd_goes_along_the_gradient_and_nothing_else_does() -> None:
    cosines = {}
    for name, make in {"sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
                       "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
                       "ascent": lambda ps: torch.optim.SGD(ps, lr=0.1, maximize=True)}.items():
        p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        geometry, optimizer = UpdateGeometry([("p", p)]), make([p])
        p.grad = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
        geometry.before()
        optimizer.step()
        cosines[name] = geometry.after()["update/cosine"]
    # Adam's first step is the sign of the gradient: (3 + 4)/(5·√2).
    assert cosines == pytest.approx({"sgd": 1.0, "adam": 7 / 50**0.5, "ascent": -1.0}, rel=1e-8)


class Run:
    """A few AdamW steps of a small real model."""

    def __init__(self, **settings: Any) -> None:
        self.model = build("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=24)
        self.geometry = UpdateGeometry(self.model.named_parameters(), **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.seed = 0

    def step(self) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """The reading, and Δ, θ before and g, kept whole."""
        ids, credit = batch(seed=self.seed)
        self.seed += 1
        self.model.zero_grad()
        (-objective(self.model, ids, credit)).backward()
        named = dict(self.model.named_parameters())
        was = {name: p.detach().clone() for name, p in named.items()}
        self.geometry.before()
        self.optimizer.step()
        found = self.geometry.after()
        return (found, {n: p.detach() - was[n] for n, p in named.items()}, was,
                {n: p.grad.clone() for n, p in named.items() if p.grad is not None})


def by_hand(delta: Tensor, theta: Tensor, g: Tensor) -> list[float]:
    lost = (theta + delta).bfloat16() == theta.bfloat16()
    return [float(-(delta @ g) / (delta.norm() * g.norm())), float(delta.norm() / theta.norm()),
            float((delta == 0).double().mean()), float(lost.double().mean())]


def test_a_real_step_in_total_and_layer_by_layer() -> None:
    run = Run()
    for _ in range(3):
        found, *whole = run.step()
        assert list(found.values()) == pytest.approx(by_hand(*(flat(x) for x in whole)), rel=1e-10)
        assert set(run.geometry.layers) == set(whole[0])
        for name, mine in run.geometry.layers.items():
            assert list(mine.values()) == pytest.approx(by_hand(*(x[name].flatten() for x in whole)), rel=1e-10)
    # lr = 1e-3 on weights of 0.02: bfloat16 keeps most of the steps, not all.
    assert 0 < found["update/zero_bf16"] < 0.5


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in named.values()])


def test_the_sketch_is_of_the_update_by_hand() -> None:
    p = nn.Parameter(torch.zeros(4))
    geometry = UpdateGeometry([("p", p)], Sketcher(8))
    move(geometry, p, [1.0] * 4, [0.0, 3.0, 4.0, 0.0])
    move(geometry, p, [1.0] * 4, [0.0, 3.0, 4.0, 1.0])
    # The last update is e₄, not the parameters it led to; one coordinate is sketched without error.
    assert geometry.sketch is not None
    assert float(geometry.sketch.square().sum()) == pytest.approx(1, rel=1e-6)


def test_the_sketched_path_has_the_ranks_of_the_updates() -> None:
    run, updates, sketches, ratios = Run(sketcher=Sketcher(32)), [], [], []
    for _ in range(6):
        found, delta, *_ = run.step()
        updates.append(flat(delta))
        assert run.geometry.sketch is not None
        sketches.append(run.geometry.sketch)
        ratios.append(found["update/ratio"])
    matrix, path = torch.stack(updates), Sketch(torch.stack(sketches), 32, 0, ())
    exact = spectrum((matrix @ matrix.T).numpy())
    assert spectrum(path.gram, eps=1e-7).effective_rank == pytest.approx(exact.effective_rank, rel=0.05)
    assert 1 < exact.effective_rank < 6
    # The sketch of a sum is the sum of the sketches: the path is of the updates and of nothing else.
    assert float((path.gram - matrix @ matrix.T).norm() / (matrix @ matrix.T).norm()) < 3 * path.relative_error
    plain = Run()
    assert [plain.step()[0]["update/ratio"] for _ in range(6)] == ratios


def test_a_number_that_does_not_exist_is_absent() -> None:
    p = nn.Parameter(torch.zeros(2))
    geometry = UpdateGeometry([("p", p), ("frozen", nn.Parameter(torch.ones(2)))])
    found = move(geometry, p, [1.0, 0.0], [0.0, 0.0])
    assert found == {"update/zero": 1.0, "update/zero_bf16": 1.0}
    assert set(geometry.layers) == {"p"}


def test_memory_is_freed_and_order_is_asked_for() -> None:
    p = nn.Parameter(torch.zeros(2))
    geometry = UpdateGeometry([("p", p)])
    with pytest.raises(CreditscopeError, match=r"call before\(\) between backward\(\) and step\(\)"):
        geometry.after()
    move(geometry, p, [1.0, 1.0], [1.0, 1.0])
    with pytest.raises(CreditscopeError, match="no parameter was copied"):
        geometry.after()
    p.grad = torch.ones(2)
    geometry.before()
    p.grad = None
    with pytest.raises(CreditscopeError, match=r"p has lost its gradient: call after\(\) before zero_grad"):
        geometry.after()


def test_a_sampled_update_is_that_of_all_weights_where_the_sample_has_all_of_them() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Parameter(torch.randn(5, 7)), torch.nn.Parameter(torch.randn(11))]
    for p in layers:
        p.grad = torch.randn_like(p) * (torch.rand_like(p) < 0.5)
    whole, sample = UpdateGeometry([(str(i), p) for i, p in enumerate(layers)]), SampledUpdate(layers)
    whole.before()
    torch.optim.SGD(layers, lr=0.1).step()
    expected = whole.after()
    found = SampledUpdate.read(sample.sums())
    assert found == pytest.approx({name: expected[name] for name in (schema.UPDATE_RATIO, schema.UPDATE_ZERO)})


def test_a_sample_weighs_each_parameter_by_its_size() -> None:
    # 8192 weights of 1, of which every second is sampled, all moved by 0.5; 8192/4 weights of 1 that stay.
    large, small = torch.nn.Parameter(torch.ones(2 * ENTRIES)), torch.nn.Parameter(torch.ones(ENTRIES // 2))
    sample = SampledUpdate([large, small])
    large.data += 0.5
    found = SampledUpdate.read(sample.sums())
    # ‖Δ‖² = 8192/4, ‖θ‖² = 8192 + 2048: 0.2; of 10240 weights 2048 did not move.
    assert found == pytest.approx({schema.UPDATE_RATIO: 0.2**0.5, schema.UPDATE_ZERO: 0.2})
    # Two ranks that both hold everything count half each.
    assert SampledUpdate.read(2 * sample.sums(ranks=2)) == pytest.approx(found)


def test_an_update_that_bfloat16_rounds_away_counts_as_zero() -> None:
    # bfloat16 has 8 bits: next to 1 its spacing is 2^-7, and 1 + 2^-9 rounds to 1; next to 2^-10 it does not.
    theta = torch.nn.Parameter(torch.tensor([1.0, 2.0**-10]).bfloat16())
    sample = SampledUpdate([theta])
    theta.data += 2.0**-9
    assert SampledUpdate.read(sample.sums())[schema.UPDATE_ZERO] == 0.5


def test_the_factor_of_epsilon_by_hand() -> None:
    # After one step v̂ = g²: √v̂ = 1e-8, 3e-8, 0. With ε = 1e-8 the factors are 1/2, 3/4, and no third; torch's median
    # of an even number is the lower one.
    theta = torch.nn.Parameter(torch.zeros(3))
    theta.grad = torch.tensor([1e-8, 3e-8, 0.0])
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        optimizer = kind([theta], eps=1e-8)
        assert epsilon_factor(optimizer) is None
        optimizer.step()
        assert epsilon_factor(optimizer) == pytest.approx(0.5, rel=1e-5)
    sgd = torch.optim.SGD([theta], lr=0.1, momentum=0.9)
    sgd.step()
    assert epsilon_factor(sgd) is None


def test_the_factor_of_epsilon_is_the_step_over_the_step_without_it() -> None:
    theta = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([theta], lr=1.0, eps=0.5, betas=(0.0, 0.9))
    for g in (2.0, 0.25, 1.0):
        before = theta.item()
        theta.grad = torch.full_like(theta, g)
        optimizer.step()
    # β₁ = 0: Δ = −g/(√v̂ + ε), and without ε −g/√v̂. v = 0.9²·0.1·4 + 0.9·0.1/16 + 0.1, v̂ = v/(1 − 0.9³).
    root = ((0.81 * 0.4 + 0.09 / 16 + 0.1) / (1 - 0.729)) ** 0.5
    assert theta.item() - before == pytest.approx(-1 / (root + 0.5))
    assert epsilon_factor(optimizer) == pytest.approx(root / (root + 0.5))


def test_the_trained_share_counts_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    model[0].requires_grad_(False)
    assert trainable_share(model) == reached_share(model) == 2 / 8


class Adapted(torch.nn.Module):
    """A layer of 3 × 2 weights, and an adapter of rank 1 beside it: 3 + 2 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(3, 2, bias=False).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(1, 2, bias=False)


def test_an_adapter_reaches_the_whole_weight_that_it_adds_to_while_it_is_trained() -> None:
    model = torch.nn.Sequential(Adapted(), torch.nn.Linear(2, 1, bias=False).requires_grad_(False))
    assert (trainable_share(model), reached_share(model)) == (5 / 13, 6 / 8)
    model[0].requires_grad_(False)
    assert (trainable_share(model), reached_share(model)) == (0, 0)


@pytest.mark.parametrize(("targets", "parts"),
                         [(["q_proj", "v_proj"], ("q_proj", "v_proj")), ("all-linear", ("_proj",))])
def test_a_lora_reaches_the_matrices_of_its_target_modules(targets: list[str] | str, parts: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    model = load_policy("tiny", device="cpu").model
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = sum(size for name, size in sizes.items() if any(part in name for part in parts)) / sum(sizes.values())
    lora = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=targets))
    assert reached_share(lora) == pytest.approx(whole)
    assert trainable_share(lora) < 0.01 < reached_share(lora)
