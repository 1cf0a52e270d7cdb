"""The parts of the next update against the step that follows, for every optimiser, and a probe that leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from creditscope import CreditscopeError
from creditscope.optimizer.families import Parts, bare
from creditscope.optimizer.state import first_moment, moving, split, updates
from each import each

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
FAST: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}, {"foreach": False}]

ADAM: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adam eps": (torch.optim.Adam, {"eps": 1e-2, "betas": (0.8, 0.9)}),
    "adam without β₁": (torch.optim.Adam, {"betas": (0.0, 0.9)}),
    "adam L2": (torch.optim.Adam, {"weight_decay": 0.3}),
    "adam L2 maximize": (torch.optim.Adam, {"weight_decay": 0.3, "maximize": True}),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.9, 0.5)}),
    "adam decoupled": (torch.optim.Adam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.3}),
    "adamw amsgrad": (torch.optim.AdamW, {"weight_decay": 0.3, "amsgrad": True, "betas": (0.9, 0.5)}),
    "adamw maximize": (torch.optim.AdamW, {"weight_decay": 0.3, "maximize": True}),
}
SGD: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd L2 maximize": (torch.optim.SGD, {"weight_decay": 0.3, "maximize": True}),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.3}),
    "sgd dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
    "sgd nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3}),
    "sgd nesterov maximize": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}
CLOSED = {**ADAM, **SGD}
OTHER: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "nadam": (torch.optim.NAdam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.3}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}


class Odd(torch.optim.Optimizer):
    """Keeps things where no torch optimiser does: numbers and lists in state, counters in its group and on itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "count": 0, "clock": torch.zeros(())})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            group["clock"].add_(1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["past"] = [*state.get("past", []), p.grad.clone()][-2:]
                state["n"] = state.get("n", 0) + 1
                state.setdefault("nested", {"sum": torch.zeros_like(p)})["sum"] += p.grad
                p.grad.mul_(2)  # some change their gradient on the way
                noise = 1 + torch.rand_like(p)
                p.sub_(group["lr"] / group["clock"] * noise * (p.grad + sum(state["past"]) + state["nested"]["sum"]))


def counterfactual(optimizer: Any, scale: Any) -> dict[Tensor, Tensor]:
    """The update with every gradient times `scale`, or `scale(gradient)`."""
    change = scale if callable(scale) else lambda g: g.mul_(scale)
    return updates(optimizer, {p: change(p.grad.clone()) for _, p in moving(bare(optimizer)) if p.grad is not None})


def makers() -> dict[str, Make]:
    """Every optimiser with every option, by name."""
    found: dict[str, Make] = {}
    for name, (kind, settings) in CLOSED.items():
        for fast in FAST:
            found[f"{name} {fast}"] = lambda ps, k=kind, s=settings, f=fast: k(ps, lr=0.02, **s, **f)
    for name, (kind, settings) in OTHER.items():
        found[name] = lambda ps, k=kind, s=settings: k(ps, lr=0.02, **s)
    if hasattr(torch.optim, "Muon"):
        found["muon"] = lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.02, weight_decay=0.3)
    found["adafactor"] = lambda ps: torch.optim.Adafactor(ps, lr=0.02)
    found["odd"] = Odd
    return found


MAKERS = makers()


pytestmark = pytest.mark.filterwarnings("ignore:TF32")


@pytest.fixture(autouse=True)
def no_onednn() -> Iterator[None]:
    """Muon works in bfloat16, and oneDNN's dies on virtual machines that announce AMX and do not allow it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Trainer:
    """Parameters of the shapes that a model has, their optimiser, and a new gradient whenever asked."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float64) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = [(9, 4), (4,), (6, 4), (4, 6), (4,), (9, 4)]
        self.params = [nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype))
                       for shape in shapes]
        self.params[-1].requires_grad_(False)  # a parameter that never has a gradient
        self.optimizer = make(self.params)
        self.seed = 0

    def backward(self) -> None:
        """∂/∂θ of ½ Σ (θ − θ*)², each coordinate with a weight of its own: some gradients are small."""
        draw = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        for p in self.params[:-1]:
            goal, scale = (torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype) for _ in range(2))
            p.grad = scale.exp() * (p.detach() - goal)

    def walk(self, steps: int) -> Iterator[int]:
        for step in range(steps):
            self.backward()
            yield step
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]

    def step(self) -> dict[Tensor, Tensor]:
        """What step() really does."""
        was = dict(zip(self.params, self.weights(), strict=True))
        self.optimizer.step()
        return {p: p.detach() - was[p] for p in was if p.grad is not None}


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))


