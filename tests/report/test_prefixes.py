"""The prefix tree by hand, and against the tree that torch makes of the same rollouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from creditscope.batch.rollouts import Rollouts
from creditscope.exact.shared_prefix import nodes
from creditscope.report.prefixes import Line, node_index, totals, tree
from each import each


def test_a_tree_by_hand() -> None:
    # a b c | a b d | e: the first two share a b, with w = 2 − 3 = −1 at a and 2 − 2 = 0 at b.
    tokens = np.array([[1, 2, 3], [1, 2, 4], [5, 0, 0]])
    mask = np.array([[True, True, True], [True, True, True], [True, False, False]])
    w = np.array([[2.0, 2.0, 2.0], [-3.0, -2.0, -3.0], [0.5, 9.0, 9.0]])
    assert tree(tokens, mask, w) == [
        Line(parent=-1, rows=(0, 1), start=0, stop=2, low=-1.0, high=0.0),
        Line(parent=-1, rows=(2,), start=0, stop=1, low=0.5, high=0.5),
        Line(parent=0, rows=(0,), start=2, stop=3, low=2.0, high=2.0),
        Line(parent=0, rows=(1,), start=2, stop=3, low=-3.0, high=-3.0)]


def test_a_row_that_ends_inside_another_ends_the_line_that_both_pass() -> None:
    tokens = np.array([[1, 2, 3], [1, 0, 0]])
    mask = np.array([[True, True, True], [True, False, False]])
    lines = tree(tokens, mask, np.ones((2, 3)))
    assert [(line.rows, line.start, line.stop, line.low) for line in lines] == [((0, 1), 0, 1, 2.0), ((0,), 1, 3, 1.0)]


def test_equal_answers_are_one_line() -> None:
    (line,) = tree(np.full((3, 4), 7), np.ones((3, 4), dtype=bool), np.ones((3, 4)))
    assert (line.rows, line.start, line.stop, line.low, line.high) == ((0, 1, 2), 0, 4, 3.0, 3.0)


def test_text_that_nobody_chose_is_part_of_the_prefix_and_has_no_w() -> None:
    # Row 1 was handed another second token: the third is another node, though it is the same token.
    tokens = np.array([[1, 8, 3], [1, 9, 3]])
    mask = np.array([[True, False, True]] * 2)
    index = node_index(tokens, mask)
    assert index[0, 0] == index[1, 0]
    assert index[0, 2] != index[1, 2]
    assert np.isnan(totals(index, mask, np.ones((2, 3)))[index[:, 1]]).all()
    given = tree(np.array([[1, 8], [2, 8]]), np.array([[False, True], [False, True]]), np.ones((2, 2)))
    assert [(line.start, line.stop, line.low) for line in given] == [(0, 2, 1.0), (0, 2, 1.0)]


def test_what_float32_leaves_of_a_sum_that_cancels_is_0() -> None:
    w = np.array([[0.1], [0.2], [-0.3]], dtype=np.float32)
    assert abs(w.astype(float).sum()) > 0
    (line,) = tree(np.ones((3, 1), dtype=int), np.ones((3, 1), dtype=bool), w)
    assert (line.low, line.high) == (0.0, 0.0)
    (line,) = tree(np.ones((3, 1), dtype=int), np.ones((3, 1), dtype=bool), w + np.float32(1e-5))
    assert line.low == pytest.approx(3e-5, rel=1e-2)


def test_a_group_without_a_chosen_token_has_no_tree() -> None:
    assert tree(np.ones((2, 3), dtype=int), np.zeros((2, 3), dtype=bool), np.ones((2, 3))) == []
    assert tree(np.ones((2, 0), dtype=int), np.zeros((2, 0), dtype=bool), np.ones((2, 0))) == []


@each("seed", range(8))
def test_nodes_and_sums_are_those_of_prefix_bias(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows, width = 12, 7
    tokens = draw.integers(0, 2 + seed % 3, (rows, width))
    mask = draw.random((rows, width)) < (0.7 if seed % 2 else 1.1)
    mask &= np.arange(width) < draw.integers(1, width + 1, rows)[:, None]
    mask[:, 0] = True
    group, w = np.repeat(np.arange(3), 4), draw.normal(size=(rows, width))
    twin = nodes(Rollouts(tokens=torch.tensor(tokens), mask=torch.tensor(mask), logp=torch.zeros(rows, width),
                          reward=torch.zeros(rows), group=torch.tensor(group)))
    spread = twin.spread(twin.sum(torch.tensor(w))).numpy()
    for g in range(3):
        at = group == g
        index = node_index(tokens[at], mask[at])
        ours = totals(index, mask[at], w[at])[index]
        chosen = mask[at]
        assert np.allclose(ours[chosen], spread[at][chosen], rtol=0, atol=1e-12)
        # The same tokens meet: two places have one node here exactly where they have one node there.
        here, there = index[chosen], twin.index.numpy()[at][chosen]
        assert ((here[:, None] == here) == (there[:, None] == there)).all()
        # The lines cover every chosen token once a row, and hold the least and the largest W of their nodes.
        lines = tree(tokens[at], mask[at], w[at])
        covered = np.zeros(chosen.shape, dtype=int)
        for line in lines:
            for row in line.rows:
                covered[row, line.start:line.stop] += 1
                found = ours[row, line.start:line.stop][chosen[row, line.start:line.stop]]
                if len(found):
                    assert line.low is not None
                    assert line.high is not None
                    assert line.low <= found.min()
                    assert found.max() <= line.high
        assert (covered[chosen] == 1).all()
