"""The tree of shared prefixes: who shares what, what a node is worth, and the two credits made of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, Rollouts
from creditscope.batch.groups import Groups
from creditscope.credit.prefix_share import prefix_share
from creditscope.credit.prefix_tree import prefix_tree
from creditscope.credit.prefixes import node_values, shared
from creditscope.credit.tools import Tools
from creditscope.objective.advantages import token_advantage
from makers import make

D = torch.float64
PLAIN = METHODS["p1_grpo"]


def answers(rows: list[list[int]], reward: list[float], group: list[int] | None = None) -> Rollouts:
    """Rollouts with these tokens; 0 is padding."""
    width = max(map(len, rows))
    batch = make(reward, group or [0] * len(rows), [len(row) for row in rows], width=width)
    return replace(batch, tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]))


@st.composite
def bushes(draw: st.DrawFn, holes: bool = True, end: int = 0) -> Rollouts:
    """Groups of 1 to 5 answers of few symbols, so that many share; rows in any order, any ids, text of others inside.

    With `end` each answer closes with that symbol, so that none is the beginning of another.
    """
    ids = draw(st.lists(st.integers(-9, 9), min_size=1, max_size=3, unique=True))
    group = draw(st.permutations([g for g in ids for _ in range(draw(st.integers(1, 5)))]))
    rows = [draw(st.lists(st.integers(1, 2), min_size=0 if end else 1, max_size=5)) + [end] * bool(end) for _ in group]
    batch = answers(rows, [draw(st.sampled_from([0., .5, 1.])) for _ in group], group)
    if not holes:
        return batch
    keep = torch.tensor(draw(st.lists(st.booleans(), min_size=batch.mask.numel(), max_size=batch.mask.numel())))
    mask = batch.mask & keep.view_as(batch.mask)
    mask[0, 0] = True
    return replace(batch, mask=mask)


@given(bushes())
def test_siblings_and_what_they_share_are_those_of_a_loop(batch: Rollouts) -> None:
    sibling, common = shared(batch)
    tokens, ends, group = batch.tokens.tolist(), batch.extents.tolist(), batch.group.tolist()
    for i in range(len(batch)):
        mates = [j for j in range(len(batch)) if group[j] == group[i]]
        expected = {}
        for j in mates:
            pairs = list(zip(tokens[i][: ends[i]], tokens[j][: ends[j]], strict=False))
            expected[j] = next((t for t, (a, b) in enumerate(pairs) if a != b), len(pairs))
        found = dict(zip(sibling[i].tolist(), common[i].tolist(), strict=True))
        assert {j: c for j, c in found.items() if j >= 0} == expected
        assert found.get(-1, -1) == -1
        assert sorted(j for j in sibling[i].tolist() if j >= 0) == mates, "each once"


def by_dictionary(batch: Rollouts, value: Tensor) -> tuple[Tensor, Tensor]:
    """Every prefix of every answer as a key, with the values of the answers that begin with it."""
    nodes: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    paths = [(int(g), tuple(row[: int(end)])) for g, row, end in
             zip(batch.group, batch.tokens.tolist(), batch.extents, strict=True)]
    for (g, path), v in zip(paths, value.tolist(), strict=True):
        for t in range(len(path) + 1):
            nodes.setdefault((g, path[:t]), []).append(v)
    mean, count = torch.zeros(2, len(batch), batch.tokens.shape[1] + 1, dtype=D)
    for i, (g, path) in enumerate(paths):
        for t in range(mean.shape[1]):
            here = nodes[g, path[:t]] if t <= len(path) else [float(value[i])]
            mean[i, t], count[i, t] = sum(here) / len(here), len(here)
    return mean, count


@given(bushes(), st.integers(0, 99))
def test_node_values_are_those_of_a_dictionary_of_prefixes(batch: Rollouts, seed: int) -> None:
    value = torch.randn(len(batch), generator=torch.Generator().manual_seed(seed), dtype=D)
    (mean, count), (slow_mean, slow_count) = node_values(batch, value), by_dictionary(batch, value)
    torch.testing.assert_close(mean, slow_mean, rtol=0, atol=1e-14)
    assert torch.equal(count, slow_count)


@given(bushes(holes=False, end=3))
def test_the_tree_telescopes_to_the_reward_minus_the_groups_mean(batch: Rollouts) -> None:
    # Equal answers must have equal rewards, as verifiers give them: reward by what the answer says.
    reward = torch.tensor([sum(row) % 3 / 2 for row in batch.tokens.tolist()], dtype=D)
    batch = replace(batch, reward=reward)
    total = prefix_tree(PLAIN, batch, Tools()).sum(dim=1)
    torch.testing.assert_close(total, reward - Groups(batch.group).mean(reward), rtol=0, atol=1e-14)


def test_an_answer_that_is_the_beginning_of_another_gets_the_value_of_the_node_where_it_ends() -> None:
    # V(∅) = ½, V(1) = mean(1, 0, 1) = ⅔, V(1 2) = mean(1, 0) = ½, V(1 2 3) = 0; rows: [1 2], [1 2 3], [1 3], [2].
    batch = answers([[1, 2], [1, 2, 3], [1, 3], [2]], [1, 0, 1, 0])
    expected = torch.tensor([[1 / 6, -1 / 6, 0], [1 / 6, -1 / 6, -.5], [1 / 6, 1 / 3, 0], [-.5, 0, 0]], dtype=D)
    torch.testing.assert_close(prefix_tree(PLAIN, batch, Tools()), expected, rtol=0, atol=1e-15)


def test_identical_answers_get_exactly_zero() -> None:
    found = prefix_tree(METHODS["grpo"], answers([[1, 2, 3]] * 7, [0.1] * 7), Tools())
    assert not bool(found.any())


def test_answers_that_part_at_once_have_all_their_credit_on_the_first_token() -> None:
    batch = answers([[1, 4, 4], [2, 4], [3, 4, 4]], [1, 0, .5])  # mean ½; what follows is equal and counts for nothing
    assert prefix_tree(PLAIN, batch, Tools()).tolist() == [[.5, 0, 0], [-.5, 0, 0], [0, 0, 0]]


def test_answers_that_part_late_have_their_credit_on_the_token_where_they_part() -> None:
    batch = answers([[4, 4, 1, 4], [4, 4, 2, 4]], [1, 0])
    assert prefix_tree(PLAIN, batch, Tools()).tolist() == [[0, 0, .5, 0], [0, 0, -.5, 0]]


def test_text_that_others_wrote_is_part_of_the_prefix_and_earns_nothing() -> None:
    # The tool's answer, 7 or 8, tells the siblings apart: it is worth ±½, but nobody chose it.
    batch = answers([[1, 7, 2], [1, 8, 2]], [1, 0])
    batch = replace(batch, mask=torch.tensor([[True, False, True]] * 2))
    assert not bool(prefix_tree(PLAIN, batch, Tools()).any())
    assert node_values(batch, batch.reward)[0].tolist() == [[.5, .5, 1, 1], [.5, .5, 0, 0]]


def test_groups_do_not_share() -> None:
    batch = answers([[1, 2], [1, 2], [1, 3], [1, 3]], [1, 0, 0, 1], [0, 1, 0, 1])
    assert prefix_tree(PLAIN, batch, Tools()).tolist() == [[0, .5], [0, -.5], [0, -.5], [0, .5]]


def test_prefix_share_by_hand() -> None:
    # A = ½, ½, −½, −½. The first token is shared by 3 of them, the second by 2.
    batch = answers([[1, 2, 3], [1, 2], [1, 3], [2, 2]], [1, 1, 0, 0])
    expected = torch.tensor([[1 / 6, .25, .5], [1 / 6, .25, 0], [-1 / 6, -.5, 0], [-.5, -.5, 0]], dtype=D)
    found = prefix_share(PLAIN, batch, Tools()).masked_fill(~batch.mask, 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


@given(bushes(holes=False))
def test_the_shares_of_those_who_share_a_token_sum_to_their_mean_advantage(batch: Rollouts) -> None:
    method = PLAIN.but(name="x", lone="zero")
    found, own = prefix_share(method, batch, Tools()), token_advantage(method, batch)[:, 0]
    for i, t in batch.mask.nonzero().tolist():
        prefix = batch.tokens[i, : t + 1]
        mates = [j for j in range(len(batch)) if batch.group[j] == batch.group[i] and bool(batch.mask[j, t])
                 and torch.equal(batch.tokens[j, : t + 1], prefix)]
        torch.testing.assert_close(found[mates, t].sum(), own[mates].mean(), rtol=0, atol=1e-14)


@given(bushes(), st.randoms(use_true_random=False))
def test_permuting_the_rows_permutes_the_credit_of_prefixes(batch: Rollouts, random: Random) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    method = PLAIN.but(name="x", lone="zero")
    for estimate in (prefix_tree, prefix_share):
        moved = estimate(method, batch.rows(torch.tensor(order)), Tools())
        torch.testing.assert_close(moved, estimate(method, batch, Tools())[order], rtol=0, atol=1e-14)
