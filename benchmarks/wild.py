"""The diagnosis on logs that strangers published, beside an expert's reading of each.

    python benchmarks/wild.py FOLDER            one folder per log, named as in READINGS; writes benchmarks/wild.md

The logs are other people's and are not part of this repository. A first line is right where it names a rule that the
reading accepts, or says in which state the run is; the peers are those of benchmarks/clinic/peers.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "clinic"))

from peers import Seen, first  # noqa: E402

from creditscope.diagnosis.engine import diagnose  # noqa: E402
from creditscope.diagnosis.read import read  # noqa: E402
from creditscope.errors import CreditscopeError  # noqa: E402

READINGS: dict[str, tuple[str, str]] = {
    "text2sql": ("truncation", "25 % of the answers are cut"),
    "text2sql-3b": ("unknown", "15 steps: too few to judge"),
    "grpo-dynamics": ("dead groups | truncation", "std exactly 0 in 45 % of the readings; 237 of 256 tokens"),
    "grpo-dynamics-trunc": ("dead groups | truncation", "the same, 50 %"),
    "wordle-lara": ("no gain | KL level", "learnt nothing in 400 steps"),
    "wordle-stage2": ("no gain | KL level", "learnt nothing in 160 steps; KL 1.1 at step 1"),
    "unsloth-imjonezz": ("fine", "healthy rise; std 0 in 26 %"),
    "swift-food": ("dead groups | too easy", "std 0 in 91 % of the last tenth"),
    "swift-food-v10": ("dead groups", "std 0 in 32 % of the last tenth"),
    "verl-notebook": ("fine", "healthy: 0.03 → 0.54; a learning rate printed as 0.000"),
    "consis-v5": ("one rollout", "GRPO with rollout.n = 1: no baseline"),
    "consis-300": ("one rollout", "the same"),
    "verl-ppo-05b": ("entropy", "entropy 0.53 → 0.06"),
    "verl-ppo-gemma": ("fine", "healthy"),
    "verl-sft": ("refused", "supervised training"),
    "opd-221801": ("length drift | KL pull", "length 1759 → 1 comes first; KL in the reward"),
    "opd-144822": ("length drift | KL pull", "length 970 → 10 comes first; KL in the reward"),
    "incident-nb": ("too easy", "saturated, 0.17 → 0.83; rows of supervised training mixed in"),
    "physics-grpo": ("dead groups", "61 % dead"),
    "rec-grpo": ("fine | unknown", "own names; must be read, or not be green"),
    "lean4-fim": ("reward constant", "reward always 0"),
    "prime-rl": ("unknown", "four lines of a console: too few to judge"),
}
"""Log -> rules or states that are right, and the reading."""


def told(folder: Path) -> tuple[str, str, str]:
    """(rule or state, first line, what the peers' rules say)."""
    file = next(path for path in sorted(folder.iterdir()) if path.name not in ("SOURCE", "args.json"))
    try:
        log = read(file)
    except CreditscopeError as error:
        return "refused", str(error).partition(": ")[2].partition(";")[0], "–"
    found = diagnose(log)
    peer = first(Seen([dict(row.values) for row in log.rows], {}))
    return (found.first.rule if found.first else found.state), found.headline.partition(" Change:")[0], peer or "fine"


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    rows, right, alarms, peers = [], 0, 0, 0
    for name, (accepted, reading) in READINGS.items():
        said, line, peer = told(Path(sys.argv[1]) / name)
        good = said in accepted.split(" | ")
        right += good
        peers += peer in accepted.split(" | ")
        alarms += said not in ("fine", "unknown", "refused") and accepted in ("fine", "unknown", "refused")
        rows.append(f"| {name} | {reading} | {line.replace('|', '/')} | {'yes' if good else '**no**'} | {peer} |")
    page = "\n".join([
        "# Strangers' logs", "", "22 logs that people published, with a reading by hand, and the first line of "
        "`creditscope doctor` on each. `python benchmarks/wild.py FOLDER` makes this page; the logs are not shipped.",
        f"Right: {right} of {len(rows)}. False alarms: {alarms}. The usual single-metric rules "
        f"(`clinic/peers.py`, which know TRL's names of metrics), asked in turn: {peers} of {len(rows)}.", "",
        "Rules and thresholds were changed while looking at these logs, so this is no test on unseen data.", "",
        "| log | reading | first line | right | single-metric rules |", "|---|---|---|---|---|", *rows]) + "\n"
    (HERE / "wild.md").write_text(page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
