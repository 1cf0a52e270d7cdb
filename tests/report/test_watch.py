"""The server of --watch: who is answered, with what, and what happens while the record changes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from creditscope.errors import CreditscopeError
from creditscope.report.watch import HOST, Server, Watched, version
from creditscope.runs.record import Record
from each import each
from report import records

PAGE = '<!doctype html>\n<html lang="en"><head></head><body>{}</body></html>\n'


class Page:
    """A page whose text can be changed, and which can fail, counting how often it was made."""

    def __init__(self) -> None:
        self.text, self.made, self.fault = "one", 0, ""
        self.kind: type[Exception] = CreditscopeError

    def __call__(self) -> str:
        if self.fault:
            raise self.kind(self.fault)
        self.made += 1
        return PAGE.format(self.text)


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return records.bare(tmp_path / "run", steps=2)


@pytest.fixture
def server(run: Path, page: Page) -> Iterator[Server]:
    server = Server(Watched([run], page))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()


def add_step(run: Path, step: int) -> None:
    with Record.resume(run, Record.open(run).config) as record:
        record.append(step, {"reward/mean": 0.5, "rollouts/spent": 16})


def test_the_page_is_made_once_and_again_when_the_record_has_changed(run: Path, page: Page, server: Server) -> None:
    code, _, first = ask(server.port)
    assert (code, page.made) == (200, 1)
    ask(server.port)
    told = json.loads(ask(server.port, "/version")[2])
    assert 0 <= told.pop("age") < 60  # the record was made by this test
    assert told == {"version": version([run]), "notice": ""}
    assert page.made == 1
    page.text = "two"
    add_step(run, 2)
    second = ask(server.port)[2]
    assert page.made == 2
    assert ("one" in first, "two" in second) == (True, True)


def test_the_page_knows_the_version_that_the_server_tells(run: Path, server: Server) -> None:
    for step in (2, 3):
        told = json.loads(ask(server.port, "/version")[2])["version"]
        assert f'data-version="{told}"' in ask(server.port)[2]
        add_step(run, step)


def test_a_record_that_cannot_be_read_leaves_the_last_good_page_with_a_notice(
        run: Path, page: Page, server: Server) -> None:
    before = ask(server.port)[2]
    page.fault = "steps.jsonl, line 3: not a step"
    add_step(run, 2)
    assert ask(server.port)[2] == before
    told = json.loads(ask(server.port, "/version")[2])
    assert f'data-version="{told["version"]}"' in before  # no reason to load it again
    assert told["notice"] == ("The record cannot be read just now, so this page is not the newest: "
                              "steps.jsonl, line 3: not a step")
    page.fault, page.text = "", "three"
    add_step(run, 3)
    assert "three" in ask(server.port)[2]
    assert json.loads(ask(server.port, "/version")[2])["notice"] == ""


def test_the_age_is_the_time_since_the_newest_file_changed(run: Path, server: Server) -> None:
    for file in run.iterdir():
        os.utime(file, (1, time.time() - 7200))
    os.utime(run / "run.json", (1, time.time() - 3600))
    assert json.loads(ask(server.port, "/version")[2])["age"] == pytest.approx(3600, abs=60)


def test_a_fault_of_any_kind_leaves_the_last_good_page(run: Path, page: Page, server: Server) -> None:
    before = ask(server.port)[2]
    page.kind = ZeroDivisionError
    page.fault = "an odd array"
    add_step(run, 2)
    assert ask(server.port)[2] == before
    assert json.loads(ask(server.port, "/version")[2])["notice"].endswith("not the newest: an odd array")


def test_a_record_that_could_never_be_read_says_why_and_is_tried_again(page: Page, server: Server) -> None:
    page.fault = "no run here \ud800"
    code, headers, text = ask(server.port)
    assert (code, text) == (503, "no run here \\ud800\n\nThis page asks again every 3 seconds.\n")
    assert headers["content-type"].startswith("text/plain")
    assert headers["refresh"] == "3"  # the browser asks again by itself
    page.fault = ""
    assert ask(server.port)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{}", "127.0.0.1", "127.0.0.1:1", "[::1]:{}", ""])
def test_who_asks_under_another_name_is_refused(host: str, server: Server) -> None:
    for path in ("/", "/version"):
        assert ask(server.port, path, host=host.format(server.port) or " ")[0] == 421


@pytest.mark.parametrize("host", ["127.0.0.1:{}", "localhost:{}", "LocalHost:{}"])
def test_the_two_names_of_this_machine_are_answered(host: str, server: Server) -> None:
    assert ask(server.port, host=host.format(server.port))[0] == 200


@each("path", ["/run.json", "/steps.jsonl", "/..", "/../run.json", "/%2e%2e/run.json", "/?x",
                                  "/version/", "/index.html", "/favicon.ico", "*"])
def test_no_other_path_is_answered(path: str, server: Server) -> None:
    assert ask(server.port, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_only_get_and_head_are_answered(method: str, server: Server) -> None:
    assert ask(server.port, method=method)[0] == 501
    code, headers, text = ask(server.port, method="HEAD")
    assert (code, text) == (200, "")
    assert int(headers["content-length"]) > 0


def test_every_answer_carries_the_headers_and_lets_no_other_site_read_it(server: Server) -> None:
    for path in ("/", "/version", "/nothing"):
        headers = ask(server.port, path)[1]
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert not any(name.startswith("access-control") for name in headers)
        assert headers["server"].strip() == "creditscope"  # and not which Python


def test_a_caller_that_leaves_does_not_end_the_server(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    for sent in (b"", b"GET / HT", b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff\r\n\r\n"):
        with socket.create_connection((HOST, server.port)) as caller:
            caller.sendall(sent)
    assert ask(server.port)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_or_is_none_is_refused_with_the_repair(server: Server, page: Page) -> None:
    for port in (server.port, 70000):
        with pytest.raises(CreditscopeError, match=rf"cannot serve on 127.0.0.1:{port}: .*choose another --port"):
            Server(Watched([], page), port)


def test_the_version_sees_every_file_of_a_record_and_no_other(run: Path) -> None:
    seen = [version([run])]
    for name in ("groups/000000.npz", "scope/000000.npz", "optimizer/000000.npz"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"x")
        seen.append(version([run]))
    (run / "run.json").write_text((run / "run.json").read_text() + "\n")
    seen.append(version([run]))
    assert len(set(seen)) == 5
    for name in ("report.html", "checkpoints/note", "groups/.000001.npz.part"):
        (run / name).write_bytes(b"x")
    assert version([run]) == seen[-1]


# -- the verb ----------------------------------------------------------------------------------------------------------


def listening(pid: int) -> set[str]:
    """Addresses, as in /proc/net, on which a process listens by TCP, and every UDP socket that it holds."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table, listens in (("tcp", "0A"), ("tcp6", "0A"), ("udp", None), ("udp6", None)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and listens in (None, fields[3]):
                found.add(f"{table} {fields[1]}")
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are read from /proc")
def test_the_verb_serves_on_loopback_alone_writes_nothing_and_ends_quietly_on_ctrl_c(run: Path) -> None:
    before = sorted(run.rglob("*"))
    with subprocess.Popen([sys.executable, "-m", "creditscope", "report", run, "--watch", "--json"], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as verb:
        assert verb.stdout is not None
        lines = [verb.stdout.readline() for _ in range(3)]
        url = json.loads("".join(lines))["url"]
        port = int(url.rsplit(":", 1)[1].strip("/"))
        assert ask(port)[0] == 200
        assert listening(verb.pid) == {f"tcp 0100007F:{port:04X}"}  # 127.0.0.1, bytes reversed
        assert sorted(run.rglob("*")) == before
        verb.send_signal(signal.SIGINT)
        out, err = verb.communicate(timeout=20)
    assert (verb.returncode, out, err) == (0, "", "")


@pytest.mark.slow
def test_a_page_follows_a_run_that_is_being_trained(tmp_path: Path) -> None:
    """A real training in another process; the version changes while it goes on, and every page is whole."""
    from creditscope.report.build import build

    run = tmp_path / "run"
    command = [sys.executable, "-m", "creditscope", "lab", "train", "--group", "2", "--prompts", "2", "--steps", "8",
               "--eval-problems", "0", "--max-tokens", "16", "--out", run, "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}) as training:
        while not (run / "run.json").exists():
            assert training.poll() is None
            time.sleep(0.05)
        watched = Watched([run], lambda: build([run], live=True))
        pages, versions = [], set()
        while training.poll() is None:
            pages.append(watched.page())
            versions.add(watched.version)
            time.sleep(0.2)
        pages.append(watched.page())
    assert training.returncode == 0
    assert len(versions) >= 3
    assert watched.notice == ""
    assert all(page.endswith(b"</html>\n") for page in pages)


def test_the_end_waits_for_the_page_that_is_being_made_and_no_other_is_begun(run: Path) -> None:
    """The process was aborted where it ended while a thread was inside compiled code."""
    begun, made = threading.Event(), []

    def make() -> str:
        begun.set()
        time.sleep(0.3)
        made.append("page")
        return '<!doctype html>\n<html lang="en">'

    watched = Watched([run], make)
    threading.Thread(target=watched.page, daemon=True).start()
    assert begun.wait(10)
    watched.close()
    assert made == ["page"]
    late = threading.Thread(target=watched.page, daemon=True)
    late.start()
    late.join(0.2)
    assert late.is_alive()  # it waits for ever, and a daemon does not keep the process
