"""Brakes: by hand, on a table of free log-probs where a token's own moment can be read off, and on a real model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from creditscope import METHODS, CreditscopeError, Method, Rollouts, surrogate
from creditscope.methods.table import GRPO, GSPO, P1_GRPO, SAPO
from creditscope.objective.bounds import beyond, bounded_tokens
from creditscope.optimizer.brakes import CLASSES, Blend, Brake, KlStop, Recall, Restart, Shorten, blend, find_brake
from creditscope.optimizer.state import first_moment
from creditscope.optimizer.table import BRAKES, parse_brake
from each import each
from makers import make
from small_models import build

D = torch.float64
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.95), foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=2.0, momentum=0.9),
    "sgd, dampened": lambda p: torch.optim.SGD(p, lr=4.0, momentum=0.8, dampening=0.3),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=2.0, momentum=0.9, nesterov=True),
}


def two_groups() -> Rollouts:
    """Right and wrong answers of unequal lengths; every token is a free parameter in `table`."""
    return make([1, 0, 0, 1, 1, 0], group=[0, 0, 0, 1, 1, 1], lengths=[3, 5, 2, 4, 1, 3])


def table(rollouts: Rollouts) -> nn.Parameter:
    """log π itself as the parameter: then the optimiser's first moment has one entry a token, −c_it."""
    return nn.Parameter(rollouts.logp.clone())


# -- recall ----------------------------------------------------------------------------------------------------------


def test_recall_by_hand() -> None:
    # One good and one bad token, A = ±1, α = 1/2, so w = ±0.5 at ratio 1. After that pass c = 0.1·w = ±0.05.
    batch = make([0, 0], group=[0, 0], lengths=[1, 1])
    brake = Recall(torch.optim.AdamW([table(batch)], lr=0.1))
    brake.begin(GRPO, batch, torch.tensor([1.0, -1.0], dtype=D))
    w = torch.tensor([[0.5], [-0.5]], dtype=D)
    assert torch.equal(brake.reweigh(w, batch.logp), w)
    brake.step()
    # The good one is past log 1.2 = 0.182, its w is 0: it is asked to give back 9 · 0.05 = 0.45. The bad one is inside.
    seen = batch.logp + torch.tensor([[0.3], [-0.1]], dtype=D)
    pulled = brake.reweigh(torch.tensor([[0.0], [-0.45]], dtype=D), seen)
    assert pulled.tolist() == [[pytest.approx(-0.45)], [-0.45]]
    brake.step()
    # 0.9 · 0.05 − 0.1 · 0.45 = 0: nothing is owed any more, so the next pass asks for nothing.
    assert brake.reweigh(torch.tensor([[0.0], [-0.4]], dtype=D), seen)[0].item() == pytest.approx(0.0, abs=1e-15)
    # Pulled in all: 0.5 + 0.5, then 0.45 + 0.45, then 0 + 0.4; 0.45 of it was owed.
    assert brake.metrics()["brake/recalled"] == pytest.approx(0.45 / 2.3)


@pytest.mark.slow
@each("name", OPTIMIZERS)
@each("method", ["grpo", "dapo", "gspo", "gmpo"])
def test_the_account_is_the_optimisers_own_first_moment_and_a_stopped_token_does_not_move(name: str,
                                                                                         method: str) -> None:
    batch, row = two_groups(), METHODS[method]
    theta = table(batch)
    brake = Recall(OPTIMIZERS[name]([theta]))
    brake.begin(row, batch)
    met = 0
    for _ in range(12):
        past = beyond(row, theta.detach(), batch.logp, batch.mask, brake.credit) > 0
        before = theta.detach().clone()
        brake.ascend(lambda: theta)
        moment = first_moment(brake.optimizer, theta)
        assert moment is not None
        assert torch.allclose(brake._account, -moment, atol=1e-14)
        held = (theta.detach() - before)[past].abs()
        assert bool((held <= 1e-12).all()), held
        met += int(past.sum())
    assert met > 0, "no token was past its bound: nothing was tested"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_the_brake_a_stopped_token_goes_on(name: str) -> None:
    batch = two_groups()
    theta = table(batch)
    plain = Brake(OPTIMIZERS[name]([theta]))
    plain.begin(GRPO, batch)
    drift = 0.0
    for _ in range(12):
        past = beyond(GRPO, theta.detach(), batch.logp, batch.mask, plain.credit) > 0
        before = theta.detach().clone()
        plain.ascend(lambda: theta)
        drift += float((theta.detach() - before)[past].abs().sum())
    assert drift > 0.01


