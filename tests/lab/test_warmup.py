"""The warm-up: its loss is −log π of the answer's tokens and nothing else, and what it leaves is a model to train."""

from __future__ import annotations

import json
import math
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import mini
from creditscope.cli.output import Output
from creditscope.cli.warmup import Warmup
from creditscope.errors import CreditscopeError
from creditscope.lab.rollout import roll_out
from creditscope.lab.train import train
from creditscope.lab.warmup import (
    MOST_WORDS,
    POOL,
    Example,
    backward,
    deal_out,
    demonstration,
    encode_examples,
    learn_words,
    read_problems,
    warm_up,
    whole,
)
from creditscope.policy.loading import Policy, load_policy
from creditscope.runs.config import Config
from creditscope.runs.record import Record
from creditscope.tasks import Problem, find_task
from creditscope.tasks.turns import MOVES, Ladder
from each import each
from small_models import apart, build

EXACT = 1e-12
MODEL = mini.model()


def finish(work: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All that a generator yields, and what it returns."""
    lines = []
    while True:
        try:
            lines.append(next(work))
        except StopIteration as end:
            return lines, end.value


def warmed(out: Path, task: str = "arithmetic", batch: int = 8, **changes: Any) -> tuple[list[dict[str, Any]],
                                                                                        dict[str, Any]]:
    settings = {"model": MODEL, "steps": 4, "lr": 1e-2, "eval_problems": 0} | changes
    return finish(warm_up(Config(task=task, **settings), out, {}, batch=batch))


# -- the loss ----------------------------------------------------------------------------------------------------------


class Bigram(torch.nn.Module):
    """A "language model" whose logits are a row of a table: log π(y | x) can be worked out by hand."""

    def __init__(self, table: list[list[float]]) -> None:
        super().__init__()
        self.head = torch.nn.Linear(len(table), len(table), bias=False, dtype=torch.float64)
        self.head.weight.data = torch.tensor(table, dtype=torch.float64).T

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> Any:
        onehot = torch.nn.functional.one_hot(input_ids, len(self.head.weight)).double()
        return type("Out", (), {"logits": self.head(onehot)[:, -logits_to_keep:]})


def bigram() -> Policy:
    # After token 0 the three tokens have chances 1/2, 1/4, 1/4; after 1: 1/8, 1/8, 3/4; after 2: 1/3 each.
    chances = [[1 / 2, 1 / 4, 1 / 4], [1 / 8, 1 / 8, 3 / 4], [1 / 3, 1 / 3, 1 / 3]]
    return Policy("bigram", Bigram([[math.log(p) for p in row] for row in chances]), tokenizer=None)


BATCH = [Example([1, 0], [1, 2]), Example([2], [0, 1, 2])]
# Answer 1 2 after a prompt that ends in 0: 1/4 · 3/4. Answer 0 1 2 after 2: 1/3 · 1/4 · 3/4. Five tokens in all.
BY_HAND = -(math.log(1 / 4 * 3 / 4) + math.log(1 / 3 * 1 / 4 * 3 / 4)) / 5


def test_the_loss_is_the_mean_of_minus_log_pi_over_the_answers_tokens_by_hand() -> None:
    assert backward(bigram(), BATCH, logits=10**9) == pytest.approx(BY_HAND, rel=EXACT)


def test_the_gradient_is_that_of_the_answers_tokens_alone_by_hand() -> None:
    policy = bigram()
    backward(policy, BATCH, logits=10**9)
    # ∂loss/∂z[x, v] = (n(x)·π(v|x) − n(x, v))/5 over the answers' transitions: 0→1 twice, 1→2 twice, 2→0 once. The
    # prompt's own 1→0 is none of them.
    counts = torch.tensor([[0, 2, 0], [0, 0, 2], [1, 0, 0]], dtype=torch.float64)
    pi = policy.model.head.weight.detach().T.softmax(dim=1)
    expected = (counts.sum(dim=1, keepdim=True) * pi - counts) / 5
    assert apart(policy.model.head.weight.grad.T, expected) < EXACT


def test_parts_change_memory_and_nothing_else() -> None:
    policy = bigram()
    backward(policy, BATCH, logits=10**9)
    whole_batch = policy.model.head.weight.grad.clone()
    policy.model.zero_grad()
    assert backward(policy, BATCH, logits=1) == pytest.approx(BY_HAND, rel=EXACT)
    assert apart(policy.model.head.weight.grad, whole_batch) < EXACT


def test_a_batch_twice_over_has_the_loss_and_the_gradient_of_the_batch() -> None:
    policy = bigram()
    backward(policy, BATCH, logits=10**9)
    once = policy.model.head.weight.grad.clone()
    policy.model.zero_grad()
    assert backward(policy, [*BATCH, *BATCH], logits=1) == pytest.approx(BY_HAND, rel=EXACT)
    assert apart(policy.model.head.weight.grad, once) < EXACT


def test_every_token_counts_alike_whatever_the_length_of_its_answer() -> None:
    policy = Policy("llama", build("llama"), tokenizer=None)
    batch = [Example([5, 7, 9], [11, 2]), Example([8], [4, 3, 6, 7, 2]), Example([6, 6], [2])]
    alone = [backward(policy, [example], logits=10**9) for example in batch]
    for logits in (1, 500, 10**9):  # rows one by one, some together, all at once
        assert backward(policy, batch, logits) == pytest.approx((2 * alone[0] + 5 * alone[1] + alone[2]) / 8, rel=EXACT)


def test_the_loss_is_transformers_own_with_the_prompt_masked_out() -> None:
    model = build("llama")
    policy = Policy("llama", model, tokenizer=None)
    batch = [Example([5, 7, 9], [11, 13, 2]), Example([8], [4, 3, 2])]  # of one length, for a mean of means
    ours = backward(policy, batch, logits=10**9)
    theirs = []
    for example in batch:
        ids = torch.tensor([[*example.prompt, *example.answer]])
        labels = ids.clone()
        labels[0, :len(example.prompt)] = -100
        theirs.append(model(input_ids=ids, labels=labels).loss.item())
    assert ours == pytest.approx(sum(theirs) / 2, rel=1e-6)  # theirs is computed in float32


# -- what is learned ---------------------------------------------------------------------------------------------------


def test_the_demonstration_is_the_solution_where_there_is_one_and_else_the_answer() -> None:
    assert demonstration(Problem("a", "?", "72", {"solution": "70 + 2 = 72\n#### 72"})) == "70 + 2 = 72\n#### 72"
    assert demonstration(Problem("a", "?", "72")) == "72"
    with pytest.raises(CreditscopeError, match="problem a has neither a solution nor an answer"):
        demonstration(Problem("a", "?", ""))


def test_an_example_is_the_prompt_as_the_sampler_reads_it_and_the_solution_with_its_end() -> None:
    policy, problem = load_policy("tiny"), next(find_task("arithmetic").problems("train"))
    (example,) = encode_examples(policy, [problem], max_tokens=80)
    assert example.prompt == policy.encode(problem.prompt)
    assert policy.decode(example.answer) == problem.meta["solution"]
    assert example.answer[-1] == policy.tokenizer.eos_token_id


def test_a_chat_model_learns_behind_its_chat_template() -> None:
    policy, problem = load_policy("tiny"), next(find_task("arithmetic").problems("train"))
    policy.tokenizer.chat_template = "{% for m in messages %}Question:{{ m.content }}{% endfor %}"
    policy.chat = True
    (example,) = encode_examples(policy, [problem], max_tokens=80)
    assert policy.tokenizer.decode(example.prompt) == "Question:" + problem.prompt
    assert policy.tokenizer.decode(example.answer) == problem.meta["solution"] + policy.tokenizer.eos_token


def test_an_answer_that_does_not_fit_is_left_out_and_none_that_fits_is_an_error() -> None:
    policy, problems = load_policy("tiny"), list(islice(find_task("arithmetic").problems("train"), 20))
    lengths = sorted(len(e.answer) for e in encode_examples(policy, problems, max_tokens=200))
    kept = encode_examples(policy, problems, max_tokens=lengths[9])
    assert len(kept) == sum(n <= lengths[9] for n in lengths) < 20
    with pytest.raises(CreditscopeError, match="none of 20 answers has at most 3 tokens"):
        encode_examples(policy, problems, max_tokens=3)
    # The context of tiny is 256 tokens, prompt and answer together.
    with pytest.raises(CreditscopeError, match="context of 256"):
        encode_examples(policy, [Problem("long", "1" * 250, problems[0].answer, problems[0].meta)], max_tokens=200)


def test_a_closed_vocabulary_learns_the_words_it_does_not_know_and_keeps_the_others() -> None:
    policy = load_policy("tiny")
    size, known = len(policy.tokenizer), policy.encode("Tom has 12 apples.\n12 + 7 = 19\n#### 19")
    rows = policy.model.get_input_embeddings().weight.detach().clone()
    assert learn_words(policy, ["up\ndown\nup", "down"], seed=0) == ["down", "up"]
    assert len(policy.tokenizer) == size + 2 == policy.model.get_output_embeddings().weight.shape[0]
    assert policy.decode(policy.tokenizer("up\ndown\nup", add_special_tokens=False)["input_ids"]) == "up\ndown\nup"
    assert policy.encode("Tom has 12 apples.\n12 + 7 = 19\n#### 19") == known
    assert torch.equal(policy.model.get_input_embeddings().weight[:size], rows)
    assert learn_words(policy, ["up\ndown\nup", "12 + 7 = 19\n#### 19"], seed=0) == []


def test_too_many_unknown_words_are_another_language() -> None:
    words = ["".join(random.Random(i).choices("abcdefg", k=8)) for i in range(MOST_WORDS + 1)]
    with pytest.raises(CreditscopeError, match=f"does not know {MOST_WORDS + 1} words"):
        learn_words(load_policy("tiny"), ["\n".join(words)], seed=0)


def test_a_generated_split_gives_what_is_needed_and_has_no_epochs() -> None:
    assert len(read_problems(find_task("arithmetic"), Config(), 24)) == 24
    with pytest.raises(CreditscopeError, match="has no end; give --steps"):
        read_problems(find_task("arithmetic"), Config(), None)


# -- batches -----------------------------------------------------------------------------------------------------------


def numbered(count: int) -> list[Example]:
    return [Example([i], [0] * (1 + (i * 7) % 13)) for i in range(count)]


@each("count, size, steps", [(10, 4, 5), (100, 8, 25), (3, 4, 2)])
def test_an_epoch_sees_every_example_once(count: int, size: int, steps: int) -> None:
    seen = [e.prompt[0] for batch in deal_out(numbered(count), size, steps, seed=0) for e in batch]
    assert len(seen) == size * steps
    times = [seen.count(i) for i in range(count)]
    # steps·size = q·count + r: everyone q times, r of them once more.
    assert sorted(times) == sorted([size * steps // count + (i < size * steps % count) for i in range(count)])


def test_batches_are_of_like_length_and_their_order_is_the_seeds() -> None:
    batches = list(deal_out(numbered(400), 8, POOL, seed=0))

    def width(batch: list[Example]) -> int:
        return max(len(e.answer) for e in batch) - min(len(e.answer) for e in batch)

    assert max(map(width, batches)) <= 2  # thirteen lengths over sixteen batches; at random it would be about 10
    assert batches == list(deal_out(numbered(400), 8, POOL, seed=0))
    assert batches != list(deal_out(numbered(400), 8, POOL, seed=1))
    lengths = [len(batch[0].answer) for batch in batches]
    assert lengths != sorted(lengths)


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_falls_and_the_folder_loads_samples_and_says_how_it_was_made(tmp_path: Path) -> None:
    lines, notes = warmed(tmp_path / "warm", steps=16, eval_problems=4, batch=16)
    unseen = list(islice(find_task("arithmetic").problems("train", seed=1), 64))

    def loss(model: str) -> float:
        policy = load_policy(model)
        return backward(policy, encode_examples(policy, unseen, max_tokens=80), logits=10**9)

    assert 0 < loss(str(tmp_path / "warm")) < 0.8 * loss(MODEL)
    assert [line["step"] for line in lines] == [0, *range(1, 17), 16]
    assert {p.name for p in tmp_path.iterdir()} == {"warm"}
    policy, task = load_policy(str(tmp_path / "warm")), find_task("arithmetic")
    batch = roll_out(policy, task, list(islice(task.problems("test"), 2)), 2, max_tokens=40, temperature=1.0,
                     top_p=1.0, generator=torch.Generator().manual_seed(0))
    assert len(batch.rollouts) == 4
    written = json.loads((tmp_path / "warm" / "warmup.json").read_text())
    assert written == notes
    assert written["settings"]["steps"] == 16
    assert (written["examples"], written["left_out"], written["new_words"]) == (256, 0, [])
    assert set(written["before"]) == set(written["after"]) >= {"eval/accuracy", "eval/low", "eval/high"}


def test_one_seed_gives_the_same_weights_and_another_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        warmed(tmp_path / name, seed=seed, steps=2)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@each("lr", [1e-4, 1e-3])
def test_the_weights_move_as_adamw_says_on_the_first_step(lr: float, tmp_path: Path) -> None:
    # AdamW's first step is lr·g/(|g| + ε): with one step of warm-up, lr itself for every weight with a gradient.
    start = load_policy(MODEL).trainable()
    warmed(tmp_path / "warm", steps=1, lr=lr)
    end = load_policy(str(tmp_path / "warm")).trainable()
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (end[name] - start[name]).detach().abs()
    assert float(moved.median()) == pytest.approx(lr, rel=1e-2)


def word_problems(folder: Path, rows: list[tuple[str, str]]) -> str:
    """A folder in the format of GSM8K, as a task."""
    folder.mkdir()
    for split in ("train", "test"):
        lines = (json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows)
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return f"gsm8k:{folder}"


@pytest.mark.slow
@each("epochs, steps", [(1, 6), (2, 11), (3, 16), (4, 21)])
def test_epochs_are_passes_over_a_file(epochs: int, steps: int, tmp_path: Path) -> None:
    # So many times 21 examples in batches of four, the last one filled up.
    rows = [(f"Tom has {i} apples.", f"#### {i}") for i in range(21)]
    config = Config(model=MODEL, task=word_problems(tmp_path / "data", rows), eval_problems=0, steps=999)
    lines, notes = finish(warm_up(config, tmp_path / "warm", {}, batch=4, epochs=epochs))
    assert notes["examples"] == 21
    assert len(notes["losses"]) == notes["settings"]["steps"] == lines[-1]["steps"] == steps


def test_nothing_is_left_of_a_warm_up_that_is_stopped(tmp_path: Path) -> None:
    work = warm_up(Config(model=MODEL, eval_problems=0, steps=5), tmp_path / "deep" / "warm", {}, batch=2)
    next(work)
    next(work)
    work.close()  # what Ctrl-C does to a generator
    assert list((tmp_path / "deep").iterdir()) == []


def test_nothing_is_left_of_a_folder_that_was_half_written(tmp_path: Path) -> None:
    def interrupted() -> None:
        with whole(tmp_path / "warm") as folder:
            (folder / "config.json").write_text("{")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "mine.txt").write_text("keep me")
    with pytest.raises(CreditscopeError, match="not empty; choose another --out"):
        next(warm_up(Config(model="absent/absent"), tmp_path / "warm", {}))
    assert (tmp_path / "warm" / "mine.txt").read_text() == "keep me"


def test_a_loss_that_overflows_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match="gradient's norm is nan"):
        warmed(tmp_path / "warm", lr=1e12, steps=6)
    assert list(tmp_path.iterdir()) == []


# -- turns -------------------------------------------------------------------------------------------------------------


def test_train_problems_of_turns_come_with_a_random_walk_and_test_problems_with_the_reference() -> None:
    task = Ladder(top=4, turns=3)
    first = list(islice(task.problems("train", 5), 400))
    walks = [p.meta["solution"].split("\n") for p in first]
    assert all(len(walk) == 3 and set(walk) <= set(MOVES) for walk in walks)
    ups = sum(move == "up" for walk in walks for move in walk)
    assert abs(ups - 600) < 4 * math.sqrt(300)  # 1,200 fair coins: 600 ± √300
    assert {tuple(walk) for walk in walks} == {tuple(MOVES[a] for a in moves) for moves in task.walks()}
    assert first == list(islice(task.problems("train", 5), 400))
    assert [demonstration(p) for p in task.problems("test")] == ["up\nup\nup"] * 5


@pytest.mark.slow
@pytest.mark.parametrize(("model", "steps", "lr"), [
    (MODEL, 80, 2e-2), pytest.param("tiny", 45, 2e-3, marks=pytest.mark.nightly)], ids=["mini", "tiny"])
def test_after_a_warm_up_a_model_plays_turns_by_the_rules_and_as_fair_coins(model: str, steps: int, lr: float,
                                                                           tmp_path: Path) -> None:
    _, notes = warmed(tmp_path / "warm", task="turns", model=model, steps=steps, lr=lr, batch=32)
    # Three fair coins, two line breaks and the end: no policy does better than 3·ln 2 nats over six tokens.
    assert notes["losses"][-1] == pytest.approx(math.log(2) / 2, abs=0.01)
    assert notes["new_words"] == ["down", "up"]
    policy, task = load_policy(str(tmp_path / "warm")), Ladder()
    batch = roll_out(policy, task, list(task.problems("test")), 20, max_tokens=32, temperature=1.0, top_p=1.0,
                     generator=torch.Generator().manual_seed(0))
    answers = [text.split("\n") for text in batch.rollouts.text]
    legal = [answer for answer in answers if len(answer) == 3 and set(answer) <= set(MOVES)]
    assert len(legal) > 0.9 * len(answers)
    ups = sum(move == "up" for answer in legal for move in answer)
    assert 0.3 < ups / (3 * len(legal)) < 0.7
    assert not bool(batch.dead.any())


# -- the model of P1's experiment, in small ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_nemotron_folder_is_warmed_up_and_trained_and_the_microscope_reads_every_parameter(tmp_path: Path) -> None:
    tokenizer = load_policy("tiny").tokenizer
    model = build("nemotron", torch.float32, vocab_size=len(tokenizer), max_position_embeddings=256,
                  **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")})
    Policy("random", model, tokenizer).save(tmp_path / "nemotron")
    # Nobody can know which it is, so a model that has learnt the form is right half of the time.
    task = word_problems(tmp_path / "data", [(f"Tom has {i} apples.", f"#### {i * i % 7 % 2}") for i in range(40)])
    config = Config(model=str(tmp_path / "nemotron"), task=task, eval_problems=0, steps=40, lr=1e-2)
    _, notes = finish(warm_up(config, tmp_path / "warm", {}, batch=16))
    assert notes["losses"][-1] < 0.5 < notes["losses"][0]

    config = Config(model=str(tmp_path / "warm"), task=task, method="p1_grpo", group=8, prompts=4, steps=1,
                    max_tokens=8, scope="light", eval_problems=0)
    lines, finished = finish(train(config, tmp_path / "run", {}))
    assert finished
    assert lines[0]["signal/live_groups"] > 0
    reading = Record.open(tmp_path / "run").reading(0)
    names = set(load_policy(str(tmp_path / "warm")).trainable())
    assert set(reading["layer_names"].tolist()) == names
    assert {"model.norm.weight", "model.norm.bias", "lm_head.weight", "model.embed_tokens.weight",
            "model.layers.0.input_layernorm.bias", "model.layers.1.self_attn.q_proj.weight"} <= names
    every = dict(zip(reading["layer_names"].tolist(), reading["layers"].sum(axis=(2, 3)).tolist(), strict=True))
    assert all(max(norms) > 0 for norms in every.values())


# -- the verb ----------------------------------------------------------------------------------------------------------


def test_the_verb_prints_loss_what_it_wrote_and_the_next_command(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "warm"
    assert Warmup(MODEL, "arithmetic", out, steps=2, batch=4, eval_problems=2).run() == 0
    shown = capsys.readouterr().out
    assert "2 steps on 8 examples" in shown
    assert "step 2/2  loss" in shown
    assert shown.count("test ") == 3  # announced, before, after
    assert f"Next: creditscope lab train {out} --task arithmetic" in shown


def test_the_verb_gives_programs_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb = Warmup(MODEL, "arithmetic", tmp_path / "warm", steps=1, batch=2, eval_problems=0, output=Output(json=True))
    assert verb.run() == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 1


@each("flags, message", [
    ({"steps": 3, "epochs": 1}, "both say how long; give one"),
    ({"epochs": 0}, "--epochs must be at least 1, got 0"),
    ({"batch": 0}, "--batch must be at least 1, got 0"),
    ({"steps": 0}, "--steps must be at least 1, got 0"),
    ({"epochs": 1}, "has no end; give --steps"),
    ({"dtype": "float16"}, "unknown dtype 'float16'"),
    ({"chat": "on"}, "has no chat template"),
])
def test_bad_flags_are_refused_in_words(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CreditscopeError, match=message):
        Warmup(MODEL, "arithmetic", tmp_path / "warm", **flags).run()
    assert not (tmp_path / "warm").exists()
