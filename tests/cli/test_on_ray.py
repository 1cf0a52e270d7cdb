"""Sweeps on Ray: what is refused at once, a run on one node, and real clusters on 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mini
import ray_nodes
from cli import run
from creditscope.cli import ray_node
from creditscope.cli.on_ray import CONNECTS, ClusterSpec, _connect, below_here
from creditscope.cli.ray_node import Runner
from creditscope.cli.sweep import inputs
from creditscope.errors import CreditscopeError
from creditscope.runs.config import Config
from creditscope.runs.mirror import Inbox, Outbox, pack, unpack
from creditscope.runs.record import Record
from same_runs import differences

COMPARE = ("lab", "compare", "credit", "outcome", "--seeds", "1", "--rollouts", "32", "--group", "4", "--prompts", "2")


def wait_for(state: Any, what: str, seconds: float = 240) -> Any:
    """The first true value of `state()`."""
    start = time.monotonic()
    while not (found := state()):
        assert time.monotonic() - start < seconds, f"no {what} in {seconds} s"
        time.sleep(0.1)
    return found


# -- what is refused at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on", "words"), [
    ("rai", "give here (processes on this machine), ray (a cluster on this machine), or ray://HOST:PORT"),
    ("ray://head", "ray://HOST:PORT"), ("ray://:10001", "ray://HOST:PORT"), ("ray://head:0", "ray://HOST:PORT"),
    ("http://head:10001", "ray://HOST:PORT"), ("ray,gpu=1", "unknown option of --on ray: 'gpu'; did you mean 'gpus'?"),
    ("ray,cpus=0", "must be a finite number of at least 0.01"), ("ray,memory=-1", "a finite number of at least 0"),
    ("ray,cpus", "'cpus' is no option; write ray,key=value")])
def test_an_on_that_cannot_be_is_refused_before_anything_is_loaded(
        on: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*COMPARE, "--out", str(tmp_path), "--on", on) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_a_run_takes_of_a_node_is_read_from_on() -> None:
    assert ClusterSpec.read("ray,cpus=2,gpus=0.5,memory=8") == ClusterSpec("ray", 2, 0.5, 8)
    assert ClusterSpec.read("ray://[::1]:10001").host() == ("::1", 10001)


def test_without_ray_the_command_that_installs_it_is_named(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(*COMPARE, "--out", str(tmp_path), "--on", "ray://head:10001") == 2
    assert "--on ray://head:10001 needs ray: pip install 'creditscope[ray]'" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_said_before_ray_is_loaded(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    with socket.socket() as closed:  # bound, and not listening: nobody else can take the port
        closed.bind(("127.0.0.1", 0))
        address = f"ray://127.0.0.1:{closed.getsockname()[1]}"
        assert run(*COMPARE, "--out", str(tmp_path), "--on", address) == 2
    assert f"no Ray cluster answers at {address}: Connection refused; on its head node: ray start --head" \
        in capsys.readouterr().err


def test_a_cluster_that_starts_no_server_for_a_client_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    tried: list[str] = []

    def init(address: str, **_: object) -> None:  # the real failure is a crash in one fork of ten, not to be provoked
        tried.append(address)
        if len(tried) % (CONNECTS + 1) != 0:
            raise ConnectionAbortedError("Initialization failure from server:\nStarting Ray client server failed.")

    monkeypatch.setattr(ray, "init", init)
    with socket.socket() as open_port:
        open_port.bind(("127.0.0.1", 0))
        open_port.listen()
        place, said = ClusterSpec(f"ray://127.0.0.1:{open_port.getsockname()[1]}"), list[str]()
        with pytest.raises(CreditscopeError, match=r"cannot use the Ray cluster .*Starting Ray client server failed"):
            _connect(place, None, said.append)
        assert (len(tried), len(said)) == (CONNECTS, CONNECTS - 1)
        assert _connect(place, None, said.append) is ray
        assert (len(tried), len(said)) == (CONNECTS + 1, CONNECTS - 1)
        refuse = mock.Mock(side_effect=ConnectionAbortedError("the runtime environment differs"))
        monkeypatch.setattr(ray, "init", refuse)
        with pytest.raises(CreditscopeError, match="the runtime environment differs"):
            _connect(place, None, said.append)
        assert refuse.call_count == 1  # another fault is no reason to ask again


def test_files_below_the_working_directory_travel_and_others_do_not(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "problems.jsonl").touch()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert below_here(["problems.jsonl", "tiny", "", "owner/name", str(tmp_path / "other")]) == ("problems.jsonl",)
    with pytest.raises(CreditscopeError, match=r"\.\./other lies outside the working directory"):
        below_here(["../other"])


def test_pairs_and_a_reward_model_travel_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward").mkdir()
    (tmp_path / "model").mkdir()  # the prefix of a learned reward is no module of the user's
    (tmp_path / "pairs.jsonl").touch()
    assert inputs(Config(method="dpo", pairs="pairs.jsonl")) == ("pairs.jsonl",)
    assert inputs(Config(reward="model:reward")) == ("reward",)


# -- a run on a node, without Ray ------------------------------------------------------------------------------------


@pytest.fixture
def no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "node_id", lambda: "this")


def heard(runner: Runner, inbox: Inbox | None = None) -> dict[str, Any]:
    """All news of a run, to its end."""
    while True:
        pieces, said = unpack(runner.news())
        if inbox is not None:
            inbox.put(pieces)
        if "code" in said:
            return said


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_leaves_nothing_on_its_node(no_id: None, tmp_path: Path) -> None:
    runner = Runner(below=str(tmp_path))
    runner.take(pack([]), False)
    assert unpack(runner.begin(["list", "methods", "grop"], 0))[1]["node"] == "this"
    said = heard(runner)
    assert said["code"] == 2
    assert "did you mean 'grpo'?" in said["log"]
    runner.close()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_said_by_the_first_call(
        no_id: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ray_node, "unfold", full)
    runner = Runner(below=str(tmp_path))
    runner.take(pack([]), False)
    assert "No space left on device" in unpack(runner.begin(["--version"], 0))[1]["error"]
    runner.close()


TRAIN = ("lab", "train", "--task", mini.TASK, "--steps", "400", "--group", "4", "--prompts", "2", "--checkpoint-every",
         "2", "--eval-problems", "0", "--device", "cpu", "--no-alarm", "--json")


@pytest.mark.slow
def test_a_run_ends_with_its_actor_and_what_came_home_goes_on(
        no_id: None, mini_task: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor's process is a fork, which is killed: nobody is left on the node to end the run or to clean up."""
    monkeypatch.setattr(os, "environ", ray_nodes.environment())
    place, model = tmp_path / "node", mini.model()
    place.mkdir()
    read, write = os.pipe()
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException), os.fdopen(write, "wb") as out:
            runner = Runner("run", str(place))
            runner.begin([*TRAIN[:2], model, *TRAIN[2:]], 0)
            while True:
                parcel = runner.news()
                out.write(len(parcel).to_bytes(8) + parcel)
                out.flush()
        os._exit(1)
    os.close(write)
    home = tmp_path / "home"
    with os.fdopen(read, "rb") as parcels, Inbox(home) as inbox:
        while not ((home / "run.json").exists() and Record.open(home).checkpoints()):
            inbox.put(unpack(parcels.read(int.from_bytes(parcels.read(8))))[0])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_for(lambda: not list(place.iterdir()), "empty scratch folder")  # the run has ended, and removed it
    done = Record.open(home).checkpoints()[-1]
    runner = Runner("run", str(place))
    for piece in Outbox(home).pieces():
        runner.take(pack([piece]), True)
    words = list(TRAIN)
    words[words.index("400")] = str(done + 2)
    runner.begin([*words[:2], model, *words[2:]], 0)
    with Inbox(home) as inbox:
        assert heard(runner, inbox)["code"] == 0
    runner.close()
    assert [line["step"] for line in Record.open(home).steps()] == list(range(done + 2))
    assert (home / "model" / "model.safetensors").exists()