def test_minibatches_share_one_account() -> None:
    # Steps on other rows shrink a token's moment too: the account follows every step, not only its own.
    batch = two_groups()
    theta = table(batch)
    brake = Recall(torch.optim.AdamW([theta], lr=0.05, weight_decay=0.0))
    brake.begin(GRPO, batch)
    for k in range(10):
        rows = torch.tensor([[0, 1, 2], [3, 4, 5]][k % 2])
        part = batch.rows(rows)
        brake.optimizer.zero_grad()
        logp = brake.watch(theta[rows], rows)
        (-surrogate(GRPO, logp, part)).backward()
        brake.step()
        moment = first_moment(brake.optimizer, theta)
        assert moment is not None
        assert torch.allclose(brake._account, -moment, atol=1e-14)


def test_micro_batches_of_one_step_are_one_sight() -> None:
    batch = two_groups()
    whole, parts = table(batch), table(batch)
    first, second = (Recall(torch.optim.AdamW([p], lr=0.05)) for p in (whole, parts))
    for brake in (first, second):
        brake.begin(GRPO, batch)
    for _ in range(8):
        first.ascend(lambda: whole)
        second.optimizer.zero_grad()
        for rows in (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])):
            # Half of the batch is half of the mean: the same gradient as the whole.
            (-surrogate(GRPO, second.watch(parts[rows], rows), batch.rows(rows)) / 2).backward()
        second.step()
        assert torch.allclose(whole, parts, atol=1e-14)


def test_a_token_that_starts_past_its_bound_is_recalled_once_it_has_moved() -> None:
    batch = make([0], group=[0], lengths=[1])
    brake = Recall(torch.optim.AdamW([table(batch)], lr=0.1))
    brake.begin(GRPO, batch, torch.tensor([1.0], dtype=D))
    past, inside = batch.logp + 0.3, batch.logp + 0.1
    for seen, w, pulled in ((past, 0.0, 0.0), (inside, 1.0, 1.0), (past, 0.0, -0.9)):  # 9 · 0.1
        assert brake.reweigh(torch.tensor([[w]], dtype=D), seen).item() == pytest.approx(pulled)
        brake.step()


def test_a_norm_clip_is_in_the_account() -> None:
    batch = two_groups()
    theta = table(batch)
    brake = Recall(torch.optim.AdamW([theta], lr=0.05, weight_decay=0.0))
    brake.begin(GRPO, batch)
    for _ in range(6):
        brake.ascend(lambda: theta, clip_norm=0.05)
        moment = first_moment(brake.optimizer, theta)
        assert moment is not None
        assert torch.allclose(brake._account, -moment, atol=1e-12)


@pytest.mark.parametrize(("method", "sign", "move"), [(SAPO, 1, 2.0), (SAPO, -1, -2.0), (METHODS["vespo"], 1, 2.0),
                                                      (METHODS["vespo"], -1, 2.0)])
def test_a_soft_bound_brings_the_moment_down_in_step_with_the_credit(method: Method, sign: int, move: float) -> None:
    # A soft bound never reaches 0. Past its edge d = w/w(1), and what is taken back is 9(1 − d)c.
    batch = make([0], group=[0], lengths=[1])
    brake = Recall(torch.optim.AdamW([table(batch)], lr=0.1))
    brake.begin(method, batch, torch.tensor([float(sign)], dtype=D))
    brake.reweigh(torch.tensor([[1.0 * sign]], dtype=D), batch.logp)
    brake.step()  # c = ±0.1
    far = batch.logp + move
    assert float(beyond(method, far, batch.logp, batch.mask, brake.credit)) > 0
    pulled = brake.reweigh(torch.tensor([[0.25 * sign]], dtype=D), far)
    assert pulled.item() == pytest.approx(sign * (0.25 - 9 * 0.75 * 0.1))
    near = batch.logp + 0.1
    assert brake.reweigh(torch.tensor([[0.9 * sign]], dtype=D), near).item() == 0.9 * sign


