"""The update that the same step would have made with all rewards times φ.

    Δ(φ) = −lr · m̂ / (√v̂ + ε/φ) − lr·λθ        Adam (arXiv:2601.05002, Prop. 2): φ enters through ε alone

Not so with a KL term, coupled weight decay, gradient-norm clipping, or an optimiser that does not normalise, such as
SGD. The live state is read between backward() and step(), and the sequence of gradients is taken as given: a run
trained with other rewards also moves to other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from creditscope.errors import CreditscopeError, unknown
from creditscope.optimizer import families
from creditscope.optimizer.families import Group, State, bare, family_of
from creditscope.optimizer.geometry import gather, square
from creditscope.optimizer.state import first_moment, moving, updates

PHIS = tuple(10.0**e for e in range(-6, 4))
SINCE = ("start", "now")
REST = ("rest_avg", "rest_sq", "rest_cross")
TORCH_EPS = 1e-6  # clip_grad_norm_ divides by norm + 1e-6
ROUNDINGS = 64  # a difference below so many roundings of its terms is lost
LOST = 0.01  # the share of a parameter's coordinates that may be lost
SAME = 1e-4  # factors that differ by less count as equal: torch adds 1e-6 to the norm, so they are never exactly equal

Update = Callable[[float], Tensor]
"""φ -> one parameter's update."""


@dataclass(frozen=True)
class ScaleSweep:
    """Change and cosine of the update over φ; nan where the state does not determine it, or no update was made."""

    phis: tuple[float, ...]
    since: str
    change: Tensor
    """(F,) float64: ‖Δ(φ) − Δ(1)‖ / ‖Δ(1)‖ over all parameters."""
    cosine: Tensor
    """(F,) float64: cos(Δ(φ), Δ(1))."""
    layers: dict[str, tuple[Tensor, Tensor]]
    """Parameter name -> (change, cosine)."""


@dataclass
class Clipping:
    """Global norm clipping, as clip_grad_norm_ does it: g · min(1, c/(‖g‖ + 1e-6)). Append the norm before each clip.

    With all rewards times φ, step t's clipped gradient is s_t times the recorded one,

        s_t = φ · min(1, c/(φ n_t + 1e-6)) / min(1, c/(n_t + 1e-6))

    Since the start, the state determines the update where all s_t are equal, for a constant factor scales m and v as
    φ does: never clipped with either reward (s = φ); clipped at every step with both (s = 1); or all norms equal. Plain
    SGD has no memory, so every φ is determined. Elsewhere m and v would weigh the past steps differently: nan.

    A rest in the gradient (a KL term) is clipped with it, and the norms are those of φr + k: φ is determined where each
    step would have been clipped as much as it was. Checkpoints do not keep these norms: after a resume it is nan.
    """

    threshold: float
    norms: list[float] = field(default_factory=list)
    """n_t of every step since the start or the resume, this step's last."""
    before: tuple[float, float, int] = (math.inf, 0.0, 0)
    """The `extent` of a resumed run's checkpoint."""

    @property
    def extent(self) -> tuple[float, float, int]:
        """Smallest norm above 0, largest, and count: s_t is monotone in n_t."""
        low, high, count = self.before
        return (min([low, *(n for n in self.norms if n > 0)]), max([high, *self.norms]), count + len(self.norms))

    def coefficient(self, norm: float) -> float:
        """min(1, c/(n + 1e-6)), the factor on a gradient of norm n."""
        return min(1.0, self.threshold / (norm + TORCH_EPS))

    def factor(self, phi: float) -> float:
        """The s that all steps since the start have in common, nan where they have none."""
        low, high, _ = self.extent
        if not 0 < low <= high:
            return phi
        s = [phi * self.coefficient(phi * n) / self.coefficient(n) if n < math.inf else math.nan for n in (low, high)]
        return s[-1] if abs(s[1] - s[0]) <= SAME * max(s) else math.nan


