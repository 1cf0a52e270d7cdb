"""The time that probes and brakes add to a training step.

    python benchmarks/probe.py                        the packaged model, P = 8, R = 8; writes benchmarks/probe.md
    python benchmarks/probe.py --device cuda          on a GPU; adds its own section
    python benchmarks/probe.py --device cuda --large  a random Llama of 107 million parameters, random rewards

A probe's share is the time inside its calls over the rest of the same steps, so both have the same load. Over two
whole schedules each reading that takes a pass of its own is counted as often as it occurs. Brakes change the policy and
with it the answers: two runs take their steps in turn, and the seconds of their inner steps are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from creditscope.lab.train import train
from creditscope.optimizer.probe import Probe
from creditscope.runs.config import Config

PAGE = Path(__file__).with_suffix(".md")
CALLS = ("begin", "see", "finish", "_before_step", "_after_step")


class Stopwatch:
    """Seconds inside the probe's calls."""

    def __init__(self, device: str) -> None:
        self.seconds = 0.0
        self._sync = torch.cuda.synchronize if device == "cuda" else lambda: None
        for name in CALLS:
            setattr(Probe, name, self._timed(getattr(Probe, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._sync()
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._sync()
                self.seconds += time.perf_counter() - start
        return timed


def probe_share(config: Config, watch: Stopwatch, schedules: int = 2) -> tuple[float, float]:
    """(milliseconds of a step without the probe, the probe's share of it), over whole schedules after a warm-up."""
    spent = inside = 0.0
    first, last = config.probe_every, config.probe_every * (schedules + 1)
    with tempfile.TemporaryDirectory() as folder:
        for line in train(replace(config, steps=last), Path(folder) / "run", {}):
            if line["step"] == first - 1:
                spent = inside = watch.seconds = 0.0
                continue
            spent += line.get("time/step", 0.0)
        inside = watch.seconds
    return 1000 * (spent - inside) / (last - first), inside / (spent - inside)


def brake_ratio(config: Config, brake: str, steps: int = 16) -> tuple[float, float]:
    """(milliseconds of the plain inner steps of a batch, with the brake over without): medians, the first four warm."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(replace(config, brake=name, steps=steps), Path(folder) / name, {}) for name in ("none", brake)]
        pairs = [[next(run)["time/train"] for run in runs] for _ in range(steps)][4:]
        for run in runs:
            run.close()
    return 1000 * statistics.median(a for a, _ in pairs), statistics.median(b / a for a, b in pairs)


def large(folder: Path) -> dict[str, str]:
    """A random Llama with the packaged tokenizer, prompts that repeat, and rewards by the answer's length."""
    from transformers import LlamaForCausalLM

    from creditscope.policy.loading import load_policy

    policy = load_policy("tiny", device="cpu")
    config = policy.model.config
    config.update({"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                   "num_key_value_heads": 3, "head_dim": 64})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(64)))
    (folder / "coin.py").write_text("def coin(text, row):\n    return float(len(text) % 2)\n")
    sys.path.insert(0, str(folder))
    return {"model": str(folder), "task": f"jsonl:{folder / 'prompts.jsonl'}", "reward": "coin:coin"}


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} thread(s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", action="store_true")
    args = parser.parse_args()
    watch, rows = Stopwatch(args.device), []
    with tempfile.TemporaryDirectory() as folder:
        chosen: dict[str, Any] = large(Path(folder)) | {"max_tokens": 64} if args.large else {}
        plain = Config(lr=1e-4, device=args.device, eval_problems=0, keep_every=0, checkpoint_every=10**6, **chosen)
        for inner in (1, 4):
            for level in ("light",) if args.large else ("light", "full"):
                ms, share = probe_share(replace(plain, inner_steps=inner, probe=level), watch)
                rows.append(f"| probe {level} | {inner} | a whole step, {ms:.0f} ms | {share:+.1%} |")
                print(rows[-1], flush=True)
        for brake in ("recall", "shorten", "restart"):
            ms, ratio = brake_ratio(replace(plain, inner_steps=4, probe="off"), brake)
            rows.append(f"| brake {brake} | 4 | the inner steps, {ms:.0f} ms | {ratio - 1:+.1%} |")
            print(rows[-1], flush=True)

    model = "random Llama, 107 M parameters" if args.large else "packaged model"
    title = f"## {machine(args.device)}, {model}"
    command = f"python benchmarks/probe.py --device {args.device}{' --large' * args.large}"
    section = "\n".join([title, "", f"`{command}`, torch {torch.__version__}.", "", "| what | μ | of | added |",
                         "|---|---|---|---|", *rows, ""])
    head = ("# What probes and brakes cost\n\nP = 8, R = 8, GRPO, AdamW, float32. *Probe*: time inside its calls "
            "over the rest of the same steps, over two schedules of thirty steps, each with one reading that takes a "
            "pass of its own. *Brake*: two runs take their steps in turn; median of the ratio of their inner steps, "
            "minus 1.\n\n")
    old = re.split(r"(?=^## )", PAGE.read_text(), flags=re.M)[1:] if PAGE.exists() else []
    kept = [part.rstrip() + "\n" for part in old if not part.startswith(title + "\n")]
    PAGE.write_text(head + "\n".join([*kept, section]))


if __name__ == "__main__":
    main()
