"""ScopeCallback on TRL's own DPOTrainer: w of each token, the Gram of pairs, and TRL's gradient, loss by loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

pytest.importorskip("trl")

from trl import DPOTrainer

import mini
from creditscope.errors import CreditscopeError
from creditscope.plugins.common.untouched import untouched
from creditscope.plugins.trl import ScopeCallback, names
from creditscope.plugins.trl.pairs import Pass, pairs_of
from creditscope.plugins.trl.stated import stated_pairs
from creditscope.runs.record import Record
from each import each
from makers import load_script
from plugins.trl_makers import dpo_trainer, preferred

pytestmark = [pytest.mark.slow, pytest.mark.conformance,
              pytest.mark.skipif(not names.returns_log_probs(), reason="the model of this DPOTrainer returns logits")]

LOSSES: dict[str, dict[str, Any]] = {name: {"loss_types": [name]} for name in (
    "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "sft", "sigmoid_norm")} | {
    "exo_pair": {"loss_types": ["exo_pair"], "label_smoothing": 0.1},
    "robust": {"loss_types": ["robust"], "label_smoothing": 0.1},
    "with sft": {"loss_types": ["sft", "hinge"], "loss_weights": [0.5, 2.0]},
    "three": {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "length": {"loss_types": ["sigmoid"], "ld_alpha": 0.5},
    "forward_kl": {"loss_types": ["sigmoid"], "f_divergence_type": "forward_kl"},
    "js": {"loss_types": ["ipo"], "f_divergence_type": "js_divergence"},
}
ROWS = {"sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "with sft"}
"""Those that are rows of the table."""
PLAIN: dict[str, Any] = {"loss_weights": [1.0], "label_smoothing": 0.0, "ld_alpha": None,
                         "f_divergence_type": "reverse_kl"}
"""What a case does not name."""


class Turns(TrainerCallback):
    """Another loss at each step, and its row stated anew: one training reads them all."""

    def __init__(self, trainer: Any, cases: list[dict[str, Any]]) -> None:
        self._trainer, self._cases = trainer, cases

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for name, value in (PLAIN | self._cases[state.global_step]).items():
            setattr(self._trainer, name, value)
        args.label_smoothing = self._trainer.label_smoothing
        scope, = (each for each in self._trainer.callback_handler.callbacks if isinstance(each, ScopeCallback))
        scope._source.name, scope._source.method = stated_pairs(self._trainer)  # type: ignore[misc]


class Slow(TrainerCallback):
    """Beside ours, at the same weights: each row's gradient by a backward of its own, from the row without padding."""

    def __init__(self, scope: ScopeCallback) -> None:
        self.scope, self.grams, self.ours = scope, list[torch.Tensor](), list[torch.Tensor]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.scope._reading is not None
        window, held = self.scope._reading
        model, rows = self.scope._policy.model, []
        with untouched(model):
            for i in range(len(held.live)):
                keep = window.inputs["attention_mask"][i].bool()
                ids, answer = window.inputs["input_ids"][i][keep], int(held.rollouts.mask[i].sum())
                logp = model(input_ids=ids[None]).logits[0].log_softmax(dim=1)
                told = logp[-answer - 1:-1].gather(1, ids[-answer:, None]).squeeze(1)
                parameters = [p for p in model.parameters() if p.requires_grad]
                grads = torch.autograd.grad((held.w[i][:answer] * told).sum(), parameters)
                rows.append(torch.cat([g.flatten() for g in grads]))
        g = torch.stack(rows)
        self.grams.append(g @ g.T)
        self.ours.append(torch.tensor(self.scope.observer.arrays(held.rollouts, held.w)["gram"]))


@dataclass
class Run:
    """A training under the callback."""

    trainer: Any
    folder: Path
    slow: Slow

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]

    def arrays(self, step: int) -> dict[str, Any]:
        with np.load(sorted((self.folder / "groups").glob("*.npz"))[step]) as held:
            return dict(held)

    @property
    def logged(self) -> list[dict[str, float]]:
        return [entry for entry in self.trainer.state.log_history if "grad_norm" in entry]


