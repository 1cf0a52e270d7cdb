"""Shared prefixes: W by hand, in closed form against autograd for every row, and which weights let it cancel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from creditscope import METHODS, Method, Rollouts, effective_credit, surrogate
from creditscope.batch.groups import Groups
from creditscope.credit.prefixes import shared
from creditscope.exact.shared_prefix import Nodes, length_exponent, measured, nodes, prefix_bias, prefix_metrics
from creditscope.methods.dialects import DIALECTS
from creditscope.methods.properties import properties
from creditscope.methods.table import even
from each import each
from makers import make
from small_models import build

D = torch.float64
ROWS = {**METHODS, **DIALECTS}
OWN = [name for name, row in ROWS.items() if row.baseline != "external"]
PLAIN = METHODS["p1_grpo"]
BY_LENGTH = PLAIN.but(name="by_length", aggregate="sequence_mean")  # ω_i = 1/(B·L_i), A_i = r_i − mean r


def answers(rows: list[list[int]], reward: list[float], group: list[int] | None = None) -> Rollouts:
    """Rollouts with these tokens, in float64."""
    batch = make(reward, group or [0] * len(rows), [len(row) for row in rows])
    width = batch.tokens.shape[1]
    return replace(batch, tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]))


def bush(seed: int, holes: bool = False) -> tuple[Rollouts, Nodes, torch.Generator]:
    """Two groups of five and three answers over two symbols, so that many share, with one log π_old a node."""
    draw = torch.Generator().manual_seed(seed)
    batch = make([1, 0, 0, 1, .5, 0, 1, 0], [3, 3, 1, 3, 1, 3, 1, 3], [6, 3, 5, 7, 4, 6, 2, 5], seed=seed)
    assert batch.entropy is not None
    mask = batch.mask & (torch.rand(batch.mask.shape, generator=draw) > 0.2) if holes else batch.mask
    tokens = torch.randint(1, 3, mask.shape, generator=draw)
    tokens[:, :2] = torch.tensor([1, 2])
    batch = replace(batch, tokens=tokens * batch.mask, mask=mask, entropy=0.5 * batch.entropy)
    tree = nodes(batch)
    return replace(batch, logp=tree.spread(-torch.rand(len(tree), generator=draw, dtype=D))), tree, draw


def moved(batch: Rollouts, tree: Nodes, draw: torch.Generator, size: float) -> Tensor:
    """Live log-probs: each node moves, and all rows that pass it with it."""
    return batch.logp + tree.spread(size * torch.randn(len(tree), generator=draw, dtype=D))


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_rows_meet_at_a_token_while_all_before_it_agrees() -> None:
    tree = nodes(answers([[1, 2, 3], [1, 2, 4], [1, 5], [1]], [1, 0, 0, 0], [0, 0, 0, 9]))
    # 1 is shared by the group of three, 1-2 by two of them; the same 1 in another group is another node.
    assert tree.index.tolist() == [[0, 1, 2], [0, 1, 3], [0, 4, -1], [5, -1, -1]]
    assert tree.rows.tolist() == [3, 2, 1, 1, 1, 1]
    assert tree.depth.tolist() == [0, 1, 2, 2, 1, 0]
    assert tree.group.tolist() == [0, 0, 0, 0, 0, 9]
    assert tree.whole.tolist() == [True, False, False, False, False, False]


def test_text_that_others_wrote_parts_rows_but_is_no_node() -> None:
    batch = answers([[1, 7, 2], [1, 8, 2], [1, 7, 2]], [1, 0, 0])
    batch = replace(batch, mask=torch.tensor([[True, False, True]] * 3))
    assert nodes(batch).index.tolist() == [[0, -1, 1], [0, -1, 2], [0, -1, 1]]


@each("holes", [False, True])
@each("seed", range(4))
def test_the_nodes_are_the_prefixes_that_a_loop_finds(seed: int, holes: bool) -> None:
    batch, tree, _ = bush(seed, holes)
    found: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for i, (row, group) in enumerate(zip(batch.tokens.tolist(), batch.group.tolist(), strict=True)):
        for t in batch.mask[i].nonzero().squeeze(1).tolist():
            found.setdefault((group, tuple(row[: t + 1])), set()).add(i)
    assert len(tree) == len(found)
    for (group, prefix), rows in found.items():
        t = len(prefix) - 1
        (name,) = {int(tree.index[i, t]) for i in rows}
        size = int((batch.group == group).sum())
        assert (int(tree.group[name]), int(tree.depth[name]), int(tree.rows[name])) == (group, t, len(rows))
        assert bool(tree.whole[name]) == (len(rows) == size > 1)


def test_tokens_on_shared_nodes_are_those_that_some_sibling_shares() -> None:
    batch, tree, _ = bush(0)
    sibling, common = shared(batch)
    others = common.masked_fill(sibling == torch.arange(len(batch))[:, None], 0)  # not itself
    assert int(tree.rows[tree.shared].sum()) == int(others.amax(dim=1).sum())


# -- W by hand --------------------------------------------------------------------------------------------------------


def test_W_of_grpo_on_a_shared_first_token_by_hand() -> None:
    batch = answers([[1, 2], [1, 3, 4, 5]], [1, 0])
    found = prefix_bias(METHODS["grpo"], batch)
    # A = ±½/(1/√2) = ±1/√2, ω = 1/(2·2) and 1/(2·4): W = 1/√2·(1/4 − 1/8) = 1/(8√2).
    assert found.total[0].item() == pytest.approx(1 / (8 * math.sqrt(2)), abs=1e-15)
    assert found.mass[0].item() == pytest.approx(3 / (8 * math.sqrt(2)), abs=1e-15)
    # Even weights would give 0 there, so all of W is bias.
    assert found.bias[0].item() == pytest.approx(1 / (8 * math.sqrt(2)), abs=1e-15)


def test_the_bias_at_a_node_of_some_by_hand() -> None:
    batch = answers([[1, 2], [1, 2, 3, 4], [1, 5, 6]], [1, 0, 0])
    found = prefix_bias(BY_LENGTH, batch)
    # A = (2/3, −1/3, −1/3), ω = 1/(3·2), 1/(3·4), 1/(3·3); ω̄ over the 9 tokens: (2/6 + 4/12 + 3/9)/9 = 1/9.
    # Behind 1-2 go rows 0 and 1: W = 2/18 − 1/36 = 1/12, evenly ω̄·(2/3 − 1/3) = 1/27.
    node = int(found.nodes.index[0, 1])
    assert found.total[node].item() == pytest.approx(1 / 12, abs=1e-15)
    assert found.even[node].item() == pytest.approx(1 / 27, abs=1e-15)
    assert found.bias[node].item() == pytest.approx(1 / 12 - 1 / 27, abs=1e-15)


@pytest.mark.parametrize(("name", "log_ratio", "expected"), [
    # Two answers that share their one token, A = ±½, α = ½: W = ¼(ω₊ − ω₋), ρ the same for both.
    ("clip", math.log(1.5), -1.5),  # above 1.2 the good one is stopped: −ρ
    ("clip", math.log(0.5), 0.5),  # below 0.8 the bad one is stopped: ρ
    ("clip", math.log(1.1), 0.0),  # inside both pull, and cancel
    ("dual", math.log(4.0), 0.0),  # beyond 3 the bad one is stopped too
    ("stop_gradient", math.log(4.0), 0.0),
])
def test_what_the_bound_stops_no_longer_cancels_by_hand(name: str, log_ratio: float, expected: float) -> None:
    clip = METHODS["grpo"].but(name="clip", scale="none")
    row = {"clip": clip, "dual": clip.but(name="dual", dual_clip=3.0),
           "stop_gradient": clip.but(name="sg", bound="stop_gradient")}[name]
    batch = answers([[1], [1]], [1, 0])
    batch = replace(batch, logp=torch.full((2, 1), -1.0, dtype=D))
    assert prefix_bias(row, batch, batch.logp + log_ratio).total.item() == pytest.approx(expected / 4, abs=1e-15)


def test_the_gate_tilts_a_shared_token_by_hand() -> None:
    row = METHODS["sapo"].but(name="x", scale="none")
    batch = answers([[1], [1]], [1, 0])
    batch = replace(batch, logp=torch.full((2, 1), -1.0, dtype=D))

    def slope(tau: float) -> float:  # of 4/τ·σ(τ(ρ−1)) in log ρ, at ρ = 2
        sigma = 1 / (1 + math.exp(-tau))
        return 4 * sigma * (1 - sigma) * 2

    total = prefix_bias(row, batch, batch.logp + math.log(2)).total.item()
    assert total == pytest.approx((slope(1.0) - slope(1.05)) / 4, abs=1e-15)


def test_a_sequence_ratio_spreads_the_answers_move_over_its_tokens_by_hand() -> None:
    batch = answers([[1, 2], [1, 3]], [1, 0])
    logp = batch.logp + torch.tensor([[0., .2], [0., .4]], dtype=D)
    free = METHODS["gspo"].but(name="x", scale="none", clip_low=0.9, clip_high=0.9)
    # a_i = 1/(2·2), two terms an answer, of which each token carries half: w = ±¼·½·s_i, s = e^0.1 and e^0.2.
    expected = (math.exp(.1) - math.exp(.2)) / 8
    assert prefix_bias(free, batch, logp).total[0].item() == pytest.approx(expected, abs=1e-15)
    product = free.but(name="y", ratio="sequence_product")
    # With the product ratio it carries all of them: w = ±¼·2·½·s_i, s = e^0.2 and e^0.4.
    expected = (math.exp(.2) - math.exp(.4)) / 4
    assert prefix_bias(product, batch, logp).total[0].item() == pytest.approx(expected, abs=1e-15)


def test_what_is_clipped_inside_the_mean_moves_the_answer_but_gets_nothing_by_hand() -> None:
    batch = answers([[1, 2], [1, 3]], [1, 0])
    logp = batch.logp + torch.tensor([[0., .9], [0., -.2]], dtype=D)
    found = prefix_bias(METHODS["gmpo"].but(name="x", scale="none"), batch, logp)
    # Good: .9 counts as .4, s = e^0.2, and its own token is stopped. Bad: −.2 is inside, s = e^−0.1.
    expected = torch.tensor([[math.exp(.2), 0], [-math.exp(-.1), -math.exp(-.1)]], dtype=D) / 8
    assert torch.allclose(found.w, expected, atol=1e-15, rtol=0)


def test_the_gamma_weight_of_a_shared_token_by_hand() -> None:
    batch = answers([[1], [1]], [1, 0])
    batch = replace(batch, logp=torch.full((2, 1), -1.0, dtype=D))
    row = METHODS["vespo"].but(name="x", scale="none")
    # s = 2: φ₊ = 2²·e^−3 and φ₋ = 2³·e^−2; two tokens, A = ±½.
    expected = (4 * math.exp(-3) - 8 * math.exp(-2)) / 4
    assert prefix_bias(row, batch, batch.logp + math.log(2)).total.item() == pytest.approx(expected, abs=1e-15)


# -- closed form against autograd -------------------------------------------------------------------------------------


@pytest.mark.slow
@each("size", [0.0, 0.01, 0.4, 1.5])
@each("name", sorted(ROWS))
def test_the_closed_form_is_what_autograd_finds(name: str, size: float) -> None:
    for seed in range(4):
        batch, tree, draw = bush(seed, holes=seed % 2 == 1)
        logp = moved(batch, tree, draw, size)
        own = ROWS[name].baseline != "external"
        credit = None if own else torch.randn(batch.mask.shape, generator=draw, dtype=D)
        found = prefix_bias(ROWS[name], batch, logp, credit)
        assert torch.allclose(found.total, measured(ROWS[name], batch, tree, logp, credit), atol=1e-12, rtol=0)


@each("name", sorted(METHODS))
def test_the_closed_form_follows_credit_that_differs_inside_an_answer(name: str) -> None:
    batch, tree, draw = bush(5)
    logp = moved(batch, tree, draw, 0.3)
    credit = torch.randn(batch.mask.shape, generator=draw, dtype=D)
    found = prefix_bias(METHODS[name], batch, logp, credit)
    assert torch.allclose(found.total, measured(METHODS[name], batch, tree, logp, credit), atol=1e-12, rtol=0)


@each("name", sorted(OWN))
def test_w_is_weight_times_credit(name: str) -> None:
    batch, tree, draw = bush(2)
    found = prefix_bias(ROWS[name], batch, moved(batch, tree, draw, 0.3))
    assert torch.allclose(found.w, found.weight * found.credit, atol=1e-14, rtol=0)
    assert bool((found.weight >= 0).all())


@each("name", ["grpo", "gspo", "gmpo", "cispo", "gcpo", "sapo", "vespo", "dr_grpo", "grpo_even"])
def test_W_is_the_gradient_that_reaches_a_tabular_policy(name: str) -> None:
    batch, tree, draw = bush(1)
    log_ratio = moved(batch, tree, draw, 0.2) - batch.logp
    # One row of three logits a context: log π of every token comes out of such a table.
    contexts: dict[tuple[int, ...], Tensor] = {}
    chosen: dict[tuple[int, ...], int] = {}  # context and token -> node
    rows = []
    for i, row in enumerate(batch.tokens.tolist()):
        cells = [torch.zeros((), dtype=D)] * len(row)
        for t in range(int(batch.lengths[i])):
            key = (int(batch.group[i]), *row[:t])
            logits = contexts.setdefault(key, torch.randn(3, generator=draw, dtype=D).requires_grad_())
            chosen[(*key, row[t])] = int(tree.index[i, t])
            cells[t] = logits.log_softmax(0)[row[t]]
        rows.append(torch.stack(cells))
    logp = torch.stack(rows)
    batch = replace(batch, logp=logp.detach() - log_ratio)
    gradients = torch.autograd.grad(surrogate(METHODS[name], logp, batch), list(contexts.values()))
    total = prefix_bias(METHODS[name], batch, logp.detach()).total
    for (key, logits), gradient in zip(contexts.items(), gradients, strict=True):
        expected = torch.zeros(3, dtype=D)
        for token in (1, 2):
            if (*key, token) in chosen:  # ∇ log π(a) = e_a − π
                score = torch.nn.functional.one_hot(torch.tensor(token), 3) - logits.detach().softmax(0)
                expected += total[chosen[(*key, token)]] * score
        assert torch.allclose(gradient, expected, atol=1e-12, rtol=0)


def test_a_language_model_learns_each_node_once_with_weight_W() -> None:
    batch, tree, _ = bush(3)
    model = build("gpt2")  # float64 throughout: others compute norms in float32
    prompt = torch.tensor([[7, 8], [9, 7]])[(batch.group == 3).long()]

    def logp() -> Tensor:
        ids = torch.cat([prompt, batch.tokens], dim=1)
        logits = model(input_ids=ids, use_cache=False).logits[:, 1:-1].log_softmax(-1)
        return logits.gather(2, batch.tokens[..., None]).squeeze(2)

    old = logp().detach()
    batch = replace(batch, logp=old.masked_fill(~batch.mask, 0.0))
    parameters = list(model.parameters())
    surrogates = torch.autograd.grad(surrogate(METHODS["grpo"], logp(), batch), parameters)
    total = prefix_bias(METHODS["grpo"], batch).total
    live = logp()
    once = [live[tuple((tree.index == n).nonzero()[0])] for n in range(len(tree))]  # any row that passes will do
    for ours, theirs in zip(torch.autograd.grad((torch.stack(once) * total).sum(), parameters), surrogates,
                            strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12, rtol=0)


@each("name", sorted(METHODS))
def test_the_nodes_together_hold_all_credit(name: str) -> None:
    batch, tree, draw = bush(4)
    logp = moved(batch, tree, draw, 0.3)
    row = METHODS[name].bare
    credit = torch.ones(len(batch), 1, dtype=D) if row.baseline == "external" else None
    w = effective_credit(lambda lp: surrogate(row, lp, batch, credit), logp)
    found = prefix_bias(row, batch, logp, credit)
    assert torch.allclose(found.w, w, atol=1e-13, rtol=0)
    assert found.total.sum().item() == pytest.approx(w.sum().item(), abs=1e-12)


# -- who cancels ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each("name", sorted(OWN))
def test_a_root_cancels_exactly_where_the_probe_says_so(name: str) -> None:
    batch, *_ = bush(0)
    # GTPO's entropy cost and λ are in W; its other answers stay below the filter of ln 2.
    root = prefix_metrics(prefix_bias(ROWS[name], batch), batch)["prefix/root"]
    assert (root < 1e-12) == properties(ROWS[name]).prefix_cancels


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo"])
def test_a_foreign_baseline_leaves_a_root_that_no_weighting_removes(name: str) -> None:
    batch, *_ = bush(0)
    for row in (METHODS[name], even(METHODS[name])):
        reading = prefix_metrics(prefix_bias(row, batch), batch)
        assert reading["prefix/bias"] < 1e-12  # the weights are even already
        assert reading["prefix/root"] > 0.01


@each("name", sorted(OWN))
def test_even_weights_are_one_number_a_group(name: str) -> None:
    row = ROWS[name]
    batch, *_ = bush(0)
    found = prefix_bias(even(row), batch)
    drops = row.keep not in ("all", "live_groups")
    for group in (1, 3):
        weight = found.weight[batch.group == group][batch.mask[batch.group == group]]
        uneven = float(weight.max() - weight.min()) > 1e-15
        alone = row.link_over == "answer"  # two answers with a link each have no weight in common
        assert uneven == ((drops and bool((weight == 0).any())) or row.token_weight != "none" or alone)


def test_even_rows_change_the_weights_and_nothing_else() -> None:
    for name in OWN:
        assert set(even(ROWS[name]).diff(ROWS[name])) <= {"aggregate", "max_tokens", "score"}
    assert not even(METHODS["grpo"]).diff(METHODS["grpo_even"])
    assert not even(METHODS["gspo"]).diff(METHODS["gspo_even"])
    assert even(METHODS["dr_grpo"].but(name="x", max_tokens=9)).max_tokens is None
    assert not even(METHODS["gcpo"]).diff(METHODS["gcpo"])  # 1/L_i against L_i terms: even as it is


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo", "gspo_token"])
def test_every_prompt_counts_the_same_under_even_weights(name: str) -> None:
    batch, *_ = bush(0)
    weight = prefix_bias(even(METHODS[name]), batch).weight.sum(dim=1)
    assert torch.allclose(Groups(batch.group).totals(weight), torch.tensor([.5, .5], dtype=D), atol=1e-15, rtol=0)


def test_even_weights_by_hand_also_where_groups_are_dropped() -> None:
    batch = make([1, 0, 1, 1], [0, 0, 5, 5], [1, 3, 2, 4])
    # P = 2, ΣL = 4 and 6: 1/8 and 1/12; the unanimous group has no advantage.
    w = prefix_bias(PLAIN.but(name="x", aggregate="group_token_mean"), batch)
    assert w.weight[:, 0].tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 12, 1 / 12], abs=1e-15)
    # Dropped and not counted, it leaves P = 1.
    w = prefix_bias(even(METHODS["dapo"]), batch)
    assert w.weight[:, 0].tolist() == pytest.approx([1 / 4, 1 / 4, 0, 0], abs=1e-15)


@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_groups_that_are_dropped_do_not_weigh_under_even_dapo(dropped: int) -> None:
    live, *_ = bush(0)
    dead = make([1] * (2 * dropped), [90 + n // 2 for n in range(2 * dropped)], [4, 2] * dropped, width=7)
    both = prefix_bias(even(METHODS["dapo"]), Rollouts.cat([live, dead])).w
    assert torch.allclose(both[: len(live)], prefix_bias(even(METHODS["dapo"]), live).w, atol=1e-15, rtol=0)
    assert not bool(both[len(live):].any())


@each("name", [name for name in OWN if ROWS[name].bound in ("stop_gradient", "gamma")])
def test_where_log_pi_carries_the_gradient_the_even_weight_is_the_groups(name: str) -> None:
    assert even(ROWS[name]).aggregate == "group_token_mean"


def test_the_bias_of_grpo_is_its_difference_from_grpo_even_where_groups_are_equal() -> None:
    batch = answers([[1, 2], [1, 2, 1, 2], [1, 1, 1], [1], [2, 1], [2, 2, 1], [2, 1, 1, 1, 2], [1, 2, 2]],
                    [1, 0, 0, 1, 0, 1, 0, 0], [0] * 4 + [1] * 4)
    ours, plain = prefix_bias(METHODS["grpo"], batch), prefix_bias(METHODS["grpo_even"], batch)
    assert torch.allclose(ours.bias, ours.total - plain.total, atol=1e-14, rtol=0)
    assert float(ours.bias.abs().max()) > 0.01


def test_with_one_group_even_grpo_is_a_token_mean() -> None:
    batch, *_ = bush(0)
    one = batch.rows(batch.group == 3)
    token_mean = METHODS["grpo"].but(name="x", aggregate="token_mean")
    assert torch.allclose(prefix_bias(METHODS["grpo_even"], one).w, prefix_bias(token_mean, one).w, atol=1e-15, rtol=0)


def test_after_a_step_token_ratios_still_cancel_inside_the_clip_and_sequence_ratios_do_not() -> None:
    batch, tree, draw = bush(0)
    logp = moved(batch, tree, draw, 0.02)  # every ρ inside 1 ± 0.2
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    token, sequence = METHODS["grpo_even"], METHODS["gspo_even"].but(name="wide", **wide)
    readings = {row.name: prefix_metrics(prefix_bias(row, batch, logp), batch)["prefix/root"]
                for row in (token, sequence, METHODS["gcpo"])}
    assert readings["grpo_even"] < 1e-12
    assert readings["wide"] > 1e-4
    assert readings["gcpo"] > 1e-4
    assert prefix_metrics(prefix_bias(sequence, batch), batch)["prefix/root"] < 1e-12  # at ratio 1 it did


# -- readings ---------------------------------------------------------------------------------------------------------


def test_the_metrics_by_hand() -> None:
    batch = answers([[1, 2], [1, 2, 3, 4], [1, 5, 6]], [1, 0, 0])
    reading = prefix_metrics(prefix_bias(BY_LENGTH, batch), batch)
    # |w| = 2/3·1/6, 1/3·1/12, 1/3·1/9 = 12/108, 3/108, 4/108. Shared: the 1 of all three and the 2 of rows 0 and 1.
    # Σ|w| = (2·12 + 4·3 + 3·4)/108 = 48/108, on shared nodes (19 + 15)/108.
    assert (reading["prefix/nodes"], reading["prefix/root_nodes"]) == (2, 1)
    assert reading["prefix/tokens"] == pytest.approx(5 / 9)
    assert reading["prefix/mass"] == pytest.approx(34 / 48)
    # W = (12 − 3 − 4)/108 at the root, (12 − 3)/108 behind it; evenly 0 and 4/108.
    assert reading["prefix/root"] == pytest.approx(5 / 19)
    assert reading["prefix/bias"] == pytest.approx((5 + 5) / 34)
    assert reading["prefix/length_negative"] == pytest.approx(-1)
    assert "prefix/length_positive" not in reading  # one good answer has no longer brother


@pytest.mark.parametrize("name", ["grpo", "gmpo", "sapo"])
def test_roots_that_pull_in_opposite_ways_do_not_make_up_for_each_other(name: str) -> None:
    # A short good and a long bad answer, and the reverse: each root is the third (½ − ¼)/(½ + ¼) of what is pulled.
    batch = answers([[1, 2], [1, 3, 4, 5], [1, 2], [1, 3, 4, 5]], [1, 0, 0, 1], [0, 0, 1, 1])
    reading = prefix_metrics(prefix_bias(METHODS[name], batch), batch)
    assert reading["prefix/root"] == pytest.approx(1 / 3)
    assert reading["prefix/bias"] == pytest.approx(1 / 3)
    assert reading["prefix/tokens"] == pytest.approx(4 / 12)


def test_a_batch_without_signal_has_no_root_to_speak_of() -> None:
    batch = answers([[1, 2], [1, 3]], [1, 1])
    assert prefix_metrics(prefix_bias(METHODS["grpo"], batch), batch) == {
        "prefix/nodes": 1, "prefix/root_nodes": 1, "prefix/tokens": 0.5}


@given(st.lists(st.integers(1, 9), min_size=3, max_size=6, unique=True), st.sampled_from([-2.0, -1.0, 0.0, 0.5]))
def test_the_length_exponent_is_the_power_that_made_the_weights(lengths: list[int], power: float) -> None:
    batch = make([1.0] * len(lengths), [0] * len(lengths), lengths)
    weight = batch.lengths.to(D).pow(power)[:, None] * batch.mask
    found = replace(prefix_bias(PLAIN, batch), credit=batch.mask.to(D), weight=weight)
    assert length_exponent(found, batch, 1) == pytest.approx(power, abs=1e-9)
    assert length_exponent(found, batch, -1) is None


@each(("name", "power"), [("grpo", -1), ("gspo", -1), ("gmpo", -1), ("sapo", -1), ("dr_grpo", 0),
                                             ("dapo", 0), ("luspo", 0), ("gcpo", 0), ("grpo_even", 0),
                                             ("gspo_even", 0)])
def test_the_length_exponent_of_the_rows_at_ratio_1(name: str, power: float) -> None:
    batch, *_ = bush(0)
    found = prefix_bias(METHODS[name], batch)
    for sign in (1, -1):
        assert length_exponent(found, batch, sign) == pytest.approx(power, abs=1e-12)


def test_padding_may_hold_anything() -> None:
    batch, tree, draw = bush(0)
    logp = moved(batch, tree, draw, 0.3)
    dirty = logp.masked_fill(~batch.mask, float("nan"))
    for name in ("grpo", "gspo", "gmpo", "sapo", "vespo", "dppo"):
        row: Method = METHODS[name]
        assert torch.equal(prefix_bias(row, batch, dirty).w, prefix_bias(row, batch, logp).w)