def test_a_loss_of_ones_own_under_watch_is_the_same_as_ascend() -> None:
    batch = two_groups()
    ours, own = table(batch), table(batch)
    brakes = [Recall(torch.optim.AdamW([p], lr=0.05)) for p in (ours, own)]
    for brake in brakes:
        brake.begin(GRPO, batch)
    for _ in range(8):
        brakes[0].ascend(lambda: ours)
        brakes[1].optimizer.zero_grad()
        (-surrogate(GRPO, brakes[1].watch(own), batch)).backward()
        brakes[1].step()
        assert torch.equal(ours, own)


def test_without_momentum_nothing_is_owed() -> None:
    batch = two_groups()
    ours, plain = table(batch), table(batch)
    first, second = Recall(torch.optim.SGD([ours], lr=3.0)), Brake(torch.optim.SGD([plain], lr=3.0))
    for brake, theta in ((first, ours), (second, plain)):
        brake.begin(GRPO, batch)
        for _ in range(6):
            brake.ascend(lambda theta=theta: theta)  # type: ignore[misc]
    assert torch.equal(ours, plain)


def test_blends_by_hand() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    assert blend(torch.optim.AdamW([p])) == Blend(0.9, pytest.approx(0.1))
    assert blend(torch.optim.AdamW([p])).debt == pytest.approx(9.0)
    assert blend(torch.optim.SGD([p], lr=1.0, momentum=0.9)).debt == pytest.approx(0.9)  # b' = 0.9b + g
    # Nesterov: w + 0.9(0.9c + w) = 0 for w = −0.81c/1.9.
    assert blend(torch.optim.SGD([p], lr=1.0, momentum=0.9, nesterov=True)).debt == pytest.approx(0.81 / 1.9)
    assert blend(torch.optim.SGD([p], lr=1.0)).debt == 0.0
    # Torch's Muon: b' = 0.95b + 0.05g, update ∝ 0.05g + 0.95b': w = −0.9025c/(0.05 + 0.0475).
    assert blend(torch.optim.Muon([p])).debt == pytest.approx(0.95 * 0.95 / (0.05 + 0.95 * 0.05))
    # A dampened buffer starts from the whole first gradient.
    sgd = torch.optim.SGD([p], lr=1.0, momentum=0.9, dampening=0.5)
    assert blend(sgd).gamma == 1.0
    p.grad = torch.ones_like(p)
    sgd.step()
    assert blend(sgd).gamma == 0.5


def test_groups_with_different_momentum_are_refused() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    mixed = torch.optim.AdamW([{"params": [a]}, {"params": [b], "betas": (0.5, 0.9)}])
    with pytest.raises(CreditscopeError, match="groups have different momentum"):
        blend(mixed)


@pytest.mark.parametrize("steps", [2, 3])
def test_muon_forgets_a_stopped_token_too(steps: int) -> None:
    # Muon orthogonalises what Nesterov made of buffer and gradient; the token's entry in that matrix must be 0.
    batch = two_groups()
    theta = table(batch)
    brake = Recall(torch.optim.Muon([theta], lr=0.5, weight_decay=0.0))
    brake.begin(GRPO, batch)
    for _ in range(steps):
        brake.ascend(lambda: theta)
    past = beyond(GRPO, theta.detach(), batch.logp, batch.mask, brake.credit) > 0
    assert bool(past.any())
    brake.ascend(lambda: theta)
    buffer, grad = first_moment(brake.optimizer, theta), theta.grad
    assert buffer is not None
    assert grad is not None
    assert float((0.05 * grad + 0.95 * buffer)[past].abs().max()) < 1e-12


