"""Each kind of log means what its writer meant; what is not a log is told in one sentence with its line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditscope import CreditscopeError, Rollouts, advantage
from creditscope.methods.find import find
from creditscope.offline.batches import Reader, SampleBatch
from creditscope.offline.dumps import SHAPES, Sample, recognise
from creditscope.offline.files import Source, complain

DUMPS = Path(__file__).parent / "dumps"
COMPLETIONS = Path(__file__).parents[2] / "examples" / "completions"  # what TRL logged
ROW = {"prompt": "1 + 1 =", "response": " 2", "reward": 1.0}
CHAT = [{"role": "user", "content": "1 + 1 ="}]


def read(path: Path, **settings: Any) -> list[SampleBatch]:
    return list(Reader(Source(path), **settings).batches())


def convert(shape: str, row: Mapping[str, Any], reward_field: str | None = None) -> list[Sample]:
    return SHAPES[shape].convert(row, reward_field, "x, line 1", partial(complain, "x, line 1"))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- TRL -------------------------------------------------------------------------------------------------------------


@pytest.mark.conformance
def test_our_advantage_of_what_trl_logged_is_the_advantage_that_trl_logged() -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    for step, batch in zip((1, 3), read(COMPLETIONS), strict=True):
        logged = pyarrow.read_table(COMPLETIONS / f"completions_{step:05d}.parquet").to_pydict()
        names: dict[object, int] = {}
        group = torch.tensor([names.setdefault(sample.key, len(names)) for sample in batch.samples])
        reward = torch.tensor([sample.reward for sample in batch.samples])
        assert reward.tolist() == logged["right"]
        ours = advantage(find("trl_grpo"), reward, group)
        assert ours.tolist() == pytest.approx(logged["advantage"], abs=1e-6)
        assert len(names) == 4  # R = 4 of 16


@pytest.mark.slow
def test_a_generation_that_trl_logs_again_at_its_second_step_is_read_once() -> None:
    pytest.importorskip("pyarrow")
    reader = Reader(Source(COMPLETIONS))
    assert [batch.step for batch in reader.batches()] == [1, 3]
    assert reader.repeats == 1
    # Taken up after step 1, the digest of its batch still tells that step 2 is the same.
    first, third = Reader(Source(COMPLETIONS)).batches()
    again = Reader(Source(COMPLETIONS))
    assert [batch.digest for batch in again.batches(first.place, first.digest)] == [third.digest]
    assert again.repeats == 1


@pytest.mark.slow
def test_two_reward_functions_of_trl_must_be_named_and_are_summed() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(CreditscopeError, match="row 1: several columns that may be rewards: right, words; give "
                                               "--reward-field right,words"):
        read(DUMPS / "trl_two_rewards")
    both, = read(DUMPS / "trl_two_rewards", reward_field="right,words")
    one, = read(DUMPS / "trl_two_rewards", reward_field="right")
    for a, b in zip(both.samples, one.samples, strict=True):
        assert a.reward == pytest.approx(b.reward + 0.01 * len((a.text or "").split()))
    with pytest.raises(CreditscopeError, match="unknown --reward-field 'rihgt'; did you mean 'right'"):
        read(DUMPS / "trl_two_rewards", reward_field="rihgt")


def test_a_reward_function_of_trl_that_returned_nothing_adds_nothing() -> None:
    row = {"step": 1, "prompt": "a", "completion": "b", "one": float("nan"), "two": 0.5, "advantage": 0.0}
    sample, = convert("trl", row, "one,two")
    assert sample.reward == 0.5
    with pytest.raises(CreditscopeError, match="no reward: one gave no number"):
        convert("trl", row, "one")


def test_a_chat_that_trl_logged_is_its_messages_and_what_was_said() -> None:
    row = {"step": 1, "prompt": CHAT, "completion": [{"role": "assistant", "content": "2"}], "right": 1.0,
           "advantage": 0.0}
    sample, = convert("trl", row)
    assert (sample.prompt, sample.text, sample.batch) == (CHAT, "2", 1)


@pytest.mark.slow
def test_what_parquet_can_hold_beside_text_and_numbers_is_read_or_told(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    asked = [{"role": "user", "content": "1 + 1 =", "at": datetime(2026, 1, 1), "raw": b"\xff"}]
    rows = [{"step": 1.0, "prompt": asked, "completion": "2", "right": Decimal(reward), "advantage": 0.0}
            for reward in ("0.25", "1.00")]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    batch, = read(tmp_path / "x.parquet")
    assert [(sample.reward, sample.batch) for sample in batch.samples] == [(0.25, 1), (1.0, 1)]
    assert len({sample.key for sample in batch.samples}) == 1
    assert len(batch.digest) == 32
    late = arrow.table({"at": arrow.array([10**18], arrow.timestamp("us"))})  # the year 33658
    parquet.write_table(late, tmp_path / "y.parquet")
    with pytest.raises(CreditscopeError, match=r"y.parquet: not a parquet file that can be read: "):
        read(tmp_path / "y.parquet")


# -- verl ------------------------------------------------------------------------------------------------------------


def test_verl_s_uid_and_equal_prompts_give_the_same_groups() -> None:
    by_uid, by_prompt = read(DUMPS / "verl"), read(DUMPS / "verl_ray")
    # As text "10.jsonl" stands before "9.jsonl"; as steps it does not.
    assert [batch.step for batch in by_uid] == [batch.step for batch in by_prompt] == [9, 10]
    for a, b in zip(by_uid, by_prompt, strict=True):
        assert [s.text for s in a.samples] != [s.text for s in b.samples]  # rows of a group are apart in the second

        def rewards(batch: SampleBatch) -> list[tuple[object, list[float]]]:
            found: dict[object, list[float]] = {}
            for sample in batch.samples:
                found.setdefault(sample.key, []).append(sample.reward)
            return sorted((len(r), sorted(r)) for r in found.values())

        assert rewards(a) == rewards(b)
        assert len(rewards(a)) == 3


@pytest.mark.parametrize(("uid", "group"), [
    ("train-9-0_3_0", "train-9-0"), ("a_b_7_0", "a_b"), ("c1f0-77", "c1f0-77"), ("x_y_z", "x_y_z"), (12, "12")])
def test_verl_s_uid_names_the_sample_before_rollout_and_output(uid: object, group: str) -> None:
    sample, = convert("verl", {"input": "a", "output": "b", "score": 1, "step": 3, "uid": uid})
    assert sample.group == group


def test_verl_s_reward_may_be_another_field() -> None:
    first = read(DUMPS / "verl_ray", reward_field="acc")[0].samples
    assert [s.reward for s in first] == [s.reward for s in read(DUMPS / "verl_ray")[0].samples]


# -- OpenAI ----------------------------------------------------------------------------------------------------------


def choice(text: str, **more: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}} | more


@pytest.mark.parametrize("row", [
    {"messages": CHAT, "choices": [choice("2", reward=1), choice("3", reward=0)]},
    {"messages": CHAT, "choices": [choice("2"), choice("3")], "reward": [1, 0]},
    {"request": {"messages": CHAT}, "response": {"choices": [choice("2"), choice("3")]}, "reward": [True, False]},
    {"body": {"messages": CHAT}, "response": {"body": {"choices": [choice("2", reward=1.0), choice("3", reward=0)]}}},
])
def test_the_choices_of_one_request_are_a_group(row: dict[str, Any]) -> None:
    assert recognise(row, None, "x") == "openai"
    a, b = convert("openai", row)
    assert (a.text, a.reward, b.text, b.reward) == ("2", 1.0, "3", 0.0)
    assert a.prompt == b.prompt == CHAT
    assert a.key == b.key == "x, line 1"


def test_requests_with_one_choice_are_grouped_by_their_messages(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "2 + 2 ="}]
    rows = [{"messages": m, "choices": [choice("2")], "reward": 1} for m in (CHAT, other, CHAT)]
    batch, = read(write(tmp_path / "log.jsonl", *rows))
    a, b, c = (sample.key for sample in batch.samples)
    assert a == c != b


def test_logprobs_spell_tokens_and_token_ids_name_them() -> None:
    spelled = {"content": [{"token": " 1", "logprob": -0.5}, {"token": "2", "logprob": -0.25}]}
    row = {"messages": CHAT, "choices": [choice(" 12", logprobs=spelled)], "reward": 1}
    sample, = convert("openai", row)
    assert sample.spelled
    assert (sample.fields["logp"], sample.fields["pieces"]) == ([-0.5, -0.25], [" 1", "2"])
    row["choices"] = [choice(" 12", logprobs=spelled, token_ids=[5, 6])]
    row["prompt_token_ids"] = [3, 4]
    sample, = convert("openai", row)
    assert (sample.fields["tokens"], sample.prompt_tokens, sample.spelled) == ([5, 6], [3, 4], False)


# -- anybody's -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [
    ROW, {"prompt": "1 + 1 =", "completion": " 2", "reward": 1}, {"prompt": "1 + 1 =", "text": " 2", "reward": True}])
def test_prompt_answer_and_reward_are_enough(row: dict[str, Any]) -> None:
    assert recognise(row, None, "x") == "creditscope"
    sample, = convert("creditscope", row)
    assert (sample.prompt, sample.text, sample.reward, sample.key) == ("1 + 1 =", " 2", 1.0, "1 + 1 =")


@pytest.mark.parametrize("name", ["group", "prompt_id", "uid"])
def test_a_group_that_is_named_counts_before_the_prompt(name: str) -> None:
    a, = convert("creditscope", ROW | {name: "g"})
    b, = convert("creditscope", ROW | {name: "g", "prompt": "other"})
    assert a.key == b.key == "g"


def test_step_as_a_number_is_the_batch_and_as_a_list_the_step_of_each_token() -> None:
    number, = convert("creditscope", ROW | {"step": 7})
    assert (number.batch, number.fields) == (7, {})
    labels, = convert("creditscope", ROW | {"tokens": [1, 2], "step": [0, 1], "batch": 7})
    assert (labels.batch, labels.fields["step"]) == (7, [0, 1])


def test_a_field_that_nobody_reads_is_named(tmp_path: Path) -> None:
    reader = Reader(Source(write(tmp_path / "log.jsonl", ROW | {"logps": [1.0], "model": "x"}, ROW)))
    assert len(list(reader.batches())) == 1
    assert reader.ignored == ["logps", "model"]


def test_the_reward_s_field_may_have_any_name(tmp_path: Path) -> None:
    file = write(tmp_path / "log.jsonl", {"prompt": "a", "response": "b", "is_correct": False})
    assert read(file, reward_field="is_correct")[0].samples[0].reward == 0.0
    with pytest.raises(CreditscopeError, match=r"line 1: not a shape of rollouts that is known here; its fields are "
                                               r"'prompt', 'response', 'is_correct'\. Known are trl: .* verl: input, "
                                               r"output, score, step; .*--reward-field"):
        read(file)


# -- hostile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "row", "message"), [
    ("creditscope", ROW | {"reward": "1"}, "'reward' must be float, got '1'"),
    ("creditscope", ROW | {"reward": None}, "'reward' must be float, got None"),
    ("creditscope", ROW | {"reward": 10**400}, "does not fit a float"),
    ("creditscope", ROW | {"prompt": [1, 2]}, "the prompt must be a text or a list of messages"),
    ("creditscope", ROW | {"prompt": []}, "the prompt must be a text or a list of messages"),
    ("creditscope", ROW | {"response": {"a": 1}}, "'response' must be a text or a list of messages, got a dict of 1"),
    ("creditscope", ROW | {"group": 1.5}, "a group is named by a text or an integer, got 1.5"),
    ("creditscope", ROW | {"step": "7"}, "'step' must be int, got '7'"),
    ("creditscope", ROW | {"step": 7.5}, "'step' must be int, got 7.5"),
    ("creditscope", ROW | {"step": math.nan}, "'step' must be int, got nan"),
    ("creditscope", ROW | {"reward": Decimal("NaN")}, "'reward' must be finite, got nan"),
    ("creditscope", ROW | {"step": 2**70}, "'step' must fit 64 bits"),
    ("creditscope", ROW | {"logp": [-1.0]}, "'logp' has one entry per token, but there are no 'tokens'"),
    ("creditscope", ROW | {"tokens": [1], "logp": [-1.0, -1.0]}, "'logp' has 2 entries for 1 tokens"),
    ("creditscope", ROW | {"prompt_tokens": "1"}, "'prompt_tokens' must be a list of int"),
    ("creditscope", {"prompt": "a", "reward": 1}, "neither an answer (response, completion, text) nor its tokens"),
    ("trl", {"step": 1.5, "prompt": "a", "completion": "b", "r": 1.0, "advantage": 0}, "'step' must be int"),
    ("trl", {"step": 1, "prompt": "a", "completion": "b", "advantage": 0}, "no column of a reward; give --reward"),
    ("verl", {"input": "a", "output": 3, "score": 1}, "'output' must be a text"),
    ("verl", {"input": "a", "output": "b", "score": 1, "uid": [1]}, "a group is named by a text or an integer"),
    ("openai", {"choices": [choice("a", reward=1)]}, "choices without the messages of their request"),
    ("openai", {"messages": CHAT, "choices": []}, "'choices' must be a list of objects, at least one"),
    ("openai", {"messages": CHAT, "choices": [1]}, "'choices' must be a list of objects"),
    ("openai", {"messages": CHAT, "choices": [choice("a")] * 2, "reward": [1]}, "'reward' has 1 entries for 2 choices"),
    ("openai", {"messages": CHAT, "choices": [choice("a")] * 2, "reward": 1}, "choice 0 has no 'reward'; put one into"),
    ("openai", {"messages": CHAT, "choices": [choice("a", logprobs={"content": [1]})], "reward": 1},
     "'logprobs' must hold a list of objects with token and logprob"),
    ("openai", {"messages": CHAT, "choices": [choice("a", logprobs={"content": [{"token": "a"}]})], "reward": 1},
     "'logp[0]' must be float, got None"),
])
def test_a_fault_is_told_with_its_line(shape: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(CreditscopeError) as told:
        convert(shape, row)
    assert str(told.value).startswith("x, line 1: ")
    assert message in str(told.value)


NAMES = st.sampled_from(["prompt", "response", "completion", "text", "reward", "group", "uid", "step", "tokens", "logp",
                         "input", "output", "score", "advantage", "messages", "choices", "message", "content", "role",
                         "logprobs", "token", "logprob", "token_ids", "body", "request", "mask", "step_reward", "r"])
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
                    max_leaves=12)


@given(st.dictionaries(NAMES, JSON, max_size=8), st.sampled_from([None, "r", "reward,r"]))
def test_no_object_whatever_ends_in_anything_but_samples_or_our_own_error(row: dict[str, Any],
                                                                         reward_field: str | None) -> None:
    try:
        shape = recognise(row, reward_field, "x, line 1")
        found = convert(shape, row, reward_field)
    except CreditscopeError as error:
        told, found = str(error), []
    else:
        told = ""
        hash(tuple(sample.key for sample in found))
    assert bool(found) != (told.startswith("x, line 1: ") and "\n" not in told)
    assert all(isinstance(sample.reward, float) and isinstance(sample.text, str | None) for sample in found)


def test_a_batch_of_samples_is_a_batch_of_rollouts() -> None:
    from creditscope.offline.assemble import assemble

    samples = [s for reward in (1.0, 0.0) for s in convert("creditscope", ROW | {
        "reward": reward, "tokens": [1, 2], "logp": [-0.5, -1.0]})]
    found = assemble(samples)
    assert isinstance(found.rollouts, Rollouts)
    assert found.rollouts.group.tolist() == [0, 0]
    assert (found.has_tokens, found.has_logp) == (True, True)
