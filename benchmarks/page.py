"""Seconds of the whole command `creditscope report`, for records of 5 to 100,000 steps.

    python benchmarks/page.py

The record is a real run of the packaged model with everything on (both microscopes, another credit, rollouts kept),
repeated under new step numbers with its numbers varied. Beside it the same command on a short run, and with several
runs side by side, up to fifty of them (ten settings, five seeds, 50 readings each); `--help` is what Python and the
imports alone take. Records of 100, 20,000 and 100,000 steps repeat the lines of a run with the light scope and the
light probe, about 90 numbers and 3 KB each, with their sums, and keep at most 40 files of each shelf. The table goes to
benchmarks/page.md. CPU seconds hold on a busy machine too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from creditscope.runs.record import Record  # noqa: E402
from report import records  # noqa: E402

REPEATS, RUNS, SEEDS = 5, 50, 5
LENGTHS = (100, 20_000, 100_000)
BEFORE = """
Before and after steps were read by column and charts were thinned (before: 30a16b1). Both read the same three records,
repeated from another run of 24 steps with the light scope and probe, once each. Other work shared the two
cores, more of it after than before: three readings of 100,000 steps after the change took 15.4, 24.8 and 26.2 seconds.
The page of 100 steps without the start of Python, least of seven: 1.34 and 1.22 CPU s before, 1.29 and 1.13 after.

| | CPU s | seconds | peak memory, MB | page, MB |
| --- | ---: | ---: | ---: | ---: |
| 100 steps, before | 1.58 | 1.71 | 89 | 1.25 |
| 100 steps, after | 2.04 | 2.19 | 88 | 1.25 |
| 20,000 steps, before | 18.07 | 18.73 | 676 | 2.45 |
| 20,000 steps, after | 5.39 | 5.97 | 142 | 1.62 |
| 100,000 steps, before | 547.20 | 661.78 | 3049 | 5.88 |
| 100,000 steps, after | 14.63 | 24.79 | 266 | 1.71 |
"""


def many(folder: Path, source: Path) -> Path:
    """Runs that differ in the learning rate and the seed: the source's arrays, and its lines with numbers varied."""
    draw, old = random.Random(0), Record.open(source)
    for number in range(RUNS):
        config = old.config | {"lr": old.config["lr"] * (1 + number // SEEDS), "seed": number % SEEDS}
        place = folder / f"lr-{number // SEEDS}" / f"seed-{number % SEEDS}"
        Record.create(place, config, old.run["versions"]).close()
        lines = [{key: value * (1 - 0.1 * draw.random()) if isinstance(value, float) else value
                  for key, value in line.items()} for line in old.steps()]
        (place / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))  # without a sync each
        for shelf in ("groups", "scope", "optimizer"):
            shutil.copytree(source / shelf, place / shelf, copy_function=os.link, dirs_exist_ok=True)
    return folder


def spend(words: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak memory in MB) of a command."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "creditscope", "report", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"creditscope report ended with {child.returncode}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: the kernel counts the parent's memory in the child's peak.
        made = {"short": records.rich, "light": records.light}
        for name, make in made.items():
            maker = multiprocessing.get_context("spawn").Process(target=make, args=(Path(folder) / name,))
            maker.start()
            maker.join()
        short, light = (Path(folder) / name for name in made)
        long = records.long(Path(folder) / "long", short)
        cases = {"--help": ["--help"], "5 steps": [str(short)], "500 steps": [str(long)],
                 "500 steps beside 5": [str(short), str(long)],
                 **{f"{steps:,} steps": [str(records.lengthened(Path(folder) / str(steps), light, steps))]
                    for steps in LENGTHS},
                 f"{RUNS} runs of 500 steps": [str(many(Path(folder) / "many", long))]}
        spent: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
        sizes: dict[str, int] = {}
        out = Path(folder) / "report.html"
        for turn in range(REPEATS):
            for name, words in cases.items():
                if turn and "runs" in name:
                    continue  # a minute each
                spent[name].append(spend([*words, *(["-o", str(out)] if name != "--help" else [])]))
                sizes[name] = out.stat().st_size if name != "--help" else 0
    rows = []
    for name, found in spent.items():
        times, cpu, peak = zip(*found, strict=True)
        rows.append(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f}–{max(times):.2f} | "
                    f"{statistics.median(cpu):.2f} | {max(peak):.0f} | {sizes[name] / 1e6:.2f} |")
    table = "\n".join([f"| | seconds, median of {REPEATS} | range | CPU s | peak memory, MB | page, MB |",
                       "| --- | ---: | ---: | ---: | ---: | ---: |", *rows])
    (ROOT / "benchmarks" / "page.md").write_text(
        f"# `creditscope report`, the whole command\n\n{os.cpu_count()} cores, Python {sys.version.split()[0]}; "
        f"`python benchmarks/page.py`. The charts' library is in the user's cache; the first report of a machine "
        f"makes it, about two seconds more. Fifty runs were read once.\n\n{table}\n{BEFORE}")
    print(table)


if __name__ == "__main__":
    main()
