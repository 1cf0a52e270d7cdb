"""Checks of untrusted model files, before transformers reads them.

A folder may name no code, no file outside itself and no format but safetensors; a GGUF file may declare no more than
its bytes can hold. Weights are then plain numbers, and take about as much memory as the files.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditscope.errors import CreditscopeError

MAX_JSON = 64 * 2**20
"""Longest JSON file of settings that is read, in bytes. An index of 100,000 tensors has 10 million."""


REQUIRED = {"the model's settings": ("config.json",),
         "the tokenizer": ("tokenizer.json", "*.model", "vocab*", "*.spm", "*.tiktoken", "tekken.json")}
"""What a folder must hold -> the files that give it, any of them; weights may be in one file or in many."""


# -- a folder --------------------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Refuse a folder that would make transformers read outside it, load a pickle, or fetch code."""
    for index in folder.glob("*.index.json"):
        named = _read(index).get("weight_map")
        for file in sorted(set(map(str, named.values()))) if isinstance(named, dict) else ():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CreditscopeError(f"{index} names the file {file!r}: weights are *.safetensors files of the same "
                                       f"folder; save the model again with save_pretrained")
    if not any(folder.glob("*.safetensors")) and (pickles := sorted(folder.glob("*.bin"))):
        raise CreditscopeError(f"{folder} has its weights in {pickles[0].name}, a pickle, which can run code, so it is "
                               f"not opened; convert it to safetensors where you trust it, with save_pretrained")
    if (folder / "adapter_config.json").exists():  # it names a base model, which may be anywhere
        raise CreditscopeError(f"{folder} holds adapters; merge them into their base model first (peft: "
                               f"merge_and_unload), and give the folder of the merged model")
    # Without these transformers guesses, and says what its guess lacks.
    for what, names in REQUIRED.items():
        if not any(any(folder.glob(name)) for name in names):
            raise CreditscopeError(f"{folder} has no {names[0]}, {what}; bring the file there, or give a whole folder "
                                   f"in Hugging Face format, as save_pretrained of model and tokenizer writes it")
    config = _read(folder / "config.json")
    for key, value in _settings(config):
        # owner/name there is a kernel on the hub: transformers would fetch it and run it.
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in json.dumps(value):
            raise CreditscopeError(f"{folder / 'config.json'} asks for the program {value!r} as {key}; a model folder "
                                   f"is data: remove that line")
    layers, held = config.get("num_hidden_layers"), sum(map(_tensors, folder.glob("*.safetensors")))
    if isinstance(layers, int) and 0 < held < layers:
        raise CreditscopeError(f"{folder / 'config.json'} names {layers:,} layers, and the weights hold {held:,} "
                               f"tensors in all; is the folder whole?")


def _read(file: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    try:
        found = json.loads(file.read_bytes()) if file.stat().st_size <= MAX_JSON else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CreditscopeError(f"cannot read {file}: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise CreditscopeError(f"cannot read {file}: it is no JSON object, or longer than {MAX_JSON:,} bytes")
    return found


def _settings(found: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of every entry, those of inner objects too."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key, value
            yield from _settings(value)
    elif isinstance(found, list):
        for value in found:
            yield from _settings(value)


@contextmanager
def tokenizing(name: str) -> Iterator[None]:
    """Name the tokenizer that failed. The library is written in Rust, and its panics are not Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, TypeError):
        raise  # a TypeError is the text's fault: half a character
    except BaseException as error:
        said = " ".join(str(error).split())[:300]
        raise CreditscopeError(f"the tokenizer of {name!r} failed ({type(error).__name__}: {said}); take the "
                               f"tokenizer.json that belongs to the model") from None


def _tensors(file: Path) -> int:
    """Tensors that a safetensors file declares; 0 where its header cannot be read, which transformers reports."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as stored:
            return len(stored.keys())
    except (OSError, ValueError, SafetensorError):
        return 0


# -- a GGUF file -----------------------------------------------------------------------------------------------------

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each kind of value."""
MOST_DIMENSIONS = 4


def check_gguf(path: Path) -> None:
    """Refuse a GGUF file whose counts, lengths or tensors do not fit into its own bytes, or whose layers do not.

    The reader behind transformers does not check them: an array of 2⁶⁰ values in 100 bytes would take all memory.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise _Overrun("it is shorter than a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _walk(_Cursor(data, len(data)))
    except OSError as error:
        raise CreditscopeError(f"cannot read {path}: {error.strerror}") from None
    except _Overrun as error:
        raise CreditscopeError(f"{path} is no GGUF file that can be read: {error}; was it downloaded whole?") from None


class _Overrun(Exception):
    """A count or a length that the file cannot hold."""


@dataclass
class _Cursor:
    """A position in the file, never past its end."""

    data: mmap.mmap
    size: int
    at: int = 0

    def skip(self, count: int, each: int = 1) -> int:
        """Pass over `count` values of at least `each` bytes; return the position before them."""
        before = self.at
        if count * each > self.size - before:
            raise _Overrun(f"byte {before:,} declares {count:,} values, and {self.size - before:,} bytes are left")
        self.at += count * each
        return before

    def number(self, form: str) -> int:
        found: int = struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(form)))[0]
        return found

    def text(self) -> bytes:
        length = self.number("Q")
        start = self.skip(length)
        return self.data[start:start + length]


def _walk(cursor: _Cursor) -> None:
    if cursor.data[cursor.skip(4):4] != MAGIC:
        raise _Overrun("it does not begin with GGUF")
    cursor.number("I")
    tensors, values = cursor.number("Q"), cursor.number("Q")
    for _ in range(values):
        name, kind = cursor.text(), cursor.number("I")
        if name.endswith(b".block_count") and kind in SCALARS:
            layers = int.from_bytes(cursor.data[cursor.at:cursor.at + SCALARS[kind]], "little")
            if layers > tensors:
                raise _Overrun(f"it names {layers:,} layers and {tensors:,} tensors")
        _value(cursor, kind)
    held = sum(_tensor(cursor) for _ in range(tensors))
    if held > cursor.size:
        raise _Overrun(f"its tensors take {held:,} bytes, and it has {cursor.size:,}")


def _value(cursor: _Cursor, kind: int, inner: bool = False) -> None:
    """Pass over one value; an array of arrays is refused."""
    if kind == STRING:
        cursor.text()
    elif kind == ARRAY and not inner:
        kind, count = cursor.number("I"), cursor.number("Q")
        if kind in SCALARS:
            cursor.skip(count, SCALARS[kind])
        else:
            for _ in range(count):
                _value(cursor, kind, inner=True)
    elif kind in SCALARS:
        cursor.skip(SCALARS[kind])
    else:
        raise _Overrun(f"byte {cursor.at:,} declares a value of kind {kind}")


def _tensor(cursor: _Cursor) -> int:
    """Bytes that a tensor takes, by its declared shape and kind."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor.text()
    dimensions = cursor.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise _Overrun(f"a tensor has {dimensions:,} dimensions")
    count = math.prod([cursor.number("Q") for _ in range(dimensions)])
    kind = cursor.number("I")
    cursor.number("Q")
    try:
        block, size = map(int, GGML_QUANT_SIZES[GGMLQuantizationType(kind)])
    except (ValueError, KeyError):
        raise _Overrun(f"a tensor is of kind {kind}") from None
    return -(-count // block) * size
