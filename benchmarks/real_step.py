"""A GRPO step and sampling of real models on one GPU: peak memory, tokens per second, and what to sample with.

    python benchmarks/real_step.py step     qwen-0.5b qwen-1.5b --task gsm8k:data   one group of 8 and of 32, 512 tokens
    python benchmarks/real_step.py sampling qwen-0.5b qwen-1.5b --task gsm8k:data   beside `generate` and the bandwidth
    python benchmarks/real_step.py choices  qwen-0.5b --task gsm8k:data             temperature and limit, untrained
    python benchmarks/real_step.py --page benchmarks/real_step.md                   all results as tables

Each part appends its results to --out, benchmarks/real_step.jsonl. A step that is there already is not measured again,
so that the same command goes on where another was stopped.

step: real prompts, random completions that all have the full length, so that every candidate does the same work.
"whole" holds all logits of a micro-batch, as 0.1.0 did; "blocks" takes the head a block of the vocabulary at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice, product
from pathlib import Path
from typing import Any

import torch

from creditscope.batch.rollouts import Rollouts
from creditscope.lab.rollout import roll_out
from creditscope.lab.setup import make_optimizer
from creditscope.lab.step import Minibatch, take_step
from creditscope.microscope import head
from creditscope.microscope.observer import Observer
from creditscope.objective.advantages import token_advantage
from creditscope.optimizer.brakes import Brake
from creditscope.policy.decoding import cache_numbers, release
from creditscope.policy.loading import Policy, load_policy
from creditscope.policy.sampling import sample
from creditscope.runs.config import Config
from creditscope.tasks import find_task

KINDS = (("float32", "whole", False), ("float32", "blocks", False), ("float32", "blocks", True),
         ("bfloat16", "whole", False), ("bfloat16", "blocks", False), ("bfloat16", "blocks", True))
"""dtype, head, recompute. The first is 0.1.0's step. The head in blocks is also measured under the microscope."""
REPEATS, ENOUGH_SECONDS = 5, 3.0
"""Measured turns after a first one: so many, or fewer where they take longer than this in all."""
GIB = 2**30


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], warm: bool = True) -> list[float]:
    """Seconds of each repeat, after a first one that warms up."""
    for _ in range(warm):
        call()
    spent: list[float] = []
    while len(spent) < REPEATS and sum(spent) < ENOUGH_SECONDS:
        wait()
        start = time.perf_counter()
        call()
        wait()
        spent.append(time.perf_counter() - start)
    return spent


def empty() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> float:
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0


# -- a step ----------------------------------------------------------------------------------------------------------


