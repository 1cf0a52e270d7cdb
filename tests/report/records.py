"""Makers of records: a real short run, the same made long, a hostile one, and one that holds next to nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditscope.runs.place import SHELVES
from creditscope.runs.record import Record, spacing
from depth import FULL

Arrays = dict[str, NDArray[Any]]


def once(root: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """What `make` writes into root/name, made by the first of several test processes and read by all."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = root / f"{name}.done"
        if not done.exists():
            make(root / name)
            done.touch()
    return root / name


def shared(base: Path) -> Path:
    """The folder that all processes of one test session share, from pytest's base folder of this process."""
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "records"


# -- a real one --------------------------------------------------------------------------------------------------------


SIZE, STEPS = (8, 5) if FULL else (4, 5)
"""R and P of the run with everything on, and its steps: a full one is of the size that people look at."""


def rich(path: Path, steps: int = STEPS) -> Path:
    """Everything on: scope and probe full, μ = 2, another credit, every second step kept. The packaged model."""
    from creditscope.cli.env import environment
    from creditscope.lab.train import train
    from creditscope.runs.config import Config

    config = Config(group=SIZE, prompts=SIZE, steps=steps, inner_steps=2, lr=1e-4, scope="full", every=2, probe="full",
                    probe_every=2, keep_every=2, also=("step_reward",), eval_problems=20)
    for _ in train(config, path, environment()):
        pass
    return path


def light(path: Path, steps: int = 5) -> Path:
    """What a long run has on: the light scope at every step, the light probe, μ = 2. The packaged model."""
    from creditscope.cli.env import environment
    from creditscope.lab.train import train
    from creditscope.runs.config import Config

    config = Config(group=8, prompts=8, steps=steps, inner_steps=2, lr=1e-4, scope="light", probe="light",
                    eval_problems=20)
    for _ in train(config, path, environment()):
        pass
    return path


