"""A long run with the full microscope, watched from another process: do memory and step time stay constant?

    python benchmarks/soak.py [--steps 2000] [--beside 100] [--device cuda] [--limit-seconds 550] [--out runs/soak]
                              [-- TRAIN WORDS]

Runs `creditscope lab train --scope full` in a process of its own and looks at it once a second: resident memory, open
files, threads, and on a GPU the memory that nvidia-smi sees in use. At the limit the run is asked to stop as by Ctrl-C;
the same command goes on where it stopped. Whenever it ends, what there is so far is judged:

    memory      the floor, the least of each block of samples: what a step needs for a moment comes and goes, a leak
                stays. Theil-Sen slope over the second half of the steps that one process took, with Sen's interval
    step time   the last steps are taken twice, by the process that has come so far and by a fresh one that resumes a
                copy of its record: the same work, bit by bit, one step of the one and one of the other in turn (the
                other is stopped meanwhile), so that whatever else the machine does slows both. Median of the ratios
    its drift   t = a + b·(mean length) + c·(longest) + e·(live groups) + d·step by least squares over blocks of steps:
                d is the drift at equal work; answers that get longer and groups that die are not called one. A machine
                that gets slower is: this needs a quiet one
    record      bytes that each kind of file had grown to by each step, against a straight line. A group that dies has
                no Gram worth its bytes, so a run that learns writes less and less: no faster than linear is asked

Writes benchmarks/soak.md and soak.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from creditscope.runs.intervals import Z975, quantile

ROOT = Path(__file__).parents[1]
FLAT = 0.01
"""Growth of memory in 1,000 steps, as a share of itself, up to which it is flat."""
STEADY = 0.05
"""How much longer a step may take at the end of the run, as a share of itself, and be flat."""
WARM = 5
"""Steps that a fresh process takes before it is compared: its first looks at the microscope's own cost."""
LINEAR = 0.05
"""How much more a kind of file may grow in the second half of the steps than in the first, as a share of that."""
POINTS = 60
"""Points that a slope is taken over, each the median of a block: neighbours in time are not independent."""
FLOORS = 20
"""Blocks of samples whose least is a point of memory's slope."""
SHELVES = {"steps.jsonl": "one line a step", "scope": "--every", "groups": "--keep-every", "optimizer": "--probe-every"}
"""What grows with the steps, and the setting that says how fast."""


@dataclass(frozen=True)
class Sample:
    """The run as it is seen from outside at one moment."""

    process: int
    """Which of the processes that took the run on, from 0."""
    seconds: float
    step: int
    """Steps on disk."""
    rss: int
    files: int
    threads: int
    gpu: int | None
    checkpoints: int
    """Bytes."""


Pair = tuple[int, float, float, float, float]
"""A step; seconds, and of them on a processor, of the process that came so far; the same of a fresh one."""


# -- watching --------------------------------------------------------------------------------------------------------


def watch(command: Sequence[str], out: Path, limit: float, samples: Path, again: Sequence[str] = (), steps: int = 0,
          beside: int = 0) -> bool:
    """Run the command to its end or to the limit, a line of `samples` a second; whether it ended by itself.

    The last `beside` of its `steps` are taken twice, the second time by `again`, which resumes the copy `fresh(out)`.
    """
    before = read_samples(samples)
    number = before[-1].process + 1 if before else 0
    start = time.monotonic()
    child = subprocess.Popen(command)
    asked, first = 0.0, None  # the steps that were there when the process began
    with samples.open("a") as log:
        while child.poll() is None:
            now = time.monotonic() - start
            if (found := look(child.pid, number, now, out)) is not None:
                log.write(json.dumps(asdict(found)) + "\n")
                log.flush()
                first = found.step if first is None else first
                if beside and found.step >= steps - beside and found.step > first + WARM and not paired(out).exists():
                    if pairs := side_by_side(child, out, again, steps):
                        paired(out).write_text(json.dumps({"age": pairs[0][0] - first, "pairs": pairs}))
                    beside = 0
            if limit and now > limit and not asked:
                asked = now
                child.send_signal(signal.SIGINT)
            elif asked and now > asked + 60:
                child.kill()
            time.sleep(1.0)
    if child.returncode not in (0, 130, -signal.SIGKILL):
        raise SystemExit(f"the run ended with {child.returncode}")
    return child.returncode == 0


