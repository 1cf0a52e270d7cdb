"""Many rollouts, many runs, and a page that follows a run: memory and page do not grow with them beyond their bound."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from creditscope.claims import evidence
from creditscope.cli.check import read_runs
from creditscope.errors import CreditscopeError
from creditscope.offline.batches import Reader
from creditscope.offline.files import Source
from creditscope.offline.scope import scope_file
from creditscope.offline.settings import Settings
from creditscope.report import optimizer, steps
from creditscope.report.build import build
from creditscope.report.watch import Watched
from creditscope.runs.record import Record
from report import records


def write_rollouts(path: Path, rollouts: int) -> Path:
    """Four answers a prompt, twenty tokens each."""
    with path.open("w") as out:
        for number in range(rollouts):
            out.write(json.dumps({"prompt": f"problem {number // 4}", "response": "x" * 400, "reward": number % 3 % 2,
                                  "tokens": list(range(20)), "logp": [-0.5] * 20}) + "\n")
    return path


def peak(of: Callable[[], object]) -> int:
    """Most bytes that Python held meanwhile."""
    gc.collect()
    tracemalloc.start()
    of()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def read_through(file: Path) -> None:
    for _ in scope_file(file, Settings(rows=32)):
        pass


@pytest.mark.slow
def test_a_file_eight_times_as_long_is_read_in_the_same_memory(tmp_path: Path) -> None:
    """What may grow is a number a group: 168 more, 32 bytes each in a set that is a quarter full and held twice when it
    grows, and 32 the number itself: 50 KB. That the measure can fail: the batches held together take megabytes."""
    short, long = (write_rollouts(tmp_path / f"{count}.jsonl", count) for count in (96, 768))
    read_through(short)  # imports and caches
    assert peak(lambda: read_through(long)) - peak(lambda: read_through(short)) < 100_000
    assert peak(lambda: list(Reader(Source(long), rows=32).batches())) > 1_000_000


@pytest.mark.slow
def test_a_reading_with_keep_most_keeps_so_many_files(tmp_path: Path) -> None:
    """48 batches of 32, all kept: 2^k apart with at most five in 0 … 47 is 16 (0, 16, 32)."""
    file = write_rollouts(tmp_path / "r.jsonl", 1536)
    for _ in scope_file(file, Settings(rows=32, keep_every=1, keep_most=5), tmp_path / "run"):
        pass
    assert Record.open(tmp_path / "run").groups() == [0, 16, 32]


# -- many steps ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thousands(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of 1,000, 3,000 and 24,000 steps."""
    folder = tmp_path_factory.mktemp("thousands")
    source = records.bare(folder / "source")
    return {count: records.lengthened(folder / str(count), source, count) for count in (1_000, 3_000, 24_000)}


@pytest.mark.slow
def test_a_page_of_eight_times_as_many_steps_is_no_larger(thousands: dict[int, Path]) -> None:
    """Both show at most 2,000 steps. What may grow are the digits of step numbers."""
    short, long = (len(build([thousands[count]]).encode()) for count in (3_000, 24_000))
    assert long < 1.05 * short


@pytest.mark.slow
def test_steps_are_read_in_a_fifth_of_the_memory_of_their_dicts(thousands: dict[int, Path]) -> None:
    """What 2,000 steps more take: the buffer into which a file is read in parts is no larger for them."""
    short, long = (Record.open(thousands[count]) for count in (1_000, 3_000))
    assert peak(long.columns) - peak(short.columns) < (peak(long.steps) - peak(short.steps)) / 5


