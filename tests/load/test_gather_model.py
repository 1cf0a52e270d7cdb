"""benchmarks/gather.py: its closed forms by hand, its simulation against them, and the constants that it cites."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gather() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("gather")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_seconds_of_four_ranks_in_one_node_and_in_two_by_hand(gather: ModuleType) -> None:
    inside, between = gather.Link(1.0, 0.5), gather.Link(10.0, 1.0)
    # m = 2. One node: three messages of 1 + 1 s; or messages of 2 and 4 bytes, 1 + 1 and 1 + 2 s.
    one = gather.Network(inside, between, size=4)
    assert [gather.CLOSED[how](one, 4, 2) for how in ("ring", "doubling", "hierarchical")] == [6, 5, 6]
    # Two nodes of 2: every step of the ring waits for a link of 10 + 2 s; doubling takes 1 + 1 s inside and 10 + 4 s
    # between; the hierarchy 10 + 2 s between, then 4 bytes inside, 1 + 2 s.
    two = gather.Network(inside, between, size=2)
    assert [gather.CLOSED[how](two, 4, 2) for how in ("ring", "doubling", "hierarchical")] == [36, 16, 15]
    # A sum up and down: 2·(1 + 1) inside and 2·(10 + 2) between.
    assert gather.tree_reduce(two, 4, 2) == 28


@pytest.mark.parametrize("how", ["ring", "doubling", "hierarchical"])
def test_without_stragglers_the_simulation_is_the_closed_form(gather: ModuleType, how: str) -> None:
    for world in (2, 4, 8, 16, 64, 128):
        for m in (40, 8192, 1e6):
            end = max(gather.simulated(how, gather.ASSUMED, [0.0] * world, m))
            assert end == pytest.approx(gather.CLOSED[how](gather.ASSUMED, world, m), rel=1e-12), (world, m)


@pytest.mark.parametrize("how", ["ring", "doubling", "hierarchical"])
def test_one_late_rank_delays_the_end_by_its_delay_and_nobody_has_its_rows_before(gather: ModuleType, how: str) -> None:
    for world in (8, 16):  # in one node, where all links are equal, and in two
        on_time = gather.CLOSED[how](gather.ASSUMED, world, 8192)
        ends = gather.simulated(how, gather.ASSUMED, [1.0 if r == 5 else 0.0 for r in range(world)], 8192)
        assert min(ends) > 1.0
        assert max(ends) <= 1.0 + on_time * (1 + 1e-9)
        assert world > 8 or max(ends) == pytest.approx(1.0 + on_time, rel=1e-12)


def test_waiting_for_the_slowest_of_w_ranks_takes_the_harmonic_number_of_mean_delays(gather: ModuleType) -> None:
    # The largest of W exponential times has mean H_W: 1 + 1/2 + 1/3 + 1/4 = 25/12 for four.
    draw = gather.random.Random(1)
    most = [max(gather.stragglers(4, draw, 1.0)) for _ in range(4000)]
    assert gather.statistics.fmean(most) == pytest.approx(25 / 12, abs=5 * 1.2 / 4000**0.5)  # σ = 1.19
    after, whole = gather.waits("doubling", 4, 8192, 1.0)
    assert 0 < after <= gather.doubling(gather.ASSUMED, 4, 8192) * (1 + 1e-9)
    assert whole > after


def test_parameters_and_sides_of_a_mixture_by_hand(gather: ModuleType) -> None:
    # One layer, width 2, one key of 1, two experts of 3, vocabulary 5. Attention 2·4 + 2·2, norms 2·2 + 2, embedding
    # and head 20: 38; router 4; an expert 18.
    found = gather.mixture("", 2, 1, 3, hidden=2, mlp=0, kv=1, layers=1, vocabulary=5)
    assert (found.parameters, found.active) == (38 + 4 + 36, 38 + 4 + 18)
    # Attention 2·4 + 2·3, norms 2·4 + 4, embedding and head 14: 40; stacks (2, 6, 2) and (2, 2, 3), router (2, 2).
    assert found.sides == 40 + (12 + 2) + (4 + 3) + (2 + 2)


def test_alpha_and_beta_are_those_of_the_two_points_and_cores_are_shared(gather: ModuleType) -> None:
    # 2 s for 10 bytes and 5 s for 40: β = 0.1, α = 1.
    link = gather.fitted({10: 2.0, 40: 5.0})
    assert (link.alpha, link.beta) == (pytest.approx(1.0), pytest.approx(0.1))
    net = gather.Network(link, link, size=64)
    assert gather.on_cores(net, 2, 10, 2) == pytest.approx(2.0)
    assert gather.on_cores(net, 4, 10, 2) == pytest.approx(3 * 2.0 * 2)


def test_covariances_summed_over_ranks_have_the_eigenvalues_of_all_pairs(gather: ModuleType) -> None:
    rows = torch.randn(4, 10, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # k = 3
    pairs = torch.linalg.eigvalsh(rows.flatten(0, 1) @ rows.flatten(0, 1).T)
    summed = torch.linalg.eigvalsh(sum(one.T @ one for one in rows))
    assert torch.allclose(pairs[-9:], summed, rtol=1e-12)
    assert pairs[:-9].abs().max() < 1e-12
    assert gather.by_covariance(3) == summed.numel() ** 2 * 8


def test_the_constants_are_those_of_the_tables_that_are_cited(gather: ModuleType) -> None:
    table = (BENCHMARKS / "gpu" / "microscope.md").read_text()
    for row in ("| N=8 T=1024 | plain | 366.9 |", "| N=8 T=1024 | exact, all parameters | 435.0 |",
                "| N=8 T=1024 | sketch 16×16 | 418.5 |", "4.19 B parameters"):
        assert row in table
    # 68.1 and 51.6 ms for 4.19 B parameters, beside 366.9 ms: a ratio of 1 + 119.7/366.9.
    model = gather.dense("", hidden=64, mlp=64, kv=64, layers=1, vocabulary=64)
    assert gather.added_seconds(model) / gather.step_seconds(model) == pytest.approx(119.7 / 366.9)
    assert gather.ROW == 45