# -- real clusters ---------------------------------------------------------------------------------------------------

LOCAL = """
import json, os, sys
from pathlib import Path
from creditscope.cli.on_ray import ClusterSpec, connected
from creditscope.cli.processes import Job
from ray_nodes import descendants

jobs = [Job("bad", ("list", "methods", "grop"), Path("bad.log")), Job("good", ("--version",), Path("good.log"))]
with connected(ClusterSpec("ray"), print) as execute:
    ended = execute(jobs, 2, lambda: False, lambda running, ended: None)
    sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in descendants(os.getpid())
               if os.path.exists(f"/proc/{pid}/fd") for fd in os.listdir(f"/proc/{pid}/fd")
               if os.path.islink(f"/proc/{pid}/fd/{fd}")}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in open(f"/proc/net/{kind}").readlines()[1:]]
    listening = {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}
left = [pid for pid in descendants(os.getpid())[1:] if os.path.exists(f"/proc/{pid}/cmdline")]
print(json.dumps({"ended": ended, "listening": sorted(listening), "left": left,
                  "environment": [name for name in os.environ if name.startswith("RAY_")]}))
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1 in /proc/net/tcp and tcp6, and ::1."""


@pytest.mark.slow
def test_a_local_cluster_listens_on_loopback_alone_and_is_gone_after_its_jobs(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", LOCAL], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env=ray_nodes.environment() | {"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ended"]["good"] is None
    assert found["ended"]["bad"].startswith("unknown method 'grop'; did you mean 'grpo'?")
    assert found["listening"]
    assert set(found["listening"]) <= LOOPBACK
    assert found["left"] == found["environment"] == []
    assert "grop" in (tmp_path / "bad.log").read_text()
    assert not (tmp_path / "good.log").exists()
    assert not (tmp_path / ".ray").exists()  # no token of the user's is made


SWEEP = ("lab", "compare", "credit", "outcome", "gae", "--seeds", "1", "--rollouts", "320", "--group", "4", "--prompts",
         "2", "--eval-problems", "8", "--points", "2", "--model", "model", "--task", mini.TASK)
"""Forty steps, a checkpoint after twenty. The model lies in the working directory, and no node has it."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a model, and the sweep by this machine's processes."""
    pytest.importorskip("ray")
    place = tmp_path_factory.mktemp("sweep")
    shutil.copytree(mini.model(), place / "model")
    subprocess.run([sys.executable, "-m", "creditscope", *SWEEP, "--out", "pool"], cwd=place, check=True,
                   env=ray_nodes.environment(), capture_output=True)
    return place


@contextlib.contextmanager
def begun(place: Path, out: str, on: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The sweep as a process, which is killed where the block raises."""
    process = subprocess.Popen([sys.executable, "-m", "creditscope", *SWEEP, "--out", out, "--on", on], cwd=place,
                               env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def same_as_the_pool(place: Path, out: str) -> bool:
    runs = sorted(path.parent.relative_to(place / "pool") for path in (place / "pool").rglob("run.json"))
    assert len(runs) == 2
    assert [name for run in runs for name in differences(place / "pool" / run, place / out / run)] == []
    return not list((place / out).rglob("*.part"))


@pytest.mark.nightly
def test_a_killed_node_loses_nothing_and_the_numbers_are_those_of_the_pool(swept: Path, tmp_path: Path) -> None:
    with ray_nodes.nodes(tmp_path, 2) as cluster:
        with begun(swept, "killed", cluster.address, cluster.env) as sweep:
            def checkpoint() -> list[Path]:
                assert sweep.poll() is None, sweep.stdout.read() if sweep.stdout else ""
                return [path for path in (swept / "killed").glob("*/seed-0/checkpoints/0*") if path.name < "000040"]

            (came, *_) = wait_for(checkpoint, "checkpoint at home")
            name = came.parents[1].relative_to(swept / "killed")
            victim = next(number for number in (1, 2)
                          if list(cluster.scratch(number).glob("creditscope-*/run/seed-0/checkpoints/000020")))
            cluster.kill(victim)
            said, _ = sweep.communicate(timeout=400)
        assert sweep.returncode == 0, said
        assert re.search(r"was lost;\s+\S+/seed-0\s+goes\s+on\s+elsewhere", said), (said, name)
        assert same_as_the_pool(swept, "killed")
        left = [path.name for number in (0, 3 - victim) for path in cluster.scratch(number).glob("creditscope-*")]
        assert [name for name in left if not name.startswith("creditscope-mini")] == []


@pytest.mark.nightly
def test_a_node_of_another_source_and_one_with_a_full_disk_are_left_out(swept: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(ray_node.__file__).parents[1], other / "creditscope",
                    ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "creditscope" / "errors.py").open("a") as out:
        out.write("\n# another checkout\n")
    full = tmp_path / "node-2"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(full)], capture_output=True,
                      check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        with ray_nodes.nodes(tmp_path, 0) as cluster:
            cluster.add(1, PYTHONPATH=os.pathsep.join([str(other), cluster.env["PYTHONPATH"]]))
            cluster.add(2)
            cluster.add(3)
            with begun(swept, "mixed", cluster.address, cluster.env) as sweep:
                said = " ".join(sweep.communicate(timeout=400)[0].split())
    finally:
        subprocess.run(["umount", "-l", str(full)], check=True)
    assert sweep.returncode == 0, said
    assert re.search(r"left out: creditscope \S+ \(source \w+\) there, \S+ \(source \w+\) here; install the same", said)
    assert re.search(r"node \S+ \(\w+\) is left out, its disk is full: .*No space left on device", said)
    assert same_as_the_pool(swept, "mixed")


@pytest.mark.nightly
def test_ctrl_c_on_a_local_cluster_keeps_the_records_and_leaves_no_process(swept: Path, tmp_path: Path) -> None:
    env = ray_nodes.environment() | {"TMPDIR": str(tmp_path)}
    with begun(swept, "stopped", "ray", env) as sweep:
        def line() -> bool:
            assert sweep.poll() is None, sweep.stdout.read() if sweep.stdout else ""
            return any(path.stat().st_size for path in (swept / "stopped").glob("*/seed-0/steps.jsonl"))

        wait_for(line, "line at home")
        below = ray_nodes.descendants(sweep.pid)[1:]
        folders = {found[0] for pid in below if (cmdline := Path(f"/proc/{pid}/cmdline")).exists()
                   if (found := re.search(r"/[^\s=\0]*/creditscope-ray-\w+", cmdline.read_text()))}
        os.killpg(sweep.pid, signal.SIGINT)
        said, _ = sweep.communicate(timeout=400)
    assert sweep.returncode == 130, said
    assert "Next: the same command goes on" in said
    assert "Traceback" not in said
    assert len(below) > 5
    wait_for(lambda: not [pid for pid in below if Path(f"/proc/{pid}").exists()], "end of the cluster's processes", 60)
    assert len(folders) == 1
    assert not any(Path(folder).exists() for folder in folders)
    kept = {path: path.read_text() for path in (swept / "stopped").glob("*/seed-0/steps.jsonl")}
    assert any(kept.values())
    with begun(swept, "stopped", "here", env) as sweep:
        said, _ = sweep.communicate(timeout=400)
    assert sweep.returncode == 0, said
    assert all(path.read_text().startswith(text) for path, text in kept.items())
    assert same_as_the_pool(swept, "stopped")
