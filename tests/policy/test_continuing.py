"""Continuing: every prefix that is cut out of a shared cache, against the same prefix computed as a prompt."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from creditscope.errors import CreditscopeError
from creditscope.policy import decoding
from creditscope.policy.loading import load_policy
from creditscope.policy.sampling import Samples, continue_from, sample
from each import each
from small_models import build

V, END, LIMIT = 50, [1, 2, 3, 4, 44, 45, 46], 12
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [30, 30, 40]]
# Weights that make each token matter: by default all logits are nearly the same, and tied ones repeat a token for ever.
LOUD = {"initializer_range": 0.4, "tie_word_embeddings": False}
MODELS: dict[str, Any] = {
    **{family: lambda family=family: build(family, **LOUD) for family in (
        "llama", "qwen2", "qwen3", "gemma", "gemma3", "gpt2", "neox", "phi", "mistral", "mixtral", "qwen3_moe")},
    "opt": lambda: build("opt", init_std=0.4),
    # These attend eagerly, which is NaN in float64 where a row is padded.
    "gemma2": lambda: build("gemma2", torch.float32, **LOUD),
    "gpt_oss": lambda: build("gpt_oss", torch.float32, **LOUD),
    "llama, eager": lambda: build("llama", torch.float32, attn_implementation="eager", **LOUD),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=2, **LOUD)).eval(),
    "gpt_neo": lambda: GPTNeoForCausalLM(GPTNeoConfig(
        vocab_size=V, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=64, **LOUD)).eval(),
    # The window has slid before a prefix ends; in some layers; not before continuations are written.
    "mistral, window 5": lambda: build("mistral", sliding_window=5, **LOUD),
    "gemma3, window 5": lambda: build("gemma3", sliding_window=5, layer_types=["sliding_attention", "full_attention"],
                                      **LOUD),
    "mistral, window 22": lambda: build("mistral", sliding_window=22, **LOUD),
}
WHOLE = {"mistral, window 5", "gemma3, window 5"}  # whose prefixes must be computed as prompts
GROWING = {*WHOLE, "bloom", "gpt_neo", "mistral, window 22"}


@cache
def make(name: str = "llama") -> Any:
    torch.manual_seed(1)
    return MODELS[name]()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rolled(model: Any, group: int = 3, **changes: Any) -> tuple[list[list[int]], Samples]:
    """A batch as the trainer has it: each row's prompt, and completions of many lengths."""
    given: dict[str, Any] = {"max_tokens": LIMIT, "end": END, "generator": seeded(7), **changes}
    return [prompt for prompt in PROMPTS for _ in range(group)], sample(model, PROMPTS, group, **given)


