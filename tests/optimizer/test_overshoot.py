"""Overshoot: three sights by hand, a slow loop over tokens, and real optimisers on a real model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from creditscope import METHODS, CreditscopeError, Method, Rollouts, surrogate
from creditscope.methods.table import GRPO
from creditscope.objective.bounds import beyond, bounded_tokens, edges_of, overhang
from creditscope.optimizer.families import Parts
from creditscope.optimizer.overshoot import Overshoot, OvershootReading, first_order
from creditscope.optimizer.state import split
from each import each
from makers import make, moved
from small_models import batch as token_batch
from small_models import build, trainable

D = torch.float64
UP, DOWN = math.log(1.2), -math.log(0.8)  # GRPO's edges, as distances from 0


def tracked(row: Method, credit: list[float], width: int = 1) -> tuple[Overshoot, Rollouts]:
    batch = make([0] * len(credit), group=[0] * len(credit), lengths=[width] * len(credit))
    return Overshoot(row, batch, torch.tensor(credit, dtype=D)), batch


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_three_sights_by_hand() -> None:
    # Four one-token answers, A = (1, 1, −1, 0). The second good token never crosses; the last one has no credit.
    track, batch = tracked(GRPO, [1, 1, -1, 0])
    for moves in ([0, 0, 0, 0], [.3, .1, -.4, 2], [.45, .1, -.3, 2]):
        track.see(batch.logp + torch.tensor(moves, dtype=D)[:, None])
    first, second, third = track.readings()
    assert first == OvershootReading(updates=0, tokens=3, past=0.0, distance=None, overshoot=0.0, max=None, after=None,
                                     kl=0.0)
    # After one update tokens 1 and 3 are past, by 0.3 − log 1.2 and 0.4 + log 0.8; nothing has moved since.
    near, far = 0.3 - UP, 0.4 - DOWN
    assert (second.updates, second.tokens, second.after) == (1, 3, 0.0)
    assert second.past == pytest.approx(2 / 3)
    assert second.distance == pytest.approx((near + far) / 2)
    assert second.overshoot == pytest.approx((near + far) / 3)
    assert second.max == pytest.approx(max(near, far))
    # Then the good one moves 0.15 further out and the bad one 0.1 back in.
    assert third.past == pytest.approx(2 / 3)
    assert third.distance == pytest.approx((near + far + .05) / 2)
    assert third.max == pytest.approx(near + .15)
    assert third.after == pytest.approx((.15 - .1) / (near + far + .05))
    assert third.kl == pytest.approx(sum(math.exp(x) - 1 - x for x in (.45, .1, -.3, 2)) / 4)
    # The steps that carried the two across were 0.3 and 0.4; the next ones 0.15 and −0.1.
    assert track.carry(0) == pytest.approx((.15 - .1) / (.3 + .4), abs=1e-12)
    assert track.carry(1) is None


def test_metrics_hold_the_last_reading_and_one_for_each_update() -> None:
    track, batch = tracked(GRPO, [1, -1])
    assert track.metrics() == {}
    track.see(batch.logp)
    assert track.metrics() == {}  # no update has been seen, so there is nothing to say about one
    for move in (.3, .4):
        track.see(batch.logp + torch.tensor([[move], [0.0]], dtype=D))
    found = track.metrics()
    near, far = .3 - UP, .4 - UP
    expected = {
        "optimizer/overshoot": far / 2, "overshoot/carry": .1 / .3, "overshoot/past": 1 / 2, "overshoot/distance": far,
        "overshoot/max": far, "overshoot/after": .1 / far, "overshoot/kl": (math.exp(.4) - 1.4) / 2,
        "overshoot/1/past": 1 / 2, "overshoot/1/distance": near, "overshoot/1/overshoot": near / 2,
        "overshoot/1/after": 0.0, "overshoot/1/kl": (math.exp(.3) - 1.3) / 2,
        "overshoot/2/past": 1 / 2, "overshoot/2/distance": far, "overshoot/2/overshoot": far / 2,
        "overshoot/2/after": .1 / far, "overshoot/2/kl": (math.exp(.4) - 1.4) / 2}
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_number_that_does_not_exist_is_absent() -> None:
    track, batch = tracked(METHODS["p1_grpo"], [1, -1])
    for _ in range(2):
        track.see(batch.logp)
    assert track.metrics() == {"overshoot/kl": 0.0, "overshoot/1/kl": 0.0}
    assert (track.stops, track.carry()) == (None, None)


def test_tokens_that_stay_inside_have_no_distance() -> None:
    track, batch = tracked(GRPO, [1, -1])
    for _ in range(2):
        track.see(batch.logp)
        assert track.loss(batch.logp) == 0
    assert track.metrics() == {"optimizer/overshoot": 0.0, "overshoot/past": 0.0, "overshoot/kl": 0.0,
                               "overshoot/1/past": 0.0, "overshoot/1/overshoot": 0.0, "overshoot/1/kl": 0.0}
    assert track.stops == "zero"


def test_a_token_that_comes_back_and_leaves_again_opens_a_new_account() -> None:
    track, batch = tracked(GRPO, [1])
    for move in (0, .3, .4, .1, .5, .6):
        track.see(batch.logp + move)
    # Lag 0: +.1 after a crossing of .3, +.1 after a crossing of .4. Lag 1: −.3 after .3, from outside to inside.
    assert track.carry(0) == pytest.approx((.1 + .1) / (.3 + .4), abs=1e-12)
    assert track.carry(1) == pytest.approx(-.3 / .3, abs=1e-12)
    assert track.carry(2) is None
    assert track.carry(-1) is None
    last = track.readings()[-1]
    assert last.after == pytest.approx(.1 / (.6 - UP), abs=1e-12)


def test_a_token_that_starts_past_its_edge_was_not_seen_to_cross() -> None:
    track, batch = tracked(GRPO, [1])
    for move in (.3, .4):
        track.see(batch.logp + move)
    assert track.carry(0) is None
    assert track.readings()[0].past == 1
    assert track.readings()[1].after == pytest.approx(.1 / (.4 - UP), abs=1e-12)


def test_a_token_pushed_past_the_far_edge_counts_as_past_but_carries_nothing() -> None:
    track, batch = tracked(GRPO.but(name="x", dual_clip=3.0), [-1])
    for move in (0, 1.5, 1.7):
        track.see(batch.logp + move)
    assert track.readings()[-1].distance == pytest.approx(1.7 - math.log(3), abs=1e-12)
    assert track.readings()[-1].after == pytest.approx(.2 / (1.7 - math.log(3)), abs=1e-12)
    assert track.carry(0) is None


def test_a_token_outside_by_another_edge_than_the_one_it_moved_towards_carries_nothing() -> None:
    # A < 0. Token 1 goes up, past the dual clip; token 2 goes down and takes the mean towards −δ = −0.5, to −0.4. So
    # token 1 came nearer to an edge in the direction of A, from 0.2231 (the clip) to 0.1, but crossed another one.
    track, batch = tracked(METHODS["grpo_v32"].but(name="x", clip_low=.2, dual_clip=3.0), [-1], width=2)
    for moves in ([0, 0], [1.5, -2.3], [1.6, -2.3]):
        track.see(batch.logp + torch.tensor([moves], dtype=D))
    # Token 2 crossed the clip by 2.3 and stays there.
    assert track.readings()[-1].past == 1
    assert track.carry(0) == 0


@pytest.mark.parametrize(("name", "tokens"), [
    ("grpo", 2), ("cppo", 1), ("cppo_topk", 1), ("dapo", 0)])  # |A| > 0.5; the larger half; groups with unlike rewards
def test_rollouts_that_the_method_drops_have_no_edge(name: str, tokens: int) -> None:
    track, batch = tracked(METHODS[name], [1, .1])
    track.see(batch.logp + 1)
    assert track.readings()[0].tokens == tokens


def test_the_kl_is_that_of_a_whole_distribution_on_average() -> None:
    # KL(old ‖ new) = Σ_v p_v log(p_v/q_v), and Σ_v p_v (ρ_v − 1 − log ρ_v) is the same, as Σ_v p_v ρ_v = 1.
    p, q = torch.tensor([.1, .2, .3, .4], dtype=D), torch.tensor([.4, .3, .2, .1], dtype=D)
    draws = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])  # each v in its share of ten
    batch = Rollouts(tokens=draws[None], mask=torch.ones(1, 10, dtype=torch.bool), logp=p.log()[draws][None],
                     reward=torch.zeros(1, dtype=D), group=torch.tensor([0]))
    track = Overshoot(GRPO, batch, torch.ones(1))
    track.see(q.log()[draws][None])
    assert track.readings()[0].kl == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-12)


@pytest.mark.parametrize(("logp", "rows", "why"), [
    ((2, 3), None, r"logp must be \(rows, T\) = \(4, 3\), got \(2, 3\)"),
    ((2, 3), [0, 0], r"rows must be different numbers from 0 to 3, got \[0, 0\]"),
    ((2, 3), [0, 4], r"rows must be different numbers from 0 to 3, got \[0, 4\]"),
    ((2, 3), [True, False], r"rows must be an int64 tensor \(n,\) of row numbers, got torch.bool")])
def test_a_pass_that_does_not_fit_says_why(logp: tuple[int, int], rows: list[int] | None, why: str) -> None:
    track, _ = tracked(GRPO, [1, 1, -1, 0], width=3)
    with pytest.raises(CreditscopeError, match=why):
        track.see(torch.zeros(logp), None if rows is None else torch.tensor(rows))


def test_credit_that_does_not_fit_says_why() -> None:
    with pytest.raises(CreditscopeError, match=r"credit must be \(B,\) = \(2,\) or \(B, T\) = \(2, 3\), got \(3,\)"):
        Overshoot(GRPO, make([1, 0], group=[0, 0], lengths=[3, 2]), torch.ones(3))


# -- twin: one token at a time ----------------------------------------------------------------------------------------


def slowly(row: Method, batch: Rollouts, credit: Tensor,
           passes: list[tuple[Tensor, Tensor]]) -> tuple[list[dict[str, float]], dict[int, list[float]]]:
    """Readings by sight number and [Σ moves, Σ carrying moves] by lag, from the whole path of each token."""
    paths: dict[int, list[Tensor]] = {i: [] for i in range(len(batch))}
    for logp, rows in passes:
        for at, i in enumerate(rows.tolist()):
            paths[i].append(logp[at])
    full = credit.expand_as(batch.mask)
    has = bounded_tokens(row, batch.logp, batch.mask, full)
    sights = max(len(path) for path in paths.values())
    sums = [dict.fromkeys(("tokens", "past", "total", "after", "k3", "chosen", "max"), 0.0) for _ in range(sights)]
    lags: dict[int, list[float]] = {}
    for i, path in paths.items():
        mask, old, a = batch.mask[i:i + 1], batch.logp[i:i + 1], full[i:i + 1]
        away = torch.stack([beyond(row, x[None], old, mask, a)[0] for x in path]).tolist()
        edges = edges_of(row, old, mask, a)
        ahead = torch.stack([overhang(edges, x[None], old, mask, a)[0][0] for x in path]).tolist()
        for t in range(batch.mask.shape[1]):
            entered = None
            for k in range(len(path)):
                d = away[k][t]
                if entered is not None and ahead[entered][t] > 0 and entered > 0:
                    pair = lags.setdefault(k - entered - 1, [0.0, 0.0])
                    pair[0] += ahead[k][t] - ahead[k - 1][t]
                    pair[1] += ahead[entered][t] - ahead[entered - 1][t]
                entered = None if d == 0 else k if entered is None else entered
                if has[i, t]:
                    sums[k]["tokens"] += 1
                    sums[k]["past"] += d > 0
                    sums[k]["total"] += d
                    sums[k]["after"] += 0.0 if entered is None else d - away[entered][t]
                    sums[k]["max"] = max(sums[k]["max"], d)
                if batch.mask[i, t]:
                    x = (path[k][t] - batch.logp[i, t]).item()
                    sums[k]["k3"] += math.exp(x) - 1 - x
                    sums[k]["chosen"] += 1
    return sums, lags


WALKED = {name: METHODS[name] for name in ("grpo", "grpo_v32", "gspo", "gspo_token", "gcpo", "gmpo", "cispo", "dppo",
                                           "dppo_kl", "sapo", "vespo", "ppo")}
WALKED["dual"] = METHODS["grpo_v32"].but(name="dual", clip_low=0.5, dual_clip=1.21, trust_high=0.2)


@pytest.mark.slow
@each("seed", range(4))
@each("name", sorted(WALKED))
def test_random_walks_in_minibatches_read_as_a_loop_over_tokens_does(name: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    row = WALKED[name]
    batch = make([1, 0, 0, 1, .5, 0], group=[0] * 6, lengths=[3, 5, 0, 4, 6, 2], seed=seed)
    credit = torch.randn(6, 6 if name == "ppo" else 1, generator=draw, dtype=D)
    credit[-1] = 0
    logp, passes = batch.logp.clone(), []
    for _ in range(5):
        for rows in torch.randperm(6, generator=draw).split(4):  # 4 rows and 2, other ones each time
            passes.append((logp[rows], rows))
            logp = (logp + 0.3 * torch.randn(logp.shape, generator=draw, dtype=D)).clamp(max=-1e-3)
    passes.append((logp[:3], torch.tensor([0, 1, 2])))  # some rows are seen once more
    track = Overshoot(row, batch, credit)
    for seen in passes:
        track.see(*seen)
    sums, lags = slowly(row, batch, credit, passes)
    readings = track.readings()
    assert len(readings) == len(sums) == 6
    for k, (ours, slow) in enumerate(zip(readings, sums, strict=True)):
        assert (ours.updates, ours.tokens) == (k, slow["tokens"])
        assert ours.kl == pytest.approx(slow["k3"] / slow["chosen"], abs=1e-12)
        assert ours.past == pytest.approx(slow["past"] / slow["tokens"], abs=1e-12)
        assert ours.overshoot == pytest.approx(slow["total"] / slow["tokens"], abs=1e-12)
        if not slow["past"]:
            assert (ours.distance, ours.max, ours.after) == (None, None, None)
            continue
        assert ours.distance == pytest.approx(slow["total"] / slow["past"], abs=1e-12)
        assert ours.max == pytest.approx(slow["max"], abs=1e-12)
        assert ours.after == pytest.approx(slow["after"] / slow["total"], abs=1e-10)
    assert any(reading.past for reading in readings)
    assert lags
    for lag in range(6):
        expected = lags[lag][0] / lags[lag][1] if lag in lags else None
        assert track.carry(lag) == (None if expected is None else pytest.approx(expected, abs=1e-10))


def test_float32_reads_as_float64_does_up_to_rounding() -> None:
    batch = make([1, 0, 0, 1], group=[0] * 4, lengths=[5, 6, 7, 8])
    credit = torch.tensor([1., -1., -.5, 2.])
    wide = Overshoot(GRPO, batch, credit)
    narrow = Overshoot(GRPO, make([1, 0, 0, 1], group=[0] * 4, lengths=[5, 6, 7, 8], dtype=torch.float32), credit)
    for k in range(4):
        logp = moved(batch, 0.2 * k, seed=k)
        wide.see(logp)
        narrow.see(logp.float())
    ours, exact = narrow.metrics(), wide.metrics()
    assert ours == pytest.approx(exact, abs=1e-5)


# -- real optimisers ------------------------------------------------------------------------------------------------


class OneParameter(nn.Module):
    """log π = log π_old + θ."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1, dtype=D))

    def forward(self, old: Tensor) -> Tensor:
        return old + self.theta