@pytest.mark.slow
@each("name, history", product(MAKERS, [0, 1, 4]))
def test_the_parts_sum_to_what_step_does(name: str, history: int) -> None:
    torch.manual_seed(0)
    run = Trainer(MAKERS[name])
    for _ in run.walk(history):
        pass
    run.backward()
    parts = split(run.optimizer)
    real = run.step()
    moved = {p for group in run.optimizer.param_groups for p in group["params"] if p.grad is not None}
    assert set(parts) == moved
    assert max(float(real[p].abs().max()) for p in parts) > 1e-5
    for p, mine in parts.items():
        # θ is of order 1, so a real update of 1e-2 is known to 1e-14 relative.
        assert apart(mine.total, real[p]) < 1e-11 or float((mine.total - real[p]).abs().max()) < 2e-15


@each("name", CLOSED)
def test_the_closed_form_agrees_with_really_stepping_where_the_two_definitions_meet(name: str) -> None:
    """The true update always. For SGD also the parts: with gradient 0 and no decay only momentum is left."""
    kind, settings = CLOSED[name]
    run = Trainer(lambda ps: kind(ps, lr=0.02, **settings))
    for _ in run.walk(3):
        pass
    run.backward()
    parts, true, without = split(run.optimizer), counterfactual(run.optimizer, 1.0), counterfactual(run.optimizer, 0.0)
    for p, mine in parts.items():
        assert float((mine.total - true[p]).abs().max()) < 1e-14
        if kind is torch.optim.SGD and not settings.get("weight_decay"):
            assert float((mine.momentum - without[p]).abs().max()) < 1e-14
    if name == "adam":
        # What the gradient does to v̂: the two definitions of momentum are not the same, and neither is negligible.
        assert max(apart(parts[p].momentum, without[p]) for p in parts) > 0.05


def one(kind: type[torch.optim.Optimizer], theta: float, grads: list[float], **settings: Any) -> Parts:
    """Parts of the last of these steps on a single number."""
    p = nn.Parameter(torch.tensor([theta], dtype=torch.float64))
    optimizer = kind([p], **settings)
    for g in grads[:-1]:
        p.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        p.data.fill_(theta)
    p.grad = torch.tensor([grads[-1]], dtype=torch.float64)
    return split(optimizer)[p]


def numbers(parts: Parts) -> list[float]:
    return [float(parts.momentum), float(parts.fresh), float(parts.decay)]


def test_adamw_by_hand() -> None:
    # β = (1/2, 3/4), g = (1, 3): m₁ = 1/2, and m₂ = 1/4 + 3/2 with 1 − β₁² = 3/4: m̂ = 1/3 + 2. v̂ = 39/7 as in the
    # replay. ε = 1, lr = 0.1: −0.1·(1/3)/(√(39/7)+1), −0.1·2/(√(39/7)+1), and −0.1·0.5·8 = −0.4 of decay.
    below = (39 / 7) ** 0.5 + 1
    got = one(torch.optim.AdamW, 8.0, [1.0, 3.0], lr=0.1, betas=(0.5, 0.75), eps=1.0, weight_decay=0.5)
    assert numbers(got) == pytest.approx([-0.1 / 3 / below, -0.2 / below, -0.4], rel=1e-13)


def test_coupled_decay_counts_as_fresh_by_hand() -> None:
    # One step: g = 3 + 0.5·8 = 7, m̂ = 7, v̂ = 49. Maximize: −3 + 4 = 1.
    got = one(torch.optim.Adam, 8.0, [3.0], lr=0.1, eps=1.0, weight_decay=0.5)
    assert numbers(got) == pytest.approx([0, -0.7 / 8, 0], rel=1e-13)
    got = one(torch.optim.Adam, 8.0, [3.0], lr=0.1, eps=1.0, weight_decay=0.5, maximize=True)
    assert numbers(got) == pytest.approx([0, -0.1 / 2, 0], rel=1e-13)


def test_sgd_by_hand() -> None:
    # b₁ = 4. Then μ = 1/2, τ = 1/4, g = 8: 2 from the buffer and 6 from the gradient; Nesterov (τ = 0): 1 and 8 + 4.
    got = one(torch.optim.SGD, 0.0, [4.0, 8.0], lr=0.1, momentum=0.5, dampening=0.25)
    assert numbers(got) == pytest.approx([-0.2, -0.6, 0], rel=1e-14)
    got = one(torch.optim.SGD, 0.0, [4.0, 8.0], lr=0.1, momentum=0.5, nesterov=True)
    assert numbers(got) == pytest.approx([-0.1, -1.2, 0], rel=1e-14)
    # The first step: no buffer, no dampening.
    got = one(torch.optim.SGD, 0.0, [4.0], lr=0.1, momentum=0.5, dampening=0.25)
    assert numbers(got) == pytest.approx([0, -0.4, 0], rel=1e-14)


