"""Metrics of equal answers, dead groups, lengths and prompts: they need texts, rewards and groups, no model.

Texts are compared by the hash of their token ids, 128 bits: one hash per row, no loop over tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from creditscope.batch.groups import Groups
from creditscope.batch.rollouts import Rollouts
from creditscope.runs import schema


def text_hashes(tokens: Tensor, inside: Tensor) -> Tensor:
    """(B, 2) int64, on the CPU: equal where the ids `tokens` (B, T) at the True places of `inside` are the same.

    >>> a, b, c = text_hashes(torch.tensor([[5, 0], [5, 7], [0, 5]]), torch.tensor([[1, 0], [1, 0], [1, 1]]).bool())
    >>> a.equal(b), a.equal(c)
    (True, False)
    """
    ids, keep = tokens.cpu().numpy(), inside.cpu().numpy()
    rows = b"".join(hashlib.blake2b(row[kept].tobytes(), digest_size=16).digest()
                    for row, kept in zip(ids, keep, strict=True))
    return torch.frombuffer(bytearray(rows), dtype=torch.int64).view(-1, 2)


def numbered(hashes: Tensor) -> Tensor:
    """(B,) int64: one number for each distinct row of `hashes` (B, 2)."""
    first: dict[tuple[int, ...], int] = {}
    return torch.tensor([first.setdefault(tuple(row), len(first)) for row in hashes.tolist()])


def answer_numbers(rollouts: Rollouts) -> Tensor:
    """(B,) int64, on the CPU: equal where answers are the same tokens, up to the last chosen one."""
    column = torch.arange(rollouts.tokens.shape[1], device=rollouts.tokens.device)
    return numbered(text_hashes(rollouts.tokens, column < rollouts.extents[:, None]))


def equal_pairs(answer: Tensor, group: Tensor) -> int:
    """#(i < j: one group, y_i = y_j) = Σ_c n_c (n_c − 1)/2 over the classes c of equal answers in a group.

    >>> equal_pairs(torch.tensor([3, 3, 3, 3]), torch.tensor([0, 0, 0, 1]))
    3
    """
    return _pairs(torch.stack([group, answer], dim=1))


def equal_pairs_apart(answer: Tensor, group: Tensor, reward: Tensor) -> int:
    """#(i < j: one group, y_i = y_j, r_i ≠ r_j): the pairs of equal answers less those whose rewards are equal too.

    >>> equal_pairs_apart(torch.tensor([3, 3, 3]), torch.tensor([0, 0, 0]), torch.tensor([1.0, 0.0, 0.0]))
    2
    """
    _, value = torch.unique(reward, return_inverse=True)
    return equal_pairs(answer, group) - _pairs(torch.stack([group, answer, value], dim=1))


def _pairs(classes: Tensor) -> int:
    """Pairs of equal rows of a (B, k) tensor."""
    _, counts = torch.unique(classes, dim=0, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def distinct_answers(answer: Tensor, group: Tensor) -> Tensor:
    """(P,) #distinct answers of each group, groups in ascending order of their ids.

    >>> distinct_answers(torch.tensor([3, 3, 4, 3]), torch.tensor([0, 0, 0, 1])).tolist()
    [2, 1]
    """
    classes = torch.unique(torch.stack([group, answer], dim=1), dim=0)
    counts: Tensor = torch.unique(classes[:, 0], return_counts=True)[1]
    return counts


def length_reward_correlation(length: Tensor, reward: Tensor, group: Tensor) -> float | None:
    """Σ(L − L̄_g)(r − r̄_g) / √(Σ(L − L̄_g)² · Σ(r − r̄_g)²); None where lengths or rewards differ in no group.

    >>> length_reward_correlation(torch.tensor([1, 2, 3]), torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0, 0, 0]))
    0.5
    """
    return group_correlation(length, reward, group)


def group_correlation(one: Tensor, other: Tensor, group: Tensor) -> float | None:
    """corr of two (B,) columns inside groups, pooled over them; None where one of them differs in no group."""
    groups = Groups(group)
    # The mean of equal floats may miss them by rounding, of which no correlation may be made.
    x, y = ((value.double() - groups.mean(value.double())).masked_fill(groups.unanimous(value.double()), 0.0)
            for value in (one, other))
    if not bool(x.any()) or not bool(y.any()):
        return None
    x, y = x / x.abs().max(), y / y.abs().max()
    return float((x @ y) / ((x @ x) * (y @ y)).sqrt())


def gold_metrics(gold: Tensor, reward: Tensor, group: Tensor) -> dict[str, Any]:
    """The verifier's mean reward beside a learned one, and their correlation inside groups.

    >>> gold_metrics(torch.tensor([1.0, 0.0]), torch.tensor([0.2, 0.3]), torch.tensor([0, 0]))
    {'reward/gold_mean': 0.5, 'reward/gold_correlation': -1.0}
    """
    out: dict[str, Any] = {schema.REWARD_GOLD_MEAN: float(gold.double().mean())}
    found = group_correlation(reward.cpu(), gold.cpu(), group.cpu())
    return out if found is None else out | {schema.REWARD_GOLD_CORRELATION: found}


def answer_metrics(answer: Tensor, reward: Tensor, group: Tensor, length: Tensor | None = None,
                   truncated: Tensor | None = None) -> dict[str, Any]:
    """The metrics of a batch from (B,) columns: the answer's number, reward, group, and where they are known its
    length and whether it was cut.

    >>> found = answer_metrics(torch.tensor([0, 0]), torch.ones(2), torch.zeros(2).long())
    >>> found["reward/equal_texts"], found["signal/distinct_texts"], found["signal/dead_one_text"]
    (1, 0.5, 1.0)
    """
    answer, reward, group = answer.cpu(), reward.cpu(), group.cpu()
    groups, distinct = Groups(group), distinct_answers(answer, group)
    out: dict[str, Any] = {schema.REWARD_EQUAL_TEXTS: equal_pairs(answer, group),
                           schema.REWARD_EQUAL_TEXTS_APART: equal_pairs_apart(answer, group, reward),
                           schema.SIGNAL_DISTINCT_TEXTS: int(distinct.sum()) / len(answer)}
    dead = groups.unanimous(reward)
    if bool(dead.any()):
        ids = torch.unique(groups.index[dead])
        out |= {schema.SIGNAL_DEAD_REWARD: float(reward[dead].double().mean()),
                schema.SIGNAL_DEAD_ONE_TEXT: float((distinct[ids] == 1).double().mean())}
    whole = torch.ones_like(dead) if truncated is None else ~truncated.cpu()
    found = None
    if length is not None and bool(whole.any()):
        found = length_reward_correlation(length.cpu()[whole], reward[whole], group[whole])
    return out if found is None else out | {schema.LENGTH_REWARD_CORRELATION: found}


class PromptsSeen:
    """The prompts of a run so far, by a hash of each.

    >>> seen = PromptsSeen()
    >>> seen.add(["1+1=", "2+2="]); seen.add(["1+1=", "3+3="]); seen.metrics()
    {'prompts/seen': 3, 'prompts/passes': 1.3333333333333333}
    """

    def __init__(self) -> None:
        self._groups, self._seen = 0, set[int]()

    def add(self, prompts: Iterable[Any]) -> None:
        """One entry per group, of any hashable kind."""
        for prompt in prompts:
            self._groups += 1
            self._seen.add(hash(prompt))

    def metrics(self) -> dict[str, Any]:
        """`prompts/seen` and `prompts/passes` = groups / distinct prompts; nothing before the first group."""
        if not self._seen:
            return {}
        return {schema.PROMPTS_SEEN: len(self._seen), schema.PROMPTS_PASSES: self._groups / len(self._seen)}