def train_alone(row: Method, credit: float, optimise: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
                steps: int) -> Overshoot:
    """One answer of one token, `steps` updates and a last look."""
    batch = make([0], group=[0], lengths=[1])
    model, given = OneParameter(), torch.tensor([credit], dtype=D)
    optimizer, track = optimise(model.parameters()), Overshoot(row, batch, given)
    for _ in range(steps):
        logp = model(batch.logp)
        track.see(logp)
        optimizer.zero_grad()
        (-surrogate(row, logp, batch, given)).backward()
        optimizer.step()
    track.see(model(batch.logp))
    return track


# A term that is A·log π until the trust region drops it: the gradient is constant, then 0.
CONSTANT = METHODS["p1_grpo"].but(name="x", trust="off_policy_sequence", trust_high=0.5)


@pytest.mark.parametrize(("step", "lag", "printed"), [(2, 0, .6786), (10, 0, .9047), (50, 4, .6763)])
def test_adamw_on_one_token_carries_what_p2_derives(step: int, lag: int, printed: float) -> None:
    # C_{T,k} = [β₁^{k+1}(1−β₁^{T−1})/(1−β₁^{T+k})]·√(β₂^{−(k+1)}(1−β₂^{T+k})/(1−β₂^{T−1})). Under a constant gradient
    # Adam moves lr a step, so an lr of 0.5/(T − 1.5) crosses δ = 0.5 at step T − 1.
    b1, b2 = .9, .95
    expected = (b1**(lag + 1) * (1 - b1**(step - 1)) / (1 - b1**(step + lag))
                * math.sqrt(b2**-(lag + 1) * (1 - b2**(step + lag)) / (1 - b2**(step - 1))))
    assert expected == pytest.approx(printed, abs=5e-5)
    track = train_alone(CONSTANT, -1.0, lambda p: torch.optim.AdamW(
        p, 0.5 / (step - 1.5), betas=(b1, b2), eps=1e-30, weight_decay=0.0), steps=step + lag)
    assert track.carry(lag) == pytest.approx(expected, abs=1e-10)
    # It was first seen past by half a step; what followed is Σ_k C_{T,k} steps.
    followed = sum(track.carry(k) or 0.0 for k in range(lag + 1))
    assert track.readings()[-1].after == pytest.approx(followed / (followed + .5), abs=1e-10)