def cuts_of(samples: Samples, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The prompt, the middle, all but the last token and the whole of each row, shuffled, some of them twice."""
    lengths = samples.mask.sum(1).tolist()
    pairs = [(i, c) for i, n in enumerate(lengths) for c in (0, n // 2, n - 1, n)] + [(4, 0), (2, lengths[2] // 2)]
    order = torch.randperm(len(pairs), generator=seeded(seed))
    row, cut = torch.tensor(pairs)[order].unbind(1)
    return row, cut


def run(model: Any, prompts: list[list[int]], tokens: Tensor, row: Tensor, cut: Tensor, samples: int = 3,
        **changes: Any) -> Samples:
    given: dict[str, Any] = {"max_tokens": LIMIT, "end": END, "generator": seeded(1), **changes}
    return continue_from(model, prompts, tokens, row, cut, samples, **given)


def twin(model: Any, prompts: list[list[int]], tokens: Tensor, row: Tensor, cut: Tensor, samples: int = 3,
         **changes: Any) -> Samples:
    """The same by `sample`, each prefix a prompt of its own: completions are cut at each prefix's own limit after."""
    given: dict[str, Any] = {"max_tokens": LIMIT, "end": END, "generator": seeded(1), **changes}
    prefixes = [prompts[i] + tokens[i, :c].tolist() for i, c in zip(row.tolist(), cut.tolist(), strict=True)]
    whole = sample(model, prefixes, samples, **given)
    over = torch.tensor([c > 0 and prefix[-1] in END for c, prefix in zip(cut.tolist(), prefixes, strict=True)])
    limit = torch.where(over, 0, given["max_tokens"] - cut).repeat_interleave(samples)
    mask = whole.mask & (torch.arange(whole.mask.shape[1]) < limit[:, None])
    width = int(mask.sum(1).max())
    kept = {name: (getattr(whole, name) * mask)[:, :width] for name in ("tokens", "logp", "entropy", "collision")}
    done = whole.finished & (whole.mask.sum(1) <= limit) | over.repeat_interleave(samples)
    return Samples(mask=mask[:, :width], finished=done, **kept)


def same(ours: Samples, other: Samples, atol: float = 2e-5, ties: int = 0) -> None:
    """Equal, but for so many rows in which u fell between the two sums that rounding makes of one: F⁻¹ is then one
    token or its neighbour, by the processor. Float32 has met one, with u 2.4e-8 from the bound."""
    parted = (ours.tokens != other.tokens).any(dim=1)
    assert int(parted.sum()) <= ties
    for mine, theirs in zip(ours.tokens[parted], other.tokens[parted], strict=True):
        t = int((mine != theirs).nonzero()[0])
        assert abs(int(mine[t]) - int(theirs[t])) == 1
    for name in ("tokens", "mask", "finished"):
        assert torch.equal(getattr(ours, name)[~parted], getattr(other, name)[~parted])
    for name in ("logp", "entropy", "collision"):
        torch.testing.assert_close(getattr(ours, name)[~parted], getattr(other, name)[~parted], atol=atol, rtol=1e-5)


# -- the same as from a prompt -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_cut_from_the_cache_is_continued_as_if_it_were_a_prompt(name: str) -> None:
    model = make(name)
    prompts, samples = rolled(model)
    row, cut = cuts_of(samples)
    assert len(samples.mask.sum(1).unique()) > 3, "too few lengths to test anything"
    ours = run(model, prompts, samples.tokens, row, cut)
    assert 0.05 < ours.finished.float().mean() < 0.95
    same(ours, twin(model, prompts, samples.tokens, row, cut), ties=int(model.dtype == torch.float32))


@each("name", MODELS)
def test_caches_are_cut_where_they_are_whole_and_both_decoders_take_them(name: str) -> None:
    model = make(name)
    known = decoding.read(model, PROMPTS)
    assert decoding.sliceable(known.cache, 6 + LIMIT) == (name not in WHOLE)
    assert type(decoding.begin(model, known, 3, 2 * LIMIT)) is (
        decoding.Growing if name in GROWING else decoding.Slots)


@pytest.mark.slow
@each("temperature, top_p", [(0.7, 1.0), (1.0, 0.6), (1.5, 0.8)])
def test_temperature_and_top_p_are_those_of_sample(temperature: float, top_p: float) -> None:
    model = make()
    prompts, samples = rolled(model)
    given = (model, prompts, samples.tokens, *cuts_of(samples))
    same(run(*given, temperature=temperature, top_p=top_p), twin(*given, temperature=temperature, top_p=top_p))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_greedy_completion_continued_from_any_cut_is_its_own_tail(name: str) -> None:
    model = make(name)
    prompts, samples = rolled(model, group=1, temperature=0)
    lengths = samples.mask.sum(1)
    row, cut = torch.tensor([(i, c) for i, n in enumerate(lengths.tolist()) for c in range(n + 1)]).unbind(1)
    tails = run(model, prompts, samples.tokens, row, cut, 2, temperature=0)
    for n, (i, c) in enumerate(zip(row.tolist(), cut.tolist(), strict=True)):
        for k in (2 * n, 2 * n + 1):
            assert tails.tokens[k][tails.mask[k]].tolist() == samples.tokens[i, c:lengths[i]].tolist()
            assert tails.finished[k] == samples.finished[i]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bloom", "mistral, window 5", "mistral, window 22"])
def test_a_row_does_not_depend_on_the_others_in_its_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding: bloom runs in float32, where seed 1 has a uniform 1e-8 from the border between two tokens."""
    model = make(name)
    prompts, samples = rolled(model, group=2)
    given = (model, prompts, samples.tokens, *cuts_of(samples))
    together = run(*given, generator=seeded(2))
    for rows, texts in ((7, 64), (1024, 2), (7, 5), (1, 1)):
        monkeypatch.setattr("creditscope.policy.sampling.ROWS", rows)
        monkeypatch.setattr("creditscope.policy.sampling.TEXTS", texts)
        same(run(*given, generator=seeded(2)), together)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom", "gpt_neo", "mistral, window 22"])
def test_rows_that_stay_in_the_batch_after_their_limit_disturb_nobody(name: str,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and max_tokens fill the context of 64: all in one batch, rows that run along would stand beyond it."""
    model = make(name)
    prompts = [[9, 8, 7, 6], [5, 6, 7, 8]]
    tokens = torch.randint(5, V, (2, 60), generator=seeded(2))
    row, cut = torch.tensor([[0, 0], [0, 58], [1, 30], [1, 59], [0, 57]]).unbind(1)
    given = (model, prompts, tokens, row, cut)
    leaving = run(*given, max_tokens=60, end=[0])
    for kind in (decoding.Slots, decoding.Growing):
        monkeypatch.setattr(kind, "worth", lambda *_: False)
    monkeypatch.setattr("creditscope.policy.sampling._pause", lambda device: 8)
    same(run(*given, max_tokens=60, end=[0]), leaving)


def test_the_packaged_model_continues_its_own_rollouts() -> None:
    policy = load_policy("tiny", device="cpu")
    prompts = [policy.encode(text) for text in ("3 + 4 * 2 = ?\n", "17 - 5 = ?\n")]
    rollouts = sample(policy.model, prompts, 4, max_tokens=40, end=policy.end, generator=seeded(3))
    each = [prompt for prompt in prompts for _ in range(4)]
    pairs = [(i, c) for i, n in enumerate(rollouts.mask.sum(1).tolist()) for c in (0, n // 3, n - 1)]
    row, cut = torch.tensor(pairs).unbind(1)
    given = (policy.model, each, rollouts.tokens, row, cut, 2)
    monte = {"max_tokens": 40, "end": policy.end}
    ours = continue_from(*given, generator=seeded(5), **monte)
    prefixes = [each[i] + rollouts.tokens[i, :c].tolist() for i, c in pairs]
    other = sample(policy.model, prefixes, 2, generator=seeded(5), **monte)
    inside = other.mask & (torch.arange(other.mask.shape[1]) < 40 - cut.repeat_interleave(2)[:, None])
    width = ours.mask.shape[1]
    assert torch.equal(ours.mask, inside[:, :width])
    assert torch.equal(ours.tokens[ours.mask], other.tokens[inside])
    torch.testing.assert_close(ours.logp[ours.mask], other.logp[inside], atol=2e-5, rtol=1e-5)


def test_a_lora_adapter_speaks_in_the_shared_cache_too() -> None:
    peft = pytest.importorskip("peft")
    bare = build("llama", **LOUD)
    prompts, samples = rolled(bare)
    given = (prompts, samples.tokens, *cuts_of(samples))
    silent = run(bare, *given)
    adapted = peft.get_peft_model(bare, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"],
                                                        init_lora_weights=False))
    ours = run(adapted, *given)
    same(ours, twin(adapted, *given))
    assert ours.tokens.shape != silent.tokens.shape or not torch.equal(ours.tokens, silent.tokens)
    with adapted.disable_adapter():
        same(run(adapted, *given), silent)


# -- what is shared ------------------------------------------------------------------------------------------


def watch(model: Any) -> tuple[list[tuple[tuple[int, ...], int]], Any]:
    """The shape of each forward before the decoder's, and how many of its tokens are not padding."""
    seen: list[tuple[tuple[int, ...], int]] = []

    def look(_: Any, args: Any, given: dict[str, Any]) -> None:
        ids, mask = given["input_ids"], given["attention_mask"]
        if mask.dim() == 2:  # the decoder's are 4-D
            seen.append((tuple(ids.shape), int(mask[:, -ids.shape[1]:].sum())))

    return seen, model.register_forward_pre_hook(look, with_kwargs=True)


def test_prompts_are_run_once_and_rollouts_once_on_top_however_many_cuts_there_are() -> None:
    model = build("llama", **LOUD)
    prompts, samples = rolled(model)
    lengths = samples.mask.sum(1)
    row, cut = torch.tensor([(i, c) for i, n in enumerate(lengths.tolist()) for c in range(n)]).unbind(1)
    seen, hook = watch(model)
    run(model, prompts, samples.tokens, row, cut)
    hook.remove()
    assert seen == [((4, 6), sum(map(len, PROMPTS))),
                    ((12, int(lengths.max()) - 1), int((lengths - 1).sum()))]


def test_only_what_is_asked_for_is_run() -> None:
    model = build("llama", **LOUD)
    prompts, samples = rolled(model)
    long = (samples.mask.sum(1) > 3).nonzero()[:, 0]
    i, j = int(long[0]), int(long[-1])
    assert prompts[i] != prompts[j]
    seen, hook = watch(model)
    run(model, prompts, samples.tokens, torch.tensor([j, i, j]), torch.tensor([1, 2, 3]))
    assert seen == [((2, max(len(prompts[i]), len(prompts[j]))), len(prompts[i]) + len(prompts[j])), ((2, 3), 5)]
    seen.clear()
    run(model, prompts, samples.tokens, torch.tensor([i, j]), torch.tensor([0, 0]))
    assert [count for _, count in seen] == [len(prompts[i]) + len(prompts[j])], "cut 0 needs no more than the prompt"
    hook.remove()


# -- limits --------------------------------------------------------------------------------------------------


def test_no_completion_passes_max_tokens_and_one_that_stops_there_is_not_finished() -> None:
    model = make()
    prompts, samples = rolled(model)
    row, cut = cuts_of(samples)
    tails = run(model, prompts, samples.tokens, row, cut, 8)
    lengths, whole = tails.mask.sum(1), tails.mask.sum(1) + cut.repeat_interleave(8)
    ended = (torch.isin(tails.tokens, torch.tensor(END)) & tails.mask).any(1)
    over = (torch.isin(samples.tokens[row, (cut - 1).clamp(min=0)], torch.tensor(END)) & (cut > 0)).repeat_interleave(8)
    assert whole.max() == LIMIT
    assert torch.equal(tails.finished, ended | over)
    assert (whole[~tails.finished] == LIMIT).all()
    assert (tails.finished & ~over & (whole == LIMIT)).any(), "an end in the last place finishes the row"
    assert (lengths[over] == 0).all()
    assert torch.equal(tails.mask, torch.arange(tails.mask.shape[1]) < lengths[:, None])
    assert (tails.tokens[~tails.mask] == 0).all()


def test_a_prefix_that_leaves_no_room_has_no_continuation() -> None:
    model = make()
    tokens = torch.full((2, 5), 20)
    tokens[1, 4] = END[0]
    seen, hook = watch(model)
    none = run(model, PROMPTS[:2], tokens, torch.tensor([0, 1]), torch.tensor([5, 5]), 2, max_tokens=5)
    hook.remove()
    assert none.tokens.shape == none.logp.shape == none.mask.shape == (4, 0)
    assert none.finished.tolist() == [False, False, True, True]
    assert not seen, "nothing to write, nothing to run"


# -- Σπ² -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each("name, temperature, top_p", [(name, *given) for name in ("llama", "gpt2", "bloom")
                                   for given in ((1.0, 1.0), (0.7, 1.0), (1.6, 0.5))])
