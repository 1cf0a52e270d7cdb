"""One logged answer, and the checks of its fields that every shape of file shares."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from creditscope.batch.jsonl import Bad, Row, check_list, check_scalar, show

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One logged answer to one prompt."""

    where: str
    """File and line, for messages."""
    reward: float
    prompt: str | Messages | None = None
    text: str | None = None
    group: Hashable = None
    """The name of its group; None where a group is the answers to one prompt."""
    batch: int | None = None
    """The training step that sampled it."""
    prompt_tokens: list[int] | None = None
    fields: Row = field(default_factory=dict)
    """Fields per token: tokens, logp, mask, entropy, step labels …, checked."""
    spelled: bool = False
    """True where tokens are known by their spelling alone: their ids are hashes, not a model's."""

    @property
    def key(self) -> Hashable:
        if self.group is not None:
            return self.group
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True, default=str)


@dataclass(frozen=True)
class Shape:
    """A kind of file. The functions take the object and --reward-field."""

    says: str
    fits: Callable[[Mapping[str, Any], str | None], bool]
    convert: Callable[[Mapping[str, Any], str | None, str, Bad], list[Sample]]
    """(object, --reward-field, its place, error from a message) -> its samples."""
    reads: Callable[[Mapping[str, Any], str | None], set[str]]
    """The fields that are read; the others are named to the user."""
    repeats: bool = False
    """Whether a generation is logged again at every update on it."""


def reward_of(row: Mapping[str, Any], name: str, bad: Bad) -> float:
    if name not in row:
        raise bad(f"no field {name!r} for the reward; say where it stands with --reward-field")
    return number_of(row[name], name, bad)


def number_of(value: Any, name: str, bad: Bad) -> float:
    """A finite number; true and false are 1 and 0, and a decimal of parquet becomes a float."""
    found: float = check_scalar(name, float(value) if isinstance(value, bool | Decimal) else value, float, bad)
    return found


def step_of(value: Any, bad: Bad) -> int | None:
    """The training step; tables with gaps have it as a float."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    found: int | None = None if whole is None else check_scalar("step", whole, int, bad)
    return found


def prompt_of(value: Any, bad: Bad) -> str | Messages:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return [dict(message) for message in value]
    raise bad(f"the prompt must be a text or a list of messages with role and content, got {show(value)}")


def text_of(value: Any, name: str, bad: Bad) -> str:
    """A text; of messages, their contents joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str | None) for m in value):
        return "".join(m.get("content") or "" for m in value)
    raise bad(f"{name!r} must be a text or a list of messages, got {show(value)}")


def name_of(value: Any, bad: Bad) -> str | int:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    raise bad(f"a group is named by a text or an integer, got {show(value)}")


def ids_of(row: Mapping[str, Any], name: str, bad: Bad) -> list[int] | None:
    return None if row.get(name) is None else check_list(name, row[name], int, bad)
