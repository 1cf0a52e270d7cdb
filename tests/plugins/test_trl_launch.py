"""`accelerate launch` as it really starts processes on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="its trainers are read")

from creditscope.runs.record import Record

pytestmark = [pytest.mark.conformance, pytest.mark.nightly]

SCRIPT = Path(__file__).parent / "trl_launched.py"


@pytest.mark.parametrize(("flag", "ranks", "kind"), [("--multi_gpu", 2, "MULTI_CPU"), ("--cpu", 1, "NO")])
def test_the_launcher_starts_as_many_processes_as_the_page_says_and_they_leave_one_record(
        flag: str, ranks: int, kind: str, tmp_path: Path) -> None:
    # --cpu with --num_processes 2 starts one process, without a message: the table of docs/trl.md.
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", flag, "--num_processes", "2", "--num_machines", "1",
         "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", str(SCRIPT), str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr[-3000:]
    told = sorted(tmp_path.glob("*.txt"))
    assert [path.read_text() for path in told] == [f"{ranks} {kind}"] * ranks
    steps = Record.open(tmp_path / "record").steps()
    assert [line["step"] for line in steps] == [0, 1]
    for line in steps:
        assert line["scope/agreement"] == pytest.approx(1, abs=1e-12)
        assert line["rollouts/sampled"] == 8 * ranks
        assert ("gram/cut_groups" in line) == (ranks == 2)
