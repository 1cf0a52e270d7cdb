"""Sampling: every number against a plain forward over the whole text, and every row against itself alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from creditscope.errors import CreditscopeError
from creditscope.policy import decoding
from creditscope.policy.sampling import Samples, draw, sample
from creditscope.selftest.trl_live import in_dtype
from each import each

V, END = 23, [1, 2]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [3, 3, 4]]
SMALL = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64, "head_dim": 4,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "initializer_range": 0.3}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, eager": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64,
                                               initializer_range=0.3, bos_token_id=1, eos_token_id=1)),
    "opt": lambda: OPTForCausalLM(OPTConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                            ffn_dim=24, max_position_embeddings=64, word_embed_proj_dim=16,
                                            init_std=0.3, pad_token_id=0)),
    # These decode with the model's own cache: a bias made from the 2-D mask, a window shorter than the text.
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=2,
                                                  initializer_range=0.3)),
    "mistral, window 5": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
    "gemma2, window 5": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=5)),
    # And this one does not need to: nothing slides.
    "mistral, window 64": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64)),
}
GROWING = {"bloom", "mistral, window 5", "gemma2, window 5"}
# Eager attention takes its softmax in float32, where a padded row masked with float64's smallest number is NaN.
SINGLE = {"bloom", "llama, eager", "gemma2, window 5"}
CLOSE = {True: {"atol": 2e-5, "rtol": 1e-5}, False: {"atol": 2e-6, "rtol": 1e-6}}


def make(name: str = "llama") -> Any:
    torch.manual_seed(1)
    return MODELS[name]().to(torch.float32 if name in SINGLE else torch.float64).eval()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(model: Any, seed: int = 0, **changes: Any) -> Samples:
    given: dict[str, Any] = {"group": 3, "max_tokens": 12, "end": END, **changes}
    return sample(model, given.pop("prompts", PROMPTS), generator=seeded(seed), **given)


@torch.no_grad()
def plain(model: Any, samples: Samples, temperature: float = 1.0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """logp and entropy by one forward a row over prompt and completion: no cache, no padding, no batch."""
    logp, entropy = torch.zeros(2, *samples.mask.shape, dtype=torch.float64)
    group = len(samples.mask) // len(PROMPTS)
    for i, (tokens, mask) in enumerate(zip(samples.tokens, samples.mask, strict=True)):
        prompt, chosen = PROMPTS[i // group], tokens[mask]
        logits = model(torch.tensor([[*prompt, *chosen.tolist()]])).logits[0, len(prompt) - 1:-1] / temperature
        p = logits.softmax(-1)
        entropy[i, :len(chosen)] = -(p * p.log()).sum(-1)
        for t, token in enumerate(chosen.tolist()):
            kept, mass = [], 0.0
            for v in p[t].argsort(descending=True).tolist():
                kept.append(v)
                mass += p[t, v].item()
                if mass >= top_p:
                    break
            assert token in kept, "a token outside the nucleus was drawn"
            logp[i, t] = (p[t, token] / p[t, kept].sum()).log()
    return logp, entropy


# -- the numbers ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logp_and_entropy_are_those_of_a_plain_forward(name: str) -> None:
    model = make(name)
    samples = run(model)
    logp, entropy = plain(model, samples)
    torch.testing.assert_close(samples.logp, logp.float(), **CLOSE[name in SINGLE])
    torch.testing.assert_close(samples.entropy, entropy.float(), **CLOSE[name in SINGLE])


@each("name", MODELS)
def test_models_take_the_fast_path_where_it_is_right(name: str) -> None:
    model = make(name)
    decoder, _ = decoding.start(model, PROMPTS, 3, 12)
    assert type(decoder) is (decoding.Growing if name in GROWING else decoding.Slots)


@each("temperature, top_p", [(0.7, 1.0), (1.0, 0.6), (1.5, 0.8), (1.0, 1e-9)])
def test_logp_is_renormalised_after_temperature_and_top_p(temperature: float, top_p: float) -> None:
    model = make()
    samples = run(model, temperature=temperature, top_p=top_p)
    logp, entropy = plain(model, samples, temperature, top_p)
    torch.testing.assert_close(samples.logp, logp.float(), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(samples.entropy, entropy.float(), atol=2e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_temperature_zero_is_generates_greedy(name: str) -> None:
    model = make(name)
    samples = run(model, temperature=0, group=2)
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                                eos_token_id=END, pad_token_id=0)[0, len(prompt):]
        for row in (2 * i, 2 * i + 1):
            assert samples.tokens[row][samples.mask[row]].tolist() == theirs.tolist()
    assert samples.logp.abs().max() == 0
    assert samples.entropy.abs().max() == 0


def test_first_tokens_follow_softmax() -> None:
    """Pearson's χ² of 6,000 draws over 23 tokens: 22 degrees of freedom, so over 48.3 once in a thousand seeds."""
    model, n = make(), 6000
    samples = run(model, prompts=[PROMPTS[0]], group=n, max_tokens=1)
    expected = n * model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).detach()
    counts = torch.bincount(samples.tokens[:, 0], minlength=V)
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 48.3


