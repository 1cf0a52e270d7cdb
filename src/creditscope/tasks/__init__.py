"""Tasks: a source of prompts and a verifier of answers. `find_task("arithmetic")` gives one by name.

    task.problems(split, seed) -> Problem ...        problem, completion text -> task.verify -> Verdict

No torch, no transformers. Each task's module is loaded when its name is asked for.
"""

from __future__ import annotations

import importlib
import inspect
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from creditscope.errors import CreditscopeError, unknown

__all__ = ["SPLITS", "TASKS", "Problem", "Step", "Task", "Verdict", "check_split", "find_task", "in_order", "spans"]

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Problem:
    """One question. The policy reads `prompt`; `meta` is for the verifier and for display."""

    id: str
    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Characters [start, end) of the completion form one reasoning step (or turn), worth `reward`.

    Spans are disjoint, in order, and include the line break, so that every token of a line has a step.
    """

    start: int
    end: int
    reward: float
    state: str | None = None
    """The state in which the step begins, where the task knows it: equal text, equal state."""


@dataclass(frozen=True)
class Verdict:
    """The reward of an answer. `error` says why it could not be judged; the reward is then 0."""

    reward: float
    steps: tuple[Step, ...] = ()
    error: str | None = None
    lost: bool | None = None
    """Whether the answer earns nothing for its form alone: its last number is the reference. None: not looked at."""


@runtime_checkable
class Task(Protocol):
    """A task as the trainer uses it."""

    @property
    def name(self) -> str: ...

    @property
    def max_tokens(self) -> int:
        """A sensible limit for the length of a completion, in tokens."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the problems are read from; none where they are generated or come from the hub."""
        ...

    def problems(self, split: str, seed: int = 0) -> Iterator[Problem]:
        """Problems in an order that the seed fixes. Generated `train` never ends; files end; `test` is a fixed list."""
        ...

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Judge a completion. Never raises, whatever the text holds."""
        ...


TASKS: Mapping[str, str] = MappingProxyType({
    "arithmetic": "creditscope.tasks.arithmetic:Arithmetic",
    "gsm8k": "creditscope.tasks.gsm8k:Gsm8k",
    "jsonl": "creditscope.tasks.jsonl:Jsonl",
    "turns": "creditscope.tasks.turns:Ladder",
})
"""Name -> module:class. The class takes the task's options as keyword arguments."""


def find_task(spec: str, **options: Any) -> Task:
    """The task of that name. After a colon comes its `source`: a file, a folder or a hub name.

    >>> find_task("arithmetic", max_steps=3).name
    'arithmetic'
    >>> find_task("arithmatic")
    Traceback (most recent call last):
    creditscope.errors.CreditscopeError: unknown task 'arithmatic'; did you mean 'arithmetic'? Choices: arithmetic, \
gsm8k, jsonl, turns.
    """
    name, colon, source = spec.partition(":")
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    if colon:
        options = {"source": source, **options}
    module, _, cls = TASKS[name].partition(":")
    factory = getattr(importlib.import_module(module), cls)
    allowed = inspect.signature(factory).parameters
    for given in options:
        if given == "source" and given not in allowed:
            raise CreditscopeError(f"task {name!r} is generated and takes no source, got {spec!r}; write {name!r}")
        if given == "reward" and given not in allowed:
            learned = f"; for the reward model in that folder write --reward model:{options[given]}" \
                if os.path.isdir(str(options[given])) else ", and --reward model:FOLDER with this one"
            raise CreditscopeError(f"--reward {options[given]}: task {name!r} judges answers itself; a function as "
                                   f"--reward goes with --task jsonl:FILE{learned}")
        if given == "answer" and given not in allowed:
            raise CreditscopeError(f"task {name!r} reads no number from an answer; --answer goes with arithmetic and "
                                   f"gsm8k")
        if given not in allowed:
            raise unknown(f"option of task {name!r}", given, allowed)
    task: Task = factory(**options)
    return task


def in_order(rows: list[Problem], split: str, seed: int) -> Iterator[Problem]:
    """The rows of a file: `test` in its order, `train` shuffled by the seed, so that every epoch has its own order."""
    return iter(rows if split == "test" else random.Random(seed).sample(rows, len(rows)))


def check_split(split: str) -> str:
    """`split` itself, if it is one of SPLITS."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return split


def spans(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, text) of each line, its line break included."""
    start = 0
    for line in text.splitlines(keepends=True):
        yield start, start + len(line), line
        start += len(line)
