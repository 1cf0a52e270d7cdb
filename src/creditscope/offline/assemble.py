"""A batch of samples as Rollouts. Fields of the file are kept; missing tokens come from the model's tokenizer, missing
log-probs from its forward pass: then every ratio is 1 by construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from creditscope.batch.jsonl import Row, collate
from creditscope.batch.rollouts import Rollouts
from creditscope.errors import CreditscopeError
from creditscope.offline.dumps import Sample
from creditscope.policy.loading import Policy
from creditscope.policy.scoring import score_tokens


@dataclass(frozen=True)
class Assembled:
    """Rollouts, and which of their fields are not the file's."""

    rollouts: Rollouts
    has_tokens: bool = True
    """False where answers are text alone: then the mask is one blank column, and no length is known."""
    has_logp: bool = True
    """False where log π_old is not known, and set to 0."""
    live: Tensor | None = None
    """(B, T) log π of the model."""
    gap: float | None = None
    """max |log π of the model − log π of the file|; None where the file has none."""
    respelled: int = 0
    """Answers whose tokens do not decode to the text that was logged."""


def assemble(samples: Sequence[Sample], dtype: torch.dtype = torch.float32) -> Assembled:
    """The batch without a model."""
    rows = _rows(samples)
    has_logp = any("logp" in row for row in rows)
    if not any("tokens" in row for row in rows):
        rows = [row | {"tokens": [0], "logp": [0.0]} for row in rows]
        return Assembled(_collate(rows, samples, dtype), has_tokens=False, has_logp=False)
    if not has_logp:
        rows = [row | {"logp": [0.0] * len(row.get("tokens", ()))} for row in rows]
    return Assembled(_collate(rows, samples, dtype), has_logp=has_logp)


def assemble_for(policy: Policy, samples: Sequence[Sample], temperature: float) -> Assembled:
    """The batch in the model's tokens, with its log-probs, entropies and Σπ² where the file has none."""
    prompts = [_prompt(policy, sample) for sample in samples]
    rows, respelled = [], 0
    for sample, prompt, row in zip(samples, prompts, _rows(samples), strict=True):
        if "tokens" not in row or sample.spelled:
            row = _tokenised(policy, sample, row)
            respelled += policy.decode(row["tokens"]) != sample.text
        _check_ids(policy, sample, row["tokens"])
        room = getattr(policy.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if room is not None and (length := len(prompt) + len(row["tokens"])) > room:
            raise CreditscopeError(f"{sample.where}: prompt and answer have {length:,} tokens, over the context of "
                                   f"{room:,} of model {policy.name!r}; drop that row, or take a model with more room")
        row.setdefault("pieces", policy.pieces(row["tokens"]))
        row.setdefault("text", policy.decode(row["tokens"]))
        rows.append(row)
    known = sum("logp" in row for row in rows)
    recompute = not known or (known < len(rows) and any(sample.spelled for sample in samples))
    if recompute:  # for the whole batch, also where the model tokenises a single text differently
        rows = [row | {"logp": [0.0] * len(row["tokens"])} for row in rows]
    dtype = torch.promote_types(policy.model.dtype, torch.float32)
    rollouts = replace(_collate(rows, samples, dtype), prompt_ids=prompts).to(policy.device)
    found = score_tokens(policy, prompts, rollouts.tokens, rollouts.mask, temperature)
    live = found.logp.to(dtype)
    gap = float((live - rollouts.logp).abs()[rollouts.mask].max()) if not recompute else None
    rollouts = replace(rollouts, logp=live if recompute else rollouts.logp,
                       entropy=found.entropy if rollouts.entropy is None else rollouts.entropy,
                       collision=found.collision if rollouts.collision is None else rollouts.collision)
    return Assembled(rollouts, live=live, gap=gap, respelled=respelled)


def _rows(samples: Sequence[Sample]) -> list[Row]:
    """Samples as `collate` takes them. The text of a chat is made once for all samples that share it."""
    groups: dict[object, int] = {}  # key -> number, in the order of their first rows
    chats = {id(sample.prompt): sample.prompt for sample in samples if isinstance(sample.prompt, list)}
    shown = {key: "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
             for key, messages in chats.items()}
    rows = []
    for sample in samples:
        row: Row = {"reward": sample.reward, "group": groups.setdefault(sample.key, len(groups))} | sample.fields
        if sample.prompt is not None:
            row["prompt"] = sample.prompt if isinstance(sample.prompt, str) else shown[id(sample.prompt)]
        rows.append(row | ({} if sample.text is None else {"text": sample.text}))
    return rows


def _collate(rows: list[Row], samples: Sequence[Sample], dtype: torch.dtype = torch.float32) -> Rollouts:
    return collate(rows, dtype, [sample.where for sample in samples])


def _prompt(policy: Policy, sample: Sample) -> list[int]:
    """The prompt's tokens: the file's, or the tokenizer's, messages through its chat template."""
    if sample.prompt_tokens is not None:
        ids = sample.prompt_tokens
    elif isinstance(sample.prompt, str):
        ids = _encoded(sample, policy.encode, sample.prompt)
    elif sample.prompt is None:
        raise CreditscopeError(f"{sample.where}: no prompt, and a model needs one; give prompt or prompt_tokens")
    else:
        ids = _templated(policy, sample)
    if not ids:
        raise CreditscopeError(f"{sample.where}: the prompt is empty; a model needs at least one token to go on from")
    _check_ids(policy, sample, ids)
    return ids


def _templated(policy: Policy, sample: Sample) -> list[int]:
    if policy.tokenizer.chat_template is None:
        raise CreditscopeError(f"{sample.where}: the prompt is a chat, and the tokenizer of {policy.name!r} has no "
                               f"chat template; take the model that was trained, or give the prompt as text")
    try:
        text = policy.tokenizer.apply_chat_template(sample.prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is the model author's program and may raise anything
        raise CreditscopeError(f"{sample.where}: the chat template of {policy.name!r} refuses the messages: "
                               f"{error}") from None
    return _encoded(sample, policy.tokenize, text)


def _encoded(sample: Sample, encode: Callable[[str], list[int]], text: str) -> list[int]:
    try:
        return encode(text)
    except (UnicodeEncodeError, TypeError):  # a lone surrogate: valid in JSON, not in UTF-8
        raise CreditscopeError(f"{sample.where}: the text has a lone surrogate and cannot be tokenised; write whole "
                               f"characters") from None


def _tokenised(policy: Policy, sample: Sample, row: Row) -> Row:
    """The row in the model's tokens; the file's fields are kept where both tokenise the text alike."""
    if sample.text is None:
        raise CreditscopeError(f"{sample.where}: no text of the answer, and its tokens are not the model's")
    ids = _encoded(sample, policy.tokenize, sample.text)
    alike = sample.spelled and policy.pieces(ids) == row["pieces"]
    return {name: value for name, value in row.items() if alike or name not in sample.fields} | {"tokens": ids}


def _check_ids(policy: Policy, sample: Sample, ids: Sequence[int]) -> None:
    size = policy.model.get_input_embeddings().weight.shape[0]
    wrong = next((i for i in ids if not 0 <= i < size), None)
    if wrong is not None:
        raise CreditscopeError(f"{sample.where}: token {wrong} is not one of the {size:,} of model {policy.name!r}; "
                               f"give the model that sampled it, or leave the tokens out")
