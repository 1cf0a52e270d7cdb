"""Standard streams as shells give them: closed, full, not read to the end, and unable to show every character.

Each case is a process of its own. The verbs are those that do not load torch.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli import run_json
from each import each

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
VERBS = ["list credits gae", "list credits gae --json", "lab train --help"]
LOG = Path(__file__).parent.parent / "diagnosis" / "logs" / "ours-fell"

pytestmark = pytest.mark.slow


def shell(line: str, stdout: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`cs` in the line is the command."""
    function = f'cs() {{ "{sys.executable}" -m creditscope "$@"; }}; '
    return subprocess.run(["bash", "-c", function + line], stdout=stdout, stderr=subprocess.PIPE, check=False,
                          env=os.environ | env)


@each("verb", VERBS)
def test_a_full_output_is_one_sentence_and_exit_code_2(verb: str) -> None:
    done = shell(f"cs {verb} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.decode() == ("creditscope: cannot write to the standard output: No space left on device; free "
                                    "some space there, or send the output elsewhere\n")


@each("verb", VERBS)
def test_a_closed_output_is_nobodys_error(verb: str) -> None:
    done = shell(f"cs {verb} >&-")
    assert (done.returncode, done.stderr) == (0, b"")


@each("line, code", [("cs list credits", 0), ("cs lab train --help", 0),
                     ("cs list credits --json", 0),  # two buffers long
                     (f"cs doctor {shlex.quote(str(LOG))} --json --strict", 141)])
def test_a_reader_that_left_ends_a_verb_quietly_and_not_as_a_verdict(line: str, code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = shell(line, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, b"")


@each("where", ["2>&-", "2> /dev/full", "2>&- >&-"])
def test_a_closed_or_full_error_stream_keeps_the_exit_code_and_leaves_the_output_alone(where: str) -> None:
    done = shell(f"cs list credits gea {where}")
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


@each("verb, env", [("list credits monte_carlo", {"PYTHONIOENCODING": "latin-1"}),
                    ("list credits monte_carlo", {"PYTHONIOENCODING": "ascii"}), ("lab train --help", C_LOCALE),
                    ("list credits monte_carlo", C_LOCALE)])
def test_characters_that_a_terminal_lacks_are_replaced(verb: str, env: dict[str, str]) -> None:
    done = shell(f"cs {verb}", **env)
    assert (done.returncode, done.stderr) == (0, b"")
    if verb == "list credits monte_carlo":
        assert b"A_it = V(next cut) ? V(cut before t)" in done.stdout


def test_json_on_such_a_terminal_is_the_same_value(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = shell("cs list credits monte_carlo --json", PYTHONIOENCODING="latin-1")
    assert json.loads(narrow.stdout.decode("latin-1")) == run_json(capsys, "list", "credits", "monte_carlo")
    assert narrow.stdout.isascii()