class RewardParts:
    """Averages of k in g_t = r_t + k_t, the part of a gradient (KL, coupled decay) that does not scale with reward.

        m(φ) = φ·m + (1−φ)·avg(k)        v(φ) = φ²·v + 2φ(1−φ)·avg(rk) + (1−φ²)·avg(k²)

    avg is the optimiser's own average; the three are in its state (`REST`) and so in its checkpoints. The rest is
    kept because it is mostly smaller than the reward's part: for φ < 1 no large numbers are subtracted.

    Make it before the first step. Every step: backward, clip, `update`, `sweep` if wanted, step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = bare(optimizer)
        self._family = family_of(self.optimizer)
        if self._family is None:
            raise CreditscopeError(f"the parts of a gradient can be followed through Adam, AdamW and SGD, not "
                                   f"{type(self.optimizer).__name__}; for it there is sweep(..., since='now')")
        self.rewards: Mapping[Tensor, Tensor] = {}  # this step's reward parts, between `update` and step()
        # Torch's Adam initialises its state where it is empty: the averages of a first step are added after it.
        self._waiting: dict[Tensor, dict[str, Tensor]] = {}
        self._missed = False
        self.squares: list[Tensor] = []
        """‖r‖², ⟨r, k⟩ and ‖k‖² of every step's gradient without coupled weight decay, which is not clipped."""
        self.optimizer.register_step_post_hook(self._store)

    @torch.no_grad()
    def update(self, reward_grads: Mapping[Tensor, Tensor]) -> None:
        """Take in one step: {parameter: the part of p.grad that scales with reward}, both clipped alike."""
        if self.rewards or self._missed:
            raise CreditscopeError(f"update is called once before each step(): "
                                   f"{'a step was taken without it' if self._missed else 'it was called twice'}")
        live = list(moving(self.optimizer))
        for _, p in live:
            if p not in reward_grads:
                raise CreditscopeError(f"reward_grads lacks a parameter of shape {tuple(p.shape)} that has a gradient; "
                                       f"give zeros for one that the reward does not reach")
        squares = []
        for group, p in live:
            r, k = reward_grads[p], _beside(p, reward_grads)
            squares.append(torch.stack([square(r), (r * k).sum(dtype=torch.float64), square(k)]))
            _fold(group, self.averages(p), -r if group["maximize"] else r, families.descent(group, p, k),
                  first_moment(self.optimizer, p) is None)
        self.squares.append(torch.stack([x.to(squares[0].device) for x in squares]).sum(0))
        self.rewards = reward_grads

    def averages(self, p: Tensor) -> dict[str, Tensor]:
        """A parameter's averages after the last `update`; SGD has avg(k) only."""
        state: dict[str, Tensor] = self.optimizer.state.get(p, {})
        if REST[0] in state:
            return state
        if first_moment(self.optimizer, p) is not None:
            raise CreditscopeError("the optimiser took steps before the parts of its gradients were followed; make "
                                   "RewardParts before the first step, or load a checkpoint that was made with it")
        names = REST if self._family is not None and self._family.normalises else REST[:1]
        return self._waiting.setdefault(p, {name: torch.zeros_like(p) for name in names})

    def _store(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p, averages in self._waiting.items():
            optimizer.state[p].update(averages)
        self._waiting, self._missed, self.rewards = {}, self._missed or not self.rewards, {}


def _beside(p: Tensor, rewards: Mapping[Tensor, Tensor]) -> Tensor:
    """The part of p.grad that does not scale with the reward."""
    assert p.grad is not None
    return p.grad - rewards[p]


def _fold(group: Group, averages: Mapping[str, Tensor], r: Tensor, k: Tensor, first: bool) -> None:
    """avg ← β avg + (1−β) x, for x = k with β₁, for k² and rk with β₂; SGD: avg ← μ avg + (1−τ) k.

    τ is 0 where torch does not dampen: at the first step, and without momentum.
    """
    if "betas" not in group:
        averages["rest_avg"].mul_(group["momentum"]).add_(k, alpha=1.0 if first else 1 - group["dampening"])
        return
    beta1, beta2 = map(float, group["betas"])
    averages["rest_avg"].mul_(beta1).add_(k, alpha=1 - beta1)
    averages["rest_sq"].mul_(beta2).addcmul_(k, k, value=1 - beta2)
    averages["rest_cross"].mul_(beta2).addcmul_(r, k, value=1 - beta2)


def sweep(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]], phis: Sequence[float] = PHIS,
          since: str = "start", parts: RewardParts | None = None, clipping: Clipping | None = None) -> ScaleSweep:
    """Change of the coming step's update with rewards times φ, since the start or from this step on.

    Call it between backward() and step(), after clipping. Without `parts` the whole gradient is assumed to scale with
    the reward. since="start" has closed forms for Adam, AdamW and SGD; since="now" works for any optimiser, by
    `state.updates` where there is no closed form.
    """
    names = {p: name for name, p in named}
    sums = _sums(optimizer, phis, since, parts, clipping)
    for p in sums:
        if p not in names:
            raise CreditscopeError(f"the optimiser moves a parameter of shape {tuple(p.shape)} that has no name here; "
                                   f"give model.named_parameters()")
    every = gather(sums.values())
    return ScaleSweep(tuple(phis), since, *_read(every.sum(0)),
                 layers={names[p]: _read(mine) for p, mine in zip(sums, every, strict=True)})


