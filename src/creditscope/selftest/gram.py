"""The Gram matrix against one backward per rollout and every inner product of the gradients.

    K_ij = ⟨g_i, g_j⟩        g_i: the gradient of rollout i's part of the loss, by its own backward
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from creditscope.microscope import kernels, routes
from creditscope.microscope.scope import Microscope
from creditscope.selftest.check import WorstError, worst_of

ROWS, LENGTH = 4, 12
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
                         "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0,
                         "bos_token_id": 1, "eos_token_id": 2}
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama_tied": ("Llama", SMALL | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64, "attn_pdrop": 0.0,
                      "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 8}),
}
"""Small random models: plain, tied head, Conv1D with biases and learned positions, biases at q, k, v, norms at q, k."""


def random_model(name: str, device: torch.device, dtype: torch.dtype = torch.float64) -> Any:
    """A small random model in eval mode, with random scales and biases."""
    import transformers

    kind, settings = SHAPES[name]
    config_class = transformers.GPT2Config if kind == "GPT2" else getattr(transformers, f"{kind}Config")
    model_class = transformers.GPT2LMHeadModel if kind == "GPT2" else getattr(transformers, f"{kind}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**settings)).eval()
        for p in model.parameters():
            if p.dim() == 1:
                p.data += 0.1 * torch.randn_like(p)
    return model.to(device, dtype)


def packaged_model(device: torch.device, dtype: torch.dtype = torch.float64) -> Any:
    from creditscope.policy.loading import load_policy

    return load_policy("tiny", device=str(device)).model.to(dtype).eval()


def batch(model: Any, rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Token ids (rows, length) and the w of each predicted token."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=draw)
    credit = torch.randn(rows, length - 1, generator=draw, dtype=torch.float64)
    device = next(model.parameters()).device
    return ids.to(device), credit.to(device)


def objective(model: Any, ids: Tensor, credit: Tensor) -> Tensor:
    """Σ_it w_it log π(y_it)."""
    logits = model(input_ids=ids, use_cache=False).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    value: Tensor = (chosen * credit.to(chosen.dtype)).sum()
    return value


def by_loop(model: Any, ids: Tensor, credit: Tensor) -> dict[str, Tensor]:
    """Rows (N, P) of every parameter in float64, by N backwards."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i in range(len(ids)):
        found = torch.autograd.grad(objective(model, ids[i:i + 1], credit[i:i + 1]), list(parameters.values()))
        for name, g in zip(parameters, found, strict=True):
            rows[name].append(g.detach().double().flatten().cpu())
    return {name: torch.stack(some) for name, some in rows.items()}


def observe(model: Any, ids: Tensor, credit: Tensor, **settings: Any) -> Microscope:
    """One forward and one backward under the microscope; the gradients are cleared again."""
    with Microscope(model, **settings) as scope:
        objective(model, ids, credit).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return scope


def apart(ours: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> dict[str, float]:
    """max|ΔK| / max|K| of every parameter and, under `all parameters`, of their sum."""
    true = {name: g @ g.T for name, g in rows.items()}
    pairs = {name: (ours[name].cpu(), k) for name, k in true.items()}
    pairs["all parameters"] = sum(ours.values()).cpu(), sum(true.values())  # type: ignore[union-attr, assignment]
    return {name: float((k - t).abs().max() / t.abs().max()) for name, (k, t) in pairs.items()}


def packaged(device: torch.device) -> WorstError:
    model = packaged_model(device)
    given = batch(model, length=24)
    return worst_of(apart(observe(model, *given).layers, by_loop(model, *given)), "parameters of the packaged model")


def shapes(device: torch.device) -> WorstError:
    errors: dict[str, float] = {}
    for name in SHAPES:
        model = random_model(name, device)
        given = batch(model)
        found = apart(observe(model, *given).layers, by_loop(model, *given))
        errors |= {f"{name} {parameter}": error for parameter, error in found.items()}
    return worst_of(errors, f"parameters of {len(SHAPES)} architectures")


def checkpointed(device: torch.device) -> WorstError:
    """Gradient checkpointing, both kinds: each layer's forward runs twice and must count once."""
    errors: dict[str, float] = {}
    for reentrant in (False, True):
        model = random_model("llama_tied", device)
        given = batch(model)
        rows = by_loop(model, *given)
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        found = apart(observe(model, *given).layers, rows)
        errors |= {f"{'reentrant ' if reentrant else ''}{name}": error for name, error in found.items()}
    return worst_of(errors, "parameters under checkpointing")


def own_precision(device: torch.device) -> WorstError:
    """The packaged model in float32 on the device's kernels, against the loop in float64."""
    model = packaged_model(device, torch.float32)
    given = batch(model, length=24)
    return worst_of(apart(observe(model, *given).layers, by_loop(copy.deepcopy(model).double(), *given)),
                    "parameters in float32")


def bfloat16(device: torch.device) -> WorstError:
    """The packaged model in bfloat16, against one backward per rollout in bfloat16."""
    model = packaged_model(device, torch.bfloat16)
    given = batch(model, rows=8, length=64)
    found = apart(observe(model, *given).layers, by_loop(model, *given))
    return WorstError(found["all parameters"], f"all {len(found) - 1} parameters together")


def gpu_routes(device: torch.device) -> WorstError:
    """Every route of this GPU against float64 products of the same bfloat16 factors."""
    errors: dict[str, float] = {}
    for n, t, d_out, d_in in ((8, 64, 256, 512), (5, 100, 200, 264), (8, 300, 1024, 768)):
        draw = torch.Generator().manual_seed(n + t)
        delta, a = (torch.randn(n, t, d, generator=draw).to(device, torch.bfloat16) for d in (d_out, d_in))
        rows = torch.bmm(delta.double().transpose(1, 2), a.double()).flatten(1)
        true = rows @ rows.T
        for name in usable_routes():
            gram = routes.ROUTES[name](delta, a)[1]
            errors[f"{name} {n}×{t}×{d_out}×{d_in}"] = float((gram - true).abs().max() / true.abs().max())
    return worst_of(errors, f"cases of the routes {', '.join(usable_routes())}")


def usable_routes() -> tuple[str, ...]:
    """The `routes` on this machine: Triton's, and on Hopper the fused one."""
    if kernels.triton is None:
        return ("chunks",)
    hopper = torch.cuda.get_device_capability()[0] == 9 and kernels.gluon is not None
    return ("chunks", "pass", "ghost", "fused") if hopper else ("chunks", "pass")
