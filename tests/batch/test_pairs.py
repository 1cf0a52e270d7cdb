"""Preference pairs are read as TRL reads them, and every fault is one sentence with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditscope import CreditscopeError
from creditscope.batch.pairs import Pair, pair_of, read_pairs, write_pairs
from each import each

USER = {"role": "user", "content": "2 + 2 ="}
FOUR, FIVE = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
GOOD = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}


@pytest.mark.slow
@given(st.lists(st.builds(Pair, *[st.text(min_size=1)] * 3).filter(lambda pair: pair.chosen != pair.rejected),
                min_size=1))
def test_the_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair]) -> None:
    path = tmp_path_factory.mktemp("pairs") / "new" / "pairs.jsonl"
    write_pairs(path, pairs)
    assert read_pairs(path) == pairs


@each(("row", "pair"), [
    (GOOD, Pair("2 + 2 =", " 4", " 5")),
    (GOOD | {"source": "arithmetic", "score": 3}, Pair("2 + 2 =", " 4", " 5")),
    ({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, Pair("2 + 2 =", " 4", " 5")),
    ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, Pair("2 + 2 =", "4", "5")),
    ({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, Pair("2 + 2 =", "4", "5")),
    # A prompt that only repeats what the conversations begin with: TRL takes theirs.
    ({"prompt": "ignored", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}, Pair("2 + 2 =", "4", "5")),
    ({"prompt": None, "chosen": "ab", "rejected": "ac"}, Pair("a", "b", "c")),
    # One answer is the beginning of the other: neither side may be empty.
    ({"chosen": "It is", "rejected": "It is not"}, Pair("It i", "s", "s not")),
])
def test_both_kinds_of_prompt_and_of_text_are_read(row: dict[str, Any], pair: Pair) -> None:
    assert pair_of(row) == pair


@each(("line", "message"), [
    ("{", "not valid JSON: Expecting property name enclosed in double quotes at column 2; one JSON object"),
    ('{"chosen": "a', "not valid JSON: Unterminated string starting at column 12; one JSON object"),
    ("[1]", r"a JSON array begins here; one JSON object {...} per line is needed"),
    ("[", r"a JSON array begins here; one JSON object {...} per line is needed"),
    ("1", r"one JSON object {...} per line is needed, got int"),
    (json.dumps(GOOD | {"rejected": " 4"}), "'chosen' and 'rejected' are equal, so nothing is preferred"),
    (json.dumps({"prompt": "a", "chosen": "b"}), "'rejected' is missing; .* it has prompt, chosen"),
    (json.dumps(GOOD | {"chosen": ""}), "'chosen' is \"\"; give it a text, or leave this line out"),
    (json.dumps(GOOD | {"chosen": None}), "'chosen' is null; give it a text, or leave this line out"),
    (json.dumps({"prompt": [USER], "chosen": [FOUR | {"content": 4}], "rejected": [FIVE]}),
     "'chosen' must be text, or a list of messages .* got int as 'content' of message 1"),
    (json.dumps({"chosen": [USER, {"role": "assistant"}], "rejected": [USER, FIVE]}),
     "got nothing as 'content' of message 2"),
    (json.dumps(GOOD | {"chosen": 4}), "'chosen' must be text, or a list of messages .* got int"),
    (json.dumps(GOOD | {"prompt": 4}), "'prompt' must be text, or a list of messages .* got int"),
    (json.dumps(GOOD | {"chosen": [FOUR]}), "must both be text, or both lists of messages"),
    (json.dumps({"chosen": ["4"], "rejected": ["5"]}),
     "'chosen' must be text, or a list of messages .* got str as message 1"),
    (json.dumps({"chosen": "a", "rejected": "b"}), "have no common beginning; give the prompt"),
    (json.dumps({"chosen": [USER, FOUR, USER, FOUR], "rejected": [USER, FOUR, USER, FIVE]}),
     "'prompt' has messages of 'user', 'assistant', 'user', and one of 'user' is read"),
    (json.dumps({"prompt": [USER], "chosen": [USER, FOUR], "rejected": [USER, FIVE]}),
     "'chosen' has messages of 'user', 'assistant', and one of 'assistant' is read"),
    (json.dumps({"prompt": [USER], "chosen": [FOUR], "rejected": [FOUR | {"name": "other"}]}), "are equal"),
    (json.dumps({"prompt": [USER], "chosen": " 4", "rejected": " 5"}),
     "'prompt' is a list of messages, and 'chosen' and 'rejected' are text; give all three as text, or all as "),
    (json.dumps({"prompt": "2 + 2 =", "chosen": [FOUR], "rejected": [FIVE]}),
     "'prompt' is text, and 'chosen' and 'rejected' are messages that have no common beginning; give all three"),
    (json.dumps(GOOD | {"chosen": "\ud800"}), "'chosen' has half a character"),
    ('{"chosen": ' + "[" * 200, "not valid JSON"),
    ('{"chosen": "a", "chosen": "b"}', "'chosen' stands twice in one object"),
])
def test_a_fault_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(CreditscopeError, match=f"pairs.jsonl, line 3: .*{message}"):
        read_pairs(path)


@each(("text", "message"), [("", "is empty"), ("\n \n", "has only blank lines; expected one pair per line")])
def test_a_file_without_pairs_says_so(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(CreditscopeError, match=message):
        read_pairs(path)


def test_a_name_that_no_file_can_have_is_told_in_a_sentence() -> None:
    with pytest.raises(CreditscopeError, match="no such file; give a file of preference pairs"):
        read_pairs("x" * 300)


def test_a_file_with_too_many_pairs_or_characters_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pairs.jsonl"
    write_pairs(path, [Pair("p", "a", "b")] * 3)
    for name, most in (("MOST_PAIRS", 2), ("MOST_CHARACTERS", 8)):
        with monkeypatch.context() as patch:
            patch.setattr(f"creditscope.batch.pairs.{name}", most)
            with pytest.raises(CreditscopeError, match="line 3: more than"):
                read_pairs(path)


def test_reading_pairs_loads_no_torch() -> None:
    from cli import loaded

    assert not loaded("from creditscope.batch.pairs import read_pairs") & {"torch", "transformers", "trl"}


# -- conformance: TRL's own code gives the same split ----------------------------------------------------------------

TEXT = st.text(alphabet="ab ", min_size=1, max_size=8)


@pytest.mark.slow
@pytest.mark.conformance
@given(TEXT, TEXT, TEXT)
def test_an_implicit_prompt_ends_where_trl_has_it(prompt: str, one: str, other: str) -> None:
    extract = pytest.importorskip("trl.data_utils").maybe_extract_prompt
    row = {"chosen": prompt + one, "rejected": prompt + other}
    if one == other:
        return
    theirs = extract(row)
    if theirs["prompt"]:
        assert pair_of(row) == Pair(theirs["prompt"], theirs["chosen"], theirs["rejected"])
    else:  # a space alone: TRL goes on with an empty prompt, which no policy can continue
        with pytest.raises(CreditscopeError, match="no common beginning"):
            pair_of(row)


@pytest.mark.conformance
@each("row", [
    GOOD, {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
    {"prompt": "copied", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
])
def test_after_a_chat_template_the_texts_are_those_of_trl(row: dict[str, Any]) -> None:
    """TRL puts the messages into the template and splits the result; a policy wraps Pair.prompt as one user message."""
    data = pytest.importorskip("trl.data_utils")
    from transformers import AutoTokenizer

    from creditscope.policy.loading import TINY

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
                               "{% if add_generation_prompt %}<assistant>{% endif %}")
    theirs = data.maybe_apply_chat_template(data.maybe_extract_prompt(row), tokenizer)
    ours = pair_of(row)
    if data.is_conversational({"chosen": row["chosen"]}):
        wrapped = tokenizer.apply_chat_template([{"role": "user", "content": ours.prompt}], tokenize=False,
                                                add_generation_prompt=True)
        ours = Pair(wrapped, ours.chosen + "</assistant>", ours.rejected + "</assistant>")
    assert ours == Pair(theirs["prompt"], theirs["chosen"], theirs["rejected"])
