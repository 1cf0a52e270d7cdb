"""From a file of rollouts to a record: each batch is recorded as a step; no update is made.

    samples ─▶ batch ─▶ Rollouts ─▶ A ─▶ w = ∂J/∂log π ─▶ credit/…            without a model, at ratio 1
                            └─ log π of the model ─▶ w at its ratios ─▶ K, gram/…, policy/sampler_gap

"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditscope.batch import metrics
from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.credit import Chosen, find_estimator
from creditscope.credit.tools import Tools
from creditscope.errors import CreditscopeError
from creditscope.exact.shared_prefix import prefix_bias, prefix_metrics
from creditscope.files.memory import enough_memory
from creditscope.lab.step import Minibatch, PolicyPasses
from creditscope.methods.axes import Method
from creditscope.methods.find import find
from creditscope.microscope.observer import Observer
from creditscope.objective.kept import kept_arrays
from creditscope.objective.surrogate import effective_credit, surrogate
from creditscope.objective.weights import with_limit
from creditscope.offline.assemble import Assembled, assemble, assemble_for
from creditscope.offline.batches import Reader, SampleBatch
from creditscope.offline.files import Place, Source, Trail
from creditscope.offline.settings import Settings
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.scoring import LOGITS
from creditscope.runs import schema
from creditscope.runs.record import Record
from creditscope.runs.stopped import stopped

KEPT_ROWS = 64
"""Rollouts of a batch that are kept: its first groups."""
KEPT_BYTES = 2**28
"""Most bytes of their texts. Text arrays have cells of one width, so one long answer costs as much as many."""
PROBES = (0.0, -20.0)
"""Log-probs of a certain and of an improbable token."""

BatchResult = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""(metrics, arrays of the microscope, rollouts to keep); the last two may be empty."""


@dataclass(frozen=True)
class ScopedBatch:
    """The metrics of a batch, and how many of the file's bytes are done."""

    line: dict[str, Any]
    done: int
    size: int
    reader: Reader


def scope_file(path: Path, settings: Settings, out: Path | None = None, versions: Mapping[str, Any] | None = None,
               resume: bool = False, stop: Callable[[], bool] = lambda: False) -> Generator[ScopedBatch, None, bool]:
    """Read a file batch by batch and yield each once it is on disk. Returns whether the end was reached.

    Without `out` nothing is written. `stop` is asked before each batch but the first.
    """
    source = Source(path)
    if out is not None and not source.again:
        raise CreditscopeError(f"{path} is a pipe, which cannot be read a second time to go on with --resume; write it "
                               f"to a file first, or leave --out away")
    read_batch = BatchReader(settings).read
    reader, trail = Reader(source, settings.format, settings.reward_field, settings.rows), Trail(source)
    config = _config(source, settings)
    record = None
    if out is not None:
        record = Record.resume(out, config, _FREE) if resume else Record.create(out, config, versions or {})
    with nullcontext() if record is None else record, nullcontext() if record is None else stopped(record, not resume):
        before, start, last = (0, Place(), None) if record is None else _continue(record, source, trail)
        for number, batch in enumerate(reader.batches(start, last), start=before):
            if number > before and stop():
                return False
            clock = time.perf_counter()
            try:
                line, reading, group = read_batch(batch, number)
            except CreditscopeError as error:
                if str(error).startswith(str(source.path)):
                    raise
                first, after = batch.samples[0].where, batch.samples[-1].where
                raise CreditscopeError(f"{first} to {after.rsplit(', ', 1)[1]}: {error}") from None
            if record is not None:
                trail.advance(batch.place)
                line |= {schema.FILE_PART: batch.place.file, schema.FILE_ROW: batch.place.row,
                         schema.FILE_BYTE: batch.place.end, schema.FILE_HASH: trail.digest,
                         schema.TIME_STEP: time.perf_counter() - clock}
                line |= {} if batch.step is None else {schema.FILE_STEP: batch.step, schema.FILE_BATCH: batch.digest}
                if reading:
                    record.save_reading(number, reading)
                if group and settings.keep_every and number % settings.keep_every == 0:
                    record.save_group(number, group)
                record.append(number, line)
                record.thin(number, settings.keep_most, {"scope": settings.every, "groups": settings.keep_every})
            yield ScopedBatch(line, source.done(batch.place), source.size, reader)
    if record is not None:
        _finish(record.path, config)
    return True


