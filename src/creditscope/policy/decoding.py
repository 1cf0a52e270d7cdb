"""One token at a time for many rows, with a KV cache from which finished rows are removed.

Two decoders with one interface: `Slots` is fast and needs a model that takes a 4-D mask; `Growing` works for all.

    step(token)                 (n,) one token per row -> (n, V) logits of the next, overwritten by the next step
    keep(rows, holes, movers)   go on with the first `rows` rows, after row movers[j] has moved into holes[j]
    worth(alive, rows)          whether going on with the unfinished rows alone saves more than it costs
"""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from creditscope.errors import CreditscopeError

SMALLEST_LENGTH, SMALLEST_ROWS = 128, 16  # below these a CUDA graph gains nothing from being smaller


@dataclass(frozen=True)
class Read:
    """P texts that the model has read."""

    cache: Any
    """Keys and values, (P, heads, W, width) per layer."""
    mask: Tensor
    """(P, W) bool: texts are padded on the left, so that every row writes its next token into the same slot."""
    lengths: Tensor
    """(P,) tokens in each text."""
    logits: Tensor
    """(P, V) of the token after each text."""


def start(policy: Any, prompts: list[list[int]], group: int, room: int) -> tuple[Growing | Slots, Tensor]:
    """Read each prompt once for `group` rows with `room` tokens to write: (decoder, (P, V) logits)."""
    known = read(policy, prompts)
    return begin(policy, known, group, room), known.logits


def begin(policy: Any, known: Read, group: int, room: int) -> Growing | Slots:
    """A decoder with `group` rows after each text. It owns the cache afterwards: call it once per `Read`."""
    slots = known.mask.shape[1] + room
    if _fits_slots(policy, known.cache, slots):
        return _slots(policy, known.cache, known.mask, known.lengths, group, slots)
    return Growing(policy, known.cache, known.mask, known.lengths, group, "position_ids" in _accepted(policy))