# -- the others ------------------------------------------------------------------------------------------------------


def model_and_batch() -> tuple[nn.Module, Callable[[], Tensor], Rollouts]:
    model = build("llama", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    batch = make([1, 0, 1, 0], group=[0, 0, 0, 0], lengths=[4, 6, 5, 6])
    words = int(model.config.vocab_size)
    tokens = torch.randint(1, words, batch.mask.shape, generator=generator)
    prompt = torch.ones(4, 1, dtype=torch.int64)

    def forward() -> Tensor:
        logits = model(torch.cat([prompt, tokens], dim=1)).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, tokens[:, :, None]).squeeze(2)

    with torch.no_grad():
        old = forward().detach()
    rollouts = Rollouts(tokens=tokens * batch.mask, mask=batch.mask, logp=old * batch.mask, reward=batch.reward,
                        group=batch.group)
    return model, forward, rollouts


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "gspo", "sapo", "dppo"])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_shorten_leaves_at_most_the_share_past_its_bound(method: str, share: float) -> None:
    model, forward, batch = model_and_batch()
    row = METHODS[method]
    brake = Shorten(torch.optim.AdamW(model.parameters(), lr=0.02), share=share)
    brake.begin(row, batch)
    shortened = False
    for _ in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        logp = forward().detach()
        brake.ascend(forward)
        length = brake._lengths[-1]
        shortened |= length < 1
        # Along the line between the two log-probs the share holds; one notch further it would not.
        whole = [old + (p.detach() - old) / length if length else None
                 for old, p in zip(before, model.parameters(), strict=True)]
        if not length:
            assert all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))
            continue
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            for p, w in zip(model.parameters(), whole, strict=True):
                assert w is not None
                p.copy_(w)
            end = forward()
            for p, k in zip(model.parameters(), kept, strict=True):
                p.copy_(k)

        def past(a: float, logp: Tensor = logp, end: Tensor = end) -> float:
            line = torch.lerp(logp, end, a)
            bounded = bounded_tokens(row, batch.logp, batch.mask, brake.credit)
            return int((beyond(row, line, batch.logp, batch.mask, brake.credit) > 0).sum()) / int(bounded.sum())

        assert past(length) <= share
        assert length == 1 or past(length + 0.05) > share
    assert shortened, "no step was long enough to be shortened"


def test_restart_forgets_older_batches_and_nothing_else() -> None:
    batch = two_groups()
    theta = table(batch)
    brake = Restart(torch.optim.AdamW([theta], lr=0.05))
    brake.begin(GRPO, batch)
    brake.ascend(lambda: theta)
    second = brake.optimizer.state[theta]["exp_avg_sq"].clone()
    assert bool(first_moment(brake.optimizer, theta).any())  # type: ignore[union-attr]
    brake.begin(GRPO, batch)
    assert not bool(first_moment(brake.optimizer, theta).any())  # type: ignore[union-attr]
    assert torch.equal(brake.optimizer.state[theta]["exp_avg_sq"], second)
    assert float(brake.optimizer.state[theta]["step"]) == 1
    # The probe's average of what does not scale with reward belongs to the same moment.
    brake.optimizer.state[theta]["rest_avg"] = torch.ones_like(theta)
    brake.begin(GRPO, batch)
    assert not bool(brake.optimizer.state[theta]["rest_avg"].any())


def test_kl_stop_takes_no_step_past_its_limit() -> None:
    # ρ − 1 − log ρ at log ρ = 0.1 is 0.00517 for every token.
    batch = two_groups()
    theta = table(batch)
    for limit, goes in ((0.0051, False), (0.0052, True)):
        brake = KlStop(torch.optim.AdamW([theta], lr=0.05), limit=limit)
        brake.begin(GRPO, batch)
        assert brake.goes_on(batch.logp)
        assert brake.goes_on(batch.logp + 0.1) is goes
        before = theta.detach().clone()
        assert brake.ascend(lambda: theta + 0.1) is goes
        assert torch.equal(before, theta) is not goes


