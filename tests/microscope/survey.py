"""Every causal language model of transformers under the microscope: run by hand, not collected.

    [SHAPE=4x4] PYTHONPATH=src:tests python tests/microscope/survey.py [name ...]

Each architecture is built as a tiny random model, where that is possible by shrinking its config; the microscope's Gram
is compared with a loop of three backwards, parameter by parameter, and a loss on one row alone must give one row alone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from creditscope import CreditscopeError
from creditscope.microscope.scope import Microscope
from small_models import VOCAB, apart, batch, gradient, grams, loop, objective, total

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "word_embed_proj_dim": 32,
    "embedding_size": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "head_dim": 8, "kv_channels": 8, "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "dff": 48, "inner_dim": 48, "shared_expert_intermediate_size": 48,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "max_position_embeddings": 64, "n_positions": 64,
    "n_ctx": 64, "rotary_dim": 8, "state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_dt_rank": 4, "n_groups": 1,
    "mamba_n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8,
    "mamba_chunk_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "attention_hidden_size": 32, "lru_width": 32, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4,
    "num_kv_shared_layers": 0, "global_head_dim": 8, "block_size": 8, "num_dense_layers": 1, "first_k_dense_replace": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16, "attention_window_size": 16,
    "attention_types": [[["global", "local"], 1]], "num_memory_blocks": 2, "memory_size": 8,
}
SHAPE = tuple(int(n) for n in os.environ.get("SHAPE", "3x8").split("x"))
"""Rows and positions. Equal numbers, also equal to the 4 heads, are where one axis is mistaken for another."""
OFF = ("dropout", "pdrop", "drop_prob", "drop_rate", "jitter")


class TooLong(Exception):
    pass


def _ring(*_: Any) -> None:
    raise TooLong("took more than 40 seconds")


LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers", "layer_type",
          "layer_block_types")
TRIES: list[tuple[set[str], dict[str, Any]]] = [
    (set(), {}), ({"head_dim"}, {}), ({"num_key_value_heads"}, {}), ({"head_dim", "num_key_value_heads"}, {}),
    (set(), {"head_dim": 16}), (set(), {"num_key_value_heads": 4}), ({"n_groups", "num_heads", "head_dim"}, {}),
    (set(), {"num_heads": 8, "head_dim": 8}), (set(), {"mamba_n_heads": 8, "mamba_d_head": 8}),
    (set(), {"mamba_d_ssm": 64, "mamba_n_heads": 4}), (set(), {"num_hidden_layers": 4}),
    (set(), {"num_hidden_layers": 4, "head_dim": 16}), (set(), {"num_hidden_layers": 6}),
    ({"num_hidden_layers", "n_layer", "num_layers"}, {}), ({"num_experts"}, {}), (set(), {"is_decoder": True}),
    ({"hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"}, {}),
    ({"num_hidden_layers", "head_dim"}, {}),
]
"""What to leave alone and what to set besides SIZES, until the model can be built and run."""


def read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # Gemma 4 refuses to name what differs from layer to layer
        return None


def shrink(config: Any, leave: set[str], extra: dict[str, Any]) -> Any:
    """A small config of the same class: through the constructor, so that what it derives is derived again."""
    fields = set(config.to_dict())
    settings = {name: size for name, size in SIZES.items() if name in fields and name not in leave}
    settings |= {name: value for name, value in extra.items() if name in fields}
    settings |= {name: 0.0 for name in fields if any(word in name for word in OFF)
                 and isinstance(read(config, name), float)}
    depth = settings.get("num_hidden_layers", 2)
    for name in LAYERS:
        kinds = read(config, name) if name in fields else None
        if isinstance(kinds, list) and kinds:
            settings[name] = (list(dict.fromkeys(kinds)) + kinds)[:depth]
    nested = {name: shrink(read(config, name), leave, extra) for name in fields
              if hasattr(read(config, name), "to_dict")}
    try:
        return type(config)(**settings, **nested)
    except Exception:
        return type(config)(**{k: v for k, v in settings.items() if k not in LAYERS}, **nested)


def tiny(architecture: Any, config_class: Any) -> nn.Module:
    """The first small model of this architecture that runs; the first error where none does."""
    first: Exception | None = None
    ways = [(torch.float64, *some) for some in TRIES] + [(torch.float32, *some) for some in TRIES[:3]]
    for dtype, leave, extra in ways:
        for text in (False, True):
            try:
                model = assemble(architecture, config_class, leave, extra, text).to(dtype)
                objective(model, *batch(*SHAPE)).backward()
                model.zero_grad(set_to_none=True)
                return model
            except TooLong as error:
                if "seconds" in str(error):
                    raise
                first = first or error
            except Exception as error:
                first = first or error
    assert first is not None
    raise first


def assemble(architecture: Any, config_class: Any, leave: set[str], extra: dict[str, Any], text: bool) -> nn.Module:
    config = shrink(config_class(), leave, extra)
    if text:  # a model of text whose config is inside that of a model of more
        config = config.get_text_config() if config.get_text_config() is not config else config.decoder
    torch.manual_seed(0)
    model = architecture(config).eval()
    size = sum(p.numel() for p in model.parameters())
    if size > 20_000_000:
        raise TooLong(f"still has {size / 1e6:.0f} M parameters")
    for p in model.parameters():
        if p.dim() < 2:
            p.data += 0.1 * torch.randn_like(p)
    if "num_experts" in str(config):
        model.set_experts_implementation("eager")
    return model


def measured(model: nn.Module, ids: Tensor, credit: Tensor) -> Microscope:
    model.zero_grad(set_to_none=True)
    with Microscope(model) as scope:
        objective(model, ids, credit).backward()
    return scope


def examine(model: nn.Module) -> str:
    ids, credit = batch(*SHAPE)
    rows = loop(model, [lambda i=i: objective(model, ids[i:i + 1], credit[i:i + 1]) for i in range(SHAPE[0])])
    want = grams(rows)
    again = total(grams(loop(model, [lambda i=i: objective(model, ids, credit * (torch.arange(SHAPE[0]) == i)[:, None])
                                     for i in range(SHAPE[0])])))
    mixes = apart(again, total(want))
    plain = gradient(model, lambda: objective(model, ids, credit))
    scope = measured(model, ids, credit)
    largest = max(float(g.abs().max()) for g in plain.values())
    off = max(float((p.grad - plain[name]).abs().max()) / largest for name, p in model.named_parameters()
              if p.grad is not None)
    whole = total(want)
    worst = max((float((k - want[name]).abs().max() / whole.abs().max()), name) for name, k in scope.layers.items())
    fine = 1e-6 if next(model.parameters()).dtype == torch.float64 else 1e-4
    right = worst[0] < fine and apart(scope.gram, whole) < fine and off < fine and scope.coverage == 1.0
    state = "ok" if right else "MIXES" if mixes > 1e-6 else "WRONG"
    return (f"{state:7s} total {apart(scope.gram, whole):.0e} worst {worst[0]:.0e} grad {off:.0e} coverage "
            f"{scope.coverage:.3f} {len(scope.layers)} parameters, alone/batch {mixes:.0e}")


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MAPPING

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _ring)
    counts: Counter[str] = Counter()
    for config_class, architecture in sorted(MAPPING.items(), key=lambda pair: pair[0].model_type):
        architecture = architecture[0] if isinstance(architecture, tuple) else architecture
        name = architecture.__name__
        if sys.argv[1:] and not any(word.lower() in name.lower() for word in sys.argv[1:]):
            continue
        line, stage = "", "build"
        signal.alarm(40)
        try:
            model = tiny(architecture, config_class)
            stage = "scope"
            line = examine(model)
        except TooLong as error:
            line = f"long    {stage}: {error}"
        except CreditscopeError as error:
            line = f"REFUSED {str(error)[:300]}"
        except Exception as error:
            word = "cannot" if stage != "scope" else "BROKE"
            line = f"{word:7s} {stage}: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"[:260]
        finally:
            signal.alarm(0)
        counts[line.split()[0]] += 1
        print(f"{name:36s} {line}", flush=True)
        gc.collect()
    print(dict(counts))


if __name__ == "__main__":
    main()
