"""The callback on real TRL trainers: it reads what they compute, and they do not notice."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

trl = pytest.importorskip("trl", reason="its trainers are read")

from transformers import TrainerCallback  # noqa: E402

import mini  # noqa: E402
from creditscope.claims.evidence import read_evidence  # noqa: E402
from creditscope.errors import CreditscopeError  # noqa: E402
from creditscope.methods.dialects import DIALECTS  # noqa: E402
from creditscope.microscope.recorder import Recorder  # noqa: E402
from creditscope.microscope.sources import ParameterSource  # noqa: E402
from creditscope.plugins.common.untouched import untouched  # noqa: E402
from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer  # noqa: E402
from creditscope.plugins.trl.batch import ROW, Generation, mask_of, objective, rollouts_of  # noqa: E402
from creditscope.plugins.trl.passes import chosen, logits  # noqa: E402
from creditscope.plugins.trl.stated import stated  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from depth import some  # noqa: E402
from each import each  # noqa: E402
from makers import load_script  # noqa: E402
from plugins.trl_makers import in_double, pairs, reward, trainer, weights  # noqa: E402
from plugins.trl_two_ranks import build  # noqa: E402
from small_models import apart  # noqa: E402

pytestmark = pytest.mark.conformance

SHAPES: dict[str, dict[str, Any]] = {
    "one_batch_a_step": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "two_passes": {"num_iterations": 2, "max_steps": 4},
    "minibatches": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
                    "max_steps": 4},
    "kl": {"beta": 0.04, "num_iterations": 2},
    "truncated": {"mask_truncated_completions": True, "gradient_accumulation_steps": 2,
                  "per_device_train_batch_size": 8},
    "temperature": {"temperature": 0.7},
}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
LOSSES: dict[str, dict[str, Any]] = {
    "trl_grpo": {"loss_type": "grpo", "delta": 3.0},
    "trl_dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "trl_dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "trl_bnpo": {"loss_type": "bnpo"},
    "trl_cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "trl_sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
    "trl_luspo": {"loss_type": "luspo", **SEQUENCE},
    "trl_vespo": {"loss_type": "vespo", "vespo_k_pos": 1.5, "use_bias_correction_kl": False},
}


def lora(dropout: float = 0.0) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)


def watched(kind: Any = None, every: int = 1, out: Path | None = None, **settings: Any) -> Any:
    """A trainer with the callback, trained."""
    live = trainer(kind, **settings)
    live.add_callback(ScopeCallback(live, every=every, out=out))
    live.train()
    return live


def told(live: Any, name: str) -> list[float]:
    """A metric of ours as TRL logged it, where it did."""
    return [entry[f"creditscope/{name}"] for entry in live.state.log_history if f"creditscope/{name}" in entry]


# -- the training does not notice ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(("kind", "shape"), pairs(["GRPOTrainer", "RLOOTrainer"], SHAPES))
def test_training_is_the_same_bit_by_bit_with_and_without_the_callback(kind: str, shape: str, tmp_path: Path) -> None:
    settings = {"dtype": "float32"} | SHAPES[shape]
    plain = trainer(getattr(trl, kind), **settings)
    plain.train()
    ended = torch.get_rng_state()
    read = watched(getattr(trl, kind), out=tmp_path / "run", **settings)
    assert torch.equal(torch.get_rng_state(), ended)
    assert torch.equal(weights(plain), weights(read))
    times = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    for before, after in zip(plain.state.log_history, read.state.log_history, strict=True):
        assert before.keys() == {key for key in after if not key.startswith("creditscope/")}
        assert all(str(before[key]) == str(after[key]) for key in before if key not in times)  # NaN equals NaN


def test_dropout_draws_the_same_numbers_with_and_without_the_callback() -> None:
    plain = trainer(peft=lora(0.3), dtype="float32")
    plain.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dropout is not in the row, and the callback says so
        read = watched(peft=lora(0.3), dtype="float32")
    assert torch.equal(weights(plain), weights(read))
    assert told(read, "scope/agreement")[0] < 1 - 1e-3


def test_a_pass_of_ours_leaves_gradients_modes_and_random_numbers() -> None:
    live = trainer(dtype="float32")
    model = live.model.train()
    model.lm_head.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    grads, state = [p.grad for p in model.parameters()], torch.get_rng_state()
    with untouched(model):
        torch.rand(3)
        assert not model.training
        assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not model.lm_head.training
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


# -- what is read is what TRL computes -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(("loss", "shape"), pairs(LOSSES, ["minibatches", "kl", "truncated"]))
def test_our_gradient_is_the_one_that_trl_steps_on(loss: str, shape: str) -> None:
    # TRL's head works in float32, whatever the model's precision: its gradient has seven digits.
    live = watched(**(LOSSES[loss] | SHAPES[shape]))
    cosines, ours = told(live, "scope/agreement"), told(live, "grad/norm")
    theirs = [entry["grad_norm"] for entry in live.state.log_history if "grad_norm" in entry]
    assert len(cosines) == len(theirs)
    assert min(cosines) > 1 - 1e-10
    assert ours == pytest.approx(theirs, rel=3e-6)


@pytest.mark.deep
@pytest.mark.parametrize("shape", some(list(SHAPES), "kl", every=3))
def test_our_gradient_is_the_one_that_rloo_steps_on(shape: str) -> None:
    live = watched(trl.RLOOTrainer, **SHAPES[shape])
    theirs = [entry["grad_norm"] for entry in live.state.log_history if "grad_norm" in entry]
    assert min(told(live, "scope/agreement")) > 1 - 1e-10
    assert told(live, "grad/norm") == pytest.approx(theirs, rel=3e-6)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_adapters_are_read_and_their_gradient_is_trls(beta: float) -> None:
    live = watched(peft=lora(), dtype="float32", beta=beta, num_iterations=2, max_steps=4)
    assert min(told(live, "scope/agreement")) > 1 - 1e-6
    assert len(told(live, "gram/group/effective_rank")) >= 1


def test_recomputed_activations_change_no_reading() -> None:
    kept = watched(max_steps=1)
    again = watched(max_steps=1, gradient_checkpointing=True)
    rank = "gram/group/effective_rank"
    assert told(again, rank) == pytest.approx(told(kept, rank), rel=1e-9)


class Slow(TrainerCallback):
    """Beside ours, at the same weights: every row's gradient by a backward of its own."""

    def __init__(self, scope: ScopeCallback) -> None:
        self.scope, self.grams, self.ours = scope, [], []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reading, model = self.scope._reading, self.scope._policy.model
        assert reading is not None
        window, held = reading
        rows = []
        with untouched(model):
            for i in range(len(held.live)):
                part = window.rows(torch.tensor([i]))
                live = chosen(logits(model, part.inputs, 1.0), part.inputs)
                grads = torch.autograd.grad(-objective(part, live), list(model.parameters()))
                rows.append(torch.cat([g.flatten() for g in grads]))
        g = torch.stack(rows)
        self.grams.append(g @ g.T)
        self.ours.append(torch.tensor(self.scope.observer.arrays(held.rollouts, held.w)["gram"]))


