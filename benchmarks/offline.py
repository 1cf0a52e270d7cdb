"""`creditscope inspect` over up to a million rollouts: memory, rate, and what a kill costs.

    python benchmarks/offline.py [--sizes 10000 100000 1000000] [--folder DIR]     writes benchmarks/offline.md, .json

The rollouts are made up, line by line: eight answers a prompt, 40 to 80 tokens each with log-probs and text, 1.4 KB a
line, one answer in three right. Each reading is a process of its own, one thread, with a record; its peak memory is
what the kernel says of it. The largest file but one is read once more and killed on the way: the record after
`--resume` must be equal, its clock apart. The file, and the records, go to a folder that is emptied at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GROUP = 8
VOCABULARY = 99
"""Of the packaged model, which has to know every token."""
WORDS = ("so", "then", "we", "add", "take", "away", "two", "apples", "from", "each", "box", "and", "count", "again")


def write_rollouts(path: Path, rollouts: int, seed: int = 0) -> int:
    """A file of so many rollouts, streamed; returns how many are right."""
    draw = random.Random(seed)
    right = 0
    with path.open("w", encoding="ascii") as out:
        for number in range(rollouts):
            length = draw.randint(40, 80)
            good = draw.randrange(3) == 0
            right += good
            row = {"prompt": f"Problem {number // GROUP}: " + " ".join(draw.choices(WORDS, k=30)), "group":
                   number // GROUP, "response": " ".join(draw.choices(WORDS, k=length)), "reward": float(good),
                   "tokens": [draw.randrange(VOCABULARY) for _ in range(length)],
                   "logp": [-round(draw.expovariate(1.0), 4) for _ in range(length)]}
            out.write(json.dumps(row) + "\n")
    return right


@dataclass(frozen=True)
class Reading:
    """What one process took, and what it found."""

    rollouts: int
    file: int
    """Bytes."""
    seconds: float
    cpu: float
    """CPU seconds, which hold on a busy machine too."""
    peak: int
    """Most resident memory, in bytes."""
    record: int
    """Bytes of the record."""
    facts: dict[str, Any]


def command(file: Path, out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "creditscope", "inspect", str(file), "--out", str(out), "--json", *words]


def measured(file: Path, out: Path, *words: str) -> Reading:
    """Read a file in a process of its own."""
    start = time.perf_counter()
    with (out.parent / f"{out.name}.json").open("w+") as printed:
        child = subprocess.Popen(command(file, out, *words), stdout=printed, env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        text = printed.read()
    if child.returncode:
        raise SystemExit(f"creditscope inspect ended with {child.returncode}: {text[-500:]}")
    facts = json.loads(text)
    return Reading(facts.get("rollouts", 0), file.stat().st_size, time.perf_counter() - start,
                   usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, size_of(out), facts)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def lines_of(out: Path) -> list[dict[str, Any]]:
    """The steps of a record without their clock, and the sum that holds it."""
    return [{name: value for name, value in json.loads(line).items() if not name.startswith(("time/", "crc32"))}
            for line in (out / "steps.jsonl").read_text().splitlines()]


def killed(file: Path, out: Path, whole: Path) -> dict[str, Any]:
    """SIGKILL at half of the batches, then --resume: what it took, and whether the record is the same."""
    batches = len(lines_of(whole))
    child = subprocess.Popen(command(file, out), stdout=subprocess.DEVNULL)
    while child.poll() is None and (not (out / "steps.jsonl").exists()
                                    or (out / "steps.jsonl").read_bytes().count(b"\n") < batches // 2):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = len(lines_of(out))
    again = measured(file, out, "--resume")
    return {"rollouts": again.facts["rollouts"], "batches": batches, "kept": kept, "seconds": again.seconds,
            "equal": lines_of(out) == lines_of(whole)}


def told(sizes: list[Reading], resumed: dict[str, Any], model: list[Reading]) -> str:
    """The page."""
    def row(reading: Reading, what: str) -> str:
        numbers = (reading.file / 1e6, reading.seconds, reading.cpu, reading.rollouts / reading.cpu, reading.peak / 1e6)
        return (f"| {reading.rollouts:,} | {what} | {' | '.join(f'{number:,.0f}' for number in numbers)} | "
                f"{reading.record / 1e6:.1f} |")

    first, last = sizes[0], sizes[-1]
    more = (last.peak - first.peak) / (last.rollouts - first.rollouts) if last.rollouts > first.rollouts else 0.0
    return "\n".join([
        "# `creditscope inspect`, the whole command, over a million rollouts", "",
        f"`python benchmarks/offline.py`, one thread of {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}. Made-up rollouts of 40 to 80 tokens with log-probs, eight a prompt; defaults "
        f"but for `--out`.", "",
        "| rollouts | read | file, MB | seconds | CPU s | rollouts a CPU s | peak memory, MB | record, MB |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(row(reading, "signal and credit") for reading in sizes),
        *(row(reading, "and log-probs and Grams of the packaged model, `--model tiny`") for reading in model), "",
        f"From {first.rollouts:,} to {last.rollouts:,} rollouts the peak grows by {more:.0f} bytes a rollout: the "
        f"reader keeps one number a group, so that a group that comes again is told.", "",
        f"Killed (SIGKILL) after {resumed['kept']:,} of {resumed['batches']:,} batches, then `--resume`: it read the "
        f"other {resumed['rollouts']:,} rollouts in {resumed['seconds']:.0f} s, and the record is "
        f"{'equal' if resumed['equal'] else 'NOT EQUAL'} to that of an unbroken reading.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--model-sizes", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--folder", type=Path, help="where there is room: 1.5 KB a rollout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        base = Path(folder)
        sizes, model = [], []
        for kind, counts, words in (("plain", options.sizes, ()), ("model", options.model_sizes, ("--model", "tiny"))):
            for count in counts:
                file = base / f"{count}.jsonl"
                right = write_rollouts(file, count)
                found = measured(file, base / f"{kind}-{count}", *words)
                assert found.rollouts == count
                assert abs(found.facts["reward/mean"] - right / count) < 1e-6, (found.facts["reward/mean"], right)
                (sizes if kind == "plain" else model).append(found)
                print(f"{kind} {count:,}: {found.seconds:.0f} s, {found.peak / 1e6:.0f} MB", flush=True)
        second = sorted(options.sizes)[-2:][0]
        resumed = killed(base / f"{second}.jsonl", base / "killed", base / f"plain-{second}")
    page = told(sizes, resumed, model)
    (ROOT / "benchmarks" / "offline.md").write_text(page)
    found: dict[str, Any] = {"sizes": [asdict(each) for each in sizes], "model": [asdict(each) for each in model]}
    for each in found["sizes"] + found["model"]:
        each["facts"].pop("out")  # the path is not shown
    found["resumed"] = resumed
    (ROOT / "benchmarks" / "offline.json").write_text(json.dumps(found, indent=1) + "\n")
    print(page)


if __name__ == "__main__":
    main()
