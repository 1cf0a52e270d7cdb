"""A policy: a Hugging Face causal language model with its tokenizer, loaded by name, folder, GGUF file or `tiny`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from creditscope.errors import CreditscopeError, install_hint, require_module, unknown
from creditscope.files.hub import answers, refuse_missing
from creditscope.files.memory import enough_memory, is_short
from creditscope.files.sums import SUMS, verify
from creditscope.optimizer.masters import HALF, Masters
from creditscope.policy.gguf import load_converted
from creditscope.policy.vetting import check_folder, check_gguf, tokenizing

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"
HEADS = {"CausalLM": "causal language modelling", "SequenceClassification": "sequence classification"}
"""What may follow AutoModelFor in transformers, in words."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Policy:
    """A model that can be sampled from and trained, and the tokenizer that goes with it."""

    name: str
    model: Any
    tokenizer: Any
    chat: bool = False
    """Wrap prompts in the tokenizer's chat template."""
    lora: bool = False
    base: bool = False
    """The base model under LoRA adapters: the same weights with the adapters switched off."""
    masters: Masters | None = None
    """Float32 copies of half-precision weights, where these are trained (`keep_masters`)."""
    uses_logits: bool = False
    """The model changes its logits after the output head, so the head cannot be applied apart from it."""
    _pieces: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found

    @property
    def end(self) -> tuple[int, ...]:
        """Ids that end a completion: the tokenizer's and those of the model's generation config."""
        own = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        own = [own] if isinstance(own, int) else list(own or [])
        return tuple(dict.fromkeys([self.tokenizer.eos_token_id, *own]))

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> what the optimiser moves, tied weights once: the parameter, or its master."""
        if self.masters is not None:
            return self.masters.named
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def keep_masters(self) -> None:
        """From now on half-precision weights are trained through float32 copies."""
        if self.masters is None and any(p.dtype in HALF for p in self.trainable().values()):
            self.masters = Masters(self.trainable())

    def collect(self) -> None:
        """After a backward pass: the gradients to where the optimiser reads them."""
        if self.masters is not None:
            self.masters.collect()

    def clear(self) -> None:
        """No gradients, in the model and where the optimiser reads them."""
        for p in (*self.model.parameters(), *self.trainable().values()):
            p.grad = None

    def spread(self) -> None:
        """After a step: what the optimiser moved into the model."""
        if self.masters is not None:
            self.masters.spread()

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, ready to be continued."""
        if self.chat:
            message = [{"role": "user", "content": prompt}]
            try:
                prompt = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template is a program in jinja's sandbox: it may fail in any way
                raise CreditscopeError(f"the chat template of {self.name!r} failed: {type(error).__name__}: {error}; "
                                       f"use --chat off") from error
        return self.tokenize(prompt, special=not self.chat)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text; `special` adds the tokenizer's special tokens."""
        with tokenizing(self.name):
            # Without `verbose` a text that is too long for the model is told by us alone.
            return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without its end token."""
        with tokenizing(self.name):
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds: joined, they are `decode(ids)`.

        Where tokens decoded alone do not join to it (a character split over tokens, spaces that depend on neighbours),
        each piece is the growth of the decoded prefix.
        """
        for i in ids:
            if i not in self._pieces:
                self._pieces[i] = self.decode([i])
        alone = [self._pieces[i] for i in ids]
        whole = self.decode(ids)
        if "".join(alone) == whole:
            return alone
        cuts = [0]
        for t in range(1, len(ids) + 1):
            # An unfinished character decodes to a replacement mark: it belongs to the token that completes it.
            text = self.decode(ids[:t])
            cuts.append(len(text) if whole.startswith(text) else cuts[-1])
        cuts[-1] = len(whole)
        return [whole[a:b] for a, b in pairwise(cuts)]

    def special(self) -> dict[int, str]:
        """Token id -> name of the tokens that `decode` leaves out, such as <|im_end|>."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        ids = {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        return {i: str(self.tokenizer.convert_ids_to_tokens(i)) for i in sorted(ids)}

    def save(self, folder: Path) -> None:
        """The model in Hugging Face format, adapters merged into the weights, with its tokenizer."""
        model = copy.deepcopy(self.model).merge_and_unload() if self.lora else self.model
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def reference(self) -> Policy:
        """A frozen copy of the policy as it is now; with LoRA the base model itself, adapters off."""
        if self.lora:
            return replace(self, base=True)
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return Policy(f"{self.name} (reference)", frozen, self.tokenizer, self.chat)

    def active(self) -> AbstractContextManager[Any]:
        """The context in which the model is this policy."""
        return self.model.disable_adapter() if self.base else nullcontext()


@enough_memory("loading the model", "choose a smaller one, or --dtype bfloat16 with --lora 16")
def load_policy(name: str, *, device: str = "auto", dtype: str = "float32", lora: int = 0, chat: str = "auto",
                seed: int = 0, recompute: bool = False) -> Policy:
    """The policy behind a name: `tiny`, a folder, a .gguf file, or a model on the hub.

    Only a hub name touches the network. `lora` is the rank of adapters to train in place of the weights, 0 for none.
    With `recompute` a layer's activations are computed again in the backward pass.
    """
    require_module("loading a model", "transformers")
    where, extra = _locate(name)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    device = _device(device)
    read = partial(_load, name, dtype=DTYPES[dtype])
    if "gguf_file" in extra:
        model, tokenizer = load_converted(Path(name), dtype, device, read)
    else:
        model, tokenizer = read(where, extra)
    if tokenizer.eos_token_id is None:
        raise CreditscopeError(f"the tokenizer of {name!r} names no end token, so completions would never end; "
                               f"set eos_token in its tokenizer_config.json")
    use_chat = tokenizer.chat_template is not None if chat == "auto" else chat == "on"
    if use_chat and tokenizer.chat_template is None:
        raise CreditscopeError(f"--chat on, but the tokenizer of {name!r} has no chat template; use --chat off")
    if lora:
        model = _with_adapters(model, lora, seed)
    if not any(p.requires_grad for p in model.parameters()):
        raise CreditscopeError(f"{name!r} has no trainable parameter; if it is a folder of adapters, merge them into "
                               f"their base model first")
    if recompute:
        _recompute(name, model)
    _avoid_cudnn_attention(device)
    # Dropout stays off: with it the ratio of the first step would not be 1.
    return Policy(name, model.to(device).eval(), tokenizer, use_chat, lora > 0)


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """What from_pretrained reads, and its further arguments."""
    if name == "tiny":
        return str(TINY), {"local_files_only": True}
    refuse_missing(name)
    path = Path(name)
    if path.suffix == ".gguf":
        require_module("reading a GGUF file", "gguf")
        check_gguf(path)
        return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    if path.is_dir():
        check_folder(path)
        try:
            verify(path, whole=False)
        except (OSError, CreditscopeError) as error:
            raise CreditscopeError(f"{path}: {error}. If you changed the file, delete {SUMS} there; otherwise bring "
                                   f"the file back from a copy, or train again") from None
        return str(path), {"local_files_only": True}
    return name, {} if answers(name) else {"local_files_only": True}


def load_folder(folder: Path, head: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a vetted folder, the model by transformers' AutoModelFor{head}."""
    if not folder.is_dir():
        raise CreditscopeError(f"no folder {folder}; give one in Hugging Face format")
    return _load(str(folder), *_locate(str(folder)), dtype=dtype, head=head)


