"""A long run stays as large as it was: nothing is held from step to step, and options bound what is on disk."""

from __future__ import annotations

import gc
import importlib.util
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mini
from creditscope.lab.train import train
from creditscope.runs.config import Config
from creditscope.runs.record import Record, spacing

SMALL = Config(model=mini.model(), task=mini.TASK, group=2, prompts=1, steps=20, max_tokens=6, eval_problems=0, lr=1e-4,
               scope="full", probe="full", probe_every=2, inner_steps=2, keep_every=2, checkpoint_every=3,
               also=("prefix_tree",), device="cpu")
pytestmark = pytest.mark.usefixtures("mini_task")

BLOCKS = 50
"""Blocks a step that are no leak. A line of a step that was read is 100 and more: a number for each name."""


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """gc passes over what there was before the test: a million objects of torch and transformers."""
    gc.freeze()
    yield
    gc.unfreeze()


def held(run: Iterator[dict[str, Any]], *at: int) -> list[tuple[int, Counter[type]]]:
    """(blocks of Python's allocator, living objects by type) after each of these steps. A dictionary of numbers is no
    object that gc knows of, so both are asked. The first look fills caches of its own."""
    found = []
    for line in run:
        if line["step"] in at:
            gc.collect()
            blocks = sys.getallocatedblocks()
            found.append((blocks, Counter(map(type, gc.get_objects()))))
    return found


@pytest.mark.slow
def test_a_step_under_the_whole_microscope_leaves_no_object_behind(tmp_path: Path, only_new_objects: None) -> None:
    """In six steps every schedule comes round twice: probes, kept rollouts, checkpoints, another credit. What a cache
    takes comes once, what leaks comes in both windows, so the smaller growth counts."""
    run = train(replace(SMALL, steps=26), tmp_path / "run", {})
    _, (first, _), (second, early), (third, late) = held(run, 12, 13, 19, 25)
    grown = late - early
    assert not any(kind.__module__.startswith(("torch", "numpy", "creditscope")) for kind in grown), grown
    assert sum(grown.values()) < 6, grown  # less than one a step
    assert min(second - first, third - second) < 6 * BLOCKS, (second - first, third - second)


@pytest.mark.slow
def test_the_count_notices_one_line_of_metrics_a_step(tmp_path: Path, only_new_objects: None) -> None:
    """Can fail: a consumer that keeps the line of every step, as the loop itself once did."""
    kept = []

    def leaking() -> Iterator[dict[str, Any]]:
        for line in train(replace(SMALL, steps=10, scope="light", also=(), probe="off"), tmp_path / "run", {}):
            kept.append(dict(line))
            yield line

    _, (early, _), (late, _) = held(leaking(), 2, 3, 9)
    assert late - early > 6 * BLOCKS


# -- the record ------------------------------------------------------------------------------------------------------


def test_a_record_with_keep_most_is_bounded_and_evenly_spread(tmp_path: Path) -> None:
    """After step 90 of a schedule of ten there would be ten files. With at most four: 10·2^k ≤ 90 has 10 multiples
    from 0 for k = 0, 5 for k = 1 (0, 20, …, 80) and 3 for k = 2 (0, 40, 80)."""
    with Record.create(tmp_path / "run", {}, {}) as record:
        for step in range(0, 91, 10):
            record.save_group(step, {"x": np.zeros(1)})
            record.save_reading(step, {"x": np.zeros(1)})
            record.append(step, {})
            record.thin(step, 4, {"groups": 10, "scope": 10, "optimizer": 0})
            assert len(record.groups()) <= 4
            assert Record.open(record.path).missing() == []  # what was thinned is not missed
        assert record.groups() == record.readings() == [0, 40, 80]
        record.thin(90, 0, {"groups": 10})
        assert record.groups() == [0, 40, 80]  # 0 is no bound
        record.rewind(60)  # the steps that thinned are forgotten, and what they thinned is gone all the same
        assert Record.open(record.path).missing() == []
        (record.path / "scope" / "000040.npz").unlink()
        assert Record.open(record.path).missing() == record.missing() == ["scope/000040.npz"]


