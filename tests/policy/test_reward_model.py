"""A learned reward: scores as transformers' own class pools them, and folders that cannot be one are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mini
from creditscope import CreditscopeError
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.reward_model import RewardModel, fresh_reward_model, load_reward_model
from each import each

TOKENS = torch.tensor([[5, 9, 2], [7, 2, 0], [4, 8, 6]])
MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
PROMPTS = [[11, 12], [13], [14, 15, 16]]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(mini.model(), device="cpu")


def made(policy: Policy, pad: int | None = 0) -> RewardModel:
    """A reward model with a random head."""
    reward = fresh_reward_model(policy)
    reward.model.config.pad_token_id = pad
    nn.init.normal_(reward.head.weight, generator=torch.Generator().manual_seed(3))
    return reward


def alone(reward: RewardModel, row: int, length: int) -> Tensor:
    """The score by the class itself, of one row without padding."""
    ids = torch.tensor([[*PROMPTS[row], *TOKENS[row, :length].tolist()]])
    with torch.no_grad():
        found: Tensor = reward.model(input_ids=ids, use_cache=False).logits[0, 0]
    return found


@each("pad", [0, None, 2])
def test_the_score_of_every_prefix_is_what_the_class_gives_that_prefix_alone(policy: Policy, pad: int | None) -> None:
    """Conformance with transformers: left-padded rows in one batch, one forward pass for all prefixes. Where the end
    token (2) is also the padding, the class pools at the token before it."""
    reward = made(policy, pad)
    found = reward.prefix_scores(PROMPTS, TOKENS, MASK)
    for row in range(3):
        for length in range(int(MASK[row].sum()) + 1):
            torch.testing.assert_close(found[row, length], alone(reward, row, length), rtol=1e-4, atol=1e-5)
    assert found[1, 3] == found[1, 2]  # past the end stands the score of the answer
    assert torch.equal(reward.scores(PROMPTS, TOKENS, MASK), found[:, -1])


def test_a_fresh_head_gives_every_text_the_score_0(policy: Policy) -> None:
    assert not fresh_reward_model(policy).prefix_scores(PROMPTS, TOKENS, MASK).any()


def test_a_saved_model_scores_as_before(policy: Policy, tmp_path: Path) -> None:
    reward = made(policy)
    reward.save(tmp_path / "reward")
    loaded = load_reward_model(tmp_path / "reward", policy)
    assert torch.equal(loaded.scores(PROMPTS, TOKENS, MASK), reward.scores(PROMPTS, TOKENS, MASK))
    assert not any(p.requires_grad for p in loaded.model.parameters())


# -- folders that cannot be a reward ---------------------------------------------------------------------------------


def changed(folder: Path, name: str, **values: Any) -> None:
    found = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(found | values))


def two_labels(folder: Path, reward: RewardModel) -> None:
    changed(folder, "config.json", id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "score.weight": weights["score.weight"].repeat(2, 1)}, folder / "model.safetensors")


def a_pickle(folder: Path, reward: RewardModel) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def not_a_number(folder: Path, reward: RewardModel) -> None:
    nn.init.constant_(reward.head.weight, torch.nan)
    reward.save(folder)


def no_head(folder: Path, reward: RewardModel) -> None:
    shutil.rmtree(folder)
    shutil.copytree(mini.model(), folder)


def other_tokens(folder: Path, reward: RewardModel) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(found))


def code(folder: Path, reward: RewardModel) -> None:
    changed(folder, "config.json", auto_map={"AutoModelForSequenceClassification": "evil.Model"}, model_type="evil")
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")


@each(("spoil", "message"), [
    (lambda folder, reward: shutil.rmtree(folder), "--reward model:.*reward: there is no such folder; creditscope lab "
                                                   "reward makes one"),
    (two_labels, "has 2 labels; a reward is one number per answer: train one with num_labels=1"),
    (a_pickle, "has its weights in pytorch_model.bin, a pickle, which can run code"),
    (no_head, "lack 1 of its parameters, score.weight first.*a model for sequence classification"),
    (other_tokens, "the tokenizers differ: token .* has id 97 in .* and 98 in the reward model"),
    (code, "cannot load the model"),
])
def test_a_folder_that_is_no_reward_model_is_refused_in_one_sentence(tmp_path: Path, spoil: Any, message: str) -> None:
    policy = load_policy(mini.model(), device="cpu")
    reward, folder = made(policy), tmp_path / "reward"
    reward.save(folder)
    spoil(folder, reward)
    with pytest.raises(CreditscopeError, match=message):
        load_reward_model(folder, policy)
    assert not (folder / "ran").exists()


def test_a_missing_head_is_told_by_our_sentence_without_transformers_table(
        policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_head(tmp_path, made(policy))
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        with pytest.raises(CreditscopeError, match=r"lack 1 of its parameters, score\.weight first"):
            load_reward_model(tmp_path, policy)
    finally:
        transformers.logging.set_verbosity(before)
    assert caplog.text == ""


def test_scores_that_are_no_numbers_are_refused_in_one_sentence(policy: Policy, tmp_path: Path) -> None:
    reward = made(policy)
    nn.init.constant_(reward.head.weight, 3e38)  # finite, and its products with the states are not
    with pytest.raises(CreditscopeError, match="gives a score that is not finite to 3 of 3 answers, row 0 first"):
        reward.scores(PROMPTS, TOKENS, MASK)
    not_a_number(tmp_path / "reward", reward)
    with pytest.raises(CreditscopeError, match=r"has weights that are not finite, in score\.weight"):
        load_reward_model(tmp_path / "reward", policy)


def test_an_answer_beyond_the_context_is_refused(policy: Policy) -> None:
    reward = made(policy)
    reward.model.config.max_position_embeddings = 5
    with pytest.raises(CreditscopeError, match="has a context of 5 tokens, and a prompt with its answer has 6"):
        reward.scores(PROMPTS, TOKENS, MASK)


def test_a_class_without_a_head_on_every_token_is_refused(tmp_path: Path, policy: Policy) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    bert = BertForSequenceClassification(BertConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1,
                                                    num_attention_heads=2, intermediate_size=8, num_labels=1))
    bert.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CreditscopeError, match="is a BertForSequenceClassification, which has no linear head `score`"):
        load_reward_model(tmp_path, policy)