@each("kind, settings, shape", [(kind, settings, shape) for shape in ((), (1,)) for kind, settings in (
    (torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {"foreach": False}), (torch.optim.SGD, {"momentum": 0.9}),
)])
def test_a_learning_rate_may_be_a_tensor(kind: Any, settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    run = Trainer(lambda ps: kind(ps, lr=torch.full(shape, 0.02, dtype=torch.float64), weight_decay=0.1, **settings))
    for _ in run.walk(2):
        pass
    run.backward()
    parts, real = split(run.optimizer), run.step()
    assert max(apart(parts[p].total, real[p]) for p in parts) < 1e-11


def test_groups_have_their_own_settings() -> None:
    def make(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": ps[:3], "lr": 0.5, "weight_decay": 0.0}, {"params": ps[3:]}], lr=0.01)

    run = Trainer(make)
    for _ in run.walk(2):
        pass
    run.backward()
    parts, real = split(run.optimizer), run.step()
    assert max(apart(parts[p].total, real[p]) for p in parts) < 1e-11
    assert not parts[run.params[0]].decay.any()
    assert parts[run.params[3]].decay.any()


def test_half_precision_is_split_in_float32() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    p.grad = torch.tensor([3.0, -5.0], dtype=torch.bfloat16)
    parts = split(torch.optim.AdamW([p], lr=1e-3, weight_decay=0.0))[p]
    assert parts.total.dtype == torch.float32
    # The first step is lr·sign(g), which bfloat16 cannot hold beside 1 and 2.
    assert torch.allclose(parts.total, torch.tensor([-1e-3, 1e-3]), rtol=1e-6)


def test_the_first_moment_is_the_live_buffer_and_absent_before_the_first_step() -> None:
    for name, key in (("adamw {'foreach': True}", "exp_avg"), ("sgd momentum {'foreach': True}", "momentum_buffer"),
                      ("sgd {'foreach': True}", None), ("rmsprop", "momentum_buffer")):
        run = Trainer(MAKERS[name])
        run.backward()
        p = next(p for p in run.params if p.grad is not None)
        assert first_moment(run.optimizer, p) is None
        assert p not in run.optimizer.state  # asking has not made an entry
        run.optimizer.step()
        found = first_moment(run.optimizer, p)
        assert found is (run.optimizer.state[p][key] if key else None)


# Counterfactuals.

def frozen(value: Any) -> Any:
    """A deep copy in which tensors are compared by bits."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().clone().numpy().tobytes()
    if isinstance(value, dict):
        return {id(k) if isinstance(k, Tensor) else k: frozen(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(v) for v in value]
    return copy.copy(value)


def everything(run: Trainer) -> Any:
    """Bits and identities of all that a probe must leave alone."""
    tensors = [t for state in run.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return (frozen([p.detach() for p in run.params]), frozen([p.grad for p in run.params]), frozen(run.optimizer.state),
            frozen(run.optimizer.param_groups), [id(t) for t in tensors], [id(p.grad) for p in run.params],
            [p.data_ptr() for p in run.params], {k: id(v) for k, v in vars(run.optimizer).items()},
            torch.get_rng_state().numpy().tobytes())


@pytest.mark.slow
@each("name, history", product(MAKERS, [0, 3]))
def test_a_counterfactual_leaves_everything_as_it_was_to_the_bit(name: str, history: int) -> None:
    torch.manual_seed(0)
    run = Trainer(MAKERS[name])
    for _ in run.walk(history):
        pass
    run.backward()
    before = everything(run)
    counterfactual(run.optimizer, 0.0)
    counterfactual(run.optimizer, lambda g: g.neg_())
    split(run.optimizer)
    assert everything(run) == before


@pytest.mark.slow
@each("name", MAKERS)
def test_training_goes_on_to_the_bit_as_if_there_had_been_no_probe(name: str) -> None:
    ends = []
    for probing in (False, True):
        torch.manual_seed(0)
        run = Trainer(MAKERS[name])
        for _ in run.walk(4):
            if probing:
                counterfactual(run.optimizer, 0.0)
                split(run.optimizer)
        ends.append(frozen(run.weights()))
    assert ends[0] == ends[1]


@pytest.mark.slow
@each("name, history", product(MAKERS, [0, 2]))
def test_a_counterfactual_is_what_step_does_with_those_gradients(name: str, history: int) -> None:
    torch.manual_seed(0)
    run = Trainer(MAKERS[name])
    for _ in run.walk(history):
        pass
    run.backward()
    halved, other = counterfactual(run.optimizer, 0.5), counterfactual(run.optimizer, lambda g: 0.5 * g)
    for p in run.params:
        if p.grad is not None:
            p.grad *= 0.5
    real = run.step()
    for p, mine in halved.items():
        assert torch.equal(mine, real[p])
        assert torch.equal(mine, other[p])


@each("name", ["nadam", "rmsprop", "odd"])
def test_hooks_do_not_run_and_schedulers_do_not_hear(name: str) -> None:
    run, heard = Trainer(MAKERS[name]), []
    run.optimizer.register_step_pre_hook(lambda *_: heard.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: heard.append("post"))
    everywhere = [register_optimizer_step_pre_hook(lambda *_: heard.append("all pre")),
                  register_optimizer_step_post_hook(lambda *_: heard.append("all post"))]
    try:
        scheduler, lr = LambdaLR(run.optimizer, lambda epoch: 1 / (1 + epoch)), run.optimizer.param_groups[0]["lr"]
        patched = run.optimizer.step
        run.backward()
        split(run.optimizer)
        assert heard == []
        assert run.optimizer.step is patched
        assert not getattr(run.optimizer, "_opt_called", False)
        run.optimizer.step()
        assert heard == ["all pre", "pre", "post", "all post"]
        scheduler.step()
        run.backward()
        split(run.optimizer)
        assert run.optimizer.param_groups[0]["lr"] == lr / 2
    finally:
        for handle in everywhere:
            handle.remove()


@each("name", ["adamw {'fused': True}", "radam", "odd"])
def test_a_step_that_the_user_has_patched_is_not_called(name: str) -> None:
    run, called = Trainer(MAKERS[name]), []
    real = run.optimizer.step

    def step(*args: Any) -> None:
        called.append(args)
        real(*args)

    run.optimizer.step = step  # type: ignore[method-assign, assignment]
    run.backward()
    counterfactual(run.optimizer, 0.0)
    assert called == []
    run.optimizer.step()
    assert called == [()]


def test_a_step_that_fails_leaves_everything_as_it_was() -> None:
    run = Trainer(MAKERS["adamw {'foreach': True}"])
    for _ in run.walk(2):
        pass
    run.backward()
    before, p = everything(run), next(p for p in run.params if p.grad is not None)
    with pytest.raises(RuntimeError):
        updates(run.optimizer, {p: torch.ones(p.shape).double().to_sparse()})
    assert everything(run) == before


def test_accelerates_wrapper_is_looked_through() -> None:
    wrapper = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    run = Trainer(MAKERS["adamw {'foreach': True}"])
    wrapped = wrapper.__new__(wrapper)  # its __init__ would start accelerate for the whole process
    wrapped.optimizer = run.optimizer
    assert bare(wrapped) is run.optimizer
    run.backward()
    mine, theirs = split(wrapped), split(run.optimizer)
    assert all(torch.equal(mine[p].total, theirs[p].total) for p in theirs)


def test_an_optimiser_that_needs_a_closure_is_refused() -> None:
    run = Trainer(torch.optim.LBFGS)
    run.backward()
    with pytest.raises(CreditscopeError, match="LBFGS evaluates the loss inside step"):
        counterfactual(run.optimizer, 1.0)


@each("family, decay", [(torch.optim.AdamW, 0.1), (torch.optim.AdamW, 0.0),
                        (torch.optim.Adam, 0.0)])
def test_adams_parts_by_hand(family: type[torch.optim.Adam], decay: float) -> None:
    # Gradient 1, then 2, betas (0.9, 0.99), lr 0.1. Before step 2: m = 0.1, v = 0.01. After it: v = 0.0099 + 0.04 =
    # 0.0499, v̂ = 0.0499/0.0199 = 2.507538, √ = 1.583521; 1 − 0.9² = 0.19. momentum: 0.09/0.19 = 0.473684;
    # fresh: 0.2/0.19 = 1.052632; each times −0.1/1.583521.
    theta = torch.nn.Parameter(torch.tensor([5.0], dtype=torch.float64))
    optimizer = family([theta], lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=decay)
    theta.grad = torch.ones_like(theta)
    assert split(optimizer)[theta].momentum.item() == 0  # nothing is remembered yet
    optimizer.step()
    theta.grad = 2 * torch.ones_like(theta)
    parts = split(optimizer)[theta]
    assert parts.momentum.item() == pytest.approx(-0.1 * 0.473684 / 1.583521, rel=1e-5)
    assert parts.fresh.item() == pytest.approx(-0.1 * 1.052632 / 1.583521, rel=1e-5)
    assert parts.decay.item() == pytest.approx(-0.1 * decay * theta.item())