def test_draw_inverts_the_cumulative_distribution() -> None:
    """p = (½, 0, ⅛, ⅜): sums ½, ½, ⅝, 1. Top-p ⅞ keeps ½ and ⅜, in this order, with mass ⅞."""
    logits = torch.tensor([0.5, 0.0, 0.125, 0.375]).log().repeat(5, 1)
    u = torch.tensor([0.0, 0.49, 0.5, 0.63, 1 - 2**-50], dtype=torch.float64)
    token, logp, entropy, collision = draw(logits, u, 1.0, 1.0)
    assert token.tolist() == [0, 0, 2, 3, 3]
    torch.testing.assert_close(logp.exp(), torch.tensor([0.5, 0.5, 0.125, 0.375, 0.375]))
    torch.testing.assert_close(entropy.exp(), torch.full((5,), 2**0.5 * 8**0.125 * (8 / 3) ** 0.375))
    torch.testing.assert_close(collision, torch.full((5,), (16 + 1 + 9) / 64))
    token, logp, entropy, collision = draw(logits, u, 1.0, 0.87)
    assert token.tolist() == [0, 0, 0, 3, 3]  # 4/7 = 0.571 lies between 0.5 and 0.63
    torch.testing.assert_close(logp.exp(), torch.tensor([4, 4, 4, 3, 3]).double() / 7, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.exp(), torch.full((5,), 2**0.5 * 8**0.125 * (8 / 3) ** 0.375))
    torch.testing.assert_close(collision, torch.full((5,), (16 + 1 + 9) / 64))


# -- rows ----------------------------------------------------------------------------------------------------


@each("name", ["llama", "mistral, window 5"])
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    model = make(name).float()
    one, two, other = run(model, 3), run(model, 3), run(model, 4)
    for field in ("tokens", "mask", "logp", "entropy", "finished"):
        assert torch.equal(getattr(one, field), getattr(two, field))
    assert one.tokens.shape != other.tokens.shape or not torch.equal(one.tokens, other.tokens)


@each("name", ["llama", "mistral, window 5"])
def test_torchs_default_dtype_changes_nothing(name: str) -> None:
    model = make(name)
    usual = run(model)
    with in_dtype(torch.float64):
        wide = run(model)
    for field in ("tokens", "mask", "logp", "entropy", "collision", "finished"):
        assert torch.equal(getattr(usual, field), getattr(wide, field))
        assert getattr(usual, field).dtype == getattr(wide, field).dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mistral, window 5"])
def test_a_row_does_not_depend_on_when_others_leave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name)
    leaving = run(model, group=8, max_tokens=30)
    assert len(leaving.mask.sum(1).unique()) > 5, "too few lengths to test anything"
    for kind in (decoding.Slots, decoding.Growing):
        monkeypatch.setattr(kind, "worth", lambda *_: False)
    staying = run(model, group=8, max_tokens=30)
    assert torch.equal(leaving.tokens, staying.tokens)
    assert torch.equal(leaving.finished, staying.finished)
    torch.testing.assert_close(leaving.logp, staying.logp)


def test_looking_for_finished_rows_less_often_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    often = run(model, group=8, max_tokens=30)
    monkeypatch.setattr("creditscope.policy.sampling._pause", lambda device: 8)
    rarely = run(model, group=8, max_tokens=30)
    assert torch.equal(often.tokens, rarely.tokens)
    assert torch.equal(often.mask, rarely.mask)


