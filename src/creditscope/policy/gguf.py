"""GGUF files: fast dequantisation with torch, and a cache of the converted model.

transformers maps the names, the config and the tokenizer. It parses the metadata three times and dequantises with
numpy; `fast_reading` swaps the functions of the gguf package that it calls.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from creditscope.errors import CreditscopeError
from creditscope.files.sums import SUMS, seal, verify
from creditscope.files.ticks import tell
from creditscope.files.writing import new_folder
from creditscope.policy.vetting import check_folder

CACHE = "CREDITSCOPE_CACHE"
FORMAT = 1
"""Part of the cache's key: raise it when a conversion would come out otherwise."""
CHUNK = {"cpu": 2**15}
"""Weights that are dequantised at once, 2²⁴ but on these devices. On a CPU so few stay in its cache, and torch takes no
second thread for them: 2 s for Qwen2.5-Coder-0.5B where 2¹⁸ with two threads took 70 on two busy cores."""
STRING, ARRAY = 8, 9
"""Types of metadata, as the file names them."""


# -- blocks to float32 -----------------------------------------------------------------------------------------------
# Each function takes (n, bytes of a block) uint8 and returns (n, weights of a block) float32, as ggml-quants.c has it.


def _half(data: Tensor) -> Tensor:
    """(n, 2k) bytes -> (n, k) float16, as float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, width: int) -> Tensor:
    """(n, k·width) bytes -> (n, 2k, width): of each group of bytes the low halves, then the high ones."""
    groups = data.reshape(len(data), -1, width)
    return torch.stack((groups & 15, groups >> 4), dim=2).flatten(1, 2)


def _bits(data: Tensor, count: int, each: int = 1) -> Tensor:
    """(n, m) bytes -> (n, count, m): bits i·each ... of every byte."""
    shifts = torch.arange(0, count * each, each, dtype=torch.uint8, device=data.device)
    found: Tensor = (data[:, None] >> shifts[:, None]) & (2**each - 1)
    return found


def _fifth(data: Tensor) -> Tensor:
    """(n, 4) bytes -> (n, 32): one bit per weight, worth 16. Looked up by byte: shifts take longer."""
    worth = _bits(torch.arange(256, dtype=torch.uint8, device=data.device)[:, None], 8).squeeze(2) << 4
    return F.embedding(data.int(), worth).flatten(1)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:], 16).flatten(1).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _nibbles(b[:, 4:], 16).flatten(1).float() + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    return _nibbles(b[:, 6:], 16).flatten(1).bitwise_or_(_fifth(b[:, 2:6])).float().sub_(16).mul_(_half(b[:, :2]))


def _q5_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 8:], 16).flatten(1) | _fifth(b[:, 4:8])).float() + _half(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].view(torch.int8).float()


def _scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """d·scale and d_min·minimum of the eight sub-blocks of Q4_K and Q5_K, (n, 8, 1) each; 6 bits per number."""
    low, least, high = b[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minimum = torch.cat((least & 63, (high >> 4) | ((least >> 2) & 48)), dim=1)
    return (_half(b[:, :2]) * scale.float())[..., None], (_half(b[:, 2:4]) * minimum.float())[..., None]


def _q4_k(b: Tensor) -> Tensor:
    scale, minimum = _scales(b)
    return (scale * _nibbles(b[:, 16:], 32).float() - minimum).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scale, minimum = _scales(b)
    return (scale * (_nibbles(b[:, 48:], 32) | (_bits(b[:, 16:48], 8) << 4)).float() - minimum).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low = _nibbles(b[:, :128], 64).reshape(-1, 8, 32)
    high = _bits(b[:, 128:192].reshape(-1, 32), 4, 2).reshape(-1, 8, 32)
    scale = _half(b[:, 208:]) * b[:, 192:208].view(torch.int8).float()
    return (scale[..., None] * ((low | (high << 4)).float() - 32).reshape(-1, 16, 16)).flatten(1)


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "F16": _half, "BF16": lambda b: b.view(torch.bfloat16).float(), "Q8_0": _q8_0,
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
"""Type -> its rule. F32 needs none; the gguf package does the other types."""


def dequantize(data: Any, kind: Any, device: str = "cpu", otherwise: Callable[[Any, Any], Any] | None = None) -> Any:
    """Weights as a float32 array from the blocks of a tensor; `otherwise` does the types that have no rule here."""
    import gguf
    import numpy as np

    rule = BLOCKS.get(gguf.GGMLQuantizationType(kind).name)
    if rule is None or not data.dtype.isnative:  # a file of the other byte order
        return (otherwise or gguf.quants.dequantize)(data, kind)
    weights, size = map(int, gguf.GGML_QUANT_SIZES[kind])
    raw = np.ascontiguousarray(data).view(np.uint8)
    shape = (*raw.shape[:-1], raw.shape[-1] // size * weights)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is read alone
        blocks = torch.from_numpy(raw.reshape(-1, size))
    out = torch.empty(len(blocks), weights)
    step = max(CHUNK.get(torch.device(device).type, 2**24) // weights, 1)
    for a in range(0, len(blocks), step):
        out[a:a + step] = rule(blocks[a:a + step].to(device))
    return out.numpy().reshape(shape)


def _strings(data: Any, start: int, count: int) -> tuple[list[Any], int]:
    """Length and bytes of each of `count` strings from `start` on, as arrays in turn, and where they end.

    All lengths lie in the file: `vetting.check_gguf` has walked them.
    """
    parts: list[Any] = []
    for _ in range(count):
        size = data[start:start + 8].view("uint64")
        end = start + 8 + int(size[0])
        parts += (size, data[start + 8:end])
        start = end
    return parts, start


@contextmanager
def fast_reading(device: str) -> Iterator[None]:
    """transformers reads GGUF files with `dequantize`, parses each file once, and tells its progress to `tell`.

    Swaps names of the gguf package for the whole process. A name that this version lacks is left alone: reading is then
    slower, and nothing else.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """A slice of np.memmap takes ten times as long as one of an array, and there are a million."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            """Arrays of strings and of numbers (a tokenizer has 450,000 entries) without a call per entry."""
            if raw_type != ARRAY or self.byte_order != "I":  # "I": the file has this machine's byte order
                return super()._get_field_parts(orig_offs, raw_type)
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            kind, count, start = int(head[0][0]), int(head[1][0]), orig_offs + 12
            number = self.gguf_scalar_to_np.get(kind)
            if not count or (number is None and kind != STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            types = [gguf.GGUFValueType(raw_type), gguf.GGUFValueType(kind)]
            if kind == STRING:
                strings, end = _strings(self.data, start, count)
                return end - orig_offs, head + strings, [3 + 2 * i for i in range(count)], types
            values = self._get(start, number, count)
            return 12 + values.nbytes, head + list(values.reshape(-1, 1)), list(range(2, 2 + count)), types

    def counted(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        every = list(items)
        for done, item in enumerate(every):
            tell(done, len(every))
            yield item
        tell(len(every), len(every))

    swaps: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", functools.cache(Reader)),
        (gguf, "dequantize", functools.partial(dequantize, device=device)),
        (gguf, "get_tensor_name_map", functools.cache(getattr(gguf, "get_tensor_name_map", print)))]
    with suppress(ImportError):
        reading = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        slow = getattr(reading, "_gguf_parse_value", None)

        def parsed(value: Any, kinds: Any) -> Any:
            """Strings without a list of their bytes; the rest as before."""
            kind = kinds[-1] if isinstance(kinds, list) else kinds
            return value.tobytes().decode() if kind == STRING else slow(value, kinds)  # type: ignore[misc]

        swaps += [(reading, "tqdm", counted), (reading, "_gguf_parse_value", parsed)]
    with ExitStack() as back:
        for owner, name, new in swaps:
            if hasattr(owner, name):
                back.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, new)
        yield


# -- the cache -------------------------------------------------------------------------------------------------------


def conversion_of(path: Path, dtype: str) -> Path:
    """The folder of a GGUF file's conversion: $CREDITSCOPE_CACHE/gguf/NAME-KEY, by default below ~/.cache/creditscope.

    The key is a hash of the file's bytes, the dtype and the version of transformers.
    """
    import transformers

    home = os.environ.get(CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "creditscope")
    with path.open("rb") as data:
        content = hashlib.file_digest(data, "sha256").hexdigest()
    key = hashlib.sha256(json.dumps([FORMAT, content, dtype, transformers.__version__]).encode()).hexdigest()
    return Path(home).expanduser() / "gguf" / f"{path.stem}-{key[:16]}"


def load_converted(path: Path, dtype: str, device: str, read: Callable[..., tuple[Any, Any]]) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file by `read(folder, options)`: from the cache, or converted and then kept there.

    A cache that cannot be written costs a warning and the time of the next conversion.
    """
    folder = conversion_of(path, dtype)
    if found := _kept(folder, read):
        return found
    with _writing(folder) as writable:
        if writable and (found := _kept(folder, read)):  # another process wrote it meanwhile
            return found
        with fast_reading(device):
            model, tokenizer = read(str(path.parent), {"gguf_file": path.name, "local_files_only": True})
        if writable:
            _keep(folder, model, tokenizer)
    return model, tokenizer