def test_sgd_without_momentum_leaves_a_lone_token_where_its_gradient_became_zero() -> None:
    for row, credit in ((GRPO, 1.0), (GRPO, -1.0), (CONSTANT, -1.0)):
        track = train_alone(row, credit, lambda p: torch.optim.SGD(p, 0.3), steps=6)
        last = track.readings()[-1]
        assert last.past == 1
        assert last.after == 0
        assert [track.carry(lag) for lag in range(3)] == [0.0, 0.0, 0.0]


def test_sgd_with_momentum_carries_its_momentum() -> None:
    # b = Σ μ^j g: constant g for c steps, then none. Δ_{c+k+1}/Δ_c = μ^{k+1}, whatever c.
    track = train_alone(CONSTANT, -1.0, lambda p: torch.optim.SGD(p, 0.1, momentum=0.8), steps=8)
    assert [track.carry(lag) for lag in range(3)] == pytest.approx([.8, .64, .512], abs=1e-12)
    assert (track.readings()[-1].after or 0.0) > 0


def test_a_cap_does_not_stop_a_token_and_a_soft_gate_only_slows_it() -> None:
    cap = train_alone(METHODS["cispo"], 1.0, lambda p: torch.optim.SGD(p, 0.2), steps=6)
    soft = train_alone(METHODS["sapo"], 1.0, lambda p: torch.optim.SGD(p, 0.5), steps=6)
    assert (cap.stops, soft.stops) == ("cap", "half")
    # Under the cap every step is lr·1.28; the one that crossed log 1.28 started at log s = 0.2, with weight e^0.2.
    assert cap.carry(0) == pytest.approx(1.28 / math.exp(.2), abs=1e-12)
    carried = soft.carry(0)
    assert carried is not None
    assert 0 < carried < 1


