"""The reward-scale probe against really training with other rewards."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from creditscope import METHODS, CreditscopeError, Rollouts, surrogate
from creditscope.optimizer.scale import PHIS, REST, Clipping, RewardParts, ScaleSweep, sensitivity, sweep
from depth import some
from each import each
from small_models import build

METHOD = METHODS["p1_grpo"]  # r − mean, no division by the std: the gradient does see the reward's scale
FIVE = (1e-6, 1e-3, 1e-1, 10.0, 1e3)
SIZES = (1.0, 3.0, 0.5, 2.0, 1.2)  # rewards of the five steps are multiplied by these, so that norms differ
STEPS = len(SIZES)
EPS, BETAS = (1e-8, 1e-5), (0.0, 0.1)
Grads = dict[str, Tensor]

# lr of SGD is small, so that it survives rewards times 1000.
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "adam L2": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-5}),
    "sgd nesterov L2": (torch.optim.SGD, {"lr": 1e-5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd dampened": (torch.optim.SGD, {"lr": 1e-5, "momentum": 0.9, "dampening": 0.5}),
    "adamw maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "adam L2 maximize": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
}


def kinds(*names: str) -> list[tuple[str, float]]:
    """Each of these with each ε; SGD has none, and comes once."""
    return [(kind, eps) for kind in names for eps in (EPS[:1] if KINDS[kind][0] is torch.optim.SGD else EPS)]


def each_of(*cases: Any) -> list[tuple[Any, ...]]:
    """Every combination, with pairs taken apart."""
    return [tuple(x for part in parts for x in (part if isinstance(part, tuple) else (part,)))
            for parts in itertools.product(*cases)]


def make(kind: str, model: nn.Module, eps: float, lr: float | None = None) -> torch.optim.Optimizer:
    optimizer, settings = KINDS[kind]
    settings = settings | ({} if lr is None else {"lr": lr})
    return optimizer(model.parameters(), **settings, **({} if optimizer is torch.optim.SGD else {"eps": eps}))


def log_probs(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


@dataclass
class World:
    """A small real model and fixed rollouts; gradients of −J in their reward part and their rest."""

    model: Any
    ids: Tensor
    rollouts: Rollouts

    @staticmethod
    def start() -> World:
        """At its first weights. There is one world: a run in it ends when the next one starts."""
        world, first = World.made()
        load(world.model, first)
        world.model.zero_grad()
        return world

    @staticmethod
    @cache
    def made() -> tuple[World, Grads]:
        model = build("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=24)
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 50, (8, 7), generator=draw)
        with torch.no_grad():
            logp = log_probs(model, ids)
        reward = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.25], dtype=torch.float64)
        ref = logp + 0.3 * torch.randn(logp.shape, dtype=torch.float64, generator=draw)
        rollouts = Rollouts(tokens=ids[:, 1:], mask=torch.ones_like(ids[:, 1:], dtype=torch.bool), logp=logp,
                            reward=reward, group=torch.arange(8) // 4, ref_logp=ref)
        return World(model, ids, rollouts), weights(model)

    def gradients(self, phi: float, beta: float, t: int) -> tuple[Grads, Grads]:
        """(the part of −∇J that comes from the reward times φ, the part that comes from the KL term) at step t."""
        named = dict(self.model.named_parameters())
        rows = replace(self.rollouts, reward=phi * SIZES[t] * self.rollouts.reward)
        logp = log_probs(self.model, self.ids)
        r = torch.autograd.grad(-surrogate(METHOD, logp, rows), list(named.values()), retain_graph=beta > 0)
        k = tuple(map(torch.zeros_like, r))
        if beta:
            kl = surrogate(METHOD.but(name="with_kl", kl="k3", beta=beta), logp, rows, credit=torch.zeros(8))
            k = torch.autograd.grad(-kl, list(named.values()))
        return dict(zip(named, r, strict=True)), dict(zip(named, k, strict=True))


@dataclass
class Step:
    theta: Grads
    r: Grads
    k: Grads


def load(model: nn.Module, theta: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.data.copy_(theta[name])


def weights(model: nn.Module) -> Grads:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def set_grads(model: nn.Module, step: Step, phi: float, clip: float | None, sign: float) -> tuple[float, Grads]:
    """Put φr + k in place, clipped; the norm before, and the reward's part after."""
    for name, p in model.named_parameters():
        p.grad = sign * (phi * step.r[name] + step.k[name])
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf))
    c = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
    return norm, {name: sign * c * phi * step.r[name] for name in step.r}


