"""Makers of evidence for the tests of claims: runs in numbers, and real records of rows whose spectrum is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from creditscope.claims.evidence import Evidence, read_evidence
from creditscope.claims.verdict import ClaimVerdict
from creditscope.runs.record import Record
from records import write_record

Scores = Callable[[np.ndarray], np.ndarray]
"""(R,) rewards of a group -> (R, d) scores ψ."""
TRACKED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight")


ALL_RIGHT = {"signal/dead_groups": 1.0, "signal/groups": 1.0, "reward/mean": 1.0, "reward/std": 0.0}
"""A step of one group whose rewards are all 1."""


def of(verdicts: Sequence[ClaimVerdict], words: str) -> ClaimVerdict:
    """The one verdict whose definition holds these words."""
    found = [verdict for verdict in verdicts if words in verdict.definition]
    assert len(found) == 1, [verdict.definition for verdict in verdicts]
    return found[0]


def settings(**changes: Any) -> dict[str, Any]:
    """What a run of `creditscope lab train --method p1_grpo` says about itself, in the settings that claims look at."""
    return {"model": "tiny", "task": "arithmetic", "method": "p1_grpo", "credit": None, "beta": None, "group": 8,
            "prompts": 8, "seed": 0, "steps": 30, "rollouts": 0, "adapt": "none", "lr": 1e-4} | changes


def evidence(*, steps: Sequence[Mapping[str, float]] = (), groups: Mapping[str, Sequence[float | None]] | None = None,
             readings: Mapping[str, Sequence[float]] | None = None, turns: Mapping[str, Sequence[float]] | None = None,
             **changes: Any) -> Evidence:
    """A run with these numbers; without a column `step` each group is a reading of its own."""
    config = settings(**changes)
    columns = dict(groups or {})
    if columns and "step" not in columns:
        columns["step"] = [float(i) for i in range(len(next(iter(columns.values()))))]
    numbered = tuple({"step": float(i), **step} for i, step in enumerate(steps))
    return Evidence(name=f"r{config['group']}-seed-{config['seed']}", config=config, finished=True, steps=numbered,
                    groups=columns, readings=readings or {}, turns=turns or {})


def seeds(make: Callable[[int], Evidence], count: int = 3) -> list[Evidence]:
    return [make(seed) for seed in range(count)]


def learner(accuracy: Callable[[int], float], *, steps: int = 3, group: int = 8, prompts: int = 8, **changes: Any
            ) -> Evidence:
    """A run evaluated before each step and after the last, by what it had spent until then."""
    each = group * prompts
    lines = [{"eval/accuracy": accuracy(i * each), "rollouts/spent": each} for i in range(steps)]
    return evidence(steps=[*lines, {"eval/accuracy": accuracy(steps * each)}], group=group, prompts=prompts, **changes)


# -- rows whose spectrum is known ------------------------------------------------------------------------------------


def orthogonal(reward: np.ndarray) -> np.ndarray:
    """Every score a direction of its own: r_eff = 4k(R−k)/R, which is R at k = R/2."""
    return np.eye(len(reward))


def two_directions(reward: np.ndarray) -> np.ndarray:
    """One direction for right answers, one for wrong: at k = R/2 both hold the same, so every rank is 2."""
    return np.stack([reward, 1 - reward], axis=1)


def one_direction(reward: np.ndarray) -> np.ndarray:
    return np.ones((len(reward), 1))


def unequal(reward: np.ndarray) -> np.ndarray:
    """Orthogonal scores of norms 1, 1/2, 1/4, ...: norms alone lower the rank."""
    return np.diag(0.5 ** np.arange(len(reward)))


def reading(scores: Scores, size: int, also: Mapping[str, Scores] | None = None, names: Sequence[str] = TRACKED
            ) -> dict[str, Any]:
    """What the microscope writes of three groups: half right twice, and all right. Rows are A_i ψ_i."""
    half = np.arange(size) < size // 2
    reward = np.concatenate([half, half, np.ones(size)]).astype(np.float64)
    group = np.repeat([0, 1, 2], size)
    credit = reward - np.repeat([reward[group == g].mean() for g in (0, 1, 2)], size)

    def gram(of: Scores) -> np.ndarray:
        rows = np.concatenate([of(reward[group == g]) for g in (0, 1, 2)]) * credit[:, None]
        return (rows @ rows.T) * (group[:, None] == group[None, :])

    whole = gram(scores)
    blocks = np.array([whole[np.ix_(group == g, group == g)] for g in (0, 1, 2)], dtype=np.float32)
    found = {"group": group, "reward": reward, "row_w": credit, "gram": whole, "eps": np.array(2.2e-16),
             "layer_names": np.array(names), "layer_groups": np.array([0, 1, 2]),
             "layers": np.array([blocks] * len(names))}
    if also:
        found["other_names"] = np.array(list(also))
        found["other_grams"] = np.array([gram(other) for other in also.values()])
    return found


def recorded(path: Path, scores: Scores, *, also: Mapping[str, Scores] | None = None, readings: int = 2,
             names: Sequence[str] = TRACKED, **changes: Any) -> Evidence:
    """The evidence of a real record with such readings."""
    config = settings(**changes)
    lines = [{"reward/mean": 2 / 3, "rollouts/spent": 3 * config["group"]}] * readings
    kept = dict.fromkeys(range(readings), reading(scores, config["group"], also, names))
    return read_evidence(Record.open(write_record(path / f"r{config['group']}-{config['seed']}", lines, config,
                                                  readings=kept, versions={"torch": "2"})))


def sweep(path: Path, scores: Scores, sizes: Sequence[int] = (2, 4, 8), **changes: Any) -> list[Evidence]:
    """Three seeds of each size."""
    return [recorded(path, scores, group=size, seed=seed, **changes) for size in sizes for seed in range(3)]
