"""A short supervised warm-up on the train split, so that a model's groups are mixed: some answers right, some wrong.

    loss = −(1/Σ_i L_i) Σ_i Σ_t log π(y_it | prompt_i, y_i<t)        y_i: demonstration i and the end token

Prompts are encoded and answers are scored by the trainer's own functions, so that reinforcement meets the model where
the warm-up left it. Dropout is off, as it is there.
"""

from __future__ import annotations

import json
import math
import operator
import random
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken

from creditscope.errors import CreditscopeError
from creditscope.files.memory import enough_memory
from creditscope.files.writing import check_new_folder, new_folder
from creditscope.lab.evaluate import evaluate
from creditscope.lab.setup import make_optimizer
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import padded, token_logp
from creditscope.policy.scoring import encode_exactly
from creditscope.policy.vetting import tokenizing
from creditscope.runs.config import Config
from creditscope.tasks import Problem, Task, find_task

RISE = 0.05
"""Share of the steps in which the learning rate rises; it falls as a cosine over the others."""
SPARE = 4
"""Problems that are read of a file for each example that is needed: some answers are too long."""
POOL = 16
"""Batches that are sorted by length together: little padding, and examples still meet at random."""
LOGITS = {"cpu": 2**26, "cuda": 2**30}
"""Logits of a forward pass, unless a single row has more: with their gradients at most 12 bytes each."""
MOST_WORDS = 64
"""Words that a closed vocabulary may learn. A few are a game's moves; more are another language."""


class Example(NamedTuple):
    """Token ids of a prompt, and of the answer to learn, end token included."""

    prompt: list[int]
    answer: list[int]


def warm_up(config: Config, out: Path, versions: dict[str, Any], *, batch: int = 64,
            epochs: int | None = None) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Train for config.steps batches, or for `epochs` passes, and write the model to `out`, whole or not at all.

    Yields each evaluation and each step's loss. Returns what is written to warmup.json.
    """
    start = time.perf_counter()
    check_new_folder(out)
    policy = load_policy(config.model, device=config.device, dtype=config.dtype, chat=config.chat, seed=config.seed)
    task = find_task(config.task, **config.task_options)
    max_tokens = config.max_tokens or task.max_tokens
    problems = read_problems(task, config, None if epochs else config.steps * batch)
    words = learn_words(policy, [demonstration(problem) for problem in problems], config.seed)
    examples = encode_examples(policy, problems, max_tokens)
    steps = math.ceil(epochs * len(examples) / batch) if epochs else config.steps
    config = replace(config, steps=steps, schedule="cosine", warmup=math.ceil(RISE * steps))
    optimizer = make_optimizer(policy, config)

    before = evaluate(policy, task, config, max_tokens) if config.eval_problems else {}
    yield {"step": 0, "steps": steps, "examples": len(examples), **before}
    losses: list[float] = []
    began = time.perf_counter()
    for step, chosen in enumerate(deal_out(examples, batch, steps, config.seed)):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate(step)
        losses.append(descend(policy, optimizer, chosen, config))
        yield {"step": step + 1, "steps": steps, "loss": losses[-1], "seconds": time.perf_counter() - began}
    after = evaluate(policy, task, config, max_tokens) if config.eval_problems else {}
    yield {"step": steps, "steps": steps, **after}

    names = ("model", "task", "steps", "lr", "seed", "dtype", "chat")
    notes = {"settings": {name: getattr(config, name) for name in names} | {
                 "epochs": epochs, "batch": batch, "max_tokens": max_tokens},
             "versions": versions, "examples": len(examples), "left_out": len(problems) - len(examples),
             "new_words": words, "losses": losses, "before": before, "after": after,
             "seconds": time.perf_counter() - start}
    with whole(out) as folder:
        policy.save(folder)
        (folder / "warmup.json").write_text(json.dumps(notes, indent=2, allow_nan=False) + "\n")
    return notes


# -- what is learned -------------------------------------------------------------------------------------------------


def demonstration(problem: Problem) -> str:
    """The text to learn: the problem's solution where the task has one, else its answer."""
    text = str(problem.meta.get("solution") or problem.answer)
    if not text:
        raise CreditscopeError(f"problem {problem.id} has neither a solution nor an answer to learn from; give its row "
                               f"an 'answer' or a 'solution', or leave it out")
    return text


def read_problems(task: Task, config: Config, count: int | None) -> list[Problem]:
    """Enough problems of the train split for `count` examples, or all of them."""
    problems = task.problems("train", config.seed)
    # A split that ends is a list, and its iterator knows how long it is; one that is generated does not.
    ends = operator.length_hint(problems) > 0
    if count is None and not ends:
        raise CreditscopeError(f"--epochs: the train split of task {config.task!r} has no end; give --steps")
    found = list(islice(problems, count and count * (SPARE if ends else 1)))
    if not found:
        raise CreditscopeError(f"task {config.task!r} has no train problems")
    return found