def test_collision_is_the_sum_of_squares_of_a_plain_forward(name: str, temperature: float, top_p: float) -> None:
    model = make(name)
    prompts, samples = rolled(model, temperature=temperature, top_p=top_p)
    expected = torch.zeros_like(samples.logp)
    for i, prompt in enumerate(prompts):
        chosen = samples.tokens[i][samples.mask[i]].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1:-1]
        expected[i, :len(chosen)] = ((logits / temperature).softmax(-1) ** 2).sum(-1)
    torch.testing.assert_close(samples.collision, expected, atol=1e-5, rtol=1e-5)
    assert samples.collision[samples.mask].std() > 0.005


def test_collision_is_one_where_the_choice_is_certain() -> None:
    _, samples = rolled(make(), temperature=0)
    assert torch.equal(samples.collision, samples.mask.float())


# -- bad input -----------------------------------------------------------------------------------------------


@each("changes, words", [
    ({"row": torch.tensor([0, 4])}, r"row\[1\] is 4, outside 0 to 3, the rows of tokens"),
    ({"row": torch.tensor([-1, 0])}, r"row\[0\] is -1, outside 0 to 3"),
    ({"cut": torch.tensor([0, 6])}, r"cut\[1\] is 6, outside 0 to 5, the tokens of a row"),
    ({"cut": torch.tensor([0, -2])}, r"cut\[1\] is -2, outside 0 to 5"),
    ({"cut": torch.tensor([0, 4]), "max_tokens": 3}, r"cut\[1\] is 4, outside 0 to 3, max_tokens"),
    ({"cut": torch.tensor([0])}, r"row has shape \(2,\) and cut \(1,\)"),
    ({"row": torch.tensor([]), "cut": torch.tensor([])}, "N ≥ 1 prefixes"),
    ({"tokens": torch.full((3, 5), 20)}, r"tokens has shape \(3, 5\) and there are 4 prompts; give .* \(4, T\)"),
    ({"tokens": torch.full((4, 5), -100)}, r"tokens\[1, 0\] is -100, outside the model's vocabulary of 50"),
    ({"samples": 0}, "samples must be at least 1, got 0"),
    ({"max_tokens": 60}, "prompt 2 has 6 tokens and max_tokens is 60: together 66, over .* 64; set max_tokens to 58"),
    ({"temperature": -1.0}, "temperature must be 0"),
])
def test_bad_prefixes_are_refused_with_their_value_and_the_range(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"prompts": PROMPTS, "tokens": torch.full((4, 5), 20), "row": torch.tensor([1, 2]),
                             "cut": torch.tensor([3, 0]), **changes}
    with pytest.raises(CreditscopeError, match=words):
        run(make(), **given)