def test_a_smaller_limit_cuts_the_same_completions() -> None:
    model = make()
    long, short = run(model, max_tokens=20), run(model, max_tokens=6)
    assert torch.equal(long.tokens[:, :6], short.tokens)


def test_the_end_token_counts_and_what_follows_is_padding() -> None:
    samples = run(make(), group=8, max_tokens=30)
    lengths = samples.mask.sum(1)
    ended = torch.isin(samples.tokens, torch.tensor(END)) & samples.mask
    assert samples.tokens.shape[1] == lengths.max()
    assert torch.equal(samples.mask, torch.arange(samples.tokens.shape[1]) < lengths[:, None])
    assert torch.equal(ended.any(1), samples.finished)
    assert torch.equal(ended.sum(1), samples.finished.long())
    assert ended[samples.finished, lengths[samples.finished] - 1].all()
    assert (samples.tokens[~samples.mask] == 0).all()
    assert samples.logp[~samples.mask].abs().max() == samples.entropy[~samples.mask].abs().max() == 0


def test_a_completion_cut_at_the_limit_is_not_finished() -> None:
    samples = run(make(), max_tokens=2, group=8)
    cut = ~samples.finished
    assert 0 < cut.sum() < len(cut)
    assert (samples.mask.sum(1)[cut] == 2).all()
    ends_on_the_last = samples.finished & (samples.mask.sum(1) == 2)
    assert ends_on_the_last.any(), "an end token in the last place finishes the row"


def test_one_prompt_one_row_one_token() -> None:
    samples = run(make(), prompts=[[4]], group=1, max_tokens=1, end=5)
    assert samples.tokens.shape == (1, 1)
    assert samples.mask.all()


def test_prompts_are_computed_once_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make(), []
    forward = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", _watched(forward, seen))
    run(model, group=5, max_tokens=3)
    assert seen[0] == (len(PROMPTS), 6)
    assert all(width == 1 and rows <= 5 * len(PROMPTS) for rows, width in seen[1:])


def _watched(forward: Any, seen: list[tuple[int, ...]]) -> Any:
    def watched(self: Any, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None,
                logits_to_keep: int = 0, **rest: Any) -> Any:
        seen.append(tuple(input_ids.shape))
        return forward(self, input_ids, attention_mask=attention_mask, position_ids=position_ids,
                       logits_to_keep=logits_to_keep, **rest)
    return watched


# -- the model is left as it was -----------------------------------------------------------------------------


def test_every_module_keeps_its_own_training_flag() -> None:
    model = make()
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    quiet = run(model)
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(quiet.tokens, run(model.eval()).tokens)


@each("outer", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_are_plain_tensors_whatever_mode_surrounds_the_call(outer: Any) -> None:
    model = make()
    with outer():
        samples = run(model)
    assert not samples.logp.requires_grad
    assert not samples.logp.is_inference()
    assert torch.equal(samples.tokens, run(model).tokens)


def test_a_lora_adapter_speaks_and_can_be_silenced() -> None:
    peft = pytest.importorskip("peft")
    model = make()
    bare = run(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    samples = run(adapted)
    logp, _ = plain(adapted, samples)
    torch.testing.assert_close(samples.logp, logp.float(), atol=2e-6, rtol=1e-6)
    assert not torch.equal(samples.tokens[:, :6], bare.tokens[:, :6])
    with adapted.disable_adapter():
        assert torch.equal(run(adapted).tokens, bare.tokens)


# -- bad input -----------------------------------------------------------------------------------------------


@each("changes, words", [
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"group": 0}, "group must be at least 1, got 0"),
    ({"temperature": -0.5}, r"temperature must be 0 \(greedy\) or positive, got -0.5"),
    ({"temperature": float("nan")}, "got nan"),
    ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
    ({"prompts": []}, "at least one prompt, got 0"),
    ({"prompts": [[4], []]}, "prompt 1 is empty"),
    ({"prompts": [[4], [V]]}, f"prompt 1 holds token {V}, outside the model's vocabulary of {V}"),
    ({"end": []}, "end is empty"),
    ({"end": [99]}, "end holds token 99"),
    ({"prompts": [[4], [4] * 64]}, "prompt 1 has 64 tokens, the model's context 64; shorten"),
    ({"prompts": [[4] * 60]}, "60 tokens and max_tokens is 12: together 72, over .* 64; set max_tokens to 4 or less"),
])
def test_bad_input_is_refused_with_its_value_and_the_repair(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CreditscopeError, match=words):
        run(make(), **changes)