def _load(name: str, where: str, extra: dict[str, Any], dtype: torch.dtype,
          head: str = "CausalLM") -> tuple[Any, Any]:
    import transformers
    from transformers.utils import logging as display

    display.disable_progress_bar()  # it would write over our own progress display
    # A model folder is data, not a program. If this were left out, transformers would ask whether to run its code.
    extra = extra | {"trust_remote_code": False}
    # Weights of another shape are told by `loaded`, and refused below.
    weights = {"dtype": dtype, "use_safetensors": None if "gguf_file" in extra else True, "output_loading_info": True,
               "ignore_mismatched_sizes": True}

    def attempt(what: str, job: Any, options: dict[str, Any]) -> Any:
        try:
            return job.from_pretrained(where, **extra, **options)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the folder is untrusted: any exception may come, panics of Rust too
            if is_short(error):
                raise
            said = " ".join(str(error).split())[:300] or type(error).__name__
            raise CreditscopeError(f"cannot load the {what} of {name!r}: {said}; bring the folder whole from where it "
                                   f"was made") from error

    with _without_table():
        model, loaded = attempt("model", getattr(transformers, f"AutoModelFor{head}"), weights)
    made_for = next(iter(getattr(model.config, "architectures", None) or ()), "")
    if head == "CausalLM" and made_for.endswith("ForSequenceClassification"):
        raise CreditscopeError(f"{name!r} is a {made_for}, which scores answers and writes none; train against it with "
                               f"--reward model:{name}, and name a language model here")
    for weight, there, wanted in sorted(loaded["mismatched_keys"]):
        raise CreditscopeError(f"the weights of {name!r} are not those of its config.json: {weight} has the shape "
                               f"{tuple(there)} there and {tuple(wanted)} by the config; bring both from one place")
    if missing := sorted(loaded["missing_keys"]):
        raise CreditscopeError(f"the weights of {name!r} lack {len(missing)} of its parameters, {missing[0]} first, "
                               f"which would be random numbers; is the folder whole, and a model for {HEADS[head]}?")
    if "gguf_file" in extra:
        # The weights are plain numbers by now; transformers still calls them quantised and would refuse to save them.
        model.hf_quantizer = None
        model.config.__dict__.pop("quantization_config", None)
    return model, attempt("tokenizer", transformers.AutoTokenizer, {})


@contextmanager
def _without_table() -> Iterator[None]:
    """transformers logs weights that are missing, superfluous or of another shape as a table with escape codes; our
    sentence says the same. Tables of other faults stay: its errors refer to them."""
    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or "CONVERSION" in text

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _with_adapters(model: Any, rank: int, seed: int) -> Any:
    if rank < 0:
        raise CreditscopeError(f"--lora is the rank of the adapters, got {rank}; give 0 for none, or 8, 16, 32 ...")
    with install_hint("--lora"):
        from peft import LoraConfig, get_peft_model
    torch.manual_seed(seed)  # adapters start at random
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0))


def _avoid_cudnn_attention(device: str) -> None:
    """On a GPU torch takes its other attention kernels, in the whole process: in bfloat16 the gradient of cuDNN's was
    NaN for some batches with padding, even of a cotangent that is 0 (torch 2.11, H200)."""
    if torch.device(device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def _recompute(name: str, model: nn.Module) -> None:
    """Activation checkpointing of each decoder layer: its input is kept, and it runs again in the backward pass.

    transformers' own switch works in training mode alone, which would turn dropout on.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise CreditscopeError(f"--recompute: the layers of {name!r} ({type(model).__name__}) are not marked as ones "
                               f"that can run again; leave it out, and raise --accumulate instead")
    for layer in layers:
        layer.forward = _again(layer.forward)


def _again(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise CreditscopeError(f"cannot use device {name!r}: {str(error).splitlines()[0]}") from None
    return name
