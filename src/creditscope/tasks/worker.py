"""Call a user's function in a process that can be killed: a thread that hangs could not be stopped.

The process is started once and answers over pipes, one line of JSON each way, about 0.1 ms per call. When it hangs or
dies it is killed with its children, and the next call starts another. Run as a program, this file is that process; it
needs the standard library only.
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

StepSpan = tuple[int, int, float, str | None]
"""start, end, reward and state of a step: characters [start, end) of the text that the function was given."""

START_SECONDS = 120.0  # a user's module may import torch


class WorkerError(Exception):
    """The call gave no number. The message says why."""


class Worker:
    """`module:function` in a process of its own, which may take `memory` bytes of address space.

    >>> root = Worker("math:sqrt", seconds=5)
    >>> root(9.0)
    3.0
    >>> root(-1.0)
    Traceback (most recent call last):
    creditscope.tasks.worker.WorkerError: raised ValueError: ...
    """

    def __init__(self, target: str, seconds: float, memory: int | None = None) -> None:
        self.target, self.seconds, self.memory = target, seconds, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def __call__(self, *args: Any) -> float:
        """The function's number. Raises WorkerError for an exception, a wrong value, a hang or a crash."""
        return self.judge(*args)[0]

    def judge(self, *args: Any) -> tuple[float, list[StepSpan] | None]:
        """The number and the steps of the text, the first argument; None where the function gave no steps."""
        try:
            line = json.dumps(args)
        except (TypeError, ValueError, RecursionError) as error:
            raise WorkerError(f"was given something that is not JSON: {error}") from error
        with self._lock:
            self._start()
            return self._ask(line, self.seconds)

    def start(self) -> None:
        """Import the function now: a wrong name is an error before the run begins."""
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
        start = {"target": self.target, "path": [os.getcwd(), *sys.path], "memory": self.memory}
        self._ask(json.dumps(start), START_SECONDS)

    def _ask(self, line: str, seconds: float) -> tuple[float, list[StepSpan] | None]:
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
        steps = answer["steps"]
        return float(answer["value"]), None if steps is None else [tuple(step) for step in steps]


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):  # the pipe was closed by _kill
        for line in process.stdout:
            lines.put(line)
    lines.put("")  # end of file: the process is gone


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # its session: itself and its children
        else:
            process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()


# -- the other end ---------------------------------------------------------------------------------------


def check_number(value: object) -> float:
    """The value as a finite float, or a TypeError or ValueError that names the value.

    >>> check_number(True)
    1.0
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"returned {value!r:.60} ({type(value).__name__}); it must return a number, or a pair of a "
                        f"number and a list of steps")
    if not math.isfinite(value):
        raise ValueError(f"returned {value}; it must return a finite number")
    return float(value)


def check_steps(steps: object, length: int) -> list[StepSpan]:
    """Spans inside a text of that length, in order and disjoint, or a TypeError or ValueError that names the step.

    >>> check_steps([[0, 2, 1], [2, 5, 0.5, "x = 3"]], length=5)
    [(0, 2, 1.0, None), (2, 5, 0.5, 'x = 3')]
    """
    if not isinstance(steps, list | tuple):
        raise TypeError(f"returned the steps {steps!r:.60} ({type(steps).__name__}); they must be a list of "
                        f"[start, end, reward] or [start, end, reward, state]")
    found: list[StepSpan] = []
    for n, step in enumerate(steps):
        who = f"returned step {n} (from 0) {step!r:.60}"
        if not isinstance(step, list | tuple) or len(step) not in (3, 4):
            raise TypeError(f"{who}; it must be [start, end, reward] or [start, end, reward, state]")
        start, end, reward, state = [*step, None][:4]
        if not all(isinstance(at, numbers.Integral) and not isinstance(at, bool) for at in (start, end)):
            raise TypeError(f"{who}; start and end must be whole numbers, places in the text")
        if not 0 <= start < end <= length:
            raise ValueError(f"{who}; it must have 0 <= start < end <= {length}, the length of the text")
        if found and start < found[-1][1]:
            raise ValueError(f"{who}; it begins before step {n - 1} ends, at {found[-1][1]}: steps are disjoint and in "
                             f"order")
        if not _finite(reward):
            raise ValueError(f"{who}; its reward must be a finite number, not {reward!r:.60}")
        if state is not None and not isinstance(state, str):
            raise TypeError(f"{who}; its state must be a text, equal where states are, not {type(state).__name__}")
        found.append((int(start), int(end), float(reward), state))
    return found


def _finite(value: object) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _serve() -> None:
    # Answers go to a private copy of stdout, the function's prints to stderr.
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
                if request["memory"] is not None:
                    import resource  # not on every system

                    resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
                function = _load(request["target"])
                answer: dict[str, Any] = {"value": 0.0, "steps": None}
            else:
                answer = _answer(function, request)
        except BaseException as error:  # SystemExit too: a reward may not end the run
            answer = {"error": f"raised {_describe(error)}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _listen(lines: queue.Queue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # the parent is gone: end, even inside a function that hangs


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is {type(function).__name__}, not a function")
    return function


def _answer(function: Any, args: list[Any]) -> dict[str, Any]:
    value = function(*args)
    text = args[0] if args and isinstance(args[0], str) else ""
    try:
        if isinstance(value, list | tuple) and len(value) == 2:
            return {"value": check_number(value[0]), "steps": check_steps(value[1], len(text))}
        return {"value": check_number(value), "steps": None}
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
