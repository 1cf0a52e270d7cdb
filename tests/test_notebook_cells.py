"""What a notebook shows of our objects: short, in the notebook's own colours, and every text of a file escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from creditscope import Record, spectrum
from creditscope.claims.verdict import ClaimVerdict
from creditscope.diagnosis import doctor
from creditscope.diagnosis.engine import Diagnosis
from creditscope.diagnosis.finding import Finding
from creditscope.files.cells import GREY, MARKS, cell, folded
from creditscope.microscope.spectrum import Spectrum
from each import each
from records import write_record
from report.records import HOSTILE
from shown_text import Reader

ELEMENTS = {"div", "b", "table", "tr", "th", "td", "br", "details", "summary", "ul", "li"}


def hostile(kind: str, text: str, folder: Path) -> Any:
    """An object of each kind with the text wherever a text can stand."""
    found = Finding(rule=text, state="broken", sentence=text, evidence=(text, text), why=text, change=text,
                    expect=text, settles=text, follows=(), assumes={text: text}, onset=3)
    if kind == "Finding":
        return found
    if kind == "Diagnosis":
        return Diagnosis([found, Finding(rule="other", state="unknown", sentence=text)], text)
    if kind == "ClaimVerdict":
        return ClaimVerdict(claim=text, definition=text, subject=text, outcome="refuted", reason=text, observed=0.5,
                            interval=(0.0, 1.0), expected=text, threshold=text, n=3, of=text)
    name = re.sub(r"[/\x00\ud800-\udfff]", "_", text)[:60]
    config = {"method": text, "model": text, "task": text, "credit": text}
    return Record.open(write_record(folder / f"run {name}", [{f"reward/{text}": 1.0, "reward/first_error": text}],
                                    config))


@pytest.mark.slow
@each("kind, text", [(kind, text) for kind in ("Finding", "Diagnosis", "ClaimVerdict", "Record") for text in HOSTILE])
def test_a_hostile_text_makes_no_element_no_attribute_and_no_address(kind: str, text: str, tmp_path: Path) -> None:
    shown = hostile(kind, text, tmp_path)._repr_html_()
    found = Reader(shown.encode().decode())
    assert set(found.elements) <= ELEMENTS
    assert set(found.attributes) <= {"style", "scope"}
    styles = set(re.findall(r'style="([^"]*)"', shown))
    ours = r"border-left:4px solid #[0-9a-f]{6};padding-left:0.8em|text-align:left(;vertical-align:top)?"
    assert all(re.fullmatch(ours, style) for style in styles), styles


def test_a_script_in_the_name_of_a_run_and_of_a_reward_is_shown_as_text(tmp_path: Path) -> None:
    script = "<script>alert(1)<_script>"
    shown = Record.open(write_record(tmp_path / script, [{script: 1.0}], {"method": script}))._repr_html_()
    assert "<script" not in shown
    assert f"method {script}" in Reader(shown).text
    assert f"{tmp_path}/{script}" in Reader(shown).text


def test_a_record_says_how_far_it_is_what_it_read_last_and_what_it_kept(tmp_path: Path) -> None:
    lines = [{"reward/mean": 0.25, "entropy/mean": 1.5}, {"reward/mean": 0.5}]
    kept = {0: {"reward": np.ones(2)}, 1: {"reward": np.ones(2)}}
    run = Record.open(write_record(tmp_path / "run", lines, {"method": "grpo", "lr": 1e-4}, groups=kept))
    text = Reader(run._repr_html_()).text
    for said in ("method grpo, lr 0.0001", "2, from 0 to 1", "reward/mean 0.5", "entropy/mean 1.5 at step 0",
                 "rollouts of 2 steps", "2: see .frame()", f"creditscope report {tmp_path}/run"):
        assert said in text
    assert repr(run) == f"Record('{tmp_path}/run')"


def test_a_record_without_steps_and_a_damaged_one_are_shown_in_words(tmp_path: Path) -> None:
    assert "none yet" in Record.open(write_record(tmp_path / "new", []))._repr_html_()
    damaged = write_record(tmp_path / "run", [{"reward/mean": 0.5}])
    (damaged / "steps.jsonl").write_text("{]\n")
    assert "cannot be read" in Record.open(damaged)._repr_html_()


def test_a_spectrum_shows_each_rank_with_its_equation_and_the_energy_by_direction() -> None:
    # σ = 2, 1, 1: Σσ = 4, Σσ² = 6, Σσ⁴ = 18.
    text = Reader(spectrum(np.diag([4.0, 1.0, 1.0]))._repr_html_()).text
    for said in ("Spectrum of 3 rollouts: effective rank 2.67", "2.667 = (Σσ)²/Σσ²", "2.000 = (Σσ²)²/Σσ⁴",
                 "1.500 = Σσ²/σ₁²", "3 of 3 above the floor", "66.7%, 16.7%, 16.7%"):
        assert said in text
    assert ", …" in Reader(spectrum(np.eye(9))._repr_html_()).text
    assert "all 0" in Spectrum(np.zeros(2), 0.0)._repr_html_()
    assert "all 0" in Spectrum(np.zeros(0), 0.0)._repr_html_()


def test_a_verdict_shows_sign_number_interval_and_rule() -> None:
    shown = ClaimVerdict(claim="P1.5", definition="effective rank", subject="tiny", outcome="refuted", observed=3.046,
                         interval=(2.9, 3.2), expected="about 2", threshold="inside [1.5, 2.5]", n=5, of="runs",
                         reason="it grows with R")._repr_html_()
    text = Reader(shown).text
    for said in ("✗ refuted: P1.5, effective rank", "3.046 [2.9, 3.2]", "about 2", "inside [1.5, 2.5]", "5 runs"):
        assert said in text
    assert MARKS["refuted"] in shown
    bare = ClaimVerdict(definition="", subject="runs", outcome="undecided", reason="needs runs")._repr_html_()
    assert "observed" not in bare
    assert GREY in bare


@pytest.mark.slow
def test_a_diagnosis_leads_with_the_doctor_s_headline_and_folds_the_rest(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [{"reward/mean": 0.3, "signal/dead_groups": 1.0, "signal/groups": 8}] * 40)
    found = doctor(run)
    assert found.first is not None
    shown = found._repr_html_()
    text = Reader(shown).text
    assert found.headline in text
    assert f"change{found.first.change}" in text
    assert all(line in text for line in found.first.evidence)
    # Each finding once: the first in full, the others in the list of their state.
    assert shown.count("<li>") == len(found.findings) - 1
    assert MARKS[found.state] in shown
    first = Reader(found.first._repr_html_()).text
    assert f"{found.first.state}: {found.first.rule}: {found.first.sentence}." in first


@pytest.mark.slow
def test_the_doctor_in_python_is_the_doctor_of_the_command_line(tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    from cli import run_json

    run = write_record(tmp_path / "run", [{"reward/mean": 0.3, "signal/dead_groups": 0.5}] * 40)
    found, told = doctor(run, sets=["group=2"]), run_json(capsys, "doctor", run, "--set", "group=2")
    assert (found.headline, found.state) == (told["headline"], told["state"])
    assert [each.rule for each in found.findings] == [each["rule"] for each in told["findings"]]


def test_rows_that_are_empty_are_left_out_and_zero_is_not() -> None:
    text = Reader(cell("t", {"none": None, "empty": "", "list": [], "zero": 0}, folded("more", ["<i>"]))).text
    assert text == "tzero0more<i>"


@each("colour", [*MARKS.values(), GREY])
def test_a_mark_can_be_seen_on_white_and_on_black(colour: str) -> None:
    """WCAG's contrast (L₁ + 0.05)/(L₂ + 0.05) of at least 3 for parts that are no text."""
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    light = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    assert min(1.05 / (light + 0.05), (light + 0.05) / 0.05) >= 3
