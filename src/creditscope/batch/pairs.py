"""Preference pairs in TRL's format, as JSON lines: a prompt, the preferred answer and the other. Loads no torch.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}                 the prompt of its own
    {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}                        the prompt is what both begin with
    {"prompt": [{"role": "user", "content": "2 + 2 ="}],
     "chosen": [{"role": "assistant", "content": "4"}], "rejected": [...]}  conversations, with either kind of prompt

A conversation is one message of a user and one of an assistant: a policy puts them into its own chat template. Longer
ones are given as text that the template has made. Fields besides the three are ignored, as TRL ignores them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import encodable, numbered_lines, parse_json
from creditscope.files.writing import write_file

MOST_PAIRS = 2**20
"""Pairs of a file: they are held in memory."""
MOST_CHARACTERS = 2**30
"""Characters of a file's pairs together."""


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which `chosen` is preferred."""

    prompt: str
    chosen: str
    rejected: str


def read_pairs(path: str | Path) -> list[Pair]:
    """The pairs of a file, in its order. An error names the line."""
    found: list[Pair] = []
    room = MOST_CHARACTERS
    for number, line in numbered_lines(path):
        try:
            pair = pair_of(_row(line))
        except CreditscopeError as error:
            raise CreditscopeError(f"{path}, line {number}: {error}") from None
        room -= len(pair.prompt) + len(pair.chosen) + len(pair.rejected)
        if len(found) == MOST_PAIRS or room < 0:
            raise CreditscopeError(f"{path}, line {number}: more than {MOST_PAIRS:,} pairs or {MOST_CHARACTERS:,} "
                                   f"characters; give a part of the file")
        found.append(pair)
    if not found:
        raise CreditscopeError(f"{path} has only blank lines; expected one pair per line: prompt, chosen, rejected")
    return found


def write_pairs(path: str | Path, pairs: Iterable[Pair]) -> None:
    """One line per pair with an explicit prompt in plain text; the file is complete or not there."""
    write_file(Path(path), "".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs))


def pair_of(row: dict[str, Any]) -> Pair:
    """The pair of a row of TRL's format.

    >>> pair_of({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    Pair(prompt='The sky is', chosen=' blue.', rejected=' green.')
    """
    chosen, rejected = (_side(row, name) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise CreditscopeError("'chosen' and 'rejected' must both be text, or both lists of messages")
    if chosen == rejected:
        raise CreditscopeError("'chosen' and 'rejected' are equal, so nothing is preferred; leave this line out")
    # As TRL's maybe_extract_prompt: a prompt of the other kind than the answers is only a copy of what is in them.
    if row.get("prompt") is not None and type(_side(row, "prompt")) is type(chosen):
        prompt = _side(row, "prompt")
    else:
        at = shared(chosen, rejected)
        if at == 0:
            raise CreditscopeError("there is no 'prompt', and 'chosen' and 'rejected' have no common beginning; give "
                                   "the prompt")
        prompt, chosen, rejected = chosen[:at], chosen[at:], rejected[at:]
    found = Pair(*(_text(value, name, role) for value, name, role in (
        (prompt, "prompt", "user"), (chosen, "chosen", "assistant"), (rejected, "rejected", "assistant"))))
    if found.chosen == found.rejected:  # messages that differ in another field alone
        raise CreditscopeError("'chosen' and 'rejected' are equal, so nothing is preferred; leave this line out")
    return found


def shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Where the implicit prompt ends, as TRL's extract_prompt has it: before the first difference, and before a space
    in front of it; where one side begins with the whole other, before the last character or message of the shorter.

    >>> shared("The sky is blue.", "The sky is green."), shared("It is", "It is not")
    (10, 4)
    """
    at = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
              min(len(chosen), len(rejected)) - 1)
    return at - 1 if at > 0 and chosen[at - 1] == " " and chosen[at] != rejected[at] else at


def _row(line: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise CreditscopeError(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise CreditscopeError(f"expected an object {{...}}, got {type(row).__name__}")
    return row


def _side(row: dict[str, Any], name: str) -> Any:
    """A side as it was given: a text, or a list of messages; an empty one is missing."""
    value = row.get(name)
    if value is None or value in ("", []):
        have = ", ".join(key[:40] for key in list(row)[:20]) or "nothing"
        raise CreditscopeError(f"{name!r} is missing or empty; a pair needs chosen and rejected, and it has {have}")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) and isinstance(message.get("role"), str)
                                              and isinstance(message.get("content"), str) for message in value):
        raise CreditscopeError(f"{name!r} must be text, or a list of messages {{\"role\": ..., \"content\": text}}, "
                               f"got {type(value).__name__}")
    return value


def _text(value: Any, name: str, role: str) -> str:
    """The text of a side, or of its only message."""
    if not isinstance(value, str):
        roles = [message["role"] for message in value]
        if roles != [role]:
            raise CreditscopeError(f"{name!r} has messages of {', '.join(map(repr, roles[:8]))}, and one of {role!r} "
                                   f"is read; apply the model's chat template to longer conversations, and give them "
                                   f"as text with --chat off")
        value = str(value[0]["content"])
    if not value:
        raise CreditscopeError(f"{name!r} is missing or empty")
    if not encodable(value):
        raise CreditscopeError(f"{name!r} has half a character (a lone surrogate), which cannot be tokenised; write "
                               f"whole characters")
    return str(value)
