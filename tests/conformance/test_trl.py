"""Our TRL rows against TRL's own code, live: the same (rollout × token) credit, to the last digits of float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from batches import batches
from ours import as_rollouts
from torch import Tensor
from trl_peer import (
    CASES,
    EVEN,
    TOLERANCE,
    Case,
    apart,
    even_batches,
    our_credit,
    trl_advantage_and_credit,
    trl_credit,
    trl_high_entropy,
)

from creditscope import METHODS, effective_credit, surrogate
from creditscope.credit.entropy_mask import entropy_mask
from creditscope.credit.tools import Tools
from creditscope.diagnosis.log import LogSettings
from creditscope.diagnosis.trainers.trl import TRL, trl_method
from creditscope.methods.dialects import DIALECTS, TRL_LOSSES
from creditscope.selftest.trl_live import advantage_and_credit as advantage_and_credit_of
from creditscope.selftest.trl_live import trainer_of
from each import each

pytest.importorskip("trl", reason="TRL's own code is the other side of the comparison")
from creditscope.plugins.trl.stated import stated

pytestmark = pytest.mark.conformance

BATCHES = even_batches()
PLAIN = [case for case in CASES if case.batches == EVEN and not case.row.has_loss_kl]  # KL would hide a w of 0


def find(dialect: str, **settings: object) -> Case:
    """The case of a row with exactly these settings besides the row's own."""
    own = next(case for case in CASES if case.dialect == dialect).settings
    return next(case for case in CASES if case.dialect == dialect and case.settings == {**own, **settings})


def advantage_and_credit(case: Case) -> tuple[Tensor, Tensor]:
    """A (n,) and w (n,) of TRL on all chosen tokens of the case's batches."""
    pairs = []
    for name in case.batches:
        advantage, w = trl_advantage_and_credit(case, BATCHES[name])
        mask = BATCHES[name]["mask"]
        pairs.append((advantage[:, None].expand_as(w)[mask], w[mask]))
    a, w = zip(*pairs, strict=True)
    return torch.cat(a), torch.cat(w)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_row_gives_the_credit_of_trl_and_in_float32_within_its_rounding(case: Case) -> None:
    for name in case.batches:
        ours = our_credit(case, BATCHES[name])
        assert apart(ours, trl_credit(case, BATCHES[name])) <= TOLERANCE, name
        assert apart(ours, trl_credit(case, BATCHES[name], torch.float32)) <= 1e-6, name


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", TRL_LOSSES)
def test_one_map_from_trls_settings_gives_trls_credit_at_either_level(loss: str, level: str) -> None:
    settings = {"loss_type": loss, "importance_sampling_level": level}
    row, batch = stated(trainer_of("GRPOConfig", settings)), BATCHES["off_policy"]
    w = effective_credit(lambda logp: surrogate(row, logp, as_rollouts(batch)), batch["logp"])
    assert apart(w, advantage_and_credit_of("GRPOConfig", settings, batch)[1]) <= TOLERANCE
    read = trl_method(LogSettings(settings, {}, TRL.defaults))
    assert read is not None
    assert (read.name, read.ratio, read.bound, read.aggregate) == (row.name, row.ratio, row.bound, row.aggregate)


def test_every_trl_row_has_a_case_with_and_without_kl() -> None:
    rows = {name for name, row in DIALECTS.items() if name.startswith("trl_") and not row.linked}
    assert {case.dialect for case in CASES if case.row.beta == 0} == rows
    assert {case.dialect for case in CASES if case.row.beta > 0} == rows


@each("name, share", product(batches(), (0.05, 0.2, 0.5, 1.0)))
def test_our_entropy_mask_credits_the_tokens_that_trl_trains_on(name: str, share: float) -> None:
    # float32: TRL takes its quantile there, and the token at the quantile must not be lost by rounding.
    batch = batches()[name] | {"entropy": batches()[name]["entropy"].float()}
    rollouts = as_rollouts(batch)
    found = entropy_mask(METHODS["reinforce"], replace(rollouts, reward=torch.ones_like(rollouts.reward)), Tools(),
                         share=share)
    theirs = trl_high_entropy(batch["entropy"], batch["mask"], share)
    assert torch.equal(found != 0, theirs)
    assert abs(int(theirs.sum()) - share * int(batch["mask"].sum())) <= 1