def sensitivity(optimizer: torch.optim.Optimizer, parts: RewardParts | None = None, clipping: Clipping | None = None,
                since: str = "start") -> float:
    """The change at φ = 0.1: 0 if the update does not depend on the reward's scale, 0.9 if it is proportional to it."""
    change, _ = _read(gather(_sums(optimizer, (0.1,), since, parts, clipping).values()).sum(0))
    return float(change[0])


@torch.no_grad()
def _sums(optimizer: torch.optim.Optimizer, phis: Sequence[float], since: str, parts: RewardParts | None,
          clipping: Clipping | None) -> dict[Tensor, Tensor]:
    """{parameter: (F, 4), the `_four` of each φ}, each on the parameter's device."""
    optimizer, family = bare(optimizer), family_of(optimizer)
    if family is not None and since == "start" and not any(map(family.remembers, optimizer.param_groups)):
        since = "now"  # without memory the two are equal
    _check(optimizer, phis, since, parts, clipping)
    if family is not None and since == "start":
        factors, rule = _factors(phis, parts, clipping), _adam_since_start if family.normalises else _sgd_since_start
        return {p: _compare(rule(group, p, optimizer.state.get(p, {}), parts), factors)
                for group, p in moving(optimizer)}
    gradient = _gradient_now(optimizer, parts, clipping)
    if family is not None:
        closed = family.parts

        def now(group: Group, p: Tensor, phi: float) -> Tensor:
            return closed(group, optimizer.state.get(p, {}), p, gradient(p, phi)).total

        return {p: _compare(partial(now, group, p), phis) for group, p in moving(optimizer)}
    one = updates(optimizer, {p: gradient(p, 1.0) for _, p in moving(optimizer)})
    rows: dict[Tensor, list[Tensor]] = {p: [] for p in one}
    for phi in phis:
        for p, x in updates(optimizer, {p: gradient(p, phi) for p in one}).items():
            rows[p].append(_four(x, one[p]))
    return {p: torch.stack(mine) for p, mine in rows.items()}


def _adam_since_start(group: Group, p: Tensor, state: State, parts: RewardParts | None) -> Update:
    """φ -> −lr·(m̂ + (1/φ−1)·k̂) / (√(v̂ + 2(1/φ−1)·rk + (1/φ²−1)·kk) + ε/φ) − lr·λθ, with k̂, rk, kk = 0 without parts.

    The formula of `RewardParts` with φ divided out, so that φ²v does not underflow.
    """
    assert p.grad is not None
    lr, eps = families.learning_rate(group), float(group["eps"])
    before, fresh, v_hat = families.adam_moments(group, state, p, p.grad)
    m_hat, decay = before.add_(fresh), families.decoupled_decay(group, p)
    if parts is None:
        root = v_hat.sqrt_()
        return lambda phi: decay - lr * m_hat / (root + eps / phi)
    t, betas = families.step_number(state), (group["betas"][0], group["betas"][1], group["betas"][1])
    kept = parts.averages(p)
    k, kk, rk = (kept[name] / (1 - float(beta) ** t) for name, beta in zip(REST, betas, strict=True))

    def update(phi: float) -> Tensor:
        u = 1 / phi
        v = v_hat + 2 * (u - 1) * rk + (u * u - 1) * kk
        # Where the rest makes nearly all of v, a large φ cancels v down to the rounding of the averages.
        floor = v_hat + 2 * abs(u - 1) * rk.abs() + abs(u * u - 1) * kk
        floor *= ROUNDINGS * torch.finfo(v.dtype).eps
        lost = ((v <= floor) & (v_hat > 0)).double().mean()
        v = torch.where(lost > LOST, math.nan, torch.maximum(v, floor))
        made: Tensor = decay - lr * (m_hat + (u - 1) * k) / (v.sqrt_() + eps * u)
        return made

    return update


def _sgd_since_start(group: Group, p: Tensor, state: State, parts: RewardParts | None) -> Update:
    """φ -> φ·Δ + (1−φ)·Δ_k, Δ_k the update of the rest alone: 0 without parts."""
    assert p.grad is not None
    total = families.sgd_parts(group, state, p, p.grad).total
    if parts is None:
        return lambda phi: phi * total
    k = parts.averages(p)["rest_avg"]
    if group["nesterov"]:
        k = families.descent(group, p, _beside(p, parts.rewards)) + group["momentum"] * k
    alone = -families.learning_rate(group) * k
    return lambda phi: phi * total + (1 - phi) * alone


