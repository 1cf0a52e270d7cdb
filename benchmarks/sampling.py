"""Sampling beside `model.generate` on the same model and batch, in one run.

    python benchmarks/sampling.py            on the GPU where there is one, else on the CPU (--device cpu)

Prints a table and writes it to its section of benchmarks/sampling.md. `generate` gives tokens alone; ours give their
log-probs and entropies too. On the CPU the model is the packaged one on its own task. On a GPU it is a 135 M Llama
shape with random weights: there, "spread" makes one token in a hundred an end token, so that lengths are geometric up
to the limit, and "full" lets every completion run to the limit.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from creditscope.policy.decoding import release
from creditscope.policy.loading import TINY, load_policy
from creditscope.policy.sampling import sample
from creditscope.tasks import find_task

PAGE = Path(__file__).with_suffix(".md")


@dataclass
class Case:
    name: str
    model: Any
    prompts: list[list[int]]
    group: int
    max_tokens: int
    end: list[int]
    top_p: float = 1.0

    def ours(self) -> Tensor:
        """(B,) lengths."""
        return sample(self.model, self.prompts, self.group, max_tokens=self.max_tokens, end=self.end,
                      top_p=self.top_p).mask.sum(1)

    def theirs(self) -> Tensor:
        width, device = max(map(len, self.prompts)), self.model.device
        rows = [p for p in self.prompts for _ in range(self.group)]
        ids = torch.tensor([[0] * (width - len(p)) + p for p in rows], device=device)
        mask = torch.arange(width, device=device) >= torch.tensor([[width - len(p)] for p in rows], device=device)
        out = self.model.generate(ids, attention_mask=mask.long(), do_sample=True, temperature=1.0, top_k=0,
                                  top_p=self.top_p, max_new_tokens=self.max_tokens, eos_token_id=self.end,
                                  pad_token_id=0)[:, width:]
        ended = torch.isin(out, torch.tensor(self.end, device=device)).long().cumsum(1)
        return ((ended == 0).sum(1) + (ended > 0).any(1).long()).clamp(max=out.shape[1])


def packaged() -> list[Case]:
    task = find_task("arithmetic")
    policy = load_policy("tiny", device="cpu")
    problems = list(islice(task.problems("test"), 8))
    prompts = [policy.encode(problem.prompt) for problem in problems]
    return [Case("packaged, natural lengths, 8 × 8", policy.model, prompts, 8, task.max_tokens, list(policy.end)),
            Case("the same, top-p 0.9", policy.model, prompts, 8, task.max_tokens, list(policy.end), 0.9),
            Case("the same, 1 × 1", policy.model, prompts[:1], 1, task.max_tokens, list(policy.end))]


def random_llama(device: str) -> list[Case]:
    """The packaged model's shape on a CPU, SmolLM2-135M's on a GPU."""
    torch.manual_seed(0)
    gpu = device == "cuda"
    shape = LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True) if gpu else LlamaConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, intermediate_size=384,
        vocab_size=128, max_position_embeddings=512)
    model = LlamaForCausalLM(shape).to(device, torch.bfloat16 if gpu else torch.float32).eval()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight[:, 0]))
    model.lm_head.bias.data[0] = -1e4  # token 0 is never drawn
    name = "random 135 M, bf16" if gpu else "random 1.3 M"
    limit, often = (256, shape.vocab_size // 100) if gpu else (90, 4)
    prompts = [torch.randint(1000 if gpu else 10, shape.vocab_size, (n,)).tolist() for n in range(40, 72, 4)]
    cases = []
    for group in (16, 64) if gpu else (8,):
        cases.append(Case(f"{name}, spread, 8 × {group}", model, prompts, group, limit, list(range(1, often + 1))))
        cases.append(Case(f"{name}, full, 8 × {group}", model, prompts, group, limit, [0]))
    if not gpu:
        cases.append(Case(f"{name}, full, 1 × 1", model, prompts[:1], 1, limit, [0]))
    return cases


def measure(jobs: dict[str, Callable[[], Tensor]], repeats: int, gpu: bool) -> dict[str, dict[str, float]]:
    """Medians over `repeats` turns; the jobs take turns, so that other load slows both.

    Memory, allocated and reserved, is that of the first turn: there `generate` runs before ours have anything to keep.
    """
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in jobs}
    first: dict[str, dict[str, float]] = {}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            if gpu and turn == 0:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            lengths = job()
            if gpu:
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            if turn == 0:
                first[name] = {"first": took}
                if gpu:
                    first[name] |= {"peak": torch.cuda.max_memory_allocated() / 2**30,
                                    "reserved": torch.cuda.max_memory_reserved() / 2**30}
            else:
                seen[name].append((took, len(lengths) / took, lengths.sum().item() / took))
    keys = ("seconds", "rollouts", "tokens")
    return {name: first[name] | dict(zip(keys, map(statistics.median, zip(*rows, strict=True)), strict=True))
            for name, rows in seen.items()}


def machine(gpu: bool) -> str:
    chip = platform.machine()
    if gpu:
        chip = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        names = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        chip = f"{(names or [chip])[0].strip()}, {torch.get_num_threads()} threads"
    return f"{chip}; torch {torch.__version__}, transformers {transformers.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    gpu = given.device == "cuda"
    lines = [f"{machine(gpu)}. Median of {given.repeats} turns after a first one.\n\n",
             "| model, lengths, prompts × group | sampler | rollouts/s | tokens/s | s | first call, s | × generate |"
             + " peak GiB (reserved) |" * gpu + "\n", "| --- " * (7 + gpu) + "|\n"]
    print(*lines, sep="", end="")
    cases = packaged() if not gpu and (TINY / "config.json").exists() else []
    for case in cases + random_llama(given.device):
        found = measure({"generate": case.theirs, "creditscope": case.ours}, given.repeats, gpu)
        for name, m in found.items():
            # By tokens, not seconds: both draw their own lengths.
            lines.append(f"| {case.name} | {name} | {m['rollouts']:.1f} | {m['tokens']:,.0f} | {m['seconds']:.2f} | "
                         f"{m['first']:.2f} | {m['tokens'] / found['generate']['tokens']:.2f} |"
                         + (f" {m['peak']:.1f} ({m['reserved']:.1f}) |" if gpu else "") + "\n")
            print(lines[-1], end="", flush=True)
        release(case.model)
    write("CUDA" if gpu else "CPU", "".join(lines))


def write(section: str, text: str) -> None:
    """Replace one section of the page; the other one was measured on another machine."""
    title = "# Sampling beside `model.generate`\n\n"
    old = PAGE.read_text().split("## ")[1:] if PAGE.exists() else []
    kept = dict(part.split("\n\n", 1) for part in old) | {section: text}
    PAGE.write_text(title + "\n".join(f"## {name}\n\n{kept[name].strip()}\n" for name in sorted(kept)))


if __name__ == "__main__":
    main()
