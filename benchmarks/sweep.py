"""One sweep four ways: this machine's processes, Ray on one node, on two nodes, and with one of the two killed.

    python benchmarks/sweep.py            # writes benchmarks/sweep.md; needs the extra ray

The runs are those of `creditscope lab compare` on the one-layer policy of tests/mini.py. Nodes are on this machine,
with one CPU and a scratch folder each. The ways take turns, --repeats times, so that other work on the machine meets
all of them. Afterwards every run is compared with the processes' own: lines without times, arrays, checkpoints and
weights.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import mini  # noqa: E402
import ray_nodes  # noqa: E402
from creditscope.files.versions import version  # noqa: E402
from same_runs import differences  # noqa: E402

CREDITS = ("outcome", "step_reward", "leave_one_out", "gae")
WAYS = {"processes": "processes of this machine, two at a time (`--on here`)",
        "one": "Ray, one node of two CPUs (`--on ray`)",
        "two": "Ray, two nodes of one CPU each (`--on ray://…`)",
        "killed": "the same, one node killed after its first checkpoint"}


def sweep(place: Path, out: Path, rollouts: int, on: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "creditscope", "lab", "compare", "credit", *CREDITS, "--seeds", "1", "--rollouts",
         str(rollouts), "--group", "4", "--prompts", "2", "--eval-problems", "8", "--points", "2", "--model", "model",
         "--task", mini.TASK, "--out", str(out), "--on", on], cwd=place, env=env, stdout=subprocess.DEVNULL)


def timed(way: str, place: Path, out: Path, rollouts: int) -> tuple[float, int]:
    """Seconds of the command, without the start of a cluster that is there already; steps made twice."""
    if way in ("processes", "one"):
        start = time.perf_counter()
        done = sweep(place, out, rollouts, "here" if way == "processes" else "ray", ray_nodes.environment()).wait()
        assert done == 0, way
        return time.perf_counter() - start, 0
    with tempfile.TemporaryDirectory() as scratch, ray_nodes.nodes(Path(scratch), 2) as cluster:
        start = time.perf_counter()
        process = sweep(place, out, rollouts, cluster.address, cluster.env)
        lost = kill(cluster, process, out) if way == "killed" else 0
        assert process.wait() == 0, way
        return time.perf_counter() - start, lost


def kill(cluster: ray_nodes.Nodes, process: subprocess.Popen[bytes], out: Path) -> int:
    """Kill the first node that has a checkpoint at home: steps since then."""
    while process.poll() is None:
        for number in (1, 2):
            for path in cluster.scratch(number).glob("creditscope-*/run/seed-0/checkpoints/000020"):
                lines = path.parents[1] / "steps.jsonl"
                made = lines.read_bytes().count(b"\n")
                if made > 25 and any(out.glob("*/seed-0/checkpoints/000020")):
                    cluster.kill(number)
                    return made - made // 20 * 20
        time.sleep(0.05)
    raise SystemExit("the sweep ended before a node could be killed; give more --rollouts")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=1600)
    parser.add_argument("--out", type=Path, default=HERE / "sweep.md")
    args = parser.parse_args()
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    wrong: dict[str, list[str]] = {way: [] for way in WAYS}
    again, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(mini.model(), place / "model")
        for repeat in range(args.repeats):
            for way in WAYS:
                seconds, lost = timed(way, place, place / f"{way}-{repeat}", args.rollouts)
                took[way].append(seconds)
                again += [lost] * (way == "killed")
                loads.append(os.getloadavg()[0])
                wrong[way] += [name for credit in CREDITS for name in differences(
                    place / "processes-0" / credit / "seed-0", place / f"{way}-{repeat}" / credit / "seed-0")]
                print(f"{repeat} {way}: {seconds:.1f} s, load {loads[-1]:.1f}, {len(wrong[way])} differences",
                      flush=True)
    args.out.write_text(page(args, took, wrong, again, loads), encoding="utf-8")
    print(f"wrote {args.out}")


def page(args: argparse.Namespace, took: dict[str, list[float]], wrong: dict[str, list[str]], again: list[int],
         loads: list[float]) -> str:
    rows = []
    for way, what in WAYS.items():
        middle = statistics.median(took[way])
        rows.append(f"| {what} | {middle:.1f} | {min(took[way]):.1f}–{max(took[way]):.1f} | "
                    f"×{middle / statistics.median(took['processes']):.2f} | {len(wrong[way]) or 'none'} |")
    return "\n".join([
        "# One sweep by processes and by Ray", "",
        f"`python benchmarks/sweep.py --repeats {args.repeats} --rollouts {args.rollouts}`: {len(CREDITS)} runs of "
        f"`creditscope lab compare credit`, {args.rollouts // 8} steps each, on the one-layer policy of "
        f"`tests/mini.py`. "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, torch {version('torch')}, "
        f"Ray {version('ray')}. The ways take turns. Load {min(loads):.0f} to {max(loads):.0f} at the ends "
        f"of the sweeps, of which two are the sweep's own.", "",
        "| | seconds, median | range | of the processes' | differences of the records |",
        "| --- | ---: | ---: | ---: | ---: |", *rows, "",
        "Seconds are those of the whole command, with the start of Python and torch in each run. `--on ray` starts a "
        "cluster and ends it; of the two nodes the start is not counted. Differences are counted over every line "
        "without its times, every array, checkpoint and weight, bit for bit, against the processes' first sweep.", "",
        f"The killed node (SIGKILL to all of its processes, its scratch folder deleted) had made "
        f"{', '.join(map(str, again))} steps after the checkpoint that was at home. They were made again on the other "
        f"node, which from then on was alone.", ""])


if __name__ == "__main__":
    main()
