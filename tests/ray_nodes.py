"""A real Ray cluster of several nodes on 127.0.0.1, each with a scratch folder of its own, in a process of its own.

    with nodes(tmp_path, count=2) as cluster:
        subprocess.run([..., "--on", cluster.address], env=cluster.env)
        cluster.kill(1)         # SIGKILL, and its scratch folder is gone

Started as a script it is that process: it reads one command per line and answers each with a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

TESTS = Path(__file__).parent
ONE = FileLock(Path(tempfile.gettempdir(), "creditscope-tests-ray.lock"))
"""A head gives its first client port 23000 if that is free, and the server there listens only seconds later: of two
clusters on a machine, a client of one may meet the server of the other."""
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


def environment(token: str = "") -> dict[str, str]:
    """Variables of a process that knows `mini`'s task, and the cluster's token."""
    paths = [str(TESTS / "cli" / "mini_site"), str(TESTS), str(TESTS.parent / "src")]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return own | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {})


@dataclass
class Nodes:
    """The running cluster: node 0 is the head, which has no CPU for runs."""

    process: subprocess.Popen[str]
    address: str
    env: dict[str, str]
    place: Path

    def scratch(self, number: int) -> Path:
        return self.place / f"node-{number}"

    def tell(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def add(self, number: int, cpus: int = 1, **env: str) -> None:
        """Start a node; `env`: variables of its processes."""
        self.scratch(number).mkdir(exist_ok=True)
        self.tell(act="add", number=number, cpus=cpus, env=env)

    def kill(self, number: int) -> None:
        """SIGKILL to everything on the node; its disk is lost."""
        self.tell(act="kill", number=number)
        shutil.rmtree(self.scratch(number), ignore_errors=True)


@contextlib.contextmanager
def nodes(place: Path, count: int) -> Iterator[Nodes]:
    """A head and `count` nodes of one CPU each; one cluster at a time on a machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(32)
    # The session's name is short, because the paths of its sockets may have 107 bytes.
    with ONE, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as session:
        process = subprocess.Popen([sys.executable, __file__, session, str(port), str(place)], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                   env=environment() | LOCAL | {"RAY_AUTH_TOKEN": token, "RAY_TMPDIR": session},
                                   cwd=place)
        try:
            cluster = Nodes(process, f"ray://127.0.0.1:{port}", environment(token), place)
            cluster.add(0, cpus=0)
            for number in range(1, count + 1):
                cluster.add(number)
            yield cluster
        finally:
            assert process.stdin is not None
            process.stdin.close()  # the end of its commands
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def descendants(pid: int) -> list[int]:
    """Processes below one, itself included."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split()
    parents = dict(zip(map(int, found[::2]), map(int, found[1::2]), strict=True))
    below = [pid]
    for one in below:
        below += [child for child, parent in parents.items() if parent == one]
    return below


def serve(session: str, port: int, place: str) -> None:
    from ray.cluster_utils import Cluster

    # Ray notes the newest cluster's address in RAY_TMPDIR/ray, by default /tmp/ray, and does not make that folder.
    Path(session, "ray").mkdir()
    cluster, started = Cluster(), dict[int, Any]()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    try:
        for line in sys.stdin:
            command: Mapping[str, Any] = json.loads(line)
            number = command["number"]
            if command["act"] == "add":
                head = {"ray_client_server_port": port, "temp_dir": session} if number == 0 else {}
                started[number] = cluster.add_node(
                    num_cpus=command["cpus"], include_dashboard=False, object_store_memory=80_000_000,
                    env_vars={"TMPDIR": f"{place}/node-{number}", **command["env"]}, **head)
            else:
                raylet = started[number].all_processes["raylet"][0].process.pid
                for pid in reversed(descendants(raylet)[1:]):  # a machine without power: not one process is left
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                cluster.remove_node(started.pop(number), allow_graceful=False)
            answers.write(json.dumps(number) + "\n")
            answers.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