@dataclass
class Recorded:
    """A run with rewards as they are, its probe at the last step, and its steps. Tests share it and change nothing."""

    steps: list[Step]
    sweeps: dict[str, ScaleSweep]
    clipping: Clipping | None
    optimizer: torch.optim.Optimizer


@cache
def record(kind: str, eps: float, beta: float, clip: float | None = None, parts: bool = True,
           phis: tuple[float, ...] = FIVE, steps: int = STEPS, lr: float | None = None) -> Recorded:
    world = World.start()
    optimizer = make(kind, world.model, eps, lr)
    sign = -1.0 if "maximize" in kind else 1.0
    follow, clipping = RewardParts(optimizer) if parts else None, Clipping(clip) if clip else None
    seen: list[Step] = []
    found: dict[str, ScaleSweep] = {}
    for t in range(steps):
        seen.append(Step(weights(world.model), *world.gradients(1.0, beta, t)))
        norm, r = set_grads(world.model, seen[-1], 1.0, clip, sign)
        if clipping:
            clipping.norms.append(norm)
        if follow:
            follow.update({p: r[name] for name, p in world.model.named_parameters()})
        if t == steps - 1:
            found = {since: sweep(optimizer, world.model.named_parameters(), phis, since, follow, clipping)
                     for since in ("start", "now")}
        optimizer.step()
    return Recorded(seen, found, clipping, optimizer)


def fed(kind: str, eps: float, steps: list[Step], phi: float, since: str, clip: float | None = None) -> Grads:
    """The last update of a real optimiser that is fed the recorded gradients, their reward part times φ."""
    model = World.start().model
    optimizer = make(kind, model, eps)
    sign = -1.0 if "maximize" in kind else 1.0
    for t, step in enumerate(steps):
        load(model, step.theta)
        set_grads(model, step, phi if since == "start" or t == len(steps) - 1 else 1.0, clip, sign)
        optimizer.step()
    return {name: p.detach() - steps[-1].theta[name] for name, p in model.named_parameters()}


def compare(update: Grads, one: Grads) -> tuple[float, float]:
    a, b = (torch.cat([x[name].flatten() for name in one]) for x in (update, one))
    return float((a - b).norm() / b.norm()), float((a @ b) / (a.norm() * b.norm()))


def trained(kind: str, eps: float, beta: float, phi: float, clip: float | None = None, steps: int = STEPS,
            lr: float | None = None) -> Grads:
    """The last update of a run that was really trained with rewards times φ, from the start."""
    world = World.start()
    optimizer = make(kind, world.model, eps, lr)
    for t in range(steps):
        before = Step(weights(world.model), *world.gradients(phi, beta, t))
        set_grads(world.model, before, 1.0, clip, -1.0 if "maximize" in kind else 1.0)
        optimizer.step()
    return {name: p.detach() - before.theta[name] for name, p in world.model.named_parameters()}


def agree(found: ScaleSweep, i: int, change: float, cosine: float, tolerance: float) -> None:
    assert float(found.change[i]) == pytest.approx(change, rel=tolerance, abs=tolerance)
    assert float(found.cosine[i]) == pytest.approx(cosine, rel=tolerance, abs=tolerance)


# Exact: a real optimiser that is fed the same gradients, their reward part times φ.

@pytest.mark.slow
@each("kind, eps, beta, since", each_of(kinds(*KINDS), BETAS, ["start", "now"]))
def test_the_probe_is_what_the_optimiser_does_with_the_same_gradients(kind: str, eps: float, beta: float,
                                                                      since: str) -> None:
    run = record(kind, eps, beta)
    one = fed(kind, eps, run.steps, 1.0, since)
    for i, phi in enumerate(FIVE):
        agree(run.sweeps[since], i, *compare(fed(kind, eps, run.steps, phi, since), one), 1e-8)