def test_padding_outside_the_vocabulary_is_nobodys_business_where_no_prefix_takes_it() -> None:
    tokens = torch.full((4, 5), 20)
    tokens[:, 3:] = -100
    samples = run(make(), PROMPTS, tokens, torch.tensor([0, 2]), torch.tensor([3, 1]))
    same(samples, run(make(), PROMPTS, tokens.clamp(min=0), torch.tensor([0, 2]), torch.tensor([3, 1])))


# -- CUDA ----------------------------------------------------------------------------------------------------

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@cuda
@pytest.mark.parametrize("name", MODELS)
def test_cuda_continues_as_the_cpu_does(name: str) -> None:
    model = MODELS[name]()
    prompts, samples = rolled(model)
    row, cut = cuts_of(samples)
    there = run(model, prompts, samples.tokens, row, cut, 16)
    model.cuda()
    for tokens in (samples.tokens, samples.tokens.cuda()):  # captured, then replayed
        here = run(model, prompts, tokens, row.to(tokens.device), cut.to(tokens.device), 16)
        assert here.tokens.is_cuda
        same(Samples(**{field: value.cpu() for field, value in vars(here).items()}), there,
             atol=2e-5 if model.dtype == torch.float64 else 1e-4)  # float32 adds up in another order there


@cuda
def test_cuda_chunks_share_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    prompts, samples = rolled(model)
    given = (prompts, samples.tokens, *cuts_of(samples))
    there = run(model, *given, 16)
    monkeypatch.setattr("creditscope.policy.sampling.ROWS", 100)
    model.cuda()
    here = run(model, *given, 16)
    same(Samples(**{field: value.cpu() for field, value in vars(here).items()}), there)
    assert decoding._KEPT[model].graphed
