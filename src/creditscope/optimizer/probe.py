"""All probes of the optimiser, for any torch loop: four lines around the step, which is not changed.

    probe = Probe(optimizer, model.named_parameters())
    probe.begin(method, rollouts)              # a new batch
    probe.see(logp)                            # each inner step, between the forward pass and backward()
    metrics = probe.finish(forward)            # after the last one

It registers step hooks on the optimiser. `light` reads a sample of the coordinates and the log-probs of the loop's own
passes; on schedule it runs one forward pass after the last update. `full`, on the same schedule, reads every
coordinate, sweeps the reward's scale, and takes the gradient of the overshoot to measure momentum's part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from creditscope.batch.observer import Passes, StepObserver
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError, unknown
from creditscope.methods.axes import Method
from creditscope.microscope.sketch import Sketcher
from creditscope.objective.advantages import token_advantage
from creditscope.optimizer.families import bare, decoupled, family_of, step_number
from creditscope.optimizer.geometry import UpdateGeometry, epsilon_factor, gather, square
from creditscope.optimizer.overshoot import Overshoot, first_order
from creditscope.optimizer.sampled_optimizer import SampledOptimizer
from creditscope.optimizer.scale import PHIS, Clipping, RewardParts, sensitivity, sweep
from creditscope.optimizer.state import moving, split
from creditscope.runs import schema

LEVELS = ("light", "full")
SAMPLE = 65_536  # coordinates of a light reading, about


class Probe(StepObserver):
    """Overshoot, reward scale and update geometry, batch by batch."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]],
                 level: str = "light", every: int = 30, clipping: Clipping | None = None,
                 parts: RewardParts | None = None) -> None:
        """`every` is the schedule, in batches. With norm clipping give `clipping`, and append each step's norm to it.
        `parts` follows the part of the gradient that does not scale with reward; without it the scale is not read."""
        if level not in LEVELS:
            raise unknown("level of the probe:", level, LEVELS)
        if every < 1:
            raise CreditscopeError(f"every is the number of batches between readings, at least 1, got {every}")
        self.level, self.every, self.clipping, self.parts = level, every, clipping, parts
        self.batches = 0  # batches so far; a resumed loop sets it
        self._optimizer = optimizer
        named = list(named_parameters)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
            raise CreditscopeError("the probe needs names with its parameters: give model.named_parameters()")
        self._named = {name: p for name, p in named if p.requires_grad}
        stride = sum(p.numel() for p in self._named.values()) // SAMPLE
        self._sample = SampledOptimizer(optimizer, stride) if stride > 1 and family_of(optimizer) is not None else None
        self._batch: tuple[Method, Rollouts, Tensor] | None = None
        bare(optimizer).register_step_pre_hook(self._before_step)
        bare(optimizer).register_step_post_hook(self._after_step)

    def begin(self, method: Method, rollouts: Rollouts, credit: Tensor | None = None) -> None:
        """A new batch, with the credit that the objective uses; by default the method's own advantage."""
        self._batch = method, rollouts, token_advantage(method, rollouts) if credit is None else credit
        self.early = self.parts is not None and method.has_loss_kl  # another pass separates the KL term
        self._track: Overshoot | None = None
        self._first: list[tuple[Tensor, Tensor | None]] = []
        self.due = self.batches % self.every == 0  # whether this batch is on schedule
        self._whole = self.due and self.level == "full"
        # A KL term in the loss and weight decay do not scale with the reward.
        self._scales = self.parts is not None or not (method.has_loss_kl or any(
            group.get("weight_decay", 0) and not decoupled(group) for group in self._optimizer.param_groups))
        self._metrics: dict[str, float] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._geometry: UpdateGeometry | None = None
        self._updates = 0
        self._slope: dict[Tensor, Tensor] = {}
        self._moved: dict[str, float] = {}
        self.batches += 1

    def see(self, logp: Tensor, rows: Tensor | None = None) -> None:
        """One pass: log π of the chosen tokens, of the whole batch or of its rows `rows`, before the coming update."""
        self._live()
        if self._updates == 0:
            self._first.append((logp.detach().clone(), rows))
            return
        track = self._tracker()
        track.see(logp.detach(), rows)
        if self._whole and logp.requires_grad:
            over = track.loss(logp, rows)
            if over.requires_grad and bool(over.detach() > 0):
                parameters = list(self._named.values())
                grads = torch.autograd.grad(over, parameters, retain_graph=True, allow_unused=True)
                for p, g in zip(parameters, grads, strict=True):
                    if g is not None:
                        self._slope[p] = self._slope.get(p, 0) + g

    def gradient(self, norm: float) -> None:
        """The norm of an update's gradient before it is clipped, for `clipping`."""
        if self.clipping is not None:
            self.clipping.norms.append(norm)

    def weighed(self, minibatch: Passes, logp: Tensor, pulled: Tensor) -> None:
        """The gradient without the KL term, for `parts`."""
        if not self.early:
            return
        method = self._live()[0]
        kl = minibatch.w(logp) - minibatch.w(logp, method=method.replace(beta=0.0))
        minibatch.backward(lambda _, chunk: -(pulled - kl)[chunk])
        self._rewards = {p: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._named.values()}

    def clipped(self, factor: float) -> None:
        """The part of the gradient that scales with reward, for `parts`."""
        if self.parts is not None:
            self.parts.update({p: g * factor for p, g in self._rewards.items()} if self.early else
                              {p: p.grad for p in self._named.values() if p.grad is not None})

    def finish(self, forward: Callable[[], Tensor] | None = None) -> dict[str, float]:
        """The batch's metrics. `forward` gives log π (B, T) after the last update; it is called on schedule only.

        Without it there are no readings after the last update, as `optimizer/overshoot`.
        """
        self._live()
        closed = self.due and forward is not None and self._updates > 0
        if closed:
            assert forward is not None
            with torch.no_grad():
                self._tracker().see(forward())
        found = self._track.metrics() if self._track is not None else {}
        if not closed:
            found = {name: value for name, value in found.items() if name.split("/")[1].isdigit()}
        predicted = {schema.OVERSHOOT_CARRY_PREDICTED: self._predicted()} if schema.OVERSHOOT_CARRY in found else {}
        self._batch = None
        return found | {k: v for k, v in (self._metrics | predicted).items() if v is not None} | self._moved

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the last scheduled reading of a `full` probe; empty where there was none."""
        return self._arrays

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._batch is None or not any(True for _ in moving(optimizer)):
            return
        if self._slope:
            slope = {p: self._slope.get(p, torch.zeros_like(p)) for _, p in moving(optimizer)}
            for name, value in first_order(slope, split(optimizer)).items():
                key = f"overshoot/by_{name}"
                self._moved[key] = self._moved.get(key, 0.0) + value / self._tracker().bounded
            self._slope = {}
        if self._updates == 0:
            self._first_step = self._step()
            sampled = self._sample is not None and not self._whole
            seen, named = optimizer, list(self._named.items())
            if sampled:
                assert self._sample is not None
                seen, named = self._sample.take(), self._sample.named
            self._read_scale(seen, sampled)
            self._metrics |= self._momentum_share(seen)
            self._geometry = UpdateGeometry(named, Sketcher(16, seed=0) if self._whole else None)
            self._geometry.before()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._batch is None:
            return
        if self._geometry is not None:
            self._metrics |= self._geometry.after() if self._sample is None or self._whole else self._of_sample()
            if self._whole:
                layers, sketch = self._geometry.layers, self._geometry.sketch
                assert sketch is not None
                names = self._arrays.get("layer_names", np.array(list(layers)))
                ratio = [layers[str(name)].get(schema.UPDATE_RATIO, np.nan) for name in names]
                self._arrays |= {"layer_names": names, "path_update": sketch.cpu().double().numpy(),
                                 "layer_ratio": np.array(ratio)}
            self._geometry = None
            if (factor := epsilon_factor(optimizer)) is not None:
                self._metrics[schema.UPDATE_EPSILON_FACTOR] = factor
        self._updates += 1

    def _of_sample(self) -> dict[str, float]:
        """The geometry of the sample's update, with ‖θ‖ over all weights: few of them may hold most of it."""
        assert self._sample is not None
        assert self._geometry is not None
        sample, whole = ([p.detach() for p in some] for some in
                         ((p for _, p in self._sample.named), self._named.values()))
        thin, all_of = (float(torch.nn.utils.get_total_norm(x)) / sum(p.numel() for p in x) ** 0.5
                        for x in (sample, whole))
        self._sample.follow()
        found = self._geometry.after()
        if schema.UPDATE_RATIO in found and all_of > 0:
            found[schema.UPDATE_RATIO] *= thin / all_of
        return found

    def _read_scale(self, optimizer: torch.optim.Optimizer, sampled: bool) -> None:
        """`optimizer/scale_change`, since the start and from this step on, and on schedule the sweep."""
        closed = family_of(optimizer) is not None
        # Parts are kept parameter by parameter: a sample has none.
        if self._scales and closed and not (sampled and self.parts is not None):
            for key, since in ((schema.OPTIMIZER_SCALE_CHANGE, "start"), (schema.OPTIMIZER_SCALE_CHANGE_NOW, "now")):
                change = sensitivity(optimizer, parts=self.parts, clipping=self.clipping, since=since)
                self._metrics |= {key: change} if np.isfinite(change) else {}
        if self._scales and self._whole:
            found = sweep(optimizer, self._named.items(), PHIS, "start" if closed else "now", self.parts, self.clipping)
            self._arrays |= {
                "phi": np.array(found.phis), "since": np.array(found.since), "change": found.change.numpy(),
                "cosine": found.cosine.numpy(), "layer_names": np.array(list(found.layers)),
                "layer_change": torch.stack([change for change, _ in found.layers.values()]).numpy(),
                "layer_cosine": torch.stack([cosine for _, cosine in found.layers.values()]).numpy()}

    def _momentum_share(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """⟨Δ_momentum, Δ⟩ / ‖Δ‖²: the share of the batch's first update that older gradients make."""
        if family_of(optimizer) is None and not self._whole:
            return {}  # `split` would take two more steps of the optimiser
        dot, whole = gather(torch.stack([(part.momentum * part.total).sum(dtype=torch.float64), square(part.total)])
                            for part in split(optimizer).values()).sum(0).tolist()
        return {schema.UPDATE_MOMENTUM: dot / whole} if whole > 0 else {}

    def _step(self) -> int:
        """The number of the coming step, of a parameter that has been moved before; 1 at first."""
        states = (bare(self._optimizer).state.get(p, {}) for p in self._named.values())
        return int(step_number(next((state for state in states if "step" in state), {})))

    def _predicted(self) -> float | None:
        """`Overshoot.carry(0)` by momentum alone; None where it has no closed form, or with minibatches.

        Adam: the mean over c = 1, 2, … of C_{T,0}, T = s + c, s the number of the batch's first step. SGD: μ.
        """
        family = family_of(self._optimizer)
        if family is None or self._track is None or self._track.stops != "zero" \
                or len(self._track.readings()) - 1 != self._updates:
            return None
        group, crossings = self._optimizer.param_groups[0], range(1, max(2, self._updates))
        shares = [share for c in crossings if (share := family.carry(group, self._first_step + c)) is not None]
        return sum(shares) / len(shares) if shares else None

    def _live(self) -> tuple[Method, Rollouts, Tensor]:
        if self._batch is None:
            raise CreditscopeError("the probe has no batch: call probe.begin(method, rollouts) first")
        return self._batch

    def _tracker(self) -> Overshoot:
        if self._track is None:
            self._track = Overshoot(*self._live())
            for logp, rows in self._first:
                self._track.see(logp, rows)
        return self._track
