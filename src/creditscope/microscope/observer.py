"""The microscope over a run: the passes of a reading, its metrics and arrays, and its cost.

`light` reads the update's own backward pass. `full` adds a pass whose cotangent is 1 on every chosen token: its rows
are the unweighted scores ψ_i, from which come the centred rank, the null of shuffled w and the optimal baseline. Each
other credit adds a pass whose cotangent is the w under that credit. Each group's block is exact: where micro-batches
cut groups apart, the update's own passes are not read, and passes of the microscope's own have any two rows of a group
together. Groups are compared only where one pass has both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from creditscope.batch.groups import Groups
from creditscope.batch.observer import Cotangent, Passes, StepObserver
from creditscope.batch.rollouts import Rollouts
from creditscope.microscope import geometry
from creditscope.microscope.matrices import model_spectra
from creditscope.microscope.proof import Proofs
from creditscope.microscope.scope import Microscope
from creditscope.microscope.sketch import Sketcher
from creditscope.runs import schema

TIMED = 2
"""Passes of each kind that are timed, in turn; the shorter one counts."""


@dataclass(frozen=True)
class Block:
    """The Grams of rollouts whose every pair was in one pass; `rows` are their rows in the batch, on the CPU."""

    rows: Tensor
    gram: NDArray[np.float64]
    layers: dict[str, NDArray[np.float64]]
    eps: float


class Observer(StepObserver):
    """Reads a model's updates through the microscope; `reset` begins a new reading."""

    def __init__(self, model: nn.Module, full: bool = False, moved: Mapping[str, nn.Parameter] | None = None) -> None:
        """`moved` is what the optimiser moves, by name, where that is not the model's own parameters."""
        self.model, self.full, self._moved = model, full, moved
        self.scope = Microscope(model)
        self.sketcher = Sketcher()
        self.proofs = Proofs()
        self._cost: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        self.blocks: list[Block] = []  # rows weighted by w, one block for each pass that was read
        self.others: dict[str, Tensor] = {}  # name → (B, T) another credit of the batch
        self.updates: list[tuple[int, float]] = []  # of each update, how many of the blocks it has, and ‖∇‖²
        self._scores: list[Block] = []
        self._others: dict[str, list[Block]] = {}
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []
        self._before: dict[str, Tensor] = {}
        self._extra: dict[str, Any] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._apart = False  # whether the micro-batches of the update cut groups apart
        self._watched = 0  # passes of updates that were read
        self._seconds = 0.0  # cost of the reading besides the update's own passes
        self._calibration = 0.0
        self.seconds = 0.0  # time spent on reading inside the update, the calibration included

    def assign(self, credits: Callable[[], dict[str, Tensor]]) -> None:
        """Other credits for the coming batch. Computing them is part of the reading's cost."""
        start = self._now()
        self.others = credits()
        self._seconds += self._now() - start

    def before(self, minibatch: Passes) -> None:
        self.calibrate(minibatch)
        if self.full:
            self.read_scores(minibatch)
        self.read_others(minibatch)
        self._apart = minibatch.joint is not minibatch.chunks

    def weighed(self, minibatch: Passes, logp: Tensor, pulled: Tensor) -> None:
        if not self._apart:
            return
        start = self._now()
        self.blocks += self._read(minibatch, partial(_rows_of, pulled))
        self._spend(start)

    @contextmanager
    def around(self, rows: Tensor) -> Iterator[None]:
        if self._apart:
            yield
            return
        self.open()
        try:
            yield
        except BaseException:
            self.abort()
            raise
        self.close(rows)

    def open(self) -> None:
        """The forward and backward pass that follows is read: for loops of other libraries."""
        self.scope.__enter__()

    def close(self, rows: Tensor) -> None:
        self.scope.__exit__(None, None, None)
        self.blocks.append(self._block(rows))
        self._watched += 1

    def abort(self) -> None:
        """Restore the model after an exception in the pass."""
        self.scope.__exit__(*sys.exc_info())

    def gradient(self, norm: float) -> None:
        """The norm of the blocks' sum. full: at the first update of a batch read the whole gradient, and copy the
        weights."""
        self.updates.append((len(self.blocks) - sum(count for count, _ in self.updates), norm**2))
        if self._before or not self.full:
            return
        start = self._now()
        parameters = self._trainable()
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self._arrays["path_gradient"] = _numbers(self.sketcher.gradient(grads.items()))
        self._extra |= self._layer_spectra()
        self._before = {name: p.detach().clone() for name, p in parameters.items()}
        self._spend(start)

    def after_updates(self) -> None:
        """full: the sketch of θ_{s+1} − θ_s over all updates of the step."""
        if not self._before:
            return
        start = self._now()
        self._arrays["path_update"] = _numbers(self.sketcher.gradient(
            (name, p.detach() - self._before[name]) for name, p in self._trainable().items()))
        self._before = {}
        self._spend(start)

    def calibrate(self, minibatch: Passes) -> None:
        """The proof of rows, where one is due; once per run, the time of a pass with and without the microscope.

        A first proof, of 2 + ⌈log₂ N⌉ passes, takes the rows of one group; later ones, of three passes, a micro-batch,
        in which the rows of several groups meet.
        """
        first = minibatch.joint[0]

        def pull(weights: Tensor, rows: Tensor = first) -> None:
            mask = minibatch.rollouts.mask[rows]
            minibatch.backward(lambda live, _: mask.to(live.dtype) * weights.to(live)[:, None], chunks=[rows],
                               collect=False)

        began = self._now()
        due = self.proofs.due(self.model)
        if due is not None:
            group = minibatch.rollouts.group[first].to(first.device)
            rows = first[group == group[0]] if due == "all" else first
            self.proofs.run(due, self.scope, partial(pull, rows=rows), len(rows))
        if not self._cost:
            every = torch.ones(len(first), dtype=torch.float64)
            spent: dict[str, list[float]] = {"plain": [], "scoped": []}
            for kind in ("plain", "scoped") * TIMED:
                start = self._now()
                with self.scope if kind == "scoped" else nullcontext():
                    pull(every)
                spent[kind].append(self._now() - start)
            self._cost = {kind: min(seconds) for kind, seconds in spent.items()}
            self._calibration = self._now() - began
            self.seconds += self._calibration
        elif due is not None:
            self._spend(began)

    def read_scores(self, minibatch: Passes) -> None:
        """Passes whose cotangents are 1: the unweighted scores, and each token's score norm for the output head."""
        start = self._now()
        mask = minibatch.rollouts.mask
        self._scores += self._read(minibatch, lambda live, part: mask[part].to(live.dtype))
        self._tokens += [(minibatch.rows[part], minibatch.head_norms(part), mask[part]) for part in minibatch.chunks]
        self._spend(start)

    def read_others(self, minibatch: Passes) -> None:
        """For each other credit a pass whose cotangents are the w under it."""
        if not self.others:
            return
        start = self._now()
        logp = minibatch.logp()
        for name, credit in self.others.items():
            w = minibatch.w(logp, credit[minibatch.rows])
            self._others.setdefault(name, []).extend(self._read(minibatch, partial(_rows_of, w)))
        self._spend(start)

    def _read(self, minibatch: Passes, cotangent: Cotangent) -> list[Block]:
        """The blocks of passes of the microscope's own; passes that share a group are one block."""
        found: list[list[Block]] = []
        last = None
        for rows in minibatch.joint:
            with self.scope:
                minibatch.backward(cotangent, chunks=[rows], collect=False)
            group = int(minibatch.rollouts.group[rows[0]])
            if group != last:  # passes of one group follow each other
                found.append([])
            found[-1].append(self._block(minibatch.rows[rows]))
            last = group
        return [blocks[0] if len(blocks) == 1 else _joined(blocks) for blocks in found]

    def metrics(self, rollouts: Rollouts, w: Tensor, seconds: float) -> dict[str, Any]:
        """`gram/…` of the weighted rows, `scores/…` of the unweighted ones, and the cost as a share of the step."""
        start = self._now()
        w_i = row_w(w, rollouts.mask)
        out = _merged([self._summary(block, rollouts, w_i) for block in _parted(self.blocks, rollouts)],
                      schema.GRAM_LIVE_GROUPS) | self._between(rollouts)
        if self._scores:
            plain = _merged([self._summary(block, rollouts, scores=True) for block in _parted(self._scores, rollouts)],
                            schema.GRAM_LIVE_GROUPS)
            out |= {name.replace("gram/", "scores/", 1): value for name, value in plain.items()}
            out |= self._nulls(rollouts, w_i) | self._baselines(rollouts) | self._token_concentration()
        out |= self._extra | self._other_ranks(rollouts)
        now = self._now() - start
        if self._cost:
            out[schema.SCOPE_RATIO] = self._cost["scoped"] / self._cost["plain"]
            extra = (self._cost["scoped"] - self._cost["plain"]) * self._watched
            # `seconds` includes the reading so far; the calibration happens once per run and is left out.
            out[schema.SCOPE_SHARE] = (max(extra, 0.0) + self._seconds + now) / (seconds - self._calibration + now)
        return out

    def arrays(self, rollouts: Rollouts, w: Tensor) -> dict[str, NDArray[Any]]:
        """The reading's arrays: Grams of all rows and, by parameter, of each group; NaN between passes."""
        count = len(rollouts)
        w_i = row_w(w, rollouts.mask)
        out = dict(self._arrays) | {"group": rollouts.group.cpu().numpy(), "reward": _numbers(rollouts.reward),
                                    "eps": np.array(max(block.eps for block in self.blocks))}
        if w_i is not None:
            out["row_w"] = w_i
        out["gram"] = _whole(self.blocks, count)
        if self._scores:
            out["scores"] = _whole(self._scores, count)
        if self._others:
            out["other_names"] = np.array(list(self._others))
            out["other_grams"] = np.array([_whole(blocks, count) for blocks in self._others.values()])
        if self._tokens:
            norms = np.zeros(tuple(rollouts.mask.shape))
            for picked, x, _ in self._tokens:
                norms[picked.cpu().numpy()] = _numbers(x)
            out["token_norms_head"] = norms
        if len(set(Groups(rollouts.group).counts.tolist())) == 1:  # one array for all groups needs groups of one size
            out |= self._layers(rollouts)
        return out

    def _layers(self, rollouts: Rollouts) -> dict[str, NDArray[Any]]:
        """(parameters, groups, R, R) Grams by parameter."""
        groups = [(block, rows) for block in self.blocks for _, rows in
                  geometry.rows_by_group(rollouts.group[block.rows].cpu().numpy())]
        return {"layer_names": np.array(list(self.blocks[0].layers)),
                "layer_groups": np.array([int(rollouts.group[block.rows[rows[0]]]) for block, rows in groups]),
                "layers": np.array([[block.layers[name][np.ix_(rows, rows)] for block, rows in groups]
                                    for name in self.blocks[0].layers], dtype=np.float32)}

    def _block(self, rows: Tensor) -> Block:
        scope = self.scope
        return Block(rows, scope.gram.numpy(), {name: k.numpy() for name, k in scope.layers.items()}, scope.eps)

    def _summary(self, block: Block, rollouts: Rollouts, w_i: NDArray[np.float64] | None = None,
                 scores: bool = False) -> dict[str, float]:
        return geometry.summary(block.gram, None if w_i is None else w_i[block.rows.cpu().numpy()],
                                rollouts.group[block.rows].cpu().numpy(),
                                None if scores else _right(rollouts, block.rows), block.eps)

    def _between(self, rollouts: Rollouts) -> dict[str, float]:
        """`gram/between` of several blocks, by the norm of each update's gradient: it needs no entry between blocks.

        Nothing where a group is cut over blocks, or where updates and blocks do not match.
        """
        if len(self.blocks) < 2 or sum(count for count, _ in self.updates) != len(self.blocks):
            return {}
        blocks, found = iter(self.blocks), []
        for count, whole in self.updates:
            groups: dict[int, float] = {}
            seen: set[int] = set()
            for block in islice(blocks, count):
                ids = rollouts.group[block.rows].cpu().numpy()
                if seen & set(ids.tolist()):
                    return {}
                seen |= set(ids.tolist())
                groups |= geometry.group_squares(block.gram, ids)
            found.append((whole, list(groups.values())))
        agree = geometry.pooled_between(found)
        return {} if agree is None else {schema.GRAM_BETWEEN: agree}

    def _nulls(self, rollouts: Rollouts, w_i: NDArray[np.float64] | None) -> dict[str, float]:
        """Groups with their w shuffled, and centred; nothing where w differs inside a rollout."""
        centred: list[float] = []
        nulls: list[dict[str, NDArray[np.float64]]] = []
        for block in self._scores if w_i is not None else ():
            assert w_i is not None
            mine = w_i[block.rows.cpu().numpy()]
            for _, rows in geometry.rows_by_group(rollouts.group[block.rows].cpu().numpy()):
                if not mine[rows].any():
                    continue
                inner = block.gram[np.ix_(rows, rows)]
                nulls.append(geometry.permutation_null(inner, mine[rows], eps=block.eps))
                if (rank := geometry.centred_rank(inner, mine[rows], block.eps, scores=inner)) is not None:
                    centred.append(rank)
        out = {f"null/group/{name}": _mean(null[name].mean() for null in nulls if name in null)
               for name in ("effective_rank", "cancellation", "conflict") if any(name in null for null in nulls)}
        return out | ({schema.GRAM_GROUP_CENTRED_EFFECTIVE_RANK: _mean(centred)} if centred else {})

    def _other_ranks(self, rollouts: Rollouts) -> dict[str, float]:
        """`also/NAME/effective_rank`, the mean over the groups in which that credit is not 0."""
        out = {}
        for name, blocks in self._others.items():
            found = _merged([self._summary(block, rollouts) for block in _parted(blocks, rollouts)],
                            schema.GRAM_LIVE_GROUPS)
            if schema.GRAM_GROUP_EFFECTIVE_RANK in found:
                out[f"also/{name}/effective_rank"] = found[schema.GRAM_GROUP_EFFECTIVE_RANK]
        return out

    def _token_concentration(self) -> dict[str, float]:
        """How few tokens hold Σ‖∇_W log π(y_t)‖², W the output head alone."""
        norms = torch.cat([x[mask] for _, x, mask in self._tokens])
        found = geometry.concentration(_numbers(norms)) if len(norms) else None
        if found is None:
            return {}
        return {schema.TOKENS_HEAD_TOP1: found.top1, schema.TOKENS_HEAD_TOP10: found.top10,
                schema.TOKENS_HEAD_EFFECTIVE_SHARE: found.effective_number / len(norms)}

    def _baselines(self, rollouts: Rollouts) -> dict[str, float]:
        """The mean reward as a baseline and the optimal one, over the groups with different rewards."""
        found = [b for block in self._scores for b in geometry.optimal_baseline(
            np.diag(block.gram), _numbers(rollouts.reward[block.rows]), rollouts.group[block.rows].cpu().numpy())]
        least = sum(b.variance_optimal for b in found)
        if least <= 0:
            return {}
        return {schema.BASELINE_MEAN: _mean(b.mean for b in found),
                schema.BASELINE_OPTIMAL: _mean(b.optimal for b in found),
                schema.BASELINE_VARIANCE_LOST: sum(b.excess for b in found) / least,
                schema.BASELINE_VARIANCE_LOST_BY_CHANCE: sum(b.by_chance for b in found) / least}

    def _layer_spectra(self) -> dict[str, float]:
        """Spectra of each layer's gradient matrix: the table goes to the arrays, the means to the metrics."""
        grads = [p.grad for p in self._trainable().values() if p.dim() == 2]
        if not any(g is not None and bool(g.any()) for g in grads):
            return {}
        found = model_spectra(self._trainable().items())
        self._arrays |= {"matrix_names": np.array(list(found)),
                         "matrix_stable_rank": np.array([s.stable_rank for s in found.values()]),
                         "matrix_effective_rank": np.array([s.effective_rank for s in found.values()]),
                         "matrix_energy": np.array([s.energy for s in found.values()])}
        return {schema.MATRIX_STABLE_RANK_LOW: _mean(s.stable_rank.low for s in found.values()),
                schema.MATRIX_STABLE_RANK_HIGH: _mean(s.stable_rank.high for s in found.values()),
                schema.MATRIX_EFFECTIVE_RANK_LOW: _mean(s.effective_rank.low for s in found.values()),
                schema.MATRIX_EFFECTIVE_RANK_HIGH: _mean(s.effective_rank.high for s in found.values())}

    def _trainable(self) -> Mapping[str, nn.Parameter]:
        if self._moved is not None:
            return self._moved
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _spend(self, start: float) -> None:
        spent = self._now() - start
        self._seconds += spent
        self.seconds += spent

    def _now(self) -> float:
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def row_w(w: Tensor, mask: Tensor) -> NDArray[np.float64] | None:
    """(B,) the w of each rollout where all its tokens have the same, else None.

    >>> row_w(torch.tensor([[2.0, 2.0], [3.0, 0.0]]), torch.tensor([[True, True], [True, False]])).tolist()
    [2.0, 3.0]
    """
    inf = torch.tensor(torch.inf, dtype=w.dtype, device=w.device)
    low, high = w.where(mask, inf).amin(dim=1), w.where(mask, -inf).amax(dim=1)
    empty = ~mask.any(dim=1)
    low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    if bool((high - low > 1e-5 * w.abs().max()).any()):
        return None
    return _numbers((low + high) / 2)