@each("kind", ["adamw", "sgd", "sgd dampened", "adamw fused"])
def test_without_a_rest_no_parts_are_needed(kind: str) -> None:
    with_parts, without = record(kind, 1e-8, 0.0), record(kind, 1e-8, 0.0, parts=False)
    for since in ("start", "now"):
        a, b = with_parts.sweeps[since], without.sweeps[since]
        assert torch.allclose(a.change, b.change, rtol=1e-10, atol=1e-15)
        assert torch.allclose(a.cosine, b.cosine, rtol=1e-12)


# Norms are 2.2, 6.4, 1.1, 4.3 and 2.5.
CLIPS = {"never": 100.0, "always": 0.5, "in between": 3.0}


@pytest.mark.slow
@each("kind, beta, clip", each_of(["adamw", "adam L2", "sgd", "sgd nesterov L2"], BETAS, CLIPS))
def test_clipping_now_is_exact_for_every_scale(kind: str, beta: float, clip: str) -> None:
    run = record(kind, 1e-8, beta, CLIPS[clip])
    one = fed(kind, 1e-8, run.steps, 1.0, "now", CLIPS[clip])
    for i, phi in enumerate(FIVE):
        agree(run.sweeps["now"], i, *compare(fed(kind, 1e-8, run.steps, phi, "now", CLIPS[clip]), one), 1e-8)


@pytest.mark.slow
@each("kind, clip, answered", each_of(["adamw", "adam L2", "sgd dampened", "sgd nesterov L2"], [
    # × 10 the largest norm is 64, below 100; × 1000 no norm is.
    ("never", {1e-6, 1e-3, 1e-1, 10.0}),
    # At c = 0.5 all are clipped, and × 10 too; × 0.1 only the second is.
    ("always", {10.0, 1e3}),
    ("in between", set()),
]))
def test_clipping_since_the_start_is_answered_where_the_state_determines_it(kind: str, clip: str,
                                                                          answered: set[float]) -> None:
    run = record(kind, 1e-8, 0.0, CLIPS[clip])
    one = fed(kind, 1e-8, run.steps, 1.0, "start", CLIPS[clip])
    for i, phi in enumerate(FIVE):
        if phi in answered:
            # Clipped in both worlds, s_t is 1 up to torch's 1e-6 beside a norm of at least 1.1.
            agree(run.sweeps["start"], i, *compare(fed(kind, 1e-8, run.steps, phi, "start", CLIPS[clip]), one),
                  1e-8 if clip == "never" else 2e-6)
        else:
            assert math.isnan(float(run.sweeps["start"].change[i]))
            assert math.isnan(float(run.sweeps["start"].cosine[i]))


@each("clip", CLIPS)
def test_plain_sgd_has_no_memory_so_its_clipping_is_always_determined(clip: str) -> None:
    run = record("sgd", 1e-8, 0.1, CLIPS[clip])
    one = fed("sgd", 1e-8, run.steps, 1.0, "start", CLIPS[clip])
    for i, phi in enumerate(FIVE):
        agree(run.sweeps["start"], i, *compare(fed("sgd", 1e-8, run.steps, phi, "start", CLIPS[clip]), one), 1e-8)


@pytest.mark.slow
@each("kind", ["adamw", "adam L2", "sgd dampened", "sgd nesterov L2"])
def test_with_a_kl_term_clipping_is_answered_where_nothing_is_clipped_otherwise(kind: str) -> None:
    run = record(kind, 1e-8, 0.1, CLIPS["never"])
    one = fed(kind, 1e-8, run.steps, 1.0, "start", CLIPS["never"])
    for i, phi in enumerate(FIVE[:4]):
        agree(run.sweeps["start"], i, *compare(fed(kind, 1e-8, run.steps, phi, "start", CLIPS["never"]), one), 1e-8)
    assert math.isnan(float(run.sweeps["start"].change[4]))
    # Always clipped, by amounts that depend on how reward and KL add up: no φ but 1.
    always = record(kind, 1e-8, 0.1, CLIPS["always"], phis=(*FIVE, 1.0)).sweeps["start"]
    assert [math.isnan(x) for x in always.change.tolist()] == [True] * 5 + [False]
    assert float(always.change[5]) == 0


# Really trained twice.

