"""Real files with a little damage, through every door: a right answer or an error of ours, and nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depth import examples
from fuzz import mutate, targets

HERE = Path(__file__).parent
CASES = sorted(case for case in (HERE / "cases").iterdir() if not case.name.startswith("."))
EXAMPLES = examples(120)
"""Of each target. They are the same in every run: the profile of the house is derandomised."""

damage = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4)


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_damaged_file_gives_a_right_answer_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    seeds = list(targets.TARGETS[name].seeds())

    @settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
    @given(which=st.integers(0, len(seeds) - 1), hurts=damage)
    def try_it(which: int, hurts: list[int]) -> None:
        data = seeds[which]
        for seed in hurts:
            data = mutate.damaged(data, random.Random(seed))
        targets.run(name, data, tmp_path)

    try_it()


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("name", targets.TARGETS)
def test_bytes_that_are_no_file_give_an_error_of_ours(name: str, tmp_path: Path) -> None:
    @settings(max_examples=EXAMPLES // 2, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode),
                                   st.sampled_from(mutate.PIECES)), max_size=8).map(b"".join))
    def try_it(data: bytes) -> None:
        targets.run(name, data, tmp_path)

    try_it()


@pytest.mark.parametrize("name", targets.TARGETS)
def test_real_files_go_through_every_door(name: str, tmp_path: Path) -> None:
    seeds = list(targets.TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        targets.run(name, seed, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_once_raised_something_else_no_longer_does(case: Path, tmp_path: Path) -> None:
    targets.run(case.name.rpartition("-")[0], case.read_bytes(), tmp_path)


LOG = b'\2{"log_history": [{"reward": 1, "frac_reward_zero_std": 0.5}]}' + targets.PART


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module", "data"), [
    ("offline", "batch.jsonl", b'{"prompt": [{"role": "user", "content": DEEP}], "response": "2", "reward": 1}\n'),
    ("task_files", "tasks.jsonl", b'{"question": "q", "answer": "#### 2", "id": DEEP}\n'),
    ("doctor", "diagnosis.readers.text", LOG + b'{"loss_type": DEEP}'),
])
def test_without_the_limit_of_depth_the_targets_go_red(name: str, module: str, data: bytes, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    # can-fail: json.loads reads lists nearly as deep as Python calls, and whoever writes them out again goes deeper.
    monkeypatch.setattr(f"creditscope.{module}.parse_json", lambda text, parse_constant=None: json.loads(text))

    def every_depth() -> None:
        for depth in range(800, 1000, 4):
            targets.run(name, data.replace(b"DEEP", b"[" * depth + b"]" * depth), tmp_path)

    with pytest.raises(RecursionError):
        every_depth()
