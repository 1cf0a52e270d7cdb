"""Real TRL trainers around a tiny random Llama with a few words: small enough to train in a second, on a CPU."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from itertools import product
from typing import Any

import torch

from creditscope.selftest.trl_live import in_dtype
from depth import FULL

WORDS = ["<pad>", "<eos>", "a", "b", "c", "d", "e", "f"]
FOLDER = tempfile.TemporaryDirectory(prefix="creditscope-trl-")


@cache
def settle() -> None:
    """What is loaded by now is garbage to nobody: TRL's full collection after each training looks at the rest alone.

    That collection takes 0.4 s with the libraries' objects in it, and a training of this size 0.2 s.
    """
    from trl import DPOTrainer, GRPOTrainer, RLOOTrainer  # noqa: F401  (loaded when they are asked for)

    gc.collect()
    gc.freeze()


@cache
def model_folder(dtype: str) -> str:
    """The model on disk: with β > 0 TRL loads its reference from there.

    The dtype has no default: `cache` would keep model_folder() and model_folder("float64") apart, and ranks forked
    after the first would both write the folder at once.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = f"{FOLDER.name}/{dtype}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    # The draws hang on the default dtype: whoever asks first must not decide what the model is.
    with in_dtype(torch.float32):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.3))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def reward(completions: list[str], **_: Any) -> list[float]:
    """Answers with many a's are good, in grades: few groups are unanimous."""
    return [float(text.count("a")) / 4 for text in completions]


PROMPTS = [" ".join(WORDS[2 + (i + j) % 6] for j in range(1 + i % 3)) for i in range(24)]


def trainer(kind: Any = None, *, dtype: str = "float64", peft: Any = None, funcs: Any = None, extra: Any = None,
            prompts: list[str] = PROMPTS, **settings: Any) -> Any:
    """A trainer just as its users make it: R = 4, sixteen rows a generation."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    settle()
    kind = kind or trl.GRPOTrainer
    config = trl.RLOOConfig if issubclass(kind, trl.RLOOTrainer) else trl.GRPOConfig
    folder = model_folder(dtype)
    usual: dict[str, Any] = {
        "output_dir": FOLDER.name, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
        "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 8, "max_steps": 3,
        "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2, "disable_tqdm": True, "beta": 0.0,
        "model_init_kwargs": {"dtype": "auto"}}
    return kind(model=folder, args=config(**(usual | settings)), reward_funcs=funcs or reward,
                train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
                processing_class=AutoTokenizer.from_pretrained(folder), peft_config=peft, **(extra or {}))


def preferred(count: int = 24) -> list[dict[str, str]]:
    """Preference pairs of one to five words, none of them equal, of all combinations of lengths."""
    def words(i: int, k: int) -> str:
        return " ".join(WORDS[2 + (i * k + j * (k + 1)) % 6] for j in range(1 + i * k % 5))

    return [{"prompt": words(i, 1) + " ", "chosen": words(i, 2), "rejected": words(i, 3) + " f"} for i in range(count)]


def dpo_trainer(kind: Any = None, *, dtype: str = "float64", peft: Any = None, rows: Any = None,
                **settings: Any) -> Any:
    """A DPOTrainer as its users make it, with four pairs per step."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    settle()
    folder = model_folder(dtype)
    usual: dict[str, Any] = {
        "output_dir": FOLDER.name, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
        "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "save_strategy": "no",
        "learning_rate": 1e-2, "disable_tqdm": True, "model_init_kwargs": {"dtype": "auto"}}
    return (kind or trl.DPOTrainer)(
        model=folder, args=trl.DPOConfig(**(usual | settings)), train_dataset=Dataset.from_list(rows or preferred()),
        processing_class=AutoTokenizer.from_pretrained(folder), peft_config=peft)


def pairs(one: Iterable[str], other: Iterable[str]) -> list[tuple[str, str]]:
    """Each with each at full depth; in `make test` all of either side, in as few pairs as that takes."""
    one, other = list(one), list(other)
    if FULL:
        return list(product(one, other))
    return [(one[i % len(one)], other[i % len(other)]) for i in range(max(len(one), len(other)))]


def in_double() -> AbstractContextManager[None]:
    """TRL holds rewards in torch's default dtype; in float64 its arithmetic can be compared to the last digits."""
    return in_dtype(torch.float64)


def weights(trained: Any) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])
