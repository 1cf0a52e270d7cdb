"""Continuations of prefixes of rollouts: from one shared cache against each prefix as a prompt; and the cost of Σπ².

    OMP_NUM_THREADS=1 python benchmarks/continuing.py            on the GPU where there is one, else on the CPU

Prints tables and writes them to their section of benchmarks/continuing.md. On the CPU the model is the packaged one on
its own task, rollouts are its own and are cut at the end of each line. On a GPU it is a 135 M Llama shape with random
weights, of which one token in a hundred ends a completion, cut every 32 tokens. Both ways draw the same uniforms, so
they write the same completions, except that a prefix as a prompt may write beyond the limit. Among 49,152 tokens of
nearly equal probability the rounding of bfloat16 alone changes most draws, so there the two differ.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from creditscope.policy import sampling
from creditscope.policy.decoding import start
from creditscope.policy.loading import load_policy
from creditscope.policy.sampling import Samples, continue_from, draw, sample
from creditscope.tasks import find_task

PAGE = Path(__file__).with_suffix(".md")


@dataclass
class Case:
    name: str
    model: Any
    prompts: list[list[int]]
    """Of each row."""
    rollouts: Samples
    row: Tensor
    cut: Tensor
    samples: int
    max_tokens: int
    end: list[int]

    @property
    def prefixes(self) -> list[list[int]]:
        tokens = self.rollouts.tokens.tolist()
        pairs = zip(self.row.tolist(), self.cut.tolist(), strict=True)
        return [self.prompts[i] + tokens[i][:c] for i, c in pairs]

    def shared(self) -> Samples:
        return continue_from(self.model, self.prompts, self.rollouts.tokens, self.row, self.cut, self.samples,
                             max_tokens=self.max_tokens, end=self.end, generator=torch.Generator().manual_seed(0))

    def apart(self) -> Samples:
        return sample(self.model, self.prefixes, self.samples, max_tokens=self.max_tokens, end=self.end,
                      generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def read_shared(self) -> None:
        """Up to the first logits, the rows' own caches made."""
        limit = self.max_tokens - self.cut
        for _ in sampling._decoders(self.model, self.prompts, self.rollouts.tokens.cpu(), self.row, self.cut, limit,
                                    self.samples, 0):
            pass

    @torch.no_grad()
    def read_apart(self) -> None:
        start(self.model, self.prefixes, self.samples, self.max_tokens)

    def describe(self) -> str:
        lengths = torch.tensor([len(p) for p in self.prompts])
        mean = self.rollouts.mask.sum(1).float().mean().item()
        return (f"{self.name}: {len(self.prompts)} rollouts of {mean:.0f} tokens after prompts of "
                f"{lengths.float().mean():.0f}, {len(self.row)} prefixes of "
                f"{(lengths[self.row] + self.cut).float().mean():.0f}, {self.samples} ends each")


def packaged(problems: int = 8, group: int = 8, samples: int = 4) -> Case:
    """Cuts at ends of lines, but not at the end of the answer."""
    task = find_task("arithmetic")
    policy = load_policy("tiny", device="cpu")
    prompts = [policy.encode(problem.prompt) for problem in islice(task.problems("test"), problems)]
    end = list(policy.end)
    rollouts = sample(policy.model, prompts, group, max_tokens=task.max_tokens, end=end,
                      generator=torch.Generator().manual_seed(1))
    pairs = []
    for i, (tokens, mask) in enumerate(zip(rollouts.tokens, rollouts.mask, strict=True)):
        pieces = policy.pieces(tokens[mask].tolist())
        pairs += [(i, 0), *((i, t + 1) for t, piece in enumerate(pieces[:-1]) if "\n" in piece)]
    row, cut = torch.tensor(pairs).unbind(1)
    return Case("packaged model, arithmetic", policy.model, [p for p in prompts for _ in range(group)], rollouts, row,
                cut, samples, task.max_tokens, end)