def run(folder: Path, live: Any, beside: TrainerCallback | None = None, groups: int | None = None) -> Run:
    scope = ScopeCallback(live, every=1, out=folder, groups=groups)
    slow = Slow(scope)
    for callback in (beside, scope, slow):
        if callback is not None:
            live.add_callback(callback)
    live.train()
    return Run(live, folder, slow)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: Any) -> Run:
    """One step by each loss of TRL, at β = 0.1."""
    live = dpo_trainer(max_steps=len(LOSSES), lr_scheduler_type="constant", learning_rate=1e-3)
    return run(tmp_path_factory.mktemp("dpo") / "run", live, Turns(live, list(LOSSES.values())))


def agrees(found: Run) -> None:
    """Σ g_i is TRL's gradient: its direction, its norm, and every row's part of it."""
    assert all("scope/absent" not in line for line in found.lines)
    assert [line["scope/agreement"] for line in found.lines] == pytest.approx([1.0] * len(found.lines), abs=1e-9)
    assert [line["scope/norm_ratio"] for line in found.lines] == pytest.approx([1.0] * len(found.lines), rel=2e-5)
    ours, theirs = ([line[name] for line in lines] for name, lines in (("grad/norm", found.lines),
                                                                       ("grad_norm", found.logged)))
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert [line["objective/value"] for line in found.lines] == pytest.approx([-x["loss"] for x in found.logged])
    for ours, loop in zip(found.slow.ours, found.slow.grams, strict=True):
        met = ~ours.isnan()
        assert met.diagonal().all()
        assert torch.allclose(ours[met], loop[met], rtol=1e-6, atol=1e-9 * float(loop.diagonal().max()))


def test_under_every_loss_the_rows_sum_to_trls_gradient_and_the_gram_is_that_of_one_backward_per_row(
        losses: Run) -> None:
    agrees(losses)
    assert len(losses.lines) == len(LOSSES)


def test_the_row_that_trls_settings_state_has_trls_w_and_other_losses_have_no_row(losses: Run) -> None:
    found = {name: line.get("scope/row_error") for name, line in zip(LOSSES, losses.lines, strict=True)}
    assert {name for name, error in found.items() if error is not None} == ROWS
    assert max(error for error in found.values() if error is not None) < 1e-5


class Another(DPOTrainer):  # type: ignore[misc]
    """At each step a β that no setting tells; a negative one prefers the rejected answers."""

    betas = (0.1, 0.3, -0.1)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.beta = self.betas[self.state.global_step]
        return super().compute_loss(*args, **kwargs)


def test_a_loss_that_the_settings_do_not_state_is_noticed_and_still_read_exactly(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="w of TRL's loss is not that of row 'trl_dpo'"):
        found = run(tmp_path / "run", dpo_trainer(Another, max_steps=3, learning_rate=1e-9))
    agrees(found)
    # At π = π_ref, w = β/2P: a row with a third of β is apart by 2/3, and one with −β by 2.
    assert [line["scope/row_error"] for line in found.lines] == pytest.approx([0.0, 2 / 3, 2.0], abs=1e-4)


