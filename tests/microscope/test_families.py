"""Real architectures, tiny and random: the microscope's Gram against a loop of N separate backwards in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from creditscope.microscope import watch
from creditscope.microscope.calls import Call, name_of
from creditscope.microscope.rerun import again
from creditscope.microscope.scope import Microscope
from depth import FULL
from small_models import FAMILIES, apart, batch, build, by_loop, double, gradient, grams, objective, total

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
TIED = ("llama", "qwen2", "qwen3", "mistral", "neox", "phi")
CASES = [(family, {}) for family in FAMILIES] + [(family, {"tie_word_embeddings": True}) for family in TIED] + [
    (family, {"tie_word_embeddings": False}) for family in ("gpt2", "gemma", "opt")]
NAMES = [f"{family}{'' if not changes else '-tied' if changes['tie_word_embeddings'] else '-untied'}"
         for family, changes in CASES]
KINDS = ("llama", "gpt2", "gemma2", "gpt_oss")
"""One family for each kind of layer: dense; Conv1D; a tied head and norms of 1 + w; experts and attention sinks."""
SOME = [case for case in zip(CASES, NAMES, strict=True) if FULL or case[0][0] in KINDS]


@contextmanager
def plain_bfloat16() -> Iterator[None]:
    """oneDNN's bfloat16 dies of an illegal instruction on virtual machines that announce AMX and do not allow it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def under_the_scope(model: Any, ids: Tensor, credit: Tensor, **kwargs: Any) -> Microscope:
    model.zero_grad(set_to_none=True)
    with Microscope(model, **kwargs) as scope:
        objective(model, ids, credit).backward()
    return scope


def gradient_error(model: Any, plain: dict[str, Tensor]) -> float:
    """max|.grad − plain| over all parameters, relative to the largest entry of the whole gradient."""
    largest = max(float(g.abs().max()) for g in plain.values())
    return max(float((p.grad - plain[name]).abs().max()) for name, p in model.named_parameters()
               if p.grad is not None) / largest


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), CASES, ids=NAMES)
def test_in_float64_every_parameter_has_the_loops_gram_and_the_plain_gradient(family: str,
                                                                              changes: dict[str, Any]) -> None:
    model, (ids, credit) = build(family, **changes), batch()
    rows = by_loop(model, ids, credit)
    want, plain = grams(rows), gradient(model, lambda: objective(model, ids, credit))
    scope = under_the_scope(model, ids, credit)
    # Every parameter is there; those with a gradient of 0 too.
    assert scope.layers.keys() == want.keys()
    for name, gram in scope.layers.items():
        # Some families compute their norms in float32 whatever the model's dtype; so does their loop.
        assert float((gram - want[name]).abs().max()) <= 1e-12 * float(total(want).abs().max()), name
    assert apart(scope.gram, total(want)) <= 1e-12
    assert scope.coverage == 1.0
    # Gemma's norms are computed in float32, so the order of their sums shows. They multiply by 1 + w.float(), so .grad
    # of w is a sum that was taken in float32, while the rows of w are added up in float64.
    gemma = family.startswith("gemma")
    assert gradient_error(model, plain) <= (1e-7 if gemma else 1e-12)
    for name, check in scope.checks.items():
        assert check.error <= (1e-7 if gemma and "norm" in name else 1e-13), name


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(("family", "changes"), [case for case, _ in SOME], ids=[name for _, name in SOME])
def test_in_float32_the_gram_is_that_of_a_float64_loop_to_a_millionth(family: str, changes: dict[str, Any]) -> None:
    model, (ids, credit) = build(family, torch.float32, **changes), batch()
    want = grams(by_loop(double(model), ids, credit))
    plain = gradient(model, lambda: objective(model, ids, credit))
    scope = under_the_scope(model, ids, credit)
    assert apart(scope.gram, total(want)) <= 1e-6
    assert scope.coverage == 1.0
    assert gradient_error(model, plain) <= 1e-6
    assert max(check.error for check in scope.checks.values()) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERTS)
def test_grouped_experts_give_the_same_gram_as_experts_one_by_one(family: str) -> None:
    model, (ids, credit) = build(family, torch.float32, experts="grouped_mm"), batch()
    want = grams(by_loop(double(model), ids, credit))
    assert apart(under_the_scope(model, ids, credit).gram, total(want)) <= 1e-6


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES if FULL else KINDS)
def test_in_bfloat16_the_gram_is_that_of_the_loops_rows_to_a_thousandth(family: str) -> None:
    # The loop rounds its rows to bfloat16 (up to 2⁻⁸ per entry), the microscope does not. Their products differ by
    # less, since roundings average out over the entries of a row.
    with plain_bfloat16():
        model, (ids, credit) = build(family, torch.bfloat16), batch()
        same = total(grams(by_loop(model, ids, credit)))
        exact = total(grams(by_loop(double(model), ids, credit)))
        scope = under_the_scope(model, ids, credit)
    assert apart(scope.gram, same) <= 1e-3
    # Against float64 arithmetic on the same weights, what is left is the forward's own rounding: no Gram undoes it.
    assert apart(scope.gram, exact) <= 1e-2
    assert apart(scope.gram, exact) <= 1.2 * apart(same, exact) + 1e-3
    assert scope.coverage == 1.0


def test_the_gram_changes_with_one_weight_so_the_comparison_can_fail() -> None:
    model, (ids, credit) = build("llama"), batch()
    want = total(grams(by_loop(model, ids, credit)))
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    assert apart(under_the_scope(model, ids, credit).gram, want) > 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "want"), [
    ("eager", {("gpt_oss", "cat")}), ("grouped_mm", {("gpt_oss", "cat")}),
    ("batched_mm", {("gpt_oss", "cat"), *((family, "getitem") for family in EXPERTS)})])
def test_only_attention_sinks_and_experts_with_a_matrix_per_token_are_run_again(
        experts: str, want: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    run_again: set[tuple[str, str]] = set()

    def spied(call: Call) -> Any:
        run_again.add((family, name_of(call.func)))
        return again(call)

    monkeypatch.setattr(watch, "again", spied)
    for family in FAMILIES if experts == "eager" else EXPERTS:
        under_the_scope(build(family, torch.float32, experts=experts), *batch())
    assert run_again == want
