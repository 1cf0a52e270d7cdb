"""A file is read as it lies, batch by batch: no group is cut, little is held, and it can be left and taken up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli import run, start
from creditscope import CreditscopeError, Record
from creditscope.offline.batches import Reader
from creditscope.offline.files import Place, Source, Trail
from creditscope.offline.scope import scope_file
from creditscope.offline.settings import Settings
from each import each

DUMPS = Path(__file__).parent / "dumps"
COMPLETIONS = Path(__file__).parents[2] / "examples" / "completions"  # what TRL logged


def rows(groups: int, size: int = 2, **more: Any) -> Iterator[dict[str, Any]]:
    for g in range(groups):
        for i in range(size):
            yield {"prompt": f"p{g}", "response": f"r{i}", "reward": i % 2, "tokens": [g % 7, i], "logp": [-1.0, -0.5],
                   "group": g} | more


def write(path: Path, found: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> Path:
    with path.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in found)
    return path


def sizes(path: Path, **settings: Any) -> list[int]:
    return [len(batch.samples) for batch in Reader(Source(path), **settings).batches()]


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_closed_at_the_end_of_the_group_in_which_it_is_full(tmp_path: Path) -> None:
    # Groups of 3: after 4 rows the second group still lacks two, so batches have 6.
    assert sizes(write(tmp_path / "f.jsonl", rows(5, 3)), rows=4) == [6, 6, 3]


def test_a_batch_is_the_rows_of_one_step_however_many(tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", [row | {"step": s} for s, n in ((4, 3), (9, 1)) for row in rows(n)])
    assert sizes(file, rows=1) == [6, 2]


def test_groups_may_be_mixed_inside_a_batch(tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", sorted(rows(3), key=lambda row: row["response"]))
    assert sizes(file, rows=512) == [6]


@each("found, message", [
    (sorted(rows(3), key=lambda row: row["response"]), "line 4: group 0 comes again after other groups"),
    ([next(rows(1)) | {"step": s} for s in (1, 3, 2)], "line 3: step 2 comes after step 3; sort the file by step"),
    ([next(rows(1)), next(rows(1)) | {"step": 1}], "line 2: some rows name the training step"),
    ([{"tokens": [1], "logp": [-1.0], "reward": 1.0}], "line 1: neither a prompt nor a group"),
])
def test_a_file_in_an_order_that_would_cut_groups_is_refused_by_line(found: list[dict[str, Any]], message: str,
                                                                     tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=message):
        sizes(write(tmp_path / "f.jsonl", found), rows=2)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_named_group_that_comes_back_after_many_batches_is_refused_by_line(resumed: bool, tmp_path: Path) -> None:
    # Batches of 4 rows, first answers to groups 0 … 9, then second ones: rows 9 to 12 are groups 8, 9, 0, 1.
    file = write(tmp_path / "f.jsonl", sorted(rows(10), key=lambda row: row["response"]))
    reader = Reader(Source(file), rows=4)
    found = reader.batches()
    second = [next(found), next(found)][1]
    if resumed:
        found = Reader(Source(file), rows=4).batches(second.place)
    with pytest.raises(CreditscopeError, match=r"line 11: group 0 comes again .* sort the file by group, give more"):
        list(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_that_comes_back_is_a_group_of_its_own_and_is_counted(kind: str, tmp_path: Path) -> None:
    found = [{"prompt": f"p{g}", "response": "r", "reward": i} for i in range(2) for g in range(10)]
    file = write(tmp_path / "f.jsonl", found)
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        file = tmp_path / "f.parquet"
        parquet.write_table(arrow.Table.from_pylist(found), file)
    reader = Reader(Source(file), rows=4)
    batches = list(reader.batches())
    assert [len(batch.samples) for batch in batches] == [4] * 5
    assert reader.again == 10
    # Whoever goes on knows what came first: after row 4 all ten are still to come again, after row 16 p6 … p9.
    for after, again in ((0, 10), (3, 4)):
        resumed = Reader(Source(file), rows=4)
        assert len(list(resumed.batches(batches[after].place))) == 4 - after
        assert resumed.again == again
    sorted_ = Reader(Source(write(tmp_path / "g.jsonl", sorted(found, key=lambda row: row["prompt"]))), rows=4)
    assert len(list(sorted_.batches())) == 5
    assert sorted_.again == 0


def test_a_group_may_come_again_at_another_step_and_names_are_not_mistaken(tmp_path: Path) -> None:
    steps = Reader(Source(write(tmp_path / "f.jsonl", [row | {"step": s} for s in (1, 2) for row in rows(3)])), rows=2)
    assert [len(batch.samples) for batch in steps.batches()] == [6, 6]
    # In Python hash(-1) is hash(-2), and a text is not the number that it spells.
    names = Reader(Source(write(tmp_path / "g.jsonl", [row | {"group": g} for g in (-1, -2, 1, "1", "p0")
                                                       for row in rows(1)])), rows=2)
    assert [len(batch.samples) for batch in names.batches()] == [2] * 5
    assert names.again == 0


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write(tmp_path / f"{step}.jsonl", [row | {"step": step} for row in rows(1)])
    assert [batch.step for batch in Reader(Source(tmp_path)).batches()] == [9, 10, 100]
    (tmp_path / "run.json").touch()
    with pytest.raises(CreditscopeError, match="is a run of creditscope, not a file of rollouts"):
        Source(tmp_path)


@each("make, message", [
    (lambda path: path.mkdir(), "holds no rollouts: no file in it ends in .jsonl or .parquet"),
    (lambda path: (path / "completions").mkdir(parents=True), "holds no rollouts: .*; try .*/x/completions$"),
    (lambda path: None, "cannot read .*: No such file"),
    (lambda path: path.touch(), "is empty; expected one JSON object per line"),
    (lambda path: path.write_text("[" * 100_000), "line 1: not valid JSON: nested too deeply"),
    (lambda path: path.write_text('{"prompt": 1\n'), "line 1: not valid JSON"),
    (lambda path: path.write_text("3\n"), "line 1: expected a JSON object, got int"),
    (lambda path: path.write_bytes(b'{"prompt": "\xff"}\n'), "line 1: not UTF-8 text: byte 0xff"),
])
def test_what_is_no_file_of_rollouts_is_told_in_a_sentence(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(CreditscopeError, match=message):
        sizes(tmp_path / "x")


def test_a_parquet_file_that_is_none_is_told_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CreditscopeError, match=r"x.parquet: not a parquet file that can be read: "):
        sizes(tmp_path / "x.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("column", ["text", "chat", "bytes"])
def test_a_text_that_parquet_repeats_is_held_once(column: str, tmp_path: Path) -> None:
    # 200 rows of one text of 2²⁰ characters are a few kB on disk, and would be 200 MiB at once.
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    index = arrow.array([0] * 200, arrow.int32())
    long = arrow.DictionaryArray.from_arrays(index, arrow.array(["x" * 2**20]))
    if column == "bytes":
        long = long.cast(arrow.dictionary(arrow.int32(), arrow.binary()))
    if column == "chat":
        said = arrow.StructArray.from_arrays([arrow.array(["user"] * 200), long], ["role", "content"])
        long = arrow.ListArray.from_arrays(arrow.array(range(201), arrow.int32()), said)
    # Without the schema of Arrow, which would say that the column is a dictionary.
    parquet.write_table(arrow.table({"prompt": long}), tmp_path / "x.parquet", store_schema=False)
    assert (tmp_path / "x.parquet").stat().st_size < 10**5
    del long
    before, count = arrow.total_allocated_bytes(), 0
    tracemalloc.start()
    for found in Source(tmp_path / "x.parquet").objects():
        assert found.size >= 2**20
        assert arrow.total_allocated_bytes() - before < 10 * 2**20
        count += 1
    assert count == 200
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("column", "limit"), [("x" * 10**5, 10**5), ([7] * 10**5, 8 * 10**5)])
def test_a_row_group_that_would_not_fit_is_refused_before_it_is_unpacked(
        column: Any, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"x": [column]}), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 10**5 / 4
    monkeypatch.setattr("creditscope.offline.files.LARGEST", limit - 1)
    with pytest.raises(CreditscopeError, match=r"x.parquet: row group 0 takes [0-9,]+ bytes, over [0-9,]+; write the"):
        list(Source(tmp_path / "x.parquet").objects())
    monkeypatch.setattr("creditscope.offline.files.LARGEST", 2 * limit)
    assert [o.row for o in Source(tmp_path / "x.parquet").objects()] == [{"x": column}]


def test_a_batch_that_would_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditscope.offline.batches.LARGEST", 1000)
    with pytest.raises(CreditscopeError, match="step 1 takes more than 1,000 bytes; split it"):
        sizes(write(tmp_path / "f.jsonl", rows(20, step=1)))
    monkeypatch.undo()
    monkeypatch.setattr("creditscope.batch.jsonl.CELLS", 100)
    long = [row | {"tokens": [1] * 60, "logp": [-1.0] * 60} for row in rows(1)]
    with pytest.raises(CreditscopeError, match="line 1: an answer of 60 tokens in a batch of 2 rows"):
        list(scope_file(write(tmp_path / "g.jsonl", long), Settings()))


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "grows"), [(True, 10), (False, 160)])
def test_memory_grows_by_a_number_a_group_and_not_at_all_with_steps(steps: bool, grows: int, tmp_path: Path) -> None:
    # A number of 64 bits is 36 bytes, and its place in a set 27 to 107; a group of this file is about 3 kB of samples.
    peaks = []
    for groups in (320, 1600):
        found = (row | ({"step": row["group"] // 16} if steps else {}) for row in rows(groups, 4))
        file = write(tmp_path / f"{groups}.jsonl", found)
        tracemalloc.start()
        for batch in Reader(Source(file), rows=64).batches():
            assert len(batch.samples) == 64
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < grows * (1600 - 320)


# -- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "folder", "parquet"])
def test_a_source_goes_on_from_any_place_with_what_comes_after_it(kind: str, tmp_path: Path) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    path = COMPLETIONS if kind == "parquet" else DUMPS / "verl" if kind == "folder" else \
        write(tmp_path / "f.jsonl", rows(4))
    source = Source(path)
    found = list(source.objects())
    assert source.done(found[-1].place) == source.size
    for i in (0, len(found) // 2, len(found) - 1):
        assert [o.where for o in source.objects(found[i].place)] == [o.where for o in found[i + 1:]]


def test_the_hash_is_of_what_was_read_and_of_nothing_else(tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", rows(4))
    places = [Place(), *(o.place for o in Source(file).objects())]

    def digest(place: Place) -> str:
        trail = Trail(Source(file))
        trail.advance(place)
        return trail.digest

    before = [digest(place) for place in places]
    assert len(set(before)) == len(places)
    data = bytearray(file.read_bytes())
    data[places[4].end + 12] ^= 1  # inside the fifth row
    file.write_bytes(data)
    after = [digest(place) for place in places]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True] * 5 + [False] * 4


# -- left and taken up -----------------------------------------------------------------------------------------------


def content(out: Path) -> tuple[list[dict[str, Any]], dict[tuple[int, str], Any], dict[str, Any]]:
    """Everything in a record but the seconds."""
    record = Record.open(out)
    lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in record.steps()]
    arrays = {(step, name): x for step in record.groups() for name, x in record.group(step).items()}
    return lines, arrays, record.config


def same(a: Path, b: Path) -> bool:
    (steps, groups, config), (steps_, groups_, config_) = content(a), content(b)
    return (steps, config, groups.keys()) == (steps_, config_, groups_.keys()) and all(
        np.array_equal(x, groups_[place]) for place, x in groups.items())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["jsonl", "verl", "trl"])
def test_a_reading_that_was_stopped_after_any_batch_ends_as_if_it_had_not(path: str, tmp_path: Path) -> None:
    if path == "trl":
        pytest.importorskip("pyarrow")
    file = write(tmp_path / "f.jsonl", rows(9)) if path == "jsonl" else COMPLETIONS if path == "trl" else DUMPS / path
    settings = Settings(rows=4, keep_every=1)
    whole = list(scope_file(file, settings, tmp_path / "whole"))
    assert len(whole) == {"jsonl": 5, "verl": 2, "trl": 2}[path]
    for after in range(1, len(whole)):
        out = tmp_path / f"stopped-{after}"
        count = iter(range(1, 100))
        assert len(list(scope_file(file, settings, out, stop=lambda c=count, n=after: next(c) >= n))) == after
        # What a kill may leave: the arrays of a batch whose line was not written, and half a line.
        (out / "groups" / f"{after:06d}.npz").write_bytes(b"half")
        with (out / "steps.jsonl").open("a") as torn:
            torn.write('{"step": 7, "rew')
        assert len(list(scope_file(file, settings, out, resume=True))) == len(whole) - after
        assert same(out, tmp_path / "whole")
    assert list(scope_file(file, settings, tmp_path / "whole", resume=True)) == []


@pytest.mark.slow
def test_a_reading_stops_inside_a_parquet_file_too(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parts = [parquet.read_table(COMPLETIONS / f"completions_0000{step}.parquet") for step in (1, 3)]
    parquet.write_table(arrow.concat_tables(parts), tmp_path / "both.parquet")
    assert len(list(scope_file(tmp_path / "both.parquet", Settings(), tmp_path / "run", stop=lambda: True))) == 1
    rest, = scope_file(tmp_path / "both.parquet", Settings(), tmp_path / "run", resume=True)
    assert (rest.line["file/step"], rest.line["file/row"]) == (3, 32)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda f: f.write_bytes(f.read_bytes().replace(b'"r0"', b'"r9"', 1)), "f.jsonl has changed before its row 4"),
    (lambda f: f.write_bytes(f.read_bytes() + b"\n"), "its size is [0-9]+, not [0-9]+"),
])
def test_another_file_is_not_taken_for_the_one_that_was_read(spoil: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", rows(4))
    list(scope_file(file, Settings(rows=4), tmp_path / "run", stop=lambda: True))
    spoil(file)
    with pytest.raises(CreditscopeError, match=message):
        list(scope_file(file, Settings(rows=4), tmp_path / "run", resume=True))


def test_other_settings_are_not_taken_for_those_of_the_record(tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", rows(4))
    list(scope_file(file, Settings(rows=4), tmp_path / "run", stop=lambda: True))
    with pytest.raises(CreditscopeError, match="its method is 'grpo', not 'rloo'"):
        list(scope_file(file, Settings(rows=4, method="rloo"), tmp_path / "run", resume=True))
    with pytest.raises(CreditscopeError, match="already holds a run; continue it with --resume"):
        list(scope_file(file, Settings(rows=4), tmp_path / "run"))


def test_a_file_that_fails_at_its_first_batch_leaves_no_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", [next(rows(1))])
    with pytest.raises(CreditscopeError, match=r"f\.jsonl, line 1 to line 1: .* but group 0 has one rollout"):
        list(scope_file(file, Settings(), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_pipe_is_read_but_not_recorded(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows(3))
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(text))
    writer.start()
    read, = scope_file(tmp_path / "pipe", Settings())
    writer.join()
    assert (read.line["rollouts/used"], read.size) == (6, 0)
    with pytest.raises(CreditscopeError, match="is a pipe, which cannot be read a second time"):
        list(scope_file(tmp_path / "pipe", Settings(), tmp_path / "run"))


def test_ctrl_c_keeps_every_batch_and_resume_ends_as_if_there_had_been_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "f.jsonl", rows(24))
    real = Record.append

    def append(self: Record, step: int, line: dict[str, Any]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        real(self, step, line)

    monkeypatch.setattr(Record, "append", append)
    assert run("inspect", file, "--rows", "8", "--out", tmp_path / "run") == 130
    monkeypatch.undo()
    told = capsys.readouterr()
    assert f"Next: creditscope inspect {file} --rows 8 --out {tmp_path / 'run'} --resume" in told.out
    assert "Traceback" not in told.err
    assert len(Record.open(tmp_path / "run").steps()) == 3
    list(scope_file(file, Settings(rows=8), tmp_path / "run", resume=True))
    list(scope_file(file, Settings(rows=8), tmp_path / "whole"))
    assert len(Record.open(tmp_path / "whole").steps()) == 6
    assert same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.nightly
def test_ctrl_c_from_outside_keeps_every_batch_too(tmp_path: Path) -> None:
    file = write(tmp_path / "f.jsonl", rows(800))
    child = start("inspect", file, "--rows", "8", "--out", tmp_path / "run")
    lines = tmp_path / "run" / "steps.jsonl"
    while not (lines.exists() and lines.stat().st_size > 1000):
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=600)
    assert child.returncode == 130
    assert f"Next: creditscope inspect {file} --rows 8 --out {tmp_path / 'run'} --resume" in out
    assert "Traceback" not in err
    done = len(Record.open(tmp_path / "run").steps())
    assert 0 < done < 200
    list(scope_file(file, Settings(rows=8), tmp_path / "run", resume=True))
    list(scope_file(file, Settings(rows=8), tmp_path / "whole"))
    assert same(tmp_path / "run", tmp_path / "whole")