def test_no_brake_is_the_plain_loop_bit_by_bit() -> None:
    model, forward, batch = model_and_batch()
    twin = copy.deepcopy(model)
    brake = Brake(torch.optim.AdamW(model.parameters(), lr=0.01))
    brake.begin(GRPO, batch)
    for _ in range(3):
        brake.ascend(forward, clip_norm=1.0)
    ours = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(twin.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (-surrogate(GRPO, forward(), batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(ours, model.parameters(), strict=True))


def test_recall_lowers_the_overshoot_of_a_real_model() -> None:
    over = {}
    for name in ("none", "recall"):
        torch.manual_seed(0)
        model, forward, batch = model_and_batch()
        brake = find_brake(name, torch.optim.AdamW(model.parameters(), lr=5e-3))
        brake.begin(GRPO, batch)
        for _ in range(8):
            brake.ascend(forward)
        over[name] = float(beyond(GRPO, forward().detach(), batch.logp, batch.mask, brake.credit).sum())
    assert 0 < over["recall"] < 0.7 * over["none"], over


# -- names and errors --------------------------------------------------------------------------------------------------


def test_every_row_of_the_list_has_its_class() -> None:
    assert BRAKES.keys() == CLASSES.keys()
    theta = nn.Parameter(torch.zeros(1))
    for name in BRAKES:
        assert type(find_brake(name, torch.optim.AdamW([theta]))) is CLASSES[name]


@pytest.mark.parametrize(("spec", "message"), [
    ("recal", "unknown brake 'recal'; did you mean 'recall'"),
    ("shorten,share=2", r"option share of brake 'shorten' must be a finite number in 0 .. 1, got 2"),
    ("recall,share=0.1", "brake 'recall' has no options, got 'share'"),
    ("kl_stop,limt=1", "unknown option of brake 'kl_stop': 'limt'; did you mean 'limit'"),
    ("kl_stop,limit", "--brake kl_stop,limit: 'limit' is no option; write kl_stop,key=value")])
def test_a_brake_that_is_not_one_is_told_in_a_sentence(spec: str, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        parse_brake(spec)


@pytest.mark.parametrize(("name", "method", "updates", "momentum", "message"), [
    ("recall", P1_GRPO, 4, 0.9, "--brake recall: method 'p1_grpo' has no bound"),
    ("recall", METHODS["cispo"], 4, 0.9, "method 'cispo' has bound='stop_gradient', which stops no token"),
    ("recall", GRPO, 1, 0.9, "acts from the second update on a batch, and there is one"),
    ("kl_stop", GRPO, 1, 0.9, "acts from the second update on a batch, and there is one"),
    ("recall", GRPO, 4, 0.0, "acts on momentum, and the optimiser has none"),
    ("restart", GRPO, 4, 0.0, "acts on momentum, and the optimiser has none")])
def test_settings_under_which_a_brake_would_idle_are_refused(name: str, method: Method, updates: int, momentum: float,
                                                             message: str) -> None:
    with pytest.raises(CreditscopeError, match=message):
        BRAKES[name].require(method, updates, momentum)


@pytest.mark.parametrize(("name", "method"), [("shorten", METHODS["cispo"]), ("recall", GSPO),
                                              ("recall", METHODS["dppo"]), ("none", P1_GRPO), ("kl_stop", P1_GRPO)])
def test_settings_under_which_it_acts_are_not(name: str, method: Method) -> None:
    BRAKES[name].require(method, 4, 0.9)  # dppo caps its ratio, but its trust region drops tokens


@pytest.mark.parametrize(("kind", "message"), [(Recall, "recall has not seen this step's log-probs"),
                                               (Shorten, "shorten compares the log-probs before and after")])
def test_a_step_without_a_look_is_refused(kind: type[Brake], message: str) -> None:
    batch = two_groups()
    brake = kind(torch.optim.AdamW([table(batch)]))
    with pytest.raises(CreditscopeError, match="seen no batch"):
        brake.ascend(lambda: batch.logp)
    brake.begin(GRPO, batch)
    with pytest.raises(CreditscopeError, match=message):
        brake.step()
