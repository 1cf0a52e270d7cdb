"""One logged object, in any of the known shapes, as samples: prompt, answer, reward and group.

    creditscope   {"prompt": …, "response": …, "reward": 1.0}          and the fields of docs/offline.md
    trl           step, prompt, completion, a column per reward function, advantage      (log_completions)
    verl          {"input": …, "output": …, "score": 1.0, "step": 3, "uid": …}           (trainer.rollout_data_dir)
    others        skyrl, areal, prime_rl, nemo_rl, swift: in `foreign`
    openai        {"messages": […], "choices": [{"message": …, "reward": 1.0}, …]}       one request per line
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from creditscope.batch.jsonl import Bad, Row, check_fields, show
from creditscope.batch.rollouts import STEP_FIELDS, TOKEN_FIELDS
from creditscope.errors import CreditscopeError, unknown
from creditscope.offline.foreign import FOREIGN
from creditscope.offline.sample import (
    Sample,
    Shape,
    ids_of,
    name_of,
    number_of,
    prompt_of,
    reward_of,
    step_of,
    text_of,
)

__all__ = ["SHAPES", "Sample", "recognise", "spelling_number"]

TEXTS = ("response", "completion", "text")
GROUPS = ("group", "prompt_id", "uid")
BATCHES = ("batch", "step")
PER_TOKEN = (*TOKEN_FIELDS, *STEP_FIELDS, "pieces")


def recognise(row: Mapping[str, Any], reward_field: str | None, where: str) -> str:
    """The name of an object's shape, or an error with its first keys and the known shapes.

    >>> recognise({"input": "1+1=", "output": "2", "score": 1.0, "gts": "2", "step": 1}, None, "1.jsonl, line 1")
    'verl'
    """
    for name, shape in SHAPES.items():
        if shape.fits(row, reward_field):
            return name
    keys = ", ".join(show(key) for key in list(row)[:8]) or "none"
    known = "; ".join(f"{name}: {shape.says}" for name, shape in SHAPES.items())
    raise CreditscopeError(f"{where}: not a shape of rollouts that is known here; its fields are {keys}. Known are "
                           f"{known}. Rename the fields, or say where the reward stands with --reward-field")


def _ours(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    known = {name: row[name] for name in PER_TOKEN if row.get(name) is not None}
    if not isinstance(known.get("step", []), list):
        del known["step"]  # a number: the training step
    batch = next((row[name] for name in BATCHES if name in row and not isinstance(row[name], list | None)), None)
    text = next((name for name in TEXTS if row.get(name) is not None), None)
    name = next((name for name in GROUPS if row.get(name) is not None), None)
    if text is None and "tokens" not in known:
        raise bad(f"neither an answer ({', '.join(TEXTS)}) nor its tokens")
    return [Sample(
        where=where, reward=reward_of(row, reward_field or "reward", bad),
        prompt=prompt_of(row["prompt"], bad) if row.get("prompt") is not None else None,
        text=None if text is None else text_of(row[text], text, bad),
        group=None if name is None else name_of(row[name], bad),
        batch=step_of(batch, bad),
        prompt_tokens=ids_of(row, "prompt_tokens", bad), fields=check_fields(known, bad))]


TRL_OWN = ("step", "prompt", "completion", "advantage")


def _trl(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """The reward is the column of the reward function; of several, the sum of those in --reward-field."""
    columns = reward_field.split(",") if reward_field else _numbers(row)
    if len(columns) != 1 and not reward_field:
        have = f"several columns that may be rewards: {', '.join(columns)}" if columns else "no column of a reward"
        raise bad(f"{have}; give --reward-field {','.join(columns) or 'NAME'} (several are summed, as TRL sums them)")
    for column in columns:
        if column not in row:
            raise bad(str(unknown("--reward-field", column, _numbers(row))))
    # TRL writes NaN where a reward function returned None.
    given = [value for value in map(row.get, columns) if value is not None and value == value]
    if not given:
        raise bad(f"no reward: {', '.join(columns)} gave no number")
    return [Sample(where=where, reward=sum(number_of(value, columns[0], bad) for value in given),
                   prompt=prompt_of(row["prompt"], bad), text=text_of(row["completion"], "completion", bad),
                   batch=step_of(row["step"], bad))]


def _numbers(row: Mapping[str, Any]) -> list[str]:
    """Columns with a number that are not TRL's own."""
    return [name for name, value in row.items()
            if name not in TRL_OWN and isinstance(value, int | float | Decimal | None)]


