"""Runs of a sweep on a Ray cluster: one actor per run, its record brought home while it is written.

A node that is lost takes its disk with it. Therefore the run's record is copied to this machine's disk after each step
and each checkpoint (`runs.mirror`), and a run whose node is lost goes on from that copy on another node.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from creditscope import __version__
from creditscope.cli.processes import POLL, Job, cores, last_line
from creditscope.cli.ray_node import Runner, source_sum
from creditscope.errors import CreditscopeError, printable, require_module
from creditscope.files.specs import Option, check_option, read_options
from creditscope.runs.mirror import CHUNK, Inbox, Outbox, Piece, pack, read_chunks, unpack

OPTIONS = {"cpus": Option(1.0, "CPUs of a run", low=0.01), "gpus": Option(0.0, "GPUs of a run", low=0),
           "memory": Option(0.0, "GiB of memory of a run", low=0)}
RETRIES = 3
"""Times that a run goes on elsewhere after its node was lost, or its disk was full."""
CONNECTS = 4
"""Times that the connection to a cluster is tried. For each client the head forks a server out of a process whose gRPC
threads run; some servers die in the fork (ray-project/ray#63202, 6 of 50 on a busy machine), told after 40 seconds."""
DIED = ("Starting Ray client server failed", "ZombieProcess")
"""What Ray says then."""
ANSWER, PROBE, CLOSE = 3.0, 60.0, 20.0
"""Seconds for a cluster to answer, for a node to state its versions, for scratch folders to be removed."""
STORE = 2**28
"""Bytes of a local cluster's object store. A parcel has `CHUNK`; what does not fit is spilled to the disk."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_AUTO_CONNECT": "0", "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "3",
         "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "3"}
"""No statistics; no second cluster where the connection to the first was lost; no retries for half a minute."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
"""As on macOS, Ray then listens on 127.0.0.1 alone, and to who knows the token."""
FULL = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class ClusterSpec:
    """Where runs go, as `--on` names it: a cluster, and what each run takes of a node."""

    address: str
    cpus: float = 1.0
    gpus: float = 0.0
    memory: float = 0.0

    @property
    def local(self) -> bool:
        return self.address == "ray"

    @classmethod
    def read(cls, spec: str) -> ClusterSpec:
        """ray, or ray://HOST:PORT, with options.

        >>> ClusterSpec.read("ray://head:10001,gpus=0.5")
        ClusterSpec(address='ray://head:10001', cpus=1.0, gpus=0.5, memory=0.0)
        """
        address, options = read_options("--on", spec)
        for name, value in options.items():
            check_option(f"--on {address}", OPTIONS, name, value)
        found = cls(address, **options)
        if not found.local and not all(found.host()):
            raise CreditscopeError(f"--on {spec:.80}: give here (processes on this machine), ray (a cluster on this "
                                   f"machine), or ray://HOST:PORT; options follow after commas, such as ray,gpus=1")
        return found

    def host(self) -> tuple[str, int]:
        """Host and port; empty and 0 where the address has none."""
        name, colon, port = self.address.removeprefix("ray://").rpartition(":")
        if not self.address.startswith("ray://") or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
            return "", 0
        return name.strip("[]"), int(port)


@contextlib.contextmanager
def connected(place: ClusterSpec, say: Callable[[str], object]) -> Iterator[RayExecutor]:
    """A cluster to run jobs on; a local one is started, and is gone afterwards. `say` prints a line."""
    require_module("--on ray", "ray")
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # what matters is said below in one sentence
    with contextlib.ExitStack() as after:
        # Ray reads its variables when it is imported.
        os.environ |= QUIET | ({**LOOPBACK, "RAY_AUTH_TOKEN": secrets.token_hex(32)} if place.local else {})
        after.callback(_restore, before)
        below = None
        if place.local:
            # Ray's sockets lie in it, whose paths may have 107 bytes.
            usual = tempfile.gettempdir()
            below = after.enter_context(tempfile.TemporaryDirectory(
                prefix="creditscope-ray-", dir=usual if len(usual) < 16 else "/tmp", ignore_cleanup_errors=True))
        ray = _connect(place, below, say)
        after.callback(ray.shutdown)
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray has set its own
        yield RayExecutor(ray, place, below, say)


def _restore(before: Mapping[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _connect(place: ClusterSpec, below: str | None, say: Callable[[str], object]) -> Any:
    """Ray, connected to a new local cluster or to the one that is named. Raises within seconds where none answers."""
    if not place.local:
        try:
            socket.create_connection(place.host(), timeout=ANSWER).close()
        except OSError as error:
            raise CreditscopeError(f"no Ray cluster answers at {place.address}: {error.strerror or error}; on its head "
                                   f"node: ray start --head --ray-client-server-port {place.host()[1]}") from None
    import ray

    try:
        if place.local:
            ray.init(address="local", num_cpus=cores(), include_dashboard=False, log_to_driver=False,
                     logging_level=logging.CRITICAL, object_store_memory=STORE, _temp_dir=below)
        else:
            _as_client(ray, place.address, say)
    except (RuntimeError, ConnectionError, OSError, ValueError, ray.exceptions.RayError) as error:
        raise CreditscopeError(f"cannot use the Ray cluster {place.address}: {_sentence(error)}") from None
    return ray


def _as_client(ray: Any, address: str, say: Callable[[str], object]) -> None:
    """Connect to a cluster that answers; again where it did not start the server of this client."""
    for left in reversed(range(CONNECTS)):
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
            return
        except ConnectionAbortedError as error:
            if not left or not any(sign in str(error) for sign in DIED):
                raise
            say(f"the Ray cluster {address} did not start a server for this client; trying again")


def _sentence(error: BaseException) -> str:
    """Ray's own words on one line; of its versions, those of both sides."""
    text = " ".join(str(error).split())
    if "mismatch" in text.lower() and "Python" in text:
        return f"its versions differ from those here, install the same on both: {text:.300}"
    return f"{text:.300}" or type(error).__name__


@dataclass
class Remote:
    """A run on the cluster."""

    job: Job
    actor: Any
    inbox: Inbox | None
    fresh: bool
    """Whether there was no record of it."""
    node: str = ""
    """Id of its node, empty until it has begun."""
    folder: str = ""
    """Its folder there."""


class RayExecutor:
    """Runs jobs on a cluster, under the contract of `processes.run_jobs`."""

    def __init__(self, ray: Any, place: ClusterSpec, below: str | None, say: Callable[[str], object]) -> None:
        self._ray, self._place, self._below, self._say = ray, place, below, say
        self._avoided: set[str] = set()
        """Nodes that get no more runs."""
        self._tries: dict[str, int] = {}
        self._closing: list[Any] = []
        self._source = f"{__version__} (source {source_sum()})"
        self._nodes = self._alive()
        """Id -> name of every node that was there at some time."""
        self._check_versions()
        self._check_needs()
        self._packed = cache(lambda path: [ray.put(parcel) for parcel in _inputs(Path(path))])

    # -- the cluster ---------------------------------------------------------------------------------------------

    def _alive(self) -> dict[str, str]:
        return {node["NodeID"]: f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
                for node in self._ray.nodes() if node["Alive"]}

    def _check_versions(self) -> None:
        """Leave out nodes whose Python, Ray or creditscope is another; refuse a cluster of which none is left."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        probe = self._ray.remote(num_cpus=0, max_retries=0)(_probe())
        asked = {probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): node
                 for node in self._nodes}
        self._ray.wait(list(asked), num_returns=len(asked), timeout=PROBE)
        ours = {"Python": platform.python_version(), "Ray": self._ray.__version__, "creditscope": self._source}
        told = ""
        for answer, node in asked.items():
            try:
                theirs = json.loads(self._ray.get(answer, timeout=0.1))
            except (self._ray.exceptions.RayError, ValueError) as error:
                told = f"node {self._nodes[node]} is left out: it did not state its versions ({_last(error):.200})"
            else:
                wrong = [f"{name} {theirs.get(name)} there, {ours[name]} here" for name in ours
                         if theirs.get(name) != ours[name]]
                if not wrong:
                    continue
                told = f"node {self._nodes[node]} is left out: {'; '.join(wrong)}; install the same on every node"
            self._avoid(node, told)
        if len(self._avoided) == len(self._nodes):
            raise CreditscopeError(f"no node of {self._place.address} can be used; {told}")

    def _check_needs(self) -> None:
        """Refuse runs for which no node is large enough: Ray would wait for one forever."""
        need = {"CPU": self._place.cpus, "GPU": self._place.gpus, "memory": self._place.memory * 2**30}
        has = [node["Resources"] for node in self._ray.nodes() if node["NodeID"] in self._nodes.keys() - self._avoided]
        if not any(all(node.get(name, 0) >= value for name, value in need.items()) for node in has):
            most = {name: max(node.get(name, 0) for node in has) for name in need}
            raise CreditscopeError(
                f"no node of {self._place.address} has cpus={self._place.cpus:g}, gpus={self._place.gpus:g} and "
                f"memory={self._place.memory:g}; at most there are {most['CPU']:g}, {most['GPU']:g} and "
                f"{most['memory'] / 2**30:.0f} (GiB): change the options of --on")
        if not self._place.gpus and (gpus := sum(node.get("GPU", 0) for node in has)):
            self._say(f"the cluster has {gpus:g} GPUs, and these runs take none: --on {self._place.address},gpus=1, or "
                      f"a part of one")

    def _avoid(self, node: str, why: str) -> None:
        self._avoided.add(node)
        self._say(why)

    # -- the jobs ------------------------------------------------------------------------------------------------

    def __call__(self, jobs: Sequence[Job], at_once: int, stop: Callable[[], bool],
                 watch: Callable[[Sequence[str], Mapping[str, str | None]], None]) -> dict[str, str | None]:
        """As `processes.run_jobs`, which see; a run whose node is lost starts again elsewhere from its copy here."""
        waiting, ended = list(jobs), dict[str, str | None]()
        live: dict[Any, Remote] = {}
        asked = False
        try:
            while waiting or live:
                if stop() and not asked:
                    asked = True
                    waiting.clear()
                    for call, remote in list(live.items()):
                        if remote.node:
                            remote.actor.stop.remote()
                        else:
                            self._end(live.pop(call), kill=True)
                while waiting and len(live) < at_once:
                    job = waiting.pop(0)
                    try:
                        remote = self._start(job)
                    except CreditscopeError as error:
                        ended[job.name] = str(error)
                    else:
                        live[remote.actor.begin.remote(job.elsewhere(), self._place.gpus)] = remote
                heard = self._ray.wait(list(live), num_returns=len(live), timeout=POLL)[0] if live else []
                for call in heard:
                    remote = live.pop(call)
                    try:
                        code = self._hear(remote, call)
                    except _Lost as lost:
                        self._end(remote, kill=True)
                        if asked:
                            continue
                        if why := self._give_up(remote, lost):
                            ended[remote.job.name] = why
                        else:
                            waiting.insert(0, remote.job)
                    except CreditscopeError as error:
                        self._end(remote, kill=True)
                        ended[remote.job.name] = str(error)
                    else:
                        if code is None:
                            live[remote.actor.news.remote()] = remote
                        else:
                            self._end(remote)
                            if not asked or code == "":
                                ended[remote.job.name] = code or None
                            if asked or not remote.job.log.stat().st_size:
                                remote.job.log.unlink()
                watch([remote.job.name for remote in live.values() if remote.node], ended)
        except ConnectionError as error:
            raise CreditscopeError(f"the connection to {self._place.address} was lost ({error}); what came home is "
                                   f"kept: the same command goes on") from None
        finally:
            for remote in live.values():
                self._end(remote, kill=True)
            with contextlib.suppress(Exception):
                self._ray.wait(self._closing, num_returns=len(self._closing), timeout=CLOSE)
            self._closing.clear()
        return ended

    def _start(self, job: Job) -> Remote:
        """Ask for an actor, and send it the record so far and the files that the run reads."""
        needs: dict[str, Any] = {"num_cpus": self._place.cpus, "num_gpus": self._place.gpus, "max_restarts": 0}
        if self._place.memory:
            needs["memory"] = int(self._place.memory * 2**30)
        if self._avoided:
            needs["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(self._avoided))})"}
        try:
            job.log.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as held:
                fresh = job.out is None or not (job.out / "run.json").exists()
                inbox = held.enter_context(Inbox(job.out)) if job.out is not None else None
                actor = self._ray.remote(Runner).options(**needs).remote(job.out.name if job.out else "", self._below)
                for parcel in _parcels(Outbox(job.out).pieces()) if job.out is not None else ():
                    actor.take.remote(parcel, True)
                for path in job.inputs:
                    for parcel in self._packed(path):
                        actor.take.remote(parcel, False)
                held.pop_all()  # until the run ends
        except OSError as error:
            raise CreditscopeError(f"cannot start {job.name}: {error.strerror or error}") from None
        return Remote(job, actor, inbox, fresh)

    def _hear(self, remote: Remote, call: Any) -> str | None:
        """Write down what an actor sent: why its run failed, "" if it ended well, None while it goes on."""
        try:
            data = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            raise _Lost(_last(error), "its disk is full" if FULL in str(error) else "") from None
        pieces, said = unpack(data)
        remote.node, remote.folder = str(said.get("node", remote.node)), str(said.get("folder", remote.folder))
        if remote.node not in self._nodes:
            self._nodes |= self._alive()
        theirs = f"{__version__} (source {said['source']})" if "source" in said else self._source
        if theirs != self._source and not self._place.local:  # it has joined since; here it is the same, edited
            raise _Lost(f"its creditscope is not {self._source}", "it has other source")
        if "error" in said:
            if FULL in str(said["error"]):
                raise _Lost(str(said["error"]), "its disk is full")
            raise CreditscopeError(f"cannot start the run: {said['error']}{self._where(remote)}")
        if remote.inbox is not None:
            remote.inbox.put(pieces)
        if "code" not in said:
            return None
        job, code = remote.job, int(said["code"])
        job.log.write_text(str(said["log"]), encoding="utf-8")
        if code == 0:
            return ""
        why = last_line(job, code).replace(remote.folder, str(job.out))
        if FULL in why:
            raise _Lost(why, "its disk is full")
        return why + self._where(remote)

    def _give_up(self, remote: Remote, lost: _Lost) -> str:
        """Why a run is not started once more; empty if it is."""
        name = remote.job.name
        tries = self._tries[name] = self._tries.get(name, 0) + 1
        node = self._nodes.get(remote.node) or "of the cluster"
        if lost.fault:
            self._avoid(remote.node, f"node {node} is left out, {lost.fault}: {lost}")
            if not self._alive().keys() - self._avoided:
                return f"node {node} is left out, {lost.fault}, and there is no other: {lost}"
        if tries > RETRIES:
            return f"its node was lost {tries} times, at last {node}: {lost}"
        if not lost.fault:
            self._say(f"node {node}, or the run's process there, was lost; {name} goes on elsewhere from its last "
                      f"checkpoint")
        return ""

    def _where(self, remote: Remote) -> str:
        return f" (on node {self._nodes.get(remote.node, remote.node[:8])})" if len(self._nodes) > 1 else ""

    def _end(self, remote: Remote, kill: bool = False) -> None:
        """Give the folder here free and end the actor, which removes the one there."""
        with contextlib.suppress(Exception):  # it may be gone, or the connection
            if kill:
                self._ray.kill(remote.actor)
            else:
                self._closing.append(remote.actor.leave.remote())
        if remote.inbox is not None:
            remote.inbox.__exit__()
            out = remote.job.out
            if remote.fresh and out is not None and not ((out / "steps.jsonl").exists() and
                                                         (out / "steps.jsonl").stat().st_size):
                shutil.rmtree(out, ignore_errors=True)  # a run that was refused leaves no folder


class _Lost(Exception):
    """A run has to go on elsewhere: its node is lost, or has a fault and is to be avoided."""

    def __init__(self, why: str, fault: str = "") -> None:
        super().__init__(why)
        self.fault = fault


def _last(error: BaseException) -> str:
    """The last line of what Ray says."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(said[-1]) if said else type(error).__name__


def _parcels(pieces: Iterator[Piece]) -> Iterator[bytes]:
    """Pieces in parcels of about `CHUNK` bytes."""
    kept: list[Piece] = []
    for piece in pieces:
        kept.append(piece)
        if sum(len(one.data) for one in kept) >= CHUNK:
            yield pack(kept)
            kept = []
    if kept:
        yield pack(kept)


def _inputs(path: Path) -> Iterator[bytes]:
    """A file, or the files of a folder."""
    def pieces() -> Iterator[Piece]:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as opened:
                    yield from read_chunks(opened, file.as_posix())

    return _parcels(pieces())


def _probe() -> Callable[[], str]:
    """A function that states a node's versions. It is nested, so that Ray sends its code: creditscope may be missing
    there, or be another."""

    def probe() -> str:
        import json
        import platform

        import ray

        found = {"Python": platform.python_version(), "Ray": ray.__version__}
        try:
            from creditscope import __version__
            from creditscope.cli.ray_node import source_sum

            found["creditscope"] = f"{__version__} (source {source_sum()})"
        except ImportError as error:
            found["creditscope"] = f"not usable ({error})"
        return json.dumps(found)

    return probe


def below_here(names: Sequence[str]) -> tuple[str, ...]:
    """Of names that may be paths, those of files below the working directory: they travel with the run."""
    found = [name for name in names if name and not Path(name).is_absolute() and Path(name).exists()]
    for name in found:
        if not Path(name).resolve().is_relative_to(Path.cwd()):
            raise CreditscopeError(f"{name} lies outside the working directory, and so cannot be sent to a cluster; "
                                   f"give a path below it, or an absolute path that every node has")
    return tuple(dict.fromkeys(found))