@pytest.mark.parametrize("most", [1, 2, 7])
def test_spacing_is_the_least_that_leaves_room(most: int) -> None:
    for step in range(200):
        apart = spacing(step, 3, most)
        assert step // apart + 1 <= most
        assert apart == 3 or step // (apart // 2) + 1 > most


@pytest.mark.slow
def test_a_run_with_keep_most_keeps_the_same_files_after_a_stop(tmp_path: Path) -> None:
    config = replace(SMALL, steps=9, scope="light", probe="off", also=(), inner_steps=1, keep_every=1, keep_most=3)
    for _ in train(config, tmp_path / "whole", {}):
        pass
    for _ in islice(train(config, tmp_path / "cut", {}), 7):
        pass  # the newest checkpoint is after step 5
    for _ in train(config, tmp_path / "cut", {}, resume=True):
        pass
    whole, cut = (Record.open(tmp_path / name) for name in ("whole", "cut"))
    assert whole.groups() == cut.groups() == whole.readings() == cut.readings() == [0, 4, 8]
    for step in whole.readings():
        assert np.array_equal(whole.reading(step)["gram"], cut.reading(step)["gram"])
    assert [step["gram/group/effective_rank"] for step in whole.steps() if "gram/group/effective_rank" in step] == \
        [step["gram/group/effective_rank"] for step in cut.steps() if "gram/group/effective_rank" in step]


# -- the judge of benchmarks/soak.py ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # its dataclasses look their types up there
    spec.loader.exec_module(module)
    return module


def test_the_slope_is_the_median_of_all_slopes_between_two_points(soak: ModuleType) -> None:
    """(0, 0), (1, 1), (2, 2), (3, 9): slopes 1, 1, 3, 1, 4, 7; their median is 2. One wild point moves it little."""
    assert soak.theil_sen([0, 1, 2, 3], [0.0, 1.0, 2.0, 9.0]).value == 2.0


@pytest.mark.parametrize(("leak", "verdict"), [(0.0, "flat"), (0.03e6, "grows")])
def test_a_leak_of_thirty_kilobytes_a_step_is_noticed_and_noise_is_not(soak: ModuleType, leak: float,
                                                                       verdict: str) -> None:
    """30 KB a step are 30 MB in 1,000 steps: 3 % of a gigabyte, under a noise of 2 MB and a warm-up of 200 MB."""
    draw = random.Random(0)
    rss = [int(1e9 - 2e8 * 0.98**step + leak * step + draw.gauss(0, 2e6)) for step in range(2000)]
    samples = [soak.Sample(0, float(step), step, size, 3, 3, None, 0) for step, size in enumerate(rss)]
    found = soak.growth(samples, rss)
    assert found.verdict(soak.FLAT) == verdict
    assert found.value == pytest.approx(1000 * leak / statistics.median(rss[1000:]), abs=1e-3)


@pytest.mark.parametrize(("drift", "verdict"), [(0.0, "flat"), (0.2, "grows")])
def test_more_work_is_no_drift_and_slower_steps_of_equal_work_are(soak: ModuleType, drift: float, verdict: str) -> None:
    """t = 0.1 + 0.01·longest + 0.05·live + drift·0.8·step/2000: answers grow from 40 to 60 tokens on the way, by half,
    and of eight groups more are dead, step by step."""
    draw = random.Random(0)
    steps = []
    for step in range(2000):
        longest = 40 + 20 * step / 2000 + draw.gauss(0, 5)
        live = sum(draw.random() > 0.5 * step / 2000 for _ in range(8))
        steps.append({"step": step, "length/mean": longest - 10, "length/max": longest, "signal/live_groups": live,
                      "time/step": 0.1 + 0.01 * longest + 0.05 * live + drift * 0.8 * step / 2000
                      + draw.gauss(0, 0.01)})
    assert soak.fifths(steps, "length/max") > 1.2
    assert soak.fifths(steps, "signal/live_groups") < 0.8
    found = soak.drift(steps)
    assert found.verdict(soak.STEADY) == verdict
    assert found.value == pytest.approx(drift * 0.8 / statistics.fmean(line["time/step"] for line in steps), abs=0.03)