@pytest.mark.slow
@each("kind, eps, beta, clip", each_of(kinds("adamw", "adam L2", "sgd"), BETAS, [None, 0.5]))
def test_the_first_step_of_a_run_with_other_rewards_is_as_predicted(kind: str, eps: float, beta: float,
                                                                   clip: float | None) -> None:
    # Powers of 2 near the five decades: rewards, and so gradients, are then scaled without rounding.
    phis = tuple(2.0**e for e in (-20, -10, -3, 3, 10))
    found = record(kind, eps, beta, clip, phis=phis, steps=1).sweeps["start" if beta == 0 or clip is None else "now"]
    one = trained(kind, eps, beta, 1.0, clip, steps=1)
    for i, phi in enumerate(phis):
        agree(found, i, *compare(trained(kind, eps, beta, phi, clip, steps=1), one), 1e-8)


@pytest.mark.slow
@pytest.mark.deep
@each("kind, eps, beta, clip", some(each_of(kinds("adamw", "adam L2", "sgd"), BETAS, [None, 100.0, 0.5])))
def test_a_run_that_drifts_away_stays_near_the_prediction(kind: str, eps: float, beta: float,
                                                         clip: float | None) -> None:
    """Five steps of 1e-3 with other rewards lead to other parameters, whose gradients are not the recorded ones.

    Seen: changes of AdamW are 0.649 predicted and 0.656 measured (φ = 1e-6), 0.0538 and 0.0589 (1e-3), 8.3e-4 and
    1.0e-3 (0.1), 8.4e-5 and 1.07e-4 (10). The largest misses: a factor 1.27 in change, 0.18 in cosine.
    """
    found, one = record(kind, eps, beta, clip).sweeps["start"], trained(kind, eps, beta, 1.0, clip)
    for i, phi in enumerate(FIVE):
        change, cosine = compare(trained(kind, eps, beta, phi, clip), one)
        if not math.isnan(float(found.change[i])):
            # 1e-6: steps that are clipped in both worlds are equal up to torch's 1e-6 beside the norm.
            assert change == pytest.approx(float(found.change[i]), rel=0.3, abs=1e-6)
            assert cosine == pytest.approx(float(found.cosine[i]), abs=0.2)


@pytest.mark.slow
@each("kind, beta", each_of(["adamw", "adam L2", "sgd", "sgd nesterov L2"], BETAS))
def test_the_drift_vanishes_with_the_learning_rate(kind: str, beta: float) -> None:
    """So the misses above are drift and nothing else: at lr = 1e-7 they are a thousand times smaller."""
    found, one = record(kind, 1e-8, beta, lr=1e-7).sweeps["start"], trained(kind, 1e-8, beta, 1.0, lr=1e-7)
    for i, phi in enumerate(FIVE[1:4], start=1):
        change, cosine = compare(trained(kind, 1e-8, beta, phi, lr=1e-7), one)
        assert change == pytest.approx(float(found.change[i]), rel=2e-4)
        assert cosine == pytest.approx(float(found.cosine[i]), abs=2e-4)


# What must show, and what must not.

def test_adamw_is_blind_to_the_rewards_scale_over_a_wide_range() -> None:
    found = record("adamw", 1e-8, 0.0, parts=False, phis=PHIS).sweeps["start"]
    assert found.phis == PHIS == tuple(float(f"1e{e}") for e in range(-6, 4))
    change = dict(zip(PHIS, found.change.tolist(), strict=True))
    assert change[1.0] == 0
    assert max(change[phi] for phi in (0.1, 10.0, 100.0, 1000.0)) < 1e-3
    # Not without end: at 1e-6 the gradient is as small as ε.
    assert change[1e-6] > 0.5


@each("kind, eps, beta", [
    ("adamw", 1e-5, 0.0),  # large ε
    ("adamw", 1e-8, 0.1),  # KL
    ("adam L2", 1e-8, 0.0),  # coupled decay
    ("sgd", 1e-8, 0.0),
])
def test_what_breaks_the_blindness_shows(kind: str, eps: float, beta: float) -> None:
    assert float(record(kind, eps, beta).sweeps["start"].change[2]) > 0.1


