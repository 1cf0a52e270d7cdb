"""What strangers' bytes can reach, one function a door: it must give a right answer or a CreditscopeError.

    target(data, place)     data: the file's bytes, place: an empty folder; whatever else is raised is a bug

Where a right answer is known it is checked: rollouts that were read survive writing and reading, verdicts lie inside
the text they judge, numbers equal those of another route. `PART` separates files where a target reads several.
Shared by the hypothesis tests and the coverage-guided fuzzer.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from creditscope.batch.jsonl import read_jsonl
from creditscope.claims.evidence import read_evidence, to_json
from creditscope.claims.table import check
from creditscope.cli.check import read_runs
from creditscope.credit.table import parse
from creditscope.diagnosis.engine import diagnose
from creditscope.diagnosis.read import read as read_log
from creditscope.errors import CreditscopeError, printable
from creditscope.files.jsonlines import parse_json
from creditscope.methods.words import equation
from creditscope.offline.batches import Reader
from creditscope.offline.files import Source
from creditscope.offline.scope import scope_file
from creditscope.offline.settings import Settings
from creditscope.optimizer.table import parse_brake
from creditscope.report.run import read_run
from creditscope.runs.adapt import parse_adapt
from creditscope.runs.config import Config, flags
from creditscope.runs.record import Record
from creditscope.studies.processbench import read_processbench
from creditscope.tasks import Problem, Verdict
from creditscope.tasks.arithmetic import Arithmetic
from creditscope.tasks.equations import equations, evaluate, holds
from creditscope.tasks.extraction import final_answer, number_of
from creditscope.tasks.gsm8k import Gsm8k
from creditscope.tasks.jsonl import read_rows
from creditscope.tasks.turns import Ladder
from makers import write_jsonl

PART = b"\n%%%\n"
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Target:
    """One door, and real files that go through it."""

    run: Callable[[bytes, Path], None]
    seeds: Callable[[], Iterator[bytes]]


@contextlib.contextmanager
def refusal() -> Iterator[None]:
    """An error of ours is an answer, if it can be shown on any terminal and read by a person."""
    try:
        yield
    except CreditscopeError as error:
        said = printable(str(error))
        said.encode("utf-8")
        assert len(said) < 20_000, f"an error of {len(said):,} characters"


# -- rollouts --------------------------------------------------------------------------------------------------------


def rollouts(data: bytes, place: Path) -> None:
    """Our own JSON lines. What was read is finite, and survives writing and reading."""
    path = place / "r.jsonl"
    path.write_bytes(data)
    with refusal():
        batch = read_jsonl(path, dtype=torch.float64)
        assert bool(torch.isfinite(batch.logp).all() and torch.isfinite(batch.reward).all())
        write_jsonl(place / "again.jsonl", batch)
        again = read_jsonl(place / "again.jsonl", dtype=torch.float64)
        write_jsonl(place / "third.jsonl", again)
        assert (place / "again.jsonl").read_bytes() == (place / "third.jsonl").read_bytes()


def offline(data: bytes, place: Path) -> None:
    """`creditscope inspect` without a model, on JSON lines of any of the known shapes."""
    path = place / "r.jsonl"
    path.write_bytes(data)
    with refusal():
        for read in scope_file(path, Settings()):
            json.dumps({name: value for name, value in read.line.items() if not isinstance(value, float)})
            assert read.done <= read.size


def parquet(data: bytes, place: Path) -> None:
    """TRL's completions, after the survey, which takes a process of its own and is tested elsewhere."""
    path = place / "completions_00001.parquet"
    path.write_bytes(data)
    source = Source(path)
    source._surveyed = True
    with refusal():
        for batch in Reader(source).batches():
            assert batch.samples
            assert all(math.isfinite(sample.reward) for sample in batch.samples)


# -- runs ------------------------------------------------------------------------------------------------------------


def record(data: bytes, place: Path) -> None:
    """run.json and steps.jsonl, as report, check and doctor read them."""
    run, _, steps = data.partition(PART)
    (place / "run.json").write_bytes(run)
    (place / "steps.jsonl").write_bytes(steps)
    with refusal():
        found = Record.open(place)
        for line in found.steps():
            assert isinstance(line["step"], int)
    with refusal():
        run_ = read_run(place)
        for name in {name for step in run_.steps for name in step}:
            assert all(isinstance(value, float) for _, value in run_.series(name))
    with refusal():
        evidence = read_runs([place])
        check(evidence)
        json.loads(to_json(evidence[0]))
    with refusal():
        diagnose(read_log(place))


