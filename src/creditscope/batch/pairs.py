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
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import encodable, fault, numbered_lines, parse_json
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
    line: int = field(default=0, compare=False, repr=False)
    """Its line in the file, counted from 1; 0 where it is of no file."""


def read_pairs(path: str | Path, option: str = "the pairs") -> list[Pair]:
    """The pairs of a file, in its order. An error names the line, or the option that gave the file."""
    if not os.path.exists(path) or os.path.isdir(path):  # pathlib's raise where a name is too long
        what = "it is a folder" if os.path.isdir(path) else "no such file"
        raise CreditscopeError(f"{option} {path}: {what}; give a file of preference pairs, which creditscope lab pairs "
                               f"--out FILE makes")
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
        found.append(replace(pair, line=number))
    if not found:
        raise CreditscopeError(f"{path} has only blank lines; expected one pair per line: prompt, chosen, rejected")
    return found


def write_pairs(path: str | Path, pairs: Iterable[Pair]) -> None:
    """One line per pair with an explicit prompt in plain text; the file is complete or not there."""
    rows = ({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs)
    write_file(Path(path), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


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
    prompt = _side(row, "prompt") if row.get("prompt") is not None else None
    if isinstance(prompt, list) and isinstance(chosen, str):
        raise CreditscopeError("'prompt' is a list of messages, and 'chosen' and 'rejected' are text; give all three "
                               "as text, or all as messages")
    if type(prompt) is not type(chosen):
        # As TRL's maybe_extract_prompt: a prompt as text is only a copy of what conversations begin with.
        at = shared(chosen, rejected)
        if at == 0 and prompt is not None:
            raise CreditscopeError("'prompt' is text, and 'chosen' and 'rejected' are messages that have no common "
                                   "beginning; give all three as text, or all as messages")
        if at == 0:
            raise CreditscopeError("there is no 'prompt', and 'chosen' and 'rejected' have no common beginning; give "
                                   "the prompt")
        prompt, chosen, rejected = chosen[:at], chosen[at:], rejected[at:]
    found = Pair(_text(prompt, "prompt", "user"), _text(chosen, "chosen", "assistant"),
                 _text(rejected, "rejected", "assistant"))
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
    if line.lstrip().startswith("["):
        raise CreditscopeError("a JSON array begins here; one JSON object {...} per line is needed, as jq -c '.[]' "
                               "makes them of an array")
    try:
        row = parse_json(line.rstrip())
    except ValueError as error:
        raise CreditscopeError(f"not valid JSON: {fault(error)}; one JSON object {{...}} per line is needed") from None
    if not isinstance(row, dict):
        raise CreditscopeError(f"one JSON object {{...}} per line is needed, got {type(row).__name__}")
    return row


def _side(row: dict[str, Any], name: str) -> Any:
    """A side as it was given: a text, or a list of messages; an empty one is missing."""
    if name not in row:
        have = ", ".join(key[:40] for key in list(row)[:20]) or "nothing"
        raise CreditscopeError(f"{name!r} is missing; a pair needs chosen and rejected, and it has {have}")
    value = row[name]
    if value is None or value in ("", []):
        raise CreditscopeError(f"{name!r} is {json.dumps(value)}; give it a text, or leave this line out")
    if wrong := _no_side(value):
        raise CreditscopeError(f"{name!r} must be text, or a list of messages {{\"role\": text, \"content\": text}}, "
                               f"got {wrong}")
    return value


def _no_side(value: Any) -> str:
    """Why a value is neither a text nor a list of messages; "" where it is one."""
    if not isinstance(value, list):
        return "" if isinstance(value, str) else type(value).__name__
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            return f"{type(message).__name__} as message {number}"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = type(message[key]).__name__ if key in message else "nothing"
                return f"{found} as {key!r} of message {number}"
    return ""


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