def test_clipping_breaks_the_blindness_when_it_binds_in_one_world_only() -> None:
    run = record("adamw", 1e-8, 0.0, 0.5, parts=False)
    one = fed("adamw", 1e-8, run.steps, 1.0, "start", 0.5)
    # Rewards × 0.1 are clipped at one step of five, the recorded ones at all. No state tells, hence nan.
    assert compare(fed("adamw", 1e-8, run.steps, 0.1, "start", 0.5), one)[0] > 0.05
    assert math.isnan(float(run.sweeps["start"].change[2]))
    assert float(run.sweeps["now"].change[2]) > 0.01
    # × 10 and × 1000 are clipped to the same gradients.
    assert float(run.sweeps["start"].change[3:].max()) < 1e-6


def test_sgd_follows_the_scale_exactly() -> None:
    found = record("sgd dampened", 1e-8, 0.0, parts=False, phis=PHIS).sweeps["start"]
    assert torch.allclose(found.change, (torch.tensor(PHIS, dtype=torch.float64) - 1).abs(), rtol=1e-12)
    assert torch.allclose(found.cosine, torch.ones(10, dtype=torch.float64), rtol=1e-12)


# By hand.

def one_number(kind: type[torch.optim.Optimizer], grads: list[float], theta: float = 0.0,
               **settings: Any) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """An optimiser of one number before the last of these steps."""
    p = nn.Parameter(torch.tensor([theta], dtype=torch.float64))
    optimizer = kind([p], **settings)
    for g in grads[:-1]:
        p.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        p.data.fill_(theta)
    p.grad = torch.tensor([grads[-1]], dtype=torch.float64)
    return optimizer, p


def test_the_change_by_hand() -> None:
    # g = 3, 3: m̂ = 3, √v̂ = 3, whatever the betas. ε = 1: Δ(1) = −lr·3/4, and Δ(1/2) = −lr·3/(3 + 2) = −lr·3/5.
    # |3/5 − 3/4|/(3/4) = 1/5. Decay −lr·0.25·1 adds to both: 0.15/(0.75 + 0.25).
    optimizer, p = one_number(torch.optim.AdamW, [3.0, 3.0], lr=0.1, eps=1.0, weight_decay=0.0)
    assert float(sweep(optimizer, [("p", p)], (0.5,)).change) == pytest.approx(0.2, rel=1e-12)
    optimizer, p = one_number(torch.optim.AdamW, [3.0, 3.0], theta=1.0, lr=0.1, eps=1.0, weight_decay=0.25)
    assert float(sweep(optimizer, [("p", p)], (0.5,)).change) == pytest.approx(0.15, rel=1e-12)


def test_the_change_now_by_hand() -> None:
    # β = (1/2, 3/4), g = (1, 3), ε = 0. Δ(1) = −lr·(7/3)/√(39/7). With 3·φ = 1: m̂ = 1, v̂ = 1, Δ = −lr.
    optimizer, p = one_number(torch.optim.AdamW, [1.0, 3.0], lr=0.1, betas=(0.5, 0.75), eps=0.0, weight_decay=0.0)
    found = sweep(optimizer, [("p", p)], (1 / 3,), since="now")
    true = 7 / 3 / (39 / 7) ** 0.5
    assert float(found.change) == pytest.approx((1 - true) / true, rel=1e-9)


def test_the_parts_by_hand() -> None:
    # Adam, one step: r = 3, k = 1, ε = 0. Δ(φ) = −lr·sign(3φ + 1): no change for φ > 0, all of it for r = −3:
    # −3 + 1 < 0, but −0.3 + 1 > 0, so Δ(0.1) = −Δ(1): change 2, cosine −1.
    for r, change, cosine in ((3.0, 0.0, 1.0), (-3.0, 2.0, -1.0)):
        optimizer, p = one_number(torch.optim.Adam, [r + 1.0], lr=0.1, eps=0.0)
        parts = RewardParts(optimizer)
        parts.update({p: torch.tensor([r], dtype=torch.float64)})
        found = sweep(optimizer, [("p", p)], (0.1,), parts=parts)
        assert float(found.change) == pytest.approx(change, abs=1e-12)
        assert float(found.cosine) == pytest.approx(cosine, rel=1e-12)
    # SGD: φ·3 + 1 against 4.
    optimizer, p = one_number(torch.optim.SGD, [4.0], lr=0.1, momentum=0.9)
    parts = RewardParts(optimizer)
    parts.update({p: torch.tensor([3.0], dtype=torch.float64)})
    assert float(sweep(optimizer, [("p", p)], (0.5,), parts=parts).change) == pytest.approx(1.5 / 4, rel=1e-12)


