"""What a run leaves and whom it asks: no secret of the environment in any file, and no network that nobody named."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import creditscope

SECRETS = {"WANDB_API_KEY": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567", "HF_TOKEN": "hf_FAKEfakeFAKEfakeFAKEfake",
           "AWS_SECRET_ACCESS_KEY": "wJalrFAKE/K7MDENG/bPxRfiCYFAKEKEY", "OPENAI_API_KEY": "sk-FAKEfakeFAKEfakeFAKE",
           "MY_PASSWORD": "correct-horse-battery-staple"}
BLOCKED = """
import os, socket, sys
def refuse(*args, **options):  # and end: libraries would try again for a minute
    os.write(2, f"NETWORK {args!r}".encode())
    os._exit(1)
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, refuse)
whole = socket.socket
class Local(whole):
    def connect(self, address):
        return whole.connect(self, address) if self.family == socket.AF_UNIX else refuse(address)
    connect_ex = connect
socket.socket = Local
from creditscope.cli.main import main
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as end:
        print("CODE", words[0], end.code, flush=True)
"""


def run(commands: list[list[str]], folder: Path) -> str:
    """All that the commands print, in a process of its own with secrets around it and no network."""
    source = {"PYTHONPATH": str(Path(creditscope.__file__).parents[1])}
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run([sys.executable, "-c", BLOCKED.replace("{commands!r}", repr(commands))], cwd=folder,
                          env=env | source | SECRETS, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(the folder, what was said) after a run was trained, resumed, read and reported, and a file was scoped. Last
    comes a model on the hub: who asks for the network ends the process."""
    folder = tmp_path_factory.mktemp("lived")
    row = {"prompt": "1+1=", "response": "2", "reward": 1.0}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | {"reward": float(n % 2)}) + "\n" for n in range(4)))
    (folder / "own.py").write_text("def bad(text, row):\n    raise ValueError('a fault of the reward')\n")
    small = ["--group", "2", "--prompts", "2", "--eval-problems", "0", "--max-tokens", "8"]
    train = ["lab", "train", "--steps", "2", *small, "--scope", "light", "--keep-every", "1", "--checkpoint-every", "1",
             "--out", "run"]
    judged = ["lab", "train", "--task", "jsonl:rows.jsonl", "--reward", "own:bad", "--steps", "1", *small, "--out",
              "judged"]
    said = run([train, ["lab", "train", "--out", "run", "--resume", "--steps", "3"], judged, ["report", "run"],
                ["papers", "check", "run", "--save", "saved"], ["doctor", "run"], ["inspect", "run"],
                ["inspect", "run", "--prefix"], ["inspect", "rows.jsonl", "--model", "tiny", "--out", "scoped"],
                ["env"], ["list", "methods"], ["list", "credits"], ["lab", "train", "no/such/model", "--out", "none"],
                ["lab", "train", "owner/name", "--out", "hub"]], folder)
    return folder, said


@pytest.mark.slow
def test_every_verb_works_on_local_data_without_a_network(lived: tuple[Path, str]) -> None:
    _, said = lived
    codes = [line.split()[1:] for line in said.splitlines() if line.startswith("CODE")]
    assert codes == [["lab", "0"], ["lab", "0"], ["lab", "0"], ["report", "0"], ["papers", "0"], ["doctor", "0"],
                     ["inspect", "0"], ["inspect", "0"], ["inspect", "0"], ["env", "0"], ["list", "0"], ["list", "0"],
                     ["lab", "2"]], said


@pytest.mark.slow
def test_the_blocked_network_of_these_tests_is_noticed(lived: tuple[Path, str]) -> None:
    """Can fail: the last command asks for the hub."""
    _, said = lived
    assert said.count("NETWORK") == 1
    assert "huggingface.co" in said.partition("NETWORK")[2]


@pytest.mark.slow
def test_no_secret_of_the_environment_is_in_any_file_or_on_the_screen(lived: tuple[Path, str]) -> None:
    folder, said = lived
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 10
    for name, secret in SECRETS.items():
        assert secret not in said
        assert [file for file in files if secret.encode() in file.read_bytes()] == [], name
    for name in ("run/run.json", "run/report.html", "scoped/run.json"):
        assert str(Path.home()) + "/" not in (folder / name).read_text() or Path.home() == Path("/")


@pytest.mark.slow
def test_nothing_that_a_run_writes_can_be_run_or_written_by_others(lived: tuple[Path, str]) -> None:
    folder, _ = lived
    for path in folder.rglob("*"):
        mode = path.stat().st_mode
        assert not mode & stat.S_IWOTH, path
        assert path.is_dir() or not mode & 0o111, path