def _kept(folder: Path, read: Callable[..., tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """Model and tokenizer from the cache; None if they are not there, or not as they were written."""
    if not (folder / SUMS).is_file():
        return None
    try:
        verify(folder)
        check_folder(folder)
        return read(str(folder), {"local_files_only": True})
    except (OSError, CreditscopeError) as error:
        warnings.warn(f"the converted model in {folder} is damaged ({error}); the GGUF file is converted again",
                      stacklevel=2)
        return None


@contextmanager
def _writing(folder: Path) -> Iterator[bool]:
    """Wait for other processes that convert the same file; whether the cache can be written."""
    from filelock import FileLock

    with ExitStack() as held:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(folder.with_name(f".{folder.name}.lock"), mode=0o644))
        except OSError as error:
            _not_kept(folder, error)
            yield False
        else:
            yield True


def _keep(folder: Path, model: Any, tokenizer: Any) -> None:
    from safetensors import SafetensorError

    try:
        with new_folder(folder) as part:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            seal(part)
    except (OSError, SafetensorError) as error:
        _not_kept(folder, error)


def _not_kept(folder: Path, error: Exception) -> None:
    said = getattr(error, "strerror", None) or error
    warnings.warn(f"the converted model cannot be kept in {folder.parent} ({said}), so the next start converts it "
                  f"again; make room there, or set {CACHE} to another folder", stacklevel=2)
