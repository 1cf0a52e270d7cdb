"""Real TRL trainers on two ranks under DDP and FSDP2. FOLDER gets their records and what was found.

    torchrun --nproc_per_node 2 tests/plugins/trl_two_ranks.py FOLDER      all scenarios
    python tests/plugins/trl_two_ranks.py FOLDER                           PART of them

The second forks its ranks from one process that has loaded TRL, which takes longer than what they do. They find each
other through a file, so no port has to be free.

With scripted answers a prompt's copies get the same answers on one process and on many, so that runs can be compared.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import mini
from creditscope.microscope.recorder import Recorder
from creditscope.plugins.common import gather_ranks as together
from creditscope.plugins.trl import ScopeCallback, ScopedGRPOTrainer, callback
from creditscope.plugins.trl.batch import ALPHA
from creditscope.runs.record import Record
from plugins.test_trl_mixin import exactly
from plugins.trl_makers import WORDS, in_double, model_folder, settle, trainer
from small_models import apart

SETTINGS: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "num_iterations": 2,
                            "optim": "sgd", "learning_rate": 0.1, "ddp_find_unused_parameters": False}
PLAIN = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "ddp_find_unused_parameters": False}
SCRIPTED: dict[str, dict[str, Any]] = {
    "dapo": PLAIN | {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    "kl": PLAIN | {"loss_type": "grpo", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
                   "num_iterations": 2, "beta": 0.04},
    # Group 3 is cut at the limit and masked: micro-batches without a token, and ranks with unequal rows.
    "masked": PLAIN | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
                       "mask_truncated_completions": True},
    # Six rows a rank: the second of three groups lies on both.
    "cut": PLAIN | {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}}
"""For one process; with W the batch of each is its W-th part."""
RUNS = (*SCRIPTED, "dapo sharded", "masked sharded", "cut sharded")
PART = ("cut", "masked sharded", "one rank fails")
"""Of the scripted runs and of the failures. The groups of a rank's rows are cut, or of unequal lengths."""
EVEN = [f"{a} {b}" for a in WORDS[2:] for b in WORDS[2:]]
"""Prompts of one length: padding on the left turns the rotary angles, which are float32's."""


def scripted(live: Any, masked: bool) -> Any:
    """Answers drawn from the prompt, the copy's number and the step, in place of the model's."""
    live = exactly(live)

    def answers(prompts: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        found = []
        first = live.accelerator.process_index * len(prompts)
        for row, ids in enumerate(prompts, start=first):
            draw = torch.Generator().manual_seed(1000 * sum(ids) + 10 * row + live.state.global_step)
            length = int(torch.randint(2, 8, (1,), generator=draw))
            words = torch.randint(2, 8, (8,), generator=draw).tolist()
            found.append(words if masked and row // 4 == 3 else [*words[:length], 1])
        return found, None

    live._generate_single_turn = answers
    return live


def build(name: str, world: int, **more: Any) -> Any:
    settings = SCRIPTED[name] | more
    settings["per_device_train_batch_size"] //= world
    return scripted(trainer(**settings, prompts=EVEN), name == "masked")


def watched(live: Any, out: Path | None = None, **options: Any) -> Any:
    live.add_callback(ScopeCallback(live, **({"every": 1, "out": out, "groups": None} | options)))
    live.train()
    return live


def ended(live: Any) -> torch.Tensor:
    """The weights, whole on every rank."""
    whole = [p.detach() for p in live.model.parameters()]
    return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten() for p in whole])


@contextmanager
def fsdp() -> Iterator[dict[str, Any]]:
    """Settings under which accelerate shards the model, which it does not do for processes that it calls CPU's.

    All else is its own: the plugin, `fully_shard` layer by layer, gloo.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(PartialState, "__init__", init):
        yield {"fsdp": True}
    AcceleratorState._reset_state(reset_partial_state=True)


# -- what happens ------------------------------------------------------------------------------------------------------


class Wrong(ScopedGRPOTrainer):
    """Forgets that ranks average their gradients."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        return found | {ALPHA: found[ALPHA] / self.accelerator.num_processes}