def side_by_side(aged: subprocess.Popen[bytes], out: Path, again: Sequence[str], steps: int) -> list[Pair]:
    """The steps from here to the last but one, each taken by the process that came so far and by a fresh one."""
    halt(aged)
    young: subprocess.Popen[bytes] | None = None
    try:
        shutil.rmtree(fresh(out), ignore_errors=True)
        shutil.copytree(out, fresh(out))
        if (at := lines(out)) + WARM >= steps - 1:
            return []
        young = subprocess.Popen(again)
        # It forgets what came after its checkpoint, and takes those steps again.
        while lines(fresh(out)) < at + WARM:
            if young.poll() is not None:
                raise SystemExit(f"the fresh process ended with {young.returncode}")
            time.sleep(0.05)
        halt(young)
        while lines(out) < lines(fresh(out)):
            step_of(aged, out)
        pairs = []
        for step in range(lines(out), steps - 1):
            both = [(aged, out), (young, fresh(out))]
            took = {process.pid: step_of(process, place) for process, place in both[::1 if step % 2 else -1]}
            if not lines(out) == lines(fresh(out)) == step + 1:
                raise SystemExit(f"the two are not at one step: {lines(out)} and {lines(fresh(out))}")
            pairs.append((step, *took[aged.pid], *took[young.pid]))
        return pairs
    finally:
        aged.send_signal(signal.SIGCONT)
        if young is not None:
            young.kill()
            young.wait()


def step_of(process: subprocess.Popen[bytes], out: Path) -> tuple[float, float]:
    """Let a stopped process go until its next line is there, and stop it again: (seconds, of them on a processor)."""
    file = out / "steps.jsonl"
    before, busy, start = file.stat().st_size, processor(process.pid), time.perf_counter()
    process.send_signal(signal.SIGCONT)
    while file.stat().st_size == before:
        if process.poll() is not None:
            raise SystemExit(f"the run in {out} ended with {process.returncode} between two steps")
        time.sleep(0.0005)
    took = time.perf_counter() - start
    halt(process)  # only then is the line known to be whole: a file grows page by page
    return took, processor(process.pid) - busy


def halt(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until it stands."""
    process.send_signal(signal.SIGSTOP)
    while process.poll() is None and Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.0002)


def processor(pid: int) -> float:
    """Seconds that the threads of a process have been on a processor."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def fresh(out: Path) -> Path:
    return out.with_name(f"{out.name}.fresh")


def paired(out: Path) -> Path:
    return out.with_name(f"{out.name}.pairs.json")


def lines(out: Path) -> int:
    return (out / "steps.jsonl").read_bytes().count(b"\n")


def look(pid: int, process: int, seconds: float, out: Path) -> Sample | None:
    """One sample; none where the process ends at this moment."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        threads = len(os.listdir(f"/proc/{pid}/task"))
        files = len(os.listdir(f"/proc/{pid}/fd"))
        steps = (out / "steps.jsonl").read_bytes().count(b"\n") if (out / "steps.jsonl").exists() else 0
        return Sample(process, round(seconds, 2), steps, pages * os.sysconf("SC_PAGE_SIZE"), files, threads,
                      gpu_memory(), size_of(out / "checkpoints"))
    except (OSError, IndexError):
        return None


def gpu_memory() -> int | None:
    """Bytes in use on the first GPU, by whoever; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    told = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
                          capture_output=True, text=True, check=False)
    return int(told.stdout.split()[0]) * 2**20 if re.match(r"\s*\d+", told.stdout) else None


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder that is being written."""
    sizes = 0
    for file in folder.rglob("*"):
        try:
            sizes += file.stat().st_size if file.is_file() else 0
        except OSError:  # a checkpoint was just renamed
            continue
    return sizes


def read_samples(path: Path) -> list[Sample]:
    return [Sample(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


# -- judging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """A slope with its 95 % interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Slope:
        return Slope(self.value * factor, self.low * factor, self.high * factor)

    def verdict(self, most: float) -> str:
        """flat: no more than `most` by the interval; grows: more by the interval."""
        return "flat" if self.high <= most else "grows" if self.low > most else "undecided"

    def __str__(self) -> str:
        return f"{self.value:+.2%} [{self.low:+.2%}, {self.high:+.2%}]"