def batch_of(policy: Policy, task: str, group: int, width: int) -> Rollouts:
    """One group of full length; every second answer is right."""
    problem = next(iter(find_task(task).problems("test")))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, 1000 if len(policy.tokenizer) > 1000 else 50, (group, width), generator=generator)
    tokens = tokens.to(policy.device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Rollouts(tokens=tokens, mask=mask, logp=torch.full(mask.shape, -8.0, device=policy.device),
                    reward=(torch.arange(group, device=policy.device) % 2).float(),
                    group=torch.zeros(group, dtype=torch.int64, device=policy.device),
                    prompt_ids=[policy.encode(problem.prompt)] * group)


def steps(model: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    held = head.HELD
    cells = [{"part": "step", "model": Path(model).name, "dtype": dtype, "head": logits, "recompute": recompute,
              "group": group, "scope": scope}
             for dtype, logits, recompute in KINDS for group in args.groups
             for scope in ((False, True) if logits == "blocks" else (False,))]
    there = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    todo = left(cells, there, args.max_tokens)
    for (dtype, recompute), rows in groupby(todo, lambda cell: (cell["dtype"], cell["recompute"])):
        policy = load_policy(model, device=args.device, dtype=dtype, recompute=recompute)
        for row in rows:
            head.HELD = held if row["head"] == "blocks" else 2**62
            yield row | one_step(policy, row["group"], row["scope"], args)
            policy.clear()
            empty()
        del policy
        empty()
    head.HELD = held


def left(cells: list[dict[str, Any]], there: list[dict[str, Any]], width: int) -> list[dict[str, Any]]:
    """The cells without a row that was measured on answers of `width` tokens."""
    done = [row for row in there if row.get("tokens") == row.get("group", 0) * width]  # one that failed has no tokens
    return [cell for cell in cells if not any(cell.items() <= row.items() for row in done)]


def one_step(policy: Policy, group: int, scope: bool, args: argparse.Namespace) -> dict[str, Any]:
    config = Config(group=group, prompts=1, lr=1e-6)
    try:
        optimizer = make_optimizer(policy, config)
        rollouts = batch_of(policy, args.task, group, args.max_tokens)
        credit = token_advantage(config.row, rollouts).expand_as(rollouts.mask)
        look = Observer(policy.model, False, policy.trainable()) if scope else None
        parameters = sum(p.numel() for p in policy.model.parameters())

        def step() -> None:
            for one in [] if look is None else [look]:
                one.begin(config.row, rollouts, credit)
            take_step(Minibatch(policy, config.row, rollouts, credit), Brake(optimizer),
                      [] if look is None else [look], config.clip_norm)
            if look is not None:
                look.after_updates()
                look.reset()

        step()  # AdamW makes its moments, the microscope its proof
        empty()
        spent = timed(step, warm=False)
    except Exception as error:  # out of memory, in one sentence: a result like others
        return {"failed": str(error)[:400]}
    tokens = int(rollouts.mask.sum())
    return {"seconds": spent, "peak": peak(), "tokens": tokens, "prompt": len(rollouts.prompt_ids[0]),
            "parameters": parameters}


# -- sampling --------------------------------------------------------------------------------------------------------


def bandwidth() -> float:
    """Bytes per second that a copy on the device reads and writes."""
    if not torch.cuda.is_available():
        return 0.0
    one = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(one)
    return 2 * one.numel() / statistics.median(timed(lambda: other.copy_(one)))


def samplings(model: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    speed, width = bandwidth(), args.sample_tokens
    for dtype in ("bfloat16", "float32"):
        empty()
        policy = load_policy(model, device=args.device, dtype=dtype)
        prompts = [policy.encode(problem.prompt) for problem in islice(find_task(args.task).problems("test"), 16)]
        for group in (1, 2, 8, 32) if dtype == "bfloat16" else (8,):
            rows = len(prompts) * group
            for name in ("creditscope", "generate") if (group, dtype) == (8, "bfloat16") else ("creditscope",):
                empty()
                spent = timed(partial(SAMPLERS[name], policy, prompts, group, width))
                length = statistics.mean(map(len, prompts)) + width / 2
                yield {"part": "sampling", "model": Path(model).name, "dtype": dtype, "rows": rows, "sampler": name,
                       "seconds": spent, "tokens": rows * width, "steps": width, "peak": peak(),
                       "weights": read_bytes(policy), "cache": rows * length * cache_bytes(policy), "bandwidth": speed}
                release(policy.model)
        del policy


def ours(policy: Policy, prompts: list[list[int]], group: int, width: int) -> Any:
    return sample(policy.model, prompts, group, max_tokens=width, end=never(policy))


def never(policy: Policy) -> int:
    """A token of the table's end that is not drawn: every row runs to the limit."""
    return len(policy.tokenizer) - 1


def generate(policy: Policy, prompts: list[list[int]], group: int, width: int) -> Any:
    longest = max(map(len, prompts))
    rows = [prompt for prompt in prompts for _ in range(group)]
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=policy.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=policy.device)
    return policy.model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                 max_new_tokens=width, eos_token_id=never(policy), pad_token_id=0)


SAMPLERS = {"creditscope": ours, "generate": generate}


def read_bytes(policy: Policy) -> int:
    """Bytes of the weights that a token reads: all, but of an input table of its own one row."""
    table, last = policy.model.get_input_embeddings().weight, policy.model.get_output_embeddings().weight
    every = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    return int(every - (0 if table is last else table.numel() * table.element_size()))


def cache_bytes(policy: Policy) -> int:
    """Bytes of keys and values per token and row."""
    return (cache_numbers(policy.model) or 0) * next(policy.model.parameters()).element_size()


# -- temperature and limit -------------------------------------------------------------------------------------------


def choices(model: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Right answers, cut answers and live groups of the model as it is, over train problems."""
    policy, task = load_policy(model, device=args.device, dtype="bfloat16"), find_task(args.task)
    problems = list(islice(task.problems("train", 0), args.problems))
    for limit in args.limits:
        for temperature in (0.3, 0.5, 0.7, 1.0):
            generator = torch.Generator(policy.device).manual_seed(0)
            drawn = roll_out(policy, task, problems, 8, max_tokens=limit, temperature=temperature, top_p=1.0,
                             generator=generator)
            lost = None if drawn.lost is None else float(drawn.lost.double().mean())
            yield {"part": "choices", "model": Path(model).name, "limit": limit, "temperature": temperature,
                   "problems": len(problems), "right": float(drawn.rollouts.reward.mean()),
                   "cut": float((~drawn.finished).double().mean()), "lost": lost,
                   "live": 1 - float(drawn.dead.double().mean()),
                   "length": float(drawn.rollouts.lengths.double().mean())}


# -- the page --------------------------------------------------------------------------------------------------------


def quartiles(values: list[float]) -> str:
    if len(values) < 3:
        return f"{statistics.median(values):.3f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def page(found: list[dict[str, Any]], machine: str) -> str:
    out = ["# A step and sampling of real models on one GPU", "",
           f"`python benchmarks/real_step.py` on {machine}. Medians with quartiles after a first turn.", ""]
    rows = [one for one in found if one["part"] == "step"]
    if rows:
        width = next((one["tokens"] // one["group"] for one in rows if "tokens" in one), "?")
        out += ["## One GRPO step on one group", "",
                f"Forward, w, backward, clipping and AdamW on one group of R answers of {width} tokens, without "
                "sampling; tokens of the answers are counted. Peak memory has weights, gradients and moments in it. "
                "\"whole\" holds the logits of the group, as 0.1.0 did; \"blocks\" never does. bfloat16 trains float32 "
                "copies of the weights. \"scope\" reads the exact Gram of the group in the same backward pass.", "",
                "| model | R | dtype | head | recompute | scope | s per step | tokens/s | peak GiB |",
                "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
        for one in sorted(rows, key=lambda one: (one["model"], one["group"], one["scope"])):
            start = (f"| {one['model']} | {one['group']} | {one['dtype']} | {one['head']} | "
                     f"{'yes' if one['recompute'] else 'no'} | {'light' if one['scope'] else 'off'} | ")
            if "failed" in one:
                out.append(f"{start}{'out of memory' if 'memory' in one['failed'] else 'failed'} | | |")
            else:
                rate = one["tokens"] / statistics.median(one["seconds"])
                out.append(f"{start}{quartiles(one['seconds'])} | {rate:,.0f} | {one['peak']:.1f} |")
        said = sorted({one["failed"] for one in rows if "failed" in one}, key=len)
        measured = {(one["model"], one["group"], one["dtype"], one["head"], one["recompute"]) for one in rows}
        lacking = sorted({f"{model}, R = {group}, {dtype}, {logits}" + ", recompute" * recompute
                          for model, group, (dtype, logits, recompute) in product(
                              {one["model"] for one in rows}, {one["group"] for one in rows}, KINDS)
                          if (model, group, dtype, logits, recompute) not in measured})
        out += ["", *(f"> {text}" for text in said[:1]),
                *([f"Not measured: {'; '.join(lacking)}."] if lacking else []), ""]
    rows = [one for one in found if one["part"] == "sampling"]
    if rows:
        out += ["## Sampling", "",
                f"16 prompts of GSM8K, all rows to the limit of {rows[0]['steps']} tokens. The limit by bandwidth is "
                "the time to read the weights and, at half of the way, the keys and values once per token, at the "
                f"speed of a copy on the device, {rows[0]['bandwidth'] / 1e12:.2f} TB/s. `generate` gives tokens "
                "alone.", "",
                "| model | dtype | rows | sampler | ms per token of all rows | tokens/s | limit, ms | × limit |",
                "| --- | --- | --- | --- | --- | --- | --- | --- |"]
        for one in rows:
            middle = statistics.median(one["seconds"])
            least = (one["weights"] + one["cache"]) / one["bandwidth"] if one["bandwidth"] else float("nan")
            each = middle / one["steps"]
            out.append(f"| {one['model']} | {one['dtype']} | {one['rows']} | {one['sampler']} | {1e3 * each:.2f} | "
                       f"{one['tokens'] / middle:,.0f} | {1e3 * least:.2f} | {each / least:.1f} |")
        out.append("")
    rows = [one for one in found if one["part"] == "choices"]
    if rows:
        out += ["## Temperature and limit, before training", "",
                f"{rows[0]['problems']} train problems, R = 8, the model as downloaded. \"lost to form\": right in "
                "value, not where the verifier looks. \"live\": groups with right and wrong answers.", "",
                "| model | limit | temperature | right | lost to form | cut | live groups | mean length |",
                "| --- | --- | --- | --- | --- | --- | --- | --- |"]
        out += [f"| {one['model']} | {one['limit']} | {one['temperature']} | {one['right']:.1%} | "
                f"{'' if one['lost'] is None else format(one['lost'], '.1%')} | {one['cut']:.1%} | {one['live']:.1%} | "
                f"{one['length']:.0f} |" for one in rows]
        out.append("")
    return "\n".join(out)


PARTS = {"step": steps, "sampling": samplings, "choices": choices}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("models", nargs="*", help="tiny, a folder or a .gguf file")
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--sample-tokens", type=int, default=256)
    parser.add_argument("--limits", type=int, nargs="+", default=[300, 400])
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    for model in args.models:
        for row in PARTS[args.part](model, args):
            print(json.dumps(row), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row | {"machine": machine()}) + "\n")
    if args.page:
        found = [json.loads(line) for line in args.out.read_text().splitlines()]
        args.page.write_text(page(found, found[0]["machine"]))


def machine() -> str:
    import transformers

    where = f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "a CPU"
    return f"{where}; torch {torch.__version__}, transformers {transformers.__version__}"


if __name__ == "__main__":
    main()
