"""The hub is asked once, and what it cannot give is told in one sentence: against a server on this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli import loaded, run
from creditscope import CreditscopeError
from creditscope.files.hub import answers, cache_alone, refuse_missing
from each import each

constants = pytest.importorskip("huggingface_hub.constants")


def listen_at(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}")


@pytest.fixture(autouse=True)
def _asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer of an earlier test, an empty cache, and no network: nothing listens at the endpoint."""
    answers.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen_at(monkeypatch, free.getsockname()[1])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


class Hub(HTTPServer):
    """Answers every request with one status, and counts them."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.headers, self.paths = status, headers, list[str]()


class Answer(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        hub: Any = self.server
        hub.paths.append(self.path)
        self.send_response(hub.status)
        for name, value in hub.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    status, headers = request.param
    server = Hub(status, **headers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    listen_at(monkeypatch, server.server_port)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


FOUND = (200, {"ETag": '"abc"', "X_Repo_Commit": "0" * 40, "Content_Length": "3"})
NO_FILE = (404, {"X_Error_Code": "EntryNotFound"})
NO_MODEL = (401, {"X_Error_Code": "RepoNotFound"})
BUSY = (503, {})


@pytest.mark.parametrize("hub", [FOUND, NO_FILE, BUSY], indirect=True, ids=["there", "no such file", "busy"])
def test_a_hub_that_answers_was_asked_once(hub: Hub) -> None:
    assert answers("owner/name")
    refuse_missing("owner/name")
    assert hub.paths == ["/owner/name/resolve/main/config.json"]


@pytest.mark.parametrize("hub", [NO_MODEL], indirect=True)
def test_a_repository_that_the_hub_does_not_have_is_refused_by_name(hub: Hub) -> None:
    with pytest.raises(CreditscopeError, match="no model 'owner/nmae' on the hub, or not for you; check the name"):
        refuse_missing("owner/nmae")
    with pytest.raises(CreditscopeError, match="no dataset 'owner/nmae' on the hub"):
        answers("owner/nmae", "dataset")
    assert len(hub.paths) == 2


def test_without_a_network_a_hub_name_is_refused_unless_it_was_loaded_before(tmp_path: Path) -> None:
    assert not answers("owner/name")
    with pytest.raises(CreditscopeError, match="it was not loaded here before, and the hub does not answer; connect"):
        refuse_missing("owner/name")
    stored = tmp_path / "cache" / "models--owner--name"
    (stored / "snapshots" / "0a").mkdir(parents=True)
    (stored / "snapshots" / "0a" / "config.json").write_text("{}")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0a")
    refuse_missing("owner/name")


@each(("name", "message"), [
    ("nowhere", "no model 'nowhere': no such folder, and not a hub name of the form owner/name; give tiny, a folder"),
    ("./owner/name", "no model './owner/name': no such folder"),
    ("a/b/c", "no model 'a/b/c': no such folder"),
    ("nope.gguf", "no such GGUF file: nope.gguf"),
    ("owner/nope.gguf", "no such GGUF file: owner/nope.gguf"),
])
def test_a_name_that_can_be_no_model_is_refused_without_asking(name: str, message: str) -> None:
    with pytest.raises(CreditscopeError, match=message.replace("(", r"\(")):
        refuse_missing(name)


def test_what_is_on_this_machine_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    for name in ("tiny", str(tmp_path), str(tmp_path / "m.gguf")):
        refuse_missing(name)


@each("words", [("lab", "train", "nowhere"), ("lab", "warmup", "nowhere", "--task", "arithmetic", "--out", "x"),
                ("papers", "localise", "nowhere"), ("inspect", __file__, "--model", "nowhere")])
def test_a_command_refuses_a_missing_model_before_anything_is_loaded(words: tuple[str, ...],
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert capsys.readouterr().err.startswith("creditscope: no model 'nowhere'")
    assert "torch" not in loaded("from creditscope.cli.main import main; main(sys.argv[1:])", *words)


def test_the_caches_alone_are_read_inside_the_block_and_the_hub_again_after_it() -> None:
    pytest.importorskip("datasets")
    with cache_alone():
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
