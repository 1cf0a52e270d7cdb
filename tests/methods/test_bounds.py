"""A bound is one row: its columns agree with one another, and one row is all that a new one takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import cli
from creditscope import METHODS, CreditscopeError, Method, effective_credit, surrogate
from creditscope.exact.ratio_one import value_at_ratio_one
from creditscope.exact.shared_prefix import prefix_bias
from creditscope.methods import find as finding
from creditscope.methods.axes import AXES
from creditscope.methods.bounds import BOUNDS, TRUSTS, Bound, TrustRegion, exp_bounded
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.properties import properties
from creditscope.methods.table import GRPO, even
from creditscope.methods.words import equation, law, term_text
from creditscope.objective.bounds import beyond
from creditscope.objective.ratios import bounded
from creditscope.optimizer.overshoot import Overshoot
from creditscope.optimizer.table import BRAKES
from creditscope.selftest import formulas
from each import each
from makers import make

D = torch.float64
ROWS = {f"{m.bound}-{m.name}": m for m in (*METHODS.values(), *DIALECTS.values()) if m.ratio != "none"}


# -- the columns of a row ----------------------------------------------------------------------------------------------


@each("name", sorted(ROWS))
@each("sign", [1.0, -1.0])
def test_the_slope_is_that_of_the_term_and_the_height_its_value_at_ratio_1(name: str, sign: float) -> None:
    m = ROWS[name]
    bound = BOUNDS[m.bound]
    x = torch.linspace(-1.5, 1.5, 62, dtype=D)[None].requires_grad_()  # no point stands on a bound of the table
    credit = torch.full_like(x, sign)
    term = bound.term(m, x, credit)
    if bound.slope is not None:
        (slope,) = torch.autograd.grad(term.sum(), x)
        assert torch.allclose(bound.slope(m, x.detach(), credit).to(D), slope, atol=1e-12)
    at_one = bound.term(m, torch.zeros(1, 1, dtype=D), torch.full((1, 1), sign, dtype=D)).item()
    expected = math.log(bound.height(m)[sign < 0]) if bound.carrier == "tokens" else bound.height(m)[sign < 0]
    assert at_one == pytest.approx(expected, abs=1e-14)


def test_exp_is_held_where_it_would_overflow() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        x = torch.tensor([1.0, 1e4], dtype=dtype)
        assert bool(exp_bounded(x).isfinite().all())
        assert exp_bounded(x)[0] == x[0].exp()
        largest = 0.9 * math.log(torch.finfo(dtype).max)
        assert exp_bounded(x)[1].double().log().item() == pytest.approx(largest, rel=1e-3)


def test_a_bound_whose_slope_is_forgotten_is_refused() -> None:
    with pytest.raises(CreditscopeError, match="a slope is given unless log π carries the gradient"):
        Bound(text="half", formula=lambda m, s, a: f"½·{s}·{a}", term=lambda m, x, credit: x, stops=None)


# -- a new one ---------------------------------------------------------------------------------------------------------


def root(m: Method, x: Tensor, credit: Tensor) -> Tensor:
    """√s up to the ceiling 1 + ε_high, for either sign."""
    return (x / 2).exp().clamp(max=1 + (m.clip_high or 0.0))


ROOT = Bound(
    text="min(√s, 1 + ε_high)·A", formula=lambda m, s, a: f"min(√{s}, {1 + (m.clip_high or 0.0):g})·{a}", term=root,
    slope=lambda m, x, credit: (x / 2).exp() / 2 * ((x / 2).exp() <= 1 + (m.clip_high or 0.0)),
    edge=lambda m: ((-math.inf, 2 * math.log1p(m.clip_high or 0.0)),) * 2, stops="zero",
    takes=("clip_high",), needs=("clip_high",))
"""φ = √s, stopped at √s = 1.2, which is s = 1.44."""
NEAR = TrustRegion(
    text="drops a token with |log ρ| above δ", formula=lambda m: f"1{{|log ρ_it| ≤ {m.trust_high}}}",
    keeps=lambda m, logp, old, mask, credit: (logp - old).abs() <= m.trust_high,
    edge=lambda m, old, credit: (torch.full_like(credit, -m.trust_high), torch.full_like(credit, m.trust_high)),
    takes=("trust_high",), needs=("trust_high",))


@pytest.fixture
def rooted(monkeypatch: pytest.MonkeyPatch) -> Method:
    """The one row of a bound, and the one row of a method that uses it."""
    monkeypatch.setitem(BOUNDS, "root", ROOT)
    row = GRPO.but(name="rooted", bound="root", clip_low=None, clip_high=0.2, scale="none", kl="none")
    table = {**METHODS, "rooted": row}
    for module in (finding, formulas):
        monkeypatch.setattr(module, "METHODS", table)
    monkeypatch.setattr("creditscope.cli.methods.METHODS", table)
    return row


def test_a_new_bound_is_one_row_for_surrogate_w_and_overshoot(rooted: Method) -> None:
    batch = make([1, 0], group=[0, 0], lengths=[1, 1])  # A = ±½, α = ½
    logp = batch.logp + torch.tensor([[math.log(1.21)], [math.log(2.25)]], dtype=D)
    # √1.21 = 1.1 is below 1.2; √2.25 = 1.5 is stopped there: J = ½·½·1.1 − ½·½·1.2, w = (½·½·1.1/2, 0).
    assert surrogate(rooted, logp, batch).item() == pytest.approx(-0.025, abs=1e-14)
    w = effective_credit(lambda lp: surrogate(rooted, lp, batch), logp)
    assert torch.allclose(w, torch.tensor([[0.1375], [0.0]], dtype=D), atol=1e-14)
    credit = torch.tensor([[0.5], [-0.5]], dtype=D)
    past = torch.tensor([[0.0], [math.log(2.25 / 1.44)]], dtype=D)
    assert torch.allclose(beyond(rooted, logp, batch.logp, batch.mask, credit), past, atol=1e-14)
    track = Overshoot(rooted, batch, credit)
    track.see(batch.logp)
    track.see(logp)
    assert track.stops == "zero"
    assert track.readings()[-1].max == pytest.approx(math.log(2.25 / 1.44), abs=1e-12)
    assert torch.allclose(prefix_bias(rooted, batch, logp).w, w, atol=1e-14)
    assert value_at_ratio_one(rooted, batch).item() == pytest.approx(surrogate(rooted, batch.logp, batch).item())
    BRAKES["shorten"].require(rooted, updates=2, momentum=0.9)


def test_a_new_bound_is_one_row_for_words_properties_and_the_command_line(
        rooted: Method, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(AXES["bound"]["root"]) == ROOT.text
    assert term_text(rooted) == "min(√ρ_it, 1.2)·A_i"
    assert "min(√ρ_it, 1.2)·A_i" in equation(rooted)
    assert law(rooted).kind == "zero"
    assert even(rooted).aggregate == "group_token_mean"
    assert properties(rooted).zero_sum is True
    with pytest.raises(CreditscopeError, match="bound='root' needs clip_high; give it"):
        rooted.replace(clip_high=None)
    with pytest.raises(CreditscopeError, match=r"dual_clip=3\.0 does nothing with bound='root'; set bound='clip'"):
        rooted.replace(dual_clip=3.0)
    shown = cli.run_json(capsys, "list", "methods", "rooted")
    assert shown["diff"]["bound"] == ["clip", "root"]
    assert shown["properties"]["prefix_cancels"] is False
    assert "rooted" in cli.run_json(capsys, "list", "methods")


def test_a_new_bound_is_held_against_the_twin(rooted: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    only = {"rooted": rooted, "spliced": rooted.but(name="spliced", ratio="sequence_mean")}
    monkeypatch.setattr(formulas, "METHODS", only)
    assert formulas.methods(torch.device("cpu")).worst < 1e-6
    monkeypatch.setattr("creditscope.objective.surrogate.bounded", lambda *given: bounded(*given) ** 2)
    assert formulas.methods(torch.device("cpu")).worst > 0.1


def test_a_new_trust_region_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRUSTS, "near", NEAR)
    row = METHODS["p1_grpo"].but(name="nearby", ratio="token", trust="near", trust_high=0.5)
    batch = make([1, 0], group=[0, 0], lengths=[1, 1])
    logp = batch.logp + torch.tensor([[0.7], [-0.3]], dtype=D)
    w = effective_credit(lambda lp: surrogate(row, lp, batch), logp)
    assert torch.allclose(w, torch.tensor([[0.0], [-math.exp(-0.3) / 4]], dtype=D), atol=1e-14)
    credit = torch.tensor([[0.5], [-0.5]], dtype=D)
    assert torch.allclose(beyond(row, logp, batch.logp, batch.mask, credit), torch.tensor([[0.2], [0.0]], dtype=D))
    assert row.stops == "zero"
    assert "1{|log ρ_it| ≤ 0.5}" in equation(row)
    monkeypatch.setattr(formulas, "METHODS", {"nearby": row})
    assert formulas.methods(torch.device("cpu")).worst < 1e-6