def read(policy: Any, texts: list[list[int]]) -> Read:
    """Run the texts side by side, padded on the left."""
    device = policy.get_input_embeddings().weight.device
    width = max(map(len, texts))
    padded = torch.tensor([[0] * (width - len(text)) + list(text) for text in texts], device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    mask = torch.arange(width, device=device) >= width - lengths[:, None]
    out = _run(policy, padded, mask, 1)
    cache = getattr(out, "past_key_values", None)
    if not isinstance(cache, Cache) or not all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
        raise CreditscopeError(f"{type(policy).__name__} has no key-value cache that a group could share; "
                               f"use a decoder with attention layers")
    return Read(cache, mask, lengths, out.logits[:, -1])


@dataclass(frozen=True)
class Branches:
    """U texts with every prefix (the prompt, then cut ≤ L tokens) still in the cache."""

    cache: Any
    """Keys and values, (U, heads, W + L, width) per layer: prompts end at slot W, completions follow."""
    width: int
    """W."""
    prompts: Tensor
    """(U,) tokens in each prompt."""
    first: Tensor
    """(U, V) logits after each prompt."""
    cuts: Tensor
    """(C,) the cuts > 0, ascending, after which logits were kept."""
    after: Tensor | None
    """(U, C, V) those logits; None where nothing was written."""

    def prefixes(self, text: Tensor, cut: Tensor) -> Read:
        """N prefixes, each a slice of its text's cache, shifted so that all end at the same slot.

        Slot j of prefix n is slot j + W + cut[n] − max_m length[m] of its text. Shifting is allowed: keys carry the
        positions of their tokens, and attention uses nothing but keys and mask.
        """
        lengths = self.prompts[text] + cut
        longest = int(lengths.max())
        slot = torch.arange(longest, device=cut.device) + (self.width + cut - longest)[:, None]
        slot = slot.clamp_(min=0)  # slots before the first are masked

        def shift(state: Tensor) -> Tensor:
            rows, slots = text.to(state.device)[:, None], slot.to(state.device)
            return state[rows, :, slots].transpose(1, 2)

        mask = torch.arange(longest, device=cut.device) >= longest - lengths[:, None]
        text, cut = text.to(self.first.device), cut.to(self.first.device)
        logits = self.first[text]
        if self.after is not None:
            place = torch.searchsorted(self.cuts, cut)
            written = cut > 0
            logits[written] = self.after[text[written], place[written]]
        return Read(_through(self.cache, shift), mask, lengths, logits)


def write(policy: Any, prompts: Read, prompt: Tensor, tokens: Tensor, lengths: Tensor, cuts: Tensor) -> Branches:
    """Run each text's own tokens once, in one forward over the cache of the prompts.

    Text u is prompt[u] followed by tokens[u, :lengths[u]]; `cuts` (ascending, > 0) are those whose logits are wanted.
    """
    def pick(state: Tensor) -> Tensor:
        return state.index_select(0, prompt.to(state.device))

    cache, width, after = _through(prompts.cache, pick), prompts.mask.shape[1], None
    if tokens.shape[1]:
        written = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        mask = torch.cat([prompts.mask[prompt], written], 1)
        out = _run(policy, tokens, mask, cuts - 1, cache)
        after = out.logits if "logits_to_keep" in _accepted(policy) else out.logits[:, cuts.to(out.logits.device) - 1]
        cuts = cuts.to(after.device)
    return Branches(cache, width, prompts.lengths[prompt], pick(prompts.logits), cuts, after)


def sliceable(cache: Any, slots: int) -> bool:
    """Whether the cache keeps one key and value for each of `slots` tokens, in their order.

    Sliding windows, recurrent states and quantized layers cannot be cut at an earlier token.
    """
    return type(cache) is DynamicCache and all(layer.is_initialized and _keeps(layer, slots) for layer in cache.layers)


def _keeps(layer: Any, slots: int) -> bool:
    """Whether a layer keeps all of `slots` tokens: a sliding window keeps its last window − 1."""
    return type(layer) is DynamicLayer or (
        type(layer) is DynamicSlidingWindowLayer and slots < layer.sliding_window)


def _through(cache: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A new cache of changed keys and values."""
    changed = copy.copy(cache)
    changed.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in changed.layers:
        layer.keys, layer.values = change(layer.keys), change(layer.values)
        if type(layer) is DynamicSlidingWindowLayer:  # it keeps a count of its own
            layer.cumulative_length = layer.keys.shape[2]
    return changed


def _run(policy: Any, ids: Tensor, mask: Tensor, keep: int | Tensor, cache: Any = None) -> Any:
    """The model on the last ids.shape[1] tokens under `mask`; logits of `keep` where the model lets us choose."""
    accepted = _accepted(policy)
    extra: dict[str, Any] = {"logits_to_keep": keep} if "logits_to_keep" in accepted else {}
    if "position_ids" in accepted:
        extra["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
    if cache is not None:
        extra["past_key_values"] = cache
    return policy(input_ids=ids, attention_mask=mask.long(), use_cache=True, **extra)


def _accepted(policy: Any) -> Mapping[str, Any]:
    return inspect.signature(policy.forward).parameters


def release(model: nn.Module) -> None:
    """Free the CUDA graphs and the cache that sampling keeps for the model's next call."""
    _KEPT.pop(base(model), None)


def cache_numbers(model: Any) -> int | None:
    """Numbers that a token's keys and values take in all layers; None for a model that does not say."""
    config = model.config.get_text_config(decoder=True)
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not layers or not heads:
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * width)


def base(model: Any) -> Any:
    """The Hugging Face model inside a peft wrapper, with the adapter's layers in it."""
    if not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise CreditscopeError(f"cannot sample through {model.active_peft_config.peft_type.value}, which prepends "
                               f"virtual tokens; use an adapter that lives in the layers, such as LoRA")
    return model.get_base_model()


class Growing:
    """The model's own cache, mask and positions, as `generate` uses them, for every architecture."""

    def __init__(self, policy: Any, cache: Any, mask: Tensor, lengths: Tensor, group: int, placed: bool) -> None:
        cache.batch_repeat_interleave(group)
        self.policy, self.cache, self.placed = policy, cache, placed
        self.mask = mask.long().repeat_interleave(group, 0)
        self.position = lengths.repeat_interleave(group)[:, None]

    def step(self, token: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(token), 1)], 1)
        where = {"position_ids": self.position} if self.placed else {}
        out = self.policy(input_ids=token[:, None], attention_mask=self.mask, past_key_values=self.cache,
                          use_cache=True, **where)
        self.position = self.position + 1
        logits: Tensor = out.logits[:, -1]
        return logits

    def keep(self, rows: int, holes: Tensor, movers: Tensor) -> None:
        index = torch.arange(rows, device=self.mask.device).index_copy_(0, holes, movers)
        self.cache.batch_select_indices(index)
        self.mask, self.position = self.mask[index], self.position[index]

    def worth(self, alive: int, rows: int) -> bool:
        return alive <= rows * 7 // 8  # the whole cache is copied


