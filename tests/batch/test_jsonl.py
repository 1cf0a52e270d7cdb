"""JSON lines are read exactly, and every fault is named by its line."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope import CreditscopeError, Rollouts
from creditscope.batch.jsonl import read_jsonl, read_rows
from each import each
from makers import make, random_batches, to_rows, write_jsonl

GOOD = {"tokens": [1, 2], "logp": [-0.5, -0.25], "reward": 1.0, "group": 0}


def same(a: Rollouts, b: Rollouts) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(Rollouts)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
               for x, y in pairs)


@given(random_batches(), st.text(), st.sampled_from([torch.float32, torch.float64]))
def test_the_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, batch: Rollouts, text: str,
                                 dtype: torch.dtype) -> None:
    narrow = {n: getattr(batch, n).to(dtype) for n in ("logp", "reward", "ref_logp", "entropy")}
    steps = torch.where(batch.mask, torch.arange(batch.mask.shape[1]) // 2, -1)
    batch = replace(batch, **narrow, step=steps, step_reward=torch.rand(len(batch), int(steps.max()) + 1).to(dtype),
                    prompt=[text] * len(batch), text=[text] * len(batch)).trim()
    unused = torch.arange(batch.step_reward.shape[1]) > batch.step.amax(dim=1, keepdim=True)
    batch = replace(batch, step_reward=batch.step_reward.masked_fill(unused, 0.0))
    path = tmp_path_factory.mktemp("round") / "rollouts.jsonl"
    write_jsonl(path, batch)
    assert same(read_jsonl(path, dtype=dtype), batch)


def test_text_that_others_wrote_survives_the_round_trip(tmp_path: Path) -> None:
    batch = make([1, 0], group=[0, 0], lengths=[4, 2])
    mask = batch.mask.clone()
    mask[0, 1:3] = False
    batch = replace(batch, mask=mask, tokens=torch.tensor([[4, 7, 8, 2], [1, 1, 0, 0]]))
    write_jsonl(tmp_path / "r.jsonl", batch)
    assert same(read_jsonl(tmp_path / "r.jsonl", dtype=torch.float64), batch)


@each(("line", "message"), [
    ("{", "not valid JSON"),
    ("[1]", "expected a JSON object, got list"),
    (json.dumps(GOOD | {"rewrad": 1}), "unknown field 'rewrad'; did you mean 'reward'"),
    (json.dumps({k: v for k, v in GOOD.items() if k != "logp"}), "field 'logp' is missing"),
    (json.dumps(GOOD | {"logp": [-0.5]}), "'logp' has 1 entries for 2 tokens"),
    (json.dumps(GOOD | {"reward": "1"}), "'reward' must be float, got '1'"),
    (json.dumps(GOOD | {"reward": True}), "'reward' must be float, got True"),
    (json.dumps(GOOD | {"reward": float("nan")}), "NaN is not allowed"),
    (json.dumps(GOOD | {"logp": [-0.5, float("-inf")]}), "-Infinity is not allowed"),
    (json.dumps(GOOD).replace("1.0", "1e999"), "'reward' must be finite, got inf"),
    (json.dumps(GOOD).replace("1.0", "1" * 400), "'reward' does not fit a float: an integer of 400 digits"),
    (json.dumps(GOOD | {"tokens": [1, 2.5]}), r"'tokens\[1\]' must be int, got 2.5"),
    (json.dumps(GOOD | {"tokens": [1, 2**70]}), r"'tokens\[1\]' must fit 64 bits"),
    (json.dumps(GOOD | {"tokens": {}}), "'tokens' must be a list of int, got a dict of 0"),
    (json.dumps(GOOD | {"prompt": 3}), "'prompt' must be text, got 3"),
    ("[" * 100_000, "nested too deeply|not valid JSON"),
])
def test_a_malformed_line_is_reported_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(CreditscopeError, match=rf"line 3: .*({message})"):
        list(read_rows(path))


def test_bytes_that_are_not_utf8_are_reported_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(CreditscopeError, match="line 2: not UTF-8 text: byte 0xff"):
        list(read_rows(path))


@pytest.mark.slow
def test_a_line_without_end_stops_at_the_limit_and_not_at_the_end_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with path.open("wb") as out:  # 10 GB in one line, as a sparse file
        out.write(json.dumps(GOOD).encode() + b"\n")
        out.truncate(10 * 2**30)
    with pytest.raises(CreditscopeError, match=r"line 2: the line is longer than 67,108,864 bytes"):
        list(read_rows(path))


def test_a_field_that_only_some_rows_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD | {"entropy": [1.0, 2.0]}) + "\n" + json.dumps(GOOD) + "\n")
    with pytest.raises(CreditscopeError, match=r"'entropy' is in 1 of 2 rollouts \(missing first in rollout 1\)"):
        read_jsonl(path)


def test_a_missing_file_an_empty_file_and_a_folder_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, message in {"absent": "no such file", "empty": "is empty", ".": "cannot read"}.items():
        with pytest.raises(CreditscopeError, match=message):
            read_jsonl(tmp_path / name)


def test_rows_carry_no_padding() -> None:
    assert [len(row["tokens"]) for row in to_rows(make([1, 0], group=[0, 0], lengths=[1, 3], width=9))] == [1, 3]
