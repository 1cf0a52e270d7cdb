"""A plain installation, without torch: logs, records and lists are read, and everything else names its extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import light
from creditscope.errors import EXTRAS, CreditscopeError, MissingExtra, install_hint, installed, require_module

HIDE = f"import sys; sys.path.insert(0, {str(Path(light.__file__).parent)!r}); import light; light.hide()\n"


@pytest.fixture(scope="module")
def ended() -> dict[str, Any]:
    """Command -> how it ended where no extra is installed; all of them in one process."""
    done = subprocess.run([sys.executable, light.__file__, "--hide", "--json"], capture_output=True, text=True,
                          check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def hidden(code: str) -> str:
    """What the code prints where no extra is installed."""
    done = subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_logs_records_and_lists_need_no_extra_and_other_commands_name_theirs(ended: dict[str, Any]) -> None:
    assert light.wrong(ended) == []


@pytest.mark.slow
def test_the_diagnosis_and_the_page_without_torch_are_whole(ended: dict[str, Any]) -> None:
    assert ended[f"doctor {light.LOG}"]["out"].startswith("✗ KL pull: The KL term outweighs the reward: β = 10")
    page = json.loads(ended[f"report {light.RECORD} -o OUT/one.html --json"]["out"])
    assert page["charts"] is installed("vl_convert")
    assert page["bytes"] > 100_000
    assert "torch" not in json.loads(ended["env --json"]["out"])  # no threads, no devices


@pytest.mark.slow
def test_public_names_that_need_no_torch_work_without_it() -> None:
    assert hidden(f"from creditscope import METHODS, Method, Record, spectrum\n"
                  f"from creditscope.optimizer.table import BRAKES\n"
                  f"print(METHODS['grpo'].name, len(Record.open({str(light.RECORD)!r}).steps()))") == "grpo 3"


@pytest.mark.slow
@pytest.mark.parametrize(("imported", "sentence"), [
    ("from creditscope import Microscope", "creditscope.Microscope needs torch: pip install 'creditscope[torch]'"),
    ("from creditscope import Rollouts", "creditscope.batch needs torch: pip install 'creditscope[torch]'"),
    ("from creditscope.optimizer import Probe",
     "creditscope.optimizer.Probe needs torch: pip install 'creditscope[torch]'"),
    ("import creditscope.lab.train", "creditscope.lab needs torch: pip install 'creditscope[lab]'"),
    ("from creditscope.plugins.trl import ScopeCallback",
     "creditscope.plugins.trl needs trl: pip install 'creditscope[trl]'"),
    ("from creditscope.plugins.verl.names import load; load('verl.workers.engine')",
     "verl.workers.engine needs verl: pip install 'creditscope[verl]'"),
])
def test_a_name_that_needs_an_extra_says_which_in_one_sentence(imported: str, sentence: str) -> None:
    assert hidden(f"from creditscope.errors import CreditscopeError\n"
                  f"try:\n    {imported}\nexcept CreditscopeError as error:\n"
                  f"    print(isinstance(error, ImportError), error)") == f"True {sentence}"


def test_a_module_of_no_extra_and_a_part_of_an_installed_one_are_not_explained() -> None:
    for name in ("no_such_module", "torch.no_such_part"):
        with pytest.raises(ModuleNotFoundError) as raised, install_hint("this"):
            raise ModuleNotFoundError(name, name=name)
        assert not isinstance(raised.value, CreditscopeError)


def test_a_failed_import_becomes_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"^--lora needs peft: pip install 'creditscope\[lora\]'$"), \
            install_hint("--lora"):
        import peft  # noqa: F401


def test_a_folder_of_the_same_name_in_the_working_directory_is_not_an_installed_module(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_trainer").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("no_such_trainer")


def test_a_missing_module_is_refused_with_the_extra_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"^--lora needs peft: pip install 'creditscope\[lora\]'$"):
        require_module("--lora", "peft")
    with pytest.raises(MissingExtra, match=r"creditscope\[lab\]"):
        require_module("the lab", "peft", extra="lab")
    assert EXTRAS["peft"] == "lora"
