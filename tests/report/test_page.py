"""The file: what lies in it, what its policy allows, and that building it needs no torch."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from creditscope.files.markup import Html, tag
from creditscope.files.writing import write_file
from creditscope.methods.table import METHODS
from creditscope.report import methods
from creditscope.report import page as pages
from creditscope.report.build import SECTIONS, build, made
from creditscope.report.page import packed, page, policy
from creditscope.report.run import Run, read_run
from creditscope.report.section import Section
from creditscope.runs.record import Record
from depth import FULL
from each import each
from makers import edit_config
from report import records

SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def data(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">([A-Za-z0-9+/=]*)</script>', text)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_data_come_back_as_they_went_in_and_twice_the_same() -> None:
    value = {"a": ["</script>", 1, None, 0.5], "\ud800": "<!--"}
    assert json.loads(gzip.decompress(base64.b64decode(packed(value)))) == value
    assert packed(value) == packed(value)


def test_a_number_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        packed({"a": float("nan")})


def test_the_policy_names_every_script_by_its_hash_and_nothing_else_may_run() -> None:
    section = Section(id="steps", title="Steps", body=Html(), data={"charts": [], "steps": []})
    text = page("t", tag("h1", "t"), [section])
    scripts = SCRIPT.findall(text)
    assert len(scripts) == 2  # Vega, and ours
    rule = re.search(r"script-src ([^;]*);", policy(scripts, live=False))
    assert rule
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    assert rule[1].split() == hashes
    written = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert written
    assert written[1].replace("&#x27;", "'") == policy(scripts, live=False)
    assert "unsafe-eval" not in written[1]
    assert "default-src 'none'" in policy([], live=False)
    assert "img-src" not in policy([], live=False)  # the page has no picture but what it draws


def test_a_live_page_may_ask_its_own_server_and_a_file_nobody() -> None:
    assert "connect-src 'self'" in policy([], live=True)
    assert "connect-src 'none'" in policy([], live=False)


MAKERS: list[Callable[[Path], Path]] = [records.bare, records.hostile]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_a_page_is_one_file_with_two_scripts_of_ours_whatever_the_record_says(
        make: Callable[[Path], Path], tmp_path: Path) -> None:
    text = build([make(tmp_path / "run")], papers=True)
    assert len(SCRIPT.findall(text)) == 2
    assert text.count("<script") == 3 + sum(s.count("<script") for s in SCRIPT.findall(text))
    head = text[:text.index("<style>")]
    assert "src=" not in re.sub(r'content="[^"]*"', "", head)
    assert set(data(text)) <= {section.__module__.rsplit(".", 1)[1] for section in SECTIONS}
    text.encode()  # no half of a surrogate pair is left


def test_the_papers_claims_are_on_the_page_only_when_asked_for(tmp_path: Path) -> None:
    runs = [records.bare(tmp_path / "a"), records.bare(tmp_path / "b")]
    for paths in (runs[:1], runs):
        assert '<section id="claims"' not in build(paths)
        assert '<section id="claims"' in build(paths, papers=True)


PAPERS = re.compile(r"\bP[12]\b|arXiv|[Pp]aper|\bEq\. \d|Proposition|Theorem|Corollary")


def read_by_people(page: str) -> str:
    return re.sub("<[^>]+>", " ", re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL))


def test_a_page_cites_nothing_unless_it_is_asked_to(tmp_path: Path) -> None:
    runs = [records.bare(tmp_path / "a"), records.bare(tmp_path / "b")]
    edit_config(runs[1], group=2)
    for paths in (runs[:1], runs):
        assert PAPERS.findall(read_by_people(build(paths))) == []
        assert {"P1", "P2", "arXiv", "Proposition"} <= set(PAPERS.findall(read_by_people(build(paths, papers=True))))


@each("name", [name for name in METHODS if not name.startswith("p1_")])
def test_the_section_of_a_method_cites_nothing_unless_it_is_asked_to(name: str) -> None:
    assert PAPERS.findall(read_by_people(methods.of([{"method": name}]).html())) == []
    cited = methods.of([{"method": name}], papers=True).html()
    assert (f"arXiv:{METHODS[name].arxiv}" in cited) == bool(METHODS[name].arxiv)


@pytest.mark.slow
def test_a_page_of_a_real_run_cites_nothing_unless_it_is_asked_to(rich_run: Path) -> None:
    assert PAPERS.findall(read_by_people(build([rich_run]))) == []


@pytest.mark.slow
def test_every_section_is_there_for_a_real_run(rich_run: Path) -> None:
    text = build([rich_run], papers=True)
    for make in SECTIONS:
        assert f'<section id="{make.__module__.rsplit(".", 1)[1]}"' in text
    assert "To be written" not in text


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["groups", "scope", "optimizer"])
def test_a_damaged_part_is_named_and_the_rest_of_the_page_stands(spoil: str, tmp_path: Path) -> None:
    path = records.hostile(tmp_path / "run", longest=100)
    for file in (path / spoil).glob("*.npz"):
        file.write_bytes(b"not a zip")
    text = build([path], papers=True)
    assert text.count("<section ") == len(SECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("shelf", ["groups", "scope", "optimizer"])
def test_arrays_that_are_not_there_leave_a_page(shelf: str, tmp_path: Path) -> None:
    """Each array of a shelf is left out in turn: an older or foreign record may lack any of them."""
    path = records.hostile(tmp_path / "run", longest=100)
    with Record.resume(path, Record.open(path).config) as record:
        load, save = {"groups": (record.group, record.save_group), "scope": (record.reading, record.save_reading),
                      "optimizer": (record.optimizer_reading, record.save_optimizer)}[shelf]
        record.rewind(2)
        whole = load(1)
        save(0, whole)
        for name in whole:
            save(1, {key: value for key, value in whole.items() if key != name})
            assert build([path], papers=True).count("<section ") == len(SECTIONS), f"without {name}"


def test_a_run_without_a_step_and_one_with_nothing_but_numbers_leave_a_page(tmp_path: Path) -> None:
    Record.create(tmp_path / "none", {}, {}).close()
    with Record.create(tmp_path / "one", {}, {}) as record:
        record.append(0, {"rollouts/spent": 4})
    with Record.create(tmp_path / "odd", {"group": "eight", "model": None, "method": 3, "also": "x"}, {}) as record:
        record.append(0, {"rollouts/spent": 4, "reward/mean": "high", "signal/groups": 0, "signal/live_groups": 0})
    for name in ("none", "one", "odd"):
        assert build([tmp_path / name], papers=True).count("<section ") == len(SECTIONS)


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")  # the claims read what they need themselves
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("shelf", ["groups", "scope", "optimizer"])
def test_arrays_of_another_kind_leave_a_page(shelf: str, tmp_path: Path) -> None:
    """Each array of a shelf in turn is complex or a date (at full depth both): kinds that no run writes."""
    path = records.hostile(tmp_path / "run", longest=100)
    with Record.resume(path, Record.open(path).config) as record:
        load, save = {"groups": (record.group, record.save_group), "scope": (record.reading, record.save_reading),
                      "optimizer": (record.optimizer_reading, record.save_optimizer)}[shelf]
        whole = load(1)
        for number, (name, value) in enumerate(whole.items()):
            kinds = [np.ones(value.shape, complex), np.zeros(value.shape, "M8[s]")]
            for odd in kinds if FULL else [kinds[number % 2]]:
                save(1, whole | {name: odd})
                text = build([path], papers=True)
                assert text.count("<section ") == len(SECTIONS), f"{name} as {odd.dtype}"
                assert f"{name} of step 1 is {odd.dtype}".replace("<", "&lt;") in text


def test_a_section_that_cannot_be_made_is_named_and_a_bug_of_ours_is_not_hidden(tmp_path: Path) -> None:
    def odd(run: Run) -> Section:
        raise ValueError("a shape of three")

    def bug(run: Run) -> Section:
        raise AssertionError

    run = read_run(records.bare(tmp_path / "run"))
    section = made(odd, run)
    assert section.id == odd.__module__.rpartition(".")[2]
    assert "This part of the record is not as a run has it." in section.html()
    assert run.faults == [f"{section.id}: not as a run has it (ValueError: a shape of three)"]
    with pytest.raises(AssertionError):
        made(bug, run)


@pytest.mark.slow
@pytest.mark.deep
def test_five_hundred_steps_take_at_most_two_and_a_half_megabytes(long_run: Path) -> None:
    assert len(build([long_run]).encode()) <= 2.5e6


def test_a_link_that_lies_where_a_file_is_made_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("theirs")
    (tmp_path / f".report.html.{os.getpid()}.part").symlink_to("other")
    write_file(tmp_path / "report.html", "ours")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"other": "theirs", "report.html": "ours"}


@pytest.mark.slow
def test_a_page_is_the_same_bytes_when_it_is_made_again(rich_run: Path) -> None:
    assert build([rich_run]) == build([rich_run])


@pytest.mark.slow
def test_building_a_page_loads_no_torch(tmp_path: Path) -> None:
    path = records.hostile(tmp_path / "run", longest=100)
    code = ("import sys; from pathlib import Path; from creditscope.report.build import build\n"
            "build([Path(sys.argv[1])])\n"
            "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'altair', 'pandas')))")
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 0


# -- the bundle is kept ------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the bundle is kept while the test goes on; nothing is there yet."""
    import vl_convert

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pages.vega.cache_clear()
    yield tmp_path / "cache" / "creditscope" / f"vega-{vl_convert.__version__}.js"
    pages.vega.cache_clear()


