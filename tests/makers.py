"""Makers of batches for tests. Everything is float64 unless a test is about precision."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from creditscope import Rollouts
from creditscope.tasks.turns import Ladder


def load_script(path: Path) -> ModuleType:
    """A script that is no part of the package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def edit_config(run: Path, without: Sequence[str] = (), **settings: Any) -> None:
    """Other settings in a record, as somebody would write them who edits it: without the sum."""
    whole = json.loads((run / "run.json").read_text())
    del whole["crc32"]
    whole["config"] = {key: value for key, value in whole["config"].items() if key not in without} | settings
    (run / "run.json").write_text(json.dumps(whole))


def make(reward: Sequence[float], group: Sequence[int], lengths: Sequence[int], seed: int = 0,
         dtype: torch.dtype = torch.float64, width: int | None = None) -> Rollouts:
    """Rollouts with random tokens, log-probs, reference and entropies."""
    draw = torch.Generator().manual_seed(seed)
    shape = (len(reward), width or max(max(lengths), 1))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]

    def noise() -> Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float64).to(dtype) * mask

    return Rollouts(tokens=torch.randint(1, 5, shape, generator=draw) * mask, mask=mask, logp=-noise() - 0.1 * mask,
                    reward=torch.tensor(reward, dtype=dtype), group=torch.tensor(group), ref_logp=-noise(),
                    entropy=noise())


def to_rows(rollouts: Rollouts) -> Iterator[dict[str, Any]]:
    """One plain dictionary per rollout, without padding. float32 values survive the trip through JSON exactly."""
    for i, extent in enumerate(rollouts.extents.tolist()):
        row: dict[str, Any] = {name: found[i] for name in ("prompt", "text") if (found := getattr(rollouts, name))}
        row |= {"group": int(rollouts.group[i]), "reward": float(rollouts.reward[i])}
        row["tokens"] = rollouts.tokens[i, :extent].tolist()
        if not bool(rollouts.mask[i, :extent].all()):
            row["mask"] = rollouts.mask[i, :extent].tolist()
        for name in ("logp", "ref_logp", "entropy", "collision", "step"):
            value = getattr(rollouts, name)
            if value is not None:
                row[name] = value[i, :extent].tolist()
        if rollouts.step_reward is not None:
            # Columns past a row's last step are padding unless something stands in them.
            values = rollouts.step_reward[i].tolist()
            states = values if rollouts.step_state is None else rollouts.step_state[i].add(1).tolist()
            used = max([max(row.get("step", []), default=-1) + 1,
                        *(s + 1 for s, found in enumerate(zip(values, states, strict=True)) if any(found))])
            row["step_reward"] = values[:used]
            if rollouts.step_state is not None:
                row["step_state"] = rollouts.step_state[i, :used].tolist()
        if rollouts.pieces:
            row["pieces"] = [*rollouts.pieces[i], *[""] * extent][:extent]
        yield row


def walk_probability(game: Ladder, policy: Tensor, start: int, moves: tuple[int, ...]) -> Tensor:
    """Π_h π_h(a_h | s_h)."""
    states, _ = game.walk(start, moves)
    return torch.stack([policy[h, states[h], move] for h, move in enumerate(moves)]).prod()


def write_jsonl(path: Path, rollouts: Rollouts) -> None:
    """A batch as JSON lines, exactly as `read_jsonl` reads them."""
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in to_rows(rollouts)))


def moved(rollouts: Rollouts, size: float = 0.5, seed: int = 1) -> Tensor:
    """Log-probs of a policy that has moved away from the sampler."""
    draw = torch.Generator().manual_seed(seed)
    step = torch.randn(rollouts.logp.shape, generator=draw, dtype=torch.float64).to(rollouts.logp.dtype)
    return rollouts.logp + size * step * rollouts.mask


@st.composite
def random_batches(draw: st.DrawFn, graded: bool = True) -> Rollouts:
    """Batches of 1 to 4 groups of 2 to 6 rollouts of 1 to 7 tokens, in any row order."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    group = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    values = st.sampled_from([0.0, 0.25, 0.5, 1.0]) if graded else st.sampled_from([0.0, 1.0])
    reward = draw(st.lists(values, min_size=len(group), max_size=len(group)))
    lengths = draw(st.lists(st.integers(1, 7), min_size=len(group), max_size=len(group)))
    return make(reward, group, lengths, seed=draw(st.integers(0, 999)))
