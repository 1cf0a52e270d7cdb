"""The data of the token view: what of a record is in the file, and what each number is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from creditscope.files.markup import tag
from creditscope.report import tokens
from creditscope.report.page import asset, packed, page
from creditscope.report.run import Run, read_run
from creditscope.report.section import spaced
from creditscope.runs.record import Record
from each import each
from records import write_record

Arrays = dict[str, NDArray[Any]]


def two() -> Arrays:
    """Two answers of three and two tokens; the middle token of the first was handed to the policy."""
    return {"tokens": np.array([[5, 6, 7], [5, 8, 0]]),
            "mask": np.array([[True, False, True], [True, True, False]]),
            "logp": np.log(np.array([[0.5, 1.0, 0.5], [0.5, 0.25, 1.0]])).astype(np.float32),
            "live_logp": np.log(np.array([[0.5, 1.0, 0.55], [0.5, 0.2, 1.0]])).astype(np.float32),
            "reward": np.array([1.0, 0.0], dtype=np.float32), "group": np.array([0, 0]),
            "credit": np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]], dtype=np.float32),
            "w": np.array([[0.25, 0.0, 0.25], [-0.25, -0.123456, 0.0]], dtype=np.float32),
            "step": np.array([[0, 0, 1], [0, 0, -1]]), "step_reward": np.array([[0.0, 1.0], [1.0, 0.0]]),
            "prompt": np.array(["p", "p"]), "text": np.array(["a\nb", "ac"]),
            "pieces": np.array([["a", "\n", "b"], ["a", "c", ""]])}


def recorded(path: Path, kept: Mapping[int, Arrays]) -> Run:
    return read_run(write_record(path, {key: {"rollouts/spent": 2} for key in kept}, {"method": "grpo"}, groups=kept))


def data(run: Run) -> dict[str, Any]:
    found = tokens.section(run).data
    assert found is not None
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


def many(rows: int, width: int, size: int, seed: int = 0) -> Arrays:
    """Random rollouts in groups of `size`; only in the last group do rewards differ."""
    draw = np.random.default_rng(seed)
    group = np.arange(rows) // size
    reward = np.where(group == group.max(), np.arange(rows) % 2, 0).astype(np.float32)
    words = draw.integers(0, 1000, (rows, width))
    return {"tokens": words, "mask": np.ones((rows, width), dtype=bool), "group": group, "reward": reward,
            "pieces": np.char.add(" w", words.astype(str)), "prompt": np.array(["p"] * rows),
            **{name: draw.normal(size=(rows, width)).astype(np.float32)
               for name in ("w", "credit", "logp", "live_logp", "entropy")}}


# -- one group by hand -------------------------------------------------------------------------------------------------


def test_the_values_of_a_token_by_hand(tmp_path: Path) -> None:
    found = data(recorded(tmp_path / "run", {0: two()}))
    (step,) = found["steps"]
    (group,) = step["groups"]
    first, second = group["answers"]
    assert (step["step"], group["group"], group["prompt"]) == (0, 0, "p")
    assert [found["words"][n] for n in first["tokens"]] == ["a", "\n", "b"]
    assert (first["reward"], first["length"], first["extent"], first["given"]) == (1.0, 2, 3, [1])
    # ρ = 0.55/0.5 = 1.1 and 0.2/0.25 = 0.8; w to three digits; what the policy did not choose has no value.
    assert first["values"]["ratio"] == [1.0, None, 1.1]
    assert second["values"] == {"w": [-0.25, -0.123], "A": [-1.0, -1.0], "logp": [-0.693, -1.39], "ratio": [1.0, 0.8]}
    assert [q["key"] for q in found["quantities"]] == ["w", "A", "ratio", "logp"]
    # Steps are (number, start, stop, reward): 0 and 1 alone, so they are right and wrong.
    assert (first["steps"], second["steps"]) == ([[0, 0, 2, 0.0], [1, 2, 3, 1.0]], [[0, 0, 2, 1.0]])
    assert found["graded"] is False
    # Both begin with token 5, where w adds up to 0.25 − 0.25 = 0.
    assert group["tree"] == [[-1, [0, 1], 0, 1, 0.0, 0.0], [0, [0], 1, 3, 0.25, 0.25], [0, [1], 1, 2, -0.123, -0.123]]


def test_steps_that_earn_more_than_right_or_wrong_are_graded(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {0: two() | {"step_reward": np.array([[0.75, 1.0], [1.0, 0.0]])}})
    assert data(run)["graded"] is True


def test_where_tokens_ended_and_other_credits_have_columns_of_their_own(tmp_path: Path) -> None:
    arrays = two()
    after = arrays["logp"] + np.float32(math.log(1.5))
    past = np.where(arrays["mask"], 0.2231, 0.0).astype(np.float32)
    run = recorded(tmp_path / "run", {0: arrays | {
        "after_logp": after, "after_past": past, "clipped": np.array([[True, False, False]] * 2),
        "other_names": np.array(["salt", "x<y"]), "other_credit": np.stack([arrays["credit"], -arrays["credit"]])}})
    found = data(run)
    values = found["steps"][0]["groups"][0]["answers"][0]["values"]
    assert values["after"] == [1.5, None, 1.5]
    assert (values["past"], values["clipped"]) == ([0.223, None, 0.223], [1.0, None, 0.0])
    assert (values["also:salt"], values["also:x<y"]) == ([1.0, None, 1.0], [-1.0, None, -1.0])
    assert {q["key"]: q["name"] for q in found["quantities"]}["also:salt"] == "A by salt"
    assert "class=\"missing\"" not in tokens.section(run).body


def test_a_run_that_asked_is_told_that_it_was_not_kept_and_another_how_to_ask(tmp_path: Path) -> None:
    """Can it fail? The three runs differ in what they asked for, and in whether a kept step was read."""
    said = {}
    for name, config, read in (("never", {}, 0), ("asked", {"also": ["salt"], "probe": "light"}, 0),
                               ("elsewhere", {"also": ["salt"], "probe": "light"}, 1)):
        with Record.create(tmp_path / name, config, {}) as record:
            for step in (0, 1):
                record.append(step, {"rollouts/spent": 2} | ({"overshoot/past": 0.1} if step == read else {}))
            record.save_group(0, two())
            record.save_reading(read, {"gram": np.eye(2)})
        said[name] = str(tokens.section(read_run(tmp_path / name)).body)
    counts = {name: (text.count("an older creditscope did not keep it"), text.count("Get it with"))
              for name, text in said.items()}
    assert counts == {"never": (0, 2), "asked": (2, 0), "elsewhere": (0, 2)}


def test_a_token_without_text_is_shown_by_its_number_and_text_without_tokens_after_them(tmp_path: Path) -> None:
    arrays = two() | {"text": np.array(["a\nb and more", "other"])}
    arrays["pieces"][1, 1] = ""
    first, second = data(recorded(tmp_path / "run", {0: arrays}))["steps"][0]["groups"][0]["answers"]
    assert first["rest"] == " and more"
    assert second["rest"] == ""
    bare = data(recorded(tmp_path / "bare", {0: {k: v for k, v in two().items() if k != "pieces"}}))
    answers = bare["steps"][0]["groups"][0]["answers"]
    assert [bare["words"][n] for n in answers[0]["tokens"]] == ["⟨#5⟩", "⟨#6⟩", "⟨#7⟩"]
    assert answers[0]["rest"] == "a\nb"


def test_a_special_token_is_shown_by_its_name_and_an_empty_prompt_by_a_mark(tmp_path: Path) -> None:
    arrays = two() | {"prompt": np.array(["", ""]), "special_ids": np.array([5, 6, 7]),
                      "special_names": np.array(["<|im_end|>", "<b>", "\u202e"])}
    arrays["pieces"] = np.array([["", "", ""], ["a", "c", ""]])
    found = data(recorded(tmp_path / "run", {0: arrays}))
    group = found["steps"][0]["groups"][0]
    assert [found["words"][n] for n in group["answers"][0]["tokens"]] == ["<|im_end|>", "<b>", "⟨202E⟩"]
    assert group["prompt"] == "⟨empty⟩"
    for odd in ({"special_ids": np.array([5])}, {"special_names": np.array([1.0, 2.0, 3.0])},
                {"special_ids": np.array(5), "special_names": np.array("x")}):
        found = data(recorded(tmp_path / f"odd-{len(list(tmp_path.iterdir()))}", {0: arrays | odd}))
        assert "⟨#5⟩" in found["words"]


# -- odd records -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each("name", sorted(set(two()) - {"tokens", "mask", "group"}))
@each("odd", ["absent", "short", "text", "nan"])
def test_an_array_that_is_absent_or_odd_costs_its_own_number_alone(name: str, odd: str, tmp_path: Path) -> None:
    arrays = two()
    other = {"absent": None, "short": arrays[name][:1], "text": np.full(arrays[name].shape, "x"),
             "nan": np.full(arrays[name].shape, np.nan)}[odd]
    arrays.pop(name)
    found = data(recorded(tmp_path / "run", {0: arrays if other is None else arrays | {name: other}}))
    answers = found["steps"][0]["groups"][0]["answers"]
    assert [answer["extent"] for answer in answers] == [3, 2]
    if name != "credit" and odd != "nan":
        assert answers[1]["values"]["A"] == [-1.0, -1.0]


@pytest.mark.parametrize("name", ["tokens", "mask", "group"])
def test_a_step_without_tokens_is_named_and_the_others_stand(name: str, tmp_path: Path) -> None:
    broken = {k: v for k, v in two().items() if k != name}
    run = recorded(tmp_path / "run", {0: broken, 5: two(), 7: two()})
    assert [step["step"] for step in data(run)["steps"]] == [5, 7]
    assert "2 of 3 kept steps are in this file, all groups of each. Not to be read: step 0." in tokens.section(run).body
    alone = tokens.section(recorded(tmp_path / "alone", {0: broken}))
    assert alone.data is None
    assert "None of the 1 kept steps can be shown" in alone.body


def test_a_damaged_file_is_named_and_a_run_that_kept_nothing_says_how_to_keep(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {0: two(), 3: two()})
    (tmp_path / "run" / "groups" / "000003.npz").write_bytes(b"half")
    assert [step["step"] for step in data(run)["steps"]] == [0]
    assert "Not to be read: step 3." in tokens.section(run).body
    empty = tokens.section(recorded(tmp_path / "empty", {}))
    assert empty.data is None
    assert "creditscope lab train --keep-every 10" in empty.body


def test_what_was_not_recorded_is_said_with_the_command_that_records_it(tmp_path: Path) -> None:
    body = tokens.section(recorded(tmp_path / "run", {0: two()})).body
    assert "--probe light" in body
    assert "--also step_reward" in body


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    arrays = two()
    arrays["w"][0, 0], arrays["live_logp"][0, 0] = np.inf, 1e4
    values = data(recorded(tmp_path / "run", {0: arrays}))["steps"][0]["groups"][0]["answers"][0]["values"]
    assert (values["w"][0], values["ratio"][0]) == (None, None)


@pytest.mark.slow
def test_hostile_text_is_made_visible_and_does_not_leave_its_place(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=evil()>\u202e\ud800"
    pieces = np.array([[evil, "x" * 10**6, "\x00\x07"], ["a", "c", ""]])
    run = recorded(tmp_path / "run", {0: two() | {"prompt": np.array([evil] * 2), "pieces": pieces}})
    found = data(run)
    assert found["words"][0] == "</script><img src=x onerror=evil()>⟨202E⟩⟨D800⟩"
    assert found["words"][1] == "x" * 400 + "… (1,000,000 characters)"
    assert found["words"][2] == "⟨0⟩⟨7⟩"
    assert "evil()" not in page("t", tag("p"), [tokens.section(run)])


# -- what is in the file -----------------------------------------------------------------------------------------------


def test_everything_is_in_the_file_where_it_fits(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {step: many(8, 5, 2, step) for step in range(4)})
    found = tokens.select(run)
    assert found is not None
    assert {step: [g["group"] for g in groups] for step, groups in found.steps.items()} == {
        step: [0, 1, 2, 3] for step in range(4)}
    assert found.note == "4 of 4 kept steps are in this file, all groups of each."


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2_000, 10_000, 30_000, 60_000])
def test_what_is_in_the_file_keeps_to_the_budget_and_spans_the_run(budget: int, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {10 * step: many(24, 12, 4, step) for step in range(15)})
    found = tokens.select(run, budget)
    assert found is not None
    groups = [group for held in found.steps.values() for group in held]
    assert sum(map(tokens.weight, groups)) <= budget
    assert 140 in found.steps
    if len(found.steps) > 1:
        assert next(iter(found.steps)) == 0
    # The one group with mixed rewards, the last, is always among them.
    assert all(held[-1]["group"] == 5 for held in found.steps.values())
    each = len(found.steps[140])
    assert each >= 2 or len(found.steps) == 1
    assert each <= 2 or len(found.steps) == 15
    assert found.note.startswith(f"{len(found.steps)} of 15 kept steps are in this file, ")
    assert each == 6 or f"{each} of 6 groups each" in found.note
    # More room is used: half the budget is not left empty while something is left out.
    if each < 6:
        assert sum(map(tokens.weight, groups)) > budget / 2 or len(groups) <= 2


def test_answers_of_a_group_that_alone_is_too_large_are_cut_and_say_so(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {0: many(2, 3000, 2)})
    found = tokens.select(run, budget=20_000)
    assert found is not None
    (group,) = found.steps[0]
    assert tokens.weight(group) <= 20_000
    for answer in group["answers"]:
        assert answer["extent"] == 3000
        assert 200 < len(answer["tokens"]) == len(answer["values"]["w"]) < 3000


def test_long_answers_of_an_early_step_are_whole_though_the_last_ones_are_short(tmp_path: Path) -> None:
    found = tokens.select(recorded(tmp_path / "run", {0: many(4, 30, 2), 1: many(4, 5, 2)}))
    assert found is not None
    assert [len(held[0]["answers"][0]["tokens"]) for held in found.steps.values()] == [30, 5]


def test_the_newest_step_that_can_be_read_stands_where_the_budget_bears_one(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {step: many(8, 200, 4, step) for step in range(3)})
    (tmp_path / "run" / "groups" / "000002.npz").write_bytes(b"half")
    found = tokens.select(run, budget=8_000)
    assert found is not None
    assert (list(found.steps), found.unread) == ([1], [2])
    assert found.note == ("1 of 3 kept steps are in this file, 1 of 2 groups each, those with mixed rewards first. "
                          "Not to be read: step 2.")


@pytest.mark.slow
def test_five_hundred_steps_fit_into_the_share_of_the_page(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {10 * step: many(64, 40, 8, step) for step in range(50)})
    assert len(packed({"tokens": tokens.section(run).data})) < 1_150_000


def test_evenly_spaced_steps_include_both_ends() -> None:
    assert spaced(list(range(0, 500, 10)), 12)[0] == 0
    assert spaced(list(range(0, 500, 10)), 12)[-1] == 490
    for count in range(2, 50):
        found = spaced(list(range(50)), count)
        assert len(set(found)) == count
        gaps = np.diff(found)
        assert gaps.max() - gaps.min() <= 1


# -- colours -----------------------------------------------------------------------------------------------------------


def grounds() -> Iterator[tuple[str, str, str]]:
    """(ground, name, colour) of every tint, and `ink`, in light and in dark."""
    for ground, part in (("light", 0), ("dark", 1)):
        ink = re.findall(r"--ink: (#\w{6})", asset("page.css"))[part]
        yield ground, "ink", ink
        for name in [f"{side}-{level}" for side in ("up", "down") for level in range(1, 6)]:
            yield ground, name, re.findall(rf"--{name}: (#\w{{6}})", asset("tokens.css"))[part]


def luminance(colour: str) -> float:
    """WCAG 2: L = 0.2126 R + 0.7152 G + 0.0722 B of the linear channels."""
    channels = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_by_hand() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the well-known grey that just fails


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_ink_reads_on_every_tint_and_a_stronger_tint_is_further_from_the_ground(ground: str) -> None:
    colours = {name: colour for where, name, colour in grounds() if where == ground}
    assert len(colours) == 11
    for name, colour in colours.items():
        assert name == "ink" or contrast(colours["ink"], colour) >= 4.5, name
    for side in ("up", "down"):
        against = [contrast(colours["ink"], colours[f"{side}-{level}"]) for level in range(1, 6)]
        assert against == sorted(against, reverse=True)
        assert len(set(against)) == 5
