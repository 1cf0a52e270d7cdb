"""A model's files are data: no code of theirs runs, nothing outside their folder is read, nothing grows without end."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from creditscope.cli.main import main
from creditscope.errors import CreditscopeError
from creditscope.policy.loading import TINY, load_policy
from creditscope.policy.scoring import encode_exactly
from creditscope.policy.vetting import check_gguf

ATTENTION = "model.layers.0.self_attn.q_proj.weight"


class Payload:
    """What a hostile pickle does when it is read: it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that appears once somebody's code has run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The packaged model, to be spoilt."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def to_pickle(folder: Path, mark: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(mark)))


def code(folder: Path, mark: Path) -> None:
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
                                   "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n")
    change(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})


def tokenizer_code(folder: Path, mark: Path) -> None:
    code(folder, mark)
    shutil.copy(TINY / "config.json", folder)
    change(folder / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": [None, "own.T"]})


def index(folder: Path, file: str) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {ATTENTION: file}}))


def index_to_pickle(folder: Path, mark: Path) -> None:
    to_pickle(folder, mark, "pytorch_model.bin")
    index(folder, "pytorch_model.bin")


def adapters(folder: Path, mark: Path) -> None:
    to_pickle(folder, mark, "adapter_model.bin")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(TINY)}))
    shutil.copy(TINY / "model.safetensors", folder)