class Slots:
    """A preallocated cache (rows, heads, slots, width) per layer, written in place and read through views.

    A row that leaves costs the copy of one other row into its place. On CUDA the forward is captured as a graph for
    each size of the views; memory and graphs stay for the next call. A graph reads weights by address: an optimizer's
    step is seen, and weights that were moved change `fingerprint`, after which `_slots` builds anew.
    """

    def __init__(self, policy: Any, cache: Any, rows: int, slots: int) -> None:
        first = cache.layers[0].keys
        self.graphed = _can_capture(policy, first.device)
        if self.graphed:  # rounded up to the sizes of graphs
            rows, slots = grid(rows, SMALLEST_ROWS), -(-slots // 64) * 64
        self.rows, self.slots = rows, slots
        self.cache = Cache(layers=[_SlotLayer(layer.keys, layer.values, rows, slots) for layer in cache.layers])
        self.mask = first.new_empty(rows, 1, 1, slots)
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=first.device)
        self.position = torch.zeros_like(self.token)
        self.slot = torch.zeros(1, dtype=torch.long, device=first.device)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.graphed else None
        self.fingerprint = fingerprint(policy) if self.graphed else None

    def load(self, policy: Any, cache: Any, mask: Tensor, lengths: Tensor, group: int) -> Slots:
        """Begin with a cache of P prompts: each is copied to the `group` rows that answer it."""
        self.policy, self.config = weakref.proxy(policy), _text(policy)  # _KEPT must not keep its own key alive
        prompts, width = mask.shape
        rows = prompts * group
        for layer, prompt in zip(self.cache.layers, cache.layers, strict=True):
            for buffer, state in ((layer.all_keys, prompt.keys), (layer.all_values, prompt.values)):
                if self.graphed:
                    buffer.zero_()  # the graphs read slots not yet written: weight 0 there, but 0 · NaN is NaN
                buffer[:rows].unflatten(0, (prompts, group))[..., :width, :] = state[:, None]
        # Additive, for sdpa and eager attention alike. New slots are opened one by one.
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.mask[:rows, 0, 0, :width].masked_fill_(mask.repeat_interleave(group, 0), 0)
        self.position.zero_()  # a graph runs unused rows too: their positions must exist
        self.position[:rows, 0] = lengths.repeat_interleave(group)
        self.slot.fill_(width)
        self.used = width
        return self

    def step(self, token: Tensor) -> Tensor:
        rows = len(token)
        self.token[:rows, 0] = token
        self.used += 1
        logits = self._replay(rows) if self.graphed else self._forward(rows, self.used)
        self.position += 1
        self.slot += 1
        return logits[:rows]

    def keep(self, rows: int, holes: Tensor, movers: Tensor) -> None:
        for layer in self.cache.layers:
            for buffer in (layer.all_keys, layer.all_values):
                seen = buffer[:, :, :self.used]
                seen.index_copy_(0, holes, seen.index_select(0, movers))
        for state in (self.mask, self.position):
            state.index_copy_(0, holes, state.index_select(0, movers))

    def worth(self, alive: int, rows: int) -> bool:
        if self.graphed:  # nothing is saved before a smaller graph fits
            return grid(alive, SMALLEST_ROWS) < grid(rows, SMALLEST_ROWS)
        return alive < rows

    def _forward(self, rows: int, length: int) -> Tensor:
        """Writes the current slot; running it twice changes nothing."""
        mask = self.mask[:rows].index_fill_(3, self.slot, 0)[..., :length]
        for layer in self.cache.layers:
            layer.look(rows, length, self.slot)
        with _one_query(self.config):
            out = self.policy(input_ids=self.token[:rows], attention_mask=mask, position_ids=self.position[:rows],
                              past_key_values=self.cache, use_cache=True)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _replay(self, rows: int) -> Tensor:
        size = grid(rows, SMALLEST_ROWS), min(grid(self.used, SMALLEST_LENGTH), self.slots)
        if size not in self.graphs:
            try:
                self.graphs[size] = self._capture(*size)
            except RuntimeError as error:  # the model synchronises, or branches on values on the device
                self.graphed = False
                warnings.warn(f"{self.policy.__class__.__name__} cannot be captured as a CUDA graph, so sampling runs "
                              f"without: {str(error).splitlines()[0]}", stacklevel=2)
                return self._forward(rows, self.used)
        graph, logits = self.graphs[size]
        graph.replay()
        return logits

    def _capture(self, rows: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        with torch.cuda.device(self.slot.device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._forward(rows, length)  # libraries allocate workspaces at first use, which a capture forbids
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self._forward(rows, length)
        return graph, logits


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's slots, behind the interface that attention modules write to."""

    def __init__(self, keys: Tensor, values: Tensor, rows: int, slots: int) -> None:
        super().__init__()
        self.all_keys = keys.new_empty(rows, keys.shape[1], slots, keys.shape[3])
        self.all_values = values.new_empty(rows, values.shape[1], slots, values.shape[3])
        self.is_initialized = True

    def look(self, rows: int, length: int, slot: Tensor) -> None:
        self.keys, self.values = self.all_keys[:rows, :, :length], self.all_values[:rows, :, :length]
        self.slot = slot

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values


def attend_one(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, **rest: Any) -> tuple[Tensor, None]:
    """Attention of one query per row, (B, H, 1, D) -> (B, 1, H, D), with the numbers of transformers' sdpa.

    Heads that share keys are queries of one head, so keys are not copied H / H_kv times.
    """
    if query.shape[2] != 1 or rest.get("softcap") is not None or rest.get("position_bias") is not None:
        out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **rest)
        return out, None
    rows, heads, _, width = query.shape
    query = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, -1), None