_FREE = frozenset({"keep_every", "keep_most", "device", "command", "steps", "group", "prompts"})
"""Settings that may differ in a resumed reading: no number depends on them, or they are known only at the end."""


def _config(source: Source, settings: Settings) -> dict[str, Any]:
    """config of run.json, under the names of `creditscope lab train` where it has them."""
    name = source.path.name
    return asdict(settings) | {"engine": "offline", "file": name, "size": source.size, "task": name, "probe": "off",
                               "scope": settings.scope if settings.model else "off",
                               "command": shlex.join(["creditscope", "inspect", name, *settings.flags()])}


def _continue(record: Record, source: Source, trail: Trail) -> tuple[int, Place, str | None]:
    """(batches done, the place after them, the digest of the last), where the file has not changed."""
    steps = [line for line in record.steps() if schema.RUN_STOPPED not in line]
    record.rewind(len(steps))  # arrays of a batch whose line was not written
    if not steps:
        return 0, Place(), None
    at: list[Any] = [steps[-1].get(f"file/{name}") for name in ("part", "row", "byte")]
    if not all(isinstance(value, int) and value >= 0 for value in at) or at[0] >= len(source.files):
        raise CreditscopeError(f"{record.path} does not say how far its file was read; start again with another --out")
    place = Place(*at)
    trail.advance(place)
    if trail.digest != steps[-1].get(schema.FILE_HASH):
        raise CreditscopeError(f"cannot resume {record.path}: {source.path.name} has changed before its row "
                               f"{place.row}; start again with another --out")
    return len(steps), place, steps[-1].get(schema.FILE_BATCH)


def _finish(out: Path, config: dict[str, Any]) -> None:
    """Write into run.json the number of batches, and R and P where all batches have the same."""
    steps = Record.open(out).steps()
    late: dict[str, Any] = {"steps": len(steps)}
    for name, metric in {"group": schema.ROLLOUTS_PER_GROUP, "prompts": schema.SIGNAL_GROUPS}.items():
        values = {step.get(metric) for step in steps}
        if len(values) == 1 and None not in values:
            late[name] = values.pop()
    Record.resume(out, config | late, _FREE).close()


class BatchReader:
    """Method, estimator, and the model with its observer: a batch -> metrics and arrays."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._method = find(settings.method)
        if settings.max_tokens is not None:
            self._method = with_limit(self._method, settings.max_tokens)
        self._credit = find_estimator(settings.credit or "outcome")
        self._policy: Policy | None = None
        self._observer: Observer | None = None
        if settings.model is not None:
            self._policy = load_policy(settings.model, device=settings.device, dtype=settings.dtype, chat=settings.chat)
            if settings.scope != "off":
                self._observer = Observer(self._policy.model, full=settings.scope == "full")

    @enough_memory("passing a batch through the model", "lower --rows, or give --scope light or off")
    def read(self, batch: SampleBatch, number: int) -> BatchResult:
        settings, policy = self._settings, self._policy
        if policy is None:
            return self._without_model(assemble(batch.samples), batch)
        got = assemble_for(policy, batch.samples, settings.temperature)
        rollouts, live = got.rollouts, got.live
        assert live is not None
        chunks = chunks_of(rollouts, policy.model.get_output_embeddings().weight.shape[0])
        passes = PolicyPasses(policy, rollouts, chunks=chunks, temperature=settings.temperature)
        credit = self._credit(self._method, rollouts, FileTools(passes))
        minibatch = Minibatch(policy, self._method, rollouts, credit, chunks=chunks, temperature=settings.temperature)
        w = minibatch.w(live)
        line = _signal(got, batch) | metrics.assigned(credit, rollouts) | metrics.spread(w, rollouts.mask)
        line |= shared_prefixes(self._method, rollouts, live, credit)
        line[schema.OBJECTIVE_VALUE] = minibatch.value(live)
        line |= {schema.POLICY_LOGP: "file", schema.POLICY_SAMPLER_GAP: got.gap} if got.gap is not None else {
            schema.POLICY_LOGP: "model"}
        line |= {schema.POLICY_RESPELLED: got.respelled} if got.respelled else {}
        reading: dict[str, Any] = {}
        if self._observer is not None and number % settings.every == 0:
            line |= read(self._observer, minibatch, w)
            reading = self._observer.arrays(rollouts, w)
            self._observer.reset()
        return line, reading, to_keep(self._method, rollouts, credit, w, live)

    def _without_model(self, got: Assembled, batch: SampleBatch) -> BatchResult:
        if not got.has_tokens:
            return _signal(got, batch), {}, {}
        rollouts, find_w = got.rollouts, weigh if got.has_logp else weigh_without_logp
        credit, w = find_w(self._method, self._credit, rollouts)
        line = _signal(got, batch) | metrics.assigned(credit, rollouts) | metrics.spread(w, rollouts.mask)
        line |= shared_prefixes(self._method, rollouts, rollouts.logp, credit)
        return line, {}, to_keep(self._method, rollouts, credit, w, rollouts.logp)


def weigh(method: Method, credit: Chosen, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(A, w) of a batch at ratio 1."""
    given = credit(method, rollouts, Tools())
    return given, effective_credit(lambda logp: surrogate(method, logp, rollouts, given), rollouts.logp)