def again() -> str:
    pages.vega.cache_clear()
    return pages.vega()


@pytest.mark.slow
def test_the_bundle_is_made_once_and_read_back(bundle: Path) -> None:
    first = again()
    assert [file.name for file in sorted(bundle.parent.iterdir())] == [bundle.name, f"{bundle.name}.sha256"]
    assert again() == first
    # Can it fail? What lies there with its own hash is what is read.
    pages.keep(bundle, "var other;")
    assert again() == "var other;"


def test_a_bundle_that_was_damaged_is_made_anew(bundle: Path) -> None:
    first = again()
    hashed = bundle.with_name(f"{bundle.name}.sha256")
    for file, wrong in ((bundle, b"window.hacked = 1"), (bundle, b"\xff"), (hashed, b"0" * 64), (hashed, b"\xff")):
        file.write_bytes(wrong)
        assert again() == first
        assert hashlib.sha256(bundle.read_bytes()).hexdigest() == hashed.read_text()  # and is whole again
    hashed.unlink()
    assert again() == first


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_time(
        bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert "vega" in again()
    (tmp_path / "cache").unlink()
    bundle.mkdir(parents=True)  # a folder where the file should be
    assert "vega" in again()
    assert list(bundle.parent.iterdir()) == [bundle]
    assert capfd.readouterr() == ("", "")