def test_a_shelf_whose_files_grow_is_off_its_line_and_its_second_half_is_larger(soak: ModuleType) -> None:
    """Files of one size are on the line. Files of size 1, …, n make x²/2 of n²/2 by the x-th: farthest from the line at
    the middle, by 1/4; the second half has 3/4 of the bytes."""
    even = soak.shelf([(step, 100) for step in range(100)], 100)
    assert (even.off_line, even.halves) == (pytest.approx(0.0, abs=1e-12), 1.0)
    grown = soak.shelf([(step, step) for step in range(1000)], 1000)
    assert (grown.off_line, grown.halves) == (pytest.approx(0.25, abs=1e-3), pytest.approx(3, rel=1e-2))


BURN = 0.005
RUN = """
import signal, sys, time
from pathlib import Path
out, drag, steps, ahead = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
file, age = out / "steps.jsonl", 0
done = file.read_bytes().count(b"\\n") if file.exists() else 0

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCONT])
while True:
    if age >= ahead:
        signal.sigwait([signal.SIGCONT])
        start = time.process_time()
        while time.process_time() - start < BURN * (1 + drag * age / steps):
            pass
    with file.open("a") as lines:
        lines.write(f'{{"step": {done + age}, "time/step": {age}}}\\n')
    age += 1
""".replace("BURN", str(BURN))
"""A run that takes `ahead` steps at once, and then one whenever it is told to go on: how fast the machine is, and when
it looks at the run, changes nothing. A step takes BURN · (1 + drag · age/steps) seconds of a processor."""


def test_of_pairs_of_steps_the_median_ratio_decides_and_a_few_disturbed_ones_do_not(soak: ModuleType) -> None:
    """101 pairs: the ranks (100 ∓ 1.96·√101)/2 are 40 and 60 of 0, …, 100. Ten that were disturbed stand at the end."""
    aged = [1.0 + 0.0001 * step for step in range(91)] + [9.0] * 10
    found = soak.ratio(aged, [1.0] * 101)
    assert (found.value, found.low, found.high) == (0.005, 0.004, 0.006)
    assert found.verdict(soak.STEADY) == "flat"
    assert soak.ratio([seconds + 0.1 for seconds in aged], [1.0] * 101).verdict(soak.STEADY) == "grows"


@pytest.mark.slow
@pytest.mark.parametrize("drag", [0.0, 1.0])
def test_a_process_that_gets_slower_with_its_age_is_told_from_a_fresh_one_on_the_same_steps(
        soak: ModuleType, drag: float, tmp_path: Path) -> None:
    """Pairs from ages 45 and 5 on, of 80 steps: (1 + 60/80·drag)/(1 + 20/80·drag) = 1.4 in the middle for drag = 1."""
    out, steps = tmp_path / "run", 80
    out.mkdir()

    def command(place: Path, ahead: int) -> list[str]:
        return [sys.executable, "-c", RUN, str(place), str(drag), str(steps), str(ahead)]

    aged = subprocess.Popen(command(out, 40))
    try:
        while not (out / "steps.jsonl").exists() or soak.lines(out) < 40:
            assert aged.poll() is None
            time.sleep(0.01)
        pairs = soak.side_by_side(aged, out, command(soak.fresh(out), soak.WARM), steps)
    finally:
        aged.kill()
        aged.wait()
    taken, seconds, busy, fresh_seconds, fresh_busy = zip(*pairs, strict=True)
    assert taken == tuple(range(45, 79))
    assert soak.ratio(busy, fresh_busy).value == pytest.approx(0.4 * drag, abs=0.1)
    # The clock's seconds are no fewer than the processor's, and more where other tests run beside it.
    assert all(spent >= BURN * (1 + drag * step / steps) for step, spent in zip(taken, seconds, strict=True))
    assert all(spent >= BURN * (1 + drag * (step - 40) / steps)
               for step, spent in zip(taken, fresh_seconds, strict=True))
    assert soak.same_work(out, pairs[0][0])
    line = (soak.fresh(out) / "steps.jsonl").read_text().splitlines()
    (soak.fresh(out) / "steps.jsonl").write_text("\n".join([*line[:-1], line[-1].replace('"step"', '"stop"')]) + "\n")
    assert not soak.same_work(out, pairs[0][0])
