"""Equal answers, dead groups, lengths and prompts: each number derived by hand, the fast path against plain loops."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from creditscope.batch import answers
from creditscope.batch.rollouts import Rollouts
from creditscope.runs import schema


def test_the_metrics_of_two_groups_by_hand() -> None:
    # Group 7: answers a a b with rewards 1 0 1, lengths 2 2 5. Group 3: answers a a with reward 0.5, lengths 2 2.
    answer, group = torch.tensor([0, 0, 1, 0, 0]), torch.tensor([7, 7, 7, 3, 3])
    reward, length = torch.tensor([1.0, 0.0, 1.0, 0.5, 0.5]), torch.tensor([2, 2, 5, 2, 2])
    found = answers.answer_metrics(answer, reward, group, length)
    # Pairs of equal answers: one in each group; that of group 7 has rewards 1 and 0. Distinct: (2 + 1) of 5.
    assert found[schema.REWARD_EQUAL_TEXTS] == 2
    assert found[schema.REWARD_EQUAL_TEXTS_APART] == 1
    assert found[schema.SIGNAL_DISTINCT_TEXTS] == 3 / 5
    # Group 3 is dead, with reward 0.5 and one text.
    assert found[schema.SIGNAL_DEAD_REWARD] == 0.5
    assert found[schema.SIGNAL_DEAD_ONE_TEXT] == 1.0
    # L − 3 = −1 −1 2, r − 2/3 = 1/3 −2/3 1/3: Σxy = −1/3 + 2/3 + 2/3 = 1, Σx² = 6, Σy² = 6/9, so 1/√4.
    assert found[schema.LENGTH_REWARD_CORRELATION] == pytest.approx(0.5)
    # Without the long answer lengths are equal.
    cut = answers.answer_metrics(answer, reward, group, length, torch.tensor([False, False, True, False, False]))
    assert schema.LENGTH_REWARD_CORRELATION not in cut
    assert cut[schema.SIGNAL_DISTINCT_TEXTS] == 3 / 5


def test_what_does_not_exist_is_absent() -> None:
    live = answers.answer_metrics(torch.tensor([0, 1]), torch.tensor([0.0, 1.0]), torch.tensor([0, 0]),
                                  torch.tensor([1, 2]), torch.tensor([True, True]))
    assert set(live) == {schema.REWARD_EQUAL_TEXTS, schema.REWARD_EQUAL_TEXTS_APART, schema.SIGNAL_DISTINCT_TEXTS}
    # 0.1 has no exact mean over 3: a rounding error is no spread of rewards.
    same = torch.full((3,), 0.1, dtype=torch.float64)
    assert answers.length_reward_correlation(torch.tensor([1, 2, 3]), same, torch.zeros(3).long()) is None
    assert answers.PromptsSeen().metrics() == {}


def test_groups_of_one_length_or_one_reward_count_in_the_sums_of_the_other() -> None:
    # Group 0: L 1 3, r 0 1 → Σxy = 1, Σx² = 2, Σy² = 1/2. Group 1 is dead: L 1 5 adds 8 to Σx² alone. 1/√(10·½).
    found = answers.length_reward_correlation(torch.tensor([1, 3, 1, 5]), torch.tensor([0.0, 1.0, 1.0, 1.0]),
                                              torch.tensor([0, 0, 1, 1]))
    assert found == pytest.approx(1 / 5**0.5)


@pytest.mark.parametrize("seed", range(5))
def test_equal_answers_are_those_of_plain_loops_over_the_texts(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, width = 24, 3
    tokens = torch.randint(0, 2, (rows, width), generator=random)
    lengths = torch.randint(0, width + 1, (rows,), generator=random)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]
    reward = torch.randint(0, 3, (rows,), generator=random).float() / 2
    group = torch.randint(0, 4, (rows,), generator=random)
    rollouts = Rollouts(tokens=tokens, mask=mask, logp=torch.zeros(mask.shape), reward=reward, group=group)
    texts = [tuple(row[:n]) for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    found = answers.answer_metrics(answers.answer_numbers(rollouts), reward, group)
    pairs = [(i, j) for i, j in combinations(range(rows), 2) if group[i] == group[j] and texts[i] == texts[j]]
    assert found[schema.REWARD_EQUAL_TEXTS] == len(pairs)
    assert found[schema.REWARD_EQUAL_TEXTS_APART] == sum(bool(reward[i] != reward[j]) for i, j in pairs)
    distinct = {(int(g), text) for g, text in zip(group, texts, strict=True)}
    assert found[schema.SIGNAL_DISTINCT_TEXTS] == len(distinct) / rows


def test_padding_is_no_part_of_an_answer_and_a_chosen_0_is() -> None:
    rollouts = Rollouts(tokens=torch.tensor([[5, 9], [5, 8], [5, 0]]), group=torch.tensor([0, 0, 0]),
                        mask=torch.tensor([[True, False], [True, False], [True, True]]), reward=torch.zeros(3),
                        logp=torch.zeros(3, 2))
    assert answers.answer_numbers(rollouts).tolist() == [0, 0, 1]