@pytest.fixture
def _plain_kernels() -> Iterator[None]:
    """Muon multiplies in bfloat16, for which oneDNN picks instructions that not every CPU has."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


IDS, CREDIT = token_batch(n=4, t=9)
OPTIMISERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=4e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=2e-2, weight_decay=0.1),
}


def chosen(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None]).squeeze(2)


def small() -> tuple[nn.Module, Rollouts]:
    model = build("gpt2")  # float64 throughout; many families compute their norms in float32
    batch = Rollouts(tokens=IDS[:, 1:], mask=torch.ones_like(CREDIT, dtype=torch.bool), logp=chosen(model).detach(),
                     reward=torch.zeros(4, dtype=D), group=torch.tensor([0, 0, 1, 1]))
    return model, batch


def update(row: Method, model: nn.Module, batch: Rollouts, optimizer: torch.optim.Optimizer, track: Overshoot,
           rows: Tensor | None = None) -> Tensor:
    """One pass, its gradient, one step; what the tracker was shown."""
    logp = chosen(model)
    track.see(logp if rows is None else logp[rows], rows)
    optimizer.zero_grad()
    (-surrogate(row, logp, batch, CREDIT)).backward()
    optimizer.step()
    return logp.detach()


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.parametrize("name", sorted(OPTIMISERS))
def test_the_account_of_four_inner_steps_closes(name: str) -> None:
    row = GRPO.but(name="x", aggregate="sequence_sum")
    model, batch = small()
    optimizer, track = OPTIMISERS[name](list(trainable(model).values())), Overshoot(row, batch, CREDIT)
    path = [update(row, model, batch, optimizer, track) for _ in range(4)]
    path.append(chosen(model).detach())
    track.see(path[-1])
    past = torch.stack([beyond(row, logp, batch.logp, batch.mask, CREDIT) for logp in path])
    readings = track.readings()
    assert readings[0].past == 0
    assert (readings[-1].past or 0.0) > 0.2
    # Token by token: the distance when first seen past in this stay, plus moves out, minus moves in.
    entered, out, back = 0.0, 0.0, 0.0
    for way in past.flatten(1).T.tolist():
        if way[-1] == 0:
            continue
        start = max((k for k, d in enumerate(way) if d == 0), default=-1) + 1
        steps = [b - a for a, b in zip(way[start:], way[start + 1:], strict=False)]
        entered += way[start]
        out += sum(step for step in steps if step > 0)
        back -= sum(step for step in steps if step < 0)
    last = readings[-1]
    assert last.overshoot is not None
    assert last.after is not None
    total = last.overshoot * last.tokens
    assert total == pytest.approx(past[-1].sum().item(), abs=1e-10)
    assert total == pytest.approx(entered + out - back, abs=1e-10)
    assert last.after * total == pytest.approx(out - back, abs=1e-10)
    assert out > 0
    assert track.carry(0) is not None


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.parametrize("name", sorted(OPTIMISERS))
def test_first_order_foretells_the_change_of_overshoot_as_the_step_shrinks(name: str) -> None:
    row = GRPO.but(name="x", aggregate="sequence_sum")
    model, batch = small()
    optimizer, track = OPTIMISERS[name](list(trainable(model).values())), Overshoot(row, batch, CREDIT)
    for _ in range(4):
        update(row, model, batch, optimizer, track)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = track.loss(chosen(model))
    slope = dict(zip(params, torch.autograd.grad(before, params), strict=True))
    optimizer.zero_grad()
    (-surrogate(row, chosen(model), batch, CREDIT)).backward()
    start = copy.deepcopy([p.data for p in params])
    full = split(optimizer)
    optimizer.step()
    step = [p.data - s for p, s in zip(params, start, strict=True)]
    predicted = sum(first_order(slope, full).values())
    assert before.item() > 0
    assert abs(predicted) > 1e-3
    errors = []
    for shrink in (1e-2, 1e-3, 1e-4):  # Δθ is proportional to lr, so this is the step of a smaller lr
        for p, s, d in zip(params, start, step, strict=True):
            p.data = s + shrink * d
        change = (track.loss(chosen(model)) - before).item()
        errors.append(abs(change / (shrink * predicted) - 1))
    assert errors[2] < 1e-4
    assert errors[2] < errors[0] / 50


def test_first_order_by_hand() -> None:
    a, b = torch.zeros(2, dtype=D), torch.zeros(1, dtype=D)
    slope = {a: torch.tensor([1., 2.], dtype=D), b: torch.tensor([3.], dtype=D), torch.zeros(1): torch.ones(1)}
    parts = {a: Parts(*(torch.tensor(x, dtype=D) for x in ([.1, .2], [1., -1.], [0., .5]))),
             b: Parts(*(torch.tensor(x, dtype=D) for x in ([2.], [0.], [-1.])))}
    # ⟨(1, 2), (.1, .2)⟩ + 3·2,  ⟨(1, 2), (1, −1)⟩ + 0,  ⟨(1, 2), (0, .5)⟩ − 3; the third parameter does not move.
    assert first_order(slope, parts) == pytest.approx({"momentum": 6.5, "fresh": -1.0, "decay": -2.0})
    with pytest.raises(CreditscopeError, match="slope lacks 1 of the 2 parameters"):
        first_order({a: slope[a]}, parts)


def test_a_lone_token_that_is_stopped_is_moved_by_momentum_and_decay_alone() -> None:
    batch, model = make([0], group=[0], lengths=[1]), OneParameter()
    credit = torch.ones(1, dtype=D)
    optimizer, track = torch.optim.AdamW(model.parameters(), lr=0.3, weight_decay=0.1), Overshoot(GRPO, batch, credit)
    for _ in range(2):  # the first update crosses log 1.2, the second starts past it
        logp = model(batch.logp)
        optimizer.zero_grad()
        (-surrogate(GRPO, logp, batch, credit)).backward()
        before, (slope,) = track.loss(logp), torch.autograd.grad(track.loss(model(batch.logp)), [model.theta])
        due = first_order({model.theta: slope}, split(optimizer))
        optimizer.step()
    change = (track.loss(model(batch.logp)) - before).item()
    assert due["fresh"] == 0
    assert due["momentum"] > 0
    assert due["decay"] == pytest.approx(-.3 * .1 * .3, abs=1e-9)  # −lr·λ·θ at θ = lr
    assert change == pytest.approx(sum(due.values()), abs=1e-12)  # exact: distance is linear in θ here


def test_the_loss_is_the_total_distance_and_its_rows_add_up() -> None:
    batch = make([1, 0, 0, 1], group=[0] * 4, lengths=[5, 6, 7, 8])
    credit = torch.tensor([1., -1., -.5, 2.], dtype=D)
    logp = moved(batch, 0.6).requires_grad_()
    for name in ("grpo", "gspo", "gmpo", "vespo", "grpo_v32"):
        track = Overshoot(METHODS[name], batch, credit)
        whole = track.loss(logp)
        assert whole.item() == pytest.approx(
            beyond(METHODS[name], logp, batch.logp, batch.mask, credit[:, None]).sum().item(), abs=1e-12)
        halves = track.loss(logp[2:], torch.tensor([2, 3])) + track.loss(logp[:2], torch.tensor([0, 1]))
        assert halves.item() == pytest.approx(whole.item(), abs=1e-12)
        (slope,) = torch.autograd.grad(whole, logp)
        past = beyond(METHODS[name], logp, batch.logp, batch.mask, credit[:, None]) > 0
        assert bool((slope[~batch.mask] == 0).all())
        assert torch.equal(slope != 0, past)


def test_gspo_token_has_the_distance_of_gspo_and_its_slope_too() -> None:
    # Its ratio has the token's gradient on purpose; how far the sequence is past its edge has not.
    batch = make([1, 0], group=[0, 0], lengths=[4, 5])
    credit = torch.tensor([[1., -1, 1, 1, 0], [-1, -1, 2, 1, -1]], dtype=D)
    logp = moved(batch, 0.6).requires_grad_()
    slopes = [torch.autograd.grad(Overshoot(METHODS[name], batch, credit).loss(logp), logp)[0]
              for name in ("gspo", "gspo_token")]
    assert torch.equal(*slopes)
    assert bool(slopes[0].any())