def test_a_diverged_policy_is_named_as_such() -> None:
    model = make()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(CreditscopeError, match="diverged"):
        run(model)


def test_a_context_filled_to_the_brim_is_allowed() -> None:
    assert run(make("gpt2"), prompts=[[4] * 60], max_tokens=4, end=[1]).tokens.shape[1] <= 4


# -- CUDA ----------------------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@cuda
@pytest.mark.parametrize("name", MODELS)
def test_cuda_samples_what_the_cpu_samples(name: str) -> None:
    model = make(name)
    there = run(model, group=16, max_tokens=30)
    model.cuda()
    for _ in range(2):  # captured, then replayed
        here = run(model, group=16, max_tokens=30)
        assert torch.equal(here.tokens.cpu(), there.tokens)
        torch.testing.assert_close(here.logp.cpu(), there.logp, **CLOSE[name in SINGLE])


@cuda
def test_cuda_graphs_are_kept_and_see_new_weights() -> None:
    model = make().cuda()
    run(model)
    kept = decoding._KEPT[model]
    graphs = dict(kept.graphs)
    with torch.no_grad():  # an optimizer's step: in place
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    here = run(model)
    assert decoding._KEPT[model] is kept
    assert graphs.items() <= kept.graphs.items()
    there = run(copy.deepcopy(model).cpu())
    assert torch.equal(here.tokens.cpu(), there.tokens)
    torch.testing.assert_close(here.logp.cpu(), there.logp, atol=2e-6, rtol=1e-6)


@cuda
@pytest.mark.parametrize("change", ["replaced", "moved", "hooked"])
def test_cuda_graphs_are_not_trusted_after_the_model_was(change: str) -> None:
    model = make().cuda()
    run(model)
    kept = decoding._KEPT[model]
    calls: list[int] = []
    if change == "replaced":
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    elif change == "moved":
        for weight in model.parameters():
            weight.data = weight.data.clone() + 0.1
    else:
        model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    here = run(model)
    assert decoding._KEPT.get(model) is not kept
    assert (len(calls) > 1) == (change == "hooked")
    there = run(copy.deepcopy(model).cpu())
    assert torch.equal(here.tokens.cpu(), there.tokens)


@cuda
def test_cuda_keeps_its_memory_until_it_is_released_or_the_model_goes() -> None:
    model = make().cuda()
    run(model)
    assert model in decoding._KEPT
    decoding.release(model)
    assert model not in decoding._KEPT
    run(model)
    before = len(decoding._KEPT)
    del model
    assert len(decoding._KEPT) == before - 1


@cuda
def test_cuda_a_larger_call_grows_and_a_smaller_one_fits() -> None:
    model = make().cuda()
    for group, limit in ((3, 12), (30, 40), (2, 5)):
        here = run(model, group=group, max_tokens=limit)
        there = run(copy.deepcopy(model).cpu(), group=group, max_tokens=limit)
        assert torch.equal(here.tokens.cpu(), there.tokens)


@cuda
def test_cuda_a_model_that_cannot_be_captured_runs_without() -> None:
    class Waiting(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **rest: Any) -> Any:
            input_ids.sum().item()
            return super().forward(input_ids, **rest)

    torch.manual_seed(1)
    model = Waiting(LlamaConfig(**SMALL)).double().eval()
    there = run(model)
    with pytest.warns(UserWarning, match="Waiting cannot be captured"):
        here = run(model.cuda())
    assert torch.equal(here.tokens.cpu(), there.tokens)
    assert torch.equal(run(model).tokens.cpu(), there.tokens)


@cuda
def test_cuda_lora_switched_off_is_seen() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make(), config)
    there = run(model)
    with model.disable_adapter():
        silent = run(model)
    model.cuda()
    assert torch.equal(run(model).tokens.cpu(), there.tokens)
    with model.disable_adapter():
        assert torch.equal(run(model).tokens.cpu(), silent.tokens)
