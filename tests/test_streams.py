"""Standard streams as shells give them: closed, full, not read to the end, and unable to show every character."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
VERBS = ["credit gae", "env --json", "train --help"]


def shell(line: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`cs` in the line is the command."""
    function = f'cs() {{ "{sys.executable}" -m creditscope "$@"; }}; set -o pipefail; '
    return subprocess.run(["bash", "-c", function + line], capture_output=True, check=False, env=os.environ | env)


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_output_is_one_sentence_and_exit_code_2(verb: str) -> None:
    done = shell(f"cs {verb} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.decode() == ("creditscope: cannot write to the standard output: No space left on device; free "
                                    "some space there, or send the output elsewhere\n")


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_output_is_nobodys_error(verb: str) -> None:
    done = shell(f"cs {verb} >&-")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("line", "code"), [("cs methods", 0), ("cs check --exact --json --strict", 141),
                                            ("cs train --help", 0)])
def test_a_reader_that_left_ends_a_verb_quietly_and_not_as_a_verdict(line: str, code: int) -> None:
    done = shell(f"(sleep 0.5; {line}) | true")
    assert (done.returncode, done.stderr) == (code, b"")


def test_a_closed_or_full_error_stream_keeps_the_exit_code_and_leaves_the_output_alone() -> None:
    for where in ("2>&-", "2> /dev/full", "2>&- >&-"):
        done = shell(f"cs methods grop {where}")
        assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"}, C_LOCALE])
@pytest.mark.parametrize("verb", ["methods dapo", "train --help"])
def test_characters_that_a_terminal_lacks_are_replaced(verb: str, env: dict[str, str]) -> None:
    done = shell(f"cs {verb}", **env)
    assert (done.returncode, done.stderr) == (0, b"")
    if verb == "methods dapo":
        assert b"clip(?_it, 0.8, 1.28)" in done.stdout


def test_json_on_such_a_terminal_is_the_same_value() -> None:
    plain, narrow = (shell("cs methods dapo --json", PYTHONIOENCODING=name) for name in ("utf-8", "latin-1"))
    assert json.loads(narrow.stdout.decode("latin-1")) == json.loads(plain.stdout)
    assert narrow.stdout.isascii()
