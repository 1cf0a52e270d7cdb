"""Rows and credits of ours in TRL's loop: with TRL's own rows it is TRL, to the last digits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", reason="its loop is used")

from creditscope import METHODS, surrogate  # noqa: E402
from creditscope.errors import CreditscopeError  # noqa: E402
from creditscope.methods.dialects import DIALECTS  # noqa: E402
from creditscope.methods.find import find  # noqa: E402
from creditscope.objective.weights import aggregate, alpha, kept  # noqa: E402
from creditscope.plugins.trl import CreditMixin, ScopeCallback, ScopedGRPOTrainer  # noqa: E402
from creditscope.plugins.trl.batch import Window, objective  # noqa: E402
from creditscope.plugins.trl.passes import chosen, entropy, logits  # noqa: E402
from creditscope.runs.record import Record  # noqa: E402
from depth import FULL, some  # noqa: E402
from each import each  # noqa: E402
from makers import make  # noqa: E402
from plugins.trl_makers import in_double, pairs, trainer, weights  # noqa: E402
from small_models import apart  # noqa: E402

pytestmark = pytest.mark.conformance

SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
PARITY: dict[str, dict[str, Any]] = {
    "trl_dapo": {"loss_type": "dapo"},
    "trl_grpo": {"loss_type": "grpo"},
    "trl_dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "trl_bnpo": {"loss_type": "bnpo"},
    "trl_cispo": {"loss_type": "cispo"},
    "trl_sapo": {"loss_type": "sapo"},
    "trl_gspo": {"loss_type": "grpo", **SEQUENCE},
    "trl_luspo": {"loss_type": "luspo", **SEQUENCE},
    "trl_vespo": {"loss_type": "vespo"},
    "trl_grpo_batch": {"loss_type": "grpo", "scale_rewards": "batch"},
    "trl_grpo_v32": {"loss_type": "grpo", "scale_rewards": "none", "off_policy_mask_threshold": 0.5},
}
SHAPES: dict[str, dict[str, Any]] = {
    "two_passes": {"num_iterations": 2, "max_steps": 4},
    "minibatches": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
                    "num_iterations": 2, "max_steps": 6},
    "kl": {"beta": 0.04, "num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "truncated": {"mask_truncated_completions": True, "gradient_accumulation_steps": 2,
                  "per_device_train_batch_size": 8},
}
# SGD: Adam would blow up the last digits of coordinates whose gradient is 0 but for rounding.
PLAIN = {"optim": "sgd", "learning_rate": 0.1}


def losses(live: Any) -> list[float]:
    return [entry["loss"] for entry in live.state.log_history if "loss" in entry]


def exactly(live: Any) -> Any:
    """TRL with log-probs in the model's own precision: its fused head rounds to float32. Its loss stays its own."""

    def look(model: Any, ids: Tensor, attend: Tensor, keep: int, **_: Any) -> tuple[Tensor, Tensor, None]:
        cut = ids.shape[1] - keep
        inputs = {"prompt_ids": ids[:, :cut], "completion_ids": ids[:, cut:], "prompt_mask": attend[:, :cut],
                  "completion_mask": attend[:, cut:]}
        z = logits(model, inputs, live.temperature)
        return chosen(z, inputs), entropy(z), None

    live._get_per_token_logps_and_entropies = look
    return live


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(("row", "shape"), [
    *(pair for pair in pairs(PARITY, ["minibatches", "kl"])
      if pair != ("trl_vespo", "kl")),  # TRL weighs its KL by a ratio that no axis has
    ("trl_dapo", "two_passes"), ("trl_grpo", "truncated"), *([("trl_dapo", "truncated")] if FULL else [])])
def test_trl_with_our_row_is_trl_with_its_own_loss(row: str, shape: str) -> None:
    settings = SHAPES[shape] | PLAIN
    with in_double():
        theirs = exactly(trainer(**(PARITY[row] | settings)))
        start = weights(theirs).clone()
        theirs.train()
        ours = exactly(trainer(ScopedGRPOTrainer, **settings, extra={"method": row}))
        ours.train()
    assert apart(weights(ours) - start, weights(theirs) - start) < 1e-12
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("row", ["trl_dapo", "trl_grpo"])
def test_trl_with_our_row_is_trl_as_it_comes_within_its_heads_rounding(row: str) -> None:
    theirs = trainer(**PARITY[row], **PLAIN)
    start = weights(theirs).clone()
    theirs.train()
    ours = trainer(ScopedGRPOTrainer, **PLAIN, extra={"method": row})
    ours.train()
    assert apart(weights(ours) - start, weights(theirs) - start) < 1e-5
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-6)