def learn_words(policy: Policy, texts: Sequence[str], seed: int) -> list[str]:
    """Give a tokenizer with a closed vocabulary the words of the texts that it does not know, and the model their rows.

    `tiny` knows no `up` and no `down`. A tokenizer that can spell every word has nothing to learn.
    """
    tokenizer = policy.tokenizer
    if tokenizer.unk_token_id is None or not tokenizer.is_fast:
        return []
    with tokenizing(policy.name):
        found = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    new = sorted({text[a:b].strip() for text, ids, spans in zip(texts, found["input_ids"], found["offset_mapping"],
                                                                strict=True)
                  for i, (a, b) in zip(ids, spans, strict=True) if i == tokenizer.unk_token_id} - {""})
    if len(new) > MOST_WORDS:
        raise CreditscopeError(f"the tokenizer of {policy.name!r} does not know {len(new)} words of the answers, such "
                               f"as {', '.join(map(repr, new[:3]))}, and can be taught {MOST_WORDS}; take a model with "
                               f"a larger vocabulary")
    if new:
        tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in new])
        torch.manual_seed(seed)  # new rows start at random
        policy.model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return new


def encode_examples(policy: Policy, problems: Sequence[Problem], max_tokens: int) -> list[Example]:
    """Prompts as the sampler reads them, each with its demonstration and the end token.

    An answer that does not fit into `max_tokens`, or into the model's context, is left out: cut, it would teach the
    model not to end.
    """
    room = getattr(policy.model.config.get_text_config(decoder=True), "max_position_embeddings", math.inf)
    examples = []
    for problem in problems:
        answer = [*encode_exactly(policy, demonstration(problem), f"problem {problem.id}"), policy.end[0]]
        prompt = policy.encode(problem.prompt)
        if len(answer) <= max_tokens and len(prompt) + len(answer) <= room:
            examples.append(Example(prompt, answer))
    if not examples:
        raise CreditscopeError(f"none of {len(problems)} answers has at most {max_tokens} tokens, its end included, "
                               f"and room behind its prompt in the context of {room}; raise --max-tokens, or take a "
                               f"model with more room")
    return examples


# -- how it is learned -----------------------------------------------------------------------------------------------


def deal_out(examples: Sequence[Example], size: int, steps: int, seed: int) -> Iterator[list[Example]]:
    """`steps` batches, epoch after epoch. Those of a pool are cut from examples in the order of their length."""
    rng = random.Random(f"warmup/{seed}")
    order: list[Example] = []
    while len(order) < steps * size:
        order += rng.sample(examples, len(examples))
    order = order[:steps * size]
    for start in range(0, len(order), POOL * size):
        pool = sorted(order[start:start + POOL * size], key=lambda e: len(e.prompt) + len(e.answer))
        batches = [pool[i:i + size] for i in range(0, len(pool), size)]
        rng.shuffle(batches)
        yield from batches


@enough_memory("passing the examples through the model", "lower --batch or --max-tokens")
def descend(policy: Policy, optimizer: torch.optim.Optimizer, batch: Sequence[Example], config: Config) -> float:
    """One step of the optimiser on a batch; the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    loss = backward(policy, batch, LOGITS.get(policy.device.type, LOGITS["cpu"]))
    norm = float(torch.nn.utils.clip_grad_norm_(policy.trainable().values(), config.clip_norm or torch.inf))
    if not math.isfinite(norm):
        raise CreditscopeError(f"the gradient's norm is {norm} after a loss of {loss:.4g}; nothing was written. Lower "
                               f"--lr, or use --dtype float32")
    optimizer.step()
    return loss


def backward(policy: Policy, batch: Sequence[Example], logits: int) -> float:
    """∇ of −(1/Σ_i L_i) Σ_it log π(y_it), so many rows at once as `logits` allows; returns that loss."""
    count = sum(len(example.answer) for example in batch)
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    rows = max(1, logits // (vocabulary * (max(len(example.answer) for example in batch) + 1)))
    total = torch.zeros((), device=policy.device)
    for start in range(0, len(batch), rows):
        part = batch[start:start + rows]
        tokens, mask = padded([example.answer for example in part], policy.device)
        logp = token_logp(policy, [example.prompt for example in part], tokens, mask, temperature=1.0)
        loss = -logp.sum() / count
        loss.backward()  # type: ignore[no-untyped-call]
        policy.collect()
        total = total + loss.detach()
    return float(total)


# -- what is left ----------------------------------------------------------------------------------------------------


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when the block ends well; else nothing is left."""
    try:
        with new_folder(folder) as part:
            yield part
    except (OSError, SafetensorError) as error:
        raise CreditscopeError(f"cannot write {folder}: {error}; nothing is left. Make room and start again") from None