def fewer_weights(folder: Path, mark: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[ATTENTION]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


Spoil = Callable[[Path, Path], Any]
HOSTILE: dict[str, tuple[Spoil, str]] = {
    "a pickle": (lambda f, m: to_pickle(f, m, "pytorch_model.bin"), "pytorch_model.bin, a pickle, which can run code"),
    "a pickle named safetensors": (lambda f, m: to_pickle(f, m, "model.safetensors"), "cannot load the model"),
    "code of its own": (code, "contains custom code"),
    "a tokenizer with code": (tokenizer_code, "cannot load the tokenizer"),
    "an index of pickles": (index_to_pickle, "names the file 'pytorch_model.bin'"),
    "an index that leads out": (lambda f, m: index(f, "../../../etc/passwd"), "names the file '../../../etc/passwd'"),
    "an index with a whole path": (lambda f, m: index(f, "/etc/x.safetensors"), "names the file '/etc/x.safetensors'"),
    "adapters": (adapters, "holds adapters; merge them"),
    "a kernel of the hub": (lambda f, m: change(f / "config.json", attn_implementation="evil/kernel"),
                            "asks for the program 'evil/kernel'"),
    "a kernel one level down": (lambda f, m: change(f / "config.json", text_config={
        "_attn_implementation": {"": "evil/kernel"}}), "asks for the program"),
    "more layers than tensors": (lambda f, m: change(f / "config.json", num_hidden_layers=10**9), "1,000,000,000"),
    "a weight too few": (fewer_weights, f"lack 1 of its parameters, {ATTENTION} first, which would be random"),
    "a width that is none": (lambda f, m: change(f / "config.json", num_attention_heads=0), "cannot load the model"),
    "settings without end": (lambda f, m: (f / "config.json").write_text("[" * 10**5), "cannot read"),
    "no settings": (lambda f, m: (f / "config.json").write_text("[]"), "is no JSON object"),
    "words without end": (lambda f, m: (f / "tokenizer.json").write_text("[" * 10**5), "cannot load the tokenizer"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_model_folder_is_refused_and_runs_nothing(
        what: str, folder: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    spoil, said = HOSTILE[what]
    spoil(folder, mark)
    with pytest.raises(CreditscopeError) as caught:
        load_policy(str(folder), device="cpu")
    assert said in str(caught.value)
    assert not mark.exists()
    assert asked == []


def test_the_payload_of_these_tests_would_run(tmp_path: Path, mark: Path) -> None:
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()


def test_a_chat_template_stays_in_its_sandbox(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(CreditscopeError, match=r"the chat template of .* failed: SecurityError"):
        load_policy(str(folder), device="cpu").encode("hello")


# -- GGUF ------------------------------------------------------------------------------------------------------------

HEADER = 300
"""Bytes of the small file that say something; behind them lie plain numbers."""
TRIES = 300


def gguf_file(path: Path) -> Path:
    """A small sound file, by the gguf package's own writer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_array("own.flags", [True, False])
    for n in range(3):
        writer.add_tensor(f"t{n}", torch.arange(64.0).reshape(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def made(*, tensors: int = 0, values: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + rest


def text(said: bytes) -> bytes:
    return struct.pack("<Q", len(said)) + said


def test_a_sound_gguf_file_passes(tmp_path: Path) -> None:
    check_gguf(gguf_file(tmp_path / "a.gguf"))


@pytest.mark.parametrize(("data", "said"), [
    (b"", "shorter than a header"),
    (b"GGML" + bytes(40), "does not begin with GGUF"),
    (made(values=2**60), "bytes are left"),
    (made(tensors=2**60), "bytes are left"),
    (made(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 0, 2**60)), "declares 1,152,921,504,606,846,976 values"),
    (made(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 8, 2**60)), "bytes are left"),
    (made(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 9, 2**60)), "a value of kind 9"),
    (made(values=1, rest=text(b"a") + struct.pack("<IQ", 8, 2**63)), "bytes are left"),
    (made(values=1, rest=struct.pack("<Q", 2**64 - 1)), "bytes are left"),
    (made(values=1, rest=text(b"a") + struct.pack("<I", 77)), "a value of kind 77"),
    (made(values=1, rest=text(b"llama.block_count") + struct.pack("<II", 4, 10**9)), "names 1,000,000,000 layers"),
    (made(tensors=1, rest=text(b"t") + struct.pack("<I", 2**31)), "2,147,483,648 dimensions"),
    (made(tensors=1, rest=text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**20, 0, 0)), "its tensors take"),
    (made(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 8, 999, 0)), "a tensor is of kind 999"),
])
def test_a_gguf_file_that_declares_more_than_it_holds_is_refused_at_once(
        data: bytes, said: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(CreditscopeError) as caught:
        load_policy(str(path), device="cpu")
    assert said in str(caught.value)
    assert time.perf_counter() - start < 5


def test_a_gguf_file_with_bytes_changed_is_refused_in_words_or_read_without_growing(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    whole = gguf_file(tmp_path / "a.gguf").read_bytes()
    draw, passed = random.Random(0), 0
    for n in range(TRIES):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(HEADER)] = draw.choice((0, 1, 8, 9, 127, 255, draw.randrange(256)))
        spoilt = tmp_path / f"{n}.gguf"
        spoilt.write_bytes(data[:draw.randint(1, len(data))] if draw.random() < 0.2 else data)
        try:
            check_gguf(spoilt)
        except CreditscopeError:
            continue
        passed += 1
        with contextlib.suppress(Exception):  # whatever it says, it says it soon: load_policy puts it in words
            assert sum(len(field.parts) for field in gguf.GGUFReader(spoilt).fields.values()) < len(whole)
    assert 0 < passed < TRIES


def words(folder: Path, **settings: Any) -> None:
    """The tokenizer with other parts."""
    change(folder / "tokenizer.json", **settings)


SPLIT = {"type": "Split", "pattern": {"Regex": "^(([0-9 +=?a-zA-Z.,])+.)+[A-Z]([0-9a-z])+$x"}, "behavior": "Isolated",
         "invert": False}
LONG = "x" * 40 + " 46"
"""A text on which that pattern tries more ways than its library allows."""
BROKEN_WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "no word": ({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}, "added_tokens": []},
                r"Exception: WordLevel error: Missing \[UNK\]"),
    "a pattern that never ends": ({"pre_tokenizer": SPLIT}, "PanicException: Onig: Regex search error"),
    "a part that is missing": ({"post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "NONE", "type_id": 0}}], "pair": [],
        "special_tokens": {}}}, "PanicException"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN_WORDS)
def test_a_tokenizer_that_fails_or_panics_is_told_with_its_model(name: str, folder: Path) -> None:
    settings, said = BROKEN_WORDS[name]
    words(folder, **settings)
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    policy = load_policy(str(folder), device="cpu")
    for read in (policy.encode, policy.tokenize, partial(encode_exactly, policy, what="it")):
        with pytest.raises(CreditscopeError, match=f"the tokenizer of .* failed .*{said}") as found:
            read(LONG)
        assert "take the tokenizer.json that belongs to the model" in str(found.value)
        if name == "a part that is missing":
            break  # texts without special tokens pass


def test_a_tokenizer_that_panics_ends_a_verb_with_exit_code_2(folder: Path, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    words(folder, **BROKEN_WORDS["a pattern that never ends"][0])
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": LONG, "response": "r", "reward": 1}) + "\n") * 2)
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(rows), "--model", str(folder)])
    assert stop.value.code == 2
    assert "failed (PanicException: Onig: Regex search error" in capsys.readouterr().err