@pytest.mark.parametrize("settings", [{}, SHAPES["accumulation"], SHAPES["kl"]], ids=["plain", "accumulation", "kl"])
def test_the_gram_is_that_of_one_backward_a_rollout(settings: dict[str, Any]) -> None:
    live = trainer(**settings)
    scope = ScopeCallback(live, every=1)
    slow = Slow(scope)
    live.add_callback(scope)
    live.add_callback(slow)
    live.train()
    for ours, loop in zip(slow.ours, slow.grams, strict=True):
        met = ~ours.isnan()
        assert met.sum() >= 4 * 16  # groups are whole, however TRL dealt their rows out
        assert apart(ours[met], loop[met]) < 1e-12


def test_means_over_groups_do_not_hang_on_how_many_share_a_pass(tmp_path: Path) -> None:
    # A group with a credit of 0 has no centred rank: a mean over two passes counts the groups that have one.
    lines = []
    with in_double():
        for size in (16, 8):
            live = build("dapo", 1, per_device_train_batch_size=size, gradient_accumulation_steps=16 // size)
            live.add_callback(ScopeCallback(live, every=1, out=tmp_path / str(size)))
            live.train()
            lines.append(Record.open(tmp_path / str(size)).steps())
    for one, several in zip(*lines, strict=True):
        names = [name for name in one if name.startswith("gram/group/")]
        assert len(names) > 10
        assert {name: several[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-7)


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Three steps of two micro-batches, every one read."""
    out = tmp_path_factory.mktemp("accumulated") / "run"
    assert watched(out=out, **SHAPES["accumulation"]).state.global_step == 3
    return Record.open(out)


def test_every_row_has_the_reward_and_the_group_of_its_answer(accumulated: Record) -> None:
    record = accumulated
    assert record.groups() == [0, 1, 2]
    for step in record.groups():
        kept = record.group(step)
        assert kept["reward"].tolist() == pytest.approx(reward(list(kept["text"])))
        for group in set(kept["group"].tolist()):
            rows = kept["group"] == group
            assert rows.sum() == 4
            assert len(set(kept["prompt"][rows])) == 1
        assert ["".join(row) for row in kept["pieces"]] == kept["text"].tolist()


def test_groups_with_the_same_prompt_stay_apart(tmp_path: Path) -> None:
    # Equal prompts alone would make one group of sixteen.
    watched(max_steps=2, prompts=["a b"] * 8, out=tmp_path / "run")
    lines = Record.open(tmp_path / "run").steps()
    assert [line["signal/groups"] for line in lines] == [4, 4]
    assert max(line["gram/live_groups"] for line in lines) > 1


def test_advantages_of_a_row_are_those_of_its_group_and_reward(tmp_path: Path) -> None:
    watched(out=tmp_path / "run", loss_type="dr_grpo", scale_rewards="none")
    kept = Record.open(tmp_path / "run").group(0)
    for i in range(16):
        mean = kept["reward"][kept["group"] == kept["group"][i]].mean()
        assert kept["credit"][i][kept["mask"][i]] == pytest.approx(kept["reward"][i] - mean, abs=1e-6)


def test_overshoot_counts_the_tokens_that_the_step_carried_past_the_clip(tmp_path: Path) -> None:
    live = watched(out=tmp_path / "run", loss_type="grpo", learning_rate=3e-2, max_steps=1)
    kept = Record.open(tmp_path / "run").group(0)
    ratio = np.exp(kept["after_logp"] - kept["logp"])
    bounded = kept["mask"] & (kept["credit"] != 0)
    # An update moves tokens both ways. The clip stops the gradient of a token that went with its credit.
    past = bounded & np.where(kept["credit"] > 0, ratio > 1.2, ratio < 0.8)
    assert past.sum() > 0
    assert told(live, "overshoot/past")[0] == pytest.approx(past.sum() / bounded.sum())


def test_what_a_tool_wrote_is_not_the_policys_choice() -> None:
    made = Generation(torch.tensor([1.0, 0.0]), 2, {})
    inputs = {"completion_ids": torch.tensor([[5, 6, 7], [5, 0, 0]]), "completion_mask": torch.tensor([[1, 1, 1],
              [1, 0, 0]]), "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]), ROW: torch.tensor([1, 0])}
    assert mask_of(inputs).tolist() == [[True, False, True], [True, False, False]]
    rollouts = rollouts_of(inputs, made, None)
    assert rollouts.reward.tolist() == [0.0, 1.0]  # by number, not by place
    assert rollouts.lengths.tolist() == [2, 1]


# -- the record ------------------------------------------------------------------------------------------------------


def test_the_record_is_read_as_evidence_with_readings_on_schedule_and_signal_with_every_batch(tmp_path: Path) -> None:
    run = watched(every=2, out=tmp_path / "run", max_steps=5)
    assert len(told(run, "gram/group/effective_rank")) == 3
    assert len(told(run, "signal/live_groups")) == 5
    record = Record.open(tmp_path / "run")
    assert [line["step"] for line in record.steps()] == [0, 1, 2, 3, 4]
    assert record.readings() == record.groups() == [0, 2, 4]
    evidence = read_evidence(record)
    assert len(evidence.trained) == 5
    live = sum(line.get("gram/live_groups", 0) for line in record.steps())
    assert len(evidence.column("all/effective_rank")) == live
    assert evidence["method"] == "trl_dapo"
    assert "hub_token" not in str(record.config)


def test_a_batch_that_is_used_twice_is_counted_once(tmp_path: Path) -> None:
    watched(out=tmp_path / "run", **SHAPES["two_passes"])
    lines = Record.open(tmp_path / "run").steps()
    assert [line["rollouts/spent"] for line in lines] == [16, 0, 16, 0]
    assert ["reward/mean" in line for line in lines] == [True, False, True, False]


def test_a_reading_takes_so_many_whole_groups_after_a_first_that_takes_all(
        accumulated: Record, tmp_path: Path) -> None:
    live = trainer(**SHAPES["accumulation"])
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run", groups=2))
    live.train()
    record = Record.open(tmp_path / "run")
    assert [sorted(set(record.group(step)["group"].tolist())) for step in range(3)] == [[0, 1, 2, 3], [0, 1], [0, 1]]
    assert [len(record.reading(step)["gram"]) for step in range(3)] == [16, 8, 8]
    assert ["scope/agreement" in line for line in record.steps()] == [True, False, False]
    part, whole = record.reading(1), accumulated.reading(1)
    for group in (0, 1):  # the block of a group does not hang on what else was read
        a, b = (reading["gram"][np.ix_(*[reading["group"] == group] * 2)] for reading in (part, whole))
        assert np.sort(np.diag(a)) == pytest.approx(np.sort(np.diag(b)), rel=1e-9)


def test_without_the_geometry_credit_and_overshoot_stay(tmp_path: Path) -> None:
    live = trainer()
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run", gram=False))
    live.train()
    assert not any("gram/" in key for key in live.state.log_history[0])
    assert len(told(live, "w/top10_mass")) == len(told(live, "overshoot/past")) == 3
    assert Record.open(tmp_path / "run").readings() == []


def test_training_that_goes_on_from_a_checkpoint_goes_on_in_its_record(tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path / "trainer"), "save_strategy": "steps", "save_steps": 2}
    watched(out=tmp_path / "run", **(settings | {"max_steps": 3}))
    live = trainer(**(settings | {"max_steps": 4}))
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run"))
    live.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    assert [line["step"] for line in Record.open(tmp_path / "run").steps()] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mini", pytest.param("as it stands", marks=pytest.mark.nightly)])
def test_the_example_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    script = load_script(Path(__file__).parents[2] / "examples" / "trl_callback.py")
    if model == "mini":
        monkeypatch.setattr(script, "TINY", mini.model())
        monkeypatch.setattr(script, "task", mini.Coins())
    script.main(steps=5)
    assert "groups carry signal; their 8 answers push in" in capsys.readouterr().out
    assert read_evidence(Record.open("runs/mine")).column("all/effective_rank")
    if model == "mini":
        script.main(steps=1)  # a second run has a folder of its own
        assert len(Record.open("runs/mine-2").steps()) == 1


# -- what cannot be read ---------------------------------------------------------------------------------------------


def test_a_step_without_a_token_is_absent_with_the_reason_and_training_goes_on(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="step 0 was not read: no token of the step is learned from"):
        live = watched(out=tmp_path / "run", mask_truncated_completions=True, max_completion_length=1, max_steps=2,
                       generation_kwargs={"suppress_tokens": [0, 1]})
    lines = Record.open(tmp_path / "run").steps()
    assert [line["scope/absent"].startswith("no token") for line in lines] == [True, True]
    assert live.state.global_step == 2


@pytest.mark.parametrize("inside", [False, True])
def test_rows_under_wrong_names_are_found_out_at_the_first_reading_and_none_is_believed(
        inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of one layer change places: the sum of the Gram, which every pass checks, stays what it was."""
    real = Recorder.matrix

    def planted(self: Recorder, source: ParameterSource, delta: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        order = torch.arange(len(a))
        if source.names == ("model.layers.0.mlp.up_proj.weight",):
            order[[0, 1]] = order[[1, 0]]
        return real(self, source, delta[order], a[order])

    monkeypatch.setattr(Recorder, "matrix", planted)
    if inside:  # the trainer's own backward
        live = trainer(ScopedGRPOTrainer, max_steps=2, extra={"every": 1, "out": tmp_path / "run"})
    else:
        live = trainer(max_steps=2)
        live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run"))
    with pytest.warns(UserWarning, match="step 0 was not read: the loss of rollouts .* through rollout 0 .*up_proj"):
        live.train()
    record = Record.open(tmp_path / "run")
    assert ["has a gradient through rollout 0" in line["scope/absent"] for line in record.steps()] == [True, True]
    assert not any(name.startswith("gram/") for line in record.steps() for name in line)
    assert record.readings() == []


def test_where_there_is_no_room_for_the_proof_readings_go_on_and_it_is_said_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_room(*_: Any) -> float:
        asked.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr("creditscope.microscope.proof.prove", no_room)
    live = trainer(max_steps=2)
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run"))
    with pytest.warns(UserWarning, match="there is no room for the proof"):
        live.train()
    assert len(asked) == 1
    assert all("gram/group/effective_rank" in line for line in Record.open(tmp_path / "run").steps())


def test_a_subclass_with_a_loss_of_its_own_is_told_that_the_row_is_not_its_loss() -> None:
    class Other(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            inputs = inputs | {"advantages": inputs["advantages"].abs()}
            return super()._compute_loss(model, inputs)

    with pytest.warns(UserWarning, match="cosine .*a subclass"):
        live = watched(Other, max_steps=1)
    assert told(live, "scope/agreement")[0] < 0.99


@each("settings, name", [
    ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
    ({"loss_type": "vespo", "beta": 0.1}, "use_bias_correction_kl=True"),
    ({"loss_type": "grpo", "delta": 1.1}, r"delta=1.1 is not above 1 \+ epsilon_high = 1.2"),
])
def test_what_no_row_can_say_is_refused_by_its_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(CreditscopeError, match=name):
        ScopeCallback(trainer(**settings))


def test_a_record_that_another_process_writes_is_refused_in_words_for_both_ways_in(tmp_path: Path) -> None:
    live = trainer()
    live.add_callback(ScopeCallback(live, out=tmp_path / "run"))
    with Record.create(tmp_path / "run", {}, {}), \
            pytest.raises(CreditscopeError, match=r"another process is writing into .*write into another folder$"):
        live.train()


def test_a_group_of_answers_that_are_all_masked_does_not_hide_the_others(tmp_path: Path) -> None:
    # One group a pass: that of group 3 has no token to pass.
    with in_double():
        live = build("masked", 1)
        live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run"))
        live.train()
    for line in Record.open(tmp_path / "run").steps():
        assert "scope/absent" not in line
        assert line["scope/agreement"] > 1 - 1e-12


def test_no_groups_at_all_are_refused() -> None:
    with pytest.raises(CreditscopeError, match="at least 1, or None for all; got 0"):
        ScopeCallback(trainer(), groups=0)


@each("every", [0, 2.5, "10", True])
def test_a_schedule_that_is_no_whole_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(CreditscopeError, match=f"a whole number of at least 1, got {every!r}$"):
        ScopeCallback(trainer(), every=every)


@each("kind, says", [
    ("FSDP", "sharded by FSDP 1.*set fsdp_version to 2"),
    ("MEGATRON_LM", "runs under MEGATRON_LM.*in one process, with DDP, FSDP 2 or ZeRO 1 or 2")])
def test_an_engine_that_cannot_be_read_is_refused_with_the_choices(kind: str, says: str) -> None:
    live = trainer()
    live.accelerator.state.distributed_type = kind
    try:
        with pytest.raises(CreditscopeError, match=says):
            ScopeCallback(live)
    finally:
        live.accelerator.state.distributed_type = "NO"


def test_ranks_that_share_rows_are_refused() -> None:
    live = trainer()
    shape = SimpleNamespace(tp_enabled=True)
    with mock.patch.object(type(live.accelerator), "parallelism_config", shape), \
            pytest.raises(CreditscopeError, match="tp_size is above 1"):
        ScopeCallback(live)


@each("loss", LOSSES)
def test_the_stated_row_has_the_settings_numbers(loss: str) -> None:
    row, settings = stated(trainer(**LOSSES[loss])), LOSSES[loss]
    assert row.name == loss
    assert row.scale == {"none": "none"}.get(settings.get("scale_rewards", ""), DIALECTS["trl_grpo"].scale)
    ceiling = {"trl_cispo": 4.0, "trl_dapo": 0.28, "trl_luspo": 4e-4, "trl_sapo": None, "trl_vespo": None}
    assert row.clip_high == ceiling.get(loss, 0.2)
    assert math.isclose(row.beta, 0.0)
