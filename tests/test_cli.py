"""The command line as a user meets it: exit codes, JSON, errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from creditscope import METHODS
from creditscope.cli import main


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(args)
    return int(stop.value.code or 0)


def test_methods_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("methods") == 0
    out = capsys.readouterr().out
    for name in METHODS:
        assert name in out


def test_methods_json_is_the_table_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("methods", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert set(table) == set(METHODS)
    assert table["dr_grpo"]["diff"] == {"scale": ["group_std", "none"], "aggregate": ["sequence_mean", "constant"],
                                        "kl": ["k3", "none"]}
    assert table["dr_grpo"]["properties"]["prefix_cancels"] is True


def test_one_method_shows_equation_diff_citations_and_properties(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("methods", "dapo") == 0
    out = capsys.readouterr().out
    for text in ("min(ρ_it·A_i, clip(ρ_it, 0.8, 1.28)·A_i)", "differs from grpo", "clip_high: 0.2 → 0.28", "2503.14476",
                 "keep: Eq. 8: s.t. 0 < correct < G", "prefix_cancels: yes"):
        assert text in out


def test_dialects_are_listed_and_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("methods", "--dialects", "--json") == 0
    assert "trl_cispo" in json.loads(capsys.readouterr().out)
    assert run("methods", "verl_gspo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parent"] == "gspo_token"


def test_an_unknown_method_is_exit_code_2_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("methods", "grop") == 2
    err = capsys.readouterr().err
    assert "unknown method 'grop'; did you mean 'grpo'?" in err
    assert "Traceback" not in err


def test_an_unknown_verb_and_an_unknown_flag_are_exit_code_2() -> None:
    assert run("methds") == 2
    assert run("methods", "--jsn") == 2


def test_env_names_versions_and_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("env", "--json") == 0
    out = capsys.readouterr().out
    assert json.loads(out)["packages"]["torch"]
    assert "/" not in out.replace("CPU/", "")


def test_a_reader_that_leaves_early_is_not_an_error() -> None:
    command = f"{sys.executable} -m creditscope methods | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
