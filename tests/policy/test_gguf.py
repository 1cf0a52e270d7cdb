"""GGUF files: the blocks against the gguf package's own numbers, and the cache against a fresh conversion."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from creditscope.files.sums import SUMS
from creditscope.files.ticks import told_to
from creditscope.policy import gguf as converting
from creditscope.policy.loading import Policy, load_policy

gguf = pytest.importorskip("gguf")

WIDTH, WORDS = 32, [*"abcdefgh", "Ġ", "ab", "abc", "<|end|>"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(converting.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf")


def write(path: Path, seed: int = 0) -> Path:
    """A Qwen2 of one layer with random weights, half of them in blocks."""
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * (len(WORDS) - 1) + [3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(len(WORDS) - 1)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(WORDS), WIDTH), "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (WIDTH // 2, WIDTH),
              "blk.0.attn_v": (WIDTH // 2, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH),
              "blk.0.ffn_gate": (2 * WIDTH, WIDTH), "blk.0.ffn_up": (2 * WIDTH, WIDTH),
              "blk.0.ffn_down": (WIDTH, 2 * WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,),
              "blk.0.ffn_norm": (WIDTH,)}
    for (name, shape), kind in zip(shapes.items(), ["Q8_0", "Q5_0", "Q4_0", "F16"] * 3, strict=False):
        weights = draw.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else kind]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    for name, size in {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2}.items():
        writer.add_tensor(f"blk.0.attn_{name}.bias", draw.normal(size=size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(file: Path, **options: Any) -> Policy:
    """A policy, in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_policy(str(file), device="cpu", **options)


def same(one: Policy, other: Policy) -> bool:
    mine, yours = one.model.state_dict(), other.model.state_dict()
    return mine.keys() == yours.keys() and all(
        mine[name].dtype == yours[name].dtype and torch.equal(mine[name], yours[name]) for name in mine)


def never(*_: object) -> None:
    raise AssertionError("converted again")


# -- blocks ----------------------------------------------------------------------------------------------------------


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("name", [*converting.BLOCKS, "F32", "Q2_K", "IQ4_NL"])
@pytest.mark.parametrize("chunk", [converting.CHUNK, {"cpu": 512, "cuda": 512}])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_random_bytes_become_the_numbers_of_the_gguf_package_bit_by_bit(
        name: str, chunk: dict[str, int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "CHUNK", chunk)
    kind = gguf.GGMLQuantizationType[name]
    data = np.random.default_rng(1).integers(0, 256, (5, gguf.GGML_QUANT_SIZES[kind][1] * 8), dtype=np.uint8)
    data = data.view({"F16": np.float16, "F32": np.float32}.get(name, np.uint8))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind)
        found = converting.dequantize(data, kind, device)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_a_type_without_a_rule_is_left_to_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gguf.quants, "dequantize", lambda data, kind: asked.append(kind.name))
    converting.dequantize(np.zeros((1, 84), np.uint8), gguf.GGMLQuantizationType.Q2_K)
    assert asked == ["Q2_K"]


# -- reading ---------------------------------------------------------------------------------------------------------


def test_the_fast_reader_gives_what_transformers_reads_and_puts_its_names_back(
        file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gguf.GGUFReader, gguf.dequantize
    fast = load(file)
    assert (gguf.GGUFReader, gguf.dequantize) == before
    monkeypatch.setenv(converting.CACHE, str(file.parent / "other"))
    monkeypatch.setattr(converting, "fast_reading", lambda device: warnings.catch_warnings())
    slow = load(file)
    assert same(fast, slow)
    assert fast.end == slow.end
    assert fast.encode("abc ab a") == slow.encode("abc ab a")


def test_fields_of_the_fast_reader_are_those_of_the_gguf_package(file: Path) -> None:
    plain = gguf.GGUFReader(file)
    with converting.fast_reading("cpu"):
        fast = gguf.GGUFReader(file)
    assert list(fast.fields) == list(plain.fields)
    for name, field in plain.fields.items():
        found = fast.fields[name]
        assert (found.offset, found.data, found.types) == (field.offset, field.data, field.types), name
        assert [part.tolist() for part in found.parts] == [part.tolist() for part in field.parts], name
    assert [tensor.name for tensor in fast.tensors] == [tensor.name for tensor in plain.tensors]


def test_a_file_is_read_also_where_transformers_has_no_module_of_that_name(
        file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    fast = load(file)
    monkeypatch.setenv(converting.CACHE, str(file.parent / "other"))
    monkeypatch.setattr(converting, "importlib", SimpleNamespace(import_module=missing))
    assert same(fast, load(file))


def test_a_name_that_the_gguf_package_lacks_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gguf, "get_tensor_name_map")
    with converting.fast_reading("cpu"):
        assert not hasattr(gguf, "get_tensor_name_map")


def test_the_display_hears_of_every_tensor(file: Path) -> None:
    heard: list[tuple[int, int]] = []
    with told_to(lambda done, total: heard.append((done, total))):
        load(file)
        load(file)
    assert heard == [(n, 14) for n in range(15)]


# -- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_start_reads_the_cache_and_gets_the_same_policy(
        dtype: str, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = load(file, dtype=dtype)
    monkeypatch.setattr(converting, "fast_reading", never)
    again = load(file, dtype=dtype)
    assert same(fresh, again)
    assert next(again.model.parameters()).dtype == getattr(torch, dtype)
    assert again.end == fresh.end
    assert again.chat
    assert again.tokenizer.chat_template == fresh.tokenizer.chat_template == TEMPLATE
    assert again.encode("abc ab a") == fresh.encode("abc ab a")
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json", ".jinja", ""}


def test_a_changed_file_and_another_dtype_are_converted_anew(file: Path) -> None:
    before, stat = load(file), file.stat()
    first = converting.conversion_of(file, "float32")
    write(file, seed=1)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert not same(before, load(file))
    assert len({first, converting.conversion_of(file, "float32"), converting.conversion_of(file, "bfloat16")}) == 3


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1] + b"!"),
    lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: (folder / "more.json").touch(),
])
def test_a_damaged_cache_is_noticed_and_made_anew(damage: Any, file: Path) -> None:
    fresh = load(file)
    damage(converting.conversion_of(file, "float32"))
    with pytest.warns(UserWarning, match="damaged"):
        assert same(fresh, load_policy(str(file), device="cpu"))
    assert same(fresh, load(file))


def test_a_cache_without_its_sums_is_not_read(file: Path) -> None:
    load(file)
    sums = converting.conversion_of(file, "float32") / SUMS
    sums.unlink()
    load(file)
    assert sums.is_file()


def test_a_cache_that_cannot_be_written_costs_one_warning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = file.parent / "taken"
    taken.touch()  # a file where the folder would be: also root cannot write there
    monkeypatch.setenv(converting.CACHE, str(taken))
    with pytest.warns(UserWarning, match="cannot be kept") as said:
        load_policy(str(file), device="cpu")
    assert len(said) == 1


@pytest.mark.parametrize("stop", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_no_half_of_a_conversion(
        stop: BaseException, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()
        raise stop

    monkeypatch.setattr(converting, "seal", fail)
    with pytest.warns(UserWarning, match="No space left") if isinstance(stop, OSError) else pytest.raises(type(stop)):
        load_policy(str(file), device="cpu")
    assert not [path for path in cache.iterdir() if path.is_dir()]
