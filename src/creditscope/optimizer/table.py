"""The optimisers and brakes by name, with equation, cost and options. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.specs import Option, read_spec
from creditscope.methods.axes import Method
from creditscope.methods.bounds import BOUNDS


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """An optimiser of --optimizer: a class of torch.optim."""

    kind: str
    memory: str
    """The setting that decays its first moment."""
    adaptive: bool
    """True where the update is divided by the gradient's own size."""
    decoupled: bool
    """True where weight decay is not part of the gradient."""


OPTIMIZERS: Mapping[str, OptimizerRow] = MappingProxyType({
    "adamw": OptimizerRow(kind="AdamW", memory="beta1", adaptive=True, decoupled=True),
    "adam": OptimizerRow(kind="Adam", memory="beta1", adaptive=True, decoupled=False),
    "sgd": OptimizerRow(kind="SGD", memory="momentum", adaptive=False, decoupled=False),
})


@dataclass(frozen=True, kw_only=True)
class BrakeRow:
    """One row of the list; its class, of the name in CamelCase, is in `brakes.py`."""

    name: str
    title: str
    equation: str
    cost: str
    """The cost beyond the inner step."""
    idle: frozenset[str | None] = frozenset()
    """Values of `Method.stops` under which it would do nothing."""
    several: bool = False
    """True where it acts from the second update on a batch."""
    momentum: bool = False
    """True where it acts on momentum alone."""
    options: Mapping[str, Option] = field(default_factory=dict)
    note: str = ""

    @property
    def idle_bounds(self) -> list[str]:
        """Bounds under which it would do nothing, where there is no trust region either."""
        return sorted(name for name, bound in BOUNDS.items() if bound.stops in self.idle)

    def require(self, method: Method, updates: int, momentum: float) -> None:
        if self.several and updates < 2:
            raise CreditscopeError(f"--brake {self.name} acts from the second update on a batch, and there is one; "
                                   f"give --inner-steps 2 or more, or leave --brake out")
        if self.momentum and momentum == 0:
            raise CreditscopeError(f"--brake {self.name} acts on momentum, and the optimiser has none; give --momentum "
                                   f"to sgd or --beta1 to adam, or leave --brake out")
        if method.stops in self.idle:
            why = "has no bound" if method.stops is None else f"has bound={method.bound!r}, which stops no token"
            raise CreditscopeError(f"--brake {self.name}: method {method.name!r} {why}; choose one that clips, such "
                                   f"as grpo, or leave --brake out")


BRAKES: Mapping[str, BrakeRow] = MappingProxyType({row.name: row for row in (
    BrakeRow(name="none", title="The optimiser as it is", equation="w'_it = w_it", cost="nothing"),
    BrakeRow(
        name="recall", title="A stopped token cancels its share of the momentum",
        equation="w'_it = w_it − β/γ·(1 − d_it)·c_it past the bound,  c ← βc + γw',  d = w/w(1)",
        cost="nothing: one multiply-add per token", several=True, momentum=True,
        idle=frozenset({None, "cap"}),
        note="c_it is the token's own share of the first moment, kept with the optimiser's own β and γ."),
    BrakeRow(
        name="shorten", title="A step length that keeps tokens inside their bound",
        equation="θ ← θ + a·Δ,  a the largest of 1, 0.95 … 0 with at most that share of tokens past the bound",
        cost="one forward pass and a copy of the weights", idle=frozenset({None}),
        options={"share": Option(0.01, "of bounded tokens that may be past it; 0 stops the worst one", low=0.0,
                                 high=1.0)},
        note="Each step compares its own rows alone: with --minibatches the others may go further."),
    BrakeRow(
        name="restart", title="The first moment starts from 0 with every batch",
        equation="m ← 0 when a batch is new; v stays", cost="nothing", momentum=True,
        note="Adam's bias correction does not start anew, so the first inner steps are short: 1 − β₁, 1 − β₁², …"),
    BrakeRow(
        name="kl_stop", title="Early stopping: no further inner step once the policy has left the sampler",
        equation="stop when mean_it (ρ − 1 − log ρ) > limit", cost="nothing", several=True,
        options={"limit": Option(0.003, "of KL(old ‖ new) per token, in nats", low=0.0)},
        note="The usual remedy, for comparison."),
)})


def parse_brake(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name,key=value`, checked.

    >>> parse_brake("shorten,share=0.02")
    ('shorten', {'share': 0.02})
    """
    return read_spec("brake", spec, BRAKES, see="creditscope list brakes")
