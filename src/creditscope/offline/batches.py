"""Batches of samples: the rows of one training step, or whole groups up to a number of rows. One batch is in memory; of
earlier ones a 64-bit number per group is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from creditscope.batch.jsonl import show
from creditscope.offline.dumps import SHAPES, Sample, recognise
from creditscope.offline.files import LARGEST, START, Place, Source, complain


@dataclass
class SampleBatch:
    """The samples of one batch, and the place in the source after them."""

    samples: list[Sample] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    size: int = 0

    @property
    def step(self) -> int | None:
        return self.samples[0].batch

    @cached_property
    def digest(self) -> str:
        """Equal for batches of TRL with the same answers and rewards, at whatever step."""
        found = hashlib.blake2b(digest_size=16)
        for number, sample in enumerate(self.samples):  # the JSON of one list, sample by sample to save memory
            content = json.dumps([sample.prompt, sample.text, sample.reward], default=str)
            found.update(f"{'[' if number == 0 else ', '}{content}".encode())
        found.update(b"]")
        return found.hexdigest()


class Reader:
    """The batches of a source. `shape` and `ignored` are known after the first."""

    def __init__(self, source: Source, shape: str = "auto", reward_field: str | None = None, rows: int = 512) -> None:
        self._source, self._rows, self._reward_field = source, rows, reward_field
        self.shape = None if shape == "auto" else shape
        self.ignored: list[str] | None = None
        """Fields of the first object that are not read."""
        self.repeats = 0
        """Steps that were left out: TRL logs a generation again at every update on it."""
        self.again = 0
        """Groups without a name whose prompt was in an earlier batch too."""

    def batches(self, start: Place = START, last: str | None = None) -> Iterator[SampleBatch]:
        """Every batch after a place; `last` is the digest of the batch before it."""
        for batch in self._cut(start):
            if self.shape is not None and SHAPES[self.shape].repeats:
                if batch.digest == last:
                    self.repeats += 1
                    continue
                last = batch.digest
            yield batch

    def _cut(self, start: Place) -> Iterator[SampleBatch]:
        batch, closed = SampleBatch(), self._before(start)
        for sample, place, size in self._samples(start):
            if batch.samples and self._ends(batch, sample):
                yield self._close(batch, closed)
                batch = SampleBatch()
            if sample.group is not None and _mark(sample) in closed:
                raise complain(sample.where, f"group {show(sample.group)} comes again after other groups, and the "
                                             f"batch it began in is closed; sort the file by group, give more --rows, "
                                             f"or give each row its step")
            batch.samples.append(sample)
            batch.place = place
            batch.size += size
            if batch.size > LARGEST:
                held = "one group" if batch.step is None else f"step {batch.step}"
                raise complain(sample.where, f"{held} takes more than {LARGEST:,} bytes; split it, or shorten rows")
        if batch.samples:
            yield self._close(batch, closed)

    def _close(self, batch: SampleBatch, closed: set[int]) -> SampleBatch:
        """Add the batch's groups to those that are closed; groups of a step end with it, and may come again."""
        if batch.step is None:
            marks = {_mark(sample) for sample in batch.samples}
            self.again += len(marks & closed)
            closed |= marks
        return batch

    def _before(self, start: Place) -> set[int]:
        """The groups before a place, for a reading that is resumed."""
        closed = set[int]()
        for sample, place, _ in self._samples(START) if start != START else ():
            if sample.batch is not None or (place.file, place.row) > (start.file, start.row):
                break
            closed.add(_mark(sample))
        return closed

    def _ends(self, batch: SampleBatch, sample: Sample) -> bool:
        """Whether a sample belongs to the next batch."""
        if (sample.batch is None) != (batch.step is None):
            raise complain(sample.where, "some rows name the training step they belong to and some do not; give it in "
                                         "all or in none")
        if sample.batch is None or batch.step is None:
            return len(batch.samples) >= self._rows and sample.key != batch.samples[-1].key
        if sample.batch < batch.step:
            raise complain(sample.where, f"step {sample.batch} comes after step {batch.step}; sort the file by step")
        return sample.batch > batch.step

    def _samples(self, start: Place) -> Iterator[tuple[Sample, Place, int]]:
        """(sample, the place after its object, its share of the object's bytes)"""
        for thing in self._source.objects(start):
            if self.shape is None:
                self.shape = recognise(thing.row, self._reward_field, thing.where)
            shape = SHAPES[self.shape]
            if self.ignored is None:
                self.ignored = sorted(set(thing.row) - shape.reads(thing.row, self._reward_field))
            found = shape.convert(_Fields(thing.row, thing.where), self._reward_field, thing.where,
                                  partial(complain, thing.where))
            for sample in found:
                if sample.group is None and sample.prompt is None:
                    raise complain(thing.where, "neither a prompt nor a group (group, prompt_id or uid), so nothing "
                                                "says which answers belong together")
                yield sample, thing.place, thing.size // len(found)


def _mark(sample: Sample) -> int:
    """64 bits per group. Of its repr, since hash(-1) == hash(-2)."""
    return hash((sample.group is None, repr(sample.key)))


class _Fields(dict[str, Any]):
    """A row that names the line where a field is missing."""

    def __init__(self, row: Mapping[str, Any], where: str) -> None:
        super().__init__(row)
        self._where = where

    def __missing__(self, name: str) -> Any:
        raise complain(self._where, f"field {name!r} is missing; it has {', '.join(map(repr, list(self)[:8]))}")
