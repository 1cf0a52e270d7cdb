"""One run on a node of a Ray cluster: a process in a folder of its own, and what is new in its record.

`Runner` is the actor. It loads neither Ray nor torch: Ray makes an actor of the class, the run is a process as in
`processes`. That process ends when its actor does, however that ended, and has the folder removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from creditscope.cli.processes import ONE_THREAD
from creditscope.errors import CreditscopeError
from creditscope.runs.mirror import CHUNK, Inbox, Outbox, Piece, pack, unpack

WAIT, LOOK = 1.0, 0.2
"""Seconds that a call waits for news, and between two looks at the folder."""
LONGEST_LOG = 2**20
CLEANER = """import os, shutil, sys, time
for _ in range(300):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
"""Removes a folder. It is a process of its own: the run has ended when it starts, and writes nothing more there."""


class Runner:
    """A run on this node. Every call is short, and returns plain bytes."""

    def __init__(self, name: str = "", below: str | None = None) -> None:
        """`name`: of the run's folder, empty where it writes none; `below`: where the scratch folder is made."""
        self._scratch = Path(tempfile.mkdtemp(prefix="creditscope-", dir=below))
        self._here, self._log = self._scratch / "here", self._scratch / "log"
        self._out = self._scratch / "run" / name if name else None
        self._inbox: Inbox | None = None
        self._error = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self._round: Iterator[Piece] | None = None
        self._last = False
        """Whether the round began after the process had ended."""

    def take(self, parcel: bytes, record: bool) -> None:
        """Write pieces of the record so far, or of files that the run reads from its working directory."""
        try:
            if record and self._out is not None:
                self._inbox = self._inbox or Inbox(self._out).__enter__()
                self._inbox.put(unpack(parcel)[0])
            else:
                unfold(unpack(parcel)[0], self._here)
        except (OSError, CreditscopeError) as error:
            self._error = self._error or str(error)

    def begin(self, args: Sequence[str], gpus: float) -> bytes:
        """Start the run, or go on with what was taken."""
        more: list[str] = []
        if self._inbox is not None:
            self._inbox.__exit__()
        if self._out is not None:
            self._outbox = Outbox(self._out, sent=True)
            more = ["--out", str(self._out), *["--resume"] * (self._out / "run.json").exists()]
        # Ray's own variables hold the cluster's token, which a run does not need.
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | ONE_THREAD
        try:
            self._here.mkdir(exist_ok=True)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "creditscope.cli.ray_node", str(self._scratch), *args, *more],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, process_group=0, cwd=self._here,
                    env=env if gpus else env | {"CUDA_VISIBLE_DEVICES": ""})
        except OSError as error:
            self._error = self._error or str(error)
        said = {"error": self._error} if self._error else {}
        return pack([], node=node_id(), folder=str(self._out), source=source_sum(), **said)

    def news(self) -> bytes:
        """Pieces of the record that are new, after at most `WAIT` seconds; at last the exit code and the log."""
        assert self._process is not None
        start = time.monotonic()
        while True:
            if self._round is None:
                self._last = self._process.poll() is not None
                self._round = self._outbox.pieces() if self._outbox else iter(())
            pieces, size = [], 0
            for piece in self._round:
                pieces.append(piece)
                size += len(piece.data)
                if size >= CHUNK:
                    return pack(pieces)
            self._round = None
            if self._last:
                return pack(pieces, code=self._process.returncode, log=self._told())
            if pieces or time.monotonic() - start > WAIT:
                return pack(pieces)
            time.sleep(LOOK)

    def _told(self) -> str:
        """The end of the run's error stream."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - LONGEST_LOG))
            return log.read().decode("utf-8", errors="replace")

    def stop(self) -> None:
        """SIGTERM: the run ends after its step, with everything kept."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def close(self) -> None:
        """End the process, if it has not ended, and remove the folder."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def leave(self) -> None:
        """The same, and end the actor: what it took of the node is free at once, whoever holds a handle."""
        import ray

        self.close()
        ray.actor.exit_actor()


def node_id() -> str:
    """This node's, as Ray knows it."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def unfold(pieces: Sequence[Piece], folder: Path) -> None:
    """Write files below a folder."""
    for piece in pieces:
        path = folder / piece.path
        if not path.resolve().is_relative_to(folder.resolve()):
            raise OSError(f"{piece.path!r} lies outside the working directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as out:
            out.write(piece.data)


def source_sum() -> str:
    """A sum of the package's source: two checkouts of one version may differ.

    >>> len(source_sum())
    12
    """
    root = Path(__file__).resolve().parents[1]
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def main() -> None:
    """`python -m creditscope.cli.ray_node FOLDER ARGS`: creditscope ARGS, until the standard input is closed."""
    folder, sys.argv[1:] = sys.argv[1], sys.argv[2:]

    def leave() -> None:
        with contextlib.suppress(OSError):
            os.read(0, 1)  # returns at the end of the actor's process
        quiet = subprocess.DEVNULL
        subprocess.Popen([sys.executable, "-S", "-c", CLEANER, folder], stdin=quiet, stdout=quiet, stderr=quiet,
                         start_new_session=True)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
    from creditscope.__main__ import main as creditscope

    creditscope()


if __name__ == "__main__":
    main()