def parity(folder: Path) -> dict[str, Any]:
    """TRL's own loss, plain and watched, our row in its place, and our row wrongly scaled."""
    ends: dict[str, torch.Tensor] = {}
    for name, kind, extra in (("plain", None, None), ("watched", None, None),
                              ("ours", ScopedGRPOTrainer, {"method": "trl_dapo"}),
                              ("wrong", Wrong, {"method": "trl_dapo"})):
        live = exactly(trainer(kind, **SETTINGS, extra=extra))
        start = ended(live).clone()
        if name == "watched":
            watched(live, folder / "parity")
        else:
            live.train()
        ends[name] = ended(live) - start
    return {"same": torch.equal(ends["plain"], ends["watched"]), "ours": apart(ends["ours"], ends["plain"]),
            "wrong": apart(ends["wrong"], ends["plain"])}


def sharding(folder: Path) -> dict[str, Any]:
    """Sharded by accelerate: plain, watched, watched without geometry, and that with whole weights left in place."""
    found: dict[str, Any] = {}
    with fsdp() as how:
        plain = trainer(**SETTINGS, **how)
        plain.train()
        found |= {"kind": type(plain.model_wrapped).__name__,
                  "parameters": sorted({type(p).__name__ for p in plain.model.parameters()})}
        for name, options in (("watched", {}), ("no gram", {"gram": False}), ("left", {"gram": False})):
            live = trainer(**SETTINGS, **how)
            with mock.patch("torch.distributed.fsdp.FSDPModule.reshard") if name == "left" else mock.MagicMock():
                watched(live, folder / f"sharded {name}", **options)
            found[name] = torch.equal(ended(plain), ended(live))
    return found


def readings(folder: Path) -> dict[str, Any]:
    """Scripted runs, whose records one process must equal."""
    return {name: reading(folder / name) for name in RUNS}


def some_readings(folder: Path) -> dict[str, Any]:
    return {name: reading(folder / name) for name in RUNS if name in PART}


def reading(out: Path) -> dict[str, Any]:
    name, _, sharded = out.name.partition(" ")
    with fsdp() if sharded else nullcontext({}) as how:
        live = watched(build(name, 2, **how), out)
        return {"weights": ended(live).tolist(), "norms": norms(live)}


def norms(live: Any) -> list[float]:
    return [entry["grad_norm"] for entry in live.state.log_history if "grad_norm" in entry]


def planted(*_: Any) -> Any:
    raise RuntimeError("planted")


MATRIX = Recorder.matrix