def test_the_parts_of_a_dampened_buffer_by_hand() -> None:
    # μ = 1/2, τ = 1/4, twice r = 3 and k = 1. The first step is not dampened: b = 4, then 2 + 3 = 5; of k alone 1, then
    # 1/2 + 3/4 = 5/4. φ = 1/2: (5 + 5/4)/2 = 25/8, a change of (5 − 25/8)/5 = 3/8.
    optimizer, p = one_number(torch.optim.SGD, [4.0], lr=0.1, momentum=0.5, dampening=0.25)
    parts, r = RewardParts(optimizer), torch.tensor([3.0], dtype=torch.float64)
    parts.update({p: r})
    optimizer.step()
    parts.update({p: r})
    assert float(sweep(optimizer, [("p", p)], (0.5,), parts=parts).change) == pytest.approx(3 / 8, rel=1e-12)


def test_the_factor_of_clipping_by_hand() -> None:
    # c = 1. Norms 0.2 and 0.4: × 2 never clips. Norms 4 and 8: × 2 gives 2·(1/8)/(1/4) = 1. Norms 0.5 and 4: × 4 gives
    # 4·(1/2)/1 = 2 and 4·(1/16)/(1/4) = 1. Equal norms have a common factor even when only one world clips.
    assert Clipping(1.0, [0.2, 0.4]).factor(2.0) == 2.0
    assert Clipping(1.0, [4.0, 8.0]).factor(2.0) == pytest.approx(1, abs=1e-6)
    assert math.isnan(Clipping(1.0, [0.5, 4.0]).factor(4.0))
    assert Clipping(1.0, [0.5, 0.5]).factor(4.0) == pytest.approx(2, rel=1e-5)
    # A step without gradient has no factor of its own.
    assert Clipping(1.0, [4.0, 0.0, 8.0]).factor(2.0) == pytest.approx(1, abs=1e-6)
    assert Clipping(1.0, [0.0]).factor(2.0) == 2.0
    g = torch.tensor([3.0, 4.0])
    p = nn.Parameter(torch.zeros(2))
    p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_([p], 0.7)
    assert p.grad.tolist() == pytest.approx((Clipping(0.7).coefficient(5.0) * g).tolist(), rel=1e-6)


# The rest.

def test_amsgrad_scales_too() -> None:
    grads = [3.0, -1.0, 0.5]
    optimizer, p = one_number(torch.optim.Adam, grads, lr=0.1, eps=0.3, betas=(0.9, 0.5), amsgrad=True)
    predicted = float(sweep(optimizer, [("p", p)], (0.1,)).change)
    ends = []
    for phi in (0.1, 1.0):
        other, q = one_number(torch.optim.Adam, [phi * g for g in grads], lr=0.1, eps=0.3, betas=(0.9, 0.5),
                              amsgrad=True)
        other.step()
        ends.append(float(q.detach()))
    assert predicted == pytest.approx(abs(ends[0] - ends[1]) / abs(ends[1]), rel=1e-12)


