"""Training of a learned reward on preference pairs, by Bradley and Terry's likelihood.

    min_v −1/N Σ_n log σ(s(x_n, c_n) − s(x_n, r_n))        c_n the preferred answer, r_n the other

The head starts at 0, so the first loss is log 2. Held-out prompts are those of `tasks.jsonl.in_test`, by their hash:
pairs of one prompt are never split. Dropout is off, as in the lab's training.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.pairs import Pair, read_pairs
from creditscope.errors import CreditscopeError
from creditscope.files.memory import enough_memory
from creditscope.files.writing import check_new_folder
from creditscope.lab.evaluate import wilson
from creditscope.lab.warmup import Example, whole
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.logp import padded
from creditscope.policy.reward_model import ROWS, RewardModel, fresh_reward_model
from creditscope.policy.scoring import encode_exactly
from creditscope.runs.reward_plan import RewardPlan
from creditscope.tasks.jsonl import HELD_OUT, in_test


@dataclass(frozen=True)
class Encoded:
    """Both answers to a prompt in token ids, each with the end token."""

    chosen: Example
    rejected: Example


def train_reward(plan: RewardPlan, out: Path,
                 versions: dict[str, Any]) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Train and write the model's folder, whole or not at all. Yields each step's loss; returns reward.json."""
    start = time.perf_counter()
    check_new_folder(out)
    pairs = read_pairs(plan.pairs, "PAIRS")
    policy = load_policy(plan.model, device=plan.device, dtype=plan.dtype, chat=plan.chat, seed=plan.seed)
    kept, held = split(pairs, plan.pairs)
    learn, test = (encode_pairs(policy, part, plan.pairs) for part in (kept, held))
    reward = fresh_reward_model(policy, body=plan.train == "all")
    optimizer = torch.optim.AdamW([{"params": list(part.parameters()), "lr": rate} for part, rate in (
        (reward.head, plan.head_rate), (reward.model.base_model, plan.rate))], weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    # Under a head the states do not change: they are computed once.
    states = states_of(reward, learn) if plan.train == "head" else None
    steps = plan.epochs * math.ceil(len(learn) / plan.batch)
    losses: list[float] = []
    for step, rows in enumerate(batches(len(learn), plan.batch, plan.epochs, plan.seed)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        losses.append(descend(reward, optimizer, [learn[i] for i in rows],
                              None if states is None else states[torch.tensor(rows, device=states.device)]))
        yield {"step": step + 1, "steps": steps, "loss": losses[-1]}
    notes = {"settings": asdict(plan) | {"lr": plan.rate}, "versions": versions, "pairs": len(learn), "losses": losses,
             "train": measure_pairs(reward, learn), "held_out": measure_pairs(reward, test),
             "seconds": time.perf_counter() - start}
    with whole(out) as folder:
        reward.save(folder)
        (folder / "reward.json").write_text(json.dumps(notes, indent=2, allow_nan=False) + "\n")
    return notes


def preference_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−1/N Σ_n log σ(s_c − s_r), of scores (N,) each.

    >>> round(float(preference_loss(torch.tensor([1.0]), torch.tensor([0.0]))), 4)     # log(1 + e⁻¹)
    0.3133
    """
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def split(pairs: Sequence[Pair], where: str) -> tuple[list[Pair], list[Pair]]:
    """The pairs to learn from, and about HELD_OUT of the prompts to measure on."""
    kept, held = ([pair for pair in pairs if in_test(pair.prompt) is out] for out in (False, True))
    if not kept or not held:
        raise CreditscopeError(f"{where}: of {len(pairs)} pairs {len(held)} are held out, {HELD_OUT:.0%} of the "
                               f"prompts by their hash; both parts need one, so give pairs of more prompts")
    return kept, held


def encode_pairs(policy: Policy, pairs: Sequence[Pair], file: str = "") -> list[Encoded]:
    """Prompts as the sampler reads them, answers as it ends them. An error names the pair's line in the file."""
    room = getattr(policy.model.config.get_text_config(decoder=True), "max_position_embeddings", math.inf)
    found = []
    for pair in pairs:
        where = f"{file}, line {pair.line}" if pair.line else f"the pair with the prompt {pair.prompt[:60]!r}"
        prompt = policy.encode(pair.prompt)
        if not prompt:
            raise CreditscopeError(f"{where}: its prompt {pair.prompt[:60]!r} has no token in the tokenizer of "
                                   f"{policy.name!r}; leave the pair out, or give it another prompt")
        if has_unknown(policy, prompt):
            raise CreditscopeError(f"{where}: its prompt {pair.prompt[:60]!r} has text that the tokenizer of "
                                   f"{policy.name!r} does not know; leave the pair out, or give it another 'prompt' "
                                   f"(where there is none, it is what both answers begin with)")
        sides = [Example(prompt, [*encode_exactly(policy, text, f"{where}, {name!r}"), policy.end[0]])
                 for name, text in (("chosen", pair.chosen), ("rejected", pair.rejected))]
        longest = len(prompt) + max(len(side.answer) for side in sides)
        if longest > room:
            raise CreditscopeError(f"{where}: prompt and answer have {longest} tokens, over the context of {room} of "
                                   f"model {policy.name!r}; leave the pair out, or take a model with more room")
        found.append(Encoded(*sides))
    return found


def has_unknown(policy: Policy, ids: Sequence[int]) -> bool:
    """Whether ids hold the token for unknown text, where the tokenizer has one for nothing else."""
    known = policy.tokenizer
    special = {known.bos_token_id, known.eos_token_id, known.pad_token_id}
    return known.unk_token_id not in {None, *special} and known.unk_token_id in ids


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Rows of each batch: every epoch shuffles all of them."""
    rng = random.Random(f"reward/{seed}")
    for _ in range(epochs):
        order = rng.sample(range(count), count)
        yield from (order[at:at + size] for at in range(0, count, size))


def answer_states(reward: RewardModel, examples: Sequence[Example]) -> Tensor:
    """(N, d) h after the last token of each answer."""
    tokens, mask = padded([example.answer for example in examples], reward.device)
    return reward.states([example.prompt for example in examples], tokens, mask)[:, -1]


@torch.no_grad()
def states_of(reward: RewardModel, pairs: Sequence[Encoded]) -> Tensor:
    """(N, 2, d) h of both answers."""
    parts = [torch.stack([answer_states(reward, [pair.chosen for pair in part]),
                          answer_states(reward, [pair.rejected for pair in part])], dim=1)
             for part in (pairs[at:at + ROWS] for at in range(0, len(pairs), ROWS))]
    return torch.cat(parts)


@enough_memory("passing the pairs through the model", "lower --batch, or use --train head")
def descend(reward: RewardModel, optimizer: torch.optim.Optimizer, pairs: Sequence[Encoded],
            states: Tensor | None) -> float:
    """One step of the optimiser on a batch; the loss before it. `states` (N, 2, d), where they are known."""
    optimizer.zero_grad(set_to_none=True)
    if states is None:
        states = torch.stack([answer_states(reward, [pair.chosen for pair in pairs]),
                              answer_states(reward, [pair.rejected for pair in pairs])], dim=1)
    chosen, rejected = reward.head(states).squeeze(2).unbind(dim=1)
    loss = preference_loss(chosen, rejected)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise CreditscopeError(f"the loss is {value}; nothing was written. Lower --lr, now "
                               f"{optimizer.param_groups[0]['lr']:g}")
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return value


@torch.no_grad()
def measure_pairs(reward: RewardModel, pairs: Sequence[Encoded]) -> dict[str, float]:
    """Loss, share of pairs in order and its 95 % interval: #(s_c > s_r)/N + ½ #(s_c = s_r)/N."""
    chosen, rejected = reward.head(states_of(reward, pairs)).squeeze(2).unbind(dim=1)
    right = float((chosen > rejected).sum()) + 0.5 * float((chosen == rejected).sum())
    low, high = wilson(right, len(pairs))
    return {"pairs": len(pairs), "loss": float(preference_loss(chosen, rejected)), "accuracy": right / len(pairs),
            "low": low, "high": high}
