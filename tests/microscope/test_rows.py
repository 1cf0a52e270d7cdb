"""Which rollout owns which position: by hand on small batches, and as parts of one whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import CreditscopeError
from creditscope.microscope.rows import RowOwners

CPU = torch.device("cpu")


def of(lead: tuple[int, ...], rows: list[int] | None = None, segments: list[list[int]] | None = None) -> RowOwners:
    return RowOwners.of(lead, None if rows is None else torch.tensor(rows),
                   None if segments is None else torch.tensor(segments), CPU)


def numbered(*shape: int) -> Tensor:
    """Each vector holds its own number, twice."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(*shape, 1).expand(*shape, 2)


def test_by_default_row_i_is_rollout_i_with_or_without_a_flat_batch_and_more_axes() -> None:
    rows = of((2, 3))
    assert rows.count == 2
    assert rows.arrange(numbered(2, 3), "x")[..., 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rows.arrange(numbered(6), "x")[..., 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rows.arrange(numbered(2, 1), "x")[..., 0].tolist() == [[0], [1]]
    assert rows.arrange(numbered(2, 2, 2), "x")[..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_that_share_a_rollout_stand_side_by_side_padded_to_the_longest() -> None:
    # Rollout 0 owns rows 0 and 2, rollout 1 owns row 1: its second place is padding.
    arranged = of((3, 2), rows=[0, 1, 0]).arrange(numbered(3, 2), "x", blank=True)
    assert arranged[..., 0].tolist() == [[0, 1, 4, 5], [2, 3, 0, 0]]
    assert not arranged[1, 2:].any()


def test_segments_name_each_position_and_minus_one_is_nobody() -> None:
    rows = of((2, 3), segments=[[0, 0, 1], [1, -1, 2]])
    arranged = rows.arrange(1 + numbered(2, 3), "x", blank=True)
    assert arranged[..., 0].tolist() == [[1, 2], [3, 4], [6, 0]]
    # Position 4 is nobody's: its vector (5, 5) has Σ x² = 50.
    assert float(rows.stray(1 + numbered(2, 3))) == 50
    assert of((2, 3), segments=[[0, 0, 1], [1, 1, 2]]).stray(numbered(2, 3)) is None


@given(st.lists(st.integers(-1, 3), min_size=6, max_size=6), st.booleans())
def test_every_owned_vector_is_in_one_piece_and_nobodys_are_in_none(owners: list[int], flat: bool) -> None:
    present = sorted({o for o in owners if o >= 0})
    owner = torch.tensor([present.index(o) if o >= 0 else -1 for o in owners])
    if not present:
        return
    for rows in (RowOwners.of((2, 3), None, owner.view(2, 3), CPU), RowOwners.of((6, 2), owner, None, CPU)):
        lead = (rows.batch, rows.width or 1)
        x = numbered(lead[0] * lead[1]) if flat else numbered(*lead)
        unit = owner.repeat_interleave(1 if rows.by_position else 2)
        for i in range(rows.count):
            piece = rows.piece(x, i)
            assert piece is not None
            assert torch.equal(piece.reshape(-1, 2), x.reshape(-1, 2)[unit == i])
    assert of((2, 3)).piece(numbered(5), 0) is None


@given(st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_folding_copies_sums_what_arranging_puts_side_by_side(owners: list[int]) -> None:
    present = sorted(set(owners))
    owner = torch.tensor([present.index(o) for o in owners]).view(2, 3)
    rows = RowOwners.of((2, 3), None, owner, CPU)
    x = 1 + numbered(2, 3)
    assert torch.equal(rows.fold(x, 1), rows.arrange(x, "x", blank=True).sum(1))
    # One copy of a (2,)-vector per position: leading axes (2, 3) broadcast against (2, 3, 4, 2).
    assert rows.spread_shape((2, 3, 4), 1, "x") == (2, 3, 1)
    assert of((2, 3)).spread_shape((2, 3, 4), 1, "x") == (2, 1, 1)


@pytest.mark.parametrize("batch", [of((3, 5)), of((3, 5), rows=[0, 1, 2]),
                                   of((1, 6), segments=[[0, 0, 1, 1, 2, -1]])])
def test_picked_vectors_belong_to_the_rollouts_that_are_named_whatever_the_batch_was(batch: RowOwners) -> None:
    # Vectors 0 and 3 are rollout 2's, vector 2 is rollout 0's, vector 1 is nobody's; rollout 1 has none.
    rows = batch.gathered(torch.tensor([2, -1, 0, 2]), CPU)
    x = 1 + numbered(4)
    assert rows.count == 3
    assert rows.arrange(x, "expert", blank=True)[..., 0].tolist() == [[3, 0], [0, 0], [1, 4]]
    assert rows.fold(x, 1)[:, 0].tolist() == [3, 0, 5]
    assert float(rows.stray(x)) == 8  # the vector (2, 2)
    pieces = [rows.piece(x, i) for i in range(3)]
    assert [piece[:, 0].tolist() for piece in pieces if piece is not None] == [[3], [], [1, 4]]


def test_as_many_vectors_as_rows_are_one_per_row() -> None:
    # Tokens that happen to be as many are never asked about here: they were picked, and come with their owners.
    for rows in (of((4, 5)), of((4, 4)), of((4, 1)), of((4,))):
        assert rows.arrange(numbered(4), "score")[..., 0].tolist() == [[0], [1], [2], [3]]


def test_picked_vectors_may_have_several_leading_axes() -> None:
    # Time first: owners (T, B), one column per rollout.
    rows = of((2, 3)).gathered(torch.tensor([[0, 1]]).expand(3, 2), CPU)
    assert rows.arrange(numbered(3, 2), "x")[..., 0].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert rows.spread_shape((3, 2), 1, "x") == (3, 2)
    assert rows.spread_shape((3, 2, 4), 1, "x") == (3, 2, 1)


@pytest.mark.parametrize(("rows", "segments", "words"), [
    ([0, 1], None, r"rows must name the rollout of each row: shape \(3,\), got \(2,\)"),
    (None, [[0, 1]], r"segments must name the rollout of each position: shape \(3, 2\), got \(1, 2\)"),
    ([0, 2, 2], None, "rows must hold the ids 0 ... N−1, each at least once.*without 1"),
    (None, [[0, 0], [3, 3], [1, 1]], "segments must hold the ids.*without 2"),
    ([0, -2, 1], None, "ids from -2 to 1"),
    ([-1, -1, -1], None, "ids from -1 to -1"),
])
def test_wrong_owners_are_refused_with_what_is_wrong(rows: list[int] | None, segments: list[list[int]] | None,
                                                     words: str) -> None:
    with pytest.raises(CreditscopeError, match=words):
        of((3, 2), rows, segments)


def test_vectors_whose_rollout_cannot_be_told_are_refused_with_their_place_and_a_way_out() -> None:
    with pytest.raises(CreditscopeError, match=r"experts.0 got vectors with leading axes \(7,\).*3 rows of 5"):
        of((3, 5)).arrange(numbered(7), "experts.0")
    for n in (3, 5, 6):
        with pytest.raises(CreditscopeError, match=rf"experts.0 got vectors .* axes \({n},\), but 4 were picked"):
            of((3, 5)).gathered(torch.tensor([0, 0, 1, 2]), CPU).arrange(numbered(n), "experts.0")
    with pytest.raises(CreditscopeError, match="logits_to_keep"):
        of((2, 3), segments=[[0, 0, 1], [1, 1, 2]]).arrange(numbered(2, 1), "lm_head")
