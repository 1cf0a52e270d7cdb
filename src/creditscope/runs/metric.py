"""What a metric of the record is: a key with its equation, unit and sentence, and families of keys. `runs.schema` has
the rows. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


class Metric(str):
    """A metric's key, with what is known about it.

    >>> from creditscope.runs.schema import REWARD_MEAN
    >>> REWARD_MEAN, REWARD_MEAN.name, REWARD_MEAN.equation
    ('reward/mean', 'mean reward', '1/B Σ_i r_i')
    """

    name: str
    unit: str
    sentence: str
    equation: str
    writer: str
    """The module that writes it, below creditscope."""
    source: str
    """Of the definition, where a paper gives it."""
    term: str
    """Its entry in the glossary; readings of other rows share one."""

    def __new__(cls, key: str, name: str, unit: str, sentence: str, equation: str = "", *, writer: str,
                source: str = "", term: str = "") -> Metric:
        self = super().__new__(cls, key)
        self.name, self.unit, self.sentence, self.equation = name, unit, sentence, equation
        self.writer, self.source, self.term = writer, source, term or key.replace("/", "_")
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """In pickles and copies a key is a plain str."""
        return str, (str(self),)

    @property
    def area(self) -> str:
        return self.partition("/")[0]

    @property
    def recorded(self) -> bool:
        """Whether a record has it; other keys go into verl's log, or are read from trainers' logs."""
        return not self.writer.startswith(("plugins.verl", "diagnosis"))


@dataclass(frozen=True)
class KeyFamily:
    """Keys that end in one of a list of readings; the caller fills in K or NAME of the pattern."""

    pattern: str
    sentence: str
    writer: str
    readings: Mapping[str, Metric]

    def __call__(self, name: str, value: object = None) -> Metric:
        """The key of a reading.

        >>> from creditscope.runs.schema import ALSO
        >>> ALSO("effective_rank", "outcome")
        'also/outcome/effective_rank'
        """
        return self._named(re.sub(r"\b(K|NAME)\b", lambda _: str(value), self.pattern) + name, self.readings[name])

    def _named(self, key: str, own: Metric) -> Metric:
        return Metric(key, own.name, own.unit, own.sentence, own.equation, writer=self.writer, source=own.source,
                      term=own.term)

    @property
    def closed(self) -> bool:
        return not re.search(r"\b(K|NAME)\b", self.pattern)

    def find(self, key: str) -> Metric | None:
        start = self.pattern.replace("NAME", ".+").replace("K", r"[1-9]\d*")
        found = re.fullmatch(rf"{start}(\w+)", key)
        own = None if found is None else self.readings.get(found[1])
        return own and self._named(key, own)