@each("kind", [torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_optimiser_answers_from_this_step_on(kind: type[torch.optim.Optimizer]) -> None:
    grads = [3.0, -1.0, 0.5]
    optimizer, p = one_number(kind, grads, lr=0.1)
    predicted = sweep(optimizer, [("p", p)], (0.1, 10.0), since="now").change.tolist()
    one = None
    for phi, said in ((1.0, 0.0), (0.1, predicted[0]), (10.0, predicted[1])):
        other, q = one_number(kind, [*grads[:-1], phi * grads[-1]], lr=0.1)
        other.step()
        one = float(q.detach()) if one is None else one
        assert abs(float(q.detach()) - one) / abs(one) == pytest.approx(said, abs=1e-12)


def test_the_layers_add_up_to_the_whole() -> None:
    run = record("adamw", 1e-5, 0.1)
    found, one = run.sweeps["start"], fed("adamw", 1e-5, run.steps, 1.0, "start")
    assert list(found.layers) == list(one)
    squares = torch.tensor([float(one[name].square().sum()) for name in found.layers], dtype=torch.float64)
    changes = torch.stack([change for change, _ in found.layers.values()])
    whole = ((changes.square() * squares[:, None]).sum(0) / squares.sum()).sqrt()
    assert torch.allclose(whole, found.change, rtol=1e-8)
    other = fed("adamw", 1e-5, run.steps, 0.1, "start")
    for name, (change, cosine) in found.layers.items():
        assert (float(change[2]), float(cosine[2])) == pytest.approx(compare({name: other[name]}, {name: one[name]}),
                                                                    rel=1e-8)


def test_sensitivity_is_the_change_at_a_tenth() -> None:
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.randn(40, 50, dtype=torch.float64)), nn.Parameter(torch.randn(7, dtype=torch.float64)))
    optimizer = torch.optim.AdamW([p, q], eps=1e-1)
    for _ in range(3):
        p.grad, q.grad = torch.randn_like(p), torch.randn_like(q)
        optimizer.step()
    whole = sensitivity(optimizer)
    assert whole == float(sweep(optimizer, [("p", p), ("q", q)], (0.1,)).change)
    assert sensitivity(torch.optim.SGD([p, q], momentum=0.9)) == pytest.approx(0.9, rel=1e-12)
    assert sensitivity(torch.optim.SGD([p, q])) == pytest.approx(0.9, rel=1e-12)


def test_the_change_over_two_parameters_by_hand() -> None:
    # ε = 1, one step, no decay. g = 1: Δ(1) = 1/2, Δ(0.1) = 1/11. g = 9: 9/10 and 9/19. p has four
    # ones and q two nines: ‖Δ(1)‖² = 4·(1/2)² + 2·(9/10)².
    p, q = nn.Parameter(torch.zeros(4, dtype=torch.float64)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p, q], lr=1.0, eps=1.0, weight_decay=0.0)
    p.grad, q.grad = torch.ones_like(p), 9 * torch.ones_like(q)
    far = 4 * (1 / 2 - 1 / 11) ** 2 + 2 * (9 / 10 - 9 / 19) ** 2
    assert sensitivity(optimizer) == pytest.approx((far / (4 / 4 + 2 * 0.81)) ** 0.5, rel=1e-12)


@pytest.mark.slow
@each("kind", [kind for kind in KINDS if "L2" not in kind])
def test_following_the_parts_leaves_training_as_it_was_to_the_bit(kind: str) -> None:
    plain, followed = record(kind, 1e-8, 0.1, parts=False, steps=3), record(kind, 1e-8, 0.1, steps=3)
    for a, b in zip(plain.steps, followed.steps, strict=True):
        assert all(torch.equal(a.theta[name], b.theta[name]) for name in a.theta)
    state = next(iter(followed.optimizer.state.values()))
    assert (set(REST) if "adam" in kind else set(REST[:1])) == set(REST) & set(state)


@each("kind", ["adamw", "adam L2", "sgd nesterov L2"])
def test_a_checkpoint_of_the_optimiser_carries_the_parts(kind: str) -> None:
    steps = record(kind, 1e-8, 0.1).steps
    model, answers = World.start().model, []
    for stops in ((), (1, 3)):
        optimizer = make(kind, model, 1e-8)
        parts = RewardParts(optimizer)
        for t, step in enumerate(steps):
            if t in stops:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make(kind, model, 1e-8)
                optimizer.load_state_dict(saved)
                parts = RewardParts(optimizer)
            load(model, step.theta)
            _, r = set_grads(model, step, 1.0, None, 1.0)
            parts.update({p: r[name] for name, p in model.named_parameters()})
            if t == STEPS - 1:
                answers.append(sweep(optimizer, model.named_parameters(), FIVE, parts=parts))
            optimizer.step()
    assert torch.equal(answers[0].change, answers[1].change)
    assert torch.equal(answers[0].cosine, answers[1].cosine)