def theil_sen(x: Sequence[float], y: Sequence[float]) -> Slope:
    """median_{i<j} (y_j − y_i)/(x_j − x_i), between the slopes of rank (N ∓ C)/2, C = z √(n(n−1)(2n+5)/18): Sen 1968.

    >>> theil_sen([0, 1, 2, 3], [0.0, 2.0, 4.0, 6.0]).value
    2.0
    """
    i, j = np.triu_indices(len(x), 1)
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    apart = xs[j] != xs[i]
    slopes = np.sort((ys[j] - ys[i])[apart] / (xs[j] - xs[i])[apart])
    n, count = len(x), len(slopes)
    reach = Z975 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = max(0, math.floor((count - reach) / 2)), min(count - 1, math.ceil((count + reach) / 2))
    return Slope(float(np.median(slopes)), float(slopes[low]), float(slopes[high]))


def blocks(count: int, most: int) -> list[slice]:
    """So many places as at most `most` blocks of one length, one after the other; a rest that fills none is left out.

    >>> blocks(7, 3)
    [slice(0, 3, None), slice(3, 6, None)]
    """
    width = -(-count // most)
    return [slice(start, start + width) for start in range(0, count - width + 1, width)]


def growth(samples: Sequence[Sample], values: Sequence[float]) -> Slope:
    """Growth of the floor in 1,000 steps as a share of itself, over the second half of the steps."""
    half = (samples[0].step + samples[-1].step) / 2
    late = [(sample.step, value) for sample, value in zip(samples, values, strict=True) if sample.step >= half]
    floors = [min(late[block], key=lambda sample: sample[1]) for block in blocks(len(late), FLOORS)]
    slope = theil_sen([step for step, _ in floors], [value for _, value in floors])
    return slope.times(1000 / statistics.median(value for _, value in floors))


def drift(steps: Sequence[Mapping[str, Any]]) -> Slope:
    """d of t = a + b·(mean length) + c·(longest) + e·(live groups) + d·step, times the steps, as a share of mean t."""
    parts = [steps[block] for block in blocks(len(steps), POINTS)]
    names = ("time/step", "length/mean", "length/max", "signal/live_groups", "step")
    # Means, under which the equation stays true; the median of the lengths belongs to another step than that of t.
    time_, *work, step = (np.array([statistics.fmean(line[name] for line in part) for part in parts])
                                  for name in names)
    # In units of their spread, so that the equations are well conditioned; a column that never varies is none.
    columns = [(x - x.mean()) / x.std() for x in work if x.std() > 0]
    span = steps[-1]["step"] - steps[0]["step"]
    design = np.stack([np.ones(len(parts)), *columns, (step - step.mean()) / span], axis=1)
    found, *_ = np.linalg.lstsq(design, time_, rcond=None)
    degrees = len(parts) - design.shape[1]
    variance = float(((time_ - design @ found) ** 2).sum()) / degrees
    reach = quantile(degrees) * math.sqrt(variance * np.linalg.pinv(design.T @ design)[-1, -1])
    return Slope(*(float(end) for end in (found[-1], found[-1] - reach, found[-1] + reach))).times(1 / time_.mean())


def ratio(aged: Sequence[float], young: Sequence[float]) -> Slope:
    """The median of aged / young − 1, between the order statistics of rank (n ∓ z √n)/2.

    >>> ratio([1.0 + 0.01 * step for step in range(101)], [1.0] * 101)
    Slope(value=0.5, low=0.4, high=0.6)
    """
    found = sorted(mine / theirs - 1 for mine, theirs in zip(aged, young, strict=True))
    n, reach = len(found), Z975 * math.sqrt(len(found)) / 2
    low, high = (found[min(n - 1, max(0, round((n - 1) / 2 + side * reach)))] for side in (-1, 1))
    return Slope(*(round(value, 6) for value in (statistics.median(found), low, high)))


def same_work(out: Path, first: int) -> bool:
    """Whether both processes did the same from a step on: every number but times is the same."""
    def facts(folder: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()[first:]]
        return [{name: value for name, value in line.items()
                 if not name.startswith(("time/", "scope/ratio", "scope/share", "crc32"))} for line in found]

    aged, young = facts(out), facts(fresh(out))
    return bool(young) and aged[:len(young)] == young


def fifths(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    """The median of the last fifth of the steps over that of the first."""
    many = max(1, len(steps) // 5)
    first, last = (statistics.median(step[name] for step in part) for part in (steps[:many], steps[-many:]))
    return last / first


@dataclass(frozen=True)
class Shelf:
    """How a kind of file grew."""

    bytes: int
    files: int
    bytes_a_step: float
    off_line: float
    """Largest distance from the straight line between no step and the last, as a share of the end."""
    halves: float
    """Bytes of the second half of the steps over those of the first."""


def shelf(written: Sequence[tuple[int, int]], steps: int) -> Shelf:
    """From (step, bytes) of each file, or of each line."""
    at = np.array([step + 1 for step, _ in written], dtype=float)
    size = np.cumsum([length for _, length in written], dtype=float)
    off = np.abs(size / size[-1] - at / at[-1]).max()
    first = sum(length for step, length in written if step < steps / 2)
    return Shelf(int(size[-1]), len(written), float(size[-1]) / steps, float(off), float(size[-1]) / max(1, first) - 1)


def shelves(out: Path, steps: int) -> dict[str, Shelf]:
    """Each kind of file that a run writes."""
    lines = (out / "steps.jsonl").read_bytes().splitlines(keepends=True)
    found = {"steps.jsonl": [(number, len(line)) for number, line in enumerate(lines)]}
    for name in ("scope", "groups", "optimizer"):
        found[name] = sorted((int(file.stem), file.stat().st_size) for file in (out / name).glob("*.npz"))
    return {name: shelf(written, steps) for name, written in found.items() if written}


def judge(out: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Everything that can be said of the run so far."""
    steps = [step for line in (out / "steps.jsonl").read_text().splitlines()
             if "time/train" in (step := json.loads(line))]
    by_process: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.step > 1:  # before that the process loads and warms up
            by_process.setdefault(sample.process, []).append(sample)
    mine = max(by_process.values(), key=lambda some: some[-1].step - some[0].step)
    trained = [step for step in steps if step["step"] > 0]  # the first is timed side by side without the microscope
    found: dict[str, Any] = {
        "steps": len(steps), "processes": len(by_process), "watched": [mine[0].step, mine[-1].step],
        "rss": {"median": statistics.median(s.rss for s in mine), "most": max(s.rss for s in mine),
                "growth": asdict(grown := growth(mine, [s.rss for s in mine])), "verdict": grown.verdict(FLAT)},
        "files": [min(s.files for s in mine), max(s.files for s in mine)],
        "threads": [min(s.threads for s in mine), max(s.threads for s in mine)],
        "time": {"median": statistics.median(step["time/step"] for step in trained),
                 "fifths": fifths(trained, "time/step"), "length": fifths(trained, "length/mean"),
                 "longest": fifths(trained, "length/max"), "drift": asdict(slow := drift(trained)),
                 "verdict": slow.verdict(STEADY)},
        "record": {name: asdict(found) for name, found in shelves(out, len(steps)).items()},
        "checkpoints": max(s.checkpoints for s in samples)}
    if paired(out).exists():
        told = json.loads(paired(out).read_text())
        steps_, old, busy_old, new, busy_new = zip(*told["pairs"], strict=True)
        found["pairs"] = {"count": len(steps_), "age": told["age"], "same_work": same_work(out, steps_[0]),
                          "ratio": asdict(slower := ratio(old, new)), "verdict": slower.verdict(STEADY),
                          "busy": asdict(busier := ratio(busy_old, busy_new)), "busy_verdict": busier.verdict(STEADY)}
    if all(s.gpu is not None for s in mine):
        used = [float(s.gpu or 0) for s in mine]
        found["gpu"] = {"median": statistics.median(used), "most": max(used),
                        "growth": asdict(grown := growth(mine, used)), "verdict": grown.verdict(FLAT)}
    return found


# -- the page ---------------------------------------------------------------------------------------------------------


def told(found: Mapping[str, Any], words: Sequence[str], device: str) -> str:
    """The page."""
    def memory(name: str, what: str) -> str:
        part = found[name]
        return (f"| {what}, growth of its floor in 1,000 steps | {Slope(**part['growth'])} (median "
                f"{part['median'] / 1e6:,.0f} MB, most {part['most'] / 1e6:,.0f}) | at most {FLAT:.0%} | "
                f"{part['verdict']} |")

    clock, (first, last) = found["time"], found["watched"]
    pages = [
        "# A soak: does a long run stay as large and as fast as it was?", "",
        f"`python benchmarks/soak.py`: `creditscope lab train {' '.join(words)}`, {found['steps']:,} steps on "
        f"{device}, Python {platform.python_version()}. Memory over the second half of steps {first:,} to {last:,}, "
        f"which one process took ({found['processes']} in all), once a second; [ ] 95 %.", "",
        "| | found | allowed | |", "| --- | --- | --- | --- |", memory("rss", "resident memory"),
        *([memory("gpu", "GPU memory in use")] if "gpu" in found else []),
        f"| open files; threads | {found['files'][0]} to {found['files'][1]}; {found['threads'][0]} to "
        f"{found['threads'][1]} | | |",
        *told_pairs(found),
        f"| step time, drift over the run at equal length and live groups | {Slope(**clock['drift'])} of "
        f"{clock['median']:.3f} s | at most {STEADY:.0%} | {clock['verdict']} |",
        f"| medians of the last fifth over the first: time; mean length; longest | ×{clock['fifths']:.3f}; "
        f"×{clock['length']:.3f}; ×{clock['longest']:.3f} | | |", "",
        "## The record", "",
        "| | MB | files | KB a step | off its line | second half over first | no faster than linear | grows by |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |"]
    for name, part in found["record"].items():
        bounded = part["halves"] <= 1 + LINEAR + 2 / part["files"]  # a file more or less is no bend
        pages.append(f"| {name} | {part['bytes'] / 1e6:.1f} | {part['files']:,} | {part['bytes_a_step'] / 1e3:.2f} | "
                     f"{part['off_line']:.2%} | ×{part['halves']:.3f} | {'yes' if bounded else 'NO'} | "
                     f"{SHELVES[name]} |")
    return "\n".join([
        *pages,
        f"| checkpoints | {found['checkpoints'] / 1e6:.1f} at most | | | | | | nothing: two are kept |", "",
        "Off its line: the largest distance between the bytes by a step and the straight line to the end, as a share "
        "of the end. `--keep-most N` keeps at most N files of each of the three kinds, spread evenly over the run: "
        "then only steps.jsonl grows.", ""])


def told_pairs(found: Mapping[str, Any]) -> list[str]:
    if "pairs" not in found:
        return []
    part = found["pairs"]
    work = "the same bit by bit" if part["same_work"] else "NOT the same"
    return [f"| time of a step in this process, {part['age']:,} steps old, over that of the same step in a fresh one, "
            f"median of {part['count']} pairs (their numbers are {work}) | {Slope(**part['ratio'])} | "
            f"at most {STEADY:.0%} | {part['verdict']} |",
            f"| the same in processor time | {Slope(**part['busy'])} | at most {STEADY:.0%} | {part['busy_verdict']} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--beside", type=int, default=100,
                        help="steps at the end that a fresh process takes too; 0: none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit-seconds", type=float, default=0.0, help="stop the run after so long; 0 for no limit")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="the run's folder; one with a run goes on")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "soak.md")
    parser.add_argument("words", nargs="*", help="more words for creditscope lab train, after --")
    options = parser.parse_args()
    words = ["--scope", "full", "--eval-problems", "0", "--steps", str(options.steps), "--device", options.device,
             *options.words]
    again = ["--resume"] if any(options.out.glob("checkpoints/*")) else []
    samples = options.out.with_name(f"{options.out.name}.samples.jsonl")
    samples.parent.mkdir(parents=True, exist_ok=True)
    if not again:
        samples.unlink(missing_ok=True)
        paired(options.out).unlink(missing_ok=True)
    train = [sys.executable, "-m", "creditscope", "lab", "train"]
    whole = watch([*train, *words, "--out", str(options.out), *again], options.out, options.limit_seconds, samples,
                  [*train, "--out", str(fresh(options.out)), "--resume"], options.steps, options.beside)
    found = judge(options.out, read_samples(samples))
    device = json.loads((options.out / "run.json").read_text())["versions"]
    where = ", ".join(device.get("devices") or []) or f"a CPU of {os.cpu_count()} cores"
    page = told(found, words, where)
    options.page.write_text(page)
    options.page.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(page)
    if not whole:
        print("the run is not at its end: the same command goes on with it")


if __name__ == "__main__":
    main()
