"""The schema is whole: no metric is named in src, or written by a run, that it does not have."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest

import creditscope
import mini
from creditscope import Record
from creditscope.diagnosis.trainers import TRL, VERL
from creditscope.lab.train import train
from creditscope.microscope.spectrum import Spectrum
from creditscope.runs import schema
from creditscope.runs.arrays import ARRAYS
from creditscope.runs.config import Config

SRC = Path(creditscope.__file__).parent
KEY = re.compile(r"(?P<area>[a-z]+)/(?:[a-z0-9_:]+/)*[a-z0-9_]+")
OTHERS = frozenset(VERL.metrics.values()) | frozenset(TRL.metrics.values()) | VERL.marks | TRL.marks
"""Names of trainers' own metrics."""
APART = frozenset({"selftest/table.py", "runs/formats.py", "diagnosis/readers/refusals.py",
                   *(f"diagnosis/trainers/{name}.py" for name in ("another", "prime_rl", "skyrl", "trl", "verl"))})
"""Modules whose names with a slash are other things: checks, names of older records, and trainers' own names."""


def heads(tree: ast.AST) -> set[str]:
    """Texts of a module, f-strings up to their first value; docstrings are texts of many words."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = {node.value for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside}
    return found | {str(node.values[0].value) + "…" for node in ast.walk(tree)
                    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant)}


def is_known(text: str) -> bool:
    """A key, the start of keys up to a slash or a value, or no metric at all."""
    if text.endswith(("…", "_")):
        start = text.removesuffix("…")
        area = start.partition("/")[0]
        if area not in schema.AREAS or not re.fullmatch(r"[a-z]+/[a-z0-9_/]*", start):
            return True
        return any(key.startswith(start) for key in (*schema.METRICS, *(f.pattern for f in schema.FAMILIES)))
    match = KEY.fullmatch(text)
    return match is None or match["area"] not in schema.AREAS or text in OTHERS or schema.metric(text) is not None


def test_no_module_names_a_metric_that_the_schema_does_not_have() -> None:
    wrong = [f"{path.relative_to(SRC)}: {text}" for path in sorted(SRC.rglob("*.py"))
             if path.relative_to(SRC).as_posix() not in APART
             for text in sorted(heads(ast.parse(path.read_text()))) if not is_known(text)]
    assert wrong == [], "add it to runs/schema.py, or spell it as it is there"


@pytest.mark.parametrize(("text", "known"), [
    ("reward/mean", True), ("reward/men", False), ("credit/zero", False), ("w/zero", True), ("gram/group/top1", True),
    ("gram/group/credit_null", False), ("overshoot/…", True), ("oversoot/…", True), ("gram/grup/…", False),
    ("critic/score/mean", True), ("text/html", True), ("reward/mean of a batch", True)])
def test_the_search_tells_a_wrong_key_from_a_right_one_and_from_what_is_no_key(text: str, known: bool) -> None:
    assert is_known(text) is known


def test_a_constant_is_named_as_its_key() -> None:
    assert {key: key.replace("/", "_").upper() for key in schema.CONSTANTS} == schema.CONSTANTS
    assert schema.GRAM_GROUP_EFFECTIVE_RANK == "gram/group/effective_rank"


def test_a_key_is_a_str_in_json_in_a_copy_and_in_another_process() -> None:
    assert json.loads(json.dumps({schema.W_ZERO: 0.5})) == {"w/zero": 0.5}
    assert {"w/zero": 1}[schema.W_ZERO] == 1
    for other in (pickle.loads(pickle.dumps(schema.W_ZERO)), copy.deepcopy(schema.W_ZERO)):
        assert (other, type(other)) == ("w/zero", str)


def test_a_family_gives_and_finds_its_keys() -> None:
    assert schema.OVERSHOOT_UPDATE("past", 3) == "overshoot/3/past"
    assert schema.ALSO("effective_rank", "monte_carlo,samples=4") == "also/monte_carlo,samples=4/effective_rank"
    for key in ("overshoot/3/past", "also/gae,lam=0.9/effective_rank", "credit:gae/top1", "scores/group/top1"):
        assert schema.metric(key) == key
    for key in ("overshoot/3/carry", "overshoot/0/past", "also/outcome/top1", "null/group/w_null", "time/lunch"):
        assert schema.metric(key) is None


def test_no_row_is_empty_and_each_names_a_module_that_is_there() -> None:
    sources = {".".join(path.relative_to(SRC).with_suffix("").parts): path.read_text() for path in SRC.rglob("*.py")}
    for key, constant in schema.CONSTANTS.items():
        text, area = sources[schema.METRICS[key].writer], schema.METRICS[key].area
        assert f'"{key}"' in text or f"schema.{constant}" in text or f'"{area}/' in text, f"who writes {key}?"
    for metric in schema.METRICS.values():
        assert metric.sentence.endswith("."), metric
        assert metric.name, metric
        assert metric.unit, metric
        assert metric.writer in sources, metric
    for arrays in ARRAYS.values():
        for array in arrays.values():
            assert array.sentence.endswith("."), array
            assert f'"{array.name}"' in sources[array.writer], array


def test_equations_of_ranks_are_those_of_the_code() -> None:
    for name in ("effective_rank", "entropy_rank", "participation_ratio", "stable_rank", "top1"):
        assert schema.READINGS[name].equation.rstrip(".") in inspect.getdoc(getattr(Spectrum, name)), name


@pytest.mark.usefixtures("mini_task")
def test_every_name_that_a_run_writes_is_in_the_schema(tmp_path: Path) -> None:
    """One run that looks at everything, with a critic, and one that brakes and adapts."""
    base = Config(model=mini.model(), task=mini.TASK, group=4, prompts=2, steps=2, inner_steps=2, eval_problems=2)
    full = dataclasses.replace(base, credit="gae", scope="full", every=1, probe="full", probe_every=1,
                               keep_every=1, also=("outcome", "prefix_tree"))
    other = dataclasses.replace(base, scope="light", every=1, brake="recall", adapt="raise_group,window=1", rollouts=64)
    seen: set[str] = set()
    for name, config in (("full", full), ("other", other)):
        list(train(config, tmp_path / name, {}))
        record = Record.open(tmp_path / name)
        seen |= {key for line in record.steps() for key in line} - {"step", "absent", "kept"}
        loads = {"groups": record.group, "scope": record.reading, "optimizer": record.optimizer_reading}
        for file, load in loads.items():
            for path in sorted((tmp_path / name / file).glob("*.npz")):
                for key, array in load(int(path.stem)).items():
                    assert key in ARRAYS[file], f"{file}: {key}"
                    assert array.ndim == len(ARRAYS[file][key].axes), f"{file}: {key} is {array.shape}"
    assert {"critic/loss", "also/outcome/effective_rank", "scores/group/top1", "w/zero", "overshoot/1/past"} <= seen
    assert [key for key in sorted(seen) if schema.metric(key) is None] == []