@pytest.mark.slow
def test_answers_and_tables_do_not_depend_on_how_many_steps_are_drawn(thousands: dict[int, Path],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    thin = build([thousands[3_000]])
    monkeypatch.setattr(steps, "MOST", 3_000)
    monkeypatch.setattr(optimizer, "POINTS", 3_000)
    whole = build([thousands[3_000]])
    assert first_screen(whole) == first_screen(thin)
    assert " of 3,000 steps" in thin
    assert " of 3,000 steps" not in whole
    assert len(whole) > len(thin)


def first_screen(page: str) -> str:
    return page.partition("<header>")[2].partition("</header>")[0]


def test_a_damaged_line_far_down_is_named(thousands: dict[int, Path], tmp_path: Path) -> None:
    shutil.copytree(thousands[3_000], tmp_path / "run")
    lines = (tmp_path / "run" / "steps.jsonl").read_bytes().splitlines(keepends=True)
    lines[2_500] = lines[2_500].replace(b'"length/max": 40', b'"length/max": 41')
    (tmp_path / "run" / "steps.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(CreditscopeError, match="line 2501 is not what was written"):
        build([tmp_path / "run"])


# -- many runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten settings of five seeds: a bare run, its reward and its settings varied."""
    folder = tmp_path_factory.mktemp("fifty")
    source = Record.open(records.bare(folder / "source"))
    for number in range(50):
        config = source.config | {"lr": 1e-4 * (1 + number // 5), "seed": number % 5}
        with Record.create(folder / "runs" / f"lr{number // 5}" / f"seed-{number % 5}", config, {}) as record:
            for line in source.steps():
                record.append(line.pop("step"), line | {"reward/mean": line["reward/mean"] + number / 1000})
    return folder / "runs"


@pytest.mark.slow
def test_a_page_of_fifty_runs_costs_two_kilobytes_a_run_more_than_one_of_ten(fifty: Path) -> None:
    whole, some = build([fifty]), build([fifty / "lr0", fifty / "lr1"])
    assert "50 runs in 10 settings" in whole
    assert whole.count('data-run="') == 50
    assert (len(whole.encode()) - len(some.encode())) / 40 < 4000


def test_fifty_runs_are_read_and_a_copy_of_one_is_counted_once(fifty: Path, tmp_path: Path) -> None:
    shutil.copytree(fifty / "lr3" / "seed-1", tmp_path / "copy")
    assert len(read_runs([fifty, tmp_path / "copy"])) == 50


# -- a page that follows a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_page_that_follows_a_run_remembers_its_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with growing(tmp_path / "run") as record:
        watched = Watched([tmp_path / "run"], lambda: build([tmp_path / "run"], live=True, papers=True))
        read: list[int] = []
        whole = evidence._groups_of
        monkeypatch.setattr(evidence, "_groups_of", lambda *arrays: (read.append(1), whole(*arrays))[1])
        for step in range(4):
            record.append(step, records.hostile_line(step))
            record.save_reading(step, records.hostile_reading())
            assert f"{step}".encode() in watched.page()
        assert len(read) == 4  # not 1 + 2 + 3 + 4


def growing(path: Path) -> Record:
    config = {"model": "tiny", "task": "arithmetic", "method": "grpo", "group": 2, "prompts": 2, "steps": 9, "seed": 0,
              "scope": "light", "every": 1}
    return Record.create(path, config, {})


@contextmanager
def remembering() -> Iterator[dict[tuple[Any, ...], evidence.ReadingNumbers]]:
    """As `report --watch` does around each page."""
    looks: dict[tuple[Any, ...], evidence.ReadingNumbers] = {}
    before = evidence.remembered.set(looks)
    yield looks
    evidence.remembered.reset(before)


def test_a_record_read_again_reads_new_readings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with growing(tmp_path / "run") as record, remembering():
        for step in range(3):
            record.append(step, records.hostile_line(step))
            record.save_reading(step, records.hostile_reading())
        before = evidence.read_evidence(Record.open(tmp_path / "run"))
        read: list[int] = []
        whole = Record.reading
        monkeypatch.setattr(Record, "reading", lambda self, step: (read.append(step), whole(self, step))[1])
        assert evidence.read_evidence(Record.open(tmp_path / "run")) == before
        assert read == []
        record.append(3, records.hostile_line(2))
        record.save_reading(3, records.hostile_reading())
        record.save_reading(1, {name: 2 * x if name == "gram" else x for name, x in records.hostile_reading().items()})
        after = evidence.read_evidence(Record.open(tmp_path / "run"))
        assert sorted(read) == [1, 3]  # the new one, and the one that was replaced
    assert evidence.read_evidence(Record.open(tmp_path / "run")) == after  # the same by the slow way
    assert sorted(read) == [0, 1, 1, 2, 3, 3]


def test_what_is_remembered_of_readings_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "LOOKS", 2)
    with growing(tmp_path / "run") as record:
        for step in range(5):
            record.append(step, records.hostile_line(step))
            record.save_reading(step, records.hostile_reading())
    first = evidence.read_evidence(Record.open(tmp_path / "run"))
    with remembering() as looks:
        for _ in range(2):
            assert evidence.read_evidence(Record.open(tmp_path / "run")) == first
    assert len(looks) == 2