def test_the_papers_dapo_is_trls_where_no_group_is_unanimous_but_for_its_1e_4_in_the_std() -> None:
    def different(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 4) for i in range(len(completions))]  # std 1.29: 1e-4 is 8e-5 of it

    plain = PLAIN | {"max_grad_norm": 0.0, "max_steps": 1}  # a clipped gradient would hide its scale
    theirs = trainer(loss_type="dapo", epsilon_high=0.28, funcs=different, **plain)
    start = weights(theirs).clone()
    theirs.train()
    ours = trainer(ScopedGRPOTrainer, funcs=different, **plain, extra={"method": "dapo"})
    ours.train()
    assert 1e-6 < apart(weights(ours) - start, weights(theirs) - start) < 1e-4


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("row", some(["dapo", "grpo_even", "cppo", "reinforce_pp", "kimi", "rloo", "trl_cispo"],
                                     "reinforce_pp", every=2))
def test_accumulation_changes_memory_and_nothing_else(row: str) -> None:
    """Weights are fixed on the whole generation, so denominators that span groups do not see micro-batches."""
    ended = []
    for parts in (1, 4):
        live = trainer(ScopedGRPOTrainer, gradient_accumulation_steps=parts, max_grad_norm=0.0, max_steps=2,
                       per_device_train_batch_size=16 // parts, **PLAIN, extra={"method": row})
        start = weights(live).clone()
        live.train()
        ended.append(weights(live) - start)
    assert apart(ended[1], ended[0]) < 1e-6  # the answers' rows are padded in float32 rewards, all else is exact


@each("name", [*METHODS, *(name for name in DIALECTS if name.startswith("trl_"))])
def test_with_the_weights_of_its_own_rows_the_objective_is_the_surrogate(name: str) -> None:
    method = find(name)
    if method.kl != "none" and method.kl_in == "loss" and not method.beta:
        method = method.replace(beta=0.1)
    rollouts = make([1, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1, 1], [5, 2, 4, 1, 3, 5], seed=3)
    draw = torch.Generator().manual_seed(0)
    credit = torch.randn(rollouts.mask.shape, generator=draw, dtype=torch.float64).masked_fill(~rollouts.mask, 0.0)
    live = rollouts.logp.double() + 0.3 * torch.randn(rollouts.mask.shape, generator=draw, dtype=torch.float64)
    keep = kept(method, rollouts, credit)
    window = Window(method, {}, rollouts, credit, alpha(method, rollouts, keep, torch.float64),
                    aggregate(method, rollouts, keep, torch.float64), rollouts.logp)
    assert float(objective(window, live)) == pytest.approx(float(surrogate(method, live, rollouts, credit)), rel=1e-12)


# -- credit ----------------------------------------------------------------------------------------------------------


def words(text: str, row: Any) -> list[list[Any]]:
    """Every word is a step, with the space before it, and an `a` is a right one."""
    return [[m.start(), m.end(), float(m[0].strip() == "a")] for m in re.finditer(r" ?\S+", text)]


def test_step_rewards_reach_the_tokens_of_their_steps(tmp_path: Path) -> None:
    live = trainer(ScopedGRPOTrainer, max_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=8, extra={
        "method": "dr_grpo", "credit": "step_reward", "steps": words, "every": 1, "out": tmp_path / "run"})
    live.train()
    kept_rows = Record.open(tmp_path / "run").group(0)
    for group in range(4):
        rows = kept_rows["group"] == group
        said, pieces = kept_rows["credit"][rows], kept_rows["pieces"][rows]
        right, step = pieces == "a", pieces != ""
        right |= pieces == " a"
        # Dr.GRPO subtracts the mean over all steps of the group.
        mean = right[step].mean()
        assert said[step] == pytest.approx(right[step] - mean, abs=1e-6)
        assert (kept_rows["step"][rows][step] >= 0).all()
    assert Record.open(tmp_path / "run").steps()[0]["credit/within"] > 0


@pytest.mark.parametrize("credit", ["leave_one_out", "prefix_tree", "prefix_share", "entropy_mask", "entropy_shaping",
                                    "optimal_token", "optimal_sequence"])
def test_credits_that_need_no_sampler_train(credit: str) -> None:
    live = trainer(ScopedGRPOTrainer, gradient_accumulation_steps=2, per_device_train_batch_size=8,
                   max_steps=2, extra={"method": "grpo", "credit": credit, "every": 1})
    live.train()
    assert [entry["creditscope/scope/agreement"] > 1 - 1e-10 for entry in live.state.log_history
            if "loss" in entry] == [True, True]


@each("extra, settings, says", [
    ({"credit": "monte_carlo"}, {}, "a policy to sample from and a verifier, which TRL's trainer"),
    ({"credit": "gae"}, {}, "a learned value function"),
    ({"credit": "optimal_scalar"}, {}, "a backward pass under the microscope"),
    ({"credit": "step_reward"}, {}, r"without steps="),
    ({"method": "ppo"}, {}, "takes its credit from a critic"),
    ({"method": "gropo"}, {}, "did you mean 'grpo'"),
    ({"method": "gspo"}, {"beta": 0.1}, "beta=0.1: method 'gspo' has no KL term"),
    ({"method": "gspo"}, {"epsilon": 0.1}, "epsilon=0.1: the row of method 'gspo' decides"),
    ({"method": "gspo"}, {"loss_type": "grpo"}, "loss_type='grpo': the row"),
])
def test_what_trl_cannot_give_is_refused_by_name(extra: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(CreditscopeError, match=says):
        trainer(ScopedGRPOTrainer, **settings, extra=extra)


def test_an_answer_without_a_reward_ends_the_run_in_a_sentence() -> None:
    live = trainer(ScopedGRPOTrainer, funcs=lambda completions, **_: [None] * len(completions))
    with pytest.raises(CreditscopeError, match="16 answers have no reward"):
        live.train()


def test_steps_that_are_no_spans_end_the_run_in_a_sentence() -> None:
    live = trainer(ScopedGRPOTrainer, extra={"credit": "step_reward", "steps": lambda text, row: [[0, 99, 1.0]]})
    with pytest.raises(CreditscopeError, match=r"steps= returned step 0"):
        live.train()


# -- the lens inside TRL's own backward ------------------------------------------------------------------------------


class Blind(CreditMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    """The same, but its readings take a pass of their own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scope.open = lambda: False  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(("row", "clip"), pairs(["grpo", "gspo", "cispo"], ["1.0", "1e-3", "0.0"]))
def test_what_is_read_inside_the_backward_is_what_a_pass_of_its_own_reads(row: str, clip: str,
                                                                           tmp_path: Path) -> None:
    grams = {}
    for kind in (ScopedGRPOTrainer, Blind):
        out = tmp_path / kind.__name__
        live = trainer(kind, num_iterations=2, max_grad_norm=float(clip), extra={"method": row, "every": 1, "out": out})
        live.train()
        own_pass = ["scope/agreement" in line for line in Record.open(out).steps()]
        assert own_pass == [kind is Blind] * 3
        grams[kind] = [Record.open(out).reading(step) for step in range(3)]
    for inside, apart_from_it in zip(grams[ScopedGRPOTrainer], grams[Blind], strict=True):
        assert apart(torch.tensor(inside["gram"]), torch.tensor(apart_from_it["gram"])) < 1e-9
        assert inside["group"].tolist() == apart_from_it["group"].tolist()


def test_the_inside_reading_changes_no_bit_of_the_training() -> None:
    ended = []
    for every in (1, 1000):
        live = trainer(ScopedGRPOTrainer, dtype="float32", extra={"method": "grpo", "every": every})
        live.train()
        ended.append(weights(live))
    assert apart(ended[0], ended[1]) < 1e-5


def test_a_mixed_in_trainer_evaluates_by_trls_own_loss() -> None:
    live = trainer(ScopedGRPOTrainer, extra={"method": "gspo"}, per_device_eval_batch_size=8)
    live.train()
    found = live.evaluate(live.train_dataset.select(range(4)))
    assert "eval_loss" in found


def test_the_callback_reads_a_mixed_in_trainer_by_its_own_row() -> None:
    live = trainer(ScopedGRPOTrainer, extra={"method": "gspo"})
    assert ScopeCallback(live).method is live.row
    assert live.row.clip_high == 4e-4