def _verl(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """uid is SAMPLE_ROLLOUT_OUTPUT, and rows of one SAMPLE are a group; without uid, rows of one prompt are."""
    group = None
    if row.get("uid") is not None:
        parts = str(name_of(row["uid"], bad)).rsplit("_", 2)
        group = parts[0] if len(parts) == 3 and all(part.isdecimal() for part in parts[1:]) else str(row["uid"])
    return [Sample(where=where, reward=reward_of(row, reward_field or "score", bad),
                   prompt=prompt_of(row["input"], bad), text=text_of(row["output"], "output", bad),
                   group=group, batch=step_of(row.get("step"), bad))]


REQUESTS = ((), ("request",), ("request", "body"), ("body",))
RESPONSES = ((), ("response",), ("response", "body"), ("body",))


def _openai(row: Mapping[str, Any], reward_field: str | None, where: str, bad: Bad) -> list[Sample]:
    """The choices of one request are a group; requests with one choice are grouped by their messages."""
    name = reward_field or "reward"
    messages, response = _inside(row, REQUESTS, "messages"), _inside(row, RESPONSES, "choices")
    if messages is None:
        raise bad("choices without the messages of their request; join the two files by custom_id first")
    choices = [] if response is None else response["choices"]
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise bad(f"'choices' must be a list of objects, at least one, got {show(choices)}")
    rewards = row.get(name)
    if isinstance(rewards, list) and len(rewards) != len(choices):
        raise bad(f"{name!r} has {len(rewards)} entries for {len(choices)} choices")
    prompt = prompt_of(messages["messages"], bad)  # once per request, which may have many choices
    samples = []
    for i, choice in enumerate(choices):
        reward = choice if name in choice else {name: rewards[i]} if isinstance(rewards, list) else row
        if reward is row and len(choices) > 1:
            raise bad(f"choice {i} has no {name!r}; put one into each choice, or a list of {len(choices)} beside them")
        message = choice.get("message")
        said = message.get("content") if isinstance(message, dict) else choice.get("text")
        fields, spelled = _logprobs(choice, bad)
        samples.append(Sample(
            where=where, reward=reward_of(reward, name, bad), prompt=prompt,
            text=text_of("" if said is None else said, "content", bad), group=where if len(choices) > 1 else None,
            batch=step_of(row.get("step"), bad), prompt_tokens=ids_of(response or {}, "prompt_token_ids", bad),
            fields=fields, spelled=spelled))
    return samples


def _logprobs(choice: Mapping[str, Any], bad: Bad) -> tuple[Row, bool]:
    """(fields per token from `logprobs`, whether it has no ids); some servers add `token_ids`."""
    found = choice.get("logprobs")
    entries = found.get("content") if isinstance(found, dict) else None
    ids = ids_of(choice, "token_ids", bad)
    if not entries:
        return ({} if ids is None else {"tokens": ids}), False
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("token"), str)
                                                for e in entries):
        raise bad("'logprobs' must hold a list of objects with token and logprob")
    pieces = [entry["token"] for entry in entries]
    row = {"tokens": [spelling_number(piece) for piece in pieces] if ids is None else ids, "pieces": pieces,
           "logp": [entry.get("logprob") for entry in entries]}
    return check_fields(row, bad), ids is None


def spelling_number(piece: str) -> int:
    """A 31-bit hash as the id of a token of which only the spelling is known.

    >>> spelling_number(" the") == spelling_number(" the") != spelling_number("the")
    True
    """
    return int.from_bytes(hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=4).digest()) >> 1


def _inside(row: Mapping[str, Any], paths: Iterable[Sequence[str]], name: str) -> Mapping[str, Any] | None:
    """The first object on one of the paths that has the field."""
    for path in paths:
        at: Any = row
        for key in path:
            at = at.get(key) if isinstance(at, Mapping) else None
        if isinstance(at, Mapping) and at.get(name) is not None:
            return at
    return None


SHAPES: dict[str, Shape] = {
    "trl": Shape("step, prompt, completion, advantage and the columns of the reward functions",
                 lambda row, _: row.keys() >= set(TRL_OWN), _trl,
                 lambda row, reward: {*TRL_OWN, *(reward.split(",") if reward else _numbers(row))}, repeats=True),
    "verl": Shape("input, output, score, step",
                  lambda row, reward: row.keys() >= {"input", "output", reward or "score"}, _verl,
                  lambda _, reward: {"input", "output", "step", "uid", reward or "score"}),
    **FOREIGN,
    "openai": Shape("messages and choices, with a reward in each choice or a list of them",
                    lambda row, _: _inside(row, RESPONSES, "choices") is not None, _openai,
                    lambda _, reward: {"messages", "choices", "request", "response", "body", "step",
                                       reward or "reward"}),
    "creditscope": Shape("prompt, response and reward, or tokens, logp, reward and group",
                         lambda row, reward: (reward or "reward") in row and ("tokens" in row or (
                             "prompt" in row and not row.keys().isdisjoint(TEXTS))), _ours,
                         lambda _, reward: {"prompt", "prompt_tokens", reward or "reward", *TEXTS, *GROUPS, *BATCHES,
                                         *PER_TOKEN}),
}
"""In the order in which they are tried: our own has the fewest required fields."""
