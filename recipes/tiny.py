"""The recipe of the packaged model: a 1.25 M-parameter Llama, supervised on arithmetic's train split.

    PYTHONPATH=src python recipes/tiny.py                       # as packaged; a GPU if there is one
    PYTHONPATH=src python recipes/tiny.py --slip 0.1 --out X    # a better pupil, elsewhere

Every problem is seen once and the loss is on the answer's tokens only. The demonstrations are a pupil's, not a
book's: one result in six is off by 1, 2 or 10 and is carried on, so the model learns to reckon and to slip, and
reinforcement has something to put right. README.md beside this says why stopping early instead does not do.
Nothing is disturbed when it samples. On a CPU the same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import time
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from creditscope.lab.evaluate import wilson
from creditscope.tasks.arithmetic import Arithmetic
from creditscope.tasks.stories import PIECE, compute, pieces, vocabulary

HERE = Path(__file__).resolve().parent
PACKAGED = HERE.parent / "src" / "creditscope" / "models" / "tiny"
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CONTEXT = 256
MICRO = 4  # on a CPU a batch goes through in parts, sorted by length: little padding, the same gradient
CHUNK = 2000  # problems a worker makes at a time


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a piece of arithmetic's closed vocabulary. Pieces carry their spaces, so decoding is joining."""
    words = {word: i for i, word in enumerate([PAD, BOS, EOS, UNK, *vocabulary()])}
    core = Tokenizer(models.WordLevel(words, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE.pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, words[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="left",
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Four layers of width 160, five heads, tied embeddings."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=160, num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=5,
        intermediate_size=432, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id))


Example = tuple[list[int], int]  # token ids, and how many of them are the prompt


def slip(solution: str, rng: random.Random, chance: float, largest: int) -> str:
    """The solution as a hurried pupil writes it: a result is off by 1, 2 or 10 with that chance, and carried on.

    >>> slip("12 + 7 = 19\\n19 - 4 = 15\\n#### 15", random.Random(4), 0.5, 99)
    '12 + 7 = 9\\n9 - 4 = 5\\n#### 5'
    """
    wrong: dict[int, int] = {}  # what the pupil has in the place of a right result
    *chain, _ = solution.split("\n")
    written, result = [], 0
    for line in chain:
        left, op, right, _, true = line.split()
        first, second = (wrong.get(int(n), int(n)) for n in (left, right))
        found = compute(first, op, second)
        # What no longer divides, or leaves the numbers of the task, the pupil puts down as it should have been.
        result = int(true) if found is None or not 0 <= found <= largest else found
        if rng.random() < chance:
            result = max(0, min(largest, result + rng.choice([-10, -2, -1, 1, 2, 10])))
        if result != int(true):
            wrong[int(true)] = result
        written.append(f"{first} {op} {second} = {result}")
    return "\n".join([*written, f"#### {result}"])


def _make(task: Arithmetic, chance: float, seed: int, start: int) -> list[Example]:
    """Examples [start, start + CHUNK) of the train split."""
    ids = {word: i for i, word in enumerate([PAD, BOS, EOS, UNK, *vocabulary()])}
    made = []
    for i in range(start, start + CHUNK):
        problem = task.problem("train", i, seed)
        answer = slip(problem.meta["solution"], random.Random(f"slip-{seed}-{i}"), chance, task.largest)
        prompt = [ids[BOS], *(ids[p] for p in pieces(problem.prompt))]
        made.append(([*prompt, *(ids[p] for p in pieces(answer)), ids[EOS]], len(prompt)))
    return made


def examples(task: Arithmetic, chance: float, seed: int, workers: int) -> Generator[Example, None, None]:
    """The train split as token ids, without end, made ahead by other processes."""
    with ProcessPoolExecutor(workers) as pool:
        ahead = [pool.submit(_make, task, chance, seed, i * CHUNK) for i in range(2 * workers)]
        for i in itertools.count(2 * workers):
            yield from ahead.pop(0).result()
            ahead.append(pool.submit(_make, task, chance, seed, i * CHUNK))


def backward(model: LlamaForCausalLM, batch: list[Example]) -> float:
    """Gradient of the mean of −log π over the answers' tokens, part by part; returns that mean."""
    batch = sorted(batch, key=lambda e: len(e[0]))
    count = sum(len(ids) - prompt for ids, prompt in batch)
    size = math.ceil(len(batch) / (1 if model.device.type == "cuda" else MICRO))
    total = 0.0
    for part in (batch[i:i + size] for i in range(0, len(batch), size)):
        width = len(part[-1][0])
        ids = torch.tensor([e + [0] * (width - len(e)) for e, _ in part])
        place = torch.arange(1, width)
        answer = torch.stack([(place >= prompt) & (place < len(e)) for e, prompt in part])
        ids, answer = ids.to(model.device), answer.to(model.device)
        # Padding stands on the right of a causal model and outside the loss, so it needs no mask.
        with sdpa_kernel(SDPBackend.MATH) if ids.is_cuda else nullcontext():  # CUDA's faster ones are not deterministic
            logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[answer].float(), ids[:, 1:][answer], reduction="sum") / count
        loss.backward()
        total += float(loss.detach())
    return total


def rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 50 steps, constant, linear decay to a tenth over the last quarter."""
    left = (steps - step) / (0.25 * steps)
    return peak * min(1.0, (step + 1) / 50) * min(1.0, 0.1 + 0.9 * left)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int = 0) -> dict[str, Any]:
    """Figures on the first `count` test problems, one answer each, sampled at temperature 1 from all tokens."""
    task = Arithmetic()
    problems = list(itertools.islice(task.problems("test"), count))
    torch.manual_seed(seed)
    tallies = dict.fromkeys(("right", "formed", "tokens", "lines", "right lines", "wrong", "early", "truncated"), 0)
    by_steps: dict[int, list[int]] = {}
    for i in range(0, count, 250):
        part = problems[i:i + 250]
        inputs = tokenizer([p.prompt for p in part], return_tensors="pt", padding=True,
                           return_token_type_ids=False).to(model.device)
        out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                             max_new_tokens=task.max_tokens, pad_token_id=tokenizer.pad_token_id)
        for problem, row in zip(part, out[:, inputs["input_ids"].shape[1]:], strict=True):
            verdict = task.verify(problem, tokenizer.decode(row, skip_special_tokens=True))
            lines, needed = [s.reward for s in verdict.steps], len(problem.meta["chain"])
            ended = bool((row == tokenizer.eos_token_id).any())
            formed = ended and len(lines) > 1 and "####" in tokenizer.decode(row)
            tallies["right"] += int(verdict.reward)
            tallies["formed"] += formed
            tallies["truncated"] += not ended
            tallies["tokens"] += int((row != tokenizer.pad_token_id).sum())
            tallies["lines"] += len(lines[:-1])
            tallies["right lines"] += int(sum(lines[:-1]))
            by_steps.setdefault(needed, []).append(int(verdict.reward))
            if not verdict.reward:
                tallies["wrong"] += 1
                tallies["early"] += 0.0 in lines[:needed - 1]
    low, high = wilson(tallies["right"], count)
    return {
        "problems": count, "accuracy": tallies["right"] / count, "interval": [round(low, 4), round(high, 4)],
        "line accuracy": round(tallies["right lines"] / max(tallies["lines"], 1), 4),
        "well-formed": tallies["formed"] / count, "truncated": tallies["truncated"] / count,
        "tokens": tallies["tokens"] / count,
        "wrong answers whose first wrong line is before the last":
            round(tallies["early"] / max(tallies["wrong"], 1), 4),
        "accuracy by steps": {k: round(sum(v) / len(v), 3) for k, v in sorted(by_steps.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the packaged model.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--slip", type=float, default=0.18, help="chance that a line of a demonstration is off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--problems", type=int, default=1000, help="test problems in the last evaluation")
    parser.add_argument("--out", type=Path, default=PACKAGED)
    parser.add_argument("--notes", type=Path, default=HERE, help="where tiny.log and tiny.json go")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)  # made on the CPU, so that the seed gives the same start everywhere
    model = model.to(args.device).train()
    size = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    args.notes.mkdir(parents=True, exist_ok=True)
    log = (args.notes / "tiny.log").open("w")

    def say(line: str) -> None:
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    say(f"{size} parameters, {len(tokenizer)} tokens, {args.steps} steps of {args.batch} problems, lr {args.lr}, "
        f"slip {args.slip}, "
        f"seed {args.seed}, {args.device}, torch {torch.__version__}, transformers {transformers.__version__}")
    began = time.perf_counter()
    source = examples(Arithmetic(), args.slip, args.seed, args.workers)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, args.lr)
        loss = backward(model, list(itertools.islice(source, args.batch)))
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            say(f"step {step + 1:4d}  loss {loss:.4f}  grad norm {norm:.3f}  {time.perf_counter() - began:.0f} s")
    source.close()
    trained = time.perf_counter() - began

    model.eval()
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # safetensors makes it private; a package is for everyone
    figures = evaluate(model, tokenizer, args.problems, args.seed)
    settings = {k: v for k, v in vars(args).items() if k in ("steps", "batch", "lr", "slip", "seed", "device")}
    result = {"settings": settings, "parameters": size, "tokens": len(tokenizer), "last loss": round(loss, 4),
              "seconds": round(trained), "test at temperature 1": figures,
              "versions": {"python": platform.python_version(), "torch": torch.__version__,
                           "transformers": transformers.__version__}}
    (args.notes / "tiny.json").write_text(json.dumps(result, indent=2) + "\n")
    for key, value in figures.items():
        say(f"{key}: {value}")
    log.close()


if __name__ == "__main__":
    main()