# -- the comparison is not empty: each branch of TRL's code acts somewhere ------------------------------------------


@pytest.mark.parametrize("case", [case for case in PLAIN if case.row.bound == "clip"], ids=str)
def test_clipping_silences_tokens_of_both_signs(case: Case) -> None:
    a, w = advantage_and_credit(case)
    assert ((a > 0) & (w == 0)).any()
    assert ((a < 0) & (w == 0)).any()
    assert ((a != 0) & (w != 0)).any()


@pytest.mark.parametrize(("with_it", "without_it"), [
    (find("trl_grpo", delta=3.0), find("trl_grpo")),
    (find("trl_gspo", delta=3.0), find("trl_gspo")),
    (find("trl_grpo_v32"), find("trl_grpo", scale_rewards="none")),
    (find("trl_grpo_v32", off_policy_mask_threshold=0.1), find("trl_grpo", scale_rewards="none")),
], ids=str)
def test_delta_and_the_off_policy_mask_silence_negative_advantages_alone(with_it: Case, without_it: Case) -> None:
    a, w = advantage_and_credit(with_it)
    gone = (w == 0) & (advantage_and_credit(without_it)[1] != 0)
    assert gone.any()
    assert (a[gone] < 0).all()


def test_truncated_completions_are_dropped_and_still_counted() -> None:
    mask = BATCHES["truncated"]["mask"]
    assert 0 < (mask.sum(dim=1) == 0).sum() < len(mask)
    case = find("trl_grpo", mask_truncated_completions=True)
    kept = case.row.but(name="kept_only", denominator="kept")
    rollouts = as_rollouts(BATCHES["truncated"])
    w = effective_credit(lambda logp: surrogate(kept, logp, rollouts), BATCHES["truncated"]["logp"])
    share = float((mask.sum(dim=1) > 0).double().mean())
    torch.testing.assert_close(trl_credit(case, BATCHES["truncated"]), w * share, rtol=1e-10, atol=0)


@each("dialect", sorted({case.dialect for case in CASES}))
def test_beta_changes_the_credit(dialect: str) -> None:
    on = next(case for case in CASES if case.dialect == dialect and case.row.beta > 0)
    off = next(case for case in CASES if case.dialect == dialect and case.row.beta == 0)
    assert apart(trl_credit(on, BATCHES["off_policy"]), trl_credit(off, BATCHES["off_policy"])) > 1e-3


# -- what no axis carries, and what a name hides --------------------------------------------------------------------


def test_trl_cispo_gives_a_fifth_of_the_paper_at_ratio_1() -> None:
    batch = BATCHES["on_policy"]
    row = METHODS["cispo"].but(name="cispo_with_trl_eps", std_eps=1e-4)
    paper = effective_credit(lambda logp: surrogate(row, logp, as_rollouts(batch)), batch["logp"])
    torch.testing.assert_close(trl_credit(find("trl_cispo"), batch), 0.2 * paper, rtol=1e-10, atol=0)


def test_trl_bnpo_divides_by_the_tokens_of_each_micro_batch() -> None:
    batch = BATCHES["off_policy"]
    case = Case("trl_bnpo", {"loss_type": "bnpo", "gradient_accumulation_steps": 2})
    tokens = batch["mask"].sum(dim=1).double()
    halves = tokens.view(2, 8).sum(dim=1).repeat_interleave(8)
    factor = tokens.sum() / (2 * halves)  # 1/(2·tokens of the half) in place of 1/(tokens of the batch)
    assert (factor != 1).any()
    torch.testing.assert_close(trl_credit(case, batch), our_credit(case, batch) * factor[:, None], rtol=1e-10, atol=0)


def test_trl_vespo_weighs_kl_by_the_ratio_of_the_token() -> None:
    batch = BATCHES["off_policy"]
    kl = {dialect: trl_credit(Case(dialect, {**find(dialect).settings, "beta": 0.04}), batch)
          - trl_credit(find(dialect), batch) for dialect in ("trl_vespo", "trl_dapo")}
    assert apart(kl["trl_vespo"], kl["trl_dapo"]) <= TOLERANCE
