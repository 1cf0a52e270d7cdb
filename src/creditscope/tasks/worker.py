"""Call somebody else's function in a process that can be killed.

A signal cannot interrupt a thread, and a thread cannot be stopped, so a function that may hang gets a process of its
own. It is started once and answers over pipes, one line of JSON each way (about a tenth of a millisecond a call);
when it hangs or dies it is killed, with its children, and the next call starts another.

Run as a program, this file is the other end: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import numbers
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from typing import Any

START_SECONDS = 120.0  # a user's module may import torch


class WorkerError(Exception):
    """The call gave no number. The message says why."""


class Worker:
    """`module:function` in a process of its own.

    >>> root = Worker("math:sqrt", seconds=5)
    >>> root(9.0)
    3.0
    >>> root(-1.0)
    Traceback (most recent call last):
    creditscope.tasks.worker.WorkerError: raised ValueError: ...
    """

    def __init__(self, target: str, seconds: float) -> None:
        self.target, self.seconds = target, seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def __call__(self, *args: Any) -> float:
        """The function's number. Raises WorkerError for an exception, a wrong value, a hang or a crash."""
        try:
            line = json.dumps(args)
        except (TypeError, ValueError) as error:
            raise WorkerError(f"was given something that is not JSON: {error}") from error
        with self._lock:
            self._start()
            return self._ask(line, self.seconds)

    def start(self) -> None:
        """Import the function now, so that a wrong name is found before the run begins."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the process. A later call starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = None

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # -P: the folder of this file must not become a place to import from.
        process = subprocess.Popen([sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   text=True, encoding="utf-8", start_new_session=True)
        self._process, self._lines = process, queue.Queue()
        self._finalizer = weakref.finalize(self, _kill, process)
        threading.Thread(target=_read, args=(process, self._lines), daemon=True).start()
        self._ask(json.dumps({"target": self.target, "path": [os.getcwd(), *sys.path]}), START_SECONDS)

    def _ask(self, line: str, seconds: float) -> float:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise WorkerError(f"gave no answer within {seconds:g} s and was stopped") from None
        except OSError:
            reply = ""
        if not reply:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            self.close()
            raise WorkerError(f"ended its process (exit status {process.returncode})")
        answer = json.loads(reply)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return float(answer["value"])


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):  # the pipe was closed by _kill
        for line in process.stdout:
            lines.put(line)
    lines.put("")  # end of file: the process is gone


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # the session it leads: itself and what it started
        else:
            process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()


# -- the other end ---------------------------------------------------------------------------------------


def check_number(value: object) -> float:
    """The value as a finite float. Raises TypeError or ValueError, which name what came instead.

    >>> check_number(True)
    1.0
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"returned {value!r:.60} ({type(value).__name__}); it must return a number")
    if not math.isfinite(value):
        raise ValueError(f"returned {value}; it must return a finite number")
    return float(value)


def _serve() -> None:
    # What the function prints must not mix with the answers: they keep a private copy of stdout.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    function: Any = None
    while True:
        request = json.loads(lines.get())
        try:
            if function is None:
                sys.path[:] = request["path"]
                function = _load(request["target"])
                answer: dict[str, Any] = {"value": 0.0}
            else:
                answer = _answer(function, request)
        except BaseException as error:  # SystemExit too: a reward may not end the run
            answer = {"error": f"raised {_describe(error)}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _listen(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # the parent is gone: go too, even from inside a function that hangs


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is {type(function).__name__}, not a function")
    return function


def _answer(function: Any, args: list[Any]) -> dict[str, Any]:
    value = function(*args)
    try:
        return {"value": check_number(value)}
    except (TypeError, ValueError, OverflowError) as error:
        return {"error": str(error)}


def _describe(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:
        message = "(no message: its __str__ failed)"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message[:300]}{place}"


if __name__ == "__main__":
    _serve()