def _gradient_now(optimizer: torch.optim.Optimizer, parts: RewardParts | None,
                  clipping: Clipping | None) -> Callable[[Tensor, float], Tensor]:
    """(p, φ) -> this step's gradient, φr + k, clipped as it would have been."""
    def whole(p: Tensor, phi: float) -> Tensor:
        assert p.grad is not None
        return phi * p.grad if parts is None else p.grad + (phi - 1) * parts.rewards[p]

    if clipping is None:
        return whole
    seen = clipping.coefficient(clipping.norms[-1])

    def norm(phi: float) -> float:
        if parts is None:
            return phi * clipping.norms[-1]
        return float(gather(square(whole(p, phi)) for _, p in moving(optimizer)).sum().sqrt()) / seen

    again = cache(lambda phi: clipping.coefficient(norm(phi)) / seen)
    return lambda p, phi: again(phi) * whole(p, phi)


def _factors(phis: Sequence[float], parts: RewardParts | None, clipping: Clipping | None) -> list[float]:
    """The factors on the gradients since the start: φ itself, or φ with clipping."""
    if clipping is None:
        return list(phis)
    if parts is None:
        return [clipping.factor(phi) for phi in phis]
    rr, rk, kk = gather(parts.squares).unbind(-1)
    whole = len(rr) == clipping.extent[2]
    if whole and bool((kk <= SAME**2 * rr).all()):
        return [clipping.factor(phi) for phi in phis]
    seen = [clipping.coefficient(n) for n in clipping.norms]

    def kept(phi: float) -> bool:
        norms = ((phi**2 * rr + 2 * phi * rk + kk).clamp(min=0).sqrt()).tolist()
        return all(abs(clipping.coefficient(n / c) / c - 1) <= SAME for n, c in zip(norms, seen, strict=True))

    return [phi if phi == 1 or (whole and kept(phi)) else math.nan for phi in phis]


def _compare(update: Update, phis: Sequence[float]) -> Tensor:
    one = update(1.0)
    return torch.stack([_four(update(phi), one) for phi in phis])


def _four(x: Tensor, one: Tensor) -> Tensor:
    """‖Δ(φ)−Δ(1)‖², ⟨Δ(φ), Δ(1)⟩, ‖Δ(φ)‖² and ‖Δ(1)‖²."""
    return torch.stack([square(x - one), (x * one).sum(dtype=torch.float64), square(x), square(one)])


def _read(sums: Tensor) -> tuple[Tensor, Tensor]:
    """(change, cosine), each (F,), from (F, 4) sums; nan where an update is 0."""
    apart, dot, x, one = sums.unbind(-1)
    return (apart / one).sqrt(), dot / (x * one).sqrt()


def _check(optimizer: torch.optim.Optimizer, phis: Sequence[float], since: str, parts: RewardParts | None,
           clipping: Clipping | None) -> None:
    if not any(True for _ in moving(optimizer)):
        raise CreditscopeError("no parameter has a gradient; call this between backward() and step()")
    if since not in SINCE:
        raise unknown("since", since, SINCE)
    if not all(phi > 0 and math.isfinite(phi) for phi in phis):
        raise CreditscopeError(f"rewards are scaled by finite φ > 0, got {list(phis)}")
    if clipping is not None and not clipping.norms:
        raise CreditscopeError("Clipping has no norms: append what clip_grad_norm_ returns, every step from the first")
    if parts is not None and not parts.rewards:
        raise CreditscopeError("parts has not seen this step's gradient: call parts.update(...) before the sweep")
    if since == "now":
        return
    if family_of(optimizer) is None:
        raise CreditscopeError(f"since='start' is answered for Adam, AdamW and SGD, not {type(optimizer).__name__}; "
                               f"ask since='now'")
    first = optimizer.state.get(next(p for _, p in moving(optimizer)), {})
    step = int(families.step_number(first))
    if clipping is not None and clipping.extent[2] < step:
        raise CreditscopeError(f"Clipping has {clipping.extent[2]} norms, but this is step {step}; it needs those of "
                               f"every step since the start")
    coupled = any(group["weight_decay"] and not families.decoupled(group) for group in optimizer.param_groups)
    if coupled and parts is None:
        raise CreditscopeError("coupled weight decay is a part of the gradient that does not scale with reward; follow "
                               "it with RewardParts, ask since='now', or use AdamW")
    if parts is not None and any(group.get("amsgrad") for group in optimizer.param_groups):
        raise CreditscopeError("amsgrad keeps the largest v of the past, and which one that was depends on φ once a "
                               "part of the gradient does not scale; ask since='now'")