ALL_ATTENTION_FUNCTIONS.register("creditscope_one_query", attend_one)


@contextmanager
def _one_query(config: Any) -> Iterator[None]:
    """sdpa models use `attend_one` in this context; they read the setting at each forward."""
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = "creditscope_one_query"
    try:
        yield
    finally:
        config._attn_implementation = before


_KEPT: weakref.WeakKeyDictionary[nn.Module, Slots] = weakref.WeakKeyDictionary()


def _slots(policy: Any, cache: Any, mask: Tensor, lengths: Tensor, group: int, slots: int) -> Slots:
    """New slots, or those of an earlier call that are large enough and whose graphs fit the model as it is."""
    rows = len(lengths) * group
    kept = _KEPT.get(policy)
    if kept is not None and _can_capture(policy, mask.device) and kept.fingerprint == fingerprint(policy):
        if rows <= kept.rows and slots <= kept.slots:
            return kept.load(policy, cache, mask, lengths, group)
        rows, slots = max(rows, kept.rows), max(slots, kept.slots)
    del kept
    _KEPT.pop(policy, None)
    fresh = Slots(policy, cache, rows, slots)
    if fresh.graphed:
        _KEPT[policy] = fresh
    return fresh.load(policy, cache, mask, lengths, group)


def _fits_slots(policy: Any, cache: Any, slots: int) -> bool:
    """Whether the model takes a 4-D mask (transformers' flags for its mask and attention interfaces), and every layer
    attends to the whole text."""
    return (getattr(policy, "_supports_attention_backend", False) is True
            and getattr(policy, "_can_compile_fullgraph", False) is True
            and _text(policy)._attn_implementation in ("sdpa", "eager")
            and all(_keeps(layer, slots) for layer in cache.layers)
            and len({layer.keys.device if layer.is_initialized else None for layer in cache.layers}) == 1)


def _can_capture(policy: Any, device: torch.device) -> bool:
    """Whether replaying a graph equals calling the model: hooks run in Python, autocast caches weights."""
    return (device.type == "cuda" and not torch.is_autocast_enabled("cuda")
            and not any(m._forward_hooks or m._forward_pre_hooks for m in policy.modules()))


def fingerprint(policy: Any) -> tuple[Any, ...]:
    """What a captured graph depends on: addresses of the weights, and the active adapters."""
    weights = [(w.data_ptr(), w.dtype, w.shape) for w in chain(policy.parameters(), policy.buffers())]
    adapters = [(m.disable_adapters, tuple(m.active_adapters), tuple(m.merged_adapters), str(m.scaling))
                for m in policy.modules() if hasattr(m, "merged_adapters")]
    return (*weights, *adapters, _text(policy)._attn_implementation)


def _text(policy: Any) -> Any:
    """The configuration of the decoder, inside that of a multimodal model."""
    return policy.config.get_text_config(decoder=True)


def grid(n: int, least: int) -> int:
    """The smallest 2^k or 3·2^k that is at least `n` and `least`: few graphs, little waste.

    >>> [grid(n, 16) for n in (3, 20, 49, 65)]
    [16, 24, 64, 96]
    """
    power = 1 << max(n - 1, 0).bit_length()
    return max(least, power * 3 // 4 if n <= power * 3 // 4 else power)