def turned(self: Recorder, source: Any, delta: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Rows of one layer under the next rollout's name: no sum over rows changes."""
    by = int("layers.0.mlp.up_proj" in source.names[0])
    return MATRIX(self, source, delta.roll(by, 0), a.roll(by, 0))


def one_rank_fails(folder: Path) -> None:
    """It must not pass in silence, and must not hang."""
    with mock.patch.object(callback, "entropy", planted) if dist.get_rank() == 1 else mock.MagicMock():
        watched(build("dapo", 2), folder / "one rank fails")


def failures(folder: Path) -> None:
    """What else must not pass in silence, and must not hang."""
    rank = dist.get_rank()
    one_rank_fails(folder)
    with fsdp() as how, mock.patch.object(callback, "entropy", planted) if rank == 1 else mock.MagicMock():
        watched(build("dapo", 2, **how), folder / "one sharded rank fails")
    with mock.patch.object(Recorder, "matrix", turned) if rank == 1 else mock.MagicMock():
        watched(build("dapo", 2), folder / "wrong rows on a rank")
    with mock.patch.object(together, "scale", return_value=1.0):
        watched(build("dapo", 2), folder / "sum for mean")
    live = build("dapo", 2)
    inner = live._compute_loss
    live._compute_loss = lambda model, inputs: inner(model, inputs | {"advantages": inputs["advantages"].abs()})
    watched(live, folder / "another loss")
    live = build("dapo", 2, mask_truncated_completions=True)
    live._generate_single_turn = lambda prompts, *_, **__: ([[2] * 8 if rank else [2, 1]] * len(prompts), None)
    watched(live, folder / "nothing on a rank")


class Talk(TrainerCallback):  # type: ignore[misc]
    """How often this rank spoke to others, step by step."""

    def __init__(self) -> None:
        self.calls = 0
        self.steps: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start = self.calls

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(self.calls - self.start)

    def counting(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return inner(*args, **kwargs)

        return outer


def traffic(folder: Path) -> dict[str, Any]:
    """Collectives of each step, without the callback and with a reading at the first step alone."""
    found: dict[str, Any] = {}
    for name in ("plain", "read once"):
        live, talk = build("dapo", 2, max_steps=3), Talk()
        if name == "read once":
            live.add_callback(ScopeCallback(live, every=100, out=folder / "read once"))
        live.add_callback(talk)
        with mock.patch.multiple(dist, **{verb: talk.counting(getattr(dist, verb)) for verb in (
                "all_gather", "all_reduce", "all_gather_object", "gather_object", "gather", "broadcast",
                "all_gather_into_tensor")}):
            live.train()
        found[name] = talk.steps
    return found


def command(folder: Path, world: int) -> None:
    """`creditscope lab train --engine trl`, with scripted answers."""
    from creditscope.plugins.trl.engine import Judge

    def answers(self: Any, prompts: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        found = []
        for row, ids in enumerate(prompts, start=self.accelerator.process_index * len(prompts)):
            draw = torch.Generator().manual_seed(1000 * sum(ids) + 10 * row + self.state.global_step)
            found.append(torch.randint(2, 30, (4 + row % 4,), generator=draw).tolist())
        return found, None

    inner = Judge.reward

    def judged(self: Any, completion_ids: list[list[int]], **about: Any) -> list[float]:
        inner(self, completion_ids, **about)
        return [float(sum(ids) % 2) for ids in completion_ids]

    flags = ["--task", mini.TASK, "--prompts", "4", "--group", "4", "--steps", "2", "--device", "cpu", "--max-tokens",
             "12", "--scope", "light", "--every", "1", "--method", "dr_grpo", "--dtype", "float64", "--eval-problems",
             "4", "--json"]
    with mini.known(), mock.patch.object(ScopedGRPOTrainer, "_generate_single_turn", answers), \
            mock.patch.object(Judge, "reward", judged):
        out = folder / f"command {world}"
        assert cli.run("lab", "train", mini.model(), "--engine", "trl", *flags, "--out", out) == 0


def main(folder: Path, whole: bool) -> None:
    torch.set_num_threads(1)
    load()
    found: dict[str, Any] = {}
    with in_double():
        for scenario in WHOLE if whole else SOME:
            found[scenario.__name__.removeprefix("some_")] = scenario(folder)
    assert dist.get_world_size() == 2
    command(folder, 2)
    if dist.get_rank() == 0:
        found["ranks"] = dist.get_world_size()
        found["absent"] = {path.name: [line.get("scope/absent") for line in Record.open(path).steps()]
                           for path in sorted(folder.iterdir()) if (path / "run.json").exists()}
        (folder / "found.json").write_text(json.dumps(found))


def load() -> None:
    """Before the ranks meet: then only the first would write the models."""
    model_folder("float64")
    mini.model()
    settle()


def rank(number: int, folder: Path) -> None:
    """One of two, in the environment that a launcher makes."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=number, world_size=2)
    main(folder, whole=False)
    dist.destroy_process_group()


WHOLE = (parity, sharding, readings, failures, traffic)
SOME = (parity, some_readings, one_rank_fails, traffic)

if __name__ == "__main__":
    if "RANK" in os.environ:
        main(Path(sys.argv[1]), whole=True)
    else:
        load()
        processes.start_processes(rank, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