def test_float32_is_good_to_its_rounding_for_every_scale() -> None:
    """Without a rest the averages of the rest are exactly 0, so no difference of equal numbers spoils φ = 1e-6."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        draw = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(1000, generator=draw).to(dtype))
        optimizer = torch.optim.AdamW([p], eps=1e-8)
        parts = RewardParts(optimizer)
        for _ in range(5):
            p.grad = (1e-3 * torch.randn(1000, generator=draw)).to(dtype)
            parts.update({p: p.grad.clone()})
            found[dtype] = sweep(optimizer, [("p", p)], PHIS, parts=parts)
            optimizer.step()
    assert torch.allclose(found[torch.float32].change, found[torch.float64].change, rtol=1e-5, atol=2e-7)
    assert found[torch.float32].change.dtype == torch.float64


def test_a_probe_leaves_the_optimiser_as_it_was() -> None:
    ends = []
    for probing in (False, True):
        optimizer, p = one_number(torch.optim.AdamW, [3.0, 1.0], theta=1.0, lr=0.1)
        if probing:
            for since in ("start", "now"):
                sweep(optimizer, [("p", p)], since=since)
            sensitivity(optimizer)
        assert p.grad is not None
        assert p.grad.tolist() == [1.0]
        optimizer.step()
        ends.append((p.tolist(), [t.tolist() for t in optimizer.state[p].values()]))
    assert ends[0] == ends[1]


def refused(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, grads: tuple[float, ...] = (1.0, 2.0),
            settings: dict[str, Any] | None = None, parts: bool = False, **given: Any) -> None:
    optimizer, p = one_number(kind, list(grads), lr=0.1, **(settings or {}))
    follow = RewardParts(optimizer) if parts else None
    if follow:
        follow.update({p: torch.ones(1, dtype=torch.float64)})
    sweep(optimizer, given.pop("named", [("p", p)]), parts=follow, **given)


@each("call, says", [
    (lambda: refused(since="then"), "unknown since 'then'.*Choices: now, start"),
    (lambda: refused(phis=(0.0, 1.0)), r"finite φ > 0, got \[0.0, 1.0\]"),
    (lambda: refused(torch.optim.NAdam), "not NAdam; ask since='now'"),
    (lambda: refused(torch.optim.Adam, settings={"weight_decay": 0.1}), "follow it with RewardParts"),
    (lambda: refused(grads=(1.0,), settings={"amsgrad": True}, parts=True), "amsgrad keeps the largest v"),
    (lambda: refused(parts=True), "make RewardParts before the first step"),
    (lambda: refused(clipping=Clipping(1.0)), "Clipping has no norms"),
    (lambda: refused(clipping=Clipping(1.0, [2.0])), "1 norms, but this is step 2"),
    (lambda: refused(named=[]), r"shape \(1,\) that has no name"),
    (lambda: RewardParts(torch.optim.NAdam([nn.Parameter(torch.ones(1))])), "not NAdam"),
])
def test_what_cannot_be_answered_is_refused(call: Any, says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        call()


def test_parts_are_taken_in_once_a_step_and_whole() -> None:
    optimizer, p = one_number(torch.optim.AdamW, [1.0], lr=0.1)
    parts, r = RewardParts(optimizer), torch.ones(1, dtype=torch.float64)
    with pytest.raises(CreditscopeError, match="has not seen this step's gradient"):
        sweep(optimizer, [("p", p)], parts=parts)
    with pytest.raises(CreditscopeError, match=r"lacks a parameter of shape \(1,\)"):
        parts.update({})
    parts.update({p: r})
    with pytest.raises(CreditscopeError, match="it was called twice"):
        parts.update({p: r})
    optimizer.step()
    optimizer.step()
    with pytest.raises(CreditscopeError, match="a step was taken without it"):
        parts.update({p: r})
    optimizer.zero_grad()
    with pytest.raises(CreditscopeError, match="no parameter has a gradient"):
        sensitivity(optimizer)


def test_what_is_left_of_v_below_rounding_is_not_answered() -> None:
    # Float32, a rest ten thousand times the reward's part: with rewards × 1000, v needs eight digits of v − v_rest.
    theta = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.Adam([theta], lr=1e-3)
    parts = RewardParts(optimizer)
    draw = torch.Generator().manual_seed(0)
    for step in range(4):
        reward = 1e-4 * torch.randn(64, generator=draw)
        theta.grad = reward + torch.randn(64, generator=draw)
        parts.update({theta: reward})
        if step == 3:
            found = sweep(optimizer, [("theta", theta)], (1e-3, 1.0, 1e3), parts=parts)
        optimizer.step()
    assert found.change.isnan().tolist() == [False, False, True]
    assert float(found.change[1]) == 0
