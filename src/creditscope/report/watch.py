"""The page while its run goes on: served on the loopback address, made again when the record has changed.

    GET /          the page
    GET /version   {"version": ..., "notice": ..., "age": ...}: which page that would be, why it is not newer, and the
                   seconds since the record changed

Other paths are refused. A web site could send requests to this machine, also by resolving its own name to 127.0.0.1: so
requests under another host name are refused, and no other site may read an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from creditscope.claims.evidence import ReadingNumbers, places, remembered
from creditscope.errors import CreditscopeError
from creditscope.runs.place import SHELVES

HOST = "127.0.0.1"
AGAIN = 3
"""Seconds after which a browser asks again for a page that cannot be made yet."""
UNTOUCHED = '<html lang="en">'


class Watched:
    """A page and what it was made from. The last good page stays while the record cannot be read."""

    def __init__(self, paths: Sequence[Path], make: Callable[[], str]) -> None:
        self._paths, self._make = paths, make
        self._lock = threading.Lock()
        self._seen: str | None = None
        self._looks: dict[tuple[Any, ...], ReadingNumbers] = {}
        self.version, self.notice, self._page = "", "", b""

    def page(self) -> bytes:
        """The page, made again if the record has changed."""
        with self._lock:
            now = version(self._paths)
            if now != self._seen:
                self._seen = now
                self._refresh(now)
            return self._page

    def close(self) -> None:
        """No page is made after this: it waits for one that is being made. A thread that is inside compiled code when
        Python ends would abort the process."""
        self._lock.acquire()

    def age(self) -> float | None:
        newest = max((found.st_mtime for _, found in _seen(self._paths)), default=None)
        return None if newest is None else round(max(0.0, time.time() - newest), 1)

    def _refresh(self, now: str) -> None:
        before = remembered.set(self._looks)  # old readings are not read again
        try:
            text = self._make()
        except Exception as error:  # any error: the server stays up while the run goes on
            if not self._page:
                self._seen = None
                raise
            self.notice = ("The record cannot be read just now, so this page is not the newest: "
                           f"{str(error) or type(error).__name__}")
        else:
            head, found, rest = text.partition(UNTOUCHED)
            assert found, "the page does not start as this server expects"
            self.version, self.notice = now, ""
            self._page = f'{head}<html lang="en" data-version="{now}">{rest}'.encode()
        finally:
            remembered.reset(before)


def version(paths: Sequence[Path]) -> str:
    """A hash of the name, size and time of every file that a page is made from."""
    seen = hashlib.sha256()
    for file, found in _seen(paths):
        seen.update(f"{file}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return seen.hexdigest()[:16]


def _seen(paths: Sequence[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for file in (file for place in places(paths) for file in _files(place)):
        with contextlib.suppress(OSError):  # replaced just now, or not there yet
            yield file, file.stat()


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    yield from (path / "run.json", path / "steps.jsonl")
    for shelf in SHELVES:
        yield from sorted((path / shelf).glob("*.npz"))


class Server(socketserver.ThreadingTCPServer):
    """Listens on the loopback address only. Port 0 takes any that is free."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, watched: Watched, port: int = 0) -> None:
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise CreditscopeError(f"cannot serve on {HOST}:{port}: {why}; choose another --port, or leave it out for "
                                   f"any that is free") from None
        self.watched = watched
        self.port: int = self.server_address[1]
        self.url = f"http://{HOST}:{self.port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that leaves in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10
    server_version, sys_version = "creditscope", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "").lower() not in {f"{name}:{self.server.port}" for name in (HOST, "localhost")}:
            self._answer(421, b"This server answers to 127.0.0.1 and localhost alone.\n")
            return
        try:
            if self.path == "/":
                self._answer(200, self.server.watched.page(), "text/html; charset=utf-8")
            elif self.path == "/version":
                self.server.watched.page()
                found = {"version": self.server.watched.version, "notice": self.server.watched.notice,
                         "age": self.server.watched.age()}
                self._answer(200, json.dumps(found).encode(), "application/json")
            else:
                self._answer(404, b"There is / and /version.\n")
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # the run may not have begun: the browser asks again
            text = f"{error}\n\nThis page asks again every {AGAIN} seconds.\n"
            self._answer(503, text.encode(errors="backslashreplace"), Refresh=str(AGAIN))

    do_HEAD = do_GET

    def _answer(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        """Headers of every answer, errors too; the page cannot forbid framing itself."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged to the terminal."""


HEADERS = {"Content-Security-Policy": "frame-ancestors 'none'", "X-Content-Type-Options": "nosniff",
           "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin",
           "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store"}


def serve(server: Server) -> None:
    """Answer until SIGINT or SIGTERM. Shells make background jobs ignore SIGINT, so both handlers are set."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        server.watched.close()
        for number, handler in before.items():
            signal.signal(number, handler)
