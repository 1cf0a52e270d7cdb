"""Passes over a batch in which every two rollouts of a group meet."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from creditscope.batch.groups import joint_passes


@pytest.mark.parametrize(("sizes", "most", "passes"), [
    ((4, 4), 4, 2),  # whole groups: the chunks themselves
    ((3, 7), 4, 1 + 6),  # 3 in a pass; 7 in parts of 2, 2, 2, 1: 4·3/2 passes
    ((5, 5, 5), 6, 3),  # cut by the chunks, but none is larger than a pass
    ((9,), 5, 10),  # parts of 2, 2, 2, 2, 1: 5·4/2 passes
])
def test_every_two_rollouts_of_a_group_meet_and_no_pass_is_larger(sizes: tuple[int, ...], most: int,
                                                                  passes: int) -> None:
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    found = joint_passes(group, torch.arange(len(group)).split(most))
    assert len(found) == passes
    assert max(map(len, found)) <= most
    met = {tuple(sorted(pair)) for rows in found for pair in combinations(rows.tolist(), 2)}
    assert met >= {(i, j) for i, j in combinations(range(len(group)), 2) if group[i] == group[j]}