def _merged(parts: Sequence[dict[str, float]], live: str) -> dict[str, float]:
    """Readings of one block as they are; of several, the means over their live groups."""
    if len(parts) == 1:
        return parts[0]
    out = {live: sum(part[live] for part in parts)}
    for name in dict.fromkeys(name for part in parts for name in part if "/group/" in name):
        have = [part for part in parts if name in part]
        out[name] = float(np.average([part[name] for part in have], weights=[part[live] for part in have]))
    return out


def _parted(blocks: Sequence[Block], rollouts: Rollouts) -> Sequence[Block]:
    """Several blocks group by group, so that a reading which only some groups have is a mean over those groups."""
    if len(blocks) < 2:
        return blocks
    return [Block(block.rows[torch.from_numpy(rows).to(block.rows.device)], block.gram[np.ix_(rows, rows)], {},
                  block.eps)
            for block in blocks for _, rows in geometry.rows_by_group(rollouts.group[block.rows].cpu().numpy())]


def _rows_of(w: Tensor, _: Tensor, part: Tensor) -> Tensor:
    return w[part]


def _joined(parts: Sequence[Block]) -> Block:
    """The block of a group from passes that have any two of its rows together.

    The norm of a row is read in several passes. What they differ by is part of the precision of the entries.
    """
    rows = torch.from_numpy(np.unique(torch.cat([part.rows for part in parts]).numpy()))
    gram = np.full((len(rows), len(rows)), np.nan)
    layers = {name: np.zeros_like(gram) for part in parts for name in part.layers}  # 0 where a pass does not use it
    gap = 0.0
    for part in parts:
        at = torch.searchsorted(rows, part.rows).numpy()
        gap = max(gap, float(np.nanmax(np.abs(gram[at, at] - part.gram.diagonal()), initial=0.0)))
        gram[np.ix_(at, at)] = part.gram
        for name, k in part.layers.items():
            layers[name][np.ix_(at, at)] = k
    most = float(gram.diagonal().max())
    return Block(rows, gram, layers, max(*(part.eps for part in parts), gap / most if most > 0 else 0.0))


def _whole(blocks: Sequence[Block], count: int) -> NDArray[np.float64]:
    """(B, B) the Gram of all rows from its blocks, NaN between rows of different blocks."""
    whole = np.full((count, count), np.nan)
    for block in blocks:
        rows = block.rows.cpu().numpy()
        whole[np.ix_(rows, rows)] = block.gram
    return whole


def _right(rollouts: Rollouts, rows: Tensor) -> NDArray[Any] | None:
    """Which answers are right, where all rewards of the batch are 0 and 1."""
    reward = rollouts.reward
    return (reward[rows] == 1).cpu().numpy() if bool(((reward == 0) | (reward == 1)).all()) else None


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _numbers(x: Tensor) -> NDArray[np.float64]:
    return x.detach().double().cpu().numpy()