def long(path: Path, source: Path, steps: int = 500, every: int = 10) -> Path:
    """The record `source` repeated under new step numbers: kept and read at every tenth step.

    Numbers shrink by a random share of up to a tenth, so that no two steps are equal and nothing is squeezed for that.
    """
    draw = np.random.default_rng(0)
    old = Record.open(source)
    lines = [line for line in old.steps() if "rollouts/spent" in line]
    read = [line for line in lines if line["step"] in old.readings()]
    plain = [line for line in lines if line["step"] not in old.readings()] or read
    with Record.create(path, old.config | {"steps": steps, "every": every, "keep_every": every}, old.run["versions"]) \
            as new:
        written = []
        for step in range(steps):
            some = read if step % every == 0 else plain
            line = {key: value * float(1 - 0.1 * draw.random()) if isinstance(value, float) else value
                    for key, value in some[step % len(some)].items()}
            written.append(json.dumps(line | {"step": step}) + "\n")
        (path / "steps.jsonl").write_text("".join(written))  # as `append` does, without a sync for each
        for step in range(0, steps, every):
            for kept, load, save in ((old.groups(), old.group, new.save_group),
                                     (old.readings(), old.reading, new.save_reading),
                                     (old.optimizer_readings(), old.optimizer_reading, new.save_optimizer)):
                if kept:
                    save(step, shrunk(load(kept[step // every % len(kept)]), draw))
    return path


def lengthened(path: Path, source: Path, steps: int, most: int = 40) -> Path:
    """The lines of `source` repeated under new step numbers, each with its sum and its numbers shrunk as above, and at
    most so many files of each shelf, as with --keep-most."""
    draw, old = np.random.default_rng(0), Record.open(source)
    lines = [line for line in old.steps() if "rollouts/spent" in line]
    with Record.create(path, old.config | {"steps": steps, "keep_most": most}, old.run["versions"]) as new:
        with (path / "steps.jsonl").open("wb") as out:
            for step in range(steps):
                line = lines[step % len(lines)]
                shares = (1 - 0.1 * draw.random(len(line))).tolist()
                out.write(sealed({key: value * share if isinstance(value, float) else value
                                  for (key, value), share in zip(line.items(), shares, strict=True)} | {"step": step}))
        for shelf in SHELVES:
            for number, step in enumerate(range(0, steps, spacing(steps - 1, 1, most))):
                if found := sorted((source / shelf).glob("*.npz")):
                    (path / shelf).mkdir(exist_ok=True)
                    shutil.copy(found[number % len(found)], path / shelf / f"{step:06d}.npz")
        new.thin(steps - 1, most, dict.fromkeys(SHELVES, 1))
    return path


def sealed(line: Mapping[str, Any]) -> bytes:
    """A line as `Record.append` writes it."""
    body = json.dumps(line)[:-1].encode()
    return body + f', "crc32": "{zlib.crc32(body):08x}"}}\n'.encode()


def shrunk(arrays: Mapping[str, NDArray[Any]], draw: np.random.Generator) -> Arrays:
    """Each array of floats times a number in (0.9, 1], so that a Gram matrix stays one; rewards and scales stay."""
    stays = {"reward", "step_reward", "eps", "phi"}
    return {name: value * value.dtype.type(1 - 0.1 * draw.random())
            if value.dtype.kind == "f" and name not in stays else value for name, value in arrays.items()}


# -- a hostile one -----------------------------------------------------------------------------------------------------

HACK = "window.hacked=(window.hacked||0)+1"
HOSTILE = (
    f"</script><script>{HACK}</script>",
    f'"}}]</script><script>{HACK};alert(1)</script>',
    f"<img src=x onerror={HACK}>",
    f'" onmouseover="{HACK}" autofocus onfocus="{HACK}" x="',
    f"<svg/onload={HACK}><!-- <script>",
    f"javascript:{HACK}//",
    "{{constructor.constructor('window.hacked=1')()}}${window.hacked=1}",
    "\u202egnp.live\u202c\u200f\u2066",
    "nul \x00 bell \x07 escape \x1b[2J",
    "half \ud800 pairs \udfff",
    "https://example.invalid/<a href=https://example.invalid>",
)
"""Texts that would run, fetch, hide or break something if they were more than text."""
MEGABYTE = 10**6


def hostile(path: Path, longest: int = MEGABYTE) -> Path:
    """A record in which every text is hostile: settings, versions, names of layers and metrics, prompts, tokens.

    One token has `longest` characters. All texts of an array are stored at the length of the longest.
    """
    config = {"model": HOSTILE[0], "task": HOSTILE[1], "method": HOSTILE[2], "credit": HOSTILE[3], "reward": HOSTILE[5],
              "group": 2, "prompts": 2, "steps": 3, "seed": 0, "optimizer": HOSTILE[4], "lr": 1e-4, "inner_steps": 2,
              "scope": "full", "every": 1, "probe": "full", "keep_every": 1, "also": list(HOSTILE[6:9]),
              "adapt": HOSTILE[9], "brake": HOSTILE[10], HOSTILE[0]: HOSTILE[1]}
    versions = {"creditscope": HOSTILE[0], "platform": HOSTILE[9], "packages": {HOSTILE[1]: HOSTILE[2]}}
    with Record.create(path, config, versions) as record:
        for step in range(3):
            record.append(step, hostile_line(step))
            record.save_group(step, hostile_rollouts(step, longest))
            record.save_reading(step, hostile_reading())
            record.save_optimizer(step, hostile_probe())
    return path


def hostile_line(step: int) -> dict[str, Any]:
    """Numbers as a run has them, an error message of the verifier's, and names and texts that are none of ours."""
    return {"reward/mean": 0.5, "reward/std": 0.5, "signal/groups": 2, "signal/live_groups": 1,
            "signal/dead_groups": 0.5, "length/mean": 3.0, "length/max": 3, "length/truncated": 0.0,
            "entropy/mean": 0.5, "rollouts/spent": 4, "rollouts/sampled": 4, "rollouts/used": 4,
            "w/top10_mass": 0.5, "w/zero": 0.5, "grad/norm": float("nan"), "objective/value": 0.0,
            "gram/group/effective_rank": 1.5, "gram/group/w_null": 1.8, "overshoot/after": 0.01,
            "reward/errors": 1, "reward/first_error": HOSTILE[step], f"gram/{HOSTILE[2]}": 1.0,
            HOSTILE[0]: 1.0, HOSTILE[7]: HOSTILE[1]}


def hostile_rollouts(step: int, longest: int = MEGABYTE) -> Arrays:
    """Two groups of two answers of three tokens; one token of the first step is the long one."""
    long = "<b>" + "x" * longest if step == 0 else HOSTILE[0]
    pieces = [[long, *HOSTILE[0:2]], list(HOSTILE[2:5]), list(HOSTILE[5:8]), list(HOSTILE[8:11])]
    credit = np.array([[1.0] * 3, [-1.0] * 3, [0.0] * 3, [0.0] * 3], dtype=np.float32)
    return {"tokens": np.arange(12).reshape(4, 3), "mask": np.ones((4, 3), dtype=bool),
            "logp": np.full((4, 3), -0.5, dtype=np.float32), "live_logp": np.full((4, 3), -0.4, dtype=np.float32),
            "entropy": np.full((4, 3), 0.5, dtype=np.float32), "reward": np.array([1, 0, 1, 1], dtype=np.float32),
            "group": np.array([0, 0, 1, 1]), "credit": credit, "w": credit / 12,
            "step": np.array([[0, 0, 1]] * 4), "step_reward": np.array([[1, 0]] * 4, dtype=np.float32),
            "prompt": np.array([HOSTILE[0], HOSTILE[0], HOSTILE[9], HOSTILE[9]]),
            "text": np.array(["".join(row) for row in pieces]), "pieces": np.array(pieces)}


def hostile_reading() -> Arrays:
    """A Gram matrix over layers with hostile names."""
    rows = np.array([[1.0, 0.0], [-0.5, 1.0], [0.0, 0.0], [0.0, 0.0]])
    gram, names = rows @ rows.T, np.array(HOSTILE[:4])
    return {"group": np.array([0, 0, 1, 1]), "reward": np.array([1.0, 0, 1, 1]), "gram": gram,
            "scores": gram + np.eye(4), "row_w": np.array([1.0, -1, 0, 0]), "eps": np.array(2e-16),
            "layer_names": names, "layer_groups": np.array([0, 1]),
            "layers": np.broadcast_to(np.stack([gram[:2, :2], gram[2:, 2:]]), (4, 2, 2, 2)).astype(np.float32),
            "other_names": np.array(HOSTILE[6:8]), "other_grams": np.stack([gram, gram]),
            "matrix_names": names, "matrix_stable_rank": np.ones((4, 2)), "matrix_effective_rank": np.ones((4, 2)),
            "matrix_energy": np.ones(4), "path_update": np.ones(8), "path_gradient": np.ones(8)}


def hostile_probe() -> Arrays:
    phi = np.array([0.1, 1.0, 10.0])
    return {"phi": phi, "since": np.array(HOSTILE[0]), "change": np.zeros(3), "cosine": np.ones(3),
            "layer_names": np.array(HOSTILE[:4]), "layer_change": np.zeros((4, 3)), "layer_cosine": np.ones((4, 3)),
            "layer_ratio": np.ones(4), "path_update": np.ones(8)}


# -- a bare one --------------------------------------------------------------------------------------------------------


def bare(path: Path, steps: int = 6) -> Path:
    """No scope, no probe, nothing kept: the lines that every run writes, and no more."""
    config = {"model": "tiny", "task": "arithmetic", "method": "grpo", "credit": None, "group": 4, "prompts": 4,
              "steps": steps, "seed": 0, "scope": "off", "probe": "off", "keep_every": 0, "lr": 1e-4}
    with Record.create(path, config, {"creditscope": "0.1.0"}) as record:
        for step in range(steps):
            record.append(step, {"reward/mean": 0.25 + 0.05 * step, "reward/std": 0.4, "signal/groups": 4,
                                 "signal/live_groups": 3, "signal/dead_groups": 0.25, "length/mean": 30.0,
                                 "length/max": 40, "length/truncated": 0.0, "entropy/mean": 0.2, "rollouts/spent": 16,
                                 "rollouts/sampled": 16, "rollouts/used": 16, "w/top10_mass": 0.3,
                                 "objective/value": 0.0, "grad/norm": 0.5, "time/step": 1.0})
    return path