def random_llama(problems: int = 8, group: int = 16, samples: int = 4) -> Case:
    torch.manual_seed(0)
    shape = LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True)
    model = LlamaForCausalLM(shape).to("cuda", torch.bfloat16).eval()
    prompts = [torch.randint(1000, shape.vocab_size, (n,)).tolist() for n in range(300, 460, 20)]
    end = list(range(1, shape.vocab_size // 100))
    rollouts = sample(model, prompts, group, max_tokens=256, end=end, generator=torch.Generator().manual_seed(1))
    pairs = [(i, c) for i, n in enumerate(rollouts.mask.sum(1).tolist()) for c in range(0, n, 32)]
    row, cut = torch.tensor(pairs).unbind(1)
    return Case("random 135 M, bf16", model, [p for p in prompts for _ in range(group)], rollouts, row, cut, samples,
                256, end)


@contextmanager
def without_collision() -> Iterator[None]:
    """In this context `draw` takes one column in place of Σπ²; nothing else differs."""
    with patch.object(torch.linalg, "vector_norm", lambda p, dim: p.select(dim, 0)):
        yield


def medians(jobs: dict[str, Callable[[], object]], repeats: int, gpu: bool) -> dict[str, float]:
    """Seconds (CPU seconds on a CPU); the jobs take turns, so that other load slows all of them.

    The first turn is not counted.
    """
    clock = time.perf_counter if gpu else time.process_time
    seen: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            begun = clock()
            job()
            if gpu:
                torch.cuda.synchronize()
            seen[name].append(clock() - begun)
    return {name: statistics.median(times[1:]) for name, times in seen.items()}


def prefixes_table(case: Case, repeats: int, gpu: bool) -> list[str]:
    ours, other = case.shared(), case.apart()
    width = min(ours.tokens.shape[1], other.tokens.shape[1])
    both = ours.mask[:, :width] & other.mask[:, :width]
    agree = (ours.tokens[:, :width] == other.tokens[:, :width])[both].float().mean().item()
    lines = [f"{case.describe()}. The tokens of the two agree in {agree:.2%} of places.\n\n",
             "| | each prefix a prompt, s | shared cache, s | × |\n| --- | --- | --- | --- |\n"]
    for name, apart, shared in (("reading the prefixes", case.read_apart, case.read_shared),
                                ("reading and continuing", case.apart, case.shared)):
        found = medians({"apart": apart, "shared": shared}, repeats, gpu)
        lines.append(f"| {name} | {found['apart']:.3f} | {found['shared']:.3f} | "
                     f"{found['apart'] / found['shared']:.2f} |\n")
    return lines


def collision_table(case: Case, repeats: int, gpu: bool) -> list[str]:
    device = "cuda" if gpu else "cpu"
    lines = ["| Σπ² | without, ms | with, ms | cost |\n| --- | --- | --- | --- |\n"]
    for rows, vocabulary in ((64, 128), (64, 49152)):
        logits, uniform = torch.randn(rows, vocabulary, device=device), torch.rand(rows, device=device).double()
        times = 400 if vocabulary < 1000 or gpu else 4

        def many(logits: Tensor = logits, uniform: Tensor = uniform, times: int = times) -> None:
            for _ in range(times):
                draw(logits, uniform, 1.0, 1.0)

        def many_bare(many: Callable[[], None] = many) -> None:
            with without_collision():
                many()

        found = medians({"bare": many_bare, "draw": many}, 3 * repeats, gpu)
        lines.append(_cost(f"`draw`, {rows} × {vocabulary:,}", found["bare"] / times, found["draw"] / times))
    prompts = list(dict.fromkeys(map(tuple, case.prompts)))

    def whole() -> None:
        sample(case.model, prompts, 8, max_tokens=case.max_tokens, end=case.end,
               generator=torch.Generator().manual_seed(0))

    def whole_bare() -> None:
        with without_collision():
            whole()

    found = medians({"bare": whole_bare, "draw": whole}, 3 * repeats, gpu)
    lines.append(_cost(f"`sample`, {len(prompts)} × 8, {case.name}", found["bare"], found["draw"]))
    return lines


def _cost(name: str, bare: float, full: float) -> str:
    return f"| {name} | {1e3 * bare:.3f} | {1e3 * full:.3f} | {full / bare - 1:+.1%} |\n"


def machine(gpu: bool) -> str:
    chip = platform.machine()
    if gpu:
        chip = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        names = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        count = torch.get_num_threads()
        chip = f"{(names or [chip])[0].strip()}, {count} thread{'s' * (count > 1)}"
    return f"{chip}; torch {torch.__version__}, transformers {transformers.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    gpu = given.device == "cuda"
    case = random_llama() if gpu else packaged()
    clock = "wall clock" if gpu else "CPU seconds of the process"
    lines = [f"{machine(gpu)}. Medians ({clock}) of {given.repeats} turns after a first one, both ways in turn; of "
             f"{3 * given.repeats} for Σπ².\n\n", *prefixes_table(case, given.repeats, gpu), "\n",
             *collision_table(case, given.repeats, gpu)]
    print(*lines, sep="", end="")
    write("CUDA" if gpu else "CPU", "".join(lines), given.page)


def write(section: str, text: str, page: Path) -> None:
    """Replace one section of the page; the other one was measured on another machine."""
    title = "# Continuing from prefixes of rollouts, and what Σπ² costs\n\n"
    old = page.read_text().split("## ")[1:] if page.exists() else []
    kept = dict(part.split("\n\n", 1) for part in old) | {section: text}
    page.write_text(title + "\n".join(f"## {name}\n\n{kept[name].strip()}\n" for name in sorted(kept)))


if __name__ == "__main__":
    main()
