"""log π through the head in blocks, with and without recomputation, equals the plain path, under Microscope too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from creditscope import Microscope, Rollouts
from creditscope.microscope import head
from creditscope.microscope.head import chosen_logp
from creditscope.policy import logp as logp_module
from creditscope.policy.loading import Policy, _avoid_cudnn_attention, _recompute
from creditscope.policy.logp import head_norms, token_logp
from small_models import VOCAB, build

PROMPTS = [[3, 4], [5, 6, 7], [8], [9, 10]]
TOKENS = torch.randint(3, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(6) < torch.tensor([6, 4, 5, 2])[:, None]
CREDIT = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
FAMILIES = {"llama": {}, "tied": {"tie_word_embeddings": True}, "phi": {}}  # phi's head has a bias
BLOCKS = 24 * 7
"""Seven words of 4 × 6 tokens at a time: 50 words are seven blocks of 7 and one of 1."""


def policy_of(family: str, dtype: torch.dtype = torch.float64, recompute: bool = False) -> Policy:
    model = build("qwen2" if family == "tied" else family, dtype, **FAMILIES.get(family, {}))
    if recompute:
        _recompute(family, model)
    return Policy(family, model, tokenizer=None)


def reading(policy: Policy, scoped: bool, temperature: float = 0.7, prompts: list[list[int]] = PROMPTS,
            **options: Any) -> dict[str, Any]:
    """log π, gradients and, under the microscope, Grams and sketch of one pass."""
    policy.model.zero_grad(set_to_none=True)
    scope = Microscope(policy.model, **options)
    if scoped:
        scope.__enter__()
    live = token_logp(policy, prompts, TOKENS, MASK, temperature)
    torch.autograd.backward(live, (CREDIT * MASK).to(live.dtype))
    if scoped:
        scope.__exit__(None, None, None)
    found: dict[str, Any] = {"logp": live.detach(),
                             **{name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}}
    if scoped and scope.exact:
        found |= {f"K of {name}": gram for name, gram in scope.layers.items()}
    if scoped and scope.sketcher is not None:
        found["sketch"] = scope.sketch.rows
    return found


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).norm() / other[k].norm().clamp(min=1e-30)) for k in one)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_of_the_vocabulary_and_recomputation_give_the_plain_paths_numbers(
        family: str, scoped: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = reading(policy_of(family), scoped)
    monkeypatch.setattr(head, "HELD", BLOCKS)
    assert far(reading(policy_of(family, recompute=recompute), scoped), plain) < 1e-12


@pytest.mark.parametrize("exact", [True, False])
def test_sketches_of_the_blocks_add_up_to_that_of_the_head(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = reading(policy_of("tied"), True, sketch=4, exact=exact)
    monkeypatch.setattr(head, "HELD", BLOCKS)
    assert far(reading(policy_of("tied"), True, sketch=4, exact=exact), plain) < 1e-12


@pytest.mark.parametrize("scoped", [False, True])
def test_in_bfloat16_blocks_are_as_near_to_the_truth_as_the_plain_path(scoped: bool,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round z and δ to 8 bits, and the products of blocks are rounded once more before they are added."""
    plain, true = reading(policy_of("tied", torch.bfloat16), scoped), reading(policy_of("tied"), scoped)
    monkeypatch.setattr(head, "HELD", BLOCKS)
    ours = reading(policy_of("tied", torch.bfloat16), scoped)
    assert torch.equal(ours["logp"], plain["logp"]) or far({"x": ours["logp"]}, {"x": plain["logp"]}) < 1e-6
    errors = [sum(far({name: one[name]}, {name: true[name]}) for name in true) / len(true) for one in (ours, plain)]
    assert errors[0] < 1.1 * errors[1] < 0.02


