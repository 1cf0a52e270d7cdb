"""Tiny random language models, and the stupid way to their per-rollout gradients: one backward a rollout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

VOCAB = 50
COMMON: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
                          "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
                          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, Any] = {**COMMON, "head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", COMMON),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", HEADS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", HEADS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB,
                                               "n_positions": 64, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", COMMON),
    "phi": ("PhiForCausalLM", "PhiConfig", COMMON),
    "mistral": ("MistralForCausalLM", "MistralConfig", COMMON),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", COMMON),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**COMMON, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**HEADS, **EXPERTS}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build(family: str, dtype: torch.dtype = torch.float64, experts: str = "eager", **changes: Any) -> Any:
    """A tiny model in eval mode whose one-dimensional parameters (scales, biases) are not all 1 or 0."""
    architecture, config, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**{**settings, **changes})).eval()
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation(experts)
    return model.to(dtype)


def batch(n: int = 4, t: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids (n, t) and a credit for each of the t − 1 tokens that are predicted, in float64."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(3, VOCAB, (n, t), generator=draw),
            torch.randn(n, t - 1, generator=draw, dtype=torch.float64))


def objective(model: Any, ids: Tensor, credit: Tensor, **kwargs: Any) -> Tensor:
    """Σ_it w_it log π(y_it)."""
    logits = model(input_ids=ids, use_cache=False, **kwargs).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return (chosen * credit.to(chosen.dtype)).sum()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The plain gradient, parameter by parameter; .grad is left as it was."""
    parameters = trainable(model)
    found = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(parameters.items(), found, strict=True)}


def loop(model: nn.Module, losses: list[Callable[[], Tensor]]) -> dict[str, Tensor]:
    """Rows (N, P) in float64 by N separate backwards: rollout i's loss is losses[i]."""
    each = [gradient(model, loss) for loss in losses]
    return {name: torch.stack([g[name].flatten().double() for g in each]) for name in each[0]}


def double(model: nn.Module) -> Any:
    """A float64 copy, with experts that run in float64."""
    twin = copy.deepcopy(model).double()
    if hasattr(getattr(twin, "config", None), "num_experts_per_tok"):
        twin.set_experts_implementation("eager")  # type: ignore[operator]
    return twin


def by_loop(model: Any, ids: Tensor, credit: Tensor) -> dict[str, Tensor]:
    """Rows of `objective`, one rollout at a time."""
    return loop(model, [lambda i=i: objective(model, ids[i:i + 1], credit[i:i + 1]) for i in range(len(ids))])


def grams(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: g @ g.T for name, g in rows.items()}


def total(layers: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(layers.values())).sum(0)


def apart(ours: Tensor, other: Tensor) -> float:
    """max|Δ| / max|other|."""
    return float((ours - other).abs().max() / other.abs().max().clamp(min=1e-300))
