"""A GRPO step on a GPU at 135 M parameters: our sampler beside the same loop around `model.generate`.

    python benchmarks/trainer_gpu.py [--tiny]       writes benchmarks/trainer_gpu.md; --tiny tries it on a small model

The weights are random, in the shape of SmolLM2-135M, so nothing is learned here: it is the cost of a step. So that
lengths spread as they do in practice, one token in 85 ends an answer. Everything but the sampling call is one code.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from creditscope import Rollouts
from creditscope.lab.setup import make_optimizer
from creditscope.lab.step import Minibatch, take_step
from creditscope.objective.advantages import token_advantage
from creditscope.optimizer.brakes import Brake
from creditscope.policy.loading import Policy
from creditscope.policy.logp import token_logp
from creditscope.policy.sampling import sample
from creditscope.runs.config import Config

SHAPE = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
         "intermediate_size": 1536, "vocab_size": 49152}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 128, "vocab_size": 512}


def ours(policy: Policy, prompts: list[list[int]], group: int, limit: int, ends: list[int], seed: int) -> Rollouts:
    drawn = sample(policy.model, prompts, group, max_tokens=limit, end=ends,
                   generator=torch.Generator(policy.device).manual_seed(seed))
    return _judged(drawn.tokens, drawn.mask, drawn.logp, group)


def generated(policy: Policy, prompts: list[list[int]], group: int, limit: int, ends: list[int], seed: int) -> Rollouts:
    torch.manual_seed(seed)
    rows = torch.tensor(prompts, device=policy.device).repeat_interleave(group, 0)
    out = policy.model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), do_sample=True, top_k=0,
                                top_p=1.0, max_new_tokens=limit, eos_token_id=ends, pad_token_id=0)
    tokens = out[:, rows.shape[1]:]
    ended = torch.isin(tokens, torch.tensor(ends, device=tokens.device)).long()
    mask = (ended.cumsum(1) - ended) == 0
    tokens = tokens * mask
    # generate keeps no log-probs of its distribution; the trainer has to compute them.
    flat = [p for p in prompts for _ in range(group)]
    return _judged(tokens, mask, token_logp(policy, flat, tokens, mask, 1.0, grad=False), group)


def _judged(tokens: torch.Tensor, mask: torch.Tensor, logp: torch.Tensor, group: int) -> Rollouts:
    reward = ((tokens * mask).sum(1) % 2).float()  # a random reward that depends on the answer
    groups = torch.arange(len(tokens) // group, device=tokens.device).repeat_interleave(group)
    return Rollouts(tokens=tokens, mask=mask, logp=logp, reward=reward, group=groups)


def measure(name: str, sampler: Any, model: Any, prompts: list[list[int]], config: Config, limit: int,
            ends: list[int], repeats: int) -> dict[str, float]:
    policy = Policy(name, model, tokenizer=None)
    optimizer = make_optimizer(policy, config)
    flat = [p for p in prompts for _ in range(config.group)]
    sampling, training, tokens = [], [], []
    for turn in range(repeats + 1):
        if turn == 1 and policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(policy)
        start = time.perf_counter()
        rollouts = sampler(policy, prompts, config.group, limit, ends, turn)
        _wait(policy)
        middle = time.perf_counter()
        credit = token_advantage(config.row, rollouts).expand_as(rollouts.mask)
        take_step(Minibatch(policy, config.row, replace(rollouts, prompt_ids=flat), credit,
                            accumulate=config.accumulate, temperature=config.temperature), Brake(optimizer),
                  clip_norm=config.clip_norm)
        _wait(policy)
        end = time.perf_counter()
        if turn:  # the first one warms up and captures
            sampling.append(middle - start)
            training.append(end - middle)
            tokens.append(float(rollouts.mask.sum()))
    peak = torch.cuda.max_memory_allocated() / 2**30 if policy.device.type == "cuda" else 0.0
    return {"sample": statistics.median(sampling), "train": statistics.median(training), "peak": peak,
            "tokens": statistics.median(tokens)}


def _wait(policy: Policy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "trainer_gpu.md")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, limit, group, repeats = (SMALL, 32, 4, 1) if args.tiny else (SHAPE, 256, 32, 3)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=True))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    prompts = torch.randint(1, shape["vocab_size"], (8, 100)).tolist()
    ends = list(range(0, shape["vocab_size"], 85))
    config = Config(group=group, prompts=8, lr=1e-6, accumulate=4 if device == "cuda" else 1)
    results = {name: measure(name, sampler, model, prompts, config, limit, ends, repeats)
               for name, sampler in (("creditscope", ours), ("loop around model.generate", generated))}
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    rows = 8 * group
    total = {name: r["sample"] + r["train"] for name, r in results.items()}
    lines = ["# A training step on a GPU at 135 M parameters\n\n",
             f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, bf16, random weights in "
             f"the shape of SmolLM2-135M; 8 prompts of 100 tokens × {group} rollouts of up to {limit} tokens, GRPO, "
             f"AdamW, 4 micro-batches. Median of {repeats} steps after a first one. TRL cannot be had on that machine: "
             f"the peer is our own loop around `model.generate`.\n\n",
             "| engine | s a step | sampling | training | rollouts/s | tokens a step | peak GiB | × |\n",
             "| --- | --- | --- | --- | --- | --- | --- | --- |\n"]
    lines += [f"| {name} | {total[name]:.2f} | {r['sample']:.2f} | {r['train']:.2f} | {rows / total[name]:.1f} | "
              f"{r['tokens']:,.0f} | {r['peak']:.1f} | {total['loop around model.generate'] / total[name]:.2f} |\n"
              for name, r in results.items()]
    args.out.write_text("".join(lines))
    print("".join(lines))


if __name__ == "__main__":
    main()
