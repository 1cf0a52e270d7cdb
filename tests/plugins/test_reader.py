"""A step of any trainer, read in the trainer's own passes: w, Gram and overshoot by hand and by autograd."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.methods.table import METHODS
from creditscope.plugins.common.reader import Part, StepReader, StepReading, first_chosen, prompt_ids
from creditscope.plugins.common.session import PREFIX, Session, batch_metrics
from creditscope.runs.record import Record

VOCABULARY, WIDTH = 7, 3


class Policy(nn.Module):
    """log π of the chosen tokens from one weight matrix, with further outputs, as trainers' wrappers return them."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.model = nn.Linear(VOCABULARY, VOCABULARY, bias=False, dtype=torch.float64)
        self.model.weight.data = torch.randn(VOCABULARY, VOCABULARY, generator=draw, dtype=torch.float64)

    def forward(self, before: Tensor, tokens: Tensor, *, more: bool = True) -> Any:
        z = self.model(nn.functional.one_hot(before, VOCABULARY).double())
        logp = z.log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)
        return (logp, {"logits": z}) if more else logp


def rows(count: int = 8, seed: int = 1) -> dict[str, Tensor]:
    """`count` answers of up to 3 tokens in groups of 4, with rewards 1, 0, 0, 1."""
    draw = torch.Generator().manual_seed(seed)
    length = torch.randint(1, WIDTH + 1, (count,), generator=draw)
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(count // 4).double()
    return {"before": torch.randint(0, VOCABULARY, (count, WIDTH), generator=draw),
            "tokens": torch.randint(1, VOCABULARY, (count, WIDTH), generator=draw),
            "mask": torch.arange(WIDTH) < length[:, None], "reward": reward,
            "group": torch.arange(count) // 4, "credit": (reward - 0.5)[:, None].expand(count, WIDTH).clone()}


def loss_of(logp: Tensor, part: dict[str, Tensor], tokens: int) -> Tensor:
    """The token mean of −ρ A at ρ = 1: its w is A / ΣL."""
    return -(part["credit"] * part["mask"] * (logp - logp.detach()).exp()).sum() / tokens


def step(policy: Policy, reader: StepReader | None, batch: dict[str, Tensor], parts: list[Tensor],
         lr: float = 0.5) -> StepReading | None:
    """One update over micro-batches, as a trainer would make it."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    tokens = int(batch["mask"].sum())
    if reader is not None:
        reader.begin()
    for chosen in parts:
        part = {name: value[chosen] for name, value in batch.items()}
        if reader is not None:
            with torch.no_grad():
                old = policy(part["before"], part["tokens"], more=False)
            reader.open(Part.of(part["tokens"], part["mask"], old, part["credit"], part["reward"], part["group"]))
        logp, _ = policy(part["before"], part["tokens"])
        loss_of(logp, part, tokens).backward()
        if reader is not None:
            reader.close()
    if reader is not None:
        reader.stepping()
    optimizer.step()
    found = reader.stepped(optimizer) if reader is not None else None
    optimizer.zero_grad()
    return found


def made(policy: Policy, **options: Any) -> StepReader:
    return StepReader(policy, policy.model, METHODS["dapo"].replace(clip_low=0.2, clip_high=0.2), **options)


WHOLE, HALVES = [torch.arange(8)], [torch.arange(4), torch.arange(4, 8)]
CUT = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]


@pytest.mark.parametrize("parts", [WHOLE, HALVES, CUT])
def test_w_is_the_gradient_that_arrives_at_the_log_probs(parts: list[Tensor]) -> None:
    policy, batch = Policy(), rows()
    found = step(policy, made(policy), batch, parts)
    assert found is not None
    order = torch.cat(parts)
    # loss = −Σ A ρ / ΣL with ρ = 1 and dρ/dlog π = 1, so w = A / ΣL on chosen tokens.
    expected = (batch["credit"] * batch["mask"] / batch["mask"].sum())[order]
    np.testing.assert_allclose(found.groups["w"], expected.float().numpy(), rtol=1e-6)


@pytest.mark.parametrize("parts", [WHOLE, HALVES])
def test_the_gram_is_that_of_rows_by_autograd(parts: list[Tensor]) -> None:
    policy, batch = Policy(), rows()
    each = []
    for i in range(8):
        logp = policy(batch["before"], batch["tokens"], more=False)
        w = (batch["credit"] * batch["mask"] / batch["mask"].sum())[i]
        (slow,) = torch.autograd.grad((w * logp[i]).sum(), policy.model.weight)
        each.append(slow.flatten())
    slow = torch.stack(each) @ torch.stack(each).T
    found = step(policy, made(policy), batch, parts)
    assert found is not None
    assert found.scope is not None
    gram = found.scope["gram"]
    known = ~np.isnan(gram)
    np.testing.assert_allclose(gram[known], slow.numpy()[known], rtol=1e-9, atol=1e-14)
    for group in (slice(0, 4), slice(4, 8)):
        assert known[group, group].all()


def test_groups_that_were_cut_are_read_from_sketches() -> None:
    policy = Policy()
    found = step(policy, made(policy), rows(), CUT)
    assert found is not None
    assert found.metrics["gram/cut_groups"] == 2
    assert found.metrics["sketch/group/effective_rank"] >= 1
    assert "gram/group/effective_rank" not in found.metrics


@pytest.mark.parametrize("gram", [True, False])
def test_the_weights_after_the_step_are_those_without_a_reader(gram: bool) -> None:
    watched, alone = Policy(), Policy()
    found = step(watched, made(watched, gram=gram), rows(), HALVES)
    step(alone, None, rows(), HALVES)
    assert torch.equal(watched.model.weight, alone.model.weight)
    assert found is not None
    assert any(name.startswith("gram/") for name in found.metrics) is gram
    assert not watched._forward_hooks


def test_overshoot_is_measured_at_the_weights_after_the_step() -> None:
    policy, batch = Policy(), rows()
    with torch.no_grad():
        old = policy(batch["before"], batch["tokens"], more=False)
    found = step(policy, made(policy), batch, HALVES, lr=30.0)
    with torch.no_grad():
        after = policy(batch["before"], batch["tokens"], more=False)
    assert found is not None
    ratio, up = after - old, batch["credit"] > 0
    past = torch.where(up, ratio > math.log(1.2), ratio < math.log(0.8))[batch["mask"]]
    assert past.any()
    assert found.metrics["overshoot/past"] == pytest.approx(float(past.double().mean()))


def test_a_loss_that_does_not_use_the_policys_log_probs_has_no_w() -> None:
    policy, batch = Policy(), rows()
    reader = made(policy, gram=False)
    reader.open(Part.of(batch["tokens"], batch["mask"], torch.zeros(8, WIDTH), batch["credit"], batch["reward"],
                        batch["group"]))
    policy.model.weight.square().sum().backward()
    with pytest.raises(CreditscopeError, match="no gradient at the log-probs"):
        reader.close()


def test_packed_rows_are_refused() -> None:
    policy, batch = Policy(), rows()
    reader = made(policy, gram=False)
    reader.open(Part.of(batch["tokens"], batch["mask"], torch.zeros(8, WIDTH), batch["credit"], batch["reward"],
                        batch["group"]))
    policy(batch["before"].reshape(1, -1), batch["tokens"].reshape(1, -1))[0].sum().backward()
    with pytest.raises(CreditscopeError, match="switch packing off"):
        reader.close()


def test_a_micro_batch_that_is_missing_is_noticed_before_the_step() -> None:
    policy, batch = Policy(), rows()
    reader = made(policy)
    for chosen in HALVES:  # the first without the reader
        part = {name: value[chosen] for name, value in batch.items()}
        if chosen is HALVES[1]:
            reader.open(Part.of(part["tokens"], part["mask"], torch.zeros(4, WIDTH), part["credit"], part["reward"],
                                part["group"]))
        loss_of(policy(part["before"], part["tokens"])[0], part, 16).backward()
    reader.close()
    with pytest.raises(CreditscopeError, match="do not add up to the reduced gradient"):
        reader.stepping()


def test_a_row_begins_at_its_first_chosen_token() -> None:
    mask = torch.tensor([[False, True, True, False], [True, False, True, False]])
    tokens = torch.tensor([[9, 5, 6, 9], [7, 9, 8, 9]])
    credit = torch.tensor([[9.0, 1.0, 2.0, 9.0], [3.0, 9.0, 4.0, 9.0]])
    part = Part.of(tokens, mask, -credit, credit, torch.zeros(2), torch.zeros(2).long())
    assert part.rollouts.tokens.tolist() == [[5, 6, 0, 0], [7, 0, 8, 0]]
    assert part.rollouts.mask.tolist() == [[True, True, False, False], [True, False, True, False]]
    assert part.credit.tolist() == [[1, 2, 0, 0], [3, 0, 4, 0]]
    assert part.placed(credit).tolist() == part.credit.tolist()
    assert first_chosen(mask)[0].tolist() == [1, 2, 3, 3]


def test_equal_prompts_have_one_id_whatever_their_padding() -> None:
    ids = prompt_ids(torch.tensor([[0, 5, 6], [5, 6, 0], [5, 7, 0]]),
                     torch.tensor([[False, True, True], [True, True, False], [True, True, False]]))
    assert ids[0] == ids[1] != ids[2]
    assert (ids >= 0).all()


def test_every_second_batch_is_read_and_its_updates_in_turn(tmp_path: Path) -> None:
    session = Session("a trainer", 2, tmp_path / "run")
    wanted = []
    for _ in range(6):
        session.begin(dict, {})
        wanted.append(session.update(2))
        session.end()
    session.close()
    assert wanted == [0, None, 1, None, 0, None]
    assert len(Record.open(tmp_path / "run").steps()) == 6


def test_a_session_writes_readings_and_tells_the_trainers_tracker(tmp_path: Path) -> None:
    policy, batch = Policy(), rows()
    session = Session("a trainer", 1, tmp_path / "run")
    session.begin(lambda: {"method": "dapo"}, {})
    blank = torch.zeros(8, WIDTH)
    session.note(batch_metrics(Part.of(batch["tokens"], batch["mask"], blank, blank, batch["reward"],
                                       batch["group"]).rollouts))
    session.take(step(policy, made(policy), batch, HALVES))
    told = session.end()
    session.close()
    record = Record.open(tmp_path / "run")
    assert told[PREFIX + "signal/dead_groups"] == 0.0
    assert told[PREFIX + "w/zero"] == record.steps()[0]["w/zero"] == 0.0
    assert record.groups() == record.readings() == [0]
    assert record.group(0)["after_logp"].shape == (8, WIDTH)


def test_a_reading_that_fails_leaves_its_reason_in_the_record_and_the_training_goes_on(tmp_path: Path) -> None:
    session = Session("a trainer", 1, tmp_path / "run")
    session.begin(dict, {})
    with pytest.warns(UserWarning, match="a trainer: batch 0 was not read: no such row"), session.reason("read"):
        raise CreditscopeError("no such row")
    session.end()
    session.close()
    assert Record.open(tmp_path / "run").steps()[0]["scope/absent"] == "no such row"


def test_a_folder_that_holds_something_else_or_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CreditscopeError, match="is not empty"):
        Session("a trainer", 1, tmp_path)
    session = Session("a trainer", 1, tmp_path / "run")
    session.begin(dict, {})
    session.end()
    session.close()
    with pytest.raises(CreditscopeError, match="already holds a run"):
        Session("a trainer", 1, tmp_path / "run")
    with pytest.raises(CreditscopeError, match="whole number of at least 1"):
        Session("a trainer", 0, None)