class Swapped(DPOTrainer):  # type: ignore[misc]
    """Exchanges chosen and rejected rows behind the callback's back."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        half = len(inputs["input_ids"]) // 2
        return super().compute_loss(model, {name: torch.cat([x[half:], x[:half]]) for name, x in inputs.items()},
                                    *args, **kwargs)


def test_rows_that_were_exchanged_inside_the_loss_are_not_read(tmp_path: Path) -> None:
    live = dpo_trainer(Swapped, max_steps=1)
    live.add_callback(ScopeCallback(live, every=1, out=tmp_path / "run"))
    with pytest.warns(UserWarning, match="compute_loss gave the model other rows than its batch has"):
        live.train()
    line = json.loads((tmp_path / "run" / "steps.jsonl").read_text())
    assert "other rows" in line["scope/absent"]
    assert "w/zero" not in line


def test_w_of_dpo_is_beta_times_sigmoid_of_the_negative_margin_over_the_pairs(losses: Run) -> None:
    # At π = π_ref, u = 0: w = β σ(0)/P = 0.1 · 0.5/4 = 0.0125 on every token of the chosen answer, − on the rejected.
    held = losses.arrays(0)
    expected = np.where(np.arange(8)[:, None] % 2 == 0, 0.0125, -0.0125) * held["mask"]
    assert held["w"] == pytest.approx(expected, rel=1e-6)
    assert held["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert held["reward"].tolist() == [1, 0] * 4
    assert held["credit"].tolist() == (np.where(np.arange(8)[:, None] % 2 == 0, 1, -1) * held["mask"]).tolist()


def test_w_of_a_later_step_follows_the_margin_of_its_pair(losses: Run) -> None:
    # sigmoid_norm has means over tokens: L = −log σ(u), u = β(h_c/L_c − h_r/L_r), so w = ± β σ(−u)/(P·L).
    at = list(LOSSES).index("sigmoid_norm")
    held = losses.arrays(at)
    length = held["mask"].sum(axis=1)
    h = ((held["live_logp"] - held["ref_logp"]) * held["mask"]).sum(axis=1) / length
    u = 0.1 * (h[::2] - h[1::2])
    assert np.abs(u).max() > 1e-4
    weight = np.repeat(0.1 / (1 + np.exp(u)) / 4, 2) * np.tile([1, -1], 4) / length
    assert held["w"] == pytest.approx(weight[:, None] * held["mask"], rel=1e-4)


def test_w_of_ipo_is_that_of_the_squared_distance_from_half_over_beta(losses: Run) -> None:
    # L = (d − 1/(2β))², d = h_c/L_c − h_r/L_r: w = ± 2(1/(2β) − d)/(P·L) = ± (10 − 2d)/(4L).
    held = losses.arrays(list(LOSSES).index("ipo"))
    length = held["mask"].sum(axis=1)
    h = ((held["live_logp"] - held["ref_logp"]) * held["mask"]).sum(axis=1) / length
    weight = np.repeat((10 - 2 * (h[::2] - h[1::2])) / 4, 2) * np.tile([1, -1], 4) / length
    assert held["w"] == pytest.approx(weight[:, None] * held["mask"], rel=1e-4)


def test_texts_pieces_and_prompts_are_those_of_the_pairs(losses: Run) -> None:
    held = losses.arrays(0)
    asked = {(row["prompt"].strip(), row["chosen"], row["rejected"]) for row in preferred()}
    read = [tuple(str(text).replace("<eos>", "").strip() for text in (held["prompt"][i], held["text"][i],
                                                                     held["text"][i + 1])) for i in range(0, 8, 2)]
    assert set(read) <= asked
    assert held["prompt"][::2].tolist() == held["prompt"][1::2].tolist()


def test_what_a_step_did_to_chosen_and_rejected_answers_is_told(losses: Run) -> None:
    line, held = losses.lines[0], losses.arrays(0)
    moved = ((held["after_logp"] - held["live_logp"]) * held["mask"]).sum(axis=1)
    assert line["pairs/chosen_change"] == pytest.approx(moved[::2].mean(), rel=1e-5)
    assert line["pairs/rejected_change"] == pytest.approx(moved[1::2].mean(), rel=1e-5)
    assert line["pairs/chosen_fell"] == (moved[::2] < 0).mean()
    assert line["pairs/chosen_change"] > 0 > line["pairs/rejected_change"]


def test_margins_and_log_probs_are_those_of_trls_log(losses: Run) -> None:
    names = {"pairs/margin": "rewards/margins", "pairs/accuracy": "rewards/accuracies",
             "pairs/chosen_reward": "rewards/chosen", "pairs/rejected_logp": "logps/rejected"}
    for ours, theirs in names.items():
        assert [line[ours] for line in losses.lines] == [entry[theirs] for entry in losses.logged]


def test_preferences_have_no_bound_so_overshoot_and_clipped_tokens_are_absent_not_0(losses: Run) -> None:
    assert not [key for line in losses.lines for key in line if key.startswith(("overshoot", "optimizer/overshoot"))]
    assert not {"clipped", "after_past"} & losses.arrays(0).keys()


# -- other shapes of the same ------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "cut at the start": {"max_length": 4},
    "cut at the end": {"max_length": 3, "truncation_mode": "keep_end"},
    "reference computed before": {"precompute_ref_log_probs": True},
    "recomputed": {"gradient_checkpointing": True},
    "clipped gradient": {"max_grad_norm": 0.1},
    "weighted": {"use_weighting": True},
}
NIGHTLY = ("clipped gradient", "weighted", "recomputed")


def shaped(name: str, folder: Path) -> Run:
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1) if name == "adapter" else None
    return run(folder / "run", dpo_trainer(peft=adapter, **SHAPES.get(name, {})))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name
                                  for name in (*SHAPES, "adapter")])
def test_the_same_holds_for(name: str, tmp_path: Path) -> None:
    found = shaped(name, tmp_path)
    agrees(found)
    assert [line.get("scope/row_error", 0.0) for line in found.lines] == pytest.approx([0.0, 0.0], abs=1e-5)
    held = found.arrays(1)
    assert ("ref_logp" in held) == (name != "reference computed before")
    if name == "accumulated":
        # Two micro-batches of two pairs: w = β σ(−u)/2, halved by accumulation; at the first step u = 0.
        assert np.abs(found.arrays(0)["w"][held["mask"].any(axis=1)]).max() == pytest.approx(0.0125, rel=1e-6)
        assert held["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    if name == "adapter":
        # The reference is the model without the adapter, which the first step starts from.
        first = found.arrays(0)
        assert first["ref_logp"] == pytest.approx(first["live_logp"] * first["mask"], abs=1e-5)
        assert not np.allclose(held["ref_logp"], held["live_logp"] * held["mask"], atol=1e-4)


def test_a_reading_of_some_pairs_is_that_of_these_pairs(tmp_path: Path) -> None:
    found = run(tmp_path / "run", dpo_trainer(), groups=1)
    whole, part = found.arrays(0), found.arrays(1)
    assert (len(whole["w"]), len(part["w"])) == (8, 2)  # the first reading takes all, to compare with TRL's gradient
    assert "scope/agreement" not in found.lines[1]
    ours, loop = found.slow.ours[1], found.slow.grams[1]
    assert torch.allclose(ours, loop, rtol=1e-6)


@pytest.mark.nightly
def test_two_ranks_read_what_one_process_with_the_same_pairs_reads(tmp_path: Path) -> None:
    script = Path(__file__).parent / "trl_dpo_ranks.py"
    start = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
             "localhost:0"]
    for name, launcher in (("two", start), ("one", [])):
        done = subprocess.run([sys.executable, *launcher, str(script), str(tmp_path / name)], capture_output=True,
                              text=True, check=False, timeout=600,
                              env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
        assert done.returncode == 0, done.stderr[-3000:]
    two, one = ([json.loads(line) for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]
                for name in ("two", "one"))
    for ours, alone in zip(two, one, strict=True):
        assert ours["scope/agreement"] == pytest.approx(1.0, abs=1e-9)
        assert ours["scope/norm_ratio"] == pytest.approx(1.0, rel=1e-6)
        # All pairs of rows across ranks are sketched, and TRL's entropy is that of one micro-batch.
        same = {key for key in ours.keys() & alone.keys() if key.startswith(("pairs/", "w/", "gram/group/", "grad/"))}
        assert len(same) > 20
        assert {key: ours[key] for key in same} == pytest.approx({key: alone[key] for key in same}, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("model", ["mini", pytest.param("as it stands", marks=pytest.mark.nightly)])
def test_the_example_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    script = load_script(Path(__file__).parents[2] / "examples" / "trl_dpo.py")
    small = {"model": mini.model()} if model == "mini" else {}
    script.main(steps=5, **small)
    assert "step 5: margin" in capsys.readouterr().out
    assert len(Record.open("runs/mine").steps()) == 5


# -- what is not read --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare() -> Any:
    """A trainer that no test trains."""
    return dpo_trainer()


@each(("place", "name", "match"), [
    ("trainer", "padding_free", "padding_free=True changes the model's forward.*set padding_free=False"),
    ("args", "use_liger_kernel", "use_liger_kernel=True changes the model's forward.*set use_liger_kernel=False"),
    ("trainer", "_is_vision_dataset", "the dataset has images, and only text is read so far"),
])
def test_a_setting_that_cannot_be_read_is_refused_with_its_name(place: str, name: str, match: str, bare: Any,
                                                                monkeypatch: Any) -> None:
    monkeypatch.setattr(bare if place == "trainer" else bare.args, name, True)
    with pytest.raises(CreditscopeError, match=match):
        ScopeCallback(bare)


def test_a_dpo_trainer_under_deepspeed_is_refused(bare: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(names, "_engine", lambda trainer: "DEEPSPEED")
    with pytest.raises(CreditscopeError, match="not read under DeepSpeed"):
        ScopeCallback(bare)


def one_pass(**changes: Any) -> Pass:
    """Two pairs: prompts of one and two tokens, answers of one to three."""
    ids = torch.tensor([[9, 1, 2, 0], [9, 9, 3, 0], [9, 4, 0, 0], [9, 9, 5, 6]])
    inside = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1]])
    pull = torch.arange(12.0).view(4, 3)
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "completion_mask": inside}
    given = {"live": -pull, "pull": pull, "ref": -pull, "loss": 2.0} | changes
    return Pass(inputs | given.pop("inputs", {}), **given)


def test_the_two_rows_of_a_pair_lie_beside_each_other_and_w_is_at_its_token() -> None:
    # Column c of the log-probs is of token c + 1. Chosen rows are 0 and 1 of the batch, rejected ones 2 and 3.
    found = pairs_of([one_pass()], 2.0, None)
    assert found.rollouts.tokens.tolist() == [[1, 2], [4, 0], [3, 0], [5, 6]]
    assert found.given.tolist() == [[-0.0, -0.5], [-3.0, 0.0], [-2.0, 0.0], [-5.0, -5.5]]  # −pull/2
    assert found.rollouts.ref_logp is not None
    assert found.rollouts.ref_logp.tolist() == [[-0.0, -1.0], [-6.0, 0.0], [-4.0, 0.0], [-10.0, -11.0]]
    assert found.rollouts.group.tolist() == [0, 0, 1, 1]
    assert found.objective == -2.0


def test_micro_batches_of_other_widths_are_joined_and_ranks_have_numbers_of_their_own() -> None:
    narrow = one_pass()
    narrow.inputs = {name: value[[0, 2], :3] for name, value in narrow.inputs.items()}
    narrow.live = narrow.pull = narrow.ref = -torch.ones(2, 2)
    found = pairs_of([one_pass(), narrow], 1.0, None, rank=1, ranks=3)
    assert found.rollouts.group.tolist() == [1, 1, 4, 4, 7, 7]
    assert found.rollouts.tokens[4:].tolist() == [[1, 2], [4, 0]]
    assert found.inputs["input_ids"].shape == (6, 4)


@each(("changes", "match"), [
    ({"inputs": {"pixel_values": torch.ones(4)}}, "the batch has 'pixel_values', and only text is read so far"),
    ({"live": None}, "the model gave compute_loss no log_probs with a gradient"),
    ({"pull": None}, "the model gave compute_loss no log_probs with a gradient"),
    ({"inputs": {"completion_mask": torch.zeros(4, 4)}}, "every answer is empty, or was cut off by max_length"),
])
def test_a_pass_that_cannot_be_read_says_why(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CreditscopeError, match=match):
        pairs_of([one_pass(**changes)], 1.0, None)
