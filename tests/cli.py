"""`creditscope ARGS`, in this process or as one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from creditscope.cli.main import main


def run(*args: object) -> int:
    """The verb in this process: its exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


def run_json(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    """What the verb prints with --json; it must end well."""
    assert run(*args, "--json") == 0
    return json.loads(capsys.readouterr().out)


def start(*args: object, **environment: str) -> subprocess.Popen[str]:
    """The verb in a process of its own: for signals, for streams, for two at once."""
    return subprocess.Popen([sys.executable, "-m", "creditscope", *map(str, args)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def loaded(code: str, *args: object) -> set[str]:
    """The modules that a fresh interpreter has loaded after the code; a SystemExit of the code is its normal end."""
    program = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit: pass\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())