def arrays(data: bytes, place: Path) -> None:
    """An npz on each shelf of a record."""
    (place / "run.json").write_text('{"format": 1, "config": {"group": 2, "seed": 0}, "versions": {}}')
    (place / "steps.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    for shelf in ("groups", "scope", "optimizer"):
        (place / shelf).mkdir()
        (place / shelf / "000000.npz").write_bytes(data)
    run = read_run(place)
    for load in (run.rollouts, run.reading, run.probed):
        assert all(isinstance(value, np.ndarray) for value in (load(0) or {}).values())
    with refusal():
        read_evidence(run.record)


def evidence(data: bytes, place: Path) -> None:
    """A file of `papers check --save`, put to every claim."""
    path = place / "a.evidence.json"
    path.write_bytes(data)
    with refusal():
        for verdict in check(read_runs([path])):
            json.dumps(asdict(verdict), allow_nan=False)


def doctor(data: bytes, place: Path) -> None:
    """A log, a table, a trainer's state, a notebook or an array of rows, by the first byte, and beside it settings."""
    name, settings = (("train.log", "config.yaml"), ("train.csv", "config.yaml"),
                      ("trainer_state.json", "training_args.json"), ("train.ipynb", "config.yaml"),
                      ("metrics.json", "config.yaml"))[data[0] % 5 if data else 0]
    log, _, given = data[1:].partition(PART)
    (place / name).write_bytes(log)
    (place / settings).write_bytes(given)
    for path, config in ((place, None), (place / name, place / settings)):
        with refusal():
            found = read_log(path, config)
            for finding in diagnose(found).findings:
                json.dumps(asdict(finding), default=str)
                assert len(finding.sentence + "".join(finding.evidence)) < 20_000


# -- tasks -----------------------------------------------------------------------------------------------------------


def task_files(data: bytes, place: Path) -> None:
    """Problems in JSON lines, in GSM8K's format, and ProcessBench's list."""
    path = place / "p.jsonl"
    path.write_bytes(data)
    with refusal():
        for row, _, number in read_rows(path):
            assert number > 0
            assert isinstance(row, dict)
    with refusal():
        task = Gsm8k(path)
        for split in ("train", "test"):
            for problem in task.problems(split):
                _inside(_judge(task, problem, str(problem.meta["solution"])), str(problem.meta["solution"]))
    with refusal():
        for solution in read_processbench(path):
            assert -1 <= solution.label < len(solution.steps)
            assert solution.spans[-1].end >= len(solution.text)


ARITHMETIC = Problem("0", "Mia has 12 apples. She buys 7 more. How many?", "19",
                     {"chain": ("12 + 7 = 19",), "solution": "12 + 7 = 19\n#### 19"})
LADDER = Ladder()
RUNG = next(iter(LADDER.problems("test")))


def verifiers(data: bytes, place: Path) -> None:
    """Answers of a model. The second part, where there is one, is the reference."""
    answer, _, other = data.partition(PART)
    text, reference = answer.decode("utf-8", "surrogateescape"), other.decode("utf-8", "replace")
    for task, problem in ((Arithmetic(), ARITHMETIC), (LADDER, RUNG)):
        _inside(task.verify(problem, text), text)
    task = Gsm8k(place)
    given = final_answer(text)
    if given is not None:
        assert 0 < len(given) <= 1000
        mine, theirs = number_of(given), number_of(reference)
        if mine is not None and theirs is not None:
            assert (mine == theirs) == (theirs == mine)
    _inside(_judge(task, Problem("0", "", reference or "1"), text), text)
    exact = text.strip()
    if exact.isascii() and exact.isdigit() and len(exact) < 400:
        assert number_of(exact) == int(exact)
    for left, right in equations(text[:2000]):
        value = evaluate(left)
        assert value is not None
        if set(right) <= set("0123456789") and len(right) <= 15:
            assert holds(left, right) == (value == Fraction(int(right)))


def _judge(task: Gsm8k, problem: Problem, text: str) -> Verdict:
    """As without math-verify: what it thinks is its own, and its process is tested elsewhere."""
    task._worker = None
    return task.verify(problem, text)


def _inside(verdict: Verdict, text: str) -> None:
    """Steps are in order, disjoint, and inside the text; rewards are finite."""
    assert math.isfinite(verdict.reward)
    edges = [edge for step in verdict.steps for edge in (step.start, step.end)]
    assert edges == sorted(edges)
    assert not edges or (edges[0] >= 0 and edges[-1] <= len(text))


# -- settings --------------------------------------------------------------------------------------------------------


def specs(data: bytes, place: Path) -> None:
    """--credit, --brake and --adapt: what was read can be written and read again."""
    text = data.decode("utf-8", "surrogateescape")
    for read in (parse, parse_brake, parse_adapt):
        with refusal():
            name, options = read(text)
            assert all(isinstance(value, bool | int | float | str) for value in options.values())
            again = ",".join([name, *(f"{key}={json.dumps(value) if isinstance(value, bool) else value}"
                                      for key, value in options.items())])
            assert read(again) == (name, options)


def config(data: bytes, place: Path) -> None:
    """Settings as a record has them: an object of anything, taken as Config and as words of the command line."""
    try:
        found = parse_json(data)
    except ValueError:
        return
    if not isinstance(found, dict):
        return
    known = {f.name for f in fields(Config)}
    with refusal():
        made = Config(**{name: tuple(value) if isinstance(value, list) else value
                         for name, value in found.items() if name in known})
        assert flags(asdict(made))
        assert equation(made.row)
        assert all(math.isfinite(made.learning_rate(step)) for step in (0, made.steps - 1))


# -- real files ------------------------------------------------------------------------------------------------------


def _texts(*paths: str, most: int = 4096) -> Iterator[bytes]:
    """The first lines of files of the tests."""
    for path in paths:
        for file in sorted(TESTS.glob(path)):
            yield file.read_bytes()[:most].rpartition(b"\n")[0] + b"\n"


def _lines(*rows: Mapping[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


OURS = {"prompt": "1+1=", "text": "2", "group": 0, "reward": 1.0, "tokens": [5, 9], "logp": [-0.1, -0.7]}
RICH = OURS | {"ref_logp": [-0.1, -0.7], "entropy": [0.5, 0.1], "collision": [0.5, 0.9], "step": [0, 1],
               "step_reward": [1.0, 0.0], "step_state": [0, 1], "pieces": ["2", ""], "mask": [True, True]}
CHAT = [{"role": "user", "content": "1+1="}]


def _rollouts_seeds() -> Iterator[bytes]:
    yield _lines(OURS, OURS | {"reward": 0.0, "logp": [-1e-300, -5]})
    yield _lines(RICH, RICH | {"reward": 0, "mask": [True, False]})
    yield b"\xef\xbb\xbf" + _lines(OURS).replace(b"\n", b"\r\n")


def _offline_seeds() -> Iterator[bytes]:
    yield from _rollouts_seeds()
    yield _lines({"prompt": CHAT, "response": "2", "reward": 1}, {"prompt": CHAT, "response": "3", "reward": 0})
    yield _lines({"messages": CHAT, "step": 1, "choices": [
        {"message": {"role": "assistant", "content": "2"}, "reward": r,
         "logprobs": {"content": [{"token": "2", "logprob": -0.1}]}} for r in (0, 1)]})
    yield _lines(*({"step": 1, "prompt": "p", "completion": c, "accuracy": r, "advantage": 0.1}
                   for c, r in (("a", 1.0), ("b", None), ("c", 0))))
    yield from _texts("offline/dumps/*/*.jsonl")


def _parquet_seeds() -> Iterator[bytes]:
    for file in sorted([*TESTS.glob("offline/dumps/*/*.parquet"), *TESTS.parent.glob("examples/*/*.parquet")]):
        yield file.read_bytes()


def _record_seeds() -> Iterator[bytes]:
    for folder in sorted(TESTS.glob("diagnosis/logs/ours-*")):
        steps = b"".join((folder / "steps.jsonl").read_bytes().splitlines(keepends=True)[:8])
        yield (folder / "run.json").read_bytes() + PART + steps


def _arrays_seeds() -> Iterator[bytes]:
    gram = np.array([[1.0, -0.5], [-0.5, 1.25]])
    reading = {"group": np.array([0, 0]), "reward": np.array([1.0, 0.0]), "gram": gram, "scores": gram,
               "credit": np.array([1.0, -1.0]), "eps": np.array(2e-16), "layer_names": np.array(["a.q_proj.weight"]),
               "layer_groups": np.array([0]), "layers": gram[None, None].astype(np.float32),
               "other_names": np.array(["salt"]), "other_grams": gram[None]}
    turns = {"step_state": np.array([[0, 1], [0, -1]]), "step_reward": np.array([[1.0, 0.0], [0.5, 0.0]]),
             "group": np.array([0, 1])}
    for save in (np.savez, np.savez_compressed):
        for some in (reading, turns):
            packed = io.BytesIO()
            save(packed, **some)  # type: ignore[arg-type]
            yield packed.getvalue()


def _evidence_seeds() -> Iterator[bytes]:
    for file in sorted((TESTS.parent / "results").glob("*/*-seed-0.evidence.json")):
        found = json.loads(file.read_bytes())
        for table in ("steps", "groups", "readings", "turns"):
            found[table] = {name: values[:3] for name, values in found[table].items()}
        if "layers" in found:  # of earlier versions
            found["layers"] = dict(list(found["layers"].items())[:2])
        yield json.dumps(found).encode()


def _doctor_seeds() -> Iterator[bytes]:
    for first, name, settings in ((b"\0", "*.log", "config.yaml"), (b"\2", "trainer_state.json", "training_args.json")):
        for log in sorted(TESTS.glob(f"diagnosis/logs/*/{name}")):
            given = next((file.read_bytes() for file in sorted(log.parent.glob(settings))), b"")
            rows = log.read_bytes()
            if name == "trainer_state.json":
                rows = json.dumps({"log_history": json.loads(rows)["log_history"][:8]}).encode()
            yield first + rows[:4096] + PART + given
    rows = "\n".join(f"{k},0.5,{k / 10},0.25,1e-6" for k in range(20))
    history = [{"step": k, "reward": k / 10, "reward_std": 0.5, "kl": 0.1} for k in range(12)]
    yield b"\4" + json.dumps({"total": 12, "steps": history}).encode() + PART
    printed = ["{'actor_rollout_ref': {'actor': {'clip_ratio': 0.2},\n", " 'data': {'max_response_length': 8}}\n",
               *(f"step:{k} - critic/score/mean:0.500 - actor/lr(1e-4):0.010\n" for k in range(12))]
    table = "<table><tr><th>Step</th><th>reward</th></tr><tr><td>1</td><td>0.5</td></tr></table>"
    cells = [{"cell_type": "code", "source": "GRPOConfig(beta=0.1)", "outputs": [
        {"output_type": "stream", "text": printed}, {"data": {"text/html": table}}]}]
    yield b"\3" + json.dumps({"nbformat": 4, "cells": cells}).encode() + PART
    yield b"\1" + f"step,reward,kl,frac_reward_zero_std,grad_norm\n{rows}\n".encode() + PART + b"beta: 0.04\n"


def _task_seeds() -> Iterator[bytes]:
    yield _lines({"question": "How many?", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 72", "id": 3})
    yield _lines({"prompt": "p", "answer": 3, "right_lines": ["a"]}, {"prompt": "q"})
    yield json.dumps([{"id": "gsm8k-0", "problem": "p", "steps": ["a", "b"], "final_answer_correct": False,
                       "label": 1}]).encode()


def _verifier_seeds() -> Iterator[bytes]:
    for text in ("12 + 7 = 19\n#### 19", "up\ndown\nup", "She earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### $1,200.50",
                 r"\boxed{\frac{\frac{1}{2}}{3}}", "#### 1e999999999", "#### -٣٤", "2*(3+4)-1/2=13.5 and 100/3 = 33.33",
                 "50% of 20 = 10", "#### 18 apples", "1/0 = 5", "#### ½"):
        yield text.encode() + PART + b"19"


def _spec_seeds() -> Iterator[bytes]:
    yield from (b"monte_carlo,samples=8", b"gae,gamma=0.99,lam=0.95", b"entropy_mask,share=0.2", b"my_module:mine,k=1",
                b"shorten,share=0.02", b"kl_stop,limit=1e-3", b"raise_group,most=16,window=3,fall=0.9",
                b"denser_credit,to=salt", b"late_group,at=0.5", b"none", b"salt")


def _config_seeds() -> Iterator[bytes]:
    yield json.dumps(asdict(Config())).encode()
    yield json.dumps({"method": "gspo", "credit": "monte_carlo,samples=2", "group": 4, "scope": "light", "lr": 1e-5,
                      "also": ["salt"], "adapt": "raise_group,most=16", "brake": "shorten", "inner_steps": 2}).encode()


TARGETS: dict[str, Target] = {
    "rollouts": Target(rollouts, _rollouts_seeds), "offline": Target(offline, _offline_seeds),
    "parquet": Target(parquet, _parquet_seeds), "record": Target(record, _record_seeds),
    "arrays": Target(arrays, _arrays_seeds), "evidence": Target(evidence, _evidence_seeds),
    "doctor": Target(doctor, _doctor_seeds), "task_files": Target(task_files, _task_seeds),
    "verifiers": Target(verifiers, _verifier_seeds), "specs": Target(specs, _spec_seeds),
    "config": Target(config, _config_seeds),
}


def run(name: str, data: bytes, place: Path) -> None:
    """One input through one door, in a folder that is emptied afterwards."""
    try:
        TARGETS[name].run(data, place)
    finally:
        for entry in os.scandir(place):
            shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