def test_the_logits_of_a_batch_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "HELD", BLOCKS)
    shapes = set()

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            shapes.update(tuple(x.shape) for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor))
            return out

    policy = policy_of("llama")
    with Shapes():
        reading(policy, scoped=True)
    assert (4, 6, 7) in shapes
    assert not [shape for shape in shapes if len(shape) > 1 and shape[-1] == VOCAB]


def test_a_model_that_changes_its_logits_after_the_head_takes_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, even = Policy("capped", build("gemma2", final_logit_softcapping=0.5), tokenizer=None), [[3, 4]] * 4
    plain = reading(policy, scoped=False, prompts=even)
    monkeypatch.setattr(head, "HELD", BLOCKS)
    called: list[int] = []
    monkeypatch.setattr(logp_module, "chosen_logp", lambda *_: called.append(1))
    assert far(reading(policy, scoped=False, prompts=even), plain) == 0
    assert policy.uses_logits
    assert not called


def test_a_model_that_scales_its_logits_in_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("llama")
    own = policy.model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits.mul_(0.5)
        return out

    policy.model.forward = scaled
    plain = reading(policy, scoped=False)
    monkeypatch.setattr(head, "HELD", BLOCKS)
    assert far(reading(policy, scoped=False), plain) == 0


def test_chosen_logp_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """z = (0, ln 3, 0, ln 4) for h = 1: Σ exp = 1 + 3 + 1 + 4 = 9, so log π(1) = ln 3/9, log π(3) = ln 4/9.

    With c = 1 on the first token, δ = 1{v = 1} − π = (−1/9, 6/9, −1/9, −4/9), dW = δ and
    dh = Σ_v W_v δ_v = ln 3 · 6/9 − ln 4 · 4/9.
    """
    monkeypatch.setattr(head, "HELD", 2 * 3)  # two tokens, three words at a time
    weight = nn.Parameter(torch.tensor([[1.0], [3.0], [1.0], [4.0]], dtype=torch.float64).log())
    hidden = torch.ones(1, 2, 1, dtype=torch.float64, requires_grad=True)
    found = chosen_logp(hidden, weight, None, torch.tensor([[1, 3]]))
    torch.testing.assert_close(found.exp(), torch.tensor([[3 / 9, 4 / 9]], dtype=torch.float64))
    found[0, 0].backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-1.0], [6], [-1], [-4]], dtype=torch.float64) / 9)
    ln3, ln4 = weight[1].item(), weight[3].item()
    assert hidden.grad is not None
    assert hidden.grad[0, 0].item() == pytest.approx(ln3 * 6 / 9 - ln4 * 4 / 9, rel=1e-12)


def test_on_a_gpu_cudnns_attention_is_not_taken() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for device, expected in (("cpu", True), ("cuda:1", False)):
            torch.backends.cuda.enable_cudnn_sdp(True)
            _avoid_cudnn_attention(device)
            assert torch.backends.cuda.cudnn_sdp_enabled() is expected
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_blocks_are_even_and_cover_the_vocabulary() -> None:
    """2^26 logits of 16 × 300 tokens are 13,981 words: 109 · 128 = 13,952 of them are a block."""
    found = list(head.blocks((16, 300), 151_936))
    assert {part.stop - part.start for part in found[:-1]} == {13_952}
    assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
    assert (found[0].start, found[-1].stop) == (0, 151_936)
    assert [part.stop for part in head.blocks((1, head.HELD // 3), 4)] == [3, 4]  # too few for an even block


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_norms_at_the_head_are_the_same_by_the_formula_and_by_autograd(family: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(family)
    rollouts = Rollouts(tokens=TOKENS, mask=MASK, logp=torch.zeros(4, 6), reward=torch.zeros(4),
                        group=torch.zeros(4, dtype=torch.int64), prompt_ids=PROMPTS)
    by_autograd = head_norms(policy, rollouts, 0.7)
    monkeypatch.setattr(head, "HELD", BLOCKS)
    torch.testing.assert_close(head_norms(policy, rollouts, 0.7), by_autograd, rtol=1e-10, atol=0)
