"""The probe in a plain torch loop: it reads what its parts read, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from creditscope import CreditscopeError, Rollouts, surrogate
from creditscope.methods.table import GRPO, P1_GRPO
from creditscope.objective.advantages import token_advantage
from creditscope.optimizer import probe as probe_module
from creditscope.optimizer.geometry import UpdateGeometry
from creditscope.optimizer.overshoot import Overshoot
from creditscope.optimizer.probe import Probe
from creditscope.optimizer.sampled_optimizer import SampledOptimizer
from creditscope.optimizer.scale import Clipping, RewardParts, sensitivity, sweep
from creditscope.optimizer.state import split
from makers import make
from small_models import build

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=5e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=5e-3, betas=(0.8, 0.95)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=5e-3, momentum=0.5),
}


def real() -> tuple[nn.Module, Callable[[], Tensor], Rollouts]:
    model = build("gpt2")
    shape = make([1, 0, 1, 0, 0, 1], group=[0, 0, 0, 1, 1, 1], lengths=[4, 6, 5, 6, 3, 6])
    words, draw = int(model.config.vocab_size), torch.Generator().manual_seed(3)
    tokens = torch.randint(1, words, shape.mask.shape, generator=draw)
    ids = torch.cat([torch.ones(len(tokens), 1, dtype=torch.int64), tokens], dim=1)

    def forward() -> Tensor:
        return model(ids).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, :, None]).squeeze(2)

    with torch.no_grad():
        old = forward()
    return model, forward, Rollouts(tokens=tokens * shape.mask, mask=shape.mask, logp=old * shape.mask,
                                    reward=shape.reward, group=shape.group)


def loop(name: str, level: str | None, every: int = 1, batches: int = 2, inner: int = 4,
         **probing: Any) -> tuple[nn.Module, list[dict[str, float]], Probe | None]:
    model, forward, rollouts = real()
    optimizer = OPTIMIZERS[name](model.parameters())
    probe = None if level is None else Probe(optimizer, model.named_parameters(), level, every, **probing)
    found = []
    for _ in range(batches):
        if probe is not None:
            probe.begin(GRPO, rollouts)
        for _ in range(inner):
            logp = forward()
            if probe is not None:
                probe.see(logp)
            optimizer.zero_grad()
            (-surrogate(GRPO, logp, rollouts)).backward()
            optimizer.step()
        if probe is not None:
            found.append(probe.finish(forward))
    return model, found, probe


@pytest.mark.slow
@pytest.mark.parametrize("level", ["light", "full"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_probed_training_is_the_same_bit_by_bit(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "SAMPLE", 1000)  # small models would be read whole
    plain, _, _ = loop(name, None)
    probed, found, _ = loop(name, level)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), probed.parameters(), strict=True))
    assert found[0]["overshoot/past"] > 0, "nothing was past its bound: nothing was read"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_full_reading_is_what_the_parts_read(name: str) -> None:
    _, found, probe = loop(name, "full", batches=1)
    assert probe is not None
    # The same loop, with every part called by hand.
    model, forward, rollouts = real()
    optimizer = OPTIMIZERS[name](model.parameters())
    track = Overshoot(GRPO, rollouts, token_advantage(GRPO, rollouts))
    by: dict[str, float] = {"momentum": 0.0, "fresh": 0.0, "decay": 0.0}
    for inner in range(4):
        logp = forward()
        track.see(logp.detach())
        slope = torch.autograd.grad(track.loss(logp), list(model.parameters()), retain_graph=True, allow_unused=True)
        optimizer.zero_grad()
        (-surrogate(GRPO, logp, rollouts)).backward()
        parts = split(optimizer)
        for kind in by:
            by[kind] += sum(float((g * getattr(parts[p], kind)).sum()) for p, g in
                            zip(model.parameters(), slope, strict=True) if g is not None)
        if inner == 0:
            whole = torch.cat([part.total.flatten() for part in parts.values()])
            momentum = torch.cat([part.momentum.flatten() for part in parts.values()])
            assert found[0]["update/momentum"] == pytest.approx(float(momentum @ whole / (whole @ whole)), abs=1e-12)
            assert found[0]["optimizer/scale_change"] == pytest.approx(sensitivity(optimizer))
            assert found[0]["optimizer/scale_change_now"] == pytest.approx(sensitivity(optimizer, since="now"))
            swept = sweep(optimizer, model.named_parameters())
            assert probe.arrays()["change"].tolist() == swept.change.tolist()
            assert probe.arrays()["layer_names"].tolist() == list(swept.layers)
            geometry = UpdateGeometry(model.named_parameters())
            geometry.before()
        optimizer.step()
        if inner == 0:
            for key, value in geometry.after().items():
                assert found[0][key] == value
    track.see(forward().detach())
    for key, value in track.metrics().items():
        assert found[0][key] == pytest.approx(value, abs=1e-15), key
    tokens = track.readings()[-1].tokens
    for kind, value in by.items():
        assert found[0][f"overshoot/by_{kind}"] == pytest.approx(value / tokens, rel=1e-9, abs=1e-15)


def test_without_momentum_momentum_moves_nothing() -> None:
    OPTIMIZERS["plain sgd"] = lambda p: torch.optim.SGD(p, lr=2.0)
    try:
        _, found, _ = loop("plain sgd", "full")
    finally:
        del OPTIMIZERS["plain sgd"]
    assert found[0]["overshoot/by_momentum"] == 0
    assert found[0]["overshoot/by_fresh"] != 0
    assert found[1]["update/momentum"] == 0


def test_only_scheduled_batches_pay_for_a_pass() -> None:
    model, forward, rollouts = real()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    probe = Probe(optimizer, model.named_parameters(), every=3)
    asked = []
    for batch in range(4):
        probe.begin(GRPO, rollouts)
        for _ in range(2):
            logp = forward()
            probe.see(logp)
            optimizer.zero_grad()
            (-surrogate(GRPO, logp, rollouts)).backward()
            optimizer.step()
        found = probe.finish(lambda batch=batch: asked.append(batch) or forward())  # type: ignore[misc, func-returns-value]
        assert "overshoot/1/past" in found  # of the second pass, which was made anyway
        assert ("optimizer/overshoot" in found) == (batch in (0, 3)), "what was not looked at is absent"
        assert ("overshoot/2/past" in found) == (batch in (0, 3))
    assert asked == [0, 3]


def test_one_pass_a_batch_says_nothing_of_overshoot_off_schedule() -> None:
    _, found, _ = loop("adamw", "light", every=2, inner=1)
    assert "overshoot/1/past" in found[0]
    assert not any(key.startswith("overshoot") for key in found[1])
    assert "optimizer/scale_change" in found[1]


# -- the sample ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("stride", [1, 3])
def test_a_sampled_optimiser_is_the_optimiser_on_a_sample(name: str, stride: int) -> None:
    model, forward, rollouts = real()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (-surrogate(P1_GRPO, forward(), rollouts)).backward()
        optimizer.step()
    optimizer.zero_grad()
    (-surrogate(P1_GRPO, forward(), rollouts)).backward()
    sample, twin = SampledOptimizer(optimizer, stride), SampledOptimizer(optimizer, stride).take()
    whole, (part,) = split(optimizer), split(sample.take()).values()
    for name in ("momentum", "fresh", "decay"):
        picked = torch.cat([getattr(whole[p], name).flatten()[::stride] for p in model.parameters()])
        assert torch.allclose(getattr(part, name), picked, rtol=1e-12, atol=0)
    # 0.15: what the coordinates that were left out change.
    assert sensitivity(sample.take()) == pytest.approx(sensitivity(optimizer), rel=0.15 if stride > 1 else 1e-9)
    before = sample.named[0][1].detach().clone()
    optimizer.step()
    sample.follow()
    twin.step()  # the sample's own step goes where the model's did
    assert torch.allclose(twin.param_groups[0]["params"][0], sample.named[0][1], atol=1e-12)
    assert not torch.equal(before, sample.named[0][1])
    assert len(before) == sum(-(-p.numel() // stride) for p in model.parameters())


def test_a_sampled_optimiser_keeps_groups_and_ages_apart() -> None:
    a, b, late = (nn.Parameter(torch.arange(6.0)) for _ in range(3))
    optimizer = torch.optim.AdamW([{"params": [a, late], "lr": 0.1}, {"params": [b], "lr": 0.5, "weight_decay": 0.2}])
    sample = SampledOptimizer(optimizer, 2)
    for step in range(3):
        a.grad, b.grad = torch.full((6,), 1.0 + step), -torch.ones(6)
        late.grad = torch.ones(6) if step == 2 else None  # it joins when the others have moments
        lrs = [g["lr"] for g in sample.take().param_groups]
        optimizer.step()
        assert sample.optimizer is not None
        sample.optimizer.step()
        found = [p.tolist() for _, p in sample.named]
        assert lrs == ([0.1, 0.1, 0.5] if step == 2 else [0.1, 0.5])
        assert found == [x[::2].tolist() for x in ((a, late, b) if step == 2 else (a, b))]


def test_a_sample_does_not_miss_a_small_parameter_that_holds_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # ε is large beside the gradients of one small parameter alone: whatever the reward's scale changes is in it.
    big, small = nn.Parameter(torch.ones(20_000)), nn.Parameter(torch.ones(200))
    batch = make([1, 0], group=[0, 0], lengths=[1, 1])
    changes = {}
    for level in ("light", "full"):
        optimizer = torch.optim.AdamW([big, small], lr=1e-3)
        monkeypatch.setattr(probe_module, "SAMPLE", 1000)
        probe = Probe(optimizer, [("big", big), ("small", small)], level, every=1)
        probe.begin(GRPO, batch)
        probe.see(batch.logp)
        big.grad, small.grad = torch.ones_like(big), torch.full_like(small, 1e-8)
        optimizer.step()
        changes[level] = probe.finish()["optimizer/scale_change"]
    assert changes["light"] == pytest.approx(changes["full"], rel=0.05)
    assert changes["full"] > 0.01


def test_a_light_reading_of_a_sample_is_near_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole, _ = loop("adamw", "full")
    monkeypatch.setattr(probe_module, "SAMPLE", sum(p.numel() for p in real()[0].parameters()) // 3)
    _, sample, _ = loop("adamw", "light")
    for key in ("update/ratio", "update/momentum", "update/cosine", "optimizer/scale_change"):
        assert sample[1][key] == pytest.approx(whole[1][key], rel=0.2), key
        assert sample[1][key] != whole[1][key], "the sample is the whole: nothing was sampled"


# -- the carry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make_optimizer", "expected"), [
    (lambda p: torch.optim.Adam(p, lr=0.25, betas=(0.9, 0.95)), 0.6786),  # C_{2,0}: the first of two updates crossed
    (lambda p: torch.optim.AdamW(p, lr=0.25, betas=(0.9, 0.95), weight_decay=0.0), 0.6786),
    (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), 0.9)])
def test_the_predicted_carry_is_the_measured_one_for_a_token_alone(
        make_optimizer: Callable[[Any], torch.optim.Optimizer], expected: float) -> None:
    batch = make([0], group=[0], lengths=[1])
    theta = nn.Parameter(batch.logp.clone())
    frozen = nn.Parameter(torch.zeros(3))  # never has a gradient: the step count is not its own
    optimizer = make_optimizer([frozen, theta])
    probe = Probe(optimizer, [("frozen", frozen), ("theta", theta)], every=1)
    probe.begin(GRPO, batch, torch.ones(1, dtype=torch.float64))
    for _ in range(2):
        probe.see(theta)
        optimizer.zero_grad()
        (-surrogate(GRPO, theta * 1.0, batch, torch.ones(1, dtype=torch.float64))).backward()
        optimizer.step()
    found = probe.finish(lambda: theta)
    assert found["overshoot/carry"] == pytest.approx(expected, abs=5e-5)
    assert found["overshoot/carry_predicted"] == pytest.approx(expected, abs=5e-5)


def test_no_carry_is_predicted_where_several_updates_lie_between_two_looks() -> None:
    model, forward, rollouts = real()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    probe = Probe(optimizer, model.named_parameters(), every=1)
    probe.begin(GRPO, rollouts)
    for _ in range(3):
        for rows in (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])):
            logp = forward()[rows]
            probe.see(logp, rows)
            optimizer.zero_grad()
            (-surrogate(GRPO, logp, rollouts.rows(rows))).backward()
            optimizer.step()
    found = probe.finish(forward)
    assert "overshoot/carry" in found
    assert "overshoot/carry_predicted" not in found


def test_rows_that_stopped_early_are_in_the_last_reading() -> None:
    # The second row is seen once more than the first; only the first is past its bound.
    batch = make([0, 0], group=[0, 0], lengths=[1, 1])
    track = Overshoot(GRPO, batch, torch.tensor([1.0, 1.0], dtype=torch.float64))
    track.see(batch.logp)
    track.see(batch.logp[1:], torch.tensor([1]))
    track.see(batch.logp + torch.tensor([[0.5], [0.0]], dtype=torch.float64))
    assert track.metrics()["overshoot/past"] == 0.5
    assert track.bounded == 2


# -- parts, clipping, errors -----------------------------------------------------------------------------------------


def test_a_kl_term_is_not_scaled_unless_its_part_is_followed() -> None:
    model, forward, rollouts = real()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    row = GRPO.but(name="with_kl", beta=0.1)
    probe = Probe(optimizer, model.named_parameters(), "full", 1)
    probe.begin(row, rollouts)
    probe.see(forward())
    (-surrogate(GRPO, forward(), rollouts)).backward()
    optimizer.step()
    assert "optimizer/scale_change" not in probe.finish(forward)
    assert "change" not in probe.arrays()

    model, forward, rollouts = real()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    parts = RewardParts(optimizer)
    probe = Probe(optimizer, model.named_parameters(), "full", 1, parts=parts)
    probe.begin(row, rollouts)
    probe.see(forward())
    (-surrogate(GRPO, forward(), rollouts)).backward()
    rewards = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(torch.full_like(p, 1e-3))  # stands in for the KL term's gradient
    parts.update(rewards)
    optimizer.step()
    assert probe.finish(forward)["optimizer/scale_change"] > 0.05


def test_coupled_decay_is_not_scaled_either() -> None:
    OPTIMIZERS["l2"] = lambda p: torch.optim.Adam(p, lr=5e-3, weight_decay=0.1)
    try:
        _, found, _ = loop("l2", "light")
    finally:
        del OPTIMIZERS["l2"]
    assert "optimizer/scale_change" not in found[0]
    assert "update/momentum" in found[0]


def test_norm_clipping_that_cannot_be_answered_leaves_the_number_out() -> None:
    model, forward, rollouts = real()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    clipping = Clipping(1e-3)
    probe = Probe(optimizer, model.named_parameters(), clipping=clipping)
    found = []
    for shrink in (1.0, 1e-6):  # the first gradient is clipped, the second is not: a tenth of either is another mix
        probe.begin(GRPO, rollouts)
        probe.see(forward())
        optimizer.zero_grad()
        (-shrink * surrogate(GRPO, forward(), rollouts)).backward()
        clipping.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
        optimizer.step()
        found.append(probe.finish())
    assert "optimizer/scale_change" in found[0]
    assert "optimizer/scale_change" not in found[1]
    assert all("optimizer/scale_change_now" in line for line in found), "this step alone can always be answered"


def test_an_extent_carries_the_norms_over_a_resume() -> None:
    whole = Clipping(1.0, [0.2, 3.0, 0.5])
    cut = Clipping(1.0, [0.5], before=Clipping(1.0, [0.2, 3.0]).extent)
    assert cut.extent == whole.extent == (0.2, 3.0, 3)
    for phi in (0.1, 1.0, 3.0, 100.0):
        assert cut.factor(phi) == pytest.approx(whole.factor(phi), nan_ok=True)


@pytest.mark.parametrize(("call", "message"), [
    (lambda o, n: Probe(o, n, "lite"), "unknown level of the probe: 'lite'; did you mean 'light'"),
    (lambda o, n: Probe(o, n, every=0), "at least 1, got 0"),
    (lambda o, n: Probe(o, [p for _, p in n]), "give model.named_parameters"),
    (lambda o, n: Probe(o, n).see(torch.zeros(1, 1)), "call probe.begin"),
    (lambda o, n: Probe(o, n).finish(), "call probe.begin"),
    (lambda o, n: SampledOptimizer(o, 2).take(), "no parameter has a gradient"),
    (lambda o, n: SampledOptimizer(torch.optim.RMSprop([n[0][1]]), 2), "not for RMSprop")])
def test_mistakes_are_told_in_a_sentence(call: Callable[[Any, Any], Any], message: str) -> None:
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises(CreditscopeError, match=message):
        call(torch.optim.AdamW([p]), [("p", p)])
