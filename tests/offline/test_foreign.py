"""Answers that five more trainers dumped with their own code: groups, steps, rewards, tokens, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from creditscope.errors import CreditscopeError
from creditscope.offline.batches import Reader, SampleBatch
from creditscope.offline.files import Source
from each import each

DUMPS = Path(__file__).parent / "dumps"
# Of the first two steps of tests/diagnosis/make_trainers/draw.py eight answers each, in two groups: 2 and 5 are right.
CASES = {  # folder -> (format, --reward-field, steps)
    "skyrl/global_step_1_evals": ("skyrl", None, [None]), "areal": ("areal", None, [0, 1]),
    "prime_rl": ("prime_rl", None, [1, 2]), "prime_rl/rollouts": ("prime_rl", "correct", [1, 2]),
    "nemo_rl": ("nemo_rl", None, [1, 2]), "swift": ("swift", "accuracy", [1, 2])}


def batches(path: Path, reward_field: str | None = None) -> tuple[Reader, list[SampleBatch]]:
    reader = Reader(Source(path), reward_field=reward_field)
    return reader, list(reader.batches())


@each("name", CASES)
def test_a_dump_has_the_groups_steps_and_rewards_that_were_written(name: str) -> None:
    shape, reward_field, steps = CASES[name]
    reader, found = batches(DUMPS / name, reward_field)
    assert reader.shape == shape
    assert [batch.step for batch in found] == steps
    assert [sum(sample.reward for sample in batch.samples) for batch in found] == [2.0, 5.0][:len(steps)]
    for batch in found:
        keys = [sample.key for sample in batch.samples]
        assert [keys.count(key) for key in dict.fromkeys(keys)] == [4, 4]


def test_tokens_and_log_probs_of_the_sampler_are_kept_where_a_dump_has_them() -> None:
    nemo = batches(DUMPS / "nemo_rl")[1][0].samples[0]
    line = json.loads((DUMPS / "nemo_rl" / "train_data_step1.jsonl").read_text().splitlines()[0])
    # Three tokens of the prompt, four of the answer, one of padding: input_lengths is 7.
    assert (nemo.prompt_tokens, nemo.fields["tokens"]) == (line["token_ids"][0][:3], line["token_ids"][0][3:7])
    assert nemo.fields["logp"] == line["generation_logprobs"][0][3:7]
    prime = batches(DUMPS / "prime_rl")[1][0].samples[0]
    assert prime.text == "".join(map(chr, prime.fields["tokens"]))  # its ids are characters
    assert prime.prompt_tokens == [ord(letter) for letter in "What is 0?"]
    assert set(prime.fields["logp"]) == {-0.5}


def episode(**trace: Any) -> dict[str, Any]:
    nodes = [{"message": {"role": "user", "content": "1+1="}, "sampled": False, "token_ids": [1, 2],
              "mask": [False] * 2},
             {"parent": 0, "message": {"role": "assistant", "content": "3"}, "sampled": True, "token_ids": [9, 3],
              "mask": [False, True], "logprobs": [-0.25]},
             {"parent": 0, "message": {"role": "assistant", "content": "2"}, "sampled": True, "token_ids": [9, 4],
              "mask": [False, True], "logprobs": [-0.75]}]
    held = {"nodes": nodes, "rewards": {"a": {"score": 1.0, "weight": 2.0}, "b": {"score": 0.5}}}
    return {"traces": [{**held, **trace}], "group": {"id": "g"}, "run": {"work": {"step": 3}}}


def test_an_episode_is_read_along_its_last_branch_and_its_rewards_are_weighted(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text(json.dumps(episode()) + "\n")
    sample = batches(tmp_path)[1][0].samples[0]
    assert sample.reward == 1.0 * 2.0 + 0.5
    assert (sample.text, sample.prompt_tokens, sample.fields["tokens"]) == ("2", [1, 2, 9], [4])
    assert (sample.fields["logp"], sample.batch, sample.group) == ([-0.75], 3, "g")
    assert batches(tmp_path, "b")[1][0].samples[0].reward == 0.5


def test_a_score_per_token_of_skyrl_is_summed(tmp_path: Path) -> None:
    row = {"input_prompt": "1+1=", "output_response": "2", "score": [0.0, 0.25, 0.5], "stop_reason": "stop"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert batches(tmp_path)[1][0].samples[0].reward == 0.75


SWIFT = {"step": ["1", "1"], "prompt": ["p", "p"], "completion": ["a", "b"], "r": [1.0, 0.0], "advantages": [1.0, -1.0]}
NEMO = {"token_ids": [[1, 2, 3]], "token_loss_mask": [[0, 1, 1]], "generation_logprobs": [[0.0, -1.0, -1.0]],
        "rewards": [1.0], "input_lengths": [3]}


@pytest.mark.parametrize(("row", "says"), [
    ({**SWIFT, "q": [1.0, 0.0]}, "several columns that may be rewards: r, q"),
    ({**SWIFT, "prompt": ["p"]}, "one entry for each of 2 completions"),
    ({**SWIFT, "r": [None, 1.0]}, "completion 0 has no reward"),
    ({**SWIFT, "step": ["x", "x"]}, "'step'"),
    ({**NEMO, "token_loss_mask": [[0, 1]]}, "one entry for each of 3 tokens"),
    ({**NEMO, "token_loss_mask": [[0, 0, 0]]}, "there is no answer"),
    ({**NEMO, "rewards": ["x"]}, "'rewards'"),
    (episode(rewards={}), "a trace without rewards"),
    (episode(nodes=[{"parent": 0, "token_ids": [], "message": {}}]), "no tree"),
    (episode(nodes=[{"token_ids": [1], "mask": [True, True], "message": {}}]), "2 entries for 1 tokens"),
    (episode(agent={"trainable": False}), "without a trace of a trained agent"),
    ({"traces": 5, "group": 1}, "not a shape of rollouts"),
    ({"task_id": {}, "tail_version": 1, "reward": 1.0, "prompt": "p", "completion": "c"}, "a group is named by"),
    ({"input_prompt": "p", "output_response": 7, "score": 1.0}, "'output_response' must be a text")])
def test_a_fault_in_a_dump_is_one_sentence_with_its_line(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(CreditscopeError, match=r"a\.jsonl, line 1: ") as error:
        batches(tmp_path)
    assert says in str(error.value)


def test_a_step_of_swift_that_is_logged_again_is_read_once(tmp_path: Path) -> None:
    again = {**SWIFT, "step": ["2", "2"]}
    (tmp_path / "completions.jsonl").write_text(json.dumps(SWIFT) + "\n" + json.dumps(again) + "\n")
    reader, found = batches(tmp_path)
    assert (len(found), reader.repeats) == (1, 1)
