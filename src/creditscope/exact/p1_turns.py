"""P1.8 (arXiv:2606.29238, Eq. 22–27): over several turns a group baseline is biased, within a bound. Every walk of a
small game is enumerated."""

from __future__ import annotations

import torch
from torch import Tensor

from creditscope.claims.verdict import ClaimVerdict, exact
from creditscope.exact.enumeration import Exact, World, ladder_world, measure
from creditscope.exact.p1 import P1_GRPO, RLOO, STATE_BASELINE, TINY, equal
from creditscope.methods.axes import Method
from creditscope.tasks.turns import Ladder

REMOVED = 0.1
"""A baseline removes a bias if less than a tenth of its RMS is left at every turn."""
LADDER, START, UP = Ladder(top=4, turns=3), 2, 0.7
"""Three turns from the middle rung, up with probability 0.7."""


def constant_policy(game: Ladder) -> Tensor:
    """(H, rungs, 2) up with probability 0.7, whatever the turn and the rung."""
    return torch.tensor([1 - UP, UP], dtype=torch.float64).expand(game.turns, game.top + 1, 2).contiguous()


def credit_bias(found: Exact, factor: float = 1.0) -> Tensor:
    """(N, H) E[Â_h | walk]/c − (G_h − v(s_h)), c the factor of a group-mean baseline."""
    world = found.world
    true = world.rollouts.reward[:, None] - world.value[:, :-1]  # rewards before turn h are in both, and cancel
    return found.by_sequence / factor - true


def rms(world: World, bias: Tensor) -> Tensor:
    """(H,) √(Σ_y π(y) Bias_h(y)²)."""
    return (world.chance[:, None] * bias.square()).sum(dim=0).sqrt()


def multi_turn(*, game: Ladder = LADDER, policy: Tensor | None = None, start: int = START, size: int = 8,
               credit: str = "outcome", state_baseline: str = STATE_BASELINE, method: Method = P1_GRPO
               ) -> list[ClaimVerdict]:
    """P1.8: Bias_h = Σ_{h'<h} r_h' + v(s_h) − v(s_0), at most h·r_max + 2·V_max, 0 at the first turn."""
    subject = f"ladder of {game.top + 1} rungs, {game.turns} turns, R = {size}"
    policy = constant_policy(game) if policy is None else policy
    world = ladder_world(game, policy, start)
    own = measure(credit, method, world, size)
    plain, by_value, by_turn, by_state = (
        measure(spec, RLOO, world, size) for spec in ("outcome", state_baseline, "turn_return", "state_return"))
    bias = credit_bias(own, (size - 1) / size if method.baseline == "group_mean" else 1.0)
    law = torch.stack([game.bias(policy, start, moves) for moves in game.walks()])
    share = float((bias.abs() / torch.tensor(game.bound(), dtype=bias.dtype)).max())
    average = float((world.chance[:, None] * bias).sum(dim=0).abs().max())
    noise = own.noise / by_state.noise
    return [
        equal(f"E[Â_h] of {credit} credit less G_h − v(s_h)", subject, float((bias - law).abs().max()),
              "Σ_{h'<h} r_h' + v(s_h) − v(s_0)", bias.numel(), "walks × turns"),
        exact("largest |Bias_h| / (h·r_max + 2·V_max)", subject, share <= 1 + TINY, share,
              f"the largest bias is {share:.2f} of its bound", expected="≤ 1", threshold="≤ 1 on every walk",
              n=bias.numel(), of="walks × turns"),
        equal("Bias_h at the first turn, h = 0", subject, float(bias[:, 0].abs().max()), "0", len(bias), "walks"),
        exact("the bias has a direction: its mean over all walks, largest over turns", subject, average > TINY, average,
              f"at every turn what the bias adds to some walks it takes from others, up to {average:.1g}"
              if average <= TINY else f"at some turn the bias of all walks averages to {average:.2g}",
              expected="> 0", threshold=f"> {TINY:g}", n=len(bias), of="walks"),
        _removal("the baseline v(s_h) itself", by_value, plain, subject),
        _removal("a baseline of the turn (turn_return)", by_turn, plain, subject),
        _removal("a baseline of the state (state_return)", by_state, plain, subject),
        exact("the bias of credit biases the gradient: ‖E ĝ − c∇J‖ / ‖c∇J‖, best c", subject,
              own.gradient_shape > TINY, own.gradient_shape, f"E ĝ is {own.gradient_factor:.4g} ∇J up to a share of "
              f"{own.gradient_shape:.1g}", expected="> 0", threshold=f"> {TINY:g}", n=len(bias), of="walks"),
        exact("the bias of credit costs variance: E‖ĝ − E ĝ‖²/‖E ĝ‖², over state_return's", subject, noise > 1 + TINY,
              noise, f"{credit} credit has {noise:.2f} times the gradient noise of a baseline of the state",
              expected="> 1", threshold="> 1", n=len(bias), of="walks"),
    ]


def _removal(name: str, found: Exact, plain: Exact, subject: str) -> ClaimVerdict:
    mine, theirs = (rms(some.world, credit_bias(some))[1:] for some in (found, plain))
    left = mine / theirs
    worst = int(left.argmax())
    by_turn, beside = (", ".join(f"{x:.2f}" for x in some.tolist()) for some in (mine, theirs))
    return exact(f"{name} removes the bias: RMS left, over outcome credit's, worst turn", subject,
                 float(left.max()) < REMOVED, float(left.max()), f"{float(left.max()):.2g} of the bias is left at turn "
                 f"{worst + 1}: after the first turn the RMS is {by_turn}, and outcome's {beside}",
                 threshold=f"< {REMOVED:g} at every turn", n=len(left), of="turns")