def weigh_without_logp(method: Method, credit: Chosen, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(A, w) at ratio 1 where log π_old is not known; an error where they depend on it.

    They are taken twice: where all tokens are certain, and where log π goes from one probe to the other over the batch.
    Equal log-probs would not do, because a pair's margin is a difference of two answers.
    """
    certain, falling = (torch.linspace(PROBES[0], end, rollouts.mask.numel()).view(rollouts.mask.shape)
                        for end in PROBES)
    (given, w), other = (weigh(method, credit, replace(rollouts, logp=torch.where(rollouts.mask, probe, 0.0)))
                         for probe in (certain, falling))
    if not (torch.allclose(given, other[0]) and torch.allclose(w, other[1])):
        who = f"method {method.name!r}" if torch.allclose(given, other[0]) else f"credit {credit.spec!r}"
        raise CreditscopeError(f"{who} needs the log-probs of the tokens, and the file has none; add logp to each row, "
                               f"or give --model to compute them")
    return given, w


def shared_prefixes(method: Method, rollouts: Rollouts, live: Tensor, credit: Tensor) -> dict[str, Any]:
    """prefix/tokens, root and bias of a batch: W on tokens that answers share, by `exact.shared_prefix`."""
    found = prefix_metrics(prefix_bias(method, rollouts, live, credit), rollouts)
    return {name: found[name] for name in (schema.PREFIX_TOKENS, schema.PREFIX_ROOT, schema.PREFIX_BIAS)
            if name in found}


def _signal(got: Assembled, batch: SampleBatch) -> dict[str, Any]:
    """Metrics of the samples that depend on no method."""
    rollouts, rows = got.rollouts, len(got.rollouts)
    line = {schema.ROLLOUTS_SAMPLED: rows, schema.ROLLOUTS_USED: rows,
            schema.ROLLOUTS_SPENT: rows} | metrics.signal(rollouts)
    sizes = set(Groups(rollouts.group).counts.tolist())
    if len(sizes) == 1:
        line[schema.ROLLOUTS_PER_GROUP] = sizes.pop()
    if got.has_tokens:
        return line
    line = {name: value for name, value in line.items() if not name.startswith("length/")}
    return line | {schema.LENGTH_CHARACTERS: sum(len(sample.text or "") for sample in batch.samples) / rows}


def to_keep(method: Method, rollouts: Rollouts, credit: Tensor, w: Tensor, live: Tensor) -> dict[str, Any]:
    """The first groups of a batch as plain arrays; nothing where their texts take more than KEPT_BYTES."""
    order = Groups(rollouts.group)
    room = max(1, int((order.counts.cumsum(0) <= KEPT_ROWS).sum()))
    rows = (order.index < room).nonzero().squeeze(1)
    if not bool(rollouts.mask[rows].any()):
        return {}
    part = rollouts.rows(rows).trim()
    width = part.tokens.shape[1]
    cells = [max(map(len, part.prompt), default=0), max(map(len, part.text), default=0),
             width * max((len(piece) for row in part.pieces for piece in row), default=0)]
    if 4 * len(part) * sum(cells) > KEPT_BYTES:
        return {}
    return kept_arrays(method, part, credit[rows, :width], w[rows, :width], live[rows, :width])


def chunks_of(rollouts: Rollouts, vocabulary: int) -> list[Tensor]:
    """Rows of each pass through the model: as many whole groups as LOGITS allows, at least one."""
    groups, most = Groups(rollouts.group), LOGITS / ((int(rollouts.extents.max()) + 1) * vocabulary)
    parts, held = [0], 0
    for count in groups.counts.tolist():
        held = held + count if not held or held + count <= most else count
        parts.append(parts[-1] + (held == count))
    part = torch.tensor(parts[1:])[groups.index.cpu()]
    return [(part == number).nonzero().squeeze(1) for number in range(1, parts[-1] + 1)]


class FileTools(Tools):
    """Tools of an estimator over a file: a Gram, no continuations and no judge."""

    def __init__(self, passes: PolicyPasses) -> None:
        self._passes = passes

    def gram(self) -> Tensor:
        return self._passes.score_gram()


def read(observer: Observer, minibatch: Minibatch, w: Tensor) -> dict[str, Any]:
    """`gram/…` of the batch under w, and `grad/norm`; a full observer adds the unweighted scores. No update is made."""
    start = time.perf_counter()
    policy = minibatch.policy
    if observer.full:
        observer.read_scores(minibatch)
    policy.model.zero_grad(set_to_none=True)
    minibatch.backward(lambda _, chunk: -w[chunk], observer.around)
    grads = [p.grad.double().norm() for p in policy.trainable().values() if p.grad is not None]
    norm = float(torch.stack(grads).norm())
    observer.gradient(norm)
    line = observer.metrics(minibatch.rollouts, w, time.perf_counter() - start)
    policy.model.zero_grad(set_to_none=True)
    return line | {schema.GRAD_NORM: norm}


class Summary:
    """The metrics of all batches as one: counts are summed, extremes kept, the rest are means weighted by rollouts."""

    COUNTS = (schema.ROLLOUTS_USED, schema.SIGNAL_GROUPS, schema.SIGNAL_LIVE_GROUPS, schema.LENGTH_EMPTY,
              schema.GRAM_LIVE_GROUPS, schema.SCORES_LIVE_GROUPS, schema.POLICY_RESPELLED, schema.REWARD_EQUAL_TEXTS,
              schema.REWARD_EQUAL_TEXTS_APART)
    EXTREMES: Mapping[str, Callable[[float, float], float]] = {
        schema.LENGTH_MAX: max, schema.POLICY_SAMPLER_GAP: max, schema.REWARD_MAX: max, schema.REWARD_MIN: min}
    LEFT_OUT = (schema.ROLLOUTS_SAMPLED, schema.ROLLOUTS_SPENT, schema.ROLLOUTS_PER_GROUP)

    def __init__(self) -> None:
        self.batches = 0
        self._words: dict[str, Any] = {}
        self._found: dict[str, float] = {}
        self._weight: dict[str, int] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        self.batches += 1
        rows = line[schema.ROLLOUTS_USED]
        for name, value in line.items():
            if name in self.LEFT_OUT or name.startswith(("file/", "time/")):
                continue
            if isinstance(value, str):
                self._words[name] = value
            elif name in self.EXTREMES:
                self._found[name] = self.EXTREMES[name](value, self._found.get(name, value))
            else:
                weight = 1 if name in self.COUNTS else rows
                self._found[name] = self._found.get(name, 0) + weight * value
                self._weight[name] = self._weight.get(name, 0) + rows

    def facts(self) -> dict[str, Any]:
        found = {name: value if name in (*self.COUNTS, *self.EXTREMES) else value / self._weight[name]
                 for name, value in self._found.items()}
        size: dict[str, Any] = {"batches": self.batches, "rollouts": found.pop(schema.ROLLOUTS_USED)}
        if schema.LENGTH_MEAN in found:
            size["tokens"] = round(self._found[schema.LENGTH_MEAN])
        found[schema.SIGNAL_DEAD_GROUPS] = 1 - found[schema.SIGNAL_LIVE_GROUPS] / found[schema.SIGNAL_GROUPS]
        return size | self._words | found
