"""A learned reward: a causal model with a linear head of one label, s(x, y_≤t) = ⟨v, h_t⟩ after each token.

    s(x, y) = s after the last token       P(y_c preferred to y_r | x) = σ(s(x, y_c) − s(x, y_r))       (Bradley–Terry)

The folder is one of `AutoModelForSequenceClassification`, of `creditscope lab reward` or of any other trainer, and is
untrusted: safetensors alone, no code. The model reads the policy's own token ids, so both number their tokens alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from creditscope.errors import CreditscopeError
from creditscope.files.memory import enough_memory
from creditscope.policy.loading import Policy, load_folder
from creditscope.policy.logp import model_inputs

ROWS = 64
"""Answers that are scored at once."""


@dataclass
class RewardModel:
    """A model of sequence classification with one label, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found

    @property
    def head(self) -> nn.Linear:
        found: nn.Linear = self.model.score
        return found

    @torch.no_grad()
    @enough_memory("scoring answers by the reward model", "lower --prompts, --group or --max-tokens")
    def prefix_scores(self, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, T+1) s(x), then s(x, y_≤t) after each token; past the last chosen token, the score of the answer."""
        self._check_room(prompts, tokens.shape[1])
        parts = [self.head(self.states(prompts[at:at + ROWS], tokens[at:at + ROWS], mask[at:at + ROWS])).squeeze(2)
                 for at in range(0, len(tokens), ROWS)]
        found = torch.cat(parts).float()
        bad = (~torch.isfinite(found)).any(dim=1)
        if bool(bad.any()):
            raise CreditscopeError(f"the reward model {self.name!r} gives a score that is not finite to "
                                   f"{int(bad.sum())} of {len(found)} answers, row {int(bad.nonzero()[0])} first; "
                                   f"train it again with a smaller learning rate")
        return found

    def scores(self, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor) -> Tensor:
        """(B,) s(x, y), as the class itself pools it."""
        return self.prefix_scores(prompts, tokens, mask)[:, -1]

    def states(self, prompts: Sequence[Sequence[int]], tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, T+1, d) h after the prompt and after each token.

        transformers pools at the last token that is not `pad_token_id`. A token of that id, such as an end token that
        is also the padding, therefore has the state of the token before it; so has every column past the answer.
        """
        inputs = model_inputs(prompts, tokens, mask, self.device)
        hidden: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state[:, -tokens.shape[1] - 1:]
        ids, there = (inputs[name][:, -tokens.shape[1] - 1:] for name in ("input_ids", "attention_mask"))
        counts = there.bool() if self.model.config.pad_token_id is None \
            else there.bool() & (ids != self.model.config.pad_token_id)
        column = torch.arange(ids.shape[1], device=ids.device)
        at = torch.where(counts, column, 0).cummax(dim=1).values
        return hidden.gather(1, at[..., None].expand_as(hidden))

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def check_tokens(self, policy: Policy) -> None:
        """Refuse a model whose token ids mean other texts than the policy's."""
        mine, theirs = self.tokenizer.get_vocab(), policy.tokenizer.get_vocab()
        apart = sorted((token for token in theirs if mine.get(token) != theirs[token]), key=lambda token: theirs[token])
        if apart:
            raise CreditscopeError(f"the tokenizers differ: token {apart[0]!r} has id {theirs[apart[0]]} in "
                                   f"{policy.name!r} and {mine.get(apart[0], 'none')} in the reward model "
                                   f"{self.name!r} ({len(apart):,} of {len(theirs):,} differ); take a reward model "
                                   f"that was trained on a model with this tokenizer")

    def _check_room(self, prompts: Sequence[Sequence[int]], width: int) -> None:
        room = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        longest = max(len(prompt) for prompt in prompts) + width
        if longest > room:
            raise CreditscopeError(f"the reward model {self.name!r} has a context of {room} tokens, and a prompt with "
                                   f"its answer has {longest}; lower --max-tokens, or take a model with more room")


@enough_memory("loading the reward model", "choose a smaller one")
def load_reward_model(folder: str | Path, policy: Policy) -> RewardModel:
    """The reward model of a folder, in float32 on the policy's device, frozen; it must fit the policy's tokens."""
    check_reward_folder(folder)
    model, tokenizer = load_folder(Path(folder), "SequenceClassification", torch.float32)
    check_head(str(folder), model)
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise CreditscopeError(f"the reward model {str(folder)!r} has weights that are not finite, in {name}; "
                                   f"train it again with a smaller --lr, or bring an undamaged copy")
    found = RewardModel(str(folder), model.to(policy.device).eval().requires_grad_(False), tokenizer)
    found.check_tokens(policy)
    return found


def check_reward_folder(folder: str | Path) -> None:
    if not Path(folder).is_dir():
        raise CreditscopeError(f"--reward model:{folder}: there is no such folder; creditscope lab reward makes one "
                               f"from pairs")


def check_head(name: str, model: Any) -> None:
    """Refuse a model without a linear head of one label on every token."""
    labels = model.config.num_labels
    if labels != 1:
        raise CreditscopeError(f"the reward model {name!r} has {labels} labels; a reward is one number per answer: "
                               f"train one with num_labels=1, or with creditscope lab reward")
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise CreditscopeError(f"the reward model {name!r} is a {type(model).__name__}, which has no linear head "
                               f"`score` on every token; take one of a causal model, or train it with creditscope lab "
                               f"reward")


def fresh_reward_model(policy: Policy, body: bool = False) -> RewardModel:
    """The policy's model with a head of zeros in place of its output embedding: s = 0 for every text.

    `body`: whether its other weights will be trained too.
    """
    from transformers import AutoModelForSequenceClassification

    settings = copy.deepcopy(policy.model.config)
    settings.num_labels = 1
    if settings.pad_token_id in policy.end:
        settings.pad_token_id = None  # the end token would not be pooled
    try:
        model = AutoModelForSequenceClassification.from_config(settings)
    except ValueError:
        raise CreditscopeError(f"transformers has no sequence classification for {type(policy.model).__name__}; take "
                               f"another model for the reward") from None
    check_head(policy.name, model)
    wide = torch.promote_types(next(policy.model.parameters()).dtype, torch.float32)
    model.base_model.load_state_dict(policy.model.base_model.state_dict())
    nn.init.zeros_(model.score.weight)
    if model.score.bias is not None:
        nn.init.zeros_(model.score.bias)
    model.base_model.requires_grad_(body)
    return RewardModel(policy.name, model.to(policy.device, wide).eval(), policy.tokenizer)
