"""w = −∂loss/∂log π of TRL's unmodified trainers, to compare our TRL rows with.

A real GRPOTrainer or RLOOTrainer is built for each setting. Only the language model is replaced: completions and
log-probs (live, old, reference) come from the batch. Rewards, advantages, masks, normalisers, ratios, bounds and KL are
TRL's own code.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

EOS = 5  # one of the ids of the batches, so that some completions count as finished
MAX_TOKENS = 12  # wider than the batches, so that a denominator taken from the width would differ


def advantage_and_credit(config: str, settings: Mapping[str, Any], batch: Mapping[str, Tensor],
                         dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(B,) A and (B, T) w of TRL under a GRPOConfig or RLOOConfig; advantages are computed in `dtype`.

    A batch has tokens, mask, old, logp, ref, reward and group: sixteen rows, four of each prompt t0 … t3.
    """
    from trl.trainer.utils import split_tensor_dict

    trainer = trainer_of(config, settings)
    steps = trainer.args.steps_per_generation
    leaf = batch["logp"].detach().clone().requires_grad_()
    live = iter(leaf.chunk(steps))  # one part for each accumulated micro-batch

    def look_up(model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        stored = batch["ref" if model is trainer.ref_model else "old"]
        logp = next(live) if torch.is_grad_enabled() else stored  # scoring runs without gradients
        return logp, torch.zeros_like(logp), None  # no entropy, no router loss

    rows = [tokens[tokens != 0].tolist() for tokens in batch["tokens"]]
    generated = rows if config == "RLOOConfig" else (rows, None)
    questions = [{"prompt": f"t{group}", "score": score}
                 for group, score in zip(batch["group"].tolist(), batch["reward"].tolist(), strict=True)]
    with (patch.object(trainer, "_generate_single_turn", lambda *_: generated),
          patch.object(trainer, "_get_per_token_logps_and_entropies", look_up),
          in_dtype(dtype)):
        scored = trainer._generate_and_score_completions(questions)
        assert torch.equal(scored["completion_mask"].bool(), batch["mask"]), "TRL masks other tokens than the batch"
        parts = split_tensor_dict(scored, steps)
        loss = sum(trainer._compute_loss(trainer.model, part) for part in parts)
    return scored["advantages"], -torch.autograd.grad(loss, leaf)[0]


def trainer_of(config: str, settings: Mapping[str, Any]) -> Any:
    """A trainer in train mode over a batch of 16, groups of 4."""
    return _trainer(config, tuple(sorted(settings.items())))


@cache
def _trainer(config: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    chosen = dict(settings)
    trainer = _build(
        config, lambda score, **_: score, [{"prompt": "t0", "score": 0.0}], gradient_checkpointing=False,
        per_device_train_batch_size=16 // chosen.get("gradient_accumulation_steps", 1),
        num_iterations=2,  # several updates per batch: with one, TRL takes π for π_old
        max_completion_length=MAX_TOKENS, **chosen)
    trainer.model.train()
    # The training loop sets this at the start of each step.
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def _build(config: str, reward: Callable[..., Any], rows: list[dict[str, Any]], **settings: Any) -> Any:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    arguments = getattr(trl, config)(output_dir=_folder().name, use_cpu=True, bf16=False, report_to=[],
                                     num_generations=4, **settings)
    return getattr(trl, config.replace("Config", "Trainer"))(
        model=_model_folder(), args=arguments, reward_funcs=reward, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(_model_folder()))


def small_run(callback: Callable[[Any], Any] | None = None, steps: int = 2) -> dict[str, Tensor]:
    """The weights after a real GRPOTrainer has trained for a few steps on the CPU."""
    trainer = _build(
        "GRPOConfig", lambda completions, **_: [text.count("t0") / 4 for text in completions],
        [{"prompt": f"t{i % 4}"} for i in range(8)], per_device_train_batch_size=8, max_completion_length=8,
        max_steps=max(1, steps), learning_rate=1e-2, logging_strategy="no", save_strategy="no", disable_tqdm=True)
    if callback is not None:
        trainer.add_callback(callback(trainer))
    if steps:
        with redirect_stdout(io.StringIO()):  # TRL prints its summary
            trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@contextmanager
def in_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype, which TRL's rewards have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="creditscope-trl-")  # removed when the process ends


@cache
def _model_folder() -> str:
    """A tiny random Llama with six words, saved because with β > 0 TRL loads its reference from disk."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "t0", "t1", "t2", "t3", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = f"{_folder().name}/model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        pad_token_id=0, eos_token_id=EOS, bos_token_id=None)).save_pretrained(folder)
    return folder
