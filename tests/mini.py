"""A policy and a task for tests of the lab's bookkeeping: a run takes a tenth of the packaged model's time.

    Config(model=mini.model(), task=mini.TASK, ...)       with the fixture `mini_task`, or `mini.known()` around it

The model is random, with the packaged model's tokenizer. Its answers end by themselves or at the limit, and the task
judges them by a sum of their letters, so that groups are mixed, lengths differ and gradients are not 0. What depends
on what a model has learnt, or on the arithmetic task, is tested on the packaged model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import torch

from creditscope import tasks
from creditscope.policy.loading import TINY
from creditscope.tasks import Problem, Step, Verdict

TASK = "coins"
FOLDER = tempfile.TemporaryDirectory(prefix="creditscope-mini-")
WIDTH = 4  # characters of a step


@dataclass(frozen=True)
class Coins:
    """A short question, and an answer whose reward is 0 or 1 by its checksum."""

    name: str = TASK
    max_tokens: int = 12
    files: ClassVar[tuple[Path, ...]] = ()

    def problems(self, split: str, seed: int = 0) -> Iterator[Problem]:
        every = (Problem(f"{split}-{seed}-{i}", f"Question: {10 + 7 * seed % 50 + i % 40} + {i % 9}\nAnswer:\n", "7")
                 for i in itertools.count(0 if split == "train" else 1000))
        return every if split == "train" else itertools.islice(every, 100)

    def verify(self, problem: Problem, text: str) -> Verdict:
        cuts = [*range(0, len(text), WIDTH), len(text)]
        steps = tuple(Step(a, b, coin(text[a:b])) for a, b in itertools.pairwise(cuts) if a < b)
        return Verdict(coin(problem.prompt + text), steps)


def coin(text: str) -> float:
    """0 or 1, the same on every machine."""
    return float(zlib.crc32(text.encode()) & 1)


@contextlib.contextmanager
def known() -> Iterator[None]:
    """The task can be found by its name."""
    with mock.patch.object(tasks, "TASKS", {**tasks.TASKS, TASK: f"{__name__}:Coins"}):
        yield


@functools.cache
def model() -> str:
    """The model's folder: one layer of width 16, and an end token that is likely now and then."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(FOLDER.name) / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(TINY) / name, folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        made = LlamaForCausalLM(LlamaConfig(
            vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            initializer_range=0.2))
        made.lm_head.weight[2] *= 6
    made.float().save_pretrained(folder)
    return str(folder)
